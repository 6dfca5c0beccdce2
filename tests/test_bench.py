"""The bench: figures from made-up times, shapes, rows, reports, and one small run."""

from __future__ import annotations

import doctest
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import ranks
import torch

import ficco
from ficco.accelerator import gpu
from ficco.errors import ConfigError
from ficco.heuristics import candidates, families, problem_of_sizes
from ficco.heuristics.families import movements
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.scaling import SCALED
from ficco.schedules import NAMED, Schedule, plans
from ficco.simulate.timeline import Timeline, loads
from ficco.tools import cli
from ficco.tools.bench import (
    attention,
    cases,
    experts,
    layers,
    measure,
    report,
    stats,
    tables,
    ways,
)
from ficco.tools.bench.calls import FUSED, Runner, build, caller, expected, step_bytes, unavailable
from ficco.tools.bench.candidates import (
    COMPARED,
    REFERENCES,
    SCHEDULES,
    block_bytes,
    choose,
    moved_bytes,
    named_again,
    of_problem,
    parse,
    refused,
)
from ficco.tools.bench.cases import OPERATOR, Case
from ficco.tools.bench.frames import BENCH, LAYERS
from ficco.tools.bench.inputs import LARGEST, Operands, exact_calls, wrong_elements
from ficco.tools.bench.measure import SLEEP_LEAST_S, SLEEP_MOST_S, Barrier, Item, modes_of, rounds
from ficco.tools.bench.run import BenchSettings, bench
from ficco.tools.bench.series import Stopwatch, slowest
from ficco.tools.bench.traces import trace_all
from ficco.tools.bench.verify import Checked, Verifier, accuracy
from ficco.tools.cli import bench as command

# Figures.


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    assert slowest([[1.0, 5.0], [2.0, 4.0], [0.5, 4.5]]).tolist() == [2.0, 5.0]


def _times(**by_name: list[float]) -> pd.DataFrame:
    return pd.DataFrame(by_name)


def test_ratios_are_taken_round_by_round() -> None:
    # The device is three times slower in the last round; the ratio is 2 in every one.
    times = _times(slow=[2.0, 2.2, 6.0], fast=[1.0, 1.1, 3.0])
    assert stats.over(times["slow"], times).to_dict() == pytest.approx({"slow": 1, "fast": 2})
    assert stats.over(None, times).isna().all()
    assert stats.spread(times).loc["fast"].to_dict() == pytest.approx(
        {"ms": 1100, "ms_low": 1050, "ms_high": 2050}
    )


def test_means_leave_out_what_is_not_there() -> None:
    assert stats.geomean([0.5, 2.0, math.nan]) == pytest.approx(1.0)
    assert math.isnan(stats.geomean([])) and math.isnan(stats.geomean([math.nan]))


def test_the_ideal_is_the_longer_of_gemm_and_fastest_communication() -> None:
    gemm, collective, copies = [3.0, 3.0], [2.0, 5.0], [4.0, 4.0]
    both = _times(gemm=gemm, collective=collective, copies=copies)
    assert list(stats.ideal(both)) == [3.0, 4.0]
    assert list(stats.ideal(_times(gemm=gemm, copies=copies))) == [4.0, 4.0]
    assert stats.ideal(_times(gemm=gemm)) is None
    assert stats.ideal(both.drop(columns="gemm")) is None


def test_overlap_efficiency_is_that_of_flux() -> None:
    times = {"gemm": [10.0] * 3, "serial-collective": [14.0] * 3, "a": [11.0] * 3, "b": [18.0] * 3}
    found = stats.overlap_efficiency(pd.DataFrame(times))
    assert found.to_dict() == {"serial-collective": 0.0, "gemm": 1.0, "a": 0.75, "b": -1.0}
    times["serial-collective"] = times["gemm"]
    assert stats.overlap_efficiency(pd.DataFrame(times)).isna().all()
    del times["gemm"]
    assert stats.overlap_efficiency(pd.DataFrame(times)).isna().all()


def test_a_summary_holds_every_candidate_against_the_same_round() -> None:
    found = stats.summarise(
        {
            "gemm": [1.0, 2.0, 1.0],
            "collective": [0.5, 1.0, 0.5],
            "copies": [0.4, 0.8, 0.4],
            "serial-collective": [1.5, 3.0, 1.5],
            "serial": [1.4, 2.8, 1.4],
            "growing": [1.25, 2.5, 1.25],
            "pytorch-fused": [1.3, 2.6, 1.3],
            "pytorch-native": [1.5, 3.0, 1.5],
        },
        queued={"growing": [1.0, 2.0, 1.0]},
    )
    growing = found.loc["growing"]
    assert (growing.ms, growing.ms_low, growing.ms_high) == (1250.0, 1250.0, 1875.0)
    assert growing.speedup == pytest.approx(1.4 / 1.25)
    assert growing.share == pytest.approx(0.8)
    assert growing.efficiency == pytest.approx(0.5)
    assert growing.vs_pytorch == pytest.approx(1.3 / 1.25)
    assert growing.vs_queued == pytest.approx(0.8)
    bound = found.loc["ideal"]
    assert bound.share == 1.0 and bound.speedup == pytest.approx(1.4)
    assert found.loc[["gemm", "collective", "copies"], "share":].isna().all(axis=None)
    assert found["vs_queued"].notna().sum() == 1


# Shapes and candidates.


def test_the_sets_are_those_that_are_published() -> None:
    sizes = [(case.m, case.n, case.k) for case in cases.SETS["measured"]()]
    assert len(sizes) == 8 and sizes[0] == (32768, 2048, 8192)
    assert [len(cases.SETS[name]()) for name in ("small", "scenarios", "waiting")] == [9, 16, 15]
    known = {case for name in ("measured", "unseen") for case in cases.SETS[name]()}
    assert set(cases.SETS["waiting"]()) <= known


def test_row_parallel_layers_have_n_and_k_exchanged() -> None:
    first = cases.SETS["measured"]()[0].on("matmul_reduce_scatter")
    assert (first.name, first.m, first.n, first.k) == ("32768x8192x2048", 32768, 8192, 2048)
    problem = first.problem(4)
    assert problem.operator == "matmul_reduce_scatter"
    assert (problem.left_rows(0), problem.out_rows(0)) == (32768, 8192)
    assert first.on(OPERATOR) == cases.SETS["measured"]()[0]


