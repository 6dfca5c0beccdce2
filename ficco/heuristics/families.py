"""Families of operators that share planning, prediction and decision, as rows of data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any

from ficco.errors import InvalidArgument
from ficco.heuristics.candidates import candidates, has_figures, on_mesh, predictable, suited
from ficco.heuristics.model import TIE, Losses, Predict, bounds, losses
from ficco.machine import Machine, Provenance, Thresholds
from ficco.plan import Crossing, Plan
from ficco.problems.experts import EXPERT_OPERATORS, ExpertLayer
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.specification import AnyProblem
from ficco.schedules import NAMED, Schedule, refusal
from ficco.schedules.attention import attention_plans
from ficco.schedules.attention import refusal as attention_refusal
from ficco.schedules.build import plans_of
from ficco.schedules.experts import expert_plans, expert_refusal
from ficco.schedules.heads import heads_plans, heads_refusal
from ficco.simulate import predict, simulate

#: Bytes from each peer. Transfers from all peers may run at the same time.
Received = Sequence[int]


def crossing(machine: Machine, nbytes: int) -> float:
    """Seconds that a copy between ranks occupies its lane."""
    assert machine.copies is not None and machine.topology is not None
    rate = min(machine.copies.rate(nbytes), machine.topology.bandwidth)
    return machine.copies.gap + nbytes / rate


def last_arrival(stages: Sequence[Received], machine: Machine) -> float:
    """Seconds until a rank has received all stages, one after the other, if it need not wait for
    computation. A stage is one copy per peer, over one port or over a link from each peer."""
    assert machine.copies is not None
    together = max if on_mesh(machine) else sum
    return sum(
        machine.copies.latency
        + together([crossing(machine, size) - machine.copies.gap for size in sizes])
        for sizes in stages
    )


def crossed(plan: Plan, machine: Machine) -> float:
    """Seconds until a rank has received its Plan's messages from other hosts, one by one."""
    crossings = [step.work for step in plan.steps if isinstance(step.work, Crossing)]
    moves = [move for one in crossings for move in one.moves if move.dst.rank == plan.rank]
    if not moves:
        return 0.0
    network = machine.network
    assert network is not None
    nbytes = sum(move.batch * plan.nbytes(move.dst) for move in moves)
    return network.latency + nbytes * network.sharing / network.bandwidth


def received(problem: AnyProblem, rank: int) -> list[Received]:
    """Bytes that a rank receives according to the specification, in up to two stages: matrices of
    the callers, then matrices computed from them."""
    specification, stages = problem.specification, list[Received]()
    peers = [peer for peer in range(problem.world) if peer != rank]
    operands = {buffer.holds for buffer in specification.operands}
    # The first buffer of a matrix counts: copies that are kept for a gradient are listed later.
    buffers = (*specification.operands, *specification.results)
    buffer_of = {buffer.holds: buffer for buffer in reversed(buffers)}
    for of_operands in (True, False):
        sizes = [0] * len(peers)
        for matrix, exchange in specification.exchanges.items():
            if (matrix in operands) is of_operands:
                buffer = buffer_of[matrix]
                row_bytes = buffer.shapes[rank][1] * buffer.itemsize
                for i, peer in enumerate(peers):
                    sizes[i] += exchange.block(peer, rank) * exchange.parts * row_bytes
        if any(sizes):
            stages.append(sizes)
    return stages


SERIAL = "serial"

#: Kinds of timeline bars that count as computation, without copies and sums of parts.
COMPUTED = ("matmul", "attend", "apply")

#: Schedules by mode if the machine has no figures. On a GPU: the vendor's collective, then the
#: product, which never loses. On CPUs, whose calls do not wait for a host: few products.
FALLBACK = {"eager": "serial:collective", "queued": "serial:collective", "idle": "growing"}
#: On CPUs over several hosts, data for other hosts travels in pieces. Products then begin with the
#: first piece, or the first piece is sent early. Wide blocks of a product are cut by columns: a
#: library's product of few rows can take twice as long (docs/results/hosts-cpu-16.md).
IN_ROWS, IN_COLUMNS = "shard-overlap:pieces=8", "hetero-unfused-2d:pieces=8,order=peer"

#: For unequal rows, all ranks are simulated, in time quadratic in their number. The budget limits
#: schedules times ranks squared: all schedules for four ranks; for eight the serial ones and the
#: five others that are the best for equal rows. The mean loss in predicted time is 0 if rows differ
#: by up to 30 %, 0.1 % if they differ by one, and 0.5 to 0.8 % if half of them are 0 or their
#: distribution is exponential; 14 % at worst (300 problems of 8 ranks on h100-8 and mi300x-8).
SIMULATION_BUDGET = 320
#: Fewest schedules to simulate, and the most if rows differ by at most 1/64.
FEWEST, NEARLY_EQUAL = 3, 64


