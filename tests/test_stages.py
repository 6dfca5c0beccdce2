"""Plans that no operator makes yet are proven, simulated, drawn and exact on the CPU engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from disturbance import Disturbance, disturb
from ranks import Rank, ranks, run
from stages import Chained, chained
from test_cpu_engine import at_rest, engine, slot_for

from ficco import schedules
from ficco.compute.program import Call
from ficco.dma.engine import Capabilities
from ficco.dma.tiles import work_of
from ficco.machine import find
from ficco.plan import Plan, Product, Signal, Step, Transfer, in_parts, product_rows, render
from ficco.plan.model import Region
from ficco.problems.products import Problem
from ficco.problems.scaling import Scaling
from ficco.problems.specification import (
    AnyProblem,
    Buffer,
    Contraction,
    Exchange,
    Factors,
    Specification,
)
from ficco.proof import PlanError, check
from ficco.runtime.program import compile
from ficco.simulate import simulate
from ficco.simulate.timeline import assemble

GATHERS = (
    "shard-overlap",
    "hetero-fused-1d:pieces=2",
    "uniform-fused-1d:pieces=3,tail=2",
    "uniform-unfused-1d:pieces=2",
    "growing",
)
SCATTERS = (
    "shard-overlap",
    "hetero-unfused-1d:pieces=2",
    "hetero-unfused-1d:pieces=2,tail=2",
    "shard-overlap:beta",
    "hetero-unfused-2d:pieces=2",
)
CHAINS = [(one, two) for one in GATHERS for two in SCATTERS]
SCALED = (
    "serial",
    "shard-overlap",
    "growing",
    "uniform-fused-1d:pieces=2",
    "hetero-fused-1d:pieces=4,tail=2",
    "uniform-unfused-1d:pieces=2,copy=2,compute=2",
    "hetero-fused-1d:pieces=2,pull",
    "uniform-fused-2d:pieces=2",
    "hetero-unfused-2d:pieces=3",
)
TILED = ("tiled", "tiled:pieces=2,order=piece", "tiled:pieces=3+2+1,pull", "tiled:tail=2,copy=2")
ROWS = {1: (9,), 2: (8, 8), 3: (5, 0, 12), 4: (16,) * 4}


def gathered(rows: tuple[int, ...], dtype: str = "bfloat16") -> Problem:
    return Problem("all_gather_matmul", rows, 12, 16, dtype)


def summed(rows: tuple[int, ...], dtype: str = "bfloat16") -> Problem:
    return Problem("matmul_reduce_scatter", rows, 12, 16, dtype)


def scaled(
    rows: tuple[int, ...],
    name: str,
    cap: int | None = None,
    k: int = 32,
    recipe: str = "row",
    bias: bool = False,
) -> list[Plan]:
    """With the rows of A travel their factors."""
    scaling = Scaling(recipe, "float8_e4m3fn", bias=bias)
    problem = Problem("all_gather_matmul", rows, 16, k, "float8_e4m3fn", scaling=scaling)
    return schedules.plans(problem, schedules.Schedule.parse(name), cap)


def tiled(problem: Problem, name: str = "tiled") -> list[Plan]:
    return schedules.plans(problem, schedules.Schedule.parse(name))


def every_plan(rows: tuple[int, ...]) -> list[list[Plan]]:
    chain = Chained(rows, 8, 12, 16)
    return [
        *(chained(chain, *names) for names in CHAINS),
        *(scaled(rows, name) for name in SCALED),
        *(tiled(gathered(rows), name) for name in TILED),
        *(tiled(summed(rows), name) for name in TILED),
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_tiles_wait_for_the_rows_that_a_plan_says(world: int) -> None:
    """The work of a launch gates and announces the rows that the parts of its step do."""
    problems = (replace(one, n=16) for one in (gathered(ROWS[world]), summed(ROWS[world])))
    for problem in problems:
        for name in TILED:
            for plan in tiled(problem, name):
                (step,) = (one for one in plan.steps if not one.whole)
                work, began = work_of(plan, step), 0
                rows: dict[tuple[str, int], set[int]] = {}
                for number, count in enumerate(work.rows):
                    for kind, column in (("gates", work.gates), ("announces", work.announces)):
                        for signal, spans in enumerate(column):
                            found = rows.setdefault((kind, signal), set())
                            for product, first, last in spans:
                                assert first < last <= work.rows[product]
                                if product == number:
                                    found.update(range(began + first, began + last))
                    began += count
                numbers = [
                    row for product in step.products for row in range(*product_rows(plan, product))
                ]
                for (kind, signal), found in rows.items():
                    one = getattr(step, kind)[signal]
                    assert {numbers[row] for row in found} == set(range(one.first, one.last))
                assert len(rows) == len(step.gates) + len(step.announces)
                assert list(work.opens) == sorted(work.opens)


@pytest.mark.parametrize("world", ROWS)
def test_they_are_proven(world: int) -> None:
    for plans in every_plan(ROWS[world]):
        check(plans)


def test_scales_travel_through_a_ring_of_stages() -> None:
    plans = scaled((16,) * 4, "hetero-fused-1d:pieces=4", cap=2 * 12 * 32)
    assert plans[0].stages == 2
    check(plans)


def test_they_are_simulated_and_drawn() -> None:
    machine = find("h200-4", None)
    for plans in every_plan((64,) * 4):
        for mode in ("queued", "idle"):
            timeline = simulate(plans, machine, mode)
            assert 0 < timeline.stop_s < 1
            bars = {bar.label for bar in timeline.ranks[0] if bar.kind != "wait"}
            labels = {step.label for step in in_parts(plans[0]).steps}
            assert bars >= labels
        text = render(plans[0])
        assert "compute0 |" in text and "copy0" in text


def test_pieces_flow_through_both_products() -> None:
    """A block of the result leaves before the last rows of A are there."""
    machine = find("h200-4", None)
    problem = Chained((4096,) * 4, 4096, 4096, 4096)
    plans = chained(problem, "shard-overlap", "shard-overlap")
    bars = simulate(plans, machine).ranks[0]
    copies = {bar.label: bar for bar in bars if bar.kind == "copy"}
    sent = [step.label for step in plans[0].steps if step.op == "copy" and step.transfer]
    products = [label for label in sent if copies[label] and "0." not in label]
    last_arrival = max(
        bar.start_s for bar in bars if bar.kind == "matmul" and bar.label.startswith("3.")
    )
    assert products and min(copies[label].start_s for label in products) < last_arrival


def test_one_product_that_is_gated_waits_less_than_a_whole_one() -> None:
    """Its rows are multiplied as they arrive."""
    machine = find("h200-4", None)
    problem = Problem("all_gather_matmul", (4096,) * 4, 4096, 4096, "bfloat16")
    plans = tiled(problem)
    whole = [
        replace(
            plan,
            steps=tuple(
                step._replace(waits=step.waits + step.gates, gates=()) for step in plan.steps
            ),
        )
        for plan in plans
    ]
    check(whole)
    assert simulate(plans, machine).stop_s < 0.9 * simulate(whole, machine).stop_s


# Broken plans.


def edited(plans: list[Plan], rank: int, edit: Callable[[Step], Step]) -> list[Plan]:
    """Rank's first step that ``edit`` changes is changed."""
    steps = list(plans[rank].steps)
    index = next(i for i, step in enumerate(steps) if edit(step) != step)
    steps[index] = edit(steps[index])
    return [*plans[:rank], replace(plans[rank], steps=tuple(steps)), *plans[rank + 1 :]]


