"""Families of operators that are planned, predicted and decided alike, as rows of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ficco.errors import InvalidArgument
from ficco.heuristics.arrivals import Received, crossed, last_arrival, received
from ficco.heuristics.candidates import candidates, predictable, suited
from ficco.heuristics.losses import Losses, bounds, losses
from ficco.heuristics.model import TIE, Predict
from ficco.heuristics.rule import rule
from ficco.machine import Machine
from ficco.plan import Plan
from ficco.problems.experts import EXPERT_OPERATORS, ExpertLayer
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.specification import AnyProblem
from ficco.schedules import NAMED, Schedule, plan, plans, refusal
from ficco.schedules.attention import attention_plans
from ficco.schedules.attention import refusal as attention_refusal
from ficco.schedules.experts import expert_plans
from ficco.schedules.heads import heads_plans
from ficco.simulate import predict, simulate

SERIAL = "serial"

#: Kinds of bars that are what a rank computes, without copies and sums of parts.
COMPUTED = ("matmul", "attend", "apply")

#: Schedules without figures of a machine: on a GPU the vendor's collective, then the product, which
#: never does harm; on CPUs, whose calls do not wait for a host, few products.
FALLBACK = {"eager": "serial:collective", "queued": "serial:collective", "idle": "growing"}
#: On CPUs over several hosts what crosses goes in pieces, so that products begin with the first, or
#: the first is sent early. Wide blocks of a product are cut by columns: a library's product of few
#: rows can take twice as long (docs/results/hosts-cpu-16.md).
IN_ROWS, IN_COLUMNS = "shard-overlap:pieces=8", "hetero-unfused-2d:pieces=8,order=peer"

#: For problems with unequal rows all ranks are simulated, in time quadratic in their number. This
#: is the most schedules times ranks squared: for four ranks all schedules, for eight the serial
#: ones and five others, the best ones if rows were equal. That loses, in predicted time and in the
#: mean, nothing where rows differ by up to 30 %, 0.1 % where by one, and 0.5 to 0.8 % where half of
#: them are 0 or their distribution is exponential; 14 % at worst (300 problems of 8 ranks on h100-8
#: and mi300x-8).
SIMULATION_BUDGET = 320
#: At least so many schedules, and no more where rows differ by at most 1/64.
FEWEST, NEARLY_EQUAL = 3, 64


def _no_turns(problem: AnyProblem, nbytes: int) -> str:
    return (
        f"required none for {problem.operator}, whose steps do not take turns on staging, "
        f"got {nbytes}"
    )


@dataclass(frozen=True)
class Family:
    """Operators that are planned, predicted and decided alike.

    Attributes:
        make: Plans of a problem under a schedule: of some ranks, None for all; with a cap on
            staging in bytes, None for no cap; with columns packed where they land.
        compared: names of the schedules to compare.
        default: schedule of a problem in a mode where nothing can be predicted.
        margin: predicted gain over serial below which serial is taken; None: the machine's.
        tie: share within which predictions are equal; the first of equal ones is taken.
        refusal: why a schedule cannot serve a problem; empty if it can.
        uncapped: why a cap of so many bytes on staging is refused; empty if it is not.
        rounded: problem whose decision holds for this one, too.
        measured: whether machines have tuned entries and thresholds of the paper's rule. Eager
            calls of other problems are predicted as queued.
    """

    make: Callable[..., Sequence[Plan]]
    compared: tuple[str, ...] = ()
    default: Callable[[Any, str], str] = lambda problem, mode: SERIAL
    margin: float | None = None
    tie: float = 0.0
    refusal: Callable[[Any, Schedule], str] = lambda problem, schedule: ""
    uncapped: Callable[[Any, int], str] = _no_turns
    rounded: Callable[[Any], Any] = lambda problem: problem
    measured: bool = False

    def empty(self, problem: Any) -> bool:
        """Whether a problem has nothing to compute."""
        results = problem.specification.results
        return not any(rows * cols for one in results for rows, cols in one.shapes)

    def evened(self, problem: Any) -> tuple[Any, int]:
        """The problem with equal rows, and how many schedules to simulate with unequal rows."""
        return problem, 0

    def rule(self, problem: Any, machine: Machine) -> tuple[Schedule, str] | None:
        """The schedule and the reason by a machine's thresholds, where it has some for these."""
        return None

    def losses(
        self, problem: Any, schedule: Schedule, machine: Machine, predict: Predict
    ) -> Losses | None:
        """The losses of a schedule, where they have names."""
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
        """The Plans of some ranks, or of all, with at most so many bytes of staging.

        Raises:
            ValueError: the schedule cannot serve the problem, or not with such a cap.
        """
        if staging_bytes is not None and (why := self.uncapped(problem, staging_bytes)):
            raise InvalidArgument("workspace_bytes", why)
        return self.make(problem, schedule, ranks, staging_bytes, packs_columns)

    def schedules(
        self, problem: Any, machine: Machine, offers: Sequence[str] | None = None
    ) -> list[Schedule]:
        """The schedules to compare; with the offers of an engine, those that ``auto`` compares."""
        named = map(Schedule.parse, self.compared)
        return [schedule for schedule in named if not self.refusal(problem, schedule)]

    def seconds(
        self, problem: Any, schedule: Schedule, machine: Machine, mode: str = "queued"
    ) -> float:
        """Simulated seconds of a call."""
        return simulate(self.plans(problem, schedule), machine, mode).stop_s

    def received(self, problem: Any, rank: int) -> list[Received]:
        """Bytes that a rank gets, in stages."""
        return received(problem, rank)

    def bounds(
        self, problem: Any, machine: Machine, mode: str, predict: Predict | None = None
    ) -> dict[str, float]:
        """Seconds of the parts of a call, with nothing else running, on the slowest rank: what is
        computed first, then what travels, by each mover that can move it."""
        plans = self.plans(problem, Schedule.parse(SERIAL))
        timeline = simulate(plans, machine, mode)
        spent = [
            sum(bar.stop_s - bar.start_s for bar in bars if bar.kind in COMPUTED)
            for bars in timeline.ranks
        ]
        arrivals = [
            max(last_arrival(self.received(problem, plan.rank), machine), crossed(plan, machine))
            for plan in plans
        ]
        return {"computed": max(spent), "copies": max(arrivals)}

    def ideal(
        self,
        problem: Any,
        machine: Machine,
        mode: str = "queued",
        predict: Predict | None = None,
    ) -> float:
        """Lower bound in seconds: what is computed, or what travels by the fastest mover if that
        takes longer."""
        computed, *moved = self.bounds(problem, machine, mode, predict).values()
        return max(computed, min(moved, default=0.0))


