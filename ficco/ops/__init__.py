"""The operators, one module each, and the call path that they share."""
