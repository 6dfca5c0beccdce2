"""The schedules that the model compares for a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ficco.machine import Machine
from ficco.problems.products import Problem
from ficco.schedules import Schedule, own_candidates, refusal, same_plans

#: What engines offer: copies by DMA; copies by a kernel and products whose tiles wait, where these
#: can be compiled for the GPU.
OFFERS = ("dma",)
ALL_OFFERS = ("dma", "kernel", "tiled")

#: The serial compositions: what every other schedule has to beat.
SERIALS = ("serial:collective", "serial")


def _names(text: str) -> tuple[str, ...]:
    """The names of a text, in their order."""
    return tuple(text.split())


#: Besides the serial ones, on a switch: a copy at a time, peer after peer, few and large products.
#: Two compute lanes first, then the simplest: of equal predictions they lost least on 4 H200
#: (29 shapes of docs/results/measured-, all-to-all- and small-h200-4.csv, queued: 0.7 % in the mean
#: and 3 % at worst; with one lane first 1.4 and 7 %).
SWITCH = _names("""
    growing:compute=2 shard-overlap:compute=2 shard-overlap growing shrinking
    shrinking:tail=2,compute=2 growing:tail=2,compute=2 growing:tail=4 shard-overlap:tail=4
    shard-overlap:tail=4,compute=2 hetero-unfused-1d:pieces=2,order=peer,compute=2
    hetero-fused-1d:pieces=2 hetero-fused-1d:pieces=4 hetero-fused-1d uniform-fused-2d
""")

#: On a mesh every schedule but Async TP's own copies over all links at once (:func:`suited`).
MESH = _names("""
    shard-overlap hetero-fused-1d:pieces=2 hetero-fused-1d:pieces=2,tail=4 hetero-fused-1d:pieces=4
    hetero-fused-1d:pieces=4,compute=2 hetero-fused-1d hetero-fused-1d:tail=2,compute=2
    hetero-unfused-1d:pieces=2 hetero-unfused-1d:pieces=2,compute=2 hetero-unfused-1d
    uniform-fused-1d:pieces=2 uniform-fused-1d:pieces=4 uniform-fused-1d uniform-fused-1d:compute=2
    uniform-fused-2d:pieces=4 uniform-fused-2d
""")

#: Where A is transposed, on a switch or a mesh: few pieces of rows, which add up to one result, or
#: pieces of columns, which make rows of it, each written once if multiplied with the own ones.
#: Chosen by simulation only, see docs/choosing.md.
TRANSPOSED = _names("""
    growing shrinking shard-overlap growing:tail=2 uniform-fused-2d
    uniform-fused-2d:pieces=2,compute=2 uniform-fused-2d:pieces=4,compute=2
    uniform-fused-2d:pieces=3+1 hetero-fused-2d hetero-fused-2d:pieces=2,tail=2
    hetero-fused-2d:pieces=4 hetero-unfused-2d:pieces=2,tail=2 hetero-unfused-2d:pieces=3+1
    uniform-unfused-2d:pieces=2,tail=2
""")

#: On a switch, where the product travels: the block that stays is multiplied last. Of two lanes
#: with products of the same size and nothing to wait for, either may come first on a GPU, and the
#: copies of the first wait for both: a second lane helps with many pieces only (2 H200: up to 32 %
#: slower with two products, docs/results/scatter-h200-2.csv).
SENDING_SWITCH = _names("""
    growing shrinking shard-overlap shrinking:tail=2,compute=2 shard-overlap:tail=4,compute=2
    shard-overlap:pieces=2,tail=4 shard-overlap:pieces=3 hetero-fused-1d:pieces=2
    uniform-fused-2d:pieces=4
""")

#: For operators that sum, before those: a block that goes from rank to rank, or the own product
#: added to the sum of all others. Not the simplest first: of equal predictions, the ring of many
#: pieces was the fastest (6 of 8 shapes on 2 H200, docs/results/reduce-scatter-h200-2.csv).
SUMMING_SWITCH = _names("""
    ring:pieces=4,tail=4,compute=2 ring ring:pieces=4,tail=4 shard-overlap:pieces=2,tail=2,beta
