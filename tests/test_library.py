"""The operators under ``torch.compile``, and as operators of ``torch.library``."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import Program
from ranks import Failure, Rank, caught, counted, leave, on_ranks, run, since
from test_gradients import GATHERING, OPERATORS, Case, case_of, make, noted, operands, same, uneven
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import ficco
from ficco.nn.functional import copied_linear, gathered_linears
from ficco.ops import library
from ficco.ops.gradients import by_columns
from ficco.ops.library import OPS
from ficco.options import current, current_text
from ficco.runtime import program as ranges
from ficco.schedules import Schedule


def called(case: Case, a: torch.Tensor, b: torch.Tensor, group: Any = None) -> torch.Tensor:
    return getattr(ficco, case.operator)(a, b, group=group, **case.arguments())


def plain(operator: str, at: Rank, **changes: Any) -> tuple[Case, torch.Tensor, torch.Tensor]:
    """A case with equal rows, and the operands of this rank."""
    case = case_of(operator, at.world, 4, 6, 8, **changes)
    return (case, *operands(case, make(case, at.world), at))


def special(operator: str, world: int) -> Case:
    """A case that the contract does not trace: of its layout, and of one gradient alone."""
    case, rows = case_of(operator, world, 4, 6, 8), uneven(operator, world)
    return case.on(rows=rows, transposed=True, dtype="bfloat16", needs="b")


def exact(at: Rank, case: Case, function: Callable[..., Any], iteration: int = 0) -> torch.dtype:
    """A call through a function of both operands, and its gradients; the dtype of its result. A
    transposed b is the view of a leaf."""
    made = make(case, at.world, iteration)
    a, b = operands(case, made, at)
    leaf = b.detach().t().contiguous() if case.transposed else b.detach()
    leaf.requires_grad_("b" in case.needs)
    y = function(a, leaf.t() if case.transposed else leaf)
    same(y, made.y[at.rank], f"the product of {case}")
    y.backward(made.g[at.rank].to(y))
    if "a" in case.needs:
        same(a.grad, made.grad_a[at.rank].view(a.shape), f"the gradient of a of {case}")
    if "b" in case.needs:
        want = made.grad_b[at.rank]
        same(leaf.grad, want.t() if case.transposed else want, f"the gradient of b of {case}")
        assert leaf.grad.is_contiguous()
    assert leaf.grad is None or leaf.grad.dtype == leaf.dtype
    return y.dtype


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **how: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **how)


def second_derivatives_are_refused(at: Rank) -> None:
    """First ones are right where second ones may be asked for."""
    for operator in OPERATORS:
        case, a, b = plain(operator, at)
        made = make(case, at.world)
        y = OPS[operator].product(a, b, dist.group.WORLD.group_name)
        g = made.g[at.rank].to(y).requires_grad_()
        grad_a, grad_b = torch.autograd.grad(y, (a, b), g, create_graph=True)
        same(grad_a, made.grad_a[at.rank], "a")
        same(grad_b, made.grad_b[at.rank], "b")
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(grad_a.sum(), b)


# torch.compile.


def layouts_and_single_gradients_compiled(at: Rank) -> None:
    cases = [(special(operator, at.world), False) for operator in OPERATORS[::2]]
    cases.append((case_of(GATHERING[0], at.world, 4, 6, 8, leading=True, needs="a"), False))
    cases.append((case_of(GATHERING[1], at.world, 4, 6, 8, transposed=True), True))
    for case, saves in cases:
        with ficco.options(save_gathered=saves):
            exact(at, case, compiled(lambda x, w, case=case: called(case, x, w)))


def rows_may_change_without_compiling_again(at: Rank) -> None:
    """Also those that the program computes from its operands."""

    def computed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = [x.shape[0] - at.rank + rank for rank in range(at.world)]
        return ficco.all_gather_matmul(x, w, rows=rows)

    for function in (*(getattr(ficco, name) for name in OPERATORS[2::2]), computed):
        counter = CompileCounterWithBackend("aot_eager")
        layer = compiled(lambda x, w, function=function: function(x, w), counter)
        for rows in (2, 3, 5):  # the first ones are equal to no other size
            if function is computed:
                of_ranks = tuple(rows + rank for rank in range(at.world))
                case = Case("all_gather_matmul", of_ranks, 6, 8)
            else:
                case = case_of(function.__name__, at.world, rows, 6, 8)

            def marked(x: torch.Tensor, w: torch.Tensor, case: Case = case) -> torch.Tensor:
                torch._dynamo.maybe_mark_dynamic(x, 0)
                if case.rows_of_b(at.rank) != case.k:
                    torch._dynamo.maybe_mark_dynamic(w, 0)
                return layer(x, w)  # noqa: B023  called at once

            exact(at, case, marked, rows)
        assert counter.frame_count == 1, function


def groups_and_schedules_of_compiled_calls(at: Rank) -> None:
    """Groups, meshes and schedules, as globals of a layer and as its arguments."""
    case, a, b = plain("all_gather_matmul", at)
    made = make(case, at.world)
    mesh = init_device_mesh("cpu", (1, at.world), mesh_dim_names=("dp", "tp"))
    world = dist.group.WORLD
    named, parsed = "hetero-fused-1d:pieces=2", Schedule.parse("uniform-fused-1d:pull")
    layers: list[Callable[..., torch.Tensor]] = [
        lambda x, w: ficco.all_gather_matmul(x, w, group=world),
        lambda x, w: ficco.all_gather_matmul(x, w, group=mesh["tp"]),
        lambda x, w: ficco.all_gather_matmul(x, w, schedule=named),
        lambda x, w: ficco.all_gather_matmul(x, w, schedule=parsed),
    ]
    for layer in layers:
        assert torch.equal(compiled(layer)(a, b).double(), made.y[at.rank])
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    layer = compiled(
        lambda x, w, group, schedule: ficco.all_gather_matmul(x, w, group=group, schedule=schedule),
        keep,
    )
    for group, schedule in ((world, named), (mesh["tp"], parsed), (world, named), (None, "auto")):
        assert torch.equal(layer(a, b, group, schedule).double(), made.y[at.rank])
    text = [str(graph.code) for graph in graphs]
    assert len(text) == 3, text
    assert named in text[0] and str(parsed) in text[1] and "'auto'" in text[2]
    layer = compiled(lambda x, w: ficco.all_gather_matmul(x, w, group=mesh), "eager")
    found = caught(lambda: layer(a, b))
    assert isinstance(found, Failure) and "required a mesh of one dimension" in found.text
    ficco.close(mesh["tp"].get_group())


def a_part_that_is_not_compiled(at: Rank) -> None:
    """A compiled step with a part that is not, and its backward inside."""
    torch._dynamo.reset()

    @torch.compiler.disable
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ficco.all_gather_matmul(x, w, schedule="hetero-fused-1d:pieces=2")

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        layer(2 * x, w).backward(grad)

    for rows in (2, 3):
        case = case_of("all_gather_matmul", at.world, rows, 6, 8)
        a, b = operands(case, make(case, at.world), at)
        grad = torch.arange(at.world * rows * 8.0).view(-1, 8) % 5 - 2
        step(a, b, grad.to(a.dtype))
        found = a.grad, b.grad
        a.grad = b.grad = None
        ficco.all_gather_matmul(2 * a, b).backward(grad.to(a.dtype))
        assert torch.equal(found[0], a.grad) and torch.equal(found[1], b.grad)


def compiled_under_autocast(at: Rank) -> None:
    def cast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    for operator in OPERATORS[2::2]:
        case = case_of(operator, at.world, 4, 6, 8)

        def inside(x: torch.Tensor, w: torch.Tensor, case: Case = case) -> torch.Tensor:
            with cast():
                return called(case, x, w)

        assert exact(at, case, compiled(inside)) == torch.bfloat16
    case = case_of(OPERATORS[0], at.world, 4, 6, 8)
    layer = compiled(lambda x, w: called(case, x, w))

    def outside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with cast():
            return layer(x, w)

    assert exact(at, case, outside) == torch.bfloat16


def options_of_a_compiled_forward_are_those_of_its_backward(at: Rank) -> None:
    """Other options compile anew."""
    counter = CompileCounterWithBackend("aot_eager")
    case = case_of("all_gather_matmul", at.world, 4, 6, 8)
    made = make(case, at.world)
    layer = compiled(lambda x, w: called(case, x, w), counter)

    def calls(**inside: Any) -> list[Any]:
        a, b = operands(case, made, at)
        with ficco.options(**inside) if inside else nullcontext():
            y = layer(a, b)
        seen: list[Any] = []
        with noted(seen), ficco.options(timeout_s=19.0):
            y.backward(made.g[at.rank].to(y))
        same(a.grad, made.grad_a[at.rank], "a")
        return [
            (operator, options.timeout_s, options.save_gathered) for operator, _, options in seen
        ]

    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    assert calls() == [(gather, None, False), (scatter, None, False)]
    assert calls(timeout_s=33.0) == [(gather, 33.0, False), (scatter, 33.0, False)]
    assert calls(save_gathered=True) == [(scatter, None, True)]
    assert calls() == [(gather, None, False), (scatter, None, False)]
    ficco.set_options(timeout_s=44.0)
    try:
        assert calls() == [(gather, 44.0, False), (scatter, 44.0, False)]
        assert calls(timeout_s=None) == [(gather, None, False), (scatter, None, False)]
    finally:
        ficco.set_options(timeout_s=None)
    # Once outside of blocks, once with each of 33 s, kept, 44 s, and defaults inside a block.
    assert counter.frame_count == 5


def options_of_a_call_inside_a_compiled_backward(at: Rank) -> None:
    """It was compiled in one block and is run in another."""
    layer = compiled(lambda x, w: copied_linear(x, w, None, group=dist.group.WORLD))
    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(6, 8, requires_grad=True)
    with ficco.options(timeout_s=33.0):
        y = layer(x, w)
    seen: list[Any] = []
    with noted(seen, library), ficco.options(timeout_s=19.0):
        y.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 8), 6.0 * at.world))
    assert [options.timeout_s for _, _, options in seen] == [33.0]


def test_compiled_calls_see_the_options_of_their_task() -> None:
    """Also where the blocks of two tasks overlap, in a copy of a context, and none of them when all
    are closed."""
    function = compiled(lambda x: (x + 1, current_text()), "eager", dynamic=False)
    seen: list[tuple[float | None, str]] = []

    def text() -> str:
        return function(torch.ones(1))[1]

    def look() -> None:
        seen.append((current().timeout_s, text()))

    async def task(opens: asyncio.Event, closes: asyncio.Event, timeout_s: float) -> None:
        with ficco.options(timeout_s=timeout_s):
            opens.set()
            await closes.wait()
            look()

    async def overlapping() -> None:
        first, second = (asyncio.Event(), asyncio.Event()), (asyncio.Event(), asyncio.Event())
        one = asyncio.create_task(task(*first, 5.0))
        await first[0].wait()
        two = asyncio.create_task(task(*second, 7.0))
        await second[0].wait()
        for closes, block in ((first[1], one), (second[1], two)):
            look()
            closes.set()
            await block

    asyncio.run(overlapping())
    look()
    five, seven = (5.0, '{"timeout_s": 5.0}'), (7.0, '{"timeout_s": 7.0}')
    assert seen == [(None, ""), five, (None, ""), seven, (None, "")]
    with ficco.options(timeout_s=9.0):
        context, inside = contextvars.copy_context(), text()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(context.run, text).result() == inside == '{"timeout_s": 9.0}'
        assert pool.submit(text).result() == text() == ""


def _while_compiling(a: torch.Tensor, b: torch.Tensor) -> Any:
    layer = compiled(lambda x, w: ficco.all_gather_matmul(x, w), "eager")
    return caught(lambda: layer(a, b))


def wrong_operands_are_refused_while_compiling(at: Rank) -> None:
    narrow, wide = torch.ones(4, 6), torch.ones(6, 8)
    for a, b, text in (
        (narrow.int(), wide.int(), "int32 is not served on cpu; use one of"),
        (narrow, torch.ones(7, 8), "weight as weight.t()"),
        (narrow[0], wide, "required a_shard [..., m/W, k] and b [k, n]"),
        (narrow, wide.double(), "required one dtype"),
    ):
        failure = _while_compiling(a, b)
        assert isinstance(failure, Failure) and text in failure.text, failure.text


def dtensors_are_refused(at: Rank) -> None:
    """In place of this rank's parts, eager and compiled."""
    mesh, found = init_device_mesh("cpu", (at.world,)), []
    for operator in OPERATORS:
        case, a, b = plain(operator, at)
        sharded = DTensor.from_local(a.detach(), mesh, [Shard(0)])
        found.append(caught(partial(called, case, sharded, b)))
    other = caught(partial(called, case, a, DTensor.from_local(b, mesh, [Shard(1)])))
    assert all(failure.type == "ValueError" for failure in (*found, other))
    assert "b: required" in other.text and "pass b.to_local()" in other.text
    failures = [(failure.text, " with (Shard(dim=0),)") for failure in found]
    for text, layout in (*failures, (_while_compiling(sharded, b).text, "")):
        required = f"a: required a plain tensor, got a DTensor{layout}; pass a.to_local()"
        assert required in text, text


