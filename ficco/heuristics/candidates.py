"""The schedules that the model compares for a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ficco.machine import Machine
from ficco.problems.products import Problem
from ficco.schedules import Schedule, own_candidates, refusal, same_plans

#: Features that engines offer: copies by DMA; and, if kernels can be compiled for the GPU, copies
#: by a kernel and products whose tiles wait.
OFFERS = ("dma",)
ALL_OFFERS = ("dma", "kernel", "tiled")

#: The serial compositions, the baseline of all other schedules.
SERIALS = ("serial:collective", "serial")


def _names(text: str) -> tuple[str, ...]:
    """Split a text into names."""
    return tuple(text.split())


#: Besides the serial ones, on a switch: one copy at a time, peer after peer; few, large products.
#: Two compute lanes come first, then the simplest schedules. With this order of equal predictions
#: the loss on 4 H200 was smallest (29 shapes of docs/results/measured-, all-to-all- and
#: small-h200-4.csv, queued: 0.7 % in the mean and 3 % at worst; with one lane first 1.4 and 7 %).
SWITCH = _names("""
    growing:compute=2 shard-overlap:compute=2 shard-overlap growing shrinking
    shrinking:tail=2,compute=2 growing:tail=2,compute=2 growing:tail=4 shard-overlap:tail=4
    shard-overlap:tail=4,compute=2 hetero-unfused-1d:pieces=2,order=peer,compute=2
    hetero-fused-1d:pieces=2 hetero-fused-1d:pieces=4 hetero-fused-1d uniform-fused-2d
""")

#: On a mesh. All schedules except Async TP's copy over all links at once (:func:`suited`).
MESH = _names("""
    shard-overlap hetero-fused-1d:pieces=2 hetero-fused-1d:pieces=2,tail=4 hetero-fused-1d:pieces=4
    hetero-fused-1d:pieces=4,compute=2 hetero-fused-1d hetero-fused-1d:tail=2,compute=2
    hetero-unfused-1d:pieces=2 hetero-unfused-1d:pieces=2,compute=2 hetero-unfused-1d
    uniform-fused-1d:pieces=2 uniform-fused-1d:pieces=4 uniform-fused-1d uniform-fused-1d:compute=2
    uniform-fused-2d:pieces=4 uniform-fused-2d
""")

#: If A is transposed, on a switch or a mesh: few pieces of rows, whose products add up to the
#: result; or pieces of columns, whose products are rows of the result. A row is written once if the
#: piece is multiplied together with the rank's own columns. Selected by simulation only, see
#: docs/choosing.md.
TRANSPOSED = _names("""
    growing shrinking shard-overlap growing:tail=2 uniform-fused-2d
    uniform-fused-2d:pieces=2,compute=2 uniform-fused-2d:pieces=4,compute=2
    uniform-fused-2d:pieces=3+1 hetero-fused-2d hetero-fused-2d:pieces=2,tail=2
    hetero-fused-2d:pieces=4 hetero-unfused-2d:pieces=2,tail=2 hetero-unfused-2d:pieces=3+1
    uniform-unfused-2d:pieces=2,tail=2
""")

#: On a switch, if the product travels: the block that stays is multiplied last. If two lanes have
#: products of equal size and do not wait, either may run first on a GPU, and the copies of the
#: first product wait for both. So a second lane only helps with many pieces (2 H200: up to 32 %
#: slower with two products, docs/results/scatter-h200-2.csv).
SENDING_SWITCH = _names("""
    growing shrinking shard-overlap shrinking:tail=2,compute=2 shard-overlap:tail=4,compute=2
    shard-overlap:pieces=2,tail=4 shard-overlap:pieces=3 hetero-fused-1d:pieces=2
    uniform-fused-2d:pieces=4
""")

#: For operators that sum, before SENDING_SWITCH: rings pass a block from rank to rank; ``beta``
#: adds the own product to the sum of the others. The simplest is not first: of equal predictions,
#: the ring of many pieces was the fastest (6 of 8 shapes on 2 H200,
#: docs/results/reduce-scatter-h200-2.csv).
SUMMING_SWITCH = _names("""
    ring:pieces=4,tail=4,compute=2 ring ring:pieces=4,tail=4 shard-overlap:pieces=2,tail=2,beta
""")

#: If sums return to all ranks. Nothing overlaps the return of the last sums, so a tail cuts them.
RETURNING_SWITCH = _names("""
    ring:pieces=4,tail=4,compute=2 ring:pieces=4,tail=4 ring growing shrinking shard-overlap
    shrinking:tail=2 shrinking:tail=2,compute=2 shard-overlap:tail=4,compute=2
    shrinking:pieces=2,tail=2,beta
