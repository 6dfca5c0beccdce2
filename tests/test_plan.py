"""Plans of all schedules pass the proof, and the proof catches what breaks a plan."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import gathered_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from ficco.plan import Buffer, Plan, Reduction, Signal, Step, Transfer, aligned
from ficco.plan.collector import MANY, paused
from ficco.plan.model import Region
from ficco.problems.products import OPERATORS, Problem
from ficco.proof import PlanError, check
from ficco.proof.execution import execute
from ficco.proof.signals import SignalColumns
from ficco.proof.steps import Steps
from ficco.schedules import NAMED, Schedule, plans, refusal

PROBLEM = Problem("all_gather_matmul", (16,) * 4, 24, 32, "bfloat16")
SUMMED = replace(PROBLEM, operator="matmul_reduce_scatter")
RETURNED = replace(PROBLEM, operator="matmul_all_reduce")
SENT = Problem.of_blocks("matmul_all_to_all", ((4,) * 4,) * 4, 24, 32, "bfloat16")
TURNED = replace(PROBLEM, operator="all_gather_transposed_matmul")
TWO = replace(PROBLEM, rows=(8, 8))
TAKEN = Problem.of_blocks("all_to_all_matmul", ((4,) * 4,) * 4, 24, 32, "bfloat16")

KNOBS = (
    "",
    "pull",
    "pieces=3",
    "pieces=3+2+1,tail=2",
    "pieces=4,pull,copy=2,compute=2",
    "copy=3,compute=2,tail=3",
    "order=peer,pieces=2",
    "pull,order=peer,compute=3",
    "beta",
    "pieces=3,tail=2,copy=2,compute=2,beta",
    "pieces=2,pull,compute=2,beta",
)


def made(name: str, problem: Problem = PROBLEM, cap: int | None = None) -> list[Plan]:
    return plans(problem, Schedule.parse(name), cap)


def served(problem: Problem) -> list[str]:
    """The names, with knobs, that serve a Problem."""
    found = []
    for base in NAMED:
        for knobs in KNOBS:
            name = f"{base}:{knobs}".rstrip(":")
            try:
                if not refusal(problem, Schedule.parse(name)):
                    found.append(name)
            except ValueError:  # knobs that do not go together
                continue
    return [*found, "serial:collective"]


def of(operator: str, rows: list[int], turn: int = 1) -> Problem:
    """A Problem with rows of these sizes; an all-to-all has a table of them, never symmetric."""
    if not OPERATORS[operator].blocks:
        return Problem(operator, tuple(rows), 24, 32, "bfloat16")
    table = [[rows[(i * turn + j) % len(rows)] for j in range(len(rows))] for i in range(len(rows))]
    return Problem.of_blocks(operator, table, 24, 32, "bfloat16")


@pytest.mark.parametrize(
    ("rows", "n", "k", "said"),
    [
        ((4, 2**63), 8, 8, "rows: required a size of at most"),
        ((4, 4), 2**63, 8, "n: required a size of at most"),
        ((4, 4), 8, -1, "k: required a size of at least 0"),
        ((1,) * 1025, 8, 8, "world: required at most 1024 ranks, got 1025"),
    ],
)
def test_sizes_that_no_host_has_are_refused(
    rows: tuple[int, ...], n: int, k: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Problem("all_gather_matmul", rows, n, k, "float32")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rows = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    found = of(draw(st.sampled_from(list(OPERATORS))), rows, draw(st.integers(0, 3)))
    n, k = draw(st.sampled_from([0, 1, 9, 40])), draw(st.sampled_from([0, 1, 7, 70]))
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    flags = (False, False) if found.kind.scatters else draw(st.tuples(st.booleans(), st.booleans()))
    return replace(found, n=n, k=k, dtype=dtype, return_gathered=flags[0], symmetric=flags[1])


def publish_bytes(plan: Plan) -> int:
    return plan.slot_bytes - plan.offsets.get("publish", plan.slot_bytes)


@settings(deadline=None, max_examples=250)
@given(problem=problems(), data=st.data(), share=st.sampled_from([None, 1.0, 0.5, 0.25]))
def test_plans_pass_the_proof(problem: Problem, data: st.DataObject, share: float | None) -> None:
    capped = share is not None and not problem.kind.scatters
    cap = int((share or 0) * gathered_bytes(problem)) if capped else None
    try:
        found = made(data.draw(st.sampled_from(served(problem))), problem, cap)
    except ValueError as error:
        assert cap is not None and "workspace_bytes: required at least" in str(error)
        return
    check(found)
    for plan in found:
        assert cap is None or plan.slot_bytes <= aligned(cap) + publish_bytes(plan)


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_schedule_serves_every_operator(operator: str) -> None:
    """Rows in plenty, fewer than pieces, and none."""
    problem = of(operator, [40, 0, 1, 9])
    for name in served(problem):
        check(made(name, problem))


WORLDS = [(operator, world) for operator in OPERATORS for world in range(1, 9)]


@pytest.mark.parametrize(
    ("operator", "world"),
    [*WORLDS, ("all_gather_matmul", 16), ("matmul_reduce_scatter", 16)],
)
def test_every_name_serves_every_world(operator: str, world: int) -> None:
    shapes = [1] * world, [world] * world, list(range(world))
    for rows in shapes if world <= 8 else shapes[2:]:
        problem = of(operator, rows)
        for name in [*NAMED, "serial:collective"]:
            if not refusal(problem, Schedule.parse(name)):
                check(made(name, problem))


def test_sums_are_rounded_once_where_nothing_else_is_asked_for() -> None:
    for problem in (SUMMED, RETURNED):
        for name in served(problem):
            steps = [step for plan in made(name, problem) for step in plan.steps]
            adds = any(p.terms for step in steps for p in step.products)
            assert adds == Schedule.parse(name).beta, name


# Broken plans.


def without_buffer(plan: Plan, name: str) -> Plan:
    return replace(plan, buffers=tuple(one for one in plan.buffers if one.name != name))


def with_buffer(plan: Plan, which: str, /, **fields: Any) -> Plan:
    return replace(
        plan,
        buffers=tuple(one._replace(**fields) if one.name == which else one for one in plan.buffers),
    )


def edited(found: list[Plan], rank: int, edit: Callable[[list[Step]], Any]) -> list[Plan]:
    steps = list(found[rank].steps)
    edit(steps)
    return [*found[:rank], replace(found[rank], steps=tuple(steps)), *found[rank + 1 :]]


def index(steps: list[Step], suits: Callable[[Step], Any]) -> int:
    return next(i for i, step in enumerate(steps) if suits(step))


def change(suits: Callable[[Step], Any], **fields: Any) -> Callable[[list[Step]], None]:
    """Replace fields of the first step that suits; a callable makes the field from the step."""

    def edit(steps: list[Step]) -> None:
        i = index(steps, suits)
        values = {name: f(steps[i]) if callable(f) else f for name, f in fields.items()}
        steps[i] = steps[i]._replace(**values)

    return edit


def is_copy(step: Step) -> bool:
    return step.op == "copy"


def awaits_data(step: Step) -> bool:
    return step.op == "matmul" and bool(step.waits)


def retires(step: Step) -> bool:
    return step.label == "retire"


def shifted(step: Step) -> Any:
    """The step's copy, landing a row too far up."""
    assert step.transfer is not None
    dst = step.transfer.dst
    return step.transfer._replace(dst=dst._replace(row=dst.row - 1, row_stop=dst.row_stop - 1))


def other_rows(step: Step) -> Any:
    assert step.transfer is not None
    src = step.transfer.src
    return step.transfer._replace(src=src._replace(row=src.row + 1, row_stop=src.row_stop + 1))


def outside(step: Step) -> Any:
    assert step.transfer is not None
    dst = step.transfer.dst
    return step.transfer._replace(dst=dst._replace(row=dst.row + 999, row_stop=dst.row_stop + 999))


def moved(end: str, **fields: Any) -> Callable[[Step], Any]:
    """The step's transfer with other fields in the region at one end."""

    def transfer(step: Step) -> Any:
        assert step.transfer is not None
        return step.transfer._replace(**{end: getattr(step.transfer, end)._replace(**fields)})

    return transfer


def multiplied(**fields: Any) -> Callable[[Step], Any]:
    """The step's products, the first with other fields; a dict holds fields of a region."""

    def products(step: Step) -> Any:
        first = step.products[0]
        values = {
            name: getattr(first, name)._replace(**value) if isinstance(value, dict) else value
            for name, value in fields.items()
        }
        return (first._replace(**values), *step.products[1:])

    return products


