"""Attention by heads of a sequence that ranks share: plans and their proof, calls on CPUs,
gradients, errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Failure, Rank, caught, ranks, run
from subjects import BY_HEADS as SCHEDULES
from test_attention import (
    MOST_ERROR,
    NO_BOUNDS,
    AttentionCase,
    reference,
    root_mean_square,
)

import ficco
from ficco.compute.attention import Heads, Result, attention, backward
from ficco.heuristics import decide
from ficco.heuristics.families import BY_HEADS
from ficco.machine import find
from ficco.plan import Plan, Step, render
from ficco.problems.attention import AttentionProblem
from ficco.problems.heads import HeadsProblem
from ficco.proof import PlanError, check
from ficco.schedules import Schedule
from ficco.schedules.heads import heads_plans, pieces_of
from ficco.simulate import simulate
from ficco.simulate.timeline import work

#: What is computed, and what is kept for a gradient.
KINDS = ((False, ""), (False, "heads"), (False, "shards"), (True, "heads"), (True, "shards"))


def asked(case: AttentionCase) -> dict[str, Any]:
    return {name: value for name, value in case.asked.items() if name != "placement"}


def problem_of(case: AttentionCase, world: int, backward: bool, saves: str) -> HeadsProblem:
    return HeadsProblem(case.problem(world), backward, saves)


def cases(world: int, rows: int = 6) -> Iterator[AttentionCase]:
    """Heads that ranks share in all ways, with masks of all kinds."""
    length = world * rows
    bounds = tuple(sorted({0, 3, min(7, length), length // 2, length}))
    masks: tuple[dict[str, Any], ...] = (
        {},
        {"causal": True},
        {"causal": True, "window": 3},
        {"causal": True, "window": 0},
        {"cu_seqlens": bounds},
        {"cu_seqlens": bounds, "causal": True},
        {"cu_seqlens": bounds, "causal": True, "window": 2},
    )
    #: As many heads of keys as of queries, several, some or none for each rank, and one for parts
    #: of two ranks.
    shared = (1, 1), (2, 2), (4, 2), (6, 3), (6, 1), (3, 1), (4, 4)
    for mask, (heads, each) in zip(masks, shared, strict=True):
        heads *= world
        for kv_heads in {heads, heads // each, max(1, heads // (2 * each)), 1}:
            if heads % kv_heads == 0:
                yield AttentionCase(rows, heads, kv_heads, 8, **mask)


# Plans.


@pytest.mark.parametrize("schedule", SCHEDULES)
@ranks(1, 2, 3, 4, 8)
def test_plans_are_proven(world: int, schedule: str) -> None:
    for number, case in enumerate(cases(world)):
        problem = problem_of(case, world, *KINDS[number % len(KINDS)])
        made = heads_plans(problem, Schedule.parse(schedule))
        check(made)
        render(made[0])
    for kind in KINDS:
        empty = problem_of(AttentionCase(0, 2 * world, world), world, *kind)
        check(heads_plans(empty, Schedule.parse(schedule)))


@given(
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(0, 5),
    st.integers(1, 3),
    st.sampled_from(SCHEDULES),
    st.sampled_from(KINDS),
)
@settings(max_examples=80, deadline=None)
def test_plans_of_any_heads_are_proven(
    world: int,
    each: int,
    shared: int,
    rows: int,
    batch: int,
    schedule: str,
    kind: tuple[bool, str],
) -> None:
    heads = world * each
    kv_heads = next(n for n in range(max(1, heads // shared), 0, -1) if heads % n == 0)
    case = AttentionCase(rows, heads, kv_heads, 4, batch, "bfloat16")
    problem = problem_of(case, world, *kind)
    check(heads_plans(problem, Schedule.parse(schedule)))
    for rank in range(world):
        pieces = pieces_of(problem, Schedule.parse(schedule), rank)
        runs = [run for piece in pieces for run in problem.alike(rank, *piece)]
        for some in (pieces, runs):  # each head once, in order
            assert [one for span in some for one in range(*span)] == list(range(each))
        for first, last in runs:
            begin = rank * each
            owners = [(begin + head) // problem.shared for head in range(first, last)]
            assert len({owners.count(owner) for owner in owners}) == 1, "not one call of a library"


def test_one_call_for_each_group_of_heads() -> None:
    """Under any mask of one sequence, and for heads that ranks share as usual."""
    for kv_heads in (1, 4, 8, 32):
        case = AttentionCase(16, 32, kv_heads, causal=True, window=5)
        problem = problem_of(case, 4, False, "")
        assert len(problem.rectangles) == 1
        for pieces in (1, 2, 4):
            schedule = Schedule.parse(f"uniform-fused-1d:pieces={pieces}")
            for rank in range(4):
                for piece in pieces_of(problem, schedule, rank):
                    assert len(list(problem.alike(rank, *piece))) == 1


def test_what_travels() -> None:
    """A rank sends each of its rows once to the rank of its head, and heads of keys to each rank
    that needs them; and nothing but the heads of its own lies on a rank."""
    case = AttentionCase(16, 8, 2, dtype="bfloat16")
    for pieces in (1, 2):
        schedule = Schedule.parse(f"uniform-fused-1d:pieces={pieces}")
        for plan in heads_plans(problem_of(case, 4, False, ""), schedule):
            copies = [step for step in plan.steps if step.op == "copy"]
            moved = sum(work(plan, step)[1] for step in copies)
            row = 16 * 16 * 2
            # Two heads of queries, one of keys and of values to each peer, and two back.
            assert moved == 3 * (2 + 2 + 2) * row
            assert len(copies) <= 3 * (3 + 1) * pieces
            assert plan.shape("q heads") == plan.shape("out heads") == (2, 4 * 256)
            assert plan.shape("k heads") == (1, 4 * 256)


def plans(backward: bool = False, saves: str = "") -> list[Plan]:
    problem = problem_of(AttentionCase(4, 12, 6, dtype="bfloat16"), 3, backward, saves)
    return heads_plans(problem, Schedule.parse("uniform-fused-1d:pieces=2"))


def _wrong(change: Callable[[Step], Step | None], *kind: Any) -> list[Plan]:
    """The plans, with the first step of rank 1 changed that a change is for; None: it is not."""
    made = plans(*kind)
    check(made)
    steps = list(made[1].steps)
    for index, step in enumerate(steps):
        if (new := change(step)) is not None:
            steps[index] = new
            made[1] = replace(made[1], steps=tuple(steps))
            return made
    raise AssertionError("no step is changed")


def applied(**fields: Callable[[Any], Any]) -> Callable[[Step], Step | None]:
    """Changes the second function that is applied."""

    def change(step: Step) -> Step | None:
        one = step.applied
        if one is None or not one.first:
            return None
        return step._replace(
            applied=one._replace(**{name: to(getattr(one, name)) for name, to in fields.items()})
        )

    return change


def moved(buffer: str, end: str, op: str = "copy", **by: int) -> Callable[[Step], Step | None]:
    """Moves an end of the first transfer from a buffer."""

    def change(step: Step) -> Step | None:
        if step.op != op or step.transfer is None or step.transfer.src.buffer != buffer:
            return None
        region = getattr(step.transfer, end)
        region = region._replace(**{name: getattr(region, name) + n for name, n in by.items()})
        return step._replace(transfer=step.transfer._replace(**{end: region}))

    return change


def first(**by: int) -> Callable[[Any], Any]:
    """Moves the first of some regions."""

    def change(regions: Any) -> Any:
        one = regions[0]
        moved = {name: getattr(one, name) + n for name, n in by.items()}
        return (one._replace(**moved), *regions[1:])

    return change


ROWS = {"row": 1, "row_stop": 1}
COLS = {"col": -64, "col_stop": -64}  # what a rank has of a head: 4 positions of 16 elements


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # The function.
        (applied(inputs=first(row=-1, row_stop=-1)), "reads another piece"),
        (applied(inputs=first(row=-1)), "regions that do not fit"),
        (applied(inputs=first(col_stop=-1)), "regions that do not fit"),
        (applied(inputs=first(rank=1)), "at a peer"),
        (applied(inputs=lambda regions: regions[:2]), "not asked for"),
        (applied(inputs=lambda r: (r[0], r[2], r[1])), "wrong buffers"),
        (applied(function=lambda _: "softmax"), "not asked for"),
        (applied(outs=first(row=-1, row_stop=-1)), "other rows than it says"),
        (applied(first=lambda _: 1), "regions that do not fit"),
        (lambda s: s._replace(waits=()) if s.applied else None, "never waited for"),
        (lambda s: s._replace(waits=s.waits[:1]) if s.applied else None, "never waited for"),
        (lambda s: s._replace(op="matmul") if s.applied else None, "does not hold"),
        # What travels there.
        (moved("q", "src", **ROWS), "another block|another piece|other rows"),
        (moved("q", "dst", **ROWS), "another piece|nobody has written|gates other rows"),
        (moved("q", "dst", **COLS), "another piece|nobody has written"),
        (moved("k", "dst", rank=-2), "another block|another piece|nobody|may still"),
        (moved("v", "src", col=1), "different sizes"),
        (lambda s: s._replace(posts=()) if s.label.startswith("q>") else None, "never posted"),
        (lambda s: s._replace(waits=()) if s.label == "acquire" else None, "never waited for"),
        # What travels back.
        (moved("out heads", "src", **COLS), "puts rows|another piece|other|leaves"),
        (moved("out heads", "src", "place", **COLS), "puts rows where others belong"),
        (moved("out heads", "dst", **ROWS), "another piece|gates other rows|nobody"),
        (
            moved("returned out", "dst", "place", **ROWS),
            "written twice|elements|another piece|nobody",
        ),
        (
            lambda s: s._replace(after=()) if s.label.startswith("out heads>") else None,
            "may read before it is written",
        ),
        (
            lambda s: s._replace(waits=()) if s.label.startswith("returned") else None,
            "never waited for",
        ),
    ],
)
def test_wrong_plans_are_found(change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(_wrong(change))


def test_wrong_plans_of_gradients_are_found() -> None:
    for change, message in (
        (moved("grad", "dst", row=1, row_stop=1), "another piece|nobody|gates"),
        (moved("dk heads", "src", row=1, row_stop=1), "another block|another piece|may read"),
        (applied(outs=first(row=-1, row_stop=-1)), "other rows than it says"),
        (lambda s: s._replace(after=()) if s.label.startswith("dv heads>") else None, "may read"),
    ):
        with pytest.raises(PlanError, match=message):
            check(_wrong(change, True, "heads"))
    for change, message in (
        (moved("k heads", "dst", "place", row=1, row_stop=1), "elements of kept k are written"),
        (lambda s: s._replace(after=()) if "kept" in s.label else None, "may read before"),
    ):
        with pytest.raises(PlanError, match=message):
            check(_wrong(change, False, "heads"))


def test_other_schedules_are_refused() -> None:
    problem = problem_of(AttentionCase(8), 4, False, "")
    for name in ("growing", "hetero-fused-1d", "uniform-fused-2d", "serial:pull", "tiled", "ring"):
        with pytest.raises(ValueError, match="required serial or uniform-fused-1d"):
            heads_plans(problem, Schedule.parse(name))


def test_simulation_and_choice() -> None:
    machine = find("h200-4", None)
    assert machine is not None and machine.gemm
    asked = AttentionProblem(4, 4096, 1, 32, 8, 128, "bfloat16", causal=True)
    pairs = 16384 * 16385 // 2
    for kind, products in (((False, ""), 2), ((True, "heads"), 5)):
        problem = HeadsProblem(asked, *kind)
        chosen = decide(problem, machine=machine)
        seconds = {one.schedule: one.queued for one in chosen.candidates}
        least = min(seconds, key=seconds.__getitem__)
        gains = seconds[least] * (1 + BY_HEADS.margin) < seconds["serial"]
        assert str(chosen.schedule) == (least if gains else "serial")
        by_pieces = [seconds[f"uniform-fused-1d:pieces={n}"] for n in (2, 4, 8)]
        assert sorted(by_pieces) == by_pieces and seconds["serial"] < by_pieces[0]  # as on 2 H100
        made = heads_plans(problem, chosen.schedule)
        flops = [sum(work(plan, step)[0] for step in plan.steps) for plan in made]
        assert flops == [2.0 * products * pairs * 128 * 8] * 4
        for step in made[0].steps:
            if one := step.applied:
                (call,) = one.calls
                assert call.flops == one.flops and call.blocks == 128 * (one.last - one.first)
                assert call.longest == 2.0 * products * 128 * 16384 * 128  # the last queries
        assert flops[0] / machine.gemm.peak < simulate(made, machine).stop_s
        slow = replace(machine, topology=replace(machine.topology, bandwidth=1e9))
        assert BY_HEADS.seconds(problem, Schedule.parse("serial"), slow) > seconds["serial"]
        # Never measured, it is that of an H100; what was measured counts, by the size of heads.
        usual, stop_s = machine.attends(machine.gemm), simulate(made, machine).stop_s
        assert simulate(made, replace(machine, attention=usual)).stop_s == stop_s
        slower = replace(usual, shares=((64, 0.9), (128, 0.45)))
        calls = [one for step in made[0].steps if step.applied for one in step.applied.calls]
        later = sum(
            slower.times(machine.gemm, 2, *one)[1] - usual.times(machine.gemm, 2, *one)[1]
            for one in calls
        )
        assert simulate(made, replace(machine, attention=slower)).stop_s - stop_s > 0.9 * later > 0
    assert str(decide(problem).schedule) == "serial"


# Calls on CPUs.


def by_library(
    problem: HeadsProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's attention and log-sum-exp on everything."""
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    scale = problem.attention.scale or q.shape[-1] ** -0.5
    for one in problem.rectangles:
        rows = slice(one.q, one.q_stop)
        heads = Heads(q[:, :, rows], k[:, :, rows], v[:, :, rows])
        out[:, :, rows], lse[:, :, rows] = attention(heads, one, scale)
    return out, lse


