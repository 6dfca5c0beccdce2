"""Mutants of the pure rooms: each replaces one operation by another."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from planted.runs import ROOT

#: The pure rooms, and the tests that are most likely to find a mutant of a room.
ROOMS: dict[str, tuple[str, ...]] = {
    "problems": ("golden_plans",),
    "plan": ("golden_plans",),
    "proof": (
        "plan.py::test_broken_plans_are_refused",
        "plan.py::test_broken_plans_of_several_ranks_are_refused",
        "interleavings",
    ),
    "schedules": ("golden_plans",),
    "machine": ("machine", "golden_times"),
    "simulate": ("golden_times",),
    "heuristics": ("model", "golden_times"),
}
#: The marks of ``make quick``.
MARKS = "not slow and not gpu and not multigpu"

PAIRS: tuple[tuple[type[Any], type[Any]], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)),
    *((ast.Is, ast.IsNot), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or)),
)
SWAPPED = {old: new for pair in PAIRS for old, new in (pair, pair[::-1])}
#: Functions whose argument order does not matter, or that only check or report.
SYMMETRIC = ("min", "max", "isinstance", "InvalidArgument", "warn_once", "print", "getattr")
#: Code without mutants: texts of errors, assertions, and texts of objects.
LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr)
TEXTS = ("__repr__", "__str__")


class Mutant(NamedTuple):
    """A part of one line, and its replacement; columns count bytes."""

    path: str
    line: int
    start: int
    stop: int
    kind: str
    old: str
    new: str
    #: The function of the mutant, and its number among equal mutants of the function.
    where: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.old} -> {self.new}"

    @property
    def room(self) -> str:
        return self.path.split("/")[1]

    def applied(self, text: str) -> str:
        """The text with the mutant."""
        lines = text.encode().splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.new.encode() + line[self.stop :]
        return b"".join(lines).decode()


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, Callable[[Any], object]]]:
    """Kinds of mutants of a node, the part that changes, and a function that changes its copy."""
    match node:
        case ast.Compare(ops=[op]):
            yield "comparison", node, lambda new: setattr(new, "ops", [SWAPPED[type(op)]()])
        case ast.BinOp(op=op) if type(op) in SWAPPED and not _holds_text(node):
            yield "arithmetic", node, lambda new: setattr(new, "op", SWAPPED[type(op)]())
        case ast.BoolOp(op=op):
            yield "and-or", node, lambda new: setattr(new, "op", SWAPPED[type(op)]())
        case ast.Constant(value=value) if type(value) is int:
            yield "constant", node, lambda new: setattr(new, "value", value + 1)
        case ast.Return(value=ast.expr() as returned) if getattr(returned, "value", 0) is not None:
            yield "return value", node, lambda new: setattr(new, "value", ast.Constant(None))
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, *_]):
            other = "max" if name == "min" else "min"
            yield "min-max", node, lambda new: setattr(new.func, "id", other)
        case ast.Call(args=[first, second, *_]) if _name_of(node) not in SYMMETRIC:
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if not starred and ast.dump(first) != ast.dump(second):
                yield "argument order", node, lambda new: new.args.insert(0, new.args.pop(1))
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", test, lambda new: ast.UnaryOp(ast.Not(), new)


def _holds_text(node: ast.BinOp) -> bool:
    text = (ast.JoinedStr, ast.List, ast.Tuple)
    sides = (node.left, node.right)
    return any(
        isinstance(side, text) or isinstance(getattr(side, "value", None), str) for side in sides
    )


def _name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def nodes(tree: ast.AST | list[Any], where: str = "") -> Iterator[tuple[ast.AST, str]]:
    """The nodes of code that runs, each with its function."""
    for child in tree if isinstance(tree, list) else ast.iter_child_nodes(tree):
        if isinstance(child, LEFT_ALONE) or _only_types(child):
            continue
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            if child.name not in TEXTS:  # neither decorators nor annotations of arguments
                yield from nodes(child.body, f"{where}.{child.name}")
        elif isinstance(child, ast.AnnAssign):
            yield from nodes([child.value] if child.value else [], where)
        else:
            yield child, where
            yield from nodes(child, where)


def _only_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def mutants_of(path: str, text: str) -> list[Mutant]:
    """All mutants of a file, in the order of its nodes."""
    mutants: list[Mutant] = []
    seen: dict[str, int] = {}
    lines = text.encode().splitlines()
    for node, where in nodes(ast.parse(text)):
        for kind, part, change in changes(node):
            line, last = getattr(part, "lineno", 0), getattr(part, "end_lineno", 0)
            if line != last:
                continue
            copy: Any = deepcopy(part)
            new = change(copy)
            place: Any = part
            start, stop = place.col_offset, place.end_col_offset
            old = lines[line - 1][start:stop].decode()
            text_of = ast.unparse(new if isinstance(new, ast.AST) else copy)
            new_text = text_of if kind in ("return value", "constant") else f"({text_of})"
            key = f"{path} {where} {kind} {old}"
            seen[key] = seen.get(key, 0) + 1
            where_of = f"{where} {seen[key]}"
            mutants.append(Mutant(path, line, start, stop, kind, old, new_text, where_of))
    return mutants


def chosen(seed: int, count: int, root: Path = ROOT) -> list[Mutant]:
    """Choose equally many mutants of each kind, by a hash of the seed and of the mutant, so that
    changes of other code hardly change the choice. No two mutants share a line."""
    paths = [path for room in ROOMS for path in sorted((root / "ficco" / room).rglob("*.py"))]
    mutants = [
        mutant
        for path in paths
        for mutant in mutants_of(str(path.relative_to(root)), path.read_text())
    ]

    def order(mutant: Mutant) -> str:
        key = seed, mutant.path, mutant.where, mutant.kind, mutant.old
        return hashlib.sha256(repr(key).encode()).hexdigest()

    counts: Counter[str] = Counter()
    turns = []
    for mutant in sorted(mutants, key=order):
        turns.append((counts[mutant.kind], mutant.kind, mutant))
        counts[mutant.kind] += 1
    picked: dict[tuple[str, int], Mutant] = {}
    for _, _, mutant in sorted(turns):
        picked.setdefault((mutant.path, mutant.line), mutant)
    return list(picked.values())[:count]
