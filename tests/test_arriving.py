"""Rows that arrive for kernels of the caller's own: plans, calls on CPUs, faults, examples."""

from __future__ import annotations

import ast
import os
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, equal, exact, gathered_a, shard_of
from ranks import Died, Failure, Rank, caught, ranks, run
from test_house import imports
from test_nn import example
from torch._subclasses.fake_tensor import FakeTensorMode

import ficco
from ficco.machine import find
from ficco.plan import OPS, Plan, Step, in_parts, render
from ficco.proof import PlanError, check
from ficco.schedules import Schedule
from ficco.schedules.arriving import Gathering, callers_step, gathering, pieces_of
from ficco.simulate import simulate

#: Arguments of a block.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"pieces": 1},
    {"pieces": 3, "order": "piece"},
    {"pieces": (3, 1), "pull": True},
)
SCHEDULES = ("tiled", "tiled:pieces=4", "tiled:pieces=3,order=piece", "tiled:pieces=2,pull")


def gathered(at: Rank, case: Case, iteration: int, group: Any = None, **ways: Any) -> None:
    """One block, which finds every row of A, each once, after it has waited for it."""
    rank = at.rank if group is None else group.rank()
    shard = shard_of(case, rank, iteration, at.device)
    if iteration % 2:  # rows with something between them
        shard = torch.cat([shard, shard], 1)[:, : case.k]
    whole = gathered_a(case, iteration, at.device)
    rows = None if len(set(case.rows)) == 1 else list(case.rows)
    with ficco.arriving(shard, rows=rows, group=group, **ways) as arriving:
        assert arriving.buffer.shape == whole.shape and arriving.buffer.dtype == whole.dtype
        assert arriving.buffer.is_contiguous() and arriving.words.dtype == torch.int32
        assert arriving.words.shape == (len(arriving.pieces),)
        found, seen = torch.full_like(whole, 99.0), torch.zeros(case.m, dtype=torch.int32)
        for first, last in arriving:
            found[first:last] = arriving.buffer[first:last]
            seen[first:last] += 1
        assert arriving.words.tolist() == [arriving.ARRIVED] * len(arriving.pieces)
    assert torch.equal(found, whole), f"rank {at.rank}, {case}, {ways}"
    assert torch.equal(seen, torch.ones_like(seen))


# Plans.


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "rows", [(16,), (16, 16), (5, 0), (0, 0), (7, 3, 12), (0, 0, 9, 1), (3,) * 8], ids=str
)
def test_plans_are_proven(rows: tuple[int, ...], schedule: str) -> None:
    for symmetric in (False, True):
        asked = Gathering(rows, 8, "bfloat16", symmetric)
        made = gathering(asked, Schedule.parse(schedule), range(len(rows)))
        check(made)
        for plan in made:
            step = plan.steps[callers_step(plan)]
            words = [gate.word for gate in step.gates]
            assert words == list(range(words[0], words[0] + len(words))) if words else True
            others = sum(rows) - rows[plan.rank]
            assert sum(piece.last - piece.first for piece in pieces_of(plan)) == others


def plans(schedule: str = "tiled:pieces=2") -> list[Plan]:
    return gathering(Gathering((16, 8, 8), 8, "float32"), Schedule.parse(schedule), range(3))


def _with(plan: Plan, step: Step) -> Plan:
    index = callers_step(plan)
    return replace(plan, steps=(*plan.steps[:index], step, *plan.steps[index + 1 :]))


def _first_gate_missing(step: Step) -> Step:
    return step._replace(gates=step.gates[1:])


def _gates_that_open_other_rows(step: Step) -> Step:
    one, two, *rest = step.gates
    rows = (
        one._replace(first=two.first, last=two.last),
        two._replace(first=one.first, last=one.last),
    )
    return step._replace(gates=(*rows, *rest))


def _rows_left_out(step: Step) -> Step:
    return step._replace(products=step.products[1:])


def _rows_twice(step: Step) -> Step:
    return step._replace(products=(*step.products, step.products[-1]))


def _no_rows(step: Step) -> Step:
    return step._replace(products=())


