"""The tuner: fits on made-up times, runs broken off in every place, files that are wrong."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist

import ficco
import ficco.tools.cli
from ficco.dma.cpu import CpuEngine
from ficco.errors import ConfigError
from ficco.heuristics import decide, problem_of_sizes
from ficco.machine import (
    SCALED_PRODUCTS,
    AttentionCalls,
    Collective,
    Contention,
    Copies,
    Fingerprint,
    Gemm,
    Host,
    Machine,
    Memory,
    Provenance,
    Thresholds,
    Topology,
    configs,
    dumps,
    load,
    loads,
    save,
    tuned_key,
)
from ficco.ops import problem_log
from ficco.problems.products import Problem
from ficco.problems.scaling import Scaling
from ficco.schedules import Schedule, plan
from ficco.tools.bench import series
from ficco.tools.bench.calls import Runner
from ficco.tools.bench.cases import Case
from ficco.tools.bench.series import Stopwatch
from ficco.tools.tune import attention, calls, check, communication, effort, fits, products
from ficco.tools.tune import run as tuning
from ficco.tools.tune.files import Journal, changes, damaged, opened, rounded
from ficco.tools.tune.site import Site

US = 1e-6

# Fits.


def rows_of_copies(latency: float, gap: float, rates: dict[float, float]) -> list[fits.CopyTime]:
    return [
        fits.CopyTime(size, count, latency + count * size / rate + (count - 1) * gap)
        for size, rate in rates.items()
        for count in (3, 12)
    ]


def test_copies_are_taken_apart_exactly() -> None:
    rates = {2.0**16: 60e9, 2.0**18: 60e9, 2.0**24: 350e9, 2.0**27: 380e9}
    found = fits.copies(rows_of_copies(15 * US, 3 * US, rates))
    assert found.latency == pytest.approx(15 * US, rel=1e-6)
    assert found.gap == pytest.approx(3 * US, rel=1e-6)
    assert dict(found.curve) == pytest.approx(rates, rel=1e-6)
    assert found.error < 1e-6


def test_copies_whose_times_are_noise_still_have_positive_figures() -> None:
    times = [(1024.0, 1, 9 * US), (1024.0, 4, 8 * US), (4096.0, 1, 5 * US), (4096.0, 4, 30 * US)]
    found = fits.copies([fits.CopyTime(*one) for one in times])
    assert found.latency >= 0 and found.gap >= 0
    assert all(rate > 0 for _, rate in found.curve)


def test_noise_does_not_make_small_copies_the_fastest() -> None:
    # By the two smallest sizes nearly all of a copy's time is its gap.
    times = rows_of_copies(5 * US, 0.0, {65536.0: 6.5536e9, 131072.0: 13.1e9, 1048576.0: 10e9})
    found = dict(fits.copies(times).curve)
    assert max(found.values()) == found[1048576.0] < 20e9


@pytest.mark.parametrize("times", [[(1024.0, 1)], [(1024.0, 1), (4096.0, 1)]])
def test_copies_that_cannot_be_taken_apart_are_refused(times: list[tuple[float, int]]) -> None:
    with pytest.raises(ValueError, match="required two sizes and rows of two lengths"):
        fits.copies([fits.CopyTime(size, count, 1.0) for size, count in times])


def enqueued(call: float, matmul: float, copy: float, signal: float) -> list[fits.Enqueued]:
    numbers = [(1, 1, 3, 2), (1, 5, 3, 9), (1, 4, 12, 3), (1, 9, 24, 20), (0, 8, 0, 0)]
    return [
        fits.Enqueued(c * call + m * matmul + t * copy + s * signal, c, m, t, s)
        for c, m, t, s in numbers
    ]


def test_what_copies_take_in_front_of_a_product_is_the_median_beside_their_bytes() -> None:
    taken = {100.0: 5.0 + 10.0, 200.0: 7.0 + 20.0, 400.0: 90.0 + 40.0}
    assert fits.in_front(taken, lambda nbytes: 10.0) == 7.0
    assert fits.in_front({100.0: 9.0}, lambda nbytes: 10.0) == 0.0


def test_host_costs_are_taken_apart_exactly() -> None:
    found = fits.host(enqueued(20 * US, 9 * US, 2 * US, 1.5 * US))
    want = {"call": 20 * US, "matmul": 9 * US, "copy": 2 * US, "signal": 1.5 * US}
    assert found == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(("columns", "signed"), [(4, None), (7, 6), (13, None), (30, 29)])
def test_least_squares_are_nonnegative_and_least_for_any_number_of_columns(
    columns: int, signed: int | None
) -> None:
    draw = np.random.default_rng(columns)
    matrix = draw.integers(0, 9, size=(3 * columns, columns)).astype(float)
    seconds = np.exp(draw.normal(size=3 * columns))
    a = matrix / seconds[:, None]
    assert np.linalg.lstsq(a, np.ones(len(a)), rcond=None)[0].min() < 0, "bounds matter"
    found = np.array(fits.least_squares(matrix, seconds, signed))
    bounded = np.arange(columns) != (-1 if signed is None else signed)
    assert (found[bounded] >= 0).all() and (found[bounded] == 0).any()
    # No step that is allowed makes the errors smaller.
    gains = a.T @ (1 - a @ found)
    assert gains[bounded & (found == 0)].max() < 1e-9
    assert gains[(found != 0) | ~bounded] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="required finite numbers and times above 0"):
        fits.memory([(1e6, 1.0), (2e6, seconds)])


def test_host_costs_are_never_negative() -> None:
    found = fits.host(enqueued(20 * US, 9 * US, 2 * US, -0.2 * US))
    assert found["signal"] == 0.0
    assert min(found.values()) >= 0
    assert found["matmul"] == pytest.approx(9 * US, rel=0.05)


def test_memory_is_a_rate_and_a_latency() -> None:
    pairs = [(size, 3 * US + size / 4e12) for size in (1e6, 1e7, 5e8)]
    assert fits.memory(pairs) == pytest.approx((4e12, 3 * US))


@pytest.mark.parametrize(
    ("at_once", "found"), [(300.0, ("mesh", 1.0)), (50.0, ("switch", 0.5)), (110.0, ("switch", 1))]
)
def test_links_of_their_own_show_in_copies_at_once(at_once: float, found: Any) -> None:
    assert fits.topology(100.0, at_once) == found


#: A library's attention, slower with small heads, beside the products of a card.
ATTENDS = AttentionCalls(
    *(7e-6, 4e-6, ((64.0, 0.6), (128.0, 0.85), (256.0, 0.5)), Provenance("fitted")),
    backward=((64.0, 0.4), (128.0, 0.7), (256.0, 0.3)),
    backward_start=3e-5,
)


def test_attention_is_taken_apart_exactly() -> None:
    gemm = load(configs() / "h100-8.yaml").gemm
    assert gemm
    counted = [attention.call_of(one) for one in effort.GPU.attends]
    seconds = [ATTENDS.times(gemm, 2, *one)[0] for one in counted]
    start, block, more, rates = fits.attention(gemm.units, counted, seconds)
    assert (start, block, more) == pytest.approx((7e-6, 4e-6, 3e-5))
    for back, curve in ((False, ATTENDS.shares), (True, ATTENDS.backward)):
        for size, share in curve or ():
            assert rates[back, int(size)] / gemm.rate(2) == pytest.approx(share)


def test_attention_whose_larger_calls_take_no_longer_is_refused() -> None:
    counted = [attention.call_of(one) for one in effort.GPU.attends]
    with pytest.raises(ValueError, match="attention: required larger calls to take longer"):
        fits.attention(132, counted, [1e-3] * len(counted))


def test_attention_needs_the_products_whose_share_it_is(made_up: Site) -> None:
    made_up.machine = Machine("new", "NVIDIA H200", 2)
    with pytest.raises(ValueError, match="attention: required the block 'gemm'"):
        attention.attention(made_up)


def test_contention_is_the_median_slowdown_and_no_gain() -> None:
    assert fits.slowdown([1.0, 2.0, 4.0], [1.5, 2.2, 5.0]) == pytest.approx(1.25)
    assert fits.slowdown([1.0, 1.0], [0.9, 0.9]) == 1.0


def test_a_hot_round_is_taken_out_by_its_references() -> None:
    times = {"x": [1.0, 2.0, 1.0], "r0": [3.0, 6.0, 3.0], "r1": [3.0, 6.0, 3.0]}
    assert fits.steadied(times, ["r0", "r1"]) == {"x": 1.0}


def rows_of_products(truth: Gemm, counts: tuple[int, ...], noise: float = 0.0) -> list[Any]:
    """Rows of two products of 0.4 and 0.7 ms, every other one slower by a share."""
    return [
        fits.RowTime(name, count, truth.heated(count * each) * (1 + noise * (i % 2)))
        for name, each in (("k-large", 0.4e-3), ("n-large", 0.7e-3))
        for i, count in enumerate(counts)
    ]


COUNTS = effort.GPU.rows


@pytest.mark.parametrize(("burst", "sustained"), [(2e-3, 0.81), (5e-3, 0.9), (1e-3, 0.6)])
def test_a_power_limit_is_found_where_it_was_put(burst: float, sustained: float) -> None:
    truth = replace(BLOCKS["gemm"], burst=burst, sustained=sustained)
    found = fits.heat(rows_of_products(truth, COUNTS))
    assert found.limited and found.error < 1e-3
    assert found.burst == pytest.approx(burst, rel=0.02)
    assert found.sustained == pytest.approx(sustained, rel=0.005)
    # Times of each product by itself come back, and the model gives the rows again.
    model = replace(truth, burst=found.burst, sustained=found.sustained)
    for row in rows_of_products(truth, COUNTS):
        each = 0.4e-3 if row.product == "k-large" else 0.7e-3
        assert found.cold(row.seconds) == pytest.approx(row.count * each, rel=0.01)
        assert model.heated(row.count * each) == pytest.approx(row.seconds, rel=0.01)
    noisy = fits.heat(rows_of_products(truth, COUNTS, noise=0.02))
    assert noisy.burst == pytest.approx(burst, rel=0.3)
    assert noisy.sustained == pytest.approx(sustained, rel=0.03)


@pytest.mark.parametrize(("sustained", "noise"), [(1.0, 0.0), (1.0, 0.1), (0.98, 0.0)])
def test_a_device_without_a_power_limit_is_given_none(sustained: float, noise: float) -> None:
    truth = replace(BLOCKS["gemm"], burst=2e-3, sustained=sustained)
    found = fits.heat(rows_of_products(truth, COUNTS, noise))
    assert (found.burst, found.sustained, found.limited) == (float("inf"), 1.0, False)
    assert found.cold(5.0) == fits.COLD.cold(5.0) == 5.0


def test_rows_of_two_lengths_show_no_bend() -> None:
    with pytest.raises(ValueError, match="required rows of three lengths"):
        fits.heat(rows_of_products(BLOCKS["gemm"], (1, 64)))


# What is measured.


def test_steps_have_names_and_times_and_blocks() -> None:
    steps = tuple(tuning.MEASURES)
    assert (*steps, "shapes") == effort.STEPS
    assert set(steps) <= {field.name for field in fields(Machine)}
    for device, quick, most in (("cuda", False, 216), ("cpu", False, 52), ("cpu", True, 5.5)):
        made = effort.EFFORTS[device, quick]
        assert tuple(made.seconds) == steps
        alone = made.seconds[tuning.NETWORK]  # of a run of its own
        assert alone > 0 and sum(made.seconds.values()) - alone < most
        assert len(made.sizes) >= 2 and len(set(made.pieces)) == 2
        assert all(len({o.keys for o in made.attends if o.size == s}) >= 2 for s in (64, 128))
        assert len(made.heating) == 2 and len(set(made.rows)) >= 3
    assert 170 <= len(effort.GPU.gemms) <= 220
    assert 20 <= len(effort.CPU.gemms) <= 30
    assert len(effort.GPU.gemms) == len(set(effort.GPU.gemms))


class MadeUp(Site):
    """Where products take as long as a model says, in rows as long as a limit allows."""

    crowded = False

    def parts(self) -> Any:
        return Anything()

    def time(self, step: str, calls: dict[str, Any], **settings: Any) -> dict[str, np.ndarray]:
        truth, found = TRUTH, {}
        for name, call in calls.items():
            shape, count = call.run if isinstance(call, Runner) else call
            how = {"batch": shape.batch, "wide": shape.wide, "rights": shape.rights}
            seconds = truth.heated(count * truth.seconds(*shape[:3], **how))
            found[name] = np.array((seconds,) * 3)
        return found


class Anything:
    def matrix(self, *sizes: Any) -> None:
        return None


#: A card at its limit after 2 ms.
TRUTH = replace(load(configs() / "h200-4.yaml").gemm, burst=2e-3, sustained=0.81)  # type: ignore


@pytest.fixture
def made_up(monkeypatch: Any) -> Site:
    monkeypatch.setattr(products, "row_of", lambda parts, shape, count: (shape, count))
    monkeypatch.setattr(products, "units", lambda site: TRUTH.units)
    # A third, for a fit in seconds, and all that take the card to its limit.
    large = [shape for shape in effort.GPU.gemms if shape.flops > 1.7e12]
    gpu = replace(effort.GPU, gemms=(*effort.GPU.gemms[::3], *large))
    known = Machine("m", "NVIDIA H200", 2, gemm=replace(TRUTH, burst=1.0, sustained=0.5))
    watch = SimpleNamespace(on_gpu=True)
    return MadeUp(watch, gpu, known, lambda kind, note: Provenance(kind, note=note))  # type: ignore


def test_products_are_taken_apart_into_a_cold_model_and_a_limit(made_up: Site) -> None:
    found = products.gemm(made_up)
    assert found.burst == pytest.approx(2e-3, rel=0.03), "not what the file had"
    assert found.sustained == pytest.approx(0.81, rel=0.01)
    assert "burst and sustained: 20 rows of products of up to 28.7 ms" in found.provenance.note
    # A fit that took the largest as they are would be slow.
    for m, n, k in ((16384, 8192, 8192), (4096, 4096, 4096)):
        assert found.seconds(m, n, k) == pytest.approx(TRUTH.seconds(m, n, k), rel=0.02)


def test_batches_of_experts_are_measured_cold_and_checked(made_up: Site) -> None:
    made_up.machine = replace(made_up.machine, gemm=TRUTH)
    found = products.experts(made_up)
    assert (found.burst, found.sustained) == (TRUTH.burst, TRUTH.sustained)
    for rows, experts in ((80, 16), (640, 4)):
        how = {"batch": experts, "rights": experts}
        assert found.seconds(rows, 28672, 4096, **how) == pytest.approx(
            TRUTH.seconds(rows, 28672, 4096, **how), rel=0.03
        )
    assert found.provenance.note.startswith(f"{len(effort.GPU.experts)} products of bfloat16")
    made_up.machine = replace(made_up.machine, experts=TRUTH)
    points = list(check._experts(made_up))
    assert len(points) == check.PRODUCTS and all(" of " in point.what for point in points)
    assert [point.ratio for point in points] == pytest.approx([1.0] * len(points))


def test_attention_is_measured_cold_and_beside_the_products(
    made_up: Site, monkeypatch: Any
) -> None:
    def timed(step: str, calls: dict[str, Any], **settings: Any) -> dict[str, np.ndarray]:
        found = MadeUp.time(made_up, step, {n: c for n, c in calls.items() if n[0] == "r"})
        for name in calls.keys() - found.keys():
            seconds, _ = ATTENDS.times(TRUTH, 2, *attention.call_of(calls[name]))
            found[name] = np.array((TRUTH.heated(seconds),) * 3)
        return found

    monkeypatch.setattr(attention, "call", lambda parts, asked: asked)
    monkeypatch.setattr(made_up, "time", timed)
    made_up.machine = replace(made_up.machine, gemm=TRUTH)
    found = attention.attention(made_up)
    fixed = ("start", "block", "backward_start")
    assert [getattr(found, name) for name in fixed] == pytest.approx(
        [getattr(ATTENDS, name) for name in fixed]
    )
    for curve, true in ((found.shares, ATTENDS.shares), (found.backward, ATTENDS.backward)):
        assert dict(curve or ()) == pytest.approx(dict(true or ()))
    assert found.provenance.note.startswith("48 calls of bfloat16, errors 0.0% median, 0.0% mean")
    made_up.machine = replace(made_up.machine, attention=found)
    points = {p.what: p for p in check._attention(made_up)}
    assert all(point.ratio == pytest.approx(1) for point in points.values())
    assert {
        "4096 x 4096, size 128, causal",
        "1024 x 1024, size 64, causal, backward",
    } <= points.keys()


def test_dtypes_that_are_not_measured_are_as_in_a_file_of_such_a_device(made_up: Site) -> None:
    made_up.machine = Machine("new", "NVIDIA H100 80GB HBM3", 2)
    found = products.gemm(made_up)
    sheet = load(configs() / "h100-8.yaml").gemm
    assert sheet and found.shares == sheet.shares and len(sheet.shares) == 3
    made_up.machine = Machine("new", "Nobody's", 2)
    assert products.gemm(made_up).shares == ((2, 1.0),)


def test_a_device_that_stays_cold_takes_a_limit_out_of_the_file(
    made_up: Site, monkeypatch: Any
) -> None:
    monkeypatch.setitem(globals(), "TRUTH", replace(TRUTH, burst=float("inf"), sustained=1.0))
    found = products.gemm(made_up)
    assert (found.burst, found.sustained) == (float("inf"), 1.0)
    assert "no power limit in 20 rows" in found.provenance.note


def test_a_check_sees_a_limit_that_no_longer_holds(made_up: Site) -> None:
    short = tuple(shape for shape in effort.GPU.gemms if shape.flops < 1e12)  # never at the limit
    made_up.effort = replace(made_up.effort, gemms=short)

    def points(gemm: Gemm) -> dict[str, float]:
        made_up.machine = replace(made_up.machine, gemm=gemm)
        return {point.what: point.ratio for point in check._gemm(made_up)}

    row = "64 of 4096 x 4096 x 8192 in a row"
    assert list(points(TRUTH))[-1] == row
    assert list(points(TRUTH).values()) == pytest.approx([1.0] * 5)
    now = points(replace(TRUTH, sustained=0.6))
    assert now.pop(row) < 1 / 1.25 and list(now.values()) == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_check_calls_by_the_copy_kernel_where_one_can_copy(
    made_up: Site, monkeypatch: Any, by_kernel: bool
) -> None:
    made_up.watch = SimpleNamespace(  # type: ignore[assignment]
        world=2, mode="queued", on_gpu=True, group=None, release=lambda: None
    )
    monkeypatch.setattr(communication, "copies_by_kernel", lambda site: by_kernel)
    monkeypatch.setattr(
        made_up, "time", lambda step, calls, share: {c: np.array((1.0,)) for c in calls}
    )
    made_up.machine = load(configs() / "h200-2.yaml")
    called = [point.what.split(",")[0] for point in check._calls(made_up)]
    assert called == ["serial", "shard-overlap", *(["serial:kernel"] if by_kernel else [])]
    made_up.machine = replace(made_up.machine, kernel_copies=None)
    assert len(list(check._calls(made_up))) == 2


def test_a_row_of_products_is_timed_alone_until_the_device_is_steady(
    made_up: Site, monkeypatch: Any
) -> None:
    seen = []

    def time(step: str, calls: dict[str, Any], **settings: Any) -> dict[str, np.ndarray]:
        ((name, row),) = calls.items()
        seen.append((row, settings["share"]))
        return {name: np.array((1.0, 1.0, 3.0, 4.0, 4.0))}

    monkeypatch.setattr(made_up, "time", time)
    shapes = made_up.effort.heating
    found = products.row_times(made_up, shapes, (1, 8))
    assert [row for row, _ in seen] == [(shape, count) for shape in shapes for count in (1, 8)]
    assert sum(share for _, share in seen) == pytest.approx(products.HEAT_SHARE)
    assert [(one.count, one.seconds) for one in found] == [(1, 4.0), (8, 4.0)] * 2


@pytest.mark.parametrize(
    ("on_gpu", "later"), [(True, {"a": 7.0, "b": 0.0}), (False, {"a": 9.0, "b": 5.0})]
)
def test_a_gpu_is_later_by_what_its_host_takes(on_gpu: bool, later: dict[str, float]) -> None:
    times = {"idle": {"a": 9.0, "b": 5.0}, "queued": {"a": 2.0, "b": 6.0}}

    class Timed(Site):
        def time(self, step: str, calls: dict[str, Any], **how: Any) -> dict[str, np.ndarray]:
            return {name: np.array((times[how["mode"]][name],)) for name in calls}

    watch = type("", (), {"world": 2, "on_gpu": on_gpu})()
    site = Timed(watch, effort.GPU, None, lambda kind, note: Provenance(kind, note=note))  # type: ignore
    assert calls._later(site, {"a": None, "b": None}) == later


class Watch:
    """A stopwatch of two ranks on a CPU, by whose clock everything takes a minute."""

    on_gpu, world = False, 2

    def time(self, calls: dict[str, Any], **settings: Any) -> dict[str, np.ndarray]:
        for call in calls.values():
            for _ in range(3):  # the first warms up
                call.run()
        return {name: np.array((60.0, 60.0)) for name in calls}

    def gather(self, value: Any) -> list[Any]:
        return [value, {name: [2 * taken for taken in times] for name, times in value.items()}]


def test_ranks_that_share_cores_are_timed_by_what_the_cores_do(monkeypatch: Any) -> None:
    spent = iter([0.0, 100.0, 100.0, 103.0, 200.0, 209.0])  # of one rank, in three calls
    monkeypatch.setattr("ficco.tools.tune.site.time.process_time", lambda: next(spent))
    site = Site(Watch(), effort.CPU, None, lambda kind, note: Provenance(kind, note=note))  # type: ignore
    monkeypatch.setattr("ficco.tools.tune.site.cores", lambda: 2)
    assert site.crowded
    assert site.time("memory", {"x": lambda: None})["x"].tolist() == [9 / 2, 27 / 2]
    assert site.provenance("measured", "x").note.endswith(
        "2 ranks take of the 2 cores that they share"
    )
    monkeypatch.setattr("ficco.tools.tune.site.cores", lambda: 3)
    assert not site.crowded
    assert site.time("memory", {"x": Runner(lambda: None)})["x"].tolist() == [60.0, 60.0]
    assert site.provenance("measured", "x").note == "x"


class Crowded(MadeUp):
    """Where a product takes 4 s, what is communicated 2 s, and both at once 9 s."""

    crowded = True

    def parts(self) -> Any:
        names = {"matrix": "", "matmul": "product", "copies": "move", "collective": "move"}
        return type("", (), {k: lambda *a, v=v: lambda: v for k, v in names.items()})()

    def time(self, step: str, calls: dict[str, Any], **settings: Any) -> dict[str, np.ndarray]:
        seconds = {"copies": 2.0, "collective": 2.0}
        return {
            name: np.array((9.0 if " and " in name else seconds.get(name, 4.0),) * 3)
            for name in calls
        }


def test_on_crowded_cores_each_of_two_has_half_of_them() -> None:
    watch = type("", (), {"world": 4, "on_gpu": False})()
    site = Crowded(watch, effort.CPU, None, lambda kind, note: Provenance(kind, note=note))  # type: ignore
    found = communication.contention(site)
    assert found.gemm_under_copies == found.copies_under_gemm == pytest.approx(2 * 9 / 6)
    assert found.gemm_under_collective == found.collective_under_gemm == pytest.approx(2 * 9 / 6)


def test_what_runs_at_the_same_time_is_waited_for_and_may_fail() -> None:
    done = []
    communication._at_once(lambda: done.append("front"), lambda: done.append("back"))()
    assert sorted(done) == ["back", "front"]

    def fail() -> None:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        communication._at_once(lambda: None, fail)()


def test_a_plan_is_counted_as_the_host_enqueues_it() -> None:
    problem = Problem("all_gather_matmul", (8, 8), 8, 8, "float32")
    # Acquire waits; the copy posts; the product of the peer waits; retire is behind others, posts.
    whole = plan(problem, Schedule.parse("shard-overlap"), 0)
    waits = sum(bool(s.waits or s.after) for s in whole.steps)
    posts = sum(bool(s.posts) for s in whole.steps)
    assert calls.counts(whole) == (2, 1, waits + posts)
    four = plan(problem, Schedule.parse("hetero-unfused-1d:pieces=4"), 0)
    assert calls.counts(four)[:2] == (5, 4)
    assert calls.counts(four)[2] == waits + posts + 6
    # Its own product and the peer's, the copy, and the sum of both.
    sums = Problem("matmul_reduce_scatter", (8, 8), 8, 8, "float32")
    assert calls.counts(plan(sums, Schedule.parse("shard-overlap"), 0))[:2] == (3, 1)


# Files.

HERE = Fingerprint("cpu", 2)
SOURCE = Provenance("measured")
BLOCKS: dict[str, Any] = {
    "gemm": Gemm(1e12, 1, 0.0, 0.5, 1e-6, 1e11, SOURCE),
    "copies": Copies(1, 1e-5, 1e-6, ((1024.0, 1e9), (4096.0, 2e9)), SOURCE),
    "kernel_copies": Copies(1, 2e-5, 1e-6, ((1024.0, 5e8), (4096.0, 1e9)), SOURCE),
    "topology": Topology("switch", 2e9, SOURCE),
    "all_gather": Collective(((1024.0, 1e-5), (4096.0, 2e-5)), SOURCE),
    "reduce_scatter": Collective(((1024.0, 2e-5), (4096.0, 3e-5)), SOURCE),
    "memory": Memory(1e10, 1e10, SOURCE),
    "contention": Contention(1.0, 1.1, 1.2, 1.3, SOURCE),
    "host": Host(1e-5, 1e-5, 1e-6, 1e-6, 1e-6, SOURCE),
    "thresholds": Thresholds(1e6, 5e6, SOURCE),
}


def machine_file(path: Path, **changes: Any) -> Machine:
    made = replace(Machine(path.stem, "cpu", 2, **BLOCKS), **changes)
    save(made, path)
    return made


def cli(*arguments: object) -> int:
    return ficco.tools.cli.run([str(argument) for argument in arguments])


def test_a_file_of_another_world_is_not_merged(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "four.yaml"
    machine_file(path, ranks=4)
    before = path.read_bytes()
    assert cli("tune", "--ranks", 2, "--device", "cpu", "--out", path, "--quick") == 2
    assert "ranks: required 2, as this run has, got 4" in capsys.readouterr().err
    assert cli("tune", "--ranks", 2, "--device", "cpu", "--out", path, "--check") == 2
    assert path.read_bytes() == before
    path.unlink()
    assert cli("tune", "--ranks", 2, "--device", "cpu", "--out", path, "--check") == 2
    assert f"--check: required a machine's file, got none at {path}; run" in capsys.readouterr().err


def test_a_damaged_file_is_kept_and_left_only_when_asked_for(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "half.yaml"
    machine_file(path)
    half = path.read_bytes()[:300]
    path.write_bytes(half)
    assert cli("tune", "--ranks", 2, "--device", "cpu", "--out", path, "--quick") == 2
    error = capsys.readouterr().err
    assert "half-written" in error and "--fresh keeps this file as half.yaml.damaged" in error
    assert path.read_bytes() == half
    found = opened(path, HERE, fresh=True)
    assert (found.name, found.ranks) == ("half", 2)
    assert damaged(path).read_bytes() == half and not path.exists()


@pytest.mark.parametrize("named", ["h200-4", "nothing"])
def test_a_new_file_begins_with_what_ships_whatever_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("FICCO_MACHINE", named)
    found = opened(tmp_path / "mine.yaml", Fingerprint("NVIDIA H200", 2))
    assert (found.name, found.gemm) == ("mine", load(configs() / "h200-2.yaml").gemm)


def test_what_is_no_file_is_refused_and_left_alone(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "mine"
    (folder / "inside").mkdir(parents=True)
    base = ("tune", "--ranks", 2, "--device", "cpu", "--quick", "--out")
    for path, what in ((folder, "a folder"), (Path("/dev/null"), "something else")):
        for more in ((), ("--fresh",)):
            assert cli(*base, path, *more) == 2
            assert f"{path}: file: required a file, got {what}" in capsys.readouterr().err
            with pytest.raises(ConfigError, match="required a file"):
                opened(path, HERE, fresh=bool(more))
    assert sorted(tmp_path.rglob("*")) == [folder, folder / "inside"]


def test_a_journal_is_read_back_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    assert Journal.read(path) is None
    noted = Journal("s").with_done("gemm").with_done("copies")
    noted.write(path)
    assert Journal.read(path) == noted
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]
    for text in ("", "[]", '{"settings": 1}', "null"):
        Journal.path(path).write_text(text)
        assert Journal.read(path) is None
    Journal.remove(path)
    Journal.remove(path)
    assert not list(tmp_path.iterdir())


def test_figures_are_shown_old_against_new(tmp_path: Path) -> None:
    old = Machine("m", "cpu", 2, memory=Memory(1e10, 1e10, SOURCE))
    new = replace(old, memory=Memory(1e10, 1.23456789e10, SOURCE), topology=BLOCKS["topology"])
    assert ("bandwidth", "10 GB/s", "12.35 GB/s") in changes(old, new, "memory")
    assert ("kind", "-", "switch") in changes(old, new, "topology")


def test_a_file_is_rounded_to_what_was_measured() -> None:
    assert rounded((1.23456789, 3, "x", True)) == (1.2346, 3, "x", True)
    curve = ((262144.0, 1.23456789), (1048576.0, 2.0))
    assert rounded(curve) == ((262144.0, 1.2346), (1048576.0, 2.0)), "sizes stay"
    assert rounded(Memory(1.23456789e10, 1e10, SOURCE)).capacity == 12346000000.0


# Runs, with steps that measure nothing.


def fake_measure(name: str, calls: Path, fault: str = "") -> Callable[[Site], Any]:
    def measure(site: Site) -> Any:
        with (calls / f"{site.watch.rank}").open("a") as file:
            file.write(f"{name}\n")
        if fault == "interrupt":
            raise KeyboardInterrupt
        if fault == "error":
            raise RuntimeError("the device is gone")
        if fault == "one rank" and site.watch.rank == 1:
            raise RuntimeError("the device is gone")
        if fault == "impossible":
            return replace(BLOCKS["memory"], bandwidth=float("nan"))
        return BLOCKS[name]

    return measure


def tune_with(
    at: ranks.Rank, path: str, calls: str, faults: dict[str, str], **settings: Any
) -> tuple[tuning.Outcome | None, str]:
    """A run whose steps are fake; what it came to, or the name of what broke it off."""
    before = tuning.MEASURES
    tuning.MEASURES = {
        name: fake_measure(name, Path(calls), faults.get(name, "")) for name in BLOCKS
    }
    try:
        wanted = tuning.TuneSettings(Path(path), "cpu", quick=True, **settings)
        return tuning.tune(wanted), ""
    except KeyboardInterrupt as error:
        return None, type(error).__name__
    finally:
        tuning.MEASURES = before


def test_a_run_goes_on_wherever_it_was_interrupted(tmp_path: Path) -> None:
    for number, name in enumerate(BLOCKS):
        folder = tmp_path / name
        folder.mkdir()
        path = folder / "m.yaml"
        broken = ranks.run(2, tune_with, str(path), str(folder), {name: "interrupt"})
        assert [text for _, text in broken] == ["KeyboardInterrupt"] * 2
        noted = Journal.read(path)
        assert noted is not None and noted.done == tuple(BLOCKS)[:number]
        if number:
            assert {b for b in BLOCKS if getattr(load(path), b)} == set(tuple(BLOCKS)[:number])
        (outcome, _), _ = ranks.run(2, tune_with, str(path), str(folder), {})
        assert outcome.earlier == tuple(BLOCKS)[:number]
        assert not outcome.failures and not outcome.error
        found = load(path)
        assert {block: getattr(found, block) for block in BLOCKS} == BLOCKS
        assert Journal.read(path) is None, "the run is over"
        for rank in "01":  # the interrupted step alone was begun twice
            begun = (folder / rank).read_text().split()
            assert sorted(begun) == sorted([*BLOCKS, name])


def test_a_fresh_run_does_not_go_on(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    ranks.run(2, tune_with, str(path), str(tmp_path), {"memory": "interrupt"})
    (outcome, _), _ = ranks.run(2, tune_fresh, str(path), str(tmp_path))
    assert outcome.earlier == () and outcome.done == list(BLOCKS)


def tune_and_fail_in_a_round(at: ranks.Rank, path: str, calls: str) -> Any:
    """A run in whose step ``memory`` rank 1 fails while its peer times calls."""
    before = tuning.MEASURES
    limit, series.PEERS_S = series.PEERS_S, 1.0

    def measure(site: Site) -> Any:
        def call() -> None:
            if at.rank == 1:
                raise MemoryError("no room")

        site.watch.time({"call": call}, seconds=0.1)

    tuning.MEASURES = {name: fake_measure(name, Path(calls)) for name in BLOCKS}
    tuning.MEASURES["memory"] = measure
    try:
        return tuning.tune(tuning.TuneSettings(Path(path), "cpu", quick=True))
    finally:
        tuning.MEASURES, series.PEERS_S = before, limit


def test_a_rank_that_fails_amid_a_step_does_not_hold_up_its_peers(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    for outcome in ranks.run(2, tune_and_fail_in_a_round, str(path), str(tmp_path)):
        assert "memory" in outcome.failures and len(outcome.done) == len(BLOCKS) - 1
        assert any(why in outcome.failures["memory"] for why in ("no room", "did not come"))


def tune_fresh(at: ranks.Rank, path: str, calls: str) -> Any:
    return tune_with(at, path, calls, {}, fresh=True)


@pytest.mark.parametrize("fault", ["error", "one rank", "impossible"])
def test_a_step_that_fails_leaves_its_block_and_the_run_goes_on(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "m.yaml"
    before = Memory(5e9, 5e9, SOURCE)
    save(Machine("m", "cpu", 2, memory=before), path)
    for outcome, _ in ranks.run(2, tune_with, str(path), str(tmp_path), {"memory": fault}):
        assert list(outcome.failures) == ["memory"]
        assert outcome.done == [name for name in BLOCKS if name != "memory"]
    assert load(path).memory == before
    (outcome, _), _ = ranks.run(2, tune_with, str(path), str(tmp_path), {})
    assert outcome.done == ["memory"] and load(path).memory == BLOCKS["memory"]


def tune_and_die(at: ranks.Rank, path: str, calls: str, where: str) -> None:
    """A run whose rank 0 is killed while it saves the block ``copies``: before the new file takes
    the place of the old one, or between the file and the journal."""
    if at.rank == 0:
        replace_file = os.replace

        def saved() -> str:
            return Path(path).read_text() if Path(path).exists() else ""

        def die(source: Any, target: Any) -> None:
            journalled = Path(target).suffix == ".json"
            copied = Path(target).exists() and "copies:" in Path(source).read_text()
            if where == "file" and copied and not journalled:
                os.kill(os.getpid(), signal.SIGKILL)
            if where == "journal" and journalled and "copies:" in saved():
                os.kill(os.getpid(), signal.SIGKILL)
            replace_file(source, target)

        os.replace = die
    tune_with(at, path, calls, {})


@pytest.mark.parametrize(("where", "blocks"), [("file", ["gemm"]), ("journal", ["gemm", "copies"])])
def test_killed_while_saving_nothing_is_lost(tmp_path: Path, where: str, blocks: list[str]) -> None:
    path = tmp_path / "m.yaml"
    ended = ranks.run(
        2, tune_and_die, str(path), str(tmp_path), where, fresh=True, catch=True, lost=(1,)
    )
    assert isinstance(ended[0], ranks.Died) and ended[0].exitcode == -signal.SIGKILL, ended
    found = load(path)
    assert [block for block in BLOCKS if getattr(found, block)] == blocks
    (outcome, _), _ = ranks.run(2, tune_with, str(path), str(tmp_path), {})
    assert outcome.earlier == ("gemm",)
    assert {block: getattr(load(path), block) for block in BLOCKS} == BLOCKS


def tune_on_full_disk(at: ranks.Rank, path: str, calls: str) -> Any:
    """A run whose disk is full from the second block on."""
    save_file = tuning.save

    def full(machine: Machine, where: Path) -> None:
        if machine.copies is not None:
            raise ConfigError(str(where), "file", "cannot be written: No space left on device")
        save_file(machine, where)

    tuning.save = full
    try:
        return tune_with(at, path, calls, {})[0]
    finally:
        tuning.save = save_file


def test_a_full_disk_ends_the_run_with_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    for outcome in ranks.run(2, tune_on_full_disk, str(path), str(tmp_path)):
        assert "No space left" in outcome.error and outcome.done == ["gemm"]
    assert load(path).gemm == BLOCKS["gemm"] and load(path).copies is None


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "m.yaml"
    for outcome, _ in ranks.run(2, tune_with, str(path), str(tmp_path), {}):
        assert "cannot be written" in outcome.error and "--out" in outcome.error
        assert outcome.done == []
    assert not (tmp_path / "0").exists()


# Runs that measure.


def tune_quick(at: ranks.Rank, path: str) -> tuning.Outcome:
    return tuning.tune(tuning.TuneSettings(Path(path), at.device.type, quick=True, command="tests"))


def rows_by(at: ranks.Rank, mover: str) -> list[tuple[float, int, bool]]:
    watch = series.Stopwatch(torch.distributed.group.WORLD, at.device)
    asked = effort.EFFORTS["cpu", True]
    site = Site(watch, asked, None, lambda kind, note: SOURCE)  # type: ignore[arg-type]
    found = communication.copy_times(site, asked.sizes[:2], asked.pieces, "kernel_copies", mover)
    return [(one.nbytes, one.count, one.seconds > 0) for one in found]


def test_rows_of_copies_count_what_is_enqueued_at_once() -> None:
    small, large = effort.EFFORTS["cpu", True].sizes[:2]
    dma = [(size, 2 * n, True) for size in (small, large) for n in (1, 4)]
    assert ranks.run(3, rows_by, "dma")[0] == dma
    assert ranks.run(3, rows_by, "kernel")[0] == [(2 * size, n // 2, ok) for size, n, ok in dma]


def curve_of(at: ranks.Rank, step: str) -> list[float]:
    watch = series.Stopwatch(torch.distributed.group.WORLD, at.device)
    asked = replace(effort.EFFORTS["cpu", True], exchanges=(4096, 12288, 65536))
    site = Site(watch, asked, None, lambda kind, note: SOURCE)  # type: ignore[arg-type]
    return [size for size, _ in communication.collective(site, step).curve]


def in_front(at: ranks.Rank, latency: float, rate: float) -> float:
    """What is found where calls take as long as their products, the copies and so many seconds."""
    asked = replace(effort.EFFORTS["cpu", True], sizes=(4096, 1 << 20, 8 << 20))
    watch = series.Stopwatch(torch.distributed.group.WORLD, at.device)
    site = Site(watch, asked, None, lambda kind, note: SOURCE)  # type: ignore[arg-type]
    multiplied, mm = [], torch.mm

    def counted(a: torch.Tensor, b: torch.Tensor, **settings: Any) -> torch.Tensor:
        multiplied.append(a.shape[0])
        return mm(a, b, **settings)

    torch.mm = counted

    def timed(step: str, calls: dict[str, Any], **settings: Any) -> dict[str, np.ndarray]:
        assert step == "kernel_copies" and 0 < settings["share"] < 1
        found = {}
        for number, (name, call) in enumerate(calls.items()):
            size, what = name.split(" ", 1)
            assert int(size) < 8 << 20, "times of large ones vary by more than what is asked"
            product, rows = number // 3 + 1.0, at.world * (int(size) // 2048)
            seconds = {
                "in front": 0.5 + product + latency + (at.world - 1) * int(size) / rate,
                "1": 0.5 + product,  # with what every row takes once
                "2": 0.5 + 2 * product,
            }[what]
            multiplied.clear()
            result = call()
            if what == "in front":
                assert result.shape == (rows, communication.IN_FRONT_COLUMNS)
            else:
                assert multiplied == int(what) * [rows]
            found[name] = np.array((seconds, seconds, 10 * seconds))
        return found

    site.time = timed  # type: ignore[method-assign]
    return communication.in_front(site, Copies(1, 9.0, 9.0, ((1.0, rate),), SOURCE))


def test_copies_are_timed_in_front_of_products() -> None:
    assert ranks.run(3, in_front, 3.0, 1e9)[0] == pytest.approx(3.5)


def test_collectives_are_measured_at_sizes_of_their_own() -> None:
    assert set(effort.GPU.sizes) < set(effort.GPU.exchanges)
    for step in ("all_gather", "all_to_all"):
        assert ranks.run(2, curve_of, step)[0] == [4096.0, 12288.0, 65536.0]


def check_file(at: ranks.Rank, machine: Machine) -> list[check.Point]:
    return check.check(machine, "cpu")


def test_a_machine_is_measured_and_the_figures_hold(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    outcome, other = ranks.run(2, tune_quick, str(path))
    assert not outcome.failures and not outcome.error, outcome
    assert outcome.machine == other.machine
    machine = load(path)
    assert machine == outcome.machine
    # On a CPU both movers are the same, a product whose rows wait is several of the library, and
    # float8 is slow.
    none = "kernel_copies", "tiled", "fp8_tensor", "fp8_row", "fp8_block", "network"
    assert not any(getattr(machine, step) for step in none)
    for step in tuning.MEASURES:
        if step in none:
            continue
        source = getattr(machine, step).provenance
        assert source.command == "tests" and source.torch == torch.__version__
        assert source.date and source.commit and source.source in ("measured", "fitted")
    points = ranks.run(2, check_file, machine)[0]
    assert {p.block for p in points} == {
        "gemm", "experts", "attention", "copies", "all_gather", "reduce_scatter", "all_to_all",
        "all_reduce", "memory", "call",
    }  # fmt: skip
    assert sum(p.what.endswith(" in a row") for p in points) == 1
    assert " rows of products of up to " in machine.gemm.provenance.note
    generous = 30.0  # the machine is shared with whatever else runs on it
    assert all(point.holds(generous) for point in points), check.report(points, generous)
    slow = replace(machine.gemm, peak=machine.gemm.peak / 1e4, start=1.0)
    falsified = Machine("m", "cpu", 2, gemm=slow, memory=machine.memory)
    points = ranks.run(2, check_file, falsified)[0]
    off = {point.block for point in points if not point.holds(generous)}
    assert off == {"gemm"}
    assert "ficco tune --only gemm" in check.report(points, generous)


def measure_scaled(at: ranks.Rank) -> tuple[dict[str, Gemm], list[check.Point]]:
    """Blocks of products of float8 operands, from few of them; and these, measured again."""
    quick = effort.EFFORTS["cpu", True]
    shapes = tuple(
        effort.Shape(m, 128, k, wide=wide)
        for m, k, wide in ((16, 128, False), (64, 256, False), (64, 256, True), (18, 40, False))
    )
    seconds = {**quick.seconds, **dict.fromkeys(SCALED_PRODUCTS.values(), 0.1)}
    little = replace(quick, gemms=shapes, seconds=seconds, reference=shapes[0])
    watch = Stopwatch(dist.group.WORLD, at.device)
    machine = Machine("m", "cpu", at.world)
    site = Site(watch, little, machine, lambda kind, note: Provenance(kind, note=note))
    blocks = {one: products.scaled(site, one) for one in SCALED_PRODUCTS}
    site.machine = replace(machine, **{SCALED_PRODUCTS[one]: blocks[one] for one in blocks})
    points = list(check._scaled(site))
    watch.close()
    return blocks, points  # type: ignore[return-value]


def test_products_by_recipe_are_measured() -> None:
    blocks, points = ranks.run(1, measure_scaled)[0]
    assert {point.block for point in points} == set(SCALED_PRODUCTS.values())
    assert all(point.holds(30.0) for point in points), check.report(points, 30.0)
    slow = [replace(one, stored=1e4 * one.stored) for one in points]
    assert "ficco tune --only fp8_tensor fp8_row fp8_block" in check.report(slow, 30.0)
    for recipe, block in blocks.items():
        assert block.shares == ((1, 1.0),) and block.seconds(64, 128, 256, itemsize=1) > 0
        assert block.provenance.note.startswith(f"3 products of fp8-{recipe}, errors")
        machine = Machine("m", "cpu", 2, gemm=BLOCKS["gemm"], **{SCALED_PRODUCTS[recipe]: block})
        assert loads(dumps(machine)) == machine


def tune_scaled(at: ranks.Rank, path: str) -> Any:
    problem = problem_of_sizes("all_gather_matmul", 64, 32, 48, "fp8-row", at.world)
    return tune_shapes(at, path, (problem,)), problem


def test_scaled_problems_become_tuned_entries(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    outcome, problem = ranks.run(2, tune_scaled, str(path))[0]
    assert not outcome.failures and not outcome.error, outcome
    machine = load(path)
    assert [entry.dtype for entry in machine.tuned] == ["fp8-row"]
    assert decide(problem, machine=machine, mode="idle").source == "tuned"
    for other in ("fp8-tensor", "bfloat16"):  # an entry is of its recipe
        asked = problem_of_sizes("all_gather_matmul", 64, 32, 48, other, 2)
        assert decide(asked, machine=machine, mode="idle").source != "tuned"


@pytest.mark.multigpu
def test_gpus_are_measured(tmp_path: Path) -> None:
    ranks.need_own_gpus(2)
    path = tmp_path / "m.yaml"
    outcome = ranks.run(2, tune_quick, str(path), device="cuda", timeout=240)[0]
    assert not outcome.failures and not outcome.error, outcome
    machine = load(path)
    assert machine.accelerator == torch.cuda.get_device_name()
    assert machine.gemm.units > 1 and machine.contention.gemm_under_copies < 2


def test_on_the_command_line_a_falsified_file_does_not_hold(tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "new" / "m.yaml"
    base = ("tune", "--ranks", 2, "--device", "cpu", "--quick", "--out", path)
    assert cli(*base, "--only", "memory") == 0
    said = capfd.readouterr().err
    assert f"wrote {path}" in said and said.endswith(f"use it with FICCO_MACHINE={path}\n")
    assert cli(*base, "--check", "--tolerance", 30) == 0
    assert "all 1 points hold" in capfd.readouterr().out
    found = load(path)
    save(replace(found, memory=replace(found.memory, bandwidth=1e4)), path)
    assert cli(*base, "--check", "--tolerance", 30) == 1
    said = capfd.readouterr().out
    assert "1 of 1 points are off" in said
    again = f"ficco tune --ranks 2 --device cpu --out {path} --only memory"
    assert said.endswith(f"measure again: {again}\n")


@pytest.mark.parametrize("crowded", [True, False])
def test_copies_are_checked_by_what_their_block_holds(
    crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On crowded cores that is the bytes' time alone; what a call takes besides is in the host."""
    call, rate = 500e-6, 3e9
    latency = 0.0 if crowded else call
    block = Copies(1, latency, 0.0, ((16384.0, rate), (1048576.0, rate)), TRUTH.provenance)

    def times(site: Any, sizes: Any, pieces: Any) -> list[fits.CopyTime]:
        return [
            fits.CopyTime(size, 3 * count, call + 3 * count * size / rate)
            for size in sizes
            for count in pieces
        ]

    monkeypatch.setattr(check.communication, "copy_times", times)
    quick = effort.EFFORTS["cpu", True]
    machine = Machine("m", "cpu", 4, copies=block)
    site: Any = SimpleNamespace(effort=quick, machine=machine, crowded=crowded, world=4)
    points = list(check._copies(site))
    assert len(points) == 2
    assert all(point.ratio == pytest.approx(1.0, rel=1e-3) for point in points), points


