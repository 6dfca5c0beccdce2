"""Scripts that make the project's own pages from committed results; run from a checkout."""
