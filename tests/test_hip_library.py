"""What the HIP engine asks of its machine: the placement kernel, a version, a way of signals.

On the double of the HIP library, as ``test_hip.py``.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hip_ranks
import pytest
import test_hip
import test_operators as operators
import torch
import torch.distributed as dist
from cases import Case, all_exact, equal, exact
from hip_ranks import SERIES, calls, clean, double, run
from ranks import Failure, Rank, caught

import ficco
from ficco.compute import products
from ficco.hip_kernels.launch import NAMES, REDUCTIONS
from ficco.tools.tune import communication

#: Schedules whose senders pack columns where there are no 2D copies, and one that packs rows that
#: lie apart.
PACKED = ("hetero-fused-2d", "uniform-fused-2d:copy=2", "uniform-unfused-2d:pieces=3", "growing")
#: The same for products that travel.
PACKED_PRODUCTS = {
    "matmul_reduce_scatter": ("uniform-fused-2d", "uniform-unfused-2d:pieces=2,compute=2"),
    "matmul_all_reduce": ("uniform-fused-2d:pieces=2", "uniform-unfused-2d"),
    "matmul_all_to_all": ("uniform-fused-2d:copy=2", "hetero-fused-2d", "hetero-unfused-2d"),
}
LAUNCH, LOAD, HOST = "hipModuleLaunchKernel", "hipModuleLoadData", "hipLaunchHostFunc"
#: A code of the library.
LAUNCH_FAILURE = 719
NO_RECTANGLES = {"2D": 0}

# Packing columns.


def _without_compiler(at: Rank, fn: Any, *args: Any) -> Any:
    from ficco.hip_kernels.build import FINDERS, CompilerNotFound

    def missing() -> Any:
        raise CompilerNotFound("hidden by the test")

    FINDERS["hip"] = (missing,)
    return fn(at, *args)


def _made(
    at: Rank, jitter: int, names: tuple[str, str], work: Callable[[], Any]
) -> tuple[int, int]:
    """How often two calls of the library are made by some work, with all queues late at random."""
    with clean():
        exact(at, equal(3, 4, 4, 4), 0)
        double().double_jitter(jitter)
        before = [calls(name) for name in names]
        work()
        ficco.synchronize()
        double().double_jitter(0)
        one, other = (calls(name) - count for name, count in zip(names, before, strict=True))
        return one, other


def _products(schedules: dict[str, tuple[str, ...]]) -> list[operators.Case]:
    return [
        operators.Case(operator, operators.rows_for(operator, 3, kind), 24, 24, dtype, name)
        for operator, names in schedules.items()
        for name in names
        for kind, dtype in (("equal", "bfloat16"), ("ragged", "float32"))
    ]


def _counted(at: Rank, jitter: int) -> tuple[int, int]:
    """Kernels that packing launches, and how often PyTorch is given something to do."""
    cases = [
        case
        for index, name in enumerate(PACKED)
        for case in (
            equal(3, 24, 40, 16, schedule=name, dtype=test_hip.DTYPES[index]),
            Case((5, 8, 2), 11, 6, schedule=name, dtype="float64", gathered=True),
            Case((5, 8, 2), 36, 6, schedule=name, a="every-other-row"),
        )
    ]

    def work() -> None:
        all_exact(at, cases)
        operators.all_exact(at, _products(PACKED_PRODUCTS))
        assert "packing" in test_hip.engine().capabilities().copy
        # PyTorch would report what was tried in vain as an error of its own.
        assert ctypes.CDLL("libamdhip64.so").hipGetLastError() == 0

    return _made(at, jitter, (LAUNCH, HOST), work)


@pytest.mark.parametrize("series", SERIES)
def test_columns_are_packed_by_the_placement_kernel(series: str) -> None:
    """Each packing is one launch; without a compiler, one operation of PyTorch's."""
    settings = {"series": series, "settings": NO_RECTANGLES}
    by_kernel = run(3, test_hip._compiling, _counted, 200, **settings)
    by_torch = run(3, _without_compiler, _counted, 0, **settings)
    for (launched, asked), (none, more) in zip(by_kernel, by_torch, strict=True):
        assert none == 0 and launched == more - asked > 20


