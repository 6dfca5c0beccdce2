"""Fixtures of the tests of commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ficco.tools import cli


@pytest.fixture
def ran(capsys: Any) -> Callable[..., Any]:
    """Run a command, given as a text and further words, and assert its exit status. Return its
    output, as ``out`` and ``err``."""

    def run(text: str, *words: object, code: int = 0) -> Any:
        capsys.readouterr()
        assert cli.run([*text.split(), *map(str, words)]) == code
        return capsys.readouterr()

    return run
