"""Lazy imports: ``import ficco`` and the command line import PyTorch only when a name needs it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import ficco

ROOT = Path(ficco.__file__).parents[1]


def test_public_names_are_loaded_from_the_modules_that_type_checkers_see() -> None:
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
    assert modules == {*ficco._MODULES} - {"integrations"}  # its modules have no short names
    assert {name: seen[name] for name in seen.keys() - modules} == ficco._MODULE_OF
    at_once = {"Options", "options", "set_options"}
    assert set(ficco.__all__) == ficco._MODULE_OF.keys() | at_once
    assert dir(ficco) == sorted({*ficco.__all__, *ficco._MODULES, "__version__"})


#: Runs in an interpreter without torch. Help and refused options import no heavy module. A name is
#: loaded on its first use, also in a compiled function, and is the same object as otherwise.
FIRST_USE = """
import sys
import ficco
from ficco.tools import cli

for command in ([], *([name] for name in cli.COMMANDS)):
    assert cli.run([*command, "--help"]) == 0 and cli.run([*command, "--wrong-flag"]) == 2
    heavy = {"torch", "numpy", "pandas", "matplotlib", "rich", "yaml"} & set(sys.modules)
    assert not heavy, (command, heavy)
assert callable(ficco.options) and ficco.options(log=True)
assert ficco.Schedule.parse("growing") and ficco.schedules and ficco.machine and ficco.heuristics
assert issubclass(ficco.SignalTimeout, ficco.FiccoError)
assert "torch" not in sys.modules
try:
    ficco.nothing
except AttributeError as error:
    assert str(error) == "module 'ficco' has no attribute 'nothing'"
assert "workspace" not in dir(ficco) and "nn" in dir(ficco)
from ficco import all_gather_matmul
assert not {"ficco.nn", "torch.distributed.tensor"} & set(sys.modules)
from ficco import nn
import pickle, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert "matmul_all_reduce" not in vars(ficco)
@torch.compile(backend="aot_eager", fullgraph=True)
def product(a, b):
    return ficco.matmul_all_reduce(a, b)
assert (product(torch.ones(4, 8), torch.ones(8, 2)) == 8).all()
assert torch.ops.ficco.all_gather_matmul.default and ficco.nn is nn
assert vars(ficco)["all_gather_matmul"] is all_gather_matmul
import ficco.options
assert ficco.options is __import__("ficco.options", fromlist=["options"]).options
for name in ficco.__all__:
    assert pickle.loads(pickle.dumps(getattr(ficco, name))) is getattr(ficco, name), name
assert ficco.passes.torch_compile and ficco.__version__
"""


def test_names_are_loaded_on_first_use() -> None:
    command, env = [sys.executable, "-c", FIRST_USE], {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=env, text=True, capture_output=True)
    assert process.returncode == 0, process.stderr
