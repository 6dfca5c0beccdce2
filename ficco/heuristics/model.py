"""Choice by prediction: the fastest candidate that loses to serial in no mode.

A call is *queued* if it is captured or its host runs ahead: host time does not count. It is *idle*
if the GPU waits for its host: host time counts. An eager call on a GPU may be either, and ranks of
a group may differ, so no rank can choose by its own state. An eager call takes a schedule that is
predicted to lose to serial in neither mode. Of these schedules it takes the one with the smallest
loss, in its worse mode, against the best of each mode.

A schedule also has losses by decomposition and by contention (FiCCO, section IV). The decomposition
inefficiency loss (DIL) of a product is the total time of its parts, run one by one with no other
work, over the time of the undivided product. The DIL of communication is defined likewise. The
contention inefficiency loss (CIL) is the time of a call over its time if copies and products did
not slow each other down. All are predicted from a machine's figures; 1.0 is no loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from ficco.heuristics.candidates import is_serial, least_gain_of, on_mesh, suited
from ficco.machine import Contention, Copies, Machine
from ficco.plan import Plan
from ficco.plan.render import seconds_text
from ficco.problems.products import Problem
from ficco.problems.specification import AnyProblem
from ficco.schedules import Schedule, plan

#: Possible modes of a call, by the mode of the decision.
MODES: dict[str, tuple[str, ...]] = {
    "eager": ("queued", "idle"),
    "queued": ("queued",),
    "idle": ("idle",),
}

#: Predictions that differ by less count as equal, since no model is more exact. Of equal ones the
#: first wins: see the order in :mod:`ficco.heuristics.candidates`.
TIE = 0.01

#: Smaller differences print as 0.0 %.
ROUNDING = 0.0005

#: The blocks of a machine that every prediction needs.
REQUIRED = ("topology", "copies", "all_gather", "gemm", "memory", "contention")

#: Seconds of a problem under a schedule on a machine in a mode.
Predict = Callable[[Problem, Schedule, Machine, str], float]


@dataclass(frozen=True)
class Prediction:
    """A schedule and its predicted seconds by mode."""

    schedule: Schedule
    seconds: dict[str, float]

    @property
    def serial(self) -> bool:
        """Whether the product does not overlap communication."""
        return is_serial(self.schedule)


@dataclass(frozen=True)
class Choice:
    """The chosen prediction, its serial baseline, and the reason."""

    chosen: Prediction
    serial: Prediction
    reason: str


def lacking(machine: Machine, mode: str, problem: AnyProblem | None = None) -> tuple[str, ...]:
    """Blocks that a prediction, of a problem within one host by default, needs and the machine
    lacks."""
    needed = [*REQUIRED, *(["host"] if "idle" in MODES[mode] else [])]
    needed += ["network"] if problem is not None and problem.hosts > 1 else []
    return tuple(name for name in needed if getattr(machine, name) is None)


def predictions(
    problem: Problem,
    schedules: Iterable[Schedule],
    machine: Machine,
    modes: Sequence[str],
    predict: Predict,
) -> tuple[Prediction, ...]:
    """The predicted seconds of schedules in some modes."""
    return tuple(
        Prediction(schedule, {mode: predict(problem, schedule, machine, mode) for mode in modes})
        for schedule in schedules
    )


def by_loss(predicted: Sequence[Prediction], modes: Sequence[str]) -> list[Prediction]:
    """Predictions sorted by their loss against the best prediction, in their worse mode."""
    best = {m: min(p.seconds[m] for p in predicted) for m in modes}
    return sorted(predicted, key=lambda p: max(p.seconds[m] / best[m] for m in modes))


def shortlist(predicted: Sequence[Prediction], modes: Sequence[str], most: int) -> list[Schedule]:
    """The serial schedules and ``most`` others, in the order of ``predicted``. The others have the
    smallest losses, but the last one is the best of another grouping, for variety."""
    ranked = [p.schedule for p in by_loss(predicted, modes) if not p.serial]
    short, rest = ranked[: most - 1], ranked[most - 1 :]
    groupings = {schedule.grouping for schedule in short}
    short += [schedule for schedule in rest if schedule.grouping not in groupings][:1] or rest[:1]
    return [p.schedule for p in predicted if p.serial or p.schedule in short]


def choose(
    predicted: Sequence[Prediction],
    machine: Machine,
    mode: str,
    scatters: bool = False,
    margin: float | None = None,
    tie: float = TIE,
) -> Choice:
    """The prediction to take; serial if the gain is below the margin.

    The baseline is the serial form with the smaller loss in its worse mode. The better of the two
    forms in each mode would be a schedule that does not exist. Of predictions within ``tie`` of the
    best, the first in ``predicted`` is taken. ``scatters``: the product travels. ``margin``
    replaces the machine's: the fastest prediction must gain it, and the taken one may gain less.
    """
    modes, own_margin = MODES[mode], margin is not None
    margin = machine.margin if margin is None else margin
    best = {m: min(p.seconds[m] for p in predicted) for m in modes}
    overlapped = [p for p in predicted if not p.serial]

    def loss(prediction: Prediction) -> tuple[float, float]:
        losses = [prediction.seconds[m] / best[m] - 1.0 for m in modes]
        return max(losses) + least_gain_of(prediction.schedule), sum(losses)

    def first_best(predictions: Sequence[Prediction]) -> Prediction:
        least = min(map(loss, predictions))[0]
        return next(p for p in predictions if loss(p)[0] <= least + tie)

    serial = min((p for p in predicted if p.serial), key=loss)

    def gains(prediction: Prediction) -> list[float]:
        return [serial.seconds[m] / prediction.seconds[m] - 1.0 for m in modes]

    least_gain = 0.0 if own_margin else -margin
    harmless = [p for p in overlapped if min(gains(p)) >= least_gain]
    winner = first_best(harmless) if harmless else serial
    on = f"on {machine.name}"
    if winner is serial:
        fastest = min(overlapped, key=loss, default=serial)
        serial_times = seconds_text(serial.seconds[mode]) if own_margin else _times(serial, modes)
        times = f"{_times(fastest, modes)} {on}, serial {serial_times}"
        return Choice(serial, serial, f"{fastest.schedule} is predicted to take {times}")
    judged = min(harmless, key=loss) if own_margin else winner
    gain = max(gains(judged))
    if gain < margin:
        share = f"{100 * margin:g}%" if own_margin else f"{margin:.1%}"
        outcome = f"gain {gain:.1%} {on}, less than the margin of {share}"
        if gain <= -ROUNDING:
            outcome = f"lose {-gain:.1%} {on}"
        elif gain < ROUNDING:
            outcome = f"gain nothing {on}"
        return Choice(serial, serial, f"{judged.schedule} is predicted to {outcome}")
    ratios = " and ".join(f"{1 + gain:.2f}" for gain in gains(winner))
    reason = f"predicted to take {_times(winner, modes)} {on}, {ratios} times as fast as serial"
    if own_margin and winner is not judged:
        reason += f"; the first of those within {100 * tie:g}%"
    if winner.schedule.grouping == "tiled":
        library = first_best([p for p in overlapped if p.schedule.grouping != "tiled"])
        speedups = (library.seconds[mode] / winner.seconds[mode] for mode in modes)
        over_library = " and ".join(f"{speedup:.2f}" for speedup in speedups)
        does = "announce what is done" if scatters else "wait for what arrives"
        reason = (
            f"one product whose tiles {does}, {reason} and {over_library} times as fast as "
            f"products of the library ({library.schedule})"
        )
    return Choice(winner, serial, reason)


def _times(prediction: Prediction, modes: Sequence[str]) -> str:
    return " and ".join(f"{seconds_text(prediction.seconds[mode])} {mode}" for mode in modes)


@dataclass(frozen=True)
class Losses:
    """The inefficiency signature of a schedule, as factors.

    Attributes:
        gemm: decomposition loss of the product.
        copies: decomposition loss of the communication; 1.0 for the vendor's collective.
        contention: contention loss of the call.
    """

    gemm: float
    copies: float
    contention: float


def losses(problem: Problem, schedule: Schedule, machine: Machine, predict: Predict) -> Losses:
    """The signature of a schedule; ``predict`` returns the seconds of a call."""
    rank0 = plan(problem, schedule, 0)
    contended = predict(problem, schedule, machine, "queued")
    assert machine.contention is not None
    no_contention = Contention(1.0, 1.0, 1.0, 1.0, machine.contention.provenance)
    free = predict(problem, schedule, replace(machine, contention=no_contention), "queued")
    return Losses(gemm_loss(problem, rank0, machine), copy_loss(rank0, machine), contended / free)


def gemm_loss(problem: Problem, plan: Plan, machine: Machine) -> float:
    """DIL of the products of one rank: the time of its parts over the time of the undivided
    product; 1.0 if the rank has no rows."""
    gemm = machine.products(problem)
    assert gemm is not None
    rows = problem.product_rows(plan.rank)
    whole = gemm.seconds(rows, problem.n, problem.k, itemsize=problem.itemsize)
    if not whole:
        return 1.0
    products = [product for step in plan.steps for product in step.products]
    parts = sum(  # scaled products run one by one: no library has batches of them
        (p.batch if p.factors else 1)
        * gemm.seconds(
            p.out.rows,
            p.out.cols,
            p.b.rows,
            batch=1 if p.factors else p.batch,
            itemsize=problem.itemsize,
            wide=plan.wide(p),
            adds=not plan.wide(p) and (p.accumulate or p.addend is not None),
        )
        for p in products
    )
    return (parts + gemm.launch * (len(products) - 1)) / whole


def copy_loss(plan: Plan, machine: Machine) -> float:
    """DIL of the copies of one rank: the time of its pieces over the time of undivided shards or
    blocks. On a mesh every peer has a separate link, so the slowest peer counts."""
    spent: dict[int, float] = defaultdict(float)
    whole: dict[int, float] = defaultdict(float)
    sizes: dict[tuple[int, int], int] = defaultdict(int)  # of a shard or block to or from a peer
    for step in plan.steps:
        if (move := step.copy) is None:
            continue
        src, dst, terms = move.src, move.dst, move.terms
        peer = dst.rank if src.rank == plan.rank else src.rank
        nbytes = plan.nbytes(src)
        spent[peer] += copy_seconds(nbytes, _copies(move.mover, machine))
        sizes[peer, terms] += nbytes
    for (peer, _), size in sizes.items():
        whole[peer] += copy_seconds(size, _copies("dma", machine))
    if not spent:
        return 1.0
    total = max if on_mesh(machine) else sum
    return float(total(spent.values()) / total(whole.values()))


def _copies(mover: str, machine: Machine) -> Copies:
    copies = machine.kernel_copies if mover == "kernel" else machine.copies
    assert copies is not None
    return copies


def copy_seconds(nbytes: float, copies: Copies) -> float:
    """Seconds that a copy occupies its queue."""
    return copies.gap + nbytes / copies.rate(nbytes) if nbytes else 0.0


def bounds(problem: Problem, machine: Machine, predict: Predict, mode: str) -> dict[str, float]:
    """Seconds of each part of a call by itself: ``"gemm"``, the undivided product; ``"copies"``,
    the transfers by copy engines; ``"collective"``, the transfers by the vendor's collective, if
    the machine has its figures. Sums and placement after the copies do not count, nor does a cast
    before them."""
    problem = replace(problem.given, transposed=False)  # it moves the same bytes
    operator = "all_gather_transposed_matmul" if problem.kind.inner else "all_gather_matmul"
    sizes = problem.n, problem.k, problem.dtype
    product = Problem(operator, (problem.m,), *sizes, scaling=problem.scaling)
    seconds = {"gemm": predict(product, Schedule.parse("serial"), machine, mode)}
    transfers = replace(problem, k=0) if problem.kind.scatters else replace(problem, n=0)
    free = machine
    if machine.memory is not None and problem.kind.scatters:
        free = replace(machine, memory=replace(machine.memory, bandwidth=inf, latency=0.0))
    by_copies = suited(Schedule.parse("shard-overlap"), problem, machine)
    seconds["copies"] = predict(transfers, by_copies, free, mode)
    if machine.all_gather is not None:
        by_library = Schedule.parse("serial:collective")
        seconds["collective"] = predict(transfers, by_library, machine, mode)
    return seconds
