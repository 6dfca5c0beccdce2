"""Edits that break Plans: each changes steps of a rank, and the proof has to say what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from ficco.plan import Plan, Signal, Step
from ficco.plan.model import Region
from ficco.proof import PlanError, check

Edit = Callable[[list[Step]], Any]
#: A test of a step, or how its label begins.
Suits = Callable[[Step], Any] | str
#: Fields of a step that hold signals.
ROLES = ("waits", "clears", "posts", "gates", "announces")


def refused(plans: Sequence[Plan], words: str | None = None) -> None:
    with pytest.raises(PlanError, match=words):
        check(list(plans))


def edited(plans: Sequence[Plan], rank: int, edit: Edit) -> list[Plan]:
    """The Plans, with an edit of the steps of a rank."""
    steps = list(plans[rank].steps)
    edit(steps)
    assert tuple(steps) != plans[rank].steps, "the edit changes nothing"
    return [*plans[:rank], replace(plans[rank], steps=tuple(steps)), *plans[rank + 1 :]]


def everywhere(plans: Sequence[Plan], edit: Edit) -> list[Plan]:
    """The Plans, with an edit of the steps of every rank."""
    for rank in range(len(plans)):
        plans = edited(plans, rank, edit)
    return list(plans)


def with_buffer(plan: Plan, which: str, /, **fields: Any) -> Plan:
    buffers = (one._replace(**fields) if one.name == which else one for one in plan.buffers)
    return replace(plan, buffers=tuple(buffers))


def without_buffer(plan: Plan, name: str) -> Plan:
    return replace(plan, buffers=tuple(one for one in plan.buffers if one.name != name))


def mapped(
    plans: Sequence[Plan],
    to: Callable[[Signal], Signal | None],
    roles: Sequence[str] = ROLES,
) -> list[Plan]:
    """The Plans with other signals, wherever they are named; without those that ``to`` drops."""

    def edit(step: Step) -> Step:
        signals = {role: tuple(filter(None, map(to, getattr(step, role)))) for role in roles}
        return step._replace(**signals)

    return [replace(plan, steps=tuple(map(edit, plan.steps))) for plan in plans]


def renamed(plans: Sequence[Plan], wrong: Signal, **fields: Any) -> list[Plan]:
    """The Plans with other fields in one signal, wherever it is named."""
    return mapped(plans, lambda one: one._replace(**fields) if one == wrong else one)


def without_kinds(*kinds: str) -> Callable[[Sequence[Plan]], list[Plan]]:
    """Take signals of rank 1 out altogether: the words are right, only the order is lost."""
    return partial(mapped, to=lambda one: None if one.poster == 1 and one.kind in kinds else one)


# Which step.


def is_copy(step: Step) -> bool:
    return step.op == "copy"


def multiplies(step: Step) -> bool:
    return step.op == "matmul"


def sums(step: Step) -> bool:
    return step.op == "reduce"


def is_collective(step: Step) -> bool:
    return step.op == "collective"


def awaits_data(step: Step) -> bool:
    return step.op == "matmul" and bool(step.waits)


def adds(step: Step) -> bool:
    return any(product.accumulate for product in step.products)


def retires(step: Step) -> bool:
    return step.label == "retire"


def index(steps: Sequence[Step], suits: Suits) -> int:
    """The first step that suits."""
    if isinstance(suits, str):
        return next(i for i, step in enumerate(steps) if step.label.startswith(suits))
    return next(i for i, step in enumerate(steps) if suits(step))


# What changes.


def replaced(value: Any, fields: dict[str, Any]) -> Any:
    """A named tuple with other fields; a dict has fields of a field, a function makes the new of
    the old."""
    new = {}
    for name, field in fields.items():
        old = getattr(value, name)
        if isinstance(field, dict):
            field = replaced(old, field)
        new[name] = field(old) if callable(field) else field
    return value._replace(**new)


def changed(step: Step, **fields: Any) -> Step:
    """A step with other fields, or its work or first product with theirs."""
    own = {name: fields.pop(name) for name in Step._fields if name in fields}
    if fields.keys() - {*getattr(step.work, "_fields", ())} and step.products:
        fields = {"products": (replaced(step.products[0], fields), *step.products[1:])}
    if fields:
        own["work"] = fields
    return replaced(step, own)  # type: ignore[no-any-return]


def change(suits: Suits, **fields: Any) -> Edit:
    """Change the first step that suits, as :func:`changed` does."""

    def edit(steps: list[Step]) -> None:
        i = index(steps, suits)
        steps[i] = changed(steps[i], **fields)

    return edit


def idle(suits: Suits) -> Edit:
    """Let the first step that suits do nothing, in its place."""
    return change(suits, work=None)


def move(source: Suits, target: Suits, *fields: str) -> Edit:
    """Let another step have all that one has in some fields."""

    def edit(steps: list[Step]) -> None:
        i, j = index(steps, source), index(steps, target)
        for field in fields:
            held, more = getattr(steps[i], field), getattr(steps[j], field)
            steps[i] = steps[i]._replace(**{field: ()})
            steps[j] = steps[j]._replace(**{field: (*more, *held)})

    return edit


def swap(suits: Suits, part: str) -> Edit:
    """Exchange a part of what the first two steps that suit do."""

    def edit(steps: list[Step]) -> None:
        i = index(steps, suits)
        j = i + 1 + index(steps[i + 1 :], suits)
        one, two = (
            getattr(steps[n].products[0] if steps[n].products else steps[n].work, part)
            for n in (i, j)
        )
        steps[i], steps[j] = changed(steps[i], **{part: two}), changed(steps[j], **{part: one})

    return edit


def in_rows(row: int, row_stop: int) -> dict[str, int]:
    return {"row": row, "row_stop": row_stop}


def in_cols(col: int, col_stop: int) -> dict[str, int]:
    return {"col": col, "col_stop": col_stop}


def down(by: int) -> Callable[[Region], Region]:
    """The region so many rows further down."""
    return lambda one: one._replace(row=one.row + by, row_stop=one.row_stop + by)


def right(by: int) -> Callable[[Region], Region]:
    """The region so many columns further right."""
    return lambda one: one._replace(col=one.col + by, col_stop=one.col_stop + by)


def twice(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values * 2


def without_first(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values[1:]


# Edits of several steps.


def clear_first(steps: list[Step]) -> None:
    """Clear a word of data where the call begins."""
    early, *rest = steps[index(steps, retires)].clears
    change("acquire", clears=lambda clears: (*clears, early))(steps)
    change(retires, clears=tuple(rest))(steps)


def clear_late(steps: list[Step]) -> None:
    """Clear what handed a slot over on a lane that no peer waits for."""
    i = index(steps, "acquire")
    late = Step(None, "copy1", "clear", clears=steps[i].clears, after=(i,))
    steps[i] = steps[i]._replace(clears=())
    retire = steps.pop()
    steps += [late, retire._replace(after=(*retire.after, len(steps)))]


def sum_before_it_is_due(steps: list[Step]) -> None:
    """Sum in front of the wait for the last product of a peer."""
    i = index(steps, lambda step: sums(step) and len(step.waits) > 1)
    *waits, late = steps[i].waits
    steps[i] = steps[i]._replace(waits=tuple(waits))
    steps[-1] = steps[-1]._replace(waits=(*steps[-1].waits, late))


def reuse_early(steps: list[Step]) -> None:
    """Fill a stage without waiting for its last reader; the word is waited for at the end."""
    i = index(steps, lambda step: any(one.kind == "room" for one in step.waits))
    late = [one for one in steps[i].waits if one.kind == "room"]
    steps[i] = steps[i]._replace(waits=tuple(one for one in steps[i].waits if one not in late))
    change(retires, waits=lambda waits: (*waits, *late))(steps)


def put_first(suits: Suits) -> Edit:
    """Enqueue the first step that suits in front of all others."""

    def edit(steps: list[Step]) -> None:
        i = index(steps, suits)
        order = [i, *(j for j in range(len(steps)) if j != i)]
        place = {old: new for new, old in enumerate(order)}
        steps[:] = [
            steps[old]._replace(after=tuple(place[one] for one in steps[old].after))
            for old in order
        ]

    return edit


def wait_first(steps: list[Step]) -> None:
    """Wait for the peer in front of the own copies, on another lane."""
    put_first(awaits_data)(steps)


def on_one_lane(steps: list[Step]) -> None:
    """The same where the copies are on the lane of the products."""
    wait_first(steps)
    steps[:] = [step._replace(lane="compute0") for step in steps]
