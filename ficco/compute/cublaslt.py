"""``out = c + a @ b`` by cuBLASLt, which PyTorch's ``addmm`` serves with a copy of c in front.

PyTorch has the library loaded; it is called through ctypes, with the algorithm that its own
heuristic names first, as PyTorch does. Operands are bfloat16 or float16, sums float32.
Source: NVIDIA, cuBLAS documentation, "Using the cuBLASLt API".
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ficco.errors import BackendError

#: Shapes whose descriptors are cached.
MAX_PLANNED = 1024
#: Workspace of an algorithm in bytes, PyTorch's limit on Hopper GPUs.
WORKSPACE = 32 << 20

_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType_t
_FLOAT32 = 0
_COMPUTE_FLOAT32 = 68  # cublasComputeType_t
_TRANSPOSE_A = 3  # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
_REDUCTIONS, _IN_FLOAT32 = 3, 2  # how split-k parts are summed; cublasLtReductionScheme_t
_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C and D


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def _plain(matrix: torch.Tensor) -> bool:
    """Whether a matrix has contiguous rows that do not overlap."""
    return matrix.dim() == 2 and matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


def _reduced(dtype: torch.dtype) -> bool:
    """Whether PyTorch allows parts of k to be added in the operands' dtype."""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    allowed = getattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction")
    return bool(allowed[0] if isinstance(allowed, tuple) else allowed)


@dataclass
class _Planned:
    """Descriptors and algorithm of a product. The descriptors are freed with this object."""

    held: ExitStack
    description: c_void_p
    layouts: tuple[c_void_p, ...]
    algorithm: _Heuristic

    def __del__(self) -> None:
        self.held.close()


class CublasLt:
    """The library on one device, which must be current.

    Raises:
        OSError: there is no such library.
        BackendError: it refuses.
    """

    def __init__(self) -> None:
        major = (torch.version.cuda or "").split(".")[0]
        self._library = ctypes.CDLL(f"libcublasLt.so.{major}")
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._one = c_float(1.0)
        self._planned = lru_cache(maxsize=MAX_PLANNED)(self._plan)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise BackendError(name, code, "see cublasStatus_t")

    @staticmethod
    def serves(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether the library takes the operands without a copy."""
        kinds = {tensor.dtype for tensor in (c, a, b, out)}
        sizes = a.shape[0] and a.shape[1] and b.shape[1]
        rows = all(map(_plain, (c, a, out)))
        sides = _plain(b) or _plain(b.t())
        return bool(sizes) and rows and sides and kinds <= set(_TYPES) and len(kinds) == 1

    def multiply(
        self,
        c: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor,
        stream: Any,
    ) -> bool:
        """Compute ``out = c + a @ b`` on a stream; False if the library has no algorithm. No other
        stream may use ``workspace`` (bytes).

        ``a`` is [m, k], ``c`` and ``out`` [m, n], all with contiguous rows; ``b`` is [k, n] or a
        transposed view of [n, k].
        """
        transposed = not _plain(b)
        pitch = b.stride(1) if transposed else b.stride(0)
        (m, k), n = a.shape, b.shape[1]
        pitches = a.stride(0), pitch, c.stride(0), out.stride(0)
        addresses = [tensor.data_ptr() for tensor in (b, a, c, out)]
        aligned = tuple(min(address & -address, 256) if address else 256 for address in addresses)
        exact = not _reduced(a.dtype)
        planned = self._planned(m, n, k, pitches, transposed, a.dtype, aligned, exact)
        if planned is None:
            return False
        one = byref(self._one)
        at_b, at_a, at_c, at_out = map(c_void_p, addresses)
        of_b, of_a, of_c, of_out = planned.layouts
        operands = one, at_b, of_b, at_a, of_a, one, at_c, of_c, at_out, of_out
        room = c_void_p(workspace.data_ptr()), c_size_t(workspace.numel())
        how = byref(planned.algorithm.algorithm), *room, c_void_p(int(stream))
        self._call("cublasLtMatmul", self._handle, planned.description, *operands, *how)
        return True

    def _plan(
        self,
        m: int,
        n: int,
        k: int,
        pitches: tuple[int, int, int, int],
        transposed: bool,
        dtype: torch.dtype,
        aligned: tuple[int, ...],
        exact: bool,
    ) -> _Planned | None:
        """Descriptors and algorithm of a product; None if the library has no algorithm.

        The library is column-major, so it computes out^T = c^T + b^T @ a^T. ``exact``: split-k
        parts are summed in float32 only.
        """
        kind = c_int(_TYPES[dtype])
        of_a, of_b, of_c, of_out = pitches
        shapes = ((k, n) if transposed else (n, k), (k, m), (n, m), (n, m))
        algorithm, count = _Heuristic(), c_int()
        with ExitStack() as held:
            try:
                description = self._create(
                    held, "cublasLtMatmulDesc", c_int(_COMPUTE_FLOAT32), c_int(_FLOAT32)
                )
                self._set("cublasLtMatmulDesc", description, _TRANSPOSE_A, c_int(int(transposed)))
                pitches = of_b, of_a, of_c, of_out
                layouts = tuple(
                    self._create(
                        held, "cublasLtMatrixLayout", kind, *map(c_uint64, sizes), c_int64(pitch)
                    )
                    for sizes, pitch in zip(shapes, pitches, strict=True)
                )
                with ExitStack() as during:
                    preference = self._create(during, "cublasLtMatmulPreference")
                    wishes: list[tuple[int, Any]] = [(_MAX_WORKSPACE, c_uint64(WORKSPACE))]
                    if exact:
                        wishes.append((_REDUCTIONS, c_uint32(_IN_FLOAT32)))
                    wishes += zip(_ALIGNMENTS, map(c_uint32, aligned), strict=True)
                    for attribute, value in wishes:
                        self._set("cublasLtMatmulPreference", preference, attribute, value)
                    self._call(
                        "cublasLtMatmulAlgoGetHeuristic",
                        self._handle,
                        description,
                        *layouts,
                        preference,
                        c_int(1),
                        byref(algorithm),
                        byref(count),
                    )
            except BackendError:
                return None
            if not count.value:
                return None
            return _Planned(held.pop_all(), description, layouts, algorithm)

    def _create(self, held: ExitStack, kind: str, *arguments: Any) -> c_void_p:
        """An object of the library, which ``held`` gives back."""
        handle = c_void_p()
        self._call(f"{kind}Create", byref(handle), *arguments)
        held.callback(getattr(self._library, f"{kind}Destroy"), handle)
        return handle

    def _set(self, kind: str, target: c_void_p, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call(f"{kind}SetAttribute", target, c_int(attribute), byref(value), size)
