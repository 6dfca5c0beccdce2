"""FSDP2 with ``ficco.fsdp.use``: Plans, hooks, training, faults.

Weights, inputs and gradients of training are small whole numbers that depend on the step and the
rank, so that every order of sums has one right value and models stay bitwise equal.
"""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import hip_ranks
import pytest
import thread_driver
import torch
import torch.distributed as dist
from edits import Edit, change, everywhere, is_copy, move, refused, sums
from ranks import Body, Died, Failure, Rank, caught, gave_up, on_ranks, ranks, run, since
from subjects import integers
from test_hosts import host_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import ficco
from ficco import fsdp
from ficco.fsdp import GATHER, SUM, WeightProblem, weight_plans
from ficco.machine import find
from ficco.options import current
from ficco.plan import Transfer, render
from ficco.proof import check
from ficco.runtime.workspace import workspaces
from ficco.schedules import Schedule
from ficco.simulate import simulate
from ficco.tools.bench import fsdp as stacks
from ficco.tools.bench.cases import BenchSettings
from ficco.tools.bench.harness import bench

MACHINE = find("h200-4", None)
#: Mark of tests that need hooks of FSDP2, which older releases lack.
HOOKS = since("2.9", "has no hooks for the collectives of FSDP2")
#: Timeouts in seconds: of a stopped peer, and of a killed one, which is detected much earlier.
PATIENCE_S, LONG_S = 1.0, 20.0


def plans(operator: str, world: int, count: int = 1000, name: str = "serial:pieces=3") -> Any:
    return weight_plans(WeightProblem(operator, world, count, "bfloat16"), Schedule.parse(name))


@pytest.mark.parametrize("operator", [GATHER, SUM])
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_plans_are_proven(operator: str, world: int) -> None:
    for count in (1, 2, 1000):
        for name in ("serial", "serial:pieces=3", "serial:pieces=7,copy=2", "serial:copy=7"):
            check(plans(operator, world, count, name))


def test_plans_are_simulated_and_drawn() -> None:
    for operator in (GATHER, SUM):
        few, many = (plans(operator, 4, count) for count in (1 << 20, 1 << 24))
        assert 0 < simulate(few, MACHINE).stop_s < simulate(many, MACHINE).stop_s
        assert "copy" in render(few[0])


def test_proof_refuses_a_sum_without_its_factor() -> None:
    """Only a reduction multiplies: a result with a factor cannot be copied into place."""
    problem, schedule = WeightProblem(SUM, 2, 1000, "bfloat16", 0.5), Schedule.parse("serial")
    scaled = weight_plans(problem, schedule)
    check(scaled)
    assert str(problem) == "fsdp_reduce_scatter(1000 x 2 ranks, bfloat16, times 0.5)"
    plain = tuple(b._replace(factor=1.0) for b in scaled[0].buffers)
    words = "the operands and results are not those that are"
    refused([replace(plan, buffers=plain) for plan in scaled], words)
    staged = tuple(b._replace(factor=0.5) if b.memory == "slot" else b for b in scaled[0].buffers)
    buffers = [replace(plan, buffers=staged) for plan in scaled]
    refused(buffers, "there are no buffers such as staging")
    refused(everywhere(scaled, change(sums, work=_placed)), "leaves out the factor of a result")


def _placed(work: Any) -> Any:
    """Replace a sum by a copy of this rank's term."""
    own = next(i for i, part in enumerate(work.parts) if part.buffer == "grads")
    return Transfer(work.parts[own], work.out, work.terms[own])


def own_twice(parts: Any) -> Any:
    return tuple(part for part in parts if part.buffer == "grads") * 2


@pytest.mark.parametrize(
    ("operator", "edit", "why"),
    [
        (GATHER, change("arrived", lane="sync"), "a result that its rank does not wait for"),
        (GATHER, move(is_copy, "retire", "waits"), "result of a peer that may not have begun"),
        (SUM, change(is_copy, terms=lambda terms: 3 - terms), "for the term of another rank"),
        (SUM, change(sums, parts=own_twice), "takes an operand for the term of another rank"),
    ],
)
def test_proof_refuses_wrong_plans(operator: str, edit: Edit, why: str) -> None:
    check(plans(operator, 2))
    refused(everywhere(plans(operator, 2), edit), why)


