"""``out = c + a @ b`` by cuBLASLt, which PyTorch's ``addmm`` serves with a copy of c in front.

PyTorch has the library loaded; it is called through ctypes, with the algorithm that its own
heuristic names first, as PyTorch does. Operands are bfloat16 or float16, sums float32.
Source: NVIDIA, cuBLAS documentation, "Using the cuBLASLt API".
"""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

import torch

from ficco.errors import BackendError

#: Bytes that an algorithm may use, as PyTorch allows on such cards.
WORKSPACE = 32 << 20

_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType_t
_FLOAT32 = 0
_COMPUTE_FLOAT32 = 68  # cublasComputeType_t
_TRANSPOSE_A = 3  # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
_REDUCTIONS, _IN_FLOAT32 = 3, 2  # which ways to add up parts of k; cublasLtReductionScheme_t
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
    found = getattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction")
    return bool(found[0] if isinstance(found, tuple) else found)


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
        self._planned = lru_cache(maxsize=1024)(self._plan)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise BackendError(name, code, "see cublasStatus_t")

    @staticmethod
    def serves(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether the operands are such as the library takes as they are."""
        kinds = {tensor.dtype for tensor in (c, a, b, out)}
        some = a.shape[0] and a.shape[1] and b.shape[1]
        rows = all(map(_plain, (c, a, out)))
        sides = _plain(b) or _plain(b.t())
        return bool(some) and rows and sides and kinds <= set(_TYPES) and len(kinds) == 1

    def multiply(
        self,
        c: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor,
        stream: Any,
    ) -> bool:
        """``out = c + a @ b`` on a stream, which has ``workspace``, bytes, for itself; False where
        the library has no way to do it.

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
        description, layouts, found = planned
        of_b, of_a, of_c, of_out = layouts
        one = byref(self._one)
        self._call(
            "cublasLtMatmul",
            self._handle,
            description,
            one,
            c_void_p(addresses[0]),
            of_b,
            c_void_p(addresses[1]),
            of_a,
            one,
            c_void_p(addresses[2]),
            of_c,
            c_void_p(addresses[3]),
            of_out,
            byref(found.algorithm),
            c_void_p(workspace.data_ptr()),
            c_size_t(workspace.numel()),
            c_void_p(int(stream)),
        )
        return True

    def _plan(self, *asked: Any) -> tuple[c_void_p, tuple[c_void_p, ...], _Heuristic] | None:
        """What :meth:`_found` gives; None where the library has no way."""
        with contextlib.suppress(BackendError):
            return self._found(*asked)
        return None

    def _found(
        self,
        m: int,
        n: int,
        k: int,
        pitches: tuple[int, int, int, int],
        transposed: bool,
        dtype: torch.dtype,
        aligned: tuple[int, ...],
        exact: bool,
    ) -> tuple[c_void_p, tuple[c_void_p, ...], _Heuristic]:
        """What describes such products, and the algorithm for them.

        The library counts by columns: it is asked for out^T = c^T + b^T @ a^T. ``exact``: parts of
        k are added in float32 alone.

        Raises:
            BackendError: there is none.
        """
        kind = _TYPES[dtype]
        description = c_void_p()
        create = "cublasLtMatmulDescCreate"
        self._call(create, byref(description), c_int(_COMPUTE_FLOAT32), c_int(_FLOAT32))
        flip = c_int(int(transposed))
        self._set("cublasLtMatmulDescSetAttribute", description, _TRANSPOSE_A, flip)
        of_a, of_b, of_c, of_out = pitches
        shapes = ((k, n) if transposed else (n, k), (k, m), (n, m), (n, m))
        layouts = tuple(
            self._layout(kind, *shape, pitch)
            for shape, pitch in zip(shapes, (of_b, of_a, of_c, of_out), strict=True)
        )
        preference = c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        setter = "cublasLtMatmulPreferenceSetAttribute"
        self._set(setter, preference, _MAX_WORKSPACE, c_uint64(WORKSPACE))
        if exact:
            self._set(setter, preference, _REDUCTIONS, c_uint32(_IN_FLOAT32))
        for attribute, alignment in zip(_ALIGNMENTS, aligned, strict=True):
            self._set(setter, preference, attribute, c_uint32(alignment))
        found, count = _Heuristic(), c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            description,
            *layouts,
            preference,
            c_int(1),
            byref(found),
            byref(count),
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        if not count.value:
            raise BackendError(
                "cublasLtMatmulAlgoGetHeuristic", 15, "no algorithm for this product"
            )
        return description, layouts, found

    def _layout(self, kind: int, rows: int, cols: int, pitch: int) -> c_void_p:
        layout = c_void_p()
        sizes = c_uint64(rows), c_uint64(cols), c_int64(pitch)
        self._call("cublasLtMatrixLayoutCreate", byref(layout), c_int(kind), *sizes)
        return layout

    def _set(self, setter: str, target: c_void_p, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call(setter, target, c_int(attribute), byref(value), size)
