"""Rules of the package: imports between units, uses of devices, vendors' names, and budgets."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import ficco
from ficco.heuristics.decide import _MODEL

PACKAGE = Path(ficco.__file__).parent

#: Budgets: the most that ficco may have of each figure of :func:`figures`. Raising one is a line in
#: a diff to argue for. Lower it when you remove lines. A renamed room is a renamed line.
BUDGETS: dict[str, int | tuple[int, int]] = {
    # Lines and statements of each room, a top-level folder or file of the package.
    "compute": (3521, 1848),
    "dma": (7502, 4225),
    "heuristics": (1648, 746),
    "hip_kernels": (1193, 570),
    "integrations": (1057, 543),
    "machine": (1470, 647),
    "nn": (2376, 1144),
    "ops": (5990, 2820),
    "passes": (1975, 1170),
    "plan": (1110, 540),
    "problems": (2425, 1090),
    "proof": (1810, 1250),
    "runtime": (2200, 1254),
    "schedules": (4680, 2760),
    "simulate": (1275, 835),
    "tools": (13661, 7696),
    "__init__.py": (195, 50),
    "__main__.py": (10, 5),
    "accelerator.py": (10, 5),
    "api.py": (360, 120),
    "errors.py": (295, 105),
    "fsdp.py": (500, 295),
    "options.py": (225, 100),
    "tile.py": (95, 20),
    "version.py": (25, 15),
    # Of the package.
    "files": 165,
    "loose files": 9,
    "lines of the longest file": 900,
    # Files whose code names a capability; rooms that only measure, tune, check and print are free.
    "files that name fp8": 32,
    "files that name hosts": 34,
    "files that name attention": 24,
    "files that name experts": 11,
    "files that name tiled": 18,
    # Numbers of places in the same files; a redesign should leave one place of each.
    "calls of begin": 4,
    "autograd functions": 2,
    "isinstance of problems": 0,
    "classes of decisions": 1,
}
#: The most lines that the tests may have; 35,000 is the aim.
LINES_OF_TESTS = 39_842
#: Rooms that may name every capability.
INSTRUMENTS = {"tools", "__main__.py"}
#: Patterns of identifiers that name a capability.
CAPABILITIES = {
    "fp8": r"fp8|float8|scaling|scales|quantize",
    "hosts": r"hosts|network|gloo|\brail",
    "attention": r"attention|attends",
    "experts": r"expert|routing",
    "tiled": r"tiled|\btiles\b|worklist",
}
#: Patterns of code that should have few places.
PLACES = {
    "calls of begin": r"\bworkspace\.begin\(",
    "autograd functions": r"autograd\.Function\)",
    "isinstance of problems": r"isinstance\([^()]*\b(\w*Problem|Gathering|KeyGather|ExpertLayer)\b",
    "classes of decisions": r"class \w*Decision\b",
}

#: Units of the package, lowest first. A unit is a module or a sub-package, of the package or of
#: ``tools``; "ficco" is its ``__init__``. A unit imports only from lower layers.
PURE = (
    ("errors", "version"),
    ("problems",),
    ("machine",),
    ("plan",),
    ("proof",),
    ("schedules",),
    ("simulate",),
    ("heuristics",),
)
LAYERS = (
    *PURE,
    # The layers from here on use devices, process groups and clocks.
    ("accelerator",),
    ("hip_kernels",),
    ("compute",),
    ("dma",),
    ("options",),
    ("runtime",),
    ("ops",),
    ("api", "fsdp", "passes"),
    ("nn", "tile"),
    ("integrations",),
    ("ficco",),
    ("tools",),
    ("tools.launch", "tools.doctor", "tools.probe", "tools.promela", "tools.baselines"),
    ("tools.bench",),
    ("tools.tune",),
    ("tools.selftest",),
    ("tools.cli",),
    ("__main__",),
)

#: Modules that the pure units do not import, not even inside a function or for a type.
IMPURE_MODULES = set(
    (
        "torch time datetime threading multiprocessing concurrent asyncio subprocess socket "
        "signal ctypes mmap random secrets tempfile cuda hip triton"
    ).split()
)

#: Packages into which ficco is integrated.
CLIENTS = set("accelerate lightning megatron peft spmd_types torchtitan transformers vllm".split())

#: Names of vendors and of their libraries, as words in code; prose may use them. PyTorch's "cuda"
#: is a GPU of any vendor, and "nccl" are the collectives of any vendor.
VENDOR = re.compile(
    r"(?<![a-z])(nvidia|amd|amdgpu|rocm|hip|rccl|cu(blas|dart|dnn)\w*|(hip|roc)blas\w*|nvlink|xgmi)"
    r"(?![a-z])"
)
#: Rooms with modules for the devices of one vendor, and the names of these modules.
ROOMS = ("compute", "dma")
VENDOR_MODULE = re.compile(r"(cuda|cublas|hip)")
#: Units that may name vendors, and the reasons.
VENDORS_ALLOWED = {
    "dma": "the engines",
    "hip_kernels": "the kernels, and the name of the folder",
    "compute": "a kernel and a library for one vendor's devices",
    "machine": "data of a machine",
    "tools.doctor": "prints what a machine has",
    "tools.probe": "tries a driver's mechanisms",
    "tools.baselines": "compares with one vendor's libraries",
    "tile": "device functions for the GPUs of each vendor",
}
#: Strings with a vendor's name that are not specific to a vendor: (unit, string).
VENDOR_WORDS_ALLOWED = {
    ("tools.bench", "ficco-rccl"),  # the paper's name of a candidate, whatever the vendor
}


#: Units that may use PyTorch's name for GPUs.
OWN_GPUS = ("accelerator", "hip_kernels", "compute", "dma", "tools.probe")


#: Returns the lines of a package that break a rule.
Rule = Callable[..., list[str]]


class Import(NamedTuple):
    unit: str
    module: str
    names: tuple[str, ...]
    where: str


def unit_of(path: Path, package: Path = PACKAGE) -> str:
    """Return the unit of a file."""
    first, *rest = (part.removesuffix(".py") for part in path.relative_to(package).parts)
    if first == "tools" and rest[0] != "__init__":
        return f"tools.{rest[0]}"
    return package.name if first == "__init__" else first


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    """Drop the syntax trees after these tests, since they slow down the garbage collector."""
    yield
    for cached in (parsed, nodes, imports_of):
        cached.cache_clear()


def sources(package: Path = PACKAGE) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path, parsed(path, path.read_text())


@cache
def parsed(path: Path, text: str) -> ast.Module:
    return ast.parse(text, str(path))


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def imports(package: Path = PACKAGE) -> Iterator[Import]:
    """All imports in the package, including those inside functions."""
    for path, tree in sources(package):
        yield from imports_of(path, tree, package)


@cache
def imports_of(path: Path, tree: ast.Module, package: Path) -> list[Import]:
    """All imports of a file."""
    imported = []
    for node in nodes(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        where = f"{path.relative_to(package.parent)}:{node.lineno}"
        unit = unit_of(path, package)
        if isinstance(node, ast.Import):
            imported += [Import(unit, alias.name, (), where) for alias in node.names]
        else:
            names = tuple(alias.name for alias in node.names)
            assert node.level == 0, f"{where}: imports are absolute in this package"
            imported.append(Import(unit, node.module or "", names, where))
    return imported


def targets(imported: Import, package: Path = PACKAGE) -> set[str]:
    """Return the units of this package that an import names."""
    parts = imported.module.split(".")
    if parts[0] != package.name:
        return set()
    if parts[1:2] == ["tools"]:
        return {f"tools.{name}" for name in parts[2:3] or imported.names}
    if len(parts) > 1:
        return {parts[1]}
    modules = {path.stem for path in package.glob("*.py")}
    modules |= {path.parent.name for path in package.glob("*/*.py")}
    return {name if name in modules else package.name for name in imported.names or ("",)}


def upward(package: Path = PACKAGE) -> list[str]:
    """Return imports that break the order of the layers."""
    level = {unit: i for i, units in enumerate(LAYERS) for unit in units}
    broken = []
    for each in imports(package):
        for target in targets(each, package) - {each.unit}:
            if each.unit not in level or target not in level:
                unknown = ({each.unit, target} - level.keys()).pop()
                broken.append(f"{each.where}: {unknown} has no place in LAYERS")
            elif level[target] >= level[each.unit]:
                broken.append(f"{each.where}: {each.unit} imports {target}, which is not below")
    return broken


def impure(package: Path = PACKAGE) -> list[str]:
    """Return imports of devices, process groups or clocks by pure units."""
    pure = {unit for units in PURE for unit in units}
    return [
        f"{each.where}: {each.unit} is pure and imports {each.module}"
        for each in imports(package)
        if each.unit in pure and each.module.split(".")[0] in IMPURE_MODULES
    ]


def clients(package: Path = PACKAGE) -> list[str]:
    """Return imports of clients or integrations outside of the integrations."""
    return [
        f"{each.where}: {each.unit} imports {each.module}"
        for each in imports(package)
        if each.unit != "integrations"
        and (each.module.split(".")[0] in CLIENTS or "integrations" in targets(each, package))
    ]


def vendor_names(package: Path = PACKAGE) -> list[str]:
    """Return vendors' names in code (names and strings, no prose) of other units."""
    broken = []
    for path, tree in sources(package):
        unit = unit_of(path, package)
        if unit in VENDORS_ALLOWED:
            continue
        prose = {
            id(node.body[0].value)
            for node in nodes(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in nodes(tree):
            for text in words(node):
                # A string with a blank in it is prose.
                sentence = isinstance(node, ast.Constant) and " " in text
                allowed = (unit, text.replace("\n", "")) in VENDOR_WORDS_ALLOWED
                if VENDOR.search(text.lower()) and not (id(node) in prose or sentence or allowed):
                    where = f"{path.relative_to(package.parent)}:{node.lineno}"
                    broken.append(f"{where}: {text!r} names a vendor")
    return broken


def vendor_modules(package: Path = PACKAGE) -> list[str]:
    """Return imports of a vendor's modules by units that may not name vendors."""
    broken = []
    for each in imports(package):
        parts = each.module.split(".")
        if each.unit in VENDORS_ALLOWED or parts[:2] not in (
            [package.name, room] for room in ROOMS
        ):
            continue
        if any(VENDOR_MODULE.match(name) for name in parts[2:] or each.names):
            broken.append(f"{each.where}: {each.unit} imports a vendor's part of the engines")
    return broken


def own_gpus(package: Path = PACKAGE) -> list[str]:
    """Return uses of PyTorch's name for GPUs instead of ``ficco.accelerator.gpu``."""
    broken = []
    for path, tree in sources(package):
        if unit_of(path, package) in OWN_GPUS:
            continue
        for node in nodes(tree):
            match node:
                case ast.Attribute(value=ast.Name("torch"), attr="cuda"):
                    named = True
                case ast.ImportFrom(module="torch.cuda"):
                    named = True
                case ast.ImportFrom(module="torch", names=names):
                    named = any(alias.name == "cuda" for alias in names)
                case _:
                    continue
            if named:
                where = f"{path.relative_to(package.parent)}:{node.lineno}"
                broken.append(f"{where}: required ficco.accelerator.gpu")
    return broken


def words(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(str(text)) | ast.Name(text) | ast.Attribute(attr=text):
            yield text
        case ast.FunctionDef(text) | ast.ClassDef(text) | ast.arg(text) | ast.keyword(str(text)):
            yield text
        case ast.Import(names):
            yield from (part for alias in names for part in alias.name.split("."))
        case ast.ImportFrom(str(module)) if module.split(".")[0] != "ficco":
            yield from module.split(".")


RULES = (upward, impure, clients, vendor_names, vendor_modules, own_gpus)


@pytest.mark.parametrize("rule", RULES)
def test_rules_hold(rule: Rule) -> None:
    assert rule() == []


def test_stored_choices_depend_on_all_code_of_the_model() -> None:
    pure = {unit for units in PURE for unit in units}
    assert {*_MODEL} == pure - {"errors", "version", "proof"}


def test_every_module_has_a_docstring() -> None:
    bare = [
        str(path.relative_to(PACKAGE.parent))
        for path, tree in sources()
        if tree.body and not ast.get_docstring(tree)
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("file", "text", "rule"),
    [
        ("plan/model.py", "from ficco.dma.engine import Slot", upward),
        ("plan/model.py", "def f():\n    import ficco.ops.call", upward),
        ("dma/cpu.py", "from ficco import runtime", upward),
        ("dma/cpu.py", "import ficco", upward),
        ("dma/host.py", "if TYPE_CHECKING:\n    from ficco.runtime.workspace import W", upward),
        ("attic.py", "from ficco.plan import Plan", upward),
        ("problems/products.py", "import torch", impure),
        ("heuristics/decide.py", "def f():\n    from time import monotonic", impure),
        ("schedules/space.py", "if TYPE_CHECKING:\n    import torch.distributed", impure),
        ("ops/call.py", "x = torch.version.hip", vendor_names),
        ("runtime/workspace.py", "if engine.name == 'hip':\n    pass", vendor_names),
        ("ops/call.py", "import rocm.utils", vendor_names),
        ("runtime/calls.py", "def use_nvidia(): pass", vendor_names),
        ("tools/tune/copies.py", "def f():\n    from ficco.dma import cuda_driver", vendor_modules),
        ("tools/bench/calls.py", "import ficco.dma.hip_api as hip", vendor_modules),
        ("tools/selftest/checks.py", "from ficco.compute.cublaslt import CublasLt", vendor_modules),
        ("tools/launch.py", "def f():\n    torch.cuda.synchronize()", own_gpus),
        ("nn/linear.py", "def f():\n    import transformers", clients),
        ("passes/graph.py", "from vllm.distributed import get_tp_group", clients),
        ("tools/bench/harness.py", "from torch import cuda", own_gpus),
    ],
)
def test_rules_report_violations(file: str, text: str, rule: Rule, tmp_path: Path) -> None:
    package, modules = tmp_path / "ficco", ("runtime/workspace", "plan/__init__", "ops/call")
    for name in ("__init__.py", *(f"{module}.py" for module in modules), "dma/cpu.py", file):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    assert rule(package) == []
    (package / file).write_text(f'"""A module of AMD and NVIDIA."""\n{text}\n')
    assert len(rule(package)) == 1, rule(package)


# The public names.


def test_all_lists_the_public_names() -> None:
    public = {
        name
        for name, value in vars(ficco).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert sorted(public) == sorted(ficco.__all__)
    assert list(ficco.__all__) == sorted(ficco.__all__)
    namespace: dict[str, object] = {}
    exec("from ficco import *", namespace)
    assert set(ficco.__all__) <= namespace.keys()


def test_public_names_are_documented() -> None:
    bare = [
        name
        for name in ficco.__all__
        if not (getattr(ficco, name).__doc__ or "").strip()
        or getattr(ficco, name).__doc__.startswith(f"{name}(")  # generated by dataclass
    ]
    assert bare == []


def test_the_docstring_and_dir_have_exactly_the_public_names() -> None:
    tour = ficco.__doc__ or ""
    assert [name for name in ficco.__all__ if not re.search(rf"\b{name}\b", tour)] == []
    assert tour.count("\n") <= 35
    others = set(dir(ficco)) - {*ficco.__all__, "__version__"}
    assert others == {*ficco._MODULES} and not any(name.startswith("_") for name in others)


# Circles and names.


def modules(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Return the modules that each module imports, also inside functions or for types."""

    def name_of(path: Path) -> str:
        dotted = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        return dotted.removesuffix(".__init__")

    graph: dict[str, set[str]] = {name_of(path): set() for path, _ in sources(package)}
    for path, tree in sources(package):
        for each in imports_of(path, tree, package):
            for name in each.names or ("",):
                full = f"{each.module}.{name}"
                target = full if full in graph else each.module
                if target in graph and target != name_of(path):
                    graph[name_of(path)].add(target)
    return graph


def circle(package: Path = PACKAGE) -> set[str]:
    """Return modules that import each other, directly or indirectly."""
    try:
        TopologicalSorter(modules(package)).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def shared_class_names(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Return names of several classes of the package, with their files."""
    where: dict[str, list[str]] = {}
    for path, tree in sources(package):
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(package)))
    return {name: files for name, files in where.items() if len(files) > 1}


def test_no_modules_import_each_other() -> None:
    assert circle() == set()


#: Class names that several modules still share; each should have one meaning. torchtitan requires
#: a class ``Config`` in each of its modules.
SHARED_STILL = {"Batch", "Copies", "Event", "uncaptured", "Config"}


def test_class_names_are_unique() -> None:
    shared = shared_class_names()
    shared.pop("Config", None)  # torchtitan requires one in each of its modules
    assert {name: shared[name] for name in shared.keys() - SHARED_STILL} == {}


def test_circles_and_shared_names_are_reported(tmp_path: Path) -> None:
    package = tmp_path / "ficco"
    (package / "plan").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "plan/__init__.py": "from ficco.plan import model",
        "plan/model.py": "class Step: pass\ndef f():\n    from ficco.problem import x",
        "problem.py": "class Other: pass",
        "runtime.py": "class Other: pass\nimport ficco.plan.model",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    assert circle(package) == set()
    assert shared_class_names(package) == {"Other": ["problem.py", "runtime.py"]}
    (package / "problem.py").write_text("if TYPE_CHECKING:\n    from ficco.plan import Step")
    assert circle(package) == {"ficco.plan", "ficco.plan.model", "ficco.problem"}
    assert shared_class_names(package) == {}


# Budgets.


def statements(tree: ast.Module) -> int:
    """Return the number of statements without docstrings."""
    stmts = (node for node in nodes(tree) if isinstance(node, ast.stmt))
    return sum(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in stmts
    )


def identifiers(text: str) -> str:
    """Return the identifiers of a file, without its comments and strings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(token.string for token in tokens if token.type == tokenize.NAME)


def figures(package: Path = PACKAGE) -> dict[str, int | tuple[int, int]]:
    """Return the figures of a package that have budgets."""
    rooms: dict[str, tuple[int, int]] = {}
    texts: dict[Path, str] = {}
    for path, tree in sources(package):
        texts[path] = path.read_text()
        room = path.relative_to(package).parts[0]
        lines, count = rooms.get(room, (0, 0))
        rooms[room] = (lines + texts[path].count("\n"), count + statements(tree))
    core = [
        text
        for path, text in texts.items()
        if path.relative_to(package).parts[0] not in INSTRUMENTS
    ]
    names = [identifiers(text) for text in core]
    return {
        **rooms,
        "files": len(texts),
        "loose files": sum(path.parent == package for path in texts),
        "lines of the longest file": max(text.count("\n") for text in texts.values()),
        **{
            f"files that name {name}": sum(bool(re.search(pattern, text, re.I)) for text in names)
            for name, pattern in CAPABILITIES.items()
        },
        **{
            name: sum(len(re.findall(pattern, text)) for text in core)
            for name, pattern in PLACES.items()
        },
    }


def over_budget(measured: Mapping[str, int | tuple[int, int]]) -> list[str]:
    """Return figures above their budgets, and rooms without a budget."""
    excesses = []
    for name, value in measured.items():
        budget = BUDGETS.get(name)
        if budget is None:
            excesses.append(f"{name}: {value} lines and statements, and no line in BUDGETS")
        elif isinstance(value, int) and isinstance(budget, int):
            excesses += [f"{name}: {value}, budget {budget}"] * (value > budget)
        elif isinstance(value, tuple) and isinstance(budget, tuple):
            for unit, figure, limit in zip(("lines", "statements"), value, budget, strict=True):
                excesses += [f"{name}: {figure} {unit}, budget {limit}"] * (figure > limit)
    return excesses


def test_nothing_is_over_budget() -> None:
    measured = figures()
    assert over_budget(measured) == []
    assert BUDGETS.keys() - measured.keys() == set()


def test_tests_are_within_their_lines() -> None:
    tests = (PACKAGE.parent / "tests").rglob("*.py")
    assert sum(path.read_text().count("\n") for path in tests) <= LINES_OF_TESTS


@pytest.mark.parametrize(
    ("file", "text", "budgets"),
    [
        ("ops/call.py", "\n" * 9, {"ops": (9, 10)}),
        ("ops/call.py", "x = 1; y = 2; z = 3\n" * 4, {"ops": (10, 10)}),
        ("attic/old.py", "x = 1\n", {}),
        ("plan/model.py", "class Model:\n    pass\n", {"lines of the longest file": 1}),
        ("plan/model.py", "def scales(): ...\n", {"files that name fp8": 0}),
        ("ops/call.py", "workspace.begin()\n" * 2, {"calls of begin": 1}),
        ("api.py", "", {"loose files": 1}),
        ("ops/call.py", "", {"files": 1}),
    ],
)
def test_figures_over_budget_are_reported(
    file: str,
    text: str,
    budgets: dict[str, int | tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = tmp_path / "ficco"
    for path in (package / "__init__.py", package / "tools" / "scales.py", package / file):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    room = path.relative_to(package).parts[0]
    with monkeypatch.context() as patch:
        patch.setitem(BUDGETS, room, (1, 1))
        assert over_budget(figures(package)) == []
    for name, budget in budgets.items():
        monkeypatch.setitem(BUDGETS, name, budget)
    (package / "tools" / "scales.py").write_text("def scales(): workspace.begin()\n")
    (package / file).write_text(f'"""A file that names scales."""  # scales\n{text}')
    assert len(over_budget(figures(package))) == 1