""")

#: Where sums return to all ranks: nothing overlaps the return of the parts that are summed last, so
#: that they are cut once more.
RETURNING_SWITCH = _names("""
    ring:pieces=4,tail=4,compute=2 ring:pieces=4,tail=4 ring growing shrinking shard-overlap
    shrinking:tail=2 shrinking:tail=2,compute=2 shard-overlap:tail=4,compute=2
    shrinking:pieces=2,tail=2,beta
""")

#: On a mesh, where the product travels. A ring would use one link of each rank.
SENDING_MESH = _names("""
    shard-overlap hetero-fused-1d:pieces=2 hetero-fused-1d:pieces=4
    hetero-fused-1d:pieces=3+1,compute=2 hetero-fused-1d:pieces=3+1,tail=2,compute=2 hetero-fused-1d
    hetero-fused-2d:pieces=4,compute=2 hetero-fused-2d:pieces=4,tail=4,compute=2
    hetero-unfused-1d:pieces=2,compute=2 uniform-fused-1d:pieces=2 uniform-fused-1d:pieces=4
    uniform-fused-2d:pieces=2,compute=2 uniform-fused-2d:pieces=3+1,compute=2 uniform-fused-2d
    uniform-fused-2d:compute=2
""")

#: Further ones for operators that sum.
SUMMING_MESH = (
    "hetero-fused-1d:pieces=3+1,tail=2,compute=2,beta",
    "hetero-fused-2d:pieces=4,tail=2,compute=2,beta",
)

#: Where a copy kernel moves the bytes: few and small copies.
BY_KERNEL = _names("""
    serial:kernel shard-overlap:kernel growing:kernel hetero-fused-1d:pieces=2,kernel
""")

#: For operators that sum, where a kernel reads the products of peers: one exchange, after them.
READING = ("one-shot", "one-shot:pieces=2")

#: One product whose tiles wait. Of equal predictions a schedule of library products wins. With the
#: rates of ficco/compute/tiled/worklist.py on h200-4, no shape of configs/shapes.csv gains 3 % by
#: another of 29 such schedules, uneven pieces among them: 0.2 % in the mean. On a mesh pieces
#: arrive over all links at once: there it is 1 % in the mean (mi300x-8, tiles at the rate of the
#: library's).
TILED = _names("tiled tiled:tail=2 tiled:pieces=2 tiled:pieces=2,tail=2")
TILED_MESH = _names("""
    tiled tiled:pieces=2,order=piece tiled:pieces=3,order=piece tiled:pieces=4,order=piece