def multiplies(step: Step) -> bool:
    return step.op == "matmul"


def adds(step: Step) -> bool:
    return any(product.accumulate for product in step.products)


def swap_sums(steps: list[Step]) -> None:
    """Round the sums of each of two shards into the rows of the other."""
    i, j, *_ = (i for i, step in enumerate(steps) if step.label == "sum>out")
    one, two = steps[i].transfer, steps[j].transfer
    assert one and two
    steps[i] = steps[i]._replace(transfer=one._replace(dst=two.dst))
    steps[j] = steps[j]._replace(transfer=two._replace(dst=one.dst))


def clear_first(steps: list[Step]) -> None:
    """Clear a word of data where the call begins."""
    i, j = index(steps, lambda step: step.label == "acquire"), index(steps, retires)
    early, *rest = steps[j].clears
    steps[i] = steps[i]._replace(clears=(*steps[i].clears, early))
    steps[j] = steps[j]._replace(clears=tuple(rest))


def release_later(steps: list[Step]) -> None:
    """Hand the slot to one peer in a step of its own."""
    *rest, last = steps[-1].posts
    steps[-1] = steps[-1]._replace(posts=tuple(rest))
    steps.append(Step("sync", "sync", "late", posts=(last,)))


def acquire_late(steps: list[Step]) -> None:
    """Take over the slots of the peers where the call ends."""
    i = index(steps, lambda step: step.label == "acquire")
    late = steps[i]
    steps[i] = late._replace(waits=(), clears=())
    steps[-1] = steps[-1]._replace(
        waits=(*late.waits, *steps[-1].waits), clears=(*late.clears, *steps[-1].clears)
    )


def product_of_inputs(steps: list[Step]) -> None:
    """Rows of A where the product should be."""
    i = index(steps, lambda step: step.label == "own")
    a, out = steps[i].products[0].a, steps[i].products[0].out
    transfer = Transfer(a._replace(col_stop=out.col_stop), out)
    steps[i] = Step("place", "compute0", "a>out", transfer=transfer)


def without_room(step: Step) -> tuple[Signal, ...]:
    return tuple(signal for signal in step.waits if signal.kind != "room")