def products(suits: Callable[[Step], Any], **fields: Any) -> Callable[[Step], Step]:
    """Other fields in the first product; a dict holds fields of a region, a list of regions."""

    def edit(step: Step) -> Step:
        if not (step.products and suits(step)):
            return step
        first = step.products[0]
        values = {
            name: getattr(first, name)._replace(**value) if isinstance(value, dict) else value
            for name, value in fields.items()
        }
        return step._replace(products=(first._replace(**values), *step.products[1:]))

    return edit


def transfers(suits: Callable[[Step], Any], end: str, **fields: Any) -> Callable[[Step], Step]:
    def edit(step: Step) -> Step:
        if step.transfer is None or not suits(step):
            return step
        region = getattr(step.transfer, end)._replace(**fields)
        return step._replace(transfer=step.transfer._replace(**{end: region}))

    return edit


def drop(suits: Callable[[Step], Any]) -> Callable[[Step], Step]:
    """The step does nothing."""

    def edit(step: Step) -> Step:
        if not suits(step):
            return step
        return step._replace(op="sync", transfer=None, products=(), reduction=None)

    return edit


def is_relu(step: Step) -> bool:
    return step.label == "relu"


def multiplies_c(step: Step) -> bool:
    return any(product.b.buffer == "c" for product in step.products)


def multiplies_b(step: Step) -> bool:
    return any(product.b.buffer == "b" for product in step.products)


def gathers(step: Step) -> bool:
    return step.op == "copy" and step.transfer is not None and not step.transfer.terms


def sends_scale(step: Step) -> bool:
    return step.op == "copy" and step.label.startswith("scale")


