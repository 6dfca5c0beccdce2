"""Seconds and bytes for people, in three digits."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Seconds as text.

    >>> seconds_text(0.00123456), seconds_text(4.2e-5), seconds_text(0.9999), seconds_text(1234.5)
    ('1.23 ms', '42 us', '1 s', '1234 s')
    """
    return _text(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")))


def bytes_text(nbytes: float) -> str:
    """Bytes as text.

    >>> bytes_text(100), bytes_text(1 << 20), bytes_text(5 << 29)
    ('100 B', '1 MiB', '2.5 GiB')
    """
    return _text(nbytes, ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")))


def _text(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Three digits, in the largest unit in which the rounded value is at least 1."""
    size, unit = next((one for one in units if value >= 0.9995 * one[0]), units[-1])
    number = value / size
    return f"{number:.0f} {unit}" if number >= 999.5 else f"{number:.3g} {unit}"