#: Calls whose columns nobody packs.
UNPACKED = {
    "matmul_reduce_scatter": ("hetero-unfused-2d:pieces=2", "uniform-unfused-2d:pull,compute=2"),
    "matmul_all_reduce": ("uniform-fused-2d:pieces=2,tail=2", "hetero-fused-2d:pieces=2"),
    "all_to_all_matmul": ("uniform-fused-2d:pull",),
}
COPY = "hipMemcpyDtoDAsync"


def _unpacked(at: Rank, jitter: int) -> tuple[int, int]:
    """How often columns that nobody packs are copied by the library, and by the kernel."""
    gathers = [
        equal(3, 40, 24, 16, schedule=name)
        for name in ("hetero-fused-2d:pull,pieces=2", "uniform-fused-2d:tail=2")
    ]
    capped = equal(3, 40, 24, 16, schedule="uniform-fused-2d:pieces=4")

    def work() -> None:
        operators.all_exact(at, _products(UNPACKED))
        all_exact(at, gathers)
        with ficco.options(workspace_bytes=4096):
            exact(at, capped, 1)

    return _made(at, jitter, (COPY, LAUNCH), work)


@pytest.mark.parametrize("series", SERIES)
def test_columns_that_nobody_packs_are_copied_by_the_kernel(series: str) -> None:
    """Each by one launch; without a compiler, by a copy for each row."""
    settings = {"series": series, "settings": NO_RECTANGLES}
    by_kernel = run(3, test_hip._compiling, _unpacked, 200, **settings)
    by_rows = run(3, _without_compiler, _unpacked, 0, **settings)
    for (copied, launched), (more, none) in zip(by_kernel, by_rows, strict=True):
        assert none == 0 and launched > 50 and more - copied > 10 * launched


def test_packing_is_captured() -> None:
    """The kernels are loaded while the first graph is captured."""
    schedules = ["hetero-fused-2d:pieces=2", "uniform-unfused-2d:compute=2"]
    args = (test_hip._replays, schedules, test_hip.GLOBAL, 12)
    run(3, test_hip._compiling, *args, series="10", settings=NO_RECTANGLES)


def _rectangles(at: Rank) -> int:
    with clean():
        all_exact(at, [equal(2, 24, 40, 16, schedule=name) for name in PACKED])
        return calls(LAUNCH) + calls(LOAD)


def test_nothing_is_packed_where_the_runtime_copies_rectangles() -> None:
    assert run(2, test_hip._compiling, _rectangles) == [0, 0]


def _failing(at: Rank, name: str) -> tuple[Any, int, int]:
    """A call whose packing fails on rank 1, then kernels that are asked for."""
    case = equal(2, 24, 40, 16, schedule="hetero-fused-2d")
    with clean():
        exact(at, equal(2, 4, 4, 4), 0)
        at.barrier()
        if at.rank == 1:
            double().double_fail(name.encode(), LAUNCH_FAILURE, 1, 1)
        with ficco.options(timeout_s=2):
            outcome = caught(lambda: test_hip._attempt(at, case, None))
        at.barrier()
        launched = calls(LAUNCH)
        if name == LAUNCH:
            ficco.close()
        exact(at, case.on(schedule="hetero-fused-2d:kernel"), 1)
        assert calls(LAUNCH) > launched
    return outcome, launched, calls("hipModuleUnload")


@pytest.mark.parametrize(
    ("name", "unloaded"), [(LOAD, 1), ("hipModuleGetFunction", 2)], ids=["load", "look up"]
)
def test_kernels_that_cannot_be_loaded_are_got_round(name: str, unloaded: int) -> None:
    """PyTorch packs, and what had been loaded is unloaded at the end."""
    args = (test_hip._compiling, _failing, name)
    (_, other, _), (outcome, launched, found) = run(2, *args, settings=NO_RECTANGLES)
    assert (outcome, launched, found) == (None, 0, unloaded) and other > 0


