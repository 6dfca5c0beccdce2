"""Scripts that write pages from committed results; run from a checkout."""
