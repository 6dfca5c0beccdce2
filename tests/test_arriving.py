"""``ficco.arriving``, rows for the caller's own kernels: plans, calls on CPUs, faults, examples."""

from __future__ import annotations

import os
import pydoc
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, equal, exact, gathered_a, shard_of
from edits import Edit, change, changed, edited, index, refused, without_first
from ranks import Died, Rank, caught, on_ranks, run
from test_nn import example
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import ficco
from ficco.machine import find
from ficco.plan import OPS, Plan, Step, in_parts, render
from ficco.proof import check
from ficco.schedules import Schedule
from ficco.schedules.tiled import Gathering, callers_step, gathering, pieces_of
from ficco.simulate import simulate

#: Arguments of ``ficco.arriving``.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"pieces": 1},
    {"pieces": 3, "order": "piece"},
    {"pieces": (3, 1), "pull": True},
)
SCHEDULES = ("tiled", "tiled:pieces=4", "tiled:pieces=3,order=piece", "tiled:pieces=2,pull")


@pytest.mark.parametrize(
    "rows", [(16,), (16, 16), (5, 0), (0, 0), (7, 3, 12), (0, 0, 9, 1), (3,) * 8], ids=str
)
def test_plans_are_proven(rows: tuple[int, ...]) -> None:
    for turn, schedule in enumerate(SCHEDULES * 2):
        problem = Gathering(rows, 8, "bfloat16", symmetric=turn < len(SCHEDULES))
        rank_plans = gathering(problem, Schedule.parse(schedule), range(len(rows)))
        check(rank_plans)
        for plan in rank_plans:
            words = [gate.word for gate in plan.steps[callers_step(plan)].gates]
            assert words == [words[0] + i for i in range(len(words))]
            others = sum(rows) - rows[plan.rank]
            assert sum(piece.last - piece.first for piece in pieces_of(plan)) == others


def plans() -> list[Plan]:
    problem = Gathering((16, 8, 8), 8, "float32")
    return gathering(problem, Schedule.parse("tiled:pieces=2"), range(3))


def calls(step: Step) -> bool:
    return step.op == "call"


def called_twice(steps: list[Step]) -> None:
    call = index(steps, calls)
    step = steps[call]
    after = tuple(i + (i >= call) for i in steps[-1].after)
    steps[call] = changed(step, products=step.products[1:])
    steps[-1] = steps[-1]._replace(after=after)
    steps.insert(call, changed(step, products=step.products[:1], gates=()))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (change(calls, gates=without_first), "never waited for|may read|is cleared"),
        (change(calls, products=without_first), "elements of out are written"),
        (change(calls, lane="copy0"), "caller's own lane"),
        (called_twice, "has 2 calls"),
    ],
)
def test_the_proof_refuses_wrong_calls(edit: Edit, words: str) -> None:
    refused(edited(plans(), 1, edit), words)


def test_tools_read_the_call_or_refuse_it() -> None:
    (plan, *_) = plans()
    assert "call" in OPS
    assert "caller 0:16 | " in render(plan)
    assert [step.op for step in in_parts(plan).steps].count("call") == 1 + 4
    with pytest.raises(NotImplementedError, match="step 'caller"):
        simulate(plans(), find("h200-4", None), "queued")


def gathered(at: Rank, case: Case, iteration: int, **arguments: Any) -> None:
    """A block iterates over all rows of A once, after each piece has arrived."""
    shard = shard_of(case, at.rank, iteration, at.device)
    if iteration % 2:  # rows that are not contiguous
        shard = torch.cat([shard, shard], 1)[:, : case.k]
    whole = gathered_a(case, iteration, at.device)
    rows = None if len(set(case.rows)) == 1 else list(case.rows)
    with ficco.arriving(shard, rows=rows, **arguments) as arriving:
        assert arriving.buffer.shape == whole.shape and arriving.buffer.dtype == whole.dtype
        assert arriving.buffer.is_contiguous() and arriving.words.dtype == torch.int32
        assert arriving.words.shape == (len(arriving.pieces),)
        result, counts = torch.full_like(whole, 99.0), torch.zeros(case.m, dtype=torch.int32)
        for first, last in arriving:
            result[first:last] = arriving.buffer[first:last]
            counts[first:last] += 1
        assert arriving.words.tolist() == [arriving.ARRIVED] * len(arriving.pieces)
    assert torch.equal(result, whole), f"rank {at.rank}, {case}, {arguments}"
    assert torch.equal(counts, torch.ones_like(counts))


