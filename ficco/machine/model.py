"""Machines as data: what a simulation needs to know of ranks, links, copy engines and GEMMs.

All quantities are SI: bytes, seconds, bytes per second, floating-point operations per second.
Nothing here knows a device; files are read and written by :mod:`ficco.machine.files`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from math import exp, log

#: (size, value) with rising sizes.
Curve = tuple[tuple[float, float], ...]


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

    source: str
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

    kind: str
    bandwidth: float
    provenance: Provenance
    sharing: float = 1.0


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

    engines: int
    latency: float
    gap: float
    curve: Curve
    provenance: Provenance

    def rate(self, nbytes: float) -> float:
        """Bytes per second of a copy."""
        return interpolate(self.curve, nbytes)


@dataclass(frozen=True)
class Collective:
    """The vendor's all-gather: (bytes that each rank contributes, seconds)."""

    curve: Curve
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

    gemm_under_copies: float
    copies_under_gemm: float
    gemm_under_collective: float
    collective_under_gemm: float
    provenance: Provenance


@dataclass(frozen=True)
class Host:
    """Seconds of host time; they count where a GPU waits for its host ("idle").

    Attributes:
        call: of a call, beside what it enqueues, and ``collective_call`` of one that goes through
            the vendor's collective instead.
        matmul, copy, signal: of each product, copy, and batch of waits or posts enqueued.
    """

    call: float
    collective_call: float
    matmul: float
    copy: float
    signal: float
    provenance: Provenance


@dataclass(frozen=True)
class Thresholds:
    """Where the rule of FiCCO, section V-C, changes its mind, in FLOPs of one rank's product.

    Attributes:
        low: below it uniform-fused-1d.
        high: above it hetero-unfused-1d; hetero-fused-1d between (the paper: 5 times ``low``).
    """

    low: float
    high: float
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
    rows: tuple[int, ...]
    n: int
    k: int
    dtype: str
    queued: str
    idle: str
    seconds: tuple[float, float]
    serial: tuple[float, float]
    provenance: Provenance


@dataclass(frozen=True)
class Machine:
    """One kind of host. A block that is None was never measured; ``missing`` names such.

    Attributes:
        name: of the file, too.
        accelerator: name of the device as its driver gives it; the fingerprint of a host is this
            and ``ranks``.
        ranks: of the group that it describes.
        margin: predicted gain over serial below which serial is taken.
        source: the file it was read from, for people; no part of what machines agree on.
    """

    name: str
    accelerator: str
    ranks: int
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
    margin: float = 0.02
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class Memory:
    """The memory of one rank: bytes, bytes per second, and seconds before a copy within it."""

    capacity: float
    bandwidth: float
    provenance: Provenance
    latency: float = 3e-6


@dataclass(frozen=True)
class Gemm:
    """Library GEMMs of one rank. See :meth:`seconds` for the model."""

    peak: float
    provenance: Provenance
