"""All that can be asked, by the name of the operator: its sizes, its Plans, and what ``auto``
takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ficco.errors import InvalidArgument
from ficco.heuristics import Decision, decide, problem_of_sizes
from ficco.heuristics.arrivals import Received
from ficco.heuristics.attention import BY_HEADS, GATHERED
from ficco.heuristics.candidates import suited
from ficco.heuristics.experts import EXPERTS
from ficco.heuristics.family import SERIAL, Family
from ficco.heuristics.losses import bounds
from ficco.machine import Machine
from ficco.plan import Plan, Planned
from ficco.problems.attention import AttentionProblem
from ficco.problems.experts import EXPERT_OPERATORS, ExpertLayer
from ficco.problems.heads import HeadsProblem
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.sizes import REQUIRED, SIZES, Size
from ficco.problems.specification import gated as named_gated
from ficco.schedules import NAMED, Schedule, plan, plans, refusal
from ficco.simulate import predict

# Families.


class Products(Family):
    """Products, of which more is known than of other families."""

    def plans(
        self,
        problem: Any,
        schedule: Schedule,
        packs_columns: bool = False,
        staging_bytes: int | None = None,
    ) -> Sequence[Plan]:
        if staging_bytes is not None and problem.kind.scatters:
            raise InvalidArgument(
                "workspace_bytes",
                f"required an operator that gathers, got {problem.operator}, whose calls go by "
                "columns of b under a cap; plan fewer columns with n",
            )
        return plans(problem, schedule, staging_bytes, packs_columns)

    def decide(self, problem: Any, wanted: str | Schedule = "auto", **how: Any) -> Decision:
        return decide(problem, wanted, **how)

    def schedules(self, problem: Any, machine: Machine) -> list[Schedule]:
        """Every named schedule, and the serial composition with the vendor's collective.

        On a mesh they copy over all links at once, but for Async TP, which goes peer after peer.
        Tiles that wait are left out where the machine has no figures for them.
        """
        named = [
            schedule if name == "shard-overlap" else suited(schedule, problem, machine)
            for name, schedule in NAMED.items()
            if not refusal(problem, schedule) and (name != "tiled" or machine.tiled is not None)
        ]
        return [*[Schedule.parse("serial:collective")] * bool(machine.all_gather), *named]

    def seconds(
        self, problem: Any, schedule: Schedule, machine: Machine, mode: str = "queued"
    ) -> float:
        return predict(problem, schedule, machine, mode)

    def received(self, problem: Any, rank: int) -> list[Received]:
        return [
            [
                part.block(peer, rank) * part.k * part.itemsize
                for peer in range(part.world)
                if peer != rank
            ]
            for part in movements(problem)
        ]

    def bounds(self, problem: Any, machine: Machine, mode: str) -> dict[str, float]:
        return bounds(problem, machine, predict, mode)


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


def _some(problem: Problem, schedule: Schedule, ranks: Sequence[int] | None) -> list[Plan]:
    some = range(problem.world) if ranks is None else ranks
    return [plan(problem, schedule, rank) for rank in some]


PRODUCTS = Products(_some, compared=(SERIAL,), default=SERIAL)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(OPERATORS, PRODUCTS),
    **dict.fromkeys(("all_gather_attention", "all_gather_attention_backward"), GATHERED),
    "ulysses_attention": BY_HEADS,
    **dict.fromkeys(EXPERT_OPERATORS, EXPERTS),
}


def family_of(problem: Planned) -> Family:
    """The family of a problem.

    Raises:
        NotImplementedError: it is of none.
    """
    if problem.operator not in FAMILIES:
        raise NotImplementedError(f"required one of {', '.join(FAMILIES)}, got {problem.operator}")
    return FAMILIES[problem.operator]


# Problems from sizes.


def _attention(
    operator: str, world: int, dtype: str, sequence: int, heads: int, head_size: int, **more: Any
) -> AttentionProblem | HeadsProblem:
    if sequence % world:
        raise InvalidArgument("sequence", f"required a multiple of {world} ranks, got {sequence}")
    kv_heads = heads if more["kv_heads"] is None else more["kv_heads"]
    if kv_heads < 1 or heads % kv_heads:
        raise InvalidArgument("kv_heads", f"required a divisor of {heads} heads, got {kv_heads}")
    del more["kv_heads"]
    shape = more.pop("batch"), heads, kv_heads, head_size
    problem = AttentionProblem(world, sequence // world, *shape, dtype, **more)
    return problem if operator == problem.operator else HeadsProblem(problem)


def _experts(
    operator: str,
    world: int,
    dtype: str,
    experts: int,
    capacity: int,
    k: int,
    h: int,
    n: int,
    activation: str,
    gated: bool,
    split: str,
    **more: Any,
) -> ExpertLayer:
    gathers = split == "columns"
    if not gathers and experts % world:
        raise InvalidArgument("experts", f"required a multiple of {world} ranks, got {experts}")
    sizes = experts if gathers else experts // world, capacity, k, h, n
    function = named_gated(activation) if gated else activation
    return ExpertLayer(operator, world, *sizes, dtype, function, gathers=gathers, **more)


class Askable(NamedTuple):
    """An operator that sizes describe.

    Attributes:
        whose: what all operators with such sizes are called.
        sizes: by name.
        make: the problem of an operator, ranks, a dtype and all sizes.
        spread: of how rows are spread over ranks, and ranks over hosts, what can be said.
    """

    whose: str
    sizes: Mapping[str, Size]
    make: Callable[..., Planned]
    spread: tuple[str, ...] = ()


def _product(operator: str, world: int, dtype: str, m: int, n: int, k: int, **more: Any) -> Problem:
    return problem_of_sizes(operator, m, n, k, dtype, world, **more)


#: The operators of which a call can be described without its operands.
ASKABLE: dict[str, Askable] = {
    **{name: Askable(*SIZES[name], _product, ("rows", "hosts")) for name in OPERATORS},
    "all_gather_attention": Askable(*SIZES["all_gather_attention"], _attention, ("hosts",)),
    "ulysses_attention": Askable(*SIZES["ulysses_attention"], _attention, ("hosts",)),
    "experts": Askable(*SIZES["experts"], _experts, ("hosts",)),
}


def size_of(operator: str, name: str) -> type | None:
    """The type of a size of an operator that is given; None if it has no such size."""
    asked = ASKABLE.get(operator)
    return asked.sizes[name].kind if asked and name in asked.sizes else None


def sizes_of(operator: str) -> list[str]:
    """The names of the sizes without which no call of an operator is described."""
    return [name for name, size in ASKABLE[operator].sizes.items() if size.default is REQUIRED]


def problem_of(
    operator: str, world: int, dtype: str, sizes: Mapping[str, Any], **spread: Any
) -> Planned:
    """The problem of a call on so many ranks.

    Args:
        sizes: by name, those that were given, as :data:`ASKABLE` has them.
        spread: ``hosts``, and of products ``rows``.

    Raises:
        ValueError: a size is wrong, missing, or none of the operator's.
        NotImplementedError: the dtype is not served.
    """
    if operator not in ASKABLE:
        raise InvalidArgument("operator", f"required one of {', '.join(ASKABLE)}, got {operator!r}")
    asked = ASKABLE[operator]
    spread = {name: value for name, value in spread.items() if value not in (None, 1)}
    for name in (*sizes, *spread):
        if name not in (asked.sizes if name in sizes else asked.spread):
            there = ", ".join(asked.sizes)
            raise InvalidArgument(name, f"required none for {operator}, which has {there}")
    needed = sizes_of(operator)
    if missing := [name for name in needed if name not in sizes]:
        there = ", ".join(needed)
        raise InvalidArgument(missing[0], f"required, since {operator} needs {there}; got none")
    if world < 1:
        raise InvalidArgument("world", f"required at least 1, got {world}")
    given = {name: size.default for name, size in asked.sizes.items()} | dict(sizes)
    for name, value in given.items():
        asked.sizes[name].check(name, value)
    return asked.make(operator, world, dtype, **given, **spread)
