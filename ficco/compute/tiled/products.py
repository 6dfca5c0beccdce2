"""The product whose tiles wait, on one device: what all of its kernels share.

:class:`TiledProducts` puts work lists on the device and :class:`TiledLaunch` launches them, through
the :class:`TileKernel` of the device's architecture. Importing this module uses no device.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ficco.accelerator import gpu
from ficco.compute.tiled.worklist import TileList, TileRates, Tiling, Work, best

#: Bytes of the unit that kernels load, and how many elements these are.
UNIT, UNIT_ELEMENTS = 16, 8
DTYPES = (torch.bfloat16, torch.float16)
#: Those of operands that are scaled.
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CONTIGUOUS = torch.contiguous_format

#: Puts numbers on the device.
Upload = Callable[[npt.NDArray[Any]], torch.Tensor]
#: Enqueues a kernel whose arguments are set, on a stream.
Enqueue = Callable[[Any], None]


class TileTypes(NamedTuple):
    """Dtypes of A, of B and of the results.

    ``precise``: what the device adds up in less than float32, as Hopper GPUs do for float8, is
    added to a sum in float32 after each step along k.
    """

    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    precise: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype) -> TileTypes:
        """One for all."""
        return cls(dtype, dtype, dtype)

    @property
    def scaled(self) -> bool:
        """Whether operands have factors."""
        return self.a.itemsize == 1


class TileScales(NamedTuple):
    """The factors of float8 operands, in float32.

    Attributes:
        a: of each product, [its rows, 1], or [1, 1] for all of them.
        b: [1, n], or [1, 1].
        bias: a row [n] of the results' dtype that is added.
    """

    a: Sequence[torch.Tensor]
    b: torch.Tensor
    bias: torch.Tensor | None = None


#: Sets the arguments for A of each product, B as it is stored, the result of each product, and the
#: factors of operands that are scaled.
Bind = Callable[
    [Sequence[torch.Tensor], torch.Tensor, Sequence[torch.Tensor], TileScales | None], Enqueue
]


@dataclass(frozen=True)
class Lists:
    """A work list on the device: addresses, unless said otherwise.

    Attributes:
        items: of ``tiles``.
        gates, words: of arrays of addresses of 32-bit words. A gate is open at 1; a word becomes 1
            when an announcement's rows are stored.
        targets: additions to a counter that complete an announcement.
        counters: per announcement.
        ready: per cut tile and whatever counts by itself, how many parts are written.
        parts: float32 of parts of tiles.
        late: becomes 1 + a gate that did not open in time, 1 + ``MAX_GATES`` for parts.
        limit_s: seconds after which a kernel no longer waits.
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
        most: products of a list.
        scales: whether it multiplies float8.
        counts: what each block has that counts tiles by itself.
    """

    most: ClassVar[int]
    scales: ClassVar[bool] = False
    counts: ClassVar[int]

    @abstractmethod
    def rates(self, types: TileTypes) -> TileRates:
        """By which lists are chosen, and the tilings."""

    @abstractmethod
    def prepare(self, lists: Lists, types: TileTypes, b_rows: bool, upload: Upload) -> Bind:
        """Compile it and load it, once for each variant. What is returned keeps what it uploads.

        Args:
            b_rows: B is stored as [k, n], otherwise as [n, k], each with contiguous rows.
        """


def addressable(matrix: torch.Tensor) -> bool:
    """Whether kernels can load units of a matrix: its rows are contiguous, and begin at multiples
    of 16 bytes."""
    size, (rows, columns) = matrix.element_size(), matrix.shape
    pitch = matrix.stride(0)
    spaced = rows == 1 or (pitch >= columns and pitch * size % UNIT == 0)
    return matrix.stride(1) == 1 and spaced and matrix.data_ptr() % UNIT == 0


def pitch_of(matrix: torch.Tensor) -> int:
    """Elements from one row of a matrix to the next; a single row may have any stride."""
    return matrix.stride(0) if len(matrix) > 1 else matrix.shape[1]


class TiledLaunch:
    """A work list on one device, with its scratch: made by :meth:`TiledProducts.prepare`.

    Its launches must run one after the other, and end before it is dropped.
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
            a: [rows of p, k] each. Rows that wait for gates must be :func:`addressable`. Others are
                copied if they are not.
            b: [k, n]. It is copied if it is not laid out as prepared for.
            out: [rows of p, n] each, likewise for rows that are announced.
            stream: PyTorch's current one, as the vendor's binding takes it.
            scales: of float8 operands, whose products they multiply.

        Returns:
            What enqueues it again for the same operands; None if some had to be copied.

        Raises:
            ValueError: a tensor has another shape or dtype, or may not be copied but must be.
        """
        self._check(a, b, out)
        operands = [*a, b if self.b_rows else b.t()]
        given = [t if addressable(t) else t.clone(memory_format=_CONTIGUOUS) for t in operands]
        results = [
            t if addressable(t) else torch.empty_like(t, memory_format=_CONTIGUOUS) for t in out
        ]
        enqueue = self._bind(given[:-1], given[-1], results, scales)
        enqueue(stream)
        for there, result in zip(out, results, strict=True):
            if there is not result:
                there.copy_(result)
        pairs = zip((*given, *results), (*operands, *out), strict=True)
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
        for name, given, dtype, shapes, spans in wanted:
            if [tuple(t.shape) for t in given] != shapes or {t.dtype for t in given} != {dtype}:
                got = [(tuple(t.shape), t.dtype) for t in given]
                raise ValueError(f"{name}: required {shapes} of {dtype}, got {got}")
            for product in {span.product for of in spans for span in of}:
                if not addressable(given[product]):
                    raise ValueError(
                        f"{name}: rows that are gated or announced must be contiguous and begin at "
                        f"multiples of 16 bytes, got strides {given[product].stride()}"
                    )


class TiledProducts:
    """Products whose tiles wait, on one device, which must be current."""

    def __init__(
        self, device: torch.device, processors: int, kernel: TileKernel, uploads: Any = None
    ) -> None:
        # On ``uploads`` lists go to the device. Engines have their own: a stream of PyTorch's is
        # also handed out to callers, who capture on it, or have it wait for peers.
        self.device, self.processors, self.kernel = device, processors, kernel
        self._uploads: gpu.Stream | None = uploads

    def serves(self, types: TileTypes, products: int, n: int, k: int) -> str:
        """Why products cannot be computed here; empty if they can."""
        served = (*DTYPES, *FLOAT8) if self.kernel.scales else DTYPES
        if types.a not in served or types.b not in served or types.out not in DTYPES:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in served)
            given = f"{types.a} by {types.b}, to {types.out}"
            return f"tiled products need {names}, to bfloat16 or float16, got {given}"
        if products > self.kernel.most:
            return f"tiled products are at most {self.kernel.most}, got {products}"
        if n % UNIT_ELEMENTS or k % UNIT_ELEMENTS or not n or not k:
            return f"tiled products need multiples of 8 columns, got n = {n} and k = {k}"
        return ""

    def best(self, work: Work, types: TileTypes, b_rows: bool, spare: int = 0) -> TileList:
        """The list with the least predicted time that leaves ``spare`` processors to others."""
        return best(work, self.kernel.rates(types), self.processors - spare, b_rows)

    def clusters(self, tiling: Tiling, spare: int = 0) -> int:
        """Clusters of a launch that leaves ``spare`` processors to others."""
        return (self.processors - spare) // tiling.blocks

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
        """Compile the kernel, load it, and put the list on the device. It waits for the device, so
        nothing that this thread must end may keep it waiting.

        Args:
            b_rows: whether B [k, n] is given with contiguous rows, else with contiguous columns.
            late, gates, words: addresses of words: see :class:`Lists`.
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
        """What is enqueued in this block is over after it, whatever else is on the device."""
        uploads = self._uploads = self._uploads or gpu.Stream(self.device)
        with gpu.stream(uploads):
            yield
            uploads.synchronize()
