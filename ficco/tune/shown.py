"""A block of a Machine for people: figures with their units, old against new."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ficco.machine import Machine, dumps

_LONG = re.compile(r"-?\d+\.?\d*(e[+-]?\d+)?")


def figures(machine: Machine, block: str) -> dict[str, str]:
    """The figures of a block by name, as a file would hold them, rounded; empty without it."""
    value = getattr(machine, block)
    if value is None:
        return {}
    alone = Machine(machine.name, machine.accelerator, machine.ranks, **{block: value})
    data = yaml.safe_load(dumps(alone))[block]
    data.pop("provenance", None)
    return {name: _text(found) for name, found in data.items()}


def changes(old: Machine, new: Machine, block: str) -> list[tuple[str, str, str]]:
    """Name, figure before and figure after, of every figure of a block."""
    before, after = figures(old, block), figures(new, block)
    names = dict.fromkeys([*after, *before])
    return [(name, before.get(name, "-"), after.get(name, "-")) for name in names]


def _text(value: Any) -> str:
    if isinstance(value, list):
        parts = [
            ": ".join(map(_text, part)) if isinstance(part, list) else _text(part) for part in value
        ]
        return ", ".join(parts)
    return _LONG.sub(_short, str(value))


def _short(found: re.Match[str]) -> str:
    return f"{float(found[0]):.4g}" if len(found[0]) > 5 else found[0]