class Group:
    """The fields of FSDP2's parameter group that hooks read."""

    def __init__(self, group: Any) -> None:
        self._all_gather_process_group = group


class Fallback:
    """PyTorch's collectives, with a count of their calls."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*size, **kwargs)

    def __call__(self, out: torch.Tensor, source: torch.Tensor, group: Any, *rest: Any) -> None:
        self.calls += 1
        if out.numel() > source.numel():
            dist.all_gather_into_tensor(out, source, group)


@contextmanager
def hooks(limit: int | None = None) -> Iterator[tuple[fsdp.Gathers, fsdp.GradientSums, Fallback]]:
    """Yield hooks of the group of all ranks, and the PyTorch collectives that they fall back to."""
    fallback, world = Fallback(), dist.group.WORLD
    rest = Group(world), fallback, current(), limit
    yield fsdp.Gathers(*rest), fsdp.GradientSums(*rest), fallback
    ficco.close(world)


def of(at: Rank) -> torch.device:
    """Return the device of a rank with its index."""
    return torch.empty(0, device=at.device).device


def gathered(at: Rank, gathers: Any, step: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Gather as FSDP2 does, from a slice of the result, and check the slices of all ranks."""
    whole = torch.cat([integers(9, step, rank, shape=(count,)) for rank in range(at.world)])
    whole = whole.abs().to(dtype) if not dtype.is_signed else whole.to(dtype)
    out = gathers.allocate((count * at.world,), dtype=dtype, device=of(at))
    own = out.narrow(0, count * at.rank, count)
    own.copy_(whole[count * at.rank :][:count])
    gathers(output_tensor=out, input_tensor=own, group=dist.group.WORLD)
    assert torch.equal(out.cpu(), whole), (step, count, dtype)
    return out


DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.int64, torch.complex128)


def all_gathers(at: Rank) -> None:
    with hooks() as (gathers, _, fallback):
        for step, dtype in enumerate(DTYPES):
            for count in (1, 5, 4096):
                gathered(at, gathers, step, count, dtype)
        with mock.patch.object(fsdp, "PIECE_BYTES", 1000):
            held = [gathered(at, gathers, step, 4097, torch.float32) for step in range(5)]
        assert len({tensor.data_ptr() for tensor in held}) == 5, "tensors in use share no buffer"
        places = {tensor.data_ptr() for tensor in held}
        del held
        again = [gathered(at, gathers, step, 4097, torch.float32).data_ptr() for step in range(9)]
        assert places.issuperset(again), "dropped tensors free their buffers"
        out = gathers.allocate((0,), dtype=torch.float32, device=of(at))
        assert not fallback.calls and not out.numel()
        with ficco.expect(overlapped=True):  # nothing to gather is nothing to hide
            gathers(out, out, dist.group.WORLD)
        # A slice outside of the result is copied into it.
        out = gathers.allocate((3 * at.world,), dtype=torch.float32, device=of(at))
        own = torch.full((3,), float(at.rank), device=at.device)
        gathers(out, own, dist.group.WORLD)
        assert out.view(at.world, 3).tolist() == [[float(rank)] * 3 for rank in range(at.world)]


