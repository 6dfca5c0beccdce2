"""Public names and parameters equal the record, ``tests/golden/public.txt``."""

from __future__ import annotations

import ast
import difflib
from functools import cached_property

import pytest
from golden import public


def test_public_names_are_as_recorded() -> None:
    before, now = public.RECORD.read_text().splitlines(), public.lines()
    if before != now:
        changes = difflib.unified_diff(before, now, "public.txt", "now", lineterm="", n=0)
        text = "\n".join(changes)
        pytest.fail(
            f"public names changed:\n{text}\nif intended, record anew in tests/: "
            "python -m golden record public",
            pytrace=False,
        )


class Example(ValueError):
    """A public class."""

    def __init__(self, size: int, *, name: str = "x", _cache: object = None) -> None:
        """Store no attribute."""

    def area(self, unit: float = 1.0) -> float:
        """A method."""
        return unit

    @cached_property
    def width(self) -> int:
        """A property."""
        return 1

    def _hidden(self) -> None: ...


def test_a_changed_signature_changes_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Example, "__module__", "ficco.example")
    assert list(public.lines_of("Example", Example)) == [
        "Example class(ValueError, Exception, BaseException)",
        "Example(size, *, name='x')",
        "Example.area(self, unit=1.0)",
        "Example.width",
    ]
    source = "class A(B, _C):\n    def f(self, x: int = 1, *, y): ...\ndef _g(): ...\n"
    assert list(public.source_lines("ficco.m", ast.parse(source))) == [
        "ficco.m.A class(B)",
        "ficco.m.A.f(self, x=1, *, y)",
    ]
