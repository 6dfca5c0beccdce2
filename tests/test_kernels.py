"""The kernels without a GPU: they compile, their instructions are read, their code runs on a CPU.

Compilers that a user's machine may lack (``tests/toolchain.sh`` installs them): clang-19 and
lld-19, nvcc, nvrtc. Without one its tests are skipped; where ``CI`` is set they fail.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import torch
from programs import Program

from ficco import warn
from ficco.errors import BackendError
from ficco.hip_kernels import build, launch
from ficco.hip_kernels.build import Compiler, CompilerNotFound, Target
from ficco.hip_kernels.launch import Kernels, Script, ScriptStep, Signals

ON_HOST = Path(__file__).parent / "kernels_on_host"
HALVES = (torch.bfloat16, torch.float16)


def missing(what: object) -> NoReturn:
    """Skip the test, or fail in CI."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(
        f"{what}: tests/toolchain.sh installs it"
    )


def compiler(finder: Callable[[], Compiler]) -> Compiler:
    """A compiler that the test is about."""
    try:
        return finder()
    except CompilerNotFound as error:
        missing(error)


def output(*command: str) -> str:
    """What a command prints; it must succeed."""
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout + found.stderr


# The instructions for AMD.

COPIES = ("ficco_copy_aligned", "ficco_copy_shifted")
EXCHANGES = ("ficco_exchange_aligned", "ficco_exchange_shifted")
REDUCTIONS = tuple(name for name in launch.NAMES if "reduce" in name)
ONE_SHOTS = tuple(name for name in launch.NAMES if "one_shot" in name)
#: A 16-byte access of every lane.
LOAD, STORE = "global_load_dwordx4", "global_store_dwordx4"