def all_sums(at: Rank) -> None:
    ficco.close()  # the programs of earlier tests
    scaled = dist._make_nccl_premul_sum(torch.tensor(0.25))  # type: ignore[attr-defined]
    operations = dist.ReduceOp.SUM, dist.ReduceOp.AVG, scaled
    with hooks() as (_, sums, fallback), mock.patch.object(fsdp, "SUM_BYTES", 256):
        for step, op in enumerate(operations):
            dtypes = torch.bfloat16, torch.float16, torch.float32, torch.float64
            for dtype in dtypes if at.device.type == "cpu" else dtypes[:3]:
                for count, room in ((1, 64 << 20), (4097, 64 << 20), (4097, 1024)):
                    size = at.world, at.world, count
                    terms = integers(9, step, count, shape=size).to(dtype)
                    source = sums.allocate((at.world * count,), dtype=dtype, device=at.device)
                    source.copy_(terms[at.rank].flatten())
                    out = torch.full((count,), float("nan"), dtype=dtype, device=at.device)
                    with mock.patch.object(fsdp, "STAGING_BYTES", room):
                        sums(output_tensor=out, input_tensor=source, group=dist.group.WORLD, op=op)
                    total = terms.sum(0, dtype=torch.promote_types(dtype, torch.float32))
                    expected = (total[at.rank] * (1, 1 / at.world, 0.25)[step]).to(dtype)
                    assert torch.equal(out.cpu(), expected), (op, dtype, count, room)
                    assert torch.equal(source.cpu(), terms[at.rank].flatten())
        assert not fallback.calls
        kinds = [kind for w in workspaces(dist.group.WORLD) for kind in w.programs.values()]
        assert {kind.plan.problem.factor for kind in kinds} == {1, 1 / at.world, 0.25}


def sums_in_order(at: Rank) -> None:
    """Sums and means of bfloat16 are in float32, in rank order, rounded once, and repeatable."""
    with hooks() as (_, sums, _):
        torch.manual_seed(7)
        terms = torch.randn(at.world, at.world, 999).bfloat16()
        total = terms[0, at.rank].float()
        for rank in range(1, at.world):
            total = total + terms[rank, at.rank].float()
        for op, factor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 1 / at.world)) * 2:
            source, out = terms[at.rank].flatten().to(at.device), torch.empty(999).bfloat16()
            out = out.to(at.device)
            sums(out, source, dist.group.WORLD, op)
            assert torch.equal(out.cpu(), (total * factor).bfloat16()), op


