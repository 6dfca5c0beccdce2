"""The canonical text of Plans, and its hash.

The text does not depend on the definition of the classes. The text omits a field with its default
value, so a new field with a default changes no hash. Fields are sorted by name. ``CLASSES`` and
``FIELDS`` map current names to the names in the text: a line here for each name that ficco changes
keeps all hashes. The fields of a step's work are fields of the step (:func:`work_fields`).

In ``after`` the text has only the last step of each other lane, since lanes run in order.
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

#: Names in the text of renamed classes, by current name.
CLASSES: dict[str, str] = {}
#: Names in the text of renamed fields, by class and current name.
FIELDS: dict[tuple[str, str], str] = {("Product", "factors"): "scales"}
#: Fields that :func:`work_fields` writes instead of :func:`fields_text`.
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
        defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(kind)}
    else:
        optional: dict[str, Any] = getattr(kind, "_field_defaults", {})
        names = getattr(kind, "_fields", ())
        defaults = {name: optional.get(name, dataclasses.MISSING) for name in names}
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
    """The text of the fields that differ from their defaults."""
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
    """The text of a buffer. Cached, since all ranks have the same buffers."""
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
    """The text without the labels of steps, which have no effect."""
    return re.sub(r" label=('[^']*'|\"[^\"]*\")", "", content)


def digest(content: str) -> str:
    """The hash of a text."""
    return hashlib.blake2b(content.encode(), digest_size=DIGITS // 2).hexdigest()
