"""Compile the kernels for one architecture, once.

On NVIDIA through nvrtc (cuda-bindings) or nvcc, on AMD through ROCm's or a distribution's clang, or
hiprtc (hip-python). No vendor's header is needed. The binary is cached in the user's cache folder
by the source, the architecture and the compiler's version.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ficco.errors import BackendError, warn_once
from ficco.machine.files import cache_dir

HERE = Path(__file__).resolve().parent

#: The header of a file in the cache; the SHA-256 of the rest follows.
MAGIC = b"ficco kernels 1\n"
#: Seconds that a compiler may take.
TIMEOUT_S = 120.0

#: Arguments of nvcc and of clang for AMD. The output is for one architecture, not a bundle.
NVCC = ("-x", "cu", "-std=c++17", "-O3")
CLANG = (
    *("-x", "hip", "-std=c++17", "-O3", "--cuda-device-only", "--no-gpu-bundle-output"),
    *("-nogpuinc", "-nogpulib", "-mcode-object-version=5"),
)


@dataclass(frozen=True)
class Target:
    """The target of a compilation: ``"cuda"`` and ``"sm_90"``, or ``"hip"`` and ``"gfx942"``,
    followed by the features that the runtime reports (``"gfx942:sramecc+:xnack-"``)."""

    vendor: str
    arch: str


@dataclass(frozen=True)
class Compiler:
    """An installed compiler: ``run`` compiles a source for an architecture."""

    name: str
    version: str
    run: Callable[[str, str], bytes]


class CompilerNotFound(Exception):
    """A compiler is not installed; the text says why."""


@lru_cache
def source() -> str:
    """The kernels as one text, since a run-time compiler has no include path."""
    include = '#include "device.h"\n'
    kernels = (HERE / "kernels.cpp").read_text()
    assert include in kernels
    return kernels.replace(include, (HERE / "device.h").read_text().replace("#pragma once\n", ""))


def compiled(target: Target, folder: Path | None = None, text: str | None = None) -> bytes:
    """The kernels for a target: from the cache, or from the first compiler that can do it.

    Args:
        text: the source; by default that of this package's kernels.
        folder: the cache; by default ``kernels/`` in the user's cache folder.

    Raises:
        BackendError: no compiler is installed, or none could compile them.
    """
    folder = folder or cache_dir() / "kernels"
    text = text or source()
    failure, missing = None, []
    for finder in FINDERS[target.vendor]:
        try:
            compiler = finder()
        except CompilerNotFound as error:
            missing.append(str(error))
            continue
        path = folder / f"{_name(text, target, compiler)}.bin"
        if image := _load(path):
            return image
        try:
            image = compiler.run(text, target.arch)
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
    """Whether a compiler is installed. Compiles nothing."""
    for finder in FINDERS[vendor]:
        try:
            finder()
            return True
        except CompilerNotFound:
            continue
    return False


# The cache.


def _name(text: str, target: Target, compiler: Compiler) -> str:
    parts = (text, target.vendor, target.arch, compiler.name, compiler.version, *NVCC, *CLANG)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    arch = "".join(c if c.isalnum() or c in "_+-" else "." for c in target.arch)
    return f"{target.vendor}-{arch}-{digest[:24]}"


def _load(path: Path) -> bytes | None:
    """A binary from the cache; None if there is none, it is damaged, or others may write it."""
    try:
        with path.open("rb") as file:
            status, data = os.fstat(file.fileno()), file.read()
    except OSError:
        return None
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        warn_once(f"a compiled kernel is not used, since other users may write it: {path}")
        return None
    image = data[len(MAGIC) + hashlib.sha256().digest_size :]
    return image if image and data == _with_header(image) else None


def _with_header(image: bytes) -> bytes:
    return MAGIC + hashlib.sha256(image).digest() + image


def _save(path: Path, image: bytes) -> None:
    """Cache a binary atomically: other processes see all of it or nothing."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_with_header(image))
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        warn_once(f"compiled kernels are not kept: {path.parent}: {error.strerror}")


# Programs.


def _program(candidates: Iterable[str | Path], program: str) -> str:
    """The first candidate that is installed."""
    for candidate in candidates:
        if path := shutil.which(str(candidate)):
            return path
    raise CompilerNotFound(f"{program} was not found")


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(command[0], type(error).__name__, str(error)) from error


def _compiler(name: str, program: str, arguments: Sequence[str]) -> Compiler:
    """A program as a compiler; its arguments have ``{}`` for the architecture."""
    try:
        answer = _call([program, "--version"])
    except BackendError as error:
        raise CompilerNotFound(str(error)) from error
    if answer.returncode:
        raise CompilerNotFound(f"{program} --version: {answer.stderr.strip()}")

    def run(text: str, arch: str) -> bytes:
        return _compile_with(program, [argument.format(arch) for argument in arguments], text)

    return Compiler(name, answer.stdout.strip(), run)


def _compile_with(program: str, arguments: Sequence[str], text: str) -> bytes:
    """The output of a compiler for a source, whose path comes after the arguments."""
    with tempfile.TemporaryDirectory(prefix="ficco-kernels-") as folder:
        path, image = Path(folder, "kernels.cpp"), Path(folder, "kernels.bin")
        path.write_text(text)
        answer = _call([program, *arguments, str(path), "-o", str(image)])
        if answer.returncode or not image.is_file():
            text = (answer.stderr + answer.stdout).strip()
            raise BackendError(program, f"exit status {answer.returncode}", text[-2000:])
        return image.read_bytes()