def attended(
    at: Rank, case: AttentionCase, iteration: int, schedule: str = "auto", group: Any = None
) -> None:
    """One call: exactly what the library makes on everything on CPUs, whose attention of a head
    does not depend on other heads; and no further from float64 than that."""
    rank, world = (at.rank, at.world) if group is None else (group.rank(), group.size())
    whole = case.whole(world, iteration, at.device)
    mine = slice(rank * case.rows, (rank + 1) * case.rows)
    shards = [one[:, :, mine] for one in whole]
    if iteration % 2:  # heads beside each other, as projections make them
        shards = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in shards]
    out = ficco.ulysses_attention(*shards, **asked(case), schedule=schedule, group=group)
    assert out.shape == shards[0].shape and out.dtype == shards[0].dtype
    library = by_library(problem_of(case, world, False, ""), *whole)[0][:, :, mine]
    if at.device.type == "cpu":
        assert torch.equal(out, library), (rank, case, schedule)
    if case.rows:
        every = torch.arange(whole[0].shape[2])
        wanted = reference(*whole, case.mask(every, every), case.scale)[:, :, mine]
        error, least = (root_mean_square(one.double() - wanted) for one in (out, library))
        assert error <= MOST_ERROR * max(least, torch.finfo(out.dtype).eps / 4), (case, error)