def test_a_point_holds_within_the_tolerance_on_either_side() -> None:
    assert check.Point("b", "x", 1.0, 1.25).holds(0.25)
    assert check.Point("b", "x", 1.25, 1.0).holds(0.25)
    assert not check.Point("b", "x", 1.0, 1.26).holds(0.25)
    assert not check.Point("b", "x", 1.26, 1.0).holds(0.25)
    assert not check.Point("b", "x", 0.0, 1.0).holds(0.25)


# Shapes.


def call_and_log(at: ranks.Rank, path: str) -> None:
    problem_log._noted.clear()
    with ficco.options(log_problems=path):
        for n, schedule in (
            (8, "serial"),
            (8, "serial"),
            (8, "growing"),
            (16, "auto"),
            (0, "serial"),
        ):
            ficco.all_gather_matmul(torch.ones(4, 8), torch.ones(8, n), schedule=schedule)
    ficco.close()


def told(at: ranks.Rank, how: str) -> tuple[list[str], list[str]]:
    """The lines of a log, and warnings, of a step that is made twice."""
    problem_log._said.clear()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger, level = logging.getLogger("ficco"), logging.getLogger("ficco").level
    logger.addHandler(handler)
    group = dist.new_group(list(range(at.world)))
    a, b = torch.ones(4, 8, requires_grad=True), torch.ones(8, 16)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if how == "level":
            logger.setLevel(logging.INFO)
        if how == "refused":
            patch.setattr(
                CpuEngine,
                "refuses",
                lambda _, problem, one: "" if one.mover == "collective" else "there is none",
            )
        with ficco.options(log=how in ("option", "refused")):
            for _ in range(2):
                ficco.all_gather_matmul(a, b, group=group).sum().backward()
    logger.removeHandler(handler)
    logger.setLevel(level)
    ficco.close(group)
    dist.destroy_process_group(group)
    return lines, [str(one.message) for one in seen]