BROKEN: dict[str, tuple[str, Callable[[list[Step]], Any], str]] = {
    "missing wait": ("growing", change(awaits_data, waits=()), "never waited for"),
    "missing post": ("growing", change(is_copy, posts=()), "never posted"),
    "doubled signal": (
        "growing",
        change(is_copy, posts=lambda step: step.posts * 2),
        "used twice",
    ),
    "dirty word": ("growing", change(retires, clears=lambda s: s.clears[1:]), "stays dirty"),
    "missing release": (
        "growing",
        change(retires, posts=lambda step: step.posts[1:]),
        "never posted",
    ),
    "early release": ("growing", change(retires, after=()), "may still use a slot"),
    "no acquire": (
        "growing",
        change(
            lambda step: step.label == "acquire",
            waits=lambda step: step.waits[1:],
            clears=lambda step: step.clears[1:],
        ),
        "never waited for",
    ),
    "overlapping landings": (
        "hetero-unfused-1d",
        change(lambda s: is_copy(s) and s.label.split(".")[1][0] == "1", transfer=shifted),
        "reads what nobody has written|another piece",
    ),
    "wrong rows": (
        "hetero-fused-1d",
        change(is_copy, transfer=other_rows),
        "another piece|gates other rows|puts rows",
    ),
    "outside the buffer": ("growing", change(is_copy, transfer=outside), "leaves the buffer"),
    "outside the columns": (
        "growing",
        change(is_copy, transfer=moved("dst", col=8, col_stop=40)),
        "leaves the buffer",
    ),
    "product left out": (
        "growing",
        change(awaits_data, products=()),
        "does not hold|elements of out are written",
    ),
    "product written twice": (
        "growing",
        change(awaits_data, products=lambda step: step.products * 2),
        "twice",
    ),
    "part of k left out": (
        "uniform-fused-2d",
        change(lambda step: awaits_data(step) and "1.2" in step.label, op="sync", products=()),
        "leaves out part of k|rounds before",
    ),
    "sums of other rows": ("uniform-unfused-2d", swap_sums, "puts rows where others belong"),
    "a term that replaces the sum": (
        "uniform-fused-2d",
        change(adds, products=multiplied(accumulate=False)),
        "is written twice",
    ),
    "a term that comes twice": (
        "uniform-fused-2d",
        change(adds, products=multiplied(b={"row": 0, "row_stop": 8}, a={"col": 0, "col_stop": 8})),
        "adds the same part of k twice|reads another piece",
    ),
    "a sum without a first term": (
        "uniform-fused-2d",
        change(multiplies, products=multiplied(accumulate=True)),
        "adds to what nobody has written",
    ),
    "a sum without a last term": (
        "hetero-fused-1d",
        change(awaits_data, products=multiplied(b={"row_stop": 31}, a={"col_stop": 31})),
        "does not cover all of k",
    ),
    "sums in a dtype that rounds": (
        "uniform-fused-2d",
        change(adds, products=multiplied(out={"buffer": "out"})),
        "adds to what has been rounded",
    ),
    "a word cleared too early": ("growing", clear_first, "may be cleared before"),
    "two releases": ("growing", release_later, "every peer in one step"),
    "no wait for the slots": ("growing", acquire_late, "has not handed it over"),
    "a release before reads are over": (
        "growing:pull",
        change(retires, after=lambda step: step.after[1:]),
        "may still use a slot",
    ),
    "memory out of reach": (
        "growing:pull",
        change(is_copy, transfer=moved("src", buffer="a")),
        "not symmetric",
    ),
    "a copy for others": (
        "growing",
        change(is_copy, transfer=moved("src", rank=1)),
        "between the wrong ranks",
    ),
    "a copy that shrinks": (
        "growing",
        change(is_copy, transfer=moved("dst", row_stop=17)),
        "different sizes|leaves the buffer",
    ),
    "inputs as product": ("growing", product_of_inputs, "between the wrong buffers"),
    "products of products": (
        "growing",
        change(awaits_data, products=multiplied(a={"buffer": "out"})),
        "in the wrong buffers",
    ),
    "products at a peer": (
        "growing",
        change(multiplies, products=multiplied(a={"rank": 2}, out={"rank": 2})),
        "multiplies at a peer",
    ),
    "own rows elsewhere": (
        "growing",
        change(multiplies, products=multiplied(out={"row": 7, "row_stop": 23})),
        "into a peer's",
    ),
    "an empty batch": ("growing", change(multiplies, products=multiplied(batch=0)), "do not fit"),
    "part of the columns": (
        "growing",
        change(multiplies, products=multiplied(out={"col_stop": 23}, b={"col_stop": 23})),
        "elements of out are written",
    ),
    "columns of b that do not fit": (
        "growing",
        change(multiplies, products=multiplied(out={"col_stop": 23})),
        "do not fit",
    ),
    "rows of b that do not fit": (
        "growing",
        change(multiplies, products=multiplied(b={"row_stop": 31})),
        "do not fit",
    ),
    "other columns of b": (
        "growing",
        change(multiplies, products=multiplied(b={"col": 1, "col_stop": 25})),
        "do not fit",
    ),
    "b of a peer": ("growing", change(multiplies, products=multiplied(b={"rank": 2})), "at a peer"),
    "A for b": ("growing", change(multiplies, products=multiplied(b={"buffer": "a"})), "wrong buf"),
    "no such buffer": ("growing", change(is_copy, transfer=moved("src", buffer="c")), "no buffer"),
    "no such rank": ("growing", change(is_copy, transfer=moved("dst", rank=9)), "no rank"),
    "no such lane": ("growing", change(is_copy, lane="copy"), "there is no lane"),
    "no such operation": ("growing", change(is_copy, op="move"), "does not hold"),
    "no such mover": ("growing", change(is_copy, mover="hand"), "does not hold"),
    "no such step": ("growing", change(retires, after=(99,)), "not there"),
    "pieces not copied": (
        "growing",
        change(is_copy, op="sync", transfer=None),
        "reads what nobody has written",
    ),
    "product not made": (
        "growing",
        change(awaits_data, op="sync", products=()),
        "elements of out are written",
    ),
    "rounded too early": (
        "uniform-fused-2d",
        lambda steps: steps.insert(
            index(steps, lambda s: s.op == "matmul") + 1,
            steps.pop(index(steps, lambda s: s.label == "sum>out")),
        ),
        "rounds before the last term",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("rank", [0, 3])
def test_broken_plans_are_caught(what: str, rank: int) -> None:
    name, edit, words = BROKEN[what]
    found = made(name)
    check(found)
    with pytest.raises(PlanError, match=words):
        check(edited(found, rank, edit))


# Broken plans of operators whose product travels.


def sums(step: Step) -> bool:
    return step.op == "reduce"


def sends(step: Step) -> bool:
    """Copies what a product made, or what was summed."""
    return is_copy(step)


def sends_back(step: Step) -> bool:
    return is_copy(step) and step.label.startswith("sum")


def sends_on(step: Step) -> bool:
    return is_copy(step) and step.transfer is not None and step.transfer.src.buffer == "staging"


def places(step: Step) -> bool:
    return step.op == "place"


def places_other(step: Step) -> bool:
    return step.label == "staging>out"


def labelled(label: str) -> Callable[[Step], bool]:
    return lambda step: step.label == label


def move(
    field: str, source: Callable[[Step], Any], target: Callable[[Step], Any]
) -> Callable[[list[Step]], None]:
    """Let another step do what one step does."""

    def edit(steps: list[Step]) -> None:
        one, two = index(steps, source), index(steps, target)
        held, more = getattr(steps[one], field), getattr(steps[two], field)
        steps[one] = steps[one]._replace(**{field: ()})
        steps[two] = steps[two]._replace(**{field: (*more, *held)})

    return edit


def joins(step: Step) -> bool:
    return any(product.accumulate for product in step.products)


def own(step: Step) -> bool:
    return any(product.addend for product in step.products)


def summed(
    change_parts: Callable[..., Any], change_terms: Callable[..., Any] = lambda terms: terms
) -> Callable[[Step], Reduction]:
    """The step's reduction with other parts and terms."""

    def reduction(step: Step) -> Reduction:
        assert step.reduction is not None
        parts, terms, out = step.reduction
        return Reduction(tuple(change_parts(parts)), tuple(change_terms(terms)), out)

    return reduction


def told(**fields: Any) -> Callable[[Step], Any]:
    """The step's transfer as it is, with other terms."""

    def transfer(step: Step) -> Any:
        assert step.transfer is not None
        return step.transfer._replace(**fields)

    return transfer


def shift(end: str, **by: int) -> Callable[[Step], Any]:
    """The step's transfer with one end elsewhere."""

    def transfer(step: Step) -> Any:
        assert step.transfer is not None
        region = getattr(step.transfer, end)
        fields = {name: getattr(region, name) + more for name, more in by.items()}
        return step.transfer._replace(**{end: region._replace(**fields)})

    return transfer


def keep(found: Any) -> Any:
    return found


def backwards(found: Any) -> Any:
    return found[::-1]


def twice(found: Any) -> Any:
    return *found, found[-1]


def fewer(found: Any) -> Any:
    return found[:-1]


def lower(found: Any) -> Any:
    """The parts, the first a row further down."""
    first, *rest = found
    return first._replace(row=first.row + 1, row_stop=first.row_stop + 1), *rest


def narrower(found: Any) -> Any:
    first, *rest = found
    return first._replace(col_stop=first.col_stop - 1), *rest


def aside(found: Any) -> Any:
    """The parts, one from a peer in other columns."""
    one = next(part for part in found if part.buffer == "staging")
    by = one.cols
    return [
        part._replace(col=part.col - by, col_stop=part.col_stop - by) if part is one else part
        for part in found
    ]


def lower_addend(step: Step) -> Any:
    """The step's products, the first added to the rows behind those that it should be."""
    first, *rest = step.products
    there = first.addend
    assert there is not None
    addend = there._replace(row=there.row + there.rows, row_stop=there.row_stop + there.rows)
    return first._replace(addend=addend), *rest


def sum_before_it_is_due(steps: list[Step]) -> None:
    """Sum in front of the wait for the last product of a peer."""
    i = index(steps, lambda step: sums(step) and len(step.waits) > 1)
    late = steps[i].waits[-1:]
    steps[i] = steps[i]._replace(waits=steps[i].waits[:-1])
    steps[-1] = steps[-1]._replace(waits=(*steps[-1].waits, *late))


def place_as_sum(steps: list[Step]) -> None:
    i = index(steps, places_other)
    moved = steps[i].transfer
    assert moved is not None
    reduction = Reduction((moved.src,), (moved.terms,), moved.dst)
    steps[i] = steps[i]._replace(op="reduce", transfer=None, reduction=reduction)


def swap_blocks(steps: list[Step]) -> None:
    """Place each of two blocks where the other belongs."""
    i, j, *_ = (i for i, step in enumerate(steps) if places_other(step))
    one, two = steps[i].transfer, steps[j].transfer
    assert one and two
    steps[i] = steps[i]._replace(transfer=one._replace(dst=two.dst))
    steps[j] = steps[j]._replace(transfer=two._replace(dst=one.dst))


FUSED, COLUMNS, BETA = "hetero-fused-1d", "uniform-fused-2d", "hetero-fused-1d:beta"

BROKEN_PRODUCTS: dict[str, tuple[Problem, str, Callable[[list[Step]], Any], str]] = {
    "missing wait": (SUMMED, FUSED, change(sums, waits=()), "never waited for"),
    "missing post": (SUMMED, FUSED, change(sends, posts=()), "never posted"),
    "doubled signal": (SUMMED, FUSED, change(sends, posts=lambda s: s.posts * 2), "used twice"),
    "dirty word": (SUMMED, FUSED, change(retires, clears=lambda s: s.clears[1:]), "stays dirty"),
    "missing release": (
        SUMMED,
        FUSED,
        change(retires, posts=lambda s: s.posts[1:]),
        "never posted",
    ),
    "early release": (SUMMED, FUSED, change(retires, after=()), "may still use a slot"),
    "release before others have read": (
        SUMMED,
        f"{FUSED}:pull",
        change(retires, after=lambda step: step.after[1:]),
        "may still use a slot",
    ),
    "sent before it is made": (SUMMED, FUSED, change(sends, after=()), "before it is written"),
    "sent on before the own is added": (
        SUMMED,
        "ring",
        change(sends_on, after=()),
        "before it is written",
    ),
    "sent back before it is summed": (
        RETURNED,
        FUSED,
        change(sends_back, after=()),
        "before it is written",
    ),
    "summed before it is there": (SUMMED, FUSED, sum_before_it_is_due, "before it is written"),
    "fetched before it is made": (
        SUMMED,
        f"{FUSED}:pull",
        change(sends, waits=()),
        "never waited for",
    ),
    "overlapping landings": (
        SUMMED,
        FUSED,
        change(lambda s: sends(s) and ".1>" in s.label, transfer=shifted),
        "another piece|nobody has written",
    ),
    "a copy of another's rows": (
        SUMMED,
        FUSED,
        change(sends, transfer=shift("src", row=16, row_stop=16)),
        "gates other rows|nobody has written",
    ),
    "a copy of another's block": (
        SENT,
        "serial",
        change(sends, transfer=shift("src", row=1, row_stop=1)),
        "takes rows of another block",
    ),
    "a block of A for another": (
        TAKEN,
        "shard-overlap",
        change(is_copy, transfer=shift("src", row=1, row_stop=1)),
        "takes rows of another block",
    ),
    "the own block of A from another": (
        TAKEN,
        "shard-overlap",
        change(multiplies, products=multiplied(a={"row": 1, "row_stop": 5})),
        "takes rows of another block|peer's",
    ),
    "blocks in the wrong places": (SENT, "serial", swap_blocks, "reads another piece"),
    "other columns sent": (
        SUMMED,
        COLUMNS,
        change(
            lambda s: sends(s) and ".1>" in s.label,
            transfer=shift("src", col=-1, col_stop=-1),
        ),
        "another piece",
    ),
    "other columns summed": (
        SUMMED,
        COLUMNS,
        change(lambda s: s.label == "sum 1", reduction=summed(aside)),
        "another piece",
    ),
    "columns of b elsewhere": (
        SUMMED,
        COLUMNS,
        change(
            multiplies,
            products=multiplied(out={"col": 1, "col_stop": 7}, b={"col": 1, "col_stop": 7}),
        ),
        "nobody has written|is written twice",
    ),
    "a product in other rows": (
        SUMMED,
        FUSED,
        change(multiplies, products=multiplied(out={"row": 1}, a={"row_stop": 3})),
        "do not fit|a peer's|leaves the buffer",
    ),
    "a row of another's block as own": (
        SENT,
        FUSED,
        change(
            lambda s: any(p.out.buffer == "partial" for p in s.products),
            products=multiplied(out={"buffer": "out"}),
        ),
        "takes rows of another block",
    ),
    "part of k": (
        SUMMED,
        FUSED,
        change(multiplies, products=multiplied(b={"row_stop": 31}, a={"col_stop": 31})),
        "multiplies part of k",
    ),
    "a product of products": (
        SUMMED,
        FUSED,
        change(multiplies, products=multiplied(a={"buffer": "staging"})),
        "in the wrong buffers",
    ),
    "A sent as a product": (
        SUMMED,
        FUSED,
        change(sends, transfer=moved("src", buffer="a")),
        "says so of an operand",
    ),
    "sums of rows that do not match": (
        SUMMED,
        FUSED,
        change(sums, reduction=summed(lower)),
        "another piece|nobody|do not belong",
    ),
    "sums of parts of other sizes": (
        SUMMED,
        FUSED,
        change(sums, reduction=summed(narrower)),
        "different sizes",
    ),
    "a sum in a peer's memory": (
        SUMMED,
        FUSED,
        change(sums, reduction=summed(lambda parts: [p._replace(rank=2) for p in parts])),
        "sums in the wrong buffers",
    ),
    "a sum of results": (
        SUMMED,
        FUSED,
        change(sums, reduction=summed(lambda parts: [p._replace(buffer="out") for p in parts])),
        "sums in the wrong buffers",
    ),
    "a sum of nothing": (
        SUMMED,
        FUSED,
        change(sums, reduction=summed(lambda _: (), lambda _: ())),
        "whose products it sums",
    ),
    "a sum of parts without a name": (
        SUMMED,
        FUSED,
        change(sums, reduction=summed(keep, fewer)),
        "whose products it sums",
    ),
    "a sum where blocks are placed": (SENT, "serial", place_as_sum, "whose products it sums"),
    "a term twice": (SUMMED, FUSED, change(sums, reduction=summed(twice, twice)), "rank twice"),
    "a term missing": (
        SUMMED,
        FUSED,
        change(sums, reduction=summed(fewer, fewer)),
        "leaves out the product of a rank",
    ),
    "terms out of order": (
        SUMMED,
        FUSED,
        change(sums, reduction=summed(backwards, backwards)),
        "in the order of the ranks",
    ),
    "terms under other names": (
        SUMMED,
        FUSED,
        change(sums, reduction=summed(backwards, keep)),
        "products of other ranks|do not belong",
    ),
    "a copy under another name": (
        SENT,
        FUSED,
        change(sends, transfer=told(terms=6)),
        "finds the products of other ranks",
    ),
    "a copy without a name": (
        SENT,
        FUSED,
        change(sends, transfer=told(terms=0)),
        "does not say whose products",
    ),
    "A under a name": (
        TAKEN,
        FUSED,
        change(is_copy, transfer=told(terms=1)),
        "or says so of an operand",
    ),
    "terms of A": (
        TAKEN,
        FUSED,
        change(multiplies, products=multiplied(terms=1)),
        "to what another rank made",
    ),
    "a sum that stays behind": (
        RETURNED,
        FUSED,
        change(places_other, op="sync", transfer=None),
        "elements of out are written",
    ),
    "the own product not added": (
        SUMMED,
        BETA,
        change(joins, op="sync", products=()),
        "leaves out the product of a rank",
    ),
    "the own product in place of the sum": (
        SUMMED,
        BETA,
        change(joins, products=multiplied(accumulate=False, terms=0)),
        "is written twice",
    ),
    "the own product added to less": (
        SUMMED,
        BETA,
        change(joins, products=multiplied(terms=6 << 1)),
        "adds itself to|that it is in",
    ),
    "the own product added twice": (
        SUMMED,
        BETA,
        change(joins, products=lambda step: step.products * 2),
        "products of other ranks than it says",
    ),
    "the own product added to itself": (
        SUMMED,
        BETA,
        change(joins, products=multiplied(terms=15)),
        "sum that it is in",
    ),
    "the own product added before the sum": (
        SUMMED,
        BETA,
        change(joins, after=()),
        "overwritten by an unordered step",
    ),
    "added to something unsaid": (
        SUMMED,
        BETA,
        change(joins, products=multiplied(terms=0)),
        "does not say whose products it adds itself to",
    ),
    "the ring adds to other rows": (
        SUMMED,
        "ring:pieces=1",
        change(joins, products=multiplied(out={"row": 1, "row_stop": 17})),
        "another piece",
    ),
    "the end of the ring adds to other rows": (
        SUMMED,
        "ring:pieces=1",
        change(own, products=lower_addend),
        "another piece|leaves the buffer",
    ),
    "the end of the ring adds to less": (
        SUMMED,
        "ring:pieces=1",
        change(own, products=multiplied(addend={"row": 0, "row_stop": 15})),
        "does not fit",
    ),
    "the end of the ring adds to what was made": (
        SUMMED,
        "ring:pieces=1",
        change(own, products=multiplied(addend={"buffer": "partial"})),
        "adds itself to the wrong buffer",
    ),
    "the end of the ring adds to two things": (
        SUMMED,
        "ring:pieces=1",
        change(own, products=multiplied(accumulate=True)),
        "does not fit",
    ),
    "the ring does not wait": (SUMMED, "ring", change(joins, waits=()), "never waited for"),
    "a peer's product is read before it is there": (
        RETURNED,
        "one-shot",
        move("waits", sums, labelled("retire")),
        "may read before it is written",
    ),
    "a peer is told too early that its product was read": (
        RETURNED,
        "one-shot",
        move("posts", labelled("has read"), labelled("acquire, tell 0")),
        "may still use a slot when its rank hands it on",
    ),
    "the slot of a peer that still has it is read": (
        RETURNED,
        "one-shot:pieces=2",
        change(sums, after=(0,)),
        "has not handed it over",
    ),
    "other rows of a peer are summed": (
        RETURNED,
        "one-shot:pieces=2",
        change(sums, reduction=summed(lower)),
        "another piece|nobody|do not belong",
    ),
    "the product of a rank is not summed": (
        RETURNED,
        "one-shot",
        change(sums, reduction=summed(lambda parts: parts[1:], lambda terms: terms[1:])),
        "leaves out the product of a rank",
    ),
    "what a peer has in its staging is summed": (
        SUMMED,
        "one-shot",
        change(sums, reduction=summed(lambda parts: [p._replace(buffer="staging") for p in parts])),
        "names no buffer",
    ),
}


@pytest.mark.parametrize("what", BROKEN_PRODUCTS)
@pytest.mark.parametrize("rank", [0, 3])
def test_broken_plans_of_products_are_caught(what: str, rank: int) -> None:
    problem, name, edit, words = BROKEN_PRODUCTS[what]
    found = made(name, problem)
    with pytest.raises(PlanError, match=words):
        check(edited(found, rank, edit))


# Plans of sums over the rows that travel.


@pytest.mark.parametrize("name", ["growing", "shrinking"])
def test_rows_that_lie_together_are_one_product(name: str) -> None:
    for plan in made(name, replace(TURNED, rows=(16,) * 8)):
        products = [product for step in plan.steps for product in step.products]
        assert len(products) == 4  # log2(W) + 1
        assert sorted(p.a.rows for p in products) == [16, 16, 32, 64]
        assert sum(step.label == "sum>out" for step in plan.steps) == 1


def test_rows_of_the_result_need_no_sums() -> None:
    for plan in made("uniform-fused-2d", TURNED):
        products = [product for step in plan.steps for product in step.products]
        assert [(p.a.rows, p.out.rows) for p in products] == [(64, 8)] * 4
        assert "sum" not in plan.buffer and not any(p.accumulate for p in products)
    serial = made("serial", replace(TURNED, rows=(16, 0, 0, 0)))
    assert not any("sum" in plan.buffer for plan in serial)


def again(step: Step) -> Any:
    """The step's products, the last of them twice."""
    return (*step.products, step.products[-1]._replace(accumulate=True))


def swap_rows(steps: list[Step]) -> None:
    """Two pieces, each with the rows of b of the other."""
    i, j, *_ = (i for i, step in enumerate(steps) if awaits_data(step))
    one, two = steps[i].products[0], steps[j].products[0]
    first, second = one._replace(b=two.b), two._replace(b=one.b)
    steps[i] = steps[i]._replace(products=(first, *steps[i].products[1:]))
    steps[j] = steps[j]._replace(products=(second, *steps[j].products[1:]))


def swap_columns(steps: list[Step]) -> None:
    """Two pieces of columns, each in the rows of the result that are the other's."""
    i, j, *_ = (i for i, step in enumerate(steps) if awaits_data(step))
    one, two = steps[i].products[0], steps[j].products[0]
    steps[i] = steps[i]._replace(products=(one._replace(out=two.out),))
    steps[j] = steps[j]._replace(products=(two._replace(out=one.out),))


def round_first(steps: list[Step]) -> None:
    """Round behind the first product."""
    i = index(steps, lambda step: step.label == "sum>out")
    steps.insert(index(steps, multiplies) + 1, steps.pop(i))


TWO_LANES = "hetero-unfused-1d:pieces=2,compute=2"
EXACT = replace(TURNED, dtype="float32")
#: Every rank multiplies another number of rows.
UNEVEN = Problem.of_blocks(
    "all_to_all_transposed_matmul",
    [[5, 6, 7, 2], [2, 4, 1, 3], [3, 0, 6, 5], [6, 4, 3, 7]],
    *(24, 32, "bfloat16"),
)


def one_row_on(step: Step) -> Any:
    """The step's products, the first with the rows of b that lie one further on."""
    first, *rest = step.products
    b = first.b._replace(row=first.b.row + 1, row_stop=first.b.row_stop + 1)
    return (first._replace(b=b), *rest)


BROKEN_SUMS: dict[str, tuple[Problem, str, Callable[[list[Step]], Any], str]] = {
    "a piece counted twice": (
        TURNED,
        "growing",
        change(awaits_data, products=again),
        "adds rows of A that another product adds",
    ),
    "own rows counted twice": (
        TURNED,
        "growing",
        change(multiplies, products=again),
        "adds rows of A that another product adds",
    ),
    "a piece counted twice, without sums that round": (
        EXACT,
        "uniform-unfused-1d:pieces=2",
        change(awaits_data, products=again),
        "adds rows of A that another product adds",
    ),
    "a piece left out": (
        TURNED,
        "growing",
        change(awaits_data, op="sync", products=()),
        "rounds before the last term",
    ),
    "a piece left out, without sums that round": (
        EXACT,
        "growing",
        change(awaits_data, op="sync", products=()),
        "does not cover all",
    ),
    "a row left out": (
        EXACT,
        "hetero-unfused-1d:pieces=2",
        change(
            awaits_data,
            products=lambda step: multiplied(
                b={"row_stop": step.products[0].b.row_stop - 1},
                a={"row_stop": step.products[0].a.row_stop - 1},
            )(step),
        ),
        "does not cover all",
    ),
    "a piece of a table counted twice": (
        UNEVEN,
        "growing",
        change(awaits_data, products=again),
        "adds rows of A that another product adds",
    ),
    "a piece of a table left out": (
        UNEVEN,
        "growing",
        change(awaits_data, op="sync", products=()),
        "rounds before the last term",
    ),
    "rows of b beside those of a table": (
        UNEVEN,
        "hetero-unfused-1d",
        change(awaits_data, products=one_row_on),
        "adds rows of A that another product adds",
    ),
    "own rows of a table beside theirs": (
        UNEVEN,
        "growing",
        change(multiplies, products=one_row_on),
        "into a peer's",
    ),
    "rounded too early": (TURNED, "hetero-fused-1d", round_first, "rounds before the last term"),
    "columns rounded too early": (
        TURNED,
        "hetero-unfused-2d:pieces=2",
        round_first,
        "rounds before the last term",
    ),
    "rows of b of another piece": (
        TURNED,
        "hetero-unfused-1d",
        swap_rows,
        "reads another piece than it should",
    ),
    "own rows with others of b": (
        TURNED,
        "growing",
        change(multiplies, products=multiplied(b={"row": 16, "row_stop": 32})),
        "into a peer's",
    ),
    "columns in other rows": (
        TURNED,
        "uniform-fused-2d",
        swap_columns,
        "reads another piece than it should",
    ),
    "not transposed": (
        TURNED,
        "growing",
        change(awaits_data, products=multiplied(transposed=False)),
        "the wrong way round",
    ),
    "transposed": (
        PROBLEM,
        "growing",
        change(awaits_data, products=multiplied(transposed=True)),
        "the wrong way round",
    ),
    "a piece that replaces the sum": (
        TURNED,
        "growing",
        change(adds, products=multiplied(accumulate=False)),
        "is written twice",
    ),
    "a sum without a first piece": (
        TURNED,
        "growing",
        change(multiplies, products=multiplied(accumulate=True)),
        "adds to what nobody has written",
    ),
    "sums in a dtype that rounds": (
        TURNED,
        "growing",
        change(adds, products=multiplied(out={"buffer": "out"})),
        "adds to what has been rounded",
    ),
    "a batch": (
        TURNED,
        "growing",
        change(awaits_data, products=multiplied(batch=2)),
        "do not fit",
    ),
    "sums in no order": (
        TURNED,
        TWO_LANES,
        change(adds, lane="compute1"),
        "may be overwritten by an unordered step",
    ),
    "sums in no order, without rounding": (
        EXACT,
        TWO_LANES,
        change(adds, lane="compute1"),
        "may be overwritten by an unordered step",
    ),
}


@pytest.mark.parametrize("what", BROKEN_SUMS)
@pytest.mark.parametrize("rank", [0, 3])
def test_broken_sums_over_rows_are_caught(what: str, rank: int) -> None:
    problem, name, edit, words = BROKEN_SUMS[what]
    found = made(name, problem)
    check(found)
    with pytest.raises(PlanError, match=words):
        check(edited(found, rank, edit))


def test_sums_may_not_return_to_where_products_are_still_read() -> None:
    found = made(FUSED, replace(RETURNED, rows=(16,) * 2))
    check(found)

    def first_rows(transfer: Any, end: str) -> Any:
        region = getattr(transfer, end)
        there = region._replace(row=region.row - 16, row_stop=region.row_stop - 16)
        return transfer._replace(**{end: there})

    def reuse(step: Step) -> Step:
        if sends_back(step):
            return step._replace(transfer=first_rows(step.transfer, "dst"))
        return step._replace(transfer=first_rows(step.transfer, "src")) if places(step) else step

    found = [replace(plan, steps=tuple(map(reuse, plan.steps))) for plan in found]
    with pytest.raises(PlanError, match="overwrites what may still be read|another piece"):
        check(found)


def test_products_may_not_be_overwritten_while_they_travel() -> None:
    """A block made in the same memory once more, while the first goes out."""
    found = made("hetero-unfused-1d:pieces=1", SUMMED)

    def edit(steps: list[Step]) -> None:
        i, j, *_ = (i for i, step in enumerate(steps) if multiplies(step))
        steps[j] = steps[j]._replace(products=(*steps[i].products, *steps[j].products))

    with pytest.raises(PlanError, match="is written twice"):
        check(edited(found, 1, edit))


def test_a_ring_adds_to_the_rows_that_it_means() -> None:
    """Two pieces that land in each other's places, where the next rank waits for both."""
    found = made("ring:pieces=2", replace(SUMMED, rows=(16,) * 3))

    def swap(steps: list[Step]) -> None:
        i, j, *_ = (i for i, step in enumerate(steps) if is_copy(step))
        one, two = steps[i].transfer, steps[j].transfer
        assert one and two
        steps[i] = steps[i]._replace(transfer=one._replace(dst=two.dst))
        steps[j] = steps[j]._replace(transfer=two._replace(dst=one.dst))

    def wait_for_both(steps: list[Step]) -> None:
        i, j, *_ = (i for i, step in enumerate(steps) if joins(step))
        steps[i] = steps[i]._replace(waits=steps[i].waits + steps[j].waits)
        steps[j] = steps[j]._replace(waits=())

    found = edited(found, 1, wait_for_both)
    check(found)
    with pytest.raises(PlanError, match="adds to another piece"):
        check(edited(found, 0, swap))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"first": 0, "last": 16}, "gates other rows|another piece"),
        ({"first": 0, "last": 64}, "another piece"),
    ],
)
def test_a_ring_sends_on_the_rows_that_it_says(fields: dict[str, int], words: str) -> None:
    found = made("ring:pieces=1", SUMMED)
    wrong = next(step for step in found[3].steps if sends_on(step)).posts[0]

    def renamed(signals: tuple[Signal, ...]) -> tuple[Signal, ...]:
        return tuple(s._replace(**fields) if s == wrong else s for s in signals)

    def edit(step: Step) -> Step:
        return step._replace(
            waits=renamed(step.waits), posts=renamed(step.posts), clears=renamed(step.clears)
        )

    found = [replace(plan, steps=tuple(map(edit, plan.steps))) for plan in found]
    with pytest.raises(PlanError, match=words):
        check(found)