def _not_by_its_own_lane(step: Step) -> Step:
    return step._replace(lane="copy0")


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        (_first_gate_missing, "never waited for|may read|is cleared"),
        (_gates_that_open_other_rows, "shares its word|may read"),
        (_rows_left_out, "elements of out are written"),
        (_rows_twice, "is written twice"),
        (_no_rows, "0 of 32 elements of out are written"),
        (_not_by_its_own_lane, "caller's own lane"),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_check_finds_what_is_wrong_with_a_call(mutant: Any, words: str) -> None:
    made = plans()
    step = made[1].steps[callers_step(made[1])]
    with pytest.raises(PlanError, match=words):
        check([made[0], _with(made[1], mutant(step)), made[2]])


def test_check_wants_the_slot_kept_until_the_caller_is_done() -> None:
    made = plans()
    index = callers_step(made[0])
    retire = made[0].steps[-1]
    early = retire._replace(after=tuple(i for i in retire.after if i != index))
    with pytest.raises(PlanError):
        check([replace(made[0], steps=(*made[0].steps[:-1], early)), *made[1:]])


def test_check_wants_one_call() -> None:
    made = plans()
    step = made[0].steps[callers_step(made[0])]
    half = step._replace(products=step.products[:1], gates=())
    rest = step._replace(products=step.products[1:])
    index = callers_step(made[0])
    retire = made[0].steps[-1]
    after = tuple(i + (i >= index) for i in retire.after)
    steps = (*made[0].steps[:index], half, rest, retire._replace(after=after))
    with pytest.raises(PlanError, match="has 2 calls"):
        check([replace(made[0], steps=steps), *made[1:]])


def test_readers_know_the_call_or_refuse_it() -> None:
    (plan, *_) = plans()
    assert "call" in OPS
    assert "caller 0:16 | " in render(plan)
    ops = [step.op for step in in_parts(plan).steps]
    assert ops.count("call") == 1 + 4
    machine = find("h200-4", None)
    with pytest.raises(NotImplementedError, match="step 'caller"):
        simulate(plans(), machine, "queued")


# Calls on CPUs.


def _blocks(at: Rank) -> None:
    iteration = 0
    for ways in WAYS:
        for case in (
            equal(at.world, 20, 24, 8),
            equal(at.world, 3, 5, 8, dtype="bfloat16"),
            Case(tuple(range(7, 7 + at.world)), 16, 8),
            Case((0,) * (at.world - 1) + (9,), 16, 8),
            equal(at.world, 0, 16, 8),
        ):
            for _ in range(2):
                gathered(at, case, iteration := iteration + 1, **ways)


@ranks(1, 2, 3, 4)
def test_all_rows_arrive(world: int) -> None:
    run(world, _blocks)


def _between(at: Rank) -> None:
    case = equal(at.world, 12, 16, 8)
    halves = dist.new_group(list(range(at.world)))
    for iteration in range(12):
        exact(at, case.on(schedule=("serial", "growing", "tiled")[iteration % 3]), 2 * iteration)
        shard = shard_of(case, at.rank, iteration, at.device)
        with ficco.arriving(shard, pull=iteration % 2 == 1) as rows:
            exact(at, case, 100 + iteration, halves)  # beside it, in another group
            rows.wait(len(rows.pieces) - 1)
        gathered(at, case, iteration)
    ficco.close(halves)


@ranks(2, 4)
def test_blocks_between_other_calls(world: int) -> None:
    run(world, _between)


def _in_place(at: Rank) -> None:
    case = equal(at.world, 8, 16, 8)
    shard = ficco.empty((8, 16))
    for iteration in range(6):
        dist.barrier()  # peers have read the shard
        shard.copy_(shard_of(case, at.rank, iteration, at.device))
        dist.barrier()
        with ficco.arriving(shard, pieces=2, pull=True) as rows:
            for index in range(len(rows.pieces)):
                rows.wait(index)
            assert torch.equal(rows.buffer, gathered_a(case, iteration, at.device))


def test_symmetric_shards_are_pulled_in_place() -> None:
    run(2, _in_place)


