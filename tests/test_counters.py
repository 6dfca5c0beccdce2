"""``ficco.expect`` refuses calls that hide no communication. ``ficco.counters`` counts calls."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, caught, on_ranks
from test_changed_layers import halves
from test_passes import gather
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import ficco
import ficco.nn
from ficco import passes
from ficco.machine import Machine, Provenance, Tuned, save
from ficco.runtime.counters import blocks

BY = Provenance("assumed")
#: Products with 8 columns hide 2 ms per call. With 16 columns, serial was measured as fastest.
PRODUCT = partial(Tuned, "all_gather_matmul", (4, 4), k=16, dtype="float32", serial=(3e-3, 3e-3))
MEASURED = (
    PRODUCT(n=8, queued="growing", idle="growing", seconds=(1e-3, 1e-3), provenance=BY),
    PRODUCT(n=16, queued="serial", idle="serial", seconds=(3e-3, 3e-3), provenance=BY),
)
TUNED = Machine("tuned", "cpu", 2, tuned=MEASURED)
ROWS, HEADS = (4, 16), (1, 4, 4, 8)


def _calls(schedule: str) -> dict[str, tuple[Callable[..., Any], tuple[int, ...]]]:
    """Return functions of one tensor and its shape, by the operator under which they count."""
    weight, up, down = torch.ones(16, 16), torch.ones(2, 16, 6), torch.ones(2, 6, 16)
    indices, pairs = torch.tensor([[0, 1], [1, 3], [2, 0], [3, 2]]), torch.ones(4, 2)
    layer: dict[str, Any] = {"capacity": 4, "schedule": schedule}
    products = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    gathered = partial(ficco.all_gather_attention, schedule=schedule)
    by_heads = partial(ficco.ulysses_attention, schedule=schedule)
    options = {"b": weight, "schedule": schedule}
    return {
        **{name: (partial(getattr(ficco, name), **options), ROWS) for name in products},
        "all_gather_attention": (lambda q: gathered(q, q, q), HEADS),
        "ulysses_attention": (lambda q: by_heads(q, q, q), HEADS),
        "experts": (lambda x: ficco.experts(x, indices, pairs, up, down, **layer), ROWS),
    }


def _refused(call: Callable[[], Any]) -> ficco.NotOverlapped:
    with pytest.raises(ficco.NotOverlapped) as raised:
        call()
    return raised.value


@on_ranks(2)
def test_a_serial_call_is_refused_and_the_group_stays_usable(at: Rank) -> None:
    """The call is refused as a first call and as a warm call."""
    for operator, (call, shape) in _calls("serial").items():
        x = torch.full(shape, at.rank + 1.0)
        for known in (False, True):
            with ficco.expect(overlapped=True):
                error = _refused(partial(call, x))
            assert error.call.startswith(f"{operator}("), (known, error)
            assert (error.schedule, error.reason) == ("serial", "requested")
            assert "got serial (requested); pass schedule='auto'" in str(error)
            y = call(x)
        overlapped = _calls("uniform-fused-1d" if "ulysses" in operator else "shard-overlap")
        if operator != "experts":
            with ficco.expect(overlapped=True):
                assert torch.allclose(overlapped[operator][0](x), y), operator


@on_ranks(2)
def test_the_error_has_the_reason_of_the_decision(at: Rank) -> None:
    call = partial(ficco.all_gather_matmul, torch.ones(8, 16), torch.ones(16, 8))
    with ficco.options(machine="h200-2"), ficco.expect():
        error = _refused(call)
    assert error.schedule.startswith("serial") and error.reason.startswith("model: ")
    assert "is predicted to take" in error.reason and "on h200-2" in error.reason
    assert "pass a schedule that overlaps to take it nevertheless" in str(error)
    with ficco.options(workspace_bytes=0), ficco.expect():  # no other schedule has room
        error = _refused(call)
    assert error.reason.startswith("in place of ") and "raise workspace_bytes" in str(error)


@on_ranks(2)
def test_blocks_nest_and_have_groups(at: Rank) -> None:
    others = dist.new_group([0, 1])
    x, b = torch.ones(4, 8), torch.ones(8, 4)
    serial = partial(ficco.all_gather_matmul, x, b, schedule="serial")
    with ficco.expect(group=others):
        serial()
        _refused(partial(serial, group=others))
        with ficco.expect():
            _refused(serial)
            with ficco.expect(overlapped=False):
                serial()
                serial(group=others)
            with ficco.expect(overlapped=False, group=init_device_mesh("cpu", (2,))):
                serial()
                _refused(partial(serial, group=others))
            _refused(serial)
        serial()
    serial(group=others)
    alone = [dist.new_group([rank]) for rank in range(at.world)][at.rank]
    with ficco.expect():  # no communication to hide
        serial(group=alone)
        ficco.all_gather_matmul(x, torch.ones(8, 0), schedule="serial")
    for wrong in (1, None):
        failure = caught(lambda value=wrong: ficco.expect(overlapped=value).__enter__())
        assert failure.text == f"overlapped: required True or False, got {wrong!r}"


@on_ranks(2)
def test_blocks_hold_in_backwards_threads_and_compiled_functions(at: Rank) -> None:
    x, b = torch.ones(4, 8, requires_grad=True), torch.ones(8, 4, requires_grad=True)
    serial = partial(ficco.all_gather_matmul, schedule="serial")
    y = serial(x, b)
    with ficco.expect():
        error = _refused(lambda: y.sum().backward(retain_graph=True))
    assert error.call.startswith("matmul_reduce_scatter(")
    y.sum().backward()
    errors: list[Any] = []
    with ficco.expect():
        thread = threading.Thread(target=lambda: errors.append(caught(partial(serial, x, b))))
        thread.start()
        thread.join()
    assert errors[0].type == "NotOverlapped"
    torch._dynamo.reset()
    compiled = torch.compile(serial, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with ficco.expect():
            _refused(lambda: compiled(x, b))
        assert torch.equal(compiled(x, b), y)

    def inside(a: torch.Tensor, schedule: str) -> torch.Tensor:
        with ficco.expect():
            return ficco.all_gather_matmul(a, b, schedule=schedule)

    broken = torch.compile(inside, backend="aot_eager")  # the block breaks the graph
    _refused(lambda: broken(x, "serial"))
    assert torch.equal(broken(x, "growing"), y) and blocks == []
    torch._dynamo.reset()
    whole = torch.compile(inside, backend="aot_eager", fullgraph=True)
    assert caught(lambda: whole(x, "serial")).type == "Unsupported" and blocks == []


@on_ranks(2)
def test_the_peer_of_one_rank_in_a_block_raises(at: Rank) -> None:
    call = partial(ficco.all_gather_matmul, torch.ones(4, 8), torch.ones(8, 4), schedule="serial")
    call()
    with ficco.expect(overlapped=at.rank == 0):
        failure = caught(call)
    assert failure.type == ("RankMismatch" if at.rank else "NotOverlapped"), failure
    assert "required an overlapped schedule within ficco.expect" in failure.text
    at.barrier()
    ficco.close()


@on_ranks(2)
def test_calls_are_counted_by_group_operator_and_source(at: Rank) -> None:
    ficco.close()
    ficco.counters(reset=True)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x, b = torch.ones(512, 512), torch.ones(512, 512)
    for schedule, times in (("shard-overlap", 3), ("serial", 2), ("serial:collective", 3)):
        for _ in range(times):
            ficco.all_gather_matmul(x, b, schedule=schedule)
    with ficco.arriving(x) as rows:
        assert len(list(rows)) == 5
    y = ficco.matmul_reduce_scatter(x.clone().requires_grad_(), b, schedule="shard-overlap")
    y.sum().backward()
    with ficco.expect():
        _refused(lambda: ficco.all_gather_matmul(x, b, schedule="serial"))
    ficco.close()  # the counts stay
    counts = ficco.counters()
    assert counts == ficco.counters(reset=True) and ficco.counters() == {}
    assert counts == {
        (name, "all_gather_matmul"): (9, 4, {"caller": 5}, 0, 0.0),
        (name, "arriving"): (1, 1, {}, 0, 0.0),
        (name, "matmul_reduce_scatter"): (1, 1, {}, 0, 0.0),
    }
    counts[name, "arriving"].serial["caller"] = 1  # changes only the returned copy
    ficco.all_gather_matmul(x, b, schedule="shard-overlap")
    assert ficco.counters(reset=True) == {(name, "all_gather_matmul"): (1, 1, {}, 0, 0.0)}


@on_ranks(2)
def test_the_time_that_calls_hide_is_summed(at: Rank) -> None:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    ficco.counters(reset=True)
    with tempfile.TemporaryDirectory() as folder:
        save(TUNED, f"{folder}/tuned.yaml")
        with ficco.options(machine=f"{folder}/tuned.yaml"):
            for columns in (8, 8, 16, 8):
                ficco.all_gather_matmul(torch.ones(4, 16), torch.ones(16, columns))
            with ficco.options(workspace_bytes=0):  # replaces the decision
                ficco.all_gather_matmul(torch.ones(4, 16), torch.ones(16, 8))
    ((key, counts),) = ficco.counters(reset=True).items()
    assert key == (name, "all_gather_matmul")
    assert counts[:4] == (5, 3, {"tuned": 1, "limits": 1}, 0)
    assert counts.hidden_s == pytest.approx(3 * 2e-3)


@on_ranks(2)
def test_parts_of_a_call_are_counted(at: Rank) -> None:
    """A call by columns counts as several calls. In a block its first part raises."""
    x, b = torch.ones(8, 16), torch.ones(16, 256)
    ficco.counters(reset=True)
    with ficco.options(workspace_bytes=4096):
        ficco.matmul_reduce_scatter(x, b, schedule="serial")
        calls = ficco.counters(reset=True)
        with ficco.expect():
            _refused(lambda: ficco.matmul_reduce_scatter(x, b, schedule="serial"))
    assert ficco.counters() == {}
    ((total, _, serial, *_),) = calls.values()
    assert serial == {"caller": total} and total > 1


class Own(nn.Linear):
    """A layer that multiplies in its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@on_ranks(2)