""")

#: Rows that a rank must have for a peer; of a gather, those of a piece in the mean. With one or two
#: rows of tiles for each arrival (128, 256) one product was mostly slower than the library's, up to
#: 15 %, with three and more it mostly was faster (one H200, docs/results/replay-h200-1.md).
TILED_ROWS = 384

#: Provenance of figures that were measured.
MEASURED_SOURCES = ("measured", "fitted")

#: With one peer half of these names give the same plan; with more ranks, all plans differ.
FEW_RANKS = 2


def candidates(
    problem: Problem, machine: Machine | None = None, offers: tuple[str, ...] = OFFERS
) -> tuple[Schedule, ...]:
    """The schedules to compare, the serial ones first; of equal predictions the first wins.

    Args:
        problem: its operator says in which direction pieces travel.
        machine: its topology selects the schedules; without one, those of a switch.
        offers: what the engine offers. Copy kernels, and products whose tiles wait, are compared
            where they were measured.
    """
    distinct: dict[Schedule, Schedule] = {}
    for schedule in _candidates(problem, machine, offers):
        if refusal(problem, schedule):
            continue
        # W pieces by number and by default are the same plan.
        distinct.setdefault(replace(schedule, pieces=schedule.pieces or problem.world), schedule)
    if problem.world > FEW_RANKS:
        return tuple(distinct.values())
    return tuple(dict.fromkeys(same_plans(problem, distinct.values()).values()))


def _candidates(
    problem: Problem, machine: Machine | None, offers: tuple[str, ...]
) -> Iterator[Schedule]:
    for name in (*SERIALS, *_overlapped(problem, on_mesh(machine))):
        schedule = Schedule.parse(name)
        if not serves(schedule, machine):
            continue
        yield schedule if name == "shard-overlap" else suited(schedule, problem, machine)
    if "kernel" in offers and machine is not None and machine.kernel_copies is not None:
        for name in BY_KERNEL:
            yield suited(Schedule.parse(name), problem, machine)
        yield from map(Schedule.parse, READING if problem.kind.sums else ())
    tiles = "tiled" in offers and machine is not None and machine.tiled is not None
    waiting = TILED_MESH if on_mesh(machine) else TILED
    for name in waiting if tiles and not problem.kind.inner else ():
        yield suited(Schedule.parse(name), problem, machine)
    own = (Schedule.parse(name) for name in offers if name in own_candidates())
    yield from (schedule for schedule in own if not refusal(problem, schedule))


def _overlapped(problem: Problem, mesh: bool) -> tuple[str, ...]:
    """Names for an operator; of equal predictions the first wins."""
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
    """Whether the model may take a schedule.

    It does not know how long the blocks of a copy kernel wait for SMs that products occupy; tuned
    entries do. Where all products come after all copies of a gather, none waits: queued on 4 H200,
    13 such calls took as long as predicted to 6 % (docs/results/serial-by-kernel-h200-4.csv), and
    six of problems that were not used before 3 % less to 16 % more (unseen-h200-4.csv there). Nor
    does a kernel that sums after all products: 24 calls on 2 H200 took 5 % less to 19 % more
    (decode-all-reduce-h200-2.csv and decode-reduce-scatter-h200-2.csv); with more ranks it was not
    measured, and reads more in an all-reduce than others send. On a CPU both offers are the same.
    """
    if schedule.grouping == "tiled":
        tiled, sizes = machine.tiled, (problem.n, problem.k)
        measured = tiled is not None and tiled.provenance.source in MEASURED_SOURCES
        ranks = range(problem.world)
        rows = max(problem.block(i, j) for i in ranks for j in ranks if i != j or ranks.stop == 1)
        # What the kernel takes, but for its dtypes: those of two bytes.
        served = problem.itemsize == 2 and not any(size % 8 for size in sizes)
        cut = 1 if problem.kind.scatters else schedule.pieces or problem.world
        pieces = cut if isinstance(cut, int) else len(cut)
        return measured and served and rows >= TILED_ROWS * pieces
    if schedule.mover != "kernel":
        return True
    copies = machine.kernel_copies
    if copies is None or copies.provenance.source not in MEASURED_SOURCES:
        return False
    if machine.accelerator == "cpu":
        return False
    if schedule.grouping == "one-shot":
        return problem.world == 2 and (schedule.pieces, schedule.tail) == (1, 1)
    return is_serial(schedule) and problem.kind.collective == "all-gather"


def is_serial(schedule: Schedule) -> bool:
    """Whether all copies come before the one product."""

    def cut(one: Schedule) -> tuple[object, ...]:
        return one.uniform, one.grouping, one.dims, one.pieces, one.tail

    return any(cut(schedule) == cut(Schedule.parse(name)) for name in SERIALS)


def on_mesh(machine: Machine | None) -> bool:
    """Whether every pair of ranks has a link of its own."""
    return machine is not None and machine.topology is not None and machine.topology.kind == "mesh"


def serves(schedule: Schedule, machine: Machine | None) -> bool:
    """Whether a schedule can gain on a kind of device: on CPUs a second compute lane brings a
    second pool of threads onto the same cores."""
    return schedule.compute == 1 or machine is None or machine.accelerator != "cpu"


def suited(schedule: Schedule, problem: Problem, machine: Machine | None) -> Schedule:
    """The schedule with a copy lane per peer where a mesh has a link to each of them."""
    if not on_mesh(machine) or schedule.mover == "collective" or schedule.own:
        return schedule
    return replace(schedule, copy=max(problem.local_world - 1, 1))