@pytest.mark.parametrize(
    ("problem", "name", "kinds"),
    [
        (SUMMED, FUSED, ("ready",)),
        (SUMMED, "ring", ("ready",)),
        (SENT, f"{FUSED}:pull", ("valid",)),
        (SENT, f"{FUSED}:pull", ("valid", "done")),
        (RETURNED, FUSED, ("summed",)),
        (TAKEN, f"{FUSED}:pull", ("done", "valid")),
    ],
)
def test_signals_of_products_that_go_missing_altogether_are_caught(
    problem: Problem, name: str, kinds: tuple[str, ...]
) -> None:
    def kept(signals: tuple[Signal, ...]) -> tuple[Signal, ...]:
        return tuple(s for s in signals if s.poster != 1 or s.kind not in kinds)

    def without(step: Step) -> Step:
        return step._replace(
            waits=kept(step.waits), posts=kept(step.posts), clears=kept(step.clears)
        )

    found = [replace(plan, steps=tuple(map(without, plan.steps))) for plan in made(name, problem)]
    with pytest.raises(PlanError, match="before it is written|nobody has|may still use a slot"):
        check(found)


def test_circles_of_sums_and_queues_of_sums_are_told_apart() -> None:
    found = made("hetero-fused-1d:pieces=1,beta", replace(SUMMED, rows=(16,) * 3))
    check(found)

    def sum_first(steps: list[Step]) -> None:
        """Wait for the peers in front of the own products, on another lane."""
        i = index(steps, sums)
        order = [i, *(j for j in range(len(steps)) if j != i)]
        place = {old: new for new, old in enumerate(order)}
        steps[:] = [
            steps[old]._replace(after=tuple(place[one] for one in steps[old].after))
            for old in order
        ]

    def everywhere(edit: Callable[[list[Step]], Any]) -> list[Plan]:
        plans = found
        for rank in range(3):
            plans = edited(plans, rank, edit)
        return plans

    with pytest.raises(PlanError, match="hardware queue"):
        check(everywhere(sum_first))

    def one_lane(steps: list[Step]) -> None:
        """The same on the lane of the products."""
        sum_first(steps)
        steps[0] = steps[0]._replace(lane="compute0")

    with pytest.raises(PlanError, match="circle"):
        check(everywhere(one_lane))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda plan: without_buffer(plan, "publish"), "something else"),
        (lambda plan: with_buffer(plan, "staging", shapes=((99, 24),) * 4), "something else"),
        (lambda plan: with_buffer(plan, "staging", dtype="float16"), "another buffer staging"),
        (lambda plan: with_buffer(plan, "staging", shapes=((48, 24),) * 3), "another buffer"),
        (lambda plan: with_buffer(plan, "b", name="c"), "not those that are specified"),
        (lambda plan: replace(plan, buffers=plan.buffers + plan.buffers[:1]), "of one name"),
    ],
)
def test_ranks_list_the_same_buffers(edit: Callable[[Plan], Plan], words: str) -> None:
    found = made(f"{FUSED}:pull", SUMMED)
    with pytest.raises(PlanError, match=words):
        check([*found[:1], edit(found[1]), *found[2:]])


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("a", {"dtype": "float16"}, "not those that are specified"),
        ("out", {"shapes": ((15, 24),) * 4}, "not those that are specified"),
        ("staging", {"shapes": ((47, 24),) * 4}, "leaves the buffer"),
        ("staging", {"shapes": ((48, 24),) * 3}, "a shape for each rank"),
        ("staging", {"holds": "A"}, "between the wrong buffers"),
        ("staging", {"dtype": "float32"}, "between the wrong buffers"),
        ("publish", {"memory": "local"}, "not symmetric"),
        ("publish", {"memory": "local", "symmetric": True}, "no buffers such as publish"),
        ("publish", {"memory": "private", "symmetric": True}, "no buffers such as publish"),
        ("publish", {"layout": "tiles"}, "no buffers such as publish"),
        ("staging", {"shapes": ((48, 24),) * 3 + ((48, 25),)}, "no buffers such as staging"),
        ("publish", {"first": (0,)}, "for each rank"),
        ("publish", {"leaves": False}, "wrong buffers|block|peer's"),
    ],
)
def test_buffers_are_what_the_steps_take_them_for(
    name: str, fields: dict[str, Any], words: str
) -> None:
    found = [with_buffer(plan, name, **fields) for plan in made(f"{FUSED}:pull", SUMMED)]
    with pytest.raises(PlanError, match=words):
        check(found)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float16"])
