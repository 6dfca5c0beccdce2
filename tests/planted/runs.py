"""A copy of the tree, in which edits are planted one at a time and tests run until one fails."""

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

#: Tests of the pure half and of every operator on two ranks, the quickest first. They are those of
#: ``make quick`` without the rules of the house and the pages, with those of machine files.
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
#: Exit status of pytest if all tests pass, and if none are left to run.
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
    """What a run of tests says: the test that failed, or what ended the run; empty if all pass."""

    found_by: str
    seconds: float


def files(names: Sequence[str], root: Path = ROOT) -> list[str]:
    """Arguments of pytest for names such as ``plan``, ``cli.py::test_x`` or whole paths, without
    those of tests that are gone."""
    every = _files(root)
    found = []
    for name in names:
        file, *test = name.split("::", 1)
        path = every.get(_stem(file))
        function = test[0].partition("[")[0] if test else ""
        if path is not None and f"def {function}" in (root / path).read_text():
            found.append("::".join([path, *test]))
    return found


def _files(root: Path) -> dict[str, str]:
    """Files of tests by what follows ``test_`` in their names."""
    paths = sorted(root.glob("tests/**/test_*.py"))
    return {_stem(path.name): str(path.relative_to(root)) for path in paths}


def _stem(file: str) -> str:
    return file.rpartition("/")[2].removesuffix(".py").removeprefix("test_")


def rest(done: Sequence[str]) -> list[str]:
    """All files of tests but those named. A file of which some tests are named is among them."""
    return [name for name in _files(ROOT) if name not in done and name != "planted"]


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the files that git tracks, for as long as the context lasts."""
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
    """Write a file of a copy. Compiled code and saved examples are removed: the time and the size
    of a file may not tell that it has changed."""
    file = tree / path
    file.write_text(text)
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)


@contextmanager
def applied(tree: Path, edit: Edit) -> Iterator[None]:
    """Apply an edit to a copy, and take it back."""
    text = (tree / edit.path).read_text()
    write(tree, edit.path, edit.applied(text))
    try:
        yield
    finally:
        write(tree, edit.path, text)


def run(tree: Path, names: Sequence[str], limit_s: float, marks: str) -> Outcome:
    """Run tests of a copy in the given order until one fails or the time is over."""
    if not (chosen := files(names, tree)):
        return Outcome("", 0.0)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-m", marks]
    command += ["-p", "no:cacheprovider", "--hypothesis-seed=0", *chosen]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    begin, code = time.monotonic(), None
    with tempfile.TemporaryFile("w+") as report:
        how: dict[str, Any] = {"cwd": tree, "env": env, "start_new_session": True}
        process = subprocess.Popen(command, stdout=report, stderr=subprocess.STDOUT, **how)
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
        raise RuntimeError(text)  # of the command, not of the tests
    failed = FAILED.search(text)
    found_by = "" if code in PASSES else failed[1] if failed else f"exit status {code}"
    return Outcome("time-out" if code is None else found_by, time.monotonic() - begin)
