"""The product whose tiles wait, on one device, for the kernels of all architectures.

:class:`TiledProducts` puts work lists on the device and :class:`TiledLaunch` launches them, through
the :class:`TileKernel` of the device's architecture. Importing this module uses no device.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ficco.accelerator import gpu
from ficco.compute.tiled.worklist import TileList, TileRates, Work, best

#: Bytes and elements of the unit that kernels load.
UNIT, UNIT_ELEMENTS = 16, 8
DTYPES = (torch.bfloat16, torch.float16)
#: Dtypes of scaled operands.
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CONTIGUOUS = torch.contiguous_format

#: Puts numbers on the device.
Upload = Callable[[npt.NDArray[Any]], torch.Tensor]
#: Enqueues a kernel whose arguments are set, on a stream.
Enqueue = Callable[[Any], None]


class TileTypes(NamedTuple):
    """Dtypes of A, of B and of the results.

    ``precise``: add the sums of each step along k in float32, for devices that accumulate with less
    precision, as Hopper GPUs do for float8.
    """

    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    precise: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype) -> TileTypes:
        """The same dtype for operands and results."""
        return cls(dtype, dtype, dtype)

    @property
    def scaled(self) -> bool:
        """Whether operands have factors."""
        return self.a.itemsize == 1


class TileScales(NamedTuple):
    """The factors of float8 operands, in float32.

    Attributes:
        a: for each product, [rows, 1], or [1, 1] for all rows.
        b: [1, n], or [1, 1].
        bias: row [n] that is added, in the results' dtype.
    """

    a: Sequence[torch.Tensor]
    b: torch.Tensor
    bias: torch.Tensor | None = None


#: Sets the arguments: A of each product, B as stored, the result of each product, and the factors
#: of scaled operands.
Bind = Callable[
    [Sequence[torch.Tensor], torch.Tensor, Sequence[torch.Tensor], TileScales | None], Enqueue
]


@dataclass(frozen=True)
class Lists:
    """A work list on the device. All fields but ``tiles`` and ``limit_s`` are device addresses.

    Attributes:
        items: the items of ``tiles``.
        gates, words: arrays of addresses of 32-bit words. A gate is open at 1; a word becomes 1
            when an announcement's rows are stored.
        targets: for each announcement, the counter value that completes it.
        counters: a counter for each announcement.
        ready: written parts, for each cut tile and each counting unit of a block.
        parts: parts of tiles, float32.
        late: set to 1 + the gate that did not open in time, or 1 + ``MAX_GATES`` for a part.
        limit_s: seconds that a kernel waits.
    """

    tiles: TileList
    items: int
    gates: int
    words: int
    targets: int
    counters: int
    ready: int
    parts: int
    late: int
    limit_s: float


class TileKernel(ABC):
    """The kernel of an architecture, on one device.

    Attributes:
        most: maximum of products in a list.
        scales: whether the kernel multiplies float8.
        counts: units of a block that each count tiles.
    """

    most: ClassVar[int]
    scales: ClassVar[bool] = False
    counts: ClassVar[int]

    @abstractmethod
    def rates(self, types: TileTypes) -> TileRates:
        """Tilings and their rates, for choosing a work list."""

    @abstractmethod
    def prepare(self, lists: Lists, types: TileTypes, b_rows: bool, upload: Upload) -> Bind:
        """Compile and load the kernel, once for each variant. The result owns its uploads.

        Args:
            b_rows: whether B is stored as [k, n], else as [n, k], with contiguous rows.
        """


def addressable(matrix: torch.Tensor) -> bool:
    """Whether kernels can load a matrix in units: contiguous rows, aligned to 16 bytes."""
    size, (rows, columns) = matrix.element_size(), matrix.shape
    pitch = matrix.stride(0)
    spaced = rows == 1 or (pitch >= columns and pitch * size % UNIT == 0)
    return matrix.stride(1) == 1 and spaced and matrix.data_ptr() % UNIT == 0


def pitch_of(matrix: torch.Tensor) -> int:
    """Elements from one row of a matrix to the next; a single row may have any stride."""
    return matrix.stride(0) if len(matrix) > 1 else matrix.shape[1]


class TiledLaunch:
    """A work list on one device, with scratch memory, from :meth:`TiledProducts.prepare`.

    Launches must not overlap, and must end before this object is dropped.
    """

    def __init__(
        self,
        tiles: TileList,
        types: TileTypes,
        b_rows: bool,
        bind: Bind,
        counters: torch.Tensor,
        memory: Sequence[torch.Tensor],
    ) -> None:
        self.tiles, self.types, self.b_rows, self.counters = tiles, types, b_rows, counters
        self._bind, self._memory = bind, memory

    def launch(
        self,
        a: Sequence[torch.Tensor],
        b: torch.Tensor,
        out: Sequence[torch.Tensor],
        stream: Any,
        scales: TileScales | None = None,
    ) -> Enqueue | None:
        """Enqueue ``out[p] = a[p] @ b`` for each product p.

        Args:
            a: [rows of p, k] each. Gated rows must be :func:`addressable`; other rows are copied if
                they are not.
            b: [k, n], copied if its layout is not the prepared one.
            out: [rows of p, n] each. Announced rows must be :func:`addressable`.
            stream: PyTorch's current stream, in the form of the vendor's binding.
            scales: factors of float8 operands.

        Returns:
            A function that enqueues the launch again for the same operands; None after a copy.

        Raises:
            ValueError: a tensor has another shape or dtype, or may not be copied but must be.
        """
        self._check(a, b, out)
        operands = [*a, b if self.b_rows else b.t()]
        inputs = [t if addressable(t) else t.clone(memory_format=_CONTIGUOUS) for t in operands]
        results = [
            t if addressable(t) else torch.empty_like(t, memory_format=_CONTIGUOUS) for t in out
        ]
        enqueue = self._bind(inputs[:-1], inputs[-1], results, scales)
        enqueue(stream)
        for target, result in zip(out, results, strict=True):
            if target is not result:
                target.copy_(result)
        pairs = zip((*inputs, *results), (*operands, *out), strict=True)
        if any(new is not old for new, old in pairs):
            return None

        def again(stream: Any, keeps: TiledLaunch = self) -> None:
            enqueue(stream)

        return again

    def _check(
        self, a: Sequence[torch.Tensor], b: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> None:
        work, types = self.tiles.work, self.types
        k = work.k * 2 // types.a.itemsize
        wanted = (
            ("a", a, types.a, [(rows, k) for rows in work.rows], work.gates),
            ("b", [b], types.b, [(k, work.n)], ()),
            ("out", out, types.out, [(rows, work.n) for rows in work.rows], work.announces),
        )
        for name, tensors, dtype, shapes, spans in wanted:
            if [tuple(t.shape) for t in tensors] != shapes or {t.dtype for t in tensors} != {dtype}:
                got = [(tuple(t.shape), t.dtype) for t in tensors]
                raise ValueError(f"{name}: required {shapes} of {dtype}, got {got}")
            for product in {span.product for of in spans for span in of}:
                if not addressable(tensors[product]):
                    raise ValueError(
                        f"{name}: rows that are gated or announced must be contiguous and begin at "
                        f"multiples of 16 bytes, got strides {tensors[product].stride()}"
                    )


class TiledProducts:
    """Products whose tiles wait, on one device, which must be current."""

    def __init__(
        self, device: torch.device, processors: int, kernel: TileKernel, uploads: Any = None
    ) -> None:
        # Stream for uploads. Engines pass one of their own: PyTorch also hands its streams out to
        # callers, who may capture on them or let them wait for peers.
        self.device, self.processors, self.kernel = device, processors, kernel
        self._uploads: gpu.Stream | None = uploads
        self.best = lru_cache(maxsize=64)(self._best)  # the programs of all slots share a list

    def serves(self, types: TileTypes, products: int, n: int, k: int) -> str:
        """Reason why products are not supported here; empty if they are."""
        served = (*DTYPES, *FLOAT8) if self.kernel.scales else DTYPES
        if types.a not in served or types.b not in served or types.out not in DTYPES:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in served)
            types_text = f"{types.a} by {types.b}, to {types.out}"
            return f"tiled products need {names}, to bfloat16 or float16, got {types_text}"
        if products > self.kernel.most:
            return f"tiled products are at most {self.kernel.most}, got {products}"
        if n % UNIT_ELEMENTS or k % UNIT_ELEMENTS or not n or not k:
            return f"tiled products need multiples of 8 columns, got n = {n} and k = {k}"
        return ""

    def _best(self, work: Work, types: TileTypes, b_rows: bool, spare: int = 0) -> TileList:
        """Fastest predicted list that leaves ``spare`` processors to other kernels."""
        return best(work, self.kernel.rates(types), self.processors - spare, b_rows)

    def prepare(
        self,
        tiles: TileList,
        types: TileTypes,
        b_rows: bool,
        *,
        late: int,
        limit_s: float,
        gates: Sequence[int] = (),
        words: Sequence[int] = (),
    ) -> TiledLaunch:
        """Compile and load the kernel, and upload the list. This synchronizes with the device, so
        no work there may depend on what this thread does next.

        Args:
            b_rows: whether B [k, n] has contiguous rows, else contiguous columns.
            late, gates, words: addresses of words, see :class:`Lists`.
        """
        work, tiling, counts = tiles.work, tiles.tiling, self.kernel.counts
        if len(gates) != len(work.gates) or len(words) != len(work.announces):
            raise ValueError(
                f"required {len(work.gates)} gates and {len(work.announces)} words, got "
                f"{len(gates)} and {len(words)}"
            )
        counted = len(words) + tiles.tiles * tiling.blocks * counts
        floats = tiles.slots * tiling.rows * tiling.columns
        with self._apart():
            counters = torch.zeros(counted, dtype=torch.int32, device=self.device)
            parts = torch.empty(floats, dtype=torch.float32, device=self.device)
            memory = [
                self._upload(array)
                for array in (
                    tiles.items,
                    np.array([*gates, *words], np.uint64).view(np.int64),
                    np.array(tiles.targets, np.int32) * np.int32(counts),
                )
            ]
            items, ends, targets = (tensor.data_ptr() for tensor in memory)
            lists = Lists(
                tiles=tiles,
                items=items,
                gates=ends,
                words=ends + 8 * len(gates),
                targets=targets,
                counters=counters.data_ptr(),
                ready=counters.data_ptr() + 4 * len(words),
                parts=parts.data_ptr(),
                late=late,
                limit_s=limit_s,
            )
            bind = self.kernel.prepare(lists, types, b_rows, self._upload)
        return TiledLaunch(tiles, types, b_rows, bind, counters, (counters, parts, *memory))

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Run the block on the stream for uploads, and wait for that stream only."""
        uploads = self._uploads = self._uploads or gpu.Stream(self.device)
        with gpu.stream(uploads):
            yield
            uploads.synchronize()
