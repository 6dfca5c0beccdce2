"""Calls of cuBLASLt, on a stand-in library. ``test_gpu.py`` tests the products on GPUs."""

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
        ((C, of(1, 5).expand(4, 5), B, C), False),  # one row, repeated by a stride of zero
        ((C, A, of(5, 1).expand(5, 6), C), False),
        ((C, of(1, 9).as_strided((4, 5), (1, 1)), B, C), False),  # rows that overlap
        ((C, of(5, 4).t(), B, C), False),
        ((C, of(4, 0), of(0, 6), C), False),
        (tuple(x.float() for x in (C, A, B, C)), False),
        ((C, A, B, C.half()), False),
    ],
)
def test_served_operands(operands: tuple[torch.Tensor, ...], served: bool) -> None:
    assert CublasLt.serves(*operands) is served


class Library:
    """A stand-in for cuBLASLt that counts live objects by kind. ``refuses`` names a call that
    fails. ``algorithms`` is the number of algorithms that the heuristic returns."""

    def __init__(self, refuses: str = "", algorithms: int = 1) -> None:
        self.live: Counter[str] = Counter()
        self.refuses, self.algorithms = refuses, algorithms

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = self.algorithms
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
    workspace = torch.empty(0, dtype=torch.uint8)
    return library.multiply(of(m, 4), of(m, 2), of(2, 4), of(m, 4), workspace, 0)


def test_descriptors_of_products_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With varying shapes, only the descriptors of ``MAX_PLANNED`` products stay live."""
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    limit, counts = 8, []
    monkeypatch.setattr(cublaslt, "MAX_PLANNED", limit)
    lt = CublasLt()
    for m in range(1, 33):
        assert multiplied(lt, m)
        if m % limit == 0:
            counts.append(library.counts())
    assert counts == [[limit, 4 * limit, 0]] * 4
    del lt
    gc.collect()
    assert library.counts() == [0, 0, 0]


@pytest.mark.parametrize(
    ("refuses", "algorithms"),
    [("cublasLtMatmulAlgoGetHeuristic", 1), ("cublasLtMatmulPreferenceSetAttribute", 1), ("", 0)],
)
def test_a_product_that_is_refused_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, refuses: str, algorithms: int
) -> None:
    library = Library(refuses, algorithms)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    lt = CublasLt()
    assert not multiplied(lt, 3)
    assert library.counts() == [0, 0, 0]
