"""Groups on several hosts, measured: the step ``network`` of a tuning run, and a bench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, run
from test_hosts import host_of

from ficco.dma.hosts import hosts_of
from ficco.machine import load
from ficco.tools.bench.candidates import choose
from ficco.tools.bench.cases import Case
from ficco.tools.bench.frames import BENCH
from ficco.tools.bench.measure import Barrier
from ficco.tools.bench.run import BenchSettings, bench
from ficco.tools.tune import fits
from ficco.tools.tune import run as tuning


def test_rows_of_messages_tell_latency_and_rate() -> None:
    times = [
        fits.CopyTime(size, count, 3e-4 + count * (5e-5 + size / 2e9))
        for size in (1 << 14, 1 << 18, 1 << 22)
        for count in (1, 4)
    ]
    latency, rate = fits.messages(times)
    assert latency == pytest.approx(5e-5) and rate == pytest.approx(2e9)


def test_rows_that_tell_nothing_are_refused() -> None:
    one = fits.CopyTime(1024, 1, 1e-3)
    with pytest.raises(ValueError, match="two sizes and rows of two lengths"):
        fits.messages([one, fits.CopyTime(2048, 1, 1e-3)])
    shrinking = [fits.CopyTime(size, n, n * 1e-3 / size) for size in (1, 4) for n in (1, 4)]
    with pytest.raises(ValueError, match="grow with their bytes"):
        fits.messages(shrinking)


def _tuned(at: Rank, path: str, only: tuple[str, ...], hosts: int) -> Any:
    with host_of(at, hosts):
        settings = tuning.TuneSettings(
            Path(path), "cpu", quick=True, only=only, fresh=True, command="tests"
        )
        outcome = tuning.tune(settings)
        return outcome.error, outcome.failures, outcome.done


def test_the_network_of_two_hosts_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    for error, failures, done in run(4, _tuned, str(path), ("network",), 2, timeout=100):
        assert not error and not failures and done == ["network"]
    machine = load(path)
    network = machine.network
    assert machine.ranks == 2 and network is not None
    assert 1e7 < network.bandwidth < 1e11 and 0 <= network.latency < 0.05
    assert network.sharing in (1, 2)
    assert network.provenance.source == "fitted"
    assert "2 hosts, gloo" in network.provenance.note


@pytest.mark.parametrize(("only", "hosts"), [(("network",), 1), (("gemm",), 2), ((), 2)])
def test_steps_of_one_host_and_of_several_are_told_apart(
    tmp_path: Path, only: tuple[str, ...], hosts: int
) -> None:
    path = tmp_path / "none.yaml"
    for error, _, done in run(2, _tuned, str(path), only, hosts):
        assert "those of several hosts that one alone" in error and not done
    assert not path.exists()


CASES = (Case("a", 256, 16, 32, "float32"),)


def _benched(at: Rank, path: str) -> None:
    about: Any = {"cases": CASES, "device": "cpu", "rounds": 2, "seconds": 30, "csv": Path(path)}
    with host_of(at, 2):
        names = ["auto", "growing", "uniform-fused-2d"]
        bench(BenchSettings(candidates=choose(names), modes=("idle",), quiet=True, **about))


def test_a_bench_over_hosts(tmp_path: Path) -> None:
    run(4, _benched, str(tmp_path / "a.csv"), timeout=100)
    rows = BENCH.read(tmp_path / "a.csv")
    timed = set(rows["candidate"][rows["status"] == "ok"])
    assert timed >= {"gemm", "collective", "copies", "serial-collective", "serial", "auto"}
    assert timed >= {"growing", "uniform-fused-2d"} and (rows["status"] != "failed").all()
    others = rows[rows["candidate"].isin(("pytorch-fused", "pytorch-native"))]
    assert set(others["note"]) == {"it copies through memory that ranks of one host share"}


def _meets_while_it_sums(at: Rank) -> tuple[float, int]:
    """A collective of the group is under way on rank 1 while the ranks meet, and begins on rank 0
    once they have met."""
    total, work = torch.tensor([1.0 + at.rank]), None
    with host_of(at, 2):
        barrier = Barrier(dist.group.WORLD, 20, hosts_of(dist.group.WORLD, 20, "a test"))
        if at.rank == 1:
            work = dist.all_reduce(total, async_op=True)
        barrier.wait()
        decided = barrier.decide(5 + at.rank)
        work = work or dist.all_reduce(total, async_op=True)
        work.wait()
        barrier.wait()
        barrier.close()
    return total.item(), decided


def test_ranks_meet_between_hosts_during_collectives_of_their_group() -> None:
    assert run(2, _meets_while_it_sums, fresh=True, timeout=30) == [(3.0, 5)] * 2


def _waits_for_a_late_rank(at: Rank) -> str:
    with host_of(at, 2):
        barrier = Barrier(dist.group.WORLD, 2, hosts_of(dist.group.WORLD, 20, "a test"))
        why = ""
        if at.rank == 0:
            try:
                barrier.wait()
            except TimeoutError as error:
                why = str(error)
        at.barrier()
    return why


def test_a_rank_that_does_not_come_from_another_host_is_a_timeout() -> None:
    why, nothing = run(2, _waits_for_a_late_rank, fresh=True, timeout=30)
    assert "a rank of another host did not come" in why and not nothing
