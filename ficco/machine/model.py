"""Machines as data: what a simulation needs to know of ranks, links, copy engines and GEMMs.

All quantities are SI: bytes, seconds, bytes per second, floating-point operations per second.
Nothing here knows a device; files are read and written by :mod:`ficco.machine.files`, to which
the annotations are the schema.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, exp, inf, log
from typing import Annotated, Any

from ficco.problems.products import ITEMSIZE, Problem
from ficco.problems.scaling import SCALED, name_of
from ficco.problems.specification import AnyProblem


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

#: The blocks of a machine that collectives have, by what libraries call them.
COLLECTIVES = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "all-reduce": "all_reduce",
}

#: The blocks of a machine that products of float8 operands have, by recipe.
SCALED_PRODUCTS = {"tensor": "fp8_tensor", "row": "fp8_row", "block": "fp8_block"}

#: The blocks of a machine that say what a device does by itself, whatever joins it to others.
OF_DEVICE = ("gemm", *SCALED_PRODUCTS.values(), "experts", "tiled", "attention", "memory")

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
        command: what measured it.
        driver, torch, commit: versions of the device's driver and of PyTorch, and ficco's commit.
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
class Network:
    """What joins hosts, as the collectives' library moves bytes from rank to rank: a message of s
    bytes takes ``latency + s / bandwidth``, and is sent while another is received.

    Attributes:
        bandwidth: bytes per second one way of a network card.
        latency: seconds until a message of no bytes is there.
        sharing: ranks of a host that share a card.
    """

    bandwidth: ByteRate
    latency: Seconds
    provenance: Provenance
    sharing: Count = 1


@dataclass(frozen=True)
class Copies:
    """Copies between ranks by one kind of mover, as a queue of them behaves.

    A copy of s bytes holds its queue for ``gap + s / rate(s)`` and is seen by the waiter of its
    signal ``latency + s / rate(s)`` after it began.

    Attributes:
        engines: copies that one rank can have in flight at once.
        latency: seconds from a copy's begin to its signal being seen, beyond the bytes' time.
        gap: seconds between two copies of a queue, signal included.
        curve: (bytes, bytes per second) of one copy that has its link or port for itself.
        in_front: the latency of one on a compute lane, where nothing is forked and joined, as
            measured in front of a product; None: ``latency``.
    """

    engines: Count
    latency: Seconds
    gap: Seconds
    curve: RateCurve
    provenance: Provenance
    in_front: Seconds | None = None

    def rate(self, nbytes: float) -> float:
        """Bytes per second of a copy."""
        return interpolate(self.curve, nbytes)

    def seen(self, in_front: bool) -> float:
        """Seconds until the signal after a copy is seen, beyond the bytes' time."""
        return self.latency if self.in_front is None or not in_front else self.in_front


@dataclass(frozen=True)
class Collective:
    """A collective of the vendor's library.

    Attributes:
        curve: (bytes that a rank has for another, seconds). All-gather: bytes of a shard.
            Reduce-scatter and all-reduce: of the part of the result that a rank sums. All-to-all:
            of a block.
    """

    curve: TimeCurve
    provenance: Provenance

    def seconds(self, nbytes: float) -> float:
        """Seconds of the collective; beyond the curve at the rate of its end."""
        size, last = self.curve[-1]
        return interpolate(self.curve, nbytes) if nbytes <= size else last * nbytes / size


@dataclass(frozen=True)
class Contention:
    """Factors by which two things that run at the same time on a rank slow down (1: not at all).

    Attributes:
        gemm_under_copies: of a GEMM beside copies by copy engines (or the paper's CIL).
        copies_under_gemm: of these copies beside a GEMM.
        gemm_under_collective: of a GEMM beside the vendor's collective.
        collective_under_gemm: of that collective beside a GEMM.
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
        call: of a call, without what it enqueues, until an idle GPU begins.
        collective_call: the same of a call that goes through the vendor's collective.
        matmul: of each product that is enqueued.
        copy: of each copy that is enqueued.
        signal: of each batch of waits or posts that is enqueued.
        skew: between the first and the last rank whose host begins a call.
    """

    call: Seconds
    collective_call: Seconds
    matmul: Seconds
    copy: Seconds
    signal: Seconds
    provenance: Provenance
    skew: Seconds = 0.0


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

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError(
                f"required high of at least low, got low {self.low:g} and high {self.high:g}"
            )


