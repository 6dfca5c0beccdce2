"""The product whose tiles wait, on one device: what all of its kernels share.

:class:`TiledProducts` puts work lists on the device and :class:`TiledLaunch` launches them, through
the :class:`TileKernel` of the device's architecture. Importing this module uses no device.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ficco.accelerator import gpu
from ficco.tiled.worklist import TileList, TileRates, Tiling, Work, best

#: Bytes of the unit that kernels load, and how many elements these are.
UNIT, UNIT_ELEMENTS = 16, 8
DTYPES = (torch.bfloat16, torch.float16)
_CONTIGUOUS = torch.contiguous_format

#: Puts numbers on the device.
Upload = Callable[[npt.NDArray[Any]], torch.Tensor]
#: Enqueues a kernel whose arguments are set, on a stream.
Enqueue = Callable[[Any], None]
#: Sets the arguments for A of each product, B as it is stored, and the result of each product.
Bind = Callable[[Sequence[torch.Tensor], torch.Tensor, Sequence[torch.Tensor]], Enqueue]


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
        rates: by which lists are chosen, and its tilings.
        most: products of a list.
        counts: what each block has that counts tiles by itself.
    """

    rates: ClassVar[TileRates]
    most: ClassVar[int]
    counts: ClassVar[int]

    @abstractmethod
    def prepare(self, lists: Lists, dtype: torch.dtype, b_rows: bool, upload: Upload) -> Bind:
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
        dtype: torch.dtype,
        b_rows: bool,
        bind: Bind,
        counters: torch.Tensor,
        memory: Sequence[torch.Tensor],
    ) -> None:
        self.tiles, self.dtype, self.b_rows, self.counters = tiles, dtype, b_rows, counters
        self._bind, self._memory = bind, memory

    def launch(
        self, a: Sequence[torch.Tensor], b: torch.Tensor, out: Sequence[torch.Tensor], stream: Any
    ) -> Enqueue | None:
        """Enqueue ``out[p] = a[p] @ b`` for each product p.

        Args:
            a: [rows of p, k] each. Rows that wait for gates must be :func:`addressable`. Others are
                copied if they are not.
            b: [k, n]. It is copied if it is not laid out as prepared for.
            out: [rows of p, n] each, likewise for rows that are announced.
            stream: PyTorch's current one, as the vendor's binding takes it.

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
        enqueue = self._bind(given[:-1], given[-1], results)
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


class TiledProducts:
    """Products whose tiles wait, on one device, which must be current."""

    def __init__(self, device: torch.device, processors: int, kernel: TileKernel) -> None:
        self.device, self.processors, self.kernel = device, processors, kernel

    def serves(self, dtype: torch.dtype, products: int, n: int, k: int) -> str:
        """Why products cannot be computed here; empty if they can."""
        if dtype not in DTYPES:
            return f"tiled products need bfloat16 or float16, got {dtype}"
        if products > self.kernel.most:
            return f"tiled products are at most {self.kernel.most}, got {products}"
        if n % UNIT_ELEMENTS or k % UNIT_ELEMENTS or not n or not k:
            return f"tiled products need multiples of 8 columns, got n = {n} and k = {k}"
        return ""

    def best(self, work: Work, b_rows: bool, spare: int = 0) -> TileList:
        """The list with the least predicted time that leaves ``spare`` processors to others."""
        return best(work, self.kernel.rates, self.processors - spare, b_rows)

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
            bind = self.kernel.prepare(lists, dtype, b_rows, self._upload)
        return TiledLaunch(tiles, dtype, b_rows, bind, counters, (counters, parts, *memory))

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    @cached_property
    def _uploads(self) -> gpu.Stream:
        return gpu.Stream(self.device)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """What is enqueued in this block is over after it, whatever else is on the device."""
        with gpu.stream(self._uploads):
            yield
            self._uploads.synchronize()
