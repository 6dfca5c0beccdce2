"""Plans that no operator makes yet, built from the same stages: two products that follow each
other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ficco.plan import Plan, Step, Transfer
from ficco.plan.model import Region
from ficco.problems.products import Problem
from ficco.problems.specification import AnyProblem, Buffer, Contraction, Specification
from ficco.schedules import Schedule
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.gather import GatherStage, GatherWorld
from ficco.schedules.scatter import ScatterStage, ScatterWorld


@dataclass(frozen=True)
class Chained(AnyProblem):
    """``y = reduce_scatter(relu(all_gather(a) @ b) @ c)``: a [m/W, k], b [k, h], c [h, n]."""

    rows: tuple[int, ...]
    h: int
    n: int
    k: int
    dtype: str = "bfloat16"
    operator: str = "all_gather_matmul_reduce_scatter"
    hosts: int = 1

    @cached_property
    def world(self) -> int:
        return len(self.rows)

    @cached_property
    def first(self) -> Problem:
        return Problem("all_gather_matmul", self.rows, self.h, self.k, self.dtype)

    @cached_property
    def second(self) -> Problem:
        return Problem("matmul_reduce_scatter", self.rows, self.n, self.h, self.dtype)

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """Operands, what lies between the products, and the result."""
        one, two = self.first.specification, self.second.specification
        (a, b), (active, c) = one.operands, two.operands
        return {
            "a": a,
            "b": b,
            "c": c._replace(name="c", holds="C"),
            "hidden": one.results[0]._replace(name="hidden", memory="local"),
            "active": active._replace(name="active", holds="H", memory="local"),
            "y": two.results[0]._replace(name="y", holds="H @ C"),
        }

    @cached_property
    def specification(self) -> Specification:
        one, two = self.first.specification, self.second.specification
        buffers = self.buffers
        return Specification(
            operands=(buffers["a"], buffers["b"], buffers["c"]),
            results=(buffers["y"],),
            contractions=(
                *one.contractions,
                Contraction("H", "C", "H @ C", two.contractions[0].summed),
            ),
            exchanges={"A": one.exchanges["A"], "H @ C": two.exchanges["A @ B"]},
            functions={("relu", "A @ B"): "H"},
        )


def chained(problem: Chained, gathers: str, scatters: str) -> list[Plan]:
    """The Plans of all ranks. Rows go on to the second product as soon as the first has made them:
    each block of the result leaves while later rows of A still arrive."""
    buffers, words = problem.buffers, WordAllocator(problem.world)
    one = Schedule.parse(gathers)
    two = Schedule.parse(scatters)
    gathering = GatherWorld(
        problem.first, one, words, operands=(buffers["a"], buffers["b"], buffers["hidden"])
    )
    scattering = ScatterWorld(
        problem.second, two, words, (buffers["active"], buffers["c"], buffers["y"]), suffix=" 2"
    )
    added = [*gathering.buffers, buffers["hidden"], buffers["active"], *scattering.buffers]
    found = []
    for rank in range(problem.world):
        builder = Builder(problem, rank)
        gather, scatter = GatherStage(gathering, builder), ScatterStage(scattering, builder)
        made: list[tuple[int, int]] = []
        waiting = list(enumerate(scatter.mine.by_group))
        for group in gather.flow(scatter.begun()):
            for first, last in gather.completed(group):
                here = Region("hidden", rank, first, last, 0, problem.h)
                move = Transfer(here, here._replace(buffer="active"), function="relu")
                lane = builder.steps[-1].lane if builder.steps else "compute0"
                builder.add(Step("place", lane, "relu", transfer=move))
                made.append((first, last))
            ready = [item for item in waiting if _made(scatter, item[1], made)]
            waiting = [item for item in waiting if item not in ready]
            for number, units in ready:
                if units:
                    scatter.multiply(number, units)
        assert not waiting
        scatter.finish()
        if builder.peers:
            builder.retire(gather.silent() + scatter.silent())
        found.append(builder.plan(f"{gathers} then {scatters}", added, words))
    return found


def _made(scatter: ScatterStage, units: list, made: list[tuple[int, int]]) -> bool:
    """Whether all rows that some units are products of are there."""
    rows = {row for first, last in made for row in range(first, last)}
    return all(
        rows.issuperset(range(region.row, region.row_stop))
        for unit in units
        for region in scatter.mine.in_operand("active", unit.peer)[unit.ordinal : unit.ordinal + 1]
    )
