"""Engines: what moves bytes and signals and enqueues matrix products, one module per vendor."""
