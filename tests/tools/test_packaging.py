"""The wheel's files, the import without side effects, and commands without the extra."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from programs import Ended, Program

import ficco
import hatch_build

ROOT = Path(ficco.__file__).resolve().parents[1]


def python(*args: str, executable: Path | str = sys.executable, **kwargs: Any) -> str:
    """Output of an interpreter that does not import the checkout by default."""
    run = subprocess.run([executable, *args], capture_output=True, text=True, timeout=200, **kwargs)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from it."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("needs a checkout")
    out = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel and this environment's torch."""
    folder = tmp_path_factory.mktemp("env")
    python("-m", "venv", "--without-pip", str(folder))
    executable = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    # This interpreter's pip installs into the new environment and downloads nothing.
    install = ["-m", "pip", "--python", str(executable), "install", "--no-deps", "--no-index"]
    python(*install, "--disable-pip-version-check", "-q", str(wheel))
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(python("-c", purelib, executable=executable).strip())
    assert site.is_relative_to(folder)
    # The new environment's packages precede those of this environment and of its base.
    paths = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (site / "torch.pth").write_text("\n".join(paths) + "\n")
    return executable


def test_wheel_and_sdist_hold_the_package_and_nothing_else(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry,) = (archive.read(n).decode() for n in names if n.endswith("entry_points.txt"))
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith("/METADATA"))
    assert {re.sub(".*dist-info", "", name.split("/")[0]) for name in names} == {"ficco", ""}
    files = [*ROOT.glob("ficco/**/*.py"), ROOT / "ficco/py.typed", *ROOT.glob("configs/**/*.*")]
    relative = {path.relative_to(ROOT).as_posix() for path in files}
    wanted = {name if name.startswith("ficco/") else f"ficco/{name}" for name in relative}
    assert {*wanted, "ficco/configs/scenarios.csv"} <= {*names}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "ficco = ficco.tools.cli:main" in entry
    extras = [f"Provides-Extra: {extra}" for extra in ("bench", "cuda", "hip", "dev")]
    lines = {*extras, "Requires-Python: >=3.11", "Description-Content-Type: text/markdown"}
    assert lines <= {*metadata.splitlines()} and "\nRequires-Dist: torch" in metadata
    assert "Read on" in metadata and relative_links(metadata) == []
    assert "Project-URL" not in metadata
    with tarfile.open(sdist) as archive_of_source:
        sources = {name.split("/", 1)[-1] for name in archive_of_source.getnames()}
    required = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "hatch_build.py"}
    assert {*required, "configs/scenarios.csv"} <= sources
    # hatchling adds the last two.
    tops = {name.split("/")[0] for name in sources}
    assert tops <= {*required, "configs", "ficco", "PKG-INFO", ".gitignore"}
    assert sdist.stat().st_size < 2 << 20


def relative_links(text: str) -> list[str]:
    return re.findall(r"\]\((?!https://)[^()\s]+\)", text)


def test_a_description_links_only_to_the_address_of_the_project() -> None:
    page = "[text](docs/a.md#b), [paper](https://x.org)\n![picture](docs/c.png)\n"
    address = "https://example.org/x"
    assert hatch_build.description(page, "") == (
        "text, [paper](https://x.org)\n\n"
        "\nA checkout of the repository has the pages that this text names in `docs/`.\n"
    )
    assert hatch_build.description(page, address) == (
        f"[text]({address}/blob/main/docs/a.md#b), [paper](https://x.org)\n"
        f"![picture]({address}/raw/main/docs/c.png)\n"
    )
    readme = (ROOT / "README.md").read_text()
    assert len(relative_links(readme)) > 30
    for repository in ("", address):
        assert relative_links(hatch_build.description(readme, repository)) == []