""")

#: On a mesh, if the product travels. A ring would use only one link of each rank.
SENDING_MESH = _names("""
    shard-overlap hetero-fused-1d:pieces=2 hetero-fused-1d:pieces=4
    hetero-fused-1d:pieces=3+1,compute=2 hetero-fused-1d:pieces=3+1,tail=2,compute=2 hetero-fused-1d
    hetero-fused-2d:pieces=4,compute=2 hetero-fused-2d:pieces=4,tail=4,compute=2
    hetero-unfused-1d:pieces=2,compute=2 uniform-fused-1d:pieces=2 uniform-fused-1d:pieces=4
    uniform-fused-2d:pieces=2,compute=2 uniform-fused-2d:pieces=3+1,compute=2 uniform-fused-2d
    uniform-fused-2d:compute=2
""")

#: Further schedules on a mesh, for operators that sum.
SUMMING_MESH = (
    "hetero-fused-1d:pieces=3+1,tail=2,compute=2,beta",
    "hetero-fused-2d:pieces=4,tail=2,compute=2,beta",
)

#: With a copy kernel: schedules of few, small copies.
BY_KERNEL = _names("""
    serial:kernel shard-overlap:kernel growing:kernel hetero-fused-1d:pieces=2,kernel
""")

#: For operators that sum: after its products, a kernel reads those of peers in one exchange.
READING = ("one-shot", "one-shot:pieces=2", "two-shot")

#: One product whose tiles wait. Of equal predictions a schedule of library products wins. With the
#: rates of ficco/compute/tiled/worklist.py on h200-4, no shape of configs/shapes.csv gains 3 % from
#: another one of 29 tiled schedules, uneven pieces included; the mean gain is 0.2 %. On a mesh,
#: where pieces arrive over all links at once, the mean gain is 1 % (mi300x-8, tiles at the rate of
#: the library's).
TILED = _names("tiled tiled:tail=2 tiled:pieces=2 tiled:pieces=2,tail=2")
TILED_MESH = _names("""
    tiled tiled:pieces=2,order=piece tiled:pieces=3,order=piece tiled:pieces=4,order=piece
