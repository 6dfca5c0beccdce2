"""The kernels without a GPU: compilation, instructions, and runs of the code on a CPU.

The tests need clang-19, lld-19, nvcc and nvrtc, which ``tests/toolchain.sh`` installs. The tests of
a missing compiler are skipped; with ``CI`` set they fail.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from programs import Program
from ranks import missing

from ficco import errors
from ficco.errors import BackendError
from ficco.hip_kernels import build, launch
from ficco.hip_kernels.build import Compiler, CompilerNotFound, Target
from ficco.hip_kernels.launch import Kernels, Script, ScriptStep, Signals

ON_HOST = Path(__file__).parent / "kernels_on_host"
SOURCE = build.HERE / "kernels.cpp"
HALVES = (torch.bfloat16, torch.float16)


def compiler(finder: Callable[[], Compiler]) -> Compiler:
    try:
        return finder()
    except CompilerNotFound as error:
        missing(error)


def output(*command: object) -> str:
    process = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


COPIES, EXCHANGES = (
    tuple(f"ficco_{verb}_{kind}" for kind in ("aligned", "shifted"))
    for verb in ("copy", "exchange")
)
REDUCTIONS, ONE_SHOTS, TWO_SHOTS = (
    tuple(name for name in launch.NAMES if kind in name)
    for kind in ("reduce", "one_shot", "two_shot")
)


def places(lines: Sequence[str], pattern: str) -> list[int]:
    return [index for index, line in enumerate(lines) if re.match(pattern, line)]


class Listing:
    """The instructions of a kernel, without blanks and comments."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = [re.sub(r"\s+", " ", line) for line in lines if line]

    def at(self, pattern: str, first: int = 0, end: int | None = None) -> list[int]:
        """Indices of lines that match a pattern, from ``first`` to before ``end``."""
        return [first + at for at in places(self.lines[first:end], pattern)]


class Assembly(NamedTuple):
    """The kernels in the assembly language of an architecture, by default NVIDIA's PTX; messages of
    the assembler; and patterns: accesses of 16 bytes per lane, a barrier of all threads of a block,
    a load that bypasses all caches, a release to the system, an acquire from it, and a store that
    is visible to the whole system."""

    arch: str
    text: str
    log: str
    load: str = r"ld\.global\.v4\."
    store: str = r"st\.global\.v4\."
    meet: str = r"bar\.sync"
    poll: str = r"ld\.(relaxed|acquire)\.sys\.global\.u32"
    back: str = r"membar\.sys|fence\.(sc|acq_rel)\.sys"
    drop: str = r"membar\.sys|fence\.(sc|acq_rel)\.sys|ld\.acquire\.sys"
    word: str = r"st\.relaxed\.sys\.global\.u32"

    @property
    def amd(self) -> bool:
        return self.arch.startswith("gfx")

    def kernel(self, name: str) -> Listing:
        body = rf"^{name}:(.*?)^\.Lfunc_end" if self.amd else rf"\.entry {name}\((.*?)^\}}"
        match = re.search(body, self.text, re.M | re.S)
        assert match, name
        lines = (line.split(";")[0].strip() for line in match[1].splitlines())
        return Listing(line for line in lines if not line.startswith("."))


#: AMD's waits for loads, and for all memory operations.
LOADED, DONE = r"s_waitcnt.*vmcnt", r"s_waitcnt.*vmcnt\(0\)"


@cache
def assembled(arch: str) -> Assembly:
    if arch == "sm_90":
        compiler(build.nvcc)
        with tempfile.TemporaryDirectory() as folder:
            keep = "-Xptxas", "-v", "--keep", "--keep-dir", folder, "-o", f"{folder}/out"
            flags = *build.NVCC, "-cubin", "-arch=sm_90", "-Werror=all-warnings", *keep
            log = output(build.nvcc_program(), *flags, SOURCE)
            (ptx,) = Path(folder).glob("*.ptx")
            return Assembly(arch, ptx.read_text(), log)
    compiler(build.clang)
    flags = *build.CLANG, "-Wall", "-Werror", f"--offload-arch={arch}", "-S", "-o", "-"
    scope = " sc0 sc1" if arch == "gfx942" else ""
    return Assembly(
        *(arch, output(build.clang_program(), *flags, SOURCE), ""),
        *("global_load_dwordx4", "global_store_dwordx4", "s_barrier"),
        poll=rf"global_load_dword v.*{scope or ' glc'}$",
        back=rf"buffer_wbl2{scope}$",
        drop=r"buffer_inv sc0 sc1$" if scope else r"buffer_invl2$",
        word=rf"global_store_dword v.*{scope}$",
    )


AMD = "gfx90a", "gfx942"


@pytest.fixture(params=AMD)
def amd(request: pytest.FixtureRequest) -> Assembly:
    return assembled(request.param)


@pytest.fixture(params=[*AMD, "sm_90"])
def assembly(request: pytest.FixtureRequest) -> Assembly:
    return assembled(request.param)


def test_all_kernels_are_compiled_without_spills(assembly: Assembly) -> None:
    count = len(launch.NAMES)
    if not assembly.amd:
        clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
        assert assembly.log.count("stack frame") == assembly.log.count(clean) == count
        return
    for name in launch.NAMES:
        assert "s_endpgm" in assembly.kernel(name).lines
    for key in ("private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count"):
        assert re.findall(rf"\.{key}: +(\d+)", assembly.text) == ["0"] * count
    # No access uses scratch, buffers, or an address space that is resolved at run time.
    assert not re.search(r"\b(scratch_|flat_|buffer_)(load|store)", assembly.text)


def test_accesses_are_by_16_bytes_with_several_in_flight(assembly: Assembly) -> None:
    for name, stored in zip(COPIES, (8, 4), strict=True):
        kernel = assembly.kernel(name)
        loads, stores = kernel.at(assembly.load), kernel.at(assembly.store)
        assert len(loads) == 8 and len(stores) == stored and max(loads) < min(stores)
        if assembly.amd and name == COPIES[0]:
            assert not kernel.at(LOADED, loads[0], loads[-1]), "a load waits for its predecessor"
    if assembly.amd:  # only stores at the ends of rows are smaller
        assert not kernel.at(r"global_load_(u?byte|u?short|dword )"), "a load of less than a unit"
        assert kernel.at("global_store_byte")
    for name in REDUCTIONS:
        kernel = assembly.kernel(name)
        loads = kernel.at(assembly.load)
        assert len(loads) >= 4 and kernel.at(assembly.store), name
        assert not kernel.at(LOADED, loads[0], loads[3]), "loads of four parts"


def test_signals_are_ordered_for_the_system(assembly: Assembly) -> None:
    """A post releases, then writes the word. A wait bypasses all caches while it spins, and ends
    with an acquire."""
    post, wait = assembly.kernel("ficco_post"), assembly.kernel("ficco_wait")
    (back,), (word,) = post.at(assembly.back), post.at(assembly.word)
    assert back < word
    polls, dropped = wait.at(assembly.poll), wait.at(assembly.drop)
    assert polls and dropped and min(dropped) > max(polls)
    # The word that reports a missed deadline must reach the host.
    assert wait.at(".*(globaltimer|s_memrealtime)") and wait.at(assembly.word)
    if assembly.amd:
        assert post.at(DONE, back, word) and wait.at(DONE, max(polls), dropped[0])
        assert wait.at("s_sleep")