def make_fx_sees_one_operator(at: Rank) -> None:
    case, a, b = plain("matmul_all_reduce", at, needs="")
    code = make_fx(lambda x, w: called(case, x, w), tracing_mode="fake")(a, b).code
    assert "torch.ops.ficco.matmul_all_reduce.default(" in code


# What it costs.


def operations_are_counted(at: Rank) -> None:
    """A product of this rank counts, and as much for each gradient that is needed."""
    for operator, needs in itertools.product(OPERATORS, ("ab", "a", "b")):
        case = special(operator, at.world).on(needs=needs)
        a, b = operands(case, make(case, at.world), at)
        with FlopCounterMode(display=False) as counter:
            y = called(case, a, b)
            forward = counter.get_total_flops()
            y.sum().backward()
        if operator in GATHERING:
            rows = y.shape[0]
        else:
            rows = b.shape[0] if "transposed" in operator else case.rows_in(at.rank)
        assert forward == 2 * rows * case.k * case.n, case
        assert counter.get_total_flops() == forward * (1 + len(needs)), case


def operations_are_counted_of_layers_and_compiled(at: Rank) -> None:
    group: Any = dist.group.WORLD
    x, w = torch.ones(4, 6, requires_grad=True), torch.ones(8, 6, requires_grad=True)
    one = 2 * 4 * at.world * 6 * 8
    with FlopCounterMode(display=False) as counter:
        y, gathered = ficco.all_gather_matmul(x, w.t(), return_gathered=True)
        gathered.sum().backward()
    assert counter.get_total_flops() == one  # what was gathered goes back without a product
    with FlopCounterMode(display=False) as counter:
        torch.cat(gathered_linears(x, (w, 2 * w), (None, None), group=group)).sum().backward()
    assert counter.get_total_flops() == 2 * 3 * one
    layer = torch.compile(called, backend="aot_eager")
    case, *_ = plain("all_gather_matmul", at)
    layer(case, x, w.t())
    with FlopCounterMode(display=False) as counter:
        layer(case, x, w.t()).sum().backward()
    assert counter.get_total_flops() == 3 * one