def _unwaited(at: Rank) -> None:
    case = equal(at.world, 8, 16, 8)
    for iteration in range(20):
        with ficco.arriving(shard_of(case, at.rank, iteration, at.device)):
            pass
        exact(at, case, iteration)


def test_words_that_nobody_waited_for_are_at_rest() -> None:
    run(3, _unwaited)


# Faults.


def _exception_inside(at: Rank) -> None:
    case = equal(at.world, 8, 16, 8)
    for iteration in range(4):
        shard = shard_of(case, at.rank, iteration, at.device)
        if at.rank == 0:
            with pytest.raises(KeyError, match="mine"), ficco.arriving(shard):
                raise KeyError("mine")
        else:
            gathered(at, case, iteration)
        exact(at, case, iteration)


def test_an_exception_inside_leaves_the_group_usable() -> None:
    run(3, _exception_inside)


def _interrupted(at: Rank) -> Any:
    case = equal(at.world, 8, 16, 8)
    gathered(at, case, 1)
    shard = shard_of(case, at.rank, 1, at.device)

    def interrupted() -> None:
        with ficco.arriving(shard) as rows:
            if at.rank == 0:
                raise KeyboardInterrupt
            rows.wait(0)
        exact(at, case, 2)
        exact(at, case, 3)

    if at.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    return caught(lambda: gathered(at, case, 2) if at.rank == 0 else interrupted())


def test_an_interrupt_inside_breaks_the_call_off() -> None:
    mine, theirs = run(2, _interrupted, fresh=True)
    assert mine.type == "FiccoError" and "KeyboardInterrupt" in mine.text
    assert theirs.type == "PeerFailed" and "KeyboardInterrupt" in theirs.text


def _late(at: Rank) -> Any:
    case = equal(at.world, 8, 16, 8)
    gathered(at, case, 1)
    gathered(at, case, 2)
    if at.rank == 1:
        time.sleep(1.5)
        return None
    began = time.monotonic()
    with ficco.options(timeout_s=0.4):

        def waits() -> None:
            with ficco.arriving(shard_of(case, at.rank, 3, at.device)) as rows:
                rows.wait(0)
                raise AssertionError("nobody sent it")

        failure = caught(waits)
    return failure, time.monotonic() - began, caught(lambda: gathered(at, case, 4))


def test_rows_that_never_come_time_out() -> None:
    (failure, seconds, later), _ = run(2, _late, fresh=True)
    assert failure.type == "SignalTimeout" and seconds < 1.4, (failure, seconds)
    for words in ("arriving", "rank 0", "step 'caller", "tiled:pieces=4"):
        assert words in failure.text
    assert failure.fields["peer"] == 1 and later.type == "SignalTimeout"


def _dies(at: Rank) -> Any:
    case = equal(at.world, 8, 16, 8)
    gathered(at, case, 1)
    if at.rank == 1:
        os._exit(3)

    def both() -> None:
        for iteration in range(2):
            gathered(at, case, iteration)

    with ficco.options(timeout_s=0.4):
        return caught(both)


def test_a_dead_peer_times_out() -> None:
    failure, dead = run(2, _dies, fresh=True, catch=True, lost=[1])
    assert failure.type == "SignalTimeout" and failure.fields["peer"] == 1
    assert isinstance(dead, Died) and dead.exitcode == 3


def _differ(at: Rank) -> Any:
    shard = torch.ones(8, 16)
    gathered(at, equal(at.world, 8, 16, 8), 1)

    def differ() -> None:
        with ficco.arriving(shard, pieces=2 + at.rank) as rows:
            rows.wait(0)

    found = caught(differ)
    ficco.close()
    dist.barrier()
    gathered(at, equal(at.world, 8, 16, 8), 2)
    return found


def test_ranks_that_disagree_learn_it() -> None:
    for failure in run(2, _differ):
        assert failure.type == "RankMismatch"
        assert "tiled:pieces=2" in failure.text and "tiled:pieces=3" in failure.text


