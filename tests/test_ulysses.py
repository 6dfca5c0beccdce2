"""Attention by heads: plans, their proof, choice of a schedule, and layouts without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from edits import Edit, change, down, right
from hypothesis import given, settings
from hypothesis import strategies as st
from subjects import BY_HEADS as SCHEDULES
from test_attention import first, problem_of, refuted
from test_hosts import TOPOLOGIES

from ficco.heuristics import decide
from ficco.heuristics.families import BY_HEADS
from ficco.machine import find
from ficco.ops.ulysses import _by_heads
from ficco.plan import Applied, Step, Transfer, render
from ficco.problems.attention import AttentionProblem, HeadsProblem
from ficco.proof import check
from ficco.schedules import Schedule
from ficco.schedules.heads import heads_plans, pieces_of
from ficco.simulate import simulate

#: Whether the gradient is computed, and the operands saved for it.
KINDS = ((False, ""), (False, "heads"), (False, "shards"), (True, "heads"), (True, "shards"))


@given(data=st.data())
@settings(max_examples=90, deadline=None)
def test_plans_of_any_heads_are_proven(data: st.DataObject) -> None:
    hosts, local = data.draw(st.sampled_from((*((1, n) for n in range(1, 9)), *TOPOLOGIES)))
    world, each, rows = hosts * local, data.draw(st.integers(1, 6)), data.draw(st.integers(0, 5))
    heads, shared = world * each, data.draw(st.integers(1, 12))
    kv_heads = next(n for n in range(max(1, heads // shared), 0, -1) if heads % n == 0)
    masks = {}, {"causal": True}, {"causal": True, "window": 3}
    mask: dict[str, Any] = data.draw(st.sampled_from(masks))
    batch = data.draw(st.integers(1, 3))
    if data.draw(st.booleans()):  # packed
        batch, length = 1, world * rows
        mask = mask | ({"cu_seqlens": tuple(sorted({0, length // 3, length}))} if rows else {})
    attention = problem_of(world, rows, batch, heads, kv_heads, 4, hosts=hosts, **mask)
    problem = HeadsProblem(attention, *data.draw(st.sampled_from(KINDS)))
    schedule = Schedule.parse(data.draw(st.sampled_from(SCHEDULES)))
    all_plans = heads_plans(problem, schedule)
    check(all_plans)
    render(all_plans[0])
    for rank in range(world):
        pieces = pieces_of(problem, schedule, rank)
        runs = [run for piece in pieces for run in problem.alike(rank, *piece)]
        for spans in (pieces, runs):  # each head once, in order
            assert [head for span in spans for head in range(*span)] == list(range(each))
        for begin, end in runs:
            owners = [(rank * each + head) // problem.shared for head in range(begin, end)]
            assert len({owners.count(owner) for owner in owners}) == 1, "not one call of a library"


def applies(step: Step) -> bool:
    return isinstance(step.work, Applied) and step.work.first == 2


def move_of(buffer: str, op: str) -> Callable[[Step], bool]:
    """The move of an operation from a buffer."""
    return lambda step: (
        step.op == op and isinstance(step.work, Transfer) and step.work.src.buffer == buffer
    )


CALL, GRADIENT, KEEPS = (False, ""), (True, "heads"), (False, "heads")


#: Elements of a head on a rank: 4 positions of 16.
HEAD = 4 * 16


@pytest.mark.parametrize(
    ("kind", "edit", "words"),
    [
        # The function.
        (CALL, change(applies, inputs=first(row=lambda row: row - 1)), "regions that do not fit"),
        (CALL, change(applies, inputs=first(rank=0)), "at a peer"),
        (CALL, change(applies, inputs=lambda regions: regions[:2]), "not asked for"),
        (CALL, change(applies, inputs=lambda r: (r[0], r[2], r[1])), "wrong buffers"),
        (CALL, change(applies, function="softmax"), "not asked for"),
        (CALL, change(applies, outs=lambda r: (down(-1)(r[0]), *r[1:])), "other rows than it says"),
        # Returned results.
        (CALL, change(move_of("out heads", "place"), src=right(-HEAD)), "puts rows where others"),
        # Gradients, and operands saved for them.
        (GRADIENT, change(move_of("grad", "copy"), dst=down(1)), "another piece|nobody|gates"),
        (KEEPS, change(move_of("k heads", "place"), dst=down(1)), "elements of kept k are written"),
    ],
)
def test_wrong_plans_are_found(kind: tuple[bool, str], edit: Edit, words: str) -> None:
    problem = HeadsProblem(problem_of(3, 4, 1, 12, 6, 16), *kind)
    refuted(heads_plans(problem, Schedule.parse("uniform-fused-1d:pieces=2")), edit, words)


def test_auto_takes_a_schedule_that_gains_the_margin() -> None:
    known = find("h200-4", None)
    assert known is not None and known.gemm
    machine = replace(known, attention=None)
    attention = AttentionProblem(4, 4096, 1, 32, 8, 128, "bfloat16", causal=True)
    for kind in (CALL, GRADIENT):
        problem = HeadsProblem(attention, *kind)
        decision = decide(problem, machine=machine)
        seconds = {one.schedule: one.queued for one in decision.candidates}
        least = min(seconds, key=seconds.__getitem__)
        gains = seconds[least] * (1 + BY_HEADS.margin) < seconds["serial"]
        assert str(decision.schedule) == (least if gains else "serial")
        ordered = [seconds["serial"], *(seconds[f"uniform-fused-1d:pieces={n}"] for n in (2, 4, 8))]
        assert ordered == sorted(ordered) and ordered[0] < ordered[1]  # as on 2 H100
        # Unmeasured attention has an H100's rates; measured rates count, by the size of heads.
        all_plans, usual = heads_plans(problem, decision.schedule), machine.attends(machine.gemm)
        slower = replace(usual, shares=((64, 0.9), (128, 0.45)))
        unmeasured, same, later = (
            simulate(all_plans, replace(machine, attention=rates)).stop_s
            for rates in (machine.attention, usual, slower)
        )
        assert unmeasured == same < later
    assert str(decide(problem).schedule) == "serial"


def test_heads_in_the_layout_of_their_copies_are_not_copied() -> None:
    plain, interleaved = torch.zeros(1, 4, 8, 16), torch.zeros(1, 8, 4, 16).transpose(1, 2)
    several = torch.zeros(4, 8, 2, 16).permute(2, 0, 1, 3)
    part, sparse = torch.zeros(1, 9, 8, 16)[:, 2:6], torch.zeros(1, 4, 8, 32)[..., ::2]
    for heads in (plain, several, part, interleaved, sparse):
        copied = _by_heads(heads).data_ptr() != heads.data_ptr()
        assert copied == (heads is interleaved or heads is sparse)