def function(name: str) -> Callable[[Step], Step]:
    def edit(step: Step) -> Step:
        if step.transfer is None or not is_relu(step):
            return step
        return step._replace(transfer=step.transfer._replace(function=name))

    return edit


def lower(region: Any) -> Any:
    return region._replace(row=region.row + 8, row_stop=region.row_stop + 8)


CHAIN = ("hetero-unfused-1d:pieces=2", "shard-overlap")
BROKEN_CHAINS: dict[str, tuple[Callable[[Step], Step], str]] = {
    "rows without relu": (drop(is_relu), "reads what nobody has written"),
    "no function": (function(""), "between the wrong buffers"),
    "another function": (function("gelu"), "'gelu', which is not asked for"),
    "relu of other rows": (
        lambda s: (
            s
            if not is_relu(s)
            else s._replace(transfer=s.transfer._replace(src=lower(s.transfer.src)))
        ),
        "puts rows|nobody has written|before it is written",
    ),
    "the product before relu": (
        products(multiplies_c, a={"buffer": "hidden"}),
        "multiplies in the wrong buffers",
    ),
    "b in place of c": (products(multiplies_c, b={"buffer": "b"}), "in the wrong buffers|leaves"),
    "c in place of b": (products(multiplies_b, b={"buffer": "c"}), "in the wrong buffers|leaves"),
    "no first product": (drop(lambda s: multiplies_b(s) and s.waits), "never|nobody has written"),
    "a second product left out": (drop(multiplies_c), "nobody has written"),
    "the second product elsewhere": (
        products(multiplies_c, out={"row": 0, "row_stop": 16}),
        "a peer's|nobody|written twice|another piece",
    ),
    "gathered rows sent as products": (
        transfers(gathers, "src", buffer="active"),
        "says so of an operand|wrong buffers",
    ),
    "gathered into the other staging": (
        transfers(gathers, "dst", buffer="staging 2"),
        "between the wrong buffers",
    ),
    "a term missing": (
        lambda s: (
            s
            if s.reduction is None
            else s._replace(
                reduction=s.reduction._replace(
                    parts=s.reduction.parts[1:], terms=s.reduction.terms[1:]
                )
            )
        ),
        "leaves out the product of a rank",
    ),
    "sent before it is made": (
        lambda s: s._replace(after=()) if s.op == "copy" and s.transfer and s.transfer.terms else s,
        "before it is written",
    ),
}


@pytest.mark.parametrize("what", BROKEN_CHAINS)
@pytest.mark.parametrize("rank", [0, 3])
def test_broken_chains_are_caught(what: str, rank: int) -> None:
    edit, words = BROKEN_CHAINS[what]
    plans = chained(Chained((16,) * 4, 8, 12, 16), *CHAIN)
    with pytest.raises(PlanError, match=words):
        check(edited(plans, rank, edit))


def other_scales(step: Step) -> Step:
    first, *rest = step.products or (None,)
    if first is None or not step.waits:
        return step
    row, col = first.factors
    moved = row._replace(row=row.row - 1, row_stop=row.row_stop - 1)
    return step._replace(products=(first._replace(factors=(moved, col)), *rest))


def swapped_scales(step: Step) -> Step:
    return (
        products(lambda s: True, factors=step.products[0].factors[::-1])(step)
        if step.products
        else step
    )


BROKEN_SCALES: dict[str, tuple[Callable[[Step], Step], str]] = {
    "no scales": (products(lambda s: True, factors=()), "is not scaled as asked for"),
    "one scale": (
        lambda s: (
            s
            if not s.products
            else s._replace(products=(s.products[0]._replace(factors=s.products[0].factors[:1]),))
        ),
        "is not scaled as asked for",
    ),
    "swapped scales": (swapped_scales, "is not scaled as asked for"),
    "scales of other rows": (
        other_scales,
        "factors of other rows|another piece|before it is written|nobody has written|leaves",
    ),
    "scales not sent": (drop(sends_scale), "never waited|nobody has written|holds"),
    "scales of other rows sent": (
        transfers(sends_scale, "src", row=1, row_stop=9),
        "another piece|sizes|block|leaves",
    ),
    "scales sent as rows": (
        transfers(sends_scale, "src", buffer="a"),
        "between the wrong buffers",
    ),
    "rows sent as scales": (
        transfers(lambda s: s.op == "copy" and not sends_scale(s), "dst", buffer="staging scale"),
        "between the wrong buffers",
    ),
    "factors of columns that are not there": (
        lambda s: (
            s
            if not s.products
            else products(
                lambda s: True,
                factors=(
                    s.products[0].factors[0],
                    s.products[0].factors[1]._replace(row=1, row_stop=2),
                ),
            )(s)
        ),
        "regions that do not fit",
    ),
    "rows of b that are not there": (
        products(lambda s: s.waits, b={"row": 0, "row_stop": 33}, a={"col_stop": 33}),
        "leaves the buffer",
    ),
    "sums of what was rounded": (
        products(lambda s: s.waits, accumulate=True),
        "adds to what has been rounded",
    ),
}