def _overlapping(at: Rank) -> list[Failure]:
    case = equal(at.world, 8, 16, 8)
    shard = shard_of(case, at.rank, 1, at.device)
    with ficco.arriving(shard) as rows:

        def nested() -> None:
            with ficco.arriving(shard):
                pass

        found = [
            caught(nested),
            caught(lambda: exact(at, case, 2)),
            caught(lambda: ficco.empty((2, 2))),
            caught(ficco.close),
        ]
        ficco.synchronize()
        rows.wait(0)
    found.append(caught(lambda: rows.wait(0)))
    exact(at, case, 3)
    return found


def test_overlapping_use_is_refused() -> None:
    for failures in run(2, _overlapping):
        assert [failure.type for failure in failures] == ["FiccoError"] * 5
        for name, failure in zip(
            ("arriving", "all_gather_matmul", "empty", "close"), failures, strict=False
        ):
            assert failure.text.startswith(f"{name}: a block of ficco.arriving"), failure.text
        assert "is over" in failures[-1].text


def _refused(at: Rank) -> list[Failure]:
    shard = torch.ones(4, 8)

    def block(a: Any = shard, **arguments: Any) -> None:
        with ficco.arriving(a, **arguments) as rows:
            rows.wait(len(rows.pieces))

    def watched() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            block()

    found = [
        caught(lambda: block("shard")),
        caught(lambda: block(torch.ones(4))),
        caught(lambda: block(torch.ones(4, 8, dtype=torch.int32))),
        caught(lambda: block(torch.ones(4, 8, requires_grad=True))),
        caught(lambda: block(pieces=0)),
        caught(lambda: block(pieces=2.5)),
        caught(lambda: block(order="rank")),
        caught(lambda: block(pull=1)),
        caught(lambda: block(rows=[5, 5])),
        caught(lambda: block(rows=[4])),
        caught(watched),
        caught(block),
    ]
    with ficco.options(workspace_bytes=100):
        found.append(caught(block))
    exact(at, equal(at.world, 8, 16, 8), 1)
    return found


def test_wrong_arguments_are_refused_by_name() -> None:
    words = (
        "ValueError: a_shard: required a torch.Tensor",
        "ValueError: a_shard: required a dense [..., m/W, k]",
        "NotImplementedError: dtype torch.int32",
        "NotImplementedError: a_shard: ficco.arriving has no gradient",
        "ValueError: pieces:",
        "ValueError: pieces:",
        "ValueError: order:",
        "ValueError: pull:",
        "ValueError: rows:",
        "ValueError: rows:",
        "NotImplementedError: ficco.arriving is not traced",
        "IndexError: piece:",
        "ValueError: workspace_bytes: required at least",
    )
    for failures in run(2, _refused):
        for failure, text in zip(failures, words, strict=True):
            assert f"{failure.type}: {failure.text}".startswith(text), failure.traceback


# In kernels, by Triton's interpreter.

INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def _kernels(at: Rank) -> None:
    import arriving_kernels

    arriving_kernels.ring(at.rank, at.world, at.device)
    matmul, experts = example("arriving_matmul"), example("arriving_experts")
    assert matmul.run(19, 24, 40) == 1.0
    assert experts.run(9, 4, 24, 32) == 1.0
    assert experts.run(5, 13, 16, 16) == 1.0  # experts without tokens
    rows = [5 * rank + 1 for rank in range(at.world)]
    a = matmul.integers((sum(rows), 24), 7, at.device)
    b = matmul.integers((24, 20), at.rank, at.device)
    shard = a.split(rows)[at.rank]
    for ways in ({}, {"pieces": 3, "order": "piece"}, {"pull": True}):
        c = matmul.gathered_matmul(shard, b, rows=rows, **ways)
        assert torch.equal(c, a @ b), ways


@ranks(1, 2, 4)
def test_kernels_wait_push_and_tell(world: int) -> None:
    pytest.importorskip("triton")
    run(world, _kernels, fresh=True, env=INTERPRETED)


