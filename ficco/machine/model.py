"""Machines as data: the figures of ranks, links, copy engines and GEMMs for simulations.

All quantities are SI: bytes, seconds, bytes per second, floating-point operations per second. The
module accesses no device. :mod:`ficco.machine.files` reads and writes files; the annotations here
are its schema.
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
    """The unit and the bounds of a number in a file; the unit of a plain number is empty."""

    unit: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None

    def allows(self, value: float) -> bool:
        """Whether a value is within the bounds."""
        return not (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
        )

    def show(self) -> str:
        """The requirement in words."""
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
        """The units in words."""
        return f"{self.x or 'number'}, {self.y or 'number'}"


@dataclass(frozen=True)
class OneOf:
    """The texts that a field may have."""

    texts: tuple[str, ...]


Size = Annotated[int, Quantity(least=0)]
Count = Annotated[int, Quantity(least=1)]
Factor = Annotated[float, Quantity(least=1)]
Share = Annotated[float, Quantity(above=0, most=1)]
Seconds = Annotated[float, Quantity("s", least=0)]
Duration = Annotated[float, Quantity("s", above=0)]
Flops = Annotated[float, Quantity("FLOP", least=0)]
FlopRate = Annotated[float, Quantity("FLOP/s", above=0)]
Bytes = Annotated[float, Quantity("B", above=0)]
ByteRate = Annotated[float, Quantity("B/s", above=0)]

#: Points (size, value) with rising sizes.
Curve = tuple[tuple[float, float], ...]
RateCurve = Annotated[Curve, Points("B", "B/s")]
TimeCurve = Annotated[Curve, Points("B", "s")]

#: The block of a machine for each collective of a library.
COLLECTIVES = {
    name: name.replace("-", "_")
    for name in ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")
}

#: The block of a machine for products of float8 operands, by recipe.
SCALED_PRODUCTS = {"tensor": "fp8_tensor", "row": "fp8_row", "block": "fp8_block"}

#: The blocks of a machine with figures of one device, which do not depend on its links.
OF_DEVICE = ("gemm", *SCALED_PRODUCTS.values(), "experts", "tiled", "attention", "memory")

#: Sources of figures.
SOURCES = ("measured", "fitted", "data sheet", "paper", "simulated", "assumed")


def interpolate(curve: Curve, size: float) -> float:
    """The value of a curve at a size: linear in log-log space, and constant beyond the ends."""
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
    """The origin of the figures of a block.

    Attributes:
        source: ``"measured"``, ``"fitted"`` (to measurements), ``"data sheet"``, ``"paper"``,
            ``"simulated"`` or ``"assumed"``.
        date: ISO date of measured or fitted figures.
        command: the command that measured them.
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
    """The links between ranks.

    Attributes:
        kind: ``"mesh"``, a separate link for every pair, or ``"switch"``, one port for every rank.
        bandwidth: bytes per second one way, of a link (mesh) or of a port (switch).
        sharing: share of the bandwidth that remains in total when several copies use a link or a
            port at the same time.
    """

    kind: Annotated[str, OneOf(("mesh", "switch"))]
    bandwidth: ByteRate
    provenance: Provenance
    sharing: Share = 1.0


@dataclass(frozen=True)
class Network:
    """The network between hosts, as used by the library of collectives: a message of s bytes takes
    ``latency + s / bandwidth``, and one can be sent while another is received.

    Attributes:
        bandwidth: bytes per second one way of a network card.
        latency: seconds until an empty message arrives.
        sharing: ranks of a host that share a card.
    """

    bandwidth: ByteRate
    latency: Seconds
    provenance: Provenance
    sharing: Count = 1


#: Seconds by which two exchanges of one launch take longer than one, assumed, never measured.
SECOND_S = 2e-6