@pytest.mark.parametrize("what", BROKEN_SCALES)
@pytest.mark.parametrize("rank", [0, 3])
def test_broken_scales_are_caught(what: str, rank: int) -> None:
    edit, words = BROKEN_SCALES[what]
    plans = scaled((16,) * 4, "hetero-unfused-1d:pieces=2")
    with pytest.raises(PlanError, match=words):
        check(edited(plans, rank, edit))


def factor(**fields: Any) -> Callable[[Step], Step]:
    """Other factors of A in the first product of a step that waits."""

    def edit(step: Step) -> Step:
        if not (step.products and step.waits):
            return step
        left, right = step.products[0].factors
        return products(lambda s: True, factors=(left._replace(**fields), right))(step)

    return edit


def bias_of(step: Step) -> Region | None:
    return next((product.bias for product in step.products), None)


BROKEN_RECIPES: dict[str, tuple[str, str, Callable[[Step], Step], str]] = {
    "the factor of another rank": (
        "tensor",
        "growing",
        factor(row=3, row_stop=4),
        "before it is written",
    ),
    "the factor of a rank that came before": (
        "tensor",
        "growing",
        lambda s: factor(row=0, row_stop=1)(s) if "2.0" in s.label else s,
        "another piece|holds",
    ),
    "the factors of two ranks": ("tensor", "growing", factor(row=1, row_stop=3), "do not fit"),
    "the factor of the own rows": (
        "tensor",
        "growing",
        factor(buffer="scale_a", row=0, row_stop=1),
        "factors of other rows|do not fit",
    ),
    "fewer blocks": ("block", "growing", factor(col_stop=1), "do not fit"),
    "the blocks of other columns": (
        "block",
        "uniform-fused-2d:pieces=2",
        factor(col=0, col_stop=1),
        "do not fit",
    ),
    "no bias": ("row", "growing", products(bias_of, bias=None), "does not add the bias once"),
    "the bias twice": (
        "row",
        "uniform-fused-2d:pieces=2",
        products(lambda s: s.products[0].accumulate, bias=Region("bias", 1, 0, 1, 0, 16)),
        "does not add the bias once",
    ),
    "the bias of other columns": (
        "row",
        "growing",
        products(bias_of, bias={"col_stop": 8}),
        "does not add the bias once",
    ),
    "a factor of columns as the bias": (
        "row",
        "growing",
        products(bias_of, bias={"buffer": "scale_b"}),
        "does not add the bias once",
    ),
}


@pytest.mark.parametrize("what", BROKEN_RECIPES)
def test_broken_recipes_are_caught(what: str) -> None:
    recipe, name, edit, words = BROKEN_RECIPES[what]
    plans = scaled((16,) * 4, name, k=256, recipe=recipe, bias=True)
    check(plans)
    with pytest.raises(PlanError, match=words):
        check(edited(plans, 1, edit))


def test_a_bias_that_nobody_asked_for_is_caught() -> None:
    plans = scaled((16,) * 4, "growing")
    biased = products(lambda s: True, bias=Region("b", 1, 0, 1, 0, 16))
    with pytest.raises(PlanError, match="does not add the bias once"):
        check(edited(plans, 1, biased))


def test_scales_behind_the_signal_are_caught() -> None:
    """Of two copies the second says that both are there."""
    plans = scaled((16,) * 4, "shard-overlap")
    steps = list(plans[1].steps)
    index = next(i for i, step in enumerate(steps) if sends_scale(step))
    steps[index : index + 2] = steps[index : index + 2][::-1]
    with pytest.raises(PlanError, match="before it is written"):
        check([plans[0], replace(plans[1], steps=tuple(steps)), *plans[2:]])


# Mutants of what the builder makes of one product: each has one thing wrong, on rank 1 or wherever
# a signal is named.

Plans = list[Plan]


def renamed(plans: Plans, other: Callable[[Signal], Signal]) -> Plans:
    """Other signals, wherever they are named."""
    fields = ("waits", "clears", "posts", "gates", "announces")

    def edit(step: Step) -> Step:
        return step._replace(**{of: tuple(map(other, getattr(step, of))) for of in fields})

    return [replace(plan, steps=tuple(map(edit, plan.steps))) for plan in plans]


