"""Plans that no operator makes yet, built from the same stages: two products that follow each
other, and operands with scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ficco.plan import Plan, Step, Transfer
from ficco.plan.model import Product, Region
from ficco.problem import Problem
from ficco.schedules import Schedule
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.gather import GatherStage, GatherWorld
from ficco.schedules.scatter import ScatterStage, ScatterWorld
from ficco.specification import Buffer, Contraction, Specification


@dataclass(frozen=True)
class Chained:
    """``y = reduce_scatter(relu(all_gather(a) @ b) @ c)``: a [m/W, k], b [k, h], c [h, n]."""

    rows: tuple[int, ...]
    h: int
    n: int
    k: int
    dtype: str = "bfloat16"
    operator: str = "all_gather_matmul_reduce_scatter"

    @property
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


@dataclass(frozen=True)
class Scaled:
    """``out = (all_gather(a) * rows) @ (b * cols)``: a [m/W, k] and b [k, n] in float8, a factor
    for each row of a and for each column of b, out [m, n] in bfloat16."""

    rows: tuple[int, ...]
    n: int
    k: int
    operator: str = "all_gather_scaled_matmul"

    @property
    def world(self) -> int:
        return len(self.rows)

    @cached_property
    def whole(self) -> Problem:
        return Problem("all_gather_matmul", self.rows, self.n, self.k, "bfloat16")

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        asked, ranks = self.whole.specification, range(self.world)
        a, b = (one._replace(dtype="float8_e4m3fn") for one in asked.operands)
        row_shapes = tuple((self.rows[rank], 1) for rank in ranks)
        return {
            "a": a,
            "b": b,
            "row scale": Buffer("row scale", "R", "float32", row_shapes, "operand", leaves=True),
            "column scale": Buffer(
                "column scale", "S", "float32", ((1, self.n),) * self.world, "operand"
            ),
            "out": asked.results[0],
        }

    @cached_property
    def specification(self) -> Specification:
        asked = self.whole.specification
        *operands, out = self.buffers.values()
        return Specification(
            operands=tuple(operands),
            results=(out,),
            contractions=(asked.contractions[0]._replace(scales=("R", "S")),),
            exchanges={name: asked.exchanges["A"] for name in ("A", "R")},
        )


class ScaledWorld(GatherWorld):
    """Each buffer in which rows of a lie has a counterpart for their scales."""

    def __init__(self, row_scale: Buffer, column_scale: Buffer, *rest) -> None:
        super().__init__(*rest)
        self.column_scale, self.scale_of = column_scale.name, {self.a.name: row_scale.name}
        for one in [one for one in self.buffers if one.holds == self.a.holds]:
            name, shapes = (
                f"{one.name} {row_scale.name}",
                tuple((rows, 1) for rows, _ in one.shapes),
            )
            self.scale_of[one.name] = self.buffer(name, row_scale, shapes, leaves=one.leaves).name


class ScaledStage(GatherStage):
    """One rank's steps. The scales of rows go before the rows, so that a signal is for both; those
    of pieces of columns go with the first one."""

    world: ScaledWorld

    def _scale(self, region: Region) -> Region:
        return region._replace(buffer=self.world.scale_of[region.buffer], col=0, col_stop=1)

    def _scaled(self, product: Product) -> Product:
        right = Region(self.world.column_scale, self.me, 0, 1, 0, self.problem.n)
        return product._replace(scales=(self._scale(product.a), right))

    def _own_product(self) -> Product:
        return self._scaled(super()._own_product())

    def _of_peer(self, peer: int) -> list[Product]:
        return [self._scaled(product) for product in super()._of_peer(peer)]

    def _open(self, tell, published: tuple[int, ...]) -> list[list[Step]]:
        copies = super()._open(tell, published)
        return [[one for copy in group for one in self._with_scales(copy)] for group in copies]

    def _with_scales(self, copy: Step) -> list[Step]:
        assert copy.transfer is not None
        if copy.transfer.src.col:
            return [copy]
        ends = Transfer(self._scale(copy.transfer.src), self._scale(copy.transfer.dst))
        first = copy._replace(label=f"scale {copy.label}", posts=(), transfer=ends)
        return [first, copy._replace(waits=())]

    def _publish(self) -> tuple[int, ...]:
        published = super()._publish()
        scales = [self._with_scales(self.steps[step])[0] for step in published]
        return (*published, *(self.add(step._replace(label="publish")) for step in scales))

    def _place(self, lane: str, src: Region, dst: Region, *rest, **how) -> int:
        placed = super()._place(lane, src, dst, *rest, **how)
        if src.buffer == self.world.a.name and not src.col:
            super()._place(lane, self._scale(src), self._scale(dst), *rest, **how)
        return placed


def scaled(problem: Scaled, name: str, cap: int | None = None) -> list[Plan]:
    """The Plans of all ranks: with each piece of A travel the factors of its rows."""
    a, b, row_scale, column_scale, out = problem.buffers.values()
    words = WordAllocator(problem.world)
    schedule = Schedule.parse(name)
    rest = problem.whole, schedule, words, cap, (a, b, out)
    world = ScaledWorld(row_scale, column_scale, *rest)
    found = []
    for rank in range(problem.world):
        builder = Builder(problem, rank)
        gather = ScaledStage(world, builder)
        gather.run()
        if builder.peers:
            builder.retire(gather.silent())
        found.append(builder.plan(name, world.buffers, words, gather.staging.stages))
    return found