# Products.


def movements(problem: Problem) -> tuple[Problem, ...]:
    """Problems without products which, one after the other, move what a problem moves.

    What is scattered travels as blocks of an all-to-all. The sum of what arrives is not in it, nor
    the memory traffic of that; sums that return are gathered.

    >>> [str(one) for one in movements(Problem("matmul_reduce_scatter", (2, 2), 8, 4, "float32"))]
    ['all_to_all_matmul(m=4 (4 x 2 ranks), n=0, k=8, float32)']
    """
    kind, width, dtype = problem.kind, problem.n, problem.out_dtype
    if not kind.scatters:
        return (replace(problem, n=0),)
    table = problem.blocks or (problem.rows,) * problem.world
    away = Problem.of_blocks("all_to_all_matmul", table, 0, width, dtype)
    if not kind.returns:
        return (away,)
    return away, Problem("all_gather_matmul", problem.rows, 0, width, dtype)


class ProductFamily(Family):
    """Products, of which machines have more figures."""

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

        On a mesh they copy over all links at once, but for Async TP, which goes peer after peer.
        Tiles that wait are left out where the machine has no figures for them.
        """
        if offers is not None:
            compared = candidates(problem, machine, tuple(offers))
            return [one for one in compared if predictable(one, problem, machine)]
        named = [
            schedule if name == "shard-overlap" else suited(schedule, problem, machine)
            for name, schedule in NAMED.items()
            if not refusal(problem, schedule) and (name != "tiled" or machine.tiled is not None)
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


def _product_plans(
    problem: Problem, schedule: Schedule, ranks: Sequence[int] | None, *how: Any
) -> list[Plan]:
    if ranks is None:
        return plans(problem, schedule, *how)
    return [plan(problem, schedule, rank, *how) for rank in ranks]


def _product_default(problem: Problem, mode: str) -> str:
    if problem.transposed:  # which no collective serves
        return FALLBACK["idle"]
    if problem.hosts > 1 and mode == "idle":
        wide = problem.kind.scatters and problem.n > max(problem.rows)
        return IN_COLUMNS if wide else IN_ROWS
    return FALLBACK[mode]


def _columns(problem: Problem, nbytes: int) -> str:
    if not problem.kind.scatters:
        return ""
    return (
        f"required an operator that gathers, got {problem.operator}, whose calls go by columns of "
        "b under a cap; plan fewer columns with n"
    )


PRODUCTS = ProductFamily(
    _product_plans,
    default=_product_default,
    tie=TIE,
    refusal=refusal,
    uncapped=_columns,
    measured=True,
)

# Attention.

#: Attention to keys that are gathered. Growing groups are few calls of a library; the others wait
#: less for the first or after the last piece. On one H100 two lanes took 0.94 to 0.99 of the time
#: of one for growing groups, 0.89 to 0.99 for single shards
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

#: Attention by heads. More pieces are more calls of a library on fewer heads. On 2 H100 two groups
#: on one lane lost 3 % to serial, simulated 1 %; two groups on two lanes gained 6 %, simulated 4 %
#: (docs/results/attention-h100-2.csv).
BY_HEADS = Family(
    lambda problem, schedule, ranks, *_: heads_plans(problem, schedule, ranks),
    compared=(
        "serial",
        *(f"uniform-fused-1d:pieces={pieces}" for pieces in (2, 4, 8)),
        *(f"uniform-fused-1d:pieces={pieces},copy=4" for pieces in (2, 4, 8)),
        *(f"uniform-fused-1d:pieces={pieces},compute=2" for pieces in (2, 4)),
    ),
    margin=0.025,
)

# Layers of experts.


def _rounded(layer: ExpertLayer) -> ExpertLayer:
    """Round the capacity up to a multiple of 2^k / 8, so that close token counts, which change from
    step to step, share a decision."""
    step = 1 << max((layer.capacity - 1).bit_length() - 4, 0)
    return replace(layer, capacity=-(-layer.capacity // step) * step)


#: ``uniform-fused-1d`` cuts by experts, whose weights are then read once; of unequal pieces little
#: is left to wait for before the first products and after the last ones. The margin: what was taken
#: for 12 layers on one H100 with replayed arrivals (docs/results/experts-replay-h100-4.md and
#: -8.md), with predicted gains of 3 % and more, was 1.03 to 1.44 times as fast as serial. Of those
#: layers, what is fastest as simulated, or first of what is within 1 % of that, loses 0.4 % of the
#: fastest of the seven that were measured in the mean, 1.3 % at worst; without these ties 0.5 and
#: 2.3 %. A second lane gains 1 to 4 % with wide experts and loses 1 to 4 % with narrow ones, as is
#: simulated.
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
    rounded=_rounded,
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
        NotImplementedError: it is of none.
    """
    if problem.operator not in FAMILIES:
        raise NotImplementedError(f"required one of {', '.join(FAMILIES)}, got {problem.operator}")
    return FAMILIES[problem.operator]
