"""Scripts that measure ficco, and fit rates to what was measured; run from a checkout."""
