"""ficco as the implementation of PyTorch's fused operators, ``torch.ops.symm_mem.fused_*``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from ficco.ops.operators import matmul_reduce_scatter, operate

#: Dispatch keys of CPUs, and of GPUs of any vendor. PyTorch has kernels only for GPUs.
_KEYS = ("CPU", "CUDA")


@cache
def behind_symm_mem() -> None:
    """Make ficco the implementation of PyTorch's fused operators, for the rest of the process.

    Programs that call ``torch.ops.symm_mem.fused_all_gather_matmul`` and
    ``fused_matmul_reduce_scatter`` run ficco unchanged: Inductor's Async TP, torchtitan's
    ``tp_gemm_backend="dist_gemm"``. On CPUs, where PyTorch has no kernels, the operators run, too.
    Of several products of one gathered tensor, the widest is ficco's; the others are plain
    products. PyTorch still serves calls that gather or scatter the last dimension, have no elements
    or have no right operand. The scaled (fp8) operators are not replaced.

    Raises:
        NotImplementedError: this PyTorch has no such operators, or its kernels cannot be replaced.
    """
    try:
        import torch.distributed._symmetric_memory as stock  # which defines the operators

        kernels = {
            "fused_all_gather_matmul": _gathering(stock._fused_all_gather_matmul_fallback),
            "fused_matmul_reduce_scatter": _scattering(stock._fused_matmul_reduce_scatter_fallback),
        }
        library = torch.library.Library("symm_mem", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, kernel in kernels.items():
                for key in _KEYS:
                    library.impl(name, kernel, key, allow_override=True)
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise NotImplementedError(
            f"PyTorch {torch.__version__}: its fused operators cannot be replaced ({error}); use "
            "ficco.passes or ficco.nn"
        ) from error
    _LIBRARIES.append(library)


#: Libraries of the registered kernels: a registration ends with its library.
_LIBRARIES: list[torch.library.Library] = []


def _gathering(stock: Any) -> Any:
    def fused_all_gather_matmul(
        A: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        gather_dim: int,
        group_name: Any,
        *,
        return_A: bool = True,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        if gather_dim % A.dim() == A.dim() - 1 or not Bs or not A.numel():
            results: tuple[torch.Tensor, list[torch.Tensor]]
            results = stock(A, Bs, gather_dim, group_name, return_A=return_A)
            return results
        x, group = A.movedim(gather_dim, 0), _resolve_process_group(group_name)
        keeps = return_A or len(Bs) > 1
        widest = max(range(len(Bs)), key=lambda i: Bs[i].shape[1])
        with torch.no_grad():
            name, rows = "all_gather_matmul", x.flatten(0, -2)
            pair: Any = operate(name, rows, Bs[widest], group, "auto", None, keeps)
            y, gathered = pair
            outs = [y if i == widest else gathered @ B for i, B in enumerate(Bs)]

        def back(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(-1, *x.shape[1:-1], rows.shape[1]).movedim(0, gather_dim)

        return back(gathered) if return_A else None, [back(out) for out in outs]

    return fused_all_gather_matmul


def _scattering(stock: Any) -> Any:
    def fused_matmul_reduce_scatter(
        A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: Any
    ) -> torch.Tensor:
        in_rows = scatter_dim % A.dim() < A.dim() - 1
        if not in_rows or reduce_op not in ("sum", "avg") or not A.numel():
            out: torch.Tensor = stock(A, B, reduce_op, scatter_dim, group_name)
            return out
        x, group = A.movedim(scatter_dim, 0), _resolve_process_group(group_name)
        with torch.no_grad():
            y = matmul_reduce_scatter(x.flatten(0, -2), B, group=group)
        if reduce_op == "avg":
            y /= group.size()
        # Contiguous, as PyTorch's meta function says: compilers rely on it.
        return y.view(-1, *x.shape[1:-1], y.shape[1]).movedim(0, scatter_dim).contiguous()

    return fused_matmul_reduce_scatter
