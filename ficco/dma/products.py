"""Matrix products of the vendor's library, through PyTorch, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: The elementwise functions that a place operation may apply, by name.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": torch.relu}


def accumulation() -> str:
    """How half-precision column pieces add up in float32 with this PyTorch."""
    if _has_out_dtype():
        return "torch.addmm(out_dtype=float32) on the pieces as they are"
    return "a float32 GEMM of upcast pieces (twice their memory while it runs)"


def _has_out_dtype() -> bool:
    """PyTorch 2.8 and later multiply half-precision matrices into float32."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8)


def multiply(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, addend: torch.Tensor | None = None
) -> None:
    """``out = a @ b``, or ``addend + a @ b``, for matrices or batches.

    ``out`` is of the operands' dtype or a wider one. ``addend`` may be ``out``; PyTorch copies any
    other to ``out`` first.
    """
    widened: dict[str, Any] = {}
    if a.dtype != out.dtype:
        if not _has_out_dtype() or not a.is_cuda:
            return multiply(a.float(), b.float(), out, addend)
        widened = {"out_dtype": out.dtype}
    batched = a.dim() == 3
    if addend is None:
        (torch.bmm if batched else torch.mm)(a, b, **widened, out=out)
    else:
        (torch.baddbmm if batched else torch.addmm)(addend, a, b, **widened, out=out)
