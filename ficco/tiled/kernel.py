"""Compile and launch the product whose tiles wait, on Hopper GPUs, through cuda-bindings.

Importing this module uses no device; :class:`TiledProducts` needs one of compute capability 9.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from ficco.accelerator import gpu
from ficco.hip_kernels.build import Target, compiled
from ficco.hip_kernels.cuda_binding import CudaBinding, check
from ficco.hip_kernels.launch import Packed
from ficco.tiled.worklist import BK, H100, MAX_PRODUCTS, TileList, Tiling, Work, best

TARGET = Target("cuda", "sm_90a")
NAME = "ficco_tiled"
THREADS = 384
#: A block of 64 x 64 elements of two bytes; two of them per group of warps hold C on its way out.
_BOX_BYTES = 64 * 64 * 2
_MAP_BYTES = 128
#: Sets of addresses whose arguments a launch keeps.
_KEPT = 64
_CONTIGUOUS = torch.contiguous_format

#: Dtypes: their names in wgmma, in the conversion from float32, and in tensor maps.
_NAMES = {
    torch.bfloat16: ("bf16", "cvt.rn.bf16x2.f32", 9),
    torch.float16: ("f16", "cvt.rn.f16x2.f32", 6),
}


@cache
def source(tiling: Tiling, dtype: torch.dtype, b_rows: bool) -> str:
    """The kernel for a tiling, a dtype and a layout of B: ``b_rows`` for rows of n elements."""
    name, pack, _ = _NAMES[dtype]
    constants = {
        "BM": tiling.bm,
        "BN": tiling.bn,
        "STAGES": tiling.stages,
        "CM": tiling.cm,
        "CN": tiling.cn,
        "B_ROWS": int(b_rows),
        "PACK": f'"{pack}"',
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
            f'    "wgmma.mma_async.sync.aligned.m64n{tiling.bn}k16.f32.{name}.{name} "\n',
            f'    "{{{registers}}}, %{count}, %{count + 1}, add, 1, 1, 0, {int(b_rows)};\\n}}"\n',
            f'    : {operands}\n    : "l"(a), "l"(b), "r"(add));\n}}\n',
            (Path(__file__).parent / "hopper.cpp").read_text(),
        )
    )


class _Maps(ctypes.Structure):
    _fields_ = [("at", ctypes.c_uint8 * (_MAP_BYTES * (2 * MAX_PRODUCTS + 1)))]


class _Lists(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("items", "gates", "words", "targets", "counters")),
        *((name, ctypes.c_uint64) for name in ("ready", "parts", "late", "limit_ns")),
        ("clusters", ctypes.c_uint32),
        ("gate_count", ctypes.c_uint32),
    ]


@cache
def _encode() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


@lru_cache(maxsize=4096)
def tensor_map(
    kind: int, address: int, rows: int, columns: int, pitch: int, box_rows: int
) -> bytes:
    """The map of a matrix, rows ``pitch`` bytes apart, in boxes of 64 columns that are swizzled by
    128 bytes. What is outside of the matrix reads as 0 and is not written."""
    room = ctypes.create_string_buffer(2 * _MAP_BYTES)
    aligned = -(-ctypes.addressof(room) // 64) * 64
    swizzle_128, promotion_256, zeros = 3, 3, 0
    status = _encode()(
        *(ctypes.c_void_p(aligned), kind, 2, ctypes.c_void_p(address)),
        *((ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(pitch)),
        *((ctypes.c_uint32 * 2)(64, box_rows), (ctypes.c_uint32 * 2)(1, 1)),
        *(0, swizzle_128, promotion_256, zeros),
    )
    if status:
        check("cuTensorMapEncodeTiled", (driver.CUresult(status),))
    return ctypes.string_at(aligned, _MAP_BYTES)


def addressable(matrix: torch.Tensor) -> bool:
    """Whether TMA can address a matrix: its rows are contiguous and begin at multiples of 16."""
    size, (rows, columns) = matrix.element_size(), matrix.shape
    pitch = matrix.stride(0)
    spaced = rows == 1 or (pitch >= columns and pitch * size % 16 == 0)
    return matrix.stride(1) == 1 and spaced and matrix.data_ptr() % 16 == 0


def shared_bytes(tiling: Tiling) -> int:
    """Shared memory of a block: up to 1024 bytes to align it, boxes of C, the ring, barriers."""
    ring = tiling.stages * (tiling.bm + -(-tiling.bn // 64) * 64) * 128
    return 1024 + 4 * _BOX_BYTES + ring + 16 * tiling.stages + 64


class TiledLaunch:
    """A work list on one device, with its scratch: made by :meth:`TiledProducts.prepare`.

    Its launches must run one after the other, and end before it is dropped.
    """

    def __init__(
        self,
        tiles: TileList,
        dtype: torch.dtype,
        b_rows: bool,
        function: Any,
        arguments: _Lists,
        memory: Sequence[torch.Tensor],
    ) -> None:
        self.tiles, self.dtype, self.b_rows = tiles, dtype, b_rows
        self._function, self._arguments, self._memory = function, arguments, memory
        self._grid, self._shared = tiles.clusters * tiles.tiling.blocks, shared_bytes(tiles.tiling)
        self._cache: dict[Any, Packed] = {}

    def launch(
        self,
        a: Sequence[torch.Tensor],
        b: torch.Tensor,
        out: Sequence[torch.Tensor],
        stream: gpu.Stream,
    ) -> None:
        """Enqueue ``out[p] = a[p] @ b`` for each product p.

        Args:
            a: [rows of p, k] each. Rows that wait for gates must be addressable by TMA: contiguous,
                each from a multiple of 16 bytes. Others are copied if they are not.
            b: [k, n]. It is copied if it is not laid out as prepared for.
            out: [rows of p, n] each, likewise for rows that are announced.

        Raises:
            ValueError: a tensor has another shape or dtype, or may not be copied but must be.
        """
        key = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (*a, b, *out))
        packed = self._cache.get(key)
        if packed is None:
            self._check(a, b, out)
            with gpu.stream(stream):
                packed, results = self._pack(a, b, out)
                if results is not None:
                    self._enqueue(packed, stream)
                    for there, result in zip(out, results, strict=True):
                        if there is not result:
                            there.copy_(result)
                    return
            if len(self._cache) == _KEPT:
                self._cache.clear()
            self._cache[key] = packed
        self._enqueue(packed, stream)

    def rest(self, stream: gpu.Stream) -> None:
        """Clear the counters after a launch that was late."""
        with gpu.stream(stream):
            self._memory[0].zero_()

    def _enqueue(self, packed: Packed, stream: gpu.Stream) -> None:
        shape = self._grid, 1, 1, THREADS, 1, 1, self._shared
        at = packed.address
        result = driver.cuLaunchKernel(self._function, *shape, stream.cuda_stream, at, 0)
        if result[0]:
            check("cuLaunchKernel", result)

    def _check(
        self, a: Sequence[torch.Tensor], b: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> None:
        work = self.tiles.work
        wanted = (
            ("a", a, [(rows, work.k) for rows in work.rows], work.gates),
            ("b", [b], [(work.k, work.n)], ()),
            ("out", out, [(rows, work.n) for rows in work.rows], work.announces),
        )
        for name, given, shapes, spans in wanted:
            if [tuple(t.shape) for t in given] != shapes or {t.dtype for t in given} != {
                self.dtype
            }:
                got = [(tuple(t.shape), t.dtype) for t in given]
                raise ValueError(f"{name}: required {shapes} of {self.dtype}, got {got}")
            for product in {span.product for of in spans for span in of}:
                if not addressable(given[product]):
                    raise ValueError(
                        f"{name}: rows that are gated or announced must be contiguous and begin at "
                        f"multiples of 16 bytes, got strides {given[product].stride()}"
                    )

    def _pack(
        self, a: Sequence[torch.Tensor], b: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> tuple[Packed, list[torch.Tensor] | None]:
        """The arguments, and results if some tensor had to be replaced, on the current stream."""
        stored = b if self.b_rows else b.t()
        operands = [*a, stored]
        addressed = [t if addressable(t) else t.clone(memory_format=_CONTIGUOUS) for t in operands]
        results = [
            t if addressable(t) else torch.empty_like(t, memory_format=_CONTIGUOUS) for t in out
        ]
        tiling, maps = self.tiles.tiling, _Maps()
        places = [
            *((index, t, tiling.bm // tiling.cn) for index, t in enumerate(addressed[:-1])),
            *((MAX_PRODUCTS + index, t, 64) for index, t in enumerate(results)),
            (2 * MAX_PRODUCTS, addressed[-1], BK if self.b_rows else tiling.bn // tiling.cm),
        ]
        for index, matrix, box_rows in places:
            (rows, columns), size = matrix.shape, matrix.element_size()
            pitch = (columns if rows == 1 else matrix.stride(0)) * size
            shape = rows, columns, pitch, box_rows
            encoded = tensor_map(_NAMES[self.dtype][2], matrix.data_ptr(), *shape)
            ctypes.memmove(ctypes.addressof(maps) + index * _MAP_BYTES, encoded, _MAP_BYTES)
        replaced = any(
            new is not old
            for new, old in zip((*addressed, *results), (*operands, *out), strict=True)
        )
        return Packed((maps, self._arguments)), results if replaced else None


class TiledProducts:
    """The kernels of one device, which must be current; compiled when first prepared for."""

    def __init__(self, index: int) -> None:
        self._binding = CudaBinding(index)
        self.device = torch.device("cuda", index)
        self.processors = self._binding.processors
        self._uploads = gpu.Stream(self.device)
        self._functions = lru_cache(maxsize=None)(self._load)

    def serves(self, dtype: torch.dtype, products: int, n: int, k: int) -> str:
        """Why products cannot be computed here; empty if they can."""
        if self._binding.target.arch != "sm_90":
            return f"tiled products need sm_90, this device is {self._binding.target.arch}"
        if dtype not in _NAMES:
            return f"tiled products need bfloat16 or float16, got {dtype}"
        if products > MAX_PRODUCTS:
            return f"tiled products are at most {MAX_PRODUCTS}, got {products}"
        if n % 8 or k % 8 or not n or not k:
            return f"tiled products need multiples of 8 columns, got n = {n} and k = {k}"
        return ""

    def best(self, work: Work, b_rows: bool, spare: int = 0) -> TileList:
        """The list with the least predicted time that leaves ``spare`` processors to others."""
        return best(work, H100, self.processors - spare, b_rows)

    def clusters(self, tiling: Tiling, spare: int = 0) -> int:
        """Clusters of a launch that leaves ``spare`` processors to others."""
        return (self.processors - spare) // tiling.blocks

    def prepare(
        self,
        tiles: TileList,
        dtype: torch.dtype,
        b_rows: bool,
        *,
        late: int,
        limit_s: float,
        gates: Sequence[int] = (),
        words: Sequence[int] = (),
    ) -> TiledLaunch:
        """Compile the kernel, load it, and put the list on the device. It waits for the device, so
        nothing that this thread must end may keep it waiting.

        Args:
            b_rows: whether B [k, n] is given with contiguous rows, else with contiguous columns.
            late: address of a 32-bit word: 1 + the index of a gate that was not open after
                ``limit_s``, or 1 + ``MAX_GATES`` if parts of tiles did not come.
            gates: addresses of 32-bit words, which are 1 when open.
            words: addresses of 32-bit words that become 1 when an announcement's rows are stored.
        """
        work = tiles.work
        if len(gates) != len(work.gates) or len(words) != len(work.announces):
            raise ValueError(
                f"required {len(work.gates)} gates and {len(work.announces)} words, got "
                f"{len(gates)} and {len(words)}"
            )
        function = self._functions(tiles.tiling, dtype, b_rows)
        per_tile = tiles.tiling.blocks * 2
        counters = len(words) + tiles.tiles * per_tile
        floats = tiles.slots * tiles.tiling.rows * tiles.tiling.columns
        addresses = np.array([*gates, *words], np.uint64).view(np.int64)
        with gpu.stream(self._uploads):
            rests = torch.zeros(counters, dtype=torch.int32, device=self.device)
            parts = torch.empty(floats, dtype=torch.float32, device=self.device)
            given = [
                torch.from_numpy(array).to(self.device)
                for array in (tiles.items, addresses, np.array(tiles.targets, np.int32))
            ]
            self._uploads.synchronize()
        items, ends, targets = (tensor.data_ptr() for tensor in given)
        arguments = _Lists(
            items=items,
            gates=ends,
            words=ends + 8 * len(gates),
            targets=targets,
            counters=rests.data_ptr(),
            ready=rests.data_ptr() + 4 * len(words),
            parts=parts.data_ptr(),
            late=late,
            limit_ns=int(limit_s * 1e9),
            clusters=tiles.clusters,
            gate_count=len(gates),
        )
        memory = rests, parts, *given
        return TiledLaunch(tiles, dtype, b_rows, function, arguments, memory)

    def _load(self, tiling: Tiling, dtype: torch.dtype, b_rows: bool) -> Any:
        image = compiled(TARGET, text=source(tiling, dtype, b_rows))
        function = self._binding.load(image, (NAME,))[NAME]
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        result = driver.cuFuncSetAttribute(function, attribute, shared_bytes(tiling))
        check("cuFuncSetAttribute", result)
        return function