def partial_signals(plans: Plans) -> tuple[Signal, ...]:
    """The gates, or announcements, of rank 1."""
    return next(
        (*step.gates, *step.announces) for step in plans[1].steps if step.gates or step.announces
    )


def without(signal: Signal, of: str) -> Callable[[Step], Step]:
    def edit(step: Step) -> Step:
        left = tuple(one for one in getattr(step, of) if one != signal)
        return step._replace(**{of: left})

    return edit


def late(plans: Plans, signal: Signal) -> Plans:
    """A signal is waited for where the call of rank 1 ends."""
    return edited(
        plans, 1, lambda s: s._replace(waits=(*s.waits, signal)) if s.label == "retire" else s
    )


def no_gate(plans: Plans) -> Plans:
    gate = partial_signals(plans)[-1]
    return late(edited(plans, 1, without(gate, "gates")), gate)


def few_rows(plans: Plans) -> Plans:
    last = partial_signals(plans)[-1]
    return renamed(plans, lambda s: s._replace(last=s.last - 4) if s == last else s)


def few_rows_here(plans: Plans) -> Plans:
    """The poster means all of them."""
    last = partial_signals(plans)[-1]

    def edit(step: Step) -> Step:
        gates = tuple(s._replace(last=s.last - 4) if s == last else s for s in step.gates)
        return step._replace(gates=gates)

    return edited(plans, 1, edit)


def few_and_told(plans: Plans) -> Plans:
    """A signal about the first rows of what it tells of."""
    first = partial_signals(plans)[0]
    return renamed(plans, lambda s: s._replace(last=s.first + 2) if s == first else s)


def swapped(plans: Plans) -> Plans:
    """Two signals are about each other's rows."""
    one, two, *_ = partial_signals(plans)
    rows = {one: (two.first, two.last), two: (one.first, one.last)}
    return renamed(
        plans, lambda s: s._replace(first=rows[s][0], last=rows[s][1]) if s in rows else s
    )


def swapped_words(plans: Plans) -> Plans:
    """The product posts each other's words."""
    one, two, *_ = partial_signals(plans)
    words = {one: two.word, two: one.word}

    def edit(step: Step) -> Step:
        told = (s._replace(word=words.get(s, s.word)) for s in step.announces)
        return step._replace(announces=tuple(told))

    return edited(plans, 1, edit)


def one_word(plans: Plans) -> Plans:
    one, two, *_ = partial_signals(plans)
    return renamed(plans, lambda s: s._replace(word=one.word) if s == two else s)


def sent_at_once(plans: Plans) -> Plans:
    """A copy does not wait for the announcement of its rows."""
    made = partial_signals(plans)[0]

    def edit(step: Step) -> Step:
        return without(made, "waits")(step) if step.op == "copy" else step

    return late(edited(plans, 1, edit), made)


def reordered(first: Callable[[Step], Any]) -> Callable[[Plans], Plans]:
    """Some steps are enqueued before all others, and wait for none of them."""

    def edit(plan: Plan) -> Plan:
        order = sorted(range(len(plan.steps)), key=lambda i: not first(plan.steps[i]))
        place = {old: new for new, old in enumerate(order)}
        steps = [
            plan.steps[i]._replace(
                after=tuple(place[j] for j in plan.steps[i].after if place[j] < place[i])
            )
            for i in order
        ]
        return replace(plan, steps=tuple(steps))

    return lambda plans: [edit(plan) for plan in plans]


READ = "before it is written"
GATHER, SCATTER = gathered((16,) * 4), summed((16,) * 4)
PUSH, PULL = "tiled:pieces=2", "tiled:pieces=2,pull"
MUTANTS: dict[str, tuple[Problem, tuple[str, ...], Callable[[Plans], Plans], str]] = {
    "a gate missing": (GATHER, (PUSH, PULL), no_gate, READ),
    "a gate and its copy about too few rows": (GATHER, (PUSH, PULL), few_rows, "gates other rows"),
    "a gate about too few rows": (GATHER, (PUSH, PULL), few_rows_here, "shares its word"),
    "gates swapped": (GATHER, (PUSH, PULL), swapped, "gates other rows"),
    "a word for two gates": (GATHER, (PUSH, PULL), one_word, "word used twice"),
    "the product before the copies": (
        GATHER, (PUSH,), reordered(lambda s: s.products), "share one hardware queue",
    ),
    "an announcement too early": (SCATTER, (PUSH, PULL), few_and_told, READ),
    "announcements swapped": (SCATTER, (PUSH, PULL), swapped, READ),
    "words of announcements swapped": (SCATTER, (PUSH, PULL), swapped_words, "shares its word"),
    "a word for two announcements": (SCATTER, (PUSH, PULL), one_word, "word used twice"),
    "a copy that does not wait": (SCATTER, (PUSH,), sent_at_once, READ),
    "the copies before the product": (
        SCATTER, (PUSH,), reordered(lambda s: s.op in ("copy", "sync") and s.lane == "copy0"),
        "share one hardware queue",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "name"), [(what, name) for what, (_, names, *_) in MUTANTS.items() for name in names]
)
def test_mutants_of_one_product_are_caught(what: str, name: str) -> None:
    problem, _, mutate, words = MUTANTS[what]
    plans = tiled(problem, name)
    check(plans)
    with pytest.raises(PlanError, match=words):
        check(mutate(plans))