INSTALLED = """
import json
import importlib.metadata
from pathlib import Path
import ficco
from ficco.machine import configs
import torch
folder = Path(ficco.__file__).parent
print(json.dumps({
    "file": ficco.__file__,
    "version": importlib.metadata.version("ficco"),
    "configs": sorted(p.name for p in (folder / "configs").iterdir()),
    "configs_path": str(configs()),
    "decision": str(ficco.explain("all_gather_matmul", m=8, n=8, k=8, world=2)),
    "backend": [
        str(type(point.load()))
        for point in importlib.metadata.entry_points(group="torch_dynamo_backends", name="ficco")
    ],
}))
"""


def test_wheel_installs_imports_and_runs(installed: Path, tmp_path: Path) -> None:
    # -I: neither the working directory nor PYTHONPATH leads back to the checkout.
    report = json.loads(python("-I", "-c", INSTALLED, executable=installed, cwd=tmp_path))
    assert Path(report["file"]).is_relative_to(installed.parents[1])
    assert report["configs"] == sorted(p.name for p in (ROOT / "configs").iterdir())
    assert Path(report["configs_path"]).is_relative_to(installed.parents[1])
    assert report["version"] == ficco.__version__ and report["decision"]
    assert report["backend"] == ["<class 'ficco.passes.compiling.Backend'>"]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    by_name = python("--help", executable=installed.parent / "ficco", cwd=tmp_path, env=clean)
    by_module = python("-I", "-m", "ficco", "--help", executable=installed, cwd=tmp_path)
    for output in (by_name, by_module):
        assert all(command in output for command in ("demo", "bench", "plan", "doctor"))


#: Runs each argument and prints the parts of the process's state that it changed. Even counting
#: devices is an error: it takes seconds on some machines, and a process must not fork after it.
CHANGES = """
import json, logging, os, signal, sys, threading, warnings
import torch

def refuse(*args, **kwargs):
    raise AssertionError("import ficco asked for a device")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse
torch.cuda.current_device = torch.cuda.get_device_properties = refuse

def state():
    return {
        "sys.path": list(sys.path),
        "sys.meta_path": list(sys.meta_path),
        "sys.path_hooks": list(sys.path_hooks),
        "hooks for exceptions": (sys.excepthook, threading.excepthook),
        "warnings.filters": list(warnings.filters),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads": threading.enumerate(),
        "environment": dict(os.environ),
        "log handlers": list(logging.root.handlers),
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "shared memory": sorted(name for name in os.listdir("/dev/shm") if "ficco" in name),
        "GPUs": torch.cuda.is_initialized(),
    }

present = set(sys.modules)
for code in sys.argv[1:]:
    before = state()
    exec(code)
    after = state()
    print(*[name for name in before if before[name] != after[name]])
print(*set(sys.modules) - present)
"""

#: Side effects that the program above must see.
SIDE_EFFECTS = {
    "sys.meta_path.insert(0, object())": "sys.meta_path",
    "sys.path_hooks.append(object())": "sys.path_hooks",
    "warnings.simplefilter('error')": "warnings.filters",
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN)": "signal handlers",
    "threading.Thread(target=threading.Event().wait, daemon=True).start()": "threads",
    "os.environ['FICCO_X'] = ''": "environment",
}

#: Slow modules, and modules that touch a device; they are imported on first use. PyTorch's FLOP
#: counter is allowed, although it imports Triton where that is installed (0.06 to 0.14 s).
HEAVY = (
    "pandas matplotlib rich yaml torch.distributed._symmetric_memory torch._dynamo "
    "torch._inductor cuda hip pytest ficco.tools.cli ficco.tools.doctor ficco.tools.bench "
    "ficco.dma.cuda_driver ficco.dma.gpu ficco.dma.hip_api ficco.dma.hip_driver "
    "ficco.hip_kernels"
).split()


def test_importing_has_no_side_effect() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    lines = python("-c", CHANGES, "import ficco", *SIDE_EFFECTS, env=env).splitlines()
    *effects, modules = lines
    assert effects == ["", *SIDE_EFFECTS.values()]
    prefixes = tuple(f"{name}." for name in HEAVY)
    assert not [module for module in modules.split() if f"{module}.".startswith(prefixes)]
    assert "ficco.ops.operators" in modules.split()