def test_experts_are_as_one_rank_of_eight_sees_them() -> None:
    found = {case.name: case for case in cases.experts()}
    assert list(found) == ["g13", "g14", "g15", "g16"]
    g14 = found["g14"]
    assert (g14.m, g14.n, g14.k) == (147456 // 8, 28672, 4096)
    assert g14.problem(4).blocks == ((147456 // 8 // 4,) * 4,) * 4
    assert g14.fitted(4, 140 << 30) == g14
    half = found["g13"].fitted(4, 100 << 30)
    assert half.m == 1607680 // 8 // 2 and "m / 2 for lack of memory" in half.label
    assert half.skipped(4, 100 << 30) == ""
    assert found["g13"].fitted(4, 1 << 40) == found["g13"]
    weights = {case.name: case for case in cases.weight_gradients()}
    assert list(weights)[-2:] == ["g7", "g7-gradient"] and len(weights) == 8
    g7 = weights["g7-gradient"].problem(4)  # 262144 tokens
    assert (g7.m, g7.n, g7.k, g7.kind.inner) == (262144, 1024, 28672, True)
    assert g7.flops == weights["g7"].problem(4).flops and g7.out_rows(0) == weights["g7"].m
    gain = cases.SETS["experts-gain"]()
    assert {case.m for case in gain} == {4096, 8192, 16384, 32768} and len(gain) == 12
    assert {case.operator for case in gain} == {"all_to_all_matmul"}
    turned = gain[0].on("all_to_all_transposed_matmul").problem(4)  # of the same tokens
    assert (turned.n, turned.k, turned.blocks) == (1024, 7168, ((1024,) * 4,) * 4)
    assert (turned.left_rows(0), turned.b_rows(0), turned.out_rows(0)) == (4096, 4096, 7168)
    assert turned.flops == gain[0].problem(4).flops


def test_scenarios_are_as_one_rank_of_eight_sees_them() -> None:
    found = {case.name: case for case in cases.scenarios()}
    assert (found["g1"].m, found["g1"].n, found["g1"].k) == (16384, 2048, 131072)
    assert "n / 8" in found["g1"].label
    assert all("all_to_all_matmul" in found[f"g{i}"].skip for i in range(13, 17))


def test_a_shape_that_does_not_fit_says_so() -> None:
    case = Case("large", 1 << 20, 1 << 13, 1 << 13)
    assert "GiB" in case.skipped(4, 1 << 30)
    assert case.skipped(4, 1 << 40) == ""
    assert "divide" in case.skipped(3, 1 << 40)


def test_shapes_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text("name,m,n,k,dtype\none,64,8,16,float32\n")
    assert cases.read(path) == [Case("one", 64, 8, 16, "float32")]
    path.write_text("name,m,n,k\none,64,-8,16\n")
    with pytest.raises(ConfigError, match="line 2, column n"):
        cases.read(path)
    with pytest.raises(ConfigError, match="none.csv"):
        cases.read(tmp_path / "none.csv")
    for junk in (b"\x81\x00\xff", b'name,m\n"' + b"a" * 200_000):
        path.write_bytes(junk)
        with pytest.raises(ConfigError, match="shapes.csv"):
            cases.read(path)


def _problem(operator: str, world: int = 4, m: int = 32, n: int = 16, k: int = 24) -> Problem:
    return Case("", m, n, k, "float32", operator=operator).problem(world)


def test_candidates_have_names_of_their_own() -> None:
    names = [candidate.name for candidate in choose(None)]
    assert len(names) == len(set(names)) == len(REFERENCES) + len(SCHEDULES)
    assert set(NAMED) <= set(names)
    assert [c.name for c in choose(["growing"])][-2:] == ["serial", "growing"]
    without = ["ficco-rccl", "pytorch-native"]
    chosen = choose(["candidates"], without)
    assert COMPARED in chosen
    names = [candidate.name for candidate in of_problem(chosen, _problem(OPERATOR))]
    assert "growing:kernel" in names and len(names) == len(set(names))
    assert set(without).isdisjoint(names) and "pytorch-fused" in names
    large = Case("", 32768, 2048, 8192).problem(4)  # whose shards are of 128 MiB
    assert not [one.name for one in of_problem(chosen, large) if "kernel" in one.name]


def test_candidates_with_a_number_are_the_first_of_those_ranked() -> None:
    problem = _problem(OPERATOR)
    chosen = choose(["candidates=2", "tiled"])
    ranked = ["tiled:pieces=2", "serial", "ring:pieces=3", "growing", "shrinking", "shard-overlap"]
    schedules = [Schedule.parse(name) for name in ranked]
    names = [one.name for one in of_problem(chosen, problem, None, lambda: schedules) if one.ours]
    assert names == ["serial", "growing", "shrinking", "tiled"]  # a gather has no ring
    names = [one.name for one in of_problem(chosen, problem) if one.ours]
    assert len(names) == 4 and not {"serial:collective", "tiled"} & {*names[1:3]}
    for wrong in ("candidates=0", "candidates=", "candidates=x"):
        with pytest.raises(ValueError):
            choose([wrong])


def test_cpus_have_several_compute_lanes_only_if_asked() -> None:
    names = [one.name for one in choose(None, device="cpu")]
    assert set(NAMED) <= set(names) and not any("compute=" in name for name in names)
    assert any("compute=2" in one.name for one in choose(None))
    cpu: Any = SimpleNamespace(asynchronous=False, refuses=lambda *_: "")
    chosen = choose(["candidates", "growing:compute=2"], device="cpu")
    found = [one.name for one in of_problem(chosen, _problem(OPERATOR), cpu)]
    assert len(found) > 10 and [n for n in found if "compute" in n] == ["growing:compute=2"]


def test_names_of_one_plan_are_timed_once() -> None:
    problem = _problem(OPERATOR, world=2)
    names = ["growing", "auto", "shard-overlap", "shard-overlap@stages=2", "shard-overlap:pull"]
    found = named_again(of_problem(choose(names), problem), problem)
    assert found == {parse("shard-overlap"): parse("growing")}
    assert named_again(of_problem(choose(names), _problem(OPERATOR)), _problem(OPERATOR)) == {}


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_operator_has_what_it_can_be_called_by(operator: str) -> None:
    problem = _problem(operator)
    found = {one.name for one in of_problem(choose(None), problem)}
    assert {"gemm", "collective", "copies", "serial-collective", "growing", "auto"} <= found
    fused = operator in (OPERATOR, "matmul_reduce_scatter")
    assert ("pytorch-fused" in found) == fused
    assert ("ficco-rccl" in found) == ("pytorch-native" in found) == (operator == OPERATOR)
    assert ("ring" in found) == ("shard-overlap:beta" in found) == problem.kind.sums
    assert ("one-shot" in found) == problem.kind.sums
    assert any("@stages" in name for name in found) != problem.kind.scatters
    compared = of_problem(choose(["candidates"]), problem)
    assert {str(one) for one in candidates(problem)} <= {one.schedule for one in compared}
    assert ("one-shot:pieces=2" in {one.schedule for one in compared}) == problem.kind.sums
    assert "beta" in refused(parse("growing:beta"), problem) or problem.kind.sums


def test_marks_behind_a_schedule() -> None:
    found = parse("shard-overlap:pull@symmetric@stages=2")
    assert (found.schedule, found.symmetric, found.stages) == ("shard-overlap:pull", True, 2)
    assert parse(found.name) == found
    for wrong in ("growing@fast", "growing@stages=0", "slowing"):
        with pytest.raises(ValueError):
            parse(wrong)


def test_a_step_is_as_large_as_a_ring_needs() -> None:
    problem = Problem("all_gather_matmul", (64,) * 4, 8, 32, "float32")
    for name in ("hetero-fused-1d:pieces=4", "uniform-fused-2d", "growing", "shard-overlap"):
        whole = plans(problem, Schedule.parse(name))[0]
        cap = 2 * step_bytes(whole)
        assert plans(problem, Schedule.parse(name), cap)[0].stages in (0, 2)


def test_modes_are_those_of_the_device() -> None:
    assert modes_of("cpu", None) == ("idle",)
    assert modes_of("cuda", "idle,queued") == ("idle", "queued")
    with pytest.raises(ValueError, match="queued"):
        modes_of("cpu", "queued")


# Operands.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exact_operands_have_one_right_product(dtype: str) -> None:
    problem = Problem("all_gather_matmul", (40, 40), 300, 200, dtype)
    operands = Operands(problem, 1, torch.device("cpu"))
    operands.exact_b()
    operands.exact(7)
    product = operands.whole_OK.double() @ operands.b_KN.double()
    assert product.abs().max() <= 256
    assert torch.equal(operands.reference().double(), product)
    assert torch.equal(operands.a_LK, operands.whole_OK[40:])
    before = operands.whole_OK.clone()
    operands.exact(8)
    assert not torch.equal(before[:40], operands.whole_OK[:40])  # depends on the iteration
    assert not torch.equal(operands.whole_OK[:40], operands.whole_OK[40:])  # and on the rank
    assert operands.b_KN.any(1).all()  # and no column of A goes unnoticed


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_rank_knows_its_result_alone(operator: str) -> None:
    kind = OPERATORS[operator]
    if kind.blocks:
        table = [[2, 3, 4], [5, 0, 1], [2, 2, 6]]
        problem = Problem.of_blocks(operator, table, 40, 100, "bfloat16")
    else:
        problem = Problem(operator, (0, 6, 3), 40, 100, "bfloat16")
        table = [[rows] * 3 for rows in problem.rows]  # of what is gathered
    everyone = [Operands(problem, rank, torch.device("cpu")) for rank in range(3)]
    for one in everyone:
        one.exact_b()
        one.exact(5)
    parts = [one.a_LK.double() for one in everyone]
    products = [one.a_LK.double() @ one.b_KN.double() for one in everyone if not kind.inner]
    for rank, one in enumerate(everyone):
        ends = [sum(row[:rank]) for row in problem.blocks] if kind.blocks else []
        if operator == OPERATOR:
            want = torch.cat(parts) @ one.b_KN.double()
        elif kind.inner:
            first = ends or [0] * 3
            sizes = [row[rank] for row in table]
            mine = [p[e : e + s] for p, e, s in zip(parts, first, sizes, strict=True)]
            want = torch.cat(mine).t() @ one.b_KN.double()
        elif kind.sums:
            total = torch.stack(products).sum(0)
            rows = slice(problem.offsets[rank], problem.offsets[rank + 1])
            want = total if kind.returns else total[rows]
        else:
            sizes = [row[rank] for row in table]
            blocks = [p[e : e + s] for p, e, s in zip(products, ends, sizes, strict=True)]
            want = torch.cat(blocks)
        assert torch.equal(one.reference().double(), want) and not (want.abs() > 256).any()
    before = everyone[1].a_LK.clone()
    everyone[1].exact(6)
    assert not torch.equal(before, everyone[1].a_LK)


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("operator", [name for name, kind in OPERATORS.items() if not kind.inner])
def test_scaled_operands_have_one_right_product(operator: str, kind: str) -> None:
    problem = problem_of_sizes(operator, 256, 64, 384, kind, 4)
    everyone = [Operands(problem, rank, torch.device("cpu")) for rank in range(4)]
    for one in everyone:
        one.exact_b()
        one.exact(5)
    products = [one.product().double() for one in everyone]  # by the scales that calls are given
    for rank, one in enumerate(everyone):
        want = products[rank]
        if problem.kind.sums:
            rows = slice(problem.offsets[rank], problem.offsets[rank + 1])
            want = torch.stack(products).sum(0)[slice(None) if problem.kind.returns else rows]
        elif problem.kind.scatters:
            starts = [problem.leaves(src, rank) for src in range(4)]
            blocks = zip(products, starts, strict=True)
            want = torch.cat([p[e : e + problem.block(0, rank)] for p, e in blocks])
        assert torch.equal(one.reference().double(), want) and want.any(1).all()
        whole = one.wide(one.whole_OK, one.whole_scale).double() @ one.wide_b_KN.double()
        assert torch.equal(want, whole)  # nothing was rounded
        # Nor can it be: eight bits hold the largest sum, of terms that A's factors may double.
        terms = int((one.b_KN.float() != 0).sum(0).max()) * (4 if problem.kind.sums else 1)
        assert terms * LARGEST * (2 if "block" in kind else 1) <= 256
    assert not torch.equal(everyone[0].a_LK.float(), everyone[1].a_LK.float())
    before = {name: scale.clone() for name, scale in everyone[1].scales.items()}
    everyone[1].exact(6)
    stale = torch.equal(before["scale_a"], everyone[1].scales["scale_a"])
    assert not stale or before["scale_a"].numel() == 1  # one of two numbers
    everyone[1].random(0)
    assert 0 < everyone[1].product().float().std() < 2  # of about normal numbers


def _references(at: ranks.Rank, kind: str) -> list[str]:
    """References that are wrong, by operator; the errors of exact and of rounded sums."""
    group = torch.distributed.group.WORLD
    wrong = []
    for operator in OPERATORS:
        if OPERATORS[operator].inner and kind in SCALED:
            continue
        problem = problem_of_sizes(operator, 64, 32, 384, kind, at.world)
        operands = Operands(problem, at.rank, at.device)
        operands.exact_b()
        for turn, one in enumerate(REFERENCES):
            if unavailable(one, operands) or operator not in (one.operators or OPERATORS):
                continue
            runner = build(one, operands, group)
            with runner.context():
                runner.run()
                operands.exact(turn)
                found = (runner.proof or runner.run)()
            if wrong_elements(found, expected(runner, operands)):
                wrong.append(f"{operator}: {one.name}")
        if not operands.problem.kind.sums:
            continue
        error = accuracy(operands, group)
        exact = error(operands.reference())
        off = operands.reference() + 100
        if exact or error(off) < 0.1:
            wrong.append(f"{operator}: the errors are {exact} and {error(off)}")
    return wrong


@pytest.mark.parametrize("kind", ["float32", "fp8-tensor", "fp8-row", "fp8-block"])
def test_references_give_what_each_operator_promises(kind: str) -> None:
    assert ranks.run(2, _references, kind) == [[], []]


@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-row"])
@pytest.mark.parametrize("operator", FUSED)
def test_pytorch_takes_scaled_operands_as_it_is_given_them(operator: str, kind: str) -> None:
    assert ranks.run(1, _fused_on_meta, operator, kind) == [((64, 32), "torch.bfloat16")]


def _fused_on_meta(at: ranks.Rank, operator: str, kind: str) -> tuple[tuple[int, ...], str]:
    """What PyTorch says of the result of its fused operator."""
    from torch.distributed import _symmetric_memory

    operands = Operands(problem_of_sizes(operator, 64, 32, 48, kind, 1), 0, at.device)
    operands.a_LK, operands.b_KN = operands.a_LK.to("meta"), operands.b_KN.to("meta")
    operands.scales = {name: scale.to("meta") for name, scale in operands.scales.items()}
    candidate = next(one for one in REFERENCES if one.kind == "pytorch")
    with _symmetric_memory._test_mode():
        result = build(candidate, operands, torch.distributed.group.WORLD).run()
    return tuple(result.shape), str(result.dtype)


class QuackDouble:
    """What is called of QuACK 0.6.5: its gather of shards, and its product that waits for them."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.work, self.quiet, self.gated = whole, 0.0, 0, []

    def AllGatherRunner(
        self, shard_m: int, k: int, dtype: torch.dtype, group: Any, device: torch.device
    ) -> Any:
        assert (shard_m, k, dtype) == (1024, 32, torch.bfloat16) and device.type == "cpu"
        return self

    def quiesce(self) -> None:
        self.quiet += 1

    @contextmanager
    def gather(self, a_shard: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
        assert torch.equal(a_shard, self.whole[:1024])
        yield self.whole, "gates"

    def gemm(
        self, A: Any, B: Any, D: Any, C: None, tile_count_semaphore: None, tile_M: int,
        tile_N: int, cluster_M: int, cluster_N: int, *, pingpong: bool, b_kn: bool, ag_args: Any,
    ) -> None:  # fmt: skip
        assert b_kn
        torch.mm(A, B, out=D)
        self.work += {(128, 192): 1.0}.get((tile_M, tile_N), 2.0)
        if ag_args:
            self.gated.append((tile_M, tile_N, cluster_M, cluster_N, pingpong))

    def event(self, enable_timing: bool) -> Any:
        at = SimpleNamespace(synchronize=lambda: None)
        at.record = lambda: setattr(at, "work", self.work)
        at.elapsed_time = lambda later: later.work - at.work
        return at


def test_quack_gathers_for_its_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
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
    candidate = next(one for one in REFERENCES if one.kind == "quack")
    runner = build(candidate, operands, None)
    for turn in range(2):
        operands.b_KN.add_(turn)  # captured calls see new operands
        with runner.context():
            assert torch.equal(runner.run(), operands.whole_OK @ operands.b_KN)
    assert double.gated == [(128, 192, 1, 2, True)] * 2 and double.quiet == 2


def test_what_moves_moves_as_many_bytes_alone() -> None:
    assert doctest.testmod(families) == (0, 1)
    for operator, kind in OPERATORS.items():
        problem = _problem(operator)
        alone = movements(problem)
        assert all(one.flops == 0 and one.rows and one.world == 4 for one in alone)
        width = problem.n if kind.scatters else problem.k
        assert {one.k for one in alone} == {width} and len(alone) == 1 + kind.returns
        for src, dst in ((0, 1), (3, 2)):
            assert alone[0].block(src, dst) == problem.block(src, dst)
        assert moved_bytes(problem) == 32 * width * 4
        assert block_bytes(problem) == 8 * width * 4


def _through_the_barrier(at: ranks.Rank) -> list[int]:
    group = torch.distributed.group.WORLD
    barrier = Barrier(group)
    found = []
    for turn in range(200):
        barrier.wait()
        found.append(barrier.decide(turn if at.rank == 0 else -1))
    barrier.close()
    return found


def test_all_ranks_go_through_the_barrier_and_hear_what_rank_0_decides() -> None:
    assert ranks.run(3, _through_the_barrier) == [list(range(200))] * 3


def _fail_together(at: ranks.Rank) -> list[Any]:
    """What each of several actions comes to, some of which fail on some ranks."""
    watch = Stopwatch(torch.distributed.group.WORLD, at.device)

    def fails(*where: int, text: str = "no room\non {}") -> Any:
        if at.rank in where:
            raise MemoryError(text.format(at.rank))
        return at.rank

    found = [
        watch.together(partial(fails, *where), named=named)
        for named in (False, True)
        for where in ((), (2,), (1, 2), (0, 1, 2))
    ]
    found.append(watch.together(partial(fails, 1, text="")))
    try:
        watch.together(partial(fails, 0, 1, 2), fatal=(MemoryError,))
    except MemoryError as error:
        found.append(str(error))
    watch.close()
    return found


def test_an_action_that_fails_on_one_rank_has_failed_on_all() -> None:
    why = "MemoryError: no room"
    for rank, found in enumerate(ranks.run(3, _fail_together)):
        assert found == [
            *[(rank, ""), (None, why), (None, why), (None, why)],
            *[(rank, ""), (None, f"rank 2: {why}"), (None, f"rank 1: {why}"), (None, why)],
            (None, "MemoryError: "),
            f"no room\non {rank}",
        ]


# Exact calls.


def test_exact_calls_are_shuffled_alike_on_all_ranks_and_each_has_its_inputs() -> None:
    operands = Operands(_problem(OPERATOR, world=1), 0, torch.device("cpu"))
    operands.exact_b()
    inputs: list[torch.Tensor] = []

    def right() -> torch.Tensor:
        inputs.append(operands.a_LK.clone())
        return operands.reference()

    def one_off() -> torch.Tensor:
        result = right()
        result[0, 0] += 1
        return result

    stale = operands.reference()
    calls = {"right": right, "off": one_off, "stale": lambda: stale, "short": lambda: stale[1:]}
    first, second = (list(exact_calls(calls, operands, 20, seed=3)) for _ in range(2))
    order = [outcome.name for outcome in first]
    assert order == [outcome.name for outcome in second]
    rounds_of = [order[i : i + 4] for i in range(0, 80, 4)]
    assert all(sorted(one) == sorted(calls) for one in rounds_of)
    assert len({one[0] for one in rounds_of}) == 4
    assert len({a.numpy().tobytes() for a in inputs}) == len(inputs) // 2 == 40
    wrong = {name: [int(o.wrong) for o in first if o.name == name] for name in calls}
    assert set(wrong["right"]) == {0} and set(wrong["off"]) == {1}
    assert min(wrong["stale"]) > 100 and min(wrong["short"]) == stale.numel()
    later = list(exact_calls({"stale": lambda: stale}, operands, 1, first=7, measure=_timed_once))
    operands.exact(7)
    assert int(later[0].wrong) == int((operands.reference() != stale).sum())
    assert later[0].figure == 0.5


class _OneRank:
    """Stands for the ranks that verify together, of which there is one; ``device`` is a CPU."""

    device, on_gpu, world = torch.device("cpu"), False, 1

    def together(self, action: Any, fatal: tuple[type[Exception], ...] = ()) -> tuple[Any, str]:
        return action(), ""

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize(("stale_after", "status"), [(99, "skipped"), (1, "wrong"), (0, "wrong")])
def test_replays_are_proven_on_inputs_of_their_own(
    stale_after: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = Operands(_problem(OPERATOR, world=1), 0, torch.device("cpu"))
    operands.exact_b()
    result, replays = operands.reference(), []

    def replay() -> None:
        replays.append(operands.a_LK.clone())
        if len(replays) <= stale_after:
            result.copy_(operands.reference())

    monkeypatch.setattr("ficco.tools.bench.verify.capture", lambda runner, pool: (replay, result))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    checked = Checked(parse("growing"), Runner(operands.reference))
    verifier = Verifier(_OneRank())  # type: ignore[arg-type]
    verifier.graph(checked, operands, None)
    assert len(replays) == 2 and not torch.equal(*replays)
    assert checked.graph_status == status
    assert (checked.replay is replay) == (status == "skipped")
    assert checked.graph_note == ("wrong result on ranks [0]" if status == "wrong" else "")


def _timed_once(call: Any) -> tuple[torch.Tensor, float]:
    return call(), 0.5


class _Clock:
    """Calls that take what is written down: seconds, and those of the host, the last for ever."""

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


class _Alone:
    def decide(self, value: int) -> int:
        return value


def _timed(clock: _Clock) -> list[Item]:
    items = [Item("queued", name, Runner(_nothing)) for name in clock.taken]
    assert rounds(items, clock, _Alone(), most=4, seconds=math.inf) == 4  # type: ignore[arg-type]
    return items


def _nothing() -> torch.Tensor:
    return torch.empty(0)


def test_calls_for_which_memory_is_allocated_are_not_taken_for_long_ones() -> None:
    clock = _Clock(
        grows=[(0.4, 0.3), (0.3, 0.2), (0.02, 1e-3), (0.01, 5e-4)], is_long=[(0.2, 1e-4)]
    )
    grows, is_long = _timed(clock)
    assert clock.calls == {"grows": 6 + 4, "is_long": 3 + 4}
    assert grows.times_s == [0.01] * 4 and grows.host_s == 1e-4
    assert math.isnan(is_long.host_s)


def test_every_call_finds_a_card_that_has_rested_as_long() -> None:
    """One that rests for longer is cooler, and faster."""
    clock = _Clock(one=[(0.4, 0.3), (0.01, 1e-4)], other=[(0.01, 7e-4)])
    one, other = _timed(clock)
    assert one.sleep_s == other.sleep_s == pytest.approx(SLEEP_LEAST_S + 2 * 7e-4)
    assert clock.sleeps[-8:] == [one.sleep_s] * 8
    slow = _Clock(one=[(0.01, 0.5)])
    assert _timed(slow)[0].sleep_s == SLEEP_MOST_S


def test_tiled_is_compared_with_products_of_the_library() -> None:
    sizes = {"m": 8, "n": 4, "k": 2, "dtype": "bfloat16", "world": 4, "mode": "queued"}
    made = {
        "gemm": (0.1, 0.08), "copies": (0.05, 0.09), "ideal": (0.1, 0.09), "serial": (0.2, 0.2),
        "growing": (0.16, 0.15), "tiled": (0.125, 0.18), "tiled:pieces=2": (0.13, 0.16),
        "auto": (0.125, 0.15),
    }  # fmt: skip
    rows = [
        {"operator": OPERATOR, "case": case, **sizes, "candidate": name, "status": "ok"}
        | {"kind": "ficco" if number > 2 else "gemm", "ms": times[shape]}
        | {"share": made["ideal"][shape] / times[shape], "note": "is tiled (model)"}
        for number, (name, times) in enumerate(made.items())
        for shape, case in enumerate(("long", "short"))
    ]
    text = report.report(BENCH.frame(rows), {}, "name", [])
    (_, long), (_, short) = (
        [line for line in text.splitlines() if line.startswith(f"| {name}")]
        for name in ("long", "short")
    )
    ours = "0.100 | 0.200 | 0.50 | growing | 0.160 | 0.62 | tiled | 0.125 | 0.80"
    assert long == f"| long: 8, 4, 2 | {ours} | tiled | 0.125 | 0.80 | 1.28 |"
    ours = "0.090 | 0.200 | 0.45 | growing | 0.150 | 0.60 | tiled:pieces=2 | 0.160 | 0.56"
    assert short == f"| short: 8, 4, 2 | {ours} | tiled | 0.150 | 0.60 | 0.94 |"
    assert "1 shapes whose GEMM takes at least 90 us: serial: of ideal 0.500, " in text
    assert "tiled x library 1.280." in text
    assert "tiles wait" not in report.report(BENCH.frame(rows[:6]), {}, "name", [])


# The whole, on the CPU engine.


def _benched(at: ranks.Rank, folder: Path, wrong: bool) -> pd.DataFrame | None:
    """A short bench of all operators but the first; ``wrong``: rank 1 spoils sums."""
    right = ficco.matmul_reduce_scatter
    if wrong and at.rank == 1:
        ficco.matmul_reduce_scatter = lambda *args, **more: right(*args, **more) + 1
    case = Case("a", 64, 16, 32, "float32")
    settings = BenchSettings(
        cases=tuple(case.on(operator) for operator in OPERATORS if operator != OPERATOR),
        candidates=choose(["auto", "hetero-fused-1d:pieces=2", "growing:pull@symmetric"]),
        modes=("idle",),
        device="cpu",
        rounds=2,
        seconds=600.0,  # two rounds end long before
        csv=folder / "family.csv",
        quiet=True,
    )
    try:
        return bench(settings)
    finally:
        ficco.matmul_reduce_scatter = right


def test_every_operator_is_proven_and_timed(tmp_path: Path) -> None:
    rows, none = ranks.run(2, _benched, tmp_path, False)
    assert none is None
    found = {(row.operator, row.candidate): row for row in rows.itertuples()}
    assert set(rows["candidate"][rows["status"] != "ok"]) == {"pytorch-fused"}
    for operator in set(OPERATORS) - {OPERATOR}:
        for name in ("gemm", "collective", "copies", "serial-collective", "serial", "auto"):
            assert found[operator, name].ms > 0, (operator, name)
        assert found[operator, "ideal"].share == 1.0
        scatters, sums = OPERATORS[operator].scatters, OPERATORS[operator].sums
        assert ((operator, "growing:pull@symmetric") in found) != scatters
        errors = [found[operator, name].error for name in ("serial-collective", "serial", "auto")]
        assert all(0 < error < 1e-6 for error in errors) if sums else all(map(math.isnan, errors))
        assert math.isnan(found[operator, "gemm"].error)
    sizes = found["matmul_all_reduce", "gemm"]
    assert (sizes.m, sizes.n, sizes.k) == (64, 32, 16)
    assert "## Accuracy of matmul_all_reduce" in report.report(rows, {}, "name", [])


def test_a_wrong_sum_is_not_timed(tmp_path: Path) -> None:
    rows, _ = ranks.run(2, _benched, tmp_path, True)
    wrong = {
        (row.operator, row.candidate): row.note
        for row in rows[rows["status"] == "wrong"].itertuples()
    }
    names = ("copies", "serial", "auto", "hetero-fused-1d:pieces=2")
    assert wrong == {("matmul_reduce_scatter", name): "wrong result on ranks [1]" for name in names}


def _layered(at: ranks.Rank, folder: Path, spoilt: str) -> pd.DataFrame | None:
    """A short bench of layers; ``spoilt``: an operator whose results rank 1 doubles."""
    if spoilt:
        right = getattr(ficco, spoilt)
        factor = 1 + at.rank
        setattr(ficco, spoilt, lambda *args, **more: right(*args, **more) * factor)
    settings = layers.LayerSettings(
        layers=layers.SHAPES["cpu"],
        modes=("idle",),
        device="cpu",
        rounds=2,
        seconds=2.0,
        csv=folder / "layers.csv",
    )
    try:
        # Compiled for its own sizes: what an earlier layer left would make the next one dynamic.
        with torch._dynamo.config.patch(recompile_limit=1):
            return layers.layers(settings)
    finally:
        if spoilt:
            setattr(ficco, spoilt, right)


def test_layers_are_proven_and_timed(tmp_path: Path) -> None:
    rows, none = ranks.run(2, _layered, tmp_path, "")
    assert none is None and len(rows) == 2 * len(layers.WAYS)
    for row in rows.itertuples():
        if row.way == layers.ASYNC_TP:
            assert row.status == "skipped" and "GPU" in row.note
        else:
            assert row.status == "ok" and row.ms > 0 and row.error <= layers.TOLERANCE["float32"], (
                row
            )
    fastest = rows["speedup"][rows["way"].isin(layers.COLLECTIVES)]
    assert len(fastest) == 6 and (fastest == 1.0).sum() >= 2
    text = layers.report(LAYERS.read(tmp_path / "layers.csv"), {"ranks": 2}, "name")
    assert "| mlp: 256 tokens, 128, 512, 256 | ficco |" in text
    assert "- pytorch-async-tp of attention: skipped" in text


@pytest.mark.parametrize("spoilt", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_layer_with_a_wrong_step_is_not_timed(tmp_path: Path, spoilt: str) -> None:
    rows, _ = ranks.run(2, _layered, tmp_path, spoilt)
    refused = rows[rows["status"] == "wrong"]
    wrong = set(zip(refused["layer"], refused["way"], strict=True))
    ours = [way for way in layers.WAYS if way.startswith("ficco")]
    assert wrong == {(layer.name, way) for layer in layers.SHAPES["cpu"] for way in ours}
    assert (refused["note"] != "").all()


WAYS = (
    (
        experts,
        (*experts.SHAPES["cpu"], replace(experts.SHAPES["cpu"][0], name="odd", experts=9)),
        "experts",
        "9 experts for 2 ranks",
    ),
    (
        attention,
        (*attention.SHAPES["cpu"], replace(attention.SHAPES["cpu"][0], name="odd", sequence=9)),
        "all_gather_attention",
        "sequence: required a multiple of 2 ranks, got 9",
    ),
)


def _ways(
    at: ranks.Rank, folder: Path, which: int, spoilt: str, seconds: float = 600.0
) -> pd.DataFrame | None:
    """A short bench of ways; ``spoilt``: an operator whose results rank 1 doubles."""
    room, cases, _, _ = WAYS[which]
    if spoilt:
        right = getattr(ficco, spoilt)
        factor = 1 + at.rank
        setattr(ficco, spoilt, lambda *args, **more: right(*args, **more) * factor)
    settings = ways.WaySettings(
        subject=room.SUBJECT,
        cases=cases,
        modes=("idle",),
        schedules=("auto", "serial") if spoilt else (),
        device="cpu",
        rounds=2,
        seconds=seconds,
        timelines=not spoilt,
        csv=folder / "ways.csv",
    )
    try:
        return ways.time_ways(settings)
    finally:
        if spoilt:
            setattr(ficco, spoilt, right)


@pytest.mark.parametrize("which", range(len(WAYS)))
def test_ways_are_proven_and_timed(tmp_path: Path, which: int) -> None:
    room, _, operator, note = WAYS[which]
    rows, none = ranks.run(2, _ways, tmp_path, which, "", timeout=300.0)
    assert none is None
    assert set(rows["status"]) == {"ok", "skipped"} and rows["note"].iloc[-1] == note
    ok = rows[rows["status"] == "ok"]
    assert (ok["ms"] > 0).all()
    for _, mine in ok.groupby("operator" if which else "case"):
        by_way = mine.set_index("way")
        parts = by_way[by_way["speedup"].isna()]
        assert len(parts) == 2 and by_way["ms"]["ideal"] >= parts["ms"].max()
        whole = by_way.drop([*parts.index, "ideal"])
        assert (whole["share"] < whole["in_turn"]).all() and (whole["speedup"] == 1.0).any()
        assert by_way["took"]["ficco"] and sum(by_way["took"] != "") == 1
        schedules = [way for way in whole.index if way.startswith("ficco, ") and "rows" not in way]
        assert len([Schedule.parse(way[7:]) for way in schedules]) > 3
    text = ways.report(room.SUBJECT, room.SUBJECT.schema.read(tmp_path / "ways.csv"), {}, "name")
    assert ("| 8 experts, top 2 | 256 | 64, 128 |", "| 256 | 8 (4), 16, causal |")[which] in text
    assert "of odd: skipped" in text and ("skew 0.5 |" in text) == (which == 0)
    timelines = loads((tmp_path / "ways_timelines.json").read_text(), "ways")
    assert (tmp_path / "ways_timelines.png").exists()
    assert [one.title for one in timelines[:2]] == ["auto: planned", "auto: measured"]
    assert len(timelines) > 6
    for planned, measured in zip(timelines[::2], timelines[1::2], strict=True):
        assert operator in planned.problem and planned.ranks
        computed = [
            [[bar for bar in bars if bar.kind in ("matmul", "attend")] for bars in one.ranks]
            for one in (planned, measured)
        ]
        named = [[sorted((bar.lane, bar.label) for bar in bars) for bars in of] for of in computed]
        assert named[0] == named[1], planned.title
        spent = [sum(bar.stop_s - bar.start_s for bars in of for bar in bars) for of in computed]
        assert spent[1] > 0 and spent[0] / spent[1] > 0.5
        # On one lane what is planned takes what was measured, at the rates of that very call; what
        # simulates steps knows more of them than a rate. On two each has the cores that are left.
        if "compute=2" not in planned.title:
            assert spent[0] / spent[1] < 1.6, planned.title


def _chosen(at: ranks.Rank, skew: float) -> Any:
    """How often each expert is chosen, and the capacity of the case."""
    watch = Stopwatch(torch.distributed.group.WORLD, at.device)
    case = experts.ExpertCase("skewed", 8, 4096, 8, 8, dtype="float32", skew=skew)
    data = experts.ExpertData(case, watch)
    pairs = data.indices.sort(1).values
    assert (pairs[:, 0] < pairs[:, 1]).all()  # no expert twice
    watch.close()
    return data.indices.flatten().bincount(minlength=8).tolist(), data.capacity


@pytest.mark.parametrize(("skew", "most"), [(0.0, 1.2), (1.0, 7.0)])
def test_routes_are_as_skewed_as_the_case(skew: float, most: float) -> None:
    for counts, capacity in ranks.run(2, _chosen, skew):
        popular = [counts[i % 2 * 4 + i // 2] for i in range(8)]  # of both ranks by turns
        assert most / 2 < popular[0] / popular[-1] < most and max(counts) <= capacity
        assert not skew or popular[0] > popular[2] > popular[4] > popular[6]


def _alike(at: ranks.Rank) -> list[float]:
    """The largest difference of each way from the first, on random data, whose every key counts."""
    watch = Stopwatch(torch.distributed.group.WORLD, at.device)
    found = []
    for case in attention.SHAPES["cpu"]:
        work = attention.AttentionData(case, watch)
        made = [way.call() for way in work.ways(()).values() if not (way.part or way.lacks)]
        assert len(made) > 5
        found += [float((one - made[0]).abs().max()) for one in made]
    watch.close()
    return found


def test_all_ways_of_attention_make_the_same_of_random_data() -> None:
    for mine in ranks.run(2, _alike):
        assert max(mine) < 1e-5  # float32, of means of about 1


def test_a_case_that_no_time_is_left_for_is_skipped(tmp_path: Path) -> None:
    rows, _ = ranks.run(2, _ways, tmp_path, 0, "", -1.0)
    assert set(rows["note"]) == {"out of time (-1 s)"} and set(rows["status"]) == {"skipped"}


@pytest.mark.parametrize(
    ("which", "operator"),
    [(0, "experts"), (1, "all_gather_attention"), (1, "ulysses_attention")],
)
def test_a_wrong_way_is_not_timed(tmp_path: Path, which: int, operator: str) -> None:
    rows, _ = ranks.run(2, _ways, tmp_path, which, operator)
    wrong = rows[rows["status"] == "wrong"]
    ours = ["ficco", "ficco, exact rows", "ficco, serial"]
    for _, mine in wrong.groupby("case"):
        assert sorted(mine["way"]) == [way for way in ours if which == 0 or "rows" not in way]
    assert set(wrong["note"]) == {"wrong result on ranks [1]"}
    if which:
        assert set(wrong["operator"]) == {operator}
        assert (rows["status"] == "ok").sum() > 5


def test_a_way_that_does_not_call_what_it_is_named_after_is_refused() -> None:
    def step() -> torch.Tensor:
        return torch.ones(2) + 1

    layers.require(("aten::add", "aten::ones"), step)
    with pytest.raises(RuntimeError, match="does not call fused_all_gather"):
        layers.require(("aten::add", "fused_all_gather"), step)


@pytest.mark.parametrize("name", ["ring:pieces=3", "ring", "one-shot"])
def test_a_schedule_that_no_operator_takes_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ficco.tools.launch.launch", lambda *_, **__: pytest.fail("started ranks"))
    words = ["bench", "--device", "cpu", "--ranks", "2", "--schedules", name]
    assert cli.run(words) == 2
    said = f"--schedules: schedule {name}: {name.partition(':')[0]} is for"
    assert said in capsys.readouterr().err


def test_shapes_of_the_command_line() -> None:
    parser = cli._parser()

    def shapes(*words: str, device: str = "cuda") -> tuple[list[tuple[str, str]], str]:
        found, name = command.chosen(parser.parse_args(["bench", *words]), device)
        return [(case.operator, case.name) for case in found], name

    assert shapes() == ([(OPERATOR, case.name) for case in cases.SETS["measured"]()], "measured")
    found, name = shapes("--operator", "all_to_all_matmul", "matmul_reduce_scatter")
    assert len(found) == 12 + 4 + 8 and name == "experts-gain-experts-measured"
    assert found[0] == ("all_to_all_matmul", "4096x1024x7168")
    assert found[-1] == ("matmul_reduce_scatter", "16384x16384x13312")
    found, name = shapes("--operator", "all_to_all_transposed_matmul")
    assert len(found) == 12 + 4 and name == "experts-gain-experts"
    found, name = shapes("--set", "experts", "small")
    assert [operator for operator, _ in found] == ["all_to_all_matmul"] * 4 + [OPERATOR] * 9
    found, _ = shapes("--set", "cpu", "--operator", *OPERATORS, device="cpu")
    assert len(found) == 3 * len(OPERATORS)
    found, _ = shapes("--set", "scenarios", "experts", "--only", "g14", "g2")
    assert [name for _, name in found] == ["g2", "g14", "g14"]


def _traced(at: ranks.Rank, dtype: str) -> list[Timeline]:
    operands = Operands(
        problem_of_sizes(OPERATOR, 64, 32, 128, dtype, at.world), at.rank, at.device
    )
    operands.exact(0)
    operands.exact_b()
    group: Any = torch.distributed.group.WORLD
    calls = {name: caller(operands, group, name) for name in ("serial", "growing")}
    return trace_all(calls, group, at.device)


@pytest.mark.parametrize("dtype", ["fp8-row", "fp8-block"])
def test_calls_of_float8_are_traced(dtype: str) -> None:
    found, other = ranks.run(2, _traced, dtype)
    assert found == other
    assert [one.title for one in found[:2]] == ["serial: planned", "serial: measured"]
    for one in found:
        kinds = {bar.kind for bars in one.ranks for bar in bars}
        labels = {bar.label for bars in one.ranks for bar in bars}
        assert {"matmul", "copy"} <= kinds and any("scale" in label for label in labels)
        assert dtype.split("-")[1] in str(one.problem)


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in row.items()}


def test_bench_writes_rows_report_and_pictures(tmp_path: Path) -> None:
    shapes = tmp_path / "tiny.csv"
    shapes.write_text("name,m,n,k,dtype\na,64,16,64,float32\nodd,63,16,64,float32\n")
    words = [sys.executable, "-m", "ficco", "bench", "--shapes", str(shapes), "--ranks", "2"]
    words += ["--device", "cpu", "--rounds", "3", "--seconds", "600", "--json", "--timelines"]
    words += ["--out", str(tmp_path / "out"), "--name", "tiny"]
    words += ["--schedules", "growing", "hetero-fused-1d:pieces=4@stages=2", "auto"]
    words += ["shrinking"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    rows = BENCH.read(out / "tiny.csv")
    pd.testing.assert_frame_equal(
        rows, BENCH.frame(map(_filled, json.loads(done.stdout))), rtol=1e-5
    )
    found = {row.candidate: row for row in rows[rows["case"] == "a"].itertuples()}
    assert set(rows["status"][rows["case"] == "odd"]) == {"skipped"}
    for name in ("gemm", "collective", "copies", "serial-collective", "serial", "ficco-rccl"):
        assert found[name].status == "ok" and found[name].ms > 0 and found[name].rounds == 3, name
    assert found["ideal"].share == 1.0
    again = found["shrinking"]  # with one peer, the same plan
    assert again.note == "the same steps as growing" and again.ms == found["growing"].ms > 0
    assert found["growing"].extra_bytes > found["hetero-fused-1d:pieces=4@stages=2"].extra_bytes
    for name in ("pytorch-fused", "quack"):
        assert found[name].status == "skipped" and "GPU" in found[name].note
    files = {path.name for path in out.iterdir()}
    assert files == {
        "tiny.csv",
        "tiny.json",
        "tiny.md",
        "tiny_share.png",
        "tiny_speedup.png",
        "tiny_timelines.json",
        "tiny_timelines.png",
        "tiny_trace.json",
    }
    about = json.loads((out / "tiny.json").read_text())
    assert about["ranks"] == 2 and about["versions"]["torch"] == torch.__version__
    events = json.loads((out / "tiny_trace.json").read_text())["traceEvents"]
    assert {"matmul", "copy"} <= {event.get("cat") for event in events}


# Estimates of time.


def test_a_forecast_is_what_was_planned_at_the_pace_so_far() -> None:
    forecast = tables.Forecast({"a": 2.0, "b": 4.0, "c": 6.0, "d": 8.0})
    assert forecast.left == 20.0  # nothing is known yet
    forecast.over("a", 6.0)
    assert forecast.left == 3 * 18.0
    forecast.over("b", None)  # failed: its time says nothing
    assert forecast.left == 3 * 14.0
    forecast.over("c", 2.0)  # both of 8 s together, where 8 s were planned
    assert forecast.left == 8.0 and list(forecast.rest) == ["d"]
    forecast.over("d", 1.0)
    assert forecast.left == 0.0


@pytest.mark.parametrize(
    ("seconds", "most", "done"), [(10.0, 100, 5), (11.9, 100, 5), (10.0, 4, 4), (1.0, 100, 3)]
)
def test_rounds_end_before_the_seconds_do(
    seconds: float, most: int, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of two items takes two seconds; three are made in any case."""
    now = [0.0]
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])

    class Clock:
        warm_calls = 1

        def time(self, item: Any) -> tuple[float, float]:
            now[0] += 1.0
            return 1.0, 0.0

    runner = SimpleNamespace(context=nullcontext, run=None)
    items = [measure.Item("queued", name, runner, None) for name in "ab"]
    barrier = SimpleNamespace(decide=lambda value: value)
    assert measure.rounds(items, Clock(), barrier, most, seconds) == done
    assert now == [2.0 + 2.0 * done]  # the first two calls warm up
    assert all(item.times_s == [1.0] * done for item in items)