def test_a_tile_that_waits_for_a_later_one_is_a_deadlock() -> None:
    """The rows for a peer wait for what the peer sends only after it got them."""
    problem = gathered((16,) * 2)
    plans = tiled(problem)
    check(plans)

    def copy_last(plan: Plan) -> Plan:
        steps = list(plan.steps)
        copy = next(i for i, step in enumerate(steps) if step.op == "copy")
        product = next(i for i, step in enumerate(steps) if step.gates)
        steps[copy] = steps[copy]._replace(after=(product,))
        order = sorted(range(len(steps)), key=lambda i: (product if i == copy else i, i == copy))
        place = {old: new for new, old in enumerate(order)}
        moved = [steps[i]._replace(after=tuple(place[j] for j in steps[i].after)) for i in order]
        return replace(plan, steps=tuple(moved))

    with pytest.raises(PlanError, match="circle|deadlock"):
        check([copy_last(plan) for plan in plans])


BROKEN_GATES: dict[str, tuple[Callable[[Step], Step], str]] = {
    "rows of a left over": (products(lambda s: s.gates, a={"row_stop": 15}), "do not fit"),
    "rows of the product upside down": (
        products(lambda s: s.gates, out={"row": 48, "row_stop": 32}),
        "do not fit|leaves the buffer",
    ),
    "another operation, too": (
        lambda s: (
            s._replace(transfer=Transfer(s.products[0].a, s.products[0].out)) if s.gates else s
        ),
        "'all': signals gate or announce rows of matrix products",
    ),
    "after the step before the first": (
        lambda s: s._replace(after=(-1,)) if s.gates else s,
        "no earlier step",
    ),
    "after itself": (lambda s: s._replace(after=(99,)) if s.gates else s, "no earlier step"),
    "a buffer that is not there": (
        products(lambda s: s.gates, out={"buffer": "nowhere"}),
        "no buffer, 'nowhere'",
    ),
}


@pytest.mark.parametrize("what", BROKEN_GATES)
@pytest.mark.parametrize("rank", [0, 3])
def test_broken_products_with_gates_are_caught(what: str, rank: int) -> None:
    edit, words = BROKEN_GATES[what]
    plans = tiled(gathered((16,) * 4))
    with pytest.raises(PlanError, match=words):
        check(edited(plans, rank, edit))


def test_a_step_does_not_run_on_the_lane_of_a_part() -> None:
    """There it would come after rows of a product without waiting for them."""
    plans = tiled(summed((16,) * 4))
    steps = list(plans[1].steps)
    i = next(i for i, step in enumerate(steps) if step.op == "copy")
    told = steps[i].waits
    steps[i] = steps[i]._replace(lane="compute0/0", waits=())
    steps[-1] = steps[-1]._replace(waits=(*steps[-1].waits, *told), after=(*steps[-1].after, i))
    with pytest.raises(PlanError, match="no lane 'compute0/0'"):
        check([plans[0], replace(plans[1], steps=tuple(steps)), *plans[2:]])


@dataclass(frozen=True)
class Asked(AnyProblem):
    """What is asked of one rank, whatever it is."""

    specification: Specification
    operator: str = "anything"
    world: int = 1
    hosts: int = 1


#: Of six rows the last four stay on the rank, and are then the first four.
LAST = Exchange(lambda src, dst: 4, lambda src, dst: 2, lambda src, dst: 0)


def one_rank(
    step: Sequence[Step], contraction: Contraction, exchanges: list[str], *buffers: Buffer
) -> list[Plan]:
    def of(*memory: str) -> tuple[Buffer, ...]:
        return tuple(buffer for buffer in buffers if buffer.memory in memory)

    asked = Specification(
        of("operand"), of("result"), (contraction,), dict.fromkeys(exchanges, LAST)
    )
    return [Plan(Asked(asked), "by hand", 0, tuple(step), of("operand", "result", "local"), 0)]


