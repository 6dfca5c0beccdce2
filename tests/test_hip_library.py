"""The HIP engine's placement kernel, HIP's version and names of libraries, on the double."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import host_gpu
import pytest
import subjects
import test_hip
import test_operators as operators
import torch
import torch.distributed as dist
from cases import Case, all_exact, equal, exact
from hip_ranks import SERIES, calls, clean, compiling, double, on_double, run, without_compiler
from ranks import Failure, Rank, caught
from test_hip import COPY, DTYPES, LAUNCH, attempted, engine, pooled

import ficco
from ficco.compute import products
from ficco.tools.tune import communication

#: Schedules whose senders pack columns without 2D copies; the last one packs rows with a stride.
PACKED = ("hetero-fused-2d", "uniform-fused-2d:copy=2", "uniform-unfused-2d:pieces=3", "growing")
#: The same for operators that send products.
PACKED_PRODUCTS = {
    "matmul_reduce_scatter": ("uniform-fused-2d", "uniform-unfused-2d:pieces=2,compute=2"),
    "matmul_all_reduce": ("uniform-fused-2d:pieces=2", "uniform-unfused-2d"),
    "matmul_all_to_all": ("uniform-fused-2d:copy=2", "hetero-fused-2d", "hetero-unfused-2d"),
}
#: Calls whose columns no rank packs.
UNPACKED = {
    "matmul_reduce_scatter": ("hetero-unfused-2d:pieces=2", "uniform-unfused-2d:pull,compute=2"),
    "matmul_all_reduce": ("uniform-fused-2d:pieces=2,tail=2", "hetero-fused-2d:pieces=2"),
    "all_to_all_matmul": ("uniform-fused-2d:pull",),
}
LOAD, HOST = "hipModuleLoadData", "hipLaunchHostFunc"
#: A code of the library.
LAUNCH_FAILURE = 719
NO_RECTANGLES = {"2D": 0}


def counted(at: Rank, names: Sequence[str], work: Callable[[], Any]) -> list[int]:
    """Numbers of HIP calls, by name, that ``work`` makes while all queues are delayed at random."""
    with clean():
        exact(at, equal(3, 4, 4, 4), 0)
        double().double_jitter(100)
        before = [calls(name) for name in names]
        work()
        ficco.synchronize()
        double().double_jitter(0)
        return [calls(name) - count for name, count in zip(names, before, strict=True)]


def _products(schedules: dict[str, tuple[str, ...]]) -> list[tuple[str, subjects.Case]]:
    return [
        (operator, subjects.Case(operators.rows_for(operator, 3, kind), (24, 24), dtype, name))
        for operator, names in schedules.items()
        for name in names
        for kind, dtype in (("equal", "bfloat16"), ("ragged", "float32"))
    ]


def _packs(at: Rank) -> None:
    cases = [
        case
        for index, name in enumerate(PACKED)
        for case in (
            equal(3, 24, 40, 16, schedule=name, dtype=DTYPES[index]),
            Case((5, 8, 2), 11, 6, schedule=name, dtype="float64", gathered=True),
            Case((5, 8, 2), 36, 6, schedule=name, a="every-other-row"),
        )
    ]
    all_exact(at, cases)
    operators.all_exact(at, _products(PACKED_PRODUCTS))
    assert "packing" in engine().capabilities().copy


def _packs_nothing(at: Rank) -> None:
    names = "hetero-fused-2d:pull,pieces=2", "uniform-fused-2d:tail=2"
    operators.all_exact(at, _products(UNPACKED))
    all_exact(at, [equal(3, 40, 24, 16, schedule=name) for name in names])
    with ficco.options(workspace_bytes=4096):
        exact(at, equal(3, 40, 24, 16, schedule="uniform-fused-2d:pieces=4"), 1)


def _columns(at: Rank) -> list[list[int]]:
    """Launches and host functions of packed columns; launches and copies of unpacked columns."""
    counts = [counted(at, (LAUNCH, HOST), lambda: _packs(at))]
    counts.append(counted(at, (LAUNCH, COPY), lambda: _packs_nothing(at)))
    # PyTorch would report the error of a failed trial as its own.
    assert ctypes.CDLL("libamdhip64.so").hipGetLastError() == 0
    return counts


def test_columns_without_2d_copies_go_by_the_placement_kernel() -> None:
    """Packing takes one launch, or one PyTorch operation without a compiler. Columns that are not
    packed take one launch, or one copy per row without a compiler."""
    options: Any = {"series": "10", "settings": NO_RECTANGLES}
    by_kernel = run(3, compiling, _columns, **options)
    by_torch = run(3, without_compiler, _columns, **options)
    for (packed, unpacked), (packed_by_torch, by_rows) in zip(by_kernel, by_torch, strict=True):
        assert packed_by_torch[0] == by_rows[0] == 0
        assert packed[0] == packed_by_torch[1] - packed[1] > 20
        assert unpacked[0] > 50 and by_rows[1] - unpacked[1] > 10 * unpacked[0]


def test_packing_is_captured() -> None:
    """The kernels are loaded while the first graph is captured."""
    schedules = ["hetero-fused-2d:pieces=2", "uniform-unfused-2d:compute=2"]
    run(3, compiling, test_hip.replayed, schedules, 8, series="10", settings=NO_RECTANGLES)


@on_double(2)
def test_nothing_is_packed_where_the_runtime_copies_rectangles(at: Rank) -> None:
    cases = [equal(2, 24, 40, 16, schedule=name) for name in PACKED]
    before = calls(LAUNCH) + calls(LOAD)
    compiling(at, all_exact, cases)
    assert calls(LAUNCH) + calls(LOAD) == before


def _failing(at: Rank, names: Sequence[str]) -> list[tuple[Any, int, int]]:
    """The outcome, launches and unloaded modules for each HIP call that fails on rank 1."""
    outcomes = []
    case = equal(2, 24, 40, 16, schedule="hetero-fused-2d")
    for name in names:
        launched, unloaded = calls(LAUNCH), calls("hipModuleUnload")
        with clean():
            exact(at, equal(2, 4, 4, 4), 0)
            at.barrier()
            if at.rank == 1:
                double().double_fail(name.encode(), LAUNCH_FAILURE, 1, 1)
            with ficco.options(timeout_s=2):
                outcome = caught(lambda: attempted(at, case, None))
            at.barrier()
            launched = calls(LAUNCH) - launched
            if name == LAUNCH:
                ficco.close()
            before = calls(LAUNCH)
            exact(at, case.on(schedule="hetero-fused-2d:kernel"), 1)
            assert calls(LAUNCH) > before
        outcomes.append((outcome, launched, calls("hipModuleUnload") - unloaded))
    return outcomes


def test_kernels_that_fail() -> None:
    """If loading fails, PyTorch packs. The error of a failed launch names the call."""
    names = LOAD, "hipModuleGetFunction", LAUNCH
    others, outcomes = run(2, compiling, _failing, names, settings=NO_RECTANGLES)
    assert outcomes[:2] == [(None, 0, 1), (None, 0, 2)]
    assert all(launched > 0 for _, launched, _ in others[:2])
    outcome, other = outcomes[2][0], others[2][0]
    assert isinstance(outcome, Failure) and outcome.type == "BackendError"
    assert (outcome.fields["call"], outcome.fields["code"]) == (LAUNCH, "hipErrorLaunchFailure")
    assert other.type == "PeerFailed" and LAUNCH in other.text


@on_double(1)
def test_pytorch_does_not_meet_the_error(at: Rank) -> None:
    exact(at, equal(1, 4, 4, 4), 0)
    double().double_fail(LOAD.encode(), LAUNCH_FAILURE, 1, 1)
    assert compiling(at, lambda at: engine()._kernels_or_none) is None
    assert ctypes.CDLL("libamdhip64.so").hipGetLastError() == 0


#: Dtypes of operands that the kernel sums.
SUMMED = ("bfloat16", "float32", "float16")


def _summed(at: Rank, cases: list[tuple[str, subjects.Case]]) -> list[list[int]]:
    """Launches and host functions, first with sums by the kernel, then with sums by PyTorch."""
    counts = []
    for by_kernel in (True, False):
        with mock.patch.object(host_gpu.HostEngine, "_sums_by_kernel", by_kernel):
            counts.append(counted(at, (LAUNCH, HOST), lambda: operators.all_exact(at, cases)))
    return counts


@pytest.mark.parametrize("series", SERIES)
def test_sums_by_the_kernel(series: str) -> None:
    """Each sum is one launch of the kernel, as on a GPU, or one operation of PyTorch."""
    cases = [
        (operator, subjects.Case(operators.rows_for(operator, 3, kind), (8, n), dtype, schedule))
        for operator in operators.SUMS
        for i, schedule in enumerate(operators.schedules_of(operator)[SERIES.index(series) :: 8])
        for kind, n, dtype in (
            ("ragged", 5, SUMMED[i % 3]),  # rows that are not whole vectors
            ("equal" if i % 4 else "ragged", 16, SUMMED[i % 2]),
        )
        if "kernel" not in schedule and "two-shot" not in schedule  # schedules that copy by kernel
    ]
    for (launched, hosted), (zero, total) in pooled(3, compiling, _summed, cases, series=series):
        assert zero == 0 and launched == total - hosted > len(cases) / 2


@on_double(2)
def test_sharing_is_tried_on_a_stream_with_the_priority_of_copies(at: Rank) -> None:
    from ficco.dma import hip_api
    from ficco.dma.driver import URGENT
    from ficco.tools import probe

    def gather(value: Any) -> list[Any]:
        gathered = [None] * at.world
        dist.all_gather_object(gathered, value)
        return gathered

    with mock.patch.object(hip_api, "make_stream", wraps=hip_api.make_stream) as make_stream:
        assert probe.share("plain", at.device, at.rank, gather) == ([], [])
    make_stream.assert_called_once_with(URGENT)


OLD = ("needs HIP 7.2 or later", "; install ROCm 7.2 or later")
#: Version of the library, version of the binding if it differs, and the error or the result.
VERSIONS = (
    (70051831, None, ("HIP 7.0:", *OLD)),
    (60443483, None, ("HIP 6.4:", *OLD)),
    (70153211, None, ("HIP 7.1:", *OLD)),
    (0, None, ("HIP 0.0:", "does not tell its version", OLD[1])),
    (80000001, None, ("HIP 8.0:", "binds HIP 7", "; install ROCm 7.2 or a later one of HIP 7")),
    (70253211, None, "3 7.2"),
    (71526333, None, "3 7.15"),
    (
        70253211,
        (7, 1, 52802, ""),
        ("hip-python binds HIP 7.1, ficco needs 7.2 or later", "install 'hip-python>=7.2,<11'"),
    ),
)


def _starts(at: Rank) -> None:
    from ficco.dma import hip_api

    assert hip_api.runtime_version() == "7.0"  # of the double's setting
    for version, bound, expected in VERSIONS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hip_api.calls, "hipRuntimeGetVersion", lambda version=version: version)
            patch.setattr(hip_api, "HIP_VERSION_TUPLE", bound or hip_api.HIP_VERSION_TUPLE)
            result = caught(lambda: f"{hip_api.start()} {hip_api.runtime_version()}")
        if isinstance(expected, str):
            assert result == expected
        else:
            assert result.type == "BackendError", result
            assert result.text.startswith("hipRuntimeGetVersion failed with HIP "), result
            assert all(word in result.text for word in expected), result


@pytest.mark.parametrize("series", SERIES)
def test_versions(series: str) -> None:
    run(1, _starts, series=series, settings={"VERSION": VERSIONS[0][0], "DEVICES": 3})


@on_double(1)
def test_the_engine_names_the_gemm_library_and_no_number_of_copy_engines(at: Rank) -> None:
    """The engine ignores the attribute AsyncEngineCount, which is a constant on AMD."""
    exact(at, equal(1, 4, 4, 4), 0)
    assert engine().capabilities().products == products.library(torch.device("cpu"))
    assert engine().copy_engines() is None


@pytest.mark.parametrize(("reported", "known", "used"), [(3, 5, 3), (None, 5, 5), (None, None, 7)])
def test_tuning_asks_the_engine(
    monkeypatch: pytest.MonkeyPatch, reported: Any, known: Any, used: int
) -> None:
    engine = SimpleNamespace(copy_engines=lambda: reported)
    monkeypatch.setattr(communication, "workspace_of", lambda *_: SimpleNamespace(engine=engine))
    machine = SimpleNamespace(copies=known and SimpleNamespace(engines=known))
    watch = SimpleNamespace(group=None, device=None)
    site: Any = SimpleNamespace(watch=watch, machine=machine, world=8)
    monkeypatch.setattr(communication, "_copies", lambda site, step, mover, engines: engines)
    assert communication.copies(site) == used


def test_names_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names follow PyTorch's preference. Naming a library uses no GPU and never fails."""

    def forbidden() -> Any:
        raise RuntimeError("no CUDA GPUs are available")

    def name(hip: str | None, preferred: Callable[[], Any]) -> str:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
        return products.library(torch.device("cuda"))

    unused = name("7.2", forbidden)
    assert "hipBLASLt" in unused and "when it first uses a GPU" in unused
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for hip, preferred, prefix in (
        ("7.2", "Cublaslt", "hipBLASLt, "),
        ("7.2", "Cublas", "rocBLAS (through hipBLAS), "),
        ("7.2", "Ck", "CK, "),
        (None, "Cublaslt", "cuBLASLt, "),
        (None, "Cublas", "cuBLAS, "),
        (None, "Another", "Another, "),
    ):
        library = SimpleNamespace(name=preferred)
        assert name(hip, lambda library=library: library) == f"{prefix}which PyTorch prefers"
    assert "does not tell" in name("7.2", forbidden)
    monkeypatch.setattr(torch.__config__, "show", forbidden)
    assert "does not tell" in products.library(torch.device("cpu"))
    monkeypatch.setattr(torch.__config__, "show", lambda: "BLAS_INFO=open, USE_MKL=OFF")
    assert products.library(torch.device("cpu")).startswith("OpenBLAS")