""")

#: Fewest rows from a rank to a peer for a tiled schedule; in a gather, mean rows of a piece. With
#: one or two rows of tiles per arrival (128, 256) one tiled product was mostly slower than the
#: library's, by up to 15 %; with three or more it was mostly faster (one H200,
#: docs/results/replay-h200-1.md).
TILED_ROWS = 384

#: Gain beyond a tie over library products that a product whose tiles wait must have, since the
#: simulator does not know which tiles are cut. Of 49 all-gathers of configs/shapes.csv on h200-4,
#: 33 gain as much. By the work lists of the product (ficco/compute/tiled/worklist.py), 31 of the 33
#: are faster than the library's, and two with 128 rows a rank are 5 and 7 % slower; TILED_ROWS
#: excludes the two. Simulated, with the rates of one H100.
TILED_MARGIN = 0.02

#: Provenance of measured figures.
MEASURED_SOURCES = ("measured", "fitted")

#: Up to this number of ranks, half of these names give equal plans if ranks have equal rows.
FEW_RANKS = 2

#: Rows, columns and terms of a problem whose pieces all differ.
LARGE = 1 << 14


def candidates(
    problem: Problem, machine: Machine | None = None, offers: tuple[str, ...] = OFFERS
) -> tuple[Schedule, ...]:
    """The schedules to compare, the serial ones first. Of equal predictions the first wins.

    Args:
        problem: its operator determines the direction of transfers.
        machine: its topology selects the schedules; None: those of a switch.
        offers: features of the engine, and names of own schedules. Copies by kernel, and products
            whose tiles wait, are compared if the machine has figures for them.
    """
    distinct: dict[Schedule, Schedule] = {}
    for schedule in _candidates(problem, machine, offers):
        if refusal(problem, schedule):
            continue
        # The default number of pieces is W, so both spellings are one plan.
        same = schedule if schedule.pieces else replace(schedule, pieces=problem.world)
        distinct.setdefault(same, schedule)
    schedules = tuple(distinct.values())
    if problem.world > FEW_RANKS or not problem.equal:
        return schedules
    return _different(_enlarged(problem), schedules)


@lru_cache(maxsize=256)
def _different(problem: Problem, schedules: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
    """The first schedule of each group that has equal Plans."""
    return tuple(dict.fromkeys(same_plans(problem, schedules).values()))


def _enlarged(problem: Problem) -> Problem:
    """A large problem that stands for all with equal blocks: Plans that are equal for it are equal
    for them. To compare the Plans of each new problem took 8 ms (x86-64, Python 3.11)."""
    size = LARGE // problem.world
    blocks = ((size,) * problem.world,) * problem.world if problem.kind.blocks else ()
    return replace(problem, rows=(LARGE,) * problem.world, n=LARGE, k=LARGE, blocks=blocks)


def _candidates(
    problem: Problem, machine: Machine | None, offers: tuple[str, ...]
) -> Iterator[Schedule]:
    for name in (*SERIALS, *_overlapped(problem, on_mesh(machine))):
        schedule = Schedule.parse(name)
        if schedule.compute > 1 and machine is not None and machine.accelerator == "cpu":
            continue  # a second compute lane would run a second thread pool on the same cores
        yield schedule if name == "shard-overlap" else suited(schedule, problem, machine)
    if "kernel" in offers and machine is not None and machine.kernel_copies is not None:
        for name in BY_KERNEL:
            yield suited(Schedule.parse(name), problem, machine)
        yield from map(Schedule.parse, READING if problem.kind.sums else ())
    tiles = "tiled" in offers and machine is not None and machine.tiled is not None
    tiled_names = TILED_MESH if on_mesh(machine) else TILED
    for name in tiled_names if tiles and not problem.kind.inner else ():
        yield suited(Schedule.parse(name), problem, machine)
    yield from (Schedule.parse(name) for name in offers if name in own_candidates())


def _overlapped(problem: Problem, mesh: bool) -> tuple[str, ...]:
    """Names of the overlapping candidates of an operator; of equal predictions the first wins."""
    kind = problem.kind
    if kind.inner:
        return TRANSPOSED
    if not kind.scatters:
        return MESH if mesh else SWITCH
    if mesh:
        return SENDING_MESH + SUMMING_MESH if kind.sums else SENDING_MESH
    if kind.returns:
        return RETURNING_SWITCH
    return SUMMING_SWITCH + SENDING_SWITCH if kind.sums else SENDING_SWITCH


def predictable(schedule: Schedule, problem: Problem, machine: Machine) -> bool:
    """Whether the model may choose a schedule.

    The model does not predict how long blocks of a copy kernel wait for SMs that products occupy;
    measurements in tuned entries include that time. If all products of a gather come after all
    copies, no block waits. Queued on 4 H200, 13 calls of this kind were within 6 % of the
    prediction (docs/results/serial-by-kernel-h200-4.csv), and six of problems that were not used
    before took 3 % less to 16 % more (unseen-h200-4.csv there). A kernel that sums after all
    products does not wait either: 24 calls on 2 H200 took 5 % less to 19 % more
    (decode-all-reduce-h200-2.csv and decode-reduce-scatter-h200-2.csv); those of a two-shot were
    not compared. With more ranks nothing was, and in an all-reduce a one-shot reads more than other
    schedules send. On a CPU both offers are the same.
    """
    if schedule.grouping == "tiled":
        tiled, sizes = machine.tiled, (problem.n, problem.k)
        measured = tiled is not None and tiled.provenance.source in MEASURED_SOURCES
        ranks = range(problem.world)
        rows = max(problem.block(i, j) for i in ranks for j in ranks if i != j or ranks.stop == 1)
        # The limits of the kernel; for its dtypes, any dtype of two bytes.
        served = problem.itemsize == 2 and not any(size % 8 for size in sizes)
        pieces = 1 if problem.kind.scatters else schedule.pieces or problem.world
        count = pieces if isinstance(pieces, int) else len(pieces)
        return measured and served and rows >= TILED_ROWS * count
    if schedule.mover != "kernel":
        return True
    copies = machine.kernel_copies
    if copies is None or copies.provenance.source not in MEASURED_SOURCES:
        return False
    if machine.accelerator == "cpu":
        return False
    if schedule.sums_in_place:
        return problem.world == 2 and (schedule.pieces, schedule.tail) == (1, 1)
    return is_serial(schedule) and problem.kind.collective == "all-gather"


def has_figures(schedule: Schedule, machine: Machine) -> bool:
    """Whether a machine has figures of the kernels of a schedule."""
    return schedule.grouping != "tiled" or machine.tiled is not None


def least_gain_of(schedule: Schedule) -> float:
    """Gain over schedules of library products that a schedule must have."""
    return TILED_MARGIN if schedule.grouping == "tiled" else 0.0


def is_serial(schedule: Schedule) -> bool:
    """Whether all copies come before a single product."""

    def cut(candidate: Schedule) -> tuple[object, ...]:
        names = "uniform", "grouping", "dims", "pieces", "tail"
        return tuple(getattr(candidate, name) for name in names)

    return any(cut(schedule) == cut(Schedule.parse(name)) for name in SERIALS)


def on_mesh(machine: Machine | None) -> bool:
    """Whether every pair of ranks has a separate link."""
    return machine is not None and machine.topology is not None and machine.topology.kind == "mesh"


def suited(schedule: Schedule, problem: Problem, machine: Machine | None) -> Schedule:
    """The schedule; on a mesh, with a copy lane for the link to each peer."""
    if not on_mesh(machine) or schedule.mover == "collective" or schedule.own:
        return schedule
    return replace(schedule, copy=max(problem.local_world - 1, 1))
