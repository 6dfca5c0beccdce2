"""The bench: figures from invented times, shapes, rows, reports, and one small run."""

from __future__ import annotations

import doctest
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import ranks
import subjects
import torch
import torch.distributed as dist
from test_hosts import host_of

import ficco
from ficco.accelerator import gpu
from ficco.dma.host import hosts_of
from ficco.errors import ConfigError
from ficco.heuristics import candidates, families, problem_of_sizes
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.scaling import SCALED
from ficco.schedules import NAMED, Schedule
from ficco.simulate.timeline import Timeline, loads
from ficco.tools import baselines, cli
from ficco.tools.baselines import COPY_ENGINES, PRODUCT, lacking, preferred, registered
from ficco.tools.bench import attention, cases, experts, harness, layers, measure, report
from ficco.tools.bench import candidates as table
from ficco.tools.bench.candidates import COMPARED, choose, of_problem, parse
from ficco.tools.bench.cases import OPERATOR, Case
from ficco.tools.bench.frames import BENCH, LAYERS
from ficco.tools.bench.harness import BenchSettings, Checked, bench, timelines_of
from ficco.tools.bench.inputs import LARGEST, Operands, wrong_elements
from ficco.tools.bench.measure import Barrier, Item, Runner, Stopwatch, rounds, slowest
from ficco.tools.bench.products import SUBJECT, ProductWork, accuracy
from ficco.tools.cli import measure as command


def test_ratios_are_taken_round_by_round() -> None:
    # The device is three times slower in the second round; the ratio is 2 in two of three rounds.
    times = pd.DataFrame({"slow": [2.0, 6.0, 2.2], "fast": [1.0, 3.0, 2.2]})
    assert report.over(times["slow"], times).to_dict() == pytest.approx({"slow": 1, "fast": 2})
    assert report.over(None, times).isna().all()
    seconds = {
        "gemm": 1.0, "collective": 0.5, "copies": 0.4, "pytorch-serial": 1.5, "serial": 1.4,
        "growing": 1.25, "pytorch-fused": 1.3, "pytorch-native": 1.5,
    }  # fmt: skip
    summary = report.summarise(
        {name: [t, 2 * t, t] for name, t in seconds.items()}, queued={"growing": [1.0, 2.0, 1.0]}
    )
    growing, bound = summary.loc["growing"], summary.loc["ideal"]
    assert (growing.ms, growing.ms_low, growing.ms_high) == (1250.0, 1250.0, 1875.0)
    assert (growing.ms_even, growing.ms_odd) == (1250.0, 2500.0)
    assert growing.speedup == pytest.approx(1.4 / 1.25)
    assert (growing.share, growing.efficiency) == pytest.approx((0.8, 0.5))
    assert (growing.vs_pytorch, growing.vs_queued) == pytest.approx((1.3 / 1.25, 0.8))
    assert bound.share == 1.0 and bound.speedup == pytest.approx(1.4)
    assert summary.loc[["gemm", "collective", "copies"], "share":].isna().all(axis=None)
    assert summary["vs_queued"].notna().sum() == 1


def test_figures_with_missing_times_and_of_the_slowest_rank() -> None:
    assert slowest([[1.0, 5.0], [2.0, 4.0], [0.5, 4.5]]).tolist() == [2.0, 5.0]
    assert report.geomean([0.5, 2.0, math.nan]) == pytest.approx(1.0)
    assert math.isnan(report.geomean([])) and math.isnan(report.geomean([math.nan]))
    parts = pd.DataFrame({"gemm": [3.0, 3.0], "collective": [2.0, 5.0], "copies": [4.0, 4.0]})
    assert list(report.ideal(parts)) == [3.0, 4.0]
    assert list(report.ideal(parts.drop(columns="collective"))) == [4.0, 4.0]
    assert report.ideal(parts[["gemm"]]) is report.ideal(parts.drop(columns="gemm")) is None
    # Flux's definition of overlap efficiency.
    times = {"gemm": [10.0], "pytorch-serial": [14.0], "a": [11.0], "b": [18.0]}
    efficiency = report.overlap_efficiency(pd.DataFrame(times))
    assert efficiency.to_dict() == {"pytorch-serial": 0.0, "gemm": 1.0, "a": 0.75, "b": -1.0}
    for changed in (times | {"pytorch-serial": [10.0]}, {"pytorch-serial": [14.0]}):
        assert report.overlap_efficiency(pd.DataFrame(changed)).isna().all()


def test_sets_have_the_published_shapes() -> None:
    sizes = [(case.m, case.n, case.k) for case in cases.SETS["measured"]()]
    assert len(sizes) == 8 and sizes[0] == (32768, 2048, 8192)
    assert [len(cases.SETS[name]()) for name in ("small", "scenarios", "waiting")] == [9, 16, 15]
    known = {case for name in ("measured", "unseen") for case in cases.SETS[name]()}
    assert set(cases.SETS["waiting"]()) <= known
    scenarios = {case.name: case for case in cases.scenarios()}  # sizes of one rank of eight
    assert (scenarios["g1"].m, scenarios["g1"].n, scenarios["g1"].k) == (16384, 2048, 131072)
    assert all("all_to_all_matmul" in scenarios[f"g{i}"].skip for i in range(13, 17))
    # Row-parallel layers swap n and k.
    swapped = cases.SETS["measured"]()[0].on("matmul_reduce_scatter")
    assert (swapped.name, swapped.m, swapped.n, swapped.k) == ("32768x8192x2048", 32768, 8192, 2048)
    assert swapped.problem(4).operator == "matmul_reduce_scatter"
    assert swapped.on(OPERATOR) == cases.SETS["measured"]()[0]
    # A shape that does not fit is skipped with a reason.
    case = Case("large", 1 << 20, 1 << 13, 1 << 13)
    assert "GiB" in case.skipped(4, 1 << 30) and "divide" in case.skipped(3, 1 << 40)
    assert case.skipped(4, 1 << 40) == ""