@dataclass(frozen=True)
class Copies:
    """Copies between ranks by one kind of mover, in a queue.

    A copy of s bytes occupies its queue for ``gap + s / rate(s)``. The waiter sees its signal
    ``latency + s / rate(s)`` after the copy starts.

    Attributes:
        engines: copies that one rank can have in flight at once.
        latency: seconds from the start of a copy until its signal is seen, beyond the time of its
            bytes.
        gap: seconds between two copies of a queue, including the signal.
        curve: (bytes, bytes per second) of one copy that does not share its link or port.
        in_front: latency of a copy on a compute lane, which needs no fork and join, measured
            before a product; None: ``latency``.
        two_shot: latency of both exchanges of a two-shot together, beyond the time of their bytes;
            None: assumed from ``in_front``.
    """

    engines: Count
    latency: Seconds
    gap: Seconds
    curve: RateCurve
    provenance: Provenance
    in_front: Seconds | None = None
    two_shot: Seconds | None = None

    def rate(self, nbytes: float) -> float:
        """Bytes per second of a copy."""
        return interpolate(self.curve, nbytes)

    def seen(self, in_front: bool) -> float:
        """Seconds until the signal of a copy is seen, beyond the time of its bytes."""
        return self.latency if self.in_front is None or not in_front else self.in_front

    @property
    def exchanged(self) -> float:
        """Seconds of both exchanges of a two-shot, beyond the time of their bytes."""
        return self.seen(True) + SECOND_S if self.two_shot is None else self.two_shot


@dataclass(frozen=True)
class Collective:
    """A collective of the vendor's library.

    Attributes:
        curve: (bytes that a rank sends to another, seconds). All-gather: bytes of a shard.
            Reduce-scatter and all-reduce: bytes of the part of the result that a rank sums.
            All-to-all: bytes of a block.
    """

    curve: TimeCurve
    provenance: Provenance

    def seconds(self, nbytes: float) -> float:
        """Seconds of the collective. Beyond the curve, the rate of its last point is used."""
        size, last = self.curve[-1]
        return interpolate(self.curve, nbytes) if nbytes <= size else last * nbytes / size


@dataclass(frozen=True)
class Contention:
    """Slow-down factors of two operations that run at the same time on a rank (1: no slow-down).

    Attributes:
        gemm_under_copies: of a GEMM during copies by copy engines (or the paper's CIL).
        copies_under_gemm: of copies by copy engines during a GEMM.
        gemm_under_collective: of a GEMM during the vendor's collective.
        collective_under_gemm: of the vendor's collective during a GEMM.
    """

    gemm_under_copies: Factor
    copies_under_gemm: Factor
    gemm_under_collective: Factor
    collective_under_gemm: Factor
    provenance: Provenance


