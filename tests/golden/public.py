"""Public names with their signatures: names, kinds and defaults of parameters, one a line.

Annotations are left out, since Python and PyTorch print them in several ways. ``ficco.tile`` and
the integrations import packages that may be missing, so their source is read.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ficco
import ficco.nn
import ficco.passes
from ficco import plan, schedules

#: Modules with public names, and the names; None stands for ``__all__``.
MODULES: tuple[tuple[ModuleType, tuple[str, ...] | None], ...] = (
    (ficco, None),
    (ficco.nn, None),
    (ficco.passes, None),
    (plan, ("check",)),
    (schedules, ("register",)),
)
#: Modules whose source is read.
SOURCES = ("tile.py", "integrations/*.py")

#: Base classes that add nothing to the description of a class.
NO_BASES = {"object", "ABC", "Generic", "Protocol"}

RECORD = Path(__file__).with_name("public.txt")


def signature_text(value: Any) -> str:
    """The parameters of a callable, without annotations."""
    signature = inspect.signature(value)
    public = (p for p in signature.parameters.values() if p.name[0] != "_")
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in public]
    return str(inspect.Signature(bare))


def own(value: Any) -> bool:
    """Whether ficco defines a class or function."""
    return str(getattr(value, "__module__", "")).split(".")[0] == "ficco"


def members(kind: type) -> dict[str, Any]:
    """Public attributes of a class from the class and its base classes in ficco, by name."""
    attributes: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if own(base):
            attributes |= {name: value for name, value in vars(base).items() if name[0] != "_"}
    return attributes


def bases(kind: type) -> list[str]:
    """Names of all base classes, except private classes of ficco."""
    return [
        base.__name__
        for base in kind.__mro__[1:]
        if base.__name__ in ficco.__all__ or not own(base) and base.__name__ not in NO_BASES
    ]


def lines_of(name: str, value: Any) -> Iterator[str]:
    """The lines of a public name; a class also has a line per public method and property."""
    if not own(value):
        yield f"{name} of {str(getattr(value, '__module__', type(value).__name__)).split('.')[0]}"
    elif inspect.isclass(value):
        yield f"{name} class({', '.join(bases(value))})"
        if any({"__init__", "__new__"} & vars(base).keys() for base in value.__mro__ if own(base)):
            yield f"{name}{signature_text(value)}"
        for part, member in sorted(members(value).items()):
            if isinstance(member, classmethod | staticmethod):
                member = member.__func__
            if inspect.isfunction(member):
                yield f"{name}.{part}{signature_text(member)}"
            elif isinstance(member, property) or hasattr(member, "__get__"):
                yield f"{name}.{part}"
    elif callable(value):
        yield f"{name}{signature_text(value)}"
    else:
        yield name


def source_lines(module: str, tree: ast.Module) -> Iterator[str]:
    """The lines of the public functions and classes in a source file."""
    for node in sorted(defined(tree), key=lambda node: node.name):
        name = f"{module}.{node.name}"
        if isinstance(node, ast.FunctionDef):
            yield f"{name}{source_signature(node.args)}"
            continue
        public = [base for base in map(ast.unparse, node.bases) if base[0] != "_"]
        yield f"{name} class({', '.join(public)})"
        for part in sorted(defined(node), key=lambda part: part.name):
            yield f"{name}.{part.name}" + (
                source_signature(part.args) if isinstance(part, ast.FunctionDef) else ""
            )


def defined(tree: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes in a body."""
    nodes = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return [node for node in nodes if node.name[0] != "_" or node.name == "__init__"]


def source_signature(arguments: ast.arguments) -> str:
    """The parameters of a definition, without annotations."""
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"({ast.unparse(arguments)})"


def lines() -> list[str]:
    """All public names, module by module."""
    texts: list[str] = []
    for module, names in MODULES:
        for name in names or sorted(module.__all__):
            texts += lines_of(f"{module.__name__}.{name}", getattr(module, name))
    package = Path(ficco.__file__).parent
    for pattern in SOURCES:
        for path in sorted(package.glob(pattern)):
            dotted = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            tree = ast.parse(path.read_text())
            texts += source_lines(dotted.removesuffix(".__init__"), tree)
    return texts


def record() -> None:
    """Write ``public.txt``."""
    RECORD.write_text("\n".join(lines()) + "\n")
