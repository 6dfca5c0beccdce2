"""Sieve for sentences and names that CONTRIBUTING.md, "Language", advises against.

python -m docs.make.language [PATH ...]

prints a line for each match in docstrings, comments, names and pages, and ends with status 1 if
there is any. `make lint` runs it on the package and on all pages. A sieve does not replace a
reader: it knows a few shapes that are always worth a second look, and no others.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docs.make import parsed

ROOT = Path(__file__).resolve().parents[2]
CODE = "ficco", "tests", "benchmarks", "examples"
CHECKED = [ROOT / name for name in (*CODE, "docs", "README.md", "CONTRIBUTING.md")]

#: Names that do not say what a value is.
EMPTY_NAMES = frozenset(
    "asked found given kept made res some theirs there thing tmp told val what".split()
)
#: Files and names that stay: ``SignalTimeout.found`` is public, the others are used in many files.
ALLOWED_NAMES = {
    ("errors.py", "found"),
    ("gather.py", "made"),
    ("one_shot.py", "made"),
    ("products.py", "given"),
}
#: Shapes of sentences, and the advice against each.
SHAPES = {
    r"(?:^|(?<=[.:;] ))(?:What|Which|Whose|Of what) (?!\S+ \S+ ?\?)": "name the thing",
    r"\b(?:theirs|nobody's)\b": "repeat the noun",
    r"\bso many\b": "say how many",
    r"\b(?:found|given|told) of\b": "name the value",
}


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Match(NamedTuple):
    """A path with a line, the matched text, the advice."""

    place: str
    text: str
    advice: str


def paths(arguments: list[Path]) -> list[Path]:
    """Python files and pages of the arguments, or of all code and pages."""
    files: list[Path] = []
    for root in [path.resolve() for path in arguments] or CHECKED:
        files += [root] if root.is_file() else root.rglob("*.*")
    return sorted(
        path for path in files if path.suffix in (".py", ".md") and "results" not in path.parts
    )


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings and comment lines of a module, or the paragraphs of a page, with their lines."""
    source = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), source, flags=re.M | re.S)
        yield from enumerate(text.split("\n"), 1)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), " ".join(text.split())
    for number, line in enumerate(source.split("\n"), 1):
        if line.lstrip().startswith("#"):
            yield number, line.lstrip("#: ")


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Names that a module assigns, defines or takes as arguments, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def matches(path: Path) -> Iterator[Match]:
    """Every match in a file."""
    for line, text in prose(path):
        plain = re.sub(r"``[^`]*``|`[^`]*`", "x", text)
        for shape, advice in SHAPES.items():
            for match in re.finditer(shape, plain):
                context = plain[max(match.start() - 20, 0) : match.end() + 40]
                yield Match(f"{path}:{line}", context.strip(), advice)
    if path.suffix == ".py":
        for line, name in names(path):
            if name.strip("_") in EMPTY_NAMES and (path.name, name) not in ALLOWED_NAMES:
                yield Match(f"{path}:{line}", name, "say what the value is")


def main(arguments: list[Path]) -> int:
    shown = [match for path in paths(arguments) for match in matches(path)]
    for place, text, advice in shown:
        print(f"{place}: {text!r}: {advice} (CONTRIBUTING.md, Language)")
    return bool(shown)


if __name__ == "__main__":
    sys.exit(main(parsed(__doc__, "paths", nargs="*")))