def test_a_layer_with_a_pytorch_collective_is_refused(at: Rank) -> None:
    mesh = init_device_mesh("cpu", (2,))
    ficco.counters(reset=True)
    plan = {
        "0": ficco.nn.ColwiseParallel(input_layouts=Shard(0)),
        "1": ficco.nn.ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "2": ficco.nn.RowwiseParallel(output_layouts=Replicate()),
    }
    wide, quiet, low = model = nn.Sequential(*(nn.Linear(8, 8) for _ in plan))
    parallelize_module(model, mesh, plan)
    up, down = ficco.nn.ColumnParallelLinear(8, 8), ficco.nn.RowParallelLinear(8, 8)
    for layer in (*model, up, down):
        halves(layer)
    ulysses = ficco.nn.UlyssesAttention(8, 2)
    ulysses.o_proj = Own(8, 8, bias=False)
    for collective, layer, shape in (
        ("all-gather", up, (4, 8)),
        ("all-gather", wide, (4, 8)),
        ("reduce-scatter", down, (4, 4)),
        ("all-reduce", low, (4, 4)),
        ("all-to-all", ulysses, (1, 4, 8)),
    ):
        call = partial(layer, torch.ones(shape))
        y = call()
        with ficco.expect():
            error = _refused(call)
        assert error.call == f"{collective} of group {layer.group.group_name}", error
        assert error.schedule == "collective" and torch.equal(call(), y)
        counts = ficco.counters(reset=True)[layer.group.group_name, collective]
        assert (counts.left, counts.calls) == (2, 0)
    with ficco.expect():
        quiet(torch.ones(4, 8))  # needs no collective before its product


