"""Scripts that measure ficco and fit rates to the measurements; run them from a checkout."""
