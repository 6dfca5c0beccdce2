"""What all tests share: what a machine must have, and what is said at the end."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections import Counter

import pytest
import ranks
from hypothesis import settings

#: GPUs that a marker asks for. In a module of multigpu tests, one marked gpu needs no second.
NEEDS = {"gpu": 1, "multigpu": 2}

#: Tests of kernels and engines through vendors' compilers and doubles of their libraries, of
#: PyTorch's compilers, and of packages: marked ``slow``, by file or by file and test.
SLOW = {
    *("test_kernels", "test_hip", "test_hip_library", "test_hip_contract", "test_hip_forward"),
    *("test_tiled_triton", "test_third_vendor", "test_traced", "test_packaging", "test_fp8_passes"),
    *("test_selftest::test_it_passes_through_the_hip_engine", "test_lazy", "test_launch"),
    *("test_selftest::test_compiled_kernels", "test_replay::test_the_bench_of_ways_is_replayed"),
    *("test_hip_batches", "test_selftest::test_batches_are_timed_for_the_machine_file"),
}

#: Tests and the processes they start know no machines and no decisions of this user's. What one
#: worker has compiled, the others take.
SHARED, STARTS_WORKERS = "FICCO_TESTS_FOLDER", "FICCO_TESTS_FOLDER" not in os.environ
if STARTS_WORKERS:
    os.environ[SHARED] = tempfile.mkdtemp(prefix="ficco-tests-")
FOLDER = os.environ[SHARED]
os.environ["FICCO_CONFIG_DIR"] = os.path.join(FOLDER, f"config-{os.getpid()}")
os.environ["FICCO_CACHE_DIR"] = os.path.join(FOLDER, "cache")
os.environ.pop("FICCO_MACHINE", None)

#: Ranks share few cores, where OpenMP's threads would spin for each other: also those that threads
#: of a double start, which torch.set_num_threads does not reach.
os.environ["OMP_NUM_THREADS"] = "1"
#: Where there are several all the same, those that wait sleep.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

#: No example has to end within a time: a busy machine may take a core away at any moment.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, skip those for which this machine has too few GPUs, and order the rest."""
    for item in items:
        if {item.path.stem, f"{item.path.stem}::{getattr(item, 'originalname', '')}"} & SLOW:
            item.add_marker(pytest.mark.slow)
    # The longest tests, of which some wait. Workers that met them last would wait with them.
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
    """Start the server of ranks, where a test could have ficco.tools.launch start it with less."""
    if "ficco.tools.launch" in sys.modules:
        ranks.start_server()


@pytest.fixture(scope="session")
def device() -> str:
    """The type of the devices of ranks; ``gpu/conftest.py`` has another."""
    return "cpu"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """End in one sentence where no ranks could meet."""
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
    """Say how many cells of the contract ran, and what was skipped for which reason."""
    stats = terminalreporter.stats
    ran = [one.nodeid for name in ("passed", "failed") for one in stats.get(name, ())]
    if cells := sum(nodeid.startswith("tests/contract/") for nodeid in ran):
        terminalreporter.write_line(f"the contract: {cells} cells")
    if skipped := stats.get("skipped", ()):
        reasons = Counter(one.longrepr[2].removeprefix("Skipped: ") for one in skipped)
        told = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(
            f"{len(skipped)} skipped: {told} (tests/toolchain.sh installs compilers and libraries)"
        )


def pytest_sessionfinish() -> None:
    """End the workers while what they need is still there."""
    ranks.close()
    if STARTS_WORKERS:
        shutil.rmtree(FOLDER, ignore_errors=True)
