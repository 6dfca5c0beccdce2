"""Edits that break Plans: each changes steps of a rank, and the proof must describe the fault."""

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
#: A predicate of a step, or the beginning of its label.
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
    buffers = (buf._replace(**fields) if buf.name == which else buf for buf in plan.buffers)
    return replace(plan, buffers=tuple(buffers))


def without_buffer(plan: Plan, name: str) -> Plan:
    return replace(plan, buffers=tuple(buf for buf in plan.buffers if buf.name != name))


def mapped(
    plans: Sequence[Plan],
    to: Callable[[Signal], Signal | None],
    roles: Sequence[str] = ROLES,
) -> list[Plan]:
    """The Plans with ``to(signal)`` in place of each signal in all steps; None removes a signal."""

    def edit(step: Step) -> Step:
        signals = {role: tuple(filter(None, map(to, getattr(step, role)))) for role in roles}
        return step._replace(**signals)

    return [replace(plan, steps=tuple(map(edit, plan.steps))) for plan in plans]


def renamed(plans: Sequence[Plan], wrong: Signal, **fields: Any) -> list[Plan]:
    """The Plans with other fields of one signal in all steps."""
    return mapped(plans, lambda signal: signal._replace(**fields) if signal == wrong else signal)


def without_kinds(*kinds: str) -> Callable[[Sequence[Plan]], list[Plan]]:
    """Remove signals that rank 1 posts from all steps: words stay consistent, the order is lost."""
    return partial(mapped, to=lambda s: None if s.poster == 1 and s.kind in kinds else s)


# Predicates of steps.


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
    """Index of the first step that suits."""
    if isinstance(suits, str):
        return next(i for i, step in enumerate(steps) if step.label.startswith(suits))
    return next(i for i, step in enumerate(steps) if suits(step))


# Changes of a step.


def replaced(value: Any, fields: dict[str, Any]) -> Any:
    """A named tuple with other fields. A dict replaces fields of a field, a function maps the old
    value to the new one."""
    new = {}
    for name, field in fields.items():
        old = getattr(value, name)
        if isinstance(field, dict):
            field = replaced(old, field)
        new[name] = field(old) if callable(field) else field
    return value._replace(**new)


def changed(step: Step, **fields: Any) -> Step:
    """A step with other fields, also fields of its work or of its first product."""
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
    """Remove the work of the first step that suits."""
    return change(suits, work=None)


def move(source: Suits, target: Suits, *fields: str) -> Edit:
    """Move the contents of some fields from one step to another."""

    def edit(steps: list[Step]) -> None:
        i, j = index(steps, source), index(steps, target)
        for field in fields:
            moved, present = getattr(steps[i], field), getattr(steps[j], field)
            steps[i] = steps[i]._replace(**{field: ()})
            steps[j] = steps[j]._replace(**{field: (*present, *moved)})

    return edit


def swap(suits: Suits, part: str) -> Edit:
    """Swap a part of the work of the first two steps that suit."""

    def edit(steps: list[Step]) -> None:
        i = index(steps, suits)
        j = i + 1 + index(steps[i + 1 :], suits)
        first, second = (
            getattr(steps[n].products[0] if steps[n].products else steps[n].work, part)
            for n in (i, j)
        )
        steps[i], steps[j] = changed(steps[i], **{part: second}), changed(steps[j], **{part: first})

    return edit


def in_rows(row: int, row_stop: int) -> dict[str, int]:
    return {"row": row, "row_stop": row_stop}


def in_cols(col: int, col_stop: int) -> dict[str, int]:
    return {"col": col, "col_stop": col_stop}


def down(by: int) -> Callable[[Region], Region]:
    """Move a region down by a number of rows."""
    return lambda region: region._replace(row=region.row + by, row_stop=region.row_stop + by)


def right(by: int) -> Callable[[Region], Region]:
    """Move a region right by a number of columns."""
    return lambda region: region._replace(col=region.col + by, col_stop=region.col_stop + by)


def twice(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values * 2


def without_first(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values[1:]


# Edits of several steps.


def clear_first(steps: list[Step]) -> None:
    """Clear the word of a data signal at the beginning of the call."""
    early, *rest = steps[index(steps, retires)].clears
    change("acquire", clears=lambda clears: (*clears, early))(steps)
    change(retires, clears=tuple(rest))(steps)


def clear_late(steps: list[Step]) -> None:
    """Clear the signals that hand the slot over on a lane that no peer waits for."""
    i = index(steps, "acquire")
    late = Step(None, "copy1", "clear", clears=steps[i].clears, after=(i,))
    steps[i] = steps[i]._replace(clears=())
    retire = steps.pop()
    steps += [late, retire._replace(after=(*retire.after, len(steps)))]


def sum_before_it_is_due(steps: list[Step]) -> None:
    """Sum before the wait for the last product of a peer."""
    i = index(steps, lambda step: sums(step) and len(step.waits) > 1)
    *waits, late = steps[i].waits
    steps[i] = steps[i]._replace(waits=tuple(waits))
    steps[-1] = steps[-1]._replace(waits=(*steps[-1].waits, late))


def reuse_early(steps: list[Step]) -> None:
    """Fill a stage without waiting for its last reader; the wait is moved to the end."""
    i = index(steps, lambda step: any(signal.kind == "room" for signal in step.waits))
    late = [signal for signal in steps[i].waits if signal.kind == "room"]
    steps[i] = steps[i]._replace(waits=tuple(one for one in steps[i].waits if one not in late))
    change(retires, waits=lambda waits: (*waits, *late))(steps)


def put_first(suits: Suits) -> Edit:
    """Enqueue the first step that suits before all other steps."""

    def edit(steps: list[Step]) -> None:
        i = index(steps, suits)
        order = [i, *(j for j in range(len(steps)) if j != i)]
        place = {old: new for new, old in enumerate(order)}
        steps[:] = [
            steps[old]._replace(after=tuple(place[earlier] for earlier in steps[old].after))
            for old in order
        ]

    return edit


def wait_first(steps: list[Step]) -> None:
    """Wait for the peer before the own copies, on another lane."""
    put_first(awaits_data)(steps)


def on_one_lane(steps: list[Step]) -> None:
    """Wait for the peer before the own copies, on the same lane."""
    wait_first(steps)
    steps[:] = [step._replace(lane="compute0") for step in steps]