def _uncapped_unsupported(problem: AnyProblem, nbytes: int) -> str:
    return (
        f"required none for {problem.operator}, whose steps do not reuse staging memory, "
        f"got {nbytes}"
    )


@dataclass(frozen=True)
class Family:
    """Operators that share planning, prediction and decision.

    Attributes:
        make: returns the Plans of a problem under a schedule. Takes ranks, a cap on staging in
            bytes (None: no cap), and whether columns are packed where they land.
        refusal: why a schedule cannot serve a problem; empty if it can.
        compared: names of the schedules to compare.
        default: schedule of a problem in a mode, if predictions are impossible.
        margin: predicted gain over serial below which serial is taken; None: the machine's.
        tie: share within which predictions are equal; the first of equal ones is taken.
        uncapped: why a cap on staging, in bytes, is refused; empty if it is accepted.
        rounded: the problem whose decision a problem shares.
        measured: whether machines have tuned entries and thresholds of the paper's rule. In other
            families, eager calls are predicted as queued.
    """

    make: Callable[..., Sequence[Plan]]
    refusal: Callable[[Any, Schedule], str]
    compared: tuple[str, ...] = ()
    default: Callable[[Any, str], str] = lambda problem, mode: SERIAL
    margin: float | None = None
    tie: float = 0.0
    uncapped: Callable[[Any, int], str] = _uncapped_unsupported
    rounded: Callable[[Any], Any] = lambda problem: problem
    measured: bool = False

    def empty(self, problem: Any) -> bool:
        """Whether a problem has nothing to compute."""
        results = problem.specification.results
        return not any(rows * cols for buffer in results for rows, cols in buffer.shapes)

    def tunable(self, problem: Any) -> bool:
        """Whether machines may have tuned entries of a problem. They describe a single host."""
        return self.measured and problem.hosts == 1

    def evened(self, problem: Any) -> tuple[Any, int]:
        """The problem with equal rows, and how many schedules to simulate with unequal rows."""
        return problem, 0

    def rule(self, problem: Any, machine: Machine) -> tuple[Schedule, str] | None:
        """The schedule by a machine's thresholds, and the reason; None without thresholds."""
        return None

    def losses(
        self, problem: Any, schedule: Schedule, machine: Machine, predict: Predict
    ) -> Losses | None:
        """The losses of a schedule; None if they are not defined for the family."""
        return None

    def plans(
        self,
        problem: Any,
        schedule: Schedule,
        ranks: Sequence[int] | None = None,
        *,
        staging_bytes: int | None = None,
        packs_columns: bool = False,
    ) -> Sequence[Plan]:
        """The Plans of some ranks, or of all ranks, with at most ``staging_bytes`` of staging.

        Raises:
            ValueError: the schedule cannot serve the problem, or not under the cap.
        """
        if staging_bytes is not None and (why := self.uncapped(problem, staging_bytes)):
            raise InvalidArgument("workspace_bytes", why)
        ranks = range(problem.world) if ranks is None else ranks
        return self.make(problem, schedule, ranks, staging_bytes, packs_columns)

    def schedules(
        self, problem: Any, machine: Machine, offers: Sequence[str] | None = None
    ) -> list[Schedule]:
        """The schedules to compare. With the offers of an engine, those that ``auto`` compares."""
        named = map(Schedule.parse, self.compared)
        return [schedule for schedule in named if not self.refusal(problem, schedule)]

    def seconds(
        self, problem: Any, schedule: Schedule, machine: Machine, mode: str = "queued"
    ) -> float:
        """Simulated seconds of a call."""
        return simulate(self.plans(problem, schedule), machine, mode).stop_s

    def received(self, problem: Any, rank: int) -> list[Received]:
        """Bytes that a rank receives, in stages."""
        return received(problem, rank)

    def bounds(
        self, problem: Any, machine: Machine, mode: str, predict: Predict | None = None
    ) -> dict[str, float]:
        """Seconds of each part of a call by itself, on the slowest rank: computation first, then
        the transfers by each mover that can make them."""
        plans = self.plans(problem, Schedule.parse(SERIAL))
        timeline = simulate(plans, machine, mode)
        computed = [
            sum(bar.stop_s - bar.start_s for bar in bars if bar.kind in COMPUTED)
            for bars in timeline.ranks
        ]
        arrivals = [
            max(last_arrival(self.received(problem, plan.rank), machine), crossed(plan, machine))
            for plan in plans
        ]
        return {"computed": max(computed), "copies": max(arrivals)}

    def ideal(
        self,
        problem: Any,
        machine: Machine,
        mode: str = "queued",
        predict: Predict | None = None,
    ) -> float:
        """Lower bound in seconds: the longer of the computation and the transfers by the fastest
        mover."""
        computed, *transfers = self.bounds(problem, machine, mode, predict).values()
        return max(computed, min(transfers, default=0.0))


