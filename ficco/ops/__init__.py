"""The operators, one module each, and the path that their calls take."""
