"""Builds Plans from a Problem and a Schedule.

The Plans of a registered schedule come from the user's function (:func:`register`). They are proven
(:func:`ficco.plan.check`), with those of all other ranks, before a problem is first predicted or
run with the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from ficco.plan.model import LibraryMove, Plan, Product, Products, Region, Step, paused
from ficco.problems.products import Problem
from ficco.problems.scaling import Scaling
from ficco.problems.specification import ITEMSIZES, Buffer
from ficco.schedules.builder import Builder, Stage, WordAllocator, World, scaled, whole
from ficco.schedules.gather import GatherStage, GatherWorld, InnerGatherStage, StagingTooSmall
from ficco.schedules.one_shot import OneShotStage, OneShotWorld
from ficco.schedules.scatter import ScatterStage, ScatterWorld
from ficco.schedules.space import KNOBS, NAMED, OWN, Schedule
from ficco.schedules.tiled import (
    TiledGatherStage,
    TiledGatherWorld,
    TiledScatterStage,
    TiledScatterWorld,
)

#: Recipes of float8 that kernels with waiting tiles serve: their factors multiply whole sums.
TILED_RECIPES = ("tensor", "row")


def plan(
    problem: Problem,
    schedule: Schedule,
    rank: int,
    staging_bytes: int | None = None,
    packs_columns: bool = False,
) -> Plan:
    """The Plan of one rank.

    ``staging_bytes`` caps the staging of gathering operators: if the pieces do not all fit, they
    use it as a ring. ``packs_columns``: copies cannot leave gaps between rows, so that pieces of
    columns are packed where they land (:class:`ficco.problems.specification.Buffer`).

    Raises:
        ValueError: the schedule cannot serve the operator, or the cap is too small for its largest
            step.
    """
    return plans_of(problem, schedule, [rank], staging_bytes, packs_columns)[0]


def plans(
    problem: Problem,
    schedule: Schedule,
    staging_bytes: int | None = None,
    packs_columns: bool = False,
) -> list[Plan]:
    """The Plans of all ranks."""
    return plans_of(problem, schedule, range(problem.world), staging_bytes, packs_columns)


def refusal(problem: Problem, schedule: Schedule) -> str:
    """Why a schedule cannot serve a Problem; empty if it can."""
    if schedule.own:
        try:
            own_plans(problem, schedule)
        except ValueError as error:
            return str(error)
    why = next(_refusals(problem, schedule), "")
    return why and f"schedule {schedule}: {why}"


def _refusals(problem: Problem, schedule: Schedule) -> Iterator[str]:
    """Yield reasons why a schedule cannot serve a Problem, each with a remedy."""
    kind, scaling, other = problem.kind, problem.scaling, "take another schedule"
    grouping, operator, tiled = schedule.grouping, problem.operator, schedule.grouping == "tiled"
    reads = "ranks read memory of their peers (pull)"
    if (schedule.beta or schedule.sums_in_place) and not kind.sums:
        option = grouping if schedule.sums_in_place or grouping == "ring" else "beta"
        why = f"which {operator} does not; leave it out"
        yield f"{option} is for operators that sum over ranks, {why}"
    if grouping == "two-shot" and not kind.returns:
        yield f"required an operator whose sums return to all ranks, got {operator}; take one-shot"
    if tiled and kind.inner:
        why = f"which {operator} has not: its products add up to all rows; {other}"
        yield f"tiled is for operators each of whose rows is one product, {why}"
    if problem.hosts > 1 and not schedule.own:
        why = "which no rank can do between hosts; take"
        if schedule.pull:
            yield f"{reads}, {why} a schedule that pushes"
        if tiled:
            yield f"tiles wait for signals, {why} another schedule"
        if schedule.beta:
            yield f"blocks go from rank to rank, or sums come first (beta), {why} another schedule"
    if problem.transposed:
        why = "which is not served for rows that lie as columns; leave it out"
        if schedule.own or tiled:
            yield f"the schedule is {grouping}, {why}"
        if schedule.pull or schedule.mover != "dma":
            yield f"{reads if schedule.pull else f'the mover is {schedule.mover}'}, {why}"
    if scaling and schedule.beta:
        adds = "ring" if grouping == "ring" else "beta"
        yield f"{adds} adds to a sum, unlike products of float8 operands; {other}"
    if scaling and tiled and (why := _untiled(scaling)):
        yield f"tiled has no kernel for {why}; {other}"


def _untiled(scaling: Scaling) -> str:
    """Operands that no kernel with waiting tiles serves; empty if a kernel serves them."""
    if scaling.recipe not in TILED_RECIPES:
        return f"float8 operands scaled by {scaling.recipe}"
    if scaling.source:
        return "operands that the call casts"
    return "" if ITEMSIZES[scaling.out] == 2 else f"results of {scaling.out}"


def same_plans(problem: Problem, schedules: Iterable[Schedule]) -> dict[Schedule, Schedule]:
    """By schedule, the first of the schedules that has equal Plans.

    With one peer, for example, growing, shrinking and shard-overlap have equal steps.

    Raises:
        ValueError: as :func:`plan`.
    """
    by_first: dict[Plan, list[Schedule]] = {}
    first_with: dict[Schedule, Schedule] = {}
    for schedule in schedules:
        alike = by_first.setdefault(_nameless(plan(problem, schedule, 0)), [])
        for other in alike:  # usually empty: most schedules differ in the Plan of rank 0
            pairs = zip(plans(problem, schedule), plans(problem, other), strict=True)
            if all(_nameless(one) == _nameless(two) for one, two in pairs):
                first_with[schedule] = other
                break
        else:
            alike.append(schedule)
            first_with[schedule] = schedule
    return first_with


def _nameless(plan: Plan) -> Plan:
    """The Plan without the name of its schedule."""
    return replace(plan, schedule="")


@paused()
def plans_of(
    problem: Problem,
    schedule: Schedule,
    ranks: Sequence[int],
    staging_bytes: int | None,
    packs_columns: bool,
) -> list[Plan]:
    """The Plans of some ranks: see :func:`plan`."""
    if schedule.own:
        every = own_plans(problem, schedule)
        if staging_bytes is not None and every[0].slot_bytes > staging_bytes:
            text = f"schedule {schedule}: it has no ring of steps"
            raise StagingTooSmall(text, every[0].slot_bytes)
        return [every[rank] for rank in ranks]
    if why := refusal(problem, schedule):
        raise ValueError(why)
    if schedule.mover == "collective" and problem.world > 1:
        return [_collective(problem, schedule, rank) for rank in ranks]
    world_type, stage_type = _builder_types(problem, schedule)
    words = WordAllocator(problem.world)
    world = world_type(problem, schedule, words, cap=staging_bytes, packs_columns=packs_columns)
    return [stage_type(world, Builder(problem, rank)).plan() for rank in ranks]


def _builder_types(problem: Problem, schedule: Schedule) -> tuple[type[World], type[Stage]]:
    """The classes whose objects plan a problem: of all ranks, and of one rank."""
    if schedule.sums_in_place:
        return OneShotWorld, OneShotStage
    if schedule.grouping == "tiled":
        if problem.kind.scatters:
            return TiledScatterWorld, TiledScatterStage
        return TiledGatherWorld, TiledGatherStage
    if problem.kind.scatters:
        return ScatterWorld, ScatterStage
    return GatherWorld, InnerGatherStage if problem.kind.inner else GatherStage


def _collective(problem: Problem, schedule: Schedule, rank: int) -> Plan:
    """The Plan of the baseline: the library's collective before or after one product."""
    specification, kind, a = problem.specification, problem.kind, problem.left
    b, out, added = specification.operands[1], specification.results[0], list[Buffer]()
    factors, builder = problem.factors if problem.scaling else a, Builder(problem, rank)

    left, target, moves = a, out, []
    if not kind.scatters:
        left = problem.gathered("result" if problem.return_gathered else "local")
        added = [] if problem.return_gathered else [left]
        if problem.sends_factors:
            gathered = problem.gathered_factors("gathered scale", "local")
            added.append(gathered)
            moves.append(LibraryMove(whole(factors, rank), whole(gathered, rank)))
            factors = gathered
        moves.append(LibraryMove(whole(a, rank), whole(left, rank)))
    elif kind.returns:  # the library sums in place
        moves.append(LibraryMove(whole(out, rank), whole(out, rank)))
    else:
        shapes = tuple((problem.product_rows(rank), problem.n) for rank in range(problem.world))
        target = Buffer("partial", out.holds, out.dtype, shapes, "local", leaves=True)
        added = [target]
        moves.append(LibraryMove(whole(target, rank), whole(out, rank)))
    products = [
        Product(whole(left, rank), whole(b, rank), whole(target, rank), transposed=kind.inner)
    ]
    if problem.scaling:
        products = list(_scaled(problem, products[0], whole(factors, rank), rank))
    steps = [
        *(Step(move, "compute0", kind.collective) for move in moves),
        Step(Products(tuple(products)), "compute0", "all"),
    ]
    if kind.scatters:
        steps.reverse()
    if problem.given is not problem:
        added += [a, problem.factors]
        builder.cast(problem, whole(a, rank))
    steps = [*builder.steps, *steps]
    buffers = (*specification.operands, *specification.results, *added)
    return Plan(problem, str(schedule), rank, tuple(steps), buffers, 0)


