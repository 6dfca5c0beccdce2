"""Compiles the Triton kernel of tiled products (``triton_kernel.py``) for MI300X, and launches it.

Triton only compiles, on first use. The vendor's binding launches, as for ficco's other kernels.
Importing this module needs no Triton and uses no device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ficco.compute.tiled.products import (
    UNIT,
    UNIT_ELEMENTS,
    Bind,
    Enqueue,
    Lists,
    TileKernel,
    TileScales,
    TileTypes,
    Upload,
    pitch_of,
)
from ficco.compute.tiled.worklist import BK, MI300X, TileRates, Tiling
from ficco.hip_kernels.build import Target
from ficco.hip_kernels.launch import Binding, Packed

#: HIP's name of the MI300X.
ARCHITECTURE = "gfx942"
#: The oldest supported Triton, which came with the first PyTorch for ROCm 7.2.
OLDEST = 3, 6
#: Maximum of products in a list. Their addresses are arguments; eight of them spill registers.
MOST_PRODUCTS = 4
NUM_WARPS = 4
#: Lower bound on the seconds of a poll.
POLL_S = 0.5e-6

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_C_TYPES = {"i64": ctypes.c_int64, "i32": ctypes.c_int32}  # others are pointers


def lacking(target: Target) -> str:
    """Reason why a device cannot run the kernel; empty if it can."""
    arch = target.arch.split(":")[0]
    if arch != ARCHITECTURE:
        return f"a product whose tiles wait needs {ARCHITECTURE} (MI300X), not {arch}"
    if find_spec("triton") is None:
        return (
            "a product whose tiles wait needs Triton, which is not installed; a PyTorch for ROCm "
            "brings it"
        )
    return ""


def signature(dtype: torch.dtype) -> dict[str, Any]:
    """Triton types of the kernel's arguments; a tuple has one type for each product."""
    addresses, pitches = ("i64",) * MOST_PRODUCTS, ("i32",) * MOST_PRODUCTS
    return {
        "a": addresses,
        "a_pitch": pitches,
        "out": addresses,
        "out_pitch": pitches,
        "b": f"*{_NAMES[dtype]}",
        "b_pitch": "i32",
        "n_units": "i32",
        "k_units": "i32",
        "table": "*i64",
    }


def constants(vendor: str, tiling: Tiling, b_rows: bool, even_k: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel. ``even_k``: ``BK`` divides k."""
    numbers = {"BM": tiling.bm, "BN": tiling.bn}
    return numbers | {"B_ROWS": b_rows, "EVEN_K": even_k, "AMD": vendor == "hip"}


def values(
    a: Sequence[torch.Tensor], b: torch.Tensor, out: Sequence[torch.Tensor], table: int
) -> dict[str, Any]:
    """Values of the kernel's arguments, by name."""

    def each(numbers: list[int]) -> tuple[int, ...]:
        return (*numbers, *[0] * (MOST_PRODUCTS - len(numbers)))

    return {
        "a": each([t.data_ptr() // UNIT for t in a]),
        "a_pitch": each([pitch_of(t) // UNIT_ELEMENTS for t in a]),
        "out": each([t.data_ptr() // UNIT for t in out]),
        "out_pitch": each([pitch_of(t) // UNIT_ELEMENTS for t in out]),
        "b": b.data_ptr(),
        "b_pitch": pitch_of(b) // UNIT_ELEMENTS,
        "n_units": out[0].shape[1] // UNIT_ELEMENTS,
        "k_units": a[0].shape[1] // UNIT_ELEMENTS,
        "table": table,
    }


def tables(lists: Lists, upload: Upload) -> tuple[torch.Tensor, torch.Tensor]:
    """The table on the device, and the numbers of rows that it points to."""
    from ficco.compute.tiled.triton_kernel import TABLE

    rows = upload(np.array(lists.tiles.work.rows, np.int32))
    more = {
        "rows": rows.data_ptr(),
        "polls": int(lists.limit_s / POLL_S),
        "clusters": lists.tiles.clusters,
    }
    numbers = [more[name] if name in more else getattr(lists, name) for name in TABLE]
    return upload(np.array(numbers, np.uint64).view(np.int64)), rows


def compiled_by_triton(
    target: Target, tiling: Tiling, dtype: torch.dtype, b_rows: bool, even_k: bool
) -> Any:
    """Triton's compiled kernel for an architecture. Needs no device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ficco.compute.tiled.triton_kernel import ficco_tiled

    arch = target.arch.split(":")[0]
    fixed = constants(target.vendor, tiling, b_rows, even_k)
    number, lanes = (arch, 64) if target.vendor == "hip" else (int(arch.removeprefix("sm_")), 32)
    device = GPUTarget(target.vendor, number, lanes)
    place = ficco_tiled.arg_names.index
    source = ASTSource(
        ficco_tiled,
        signature(dtype) | dict.fromkeys(fixed, "constexpr"),
        {(place(name),): value for name, value in fixed.items()},
        {(place("b"),): [["tt.divisibility", UNIT]]},
    )
    options = {"num_warps": NUM_WARPS, "num_stages": tiling.stages}
    return triton.compile(source, target=device, options=options)


class TritonKernel(TileKernel):
    """See :class:`ficco.compute.tiled.products.TileKernel`.

    Raises:
        NotImplementedError: this Triton is too old.
    """

    most = MOST_PRODUCTS
    counts = 1

    def __init__(self, binding: Binding) -> None:
        import triton

        if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise NotImplementedError(
                f"a product whose tiles wait needs Triton {oldest} or later, this is "
                f"{triton.__version__}; update PyTorch, which brings it"
            )
        self._binding = binding
        self._functions = lru_cache(maxsize=None)(self._load)

    def rates(self, types: TileTypes) -> TileRates:
        return MI300X

    def prepare(self, lists: Lists, types: TileTypes, b_rows: bool, upload: Upload) -> Bind:
        tiles, dtype = lists.tiles, types.a
        variant = tiles.tiling, dtype, b_rows, tiles.work.k % BK == 0
        function, threads, shared = self._functions(*variant)
        on_device = tables(lists, upload)
        kinds = signature(dtype)

        def bind(
            a: Sequence[torch.Tensor],
            b: torch.Tensor,
            out: Sequence[torch.Tensor],
            scales: TileScales | None,
        ) -> Enqueue:
            arguments: list[Any] = []
            for name, value in values(a, b, out, on_device[0].data_ptr()).items():
                numbers = value if isinstance(value, tuple) else (value,)
                kind = kinds[name][0] if isinstance(value, tuple) else kinds[name]
                arguments += map(_C_TYPES.get(kind, ctypes.c_void_p), numbers)
            # Triton adds two pointers to scratch memory, which this kernel does not use.
            arguments += ctypes.c_void_p(), ctypes.c_void_p()
            launch, packed = self._binding.launch, Packed(arguments)
            return partial(launch, function, tiles.clusters, threads, packed, shared=shared)

        return bind

    def _load(
        self, tiling: Tiling, dtype: torch.dtype, b_rows: bool, even_k: bool
    ) -> tuple[Any, int, int]:
        """The loaded kernel, its threads per block, and its bytes of shared memory."""
        compiled = compiled_by_triton(self._binding.target, tiling, dtype, b_rows, even_k)
        metadata = compiled.metadata
        kernels = self._binding.load(compiled.kernel, (metadata.name,), metadata.shared)
        threads = metadata.num_warps * metadata.target.warp_size
        return kernels[metadata.name], threads, metadata.shared
