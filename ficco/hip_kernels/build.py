"""Compile the kernels for one architecture, once.

On NVIDIA through nvrtc (cuda-bindings) or nvcc, on AMD through ROCm's or a distribution's clang, or
hiprtc (hip-python). No vendor's header is needed. The result is kept in the user's cache folder
by the source, the architecture and the compiler's version.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ficco.errors import BackendError
from ficco.heuristics.saved import cache_dir
from ficco.warn import warn_once

HERE = Path(__file__).resolve().parent

#: What a file in the cache begins with; then the SHA-256 of the rest.
MAGIC = b"ficco kernels 1\n"
#: Seconds that a compiler may take.
PATIENCE_S = 120.0

#: Arguments of nvcc and of a clang for AMD. Neither wraps the code for one device in a bundle.
NVCC = ("-x", "cu", "-std=c++17", "-O3")
CLANG = (
    *("-x", "hip", "-std=c++17", "-O3", "--cuda-device-only", "--no-gpu-bundle-output"),
    *("-nogpuinc", "-nogpulib", "-mcode-object-version=5"),
)


@dataclass(frozen=True)
class Target:
    """What to compile for: ``"cuda"`` and ``"sm_90"``, or ``"hip"`` and ``"gfx942"``, with the
    features that the runtime names behind it (``"gfx942:sramecc+:xnack-"``)."""

    vendor: str
    arch: str


@dataclass(frozen=True)
class Compiler:
    """A compiler that is there: ``run`` turns a text into the code for an architecture."""

    name: str
    version: str
    run: Callable[[str, str], bytes]


class Missing(Exception):
    """A compiler is not there; the text says why."""


@lru_cache
def source() -> str:
    """The kernels as one text, since a run-time compiler has no folder to include from."""
    include = '#include "device.h"\n'
    kernels = (HERE / "kernels.cpp").read_text()
    assert include in kernels
    return kernels.replace(include, (HERE / "device.h").read_text().replace("#pragma once\n", ""))


def compiled(target: Target, folder: Path | None = None) -> bytes:
    """The kernels for a target: from the cache, or from the first compiler that can do it.

    Args:
        folder: of the cache, in place of ``kernels/`` in the user's.

    Raises:
        BackendError: no compiler is there, or none could compile them.
    """
    folder = folder or cache_dir() / "kernels"
    failure = None
    missing = []
    for finder in FINDERS[target.vendor]:
        try:
            compiler = finder()
        except Missing as error:
            missing.append(str(error))
            continue
        path = folder / f"{_name(target, compiler)}.bin"
        image = _load(path)
        if image is not None:
            return image
        try:
            image = compiler.run(source(), target.arch)
        except BackendError as error:
            failure = failure or error
            continue
        _save(path, image)
        return image
    raise failure or BackendError(
        f"compiling ficco's kernels for {target.arch}",
        "no compiler",
        f"{'; '.join(missing)}. {REMEDIES[target.vendor]}",
    )


@lru_cache
def can_compile(vendor: str) -> bool:
    """Whether a compiler is there. Compiles nothing."""
    for finder in FINDERS[vendor]:
        try:
            finder()
            return True
        except Missing:
            continue
    return False


# The cache.


def _name(target: Target, compiler: Compiler) -> str:
    parts = (source(), target.vendor, target.arch, compiler.name, compiler.version)
    digest = hashlib.sha256("\0".join((*parts, *NVCC, *CLANG)).encode()).hexdigest()
    arch = "".join(c if c.isalnum() or c in "_+-" else "." for c in target.arch)
    return f"{target.vendor}-{arch}-{digest[:24]}"


def _load(path: Path) -> bytes | None:
    """What was kept, None if it is not there or damaged."""
    try:
        found = path.read_bytes()
    except OSError:
        return None
    head = len(MAGIC) + hashlib.sha256().digest_size
    image = found[head:]
    whole = found[:head] == MAGIC + hashlib.sha256(image).digest()
    return image if whole and image else None


def _save(path: Path, image: bytes) -> None:
    """Keep it, in one step: other processes see all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(image).digest() + image)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        warn_once(f"compiled kernels are not kept: {path.parent}: {error.strerror}")


# Programs.


def _program(candidates: Iterator[str | Path], what: str) -> str:
    """The first program that is there."""
    for candidate in candidates:
        if found := shutil.which(str(candidate)):
            return found
    raise Missing(f"{what} was not found")


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(command[0], type(error).__name__, str(error)) from error


def _version_of(program: str) -> str:
    try:
        answer = _call([program, "--version"])
    except BackendError as error:
        raise Missing(str(error)) from error
    if answer.returncode:
        raise Missing(f"{program} --version: {answer.stderr.strip()}")
    return answer.stdout.strip()


def _compile_with(program: str, arguments: Callable[[str], list[str]], text: str) -> bytes:
    """What a program makes of the source; ``arguments`` takes the path of the source."""
    with tempfile.TemporaryDirectory(prefix="ficco-kernels-") as folder:
        path, image = Path(folder, "kernels.cpp"), Path(folder, "kernels.bin")
        path.write_text(text)
        answer = _call([program, *arguments(str(path)), "-o", str(image)])
        if answer.returncode or not image.is_file():
            text = (answer.stderr + answer.stdout).strip()
            raise BackendError(program, f"exit status {answer.returncode}", text[-2000:])
        return image.read_bytes()