def test_amd_copy_to_a_peer_ends_with_a_release(amd: Assembly) -> None:
    """After the stores of all waves one wave writes the L2 back and waits for the write-back."""
    for name in COPIES:
        kernel = amd.kernel(name)
        (meet,), (back,) = kernel.at(amd.meet), kernel.at(amd.back)
        assert kernel.at(DONE, max(kernel.at("global_store", 0, meet)), meet)
        assert meet < back < len(kernel.lines) - 2 and kernel.at(DONE, back)


def test_amd_exchange_is_ordered(amd: Assembly) -> None:
    """A block is counted after its stores. Its clears are visible before its posts. Data that it
    has waited for is read after an acquire."""
    for name in EXCHANGES:
        kernel = amd.kernel(name)
        started, meet = kernel.at(amd.meet)
        stores = kernel.at("global_store_(dwordx4|byte)")
        assert started < min(stores) and kernel.at(DONE, max(s for s in stores if s < meet), meet)
        posted, copied, cleared = kernel.at(amd.back)
        (counted,) = kernel.at("global_atomic_add")
        assert posted < started < meet < copied < counted < cleared
        assert kernel.at(DONE, copied, counted)
        for first, end in ((0, started), (counted, None)):
            assert max(kernel.at(amd.poll, first, end)) < max(kernel.at(amd.drop, first, end))


def test_amd_one_shot_sum_follows_its_waits(amd: Assembly) -> None:
    """Four units of each of two parts are in flight. Data that was waited for is read after an
    acquire. The last block is counted after the loads."""
    for name in ONE_SHOTS:
        kernel = amd.kernel(name)
        meet, through = kernel.at(amd.meet)
        loads = kernel.at(amd.load)
        in_flight = [at for at in loads if at < loads[0] + 200][:8]
        assert not kernel.at(LOADED, in_flight[0], in_flight[-1]), name
        assert meet < min(loads) and max(loads) < through and kernel.at(amd.store)
        polls, dropped = kernel.at(amd.poll, 0, meet), kernel.at(amd.drop, 0, meet)
        assert polls and min(polls) < min(dropped) and max(polls) < max(dropped)
        (counted,) = kernel.at("global_atomic_add")
        assert through < counted < max(kernel.at(amd.word.replace("dword", "dword(x2)?")))


def test_two_shot_is_ordered(assembly: Assembly) -> None:
    """A block posts after it has stored its sums, and polls before it reads the sums of peers."""
    load, store, back, word = assembly.load, assembly.store, assembly.back, assembly.word
    for name in TWO_SHOTS:
        kernel = assembly.kernel(name)
        started, summed, polled, ended = kernel.at(assembly.meet)
        assert started < min(kernel.at(load)) and max(kernel.at(store)) < ended
        assert kernel.at(store, started, summed) and not kernel.at(store, summed, polled)
        (released,), (poll,) = (
            kernel.at(pattern, summed, polled) for pattern in (back, assembly.poll)
        )
        (post,), (_,) = kernel.at(word, summed, polled), kernel.at(word, polled, ended)
        assert released < post < poll and kernel.at(load, polled, ended)
        assert kernel.at(assembly.drop, poll, polled)
        assert not assembly.amd or kernel.at(DONE, released, post)


def test_amd_script_releases_before_its_posts(amd: Assembly) -> None:
    script = amd.kernel("ficco_script")
    (back,) = script.at(amd.back)
    *aside, first, second = script.at(amd.word.replace("dword", "dword(x2)?"))
    assert aside and max(aside) < back < first < second and script.at(DONE, back, first)


def test_casts_are_by_16_bytes_and_by_the_instruction(assembly: Assembly) -> None:
    """Values that stay in registers are loaded before the first wait. gfx942 and NVIDIA from
    compute capability 8.9 on have an instruction for e4m3, older GPUs have none."""
    variants = (("", launch.CAST_HELD), ("short_", launch.CAST_HELD_SHORT))
    for (kind, count), dtype in itertools.product(variants, launch.CASTS):
        kernel = assembly.kernel(f"ficco_cast_{kind}{launch._text(dtype)}")
        if not assembly.amd:
            assert kernel.at(r"cvt\.rn\.satfinite\.e4m3x2\.f32")
            continue
        assert len(kernel.at(assembly.load)) >= 2 * count, "loads are smaller than 16 bytes"
        assert kernel.at("ds_bpermute"), "warps do not exchange their maxima"
        # One barrier before the maxima of warps are written, one before they are read.
        assert len(kernel.at(assembly.meet)) == 2
        assert bool(kernel.at("v_cvt_pk_fp8_f32")) == (assembly.arch == "gfx942")


def test_older_nvidia_gpus_cast_without_the_instruction(tmp_path: Path) -> None:
    compiler(build.nvcc)
    older = tmp_path / "older.ptx"
    output(build.nvcc_program(), *build.NVCC, "-ptx", "-arch=sm_80", SOURCE, "-o", older)
    assert "e4m3x2" not in older.read_text()


#: An empty kernel, and an invalid text.
HEADER = (build.HERE / "device.h").read_text().replace("#pragma once\n", "")
IDLE, INVALID = "KERNEL(64) ficco_idle() {}\n", "int wrong() { return nothing(); }\n"


TARGETS = (
    *((build.clang, arch) for arch in ("gfx90a", "gfx942:sramecc+:xnack-")),
    *((finder, "sm_90") for finder in (build.nvcc, build.nvrtc)),
)


@pytest.mark.parametrize(("finder", "arch"), TARGETS)
def test_code(finder: Callable[[], Compiler], arch: str) -> None:
    """The image is an ELF file for the processor. A compiler's error has the compiler's message."""
    selected = compiler(finder)
    image, machine = selected.run(HEADER + IDLE, arch), 224 if finder is build.clang else 190
    assert image[:4] == b"\x7fELF" and int.from_bytes(image[18:20], "little") == machine
    if finder is build.clang:
        assert image[48] == {"gfx90a": 0x3F}.get(arch, 0x4C)  # EF_AMDGPU_MACH
    assert b"ficco_idle" in image
    if finder is build.nvrtc:  # the tests above compile all kernels with the others
        image = selected.run(build.source(), arch)
        assert all(name.encode() in image for name in launch.NAMES)
    with pytest.raises(BackendError, match="undeclared|undefined") as raised:
        selected.run(INVALID, arch)
    assert raised.value.call and raised.value.code


# ROCm's run-time compiler: the real binding on a double of the library.


WITH_HIPRTC = """
import ctypes, sys
from ficco.errors import BackendError
from ficco.hip_kernels import build

sys.path.insert(0, sys.argv[1])
try:
    build.hiprtc()
except build.CompilerNotFound as error:
    print(error)
ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
compiler = build.hiprtc()
print(compiler.version, compiler.run("text", "gfx942:xnack-").decode())
try:
    compiler.run("to be refused", "gfx942")
except BackendError as error:
    print(error.call, error.code, error.text)
"""