def _all_rows(at: Rank) -> None:
    cases = (
        equal(at.world, 20, 24, 8),
        equal(at.world, 3, 5, 8, dtype="bfloat16"),
        Case(tuple(range(7, 7 + at.world)), 16, 8),
        Case((0,) * (at.world - 1) + (9,), 16, 8),
        equal(at.world, 0, 16, 8),
    )
    for turn, arguments in enumerate(WAYS):
        for iteration, case in enumerate(cases, start=5 * turn):
            gathered(at, case, iteration, **arguments)


def _between_other_calls(at: Rank) -> None:
    """Other calls may follow a block that has not waited for all words, or has raised."""
    case = equal(at.world, 12, 16, 8)
    other = dist.new_group(list(range(at.world)))
    for iteration in range(12):
        exact(at, case.on(schedule=("serial", "growing", "tiled")[iteration % 3]), 2 * iteration)
        shard = shard_of(case, at.rank, iteration, at.device)
        with ficco.arriving(shard, pull=iteration % 2 == 1) as rows:
            exact(at, case, 100 + iteration, other)  # during the block, in another group
            if iteration % 3:
                rows.wait(len(rows.pieces) - 1)
        if iteration % at.world == at.rank:
            error = GeneratorExit("mine") if iteration % 3 else KeyError("mine")
            with pytest.raises(type(error), match="mine"), ficco.arriving(shard):
                raise error
        else:
            gathered(at, case, iteration)
    ficco.close(other)


def _in_place(at: Rank) -> None:
    case, shard = equal(at.world, 8, 16, 8), ficco.empty((8, 16))
    for iteration in range(6):
        at.barrier()  # peers have read the shard
        shard.copy_(shard_of(case, at.rank, iteration, at.device))
        at.barrier()
        with ficco.arriving(shard, pieces=2, pull=True) as rows:
            for index in range(len(rows.pieces)):
                rows.wait(index)
            assert torch.equal(rows.buffer, gathered_a(case, iteration, at.device))
    addresses = ficco.addresses(shard[2:, 1])
    assert addresses.dtype == torch.int64 and addresses.shape == (at.world,)
    assert addresses[at.rank] == shard.data_ptr() + 4 * (2 * 16 + 1)


@pytest.mark.parametrize(
    ("world", "blocks"),
    [(1, _all_rows), (2, _all_rows), (4, _all_rows), (3, _between_other_calls), (2, _in_place)],
)
def test_all_rows_arrive(world: int, blocks: Callable[[Rank], None]) -> None:
    run(world, blocks)


def _refuses(words: str, call: Callable[[], Any]) -> None:
    failure = caught(call)
    assert f"{failure.type}: {failure.text}".startswith(words), failure


