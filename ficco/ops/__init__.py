"""The operators, and the call path that they share."""