# Products.


def movements(problem: Problem) -> tuple[Problem, ...]:
    """Problems without products that, one after the other, move the same data as a problem.

    Scattered rows travel as blocks of an all-to-all. Summing the rows that arrive is not included,
    nor its memory traffic. Sums that return are gathered.

    >>> [str(one) for one in movements(Problem("matmul_reduce_scatter", (2, 2), 8, 4, "float32"))]
    ['all_to_all_matmul(m=4 (4 x 2 ranks), n=0, k=8, float32)']
    """
    kind, width, dtype = problem.kind, problem.n, problem.out_dtype
    if not kind.scatters:
        return (replace(problem, n=0),)
    table = problem.blocks or (problem.rows,) * problem.world
    scattered = Problem.of_blocks("all_to_all_matmul", table, 0, width, dtype)
    if not kind.returns:
        return (scattered,)
    return scattered, Problem("all_gather_matmul", problem.rows, 0, width, dtype)


class ProductFamily(Family):
    """Products. Machines have more figures for them than for other families."""

    def empty(self, problem: Problem) -> bool:
        return problem.flops == 0

    def evened(self, problem: Problem) -> tuple[Problem, int]:
        sizes = [size for row in problem.blocks for size in row] or problem.rows
        alike = max(sizes) - min(sizes) <= max(sizes) // NEARLY_EQUAL
        most = FEWEST if alike else max(SIMULATION_BUDGET // problem.world**2, FEWEST)
        return problem.evened, most

    def schedules(
        self, problem: Problem, machine: Machine, offers: Sequence[str] | None = None
    ) -> list[Schedule]:
        """Every named schedule, and the serial composition with the vendor's collective.

        On a mesh they copy over all links at once, except Async TP, which goes peer after peer.
        Tiled schedules are left out if the machine has no figures for them.
        """
        if offers is not None:
            compared = candidates(problem, machine, tuple(offers))
            return [schedule for schedule in compared if predictable(schedule, problem, machine)]
        named = [
            schedule if name == "shard-overlap" else suited(schedule, problem, machine)
            for name, schedule in NAMED.items()
            if not refusal(problem, schedule) and has_figures(schedule, machine)
        ]
        return [*[Schedule.parse("serial:collective")] * bool(machine.all_gather), *named]

    def rule(self, problem: Problem, machine: Machine) -> tuple[Schedule, str] | None:
        if machine.thresholds is None:
            return None
        name, reason = rule(problem, machine.thresholds)
        return suited(Schedule.parse(name), problem, machine), reason

    def seconds(
        self, problem: Problem, schedule: Schedule, machine: Machine, mode: str = "queued"
    ) -> float:
        return predict(problem, schedule, machine, mode)

    def losses(
        self, problem: Problem, schedule: Schedule, machine: Machine, predict: Predict
    ) -> Losses:
        return losses(problem, schedule, machine, predict)

    def received(self, problem: Problem, rank: int) -> list[Received]:
        return [stage for part in movements(problem) for stage in received(part, rank)]

    def bounds(
        self, problem: Problem, machine: Machine, mode: str, predict: Predict | None = None
    ) -> dict[str, float]:
        return bounds(problem, machine, predict or self.seconds, mode)


def _product_default(problem: Problem, mode: str) -> str:
    if problem.transposed:  # no collective serves it
        return FALLBACK["idle"]
    if problem.hosts > 1 and mode == "idle":
        wide = problem.kind.scatters and problem.n > max(problem.rows)
        return IN_COLUMNS if wide else IN_ROWS
    return FALLBACK[mode]


def _uncapped_products(problem: Problem, nbytes: int) -> str:
    if not problem.kind.scatters:
        return ""
    return (
        f"required an operator that gathers, got {problem.operator}; under a cap, a call is cut by "
        "columns of b, so plan fewer columns with n"
    )


PRODUCTS = ProductFamily(
    plans_of,
    default=_product_default,
    tie=TIE,
    refusal=refusal,
    uncapped=_uncapped_products,
    measured=True,
)

# Attention.

#: Attention to gathered keys. Growing groups make few library calls; the other schedules wait less
#: for the first piece or after the last piece. On one H100 two lanes took 0.94 to 0.99 of the time
#: of one lane for growing groups, 0.89 to 0.99 for single shards
#: (docs/results/attention-replay-h100-8.csv and -4.csv).
GATHERED = Family(
    lambda problem, schedule, ranks, cap, _: attention_plans(problem, schedule, ranks, cap),
    compared=(
        "growing",
        "growing:compute=2",
        "growing:tail=2,compute=2",
        "growing:pull",
        "shard-overlap",
        "shard-overlap:compute=2",
        "shard-overlap:pull",
        "hetero-fused-1d:pieces=2",
        "hetero-fused-1d:pieces=2,copy=4",
        "serial",
    ),
    default=lambda problem, mode: "growing",
    margin=0.0,
    refusal=attention_refusal,
    uncapped=lambda problem, nbytes: "",
)

#: Attention by heads. More pieces mean more library calls with fewer heads each. On 2 H100 two
#: groups on one lane lost 3 % to serial, simulated 1 %; two groups on two lanes gained 6 %,
#: simulated 4 % (docs/results/attention-h100-2.csv).
BY_HEADS = Family(
    lambda problem, schedule, ranks, *_: heads_plans(problem, schedule, ranks),
    compared=(
        "serial",
        *(f"uniform-fused-1d:pieces={pieces}" for pieces in (2, 4, 8)),
        *(f"uniform-fused-1d:pieces={pieces},copy=4" for pieces in (2, 4, 8)),
        *(f"uniform-fused-1d:pieces={pieces},compute=2" for pieces in (2, 4)),
    ),
    margin=0.025,
    refusal=heads_refusal,
)

# Layers of experts.


def _rounded_capacity(layer: ExpertLayer) -> ExpertLayer:
    """Round the capacity up to a multiple of 2^k / 8, so that close token counts, which change from
    step to step, share a decision."""
    step = 1 << max((layer.capacity - 1).bit_length() - 4, 0)
    return replace(layer, capacity=-(-layer.capacity // step) * step)


#: ``uniform-fused-1d`` cuts by experts, so the weights of an expert are read once. With unequal
#: pieces, little time is spent waiting before the first products and after the last ones. Margin:
#: the schedules chosen for 12 layers on one H100 with replayed arrivals
#: (docs/results/experts-replay-h100-4.md and -8.md), with predicted gains of 3 % and more, were
#: 1.03 to 1.44 times as fast as serial. Tie: for these layers, the first schedule within 1 % of the
#: fastest simulated one loses 0.4 % to the fastest of the seven that were measured in the mean,
#: 1.3 % at worst; without ties 0.5 and 2.3 %. A second lane gains 1 to 4 % with wide experts and
#: loses 1 to 4 % with narrow ones, in simulations as well.
EXPERTS = Family(
    lambda problem, schedule, ranks, *_: expert_plans(problem, schedule, ranks),
    compared=(
        "serial",
        "growing",
        "shard-overlap",
        "hetero-fused-1d:pieces=2",
        "uniform-fused-1d:pieces=2",
        "uniform-fused-1d:pieces=1+3+3+1,copy=3",
        "uniform-fused-1d:pieces=1+3+3+1,copy=3,compute=2",
    ),
    margin=0.02,
    tie=TIE,
    refusal=expert_refusal,
    rounded=_rounded_capacity,
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(OPERATORS, PRODUCTS),
    **dict.fromkeys(("all_gather_attention", "all_gather_attention_backward"), GATHERED),
    "ulysses_attention": BY_HEADS,
    **dict.fromkeys(EXPERT_OPERATORS, EXPERTS),
}


def family_of(problem: AnyProblem) -> Family:
    """The family of a problem.

    Raises:
        NotImplementedError: the problem belongs to no family.
    """
    if problem.operator not in FAMILIES:
        raise NotImplementedError(f"required one of {', '.join(FAMILIES)}, got {problem.operator}")
    return FAMILIES[problem.operator]


# The rule of FiCCO, section V-C: a schedule from the sizes of a product and two thresholds.
#
# The paper multiplies operations per byte (OTB) by memory traffic (MT), which is the number of
# operations, and compares it with a threshold of the machine: "its peak compute FLOPs". It does not
# say whose operations are counted, or how a number compares with a rate. Here the operations are
# those of *one rank's* product, ``2 * m * n * k`` with the rank's n (:attr:`Problem.flops`), and
# the thresholds are numbers of operations, fitted to measurements (:func:`fit_thresholds`).

#: The schedules of the rule: for m <= k; and otherwise, from few operations to many.
RULE_COLUMNS = "uniform-fused-2d"
RULE_ROWS = ("uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d")

#: The upper threshold over the lower one, in the paper.
RULE_RATIO = 5.0

#: Loss, as a share of the best time, of a schedule that was not measured.
UNMEASURED_LOSS = 1.0


def rule(problem: Problem, thresholds: Thresholds) -> tuple[str, str]:
    """The name of the schedule that the rule takes, and the reason in words.

    The paper's rule is for gathers: A [m, k] travels. If the product [m, n] travels, the rule is
    applied to the transposed problem: n and k are exchanged, and it gathers as many bytes for as
    many operations; each problem is the gradient of the other. If A is transposed, k replaces m,
    and columns of A replace rows.
    """
    m, n, k = ("m", problem.m), ("n", problem.n), ("k", problem.k)
    if problem.kind.inner:
        name, reason = _rule_of_sizes(k, m, problem.flops, thresholds)
        dims = {"1d": "2d", "2d": "1d"}[name[-2:]]
        return f"{name[:-2]}{dims}", f"for A transposed, {reason}"
    name, reason = _rule_of_sizes(m, n if problem.kind.scatters else k, problem.flops, thresholds)
    if problem.kind.scatters:
        reason += ", by the paper's rule for the transposed problem, a gather"
    return name, reason


def _rule_of_sizes(
    height: tuple[str, int], width: tuple[str, int], flops: int, thresholds: Thresholds
) -> tuple[str, str]:
    (tall, rows), (wide, columns) = height, width
    if rows <= columns:
        return RULE_COLUMNS, (
            f"{tall}={rows} is not above {wide}={columns}, so that cutting columns loses less than "
            "cutting rows"
        )
    low, high = thresholds.low, thresholds.high
    count = f"{tall}={rows} is above {wide}={columns}, and {flops:.2g} operations of a rank are"
    if flops < low:
        return RULE_ROWS[0], f"{count} below the threshold {low:.2g}"
    if flops > high:
        return RULE_ROWS[2], f"{count} above the upper threshold {high:.2g}"
    return RULE_ROWS[1], f"{count} between the thresholds {low:.2g} and {high:.2g}"


@dataclass(frozen=True)
class Observation:
    """Measured seconds of a problem by name of schedule; at least those of the best of the rule's
    four schedules."""

    problem: Problem
    seconds: Mapping[str, float]

    def loss(self, name: str) -> float:
        """Excess of a schedule's time over the best time, as a share of the best time."""
        if name not in self.seconds:
            return UNMEASURED_LOSS
        return self.seconds[name] / min(self.seconds.values()) - 1.0


def fit_thresholds(observations: Iterable[Observation]) -> Thresholds:
    """The thresholds with the smallest loss of the rule on measured problems.

    Problems with m <= k do not depend on the thresholds and are left out; so are problems with A
    transposed. Of thresholds with equal loss, the pair with the ratio nearest to the paper's wins.

    Raises:
        ValueError: no measured problem depends on the thresholds.
    """
    observations = [o for o in observations if not o.problem.kind.inner]
    seen = [o for o in observations if o.problem.m > o.problem.k]
    if not seen:
        raise ValueError("fit_thresholds: required a measured problem with m > k, got none")
    flops = sorted({o.problem.flops for o in seen})
    ends = [flops[0] / 2, *flops, flops[-1] * 2]
    marks = [sqrt(a * b) for a, b in pairwise(ends)]  # before, between and after the sizes
    by_row = (
        [sum(o.loss(name) for o in seen if o.problem.flops == size) for size in flops]
        for name in RULE_ROWS
    )
    below, between, above = (list(accumulate(losses, initial=0.0)) for losses in by_row)
    # The first `i` sizes are below the lower mark, the first `j` not above the upper one.
    loss = {
        (marks[i], marks[j]): below[i] + between[j] - between[i] + above[-1] - above[j]
        for i in range(len(marks))
        for j in range(i, len(marks))
    }

    def key(pair: tuple[float, float]) -> tuple[float, float, float]:
        low, high = pair
        return round(loss[pair], 9), abs(high / low - RULE_RATIO), low

    low, high = min(loss, key=key)
    note = (
        f"to {len(seen)} problems, on which the rule loses {loss[low, high] / len(seen):.1%} "
        "of the best schedule's time"
    )
    return Thresholds(low, high, Provenance("fitted", note=note))
