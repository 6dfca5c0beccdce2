"""The packages of the extra ``bench``, and the one sentence where they are missing."""

from __future__ import annotations

from importlib.util import find_spec

#: What figures, pictures and tables need, and nothing that a program with ficco imports.
PACKAGES = ("pandas", "matplotlib", "rich")


def missing(package: str) -> str:
    """What to do about a package of the extra that is not installed."""
    return f'{package}: required, and not installed; `pip install "ficco[bench]"` adds it'


def require() -> None:
    """Refuse to begin what needs the extra.

    Raises:
        ModuleNotFoundError: a package is missing; its ``name`` is one of ``PACKAGES``.
    """
    for package in PACKAGES:
        try:
            there = find_spec(package)
        except ValueError:  # imports of it are blocked
            there = None
        if there is None:
            raise ModuleNotFoundError(missing(package), name=package)