def test_declared_requirements() -> None:
    """The tests run on a declared Python, and the runtime requires three packages."""
    assert f"\nversion: {ficco.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert f"Python :: {sysconfig.get_python_version()}" in project
    assert re.search(r'^dependencies = \["torch\S*", "numpy", "pyyaml\S*"\]$', project, re.M)


#: Runs at the start of each interpreter, also of ranks, and makes imports of the extra fail.
WITHOUT_EXTRA = """
import sys
sys.modules |= dict.fromkeys(("pandas", "matplotlib", "rich"))
"""

SIZES = "--m 64 --n 8 --k 32 --world 2"


#: Runs a command in a process that has imported torch and no package of the extra.
COMMAND = f"""
import runpy, sys
assert not {{"pandas", "matplotlib", "rich"}} & sys.modules.keys()
{WITHOUT_EXTRA}
runpy.run_module("ficco", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def without_extra(tmp_path: Path) -> Callable[..., Ended]:
    """Run a command, and the interpreters that it starts, without the packages of the extra."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EXTRA)
    env, numbers = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, count()

    def run(command: str) -> Ended:
        program = Program(tmp_path, f"command{next(numbers)}", COMMAND, command.split(), env)
        return program.end(time.monotonic() + 200)

    return run


def test_commands_that_need_no_extra_work_without_it(without_extra: Callable[..., Ended]) -> None:
    for command, message in (
        (f"explain {SIZES} --machine h200-4", "predicted"),
        ("doctor --device cpu --ranks 2", "right on every rank"),
        (f"plan growing {SIZES}", "checked for all 2 ranks"),
        (f"plan growing {SIZES} --trace {os.devnull}", "checked for all 2 ranks"),
    ):
        ended = without_extra(command)
        assert ended.code == 0 and message in ended.out, ended
    # The self-test and its imports do not need the extra either, in a new interpreter.
    files = (ROOT / "ficco/tools/selftest").glob("[!_]*.py")
    names = [f"ficco.tools.selftest.{path.stem}" for path in files]
    python("-c", f"{WITHOUT_EXTRA}\nimport {', '.join(names)}", cwd=ROOT)


def test_commands_that_need_the_extra_name_it(without_extra: Callable[..., Ended]) -> None:
    for command in (
        *("demo --device cpu", "bench --device cpu", "tune --device cpu --quick"),
        *("plot none.json", "simulate", f"plan growing {SIZES} --draw x.png"),
        *(f"explain {SIZES} {more}" for more in ("--machine h200-4 --draw x.png", "--measure")),
    ):
        ended = without_extra(command)
        assert (ended.code, ended.out) == (2, ""), ended.err
        (line,) = ended.err.splitlines()
        assert 'pip install "ficco[bench]"' in line


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ("", "No rule to make target 'lint'.  Stop."),  # all checks pass
        ("sed -i s/0.1.0/0.2.0/ pyproject.toml", "a section for 0.2.0 in CHANGELOG.md, got none"),
        ("touch new", "required a clean tree, got changes: git status lists them"),
        ("git tag v0.1.0", "required a new version, got 0.1.0, which has a tag"),
    ],
)
def test_release_refuses(changes: str, end: str, tmp_path: Path) -> None:
    script = f"""
    mkdir .ci && cp {ROOT}/.ci/release .ci && echo 'version = "0.1.0"' > pyproject.toml
    echo '## [0.1.0]' > CHANGELOG.md && git init -q . && git add . &&
    git -c user.name=a -c user.email=a@example.org commit -qm one && {{ {changes or "true"}; }}
    """
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True, timeout=60)
    run = subprocess.run([".ci/release"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode and end in run.stderr.splitlines()[-1], run.stderr
