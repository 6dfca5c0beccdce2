"""Groups on several hosts, measured: the step ``network`` of a tuning run, and a bench."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, caught, run
from test_hosts import host_of

from ficco.dma.host import hosts_of
from ficco.machine import load
from ficco.tools.bench.candidates import choose
from ficco.tools.bench.cases import Case
from ficco.tools.bench.frames import BENCH
from ficco.tools.bench.harness import BenchSettings, bench
from ficco.tools.bench.measure import Barrier
from ficco.tools.bench.products import SUBJECT
from ficco.tools.tune import fits
from ficco.tools.tune import run as tuning


def test_rows_of_messages_tell_latency_and_rate() -> None:
    times = [
        fits.CopyTime(size, count, 3e-4 + count * (5e-5 + size / 2e9))
        for size in (1 << 14, 1 << 18, 1 << 22)
        for count in (1, 4)
    ]
    assert fits.messages(times) == pytest.approx((5e-5, 2e9))
    one = fits.CopyTime(1024, 1, 1e-3)
    with pytest.raises(ValueError, match="two sizes and rows of two lengths"):
        fits.messages([one, fits.CopyTime(2048, 1, 1e-3)])
    shrinking = [fits.CopyTime(size, n, n * 1e-3 / size) for size in (1, 4) for n in (1, 4)]
    with pytest.raises(ValueError, match="grow with their bytes"):
        fits.messages(shrinking)


def _tuned(at: Rank, path: Path, only: tuple[str, ...], hosts: int) -> Any:
    """A tuning run, in which messages of one rank and of all take latencies and rates that do not
    depend on the pace of this machine."""
    fitted = mock.patch.object(fits, "messages", side_effect=[(1e-4, 2e9), (2e-4, 1e9)])
    with host_of(at, hosts), fitted as messages:
        outcome = tuning.tune(
            tuning.TuneSettings(path, "cpu", quick=True, only=only, fresh=True, command="tests")
        )
    rows = [one for call in messages.call_args_list for one in call.args[0]]
    assert all(one.seconds > 0 for one in rows)
    sizes = {(one.nbytes, one.count) for one in rows}
    return outcome.error, outcome.failures, outcome.done, len(sizes)


def test_the_network_of_two_hosts_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    for error, failures, done, rows in run(4, _tuned, path, ("network",), 2):
        assert not error and not failures and done == ["network"] and rows >= 4
    machine = load(path)
    network = machine.network
    assert machine.ranks == 2 and network is not None
    assert (network.bandwidth, network.latency, network.sharing) == (2e9, 1e-4, 2)
    assert network.provenance.source == "fitted"
    assert "2 hosts, gloo" in network.provenance.note


@pytest.mark.parametrize(("only", "hosts"), [(("network",), 1), (("gemm",), 2), ((), 2)])
def test_steps_of_one_host_and_of_several_are_told_apart(
    tmp_path: Path, only: tuple[str, ...], hosts: int
) -> None:
    path = tmp_path / "none.yaml"
    for error, _, done, _ in run(2, _tuned, path, only, hosts):
        assert "those of several hosts that one alone" in error and not done
    assert not path.exists()


def _benched(at: Rank, path: Path) -> None:
    about: Any = {"cases": (Case("a", 256, 16, 32, "float32"),), "device": "cpu", "csv": path}
    with host_of(at, 2):
        chosen = choose(["auto", "growing", "uniform-fused-2d"])
        about |= {"schedules": chosen, "modes": ("idle",), "rounds": 2, "seconds": 30}
        bench(BenchSettings(subject=SUBJECT, quiet=True, **about))


def test_a_bench_over_hosts(tmp_path: Path) -> None:
    run(2, _benched, tmp_path / "a.csv")
    rows = BENCH.read(tmp_path / "a.csv")
    timed = set(rows["candidate"][rows["status"] == "ok"])
    assert timed >= {"gemm", "collective", "copies", "pytorch-serial", "serial", "auto"}
    assert timed >= {"growing", "uniform-fused-2d"} and (rows["status"] != "failed").all()
    others = rows[rows["candidate"].isin(("pytorch-fused", "pytorch-native"))]
    why = "not here: it copies through memory that ranks of one host share"
    assert set(others["note"]) == {why}


def _meets(at: Rank) -> tuple[float, int, Any]:
    """A collective of the group is under way on rank 1 while the ranks meet, and begins on rank 0
    once they have met. Later rank 1 does not come."""
    total, work = torch.tensor([1.0 + at.rank]), None
    with host_of(at, 2):
        hosts = hosts_of(dist.group.WORLD, 20, "a test")
        barrier = Barrier(dist.group.WORLD, 4, hosts)
        if at.rank == 1:
            work = dist.all_reduce(total, async_op=True)
        barrier.wait()
        decided = barrier.decide(5 + at.rank)
        work = work or dist.all_reduce(total, async_op=True)
        work.wait()
        barrier.wait()
        late = caught(barrier.wait) if at.rank == 0 else None
        at.barrier()
        barrier.close()
    return total.item(), decided, late


def test_ranks_meet_between_hosts_during_collectives_of_their_group() -> None:
    first, second = run(2, _meets, timeout=30)
    assert first[:2] == second[:2] == (3.0, 5)
    assert first[2].type == "TimeoutError"
    assert "a rank of another host did not come" in first[2].text