def test_operators_are_registered_when_first_asked_for(tmp_path: Path) -> None:
    """By any thread, and not by the import, which takes no counter and no Triton with it. They are
    counted by a counter that is imported last."""
    program = (
        "import sys, torch, ficco, torch.distributed as dist\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "assert 'torch.utils.flop_counter' not in sys.modules and 'triton' not in sys.modules\n"
        "names = torch._C._dispatch_get_all_op_names\n"
        "assert not [name for name in names() if name.startswith('ficco::')]\n"
        "def ask(at):\n"
        "    return torch.ops.ficco.experts_backward\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    assert len({id(one) for one in pool.map(ask, range(64))}) == 1\n"
        "registered = {name for name in names() if name.startswith('ficco::')}\n"
        "assert registered == {'ficco::experts_backward'}, registered\n"
        "assert not hasattr(torch.ops.ficco, 'expert')\n"
        "assert torch.ops.ficco.all_gather_matmul.default._schema.arguments[0].name == 'a'\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    ficco.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 2))\n"
        "    ficco.matmul_all_reduce(torch.ones(4, 8), torch.ones(8, 2))\n"
        "assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 2\n"
    )
    ended = Program(tmp_path, "asks", program, (), {}).end(time.monotonic() + 240)
    assert ended.code == 0, ended.err


