"""Measuring a machine: curves, fits, the fastest schedules of given problems, and the file."""
