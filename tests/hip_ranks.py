"""Ranks with the HIP double of ``hip_double``, called through the real hip-python."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import hashlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import host_gpu
import ranks
from ranks import Body, Rank, missing

import ficco
from ficco.errors import BackendError
from ficco.hip_kernels import build
from ficco.hip_kernels.build import CompilerNotFound, Target

HERE = Path(__file__).parent
SOURCE = HERE / "hip_double" / "double.cpp"
#: HIP's library on an NVIDIA GPU, and a double of the GPU's driver.
FORWARD, FAKE_DRIVER = (HERE / "hip_forward" / f"{name}.cpp" for name in ("forward", "fake_driver"))
#: Folders of the two series of hip-python, by their first number; tests/toolchain.sh fills them.
WHEELS = HERE.parent / "build" / "hip-python"
SERIES = ("7", "10")
#: Variables: paths of the library and of the binding, and of the double if it is another library.
LIBRARY, WHEEL, DOUBLE = "FICCO_TEST_HIP_LIBRARY", "FICCO_TEST_HIP_WHEEL", "FICCO_TEST_HIP_DOUBLE"


@cache
def compiled(source: Path, name: str, *flags: str) -> Path:
    """The compiled library of a source, cached by the source and flags."""
    if shutil.which("g++") is None:
        missing("g++")
    common = ("-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    named = ("-fvisibility=hidden", f"-Wl,-soname,{name}")
    text = "\0".join((*common, *named, *flags)).encode() + source.read_bytes()
    digest = hashlib.sha256(text).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ficco-hip-double-{os.getuid()}-{digest}"
    path = folder / name
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # concurrent test processes wait
        if not path.exists():
            part = folder / f"{os.getpid()}.so"
            command = ["g++", *common, *named, str(source), "-o", str(part), *flags]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            part.rename(path)
    return path


def library(name: str = "libamdhip64.so") -> Path:
    """The double."""
    return compiled(SOURCE, name, "-lpthread")


def forward() -> Path:
    """HIP's library on CUDA's driver. Compilers of machines with GPUs may print more warnings."""
    flags = (f"-I{_cuda_headers()}", "-Wno-error", "-ldl")
    return compiled(FORWARD, "libamdhip64.so", *flags)


def fake_driver() -> Path:
    """CUDA's driver on a double."""
    return compiled(FAKE_DRIVER, "libcuda.so.1", f"-I{_cuda_headers()}", "-ldl")


def _cuda_headers() -> Path:
    """The folder of ``cuda.h``."""
    nvcc = shutil.which("nvcc")
    homes = [*build._cuda_homes(), *([Path(nvcc).resolve().parents[1]] if nvcc else [])]
    folders = [home / "include" for home in homes if (home / "include" / "cuda.h").exists()]
    if not folders:
        missing("cuda.h")
    return folders[0]


def wheel(series: str) -> Path:
    """The folder of a series of hip-python."""
    folder = WHEELS / series
    if not (folder / "hip").exists():
        missing(f"hip-python {series}")
    return folder


@cache
def compile_kernels() -> None:
    """Compile the kernels into the cache, so that the ranks do not all compile them."""
    with contextlib.suppress(BackendError):
        build.compiled(Target("hip", "gfx942"))


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    series: str = "7",
    settings: dict[str, Any] | None = None,
    fresh: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Run as :func:`ranks.run` on ranks with the double and its settings. Ranks that are not
    ``fresh`` stay for the next test, so ``fn`` has to close all that it opens."""
    compile_kernels()
    env = {f"HIP_DOUBLE_{name}": str(value) for name, value in (settings or {}).items()}
    env |= kwargs.pop("env", {})
    if LIBRARY not in env:
        env[LIBRARY] = str(library())
    if WHEEL not in env:
        env[WHEEL] = str(wheel(series))
    return ranks.run(world, partial(_with_library, fn), *args, fresh=fresh, env=env, **kwargs)


def on_double(world: int, **how: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a function of a rank, as :func:`ranks.on_ranks`, that fails on violations of
    the API and on leaks. ``how`` has arguments of :func:`run`; by default the ranks stay."""

    def test_of(body: Callable[..., None]) -> Any:
        parameters = [*inspect.signature(body).parameters.values()][1:]

        @wraps(body)
        def test(**arguments: Any) -> None:
            values = (arguments[parameter.name] for parameter in parameters)
            where = {"fresh": False, **how}
            run(world, _cleanly, Body(body.__module__, body.__name__), *values, **where)

        vars(test).update(body=body, __signature__=inspect.Signature(parameters))
        return test

    return test_of


def _cleanly(at: Rank, fn: Callable[..., None], *args: Any) -> None:
    with clean():
        fn(at, *args)


def bind(folder: str) -> None:
    """Let this process import a folder's hip-python; reuse modules of the server of ranks."""
    sys.path.insert(0, folder)
    if preloaded := sys.modules.get("tests.preloaded"):
        sys.modules.update(preloaded.BINDINGS.get(folder, {}))


def _with_library(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    bind(os.environ[WHEEL])
    host_gpu.serve_cpu_tensors()
    ctypes.CDLL(os.environ[LIBRARY], mode=ctypes.RTLD_GLOBAL)
    with ficco.options(engine="hip", on_timeout="raise", timeout_s=20):
        return fn(at, *args)


def compiling(at: Rank, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function with kernels without code: the double knows kernels by their names."""
    import ficco.dma.hip_driver
    import ficco.hip_kernels.launch

    with (
        mock.patch.object(ficco.dma.hip_driver, "can_compile", lambda vendor: True),
        mock.patch.object(ficco.hip_kernels.launch, "compiled", lambda target: b"\0"),
    ):
        return fn(at, *args)


def without_compiler(at: Rank, fn: Callable[..., Any], *args: Any) -> Any:
    def hidden() -> Any:
        raise CompilerNotFound("hidden by the test")

    with mock.patch.dict(build.FINDERS, hip=(hidden,)):
        return fn(at, *args)


@contextlib.contextmanager
def asking(ways: str) -> Iterator[None]:
    """Engines that are created in this block use the given values of ``FICCO_HIP``."""
    with mock.patch.dict(os.environ, {"FICCO_HIP": ways} if ways else {}):
        yield


def double() -> Any:
    """The double of this process, for its settings."""
    library = ctypes.CDLL(os.environ.get(DOUBLE) or os.environ[LIBRARY])
    library.double_calls.restype = ctypes.c_long
    library.double_calls.argtypes = [ctypes.c_char_p]
    library.double_said.restype = library.double_called.restype = ctypes.c_char_p
    library.double_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    library.double_jitter.argtypes = [ctypes.c_long]
    library.double_delay.argtypes = [ctypes.c_void_p, ctypes.c_long]
    return library


def calls(name: str) -> int:
    """How often a function of the library was called."""
    return int(double().double_calls(name.encode()))


def spotless() -> None:
    """Fail on violations of the API and, once everything is closed, on leaks."""
    ficco.close()
    gc.collect()
    library = double()
    violated, leaked = library.double_violations(), library.double_leaks()
    assert not violated and not leaked, library.double_said().decode()


@contextlib.contextmanager
def clean() -> Iterator[None]:
    """Fail if the block violates the API or, once everything is closed, leaks."""
    yield
    spotless()