@pytest.mark.parametrize("series", ["7", "10"])
def test_hiprtc(series: str, tmp_path: Path) -> None:
    """Both series of the binding, first without the library, then with it."""
    folder, double = build.HERE.parents[1] / "build/hip-python" / series, tmp_path / "libhiprtc.so"
    if not (folder / "hip").is_dir():
        missing(f"hip-python {series}")
    flags = ("-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{double.name}")
    output("g++", *flags, "-o", double, ON_HOST / "hiprtc.c")
    args, env = [str(folder), str(double)], {"ROCM_PATH": "/nowhere"}
    program = Program(tmp_path, f"hiprtc{series}", WITH_HIPRTC, args, env)
    code, printed, errors = program.end(time.monotonic() + 240)
    assert code == 0 and "leaked" not in errors, errors
    absent, *lines = printed.splitlines()
    assert "libhiprtc.so" in absent
    assert lines == [
        "9.1 text --offload-arch=gfx942:xnack- -std=c++17 -O3",
        "hiprtcCompileProgram HIPRTC_ERROR_COMPILATION line 1: refused",
    ]


# The kernels' code on a CPU, through the launches of a GPU.


class HostBinding:
    """A device that runs one thread after the other."""

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
        has_barriers = any(name in kernel.__name__ for name in ("cast", "route"))
        for block in range(blocks):
            if has_barriers:
                self.concurrently(block, threads, (kernel, arguments))
            else:
                self.in_turn(block, threads, kernel, arguments)

    def in_turn(self, block: int, threads: int, kernel: Any, arguments: Any) -> None:
        for thread in range(threads):
            self.library.become(block, thread)
            kernel(*arguments.arguments)

    def concurrently(self, block: int, threads: int, *work: tuple[Any, Any]) -> None:
        """Run the threads of a block of kernels concurrently, since they share barriers."""

        def run(thread: int, kernel: Any, arguments: Any) -> None:
            self.library.become(block, thread)
            kernel(*arguments.arguments)

        started = [
            threading.Thread(target=run, args=(thread, *kernel))
            for kernel in work
            for thread in range(threads)
        ]
        self.library.meet(len(started))
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
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
    """Random bytes at an address that is a multiple of 16."""
    random = torch.Generator().manual_seed(seed)
    buffer = torch.randint(0, 256, (nbytes + 16,), dtype=torch.uint8, generator=random).to(device)
    return buffer[-buffer.data_ptr() % 16 :][:nbytes]


#: Offsets of the first rows, pitches, width and height: (dst, its pitch, src, its pitch, w, h).
RECTANGLES = [
    (0, 64, 0, 64, 64, 3),  # contiguous
    (0, 512, 0, 256, 256, 5),  # aligned rows
    (0, 512, 16, 272, 250, 5),  # aligned, with a tail
    (5, 512, 21, 272, 250, 5),  # with a head and a tail
    (15, 64, 15, 64, 31, 4),  # a head and one unit
    (15, 64, 15, 64, 30, 4),  # shorter than a head and one unit
    (0, 64, 0, 64, 0, 4),
    (0, 64, 0, 64, 64, 0),
    (8, 72, 16, 40, 40, 7),  # units of 8 bytes
    (4, 72, 16, 40, 38, 7),
    (2, 34, 0, 30, 30, 9),  # units of 2 bytes: odd matrices of half precision
    (1, 31, 0, 37, 29, 9),
    (3, 17, 3, 17, 1, 9),  # a column
    (6, 9999, 6, 12345, 9001, 2),  # several blocks, one piece of work each
    (7, 100, 23, 200, 70000, 1),  # the pitches of a single row are ignored
    (16, 16, 0, 16, 16, 1500),  # more rows than a block has threads
    (1, 18, 1, 18, 17, 1500),
]


#: Rows of 200 bytes that several blocks copy.
ROWS = (0, 224, 0, 224, 200, 600)


class Area(NamedTuple):
    dst: torch.Tensor
    expected: torch.Tensor
    src: torch.Tensor  # the launch has its address
    ends: tuple[tuple[int, int], ...]


def in_places(shape: tuple[int, ...], places: int, gap: int = 0, device: str = "cpu") -> Area:
    """Rectangles of random bytes. The distance of the destinations exceeds the distance of the
    sources by ``gap``."""
    to, dst_pitch, at, src_pitch, width, height = shape
    dst_size, src_size = (
        (max(1, height) * max(width, pitch) + 31) // 16 * 16 for pitch in (dst_pitch, src_pitch)
    )
    dst = area(to + places * (dst_size + gap), 1, device)
    src = area(at + places * src_size, 2, device)
    expected, ends = dst.clone(), []
    for place in range(places):
        first, begin = to + place * (dst_size + gap), at + place * src_size
        for row in range(height):
            expected[first + row * dst_pitch :][:width] = src[begin + row * src_pitch :][:width]
        ends.append((dst.data_ptr() + first, src.data_ptr() + begin))
    return Area(dst, expected, src, tuple(ends))


def rectangle(
    kernels: Kernels,
    shape: tuple[int, ...],
    device: str = "cpu",
    stream: Any = None,
    blocks: int = launch.PEER_BLOCKS,
) -> None:
    areas, (_, dst_pitch, _, *rest) = in_places(shape, 1, 0, device), shape
    kernels.copies(areas.ends, (dst_pitch, *rest), stream, blocks)
    assert torch.equal(areas.dst, areas.expected), shape


