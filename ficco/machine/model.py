"""Machines as data: what a simulation needs to know of ranks, links, copy engines and GEMMs.

All quantities are SI: bytes, seconds, bytes per second, floating-point operations per second.
Nothing here knows a device; files are read and written by :mod:`ficco.machine.files`, to which
the annotations are the schema.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, exp, log
from typing import Annotated

from ficco.problem import ITEMSIZE


@dataclass(frozen=True)
class Quantity:
    """What a number in a file must be: its unit, empty for a plain number, and its bounds."""

    unit: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None

    def allows(self, value: float) -> bool:
        """Whether a value lies within the bounds."""
        return not (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
        )

    def show(self) -> str:
        """In words."""
        words = [f"a quantity in {self.unit}" if self.unit else "a number"]
        words += [f"of at least {self.least:g}"] if self.least is not None else []
        words += [f"above {self.above:g}"] if self.above is not None else []
        words += [f"and at most {self.most:g}"] if self.most is not None else []
        return " ".join(words)


@dataclass(frozen=True)
class Points:
    """The units of the points of a curve, empty for plain numbers."""

    x: str
    y: str

    def show(self) -> str:
        """In words."""
        return f"{self.x or 'number'}, {self.y or 'number'}"


@dataclass(frozen=True)
class OneOf:
    """The texts that a field can hold."""

    texts: tuple[str, ...]


Size = Annotated[int, Quantity(least=0)]
Count = Annotated[int, Quantity(least=1)]
Factor = Annotated[float, Quantity(least=1)]
Share = Annotated[float, Quantity(above=0, most=1)]
Seconds = Annotated[float, Quantity("s", least=0)]
Flops = Annotated[float, Quantity("FLOP", least=0)]
FlopRate = Annotated[float, Quantity("FLOP/s", above=0)]
Bytes = Annotated[float, Quantity("B", above=0)]
ByteRate = Annotated[float, Quantity("B/s", above=0)]

#: (size, value) with rising sizes.
Curve = tuple[tuple[float, float], ...]
RateCurve = Annotated[Curve, Points("B", "B/s")]
TimeCurve = Annotated[Curve, Points("B", "s")]

#: How ranks can be joined.
KINDS = ("mesh", "switch")

#: Where figures come from.
SOURCES = ("measured", "fitted", "data sheet", "paper", "simulated", "assumed")


def interpolate(curve: Curve, size: float) -> float:
    """The value of a curve at a size: on straight lines in log-log space, the ends held."""
    if size <= curve[0][0]:
        return curve[0][1]
    if size >= curve[-1][0]:
        return curve[-1][1]
    i = bisect_right(curve, (size, float("inf")))
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    share = (log(size) - log(x0)) / (log(x1) - log(x0))
    return exp(log(y0) + share * (log(y1) - log(y0)))


@dataclass(frozen=True)
class Provenance:
    """Where the figures of a block come from.

    Attributes:
        source: ``"measured"``, ``"fitted"`` (to measurements), ``"data sheet"``, ``"paper"``,
            ``"simulated"`` or ``"assumed"``.
        date: ISO date, for what was measured or fitted.
        command, driver, torch, commit: what measured it, and with which versions.
        note: anything else a reader should know.
    """

    source: Annotated[str, OneOf(SOURCES)]
    date: str = ""
    command: str = ""
    driver: str = ""
    torch: str = ""
    commit: str = ""
    note: str = ""


@dataclass(frozen=True)
class Topology:
    """How ranks are joined.

    Attributes:
        kind: ``"mesh"``, every pair by a link of its own, or ``"switch"``, every rank by a port.
        bandwidth: bytes per second one way, of a link (mesh) or of a port (switch).
        sharing: share of it that is left, in total, once several copies use a link or port at the
            same time.
    """

    kind: Annotated[str, OneOf(KINDS)]
    bandwidth: ByteRate
    provenance: Provenance
    sharing: Share = 1.0


@dataclass(frozen=True)
class Copies:
    """Copies between ranks by one kind of mover, as a queue of them behaves.

    A copy of s bytes holds its queue for ``gap + s / rate(s)`` and is seen by the waiter of its
    signal ``latency + s / rate(s)`` after it began.

    Attributes:
        engines: copies that one rank can have in flight at once.
        latency: seconds from a copy's begin to its signal being seen, beside the bytes' time.
        gap: seconds between two copies of a queue, signal included.
        curve: (bytes, bytes per second) of one copy that has its link or port for itself.
    """

    engines: Count
    latency: Seconds
    gap: Seconds
    curve: RateCurve
    provenance: Provenance

    def rate(self, nbytes: float) -> float:
        """Bytes per second of a copy."""
        return interpolate(self.curve, nbytes)


@dataclass(frozen=True)
class Collective:
    """The vendor's all-gather: (bytes that each rank contributes, seconds)."""

    curve: TimeCurve
    provenance: Provenance

    def seconds(self, nbytes: float) -> float:
        """Seconds of an all-gather; beyond the curve at the rate of its end."""
        size, last = self.curve[-1]
        return interpolate(self.curve, nbytes) if nbytes <= size else last * nbytes / size


@dataclass(frozen=True)
class Contention:
    """Factors by which two things that run at the same time on a rank slow down (1: not at all).

    Attributes:
        gemm_under_copies, copies_under_gemm: GEMM and copy engines (or the paper's CIL).
        gemm_under_collective, collective_under_gemm: GEMM and the vendor's collective.
    """

    gemm_under_copies: Factor
    copies_under_gemm: Factor
    gemm_under_collective: Factor
    collective_under_gemm: Factor
    provenance: Provenance