@pytest.fixture(scope="module", params=["gfx90a", "gfx942"])
def isa(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An architecture, and the kernels in its assembly language."""
    compiler(build.clang)
    source = str(build.HERE / "kernels.cpp")
    arch = f"--offload-arch={request.param}"
    program = build.clang_program()
    text = output(program, *build.CLANG, "-Wall", "-Werror", arch, "-S", source, "-o", "-")
    return request.param, text


def body(text: str, kernel: str) -> list[str]:
    """The instructions of a kernel, without blanks and comments."""
    found = re.search(rf"^{kernel}:.*?^\.Lfunc_end", text, re.M | re.S)
    assert found, kernel
    lines = (line.split(";")[0].strip() for line in found[0].splitlines()[1:])
    return [re.sub(r"\s+", " ", line) for line in lines if line and not line.startswith(".")]


def places(lines: Sequence[str], pattern: str) -> list[int]:
    return [index for index, line in enumerate(lines) if re.match(pattern, line)]


def test_amd_every_kernel_is_there_and_spills_nothing(isa: tuple[str, str]) -> None:
    _, text = isa
    for name in launch.NAMES:
        assert "s_endpgm" in body(text, name)
    for key in ("private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count"):
        assert re.findall(rf"\.{key}: +(\d+)", text) == ["0"] * len(launch.NAMES)
    # Nor does anything go through an address space that is found out while it runs.
    assert not re.search(r"\b(scratch_|flat_|buffer_)(load|store)", text)


def test_amd_copy_is_by_16_bytes_with_several_in_flight(isa: tuple[str, str]) -> None:
    _, text = isa
    lines = body(text, "ficco_copy_aligned")
    loads, stores = places(lines, LOAD), places(lines, STORE)
    assert len(loads) == len(stores) == 8
    assert max(loads) < min(stores)
    waits = places(lines[loads[0] : loads[-1]], r"s_waitcnt.*vmcnt")
    assert waits == [], "it waits for one load before it issues the next"


def test_amd_shifted_copy_is_by_16_bytes_but_at_the_ends_of_rows(isa: tuple[str, str]) -> None:
    _, text = isa
    lines = body(text, "ficco_copy_shifted")
    loads, stores = places(lines, LOAD), places(lines, STORE)
    assert len(loads) == 8 and len(stores) == 4
    assert max(loads) < min(stores)
    assert not places(lines, r"global_load_(u?byte|u?short|dword )"), "a load of less than a unit"
    assert places(lines, "global_store_byte")


def test_amd_reduction_is_by_16_bytes(isa: tuple[str, str]) -> None:
    _, text = isa
    for name in REDUCTIONS:
        lines = body(text, name)
        loads = places(lines, LOAD)
        assert len(loads) >= 4 and places(lines, STORE), name
        # Those of four parts are in flight together.
        assert places(lines[loads[0] : loads[3]], r"s_waitcnt.*vmcnt") == [], name


def test_amd_post_releases_to_the_system(isa: tuple[str, str]) -> None:
    """Write the L2 back, wait for that, then the word."""
    arch, text = isa
    lines = body(text, "ficco_post")
    scope = " sc0 sc1" if arch == "gfx942" else ""
    (back,) = places(lines, rf"buffer_wbl2{scope}$")
    (word,) = places(lines, rf"global_store_dword v.*off{scope}$")
    assert back < word
    assert places(lines[back:word], r"s_waitcnt.*vmcnt\(0\)")


def test_amd_wait_acquires_from_the_system(isa: tuple[str, str]) -> None:
    """Read past all caches while it spins, then drop what they hold, as the last thing."""
    arch, text = isa
    lines = body(text, "ficco_wait")
    scope = {"gfx942": " sc0 sc1", "gfx90a": " glc"}[arch]
    polls = places(lines, rf"global_load_dword v\d+, v\[[0-9:]+\], off{scope}$")
    assert polls
    dropped = places(lines, r"buffer_inv sc0 sc1$" if arch == "gfx942" else r"buffer_invl2$")
    assert dropped and min(dropped) > max(polls)
    assert places(lines[max(polls) : dropped[0]], r"s_waitcnt.*vmcnt\(0\)")
    assert places(lines, "s_memrealtime") and places(lines, "s_sleep")
    # The word about the deadline must reach the host, too.
    assert places(
        lines, rf"global_store_dword v\d+, v\d+, s.*{'sc0 sc1' if scope[1] == 's' else ''}"
    )


def test_amd_copy_to_a_peer_ends_with_a_release(isa: tuple[str, str]) -> None:
    """All waves have stored, then one writes the L2 back and waits for that."""
    arch, text = isa
    for name in COPIES:
        lines = body(text, name)
        (meet,) = places(lines, "s_barrier")
        last = max(places(lines[:meet], "global_store"))
        assert places(lines[last:meet], r"s_waitcnt.*vmcnt\(0\)")
        (back,) = places(lines, "buffer_wbl2" + (" sc0 sc1$" if arch == "gfx942" else "$"))
        assert meet < back < len(lines) - 2
        assert places(lines[back:], r"s_waitcnt.*vmcnt\(0\)")


def test_amd_exchange_is_ordered(isa: tuple[str, str]) -> None:
    """A block has stored before it is counted; what it clears is seen before what it posts; and
    what it has waited for is read anew."""
    arch, text = isa
    scope = " sc0 sc1" if arch == "gfx942" else ""
    for name in EXCHANGES:
        lines = body(text, name)
        begun, meet = places(lines, "s_barrier")
        last = max(places(lines[:meet], "global_store_(dwordx4|byte)"))
        assert places(lines[last:meet], r"s_waitcnt.*vmcnt\(0\)")
        assert begun < min(places(lines, "global_store_(dwordx4|byte)"))
        told, copied, cleared = places(lines, rf"buffer_wbl2{scope}$")
        (counted,) = places(lines, "global_atomic_add")
        assert told < begun < meet < copied < counted < cleared
        assert places(lines[copied:counted], r"s_waitcnt.*vmcnt\(0\)")
        dropped = places(lines, r"buffer_inv sc0 sc1$" if scope else r"buffer_invl2$")
        polls = places(lines, rf"global_load_dword v.*{scope or ' glc'}$")
        for first, end in ((0, begun), (counted, len(lines))):
            waits = [poll for poll in polls if first < poll < end]
            seen = [drop for drop in dropped if first < drop < end]
            assert waits and max(waits) < max(seen)


def test_amd_sum_at_the_peers_is_by_16_bytes_behind_what_is_waited_for(
    isa: tuple[str, str],
) -> None:
    """Four units of each of two parts are in flight; what was waited for is read anew; and the
    last block is counted behind them."""
    arch, text = isa
    scope = " sc0 sc1" if arch == "gfx942" else ""
    for name in ONE_SHOTS:
        lines = body(text, name)
        meet, through = places(lines, "s_barrier")
        loads = places(lines, LOAD)
        together = [at for at in loads if at < loads[0] + 200][:8]
        assert places(lines[together[0] : together[-1]], r"s_waitcnt.*vmcnt") == [], name
        assert meet < min(loads) and max(loads) < through and places(lines, STORE)
        polls = places(lines[:meet], rf"global_load_dword v.*{scope or ' glc'}$")
        dropped = places(lines[:meet], r"buffer_inv sc0 sc1$" if scope else r"buffer_invl2$")
        assert polls and min(polls) < min(dropped) and max(polls) < max(dropped)
        (counted,) = places(lines, "global_atomic_add")
        assert through < counted < max(places(lines, rf"global_store_dword(x2)? v.*{scope}$"))


def test_amd_script_tells_behind_what_came_before(isa: tuple[str, str]) -> None:
    arch, text = isa
    scope = " sc0 sc1" if arch == "gfx942" else ""
    lines = body(text, "ficco_script")
    (back,) = places(lines, rf"buffer_wbl2{scope}$")
    words = places(lines, rf"global_store_dword(x2)? v.*{scope}$")
    *aside, one, other = words
    assert aside and max(aside) < back < one < other
    assert places(lines[back:one], r"s_waitcnt.*vmcnt\(0\)")


@pytest.mark.parametrize(
    ("arch", "number"), [("gfx90a", 0x3F), ("gfx942", 0x4C), ("gfx942:sramecc+:xnack-", 0x4C)]
)
def test_amd_code_object(arch: str, number: int) -> None:
    """What the driver is given: an ELF file for that processor, with all kernels."""
    image = compiler(build.clang).run(build.source(), arch)
    assert image[:4] == b"\x7fELF"
    assert int.from_bytes(image[18:20], "little") == 224  # EM_AMDGPU
    assert image[48] == number  # EF_AMDGPU_MACH
    for name in launch.NAMES:
        assert name.encode() + b".kd\0" in image


# The instructions for NVIDIA.


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler(build.nvcc)
    source, path = str(build.HERE / "kernels.cpp"), tmp_path_factory.mktemp("ptx") / "kernels.ptx"
    output(
        build.nvcc_program(),
        *build.NVCC,
        "-ptx",
        "-arch=sm_90",
        "-Werror=all-warnings",
        source,
        "-o",
        str(path),
    )
    return path.read_text()


def entry(text: str, kernel: str) -> list[str]:
    found = re.search(rf"\.entry {kernel}\(.*?^\}}", text, re.M | re.S)
    assert found, kernel
    return [re.sub(r"\s+", " ", line.strip()) for line in found[0].splitlines()]


def test_nvidia_accesses_are_by_16_bytes(ptx: str) -> None:
    for name, each in zip(COPIES, (8, 4), strict=True):
        lines = entry(ptx, name)
        loads, stores = places(lines, r"ld\.global\.v4\."), places(lines, r"st\.global\.v4\.")
        assert len(loads) == 8 and len(stores) == each and max(loads) < min(stores)
    for name in REDUCTIONS:
        lines = entry(ptx, name)
        assert len(places(lines, r"ld\.global\.v4\.")) >= 4, name
        assert places(lines, r"st\.global\.v4\."), name


def test_nvidia_signals_are_ordered_for_the_system(ptx: str) -> None:
    post, wait = entry(ptx, "ficco_post"), entry(ptx, "ficco_wait")
    (fence,) = places(post, r"membar\.sys|fence\.(sc|acq_rel)\.sys")
    (word,) = places(post, r"st\.relaxed\.sys")
    assert fence < word
    (fence,) = places(wait, r"membar\.sys|fence\.(sc|acq_rel)\.sys")
    assert fence > max(places(wait, r"ld\.relaxed\.sys"))
    assert any("globaltimer" in line for line in wait)


def test_nvidia_exchange_is_ordered(ptx: str) -> None:
    for name in EXCHANGES:
        lines = entry(ptx, name)
        begun, meet = places(lines, r"(bar|barrier)\.(cta\.)?sync")
        (counted,) = places(lines, r"atom\..*add")
        told, copied, seen, cleared = places(lines, r"fence\.acq_rel\.(sys|gpu)")
        assert [lines[at][-4:] for at in (told, copied, seen, cleared)] == [
            "sys;", "sys;", "gpu;", "sys;"
        ]  # fmt: skip
        stores = places(lines, r"st\.global\.v4\.")
        assert told < begun < min(stores) <= max(stores) < meet < copied < counted < seen < cleared
        waited, last = places(lines, r"ld\.acquire\.sys")
        assert waited < begun and seen < last and not places(lines, r"ld\.relaxed\.sys")


def test_nvidia_sum_at_the_peers_is_ordered(ptx: str) -> None:
    """Each block reads the parts behind what it has waited for, and is counted behind that."""
    for name in ONE_SHOTS:
        lines = entry(ptx, name)
        loads, stores = places(lines, r"ld\.global\.v4\."), places(lines, r"st\.global\.v4\.")
        meet, through = places(lines, r"(bar|barrier)\.(cta\.)?sync")
        assert meet < min(loads) <= max(stores) < through, name
        assert len(places(lines[:meet], r"ld\.acquire\.sys")) == 1
        assert not places(lines, r"ld\.relaxed\.sys")
        (counted,) = places(lines, r"atom\..*add")
        own, others = places(lines, r"fence\.acq_rel\.gpu")
        assert through < own < counted < others < max(places(lines, r"st\.relaxed\.sys"))


def test_nvidia_script_is_ordered(ptx: str) -> None:
    lines = entry(ptx, "ficco_script")
    (seen,) = places(lines, r"ld\.acquire\.sys")
    (fence,) = places(lines, r"fence\.acq_rel\.sys")
    words = places(lines, r"st\.relaxed\.sys\.global\.u(32|64)")
    *aside, one, other = words
    assert aside and max(aside) < seen and fence < one < other
    assert not places(lines, r"ld\.relaxed\.sys")
    # It polls by what acquires, in a loop of its own.
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    ends = [(at, re.search(r"bra(?:\.uni)? (\S+);", line)) for at, line in enumerate(lines)]
    loops = [(labels[found[1]], at) for at, found in ends if found and labels[found[1]] < at]
    assert any(begin < seen < end and end - begin < 10 for begin, end in loops)


def test_nvidia_nothing_is_spilt(tmp_path: Path) -> None:
    compiler(build.nvcc)
    source, image = str(build.HERE / "kernels.cpp"), str(tmp_path / "kernels.cubin")
    log = output(
        build.nvcc_program(),
        *build.NVCC,
        "-cubin",
        "-arch=sm_90",
        "-Xptxas",
        "-v",
        source,
        "-o",
        image,
    )
    clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert log.count("bytes stack frame") == log.count(clean) == len(launch.NAMES)


@pytest.mark.parametrize("finder", [build.nvcc, build.nvrtc])
def test_nvidia_code(finder: Callable[[], Compiler]) -> None:
    image = compiler(finder).run(build.source(), "sm_90")
    assert image[:4] == b"\x7fELF"
    assert int.from_bytes(image[18:20], "little") == 190  # EM_CUDA
    for name in launch.NAMES:
        assert name.encode() in image


@pytest.mark.parametrize("finder", [build.nvcc, build.nvrtc, build.clang])
def test_a_compiler_says_what_it_dislikes(finder: Callable[[], Compiler]) -> None:
    arch = "gfx942" if finder is build.clang else "sm_90"
    with pytest.raises(BackendError, match="undeclared|undefined") as caught:
        compiler(finder).run(build.source() + "\nKERNEL(64) worse() { nothing(); }\n", arch)
    assert caught.value.call and caught.value.code


# The run-time compiler of ROCm, by the real binding against a double.

WITH_HIPRTC = """
from ficco.errors import BackendError
from ficco.hip_kernels import build

compiler = build.hiprtc()
assert compiler.version == "9.1"
code = compiler.run("text", "gfx942:xnack-")
assert code == b"text --offload-arch=gfx942:xnack- -std=c++17 -O3", code
try:
    compiler.run("to be refused", "gfx942")
except BackendError as error:
    assert error.call == "hiprtcCompileProgram" and error.code == "HIPRTC_ERROR_COMPILATION", error
    assert error.text == "line 1: refused"
else:
    raise AssertionError("it compiled")
"""


@pytest.fixture(params=["7", "10"])
def hip_python(request: pytest.FixtureRequest) -> Path:
    """The folder of a series of the binding."""
    folder = build.HERE.parents[1] / "build" / "hip-python" / request.param
    return folder if (folder / "hip").is_dir() else missing(f"hip-python {request.param}")


def with_hip(folder: Path, library: Path, program: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(build.HERE.parents[1])]),
        "LD_LIBRARY_PATH": str(library),
        "ROCM_PATH": "/nowhere",
    }
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_hiprtc(hip_python: Path, tmp_path: Path) -> None:
    double = str(tmp_path / "libhiprtc.so")
    output("g++", "-x", "c", "-shared", "-fPIC", "-o", double, str(ON_HOST / "hiprtc.c"))
    found = with_hip(hip_python, tmp_path, WITH_HIPRTC)
    assert found.returncode == 0 and "leaked" not in found.stderr, found.stderr


def test_without_rocm(hip_python: Path, tmp_path: Path) -> None:
    """The binding is there, its library is not."""
    program = (
        "from ficco.hip_kernels import build\n"
        "try:\n"
        "    build.hiprtc()\n"
        "except build.CompilerNotFound as error:\n"
        "    assert 'libhiprtc.so' in str(error) and '\\n' not in str(error), error\n"
        "else:\n"
        "    raise AssertionError('found')\n"
    )
    found = with_hip(hip_python, tmp_path, program)
    assert found.returncode == 0, found.stderr


# Their code on a CPU, through the launches of a GPU.


class HostBinding:
    """A device with one thread after the other."""

    target = Target("host", "cpu")
    processors = 2
    ticks_per_s = 1e9

    def __init__(self) -> None:
        self.launches: list[tuple[str, int]] = []

    def load(self, image: bytes, names: Sequence[str]) -> Mapping[str, Any]:
        path = Path(os.environ["FICCO_CACHE_DIR"]) / "on_host.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
        self.library = ctypes.CDLL(str(path))
        return {name: getattr(self.library, name) for name in names}

    def launch(self, kernel: Any, blocks: int, threads: int, arguments: Any, stream: Any) -> None:
        self.launches.append((kernel.__name__, blocks))
        if any(name in kernel.__name__ for name in ("cast", "route")):  # whose threads meet
            return self.together(kernel, blocks, threads, arguments)
        for block in range(blocks):
            for thread in range(threads):
                self.library.become(block, thread)
                kernel(*arguments.arguments)

    def together(self, kernel: Any, blocks: int, threads: int, arguments: Any) -> None:
        """All threads of a block at a time."""

        def run(block: int, thread: int) -> None:
            self.library.become(block, thread)
            kernel(*arguments.arguments)

        self.library.meet(threads)
        for block in range(blocks):
            each = [threading.Thread(target=run, args=(block, i)) for i in range(threads)]
            for one in each:
                one.start()
            for one in each:
                one.join()
        self.library.meet(0)


def for_this_cpu() -> Compiler:
    def run(text: str, arch: str) -> bytes:
        arguments = ["-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
        return build._compile_with("g++", arguments, text)

    return Compiler("g++", "any", run)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    header = (ON_HOST / "device.h").read_text()
    kernels = (build.HERE / "kernels.cpp").read_text().replace('#include "device.h"\n', header)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "source", lambda: kernels)
        patch.setitem(build.FINDERS, "host", (for_this_cpu,))
        patch.setenv("FICCO_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield Kernels(HostBinding())


def area(nbytes: int, seed: int, device: str = "cpu") -> torch.Tensor:
    """Random bytes that begin at a multiple of 16."""
    random = torch.Generator().manual_seed(seed)
    room = torch.randint(0, 256, (nbytes + 16,), dtype=torch.uint8, generator=random).to(device)
    return room[-room.data_ptr() % 16 :][:nbytes]


#: Where rows begin, their pitches, width and height: (dst, its pitch, src, its pitch, w, h).
RECTANGLES = [
    (0, 64, 0, 64, 64, 3),  # in one piece
    (0, 512, 0, 256, 256, 5),  # aligned rows
    (0, 512, 16, 272, 250, 5),  # aligned, with a tail
    (5, 512, 21, 272, 250, 5),  # with a head and a tail
    (15, 64, 15, 64, 31, 4),  # the head, and one unit
    (15, 64, 15, 64, 30, 4),  # shorter than that
    (0, 64, 0, 64, 0, 4),
    (0, 64, 0, 64, 64, 0),
    (8, 72, 16, 40, 40, 7),  # by 8
    (4, 72, 16, 40, 38, 7),
    (2, 34, 0, 30, 30, 9),  # by 2: odd matrices of half precision
    (1, 31, 0, 37, 29, 9),
    (3, 17, 3, 17, 1, 9),  # a column
    (6, 9999, 6, 12345, 9001, 2),  # one piece of work for each of several blocks
    (7, 100, 23, 200, 70000, 1),  # pitches of a single row mean nothing
    (16, 16, 0, 16, 16, 1500),  # more rows than a block has threads
    (1, 18, 1, 18, 17, 1500),
]


def rectangle(
    kernels: Kernels,
    shape: tuple[int, ...],
    device: str = "cpu",
    stream: Any = None,
    blocks: int = launch.PEER_BLOCKS,
) -> None:
    """Copy within random bytes, and compare all of them with what should be there."""
    to, dst_pitch, at, src_pitch, width, height = shape
    dst = area(to + max(1, height) * max(width, dst_pitch) + 32, 1, device)
    src = area(at + max(1, height) * max(width, src_pitch) + 32, 2, device)
    wanted = dst.clone()
    for row in range(height):
        first, begin = to + row * dst_pitch, at + row * src_pitch
        wanted[first : first + width] = src[begin : begin + width]
    ends = ((dst.data_ptr() + to, src.data_ptr() + at),)
    kernels.copies(ends, (dst_pitch, src_pitch, width, height), stream, blocks)
    assert torch.equal(dst, wanted), shape


@pytest.mark.parametrize("shape", RECTANGLES)
def test_copies_are_exact(on_host: Kernels, shape: tuple[int, ...]) -> None:
    rectangle(on_host, shape)


def test_copy_takes_the_blocks_that_it_is_given(on_host: Kernels) -> None:
    launches = on_host.binding.launches
    for blocks, taken in ((1, 1), (3, 3), (64, 10)):
        launches.clear()
        rectangle(on_host, (0, 80, 0, 80, 80, 1000), blocks=blocks)
        assert launches == [("ficco_copy_aligned", taken)]


class Area(NamedTuple):
    """What is copied to several places, and where it should lie."""

    src: torch.Tensor
    dst: torch.Tensor
    wanted: torch.Tensor
    ends: tuple[tuple[int, int], ...]


def in_places(places: int, height: int, src_pitch: int = 224, apart: int = 0) -> Area:
    """Rows of 200 bytes, so many in each place, with a pitch of 224 there; places begin ``apart``
    further from each other than what they get does."""
    width, pitch, room = 200, 224, height * 224 + 16
    dst, src = area(places * (room + apart), 1), area(places * room, 2)
    wanted, ends = dst.clone(), []
    for place in range(places):
        to, at = place * (room + apart), place * room
        for row in range(height):
            there, here = to + row * pitch, at + row * src_pitch
            wanted[there : there + width] = src[here : here + width]
        ends.append((dst.data_ptr() + to, src.data_ptr() + at))
    return Area(src, dst, wanted, tuple(ends))


@pytest.mark.parametrize("peers", [1, 2, 3, launch.MAX_ENDS, launch.MAX_ENDS + 1])
@pytest.mark.parametrize(
    ("src_pitch", "apart", "alike"),
    [(224, 0, True), (200, 1, True), (224, 1, False)],
    ids=["aligned", "shifted", "of both kinds"],
)
def test_copies_to_several_places(
    on_host: Kernels, peers: int, src_pitch: int, apart: int, alike: bool
) -> None:
    """By one launch where it can be, with blocks of their own."""
    found = in_places(peers, 9, src_pitch, apart)
    launches = on_host.binding.launches
    launches.clear()
    on_host.copies(found.ends, (224, src_pitch, 200, 9), None, 2)
    assert torch.equal(found.dst, found.wanted)
    together = peers <= launch.MAX_ENDS and (alike or peers == 1)
    assert len(launches) == (1 if together else peers)
    if together:
        ((_, blocks),) = launches
        assert blocks == peers


def seen_to(words: torch.Tensor, front: int = 0, rear: int = 0) -> Signals:
    """The first word counts, two are written to 7 and three to 9 behind all; in front so many are
    waited for from the sixth on, and behind from the twelfth on, to be 5."""
    at = [words.data_ptr() + 4 * i for i in range(len(words))]
    awaited = [
        ScriptStep(word, 5, waits=True) for word in (*at[6 : 6 + front], *at[12 : 12 + rear])
    ]
    cleared = [ScriptStep(word, 7) for word in at[1:3]]
    posted = [ScriptStep(word, 9, behind=word == at[3]) for word in at[3:6]]
    script = Script((*cleared, *posted, *awaited[front:]))
    return Signals(at[0], Script(tuple(awaited[:front])), script)


@pytest.mark.parametrize("apart", [0, 1])
def test_signals_come_behind_all_copies(on_host: Kernels, apart: int) -> None:
    """Whatever the order of the blocks; and the word that counts them is 0 again."""
    found, words = in_places(3, 600, apart=apart), torch.zeros(16, dtype=torch.int32)
    signals = seen_to(words)
    launches = on_host._prepare(found.ends, (224, 224, 200, 600), 2, True, signals)
    assert len(launches) == (3 if apart else 1)
    for turn in range(2):
        for number, (kernel, blocks, threads, arguments) in enumerate(launches):
            for block in random.Random(turn).sample(range(blocks), blocks):
                assert not words[1:].any()
                for thread in range(threads):
                    on_host.binding.library.become(block, thread)
                    kernel(*arguments.arguments)
            last = number == len(launches) - 1
            assert bool(words[1:].any()) == last
        assert torch.equal(found.dst, found.wanted)
        assert words.tolist() == [0, 7, 7, 9, 9, 9] + 10 * [0]
        words.zero_()


def test_a_launch_waits_for_signals(on_host: Kernels) -> None:
    """Once it has posted its own."""
    found, words, said = in_places(3, 600), torch.zeros(16, dtype=torch.int32), []
    signals = seen_to(words, rear=2)

    def peer() -> None:
        until(lambda: bool(words[5]))
        for word in (12, 13):
            time.sleep(0.05)
            said.append(words.tolist()[:6] + words.tolist()[12:14])
            words[word] = 5

    thread = threading.Thread(target=peer)
    thread.start()
    began = time.monotonic()
    on_host.copies(found.ends, (224, 224, 200, 600), None, 2, signals)
    assert time.monotonic() - began >= 0.1
    thread.join()
    assert said == [[0, 7, 7, 9, 9, 9, 0, 0], [0, 7, 7, 9, 9, 9, 5, 0]]
    assert torch.equal(found.dst, found.wanted)


@pytest.mark.parametrize("apart", [0, 1])
def test_no_block_copies_before_what_is_in_front_is_there(on_host: Kernels, apart: int) -> None:
    """Of several launches the first waits, for all of them."""
    found, words = in_places(3, 600, apart=apart), torch.zeros(16, dtype=torch.int32)
    before, said = found.dst.clone(), []
    signals = seen_to(words, front=2)
    kernel, blocks, threads, arguments = on_host._prepare(
        found.ends, (224, 224, 200, 600), 2, True, signals
    )[0]

    def peer() -> None:
        for word in (7, 6):
            time.sleep(0.03)
            said.append(torch.equal(found.dst, before))
            words[word] = 5

    for block in range(blocks):
        found.dst.copy_(before)
        words.zero_()
        said.clear()
        thread = threading.Thread(target=peer)
        thread.start()
        for at in range(threads):
            on_host.binding.library.become(block, at)
            kernel(*arguments.arguments)
        thread.join()
        assert said == [True, True] and not torch.equal(found.dst, before)
        assert words.tolist() == [1, 0, 0, 0, 0, 0, 5, 5] + 8 * [0]


def test_copies_stay_within_the_pages_that_hold_their_rows(on_host: Kernels) -> None:
    """Behind and in front of these pages nothing can be touched: that would end the process."""
    page = mmap.PAGESIZE
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    rooms = [mmap.mmap(-1, 3 * page) for _ in range(2)]
    starts = []
    for room in rooms:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(room))
        room[page : 2 * page] = random.Random(1).randbytes(page)
        assert protect(begin, page, 0) == protect(begin + 2 * page, page, 0) == 0
        starts.append(begin + page)
    (to, _), (at, held) = zip(starts, rooms, strict=True)
    for width in (1, 15, 16, 17, 33, 100):
        for to_gap, at_gap in itertools.product((0, 1, 8, 15), repeat=2):
            # From the first byte on, and up to the last.
            for first, begin in ((to_gap, at_gap), (page - width - to_gap, page - width - at_gap)):
                on_host.copies(((to + first, at + begin),), (width, width, width, 1), None)
                found = ctypes.string_at(to + first, width)
                assert found == held[page + begin : page + begin + width], (width, first, begin)
    for start in starts:
        assert protect(start - page, 3 * page, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("limit", [64, 1000])
def test_a_copy_too_large_for_one_launch(
    on_host: Kernels, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_UNITS", limit)
    on_host._copies.cache_clear()
    for shape in RECTANGLES[:14]:
        rectangle(on_host, shape)
    on_host._copies.cache_clear()


def test_strips_copy_each_byte_once_by_units_that_addresses_divide() -> None:
    for to, dst_pitch, at, src_pitch, width, height in RECTANGLES:
        for shift in range(16):
            touched: list[int] = []
            for strip in launch.strips(to + shift, at, (dst_pitch, src_pitch, width, height)):
                for row in range(strip.height):
                    ends = (strip.dst + row * dst_pitch, strip.src + row * src_pitch)
                    first, last = ends[0], ends[0] + strip.width
                    if strip.aligned:
                        assert all((end + strip.head) % 16 == 0 for end in ends)
                        assert 0 <= strip.width - strip.head - 16 * strip.units < 16
                    else:
                        assert len(range(first // 16, -(-last // 16))) <= strip.units
                    touched += range(first, last)
            rows = (
                range(to + shift + row * dst_pitch, to + shift + row * dst_pitch + width)
                for row in range(height)
            )
            assert sorted(touched) == sorted(at for row in rows for at in row)


def test_aligned_rows_go_by_16_bytes_at_both_ends() -> None:
    for shift in (0, 2, 8, 13):
        for pitch in (4096, 4112):
            (strip,) = launch.strips(shift, shift + 160, (4096, pitch, 4000, 20))
            assert strip.aligned and strip.units >= 248


def test_division_is_exact() -> None:
    numbers = [1, 2, 3, 5, 7, 10, 641, 4095, 4096, 4097, 65537, (1 << 30) - 1, 1 << 30]
    for units in numbers:
        magic, shift = launch.divisor(units)
        assert magic < 1 << 32
        ends = {0, 1, units - 1, units, units + 1, (1 << 31) - 1, (1 << 31) // units * units - 1}
        for i in ends | {k * units - 1 for k in (2, 3, 1000)} | {k * units for k in (2, 3, 1000)}:
            if 0 <= i < 1 << 31:
                assert i * magic >> shift == i // units, (i, units)


def check_place(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    for dtype in (*HALVES, torch.float32, torch.float64, torch.uint8):
        whole = torch.arange(31 * 57, device=device).view(31, 57).remainder(251).to(dtype)
        target = torch.zeros(64, 91, dtype=dtype, device=device)
        for rows, cols in ((slice(None), slice(None)), (slice(3, 20), slice(7, 40))):
            src = whole[rows, cols]
            dst = target[5 : 5 + src.shape[0], 11 : 11 + src.shape[1]]
            wanted = target.clone()
            wanted[5 : 5 + src.shape[0], 11 : 11 + src.shape[1]] = src
            kernels.place(dst, src, stream)
            assert torch.equal(target, wanted)
        solid = torch.zeros(31 * 57, dtype=dtype, device=device).view(3, 19, 31)
        kernels.place(solid, whole.view(3, 19, 31), stream)
        assert torch.equal(solid.view(31, 57), whole)


def in_order(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum as it is defined: one addition after the other in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)


def at_peers(kernels: Kernels, arrived: int) -> Callable[..., None]:
    """A sum at the peers for which nothing has to be waited for."""

    def reduce(out: torch.Tensor, parts: Sequence[torch.Tensor], stream: Any) -> None:
        kernels.one_shot(out, parts, Signals(arrived), stream)

    return reduce


def check_reduce(
    reduce: Callable[..., None],
    device: str = "cpu",
    stream: Any = None,
    kinds: Iterable[tuple[torch.dtype, torch.dtype]] = launch.REDUCTIONS,
) -> None:
    torch.manual_seed(3)
    for part, out in kinds:
        for count in (1, 2, 4, 7, 16):
            for elements, skip in ((0, 0), (1, 0), (8, 0), (1003, 0), (1000, 1)):
                # Of sizes far apart, so that another order, or a second rounding, shows.
                parts = [
                    (torch.randn(elements + skip, device=device) * 2.0 ** (5 * (p % 3) - 3)).to(
                        part
                    )[skip:]
                    for p in range(count)
                ]
                found = torch.full((elements + skip,), 7.0, dtype=out, device=device)[skip:]
                reduce(found, parts, stream)
                assert torch.equal(found, in_order(parts, out)), (part, out, count, elements)
            # Columns of a matrix: by vectors, by elements, and from an odd place on.
            for rows, first, last, pitch in ((5, 8, 40, 64), (3, 8, 13, 64), (4, 1, 17, 31)):
                whole = [
                    (torch.randn(rows, pitch, device=device) * 2.0 ** (5 * (p % 3) - 3)).to(part)
                    for p in range(count)
                ]
                parts = [matrix[:, first:last] for matrix in whole]
                for wider in (0, 16):  # the result's rows may lie further apart
                    total = torch.full((rows, pitch + wider), 7.0, dtype=out, device=device)
                    wanted = total.clone()
                    reduce(total[:, first:last], parts, stream)
                    wanted[:, first:last] = in_order(parts, out)
                    assert torch.equal(total, wanted), (part, out, count, first, last, wider)


def check_merge(merge: Callable[..., None], device: str = "cpu", stream: Any = None) -> None:
    """Against float64, to the rounding of the result; a single part and equal ones exactly. Parts
    have all rows, or each its own, the first of them all."""
    torch.manual_seed(4)
    for dtype, apart in itertools.product(launch.MERGES, (False, True)):
        for count, (batch, heads, rows, size) in itertools.product(
            (1, 2, 3, 5, 16), ((1, 1, 1, 8), (2, 3, 5, 64), (1, 4, 7, 128), (1, 2, 0, 8))
        ):
            shape = batch, rows, heads, size
            spans = [(i % 4, rows - i % 3) if apart else (0, rows) for i in range(count)]
            spans = [(first, last) if first < last else (0, rows) for first, last in spans]
            made = [torch.randn(shape, device=device).to(dtype) for _ in range(count)]
            means = [
                one.transpose(1, 2) if i % 2 else one.transpose(1, 2).contiguous()
                for i, one in enumerate(made)
            ]
            lses = [40 * torch.randn(batch, heads, rows, device=device) for _ in range(count)]
            if count == 3:  # strided, and far apart
                lses = [torch.stack([one, one], -1)[..., 0] * 100 for one in lses]
            parts = [
                (first, last, mean[:, :, first:last], lse[:, :, first:last])
                for (first, last), mean, lse in zip(spans, means, lses, strict=True)
            ]
            out = torch.full(shape, 7.0, dtype=dtype, device=device).transpose(1, 2)
            total = torch.full((batch, rows, heads), 7.0, device=device).transpose(1, 2)
            merge(out, total, parts, stream)
            wide = torch.stack(lses).double()
            for one, (first, last) in zip(wide, spans, strict=True):
                one[:, :, :first] = one[:, :, last:] = -torch.inf
            weights = (wide - wide.logsumexp(0)).exp().unsqueeze(-1)
            wanted = (torch.stack(means).double() * weights).sum(0)
            eps = torch.finfo(dtype).eps
            assert ((out.double() - wanted).abs() <= 0.6 * eps * wanted.abs() + 1e-5).all()
            assert torch.allclose(total.double(), wide.logsumexp(0), rtol=1e-6, atol=1e-5)
            again = torch.full(shape, 7.0, dtype=dtype, device=device).transpose(1, 2)
            merge(again, None, [(0, rows, means[0], lses[0])] * count, stream)
            if count & count - 1 == 0:
                assert torch.equal(again, means[0])


def check_combine(combine: Callable[..., None], device: str = "cpu", stream: Any = None) -> None:
    """Whole numbers exactly; others as PyTorch's operations, up to an ulp of float32."""
    for dtype, choices, (tokens, rows, cols) in itertools.product(
        launch.COMBINES, (0, 1, 2, 3, 8), ((1, 1, 8), (33, 100, 24), (257, 40, 4096), (0, 3, 8))
    ):
        torch.manual_seed(choices)
        table = torch.randint(-8, 9, (rows, cols), device=device).to(dtype)
        picked = torch.randint(rows, (choices, tokens), device=device).t()
        weights = torch.randint(-4, 5, (tokens, choices), device=device) / 4
        for one, some in itertools.product((picked, picked.contiguous()), (None, weights)):
            out = torch.full((tokens, cols), 7.0, dtype=dtype, device=device)
            combine(out, table, one, some, stream)
            picks = table.double()[one] * (1 if some is None else some.double()[..., None])
            assert torch.equal(out, picks.sum(1).to(dtype))
        table = torch.randn(rows, cols, device=device).to(dtype)
        weights = torch.randn(tokens, choices, device=device)
        combine(out, table, picked, weights, stream)
        wanted = (table.double()[picked] * weights.double()[..., None]).sum(1)
        most = (table.double()[picked] * weights.double()[..., None]).abs().sum(1)
        eps, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
        assert ((out.double() - wanted).abs() <= eps * (most + least)).all()


def check_gate(gate: Callable[..., None], device: str = "cpu", stream: Any = None) -> None:
    """Of whole numbers exactly; otherwise to the rounding of the result. Rows between stay."""
    torch.manual_seed(6)
    for dtype, function, shape in itertools.product(
        launch.GATED, launch.GATES, ((5, 8), (3, 4, 24), (1, 7, 1408), (2, 0, 8))
    ):
        *outer, cols = shape
        wide = torch.randn(*outer[:-1], outer[-1] + 2, 2 * cols, device=device).to(dtype) * 4
        wide[..., :1, 0], wide[..., 1:2, 0] = 200.0, -200.0
        room = torch.full((*outer[:-1], outer[-1] + 1, cols), 7.0, dtype=dtype, device=device)
        x, out = wide[..., : outer[-1], :], room[..., : outer[-1], :]
        gate(function, out, x, stream)
        one, other = x.double().chunk(2, -1)
        held = one * one.sigmoid() if function == "silu gated" else one.relu()
        eps, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
        assert (
            (out.double() - held * other).abs() <= 0.6 * eps * (held * other).abs() + eps * least
        ).all()
        assert (room[..., outer[-1] :, :] == 7).all()
    nothing = torch.full((1, 16), float("nan")).to(device).bfloat16()
    for function in launch.GATES:
        out = torch.zeros(1, 8, device=device).bfloat16()
        gate(function, out, nothing, stream)
        assert out.isnan().all()


def check_route(route: Callable[..., Any], device: str = "cpu", stream: Any = None) -> None:
    torch.manual_seed(7)
    for (tokens, choices), experts, capacity in itertools.product(
        ((1, 1), (300, 2), (7, 8), (1000, 1), (0, 2), (4, 0)), (1, 9), (0, 3, 50)
    ):
        whole = torch.rand(tokens, 12, device=device).argsort(1) % experts
        for chosen in (whole[:, :choices], whole[:, :choices].t().contiguous().t()):
            counts, places, rows, held = route(chosen, experts, capacity, stream)
            flat = chosen.t().flatten()
            assert torch.equal(counts, torch.bincount(flat, minlength=experts))
            each = (flat[None] == torch.arange(experts, device=device)[:, None]).cumsum(1)
            wanted = (each.gather(0, flat[None]) - 1).view(choices, tokens).t()
            assert torch.equal(places, wanted)
            if capacity:
                taken = chosen * capacity + wanted
                assert torch.equal(rows, taken.where(wanted < capacity, experts * capacity))
            else:
                order = flat.argsort(stable=True)
                assert torch.equal(
                    rows.t().flatten()[order], torch.arange(len(flat), device=device)
                )
                assert torch.equal(held, order % max(tokens, 1))


def check_halves(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    """All values there are, those halfway between two, infinities and what is no number."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=device).to(torch.int16)
    for dtype in HALVES:
        values = every.view(dtype)
        found = torch.empty_like(values)
        kernels.reduce(found, [values], stream)
        assert torch.equal(found.isnan(), values.isnan())
        assert torch.equal(found.view(torch.int16)[~values.isnan()], every[~values.isnan()])
        # 1 below, at, and 1 above what is halfway between two values of 16 or of 11 bits.
        ends = torch.tensor([0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], device=device)
        near = (torch.arange(1 << 16, device=device)[:, None] << 16 | ends).flatten()
        floats = near.to(torch.int32).view(torch.float32)
        found = torch.empty(floats.shape, dtype=dtype, device=device)
        kernels.reduce(found, [floats], stream)
        wanted = floats.to(dtype)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found[~wanted.isnan()], wanted[~wanted.isnan()])


def test_placement(on_host: Kernels) -> None:
    check_place(on_host)


def test_reduction_is_exact(on_host: Kernels) -> None:
    check_reduce(on_host.reduce)


def test_merge(on_host: Kernels) -> None:
    check_merge(on_host.merge)
    one = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    lse = torch.zeros(1, 2, 3)
    for wrong, message in (
        ((one, None, []), "required 1 to 16"),
        ((one, None, [(0, 3, one.half(), lse)]), "required shape"),
        ((one, None, [(0, 3, one[..., :4], lse)]), "required shape"),
        ((one, None, [(0, 3, one[:, :, :2], lse)]), "required shape"),
        ((one, None, [(1, 4, one, lse)]), "required rows of the 3 of out, got 1 to 4"),
        ((one, lse[:, :1], [(0, 3, one, lse)]), "lse: required float32"),
        ((one, None, [(0, 3, one, lse.double())]), "lse: required float32"),
        ((one, None, [(0, 3, one, lse[:, :, :2])]), "lse: required float32"),
        ((one[..., 1:], None, [(0, 3, one[..., 1:], lse)]), "multiples of 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            on_host.merge(*wrong, None)


def test_route(on_host: Kernels) -> None:
    check_route(on_host.route)
    for wrong in ((torch.zeros(3), 2, 1), (torch.zeros(3, 2).int(), 2, 1)):
        with pytest.raises(ValueError, match="required int64"):
            on_host.route(*wrong, None)


def test_gate(on_host: Kernels) -> None:
    check_gate(on_host.gate)
    x, out = torch.zeros(3, 16).bfloat16(), torch.zeros(3, 8).bfloat16()
    for wrong in (
        ("gelu gated", out, x),
        ("silu gated", out.float(), x.float()),
        ("silu gated", out[:2], x),
        ("silu gated", out[:, :4], x[:, :8]),
        ("silu gated", out[:, ::2], x[:, ::2]),
    ):
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            on_host.gate(*wrong, None)


def check_copy_runs(
    copy_runs: Callable[..., None], device: str = "cpu", stream: Any = None
) -> None:
    """Runs of any length, more than a launch takes; nothing beside them is written."""
    for count, most in ((1, 1), (5, 3), (launch.MAX_RUNS, 700), (2 * launch.MAX_RUNS + 1, 9)):
        units = torch.arange(count * most * 4, dtype=torch.int32, device=device).view(-1, 4)
        out = torch.full_like(units, -1)
        draw = np.random.default_rng(count)
        rows = draw.integers(1, most + 1, count)
        at, to = (most * draw.permutation(count) for _ in range(2))
        ends = [16 * one + base for one, base in ((to, out.data_ptr()), (at, units.data_ptr()))]
        copy_runs(*ends, 16 * rows, stream)
        wanted = torch.full_like(units, -1)
        for there, here, some in zip(to, at, rows, strict=True):
            wanted[there : there + some] = units[here : here + some]
        assert torch.equal(out, wanted)


def test_copy_runs(on_host: Kernels) -> None:
    check_copy_runs(on_host.copy_runs)
    one = np.array([32])
    for wrong in ((one + 8, one, one), (one, one + 8, one), (one, one, one + 8)):
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            on_host.copy_runs(*wrong, None)


def test_combine(on_host: Kernels) -> None:
    check_combine(on_host.combine)
    rows, out = torch.zeros(5, 8).bfloat16(), torch.zeros(3, 8).bfloat16()
    picked, weights = torch.zeros(3, 2).long(), torch.ones(3, 2)
    for wrong, message in (
        ((out, rows.float(), picked, weights), "required rows and a result"),
        ((out[:2], rows, picked, weights), "required rows and a result"),
        ((out[:, :4], rows[:, :4], picked, weights), "required contiguous rows"),
        ((out, rows, picked.int(), weights), "required int64 numbers"),
        ((out, rows, picked, weights.double()), "required int64 numbers"),
        ((out, rows, picked, weights[:, :1]), "required int64 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            on_host.combine(*wrong, None)


#: Of parts of the result's dtype.
ALIKE = [(part, out) for part, out in launch.REDUCTIONS if part == out]


def test_sum_at_the_peers_is_exact(on_host: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = torch.zeros(1, dtype=torch.int32)
    check_reduce(at_peers(on_host, arrived.data_ptr()), kinds=ALIKE)
    assert arrived.item() == 0
    # On many blocks, which go over what there is more than once.
    monkeypatch.setattr(on_host.binding, "processors", 6)
    parts = [torch.randn(3 * launch.ONE_SHOT_THREADS * 4 * 4 * 2 + 5) for _ in range(3)]
    found, launches = torch.empty_like(parts[0]), on_host.binding.launches
    launches.clear()
    at_peers(on_host, arrived.data_ptr())(found, parts, None)
    assert torch.equal(found, in_order(parts, torch.float32))
    assert launches == [("ficco_one_shot_float32", 3)]


class Launched(NamedTuple):
    """A launch of a sum at the peers that is not carried out yet, and all that it touches: of the
    words the first counts blocks, the next three are waited for, then some are written in front,
    from the eighth on behind, and from the twelfth on beside all else."""

    out: torch.Tensor
    parts: list[torch.Tensor]
    wanted: torch.Tensor
    words: torch.Tensor
    arguments: tuple[Any, ...]


@pytest.fixture
def launched(on_host: Kernels, monkeypatch: pytest.MonkeyPatch) -> Launched:
    monkeypatch.setattr(on_host.binding, "processors", 6)
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(on_host.binding, "launch", lambda *rest: found.append(rest))
    words = torch.zeros(16, dtype=torch.int32)
    at = [words.data_ptr() + 4 * i for i in range(16)]
    front = Script(
        (
            ScriptStep(at[12], 6 << 32 | 4, wide=True),
            ScriptStep(at[1], 5, waits=True),
            ScriptStep(at[4], 7),
            ScriptStep(at[5], 8, behind=True),
            ScriptStep(at[2], 5, waits=True),
            ScriptStep(at[3], 5, waits=True),
        ),
        aside=1,
        alone=4,
    )
    rear = Script((ScriptStep(at[8], 9), ScriptStep(at[10], 3 << 32 | 2, wide=True)))
    parts = [torch.randn(20000) for _ in range(2)]
    out = torch.full((20000,), 7.0)
    on_host.one_shot(out, parts, Signals(at[0], front, rear), None, blocks=3)
    ((kernel, blocks, threads, arguments, _),) = found
    assert (blocks, threads) == (3, launch.ONE_SHOT_THREADS)
    wanted = in_order(parts, torch.float32)
    return Launched(out, parts, wanted, words, (kernel, threads, arguments))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.001)


def carry_out(library: ctypes.CDLL, some: Launched, block: int) -> None:
    kernel, threads, arguments = some.arguments
    for thread in range(threads):
        library.become(block, thread)
        kernel(*arguments.arguments)


def test_what_is_told_behind_a_sum_comes_behind_all_of_it(
    on_host: Kernels, launched: Launched
) -> None:
    """Whatever the order of the blocks, of which one alone tells what comes in front."""
    for order in itertools.permutations(range(3)):
        launched.words.zero_()
        launched.words[1:4] = 5
        launched.out.fill_(7.0)
        for number, block in enumerate(order):
            before = launched.words.tolist()
            assert before[4:6] == ([7, 8] if 0 in order[:number] else [0, 0])
            assert before[8:12] == [0, 0, 0, 0]
            assert before[12:14] == ([4, 6] if 0 in order[:number] else [0, 0])
            assert not torch.equal(launched.out, launched.wanted)
            carry_out(on_host.binding.library, launched, block)
        assert torch.equal(launched.out, launched.wanted)
        assert launched.words.tolist() == [0, 5, 5, 5, 7, 8, 0, 0, 9, 0, 2, 3, 4, 6, 0, 0]


@pytest.mark.parametrize("block", range(3))
def test_every_block_waits_for_the_peers(on_host: Kernels, launched: Launched, block: int) -> None:
    """The first for what lets it tell them, too; before it has told them, it reads nothing."""
    out, words, said = launched.out, launched.words, []

    def peers() -> None:
        for word in (1, 2, 3):
            if block == 0 and word > 1:
                until(lambda: words[5] != 0)
            time.sleep(0.03)
            said.append((words[4:6].tolist(), bool((out != 7.0).any())))
            words[word] = 5

    thread = threading.Thread(target=peers)
    thread.start()
    carry_out(on_host.binding.library, launched, block)
    thread.join()
    told = [[0, 0], [7, 8], [7, 8]] if block == 0 else [[0, 0]] * 3
    assert said == [(words, False) for words in told]
    assert (out != 7.0).any() and launched.words[0] == 1


def test_a_script_goes_from_the_front(on_host: Kernels) -> None:
    words, seen = torch.zeros(8, dtype=torch.int32), []
    at = [words.data_ptr() + 4 * i for i in range(8)]
    script = Script(
        (
            ScriptStep(at[2], 4),
            ScriptStep(at[0], 1, waits=True),
            ScriptStep(at[3], 5, behind=True),
            ScriptStep(at[1], 2, waits=True),
            ScriptStep(at[4], 6 << 32 | 7, wide=True),
        )
    )

    def peer() -> None:
        for word, written in ((0, 2), (1, 3)):
            until(lambda written=written: words[written] != 0)
            time.sleep(0.03)
            seen.append(words.tolist())
            words[word] = 1 + word

    thread = threading.Thread(target=peer)
    thread.start()
    on_host.script(script, None)
    thread.join()
    assert seen == [[0, 0, 4, 0, 0, 0, 0, 0], [1, 0, 4, 5, 0, 0, 0, 0]]
    assert words.tolist() == [1, 2, 4, 5, 7, 6, 0, 0]


def test_what_a_script_has_aside_is_carried_out_once(on_host: Kernels) -> None:
    """By a thread of another warp, and not by the first."""
    words = torch.zeros(4, dtype=torch.int32)
    at = [words.data_ptr() + 4 * i for i in range(4)]
    steps = ScriptStep(at[0], 8), ScriptStep(at[1], 9), ScriptStep(at[2], 7)
    script, library = Script(steps, aside=1, alone=3), on_host.binding.library
    threads = []
    for thread in range(launch.SIGNAL_THREADS):
        library.become(0, thread)
        library.ficco_script(script.packed)
        if words.any():
            threads.append((thread, words.tolist()))
            words.zero_()
    assert threads == [(0, [0, 9, 7, 0]), (32, [8, 0, 0, 0])]


def test_reduction_in_place(on_host: Kernels) -> None:
    parts = [torch.randn(501).bfloat16() for _ in range(3)]
    wanted = in_order(parts, torch.bfloat16)
    on_host.reduce(parts[1], parts, None)
    assert torch.equal(parts[1], wanted)


def test_rounding_to_half_precision(on_host: Kernels) -> None:
    """bfloat16 is rounded by the kernel's own code, on a GPU too; float16 by this test's header."""
    check_halves(on_host)


REFUSED_SUMS = {
    "no parts": (lambda x: (x, []), "at least 1"),
    "shape": (lambda x: (x, [x[:2]]), "shape"),
    "dtype": (lambda x: (x, [x.double()]), "float64"),
    "wider": (lambda x: (x, [x.bfloat16()]), "bfloat16"),
    "mixed": (lambda x: (x.bfloat16(), [x, x.bfloat16()]), "one dtype"),
    "strides": (lambda x: (x.t(), [x.t()]), "contiguous"),
    "distances": (lambda x: (x[:, 1:], [x[:, 1:], torch.ones(4, 9)[:, 1:6]]), "one distance"),
}


@pytest.mark.parametrize("what", REFUSED_SUMS)
def test_refused_sums(on_host: Kernels, what: str) -> None:
    make, words = REFUSED_SUMS[what]
    with pytest.raises(ValueError, match=words):
        on_host.reduce(*make(torch.ones(4, 6)), None)


def test_many_parts(on_host: Kernels) -> None:
    """The kernel's arguments hold 16."""
    parts = [torch.full((3, 4), float(p)).bfloat16() for p in range(17)]
    found = torch.empty(3, 4).bfloat16()
    with pytest.raises(ValueError, match="1 to 16, got 17"):
        on_host.reduce(found, parts, None)


def test_refused_placements(on_host: Kernels) -> None:
    x = torch.ones(4, 6)
    for dst, src in ((x, x[:2]), (x, x.double()), (x.t(), x.t()), (x, torch.ones(6, 4).t())):
        with pytest.raises(ValueError, match="required"):
            on_host.place(dst, src, None)


def test_signals_between_threads(on_host: Kernels) -> None:
    """A wait ends behind its post, not before, and then what was written before is there."""
    words = torch.zeros(100, dtype=torch.int32)
    late, data = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    wanted = [(words.data_ptr() + 4 * i, 1 + i) for i in range(100)]
    seen: list[float] = []

    def waiter() -> None:
        on_host.wait(wanted, 30.0, late.data_ptr(), None)
        seen.append(float(data))

    thread = threading.Thread(target=waiter)
    thread.start()
    time.sleep(0.2)
    assert not seen
    data.fill_(5.0)
    on_host.post(wanted, None)
    thread.join(30)
    assert seen == [5.0] and late.item() == 0
    assert words.tolist() == list(range(1, 101))


def test_wait_has_a_deadline(on_host: Kernels) -> None:
    words = torch.ones(70, dtype=torch.int32)
    words[67] = 0
    late = torch.zeros(1, dtype=torch.int32)
    begin = time.monotonic()
    on_host.wait([(words.data_ptr() + 4 * i, 1) for i in range(70)], 0.3, late.data_ptr(), None)
    assert 0.25 < time.monotonic() - begin < 5.0
    assert late.item() == 68


# The cache.

TARGET = Target("cuda", "sm_90")


class Counted:
    """A compiler that counts, and may fail."""

    def __init__(self, version: str = "1", error: str = "") -> None:
        self.version, self.error, self.calls = version, error, 0

    def __call__(self) -> Compiler:
        return Compiler("counted", self.version, self.run)

    def run(self, text: str, arch: str) -> bytes:
        self.calls += 1
        if self.error:
            raise BackendError("counted", "1", self.error)
        return f"{arch} {self.version} ".encode() + text.encode()


def gone() -> Compiler:
    raise CompilerNotFound("it was not found")


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *found: monkeypatch.setitem(build.FINDERS, "cuda", found)


def test_compiled_once(finders: Callable[..., None], tmp_path: Path) -> None:
    first = Counted()
    finders(gone, first)
    image = build.compiled(TARGET, tmp_path)
    assert build.compiled(TARGET, tmp_path) == image and first.calls == 1
    assert image.startswith(b"sm_90 1 ") and b"ficco_post" in image
    assert [path.suffix for path in tmp_path.iterdir()] == [".bin"]


def test_another_key_is_compiled_anew(
    finders: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Counted("1"), Counted("2")
    finders(first)
    build.compiled(TARGET, tmp_path)
    build.compiled(Target("cuda", "sm_100"), tmp_path)
    assert first.calls == 2
    finders(second)
    assert b" 2 " in build.compiled(TARGET, tmp_path)
    text = build.source() + "// changed\n"
    monkeypatch.setattr(build, "source", lambda: text)
    assert build.compiled(TARGET, tmp_path).endswith(b"// changed\n")
    assert second.calls == 2 and len(list(tmp_path.iterdir())) == 4


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda found: b"",
    "cut": lambda found: found[:-7],
    "head": lambda found: found[:10],
    "nothing behind the head": lambda found: found[:48],
    "one bit": lambda found: found[:-9] + bytes([found[-9] ^ 4]) + found[-8:],
    "another version": lambda found: found.replace(b"kernels 1", b"kernels 0", 1),
    "longer": lambda found: found + b"x",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_is_compiled_anew(
    finders: Callable[..., None], tmp_path: Path, damage: str
) -> None:
    first = Counted()
    finders(first)
    image = build.compiled(TARGET, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert build.compiled(TARGET, tmp_path) == image
    assert first.calls == 2 and path.read_bytes() == whole


def test_cache_that_cannot_be_written(
    finders: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warn, "_warned", set())
    finders(Counted())
    file = tmp_path / "file"
    file.touch()
    with pytest.warns(UserWarning, match="not kept"):
        assert build.compiled(TARGET, file / "kernels").startswith(b"sm_90")


def test_interrupted_write_leaves_nothing(
    finders: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    finders(Counted())
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build.compiled(TARGET, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_next_compiler_where_one_fails(finders: Callable[..., None], tmp_path: Path) -> None:
    finders(Counted(error="unknown architecture"), Counted("2"))
    assert b" 2 " in build.compiled(TARGET, tmp_path)
    finders(Counted(error="unknown architecture"), Counted(error="second"), gone)
    with pytest.raises(BackendError, match="counted failed with 1: unknown architecture"):
        build.compiled(Target("cuda", "sm_9"), tmp_path)


@pytest.mark.parametrize(("vendor", "remedy"), [("cuda", "nvrtc"), ("hip", "clang-19")])
def test_no_compiler(vendor: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build.FINDERS, vendor, (gone,))
    with pytest.raises(BackendError, match=f"no compiler: it was not found.*{remedy}"):
        build.compiled(Target(vendor, "any"))


def test_import_looks_for_nothing(tmp_path: Path) -> None:
    """Neither a device nor a compiler nor a vendor's binding."""
    program = (
        "import subprocess, sys, torch\n"  # PyTorch imports the binding of its vendor, if any
        "before = set(sys.modules)\n"
        "assert 'ficco.hip_kernels' not in before\n"
        "subprocess.run = subprocess.Popen = None\n"
        "import ficco.hip_kernels\n"
        "new = {name.split('.')[0] for name in sys.modules.keys() - before}\n"
        "assert not {'cuda', 'hip'} & new and not torch.cuda.is_initialized(), new\n"
    )
    ended = Program(tmp_path, "imports", program, (), {}).end(time.monotonic() + 60)
    assert ended.code == 0, ended.err


# Casts.

E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
#: Rows, columns, and elements in front of the first: rows in registers, by one warp and by several,
#: and rows that are too long for that; blocks, the last of which is short.
CAST_SHAPES = (
    *((5, 48, 0, 48), (3, 4112, 0, 4112), (2, 16400, 0, 16400), (3, 96, 3, 96)),
    *((5, 400, 0, 128), (2, 128, 5, 128)),
)


def powers(matrix: torch.Tensor, length: int, most: float) -> torch.Tensor:
    """By the definition: of all powers of two by which nothing overflows the smallest."""
    rows, cols = matrix.shape
    found = torch.empty(rows, -(-cols // length))
    for row in range(rows):
        for part in range(found.shape[1]):
            largest = matrix[row, part * length : (part + 1) * length].abs().max().item()
            exponent = -126
            while 2.0**exponent * most < largest:
                exponent += 1
            found[row, part] = 2.0**exponent
    return found


def check_casts(
    kernels: Kernels, to: torch.dtype, dtype: torch.dtype, device: str = "cpu", stream: Any = None
) -> None:
    """Bit by bit as PyTorch, sizes that are as large as may be, ties and what is below the normal
    numbers among them; and nothing else is written."""
    most, random_ = torch.finfo(to).max, torch.Generator().manual_seed(1)
    for rows, cols, ahead, length in CAST_SHAPES:
        wide = torch.randn(rows, cols + 8, generator=random_)
        wide *= 2.0 ** torch.randint(-12, 12, (rows, 1), generator=random_)
        wide[0, ahead : ahead + 16] = torch.arange(16) * 2.0**-10  # ties
        wide[0, ahead + 16] = most * 2.0**-4
        wide[1] = 0
        wide[1, -1] = most  # of no part
        wide[-1, ahead + cols - 1] = 3 * most  # what is read last
        matrix = wide.to(device, dtype)[:, ahead : ahead + cols]
        out = torch.zeros(rows + 1, cols + 16, device=device).to(to)
        factors = torch.full((rows + 1, -(-cols // length)), 99.0, device=device)
        into, by = out[:rows, :cols], factors[:rows]
        kernels.cast(into, by, matrix, stream)
        wanted = powers(matrix.cpu().float(), length, most).to(device)
        assert torch.equal(by, wanted), (rows, cols)
        shared = wanted.repeat_interleave(length, 1)[:, :cols]
        right = (matrix.float() / shared).to(to)
        assert torch.equal(into.view(torch.uint8), right.view(torch.uint8)), (rows, cols)
        assert (factors[rows:] == 99).all()
        assert not out[rows:].float().any() and not out[:, cols:].float().any()


@pytest.mark.parametrize("dtype", launch.CASTS)
@pytest.mark.parametrize("to", E4M3)
def test_casts_are_those_of_pytorch(on_host: Kernels, to: torch.dtype, dtype: torch.dtype) -> None:
    check_casts(on_host, to, dtype)


@pytest.mark.parametrize("to", E4M3)
def test_a_cast_of_nan_or_infinity_is_nan(on_host: Kernels, to: torch.dtype) -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        matrix = torch.ones(3, 256).bfloat16()
        matrix[1, 200] = value
        out, factors = torch.zeros(3, 256).to(to), torch.zeros(3, 2)
        on_host.cast(out, factors, matrix, None)
        back = out.float() * factors.repeat_interleave(128, 1)
        assert back[1, 128:].isnan().all()
        assert (back[[0, 2]] == 1).all() and (back[1, :128] == 1).all()


def test_casts_that_cannot_be_are_refused(on_host: Kernels) -> None:
    out, factors = torch.zeros(4, 32).to(E4M3[0]), torch.zeros(4, 1)
    matrix = torch.zeros(4, 32)
    for wrong, words in (
        ((out, torch.zeros(4, 2), matrix), "factors of one of the shapes"),
        ((out, factors, torch.zeros(4, 16)), "a result of 4 x 16"),
        ((out, factors, matrix.double()), "16 columns"),
        ((out, factors, torch.zeros(32, 4).t()), "contiguous rows"),
    ):
        with pytest.raises(ValueError, match=words):
            on_host.cast(*wrong, None)


def test_amd_cast_is_by_16_bytes_and_by_the_instruction(isa: tuple[str, str]) -> None:
    """All loads of what stays in registers before the first wait; e4m3 by gfx942's own."""
    arch, text = isa
    held = (("", launch.CAST_HELD), ("short_", launch.CAST_HELD_SHORT))
    for (of, most), dtype in itertools.product(held, launch.CASTS):
        lines = body(text, f"ficco_cast_{of}{launch._text(dtype)}")
        loads = places(lines, LOAD)
        assert len(loads) >= 2 * most, "they are not by 16 bytes"
        assert places(lines, "ds_bpermute"), "warps do not exchange what is largest"
        # Before the largest of warps are written, and before they are read.
        assert len(places(lines, "s_barrier")) == 2
        assert bool(places(lines, "v_cvt_pk_fp8_f32")) == (arch == "gfx942")


def test_nvidia_cast_is_by_the_instruction(tmp_path: Path) -> None:
    """From compute capability 8.9 on; what is older has none."""
    compiler(build.nvcc)
    source = str(build.HERE / "kernels.cpp")
    for arch, has in (("sm_90", True), ("sm_80", False)):
        to = tmp_path / f"{arch}.ptx"
        output(build.nvcc_program(), *build.NVCC, "-ptx", f"-arch={arch}", source, "-o", str(to))
        assert ("cvt.rn.satfinite.e4m3x2.f32" in to.read_text()) == has