@pytest.mark.parametrize("how", ["off", "option", "level"])
def test_a_run_says_once_what_each_problem_takes(how: str) -> None:
    (lines, warned), *others = ranks.run(2, told, how)
    assert others == [([], [])] and not warned
    if how == "off":
        assert lines == []
        return
    first, second = lines
    problem = Problem("all_gather_matmul", (4, 4), 16, 8, "float32")
    taken = re.fullmatch(r"(.*): (\S+) \((\w+): .*\)", first)
    assert taken and taken[1] == str(problem) and Schedule.parse(taken[2])
    assert taken[3] == "fallback" and "`ficco tune` measures this machine" in first
    assert ", for the gradient of a_shard of all_gather_matmul: " in second


def test_a_call_that_cannot_have_its_schedule_says_so_once() -> None:
    (lines, warned), other = ranks.run(2, told, "refused")
    assert other == ([], [])
    for line in (*lines, *warned):
        assert "serial:collective in place of " in line
    assert len(warned) == len(set(warned)) and all("there is none" in text for text in warned)
    assert warned[0].startswith("schedule='auto' takes serial:collective in place of ")


def test_what_is_noted_is_read(tmp_path: Path) -> None:
    log = tmp_path / "problems.jsonl"
    rows = ((1, 2), (3, 4))
    scaling = Scaling("tensor", "float8_e4m3fn")
    problems = [
        Problem("all_gather_matmul", (4, 5), 8, 16, "float32"),
        Problem.of_blocks("all_to_all_matmul", rows, 8, 16, "bfloat16"),
        Problem("all_gather_matmul", (16, 16), 16, 32, "float8_e4m3fn", scaling=scaling),
    ]
    for problem in (*problems, *problems):
        problem_log.note(str(log), problem, 0)
        problem_log.note(str(log), problem, 1)
    assert problem_log.read(log) == problem_log.read(log, 2) == problems
    assert problem_log.read(log, 4) == [] and len(log.read_text().splitlines()) == 3


