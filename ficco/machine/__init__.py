"""Machines: what is known of a kind of host, as data and as files."""