def _direct(at: Rank, needs: str) -> list[str]:
    """ficco's operators that the dispatcher sees of an eager forward and backward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for operator in OPERATORS:
            y = called(*plain(operator, at, needs=needs))
            if needs:
                y.sum().backward()
        name = dist.group.WORLD.group_name
        OPS["all_gather_matmul"].product(torch.ones(2, 2), torch.ones(2, 2), name)
    return [event.name for event in profile.events() if event.name.startswith("ficco::")]


def test_eager_calls_do_not_pass_the_dispatcher() -> None:
    seen = ["ficco::all_gather_matmul"]  # the call that asks for it
    assert run(2, _direct, "") == run(2, _direct, "ab") == [seen] * 2


def _ranges(at: Rank, how: str) -> tuple[list[str], list[str]]:
    """What a profiler has of a forward and its backward, and what a tool is told."""
    group, told = dist.new_group(list(range(at.world))), []
    case, a, b = plain("all_gather_matmul", at, schedule="serial", needs="a")

    def step() -> None:
        called(case, a, b, group).sum().backward()

    nvtx = SimpleNamespace(range_push=told.append, range_pop=lambda: told.append("pop"))
    stub = SimpleNamespace(is_available=lambda: True, nvtx=nvtx)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "STEPS", how == "steps")
        if how == "off":
            patch.setattr(ranges, "marked", None)  # nobody may call it
        if how == "tool":
            patch.setattr(ranges, "TOOLED", True)
            patch.setattr(ranges, "active", lambda: True)
            patch.setattr(ranges, "gpu", stub)
        profiled = how in ("profiler", "steps")
        with profile if profiled else nullcontext():
            step()
    leave(group)
    events = sorted(profile.events() if profiled else (), key=lambda event: event.time_range.start)
    names = [event.name for event in events]
    return [name for name in names if name.startswith("ficco: ") or " on " in name], told


def test_calls_are_ranges_where_anybody_sees_them() -> None:
    asked = "ficco: all_gather_matmul(m=8 (4 x 2 ranks), n=8, k=6, float32), serial"
    dual = "ficco: matmul_reduce_scatter(m=8 (4 x 2 ranks), n=6, k=8, float32), serial"
    assert run(2, _ranges, "off") == [([], [])] * 2
    assert run(2, _ranges, "profiler") == [([asked, dual], [])] * 2
    assert run(2, _ranges, "tool") == [([], [asked, "pop", dual, "pop"])] * 2
    for names, _ in run(2, _ranges, "steps"):
        inside = names[1 : names.index(dual)]
        assert names[0] == asked and inside and all(" on compute0)" in name for name in inside)


def _selective(at: Rank, save: bool) -> dict[str, int]:
    """Calls of a backward whose block is checkpointed, but for what a policy saves."""
    case, a, b = plain("matmul_reduce_scatter", at)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        chosen = save and op is torch.ops.ficco.matmul_reduce_scatter.default
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    y = checkpoint(
        lambda a, b: torch.relu(called(case, a, b)) ** 2,
        *(a, b),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    with counted() as counts:
        y.sum().backward()
    _, plain_a, plain_b = plain("matmul_reduce_scatter", at)
    (torch.relu(called(case, plain_a, plain_b)) ** 2).sum().backward()
    assert torch.equal(a.grad, plain_a.grad) and torch.equal(b.grad, plain_b.grad)
    return dict(counts)


def test_selective_checkpointing_can_save_what_travelled() -> None:
    again = "matmul_reduce_scatter"
    saved, *_ = found = run(2, _selective, True)
    assert found == [saved] * 2 and again not in saved
    assert run(2, _selective, False) == [{**saved, again: 1}] * 2


def test_layout_of_a_transposed_view() -> None:
    weight = torch.ones(3, 4)
    assert by_columns(weight.t()) and not by_columns(weight)
    assert not by_columns(torch.ones(3, 8)[:, ::2])


def vmap_makes_many_calls(at: Rank) -> None:
    for operator in OPERATORS:
        case, a, b = plain(operator, at, needs="")
        many = torch.vmap(partial(called, case, b=b))(torch.stack([a, a + 1]))
        assert torch.equal(many, torch.stack([called(case, a, b), called(case, a + 1, b)]))


def what_traces_sizes_as_tensors_is_refused(at: Rank) -> None:
    a, b = torch.ones(4, 6), torch.ones(6, 8)
    q, tokens = torch.ones(1, 2, 4, 8), torch.ones(4, 8)
    x, weights = torch.ones(1, 4, 8), (torch.ones(4 * at.world, 8),) * 3
    indices, up, down = torch.zeros(4, 2).long(), torch.ones(1, 8, 6), torch.ones(1, 6, 8)
    for function, given in (
        (lambda a: ficco.all_gather_matmul(a, b), a),
        (lambda q: ficco.all_gather_attention(q, q, q), q),
        (lambda q: ficco.ulysses_attention(q, q, q), q),
        (lambda x: ficco.ulysses_project(x, *weights, size=4), x),
        (lambda q: ficco.ulysses_output(q, torch.ones(8, 16 * at.world)), q),
        (lambda i: ficco.route(i, at.world, capacity=4).counts, indices),
        (lambda t: ficco.experts(t, indices, torch.ones(4, 2), up, down, capacity=4), tokens),
    ):
        failure = caught(partial(torch.jit.trace, function, (given,)))
        assert failure.type == "NotImplementedError" and "torch.compile" in failure.text


@since("2.13", "cannot have its kernels replaced (2.6), or sums for avg with gloo (2.8)")
@on_ranks(2, fresh=True)
def test_pytorchs_fused_operators_run_ficco(at: Rank) -> None:
    """PyTorch's fused operators, as its own collectives and products compute them."""
    import torch.distributed._symmetric_memory as stock

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ficco.behind_symm_mem()
        ficco.behind_symm_mem()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(5)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    def alike(found: Any, want: Any, about: str) -> None:
        tensors = [[t for t in tree_leaves(x) if t is not None] for x in (found, want)]
        pairs = zip(*tensors, strict=True)
        for one, other in pairs:
            assert torch.equal(one, other) and one.stride() == other.stride(), about

    for dim, shape in ((0, (4, 6)), (0, (4, 3, 6)), (1, (3, 4, 6)), (2, (3, 4, 6))):
        last = dim == len(shape) - 1
        x = integers(at.world, *shape)[at.rank]
        weights = [integers(shape[-1] * (at.world if last else 1), n) for n in (5, 7, 2)]
        with counted() as counts:
            for some, keeps in ((weights, True), (weights, False), (weights[:1], False)):
                given = (x, some, dim, name)
                found = torch.ops.symm_mem.fused_all_gather_matmul(*given, return_A=keeps)
                want = stock._fused_all_gather_matmul_fallback(*given, return_A=keeps)
                alike(found, want, f"{shape}, gathered at {dim}, {keeps}")
            for how in ("sum", "avg"):
                whole = [size * (at.world if i == dim else 1) for i, size in enumerate(shape)]
                a, b = integers(at.world, *whole)[at.rank], integers(whole[-1], 8)
                given = (a, b, how, dim, name)
                found = torch.ops.symm_mem.fused_matmul_reduce_scatter(*given)
                want = stock._fused_matmul_reduce_scatter_fallback(*given)
                alike(found, want, f"{shape}, scattered at {dim}, {how}")
        wanted = {} if last else {"all_gather_matmul": 3, "matmul_reduce_scatter": 2}
        assert counts == wanted, (dim, counts)
    empty, weight = torch.empty(4, 0, 6), integers(6, 5)
    for x, some in ((empty, [weight]), (integers(4, 6), [])):  # a batch of 0; no weights
        found = torch.ops.symm_mem.fused_all_gather_matmul(x, some, 0, name)
        alike(found, stock._fused_all_gather_matmul_fallback(x, some, 0, name), f"{x.shape}")
        assert len(found[1]) == len(some)
    given = (empty, weight, "sum", 0, name)
    found = torch.ops.symm_mem.fused_matmul_reduce_scatter(*given)
    assert found.shape == (4 // at.world, 0, 5)
    alike([found], [stock._fused_matmul_reduce_scatter_fallback(*given)], "scattered, empty")
    # On GPUs PyTorch has kernels of its own, which are in force no more.
    for operator in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        kernels = torch._C._dispatch_dump(f"symm_mem::{operator}").splitlines()
        (active,) = [line for line in kernels if line.startswith("CUDA:")]
        assert "ficco/ops/operators.py" in active, active


def on_a_later_pytorch(program: Callable[[Rank], None], lacks: str) -> Any:
    return pytest.param(program, marks=since("2.13", lacks))


@pytest.mark.parametrize(
    "program",
    [
        second_derivatives_are_refused,
        layouts_and_single_gradients_compiled,
        rows_may_change_without_compiling_again,
        on_a_later_pytorch(
            groups_and_schedules_of_compiled_calls,
            "cannot compile a call with a Schedule, only with its name",
        ),
        a_part_that_is_not_compiled,
        compiled_under_autocast,
        options_of_a_compiled_forward_are_those_of_its_backward,
        options_of_a_call_inside_a_compiled_backward,
        wrong_operands_are_refused_while_compiling,
        on_a_later_pytorch(
            dtensors_are_refused, "has its own text for an error in a compiled function"
        ),
        make_fx_sees_one_operator,
        operations_are_counted,
        operations_are_counted_of_layers_and_compiled,
        vmap_makes_many_calls,
        what_traces_sizes_as_tensors_is_refused,
    ],
    ids=lambda program: program.__name__,
)
def test_on_two_ranks(program: Callable[[Rank], None]) -> None:
    run(2, program, timeout=200)  # compilers take their time on a busy machine
