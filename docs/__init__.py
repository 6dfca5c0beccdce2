"""The documentation: pages, settings of the site, and in ``make`` scripts that write pages."""