def test_copies_are_exact(on_host: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that exceed the limit of a launch take several."""
    for shape in RECTANGLES:
        rectangle(on_host, shape)
    for limit in (64, 1000):
        monkeypatch.setattr(launch, "MAX_UNITS", limit)
        on_host._copies.cache_clear()
        for shape in RECTANGLES[:14]:
            rectangle(on_host, shape)
    on_host._copies.cache_clear()


def test_copies_use_at_most_the_requested_blocks(on_host: Kernels) -> None:
    launches = on_host.binding.launches
    for blocks, used in ((1, 1), (3, 3), (64, 10)):
        launches.clear()
        rectangle(on_host, (0, 80, 0, 80, 80, 1000), blocks=blocks)
        assert launches == [("ficco_copy_aligned", used)]


@pytest.mark.parametrize("peers", [1, 2, 3, launch.MAX_ENDS, launch.MAX_ENDS + 1])
@pytest.mark.parametrize(
    ("src_pitch", "gap", "alike"),
    [(224, 0, True), (200, 1, True), (224, 1, False)],
    ids=["aligned", "shifted", "mixed"],
)
def test_copies_to_several_places(
    on_host: Kernels, peers: int, src_pitch: int, gap: int, alike: bool
) -> None:
    """One launch, if its kernel fits all copies, with separate blocks for each destination."""
    areas = in_places((0, 224, 0, src_pitch, 200, 9), peers, gap)
    launches = on_host.binding.launches
    launches.clear()
    on_host.copies(areas.ends, (224, src_pitch, 200, 9), None, 2)
    assert torch.equal(areas.dst, areas.expected)
    one_launch = peers <= launch.MAX_ENDS and (alike or peers == 1)
    assert len(launches) == (1 if one_launch else peers)
    if one_launch:
        ((_, blocks),) = launches
        assert blocks == peers


def signals_on(words: torch.Tensor, front: int = 0, rear: int = 0) -> Signals:
    """Signals on 16 words: word 0 counts blocks; after the copies 1 and 2 become 7 and 3 to 5
    become 9. Words 6 on (``front`` of them) and 12 on (``rear``) are awaited to be 5."""
    at = [words.data_ptr() + 4 * i for i in range(len(words))]
    awaited = [
        ScriptStep(word, 5, waits=True) for word in (*at[6 : 6 + front], *at[12 : 12 + rear])
    ]
    cleared = [ScriptStep(word, 7) for word in at[1:3]]
    posted = [ScriptStep(word, 9, behind=word == at[3]) for word in at[3:6]]
    script = Script((*cleared, *posted, *awaited[front:]))
    return Signals(at[0], Script(tuple(awaited[:front])), script)


@contextmanager
def answered(
    words: torch.Tensor, answers: Sequence[tuple[int, int, int | None]], look: Callable[[], Any]
) -> Iterator[list[Any]]:
    """Run a peer that writes words in order: (word, value, the word that must be set before).
    Yields the results of ``look`` before each write."""
    seen: list[Any] = []

    def peer() -> None:
        for word, value, first in answers:
            end = time.monotonic() + 10
            while first is not None and not words[first] and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.03)
            seen.append(look())
            words[word] = value

    thread = threading.Thread(target=peer)
    thread.start()
    yield seen
    thread.join()


@pytest.mark.parametrize("gap", [0, 1])
def test_signals_follow_all_copies(on_host: Kernels, gap: int) -> None:
    """The order of the blocks does not matter. The word that counts the blocks is 0 afterwards."""
    areas, words = in_places(ROWS, 3, gap), torch.zeros(16, dtype=torch.int32)
    signals = signals_on(words)
    launches = on_host._prepare(areas.ends, (224, 224, 200, 600), 2, True, signals)
    assert len(launches) == (3 if gap else 1)
    for turn in range(2):
        for number, (kernel, blocks, threads, arguments) in enumerate(launches):
            for block in random.Random(turn).sample(range(blocks), blocks):
                assert not words[1:].any()
                on_host.binding.in_turn(block, threads, kernel, arguments)
            assert bool(words[1:].any()) == (number == len(launches) - 1)
        assert torch.equal(areas.dst, areas.expected)
        assert words.tolist() == [0, 7, 7, 9, 9, 9] + 10 * [0]
        words.zero_()


def test_a_launch_waits_for_signals(on_host: Kernels) -> None:
    """The launch posts its own signals before it waits."""
    areas, words = in_places(ROWS, 3), torch.zeros(16, dtype=torch.int32)
    answers = (12, 5, 5), (13, 5, 5)
    with answered(words, answers, lambda: words[[*range(6), 12, 13]].tolist()) as seen:
        on_host.copies(areas.ends, (224, 224, 200, 600), None, 2, signals_on(words, rear=2))
        assert words[13] == 5
    assert seen == [[0, 7, 7, 9, 9, 9, 0, 0], [0, 7, 7, 9, 9, 9, 5, 0]]
    assert torch.equal(areas.dst, areas.expected)


@pytest.mark.parametrize("gap", [0, 1])
def test_no_block_copies_before_its_front_waits_end(on_host: Kernels, gap: int) -> None:
    """If the copies take several launches, the first launch waits for all of them."""
    areas, words = in_places(ROWS, 3, gap), torch.zeros(16, dtype=torch.int32)
    before, signals = areas.dst.clone(), signals_on(words, front=2)
    launches = on_host._prepare(areas.ends, (224, 224, 200, 600), 2, True, signals)
    kernel, blocks, threads, arguments = launches[0]
    for block in range(blocks):
        areas.dst.copy_(before)
        words.zero_()
        answers = (7, 5, None), (6, 5, None)
        with answered(words, answers, lambda: torch.equal(areas.dst, before)) as seen:
            on_host.binding.in_turn(block, threads, kernel, arguments)
        assert seen == [True, True] and not torch.equal(areas.dst, before)
        assert words.tolist() == [1, 0, 0, 0, 0, 0, 5, 5] + 8 * [0]


def test_copies_stay_within_the_pages_that_hold_their_rows(on_host: Kernels) -> None:
    """The neighbouring pages are protected: an access would end the process."""
    page = mmap.PAGESIZE
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    maps = [mmap.mmap(-1, 3 * page) for _ in range(2)]
    starts = []
    for pages in maps:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        pages[page : 2 * page] = random.Random(1).randbytes(page)
        assert protect(begin, page, 0) == protect(begin + 2 * page, page, 0) == 0
        starts.append(begin + page)
    (to, _), (at, source) = zip(starts, maps, strict=True)
    for width in (1, 15, 16, 17, 33, 100):
        for to_gap, at_gap in itertools.product((0, 1, 8, 15), repeat=2):
            # Rows that begin near the first byte, and rows that end near the last byte.
            for first, begin in ((to_gap, at_gap), (page - width - to_gap, page - width - at_gap)):
                on_host.copies(((to + first, at + begin),), (width, width, width, 1), None)
                copied = ctypes.string_at(to + first, width)
                assert copied == source[page + begin : page + begin + width], (width, first, begin)
    for start in starts:
        assert protect(start - page, 3 * page, mmap.PROT_READ | mmap.PROT_WRITE) == 0


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
            expected = target.clone()
            expected[5 : 5 + src.shape[0], 11 : 11 + src.shape[1]] = src
            kernels.place(dst, src, stream)
            assert torch.equal(target, expected)
        solid = torch.zeros(31 * 57, dtype=dtype, device=device).view(3, 19, 31)
        kernels.place(solid, whole.view(3, 19, 31), stream)
        assert torch.equal(solid.view(31, 57), whole)


def in_order(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The defined sum: additions in float32 in order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)


def mixed_sizes(count: int, dtype: torch.dtype, *shape: int, device: str) -> list[torch.Tensor]:
    """Parts of different magnitudes, so that another order or a second rounding changes the sum."""
    parts = (
        torch.randn(shape, device=device) * 2.0 ** (5 * (part % 3) - 3) for part in range(count)
    )
    return [part.to(dtype) for part in parts]


def check_reduce(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    """Local sums, and one-shot sums without waits."""
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    signals = Signals(arrived.data_ptr())
    check_sum(kernels.reduce, launch.REDUCTIONS, device, stream)
    same_dtype = [(part, out) for part, out in launch.REDUCTIONS if part == out]
    check_sum(lambda *sum: kernels.one_shot(*sum[:2], signals, sum[2]), same_dtype, device, stream)
    assert arrived.item() == 0


def check_sum(
    reduce: Callable[..., None],
    kinds: Iterable[tuple[torch.dtype, torch.dtype]],
    device: str,
    stream: Any,
) -> None:
    torch.manual_seed(3)
    for (part, out), count in itertools.product(kinds, (1, 2, 4, 7, 16)):
        for elements, skip in ((0, 0), (1, 0), (8, 0), (1003, 0), (1000, 1)):
            whole = mixed_sizes(count, part, elements + skip, device=device)
            parts = [tensor[skip:] for tensor in whole]
            result = torch.full((elements + skip,), 7.0, dtype=out, device=device)[skip:]
            reduce(result, parts, stream)
            assert torch.equal(result, in_order(parts, out)), (part, out, count, elements)
        # Columns of a matrix: whole vectors, single elements, and an odd first column.
        for rows, first, last, pitch in ((5, 8, 40, 64), (3, 8, 13, 64), (4, 1, 17, 31)):
            whole = mixed_sizes(count, part, rows, pitch, device=device)
            parts = [matrix[:, first:last] for matrix in whole]
            for wider in (0, 16):  # the result may have a larger pitch
                total = torch.full((rows, pitch + wider), 7.0, dtype=out, device=device)
                expected = total.clone()
                reduce(total[:, first:last], parts, stream)
                expected[:, first:last] = in_order(parts, out)
                assert torch.equal(total, expected), (part, out, count, first, last, wider)


def check_scaled(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    """A sum is scaled before it is rounded, by vectors and by elements."""
    for part, out in launch.REDUCTIONS:
        for elements, factor in itertools.product((8, 1003), (1 / 3, 0.25)):
            parts = mixed_sizes(3, part, elements, device=device)
            total = torch.empty(elements, dtype=out, device=device)
            kernels.reduce(total, parts, stream, factor)
            expected = in_order(parts, torch.float32) * factor
            assert torch.equal(total, expected.to(out)), (part, out, elements, factor)


def check_merge(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    """Compare with float64, within the result's rounding; a single part and equal parts exactly.
    Parts have all rows, or different rows; the first part always has all rows."""
    torch.manual_seed(4)
    for dtype, ragged in itertools.product(launch.MERGES, (False, True)):
        for count, (batch, heads, rows, size) in itertools.product(
            (1, 2, 3, 5, 16), ((1, 1, 1, 8), (2, 3, 5, 64), (1, 4, 7, 128), (1, 2, 0, 8))
        ):
            shape = batch, rows, heads, size
            spans = [(i % 4, rows - i % 3) if ragged else (0, rows) for i in range(count)]
            spans = [(first, last) if first < last else (0, rows) for first, last in spans]
            values = [torch.randn(shape, device=device).to(dtype) for _ in range(count)]
            means = [
                value.transpose(1, 2) if i % 2 else value.transpose(1, 2).contiguous()
                for i, value in enumerate(values)
            ]
            lses = [40 * torch.randn(batch, heads, rows, device=device) for _ in range(count)]
            if count == 3:  # strided, and of different magnitudes
                lses = [torch.stack([lse, lse], -1)[..., 0] * 100 for lse in lses]
            parts = [
                (first, last, mean[:, :, first:last], lse[:, :, first:last])
                for (first, last), mean, lse in zip(spans, means, lses, strict=True)
            ]
            out = torch.full(shape, 7.0, dtype=dtype, device=device).transpose(1, 2)
            total = torch.full((batch, rows, heads), 7.0, device=device).transpose(1, 2)
            kernels.merge(out, total, parts, stream)
            wide = torch.stack(lses).double()
            for lse, (first, last) in zip(wide, spans, strict=True):
                lse[:, :, :first] = lse[:, :, last:] = -torch.inf
            weights = (wide - wide.logsumexp(0)).exp().unsqueeze(-1)
            expected = (torch.stack(means).double() * weights).sum(0)
            eps = torch.finfo(dtype).eps
            assert ((out.double() - expected).abs() <= 0.6 * eps * expected.abs() + 1e-5).all()
            assert torch.allclose(total.double(), wide.logsumexp(0), rtol=1e-6, atol=1e-5)
            repeated = torch.full(shape, 7.0, dtype=dtype, device=device).transpose(1, 2)
            kernels.merge(repeated, None, [(0, rows, means[0], lses[0])] * count, stream)
            if count & count - 1 == 0:
                assert torch.equal(repeated, means[0])


def check_combine(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    """Integers exactly; other values like PyTorch's operations, up to an ulp of float32."""
    for dtype, choices, (tokens, rows, cols) in itertools.product(
        launch.COMBINES, (0, 1, 2, 3, 8), ((1, 1, 8), (33, 100, 24), (257, 40, 4096), (0, 3, 8))
    ):
        torch.manual_seed(choices)
        table = torch.randint(-8, 9, (rows, cols), device=device).to(dtype)
        picked = torch.randint(rows, (choices, tokens), device=device).t()
        weights = torch.randint(-4, 5, (tokens, choices), device=device) / 4
        for index, scale in itertools.product((picked, picked.contiguous()), (None, weights)):
            out = torch.full((tokens, cols), 7.0, dtype=dtype, device=device)
            kernels.combine(out, table, index, scale, stream)
            picks = table.double()[index] * (1 if scale is None else scale.double()[..., None])
            assert torch.equal(out, picks.sum(1).to(dtype))
        table = torch.randn(rows, cols, device=device).to(dtype)
        weights = torch.randn(tokens, choices, device=device)
        kernels.combine(out, table, picked, weights, stream)
        expected = (table.double()[picked] * weights.double()[..., None]).sum(1)
        magnitude = (table.double()[picked] * weights.double()[..., None]).abs().sum(1)
        eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
        assert ((out.double() - expected).abs() <= eps * (magnitude + tiny)).all()


def check_gate(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    """Compare with float64, within the rounding of the result. Rows in between are not written."""
    torch.manual_seed(6)
    for dtype, function, shape in itertools.product(
        launch.GATED, launch.GATES, ((5, 8), (3, 4, 24), (1, 7, 1408), (2, 0, 8))
    ):
        *outer, cols = shape
        wide = torch.randn(*outer[:-1], outer[-1] + 2, 2 * cols, device=device).to(dtype) * 4
        wide[..., :1, 0], wide[..., 1:2, 0] = 200.0, -200.0
        buffer = torch.full((*outer[:-1], outer[-1] + 1, cols), 7.0, dtype=dtype, device=device)
        x, out = wide[..., : outer[-1], :], buffer[..., : outer[-1], :]
        kernels.gate(function, out, x, stream)
        gate, value = x.double().chunk(2, -1)
        active = gate * gate.sigmoid() if function == "silu gated" else gate.relu()
        eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
        expected = active * value
        assert ((out.double() - expected).abs() <= 0.6 * eps * expected.abs() + eps * tiny).all()
        assert (buffer[..., outer[-1] :, :] == 7).all()
    nans = torch.full((1, 16), float("nan")).to(device).bfloat16()
    for function in launch.GATES:
        out = torch.zeros(1, 8, device=device).bfloat16()
        kernels.gate(function, out, nans, stream)
        assert out.isnan().all()


def check_route(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    torch.manual_seed(7)
    sizes = (
        *(((1, 1), 1, 0), ((300, 2), 9, 3), ((7, 8), 9, 0), ((1000, 1), 9, 50)),
        *(((0, 2), 1, 3), ((4, 0), 9, 0), ((300, 2), 9, 50), ((20, 8), 1, 50)),
    )
    for turn, ((tokens, choices), experts, capacity) in enumerate(sizes):
        chosen = torch.rand(tokens, 12, device=device).argsort(1)[:, :choices] % experts
        chosen = chosen if turn % 2 else chosen.t().contiguous().t()
        counts, places, rows, sources = kernels.route(chosen, experts, capacity, stream)
        flat = chosen.t().flatten()
        assert torch.equal(counts, torch.bincount(flat, minlength=experts))
        each = (flat[None] == torch.arange(experts, device=device)[:, None]).cumsum(1)
        expected = (each.gather(0, flat[None]) - 1).view(choices, tokens).t()
        assert torch.equal(places, expected)
        if capacity:
            slots = chosen * capacity + expected
            assert torch.equal(rows, slots.where(expected < capacity, experts * capacity))
        else:
            order = flat.argsort(stable=True)
            ranked = rows.t().flatten()[order]
            assert torch.equal(ranked, torch.arange(len(flat), device=device))
            assert torch.equal(sources, order % max(tokens, 1))


def check_halves(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    """All values, float32 values halfway between two, infinities and NaNs."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=device).to(torch.int16)
    for dtype in HALVES:
        values = patterns.view(dtype)
        result = torch.empty_like(values)
        kernels.reduce(result, [values], stream)
        assert torch.equal(result.isnan(), values.isnan())
        assert torch.equal(result.view(torch.int16)[~values.isnan()], patterns[~values.isnan()])
        # Halfway between two values of 16 or of 11 bits, and 1 below and above halfway.
        ends = torch.tensor([0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], device=device)
        near = (torch.arange(1 << 16, device=device)[:, None] << 16 | ends).flatten()
        floats = near.to(torch.int32).view(torch.float32)
        result = torch.empty(floats.shape, dtype=dtype, device=device)
        kernels.reduce(result, [floats], stream)
        expected = floats.to(dtype)
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result[~expected.isnan()], expected[~expected.isnan()])


def check_copy_runs(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    """Runs of any length, also more than one launch takes. No other bytes are written."""
    for count, longest in ((1, 1), (5, 3), (launch.MAX_RUNS, 700), (2 * launch.MAX_RUNS + 1, 9)):
        units = torch.arange(count * longest * 4, dtype=torch.int32, device=device).view(-1, 4)
        out = torch.full_like(units, -1)
        draw = np.random.default_rng(count)
        rows = draw.integers(1, longest + 1, count)
        at, to = (longest * draw.permutation(count) for _ in range(2))
        ends = [16 * row + base for row, base in ((to, out.data_ptr()), (at, units.data_ptr()))]
        kernels.copy_runs(*ends, 16 * rows, stream)
        expected = torch.full_like(units, -1)
        for dst, src, length in zip(to, at, rows, strict=True):
            expected[dst : dst + length] = units[src : src + length]
        assert torch.equal(out, expected)


#: Rows, columns, offset of the first element, length of a factor's part: rows in registers of one
#: warp and of several warps, rows that exceed the registers, and blocks of which the last is short.
CAST_SHAPES = (
    *((5, 48, 0, 48), (3, 4112, 0, 4112), (2, 16400, 0, 16400), (3, 96, 3, 96)),
    *((5, 400, 0, 128), (2, 128, 5, 128)),
)


def powers(matrix: torch.Tensor, length: int, maximum: float) -> torch.Tensor:
    """The defined factors: the smallest powers of two by which no element overflows."""
    rows, cols = matrix.shape
    factors = torch.empty(rows, -(-cols // length))
    for row in range(rows):
        for part in range(factors.shape[1]):
            largest = matrix[row, part * length : (part + 1) * length].abs().max().item()
            exponent = -126
            while 2.0**exponent * maximum < largest:
                exponent += 1
            factors[row, part] = 2.0**exponent
    return factors


def check_casts(kernels: Kernels, device: str = "cpu", stream: Any = None) -> None:
    for to, dtype in itertools.product(launch.E4M3, launch.CASTS):
        check_cast(kernels, to, dtype, device, stream)


def check_cast(kernels: Kernels, to: Any, dtype: Any, device: str, stream: Any) -> None:
    """Bits are equal to PyTorch's, also of the largest sizes, ties and subnormal numbers. No other
    bytes are written."""
    maximum, random_ = torch.finfo(to).max, torch.Generator().manual_seed(1)
    for rows, cols, offset, length in CAST_SHAPES:
        wide = torch.randn(rows, cols + 8, generator=random_)
        wide *= 2.0 ** torch.randint(-12, 12, (rows, 1), generator=random_)
        wide[0, offset : offset + 16] = torch.arange(16) * 2.0**-10  # ties
        wide[0, offset + 16] = maximum * 2.0**-4
        wide[1] = 0
        wide[1, -1] = maximum  # outside of the matrix
        wide[-1, offset + cols - 1] = 3 * maximum  # the last element read
        matrix = wide.to(device, dtype)[:, offset : offset + cols]
        out = torch.zeros(rows + 1, cols + 16, device=device).to(to)
        factors = torch.full((rows + 1, -(-cols // length)), 99.0, device=device)
        narrow, scales = out[:rows, :cols], factors[:rows]
        kernels.cast(narrow, scales, matrix, stream)
        expected = powers(matrix.cpu().float(), length, maximum).to(device)
        assert torch.equal(scales, expected), (rows, cols)
        shared = expected.repeat_interleave(length, 1)[:, :cols]
        quotients = (matrix.float() / shared).to(to)
        assert torch.equal(narrow.view(torch.uint8), quotients.view(torch.uint8)), (rows, cols)
        assert (factors[rows:] == 99).all()
        assert not out[rows:].float().any() and not out[:, cols:].float().any()


#: Checks of kernels on a device and a stream, shared with the tests on GPUs.
CHECKS = (
    *(check_place, check_reduce, check_scaled, check_halves, check_merge, check_combine),
    *(check_gate, check_route, check_copy_runs, check_casts),
)


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_are_exact(on_host: Kernels, check: Callable[[Kernels], None]) -> None:
    check(on_host)


def test_casts_of_values_that_are_not_finite_are_nan(on_host: Kernels) -> None:
    for to, value in itertools.product(launch.E4M3, (torch.nan, torch.inf, -torch.inf)):
        matrix = torch.ones(3, 256).bfloat16()
        matrix[1, 200] = value
        out, factors = torch.zeros(3, 256).to(to), torch.zeros(3, 2)
        on_host.cast(out, factors, matrix, None)
        back = out.float() * factors.repeat_interleave(128, 1)
        assert back[1, 128:].isnan().all()
        assert (back[[0, 2]] == 1).all() and (back[1, :128] == 1).all()


def test_a_sum_in_place(on_host: Kernels) -> None:
    parts = [torch.randn(501).bfloat16() for _ in range(3)]
    expected = in_order(parts, torch.bfloat16)
    on_host.reduce(parts[1], parts, None)
    assert torch.equal(parts[1], expected)


def test_refused_arguments(on_host: Kernels) -> None:
    x = torch.ones(4, 6)
    mean, lse = torch.zeros(1, 2, 3, 8).bfloat16(), torch.zeros(1, 2, 3)
    gated, out, run = torch.zeros(3, 16).bfloat16(), torch.zeros(3, 8).bfloat16(), np.array([32])
    units, at = torch.zeros(2, 12).bfloat16(), Signals(0)
    wrong, units_of = torch.zeros(2, 16).bfloat16()[:, :8], "multiples of 16 bytes"
    cases: list[tuple[Any, ...]] = [
        (on_host.place, x.t(), x.t(), "required"),
        (on_host.place, x, torch.ones(6, 4).t(), "required"),
        (on_host.reduce, x, [], "at least 1"),
        (on_host.reduce, x, [x[:2]], "shape"),
        (on_host.reduce, x, [x.double()], "float64"),
        (on_host.reduce, x, [x.bfloat16()], "bfloat16"),
        (on_host.reduce, x.bfloat16(), [x, x.bfloat16()], "one dtype"),
        (on_host.reduce, x.t(), [x.t()], "contiguous"),
        (on_host.reduce, x[:, 1:], [x[:, 1:], torch.ones(4, 9)[:, 1:6]], "one distance"),
        (on_host.two_shot, units[:1], [units[:1]], [], [(0, 0, units[:1])], 1, at, units_of),
        (on_host.two_shot, wrong, [wrong], [], [(0, 0, units[:1])], 1, at, units_of),
        (on_host.merge, mean[..., 1:], None, [(0, 3, mean[..., 1:], lse)], units_of),
        *(
            (on_host.copy_runs, *(run + 8 * row), units_of)
            for row in np.eye(3, dtype=int)[..., None]
        ),
    ]
    for method, *arguments, words in cases:
        with pytest.raises(ValueError, match=words):
            method(*arguments, None)
    assert launch.gates("silu gated", out, gated) and not launch.gates("gelu gated", out, gated)
    for wrong, left in (
        (out.float(), gated.float()),
        (out[:2], gated),
        (out[:, :4], gated[:, :8]),
        (out[:, ::2], gated[:, ::2]),
    ):
        assert not launch.gates("silu gated", wrong, left)


def test_one_shot_sums_take_many_blocks(on_host: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks loop over the elements more than once."""
    arrived = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(on_host.binding, "processors", 6)
    parts = [torch.randn(3 * launch.ONE_SHOT_THREADS * 4 * 4 * 2 + 5) for _ in range(3)]
    result, launches = torch.empty_like(parts[0]), on_host.binding.launches
    launches.clear()
    on_host.one_shot(result, parts, Signals(arrived.data_ptr()), None)
    assert torch.equal(result, in_order(parts, torch.float32))
    assert launches == [("ficco_one_shot_float32", 3)]


class Sum:
    """A launch of a one-shot sum that runs block by block. Word 0 counts blocks, 1 to 3 are
    awaited, 4 and 5 are written before the sum, 8 to 11 after it, and 12 and 13 by another
    warp."""

    def __init__(self, kernels: Kernels, patch: pytest.MonkeyPatch) -> None:
        self.binding, launched = kernels.binding, mock.Mock()
        patch.setattr(self.binding, "processors", 6)
        patch.setattr(self.binding, "launch", launched)
        self.words = torch.zeros(16, dtype=torch.int32)
        at = [self.words.data_ptr() + 4 * i for i in range(16)]
        posts = ScriptStep(at[4], 7), ScriptStep(at[5], 8, behind=True)
        first_wait, *waits = (ScriptStep(word, 5, waits=True) for word in at[1:4])
        aside = ScriptStep(at[12], 6 << 32 | 4, wide=True)
        front = Script((aside, first_wait, *posts, *waits), aside=1, alone=4)
        rear = Script((ScriptStep(at[8], 9), ScriptStep(at[10], 3 << 32 | 2, wide=True)))
        self.parts = [torch.randn(20000) for _ in range(2)]  # the launch has their addresses
        self.out, self.expected = torch.full((20000,), 7.0), in_order(self.parts, torch.float32)
        kernels.one_shot(self.out, self.parts, Signals(at[0], front, rear), None, blocks=3)
        self.kernel, blocks, self.threads, self.arguments, _ = launched.call_args.args
        assert (blocks, self.threads) == (3, launch.ONE_SHOT_THREADS)

    def carry_out(self, block: int) -> None:
        self.binding.in_turn(block, self.threads, self.kernel, self.arguments)


def test_posts_after_a_sum_follow_all_of_its_blocks(on_host: Kernels, monkeypatch: Any) -> None:
    """The order of the blocks does not matter. One block writes the words before the sum."""
    summing = Sum(on_host, monkeypatch)
    for order in itertools.permutations(range(3)):
        summing.words.zero_()
        summing.words[1:4] = 5
        summing.out.fill_(7.0)
        for number, block in enumerate(order):
            words, posted = summing.words, 0 in order[:number]
            assert words[4:6].tolist() == [7 * posted, 8 * posted] and not words[8:12].any()
            assert words[12:14].tolist() == [4 * posted, 6 * posted]
            assert not torch.equal(summing.out, summing.expected)
            summing.carry_out(block)
        assert torch.equal(summing.out, summing.expected)
        assert summing.words.tolist() == [0, 5, 5, 5, 7, 8, 0, 0, 9, 0, 2, 3, 4, 6, 0, 0]


@pytest.mark.parametrize("block", range(3))
def test_every_block_waits_for_the_peers(on_host: Kernels, monkeypatch: Any, block: int) -> None:
    """Block 0 also waits for word 1 before it posts to the peers. No block reads before its waits
    end."""
    summing, first = Sum(on_host, monkeypatch), 5 if block == 0 else None
    answers = (1, 5, None), (2, 5, first), (3, 5, first)
    look = lambda: (summing.words[4:6].tolist(), bool((summing.out != 7.0).any()))  # noqa: E731
    with answered(summing.words, answers, look) as seen:
        summing.carry_out(block)
    posted = [7, 8] if block == 0 else [0, 0]
    assert seen == [([0, 0], False), (posted, False), (posted, False)]
    assert (summing.out != 7.0).any() and summing.words[0] == 1


class TwoShot:
    """Launches of a two-shot with two blocks on ranks of one process. They run block by block, the
    threads of a block of all ranks concurrently. The words of a rank are the counter, one word that
    is written at the end, and one word for each rank and block."""

    BLOCKS = 2

    def __init__(self, kernels: Kernels, patch: pytest.MonkeyPatch, *rows: int, n: int) -> None:
        self.binding: Any = kernels.binding
        self.launches: list[tuple[Any, ...]] = []
        patch.setattr(self.binding, "launch", lambda *arguments: self.launches.append(arguments))
        self.ranks, size = range(len(rows)), 2 + self.BLOCKS * len(rows)
        self.words = torch.zeros(len(rows), size, dtype=torch.int32)
        ends = [sum(rows[:rank]) for rank in (*self.ranks, len(rows))]
        self.own = [slice(*pair) for pair in itertools.pairwise(ends)]
        self.products = mixed_sizes(len(rows), torch.bfloat16, ends[-1], n, device="cpu")
        self.arrived, self.out = torch.zeros(2, len(rows), ends[-1], n).bfloat16()
        word = lambda rank, at: self.words[rank, at].data_ptr()  # noqa: E731
        first = lambda rank, of: word(rank, 2 + self.BLOCKS * of)  # noqa: E731
        for rank in self.ranks:
            peers, own = [peer for peer in self.ranks if peer != rank], self.own[rank]
            sends = [(self.arrived[to, own].data_ptr(), first(to, rank)) for to in peers]
            keeps = [
                (self.arrived[rank, rows].data_ptr(), first(rank, of), self.out[rank, rows])
                for of in peers
                for rows in [self.own[of]]
            ]
            rear = Script((ScriptStep(word(rank, 1), 9),))
            parts = [product[own] for product in self.products]
            ends = sends, keeps, self.BLOCKS, Signals(word(rank, 0), rear=rear)
            kernels.two_shot(self.out[rank, own], parts, *ends, None)

    def carry_out(self, block: int, *ranks: int) -> None:
        work = [(self.launches[rank][0], self.launches[rank][3]) for rank in ranks]
        self.binding.concurrently(block, launch.ONE_SHOT_THREADS, *work)


def test_a_two_shot_is_exact_on_all_ranks(on_host: Kernels, monkeypatch: Any) -> None:
    """The blocks run in any order, in successive calls. The words have their first values again."""
    torch.manual_seed(1)
    ranks = TwoShot(on_host, monkeypatch, 9, 7, 2, n=1032)
    for order in ((0, 1), (1, 0)):
        for product in ranks.products:
            product.copy_(torch.randn(product.shape) * 2.0 ** int(torch.randint(-3, 4, ())))
        ranks.words.zero_()
        ranks.out.fill_(7.0)
        for block in order:
            assert not ranks.words[:, 1].any()
            ranks.carry_out(block, *ranks.ranks)
        expected = in_order(ranks.products, torch.bfloat16)
        assert all(torch.equal(out, expected) for out in ranks.out)
        assert ranks.words.tolist() == [[0, 9] + [0] * 6] * 3


@pytest.mark.parametrize("block", range(TwoShot.BLOCKS))
def test_a_block_of_a_two_shot_meets_that_block_of_the_peer(
    on_host: Kernels, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """The block posts after its sums have reached the peer, and copies the peer's sums after the
    peer's post."""
    ranks = TwoShot(on_host, monkeypatch, 8, 8, n=1024)
    expected, arrived = in_order(ranks.products, torch.bfloat16), ranks.out.new_full((8, 1024), 3.0)
    units = torch.arange(1024).view(8, 128) // launch.ONE_SHOT_THREADS % ranks.BLOCKS == block
    of_block = units.repeat_interleave(8, 1)
    words, other = ranks.words.view(-1), ranks.words.shape[1]
    own_word, peer_word = other + 2 + block, 2 + ranks.BLOCKS + block

    def look() -> tuple[bool, bool]:
        sent = torch.equal(ranks.arrived[1, :8], torch.where(of_block, expected[:8], 0))
        ranks.arrived[0, 8:] = arrived
        return sent, bool(ranks.out[0, 8:].any())

    with answered(words, [(peer_word, 1, own_word)], look) as seen:
        ranks.carry_out(block, 0)
    assert seen == [(True, False)]
    assert torch.equal(ranks.out[0, 8:], torch.where(of_block, arrived, 0))
    assert words.nonzero().flatten().tolist() == [0, own_word]


def test_a_script_runs_in_order(on_host: Kernels) -> None:
    words = torch.zeros(8, dtype=torch.int32)
    at = [words.data_ptr() + 4 * i for i in range(8)]
    waits = [ScriptStep(at[word], 1 + word, waits=True) for word in (0, 1)]
    posts = ScriptStep(at[3], 5, behind=True), ScriptStep(at[4], 6 << 32 | 7, wide=True)
    script = Script((ScriptStep(at[2], 4), waits[0], posts[0], waits[1], posts[1]))
    with answered(words, ((0, 1, 2), (1, 2, 3)), words.tolist) as seen:
        on_host.script(script, None)
    assert seen == [[0, 0, 4, 0, 0, 0, 0, 0], [1, 0, 4, 5, 0, 0, 0, 0]]
    assert words.tolist() == [1, 2, 4, 5, 7, 6, 0, 0]


def test_steps_aside_of_a_script_run_once(on_host: Kernels) -> None:
    """A thread of the second warp runs them."""
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


TARGET = Target("cuda", "sm_90")


class Counted:
    def __init__(self, version: str = "1", error: str = "") -> None:
        self.version, self.error, self.calls = version, error, 0

    def __call__(self) -> Compiler:
        return Compiler("counted", self.version, self.run)

    def run(self, text: str, arch: str) -> bytes:
        self.calls += 1
        if self.error:
            raise BackendError("counted", "1", self.error)
        return f"{arch} {self.version} {text}".encode()


def absent() -> Compiler:
    raise CompilerNotFound("it was not found")


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *cuda: monkeypatch.setitem(build.FINDERS, "cuda", cuda)


def test_each_key_is_compiled_once(finders: Any, tmp_path: Path, monkeypatch: Any) -> None:
    first, second = Counted("1"), Counted("2")
    finders(absent, first)
    image = build.compiled(TARGET, tmp_path)
    assert build.compiled(TARGET, tmp_path) == image and first.calls == 1
    assert image.startswith(b"sm_90 1 ") and b"ficco_post" in image
    assert [path.suffix for path in tmp_path.iterdir()] == [".bin"]
    build.compiled(Target("cuda", "sm_100"), tmp_path)
    assert first.calls == 2
    finders(second)
    assert b" 2 " in build.compiled(TARGET, tmp_path)
    text = build.source() + "// changed\n"
    monkeypatch.setattr(build, "source", lambda: text)
    assert build.compiled(TARGET, tmp_path).endswith(b"// changed\n")
    assert second.calls == 2 and len(list(tmp_path.iterdir())) == 4


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda image: b"",
    "cut": lambda image: image[:-7],
    "head": lambda image: image[:10],
    "header only": lambda image: image[:48],
    "one bit": lambda image: image[:-9] + bytes([image[-9] ^ 4]) + image[-8:],
    "another version": lambda image: image.replace(b"kernels 1", b"kernels 0", 1),
    "longer": lambda image: image + b"x",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again(finders: Any, tmp_path: Path, damage: str) -> None:
    first = Counted()
    finders(first)
    image = build.compiled(TARGET, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert build.compiled(TARGET, tmp_path) == image
    assert first.calls == 2 and path.read_bytes() == whole


def test_a_file_that_other_users_may_write_is_compiled_again(
    finders: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Counted()
    finders(first)
    image = build.compiled(TARGET, tmp_path / "kernels")
    (path,) = (tmp_path / "kernels").iterdir()
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    changes = [lambda: path.chmod(0o602), lambda: path.chmod(0o620)]
    if os.geteuid() == 0:
        changes.append(lambda: os.chown(path, 65534, -1))
    for calls, change in enumerate(changes, 2):
        monkeypatch.setattr(errors, "_warned", set())
        change()
        with pytest.warns(UserWarning, match="other users may write it"):
            assert build.compiled(TARGET, path.parent) == image
        assert (first.calls, path.stat().st_uid) == (calls, os.geteuid())


def test_cache_that_cannot_be_written(finders: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The compiled image is used without a cache. An interrupted write leaves no file."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(errors, "_warned", set())
    finders(Counted())
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    with pytest.warns(UserWarning, match="not kept"):
        assert build.compiled(TARGET, file / "kernels").startswith(b"sm_90")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build.compiled(TARGET, folder)
    assert list(folder.iterdir()) == []


def test_the_next_compiler_replaces_one_that_fails(
    finders: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finders(Counted(error="unknown architecture"), Counted("2"))
    assert b" 2 " in build.compiled(TARGET, tmp_path)
    finders(Counted(error="unknown architecture"), Counted(error="second"), absent)
    with pytest.raises(BackendError, match="counted failed with 1: unknown architecture"):
        build.compiled(Target("cuda", "sm_9"), tmp_path)
    for vendor, remedy in (("cuda", "nvrtc"), ("hip", "clang-19")):
        monkeypatch.setitem(build.FINDERS, vendor, (absent,))
        with pytest.raises(BackendError, match=f"no compiler: it was not found.*{remedy}"):
            build.compiled(Target(vendor, "any"))