@on_ranks(2)
def test_wrong_use_is_refused_by_name(at: Rank) -> None:
    case = equal(at.world, 8, 16, 8)
    shard = shard_of(case, at.rank, 1, at.device)

    def block(a: Any = shard, **arguments: Any) -> None:
        with ficco.arriving(a, **arguments) as rows:
            rows.wait(len(rows.pieces))

    def traced() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            block()

    with ficco.arriving(shard) as rows:
        for name, call in (
            ("arriving", block),
            ("all_gather_matmul", lambda: exact(at, case, 2)),
            ("empty", lambda: ficco.empty((2, 2))),
            ("close", ficco.close),
        ):
            _refuses(f"FiccoError: {name}: a block of ficco.arriving", call)
        ficco.synchronize()
        rows.wait(0)
    assert "is over" in caught(lambda: rows.wait(0)).text
    for words, wrong, arguments in (
        ("ValueError: a_shard: required a torch.Tensor", "shard", {}),
        ("ValueError: a_shard: required a dense [..., m/W, k]", torch.ones(4), {}),
        ("NotImplementedError: dtype torch.int32", shard.int(), {}),
        ("ValueError: pieces:", shard, {"pieces": 0}),
        ("ValueError: pieces:", shard, {"pieces": 2.5}),
        ("ValueError: order:", shard, {"order": "rank"}),
        ("ValueError: pull:", shard, {"pull": 1}),
        ("ValueError: rows:", shard, {"rows": [5, 5]}),
        ("ValueError: rows:", shard, {"rows": [4]}),
        ("IndexError: piece:", shard, {}),
    ):
        _refuses(words, partial(block, wrong, **arguments))
    _refuses("NotImplementedError: ficco.arriving is not traced", traced)
    with forward_ad.dual_level():
        tangent = partial(block, forward_ad.make_dual(shard, shard))
        _refuses("NotImplementedError: derivatives in forward mode", tangent)
    with ficco.options(workspace_bytes=100):
        _refuses("ValueError: workspace_bytes: required at least", block)
    _refuses("ValueError: ", lambda: ficco.addresses(3))
    assert "required one from ficco.empty" in caught(lambda: ficco.addresses(shard)).text
    exact(at, case, 3)


def _blocks(at: Rank, turns: Sequence[int], timeout_s: float = 20.0, **arguments: Any) -> Any:
    """Return the results of blocks with a timeout, or the error."""
    case = equal(at.world, 8, 16, 8)
    with ficco.options(timeout_s=timeout_s):
        return caught(lambda: [gathered(at, case, turn, **arguments) for turn in turns])


def _serves_again(at: Rank) -> None:
    ficco.close()
    at.barrier()
    assert _blocks(at, [1, 2]) == [None] * 2
    at.barrier()


def _broken_off(at: Rank) -> None:
    """Errors on other ranks after a rank disagrees, is interrupted, is late, or ends."""
    first = at.rank == 0
    failure = _blocks(at, [1], pieces=2 + at.rank)
    assert failure.type == "RankMismatch", failure
    assert "tiled:pieces=2" in failure.text and "tiled:pieces=3" in failure.text
    _serves_again(at)

    if first:
        shard = shard_of(equal(at.world, 8, 16, 8), 0, 1, at.device)
        with pytest.raises(KeyboardInterrupt), ficco.arriving(shard):
            raise KeyboardInterrupt
    failure = _blocks(at, range(1, 4))
    assert failure.type == ("FiccoError" if first else "PeerFailed"), failure
    assert "KeyboardInterrupt" in failure.text
    _serves_again(at)

    if first:
        began = time.monotonic()
        failure = _blocks(at, [3], timeout_s=0.4)
        assert failure.type == "SignalTimeout" and time.monotonic() - began < 10, failure
        assert failure.fields["peer"] == 1 and "rank 0" in failure.text
        assert re.search("arriving.*step 'caller.*tiled:pieces=4", failure.text), failure.text
        assert _blocks(at, [4]).type == "SignalTimeout"
    else:
        time.sleep(1.5)
    _serves_again(at)

    if not first:
        os._exit(3)
    failure = _blocks(at, [1, 2], timeout_s=0.4)
    assert failure.type == "SignalTimeout" and failure.fields["peer"] == 1, failure


def test_errors_of_blocks_reach_other_ranks() -> None:
    _, dead = run(2, _broken_off, fresh=True, catch=True, lost=[1])
    assert isinstance(dead, Died) and dead.exitcode == 3


