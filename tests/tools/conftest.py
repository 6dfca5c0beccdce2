"""What tests of commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ficco.tools import cli


@pytest.fixture
def ran(capsys: Any) -> Callable[..., Any]:
    """Runs a command, whose words are those of a text and more words, and which has to end with
    ``code``; what it prints, as ``out`` and ``err``."""

    def run(text: str, *words: object, code: int = 0) -> Any:
        capsys.readouterr()
        assert cli.run([*text.split(), *map(str, words)]) == code
        return capsys.readouterr()

    return run