def test_products_are_not_rounded_on_their_way(dtype: str) -> None:
    found = made(f"{FUSED}:pull", SUMMED)
    for name in ("publish", "staging"):
        found = [with_buffer(plan, name, dtype=dtype) for plan in found]
    with pytest.raises(PlanError, match="rounds what out does not"):
        check(found)


def test_a_rank_without_a_result_is_caught() -> None:
    one, two = made("shard-overlap", TWO)
    steps = [step._replace(op="sync", products=()) if step.products else step for step in two.steps]
    two = without_buffer(replace(two, steps=tuple(steps)), "out")
    with pytest.raises(PlanError, match="rank 1 lacks operands or results"):
        check([one, two])


def test_landed_rows_are_not_sent_on_to_ranks_that_get_others() -> None:
    """Rank 1 sends what it got from rank 0 on to rank 2, in place of what rank 0 has for that."""
    problem = Problem.of_blocks("all_to_all_matmul", ((4,) * 3,) * 3, 24, 32, "bfloat16")
    found = made("shard-overlap", problem)

    def keep_back(steps: list[Step]) -> None:
        i = index(steps, labelled("0.0>2"))
        steps[i] = steps[i]._replace(op="sync", transfer=None)

    def send_on(steps: list[Step]) -> None:
        own, acquire, send, other, product, *rest, retire = steps
        here = Region("staging", 1, 0, 4, 0, 32)
        on = Transfer(here, here._replace(rank=2))
        more = Step("copy", "compute0", "0.0>2", after=(1,), transfer=on)
        send = send._replace(lane="compute0")
        retire = retire._replace(after=(6, 2))
        steps[:] = [own, acquire, other, product, more, send, *rest, retire]

    with pytest.raises(PlanError, match="passes on what is for others"):
        check(edited(edited(found, 0, keep_back), 1, send_on))