def _last_error(at: Rank) -> tuple[Any, int]:
    with clean():
        exact(at, equal(1, 4, 4, 4), 0)
        double().double_fail(LOAD.encode(), LAUNCH_FAILURE, 1, 1)
        found = test_hip.engine()._kernels_or_none
        return found, ctypes.CDLL("libamdhip64.so").hipGetLastError()


def test_pytorch_does_not_meet_the_error() -> None:
    assert run(1, test_hip._compiling, _last_error) == [(None, 0)]


def test_a_launch_that_fails_is_named() -> None:
    args = (test_hip._compiling, _failing, LAUNCH)
    (other, _, _), (outcome, _, _) = run(2, *args, series="10", settings=NO_RECTANGLES)
    assert isinstance(outcome, Failure) and outcome.type == "BackendError"
    assert (outcome.fields["call"], outcome.fields["code"]) == (LAUNCH, "hipErrorLaunchFailure")
    assert other.type == "PeerFailed" and LAUNCH in other.text


# Sums.

#: Dtypes of operands whose parts the kernel adds up.
SUMMED = ("bfloat16", "float32", "float16")


def _summed(at: Rank, cases: list[operators.Case], by_kernel: bool) -> tuple[int, int]:
    """Kernels that the calls launch, and how often PyTorch is given something to do."""
    import host_gpu

    host_gpu.HostEngine._sums_by_kernel = by_kernel
    return _made(at, 100, (LAUNCH, HOST), lambda: operators.all_exact(at, cases))


@pytest.mark.parametrize("series", SERIES)
def test_sums_by_the_kernel(series: str) -> None:
    """As on a card, each is one launch; else, one operation of PyTorch's."""
    cases = [
        operators.Case(operator, operators.rows_for(operator, 3, kind), 8, n, dtype, schedule)
        for operator in operators.SUMS
        for at, schedule in enumerate(operators.schedules_of(operator))
        for kind, n, dtype in (
            ("ragged", 5, SUMMED[at % 3]),  # rows of no whole vectors
            ("equal" if at % 4 else "ragged", 16, SUMMED[at % 2]),
        )
        if "kernel" not in schedule and (at + n) % 4 == SERIES.index(series)
    ]
    args = (test_hip._compiling, _summed, cases)
    by_kernel = run(3, *args, True, series=series)
    by_torch = run(3, *args, False, series=series)
    for (launched, asked), (none, more) in zip(by_kernel, by_torch, strict=True):
        assert none == 0 and launched == more - asked > len(cases) / 2


#: Parts, rows, their width and how far apart they begin.
SIZES = ((1, 1, 1, 1), (3, 7, 5, 5), (16, 4, 16, 16), (5, 6, 16, 24), (4, 3, 5, 9))


def _to_the_bit(at: Rank) -> int:
    """Sums of the double's, in memory of its own; some of them in place."""
    from ficco.dma import hip_api

    with clean():
        exact(at, equal(1, 4, 4, 4), 0)
        engine, place = test_hip.engine(), hip_api.malloc(17 << 12)
        room = engine.work.tensor(place, 17 << 12)[0].view(17, -1)
        chance = torch.Generator().manual_seed(1)
        cases = list(itertools.product(sorted(REDUCTIONS, key=str), SIZES, (False, True)))
        for (dtype, to), (count, rows, width, pitch), within in cases:
            lines = [line.view(dtype)[: rows * pitch] for line in room[:count]]
            parts = [line.view(rows, pitch)[:, :width] for line in lines]
            for index, part in enumerate(parts):
                part.copy_(torch.randn(rows, width, generator=chance) * 8.0 ** -(index % 8))
            parts[0][0, 0], parts[0][-1, -1] = 65000, 3e-7  # the ends of float16
            wanted = torch.zeros(rows, width)
            for part in parts:
                wanted += part
            out = parts[-1]
            if not within or dtype != to:
                out = room[16].view(to)[: rows * pitch].view(rows, pitch)[:, :width]
            engine._kernels.reduce(out, parts, engine.side.handle)
            engine.settle(engine.side.handle)
            assert torch.equal(out, wanted.to(to)), (dtype, to, count, rows, width, pitch)
        hip_api.free(place)
    return len(cases)