def operand(name: str, holds: str, rows: int, cols: int, leaves: bool = False) -> Buffer:
    return Buffer(name, holds, "float32", ((rows, cols),), "operand", leaves=leaves)


def region(name: str, row: int, row_stop: int, cols: int, col: int = 0) -> Region:
    return Region(name, 0, row, row_stop, col, col + cols)


OUT = Buffer("out", "C", "float32", ((4, 3),), "result")


@pytest.mark.parametrize(("first", "words"), [(2, None), (0, "another block")])
def test_rows_of_b_have_the_numbers_with_which_they_land(first: int, words: str | None) -> None:
    b = region("b", first, first + 4, 3)
    product = Product(region("a", 0, 4, 4), b, region("out", 0, 4, 3))
    plans = one_rank(
        [Step("matmul", "compute0", "", products=(product,))],
        Contraction("A", "B", "C", (4,)),
        ["B"],
        operand("a", "A", 4, 4),
        operand("b", "B", 6, 3, leaves=True),
        OUT,
    )
    refused = pytest.raises(PlanError, match=words) if words else nullcontext()
    with refused:
        check(plans)


def test_rows_of_a_transposed_product_do_not_land_elsewhere() -> None:
    """They are columns of A: those are not renumbered."""
    product = Product(region("a", 0, 5, 4), region("b", 0, 5, 3), region("out", 0, 4, 3), terms=0)
    plans = one_rank(
        [Step("matmul", "compute0", "", products=(product._replace(transposed=True),))],
        Contraction("A", "B", "C", (5,), transposed=True),
        ["C"],
        operand("a", "A", 5, 6),
        operand("b", "B", 5, 3),
        OUT,
    )
    with pytest.raises(PlanError, match="in the wrong buffers"):
        check(plans)


@pytest.mark.parametrize("landed", [2, 0])
def test_factors_of_rows_have_the_numbers_with_which_they_land(landed: int) -> None:
    def product(row: int, scale: Region) -> Product:
        a, out = region("a", row + 2, row + 4, 4), region("out", row, row + 2, 3)
        return Product(a, region("b", 0, 4, 3), out, factors=(scale, region("s", 0, 1, 3)))

    copied = Transfer(region("r", 2, 6, 1), region("landed", 0, 4, 1))
    # Rows 2 and 3 of the operand are the first that land, rows 4 and 5 the next.
    two = (
        product(0, region("landed", landed and 2, (landed and 2) + 2, 1)),
        product(2, region("r", 4, 6, 1)),
    )
    plans = one_rank(
        [
            Step("place", "compute0", "r", transfer=copied),
            Step("matmul", "compute0", "", products=two),
        ],
        Contraction("A", "B", "C", (4,), factors=(Factors("R", (1, 0)), Factors("S", (0, 1)))),
        ["A", "R"],
        operand("a", "A", 6, 4, leaves=True),
        operand("b", "B", 4, 3),
        operand("r", "R", 6, 1, leaves=True),
        operand("s", "S", 1, 3),
        OUT,
        Buffer("landed", "R", "float32", ((4, 1),), "local"),
    )
    refused = pytest.raises(PlanError, match="factors of other rows") if landed else nullcontext()
    with refused:
        check(plans)


def test_parts_of_batches_are_refused_by_name() -> None:
    (plan, *_) = tiled(gathered((16,) * 4))
    index = next(i for i, step in enumerate(plan.steps) if step.gates)
    step = plan.steps[index]
    batch = step._replace(products=(step.products[0]._replace(batch=2),))
    steps = (*plan.steps[:index], batch, *plan.steps[index + 1 :])
    with pytest.raises(NotImplementedError, match="neither a batch nor transposed"):
        in_parts(replace(plan, steps=steps))


NOTHING = dict.fromkeys(("engine", "post", "wait", "copy", "products", "accumulate"), "")
#: An engine that offers nothing beyond the steps that all engines know.
GPU: Any = SimpleNamespace(
    name="gpu",
    capabilities=lambda: Capabilities(**NOTHING, movers=("dma",), capture=False),
    enter=lambda program, lane: None,
)