def _scaled(problem: Problem, whole: Product, factors: Region, rank: int) -> Iterator[Product]:
    """The product of all rows with its factors. If each rank has a single factor, there is one
    product for the rows of each rank."""
    if problem.kind.scatters or not (problem.scaling and problem.scaling.by_rank):
        yield scaled(problem, whole, factors)
        return
    peers = [peer for peer in range(problem.world) if problem.block(peer, rank)]
    for peer in peers or [0]:
        first = problem.lands(peer, rank)
        last = first + problem.block(peer, rank)
        a, out = (one._replace(row=first, row_stop=last) for one in (whole.a, whole.out))
        part = factors._replace(row=peer, row_stop=peer + 1)
        yield scaled(problem, whole._replace(a=a, out=out), part)


#: Returns the Plan of a rank; raises ``ValueError`` for a problem that it does not serve.
PlanFunction = Callable[[Problem, int], Plan]


def register(name: str, *, candidate: bool = False) -> Callable[[PlanFunction], PlanFunction]:
    """Decorator that registers a function as a schedule. The function returns the Plan of a rank.

    All ranks register the same schedules. The gradients of its calls take ``"auto"``.

    Args:
        name: name of the schedule, used like names of other schedules: letters, digits, ``-`` and
            ``_``.
        candidate: ``auto`` compares it where the machine is described, and takes it where it is
            predicted to be fastest.

    Raises:
        ValueError: the name cannot be one, or is taken.

    Example::

        @ficco.schedules.register("two-halves")
        def two_halves(problem, rank):
            ...
            return builder.plan("two-halves", buffers, words)
    """
    if not name or not name.replace("-", "").replace("_", "").isalnum() or name == "auto":
        raise ValueError(f"name: required letters, digits, - and _, other than auto, got {name!r}")
    if name in NAMED or any(name == knob.axis for knob in KNOBS):
        raise ValueError(f"name: required one that ficco does not use, got {name!r}")

    def add(function: PlanFunction) -> PlanFunction:
        if OWN.setdefault(name, function) is not function:
            raise ValueError(f"name: required one that is not registered yet, got {name!r}")
        if candidate:
            _candidates[name] = None
        return function

    return add


_candidates: dict[str, None] = {}


def own_candidates() -> tuple[str, ...]:
    """Names of registered schedules that ``auto`` compares."""
    return tuple(_candidates)


@lru_cache(maxsize=256)
def own_plans(problem: Problem, schedule: Schedule) -> tuple[Plan, ...]:
    """The Plans of all ranks for a registered schedule, proven.

    Raises:
        ValueError: the function does not serve the problem, or its Plans are wrong. The text of
            the error is that of the proof.
    """
    from ficco.proof import PlanError, check  # importing ficco need not load the proof

    name, plans = schedule.own, []
    for rank in range(problem.world):
        plan = OWN[name](problem, rank)
        if not isinstance(plan, Plan) or plan.problem != problem or plan.rank != rank:
            raise ValueError(
                f"schedule {name}: required the Plan of rank {rank} for {problem}, got {plan!r:.80}"
            )
        plans.append(replace(plan, schedule=name))
    try:
        with paused():
            check(plans)
    except PlanError as error:
        raise ValueError(f"schedule {name}: its plans for {problem} are wrong: {error}") from error
    return tuple(plans)