def test_rows_do_not_move_to_where_they_are_still_read() -> None:
    one, two = (
        with_buffer(plan, "staging", shapes=((12, 32),) * 2) for plan in made("shard-overlap", TWO)
    )
    steps = list(two.steps)
    i = index(steps, awaits_data)
    (product,) = steps[i].products
    down = product.a._replace(row=4, row_stop=12)
    aside = Step("place", "compute0", "aside", steps[i].waits, transfer=Transfer(product.a, down))
    steps[i] = steps[i]._replace(waits=(), products=(product._replace(a=down),))
    steps.insert(i, aside)
    steps[-1] = steps[-1]._replace(after=tuple(j + (j >= i) for j in steps[-1].after))
    with pytest.raises(PlanError, match="moves to where it still reads"):
        check([one, replace(two, steps=tuple(steps))])


@pytest.mark.parametrize("packs", [False, True])
def test_packed_columns_are_read_as_they_were_packed(packs: bool) -> None:
    found = plans(TWO, Schedule.parse("uniform-fused-2d:pieces=2"), packs_columns=packs)
    check(found)

    def halves(steps: list[Step]) -> None:
        i = index(steps, awaits_data)
        (product,) = steps[i].products
        a, b = product.a, product.b
        first = product._replace(a=a._replace(col_stop=8), b=b._replace(row_stop=8))
        second = product._replace(a=a._replace(col=8), b=b._replace(row=8), accumulate=True)
        steps[i] = steps[i]._replace(products=(first, second))

    broken = edited(found, 0, halves)
    if not packs:
        check(broken)
        return
    with pytest.raises(PlanError, match="cuts packed columns otherwise"):
        check(broken)


