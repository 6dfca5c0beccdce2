"""Compile and launch the product whose tiles wait on Hopper GPUs (``hopper.cpp``).

Importing this module uses no device; :class:`HopperKernel` needs one of compute capability 9.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from ficco.accelerator import gpu
from ficco.compute.tiled.products import (
    Bind,
    Enqueue,
    Lists,
    TiledProducts,
    TileKernel,
    TileScales,
    TileTypes,
    Upload,
    pitch_of,
)
from ficco.compute.tiled.worklist import BK, H100, H100_PRECISE, MAX_PRODUCTS, TileRates, Tiling
from ficco.hip_kernels.build import Target, compiled
from ficco.hip_kernels.cuda_binding import CudaBinding, check
from ficco.hip_kernels.launch import Packed

TARGET = Target("cuda", "sm_90a")
NAME = "ficco_tiled"
THREADS = 384
#: A block of 64 x 64 elements of two bytes; two of them per group of warps hold C on its way out.
_BOX_BYTES = 64 * 64 * 2
#: Bytes of a row of A or B in one step along k, and of a tensor map.
_LINE, _MAP_BYTES = 128, 128

#: Dtypes: their names in wgmma and in conversions, and in tensor maps.
_NAMES = {
    torch.bfloat16: ("bf16", 9),
    torch.float16: ("f16", 6),
    torch.float8_e4m3fn: ("e4m3", 0),
    torch.float8_e5m2: ("e5m2", 0),
}


@cache
def source(tiling: Tiling, types: TileTypes, b_rows: bool) -> str:
    """The kernel for a tiling, dtypes and a layout of B: ``b_rows`` for rows of n elements."""
    left, right, result = (_NAMES[dtype][0] for dtype in types[:3])
    size, shape = types.a.itemsize, f"m64n{tiling.bn}k{32 // types.a.itemsize}"
    layouts = "" if types.scaled else f", 0, {int(b_rows)}"  # float8 has but one
    constants = {
        "SIZE": size,
        "PRECISE": int(types.precise),
        "BM": tiling.bm,
        "BN": tiling.bn,
        "STAGES": tiling.stages,
        "CM": tiling.cm,
        "CN": tiling.cn,
        "B_ROWS": int(b_rows),
        "PACK": f'"cvt.rn.{result}x2.f32"',
        "WIDEN": f'"cvt.f32.{result}"',
    }
    count = tiling.bn // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return "".join(
        (
            *(f"#define {key} {value}\n" for key, value in constants.items()),
            f"__device__ __forceinline__ void mma(float (&d)[{count}], unsigned long long a,\n",
            "                                    unsigned long long b, int add) {\n",
            f'  asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 2}, 0;\\n"\n',
            f'    "wgmma.mma_async.sync.aligned.{shape}.f32.{left}.{right} "\n',
            f'    "{{{registers}}}, %{count}, %{count + 1}, add, 1, 1{layouts};\\n}}"\n',
            f'    : {operands}\n    : "l"(a), "l"(b), "r"(add));\n}}\n',
            (Path(__file__).parent / "hopper.cpp").read_text(),
        )
    )


#: The fields of Lists that are passed on.
_ADDRESSES = ("items", "gates", "words", "targets", "counters", "ready", "parts", "late")


class _Maps(ctypes.Structure):
    _fields_ = [("at", ctypes.c_uint8 * (_MAP_BYTES * (2 * MAX_PRODUCTS + 1)))]


class _Lists(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in (*_ADDRESSES, "limit_ns")),
        ("clusters", ctypes.c_uint32),
        ("gate_count", ctypes.c_uint32),
    ]


class _Scales(ctypes.Structure):
    _fields_ = [
        ("a", ctypes.c_uint64 * MAX_PRODUCTS),
        *((name, ctypes.c_uint64) for name in ("b", "bias")),
        ("rows", ctypes.c_int32 * MAX_PRODUCTS),
        *((name, ctypes.c_int32) for name in ("n", "a_stride", "b_stride")),
    ]

    @classmethod
    def of(cls, scales: TileScales, rows: Sequence[int], n: int) -> _Scales:
        """Raises ValueError: factors are neither one for each row or column, nor one for all."""
        columns = [*zip(scales.a, rows, strict=True), (scales.b.t(), n)]
        for factors, count in columns:
            if factors.shape not in ((count, 1), (1, 1)) or factors.dtype != torch.float32:
                raise ValueError(
                    f"scales: required {count} or 1 of float32, got {tuple(factors.shape)} of "
                    f"{factors.dtype}"
                )
        *of_a, of_b = (factors.stride(0) if len(factors) > 1 else 0 for factors, _ in columns)
        return cls(
            (ctypes.c_uint64 * MAX_PRODUCTS)(*(factors.data_ptr() for factors in scales.a)),
            scales.b.data_ptr(),
            0 if scales.bias is None else scales.bias.data_ptr(),
            (ctypes.c_int32 * MAX_PRODUCTS)(*rows),
            *(n, max(of_a), of_b),
        )


@cache
def _encode() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


@lru_cache(maxsize=4096)
def tensor_map(
    dtype: torch.dtype, address: int, rows: int, columns: int, pitch: int, box_rows: int
) -> bytes:
    """Tensor map of a matrix with rows ``pitch`` bytes apart: swizzled boxes of ``box_rows`` rows
    by 128 bytes. Elements outside the matrix read as 0 and are not written."""
    room = ctypes.create_string_buffer(2 * _MAP_BYTES)
    aligned = -(-ctypes.addressof(room) // 64) * 64
    swizzle_128, promotion_256, zeros = 3, 3, 0
    status = _encode()(
        *(ctypes.c_void_p(aligned), _NAMES[dtype][1], 2, ctypes.c_void_p(address)),
        *((ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(pitch)),
        *((ctypes.c_uint32 * 2)(_LINE // dtype.itemsize, box_rows), (ctypes.c_uint32 * 2)(1, 1)),
        *(0, swizzle_128, promotion_256, zeros),
    )
    if status:
        check("cuTensorMapEncodeTiled", (driver.CUresult(status),))
    return ctypes.string_at(aligned, _MAP_BYTES)


def shared_bytes(tiling: Tiling) -> int:
    """Shared memory of a block: up to 1024 bytes to align it, boxes of C, the ring, barriers."""
    ring = tiling.stages * (tiling.bm + -(-tiling.bn // 64) * 64) * 128
    return 1024 + 4 * _BOX_BYTES + ring + 16 * tiling.stages + 64


class HopperKernel(TileKernel):
    """See :class:`ficco.compute.tiled.products.TileKernel`."""

    most = MAX_PRODUCTS
    scales = True
    counts = 2  # warps that store, and groups of warps that multiply, each half of a tile

    def __init__(self, binding: CudaBinding) -> None:
        self._binding = binding
        self._functions = lru_cache(maxsize=None)(self._load)

    def rates(self, types: TileTypes) -> TileRates:
        return H100_PRECISE if types.precise else H100

    def prepare(self, lists: Lists, types: TileTypes, b_rows: bool, upload: Upload) -> Bind:
        tiling, work = lists.tiles.tiling, lists.tiles.work
        function = self._functions(tiling, types, b_rows)
        arguments = _Lists(
            **{name: getattr(lists, name) for name in _ADDRESSES},
            limit_ns=int(lists.limit_s * 1e9),
            clusters=lists.tiles.clusters,
            gate_count=len(work.gates),
        )
        blocks, shared = lists.tiles.clusters * tiling.blocks, shared_bytes(tiling)

        def bind(
            a: Sequence[torch.Tensor],
            b: torch.Tensor,
            out: Sequence[torch.Tensor],
            scales: TileScales | None,
        ) -> Enqueue:
            maps = _Maps()
            factors = _Scales() if scales is None else _Scales.of(scales, work.rows, work.n)
            places = [
                *((index, t, tiling.bm // tiling.cn) for index, t in enumerate(a)),
                *((MAX_PRODUCTS + index, t, 64) for index, t in enumerate(out)),
                (2 * MAX_PRODUCTS, b, BK if b_rows else tiling.bn // tiling.cm),
            ]
            for index, matrix, box_rows in places:
                shape = *matrix.shape, pitch_of(matrix) * matrix.element_size(), box_rows
                encoded = tensor_map(matrix.dtype, matrix.data_ptr(), *shape)
                ctypes.memmove(ctypes.addressof(maps) + index * _MAP_BYTES, encoded, _MAP_BYTES)
            packed = Packed((maps, arguments, factors))
            return partial(self._binding.launch, function, blocks, THREADS, packed, shared=shared)

        return bind

    def _load(self, tiling: Tiling, types: TileTypes, b_rows: bool) -> Any:
        image = compiled(TARGET, text=source(tiling, types, b_rows))
        return self._binding.load(image, (NAME,), shared_bytes(tiling))[NAME]


def hopper_products(index: int, uploads: gpu.Stream | None = None) -> TiledProducts:
    """Those of a Hopper GPU."""
    binding, device = CudaBinding(index), torch.device("cuda", index)
    return TiledProducts(device, binding.processors, HopperKernel(binding), uploads)