def test_sums_of_the_double_are_right_to_the_last_bit() -> None:
    found = run(1, test_hip._compiling, _to_the_bit)
    assert found == [len(REDUCTIONS) * len(SIZES) * 2]


def _looked_up(at: Rank) -> tuple[str, str]:
    from ficco.dma import hip_api

    module = hip_api.load_module(b"\0")
    for name in NAMES:
        assert hip_api.kernel(module, name.encode())
    unknown = caught(lambda: hip_api.kernel(module, b"ficco_reduce_float64_float64"))
    hip_api.unload_module(module)
    assert not double().double_violations()
    return unknown.fields["call"], unknown.fields["code"]


@pytest.mark.parametrize("series", SERIES)
def test_the_double_has_the_kernels_of_the_source_alone(series: str) -> None:
    assert run(1, _looked_up, series=series) == [("hipModuleGetFunction", "hipErrorNotFound")]


def _streams_of_a_probe(at: Rank) -> list[int]:
    """Priorities of the streams by which sharing is tried."""
    from ficco.dma import hip_api
    from ficco.dma.driver import URGENT
    from ficco.tools import probe

    made, right = [], hip_api.make_stream
    hip_api.make_stream = lambda priority: made.append(priority) or right(priority)

    def gather(value: Any) -> list[Any]:
        everyone = [None] * at.world
        dist.all_gather_object(everyone, value)
        return everyone

    assert probe.share("plain", at.device, at.rank, gather) == ([], [])
    return [*made, URGENT]


def test_sharing_is_tried_on_a_stream_as_copies_have() -> None:
    for made, urgent in run(2, _streams_of_a_probe):
        assert made == urgent and made is not False


# Versions.

#: What starting says, for each version that a library tells and a binding binds: the double's own
#: first, then made up ones.
START = """
import ficco.dma.hip_api as api
def start():
    try:
        print(api.start(), api.runtime_version())
    except Exception as error:
        print(type(error).__name__, error)
start()
for version, binds in {made_up}:
    api.calls.hipRuntimeGetVersion = lambda: version
    api.HIP_VERSION_TUPLE = binds or api.HIP_VERSION_TUPLE
    start()
"""
OLD = ("needs HIP 7.2 or later", "; install ROCm 7.2 or later")
#: Versions, and what is said of those that will not do.
REFUSED = {
    70051831: ("HIP 7.0:", *OLD),  # the double's
    60443483: ("HIP 6.4:", *OLD),
    70153211: ("HIP 7.1:", *OLD),
    0: ("HIP 0.0:", "does not tell its version", OLD[1]),
    80000001: ("HIP 8.0:", "binds HIP 7", "; install ROCm 7.2 or a later one of HIP 7"),
}
ACCEPTED = {70253211: "3 7.2", 71526333: "3 7.15"}


@pytest.mark.parametrize("series", SERIES)
def test_versions(series: str) -> None:
    own, *others = REFUSED
    made_up = [(version, None) for version in (*others, *ACCEPTED)]
    made_up.append((70253211, (7, 1, 52802, "")))
    env = {
        "LD_LIBRARY_PATH": str(hip_ranks.library().parent),
        "HIP_DOUBLE_VERSION": str(own),
        "HIP_DOUBLE_DEVICES": "3",
    }
    script = START.replace("{made_up}", repr(made_up))
    done = test_hip.python(script, wheel=str(hip_ranks.wheel(series)), **env)
    assert done.returncode == 0, done.stderr
    *refused, fits, newer, binding = done.stdout.splitlines()
    for said, words in zip(refused, REFUSED.values(), strict=True):
        assert said.startswith("BackendError hipRuntimeGetVersion failed with HIP "), said
        assert all(word in said for word in words), said
    assert [fits, newer] == list(ACCEPTED.values())
    assert "hip-python binds HIP 7.1, ficco needs 7.2 or later" in binding
    assert "pip install 'hip-python>=7.2,<11'" in binding