def test_sums_that_all_ranks_get_are_exchanged_in_place() -> None:
    found = made("serial:collective", replace(SUMMED, operator="matmul_all_reduce"))
    shapes = ((64, 24),) * 4
    partial = Buffer("partial", "A @ B", "bfloat16", shapes, "local", leaves=True)

    def aside(step: Step) -> Step:
        if step.products:
            return step._replace(products=multiplied(out={"buffer": "partial"})(step))
        return step._replace(transfer=moved("src", buffer="partial")(step))

    with pytest.raises(PlanError, match="something else than the whole"):
        check(
            [
                replace(p, steps=tuple(map(aside, p.steps)), buffers=(*p.buffers, partial))
                for p in found
            ]
        )


def test_sums_that_one_rank_gets_are_not_exchanged_in_place() -> None:
    found = made("serial:collective", replace(SUMMED, rows=(8, 0)))

    def in_place(plan: Plan) -> Plan:
        product, moves = plan.steps
        rows, cols = plan.shape("out")
        out = Region("out", plan.rank, 0, rows, 0, cols)
        whole = multiplied(a={"row_stop": rows}, out=out._asdict())(product)
        product = product._replace(products=whole)
        if not rows:
            product = product._replace(op="sync", products=())
        moves = moves._replace(transfer=moves.transfer and Transfer(out, out))
        return replace(plan, steps=(product, moves))

    with pytest.raises(PlanError, match="something else than the whole"):
        check(list(map(in_place, found)))


def test_collectives_do_not_begin_in_part_of_the_rows() -> None:
    half = Buffer("half", "A", "bfloat16", ((4, 32),) * 2, "local", leaves=True)

    def halved(plan: Plan) -> Plan:
        moves, *rest = plan.steps
        assert moves.transfer is not None
        whole = moves.transfer.src
        here, there = whole._replace(row_stop=4), whole._replace(row_stop=4, buffer="half")
        place = Step("place", moves.lane, "half", transfer=Transfer(here, there))
        moves = moves._replace(transfer=moves.transfer._replace(src=there))
        rest = [step._replace(after=tuple(i + 1 for i in step.after)) for step in rest]
        return replace(plan, steps=(place, moves, *rest), buffers=(*plan.buffers, half))

    found = made("serial:collective", TWO)
    with pytest.raises(PlanError, match="something else than the whole"):
        check(list(map(halved, found)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_collectives_move_the_whole(operator: str) -> None:
    problem = of(operator, [3, 5, 4])
    found = made("serial:collective", problem)
    check(found)
    i = index(list(found[1].steps), lambda step: step.op == "collective")
    move = found[1].steps[i].transfer
    assert move is not None
    for end in ("src", "dst"):
        less = getattr(move, end)._replace(row_stop=getattr(move, end).row_stop - 1)
        spoilt = move._replace(**{end: less})
        with pytest.raises(PlanError, match="something else than the whole"):
            check(edited(found, 1, change(lambda s: s.op == "collective", transfer=spoilt)))
    with pytest.raises(PlanError, match="nobody has written|before it is written|of a rank"):
        check(edited(found, 1, list.reverse))


def test_early_reuse_of_a_stage_is_caught() -> None:
    found = made("hetero-fused-1d", cap=gathered_bytes(PROBLEM) // 3)
    assert 0 < found[0].stages < 4
    check(found)

    def suits(step: Step) -> bool:
        return any(signal.kind == "room" for signal in step.waits)

    # The word itself is still waited for, at the very end: only the order is lost.
    def edit(steps: list[Step]) -> None:
        i = index(steps, suits)
        late = tuple(signal for signal in steps[i].waits if signal.kind == "room")
        steps[i] = steps[i]._replace(waits=without_room(steps[i]))
        j = index(steps, retires)
        steps[j] = steps[j]._replace(waits=(*steps[j].waits, *late))

    with pytest.raises(PlanError, match="overwrites|may still be read|unordered"):
        check(edited(found, 1, edit))


def test_pull_before_the_peer_is_ready_is_caught() -> None:
    found = made("hetero-fused-1d:pull")

    def edit(steps: list[Step]) -> None:
        i = index(steps, lambda step: step.op == "copy" and step.waits)
        late = steps[i].waits
        steps[i] = steps[i]._replace(waits=())
        j = index(steps, lambda step: step.label == "peers have read")
        steps[j] = steps[j]._replace(waits=(*steps[j].waits, *late))

    with pytest.raises(PlanError):
        check(edited(found, 2, edit))


def test_circles_and_shared_queues_are_told_apart() -> None:
    found = made("shard-overlap", replace(PROBLEM, rows=(16,) * 2))

    def wait_first(steps: list[Step]) -> None:
        """Wait for the peer in front of the own copies, on another lane."""
        steps.insert(0, steps.pop(index(steps, awaits_data)))
        last = index(steps, retires)
        lanes = {step.lane: i for i, step in enumerate(steps[:last])}
        steps[last] = steps[last]._replace(after=tuple(lanes.values()))

    queued = edited(edited(found, 0, wait_first), 1, wait_first)
    with pytest.raises(PlanError, match="hardware queue"):
        check(queued)

    def one_lane(steps: list[Step]) -> None:
        """The same where the copies are on the lane of the products."""
        wait_first(steps)
        steps[:] = [s._replace(lane="compute0") if s.lane == "copy0" else s for s in steps]

    with pytest.raises(PlanError, match="circle"):
        check(edited(edited(found, 0, one_lane), 1, one_lane))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("hetero-fused-1d:pull", ("valid",)),
        ("hetero-fused-1d:pull", ("valid", "done")),
        ("hetero-fused-1d", ("ready",)),
    ],
)
def test_signals_that_go_missing_altogether_are_caught(name: str, kinds: tuple[str, ...]) -> None:
    """Neither posted, waited for nor cleared: the words are right, the order is lost."""
    found = made(name, replace(PROBLEM, symmetric=True))

    def kept(signals: tuple[Signal, ...]) -> tuple[Signal, ...]:
        return tuple(s for s in signals if s.poster != 1 or s.kind not in kinds)

    def without(step: Step) -> Step:
        return step._replace(
            waits=kept(step.waits), posts=kept(step.posts), clears=kept(step.clears)
        )

    found = [replace(plan, steps=tuple(map(without, plan.steps))) for plan in found]
    with pytest.raises(PlanError, match="may not have begun|before it is written|nobody has"):
        check(found)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"last": 17}, "gates other rows"),
        ({"word": 9999}, "outside the pads"),
        ({"word": 1}, "used twice"),
        ({"kind": "released"}, "rests at another value"),
        ({"poster": 2}, "another rank than it says"),
    ],
)
def test_signals_that_are_wrong_on_both_sides_are_caught(
    fields: dict[str, Any], words: str
) -> None:
    found = made("growing")
    wrong = next(step for step in found[1].steps if is_copy(step)).posts[0]

    def renamed(signals: tuple[Signal, ...]) -> tuple[Signal, ...]:
        return tuple(s._replace(**fields) if s == wrong else s for s in signals)

    def edit(step: Step) -> Step:
        return step._replace(
            waits=renamed(step.waits), posts=renamed(step.posts), clears=renamed(step.clears)
        )

    found = [replace(plan, steps=tuple(map(edit, plan.steps))) for plan in found]
    with pytest.raises(PlanError, match=words):
        check(found)


def test_a_word_is_not_cleared_for_nothing() -> None:
    found = made("growing")
    signal = found[2].steps[-1].clears[0]

    def kept(signals: tuple[Signal, ...]) -> tuple[Signal, ...]:
        return tuple(s for s in signals if s != signal)

    def edit(step: Step) -> Step:
        return step._replace(waits=kept(step.waits), posts=kept(step.posts))

    found = [replace(plan, steps=tuple(map(edit, plan.steps))) for plan in found]
    with pytest.raises(PlanError, match="cleared, and nobody waits for it"):
        check(found)


