"""What is handed to cuBLASLt, on a stand-in; that its products are exact is in ``test_gpu.py``."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from typing import Any

import pytest
import torch

from ficco.compute import cublaslt
from ficco.compute.cublaslt import CublasLt


def of(m: int, n: int) -> torch.Tensor:
    return torch.zeros(m, n, dtype=torch.bfloat16)


#: An addend of 4 x 6, operands of 4 x 5 and 5 x 6, and a result.
C, A, B = of(4, 6), of(4, 5), of(5, 6)


@pytest.mark.parametrize(
    ("operands", "served"),
    [
        ((C, A, B, C), True),
        ((C, A, of(6, 5).t(), C), True),
        ((of(4, 9)[:, 2:8], of(4, 8)[:, :5], B, of(4, 7)[:, 1:]), True),  # of wider matrices
        ((C, of(4, 1), of(6, 1).t(), C), True),
        ((C, of(1, 5).expand(4, 5), B, C), False),  # one row again and again
        ((C, A, of(5, 1).expand(5, 6), C), False),
        ((C, of(1, 9).as_strided((4, 5), (1, 1)), B, C), False),  # rows that overlap
        ((C, of(5, 4).t(), B, C), False),
        ((C, of(4, 0), of(0, 6), C), False),
        (tuple(one.float() for one in (C, A, B, C)), False),
        ((C, A, B, C.half()), False),
    ],
)
def test_what_is_served(operands: tuple[torch.Tensor, ...], served: bool) -> None:
    assert CublasLt.serves(*operands) is served


class Library:
    """Counts what was created and not destroyed, by kind; ``refuses`` names a call that fails, and
    without ``ways`` it knows no algorithm."""

    def __init__(self, refuses: str = "", ways: int = 1) -> None:
        self.live: Counter[str] = Counter()
        self.refuses, self.ways = refuses, ways

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = self.ways
            elif name.endswith("Create") and name != "cublasLtCreate":
                arguments[0]._obj.value = 1
                self.live[name.removesuffix("Create")] += 1
            elif name.endswith("Destroy"):
                self.live[name.removesuffix("Destroy")] -= 1
            return int(name == self.refuses)

        return call

    def counts(self) -> list[int]:
        return list(self.live.values())


def multiplied(library: CublasLt, m: int) -> bool:
    room = torch.empty(0, dtype=torch.uint8)
    return library.multiply(of(m, 4), of(m, 2), of(2, 4), of(m, 4), room, 0)


def test_what_describes_products_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that vary from call to call take no more native memory than those that are kept."""
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    kept, most = 8, []
    monkeypatch.setattr(cublaslt, "MAX_PLANNED", kept)
    made = CublasLt()
    for m in range(1, 33):
        assert multiplied(made, m)
        if m % kept == 0:
            most.append(library.counts())
    assert most == [[kept, 4 * kept, 0]] * 4
    del made
    gc.collect()
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