@dataclass(frozen=True)
class Host:
    """Seconds of host time. They count only if the GPU waits for its host ("idle").

    Attributes:
        call: per call, until an idle GPU begins, without enqueueing operations.
        collective_call: the same for a call that uses the vendor's collective.
        matmul: per product that is enqueued.
        copy: per copy that is enqueued.
        signal: per batch of waits or posts that is enqueued.
        tiled: more, until a product whose tiles wait begins: it is launched after the recording of
            all other operations. None: estimated from ``call``.
        skew: between the first and the last rank whose host begins a call.
    """

    call: Seconds
    collective_call: Seconds
    matmul: Seconds
    copy: Seconds
    signal: Seconds
    provenance: Provenance
    tiled: Seconds | None = None
    skew: Seconds = 0.0


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the rule of FiCCO, section V-C, in FLOPs of one rank's product.

    Attributes:
        low: below it, the rule takes uniform-fused-1d.
        high: above it, the rule takes hetero-unfused-1d; between the two, hetero-fused-1d. In the
            paper it is 5 times ``low``.
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
        dtype: ``kind_of_operands`` of the Problem.
        blocks: of the Problem, the table of an all-to-all.
        queued: name of the schedule to take in a captured or host-ahead call.
        idle: name of the schedule to take in a call whose GPU waits for the host.
        seconds: measured time of ``queued``, then of ``idle``.
        serial: measured times of the faster serial composition, in the same order.
    """

    operator: str
    rows: tuple[Size, ...]
    n: Size
    k: Size
    dtype: Annotated[str, OneOf((*ITEMSIZE, *SCALED))]
    queued: str
    idle: str
    seconds: tuple[Duration, Duration]
    serial: tuple[Seconds, Seconds]
    provenance: Provenance
    blocks: tuple[tuple[Size, ...], ...] = ()

    scaling = None  # the dtype names the scaling


def tuned_key(one: Tuned | Problem) -> tuple[object, ...]:
    """The key by which entries are looked up."""
    kind = name_of(one.dtype, one.scaling)
    return one.operator, tuple(one.rows), one.n, one.k, kind, tuple(one.blocks)


@dataclass(frozen=True)
class Memory:
    """The memory of one rank.

    Attributes:
        capacity: bytes.
        bandwidth: bytes per second.
        latency: seconds before a copy within the memory begins.
    """

    capacity: Bytes
    bandwidth: ByteRate
    provenance: Provenance
    latency: Seconds = 3e-6


@dataclass(frozen=True)
class Gemm:
    """Library GEMMs of one rank, as waves of tiles.

    The result is cut into tiles, and k into parts if there are fewer tiles than processors. Each
    processor works on one tile, wave after wave, and the last wave takes as long as a full one. The
    time of a tile is its prologue, its terms of k, and the writing of its result. The library has
    tiles of many shapes and takes the one that finishes first. Memory limits the product as a
    whole.

    Other behaviour of a library, such as a poor choice for an odd shape, is not modelled. On shapes
    that the fit has not seen, the remaining errors are no smooth function of the sizes. Curves over
    rows and tables of corrections were tried and did not help.

    Attributes:
        peak: operations per second of the smallest dtype in ``shares``, from the data sheet.
        units: processors (SMs, CUs, cores); each works on one tile at a time.
        launch: seconds between two products of a lane, beyond their times.
        efficiency: share of the peak that full waves reach.
        start: seconds of a product before its first and after its last tile.
        bandwidth: highest bytes per second of reading operands and writing the result.
        tile_rows, tile_cols: sizes of tiles; the library has tiles of every pair of the two.
        splits: numbers of parts into which k can be cut.
        prologue: seconds of a tile before its first term.
        step: seconds of every 64 terms of k beyond their operations.
        write: bytes per second that all processors together write; None: writing takes no time.
        join: seconds before the parts of a split k are read back and summed.
        shares: (bytes per element, share of the peak) of the dtypes.
        burst: seconds of products in a call after which the card reaches its power limit.
        sustained: share of its rate that remains at the power limit. See :meth:`heated`.
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

    def __post_init__(self) -> None:
        for name in ("tile_rows", "tile_cols", "splits"):
            if not getattr(self, name):
                raise ValueError(f"required at least one number in {name}, got none")

    def __hash__(self) -> int:
        # Cached times are looked up by Gemm, so its hash must be cheaper than computing a time.
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
        """Seconds of a product, or of a strided batch of products: on an otherwise idle rank, and
        on a busy rank, where other products fill its start and its last wave.

        ``wide``: the product is added to a float32 result. ``adds``: it is added to a result of the
        operands' dtype. ``rights``: right operands of the batch; 1 if all products share one.
        """
        return _times(self, m, n, k, batch, itemsize, wide, adds, rights)[:2]

    def seconds(self, m: int, n: int, k: int, **options: Any) -> float:
        """Seconds on an otherwise idle rank: the first of :meth:`times`."""
        return self.times(m, n, k, **options)[0]

    def tile(self, m: int, n: int, k: int, *, itemsize: int = 2) -> tuple[int, int, int]:
        """Rows and columns of the tiles of a product, and the number of parts of k."""
        return _times(self, m, n, k, 1, itemsize, False, False)[2]

    def waves(self, rows: int, m: int, n: int, k: int, *, itemsize: int = 2) -> int:
        """Waves of tiles after which the first ``rows`` of a product's m rows are complete."""
        height, width, split = self.tile(m, n, k, itemsize=itemsize)
        return -(-(-(-rows // height) * -(-n // width) * split) // self.units)

    def heated(self, seconds: float) -> float:
        """Seconds of all products of a call, if their times add up to ``seconds``.

        After ``burst`` seconds of products in a row, a card is at its power limit. The other
        methods return times below the power limit.
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
    """Seconds of all tiles: in full waves, and if other work fills the last wave.

    ``parts``: tiles times the parts of k, of ``terms`` terms each. ``rate``: operations per second
    of all processors. Arguments are numbers or arrays.
    """
    written = rows * cols * result_bytes(itemsize, wide, adds)
    per_part = gemm.prologue + terms * (gemm.step / 64 + 2.0 * rows * cols * gemm.units / rate)
    if gemm.write:
        per_part = per_part + written * gemm.units / gemm.write
    return -(-parts // gemm.units) * per_part, parts / gemm.units * per_part


def result_bytes(itemsize: Any, wide: Any, adds: bool) -> Any:
    """Bytes read and written per element of the result. A result that is added to is read, too; a
    wide result is float32. Results of one-byte operands have two bytes; a separate pass adds them
    to wide sums."""
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
    """Seconds of reading the operands and writing the result. Arguments are numbers or arrays."""
    written = batch * m * n * result_bytes(itemsize, wide, adds)
    return ((batch * m * k + rights * k * n) * itemsize + written) / gemm.bandwidth


def join_seconds(gemm: Gemm, m: Any, n: Any, batch: Any, split: int) -> Any:
    """Seconds of writing, reading and adding the float32 sums of the parts of k."""
    return gemm.join + batch * m * n * 8.0 * split / gemm.bandwidth if split > 1 else 0.0


def both(busy: Any, memory: Any) -> Any:
    """Seconds under two limits: about the greater one, and more if the two are about equal."""
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
    """Seconds on an otherwise idle rank, seconds on a rank that is busy with other products, and
    (rows of tiles, columns of tiles, parts of k)."""
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
                join = join_seconds(gemm, m, n, batch, split)
                if busy + join < best:
                    best, best_filled = busy + join, filled + join
                    tile = rows, cols, split
    memory = memory_seconds(gemm, m, n, k, batch, itemsize, wide, adds, rights)
    return gemm.start + both(best, memory), both(best_filled, memory), tile


#: Figures of attention that was never measured: its rate as a share of the rate of full waves of
#: products, and additional seconds per block of queries. For cuDNN on an H100, with 32 heads of
#: size 128, a wave takes 5 us plus 11.2 ns per key, in whole rectangles of 1024 and 2048 queries,
#: 2048 and 4096 keys (2026-11-26). With the other figures of h100-8, predicted plans are 8 % below
#: to 3 % above measurements for 16k positions, within 2 % for 64k and 3 to 13 % below for 128k
#: (docs/results/attention-h100-1.csv).
ATTENTION, BLOCK_S = 0.9, 5e-6
#: If the operations are below the share ALIKE of blocks times the largest block, a mask made the
#: blocks unequal. Processors then idle for LAST_BLOCK of the largest block's time at the end of a
#: call: for groups of heads on 2 H100 (16384 causal positions, 16 heads of a rank) calls took
#: 0.12 ms longer than their share, and the largest block takes 0.22 ms.
ALIKE, LAST_BLOCK = 0.9, 0.5


def attention_loads(
    units: int, blocks: int, flops: float, longest: float
) -> tuple[float, float, float]:
    """Load of each processor in a call of attention, on average: blocks of queries, operations, and
    idle time at the end, in operations."""
    waves = blocks / units
    idle_blocks = ceil(waves) - waves  # if all blocks are alike
    if flops < ALIKE * blocks * longest:
        idle_blocks = LAST_BLOCK
    return waves, flops / units, idle_blocks * longest


@dataclass(frozen=True)
class AttentionCalls:
    """Calls of a library's attention, as blocks of queries that are distributed to processors.

    Attributes:
        start: seconds of a call before its first and after its last block.
        block: seconds of a block of queries beyond its operations.
        shares: (head size, rate as a share of the rate of full waves of products).
        backward: the same for the backward; None: ``shares``.
        backward_start: seconds of a backward beyond ``start``, for its additional kernels.
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
        """Seconds of a call on an otherwise idle rank, and on a busy rank, where other work fills
        its start and the processors that finish early. The arguments of a call are the fields of
        ``ficco.problems.mask.LibraryCall``."""
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
    """The figures of one kind of host. A block that is None was never measured.

    Attributes:
        name: name of the machine and of its file.
        topology: the links between ranks.
        copies: copies between ranks by copy engines.
        kernel_copies: copies between ranks by ficco's copy kernel.
        gemm: products of the library.
        tiled: the product whose tiles wait for signals.
        experts: batches of library products, each with a separate right operand; None: ``gemm``.
        fp8_tensor: library products of float8 operands, with a scale for each operand.
        fp8_row: the same, with scales of rows.
        fp8_block: the same, with scales of blocks. See :meth:`products`.
        all_gather, reduce_scatter, all_to_all: the collective of the vendor's library.
        all_reduce: the same. See :meth:`exchange` for a collective that was not measured.
        accelerator: the driver's name of the device. The fingerprint of a host is this name and
            ``ranks``.
        also: further names of the device.
        ranks: ranks of the group, or of each of its hosts.
        network: the network between hosts; None for a single host.
        attention: calls of the library's attention. See :meth:`attends`.
        memory: memory of one rank.
        contention: how products and communication slow each other down.
        host: host time of calls.
        thresholds: thresholds of the rule of FiCCO, section V-C.
        tuned: problems whose candidates were all measured, with the fastest.
        margin: predicted gain over serial below which serial is taken.
        largest_copy: bytes of the longest copy that the engine enqueues, which cuts longer ones; 0:
            no limit. A runtime can hang on a longer copy, or leave bytes out.
        batched_copies: bytes of the longest copies of which a lane submits several to different
            peers at once (HIP); 0: it submits each by itself.
        source: the file it was read from, for human readers. Ranks need not agree on it.
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
    largest_copy: Annotated[int, Quantity("B", least=0)] = 0
    batched_copies: Annotated[int, Quantity("B", least=0)] = 0
    source: str = field(default="", compare=False)

    def products(self, problem: AnyProblem) -> Gemm | None:
        """Figures of the library's products of a problem: those of its float8 recipe. If the recipe
        was never measured, ``gemm``, at the rate of its narrowest dtype."""
        scaling = problem.scaling
        scaled: Gemm | None = getattr(self, SCALED_PRODUCTS[scaling.recipe]) if scaling else None
        return scaled or self.gemm

    def with_devices_of(self, other: Machine) -> Machine:
        """This machine with the device figures of another: same links, other devices."""
        return replace(self, **{block: getattr(other, block) for block in OF_DEVICE})

    def attends(self, gemm: Gemm) -> AttentionCalls:
        """Figures of the library's attention; :data:`ATTENTION` of the rate of ``gemm`` if
        attention was never measured."""
        assumed = AttentionCalls(gemm.start, BLOCK_S, ((128, ATTENTION),), Provenance("assumed"))
        return self.attention or assumed

    def unmeasured(self, problem: AnyProblem) -> str:
        """The block that :meth:`products` needs, if it was never measured; empty otherwise."""
        block = SCALED_PRODUCTS[problem.scaling.recipe] if problem.scaling else ""
        return block if block and getattr(self, block) is None else ""

    def exchange(self, collective: str, nbytes: float, hosts: int = 1) -> float:
        """Seconds of a collective in which a rank sends ``nbytes`` to each other rank.

        A collective that was not measured takes as long as the all-gather that sends as many bytes
        to every rank, and an all-reduce as long as a reduce-scatter and an all-gather. Over several
        hosts it takes the longer of two times: the exchange within a host, and the exchange of a
        rank with its rail, each byte once (assumed, never measured).

        Args:
            collective: a key of :data:`COLLECTIVES`.
            nbytes: bytes as in :attr:`Collective.curve`.
            hosts: number of hosts, with ``ranks`` ranks each.

        Raises:
            ValueError: neither the collective nor the all-gather was measured, or the machine has
                no network.
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
        measured: Collective | None = getattr(self, COLLECTIVES[collective])
        if measured is not None:
            return measured.seconds(nbytes)
        if self.all_gather is None:
            raise ValueError(
                f"machine {self.name}: required the block 'all_gather' or "
                f"{COLLECTIVES[collective]!r}, got none"
            )
        if collective == "all-reduce":
            return self.exchange("reduce-scatter", nbytes) + self.all_gather.seconds(nbytes)
        return self.all_gather.seconds(nbytes)


#: Bytes at the ends of a curve of one rate; the curve is constant beyond its ends.
_LEAST, _MOST = 1.0, 1e15


def flat(
    flops: float,
    link_bytes: float,
    memory_bytes: float,
    *,
    ranks: int = 2,
    kind: str = "switch",
    start: float = 0.0,
    source: str = "assumed",
) -> Machine:
    """A Machine on which products, copies and memory have one rate each.

    Args:
        flops: floating-point operations per second of any product.
        link_bytes: bytes per second of a copy, and of a link or port.
        memory_bytes: bytes per second of reads and writes within a rank.
        ranks: number of ranks. The collective transfers the shards of all peers one by one.
        kind: topology, ``"switch"`` or ``"mesh"``.
        start: seconds before the first byte of a copy, or the first tile of a product.
        source: where the numbers come from.
    """
    provenance = Provenance(source)
    copies = Copies(64, start, start, ((_MOST, link_bytes),), provenance)
    return Machine(
        name="flat",
        accelerator="",
        ranks=ranks,
        topology=Topology(kind, link_bytes, provenance),
        copies=copies,
        kernel_copies=copies,
        all_gather=Collective(
            tuple((size, (ranks - 1) * size / link_bytes) for size in (_LEAST, _MOST)), provenance
        ),
        gemm=Gemm(
            peak=flops,
            units=1,
            launch=0.0,
            efficiency=1.0,
            start=start,
            bandwidth=float("inf"),
            provenance=provenance,
        ),
        memory=Memory(float("inf"), memory_bytes, provenance, latency=start),
        contention=Contention(1.0, 1.0, 1.0, 1.0, provenance),
        host=Host(0.0, 0.0, 0.0, 0.0, 0.0, provenance),
    )