@pytest.mark.parametrize("role", ["waits", "clears"])
def test_signals_are_used_by_the_ranks_that_they_name(role: str) -> None:
    found = made("growing")
    signal = getattr(next(s for s in found[2].steps if getattr(s, role)), role)[0]

    def drop(steps: list[Step]) -> None:
        i = index(steps, lambda step: signal in getattr(step, role))
        rest = tuple(s for s in getattr(steps[i], role) if s != signal)
        steps[i] = steps[i]._replace(**{role: rest})

    def take(steps: list[Step]) -> None:
        steps[-1] = steps[-1]._replace(**{role: (*getattr(steps[-1], role), signal)})

    with pytest.raises(PlanError, match="another rank than it says"):
        check(edited(edited(found, 2, drop), 3, take))


def test_words_are_cleared_before_they_are_posted_again() -> None:
    def edit(steps: list[Step]) -> None:
        """Clear what handed a slot over on a lane that no peer waits for."""
        i = index(steps, lambda step: step.label == "acquire")
        late = Step("sync", "copy1", "clear", clears=steps[i].clears, after=(i,))
        steps[i] = steps[i]._replace(clears=())
        retire = steps.pop()
        steps += [late, retire._replace(after=(*retire.after, len(steps)))]

    with pytest.raises(PlanError, match="may be posted before it is cleared"):
        check(edited(made("growing"), 1, edit))


def test_a_rank_publishes_its_own_rows() -> None:
    found = [
        with_buffer(replace(plan, problem=replace(PROBLEM, symmetric=True)), "a", symmetric=True)
        for plan in made("growing:pull")
    ]
    check(found)

    def publishes(step: Step) -> bool:
        return step.label == "publish"

    with pytest.raises(PlanError, match="puts rows where others belong"):
        check(edited(found, 0, change(publishes, op="copy", transfer=moved("src", rank=1))))


def test_two_signals_do_not_share_a_word() -> None:
    def edit(steps: list[Step]) -> None:
        i = index(steps, is_copy)
        steps[i] = steps[i]._replace(posts=tuple(s._replace(slot=1) for s in steps[i].posts))

    with pytest.raises(PlanError, match="shares its word"):
        check(edited(made("growing"), 2, edit))


def test_a_rank_has_the_local_buffers_that_it_uses() -> None:
    found = made("uniform-fused-2d")
    found[1] = without_buffer(found[1], "sum")
    with pytest.raises(PlanError, match="leaves the buffer"):
        check(found)


def test_plans_are_those_of_all_ranks() -> None:
    found = made("growing")
    with pytest.raises(PlanError, match="something else"):
        check([found[0], *found[:3]])


def test_rows_of_the_gathered_a_lie_where_they_belong() -> None:
    def own(step: Step) -> bool:
        return step.label == "a>gathered"

    found = made("growing", replace(PROBLEM, return_gathered=True))
    shift = change(own, transfer=moved("dst", row=16, row_stop=32))
    with pytest.raises(PlanError, match="puts rows where others belong"):
        check(edited(found, 0, shift))
    with pytest.raises(PlanError, match="48 of 64|1536 of 2048 elements of gathered"):
        check(edited(found, 0, change(own, op="sync", transfer=None)))


def test_memory_is_not_shared_without_signals() -> None:
    (plan,) = made("growing", replace(PROBLEM, rows=(16,)))
    a = plan.steps[0].products[0].a
    extra = Step("place", "compute0", "in", transfer=Transfer(a, a._replace(buffer="staging")))
    staging = Buffer("staging", "A", "bfloat16", ((16, 32),), "slot")
    plan = replace(plan, steps=(*plan.steps, extra), buffers=(*plan.buffers, staging))
    with pytest.raises(PlanError, match="without a signal"):
        check([plan])
    with pytest.raises(PlanError, match="no plans"):
        check([])


def test_rows_written_twice_do_not_make_up_for_rows_left_out() -> None:
    problem = Problem("all_gather_matmul", (4, 4), 3, 8, "float32")
    found = made("uniform-fused-2d:pieces=2", problem)
    check(found)

    def rows(step: Step, first: int, last: int) -> Any:
        product = step.products[0]
        a, out = (r._replace(row=first, row_stop=last) for r in (product.a, product.out))
        return product._replace(a=a, out=out)

    def edit(steps: list[Step]) -> None:
        i, j = (i for i, step in enumerate(steps) if step.op == "matmul")
        steps[i] = steps[i]._replace(products=(rows(steps[i], 0, 4),))
        steps[j] = steps[j]._replace(products=(rows(steps[j], 0, 2), rows(steps[j], 2, 4)))

    with pytest.raises(PlanError, match="12 of 24 elements of out"):
        check(edited(found, 0, edit))


def test_collectives_are_the_same_everywhere_and_alone() -> None:
    found = made("serial:collective")
    moves = index(list(found[1].steps), lambda step: step.op == "collective")
    for fields, words in (
        ({"label": "other"}, "other collectives"),
        ({"posts": made("growing")[1].steps[-1].posts}, "mixes signals|never waited for"),
        ({"transfer": moved("dst", row_stop=63)(found[1].steps[moves])}, "the whole"),
    ):
        with pytest.raises(PlanError, match=words):
            check(edited(found, 1, change(lambda step: step.op == "collective", **fields)))


def test_plans_of_different_schedules_do_not_mix() -> None:
    with pytest.raises(PlanError, match="something else"):
        check([*made("growing")[:3], made("shrinking")[3]])
    with pytest.raises(PlanError, match="3 plans for 4 ranks"):
        check(made("growing")[:3])


def test_a_capped_ring_takes_less_than_half_of_what_serial_needs() -> None:
    problem = Problem("all_gather_matmul", (512,) * 4, 64, 256, "bfloat16")
    found = made("hetero-fused-1d:pieces=4", problem, gathered_bytes(problem) * 3 // 8)
    assert found[0].stages == 2
    assert found[0].extra_bytes < gathered_bytes(problem) / 2


@pytest.mark.parametrize(
    ("operator", "name", "cap"),
    [
        ("all_gather_matmul", "uniform-unfused-1d:pieces=3,copy=2,compute=2", 24 * 40 * 2),
        ("all_gather_matmul", "hetero-unfused-2d:pieces=3,pull", None),
        ("matmul_reduce_scatter", "hetero-fused-1d:pieces=2,pull", None),
        ("matmul_all_reduce", "ring:pieces=2", None),
    ],
)
def test_orders_are_told_as_by_walking_all_paths(operator: str, name: str, cap: int | None) -> None:
    problem = Problem(operator, (24, 0, 17, 8), 24, 40, "bfloat16")
    found = Steps(made(name, problem, cap))
    order = execute(found, SignalColumns(found))
    steps = range(len(found.all))
    over = [1 << step for step in steps]  # by step, what is over before it starts, and itself
    before = defaultdict(list)
    for source, target in zip(order.source.tolist(), order.target.tolist(), strict=True):
        before[target].append(source)
    latest: dict[int, int] = {}
    for step in order.ran:
        lane = int(order.lane[step])
        for other in [*before[step], *([latest[lane]] if lane in latest else ())]:
            over[step] |= over[other]
        latest[lane] = step

    first, second = map(np.ravel, np.meshgrid(steps, steps))
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    true = np.array([over[after] >> one & 1 for one, after in pairs], np.bool_)
    assert (order.holds(first, second) == true).all()


@pytest.mark.parametrize(
    ("operator", "name", "stages"),
    [
        ("all_gather_matmul", "uniform-unfused-2d", 0),
        ("all_gather_matmul", "uniform-unfused-1d", 4),
        ("matmul_reduce_scatter", "hetero-unfused-1d:pull", 0),
        ("matmul_reduce_scatter", "ring:pieces=24", 0),
    ],
)
def test_24_ranks_with_24_pieces_are_built_and_proven(
    operator: str, name: str, stages: int
) -> None:
    problem = Problem(operator, (1536,) * 24, 512, 1536, "bfloat16")
    made_plans = made(name, problem, stages * 64 * problem.k * problem.itemsize or None)
    check(made_plans)
    assert made_plans[0].stages == stages


@pytest.mark.parametrize(("count", "generation"), [(MANY + 1, 2), (100, 0)])
def test_many_new_tuples_are_old_at_once_and_few_are_left_alone(
    count: int, generation: int
) -> None:
    gc.collect()
    with paused():
        assert not gc.isenabled()
        made = [[] for _ in range(count)]
        last = made[-1]
    assert gc.isenabled()
    assert any(one is last for one in gc.get_objects(generation))
    gc.freeze()  # what a caller froze stays so
    try:
        frozen = gc.get_freeze_count()
        with paused():
            made += [[] for _ in range(MANY + 1)]
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