@dataclass(frozen=True)
class Tuned:
    """The schedules that were measured fastest for one problem.

    Attributes:
        operator, n, k: of the Problem.
        rows: of the Problem on every rank.
        dtype: of the Problem, what it calls its kind of operands.
        blocks: of the Problem, the table of an all-to-all.
        queued: name of the schedule to take in a captured or host-ahead call.
        idle: name of the schedule to take in a call whose GPU waits for the host.
        seconds: measured time of ``queued``, then of ``idle``.
        serial: likewise of the faster serial composition.
    """

    operator: str
    rows: tuple[Size, ...]
    n: Size
    k: Size
    dtype: Annotated[str, OneOf((*ITEMSIZE, *SCALED))]
    queued: str
    idle: str
    seconds: tuple[Seconds, Seconds]
    serial: tuple[Seconds, Seconds]
    provenance: Provenance
    blocks: tuple[tuple[Size, ...], ...] = ()

    scaling = None  # whose name is that of the dtype


def tuned_key(one: Tuned | Problem) -> tuple[object, ...]:
    """What an entry is looked up by."""
    kind = name_of(one.dtype, one.scaling)
    return one.operator, tuple(one.rows), one.n, one.k, kind, tuple(one.blocks)


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
    """Library GEMMs of one rank, as waves of tiles.

    The result is cut into tiles, and into parts of k where there are fewer tiles than processors.
    The processors work on one tile each, wave after wave, and the last wave takes as long as a
    full one. A tile takes its prologue, its terms of k, and the writing of its result. The library
    has tiles of many shapes and takes the one that ends first. Memory limits the whole.

    What a library does beyond that, such as a poor choice for an odd shape, is not modelled: on
    shapes that the fit has not seen the errors that are left are no smooth function of the sizes,
    so that curves over rows and tables of corrections were tried and did not help.

    Attributes:
        peak: operations per second of the smallest dtype in ``shares``, from the data sheet.
        units: processors (SMs, CUs, cores) that work on one tile each.
        launch: seconds between two products of a lane, beyond their own time.
        efficiency: share of the peak at which full waves run.
        start: seconds of a product before its first and after its last tile.
        bandwidth: bytes per second at which operands and result are read and written at best.
        tile_rows, tile_cols: sizes of tiles; every pair of both is a tile that the library has.
        splits: numbers of parts that k can be cut into.
        prologue: seconds of a tile before its first term.
        step: seconds that every 64 terms of k take beyond their operations.
        write: bytes per second at which all processors together write results; None: at once.
        join: seconds before the parts of a split k are read back and summed.
        shares: (bytes per element, share of the peak) of the dtypes.
        burst: seconds of products in a call after which the card is at its power limit.
        sustained: share of its rate that is left then. See :meth:`heated`.
    """

    peak: FlopRate
    units: Count
    launch: Seconds
    efficiency: Share
    start: Seconds
    bandwidth: ByteRate
    provenance: Provenance
    tile_rows: tuple[Count, ...] = (1,)
    tile_cols: tuple[Count, ...] = (1,)
    splits: tuple[Count, ...] = (1,)
    prologue: Seconds = 0.0
    step: Seconds = 0.0
    write: ByteRate | None = None
    join: Seconds = 0.0
    shares: Annotated[Curve, Points("", "")] = ((2, 1.0),)
    burst: Seconds = inf
    sustained: Share = 1.0

    def __hash__(self) -> int:
        # Times are looked up by the machine they are of: its hash must not cost more than they do.
        return hash((self.peak, self.efficiency, self.start, self.bandwidth, self.write))

    def rate(self, itemsize: int) -> float:
        """Operations per second of full waves of a dtype."""
        return self.peak * self.efficiency * interpolate(self.shares, itemsize)

    def times(
        self,
        m: int,
        n: int,
        k: int,
        *,
        batch: int = 1,
        itemsize: int = 2,
        wide: bool = False,
        adds: bool = False,
        rights: int = 1,
    ) -> tuple[float, float]:
        """Seconds of a product, or of a strided batch of such, on an otherwise idle rank, and what
        it costs one that others keep busy: they fill its start and last wave.

        ``wide``: the result is float32 and is added to. ``adds``: it is added to, and of the
        operands' dtype. ``rights``: right operands of the batch; 1 if all share it.
        """
        return _times(self, m, n, k, batch, itemsize, wide, adds, rights)[:2]

    def seconds(self, m: int, n: int, k: int, **how: Any) -> float:
        """The first of :meth:`times`."""
        return self.times(m, n, k, **how)[0]

    def tile(self, m: int, n: int, k: int, *, itemsize: int = 2) -> tuple[int, int, int]:
        """Rows and columns of the tiles of a product, and the parts of k in which each is made."""
        return _times(self, m, n, k, 1, itemsize, False, False)[2]

    def waves(self, rows: int, m: int, n: int, k: int, *, itemsize: int = 2) -> int:
        """Waves of tiles after which the first ``rows`` of a product's m rows are complete."""
        height, width, split = self.tile(m, n, k, itemsize=itemsize)
        return -(-(-(-rows // height) * -(-n // width) * split) // self.units)

    def heated(self, seconds: float) -> float:
        """Seconds that all products of a call take, of so many seconds one by one.

        Products of more than ``burst`` seconds in a row bring a card to its power limit. The other
        methods are of one that is not there.
        """
        return seconds + max(0.0, seconds - self.burst) * (1 / self.sustained - 1)


def tiles_seconds(
    gemm: Gemm,
    rows: int,
    cols: int,
    parts: Any,
    terms: Any,
    itemsize: Any,
    wide: Any,
    rate: Any,
    adds: bool = False,
) -> tuple[Any, Any]:
    """Seconds in which the processors work on parts, in whole waves and with the last one filled.

    ``parts``: tiles times the parts of k, of ``terms`` each; ``rate``: operations per second of all
    processors. Numbers, or arrays of them.
    """
    result = rows * cols * result_bytes(itemsize, wide, adds)
    each = gemm.prologue + terms * (gemm.step / 64 + 2.0 * rows * cols * gemm.units / rate)
    if gemm.write:
        each = each + result * gemm.units / gemm.write
    return -(-parts // gemm.units) * each, parts / gemm.units * each


def result_bytes(itemsize: Any, wide: Any, adds: bool = False) -> Any:
    """Bytes that an element of the result moves: what is added to is read, too; wide is float32.
    The product of one-byte operands has two bytes, and is added to sums by a pass of its own."""
    narrow = itemsize == 1
    itemsize = itemsize + narrow
    return itemsize + (8 + 8 * narrow - itemsize) * wide + itemsize * adds


def memory_seconds(
    gemm: Gemm,
    m: Any,
    n: Any,
    k: Any,
    batch: Any,
    itemsize: Any,
    wide: Any,
    adds: bool = False,
    rights: Any = 1,
) -> Any:
    """Seconds in which the operands are read and the result is written; numbers, or arrays."""
    result = batch * m * n * result_bytes(itemsize, wide, adds)
    return ((batch * m * k + rights * k * n) * itemsize + result) / gemm.bandwidth


def join_seconds(gemm: Gemm, m: Any, n: Any, batch: Any, split: int) -> Any:
    """Seconds in which float32 sums of the parts of k are written, read and added."""
    return gemm.join + batch * m * n * 8.0 * split / gemm.bandwidth if split > 1 else 0.0


def both(busy: Any, memory: Any) -> Any:
    """Seconds of what two limits slow: nearly the greater, more where they are about equal."""
    return (busy**3 + memory**3) ** (1 / 3)


@lru_cache(maxsize=1 << 16)
def _times(
    gemm: Gemm,
    m: int,
    n: int,
    k: int,
    batch: int,
    itemsize: int,
    wide: bool,
    adds: bool,
    rights: int = 1,
) -> tuple[float, float, tuple[int, int, int]]:
    """Seconds on an otherwise idle rank, and on one that other products keep busy; rows and columns
    of the tiles, and the parts of k."""
    tile = 1, 1, 1
    if not (m and n and k and batch):
        return 0.0, 0.0, tile
    rate = gemm.rate(itemsize)
    best = best_filled = inf
    for rows in gemm.tile_rows:
        down = batch * -(-m // rows)
        for cols in gemm.tile_cols:
            tiles = down * -(-n // cols)
            for split in gemm.splits:
                parts = tiles * split
                if split > 1 and parts > gemm.units:
                    break
                busy, filled = tiles_seconds(
                    gemm, rows, cols, parts, k / split, itemsize, wide, rate, adds
                )
                joined = join_seconds(gemm, m, n, batch, split)
                if busy + joined < best:
                    best, best_filled = busy + joined, filled + joined
                    tile = rows, cols, split
    memory = memory_seconds(gemm, m, n, k, batch, itemsize, wide, adds, rights)
    return gemm.start + both(best, memory), both(best_filled, memory), tile


#: What attention that was never measured takes: the rate as a share of that of full waves of
#: products, and the seconds of a block of queries beyond it. Of cuDNN on an H100, with 32 heads of
#: size 128, a wave takes 5 us and 11.2 ns for each key, in whole rectangles of 1024 and 2048
#: queries, 2048 and 4096 keys (2026-11-26). With h100-8's other figures, plans take 8 % less to 3 %
#: more than what was measured for 16k positions, within 2 % for 64k and 3 to 13 % less for 128k
#: (docs/results/attention-h100-1.csv).
ATTENTION, BLOCK_S = 0.9, 5e-6
#: Below this share of what they would be if all blocks were as large as the largest, operations are
#: those of a mask. A call then has processors without work for LAST_BLOCK of the largest's time: of
#: groups of heads on 2 H100 (16384 causal positions, 16 heads of a rank) calls took 0.12 ms longer
#: than their share, where the largest block takes 0.22.
ALIKE, LAST_BLOCK = 0.9, 0.5


def attention_loads(
    units: int, blocks: int, flops: float, longest: float
) -> tuple[float, float, float]:
    """What each of so many processors does in a call of attention: blocks of queries, operations,
    and those for which it has no work before the last one is done."""
    waves = blocks / units
    last = ceil(waves) - waves  # of blocks that are all alike
    if flops < ALIKE * blocks * longest:
        last = LAST_BLOCK
    return waves, flops / units, last * longest


@dataclass(frozen=True)
class AttentionCalls:
    """Calls of a library's attention, as blocks of queries that processors share.

    Attributes:
        start: seconds of a call before its first and after its last block.
        block: seconds that a block of queries takes beyond its operations.
        shares: (size of a head, rate as a share of that of full waves of products).
        backward: the same of backwards; None: ``shares``.
        backward_start: seconds that a backward takes beyond ``start``, for its further kernels.
    """

    start: Seconds
    block: Seconds
    shares: Annotated[Curve, Points("", "")]
    provenance: Provenance
    backward: Annotated[Curve, Points("", "")] | None = None
    backward_start: Seconds = 0.0

    def times(
        self,
        gemm: Gemm,
        itemsize: int,
        blocks: int,
        flops: float,
        longest: float,
        size: int,
        back: bool,
    ) -> tuple[float, float]:
        """Seconds of a call on an otherwise idle rank, and what it costs one that others keep busy:
        they fill its start and the processors that are done before the last. The call is given as
        ``ficco.problems.mask.LibraryCall`` has it."""
        if not flops:
            return 0.0, 0.0
        waves, work, idle = attention_loads(gemm.units, blocks, flops, longest)
        shares = (back and self.backward) or self.shares
        rate = interpolate(shares, size) * gemm.rate(itemsize) / gemm.units
        start = self.start + back * self.backward_start
        filled = waves * self.block + work / rate
        return start + filled + idle / rate, filled


@dataclass(frozen=True)
class Machine:
    """One kind of host. A block that is None was never measured.

    Attributes:
        name: of the file, too.
        topology: how ranks are joined.
        copies: between ranks, by copy engines.
        kernel_copies: between ranks, by ficco's copy kernel.
        gemm: products of the library.
        tiled: the product whose tiles wait for signals.
        experts: batches of products of the library with a right operand each; None: as of
            ``gemm``.
        fp8_tensor: products of the library of float8 operands, with a scale for each operand.
        fp8_row: the same, with scales of rows.
        fp8_block: the same, with scales of blocks. See :meth:`products`.
        all_gather, reduce_scatter, all_to_all: the collective of the vendor's library.
        all_reduce: the same. See :meth:`exchange` for one that was not measured.
        accelerator: name of the device as its driver gives it; the fingerprint of a host is this
            and ``ranks``.
        also: further names of the device.
        ranks: of the group that it describes, or of each of its hosts.
        network: what joins hosts; None where there is one only.
        attention: calls of the library's attention. See :meth:`attends`.
        memory: of one rank.
        contention: how products and communication slow each other down.
        host: what a call costs its host.
        thresholds: of the rule of FiCCO, section V-C.
        tuned: problems whose candidates were all measured, with the fastest.
        margin: predicted gain over serial below which serial is taken.
        source: the file it was read from, for people; no part of what machines agree on.
    """

    name: str
    accelerator: str
    ranks: Count
    also: tuple[str, ...] = ()
    topology: Topology | None = None
    network: Network | None = None
    copies: Copies | None = None
    kernel_copies: Copies | None = None
    all_gather: Collective | None = None
    reduce_scatter: Collective | None = None
    all_to_all: Collective | None = None
    all_reduce: Collective | None = None
    gemm: Gemm | None = None
    fp8_tensor: Gemm | None = None
    fp8_row: Gemm | None = None
    fp8_block: Gemm | None = None
    tiled: Gemm | None = None
    experts: Gemm | None = None
    attention: AttentionCalls | None = None
    memory: Memory | None = None
    contention: Contention | None = None
    host: Host | None = None
    thresholds: Thresholds | None = None
    tuned: tuple[Tuned, ...] = ()
    margin: Annotated[float, Quantity(least=0)] = 0.02
    source: str = field(default="", compare=False)

    def products(self, problem: AnyProblem) -> Gemm | None:
        """The library's products of a problem: those of its recipe of float8 or, if it was never
        measured, all others at the rate of their narrowest dtype."""
        scaling = problem.scaling
        own: Gemm | None = getattr(self, SCALED_PRODUCTS[scaling.recipe]) if scaling else None
        return own or self.gemm

    def with_devices_of(self, other: Machine) -> Machine:
        """Ranks that are joined like these, and that work by themselves like those of another."""
        return replace(self, **{block: getattr(other, block) for block in OF_DEVICE})

    def attends(self, gemm: Gemm) -> AttentionCalls:
        """The library's attention beside these products; :data:`ATTENTION` where it was never
        measured."""
        assumed = AttentionCalls(gemm.start, BLOCK_S, ((128, ATTENTION),), Provenance("assumed"))
        return self.attention or assumed

    def unmeasured(self, problem: AnyProblem) -> str:
        """The block that :meth:`products` would take and that was never measured, if any."""
        block = SCALED_PRODUCTS[problem.scaling.recipe] if problem.scaling else ""
        return block if block and getattr(self, block) is None else ""

    def exchange(self, collective: str, nbytes: float, hosts: int = 1) -> float:
        """Seconds of a collective in which a rank has so many bytes for another.

        One without a block of its own takes as long as the all-gather that brings as many bytes to
        every rank, and an all-reduce as a reduce-scatter and an all-gather. Over several hosts it
        takes as long as the slower of two: what a host exchanges inside, and what a rank exchanges
        with its rail, each byte once (assumed, never measured).

        Args:
            collective: a key of :data:`COLLECTIVES`.
            nbytes: as the curve of a :class:`Collective` counts them.
            hosts: of so many ranks each as the machine has.

        Raises:
            ValueError: neither it nor the all-gather was measured, or there is no network.
        """
        if not nbytes:
            return 0.0
        if hosts > 1:
            if self.network is None:
                raise ValueError(f"machine {self.name}: required the block 'network', got none")
            direct, both_ways = collective == "all-to-all", collective == "all-reduce"
            inside = self.exchange(collective, nbytes * (1 if direct else hosts))
            sent = (hosts - 1) * nbytes * (self.ranks if direct else 1) * (1 + both_ways)
            card = self.network.bandwidth / self.network.sharing
            return self.network.latency + max(inside if self.ranks > 1 else 0.0, sent / card)
        own: Collective | None = getattr(self, COLLECTIVES[collective])
        if own is not None:
            return own.seconds(nbytes)
        if self.all_gather is None:
            raise ValueError(
                f"machine {self.name}: required the block 'all_gather' or "
                f"{COLLECTIVES[collective]!r}, got none"
            )
        if collective == "all-reduce":
            return self.exchange("reduce-scatter", nbytes) + self.all_gather.seconds(nbytes)
        return self.all_gather.seconds(nbytes)