def _cuda_homes() -> list[Path]:
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    wheels = importlib.util.find_spec("nvidia")
    places = wheels.submodule_search_locations if wheels else None
    from_wheels = [home for place in places or () for home in Path(place).glob("cu*")]
    return [*map(Path, named), Path("/usr/local/cuda"), *from_wheels]


def _rocm_homes() -> list[Path]:
    named = [os.environ[name] for name in ("ROCM_PATH", "ROCM_HOME") if os.environ.get(name)]
    return [Path(home) for home in (*named, "/opt/rocm")]


def nvcc_program() -> str:
    """The compiler of the CUDA toolkit, or of its wheels."""
    homes = (home / "bin" / "nvcc" for home in _cuda_homes())
    return _program(iter(["nvcc", *homes]), "nvcc")


@lru_cache
def nvcc() -> Compiler:
    """CUDA's compiler."""
    program = nvcc_program()

    def run(text: str, arch: str) -> bytes:
        return _compile_with(program, lambda path: [*NVCC, "-cubin", f"-arch={arch}", path], text)

    return Compiler("nvcc", _version_of(program), run)


def clang_program() -> str:
    """ROCm's clang, or the distribution's."""
    homes = (home / "llvm" / "bin" / "clang++" for home in _rocm_homes())
    names = ("amdclang++", "clang++-20", "clang++-19", "clang++-18", "clang++")
    return _program(iter([*homes, *names]), "clang++ (of ROCm, or clang-19 and lld-19)")


@lru_cache
def clang() -> Compiler:
    """A clang that knows the architecture."""
    program = clang_program()

    def run(text: str, arch: str) -> bytes:
        def arguments(path: str) -> list[str]:
            return [*CLANG, f"--offload-arch={arch}", "-c", path]

        return _compile_with(program, arguments, text)

    return Compiler("clang", _version_of(program), run)


# Run-time compilers. Those of both vendors have the same calls, by other names.


def _run_time_compiler(
    name: str, binding: Callable[[], Any], options: Sequence[str], code: str, by_reference: bool
) -> Compiler:
    """A vendor's compiler.

    Args:
        name: its own, with which its calls begin.
        binding: imports the module of its calls.
        options: of a compilation, with ``{}`` for the architecture.
        code: what its calls call the code.
        by_reference: whether a program is destroyed through a reference to its handle.
    """
    try:
        api = binding()
        status, major, minor = getattr(api, f"{name}Version")()
    except (ImportError, RuntimeError, OSError) as error:
        raise Missing(f"{name}: {_first_line(error)}") from error
    if int(status):
        raise Missing(f"{name}: {status}")

    def call(what: str, *arguments: Any) -> Any:
        return getattr(api, name + what)(*arguments)

    def must(what: str, *arguments: Any) -> Any:
        """The value of a call, or :class:`BackendError`."""
        failed, *value = call(what, *arguments)
        if int(failed):
            status_name = getattr(failed, "name", str(failed))
            raise BackendError(name + what, status_name, "no explanation")
        return value[0] if value else None

    def run(text: str, arch: str) -> bytes:
        program = must("CreateProgram", text.encode(), b"kernels.cpp", 0, None, None)
        try:
            given = [option.format(arch).encode() for option in options]
            failed = call("CompileProgram", program, len(given), given)[0]
            if int(failed):
                log = bytearray(must("GetProgramLogSize", program))
                call("GetProgramLog", program, log)
                explanation = log.decode(errors="replace").strip("\0\n ")
                raise BackendError(f"{name}CompileProgram", failed.name, explanation[-2000:])
            image = bytearray(must(f"Get{code}Size", program))
            must(f"Get{code}", program, image)
            return bytes(image)
        finally:
            call("DestroyProgram", program.createRef() if by_reference else program)

    return Compiler(name, f"{major}.{minor}", run)


@lru_cache
def nvrtc() -> Compiler:
    """CUDA's run-time compiler; PyTorch's wheels for CUDA bring it."""

    def binding() -> Any:
        from cuda.bindings import nvrtc

        return nvrtc

    options = ("--gpu-architecture={}", "--std=c++17")
    return _run_time_compiler("nvrtc", binding, options, "CUBIN", by_reference=False)


@lru_cache
def hiprtc() -> Compiler:
    """ROCm's run-time compiler, for machines without ROCm's clang."""

    def binding() -> Any:
        from hip import hiprtc

        return hiprtc

    options = ("--offload-arch={}", "-std=c++17", "-O3")
    return _run_time_compiler("hiprtc", binding, options, "Code", by_reference=True)


def _first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


#: Compilers by vendor, the first choice first. ROCm's clang is the one whose output was read.
FINDERS: dict[str, tuple[Callable[[], Compiler], ...]] = {
    "cuda": (nvrtc, nvcc),
    "hip": (clang, hiprtc),
}
REMEDIES = {
    "cuda": "Install nvrtc, with cuda-bindings of the same major version, or the CUDA toolkit",
    "hip": "Install ROCm's compiler, or clang-19 and lld-19 of the distribution",
}