def test_what_a_reader_of_plans_does_not_know_is_refused_by_name() -> None:
    (plan, *_) = tiled(gathered((16,)), "shard-overlap")
    strange = replace(plan, steps=(Step("divine", "compute0", "new"),))
    machine = find("h200-4", None)
    readers: dict[str, Callable[[Plan], object]] = {
        "render": render,
        "the simulator": lambda one: simulate([one], machine),
        "the gpu engine": lambda one: compile(one, GPU, None),
    }
    for name, read in readers.items():
        words = f"{name} does not know the operation 'divine' of step 'new' on compute0"
        with pytest.raises(NotImplementedError, match=words):
            read(strange)
    with pytest.raises(NotImplementedError, match="a timeline does not know .* 'divine'"):
        assemble("", [strange], [[(strange.steps[0], 0.0, 1.0)]])
    with pytest.raises(PlanError, match="does not hold what its operation says"):
        check([strange])


# On the CPU engine.


def integers(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


def on_cpu(made: Any, plan: Plan, slot: Any, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """The result of a call; its buffers hold nonsense at first."""
    tensors = dict(operands)
    for buffer in plan.buffers:
        if buffer.memory in ("result", "local"):
            dtype, shape = getattr(torch, buffer.dtype), plan.shape(buffer.name)
            tensors[buffer.name] = torch.full(shape, float("nan"), dtype=dtype)
    made.execute(compile(plan, made, slot), Call(tensors))
    (result,) = [buffer.name for buffer in plan.buffers if buffer.memory == "result"]
    return tensors[result]


def exact_chains(at: Rank, rows: tuple[int, ...]) -> None:
    problem = Chained(rows, 8, 12, 16, "float32")
    plans = [chained(problem, *names)[at.rank] for names in CHAINS]
    begin = sum(rows[: at.rank])
    mine = slice(begin, begin + rows[at.rank])
    with engine() as made:
        slot = slot_for(made, plans)
        for turn, plan in enumerate(plans):
            a = integers(turn, sum(rows), 16)
            b, c = (
                [integers(100 * turn + 10 * rank + i, *shape) for rank in range(at.world)]
                for i, shape in ((1, (16, 8)), (2, (8, 12)))
            )
            wanted = sum(torch.relu(a @ x) @ y for x, y in zip(b, c, strict=True))
            operands = {"a": a[mine].float(), "b": b[at.rank].float(), "c": c[at.rank].float()}
            out = on_cpu(made, plan, slot, operands)
            assert torch.equal(out.double(), wanted[mine]), plan.schedule
        if slot.words:
            at_rest(made, slot)


@ranks(1, 2, 3, 4)
def test_chains_are_exact(world: int) -> None:
    run(world, exact_chains, ROWS[world])


def exact_parts(at: Rank, rows: tuple[int, ...]) -> None:
    begin = sum(rows[: at.rank])
    mine = slice(begin, begin + rows[at.rank])
    gathers = [tiled(gathered(rows, "float32"), name)[at.rank] for name in TILED]
    scatters = [tiled(summed(rows, "float32"), name)[at.rank] for name in TILED]
    with engine() as made:
        slot = slot_for(made, gathers + scatters)
        for turn, plan in enumerate(gathers + scatters):
            dist.barrier()
            everyone = [integers(50 * turn + rank, sum(rows), 16) for rank in range(at.world)]
            b = [integers(50 * turn + 20 + rank, 16, 12) for rank in range(at.world)]
            if plan in gathers:
                a, wanted = everyone[0][mine], everyone[0] @ b[at.rank]
            else:
                a = everyone[at.rank]
                wanted = sum(x @ y for x, y in zip(everyone, b, strict=True))[mine]
            # Blocks of rows one after the other, then each as soon as its own gate is open.
            for parts in (plan, in_parts(plan, concurrent=True)):
                with disturb(Disturbance(delay_s=0.002, seed=turn)):
                    out = on_cpu(made, parts, slot, {"a": a.float(), "b": b[at.rank].float()})
                assert torch.equal(out.double(), wanted), plan.schedule
        if slot.words:
            at_rest(made, slot)


@ranks(1, 2, 4)
def test_gated_and_announced_rows_are_exact(world: int) -> None:
    run(world, exact_parts, ROWS[world])


def test_an_engine_without_partial_signals_says_so() -> None:
    (plan, *_) = tiled(gathered((16,) * 2))
    with pytest.raises(NotImplementedError, match="gpu engine does not offer signals that gate"):
        compile(plan, GPU, None)
    (plan, *_) = scaled((16,), "serial")
    with pytest.raises(NotImplementedError, match="gpu engine does not offer products of scaled"):
        compile(plan, GPU, None)
    (plan, *_) = chained(Chained((16,), 8, 12, 16), *CHAIN)
    with pytest.raises(NotImplementedError, match="does not offer the function 'relu'"):
        compile(plan, GPU, None)
