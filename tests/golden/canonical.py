"""The canonical text of Plans, and its hash.

The text does not depend on how classes are written. A field that has its default is left out, so a
new field with a default changes no hash. Fields are sorted by name. ``CLASSES`` and ``FIELDS`` map
names of today to the names in the text: rename a field in ficco, add a line here, and no hash
changes. The text has the fields of a step's work as fields of the step (:func:`work_fields`).

In ``after``, only the last step of each other lane counts, since lanes run in order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from ficco.plan.model import Applied, LibraryMove, Plan, Reduction, Region, Signal, Step, Transfer
from ficco.problems.specification import Buffer

#: Names in the text of classes that have another name by now.
CLASSES: dict[str, str] = {}
#: Names in the text of fields that have another name by now, by class and field.
FIELDS: dict[tuple[str, str], str] = {("Product", "factors"): "scales"}
#: Fields that are not in the text of their class, but in that of a step.
OF_STEPS = {("Step", "work"), ("Transfer", "mover")}

#: Hexadecimal digits of a hash.
DIGITS = 12


class Field(NamedTuple):
    """A field of a class: its name in the text, its name in ficco, and its default."""

    name: str
    attribute: str
    default: Any


@cache
def fields_of(kind: type) -> tuple[Field, ...]:
    """The fields of a named tuple or a dataclass, sorted by their names in the text."""
    if dataclasses.is_dataclass(kind):
        defaults: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(kind)}
    else:
        known: dict[str, Any] = getattr(kind, "_field_defaults", {})
        names = getattr(kind, "_fields", ())
        defaults = {name: known.get(name, dataclasses.MISSING) for name in names}
    return tuple(
        sorted(
            Field(FIELDS.get((kind.__name__, name), name), name, default)
            for name, default in defaults.items()
            if (kind.__name__, name) not in OF_STEPS
        )
    )


def text_of(value: Any) -> str:
    """The text of a value of a Plan."""
    kind: Any = type(value)
    if kind is Region:
        buffer, rank, row, row_stop, col, col_stop = value
        return f"{buffer}@{rank}[{row}:{row_stop},{col}:{col_stop}]"
    if kind is Signal:
        return signal_text(value)
    if kind is tuple:
        return f"[{', '.join(map(text_of, value))}]"
    if fields_of(kind):
        return f"{CLASSES.get(kind.__name__, kind.__name__)}{{{fields_text(value)}}}"
    return repr(value)


@cache
def signal_text(signal: Signal) -> str:
    """The text of a signal: kind, ranks, word and rows."""
    return f"{signal.name}#{signal.word}({signal.first}:{signal.last})"


def fields_text(value: Any) -> str:
    """The text of the fields that do not have their default."""
    kind: Any = type(value)
    texts = work_fields(value) if kind is Step else []
    for name, attribute, default in fields_of(kind):
        content = getattr(value, attribute)
        if content is not default and content != default:
            texts.append(f"{name}={text_of(content)}")
    return " ".join(sorted(texts) if kind is Step else texts)


def work_fields(step: Step) -> list[str]:
    """The text of the operation of a step, and of the fields of its work."""
    work: Any = step.work
    name = {Transfer: "transfer", Reduction: "reduction", Applied: "applied"}.get(type(work))
    fields = {"op": step.op} | ({name: work} if name else {})
    if isinstance(work, LibraryMove):
        fields["transfer"] = Transfer(*work)
    elif work is not None and not name and work[0]:  # moves, products or attends
        fields[work._fields[0]] = work[0]
    if isinstance(work, Transfer) and work.mover != "dma":
        fields["mover"] = work.mover
    return [f"{name}={text_of(content)}" for name, content in fields.items()]


@cache
def buffer_text(buffer: Buffer) -> str:
    """The text of a buffer, which is the same on all ranks."""
    return f"buffer {fields_text(buffer)}"


def step_text(plan: Plan, index: int) -> str:
    """The text of a step."""
    step: Step = plan.steps[index]
    last = {plan.steps[i].lane: i for i in sorted(step.after)}
    after = tuple(sorted(i for lane, i in last.items() if lane != step.lane))
    return f"{index:4} {fields_text(step._replace(after=after))}"


def plan_text(plan: Plan) -> str:
    """The text of the Plan of a rank."""
    lines = [f"plan {plan.schedule} rank={plan.rank} words={plan.words} stages={plan.stages}"]
    lines += map(buffer_text, plan.buffers)
    lines += [step_text(plan, index) for index in range(len(plan.steps))]
    return "\n".join(lines)


def text(plans: Iterable[Plan]) -> str:
    """The text of the Plans of all ranks."""
    return "\n".join(map(plan_text, plans)) + "\n"


def without_labels(content: str) -> str:
    """The text without the labels of steps, which people read."""
    return re.sub(r" label=('[^']*'|\"[^\"]*\")", "", content)


def digest(content: str) -> str:
    """The hash of a text."""
    return hashlib.blake2b(content.encode(), digest_size=DIGITS // 2).hexdigest()