def _calls(at: Rank) -> None:
    iteration = 0
    for case in cases(at.world):
        for dtype, schedule in zip(
            ("float32", "bfloat16", "float64", "float16"),
            random.Random(iteration).sample((*SCHEDULES, "auto"), 4),
            strict=True,
        ):
            attended(at, replace(case, dtype=dtype), iteration := iteration + 1, schedule)
    for case in (
        AttentionCase(7, 12, 4, 8, batch=3, causal=True),
        AttentionCase(8, 12, 1, 64, batch=2, causal=True, scale=0.5),
        AttentionCase(1, 12, 6, 1, causal=True),
        AttentionCase(0, 12, 6),
    ):
        for schedule in SCHEDULES:
            attended(at, case, iteration := iteration + 1, schedule)


@ranks(1, 2, 3, 4)
def test_what_the_library_makes_on_the_whole(world: int) -> None:
    run(world, _calls, timeout=280)


def _exact(at: Rank) -> None:
    """One key outweighs all others: its value, in any dtype, from its rank and of its head."""
    world, rows, iteration = at.world, 4, 0
    for schedule in (*SCHEDULES, "auto"):
        for dtype in (torch.float32, torch.bfloat16):
            for heads, kv_heads in ((12, 12), (12, 6), (12, 3), (12, 1)):
                iteration += 1
                length, mine = world * rows, slice(at.rank * rows, (at.rank + 1) * rows)
                codes = torch.eye(length, dtype=dtype).view(1, 1, length, length)
                where = (3 * torch.arange(length) + iteration) % length
                q = 512 * codes[:, :, where[mine]].expand(1, heads, -1, -1)
                k = codes[:, :, mine].expand(1, kv_heads, -1, -1)
                values = torch.arange(kv_heads)[:, None] * length + torch.arange(length)
                v = values[:, mine, None].expand(1, kv_heads, rows, length).to(dtype)
                out = ficco.ulysses_attention(q, k, v, schedule=schedule, scale=1.0)
                wanted = values.repeat_interleave(heads // kv_heads, 0)[:, where[mine], None]
                assert torch.equal(out, wanted.to(dtype).expand_as(out)), (schedule, heads)


@ranks(1, 2, 3, 4)
def test_exact_where_one_key_is_seen(world: int) -> None:
    run(world, _exact)


def _laid_out(at: Rank) -> list[bool]:
    """Heads whose elements are contiguous are not copied before they travel."""
    from ficco.ops.ulysses import _by_heads

    plain, beside = torch.zeros(1, 4, 8, 16), torch.zeros(1, 8, 4, 16).transpose(1, 2)
    several = torch.zeros(4, 8, 2, 16).permute(2, 0, 1, 3)
    part, sparse = torch.zeros(1, 9, 8, 16)[:, 2:6], torch.zeros(1, 4, 8, 32)[..., ::2]
    same = [_by_heads(one).data_ptr() == one.data_ptr() for one in (plain, several, part)]
    copied = [_by_heads(one).data_ptr() != one.data_ptr() for one in (beside, sparse)]
    return same + copied


def test_heads_laid_out_as_they_travel() -> None:
    assert all(map(all, run(1, _laid_out)))


def _capped(at: Rank) -> Any:
    case = AttentionCase(16, causal=True)
    with ficco.options(workspace_bytes=60_000):
        for iteration in range(4):
            attended(at, case, iteration)
    with ficco.options(workspace_bytes=6_000):
        return caught(lambda: attended(at, case, 1))


def test_memory_is_capped() -> None:
    for failure in run(4, _capped):
        assert isinstance(failure, Failure) and failure.type == "ValueError"
        assert "workspace_bytes: required at least" in failure.text


# Gradients.


def differentiated(
    at: Rank,
    case: AttentionCase,
    iteration: int,
    schedule: str = "auto",
    saves: bool = False,
) -> None:
    """Gradients of one call: on CPUs exactly what the library makes on everything, except for heads
    of keys that several calls have a part of; and close to float64."""
    rank, world = at.rank, at.world
    whole = case.whole(world, iteration, at.device)
    (grad,) = case.whole(world, iteration + 1, at.device)[:1]
    mine = slice(rank * case.rows, (rank + 1) * case.rows)
    shards = [one[:, :, mine].clone().requires_grad_() for one in whole]
    with ficco.options(save_gathered=saves):
        out = ficco.ulysses_attention(*shards, **asked(case), schedule=schedule)
    out.backward(grad[:, :, mine])
    problem = problem_of(case, world, True, "heads")
    result, lse = by_library(problem, *whole)
    library = [torch.empty_like(one) for one in whole]
    for one in problem.rectangles:
        rows = slice(one.q, one.q_stop)
        heads = Heads(*(each[:, :, rows] for each in whole))
        of = Result(*(each[:, :, rows] for each in (result, lse, grad)))
        made = backward(heads, of, one, case.scale or case.size**-0.5)
        for each, gradient in zip(library, made, strict=True):
            each[:, :, rows] = gradient
    wide = [one.double().requires_grad_() for one in whole]
    every = torch.arange(whole[0].shape[2])
    reference(*wide, case.mask(every, every), case.scale).backward(grad.double())
    divided = problem.heads % problem.shared > 0  # between ranks
    for name, shard, one, plain in zip("qkv", shards, library, wide, strict=True):
        assert shard.grad is not None and plain.grad is not None
        assert shard.grad.dtype == shard.dtype and shard.grad.shape == shard.shape
        if at.device.type == "cpu" and (name == "q" or not divided):
            assert torch.equal(shard.grad, one[:, :, mine]), (name, case, schedule)
        if case.rows:
            error, least = (
                root_mean_square((some.double() - plain.grad)[:, :, mine])
                for some in (one, torch.zeros_like(one))
            )
            found = root_mean_square(shard.grad.double() - plain.grad[:, :, mine])
            # Parts are rounded before they are summed in float32: each by half an ulp at most.
            limit = max(MOST_ERROR * error, torch.finfo(shard.dtype).eps * least)
            assert found <= limit, (name, rank, case, schedule, found, limit)


def _gradients(at: Rank) -> None:
    iteration = 0
    for case in cases(at.world):
        for dtype, schedule in zip(
            ("float32", "bfloat16", "float64"),
            random.Random(iteration).sample((*SCHEDULES, "auto"), 3),
            strict=True,
        ):
            iteration += 1
            differentiated(at, replace(case, dtype=dtype), iteration, schedule, iteration % 2 > 0)
    for case in (
        AttentionCase(7, 12, 4, 8, batch=3, causal=True),
        AttentionCase(8, 12, 1, 64, batch=2, causal=True, scale=0.1),
        AttentionCase(0, 12, 6),
    ):
        for schedule in SCHEDULES:
            for saves in (False, True):
                differentiated(at, case, iteration := iteration + 1, schedule, saves)


@ranks(1, 2, 3, 4)
def test_gradients(world: int) -> None:
    run(world, _gradients, timeout=280)


def _some(at: Rank) -> Any:
    case = AttentionCase(4)
    q, k, v = (one[:, :, :4].clone() for one in case.whole(at.world, 1, at.device))
    out = ficco.ulysses_attention(q, k.requires_grad_(), v)
    (dk,) = torch.autograd.grad(out.square().sum(), k, create_graph=True)
    assert q.grad is None and dk.shape == k.shape
    return caught(lambda: dk.sum().backward())


def test_second_derivatives_are_refused() -> None:
    for failure in run(2, _some):
        assert isinstance(failure, Failure) and "derivative" in failure.text, failure


# Errors.


def _refused(at: Rank) -> list[Any]:
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    odd = torch.zeros(1, 3, 8, 16)
    packed = [0, 4, 8 * at.world]
    found = []
    for operands, named in (
        ((q, k, None), {}),
        ((q, k[0], k), {}),
        ((q, k, k[:, :, :4]), {}),
        ((q, k[:, :, :4], k[:, :, :4]), {}),
        ((q, k.double(), k.double()), {}),
        ((q, odd, odd), {}),
        ((odd, odd, odd), {}),  # heads that two ranks cannot share
        ((q, k, k), {"window": 4}),
        ((q, k, k), {"window": -1, "causal": True}),
        ((q, k, k), {"cu_seqlens": [0, 4]}),
        ((q, k, k), {"cu_seqlens": [0.0, 8 * at.world]}),
        ((torch.cat([q, q]), torch.cat([k, k]), torch.cat([k, k])), {"cu_seqlens": packed}),
        ((q.int(), k.int(), k.int()), {}),
        ((q, k, k), {"schedule": "growing"}),
        ((q, k, k), {"schedule": 3}),
        ((q, k, k), {"scale": "1"}),
        ((q, k, k), {"causal": 1}),
        ((q, k, k), {"scale": True}),
        ((q, k, k), {"window": np.float32(4), "causal": True}),
        *(((q, k, k), {"cu_seqlens": wrong}) for wrong in NO_BOUNDS),
    ):
        found.append(caught(lambda o=operands, a=named: ficco.ulysses_attention(*o, **a)))
        attended(at, AttentionCase(4), len(found))  # the group goes on
    return found


def test_bad_input_says_what_to_do() -> None:
    one, other = run(2, _refused)
    assert len(one) == 19 + len(NO_BOUNDS)
    assert one[5].text.startswith("k: required a number of heads that divides the 4 of q")
    for failures in zip(one, other, strict=True):
        for failure in failures:
            assert isinstance(failure, Failure), failures
            assert failure.type in ("ValueError", "NotImplementedError", "InvalidArgument"), failure
            assert "required" in failure.text or "not served" in failure.text, failure.text
        assert failures[0].text == failures[1].text
    for failure in one[-len(NO_BOUNDS) :]:
        assert failure.text.startswith("cu_seqlens: required a list of whole numbers on the host")
    assert "share equally" in one[6].text


def _numbers(at: Rank) -> None:
    """Numbers of any type are those of Python."""
    q, k = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    plain = {"causal": True, "window": 3, "scale": 0.25, "cu_seqlens": [0, 5, 8 * at.world]}
    wanted = ficco.ulysses_attention(q, k, k, **plain)
    for changes in (
        {"window": np.int64(3), "scale": np.float32(0.25)},
        {"window": np.uint8(3), "scale": np.float16(0.25), "cu_seqlens": np.array([0, 5, 16])},
        {"scale": Fraction(1, 4), "cu_seqlens": torch.tensor([0, 5, 16], dtype=torch.int32)},
    ):
        assert torch.equal(ficco.ulysses_attention(q, k, k, **(plain | changes)), wanted)


def test_numbers_of_any_type() -> None:
    run(2, _numbers)


def _unlike(at: Rank) -> list[Any]:
    import torch.distributed as dist

    case, found = AttentionCase(8), []
    for mine in (
        replace(case, causal=at.rank == 0),
        replace(case, rows=8 + 2 * at.rank),
        replace(case, kv_heads=2 + 2 * at.rank),
        case,
    ):
        group = dist.new_group(list(range(at.world)))
        with ficco.options(timeout_s=10):
            q, k, v = (one[:, :, : mine.rows].clone() for one in mine.whole(at.world, 1, at.device))
            if mine is case:  # only one rank wants gradients
                q.requires_grad_(at.rank == 0)
            found.append(
                caught(
                    lambda t=(q, k, v), m=mine, g=group: ficco.ulysses_attention(
                        *t, **asked(m), group=g
                    )
                )
            )
        at.barrier()
        ficco.close(group)
        dist.destroy_process_group(group)
    return found


def test_ranks_that_differ_are_told() -> None:
    for found in run(2, _unlike):
        assert [one.type for one in found] == ["RankMismatch"] * 4, found
        assert "ulysses_attention" in found[0].text and "causal" in found[0].text
