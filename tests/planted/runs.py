"""Run tests on a copy of the tree with one planted edit at a time, until a test fails."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

ROOT = Path(__file__).parents[2]

#: Tests of the pure half and of all operators on two ranks, the quickest first: the tests of
#: ``make quick`` and of machine files, without the tests of style and pages.
PURE = (
    *("model", "golden_times", "interleavings", "golden_plans", "schedules", "simulate", "machine"),
    *("decide", "plan", "gate", "memops", "flights", "passes", "errors", "host", "board"),
    "cli.py::test_the_help_has_every_option_and_its_default",
    "cli.py::test_bad_input_is_one_line_and_exit_code_2",
    "contract.py::test_forward",
    "contract.py::test_gradient",
)
#: The first failing or broken test in the report of pytest.
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
#: Exit status of pytest if all tests pass, and if no test is selected.
PASSES = (0, 5)


class Edit(Protocol):
    """A change of one file."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...

    def applied(self, text: str) -> str:
        """The text of the file with the change."""


class Outcome(NamedTuple):
    """Failed test of a run, or the reason of its end; ``found_by`` is empty if all tests pass."""

    found_by: str
    seconds: float


def files(names: Sequence[str], root: Path = ROOT) -> list[str]:
    """Arguments of pytest for names such as ``plan``, ``cli.py::test_x`` or paths. Names of removed
    tests are left out."""
    paths = _files(root)
    arguments = []
    for name in names:
        file, *test = name.split("::", 1)
        path = paths.get(_stem(file))
        function = test[0].partition("[")[0] if test else ""
        if path is not None and f"def {function}" in (root / path).read_text():
            arguments.append("::".join([path, *test]))
    return arguments


def _files(root: Path) -> dict[str, str]:
    """Files of tests by their names without ``test_`` and suffix."""
    paths = sorted(root.glob("tests/**/test_*.py"))
    return {_stem(path.name): str(path.relative_to(root)) for path in paths}


def _stem(file: str) -> str:
    return file.rpartition("/")[2].removesuffix(".py").removeprefix("test_")


def rest(done: Sequence[str]) -> list[str]:
    """All files of tests except ``done``. Files with single tests in ``done`` are included."""
    return [name for name in _files(ROOT) if name not in done and name != "planted"]


@contextmanager
def copied() -> Iterator[Path]:
    """A temporary copy of the files that git tracks."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    try:
        for name in listed.split("\0")[:-1]:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(tree: Path, path: str, text: str) -> None:
    """Write a file of a copy. Remove its compiled code and saved examples, since the time and the
    size of a file may not show the change."""
    file = tree / path
    file.write_text(text)
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)


@contextmanager
def applied(tree: Path, edit: Edit) -> Iterator[None]:
    """Apply an edit to a copy, and revert it at the end."""
    text = (tree / edit.path).read_text()
    write(tree, edit.path, edit.applied(text))
    try:
        yield
    finally:
        write(tree, edit.path, text)


def run(tree: Path, names: Sequence[str], limit_s: float, marks: str) -> Outcome:
    """Run tests of a copy in order until one fails or the time limit is over."""
    if not (chosen := files(names, tree)):
        return Outcome("", 0.0)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-m", marks]
    command += ["-p", "no:cacheprovider", "--hypothesis-seed=0", *chosen]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    begin, code = time.monotonic(), None
    with tempfile.TemporaryFile("w+") as report:
        options: dict[str, Any] = {"cwd": tree, "env": env, "start_new_session": True}
        process = subprocess.Popen(command, stdout=report, stderr=subprocess.STDOUT, **options)
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the ranks that the tests started
            process.wait()
        report.seek(0)
        text = report.read()
    if "\nERROR: not found" in text or "unrecognized arguments" in text:
        raise RuntimeError(text)  # an error of the command, not of the tests
    failed = FAILED.search(text)
    found_by = "" if code in PASSES else failed[1] if failed else f"exit status {code}"
    return Outcome("time-out" if code is None else found_by, time.monotonic() - begin)