def test_experts_have_the_sizes_of_one_rank_of_eight() -> None:
    by_name = {case.name: case for case in cases.experts()}
    assert list(by_name) == ["g13", "g14", "g15", "g16"]
    assert by_name["g14"].problem(4).blocks == ((147456 // 8 // 4,) * 4,) * 4
    half = by_name["g13"].fitted(4, 100 << 30)
    assert half.m == 1607680 // 8 // 2 and "m / 2 for lack of memory" in half.label
    assert half.skipped(4, 100 << 30) == "" and by_name["g13"].fitted(4, 1 << 40) == by_name["g13"]
    g7 = {case.name: case.problem(4) for case in cases.weight_gradients()}["g7-gradient"]
    assert (g7.m, g7.n, g7.k, g7.kind.inner) == (262144, 1024, 28672, True)  # 262144 tokens
    gain = cases.SETS["experts-gain"]()[0]
    transposed = gain.on("all_to_all_transposed_matmul").problem(4)  # for the same tokens
    assert (transposed.n, transposed.k, transposed.blocks) == (1024, 7168, ((1024,) * 4,) * 4)
    assert transposed.flops == gain.problem(4).flops


def test_shapes_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text("name,m,n,k,dtype\none,64,8,16,float32\n")
    assert cases.read(path) == [Case("one", 64, 8, 16, "float32")]
    with pytest.raises(ConfigError, match="none.csv"):
        cases.read(tmp_path / "none.csv")
    negative, twice = (b"name,m,n,k\none,64,%d,16\none,64,9,16\n" % n for n in (-8, 8))
    messages = {negative: "line 2, column n", twice: "another name for each .* got 'one' 2 times"}
    for junk in (*messages, b"\x81\x00\xff", b'name,m\n"' + b"a" * 200_000):
        path.write_bytes(junk)
        message = messages.get(junk, "shapes.csv")
        with pytest.raises(ConfigError, match=message):
            cases.read(path)


def _problem(operator: str, world: int = 4, m: int = 32, n: int = 16, k: int = 24) -> Problem:
    return Case("", m, n, k, "float32", operator=operator).problem(world)


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_operator_has_its_candidates(operator: str) -> None:
    problem, offered = _problem(operator), choose(None)
    assert len({candidate.name for candidate in offered}) == len(offered)
    assert len(offered) == len(table.REFERENCES) + len(table.SCHEDULES)
    names = {candidate.name for candidate in of_problem(offered, problem)}
    assert {"gemm", "collective", "copies", "pytorch-serial", "growing", "auto"} <= names
    fused, gathers = operator in (OPERATOR, "matmul_reduce_scatter"), operator == OPERATOR
    assert ("pytorch-fused" in names) == fused
    shots = {"two-shot", "pytorch-one-shot", "pytorch-two-shot"}
    assert shots & names == (shots if problem.kind.returns else set())
    assert ("pytorch-pieces" in names) == ("pytorch-native" in names) == gathers
    assert ("ring" in names) == ("shard-overlap:beta" in names) == problem.kind.sums
    assert any("@stages" in name for name in names) != problem.kind.scatters
    chosen = choose(["candidates"], without=["pytorch-pieces", "pytorch-native"])
    compared = of_problem(chosen, problem)
    assert COMPARED in chosen
    assert not {"pytorch-pieces", "pytorch-native"} & {candidate.name for candidate in compared}
    schedules = {candidate.schedule for candidate in compared}
    assert {str(schedule) for schedule in candidates(problem)} <= schedules
    assert ("one-shot:pieces=2" in schedules) == problem.kind.sums
    assert "beta" in table.reason_against(parse("growing:beta"), problem) or problem.kind.sums
    large = Case("", 32768, 2048, 8192).problem(4)  # shards of 128 MiB
    assert not any("kernel" in candidate.name for candidate in of_problem(chosen, large))


def test_one_rank_has_no_staging_to_cap() -> None:
    for world in (1, 2):
        served = of_problem(choose(None), _problem(OPERATOR, world))
        assert any(candidate.stages for candidate in served) == (world > 1)


def test_candidates_with_a_number_are_the_first_of_those_ranked() -> None:
    problem = _problem(OPERATOR)
    chosen = choose(["candidates=2", "tiled"])
    ranked = ["tiled:pieces=2", "serial", "ring:pieces=3", "growing", "shrinking", "shard-overlap"]
    schedules = [Schedule.parse(name) for name in ranked]
    compared = of_problem(chosen, problem, None, lambda: schedules)
    names = [candidate.name for candidate in compared if candidate.ours]
    assert names == ["serial", "growing", "shrinking", "tiled"]  # a gather has no ring
    for wrong in ("candidates=0", "candidates=", "candidates=x"):
        with pytest.raises(ValueError):
            choose([wrong])


def test_cpus_have_several_compute_lanes_and_modes_only_if_asked() -> None:
    names = [candidate.name for candidate in choose(None, device="cpu")]
    assert set(NAMED) <= set(names) and not any("compute=" in name for name in names)
    assert any("compute=2" in candidate.name for candidate in choose(None))
    cpu: Any = SimpleNamespace(asynchronous=False, refuses=lambda *_: "")
    chosen = choose(["candidates", "growing:compute=2"], device="cpu")
    names = [candidate.name for candidate in of_problem(chosen, _problem(OPERATOR), cpu)]
    assert len(names) > 10
    assert [name for name in names if "compute" in name] == ["growing:compute=2"]
    assert measure.modes_of("cpu", None) == ("idle",)
    assert measure.modes_of("cuda", "idle,queued") == ("idle", "queued")
    for device, mode in (("cpu", "queued"), ("cuda", "graph")):
        with pytest.raises(ValueError, match=f"on {device}, got '{mode}'"):
            measure.modes_of(device, mode, graphs=False)


def test_marks_of_schedules_and_names_of_one_plan() -> None:
    pulled = parse("shard-overlap:pull@symmetric@stages=2")
    assert (pulled.schedule, pulled.symmetric, pulled.stages) == ("shard-overlap:pull", True, 2)
    assert parse(pulled.name) == pulled
    for wrong in ("growing@fast", "growing@stages=0", "slowing"):
        with pytest.raises(ValueError):
            parse(wrong)
    names = ["growing", "auto", "shard-overlap", "shard-overlap@stages=2", "shard-overlap:pull"]
    for world, aliases in ((2, {parse("shard-overlap"): parse("growing")}), (4, {})):
        problem = _problem(OPERATOR, world=world)
        assert table.named_again(of_problem(choose(names), problem), problem) == aliases


def _exact_problem(operator: str, kind: str) -> Problem:
    if kind in SCALED:
        return problem_of_sizes(operator, 256, 64, 384, kind, 4)
    if OPERATORS[operator].blocks:
        return Problem.of_blocks(operator, [[2, 3, 4], [5, 0, 1], [2, 2, 6]], 40, 100, kind)
    return Problem(operator, (3, 6, 0), 40, 100, kind)


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        (operator, kind)
        for operator in OPERATORS
        for kind in ("float32", "bfloat16", "float16", *SCALED)
        if not (OPERATORS[operator].inner and kind in SCALED)
    ],
)
def test_exact_operands_have_one_right_product(operator: str, kind: str) -> None:
    problem = _exact_problem(operator, kind)
    per_rank = [Operands(problem, rank, torch.device("cpu")) for rank in range(problem.world)]
    for operands in per_rank:
        operands.exact_b()
        operands.exact(5)
    a_shards = [own.wide(own.a_LK, own.scales.get("scale_a")).double() for own in per_rank]
    wide = [[a, own.wide_b_KN.double()] for a, own in zip(a_shards, per_rank, strict=True)]
    case = subjects.Case(problem.blocks or problem.rows, (problem.k, problem.n))
    expected = subjects.Product(operator).together(case, wide, 0)
    for operands, (exact,) in zip(per_rank, expected, strict=True):
        assert torch.equal(operands.reference().double(), exact)
        assert torch.equal(operands.product(), operands.reference_product())
        assert operands.b_KN.float().any(1).all()  # each column of A affects the product
        # No sum is rounded: eight bits hold the largest sum, whose terms a scale can double.
        summed = problem.world if problem.kind.sums else 1
        terms = int((operands.b_KN.float() != 0).sum(0).max()) * summed
        assert terms * LARGEST * (2 if "block" in kind else 1) <= 256
    first, second = (operands.a_LK[:2].float().clone() for operands in per_rank[:2])
    assert not torch.equal(first, second)  # operands depend on the rank and on the iteration
    scales = {name: scale.clone() for name, scale in per_rank[1].scales.items()}
    per_rank[1].exact(6)
    assert not torch.equal(second, per_rank[1].a_LK[:2].float())
    if scales and scales["scale_a"].numel() > 1:  # a single scale has only two values
        assert not torch.equal(scales["scale_a"], per_rank[1].scales["scale_a"])
    per_rank[1].random(0)
    assert 0 < per_rank[1].product().float().std() < 2  # about a standard normal distribution


