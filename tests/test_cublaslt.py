"""What is handed to cuBLASLt; that its products are exact is in ``test_gpu.py``."""

from __future__ import annotations

import pytest
import torch

from ficco.dma.cublaslt import CublasLt


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
