"""What is imported when: ``import ficco`` and the command line do without PyTorch as long as they
can."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ficco
from ficco.tools import cli

ROOT = Path(ficco.__file__).parents[1]

#: What parsing does without.
HEAVY = {"torch", "numpy", "pandas", "matplotlib", "rich", "yaml"}


def python(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], env=env, text=True, capture_output=True)


def heavy(*words: str, code: int) -> set[str]:
    """What of ``HEAVY`` a command line imports; it ends with an exit code."""
    done = python("-X", "importtime", "-m", "ficco", *words)
    assert done.returncode == code, done.stderr
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "ficco.tools.cli" in imported
    return imported & HEAVY


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_and_refused_options_import_no_torch(command: str) -> None:
    words = [command] if command else []
    assert heavy(*words, "--help", code=0) == set()
    assert heavy(*words, "--wrong-flag", code=2) == set()


def test_a_command_says_of_itself_what_the_help_says() -> None:
    for name, text in cli.COMMANDS.items():
        said = " ".join((import_module(f"ficco.tools.cli.{name}").__doc__ or "").split())
        assert said == f"``ficco {name}``: {text}."


def test_every_public_name_is_loaded_from_where_checkers_see_it() -> None:
    tree = ast.parse(Path(ficco.__file__).read_text())
    (checked,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "typing.TYPE_CHECKING"
    )
    seen = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name for name, module in seen.items() if module == "ficco"}
    assert modules == {*ficco._MODULES} - {"integrations"}  # which are imported by name alone
    assert {name: seen[name] for name in seen.keys() - modules} == ficco._MODULE_OF
    at_once = {"Options", "options", "set_options"}
    assert set(ficco.__all__) == ficco._MODULE_OF.keys() | at_once
    assert dir(ficco) == sorted({*ficco.__all__, *ficco._MODULES, "__version__"})


#: In an interpreter that has not imported torch: names come on first use, as they are otherwise.
FIRST_USE = """
import sys
import ficco
assert callable(ficco.options) and ficco.options(log=True)
assert ficco.Schedule.parse("growing") and ficco.schedules and ficco.machine and ficco.heuristics
assert issubclass(ficco.SignalTimeout, ficco.FiccoError)
assert "torch" not in sys.modules
try:
    ficco.nothing
except AttributeError as error:
    assert str(error) == "module 'ficco' has no attribute 'nothing'"
assert "workspace" not in dir(ficco) and "nn" in dir(ficco)
from ficco import all_gather_matmul, nn
import pickle, torch
assert torch.ops.ficco.all_gather_matmul.default and ficco.nn is nn
assert vars(ficco)["all_gather_matmul"] is all_gather_matmul
import ficco.options
assert ficco.options is __import__("ficco.options", fromlist=["options"]).options
for name in ficco.__all__:
    assert pickle.loads(pickle.dumps(getattr(ficco, name))) is getattr(ficco, name), name
assert ficco.passes.torch_compile and ficco.__version__
"""


def test_names_are_loaded_on_first_use() -> None:
    done = python("-c", FIRST_USE)
    assert done.returncode == 0, done.stderr


#: The first use may be inside of a function that is compiled.
COMPILED = """
import ficco
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
@torch.compile(backend="aot_eager", fullgraph=True)
def product(a, b):
    return ficco.matmul_all_reduce(a, b)
assert "matmul_all_reduce" not in vars(ficco)
assert (product(torch.ones(4, 8), torch.ones(8, 2)) == 8).all()
"""


def test_a_name_is_loaded_in_a_compiled_function() -> None:
    done = python("-c", COMPILED)
    assert done.returncode == 0, done.stderr


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import ficco
assert not hasattr(ficco, "tile")
try:
    ficco.tile
except AttributeError as error:
    assert "ficco.tile needs Triton" in str(error)
try:
    import ficco.tile
except ImportError as error:
    assert "ficco.tile needs Triton" in str(error)
else:
    raise AssertionError
help(ficco)
"""


def test_without_triton_the_device_functions_are_missing_and_say_why() -> None:
    done = python("-c", WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr
    assert "all_gather_matmul" in done.stdout