@pytest.mark.parametrize("kind", ["float32", "fp8-tensor", "fp8-row", "fp8-block"])
@ranks.on_ranks(2)
def test_references_of_each_operator_are_right(at: ranks.Rank, kind: str) -> None:
    group = torch.distributed.group.WORLD
    for operator in OPERATORS:
        if OPERATORS[operator].inner and kind in SCALED:
            continue
        problem = problem_of_sizes(operator, 64, 32, 384, kind, at.world)
        operands = Operands(problem, at.rank, at.device)
        operands.exact_b()
        for turn, call in enumerate(table.REFERENCES):
            if table.unavailable(call, operands) or operator not in (call.operators or OPERATORS):
                continue
            runner = table.build(call, operands, group)
            with runner.context():
                runner.run()
                operands.exact(turn)
                result = (runner.proof or runner.run)()
            assert not wrong_elements(result, runner.expected(operands)), (operator, call.name)
        if operands.problem.kind.sums:
            error, right = accuracy(operands, group), operands.reference()
            assert error(right) == 0 and error(right + 100) >= 0.1, operator


class QuackDouble:
    """Double of QuACK 0.6.5: the gather of shards and the product that waits for them."""

    def __init__(self, gathered: torch.Tensor) -> None:
        self.gathered, self.work, self.quiet, self.gated = gathered, 0.0, 0, []

    def AllGatherRunner(self, *arguments: Any) -> Any:
        assert arguments[:3] == (1024, 32, torch.bfloat16)
        return self

    def quiesce(self) -> None:
        self.quiet += 1

    @contextmanager
    def gather(self, a_shard: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
        assert torch.equal(a_shard, self.gathered[:1024])
        yield self.gathered, "gates"

    def gemm(
        self, A: Any, B: Any, D: Any, C: None, semaphore: None, *tiling: int, pingpong: bool,
        b_kn: bool, ag_args: Any,
    ) -> None:  # fmt: skip
        torch.mm(A, B, out=D)
        self.work += 1.0 if tiling[:2] == (128, 192) else 2.0
        if ag_args:
            self.gated.append((*tiling, pingpong))

    def event(self, enable_timing: bool) -> Any:
        at = SimpleNamespace(synchronize=lambda: None)
        at.record = lambda: setattr(at, "work", self.work)
        at.elapsed_time = lambda later: later.work - at.work
        return at


def test_quack_gathers_for_its_fastest_product(monkeypatch: Any) -> None:
    operands = Operands(
        problem_of_sizes("all_gather_matmul", 2048, 16, 32, "bfloat16", 2), 0, torch.device("cpu")
    )
    operands.whole_OK.copy_(torch.randint(-3, 4, (2048, 32)))
    operands.a_LK.copy_(operands.whole_OK[:1024])
    operands.b_KN.copy_(torch.randint(-3, 4, (32, 16)))
    double = QuackDouble(operands.whole_OK)
    for name in ("quack", "quack.gemm", "quack.distributed"):
        monkeypatch.setitem(sys.modules, name, double)
    monkeypatch.setattr(gpu, "Event", double.event)
    candidate = next(reference for reference in table.REFERENCES if reference.kind == "quack")
    runner = table.build(candidate, operands, None)
    for turn in range(2):
        operands.b_KN.add_(turn)  # captured calls see new operands
        with runner.context():
            assert torch.equal(runner.run(), operands.whole_OK @ operands.b_KN)
    assert double.gated == [(128, 192, 1, 2, True)] * 2 and double.quiet == 2


def test_movements_without_products_move_the_same_bytes() -> None:
    assert doctest.testmod(families) == (0, 1)
    for operator, kind in OPERATORS.items():
        problem = _problem(operator)
        moves = families.movements(problem)
        width = problem.n if kind.scatters else problem.k
        assert {(move.flops, move.k) for move in moves} == {(0, width)}
        assert len(moves) == 1 + kind.returns and moves[0].block(3, 2) == problem.block(3, 2)
        assert (table.moved_bytes(problem), table.block_bytes(problem)) == (128 * width, 32 * width)


def _together(at: ranks.Rank) -> tuple[list[int], list[Any]]:
    """Decisions at a barrier, and outcomes of actions that fail on some ranks."""
    group = torch.distributed.group.WORLD
    barrier, decisions = Barrier(group), []
    for turn in range(200):
        barrier.wait()
        decisions.append(barrier.decide(turn if at.rank == 0 else -1))
    barrier.close()
    watch = Stopwatch(group, at.device)

    def fails(*failing: int, text: str = "no room\non {}") -> Any:
        if at.rank in failing:
            raise MemoryError(text.format(at.rank))
        return at.rank

    outcomes = [
        watch.together(partial(fails, *failing), named=named)
        for named in (False, True)
        for failing in ((), (1,), (0, 1))  # failing ranks
    ]
    outcomes.append(watch.together(partial(fails, 1, text="")))
    fatal = ranks.caught(lambda: watch.together(partial(fails, 0, 1), fatal=(MemoryError,)))
    watch.close()
    return decisions, [*outcomes, fatal.text]


def test_ranks_share_decisions_and_failures() -> None:
    message = "MemoryError: no room"
    for rank, (decisions, outcomes) in enumerate(ranks.run(2, _together)):
        assert decisions == list(range(200))
        assert outcomes == [
            *[(rank, ""), (None, message), (None, message)],
            *[(rank, ""), (None, f"rank 1: {message}"), (None, message)],
            (None, "MemoryError: "),
            f"no room\non {rank}",
        ]


def _meets(at: ranks.Rank) -> tuple[float, int, Any]:
    """Start a collective before the barrier on rank 1, after it on rank 0. Rank 1 misses a later
    barrier."""
    total, work = torch.tensor([1.0 + at.rank]), None
    with host_of(at, 2):
        barrier = Barrier(dist.group.WORLD, 4, hosts_of(dist.group.WORLD, 20, "a test"))
        if at.rank == 1:
            work = dist.all_reduce(total, async_op=True)
        barrier.wait()
        decided = barrier.decide(5 + at.rank)
        work = work or dist.all_reduce(total, async_op=True)
        work.wait()
        barrier.wait()
        late = ranks.caught(barrier.wait) if at.rank == 0 else None
        at.barrier()
        barrier.close()
    return total.item(), decided, late


def test_ranks_meet_between_hosts_during_collectives_of_their_group() -> None:
    first, second = ranks.run(2, _meets, timeout=30)
    assert first[:2] == second[:2] == (3.0, 5)
    assert first[2].type == "TimeoutError"
    assert "a rank of another host did not come" in first[2].text


#: Double of the stopwatch, for a group of one rank.
ONE_RANK: Any = SimpleNamespace(
    group=None,
    device=torch.device("cpu"),
    on_gpu=False,
    world=1,
    operands=lambda problem: Operands(problem, 0, torch.device("cpu")),
    together=lambda action, **_: (action(), ""),
    gather=lambda value: [value],
    proof=lambda call, operands: call,
    decide=lambda value: value,
)


@pytest.mark.parametrize(("stale_after", "status"), [(99, "skipped"), (1, "wrong"), (0, "wrong")])
def test_replays_are_proven_on_new_inputs(stale_after: int, status: str, monkeypatch: Any) -> None:
    work = ProductWork(Case("", 32, 16, 24, "float32"), ONE_RANK)
    operands = work.operands
    operands.exact_b()
    result, replays = operands.reference(), []

    def replay() -> None:
        replays.append(operands.a_LK.clone())
        if len(replays) <= stale_after:
            result.copy_(operands.reference())

    monkeypatch.setattr("ficco.tools.bench.products.capture", lambda runner, pool: (replay, result))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    checked = Checked("growing", Runner(operands.reference))
    work.graph(checked, None)
    assert len(replays) == 2 and not torch.equal(*replays)
    assert checked.graph_status == status
    assert (checked.replay is replay) == (status == "skipped")
    assert checked.graph_note == ("wrong result on ranks [0]" if status == "wrong" else "")


class _Clock:
    """Prescribed times of calls: seconds of the device and of the host. The last pair repeats."""

    warm_calls = 6

    def __init__(self, **taken: list[tuple[float, float]]) -> None:
        self.taken = taken
        self.calls = dict.fromkeys(taken, 0)
        self.sleeps: list[float] = []

    def time(self, item: Item) -> tuple[float, float]:
        name = item.name
        taken = self.taken[name][min(self.calls[name], len(self.taken[name]) - 1)]
        self.calls[name] += 1
        self.sleeps.append(item.sleep_s)
        return taken

    def host(self, item: Item) -> float:
        return 1e-4


def _timed(clock: _Clock) -> list[Item]:
    items = [Item("queued", name, Runner(lambda: torch.empty(0))) for name in clock.taken]
    assert rounds(items, clock, ONE_RANK, most=4, seconds=math.inf) == 4  # type: ignore[arg-type]
    return items


def test_calls_are_warmed_up_and_sleep_equally_long() -> None:
    # Calls that allocate memory do not count as long calls.
    growing = [(0.4, 0.3), (0.3, 0.2), (0.02, 1e-3), (0.01, 5e-4)]
    clock = _Clock(grows=growing, is_long=[(0.2, 1e-4)])
    grows, is_long = _timed(clock)
    assert clock.calls == {"grows": 6 + 4, "is_long": 3 + 4}
    assert grows.times_s == [0.01] * 4 and grows.host_s == 1e-4
    assert math.isnan(is_long.host_s)
    # A GPU that sleeps longer is cooler and faster, so all calls sleep equally long.
    clock = _Clock(quick=[(0.4, 0.3), (0.01, 1e-4)], slow=[(0.01, 7e-4)])
    quick, slow = _timed(clock)
    assert quick.sleep_s == slow.sleep_s == pytest.approx(measure.SLEEP_LEAST_S + 2 * 7e-4)
    assert clock.sleeps[-8:] == [quick.sleep_s] * 8
    assert _timed(_Clock(quick=[(0.01, 0.5)]))[0].sleep_s == measure.SLEEP_MOST_S


@contextmanager
def _corrupted(operator: str, rank: int) -> Iterator[None]:
    """Multiply the results of an operator by the rank plus one."""
    right = getattr(ficco, operator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ficco, operator, lambda *args, **kwargs: right(*args, **kwargs) * (1 + rank))
        yield


def _small(subject: Any, cases: Sequence[Any], csv: Path, **more: Any) -> BenchSettings:
    how = {"modes": ("idle",), "device": "cpu", "rounds": 2, "seconds": 600.0} | more
    return BenchSettings(subject=subject, cases=tuple(cases), csv=csv, **how)


def _benched(at: ranks.Rank, folder: Path) -> pd.DataFrame | None:
    """Bench all operators except the first; rank 1 corrupts ``matmul_reduce_scatter``."""
    case = Case("a", 64, 16, 32, "float32")
    cases = [case.on(operator) for operator in OPERATORS if operator != OPERATOR]
    chosen = choose(["auto", "hetero-fused-1d:pieces=2", "growing:pull@symmetric"])
    with _corrupted("matmul_reduce_scatter", at.rank):
        return bench(_small(SUBJECT, cases, folder / "family.csv", schedules=chosen, quiet=True))


def test_every_operator_is_proven_and_timed_and_a_wrong_sum_is_not(tmp_path: Path) -> None:
    rows, no_rows = ranks.run(2, _benched, tmp_path)
    assert no_rows is None
    by_call = {(row.operator, row.candidate): row for row in rows.itertuples()}
    wrong = {key: row.note for key, row in by_call.items() if row.status == "wrong"}
    names = ("copies", "serial", "auto", "hetero-fused-1d:pieces=2")
    assert wrong == {("matmul_reduce_scatter", name): "wrong result on ranks [1]" for name in names}
    skipped = {key[1]: row.note for key, row in by_call.items() if row.status == "skipped"}
    shots = {"pytorch-one-shot", "pytorch-two-shot"}
    assert skipped.keys() == {"pytorch-fused", PRODUCT, *COPY_ENGINES, *shots}
    assert all(note.startswith("not here: ") for note in skipped.values())
    for operator in set(OPERATORS) - {OPERATOR, "matmul_reduce_scatter"}:
        for name in ("gemm", "collective", "copies", "pytorch-serial", "serial", "auto"):
            assert by_call[operator, name].ms > 0, (operator, name)
        assert by_call[operator, "ideal"].share == 1.0
        scatters, sums = OPERATORS[operator].scatters, OPERATORS[operator].sums
        assert ((operator, "growing:pull@symmetric") in by_call) != scatters
        errors = [by_call[operator, name].error for name in ("pytorch-serial", "serial", "auto")]
        assert all(0 < error < 1e-6 for error in errors) if sums else all(map(math.isnan, errors))
        assert math.isnan(by_call[operator, "gemm"].error)
    sizes = by_call["matmul_all_reduce", "gemm"]
    assert (sizes.m, sizes.n, sizes.k) == (64, 32, 16)
    assert "## Accuracy of matmul_all_reduce" in report.report(rows, {}, "name", [])


def _layered(at: ranks.Rank, folder: Path) -> list[Any]:
    """Bench layers by all ways, and one layer with each of its operators corrupted."""
    ways = {name: layers.WAYS[name] for name in ("pytorch-serial", "auto")}
    settings = _small(layers.SUBJECT, layers.SHAPES["cpu"], folder / "layers.csv")
    # Without this limit sizes of an earlier layer would make the next layer's sizes dynamic.
    with torch._dynamo.config.patch(recompile_limit=1):
        tables = [bench(settings)]
    for operator in ("all_gather_matmul", "matmul_reduce_scatter"):
        with _corrupted(operator, at.rank), pytest.MonkeyPatch.context() as patch:
            patch.setattr(layers, "WAYS", ways)
            faulty = replace(settings, cases=settings.cases[:1], csv=folder / f"{operator}.csv")
            tables.append(bench(faulty))
    return tables


def test_layers_are_proven_and_timed_and_one_with_a_wrong_step_is_not(tmp_path: Path) -> None:
    (rows, *corrupted), no_rows = ranks.run(2, _layered, tmp_path, timeout=250.0)
    assert set(no_rows) == {None} and len(rows) == 2 * len(layers.WAYS)
    for row in rows.itertuples():
        if row.way == layers.ASYNC_TP:
            assert row.status == "skipped" and "GPU" in row.note
        else:
            assert (row.status, row.note) == ("ok", ""), row
            assert row.ms > 0 and row.error <= layers.TOLERANCE["float32"], row
    assert (rows["speedup"][rows["way"].isin(layers.COLLECTIVES)] == 1.0).sum() >= 2
    page = harness.report(layers.SUBJECT, LAYERS.read(tmp_path / "layers.csv"), {}, "name")
    assert "| mlp: 256 tokens, 128, 512, 256 | auto |" in page
    assert "- pytorch-async-tp of attention: skipped" in page
    for rows in corrupted:
        by_way = rows.set_index("way")
        assert by_way["status"].to_dict() == {"pytorch-serial": "ok", "auto": "wrong"}
        assert by_way["note"]["auto"] != ""


WAYS = (
    (experts, "experts", "9 experts for 2 ranks"),
    (attention, "sequence", "sequence: required a multiple of 2 ranks, got 9"),
)


def _ways(at: ranks.Rank, folder: Path, workload: int, corrupted: tuple[str, ...]) -> list[Any]:
    """Bench all ways, then two ways without time left and with corrupted operators."""
    room, size, _ = WAYS[workload]
    cases = (*room.SHAPES["cpu"], replace(room.SHAPES["cpu"][0], name="odd", **{size: 9}))
    settings = _small(room.SUBJECT, cases, folder / "ways.csv", timelines=True)
    some_ways = replace(settings, schedules=("auto", "serial", "growing", "shard-overlap"))
    short = replace(settings, schedules=("auto", "serial"), timelines=False, csv=folder / "few.csv")
    late = replace(short, seconds=-1.0)
    with pytest.MonkeyPatch.context() as patch:
        shortened = {operator: names[:4] for operator, names in attention.SCHEDULES.items()}
        patch.setattr(attention, "SCHEDULES", shortened)
        tables = [bench(options) for options in (settings if workload else some_ways, late)]
        with ExitStack() as stack:
            for operator in corrupted:
                stack.enter_context(_corrupted(operator, at.rank))
            tables.append(bench(short))
    return tables


@pytest.mark.parametrize("workload", range(len(WAYS)))
def test_ways_are_proven_and_timed_and_wrong_ones_are_not(
    tmp_path: Path, workload: int, capsys: Any
) -> None:
    room, _, note = WAYS[workload]
    corrupted = ("all_gather_attention", "ulysses_attention") if workload else ("experts",)
    (rows, late, wrong), no_rows = ranks.run(2, _ways, tmp_path, workload, corrupted, timeout=300.0)
    assert set(no_rows) == {None}
    assert set(rows["status"]) == {"ok", "skipped"} and rows["note"].iloc[-1] == note
    ok = rows[rows["status"] == "ok"]
    assert (ok["ms"] > 0).all()
    for _, of_case in ok.groupby("operator" if workload else "case"):
        by_way = of_case.set_index("way")
        parts = by_way[by_way["speedup"].isna()]
        assert len(parts) == 2 and by_way["ms"]["ideal"] >= parts["ms"].max()
        timed = by_way.drop([*parts.index, "ideal"])
        assert (timed["share"] < timed["in_turn"]).all() and (timed["speedup"] == 1.0).any()
        assert by_way["took"]["auto"] and sum(by_way["took"] != "") == 1
    rows = room.SUBJECT.schema.read(tmp_path / "ways.csv")
    page = harness.report(room.SUBJECT, rows, {}, "name")
    assert ("| 8 experts, top 2 | 256 | 64, 128 |", "| 256 | 8 (4), 16, causal |")[workload] in page
    assert f"| auto ({ok['took'][ok['way'] == 'auto'].iloc[0]}) |" in page
    harness.show_ways(room.SUBJECT, rows)
    table = capsys.readouterr().out
    assert "│ auto (" in table and "│ serial " in table and "---" not in table
    case = ("layer: 8 experts, top 2; tokens a rank: 256; ", "positions: 256; heads (of keys), ")
    assert case[workload] in table and "\nx baseline  the fastest baseline over" in table
    assert f"all ways of odd: skipped: {note}\n" in table
    assert cli.run(["plot", str(tmp_path / "ways.csv"), "--report"]) == 0
    assert (tmp_path / "ways.md").read_text().partition("Forward passes")[2] in page
    assert (tmp_path / "ways.png").read_bytes().startswith(b"\x89PNG")
    assert "of odd: skipped" in page and ("skew 0.5 |" in page) == (workload == 0)
    timelines = loads((tmp_path / "ways_timelines.json").read_text(), "ways")
    assert (tmp_path / "ways_timelines.png").exists() and len(timelines) > 6
    ratios = []
    for pair in zip(timelines[::2], timelines[1::2], strict=True):
        assert corrupted[0] in pair[0].problem and pair[0].ranks
        kinds = ("matmul", "attend")
        computed = [[[b for b in bars if b.kind in kinds] for bars in run.ranks] for run in pair]
        named = [[sorted((b.lane, b.label) for b in bars) for bars in run] for run in computed]
        assert named[0] == named[1], pair[0].title
        spent = [sum(bar.stop_s - bar.start_s for bars in run for bar in bars) for run in computed]
        ratios.append(spent[0] / spent[1])
    # Planned times follow from rates that were measured in the same bench. A pause of the machine
    # may stretch all but one of the measured timelines.
    assert any(0.01 < ratio < 100 for ratio in ratios), ratios

    missed = wrong[wrong["status"] == "wrong"]
    ways = ["auto", "serial"] if workload else ["auto", "auto, exact rows", "serial"]
    for _, of_case in missed.groupby("operator" if workload else "case"):
        assert sorted(of_case["way"]) == ways
    assert set(missed["note"]) == {"wrong result on ranks [1]"} and (wrong["status"] == "ok").any()
    assert not workload or set(missed["operator"]) == set(corrupted)
    assert set(late["note"]) == {"out of time (-1 s)"} and set(late["status"]) == {"skipped"}


def _data(at: ranks.Rank) -> tuple[list[tuple[list[int], int]], list[float]]:
    """Tokens of each expert and the capacity for two skews; the largest difference of each way of
    attention from the first way, on random data where each key matters."""
    watch = Stopwatch(torch.distributed.group.WORLD, at.device)
    chosen = []
    for skew in (0.0, 1.0):
        case = experts.ExpertCase("skewed", 8, 4096, 8, 8, dtype="float32", skew=skew)
        data = experts.ExpertData(case, watch)
        pairs = data.indices.sort(1).values
        assert (pairs[:, 0] < pairs[:, 1]).all()  # no expert twice
        counts = data.indices.flatten().bincount(minlength=8).tolist()
        chosen.append((counts, data.capacity))
    differences = []
    for shape in attention.SHAPES["cpu"]:
        work = attention.AttentionData(shape, watch)
        outputs = [way.call() for way in work.variants().values() if not (way.part or way.lacks)]
        assert len(outputs) > 5
        differences += [float((one - outputs[0]).abs().max()) for one in outputs]
    watch.close()
    return chosen, differences


def test_routes_are_as_skewed_as_the_case_and_attention_is_alike_on_random_data() -> None:
    for chosen, differences in ranks.run(2, _data):
        for (counts, capacity), ratio in zip(chosen, (1.2, 7.0), strict=True):
            popular = [counts[i % 2 * 4 + i // 2] for i in range(8)]  # of both ranks by turns
            assert ratio / 2 < popular[0] / popular[-1] < ratio and max(counts) <= capacity
        assert popular[0] > popular[2] > popular[4] > popular[6]  # of the skewed case
        assert max(differences) < 1e-5  # float32, of means of about 1


def test_a_way_must_call_the_operation_of_its_name() -> None:
    with pytest.raises(RuntimeError, match="does not call fused_all_gather"):
        layers.require(("aten::add", "fused_all_gather"), lambda: torch.ones(2) + 1)


def test_shapes_of_the_command_line() -> None:
    parser = cli._parser()

    def shapes(words: str = "", device: str = "cuda") -> tuple[list[tuple[str, str]], str]:
        chosen, name = command.chosen(parser.parse_args(["bench", *words.split()]), device)
        return [(case.operator, case.name) for case in chosen], name

    assert shapes() == ([(OPERATOR, case.name) for case in cases.SETS["measured"]()], "measured")
    chosen, name = shapes("--operator all_to_all_matmul matmul_reduce_scatter")
    assert len(chosen) == 12 + 4 + 8 and name == "experts-gain-experts-measured"
    assert chosen[-1] == ("matmul_reduce_scatter", "16384x16384x13312")
    chosen, name = shapes("--set experts small")
    assert [operator for operator, _ in chosen] == ["all_to_all_matmul"] * 4 + [OPERATOR] * 9
    assert len(shapes(f"--set cpu --operator {' '.join(OPERATORS)}", "cpu")[0]) == 3 * 7
    chosen, _ = shapes("--set scenarios experts --only g14 g2")
    assert [name for _, name in chosen] == ["g2", "g14", "g14"]


def _timelines(at: ranks.Rank) -> list[list[Timeline]]:
    group: Any = torch.distributed.group.WORLD
    watch, timelines = Stopwatch(group, at.device), []
    for dtype in ("fp8-row", "fp8-block"):
        problem = problem_of_sizes(OPERATOR, 64, 32, 128, dtype, at.world)
        operands = Operands(problem, at.rank, at.device)
        operands.exact(0)
        operands.exact_b()
        calls = {name: table.caller(operands, group, name) for name in ("serial", "growing")}
        timelines.append(timelines_of(calls, watch))
    return timelines


def test_calls_of_float8_have_timelines() -> None:
    by_dtype, by_dtype_of_rank_1 = ranks.run(2, _timelines)
    assert by_dtype == by_dtype_of_rank_1
    for recipe, timelines in zip(("row", "block"), by_dtype, strict=True):
        assert [run.title for run in timelines[:2]] == ["serial: planned", "serial: measured"]
        for timeline in timelines:
            bars = [bar for lanes in timeline.ranks for bar in lanes]
            assert {"matmul", "copy"} <= {bar.kind for bar in bars}
            assert any("scale" in bar.label for bar in bars) and recipe in str(timeline.problem)


def test_bench_writes_rows_report_and_pictures(tmp_path: Path, capfd: Any) -> None:
    shapes, out = tmp_path / "tiny.csv", tmp_path / "out"
    shapes.write_text("name,m,n,k,dtype\na,64,16,64,float32\nodd,63,16,64,float32\n")
    words = f"bench --shapes {shapes} --ranks 2 --device cpu --rounds 3 --seconds 600 --json"
    words += f" --timelines --out {out} --name tiny"
    words += " --schedules growing hetero-fused-1d:pieces=4@stages=2 auto shrinking"
    assert cli.run(words.split()) == 0
    rows, printed = BENCH.read(out / "tiny.csv"), json.loads(capfd.readouterr().out)
    filled = [{n: math.nan if v is None else v for n, v in row.items()} for row in printed]
    pd.testing.assert_frame_equal(rows, BENCH.frame(filled), rtol=1e-5)
    timed = {row.candidate: row for row in rows[rows["case"] == "a"].itertuples()}
    assert set(rows["status"][rows["case"] == "odd"]) == {"skipped"}
    for name in ("gemm", "collective", "copies", "pytorch-serial", "serial", "pytorch-pieces"):
        assert timed[name].status == "ok" and timed[name].ms > 0 and timed[name].rounds == 3, name
    assert timed["ideal"].share == 1.0
    alias = timed["shrinking"]  # with one peer the plan is the same
    assert alias.note == "the same steps as growing" and alias.ms == timed["growing"].ms > 0
    assert timed["growing"].extra_bytes > timed["hetero-fused-1d:pieces=4@stages=2"].extra_bytes
    assert timed["quack"].status == "skipped" and "GPU" in timed["quack"].note
    ends = ".csv .json .md _share.png _speedup.png _timelines.json _timelines.png _trace.json"
    assert {path.name for path in out.iterdir()} == {f"tiny{end}" for end in ends.split()}
    about = json.loads((out / "tiny.json").read_text())
    assert about["ranks"] == 2 and about["versions"]["torch"] == torch.__version__
    events = json.loads((out / "tiny_trace.json").read_text())["traceEvents"]
    assert {"matmul", "copy"} <= {event.get("cat") for event in events}
    assert cli.run(["plot", str(out / "tiny.csv"), "--out", str(out / "again.svg")]) == 0
    assert {path.name for path in out.glob("again*")} == {"again_share.svg", "again_speedup.svg"}


@pytest.mark.parametrize(("seconds", "most", "count"), [(11.9, 99, 5), (10.0, 4, 4), (1.0, 99, 3)])
def test_rounds_end_in_time(seconds: float, most: int, count: int, monkeypatch: Any) -> None:
    """A round of two items takes two seconds; at least three rounds run."""
    clock = _Clock(a=[(1.0, 0.0)], b=[(1.0, 0.0)])
    clock.warm_calls = 1
    monkeypatch.setattr(measure.time, "monotonic", lambda: sum(clock.calls.values()))
    items = [Item("queued", name, Runner(lambda: torch.empty(0))) for name in "ab"]
    assert rounds(items, clock, ONE_RANK, most=most, seconds=seconds) == count  # type: ignore
    assert clock.calls == {"a": 1 + count, "b": 1 + count}  # the first call warms up
    assert all(item.times_s == [1.0] * count for item in items)


def _benched_over_hosts(at: ranks.Rank, path: Path) -> None:
    cases, chosen = [Case("a", 256, 16, 32, "float32")], ["auto", "growing", "uniform-fused-2d"]
    with host_of(at, 2):
        bench(_small(SUBJECT, cases, path, schedules=choose(chosen), seconds=30, quiet=True))


def test_a_bench_over_hosts(tmp_path: Path) -> None:
    ranks.run(2, _benched_over_hosts, tmp_path / "a.csv")
    rows = BENCH.read(tmp_path / "a.csv")
    timed = set(rows["candidate"][rows["status"] == "ok"])
    assert timed >= {"gemm", "collective", "copies", "pytorch-serial", "serial", "auto"}
    assert timed >= {"growing", "uniform-fused-2d"} and (rows["status"] != "failed").all()
    fused = rows[rows["candidate"].isin(("pytorch-fused", "pytorch-native"))]
    reason = "not here: it copies through memory that ranks of one host share"
    assert set(fused["note"]) == {reason}


# Ways of AMD's libraries: their requirements and their calls, on doubles of PyTorch's API.

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
VARIABLES = sorted({name for one in COPY_ENGINES.values() for name in one.variables})


@pytest.fixture
def rocm(monkeypatch: Any) -> pytest.MonkeyPatch:
    """A PyTorch for ROCm, without RCCL's environment variables."""
    monkeypatch.setattr(torch.version, "hip", "7.15")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_operators_have_the_collectives_of_their_exchange() -> None:
    served = {reference.name: reference.operators for reference in table.REFERENCES}
    kinds = {name: {OPERATORS[key].collective for key in served[name]} for name in COPY_ENGINES}
    sdma = {"all-gather", "all-to-all"}
    assert kinds == {"rccl-sdma": sdma, "rccl-ce-all-reduce": {"all-reduce"}}
    assert served[PRODUCT] == () and set(COPY_ENGINES) < set(report.SERIALS)
    for name, device in product((*COPY_ENGINES, PRODUCT), (CPU, CARD)):
        assert lacking(name, device, True) == "it needs GPUs and PyTorch for ROCm"


@pytest.mark.parametrize("name", COPY_ENGINES)
def test_a_collective_names_its_missing_requirement(name: str, rocm: pytest.MonkeyPatch) -> None:
    variables = dict(COPY_ENGINES[name].variables)
    first, value = variables.popitem()
    for variable, setting in variables.items():
        rocm.setenv(variable, setting)
    for setting in ("", "0"):
        rocm.setenv(first, setting)
        advice = "RCCL reads its variables once: start all ranks with "
        assert lacking(name, CARD, True) == f"{advice}{first}={value}"
    rocm.setenv(first, value)
    assert "one size on all ranks" in lacking(name, CARD, False)
    assert "has not loaded RCCL" in lacking(name, CARD, True)
    loaded = {"ncclAllGather": "registers no symmetric memory", "ncclCommWindowRegister": ""}
    for function, message in loaded.items():
        rocm.setattr(baselines, "_rccl", lambda name=function: SimpleNamespace(**{name: None}))
        lacks = lacking(name, CARD, True)
        assert message in lacks and bool(message) == bool(lacks)


def test_hipblaslt_is_preferred_only_in_the_context(rocm: pytest.MonkeyPatch) -> None:
    """PyTorch returns the library in use, which differs from the requested one on some GPUs."""
    backends = torch._C._BlasBackend
    chosen, offered = [backends.Default], {"hipblaslt": backends.Cublas}

    def choose(library: Any = None) -> Any:
        if library is not None:
            chosen.append(offered.get(library, library))
        return chosen[-1]

    rocm.setattr(torch.backends.cuda, "preferred_blas_library", choose)
    assert "PyTorch takes" in lacking(PRODUCT, CARD, True)
    offered["hipblaslt"] = backends.Cublaslt
    assert lacking(PRODUCT, CARD, True) == ""
    with pytest.raises(ZeroDivisionError), preferred():
        assert choose() == backends.Cublaslt
        raise ZeroDivisionError
    assert choose() == backends.Default


def test_memory_is_registered_before_it_is_timed(monkeypatch: Any) -> None:
    pools: list[Any] = []
    registered_pools: list[list[str]] = []

    @contextmanager
    def use(pool: list[str]) -> Iterator[None]:
        pools.append(pool)
        yield
        pools.pop()

    def register(pool: list[str], symm: bool) -> None:
        registered_pools.append(list(pool))

    monkeypatch.setattr(gpu, "MemPool", lambda allocator: [allocator])
    monkeypatch.setattr(gpu, "use_mem_pool", use)
    monkeypatch.setattr(gpu, "synchronize", lambda: None)
    backend = SimpleNamespace(mem_allocator="RCCL's", register_mem_pool=register)
    group: Any = SimpleNamespace(_get_backend=lambda device: backend)
    context = registered(group, CARD, lambda: pools[-1].append("a call"))
    assert registered_pools == [["RCCL's", "a call"]] and not pools
    with context():
        assert pools == [["RCCL's", "a call"]]
    backend.register_mem_pool = mock.Mock(side_effect=TypeError("incompatible arguments"))
    with pytest.raises(NotImplementedError, match="cannot be registered with RCCL: incompatible"):
        registered(group, CARD, lambda: None)