@on_ranks(2)
def test_collectives_that_the_pass_left_are_refused(at: Rank) -> None:
    """Calls of compiled functions raise, also if they were compiled outside of the block."""
    group = dist.group.WORLD
    x, w = torch.ones(4, 8), torch.ones(8, 3)

    def half(x: torch.Tensor) -> torch.Tensor:
        return gather(x @ w, 0, group) + 1

    def both(x: torch.Tensor) -> torch.Tensor:
        return gather(x, 0, group) @ w + 1

    ficco.counters(reset=True)
    for inner in ("aot_eager", lambda graph, inputs: graph.forward):
        torch._dynamo.reset()
        compiled = torch.compile(half, backend=passes.backend(inner), fullgraph=True)
        for _ in range(2):  # the first call compiles within the block
            with ficco.expect():
                error = _refused(partial(compiled, x))
            with ficco.expect(group=dist.new_group([0, 1])):
                assert torch.equal(compiled(x), half(x))
        assert error.call.startswith("all-gather at test_passes.py:"), error.call  # its gather()
        assert "no product" in error.reason and "docs/compile.md" in str(error)
        with ficco.expect():
            replaced = torch.compile(both, backend=passes.backend(inner), fullgraph=True)
            assert torch.equal(replaced(x), both(x))
    assert ficco.counters(reset=True)[group.group_name, "all-gather"] == (0, 0, {}, 2, 0.0)


@on_ranks(2)
def test_a_pass_on_a_graph_counts_collectives_and_refuses_them(at: Rank) -> None:
    """The pass raises after it has replaced the other collectives."""
    from torch.fx.experimental.proxy_tensor import make_fx

    group, x, w = dist.group.WORLD, torch.ones(4, 8), torch.ones(8, 3)

    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gather(x, 0, group) @ w, gather(x, 0, group) + 1

    hook = passes.inductor_pass()
    for run in (passes.replace, lambda module: passes.replace(module.graph), hook):
        ficco.counters(reset=True)
        for where, refuses in ((group, True), (dist.new_group([0, 1]), False)):
            module = make_fx(both, tracing_mode="fake")(x, w)
            graph = module.graph if run is hook else module
            with ficco.expect(group=where):
                if refuses:
                    error = _refused(partial(run, graph))
                    assert error.call.startswith("all-gather"), error.call
                    assert error.schedule == "collective" and "no product" in error.reason
                else:
                    run(graph)
            targets = [str(node.target) for node in module.graph.nodes]
            assert sum("ficco.all_gather_matmul" in target for target in targets) == 1
        assert ficco.counters()[group.group_name, "all-gather"] == (0, 0, {}, 2, 0.0)
    assert (len(hook.report.replaced), len(hook.report.left)) == (2, 2)