def test_what_a_program_noted_is_explained(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "problems.jsonl"
    ranks.run(2, call_and_log, str(log))
    base = ("explain", "--from-log", log, "--machine", "h200-2")
    assert cli(*base) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("all_gather_matmul(m=8 (4 x 2 ranks), n=8, ")
    assert all(" on h200-2" in line for line in lines)
    assert cli(*base, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    taken = [line.split(": ")[1].split(" ")[0] for line in lines]
    assert taken == [one["schedule"] for one in found]
    without = "--m: required without --from-log"
    for wrong, why in ((("--m", 4), without), (("--world", 5), "got none")):
        assert cli(*base, *wrong) == 2
        assert why in capsys.readouterr().err


def tune_shapes(at: ranks.Rank, path: str, problems: tuple[Problem, ...]) -> tuning.Outcome:
    return tuning.tune(
        tuning.TuneSettings(Path(path), "cpu", quick=True, only=("shapes",), problems=problems)
    )


def test_logged_problems_become_tuned_entries(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "m.yaml"
    ranks.run(2, call_and_log, str(log))
    assert [json.loads(line)["n"] for line in log.read_text().splitlines()] == [8, 16, 0]
    problems = problem_log.read(log, 2)
    assert [(p.rows, p.n, p.k, p.dtype) for p in problems] == [
        ((4, 4), 8, 8, "float32"), ((4, 4), 16, 8, "float32")
    ]  # fmt: skip
    assert problem_log.read(log, 3) == []
    machine_file(path)
    outcome = ranks.run(2, tune_shapes, str(path), tuple(problems[:1]))[0]
    assert not outcome.failures, outcome.failures
    tuned = load(path).tuned
    assert [tuned_key(one) for one in tuned] == [tuned_key(problems[0])]
    for one in tuned:
        assert str(Schedule.parse(one.queued)) == one.queued == one.idle
        assert 0 < one.seconds[0] <= one.serial[0]
    assert load(path).gemm == BLOCKS["gemm"], "blocks that were not measured stay"


def call_and_log_all(at: ranks.Rank, path: str) -> None:
    problem_log._noted.clear()
    a, b = torch.ones(6, 8), torch.ones(8, 4)
    table = [[5, 1], [2, 4]]
    with ficco.options(log_problems=path):
        ficco.matmul_reduce_scatter(a, b, schedule="serial", rows=[1, 5])
        ficco.matmul_all_reduce(a, b, schedule="serial")
        ficco.all_to_all_matmul(a, b, schedule="serial", rows=table)
        ficco.matmul_all_to_all(a, b, schedule="serial", rows=table)
        mine = torch.ones((7, 5)[at.rank], 4)
        ficco.all_to_all_transposed_matmul(a, mine, schedule="serial", rows=table)
    ficco.close()


def test_logged_problems_of_every_operator_are_tuned_and_found_again(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "m.yaml"
    ranks.run(2, call_and_log_all, str(log))
    problems = problem_log.read(log, 2)
    table = ((5, 1), (2, 4))
    assert [(p.operator, p.rows, p.blocks) for p in problems] == [
        ("matmul_reduce_scatter", (1, 5), ()),
        ("matmul_all_reduce", (3, 3), ()),
        ("all_to_all_matmul", (7, 5), table),
        ("matmul_all_to_all", (6, 6), table),
        ("all_to_all_transposed_matmul", (7, 5), table),
    ]
    assert len({calls.name_of(p) for p in problems}) == 5
    machine_file(path)
    some = (problems[0], problems[2], problems[4])
    outcome = ranks.run(2, tune_shapes, str(path), some)[0]
    assert not outcome.failures, outcome.failures
    machine = load(path)
    assert [tuned_key(one) for one in machine.tuned] == [tuned_key(p) for p in some]
    for problem, one in zip(some, machine.tuned, strict=True):
        found = decide(problem, machine=machine, mode="idle", offers=("dma", "kernel"))
        assert (found.source, str(found.schedule)) == ("tuned", one.idle)
    # Rows that are sent to others are another problem, though each multiplies as many.
    other = Problem.of_blocks("all_to_all_matmul", [[6, 0], [1, 5]], 4, 8, "float32")
    assert other.rows == problems[2].rows
    assert decide(other, machine=machine, mode="idle").source == "model"


def test_operators_choose_their_collectives_and_shapes(tmp_path: Path) -> None:
    every = {"reduce_scatter", "all_to_all", "all_reduce"}
    for operators, measured in (
        ((), every),
        (("all_gather_matmul",), set()),
        (("matmul_reduce_scatter", "matmul_all_to_all"), {"reduce_scatter", "all_to_all"}),
    ):
        settings = tuning.TuneSettings(tmp_path / "m.yaml", "cpu", operators=operators)
        assert {*settings.steps} & every == measured
        assert {"gemm", "all_gather", "thresholds"} <= {*settings.steps}
    case = Case("x", 64, 16, 32, "float32")
    found = calls.from_cases([case], 2, "cpu", ("all_gather_matmul", "matmul_all_reduce"))
    assert [(p.operator, p.n, p.k) for p in found] == [
        ("all_gather_matmul", 16, 32),
        ("matmul_all_reduce", 32, 16),
    ]
    (alone,) = calls.from_cases([replace(case, operator="all_to_all_matmul")], 2, "cpu")
    assert alone.blocks == ((32, 32), (32, 32))


def test_the_fastest_of_each_mode_is_entered_and_replaces_the_older_entry() -> None:
    problem = Problem("all_gather_matmul", (4, 4), 8, 8, "float32")
    site = Site(None, effort.CPU, None, lambda kind, note: SOURCE)  # type: ignore
    times = {
        "queued": {"serial:collective": 5.0, "serial": 4.0, "growing": 2.0, "shrinking": 3.0},
        "idle": {"serial:collective": 5.0, "serial": 6.0, "growing": 8.0, "shrinking": 7.0},
    }
    found = calls.entry(problem, times, site)
    assert (found.queued, found.idle) == ("growing", "serial:collective")
    assert (found.seconds, found.serial) == ((2.0, 5.0), (4.0, 5.0))
    other = replace(found, n=9)
    machine = Machine("m", "cpu", 2, tuned=(replace(found, queued="serial"), other))
    assert calls.with_entry(machine, found).tuned == (other, found)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"operator": "x"}',
        '{"operator":"matmul_all_reduce","rows":[1],"n":"a","k":1,"dtype":"x"}',
        '{"operator":"gather","rows":[1],"n":1,"k":1,"dtype":"float32"}',
        '{"operator":"all_to_all_matmul","rows":[2,2],"n":1,"k":1,"dtype":"float32",'
        '"blocks":[[1,2],[1,1]]}',
    ],
)
def test_a_log_with_a_wrong_line_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    log = tmp_path / "log"
    good = '{"operator": "all_gather_matmul", "rows": [1, 1], "n": 1, "k": 1, "dtype": "float32"}'
    log.write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError, match="line 2: required a problem"):
        problem_log.read(log, 2)