def left(at: Rank) -> None:
    """Collectives without room, and reductions that are no sums, fall back and are counted."""
    ficco.counters(reset=True)
    with hooks(limit=4096) as (gathers, sums, fallback):
        first = gathered(at, gathers, 0, 512 // at.world, torch.float32)
        with ficco.expect(overlapped=True), pytest.raises(ficco.NotOverlapped, match="raise buffe"):
            gathered(at, gathers, 1, 4096, torch.float32)
        gathered(at, gathers, 1, 4096, torch.float32)
        assert fallback.calls == 1
        del first
        gathered(at, gathers, 2, 100 // at.world, torch.float32)
        assert fallback.calls == 1
        out = torch.empty(4, device=at.device)
        sums(out, torch.ones(4 * at.world, device=at.device), dist.group.WORLD, dist.ReduceOp.MAX)
        whole = torch.empty(4, dtype=torch.int64, device=at.device)
        sums(whole, whole.repeat(at.world), dist.group.WORLD, dist.ReduceOp.SUM)
        assert fallback.calls == 3
    counts = {name: count for (_, name), count in ficco.counters().items()}
    assert counts["all-gather"].left == 1 and counts["reduce-scatter"].left == 2
    assert counts[GATHER].calls == 2 and SUM not in counts


@HOOKS
@ranks(2, 3, 4)
@pytest.mark.parametrize("body", [all_gathers, all_sums, sums_in_order, left])
def test_hooks(world: int, body: Callable[[Rank], None]) -> None:
    run(world, body)


def _on_threads(at: Rank, body: Callable[[Rank], None]) -> None:
    """Run ``body`` on the double of a GPU that has ficco's kernels."""
    thread_driver.serve()
    with ficco.options(engine="threads", on_timeout="raise", timeout_s=20):
        body(at)


@HOOKS
@pytest.mark.slow
@pytest.mark.parametrize("body", [all_gathers, all_sums, sums_in_order])
def test_hooks_on_doubles_of_gpus(body: Callable[[Rank], None]) -> None:
    hip_ranks.run(2, body)
    run(3, _on_threads, body, fresh=True)


class Block(nn.Module):
    """Two layers of sizes that the number of ranks does not divide, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sharded(at: Rank, mode: str) -> Model:
    """Return a model under FSDP2, with the options of a mode."""
    model = Model().to(at.device)
    options: dict[str, Any] = {"mesh": init_device_mesh(at.device.type, (at.world,))}
    if mode == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if mode == "kept":
        options["reshard_after_forward"] = False
    if mode == "to two ranks":
        options["reshard_after_forward"] = 2
    if mode == "replicated":
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh(at.device.type, (2, at.world // 2), mesh_dim_names=names)
    for block in model.blocks:
        if mode == "compiled":
            block.compile(backend="eager")
        fully_shard(block, **options)
    fully_shard(model, **options)
    blocks: list[Any] = list(model.blocks)
    if mode == "prefetched":
        for first, second, third in zip(blocks, blocks[1:], blocks[2:], strict=False):
            first.set_modules_to_forward_prefetch([second, third])
            third.set_modules_to_backward_prefetch([second, first])
    if mode == "summed":
        for module in (model, *blocks):
            module.set_force_sum_reduction_for_comms(True)
    return model


def trained(at: Rank, model: Any, mode: str, step: int) -> list[torch.Tensor]:
    """Set the weights of a step, run it, and return its loss, gradients and weights."""
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):
            local = weight.to_local()
            local.copy_(integers(1, step, at.rank, index, shape=local.shape))
    if mode == "accumulated":
        model.set_requires_gradient_sync(step % 3 == 2)
    if mode == "unsharded before":
        handles = [block.unshard(async_op=True) for block in model.blocks]
        for handle in handles:
            handle.wait()
    x = integers(2, step, at.rank, shape=(4, 3)).float().to(at.device)
    loss = model(x).float().sum()
    loss.backward()
    if mode == "evaluated":
        with torch.inference_mode():
            loss = loss + model(x).float().sum()
        model.reshard()
    weights = [weight.to_local().clone() for weight in model.parameters()]
    grads = [w.grad.to_local().clone() for w in model.parameters() if w.grad is not None]
    if mode != "accumulated" or step % 3 == 2:
        model.zero_grad()
    return [loss.detach().clone(), *grads, *weights]


MODES = (
    *("plain", "mixed", "kept", "prefetched", "accumulated", "summed", "unsharded before"),
    *("evaluated", "compiled", "gathers only", "replicated", "to two ranks"),
)
#: Modes that need four ranks.
WIDE = MODES[-2:]


@HOOKS
@ranks(2, 4)
@pytest.mark.parametrize("mode", MODES)
@on_ranks()
def test_training_is_that_of_pytorch(at: Rank, mode: str) -> None:
    """Three models in one process: one with PyTorch's collectives, two with ficco's."""
    if mode in WIDE and at.world < 4:
        return
    ficco.counters(reset=True)
    models = [sharded(at, mode) for _ in range(3)]
    for model in models[1:]:
        rows = fsdp.use(model, reduce_scatter=mode != "gathers only")
        assert [row.module for row in rows] == ["", *(f"blocks.{i}" for i in range(4))]
        assert not any(row.left for row in rows)
    for step in range(6):
        expected, *others = (trained(at, model, mode, step) for model in models)
        for other in others:
            assert len(expected) == len(other)
            for want, result in zip(expected, other, strict=True):
                assert torch.equal(want, result), (mode, step)
    counts = ficco.counters()
    assert not any(count.left for count in counts.values())
    assert sum(count.calls for (_, name), count in counts.items() if name == GATHER) >= 2 * 6 * 5
    assert any(name == SUM for _, name in counts) == (mode != "gathers only")
    served = [workspace for workspace in workspaces() if workspace.held]
    assert served
    for workspace in served:  # one buffer of the root, two of blocks
        for kind in workspace.programs.values():
            if (operator := kind.plan.problem.operator) in (GATHER, SUM):
                (program,) = kind.programs.values()
                # No gather waits for a sum.
                assert program.slot is workspace._slots[0][operator == GATHER]
        sizes = [buffer.nbytes for buffer in workspace.held]
        assert len(sizes) <= (6 if mode in ("prefetched", "unsharded before") else 3)
        assert workspace.nbytes >= sum(sizes)
    ficco.close()


@HOOKS
@on_ranks(2)
def test_modules_of_one_group_are_one_row(at: Rank) -> None:
    """A gather that falls back counts once."""
    model = Model().to(at.device)
    fully_shard([*model.blocks])
    rows = fsdp.use(fully_shard(model), buffer_bytes=0)
    assert [row.module for row in rows] == ["", "blocks.0"]
    assert sum(row.elements for row in rows) == sum(w.numel() for w in model.parameters())
    ficco.counters(reset=True)
    trained(at, model, "plain", 0)
    (counts,) = (count for (_, name), count in ficco.counters().items() if name == "all-gather")
    assert counts.left == 3, "the weights of the blocks are gathered twice"
    ficco.close()


def _broken(*_: Any) -> None:
    raise ValueError("no weights")


@HOOKS
@on_ranks(2)
def test_a_model_that_failed_leaves_its_buffers(at: Rank) -> None:
    """FSDP2 keeps gathered weights of a failed step, in cycles that one rank collects later. Their
    buffers are free after the next ``use``, and not before."""
    models = [sharded(at, "plain") for _ in range(3)]
    assert [len(fsdp.use(model)) for model in models[:2]] == [5, 5]
    models[0].blocks[2].register_forward_pre_hook(_broken)
    gc.disable()
    try:
        assert isinstance(caught(lambda: trained(at, models[0], "plain", 0)), Failure)
        del models[0]
        if at.rank == 0:
            gc.collect()
        trained(at, models[0], "plain", 1)
        fsdp.use(models[1])
        trained(at, models[1], "plain", 1)
        assert not any(one.user for workspace in workspaces() for one in workspace.held)
    finally:
        gc.enable()
    ficco.close()


@HOOKS
@pytest.mark.slow
@on_ranks(4)
def test_groups_of_other_ranks_have_other_weights(at: Rank) -> None:
    """Layers in place of experts, whose sizes differ between the columns of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    models, wide = [Model(1) for _ in range(2)], at.rank % 2 + 6
    for model in models:
        model.blocks[0].up, model.blocks[0].down = nn.Linear(5, wide), nn.Linear(wide, 5)
        fully_shard(model.blocks[0], mesh=mesh["shard"])
        fully_shard(model)
    assert [row.ranks for row in fsdp.use(models[1])] == [4, 2]
    for step in range(2):
        expected, results = (trained(at, model, "plain", step) for model in models)
        assert all(map(torch.equal, expected, results))
    ficco.close()


def multiplied(group: Any, rank: int, block: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    """Add products whose sums are exact, and their gradients."""
    b = integers(1, rank, shape=(5, 5)).float().to(out.device)
    y = ficco.all_gather_matmul(out, b, group=group, schedule="hetero-fused-1d:pieces=2")
    return out + ficco.matmul_reduce_scatter(y, torch.eye(5, device=out.device), group=group)


@HOOKS
@pytest.mark.slow
def test_training_on_the_double_of_hip() -> None:
    body = Body(__name__, "test_training_is_that_of_pytorch")
    for mode in ("mixed", "prefetched"):
        hip_ranks.run(2, body, mode)


@HOOKS
@pytest.mark.multigpu
@pytest.mark.parametrize("body", [all_gathers, all_sums, sums_in_order, left])
def test_hooks_on_gpus(body: Callable[[Rank], None]) -> None:
    run(2, body, device="cuda")


@HOOKS
@pytest.mark.multigpu
@pytest.mark.parametrize("mode", MODES)
def test_training_on_gpus(mode: str) -> None:
    world = 4 if mode in WIDE else 2
    run(world, Body(__name__, "test_training_is_that_of_pytorch"), mode, device="cuda")


@HOOKS
@on_ranks(2)
def test_checkpoints_are_untouched(at: Rank) -> None:
    """The state dict keeps its names, placements and values, and loads into another model."""
    models = [sharded(at, "plain") for _ in range(2)]
    fsdp.use(models[1])
    for step in range(2):
        for model in models:
            trained(at, model, "plain", step)
    expected, state = (model.state_dict() for model in models)
    assert expected.keys() == state.keys()
    for name, weight in expected.items():
        assert weight.placements == state[name].placements
        assert torch.equal(weight.to_local(), state[name].to_local())
    models[0].load_state_dict(state)
    ficco.close()


@HOOKS
@on_ranks(2, timeout=250.0)
def test_the_bench_is_proven_and_timed(at: Rank, tmp_path: Path) -> None:
    """A short bench of all ways, and of one with wrong weights. Rank 0 has the rows."""

    def spoil(model: Any) -> None:
        with torch.no_grad():
            model[0].down.weight.to_local().zero_()

    ways = {**stacks.WAYS, "spoilt": stacks.StackWay(spoil)}
    csv, cases = tmp_path / "fsdp.csv", stacks.SHAPES["cpu"]
    settings = {"modes": ("idle",), "device": "cpu", "rounds": 2, "seconds": 600.0, "csv": csv}
    with mock.patch.object(stacks, "WAYS", ways):
        rows = bench(BenchSettings(subject=stacks.SUBJECT, cases=cases, **settings))
    if at.rank:
        return
    by_way, memory = rows.set_index("way"), ("pytorch-registered", "pytorch-symmetric")
    timed = [way for way in stacks.WAYS if way not in memory]
    statuses = dict.fromkeys(timed, "ok") | dict.fromkeys(memory, "skipped") | {"spoilt": "wrong"}
    assert by_way["status"].to_dict() == statuses
    assert (by_way["ms"][timed] > 0).all()
    for way, method in zip(memory, METHODS, strict=True):
        have = hasattr(FSDPModule, method)
        why = f"{method}: required NCCL, got gloo" if have else f"has no FSDPModule.{method}"
        assert why in by_way["note"][way]


#: Methods of FSDP2 for collectives in memory that NCCL allocates.
METHODS = "set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm"


@HOOKS
@on_ranks(1)
def test_ways_in_memory_of_nccl(at: Rank) -> None:
    """Calls of FSDP2's methods, and the errors of a backend, a device and PyTorch."""
    model, called, refused = stacks.stack(stacks.SHAPES["cpu"][0], at.device, 2), [], []
    ways, kind = (stacks.registered, stacks.symmetric), type(dist.group.WORLD._get_backend(of(at)))

    used = RuntimeError("Backend can not be changed after use.")
    with mock.patch.object(dist, "get_backend", lambda: "nccl"):
        with mock.patch.object(kind, "supports_tensor_alloc", lambda self, device: False):
            refused.append(caught(lambda: stacks.registered(model)))
        with mock.patch.object(kind, "supports_tensor_alloc", lambda self, device: True):
            for way, method in zip(ways, METHODS, strict=True):
                with mock.patch.object(FSDPModule, method, create=True) as recorded:
                    way(model)
                called.append([call.args for call in recorded.call_args_list])
        with mock.patch.object(FSDPModule, METHODS[1], create=True, side_effect=used):
            refused.append(caught(lambda: stacks.symmetric(model)))
            del FSDPModule.set_symm_mem_for_comm
            refused.append(caught(lambda: stacks.symmetric(model)))
    assert called == [[(True,)] * 3, [()] * 3], "the model and two blocks"
    texts = "NCCL allocates no memory", "Backend can not be changed after use", "has no FSDPModule"
    for failure, text in zip(refused, texts, strict=True):
        assert failure.type == "NotImplementedError" and text in failure.text, failure


def _ends(how: str, *_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def _with_a_casualty(at: Rank, victim: int, how: str, when: str) -> Any:
    model = sharded(at, "plain")
    with ficco.options(timeout_s=PATIENCE_S if how == "stop" else LONG_S):
        fsdp.use(model)
    trained(at, model, "plain", 0)
    if at.rank == victim:
        block = model.blocks[2]
        if when == "forward":
            block.register_forward_pre_hook(partial(_ends, how))
        else:
            block.down.register_full_backward_hook(partial(_ends, how))
    first = caught(lambda: trained(at, model, "plain", 1))
    return first, caught(lambda: model(torch.zeros(4, 3)))


@HOOKS
@pytest.mark.parametrize(
    ("victim", "how", "when"),
    [(0, "kill", "forward"), (1, "kill", "backward"), (1, "stop", "forward")],
)
def test_a_lost_rank_is_named(victim: int, how: str, when: str) -> None:
    lost = {victim} if how == "stop" else ()
    outcomes = run(3, _with_a_casualty, victim, how, when, fresh=True, catch=True, lost=lost)
    if how == "kill":
        assert isinstance(outcomes[victim], Died)
    for rank in {0, 1, 2} - {victim}:
        first, again = outcomes[rank]
        for facts in gave_up(first):
            assert facts["operator"] in (GATHER, SUM)
            assert facts["peer"] == victim and facts["ended"] == (how == "kill"), first.text
        assert isinstance(again, Failure) and "an earlier call of this group failed" in again.text


@HOOKS
@on_ranks(2, fresh=True)
def test_use_on_one_rank_only(at: Rank) -> None:
    model = sharded(at, "plain")
    if at.rank == 0:
        with ficco.options(timeout_s=PATIENCE_S):
            failure = caught(lambda: fsdp.use(model))
        assert failure.type == "SignalTimeout" and failure.fields["peer"] == 1, failure
        assert failure.fields["operator"] == "fsdp.use"
    at.barrier()


@HOOKS
@on_ranks(2, fresh=True)
def test_use_with_different_arguments(at: Rank) -> None:
    model = sharded(at, "plain")
    failure = caught(lambda: fsdp.use(model, reduce_scatter=at.rank == 0))
    assert failure.type == "RankMismatch", failure
    assert "reduce_scatter=True" in failure.text and "reduce_scatter=False" in failure.text


REFUSALS = (
    ("InvalidArgument", "model: required a module .* got Linear without; call fully_shard first"),
    ("InvalidArgument", "model: required a module .* got str without; call fully_shard first"),
    ("InvalidArgument", "buffer_bytes: required a number of at least 0, or None, got -1"),
    ("InvalidArgument", "reduce_scatter: required True or False, got 'yes'"),
    ("NotImplementedError", "required parameters that stay .* got CPUOffloadPolicy .*leave out"),
    ("InvalidArgument", "model: required modules that are .* yet, got .*; call fsdp.use once"),
    ("NotImplementedError", "required PyTorch 2.9 or later, .* got .*; update PyTorch"),
)


@HOOKS
@on_ranks(2)
def test_bad_input_is_refused(at: Rank) -> None:
    model, calls = sharded(at, "plain"), list[Callable[[], Any]]()
    calls += [lambda: fsdp.use(nn.Linear(2, 2)), lambda: fsdp.use("model")]  # type: ignore[arg-type]
    calls.append(lambda: fsdp.use(model, buffer_bytes=-1))
    calls.append(lambda: fsdp.use(model, reduce_scatter="yes"))  # type: ignore[arg-type]
    offloaded = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))
    calls.append(lambda: fsdp.use(offloaded))
    failures = [caught(call) for call in calls]
    fsdp.use(model)
    failures.append(caught(lambda: fsdp.use(model.blocks[1])))  # type: ignore[arg-type]
    with mock.patch.object(FSDPModule, "set_custom_reduce_scatter", create=True):
        del FSDPModule.set_custom_reduce_scatter
        failures.append(caught(lambda: fsdp.use(model)))
    trained(at, model, "plain", 1)  # the group stays usable
    ficco.close()
    for failure, (kind, text) in zip(failures, REFUSALS, strict=True):
        assert failure.type == kind and re.search(text, failure.text), failure


@HOOKS
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_groups_of_several_hosts_and_of_one_rank_are_left(at: Rank) -> None:
    why = "it has one rank" if at.world == 1 else "its ranks are on 2 hosts"
    with host_of(at, at.world):
        model = sharded(at, "plain")
        rows = fsdp.use(model)
        trained(at, model, "plain", 1)
    assert [row.left for row in rows] == [why] * 5
    assert str(rows[0]) == f"model: 32 elements, {at.world} ranks: left to PyTorch: {why}"
