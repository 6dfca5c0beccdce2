"""The planted faults still apply to the code, and mutants have their kind and their line."""

from __future__ import annotations

import ast

import pytest
from planted.faults import FAULTS, Fault
from planted.mutants import mutants_of
from planted.runs import ROOT

SOURCE = '''
"""A docstring with 1 < 2."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import a1
size: Literal[3] = 4

def most(a: Literal[5], b=6) -> int:
    if a < 7:
        raise ValueError(f"required {a + 8}")
    return call(a, b)

class Thing:
    def __repr__(self):
        return "9" * 9
'''


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_can_be_planted(fault: Fault) -> None:
    source = (ROOT / fault.path).read_text()
    wrong = fault.applied(source)
    ast.parse(wrong)
    assert wrong != source and len({fault.name for fault in FAULTS}) == len(FAULTS) == 20


def test_mutants_leave_texts_and_types_unchanged() -> None:
    assert [(mutant.kind, mutant.old, mutant.new) for mutant in mutants_of("x.py", SOURCE)] == [
        ("constant", "4", "5"),
        ("condition", "a < 7", "(not a < 7)"),
        ("comparison", "a < 7", "(a <= 7)"),
        ("constant", "7", "8"),
        ("return value", "return call(a, b)", "return None"),
        ("argument order", "call(a, b)", "(call(b, a))"),
    ]


def test_a_mutant_is_a_change_of_one_line() -> None:
    for mutant in mutants_of("x.py", SOURCE):
        changed = mutant.applied(SOURCE)
        ast.parse(changed)
        pairs = zip(SOURCE.splitlines(), changed.splitlines(), strict=True)
        assert [i for i, (old, new) in enumerate(pairs, 1) if old != new] == [mutant.line]
