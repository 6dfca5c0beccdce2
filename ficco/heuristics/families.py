"""All that can be asked, by the name of the operator: its sizes, its Plans, and what ``auto``
takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ficco.errors import InvalidArgument
from ficco.heuristics import Decision, decide
from ficco.heuristics.arrivals import Received
from ficco.heuristics.attention import BY_HEADS, GATHERED
from ficco.heuristics.candidates import suited
from ficco.heuristics.experts import EXPERTS
from ficco.heuristics.family import SERIAL, Family
from ficco.heuristics.losses import bounds
from ficco.machine import Machine
from ficco.plan import Plan, Planned
from ficco.problems.experts import EXPERT_OPERATORS
from ficco.problems.products import OPERATORS, Problem
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
