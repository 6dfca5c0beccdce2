"""Ranks whose HIP library is the double of ``hip_double``, called through the real hip-python."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import ranks
from ranks import Rank

import ficco

SOURCE = Path(__file__).parent / "hip_double" / "double.cpp"
#: Folders of the two series of hip-python, by their first number; tests/toolchain.sh fills them.
WHEELS = Path(__file__).parent.parent / "build" / "hip-python"
SERIES = ("7", "10")
#: Where a double is loaded from, and how a test can tell its ranks' processes.
LIBRARY, WHEEL = "FICCO_TEST_HIP_LIBRARY", "FICCO_TEST_HIP_WHEEL"


def missing(what: str) -> None:
    """Skip a test, or fail it in CI, where everything is installed."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(
        f"{what} is not here: tests/toolchain.sh installs it"
    )


@cache
def library() -> Path:
    """The double, compiled once for its source."""
    if shutil.which("g++") is None:
        missing("g++")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ficco-hip-double-{os.getuid()}-{digest}"
    made = folder / "libamdhip64.so"
    if not made.exists():
        folder.mkdir(exist_ok=True)
        part = folder / f"{os.getpid()}.so"
        flags = ("-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        name = ("-fvisibility=hidden", "-Wl,-soname,libamdhip64.so")
        command = ["g++", *flags, *name, str(SOURCE), "-o", str(part), "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        part.rename(made)
    return made


def wheel(series: str) -> Path:
    """The folder of a series of hip-python."""
    folder = WHEELS / series
    if not (folder / "hip").exists():
        missing(f"hip-python {series}")
    return folder


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    series: str = "7",
    settings: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """As :func:`ranks.run`, on ranks of their own with the double and its settings."""
    env = {f"HIP_DOUBLE_{name}": str(value) for name, value in (settings or {}).items()}
    env |= {LIBRARY: str(library()), WHEEL: str(wheel(series))}
    env |= kwargs.pop("env", {})
    return ranks.run(world, partial(_with_double, fn), *args, fresh=True, env=env, **kwargs)


def _with_double(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    sys.path.insert(0, os.environ[WHEEL])
    ctypes.CDLL(os.environ[LIBRARY], mode=ctypes.RTLD_GLOBAL)
    with ficco.options(engine="hip", on_timeout="raise", timeout_s=20):
        result = fn(at, *args)
    return result


def double() -> Any:
    """The double of this process, for its settings."""
    found = ctypes.CDLL(os.environ[LIBRARY])
    found.double_calls.restype = ctypes.c_long
    found.double_calls.argtypes = [ctypes.c_char_p]
    found.double_said.restype = found.double_called.restype = ctypes.c_char_p
    found.double_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    found.double_jitter.argtypes = [ctypes.c_long]
    return found


def calls(name: str) -> int:
    """How often a function of the library was called."""
    return int(double().double_calls(name.encode()))


def spotless() -> None:
    """Fail unless nothing was violated and, once everything is closed, nothing leaks."""
    ficco.close()
    gc.collect()
    found = double()
    violated, leaked = found.double_violations(), found.double_leaks()
    assert not violated and not leaked, found.double_said().decode()


@contextlib.contextmanager
def clean() -> Iterator[None]:
    """The block violates nothing and, once everything is closed, leaks nothing."""
    yield
    spotless()
