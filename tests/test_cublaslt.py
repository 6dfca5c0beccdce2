"""What is handed to cuBLASLt, on a stand-in; that its products are exact is in ``test_gpu.py``."""

from __future__ import annotations

import ctypes
import gc
from itertools import count
from typing import Any

import pytest
import torch

from ficco.compute import cublaslt
from ficco.compute.cublaslt import CublasLt


def of(m: int, n: int) -> torch.Tensor:
    return torch.zeros(m, n, dtype=torch.bfloat16)


#: m x k and k x n, an addend and a result of 4 x 6, with k = 5; and whether they are served.
OPERANDS = {
    "plain": (of(4, 6), of(4, 5), of(5, 6), of(4, 6), True),
    "b transposed": (of(4, 6), of(4, 5), of(6, 5).t(), of(4, 6), True),
    "columns of wider matrices": (
        of(4, 9)[:, 2:8],
        of(4, 8)[:, :5],
        of(5, 6),
        of(4, 7)[:, 1:],
        True,
    ),
    "one term": (of(4, 6), of(4, 1), of(6, 1).t(), of(4, 6), True),
    "one row again and again": (of(4, 6), of(1, 5).expand(4, 5), of(5, 6), of(4, 6), False),
    "one column of b": (of(4, 6), of(4, 5), of(5, 1).expand(5, 6), of(4, 6), False),
    "rows that overlap": (of(4, 6), of(1, 9).as_strided((4, 5), (1, 1)), of(5, 6), of(4, 6), False),
    "a transposed": (of(4, 6), of(5, 4).t(), of(5, 6), of(4, 6), False),
    "no terms": (of(4, 6), of(4, 0), of(0, 6), of(4, 6), False),
    "float32": (*(of(*shape).float() for shape in ((4, 6), (4, 5), (5, 6), (4, 6))), False),
    "several dtypes": (of(4, 6), of(4, 5), of(5, 6), of(4, 6).half(), False),
}


@pytest.mark.parametrize("what", OPERANDS)
def test_what_is_served(what: str) -> None:
    *operands, served = OPERANDS[what]
    assert CublasLt.serves(*operands) is served


class Library:
    """Counts what was created and not destroyed, by kind; ``refuses`` names a call that fails, and
    without ``ways`` it knows no algorithm."""

    def __init__(self, refuses: str = "", ways: int = 1) -> None:
        self.live: dict[str, set[int]] = {}
        self.refuses, self.ways = refuses, ways
        self._numbers = count(1)

    def __getattr__(self, name: str) -> Any:
        if name == self.refuses:
            return lambda *_: 1
        if name.endswith("Create") and name != "cublasLtCreate":
            return lambda made, *_: self._create(name.removesuffix("Create"), made)
        if name.endswith("Destroy"):
            live = self.live[name.removesuffix("Destroy")]
            return lambda made: live.remove(made.value) or 0
        if name == "cublasLtMatmulAlgoGetHeuristic":
            return self._heuristic
        return lambda *_: 0

    def _create(self, kind: str, made: Any) -> int:
        made._obj.value = next(self._numbers)
        self.live.setdefault(kind, set()).add(made._obj.value)
        return 0

    def _heuristic(self, *arguments: Any) -> int:
        arguments[-1]._obj.value = self.ways
        return 0

    def counts(self) -> list[int]:
        gc.collect()
        return [len(live) for live in self.live.values()]


def multiplied(library: CublasLt, m: int) -> bool:
    room = torch.empty(0, dtype=torch.uint8)
    return library.multiply(of(m, 4), of(m, 2), of(2, 4), of(m, 4), room, 0)


def test_what_describes_products_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that vary from call to call take no more native memory than those that are kept."""
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    made, most = CublasLt(), []
    for m in range(1, 5001):
        assert multiplied(made, m)
        if m % 1250 == 0:
            most.append(library.counts())
    kept = cublaslt.MAX_PLANNED
    assert most == [[kept, 4 * kept, 0]] * 4
    del made
    assert library.counts() == [0, 0, 0]


@pytest.mark.parametrize(
    ("refuses", "ways"),
    [("cublasLtMatmulAlgoGetHeuristic", 1), ("cublasLtMatmulPreferenceSetAttribute", 1), ("", 0)],
)
def test_a_product_that_is_refused_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, refuses: str, ways: int
) -> None:
    library = Library(refuses, ways)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    made = CublasLt()
    assert not multiplied(made, 3)
    assert library.counts() == [0, 0, 0]