# Kernels, by Triton's interpreter.


def _kernels(at: Rank) -> float:
    """Kernels that wait, push and signal. The last one polls while its peer is late."""
    import arriving_kernels

    arriving_kernels.ring(at.rank, at.world, at.device)
    matmul, experts = example("arriving_matmul"), example("arriving_experts")
    assert matmul.run(19, 24, 40) == 1.0
    assert experts.run(9, 4, 24, 32) == 1.0
    assert experts.run(5, 13, 16, 16) == 1.0  # experts without tokens
    rows = [5 * rank + 1 for rank in range(at.world)]
    a = matmul.integers((sum(rows), 24), 7, at.device)
    b = matmul.integers((24, 20), at.rank, at.device)
    for arguments in ({}, {"pieces": 3, "order": "piece"}, {"pull": True}):
        c = matmul.gathered_matmul(a.split(rows)[at.rank], b, rows=rows, **arguments)
        assert torch.equal(c, a @ b), arguments

    case = equal(2, 32, 16, 8)
    for iteration in (3, 4):  # allocates both slots, so that entering waits for no peer
        gathered(at, case, iteration)
    at.barrier()
    time.sleep(0.3 * at.rank)
    out = torch.empty(32, 16)
    with ficco.arriving(shard_of(case, at.rank, 2, at.device)) as arriving:
        began = time.monotonic()
        first = min(piece.first for piece in arriving.pieces)
        assert [piece.first for piece in arriving.pieces] == list(range(first, first + 32, 8))
        arriving_kernels.gather[(4,)](arriving.words, arriving.buffer[first:], out, 8, 16)
        seconds = time.monotonic() - began
    assert torch.equal(out, gathered_a(case, 2, at.device)[first : first + 32])
    return seconds


def test_kernels_wait_push_and_signal() -> None:
    pytest.importorskip("triton")
    interpreted = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert run(2, _kernels, fresh=True, env=interpreted)[0] > 0.2


#: Instructions of a wait and of a signal, in order, by target.
TARGETS = {
    ("cuda", 90, 32): (["ld.global.sys.acquire"], ["st.global", "bar.sync", "sys.release"]),
    ("hip", "gfx942", 64): (
        ["buffer_inv sc0 sc1"],
        ["buffer_store", "s_waitcnt vmcnt(0)\nv_mov", "s_barrier", "buffer_wbl2 sc0 sc1", "swap"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=["sm_90", "gfx942"])
def test_kernels_compile_for_gpus(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait is an acquire load. A signal is stored after the stores of all threads."""
    compiler = pytest.importorskip("triton.compiler")
    names = "backends.compiler", "runtime.driver"
    backends, driver = (pytest.importorskip(f"triton.{name}") for name in names)
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
        compiled = compiler.compile(source, target=gpu)
        text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
        present, at = [], len(text)
        for part in reversed(wanted):  # each instruction before its successor
            at = text.rfind(part, 0, at)
            present.append(at >= 0)
        assert all(present), text


def test_only_device_functions_import_triton() -> None:
    package = Path(ficco.__file__).parent
    imports = re.compile(r"^\s*(import|from) triton", re.MULTILINE)
    importers = [path for path in package.rglob("*.py") if imports.search(path.read_text())]
    assert {path.relative_to(package).parts[0] for path in importers} == {"tile.py", "compute"}


def test_without_triton_functions_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ficco.tile", raising=False)
    monkeypatch.delitem(vars(ficco), "tile", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    advice = r"ficco\.tile needs Triton .*pip install triton"
    with pytest.raises(ImportError, match=advice):
        import_module("ficco.tile")
    with pytest.raises(AttributeError, match=advice):
        _ = ficco.tile
    assert not hasattr(ficco, "tile") and "all_gather_matmul" in pydoc.render_doc(ficco)
