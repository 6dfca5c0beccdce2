"""Configuration of all tests: requirements on the machine, environment, and the summary."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections import Counter
from typing import Any

import pytest
import ranks
from hypothesis import settings

#: GPUs that a marker requires. In a module of multigpu tests, a test marked gpu needs only one.
NEEDS = {"gpu": 1, "multigpu": 2}

#: Tests that are marked ``slow``, by file or by file and test: of kernels and engines through
#: vendors' compilers and doubles of their libraries, of PyTorch's compilers, and of packages.
SLOW = {
    *("test_kernels", "test_hip", "test_hip_library", "test_hip_contract", "test_hip_forward"),
    *("test_tiled_triton", "test_third_vendor", "test_traced", "test_packaging", "test_fp8_passes"),
    *("test_selftest::test_it_passes_through_the_hip_engine", "test_lazy", "test_launch"),
    *("test_selftest::test_compiled_kernels", "test_replay::test_the_bench_of_ways_is_replayed"),
    *("test_hip_batches", "test_selftest::test_batches_are_timed_for_the_machine_file"),
}

#: Tests and their processes see no machine files and no decisions of this user. Workers share one
#: cache of compiled code.
SHARED, STARTS_WORKERS = "FICCO_TESTS_FOLDER", "FICCO_TESTS_FOLDER" not in os.environ
if STARTS_WORKERS:
    os.environ[SHARED] = tempfile.mkdtemp(prefix="ficco-tests-")
FOLDER = os.environ[SHARED]
os.environ["FICCO_CONFIG_DIR"] = os.path.join(FOLDER, f"config-{os.getpid()}")
os.environ["FICCO_CACHE_DIR"] = os.path.join(FOLDER, "cache")
os.environ.pop("FICCO_MACHINE", None)

#: Ranks share few cores, and OpenMP's threads would spin for each other. The variable also covers
#: threads of a double, which torch.set_num_threads does not.
os.environ["OMP_NUM_THREADS"] = "1"
#: If OpenMP still has several threads, waiting threads sleep.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

#: Examples have no deadline: a busy machine may take a core away at any moment.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, skip tests that need more GPUs than this machine has, and sort the tests."""
    for item in items:
        if {item.path.stem, f"{item.path.stem}::{getattr(item, 'originalname', '')}"} & SLOW:
            item.add_marker(pytest.mark.slow)
    # The longest tests run first, so that no worker is left waiting in them at the end.
    items.sort(key=lambda item: item.path.stem != "test_hip")
    needs = [
        (item, next((n for name, n in NEEDS.items() if item.get_closest_marker(name)), 0))
        for item in items
    ]
    count = ranks.most_gpu_ranks() if any(need for _, need in needs) else 0
    for item, need in needs:
        if need > count:
            item.add_marker(pytest.mark.skip(reason=f"needs GPUs for {need} ranks, found {count}"))


@pytest.fixture(scope="session", autouse=True)
def server() -> None:
    """Start the server of ranks before ficco.tools.launch starts it with fewer modules."""
    if "ficco.tools.launch" in sys.modules:
        ranks.start_server()


@pytest.fixture(scope="session")
def device() -> str:
    """The type of the devices of ranks; ``gpu/conftest.py`` overrides it."""
    return "cpu"


@pytest.fixture
def cuda() -> Any:
    """The module of CUDA's driver."""
    try:
        from ficco.dma import cuda_driver
    except ImportError:
        ranks.missing("cuda-bindings")
    return cuda_driver


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Stop with a usage error if the loopback interface does not work: ranks meet there."""
    if hasattr(session.config, "workerinput"):
        return
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 5).close()
    except OSError as error:
        raise pytest.UsageError(
            f"ranks meet at a port of 127.0.0.1, which this machine refuses ({error.strerror}): "
            "bring up its loopback interface, or close programs that hold many ports"
        ) from None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of contract cells that ran, and the number of skipped tests by reason."""
    stats = terminalreporter.stats
    ran = [report.nodeid for name in ("passed", "failed") for report in stats.get(name, ())]
    if cells := sum(nodeid.startswith("tests/contract/") for nodeid in ran):
        terminalreporter.write_line(f"the contract: {cells} cells")
    if skipped := stats.get("skipped", ()):
        reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
        text = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(
            f"{len(skipped)} skipped: {text} (tests/toolchain.sh installs compilers and libraries)"
        )


def pytest_sessionfinish() -> None:
    """End the workers, then remove the folder that they use."""
    ranks.close()
    if STARTS_WORKERS:
        shutil.rmtree(FOLDER, ignore_errors=True)