@pytest.mark.parametrize("name", ["", "\ud800", "a\0b"], ids=["a folder", "no text", "a zero"])
def test_a_log_that_cannot_be_written_does_no_harm(tmp_path: Path, name: str) -> None:
    problem = Problem("all_gather_matmul", (1,), 1, 1, "float32")
    with pytest.warns(UserWarning, match="problems are not logged"):
        problem_log.note(f"{tmp_path}/{name}", problem, 0)
    problem_log.note(f"{tmp_path}/{name}", problem, 0)  # warned of once


def test_wrong_arguments_are_refused_before_ranks_start(tmp_path: Path, capsys: Any) -> None:
    base = ("tune", "--ranks", 2, "--device", "cpu", "--out", tmp_path / "m.yaml")
    assert cli(*base, "--only", "shapes") == 2
    assert cli(*base, "--from-log", tmp_path / "none") == 2
    assert cli(*base, "--check") == 2
    assert cli(*base, "--only", "tea") == 2
    (tmp_path / "log").write_text("")
    assert cli(*base, "--from-log", tmp_path / "log") == 2
    assert "required a problem of 2 ranks" in capsys.readouterr().err
    for options, said in (
        (("--ranks", 1), "--ranks: required at least 2"),
        (("--tolerance", 0.1), "--tolerance: required with --check"),
        (("--check", "--tolerance", -1), "above 0, got -1.0"),
        (("--check", "--only", "gemm"), "--check: required without --only"),
        (("--check", "--fresh"), "--check: required without --fresh"),
        (("--operator", "matmul"), "--operator"),
    ):
        assert cli(*base, *options) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "m.yaml").exists()