@dataclass(frozen=True)
class Host:
    """Seconds of host time; they count where a GPU waits for its host ("idle").

    Attributes:
        call: of a call, beside what it enqueues, and ``collective_call`` of one that goes through
            the vendor's collective instead.
        matmul, copy, signal: of each product, copy, and batch of waits or posts enqueued.
    """

    call: Seconds
    collective_call: Seconds
    matmul: Seconds
    copy: Seconds
    signal: Seconds
    provenance: Provenance


@dataclass(frozen=True)
class Thresholds:
    """Where the rule of FiCCO, section V-C, changes its mind, in FLOPs of one rank's product.

    Attributes:
        low: below it uniform-fused-1d.
        high: above it hetero-unfused-1d; hetero-fused-1d between (the paper: 5 times ``low``).
    """

    low: Flops
    high: Flops
    provenance: Provenance


@dataclass(frozen=True)
class Tuned:
    """The schedules that were measured fastest for one problem.

    Attributes:
        operator, rows, n, k, dtype: of the Problem; its rows on every rank.
        queued, idle: name of the schedule to take in a captured or host-ahead call, and in one
            whose GPU waits for the host.
        seconds: measured time of ``queued``, then of ``idle``.
        serial: likewise of the faster serial composition.
    """

    operator: str
    rows: tuple[Size, ...]
    n: Size
    k: Size
    dtype: Annotated[str, OneOf(tuple(ITEMSIZE))]
    queued: str
    idle: str
    seconds: tuple[Seconds, Seconds]
    serial: tuple[Seconds, Seconds]
    provenance: Provenance


@dataclass(frozen=True)
class Memory:
    """The memory of one rank.

    Attributes:
        capacity: bytes.
        bandwidth: bytes per second.
        latency: seconds before a copy within it.
    """

    capacity: Bytes
    bandwidth: ByteRate
    provenance: Provenance
    latency: Seconds = 3e-6


@dataclass(frozen=True)
class Gemm:
    """Library GEMMs of one rank. See :meth:`seconds` for the model.

    Attributes:
        peak: operations per second of 2-byte numbers, from the data sheet.
        units: processors (SMs, CUs) that work on one tile of the output each.
        launch: seconds between two products of a lane, beside their own time.
        efficiency: share of the peak that full waves of tiles reach.
        start: seconds of a product before and behind its tiles.
        tile: rows and columns of a tile.
        bandwidth: bytes per second at which operands and result are read and written at best.
        shares: (bytes per element, share of the peak) of the dtypes.
    """

    peak: FlopRate
    units: Count
    launch: Seconds
    efficiency: Share
    start: Seconds
    tile: tuple[Count, Count]
    bandwidth: ByteRate
    provenance: Provenance
    shares: Annotated[Curve, Points("", "")] = ((2, 1.0),)

    def seconds(
        self, m: int, n: int, k: int, *, batch: int = 1, itemsize: int = 2, wide: bool = False
    ) -> float:
        """Seconds of a product, or of a strided batch of such, on an idle rank.

        ``wide``: the result is float32 and is added to.
        """
        return _gemm_seconds(self, m, n, k, batch, itemsize, wide, True)

    def dense(
        self, m: int, n: int, k: int, *, batch: int = 1, itemsize: int = 2, wide: bool = False
    ) -> float:
        """The same with the last wave counted as far as it is filled: another product fills it."""
        return _gemm_seconds(self, m, n, k, batch, itemsize, wide, False)


@lru_cache(maxsize=1 << 16)
def _gemm_seconds(
    gemm: Gemm, m: int, n: int, k: int, batch: int, itemsize: int, wide: bool, whole: bool
) -> float:
    if not (m and n and k and batch):
        return 0.0
    rows, cols = gemm.tile
    tiles = batch * ceil(m / rows) * ceil(n / cols)
    waves = ceil(tiles / gemm.units) if whole else tiles / gemm.units
    rate = gemm.peak * gemm.efficiency * interpolate(gemm.shares, itemsize)
    busy = waves * gemm.units * 2.0 * rows * cols * k / rate
    moved = batch * (m * k + k * n) * itemsize + batch * m * n * (8 if wide else itemsize)
    return gemm.start + max(busy, moved / gemm.bandwidth)


@dataclass(frozen=True)
class Machine:
    """One kind of host. A block that is None was never measured; ``missing`` names such.

    Attributes:
        name: of the file, too.
        accelerator: name of the device as its driver gives it; the fingerprint of a host is this
            and ``ranks``.
        also: further names of the device.
        ranks: of the group that it describes.
        margin: predicted gain over serial below which serial is taken.
        source: the file it was read from, for people; no part of what machines agree on.
    """

    name: str
    accelerator: str
    ranks: Count
    also: tuple[str, ...] = ()
    topology: Topology | None = None
    copies: Copies | None = None
    kernel_copies: Copies | None = None
    collective: Collective | None = None
    gemm: Gemm | None = None
    memory: Memory | None = None
    contention: Contention | None = None
    host: Host | None = None
    thresholds: Thresholds | None = None
    tuned: tuple[Tuned, ...] = ()
    margin: Annotated[float, Quantity(least=0)] = 0.02
    source: str = field(default="", compare=False)
