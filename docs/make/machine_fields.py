"""Write tables of all keys of a machine file, from its dataclasses, into a page.

python -m docs.make.machine_fields [docs/api/machine-file.md]
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import MISSING, Field, fields, is_dataclass
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from docs.make import parsed
from docs.make.readme import put_between
from ficco.machine import Machine, Provenance, configs, files, load
from ficco.machine.model import OneOf, Points, Quantity
from ficco.tools.bench.frames import markdown

#: By class, who gives a key its value, in the words of the page. Keys that hold a block are left
#: out: the block's own keys say it.
FROM: dict[str, dict[str, str]] = {
    "Machine": {
        "asked": "name accelerator ranks",
        "by hand": "also margin",
        "self-test": "largest_copy batched_copies",
    },
    "Topology": {"measured": "kind bandwidth sharing"},
    "Network": {"fitted": "bandwidth latency", "measured": "sharing"},
    "Copies": {
        "asked": "engines",
        "fitted": "latency gap curve",
        "measured": "in_front",
        "by hand": "two_shot",
    },
    "Collective": {"measured": "curve"},
    "Gemm": {
        "kept": "peak",
        "asked": "units",
        "fixed": "launch tile_rows tile_cols splits",
        "fitted": "efficiency start bandwidth prologue step write join shares burst sustained",
    },
    "AttentionCalls": {"fitted": "start block shares backward backward_start"},
    "Memory": {"asked": "capacity", "measured": "bandwidth latency"},
    "Contention": {
        "measured": "gemm_under_copies copies_under_gemm gemm_under_collective "
        "collective_under_gemm"
    },
    "Host": {
        "fitted": "call matmul copy signal",
        "measured": "collective_call tiled",
        "by hand": "skew",
    },
    "Thresholds": {"fitted": "low high"},
    "Tuned": {
        "asked": "operator rows n k dtype blocks",
        "measured": "queued idle seconds serial",
    },
    "Provenance": {"asked": "source date command driver torch commit note"},
}

#: An entry of a docstring's section of attributes: its names, and the text.
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", re.MULTILINE)


def keys(kind: Any) -> list[Field[Any]]:
    """The fields of a class that a file has."""
    return [field for field in fields(kind) if field.compare]


def block_of(hint: Any) -> Any:
    """The class of the blocks that a field holds, one or several; None where it holds none."""
    held = [arm for arm in get_args(hint) if arm not in (type(None), Ellipsis)] or [hint]
    return held[0] if is_dataclass(held[0]) else None


def blocks() -> dict[Any, list[str]]:
    """The classes of the blocks of a file, and the keys that hold them."""
    hints = get_type_hints(Machine, include_extras=True)
    by_class: dict[Any, list[str]] = {}
    for field in keys(Machine):
        if block := block_of(hints[field.name]):
            by_class.setdefault(block, []).append(field.name)
    return {**by_class, Provenance: ["provenance"]}


def meanings(kind: Any) -> dict[str, str]:
    """Meaning of each key of a class, from its docstring, in Markdown."""
    text = inspect.getdoc(kind) or ""
    _, _, listed = text.partition("Attributes:\n")
    plain = re.sub(r"`{2}(.+?)`{2}|:\w+:`(.+?)`", r"`\1\2`", listed)
    return {
        name: " ".join(said.split())
        for names, said in ENTRY.findall(plain)
        for name in names.split(", ")
    }


def sources(kind: Any) -> dict[str, str]:
    """Source of the value of each key of a class."""
    return {name: word for word, names in FROM[kind.__name__].items() for name in names.split()}


def value(hint: Any) -> str:
    """Kind of a key's value: a unit and bounds, or the kind of text or list."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    kind, note = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
    if isinstance(note, OneOf):
        return ", ".join(f"`{text}`" for text in note.texts)
    if isinstance(note, Points):
        return f"points [{note.show()}]"
    if isinstance(note, Quantity):
        whole = "whole number" if kind is int else "number"
        return note.show().removeprefix("a quantity in ").replace("a number", whole)
    if get_origin(kind) is tuple:
        first, *rest = get_args(kind)
        length = "" if rest == [...] else f" of {1 + len(rest)}"
        return f"list{length}: {value(first)}"
    assert kind is str, f"machine_fields: no words for {hint}"
    return "text"


def default(field: Field[Any], hint: Any) -> str:
    """Value of a key that a file omits."""
    if field.default is MISSING:
        return "required"
    if field.default is None or field.default in ("", ()):
        return "none"
    note = next((arm for arm in get_args(hint) if isinstance(arm, Quantity)), Quantity())
    if note.unit and isfinite(field.default):
        return files.quantity_text(field.default, note.unit)
    return json.dumps(field.default)


def table(kind: Any) -> str:
    """The keys of a class."""
    hints = get_type_hints(kind, include_extras=True)
    meaning, source_of = meanings(kind), sources(kind)
    rows = []
    for field in keys(kind):
        block = block_of(hints[field.name])
        if block and kind is not Machine:
            continue  # provenance, which every block has
        described = (
            f"[{block.__name__}](#{block.__name__.lower()})" if block else value(hints[field.name])
        )
        source = "" if block else source_of[field.name]
        omitted = default(field, hints[field.name])
        rows.append((f"`{field.name}`", described, omitted, source, meaning[field.name]))
    return markdown(("key", "value", "if left out", "from", "meaning"), rows)


def text() -> str:
    """Every class, the machine first."""
    parts = [table(Machine)]
    for block, names in blocks().items():
        where = ", ".join(f"`{name}`" for name in names)
        about = " ".join(str(inspect.getdoc(block)).partition("\n\n")[0].split())
        parts += [f"### {block.__name__}", f"{where}: {about[0].lower()}{about[1:]}", table(block)]
    return "\n\n".join(parts)


def shipped() -> str:
    """Provenance of the blocks of the shipped machine files, as Markdown."""
    machines = [load(path) for path in sorted(configs().glob("*.yaml"))]
    names = [name for block, names in blocks().items() for name in names if block is not Provenance]
    rows = [[f"`{name}`", *(_source(getattr(one, name)) for one in machines)] for name in names]
    return markdown(["", *(f"`{one.name}`" for one in machines)], rows)


def _source(block: Any) -> str:
    return block.provenance.source if block else ""


def main(page: Path) -> None:
    put_between(page, "fields", text())
    put_between(page, "shipped", shipped())
    print(f"wrote {page}")


if __name__ == "__main__":
    main(parsed(__doc__, "page", nargs="?", default="docs/api/machine-file.md"))
