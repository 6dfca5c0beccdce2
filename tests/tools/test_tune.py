"""The tuner: fits of modelled times, runs interrupted in every step, and wrong files."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from test_hosts import host_of

import ficco
from ficco.dma.cpu import CpuEngine
from ficco.errors import ConfigError
from ficco.heuristics import decide, problem_of_sizes
from ficco.machine import SCALED_PRODUCTS, Machine, Provenance, configs, files, load, model, save
from ficco.ops import problem_log
from ficco.problems.products import Problem
from ficco.schedules import Schedule, plan
from ficco.tools import cli
from ficco.tools.bench import measure
from ficco.tools.bench.cases import Case
from ficco.tools.bench.measure import Runner
from ficco.tools.tune import calls, effort, fits, products
from ficco.tools.tune import run as tuning
from ficco.tools.tune.run import Journal, changes, damaged, opened, rounded
from ficco.tools.tune.site import Site

US = 1e-6


def test_copies_are_fitted_exactly() -> None:
    rates = {2.0**16: 60e9, 2.0**18: 60e9, 2.0**24: 350e9, 2.0**27: 380e9}
    fit = fits.copies([
        fits.CopyTime(size, count, 15 * US + count * size / rate + (count - 1) * 3 * US)
        for size, rate in rates.items()
        for count in (3, 12)
    ])  # fmt: skip
    assert (fit.latency, fit.gap) == pytest.approx((15 * US, 3 * US), rel=1e-6)
    assert dict(fit.curve) == pytest.approx(rates, rel=1e-6) and fit.error < 1e-6


def test_insufficient_times_are_refused() -> None:
    for seconds in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="required finite numbers and times above 0"):
            fits.memory([(1e6, 1.0), (2e6, seconds)])
    counted = [products.call_of(case) for case in effort.GPU.attends]
    with pytest.raises(ValueError, match="attention: required larger calls to take longer"):
        fits.attention(132, counted, [1e-3] * len(counted))


def test_medians_and_straight_lines() -> None:
    times_of_sizes = {100.0: 5.0 + 10.0, 200.0: 7.0 + 20.0, 400.0: 90.0 + 40.0}
    assert fits.in_front(times_of_sizes, lambda nbytes: 10.0) == 7.0
    assert fits.in_front({100.0: 9.0}, lambda nbytes: 10.0) == 0.0
    pairs = [(size, 3 * US + size / 4e12) for size in (1e6, 1e7, 5e8)]
    assert fits.memory(pairs) == pytest.approx((4e12, 3 * US))
    by_all_links = {300.0: ("mesh", 1.0), 50.0: ("switch", 0.5), 110.0: ("switch", 1)}
    assert {rate: fits.topology(100.0, rate) for rate in by_all_links} == by_all_links
    assert fits.slowdown([1.0, 2.0, 4.0], [1.5, 2.2, 5.0]) == pytest.approx(1.25)
    assert fits.slowdown([1.0, 1.0], [0.9, 0.9]) == 1.0
    # Times of a reference correct a hot round.
    times = {"x": [1.0, 2.0, 1.0], "r0": [3.0, 6.0, 3.0], "r1": [3.0, 6.0, 3.0]}
    assert fits.steadied(times, ["r0", "r1"]) == {"x": 1.0}


def test_host_costs_are_fitted_exactly_and_never_negative() -> None:
    rows = np.array([(1, 1, 3, 2), (1, 5, 3, 9), (1, 4, 12, 3), (1, 9, 24, 20), (0, 8, 0, 0)])
    exact, bounded = (
        fits.host([fits.Enqueued(row @ (20, 9, 2, signal) * US, *row) for row in rows])
        for signal in (1.5, -0.2)
    )
    costs = {"call": 20 * US, "matmul": 9 * US, "copy": 2 * US, "signal": 1.5 * US}
    assert exact == pytest.approx(costs, rel=1e-6)
    assert bounded["signal"] == 0.0 and min(bounded.values()) >= 0
    assert bounded["matmul"] == pytest.approx(9 * US, rel=0.05)


@pytest.mark.parametrize(("columns", "signed"), [(4, None), (7, 6), (13, None), (30, 29)])
def test_least_squares_are_nonnegative_and_least_for_any_number_of_columns(
    columns: int, signed: int | None
) -> None:
    draw = np.random.default_rng(columns)
    matrix = draw.integers(0, 9, size=(3 * columns, columns)).astype(float)
    seconds = np.exp(draw.normal(size=3 * columns))
    a = matrix / seconds[:, None]
    assert np.linalg.lstsq(a, np.ones(len(a)), rcond=None)[0].min() < 0, "needs no bounds"
    solution = np.array(fits.least_squares(matrix, seconds, signed))
    bounded = np.arange(columns) != (-1 if signed is None else signed)
    assert (solution[bounded] >= 0).all() and (solution[bounded] == 0).any()
    # No allowed step reduces the errors.
    gains = a.T @ (1 - a @ solution)
    assert gains[bounded & (solution == 0)].max() < 1e-9
    assert gains[(solution != 0) | ~bounded] == pytest.approx(0.0, abs=1e-9)


def rows_of_products(truth: model.Gemm, counts: tuple[int, ...], noise: float = 0.0) -> list[Any]:
    """Rows of two products of 0.4 and 0.7 ms. Every second row is slower by ``noise``."""
    return [
        fits.RowTime(name, count, truth.heated(count * seconds) * (1 + noise * (i % 2)))
        for name, seconds in (("k-large", 0.4e-3), ("n-large", 0.7e-3))
        for i, count in enumerate(counts)
    ]


@pytest.mark.parametrize(("burst", "sustained"), [(2e-3, 0.81), (5e-3, 0.9), (1e-3, 0.6)])
def test_a_power_limit_is_recovered(burst: float, sustained: float) -> None:
    truth = replace(BLOCKS["gemm"], burst=burst, sustained=sustained)
    for noise, of_burst, of_sustained in ((0.0, 0.02, 0.005), (0.02, 0.3, 0.03)):
        fit = fits.heat(rows_of_products(truth, effort.GPU.rows, noise))
        assert fit.limited and (noise or fit.error < 1e-3)
        assert fit.burst == pytest.approx(burst, rel=of_burst)
        assert fit.sustained == pytest.approx(sustained, rel=of_sustained)
    for sustained, noise in ((1.0, 0.1), (0.98, 0.0)):
        free = replace(BLOCKS["gemm"], burst=2e-3, sustained=sustained)
        fit = fits.heat(rows_of_products(free, effort.GPU.rows, noise))
        assert (fit.burst, fit.sustained, fit.limited) == (float("inf"), 1.0, False)
        assert fit.cold(5.0) == fits.COLD.cold(5.0) == 5.0


def test_rows_of_messages_give_latency_and_rate() -> None:
    sizes = itertools.product((1 << 14, 1 << 18, 1 << 22), (1, 4))
    times = [fits.CopyTime(size, n, 3e-4 + n * (5e-5 + size / 2e9)) for size, n in sizes]
    assert fits.messages(times) == pytest.approx((5e-5, 2e9))
    shrinking = [fits.CopyTime(size, n, n * 1e-3 / size) for size in (1, 4) for n in (1, 4)]
    with pytest.raises(ValueError, match="grow with their bytes"):
        fits.messages(shrinking)


def site_of(watch: Any, settings: effort.Effort = effort.CPU, kind: Any = Site) -> Site:
    return kind(watch, settings, None, lambda source, note: Provenance(source, note=note))


def test_all_steps_are_measured_within_minutes() -> None:
    assert (*tuning.MEASURES, "shapes") == effort.STEPS
    for device, quick, limit in (("cuda", False, 216), ("cpu", False, 52), ("cpu", True, 5.5)):
        seconds = effort.EFFORTS[device, quick].seconds
        assert sum(seconds.values()) - seconds[tuning.NETWORK] < limit  # a separate run measures it


class ModelledSite(Site):
    """A site whose products take the times of a model with a power limit. The first rounds of a
    single row take half the time."""

    crowded = False

    def parts(self) -> Any:
        return SimpleNamespace(matrix=lambda *sizes: None)

    def time(self, step: str, calls: dict[str, Any], **settings: Any) -> dict[str, np.ndarray]:
        truth, times = TRUTH, {}
        for name, call in calls.items():
            shape, count = call.run if isinstance(call, Runner) else call
            kind = {"batch": shape.batch, "wide": shape.wide, "rights": shape.rights}
            seconds = truth.heated(count * truth.seconds(*shape[:3], **kind))
            cold = seconds / 2 if calls.keys() == {"row"} else seconds
            times[name] = np.array((cold,) * 3 + (seconds,) * 3)
        return times


#: A GPU that reaches its power limit after 2 ms.
TRUTH = replace(load(configs() / "h200-4.yaml").gemm, burst=2e-3, sustained=0.81)  # type: ignore


@pytest.fixture
def modelled(monkeypatch: Any) -> Site:
    monkeypatch.setattr(products, "row_of", lambda parts, shape, count: (shape, count))
    monkeypatch.setattr(products, "units", lambda site: TRUTH.units)
    # A third of the products, so that the fit takes seconds, and all that reach the power limit.
    large = [shape for shape in effort.GPU.gemms if shape.flops > 1.7e12]
    gpu = replace(effort.GPU, gemms=(*effort.GPU.gemms[::3], *large))
    site = site_of(SimpleNamespace(on_gpu=True), gpu, ModelledSite)
    site.machine = Machine("m", "NVIDIA H200", 2, gemm=replace(TRUTH, burst=1.0, sustained=0.5))
    return site


def test_products_are_fitted_by_a_cold_model_and_a_limit(modelled: Site) -> None:
    fit = products.gemm(modelled)
    assert fit.burst == pytest.approx(2e-3, rel=0.03), "the file's value"
    assert fit.sustained == pytest.approx(0.81, rel=0.01)
    assert "burst and sustained: 20 rows of products of up to 28.7 ms" in fit.provenance.note
    # Without the power limit the fit of the largest products would be too slow.
    for m, n, k in ((16384, 8192, 8192), (4096, 4096, 4096)):
        assert fit.seconds(m, n, k) == pytest.approx(TRUTH.seconds(m, n, k), rel=0.02)
    # A check detects a limit that no longer holds. Small products never reach it.
    short = tuple(shape for shape in effort.GPU.gemms if shape.flops < 1e12)
    modelled.effort = replace(modelled.effort, gemms=short)
    for sustained, lowest, highest in ((0.81, 0.99, 1.01), (0.6, 0.0, 1 / 1.25)):
        modelled.machine = replace(modelled.machine, gemm=replace(TRUTH, sustained=sustained))
        *points, row = tuning._gemm(modelled, "gemm", modelled.machine.gemm)
        assert row.subject == "64 of 4096 x 4096 x 8192 in a row" and lowest < row.ratio < highest
        assert [point.ratio for point in points] == pytest.approx([1.0] * 4)


def test_attention_is_measured_cold_and_next_to_products(modelled: Site, monkeypatch: Any) -> None:
    start, block, backward_start = fixed = 7e-6, 4e-6, 3e-5
    shares, backward = ((64.0, 0.6), (128.0, 0.85), (256.0, 0.5)), ((64.0, 0.4), (128.0, 0.7))
    backward = (*backward, (256.0, 0.3))
    truth = model.AttentionCalls(start, block, shares, SOURCE, backward, backward_start)

    def timed(step: str, calls: dict[str, Any], **settings: Any) -> dict[str, np.ndarray]:
        rows = {name: call for name, call in calls.items() if name[0] == "r"}
        times = ModelledSite.time(modelled, step, rows)
        for name in calls.keys() - times.keys():
            seconds, _ = truth.times(TRUTH, 2, *products.call_of(calls[name]))
            times[name] = np.array((TRUTH.heated(seconds),) * 6)
        return times

    monkeypatch.setattr(products, "attention_call", lambda parts, call: call)
    monkeypatch.setattr(modelled, "time", timed)
    modelled.machine = Machine("new", "NVIDIA H200", 2)
    with pytest.raises(ValueError, match="attention: required the block 'gemm'"):
        products.attention(modelled)
    modelled.machine = replace(modelled.machine, gemm=TRUTH)
    fit = products.attention(modelled)
    assert (fit.start, fit.block, fit.backward_start) == pytest.approx(fixed)
    assert dict(fit.shares) == pytest.approx(dict(shares))
    assert dict(fit.backward or ()) == pytest.approx(dict(backward))
    modelled.machine = replace(modelled.machine, attention=fit)
    points = {p.subject: p.ratio for p in tuning._attention(modelled, "attention", fit)}
    assert points == dict.fromkeys(points, pytest.approx(1)) and len(points) > 1


def test_a_device_that_stays_cold_removes_the_limit(modelled: Site, monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "TRUTH", replace(TRUTH, burst=float("inf"), sustained=1.0))
    modelled.effort = replace(modelled.effort, gemms=modelled.effort.gemms[::4])
    fit = products.gemm(modelled)
    assert (fit.burst, fit.sustained) == (float("inf"), 1.0)
    # Dtypes that are not measured come from the shipped file of the device.
    modelled.machine = Machine("new", "NVIDIA H100 80GB HBM3", 2)
    known, sheet = products.known_gemm(modelled), load(configs() / "h100-8.yaml").gemm
    assert known.shares == sheet.shares and len(sheet.shares) == 3
    modelled.machine = Machine("new", "Nobody's", 2)
    assert products.known_gemm(modelled) is None


def test_a_plan_is_counted_as_the_host_enqueues_it() -> None:
    problem = Problem("all_gather_matmul", (8, 8), 8, 8, "float32")
    # Acquire waits, the copy posts, the product of the peer's shard waits, retire waits and posts.
    shards = plan(problem, Schedule.parse("shard-overlap"), 0)
    signals = sum(bool(s.waits or s.after) + bool(s.posts) for s in shards.steps)
    assert calls.counts(shards) == (2, 1, signals)
    pieces = plan(problem, Schedule.parse("hetero-unfused-1d:pieces=4"), 0)
    assert calls.counts(pieces) == (5, 4, signals + 6)
    # Products of both ranks' rows, the copy and the sum.
    sums = Problem("matmul_reduce_scatter", (8, 8), 8, 8, "float32")
    assert calls.counts(plan(sums, Schedule.parse("shard-overlap"), 0))[:2] == (3, 1)


HERE = files.Fingerprint("cpu", 2)
SOURCE = Provenance("measured")
STEPS = "gemm copies kernel_copies topology all_gather reduce_scatter memory contention host"
SHIPPED = load(configs() / "h200-2.yaml")
BLOCKS: dict[str, Any] = {name: getattr(SHIPPED, name) for name in (*STEPS.split(), "thresholds")}


def machine_file(path: Path, **changes: Any) -> Machine:
    machine = replace(Machine(path.stem, "cpu", 2, **BLOCKS), **changes)
    save(machine, path)
    return machine


def test_a_file_of_other_ranks_or_a_damaged_file_is_kept(tmp_path: Path, ran: Any) -> None:
    four, half = tmp_path / "four.yaml", tmp_path / "half.yaml"
    machine_file(four, ranks=4)
    content = four.read_bytes()
    half.write_bytes(content[:300])
    for path, option, message in (
        (four, "--quick", "ranks: required 2, as this run has, got 4"),
        (four, "--check", "required a machine of 2 ranks"),
        (half, "--quick", "--fresh keeps this file as half.yaml.damaged"),
        (tmp_path / "none.yaml", "--check", "required a machine's file, got none at"),
    ):
        assert message in ran("tune --ranks 2 --device cpu --out", path, option, code=2).err
    assert (four.read_bytes(), half.read_bytes()) == (content, content[:300])
    machine = opened(half, HERE, fresh=True)
    assert (machine.name, machine.ranks) == ("half", 2)
    assert damaged(half).read_bytes() == content[:300] and not half.exists()


def test_a_new_file_starts_from_the_shipped_file_and_keeps_others(
    tmp_path: Path, ran: Any, monkeypatch: Any
) -> None:
    for setting in ("h200-4", "nothing"):  # the environment has no effect
        monkeypatch.setenv("FICCO_MACHINE", setting)
        machine = opened(tmp_path / "mine.yaml", files.Fingerprint("NVIDIA H200", 2))
        assert (machine.name, machine.gemm) == ("mine", load(configs() / "h200-2.yaml").gemm)
    folder = tmp_path / "mine"
    (folder / "inside").mkdir(parents=True)
    base = "tune --ranks 2 --device cpu --quick --out"
    kinds = {str(folder): "a folder", "/dev/null": "something else"}
    for (path, kind), options in itertools.product(kinds.items(), ((), ("--fresh",))):
        error = ran(base, path, *options, code=2).err
        assert f"{path}: file: required a file, got {kind}" in error
    assert sorted(tmp_path.rglob("*")) == [folder, folder / "inside"]


def test_a_damaged_journal_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    for text in ("", "[]", '{"settings": 1}', "null"):
        Journal.path(path).write_text(text)
        assert Journal.read(path) is None


def test_tune_lists_shapes_whose_schedule_changes(tmp_path: Path) -> None:
    machine, settings = load(configs() / "h200-4.yaml"), tuning.TuneSettings(tmp_path, "cuda")
    lines = [*calls.rechosen(Machine("m", "NVIDIA H200", 4), machine, 4, settings)]
    count = re.match(r"schedule='auto' changed for (\d+) of 8 shapes \(set measured\)", lines[0])
    assert count and len(lines) == 1 + int(count[1]) > 1
    assert all("): serial:collective -> " in line for line in lines[1:])
    (line,) = calls.rechosen(machine, machine, 4, settings)
    assert "changed for 0 of 8" in line
    assert [tuning._change("-", "2 s"), tuning._change("1 s", "2 s")] == ["2 s (new)", "1 s -> 2 s"]


def test_figures_are_rounded_and_shown_old_against_new() -> None:
    old = Machine("m", "cpu", 2, memory=model.Memory(1e10, 1e10, SOURCE))
    memory = model.Memory(1e10, 1.23456789e10, SOURCE)
    new = replace(old, memory=memory, topology=BLOCKS["topology"])
    assert ("bandwidth", "10 GB/s", "12.35 GB/s") in changes(old, new, "memory")
    assert ("kind", "-", "switch") in changes(old, new, "topology")
    assert rounded((1.23456789, 3, "x", True)) == (1.2346, 3, "x", True)
    curve = ((262144.0, 1.23456789), (1048576.0, 2.0))
    assert rounded(curve) == ((262144.0, 1.2346), (1048576.0, 2.0)), "sizes were rounded"
    assert rounded(model.Memory(1.23456789e10, 1e10, SOURCE)).capacity == 12346000000.0


def fake_measure(name: str, calls: Path, fault: str, site: Site) -> Any:
    rank = site.watch.rank
    with (calls / f"{rank}").open("a") as file:
        file.write(f"{name}\n")
    if fault == "interrupt":
        raise KeyboardInterrupt
    if fault == "error" or (fault == "one rank" and rank == 1):
        raise RuntimeError("the device is gone")
    if fault == "amid a round":
        fails = mock.Mock(side_effect=MemoryError("no room") if rank == 1 else None)
        site.watch.time({"call": fails}, seconds=0.1)
    if fault == "impossible":
        return replace(BLOCKS[name], bandwidth=float("nan"))
    return BLOCKS[name]


def tune_with(
    at: ranks.Rank, path: str, calls: str, faults: dict[str, str], fresh: bool = False
) -> tuple[tuning.Outcome | None, str]:
    """Tune with fake steps: the outcome, or the name of the exception that ended the run."""

    def save_if_room(machine: Machine, target: Path) -> None:
        if faults.get("copies") == "full disk" and machine.copies is not None:
            raise ConfigError(str(target), "file", "cannot be written: No space left on device")
        save(machine, target)

    with pytest.MonkeyPatch.context() as patch:
        fake = {n: partial(fake_measure, n, Path(calls), faults.get(n, "")) for n in BLOCKS}
        patch.setattr(tuning, "MEASURES", fake)
        patch.setattr(effort, "STEPS", tuple(fake))
        patch.setattr(tuning, "save", save_if_room)
        patch.setattr(measure, "PEERS_S", 1.0)
        try:
            settings = tuning.TuneSettings(Path(path), "cpu", quick=True, fresh=fresh)
            return tuning.tune(settings), ""
        except KeyboardInterrupt as error:
            return None, type(error).__name__


def test_a_run_goes_on_where_it_was_interrupted_unless_it_is_fresh(tmp_path: Path) -> None:
    for name in ("gemm", "topology", "thresholds"):  # the first one, one between, the last one
        folder, number = tmp_path / name, list(BLOCKS).index(name)
        folder.mkdir()
        path = folder / "m.yaml"
        paths = str(path), str(folder)
        broken = ranks.run(2, tune_with, *paths, {name: "interrupt"})
        assert [error for _, error in broken] == ["KeyboardInterrupt"] * 2
        done = tuple(BLOCKS)[:number]
        assert Journal.read(path).done == done
        if number:
            assert {b for b in BLOCKS if getattr(load(path), b)} == {*done}
        (outcome, _), _ = ranks.run(2, tune_with, *paths, {})
        assert outcome.earlier == done and not outcome.failures and not outcome.error
        machine = load(path)
        assert {block: getattr(machine, block) for block in BLOCKS} == BLOCKS
        assert Journal.read(path) is None, "the journal is left over"
        for rank in "01":  # only the interrupted step began twice
            assert sorted((folder / rank).read_text().split()) == sorted([*BLOCKS, name])
    ranks.run(2, tune_with, *paths, {"memory": "interrupt"})
    (outcome, _), _ = ranks.run(2, tune_with, *paths, {}, True)
    assert outcome.earlier == () and outcome.done == list(BLOCKS)


def test_steps_that_fail_leave_their_blocks_and_the_run_goes_on(tmp_path: Path) -> None:
    path, calls = tmp_path / "m.yaml", str(tmp_path)
    earlier = model.Memory(5e9, 5e9, SOURCE)
    save(Machine("m", "cpu", 2, memory=earlier), path)
    faults = dict(copies="amid a round", topology="error", memory="impossible", host="one rank")
    messages = {"topology": "the device is gone", "memory": "bandwidth", "host": "rank 1: "}
    for outcome, _ in ranks.run(2, tune_with, str(path), calls, faults):
        assert list(outcome.failures) == list(faults)
        assert outcome.done == [name for name in BLOCKS if name not in faults]
        assert all(message in outcome.failures[name] for name, message in messages.items())
        in_round = outcome.failures["copies"]
        assert "no room" in in_round or "did not come" in in_round
    machine = load(path)
    assert (machine.memory, machine.copies, machine.gemm) == (earlier, None, BLOCKS["gemm"])
    (outcome, _), _ = ranks.run(2, tune_with, str(path), calls, {})
    assert outcome.done == list(faults) and load(path).memory == BLOCKS["memory"]


def tune_and_die(at: ranks.Rank, path: str, calls: str, moment: str) -> None:
    """Tune, and kill rank 0 while it saves the block ``copies``: before the new file replaces the
    old file, or between the file and the journal."""
    replace_file = os.replace

    def die(source: Any, target: Any) -> None:
        journalled = Path(target).suffix == ".json"
        saved = Path(path).read_text() if Path(path).exists() else ""
        content = Path(source).read_text() if moment == "file" and saved else saved
        if at.rank == 0 and "copies:" in content and journalled == (moment == "journal"):
            os.kill(os.getpid(), signal.SIGKILL)
        replace_file(source, target)

    os.replace = die
    tune_with(at, path, calls, {})


@pytest.mark.parametrize(("step", "blocks"), [("file", ["gemm"]), ("journal", ["gemm", "copies"])])
def test_killed_while_saving_nothing_is_lost(tmp_path: Path, step: str, blocks: list[str]) -> None:
    path = tmp_path / "m.yaml"
    how: Any = {"fresh": True, "catch": True, "lost": (1,)}
    ended = ranks.run(2, tune_and_die, str(path), str(tmp_path), step, **how)
    assert isinstance(ended[0], ranks.Died) and ended[0].exitcode == -signal.SIGKILL, ended
    machine = load(path)
    assert [block for block in BLOCKS if getattr(machine, block)] == blocks
    (outcome, _), _ = ranks.run(2, tune_with, str(path), str(tmp_path), {})
    assert outcome.earlier == ("gemm",)
    assert {block: getattr(load(path), block) for block in BLOCKS} == BLOCKS


def test_a_file_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    path, inside_file = tmp_path / "m.yaml", tmp_path / "file" / "m.yaml"
    (tmp_path / "file").touch()
    for outcome, _ in ranks.run(2, tune_with, str(inside_file), str(tmp_path), {}):
        assert "cannot be written" in outcome.error and "--out" in outcome.error
        assert outcome.done == []
    assert not (tmp_path / "0").exists(), "a step ran"
    full = {"copies": "full disk"}
    for outcome, _ in ranks.run(2, tune_with, str(path), str(tmp_path), full):
        assert "No space left" in outcome.error and outcome.done == ["gemm"]
    assert load(path).gemm == BLOCKS["gemm"] and load(path).copies is None


QUICK = effort.EFFORTS["cpu", True]


def little() -> effort.Effort:
    """Efforts that time each call as rarely as possible, also float8 products, slow on CPUs."""
    seconds_of_steps = {**QUICK.seconds, **dict.fromkeys(SCALED_PRODUCTS.values(), 0.1)}
    seconds = {step: limit / 20 for step, limit in seconds_of_steps.items()}
    subsets = {"gemms": QUICK.gemms[::3], "experts": QUICK.experts[::4]}
    return replace(QUICK, seconds=seconds, shape_seconds=0.1, **subsets)


def with_little(at: ranks.Rank, run: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(effort.EFFORTS, ("cpu", True), little())
        return run(*args)


def test_a_machine_is_measured_and_the_figures_hold(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    settings = tuning.TuneSettings(path, "cpu", True, command="tests")
    outcome, outcome_of_rank_1 = ranks.run(2, with_little, tuning.tune, settings)
    assert not outcome.failures and not outcome.error, outcome
    assert outcome.machine == outcome_of_rank_1.machine
    machine = load(path)
    assert machine == outcome.machine
    assert outcome.skipped.keys() == {"kernel_copies", "tiled"}
    assert outcome.skipped["kernel_copies"] == "no kernel copies on this device"
    # A CPU has no kernel copies, and its tiled product consists of library products.
    absent = {"kernel_copies", "tiled", "network"}
    assert not any(getattr(machine, step) for step in absent)
    for step in set(tuning.MEASURES) - absent:
        source = getattr(machine, step).provenance
        assert source.command == "tests" and source.torch == torch.__version__
        assert source.date and source.commit and source.source in ("measured", "fitted")
    for recipe, block in SCALED_PRODUCTS.items():
        assert f" products of fp8-{recipe}, errors" in getattr(machine, block).provenance.note
    points = ranks.run(2, with_little, tuning.check, machine, "cpu")[0]
    checked = "gemm experts attention copies all_gather reduce_scatter all_to_all all_reduce"
    named = {*checked.split(), "memory", "call", *SCALED_PRODUCTS.values()}
    assert {point.block for point in points} == named
    assert sum(p.subject.endswith(" in a row") for p in points) == 1
    # The ratio depends on the load of the machine, so only the signs are compared.
    assert all(p.stored > 0 and p.measured > 0 for p in points)
    equal = [replace(p, measured=p.stored) for p in points]
    assert f"all {len(points)} points hold" in tuning.report(equal, 0.01)


@pytest.mark.multigpu
def test_gpus_are_measured(tmp_path: Path) -> None:
    ranks.need_own_gpus(2)
    path = tmp_path / "m.yaml"
    settings = tuning.TuneSettings(path, "cuda", True)
    # Only CPUs have a reduced effort.
    outcome = ranks.run(2, with_little, tuning.tune, settings, device="cuda", timeout=240)[0]
    assert not outcome.failures and not outcome.error, outcome
    machine = load(path)
    assert machine.accelerator == torch.cuda.get_device_name()
    assert machine.gemm.units > 1 and machine.contention.gemm_under_copies < 2


def test_on_the_command_line_a_falsified_file_does_not_hold(tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "new" / "m.yaml"
    base = f"tune --ranks 2 --device cpu --quick --out {path}"
    assert cli.run(f"{base} --only memory".split()) == 0
    output = capfd.readouterr().err
    assert f"wrote {path}" in output and output.endswith(f"use it with FICCO_MACHINE={path}\n")
    machine = load(path)
    save(replace(machine, memory=replace(machine.memory, bandwidth=1e4)), path)
    assert cli.run(f"{base} --check --tolerance 30".split()) == 1
    output = capfd.readouterr().out
    assert "1 of 1 points are off" in output
    command = f"ficco tune --ranks 2 --device cpu --out {path} --only memory"
    assert output.endswith(f"measure again: {command}\n")


@pytest.mark.parametrize("crowded", [True, False])
def test_copies_are_checked_against_their_block(crowded: bool, monkeypatch: Any) -> None:
    """On crowded cores the block holds only the time of the bytes; the latency is a host cost."""
    call, rate = 500e-6, 3e9

    def times(site: Any, sizes: Any, pieces: Any) -> list[fits.CopyTime]:
        rows = [(size, 3 * count) for size in sizes for count in pieces]
        return [fits.CopyTime(size, count, call + count * size / rate) for size, count in rows]

    monkeypatch.setattr(tuning.communication, "copy_times", times)
    curve = ((16384.0, rate), (1048576.0, rate))
    copies = model.Copies(1, 0.0 if crowded else call, 0.0, curve, SOURCE)
    machine = Machine("m", "cpu", 4, copies=copies)
    site: Any = SimpleNamespace(effort=QUICK, machine=machine, crowded=crowded, world=4)
    ratios = [point.ratio for point in tuning._copies(site, "copies", copies)]
    assert ratios == pytest.approx([1.0] * 2, rel=1e-3)
    # A point holds within the tolerance on either side.
    for seconds, holds in (((1.25, 1.0), True), ((1.0, 1.26), False), ((1.26, 1.0), False)):
        assert tuning.Point("b", "x", *seconds).holds(0.25) == holds


TABLE = ((5, 1), (2, 4))


def call_and_log(at: ranks.Rank, path: str) -> None:
    """Log calls of every operator, one of them twice and one without columns."""
    problem_log._noted.clear()
    a, b, rows = torch.ones(6, 8), torch.ones(8, 4), list(map(list, TABLE))
    with ficco.options(log_problems=path):
        for n, schedule in ((8, "serial"), (8, "growing"), (16, "auto"), (0, "serial")):
            ficco.all_gather_matmul(torch.ones(4, 8), torch.ones(8, n), schedule=schedule)
        ficco.matmul_reduce_scatter(a, b, schedule="serial", rows=[1, 5])
        ficco.matmul_all_reduce(a, b, schedule="serial")
        ficco.all_to_all_matmul(a, b, schedule="serial", rows=rows)
        ficco.matmul_all_to_all(a, b, schedule="serial", rows=rows)
        b_shard = torch.ones((7, 5)[at.rank], 4)
        ficco.all_to_all_transposed_matmul(a, b_shard, schedule="serial", rows=rows)
    ficco.close()


def log_lines(at: ranks.Rank) -> dict[str, tuple[list[str], list[str]]]:
    """Log lines and warnings of two equal training steps, by the setting of the log."""
    logger, by_setting = logging.getLogger("ficco"), {}
    a, b = torch.ones(4, 8, requires_grad=True), torch.ones(8, 16)
    for setting in ("off", "option", "level", "refused"):
        problem_log._said.clear()
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, to=lines: to.append(record.getMessage())  # type: ignore
        logger.addHandler(handler)
        level, group = logger.level, dist.new_group(list(range(at.world)))
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if setting == "level":
                logger.setLevel(logging.INFO)
            if setting == "refused":
                patch.setattr(CpuEngine, "refuses", _refuses_all_but_collectives)
            with ficco.options(log=setting in ("option", "refused")):
                for _ in range(2):
                    ficco.all_gather_matmul(a, b, group=group).sum().backward()
        logger.removeHandler(handler)
        logger.setLevel(level)
        ranks.leave(group)
        by_setting[setting] = lines, [str(warning.message) for warning in caught]
    return by_setting


def _refuses_all_but_collectives(engine: CpuEngine, problem: Problem, schedule: Schedule) -> str:
    return "" if schedule.mover == "collective" else "there is none"


def test_a_run_logs_each_decision_once() -> None:
    by_setting, of_rank_1 = ranks.run(2, log_lines)
    assert set(map(str, of_rank_1.values())) == {"([], [])"}, "rank 1 logged"
    lines, warned = by_setting.pop("refused")
    for line in (*lines, *warned):
        assert "serial:collective in place of " in line
    assert len(warned) == len(set(warned)) and all("there is none" in warning for warning in warned)
    assert warned[0].startswith("schedule='auto' takes serial:collective in place of ")
    assert by_setting.pop("off") == ([], [])
    problem = Problem("all_gather_matmul", (4, 4), 16, 8, "float32")
    for (forward, backward), warned in by_setting.values():
        match = re.fullmatch(r"(.*): (\S+) \((\w+): .*\)", forward)
        assert match and match[1] == str(problem) and Schedule.parse(match[2])
        assert match[3] == "fallback" and "`ficco tune` measures this machine" in forward
        assert ", for the gradient of a_shard of all_gather_matmul: " in backward and not warned


def test_logged_problems_are_explained_tuned_and_found_again(tmp_path: Path, ran: Any) -> None:
    log, path = tmp_path / "log", tmp_path / "m.yaml"
    ranks.run(2, call_and_log, str(log))
    scaled = problem_of_sizes("all_gather_matmul", 64, 32, 48, "fp8-row", 2)
    problem_log.note(str(log), scaled, 0)
    problem_log.note(str(log), replace(scaled, n=64), 1)  # only rank 0 logs
    noted = [json.loads(line)["n"] for line in log.read_text().splitlines()]
    assert noted == [8, 16, 0, 4, 4, 4, 4, 4, 32]
    *problems, read = problem_log.read(log, 2)
    assert [(p.operator, p.rows, p.blocks, p.n) for p in problems] == [
        *(("all_gather_matmul", (4, 4), (), n) for n in (8, 16)),
        ("matmul_reduce_scatter", (1, 5), (), 4),
        ("matmul_all_reduce", (3, 3), (), 4),
        ("all_to_all_matmul", (7, 5), TABLE, 4),
        ("matmul_all_to_all", (6, 6), TABLE, 4),
        ("all_to_all_transposed_matmul", (7, 5), TABLE, 4),
    ]
    assert read == scaled and problem_log.read(log, 3) == []

    explain = f"explain --from-log {log} --machine h200-2"
    lines = ran(explain).out.splitlines()
    assert len(lines) == 8 and lines[0].startswith("all_gather_matmul(m=8 (4 x 2 ranks), n=8, ")
    assert all(" on h200-2" in line for line in lines)
    decisions = json.loads(ran(f"{explain} --json").out)
    schedules = [decision["schedule"] for decision in decisions]
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == schedules
    for wrong in ("--m 4", "--operator experts", "--world 5"):
        message = "none" if "world" in wrong else f"--from-log: required without {wrong.split()[0]}"
        assert message in ran(f"{explain} {wrong}", code=2).err
    for junk in (b"\xff", b"[" * 100_000, b'{"rows": [1], "n": 1e999}'):
        (tmp_path / "junk").write_bytes(junk)
        assert "line 1: required" in ran(f"explain --from-log {tmp_path}/junk", code=2).err

    machine_file(path)
    chosen = (problems[4], scaled)
    settings = tuning.TuneSettings(path, "cpu", True, only=("shapes",), problems=chosen)
    outcome = ranks.run(2, with_little, tuning.tune, settings)[0]
    assert not outcome.failures, outcome.failures
    machine = load(path)
    assert machine.gemm == BLOCKS["gemm"], "a block that was not measured changed"
    assert [*map(model.tuned_key, machine.tuned)] == [*map(model.tuned_key, chosen)]
    for problem, entry in zip(chosen, machine.tuned, strict=True):
        assert entry.queued == entry.idle and 0 < entry.seconds[0] <= entry.serial[0]
        decision = decide(problem, machine=machine, mode="idle", offers=("dma", "kernel"))
        assert (decision.source, str(decision.schedule)) == ("tuned", entry.idle)
    # Other blocks with the same row counts are another problem, and so is another float8 recipe.
    skewed = Problem.of_blocks("all_to_all_matmul", [[6, 0], [1, 5]], 4, 8, "float32")
    assert skewed.rows == problems[4].rows
    for problem in (skewed, problem_of_sizes("all_gather_matmul", 64, 32, 48, "fp8-tensor", 2)):
        assert decide(problem, machine=machine, mode="idle").source != "tuned"


def test_operators_choose_their_collectives_and_shapes(tmp_path: Path) -> None:
    optional = {"reduce_scatter", "all_to_all", "all_reduce"}
    for operators, measured in (
        ((), optional),
        (("all_gather_matmul",), set()),
        (("matmul_reduce_scatter", "matmul_all_to_all"), {"reduce_scatter", "all_to_all"}),
    ):
        steps = {*tuning.TuneSettings(tmp_path / "m.yaml", "cpu", operators=operators).steps}
        assert steps & optional == measured and {"gemm", "all_gather", "thresholds"} <= steps
    case = Case("x", 64, 16, 32, "float32")
    problems = calls.from_cases([case], 2, "cpu", ("all_gather_matmul", "matmul_all_reduce"))
    sizes = [(p.operator, p.n, p.k) for p in problems]
    assert sizes == [("all_gather_matmul", 16, 32), ("matmul_all_reduce", 32, 16)]
    (problem,) = calls.from_cases([replace(case, operator="all_to_all_matmul")], 2, "cpu")
    assert problem.blocks == ((32, 32), (32, 32))


def test_the_fastest_of_each_mode_is_entered_and_replaces_the_older_entry() -> None:
    problem = Problem("all_gather_matmul", (4, 4), 8, 8, "float32")
    names = ("serial:collective", "serial", "growing", "shrinking")
    by_mode = {"queued": (5.0, 4.0, 2.0, 3.0), "idle": (5.0, 6.0, 8.0, 7.0)}
    times = {mode: dict(zip(names, s, strict=True)) for mode, s in by_mode.items()}
    entry = calls.entry(problem, times, site_of(None))
    assert (entry.queued, entry.idle) == ("growing", "serial:collective")
    assert (entry.seconds, entry.serial) == ((2.0, 5.0), (4.0, 5.0))
    other = replace(entry, n=9)
    machine = Machine("m", "cpu", 2, tuned=(replace(entry, queued="serial"), other))
    assert calls.with_entry(machine, entry).tuned == (other, entry)


def test_a_log_with_a_wrong_line_is_refused_with_its_number(tmp_path: Path) -> None:
    log = tmp_path / "log"
    valid = {"operator": "all_gather_matmul", "rows": [1, 1], "n": 1, "k": 1, "dtype": "float32"}
    by_blocks = {"operator": "all_to_all_matmul", "blocks": [[1, 2], [1, 1]], "rows": [2, 2]}
    wrong = ({"n": "a"}, {"operator": "gather"}, by_blocks)
    for line in ("{", "[]", *(json.dumps({**valid, **change}) for change in wrong)):
        log.write_text(f"{json.dumps(valid)}\n{line}\n")
        with pytest.raises(ConfigError, match="line 2: required a problem"):
            problem_log.read(log, 2)


@pytest.mark.parametrize("name", ["", "\ud800", "a\0b"], ids=["a folder", "no text", "a zero"])
def test_a_log_that_cannot_be_written_does_no_harm(tmp_path: Path, name: str) -> None:
    problem = Problem("all_gather_matmul", (1,), 1, 1, "float32")
    with pytest.warns(UserWarning, match="problems are not logged"):
        problem_log.note(f"{tmp_path}/{name}", problem, 0)
    problem_log.note(f"{tmp_path}/{name}", problem, 0)  # the warning is not repeated


def _tuned(at: ranks.Rank, path: Path, only: tuple[str, ...], hosts: int) -> Any:
    """Tune with fixed latencies and rates of messages, independent of this machine's pace."""
    fitted = mock.patch.object(fits, "messages", side_effect=[(1e-4, 2e9), (2e-4, 1e9)])
    with host_of(at, hosts), fitted as messages:
        outcome = tuning.tune(
            tuning.TuneSettings(path, "cpu", quick=True, only=only, fresh=True, command="tests")
        )
    rows = [row for call in messages.call_args_list for row in call.args[0]]
    assert all(row.seconds > 0 for row in rows)
    sizes = {(row.nbytes, row.count) for row in rows}
    return outcome.error, outcome.failures, outcome.done, len(sizes)


def test_the_network_of_two_hosts_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    for error, failures, done, rows in ranks.run(4, _tuned, path, ("network",), 2):
        assert not error and not failures and done == ["network"] and rows >= 4
    network = load(path).network
    assert (network.bandwidth, network.latency, network.sharing) == (2e9, 1e-4, 2)
    assert load(path).ranks == 2 and network.provenance.source == "fitted"
    assert "2 hosts, gloo" in network.provenance.note


@pytest.mark.parametrize(("only", "hosts"), [(("network",), 1), (("gemm",), 2), ((), 2)])
def test_steps_of_one_host_and_of_several_are_told_apart(
    tmp_path: Path, only: tuple[str, ...], hosts: int
) -> None:
    path = tmp_path / "none.yaml"
    for error, _, done, _ in ranks.run(2, _tuned, path, only, hosts):
        assert "those of several hosts that one alone" in error and not done
    assert not path.exists()