def _cuda_homes() -> list[Path]:
    wheels = importlib.util.find_spec("nvidia")
    folders = wheels.submodule_search_locations if wheels else None
    from_wheels = [home for folder in folders or () for home in Path(folder).glob("cu*")]
    return [*_named("CUDA_HOME", "CUDA_PATH"), Path("/usr/local/cuda"), *from_wheels]


def _named(*variables: str) -> list[Path]:
    """The folders in environment variables that are set."""
    return [Path(value) for value in map(os.environ.get, variables) if value]


def nvcc_program() -> str:
    """The compiler of the CUDA toolkit, or of its wheels."""
    return _program(["nvcc", *(home / "bin" / "nvcc" for home in _cuda_homes())], "nvcc")


@lru_cache
def nvcc() -> Compiler:
    """CUDA's compiler."""
    return _compiler("nvcc", nvcc_program(), (*NVCC, "-cubin", "-arch={}"))


def clang_program() -> str:
    """ROCm's clang, or the distribution's."""
    homes = [*_named("ROCM_PATH", "ROCM_HOME"), Path("/opt/rocm")]
    paths = [home / "llvm" / "bin" / "clang++" for home in homes]
    names = ("amdclang++", "clang++-20", "clang++-19", "clang++-18", "clang++")
    return _program([*paths, *names], "clang++ (of ROCm, or clang-19 and lld-19)")


@lru_cache
def clang() -> Compiler:
    """A clang that knows the architecture."""
    return _compiler("clang", clang_program(), (*CLANG, "--offload-arch={}", "-c"))


# Run-time compilers. Both vendors' have the same functions, under different names.


def _run_time_compiler(
    name: str,
    binding: str,
    options: Sequence[str],
    code: str,
    by_reference: bool,
    since: tuple[int, str] | None = None,
) -> Compiler:
    """A vendor's compiler.

    Args:
        name: the prefix of its functions.
        binding: the module of its functions.
        options: of a compilation, with ``{}`` for the architecture.
        code: what its functions call a binary.
        by_reference: whether a program is destroyed through a reference to its handle.
        since: a major version, and an option that it and later ones have.
    """
    try:
        # Some series of a binding make the module an attribute of its package alone.
        package, _, module = binding.rpartition(".")
        api: Any = getattr(
            importlib.import_module(package), module, None
        ) or importlib.import_module(binding)
        status, major, minor = getattr(api, f"{name}Version")()
    except (ImportError, RuntimeError, OSError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CompilerNotFound(f"{name}: {line}") from error
    if int(status):
        raise CompilerNotFound(f"{name}: {status}")

    if since is not None and major >= since[0]:
        options = (*options, since[1])

    def call(function: str, *arguments: Any) -> Any:
        return getattr(api, name + function)(*arguments)

    def must(function: str, *arguments: Any) -> Any:
        """The value of a call, or :class:`BackendError`."""
        status, *value = call(function, *arguments)
        if int(status):
            code_name = getattr(status, "name", str(status))
            raise BackendError(name + function, code_name, "no explanation")
        return value[0] if value else None

    def run(text: str, arch: str) -> bytes:
        program = must("CreateProgram", text.encode(), b"kernels.cpp", 0, None, None)
        try:
            formatted = [option.format(arch).encode() for option in options]
            status = call("CompileProgram", program, len(formatted), formatted)[0]
            if int(status):
                log = bytearray(must("GetProgramLogSize", program))
                call("GetProgramLog", program, log)
                explanation = log.decode(errors="replace").strip("\0\n ")
                raise BackendError(f"{name}CompileProgram", status.name, explanation[-2000:])
            image = bytearray(must(f"Get{code}Size", program))
            must(f"Get{code}", program, image)
            return bytes(image)
        finally:
            call("DestroyProgram", program.createRef() if by_reference else program)

    return Compiler(name, f"{major}.{minor}", run)


@lru_cache
def nvrtc() -> Compiler:
    """CUDA's run-time compiler; PyTorch's wheels for CUDA include it."""
    options = ("--gpu-architecture={}", "--std=c++17")
    # On all cores: 2.9 s in place of 6.5 (16 cores of an Intel Xeon, CUDA 13.0, 2026-11-29).
    parallel = (13, "--split-compile=0")
    return _run_time_compiler(
        "nvrtc", "cuda.bindings.nvrtc", options, "CUBIN", by_reference=False, since=parallel
    )


@lru_cache
def hiprtc() -> Compiler:
    """ROCm's run-time compiler, for machines without ROCm's clang."""
    options = ("--offload-arch={}", "-std=c++17", "-O3")
    return _run_time_compiler("hiprtc", "hip.hiprtc", options, "Code", by_reference=True)


#: Compilers by vendor, the first choice first. The tests read the output of ROCm's clang.
FINDERS: dict[str, tuple[Callable[[], Compiler], ...]] = {
    "cuda": (nvrtc, nvcc),
    "hip": (clang, hiprtc),
}
REMEDIES = {
    "cuda": "Install nvrtc, with cuda-bindings of the same major version, or the CUDA toolkit",
    "hip": "Install ROCm's compiler, or clang-19 and lld-19 of the distribution",
}