def _polls(at: Rank) -> float:
    """The peer comes late, while the kernel polls."""
    import arriving_kernels

    case = equal(2, 32, 16, 8)
    for iteration in (3, 4):  # both slots are there, so that entering waits for nobody
        gathered(at, case, iteration)
    if at.rank == 1:
        time.sleep(0.3)
    shard = shard_of(case, at.rank, 2, at.device)
    out = torch.empty(32, 16)
    with ficco.arriving(shard) as rows:
        began = time.monotonic()
        first = min(piece.first for piece in rows.pieces)
        assert [piece.first for piece in rows.pieces] == list(range(first, first + 32, 8))
        arriving_kernels.gather[(4,)](rows.words, rows.buffer[first:], out, 8, 16)
        seconds = time.monotonic() - began
    assert torch.equal(out, gathered_a(case, 2, at.device)[first : first + 32])
    return seconds


def test_a_kernel_polls_words_that_others_write() -> None:
    pytest.importorskip("triton")
    assert run(2, _polls, fresh=True, env=INTERPRETED)[0] > 0.2


#: By target: what a wait is made of, and what telling is made of, in order.
TARGETS = {
    ("cuda", 90, 32): (["ld.global.sys.acquire"], ["st.global", "bar.sync", "sys.release"]),
    ("hip", "gfx942", 64): (
        ["buffer_inv sc0 sc1"],
        ["buffer_store", "s_waitcnt vmcnt(0)\nv_mov", "s_barrier", "buffer_wbl2 sc0 sc1", "swap"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=["sm_90", "gfx942"])
def test_kernels_compile_for_gpus(
    target: tuple[str, Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait is a load that acquires; a word is set after the stores of all threads."""
    compiler = pytest.importorskip("triton.compiler")
    backends, driver = (
        pytest.importorskip(f"triton.{name}") for name in ("backends.compiler", "runtime.driver")
    )
    import arriving_kernels

    gpu = backends.GPUTarget(*target)
    active = type("Active", (), {"get_current_target": staticmethod(lambda: gpu)})()
    monkeypatch.setattr(driver.driver, "_active", active)
    kernels = {
        arriving_kernels.receive: ("*i32", "*fp32", "*fp32"),
        arriving_kernels.send: ("*i64", "*i64", "i32", "*fp32"),
    }
    for (kernel, types), wanted in zip(kernels.items(), TARGETS[target], strict=True):
        signature = dict(zip(kernel.arg_names, (*types, "constexpr"), strict=True))
        source = compiler.ASTSource(kernel, signature, constexprs={(len(types),): 256})
        made = compiler.compile(source, target=gpu)
        text = made.asm.get("ptx") or made.asm["amdgcn"]
        found, at = [], len(text)
        for part in reversed(wanted):  # each before the next
            at = text.rfind(part, 0, at)
            found.append(at >= 0)
        assert all(found), text


def test_triton_is_imported_by_device_functions_alone() -> None:
    importers = {(one.unit, one.module.split(".")[0]) for one in imports()}
    assert {unit for unit, module in importers if module == "triton"} == {"tile", "compute"}
    late = [node for node in ast.walk(ast.parse(Path(ficco.__file__).read_text()))]
    top = [node for node in late if isinstance(node, ast.Import) and node.col_offset == 0]
    assert not any("ficco.tile" in alias.name for node in top for alias in node.names)


def test_without_triton_the_device_functions_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "ficco.tile", raising=False)
    monkeypatch.delitem(vars(ficco), "tile", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    advice = r"ficco\.tile needs Triton .*pip install triton"
    with pytest.raises(ImportError, match=advice):
        import_module("ficco.tile")
    with pytest.raises(AttributeError, match=advice):  # as help(ficco) and hasattr expect
        _ = ficco.tile


def _addresses(at: Rank) -> list[Failure]:
    found = [caught(lambda: ficco.addresses(torch.ones(3))), caught(lambda: ficco.addresses(3))]
    tensor = ficco.empty((4, 4))
    addresses = ficco.addresses(tensor[2:, 1])
    assert addresses.dtype == torch.int64 and addresses.shape == (at.world,)
    assert addresses[at.rank] == tensor.data_ptr() + 4 * (2 * 4 + 1)
    return found


def test_addresses_of_peers() -> None:
    for failures in run(2, _addresses):
        assert [failure.type for failure in failures] == ["ValueError"] * 2
        assert "required one from ficco.empty" in failures[0].text