# Ways of signals that are asked for and cannot be gone.


@pytest.mark.parametrize(
    ("way", "settings", "words"),
    [
        ("signal", {"WAIT": 0}, "CanUseStreamWaitValue"),
        ("signal", {"SIGNAL_IPC": 0}, "signal memory that processes can share"),
        ("uncached", {}, "GPU_STREAMOPS_CP_WAIT=1"),
        ("kernel", {}, "clang or hiprtc"),
    ],
)
def test_refused_ways_of_signals(way: str, settings: dict[str, int], words: str) -> None:
    hide = {"FICCO_HIP": f"signals={way}"}
    found = run(2, _without_compiler, test_hip._first, settings=settings, env=hide, series="10")
    for outcome, leaks in found:
        assert outcome.type == "NotImplementedError" and not leaks, outcome
        assert outcome.text.count(f"FICCO_HIP=signals={way} cannot be had") == 1
        assert words in outcome.text and "leave signals out of the variable" in outcome.text
        # A compiler is the remedy for one way alone.
        assert ("compiler" in outcome.text) == (way == "kernel")


# What it tells.


def _told(at: Rank) -> tuple[str, int | None]:
    with clean():
        exact(at, equal(1, 4, 4, 4), 0)
        found = test_hip.engine()
        return found.capabilities().products, found.copy_engines()


def test_it_names_the_library_of_products_and_no_number_of_engines() -> None:
    """The double's attribute AsyncEngineCount is 2, AMD's a constant: neither is believed."""
    assert run(1, _told) == [(products.library(torch.device("cpu")), None)]


@pytest.mark.parametrize(("said", "known", "taken"), [(3, 5, 3), (None, 5, 5), (None, None, 7)])
def test_the_tuner_asks_the_engine(
    monkeypatch: pytest.MonkeyPatch, said: int | None, known: int | None, taken: int
) -> None:
    engine = SimpleNamespace(copy_engines=lambda: said)
    monkeypatch.setattr(communication, "workspace_of", lambda *_: SimpleNamespace(engine=engine))
    machine = SimpleNamespace(copies=known and SimpleNamespace(engines=known))
    site: Any = SimpleNamespace(watch=SimpleNamespace(group=None, device=None), machine=machine)
    site.world = 8
    monkeypatch.setattr(communication, "_copies", lambda site, step, mover, engines: engines)
    assert communication.copies(site) == taken


@pytest.mark.parametrize(
    ("hip", "preferred", "words"),
    [
        ("7.2", "Cublaslt", "hipBLASLt, "),
        ("7.2", "Cublas", "rocBLAS (through hipBLAS), "),
        ("7.2", "Ck", "CK, "),
        (None, "Cublaslt", "cuBLASLt, "),
        (None, "Cublas", "cuBLAS, "),
        (None, "Another", "Another, "),
    ],
)
def test_names_of_libraries(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, preferred: str, words: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    said = SimpleNamespace(name=preferred)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: said)
    assert products.library(torch.device("cuda")) == f"{words}which PyTorch prefers"


def test_naming_a_library_uses_no_gpu_and_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> Any:
        raise RuntimeError("no CUDA GPUs are available")

    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", forbidden)
    said = products.library(torch.device("cuda"))
    assert "hipBLASLt" in said and "when it first uses a GPU" in said
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "does not tell" in products.library(torch.device("cuda"))
    monkeypatch.setattr(torch.__config__, "show", forbidden)
    assert "does not tell" in products.library(torch.device("cpu"))
    monkeypatch.setattr(torch.__config__, "show", lambda: "BLAS_INFO=open, USE_MKL=OFF")
    assert products.library(torch.device("cpu")).startswith("OpenBLAS")
