"""The operators under ``torch.compile`` and as operators of ``torch.library``."""

from __future__ import annotations

import contextvars
import itertools
import time
import warnings
from collections import Counter
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
from ranks import Rank, caught, counted, leave, on_ranks, run, since
from test_gradients import GATHERING, OPERATORS, Case, case_of, make, noted, operands, same, uneven
from test_nn import refuses
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import ficco
from ficco.nn.functional import copied_linear, gathered_linears
from ficco.ops import library
from ficco.ops.library import product_of
from ficco.options import current, current_text
from ficco.runtime import calls as ranges
from ficco.schedules import Schedule

#: Compilers are slow on a busy machine.
on_two_ranks = on_ranks(2, timeout=200)


def called(case: Case, a: torch.Tensor, b: torch.Tensor, group: Any = None) -> torch.Tensor:
    return getattr(ficco, case.operator)(a, b, group=group, **case.arguments())


def plain(operator: str, at: Rank, **changes: Any) -> tuple[Case, torch.Tensor, torch.Tensor]:
    """A case with equal rows, and the operands of this rank."""
    case = case_of(operator, at.world, 4, 6, 8, **changes)
    return (case, *operands(case, make(case, at.world), at))


def special(operator: str, world: int) -> Case:
    """A case that the contract does not trace: a transposed b, and only the gradient of b."""
    case, rows = case_of(operator, world, 4, 6, 8), uneven(operator, world)
    return case.on(rows=rows, transposed=True, dtype="bfloat16", needs="b")


def exact(at: Rank, case: Case, function: Callable[..., Any], iteration: int = 0) -> torch.dtype:
    """Check a call through a function of both operands, and its gradients; return the dtype of the
    result. A transposed b is a view of a leaf."""
    expected = make(case, at.world, iteration)
    a, b = operands(case, expected, at)
    leaf = b.detach().t().contiguous() if case.transposed else b.detach()
    leaf.requires_grad_("b" in case.needs)
    y = function(a, leaf.t() if case.transposed else leaf)
    same(y, expected.y[at.rank], f"the product of {case}")
    y.backward(expected.g[at.rank].to(y))
    if "a" in case.needs:
        same(a.grad, expected.grad_a[at.rank].view(a.shape), f"the gradient of a of {case}")
    if "b" in case.needs:
        grad = expected.grad_b[at.rank]
        same(leaf.grad, grad.t() if case.transposed else grad, f"the gradient of b of {case}")
        assert leaf.grad.is_contiguous()
    assert leaf.grad is None or leaf.grad.dtype == leaf.dtype
    return y.dtype


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@on_two_ranks
def test_second_derivatives_are_refused(at: Rank) -> None:
    """First derivatives are right with ``create_graph``."""
    for operator in OPERATORS:
        case, a, b = plain(operator, at)
        expected = make(case, at.world)
        y = product_of(operator)(a, b, dist.group.WORLD.group_name)
        g = expected.g[at.rank].to(y).requires_grad_()
        grad_a, grad_b = torch.autograd.grad(y, (a, b), g, create_graph=True)
        same(grad_a, expected.grad_a[at.rank], "a")
        same(grad_b, expected.grad_b[at.rank], "b")
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(grad_a.sum(), b)


# torch.compile.


@on_two_ranks
def test_compiled_layouts_and_single_gradients(at: Rank) -> None:
    cases = [(special(operator, at.world), False) for operator in OPERATORS[::2]]
    cases.append((case_of(GATHERING[0], at.world, 4, 6, 8, leading=True, needs="a"), False))
    cases.append((case_of(GATHERING[1], at.world, 4, 6, 8, transposed=True), True))
    for case, saves in cases:
        with ficco.options(save_gathered=saves):
            exact(at, case, compiled(lambda x, w, case=case: called(case, x, w)))


@on_two_ranks
def test_rows_may_change_without_compiling_again(at: Rank) -> None:
    """Rows may also be computed from the operands."""

    def computed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = [x.shape[0] - at.rank + rank for rank in range(at.world)]
        return ficco.all_gather_matmul(x, w, rows=rows)

    for operator in (*OPERATORS[2::2], ""):
        function = getattr(ficco, operator) if operator else computed
        counter = CompileCounterWithBackend("aot_eager")
        layer = compiled(lambda x, w, function=function: function(x, w), counter)
        for rows in (2, 3, 5):  # the first rows differ from all other sizes
            case = Case(OPERATORS[0], tuple(rows + rank for rank in range(at.world)), 6, 8)
            case = case_of(operator, at.world, rows, 6, 8) if operator else case

            def marked(x: torch.Tensor, w: torch.Tensor, case: Case = case) -> torch.Tensor:
                torch._dynamo.maybe_mark_dynamic(x, 0)
                if case.rows_of_b(at.rank) != case.k:
                    torch._dynamo.maybe_mark_dynamic(w, 0)
                return layer(x, w)  # noqa: B023  called at once

            exact(at, case, marked, rows)
        assert counter.frame_count == 1, function


@since("2.13", "cannot compile a call with a Schedule, only with its name")
@on_two_ranks
def test_groups_and_schedules_of_compiled_calls(at: Rank) -> None:
    case, a, b = plain("all_gather_matmul", at)
    expected = make(case, at.world)
    mesh = init_device_mesh("cpu", (1, at.world), mesh_dim_names=("dp", "tp"))
    world = dist.group.WORLD
    named, parsed = "hetero-fused-1d:pieces=2", Schedule.parse("uniform-fused-1d:pull")
    for how in ({"group": world}, {"group": mesh["tp"]}, {"schedule": named}, {"schedule": parsed}):
        layer = compiled(lambda x, w, how=how: ficco.all_gather_matmul(x, w, **how))
        assert torch.equal(layer(a, b).double(), expected.y[at.rank])
    recorded = EagerAndRecordGraphs()
    layer = compiled(
        lambda x, w, g, name: ficco.all_gather_matmul(x, w, group=g, schedule=name), recorded
    )
    for group, schedule in ((world, named), (mesh["tp"], parsed), (world, named), (None, "auto")):
        assert torch.equal(layer(a, b, group, schedule).double(), expected.y[at.rank])
    for graph, text in zip(recorded.graphs, (named, str(parsed), "'auto'"), strict=True):
        assert text in str(graph.code)
    layer = compiled(lambda x, w: ficco.all_gather_matmul(x, w, group=mesh), "eager")
    assert "required a mesh of one dimension" in caught(lambda: layer(a, b)).text
    ficco.close(mesh["tp"].get_group())


@on_two_ranks
def test_an_eager_layer_in_a_compiled_step(at: Rank) -> None:
    """A compiled step with an eager layer and the backward inside."""
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
        grads = a.grad, b.grad
        a.grad = b.grad = None
        ficco.all_gather_matmul(2 * a, b).backward(grad.to(a.dtype))
        assert torch.equal(grads[0], a.grad) and torch.equal(grads[1], b.grad)


@on_two_ranks
def test_compiled_calls_under_autocast(at: Rank) -> None:
    cast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    for operator in OPERATORS[2::2]:
        case = case_of(operator, at.world, 4, 6, 8)

        def inside(x: torch.Tensor, w: torch.Tensor, case: Case = case) -> torch.Tensor:
            with cast():
                return called(case, x, w)

        assert exact(at, case, compiled(inside)) == torch.bfloat16
    case = case_of(OPERATORS[0], at.world, 4, 6, 8)
    layer = compiled(lambda x, w: called(case, x, w))
    assert exact(at, case, cast()(layer)) == torch.bfloat16


@on_two_ranks
def test_options_of_a_compiled_forward_are_those_of_its_backward(at: Rank) -> None:
    """Other options compile again."""
    counter = CompileCounterWithBackend("aot_eager")
    case = case_of("all_gather_matmul", at.world, 4, 6, 8)
    expected = make(case, at.world)
    layer = compiled(lambda x, w: called(case, x, w), counter)

    def calls(**options: Any) -> list[Any]:
        a, b = operands(case, expected, at)
        with ficco.options(**options) if options else nullcontext():
            y = layer(a, b)
        seen: list[Any] = []
        with noted(seen), ficco.options(timeout_s=19.0):
            y.backward(expected.g[at.rank].to(y))
        same(a.grad, expected.grad_a[at.rank], "a")
        return [(operator, used.timeout_s, used.save_gathered) for operator, _, used in seen]

    def with_gather(timeout_s: float | None) -> list[Any]:
        return [(name, timeout_s, False) for name in ("all_gather_matmul", "matmul_reduce_scatter")]

    assert calls() == with_gather(None)
    assert calls(timeout_s=33.0) == with_gather(33.0)
    assert calls(save_gathered=True) == [("matmul_reduce_scatter", None, True)]
    assert calls() == with_gather(None)
    ficco.set_options(timeout_s=44.0)
    try:
        assert calls() == with_gather(44.0)
        assert calls(timeout_s=None) == with_gather(None)
    finally:
        ficco.set_options(timeout_s=None)
    # One frame outside of blocks, one each for 33 s, save_gathered, 44 s, and None in a block.
    assert counter.frame_count == 5


@on_two_ranks
def test_options_of_a_call_inside_a_compiled_backward(at: Rank) -> None:
    """The call keeps the options of the forward while the backward runs in another block."""
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
    """The blocks of two tasks may overlap, and a copied context keeps its block. No options are in
    force after all blocks are closed."""
    function = compiled(lambda x: (x + 1, current_text()), "eager", dynamic=False)
    seen: list[tuple[float | None, str]] = []

    def text() -> str:
        return function(torch.ones(1))[1]

    def look() -> None:
        seen.append((current().timeout_s, text()))

    tasks = [(contextvars.copy_context(), ficco.options(timeout_s=s)) for s in (5.0, 7.0)]
    for task, block in tasks:
        task.run(block.__enter__)
    for task, block in tasks:
        look()
        task.run(look)
        task.run(block.__exit__, None, None, None)
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


@on_two_ranks
def test_wrong_operands_are_refused_while_compiling(at: Rank) -> None:
    narrow, wide = torch.ones(4, 6), torch.ones(6, 8)
    for a, b, text in (
        (narrow.int(), wide.int(), "int32 is not served on cpu; use one of"),
        (narrow, torch.ones(7, 8), "weight as weight.t()"),
        (narrow[0], wide, "required a_shard [..., m/W, k] and b [k, n]"),
        (narrow, wide.double(), "required one dtype"),
    ):
        assert text in _while_compiling(a, b).text, text
    for rows in (3, [1.5, 2], "ab"):
        with FlopCounterMode(display=False):  # so that the call is an operator
            failure = caught(partial(ficco.all_gather_matmul, narrow, wide, rows=rows))
        assert failure.type == "ValueError" and failure.text.startswith("rows: required"), failure


@since("2.13", "has its own text for an error in a compiled function")
@on_two_ranks
def test_dtensors_are_refused(at: Rank) -> None:
    """DTensors in place of plain tensors raise, in eager and in compiled calls."""
    mesh = init_device_mesh("cpu", (at.world,))
    required = "a: required a plain tensor, got a DTensor with (Shard(dim=0),); pass a.to_local()"
    for operator in OPERATORS:
        case, a, b = plain(operator, at)
        sharded = DTensor.from_local(a.detach(), mesh, [Shard(0)])
        refuses((required, partial(called, case, sharded, b)))
    other = DTensor.from_local(b, mesh, [Shard(1)])
    refuses(("pass b.to_local()", partial(called, case, a, other)))
    compiling = required.replace(" with (Shard(dim=0),)", "")
    assert compiling in _while_compiling(sharded, b).text


# Counted operations and profiler ranges.


@on_two_ranks
def test_operations_are_counted(at: Rank) -> None:
    """The product of this rank counts once, and once more for each needed gradient."""
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


@on_two_ranks
def test_operations_of_layers_and_compiled_calls_are_counted(at: Rank) -> None:
    group: Any = dist.group.WORLD
    x, w = torch.ones(4, 6, requires_grad=True), torch.ones(8, 6, requires_grad=True)
    product = 2 * 4 * at.world * 6 * 8
    with FlopCounterMode(display=False) as counter:
        y, gathered = ficco.all_gather_matmul(x, w.t(), return_gathered=True)
        gathered.sum().backward()
    assert counter.get_total_flops() == product  # the gradient of gathered needs none
    with FlopCounterMode(display=False) as counter:
        torch.cat(gathered_linears(x, (w, 2 * w), (None, None), group=group)).sum().backward()
    assert counter.get_total_flops() == 2 * 3 * product
    layer = torch.compile(called, backend="aot_eager")
    case, *_ = plain("all_gather_matmul", at)
    layer(case, x, w.t())
    with FlopCounterMode(display=False) as counter:
        layer(case, x, w.t()).sum().backward()
    assert counter.get_total_flops() == 3 * product


def test_operators_are_registered_on_first_use(tmp_path: Path) -> None:
    """Any thread may register an operator. The import of ficco registers none, and imports neither
    Triton nor the counter of FLOPs. A counter that is imported later counts the operators."""
    program = (
        "import sys, torch, ficco, torch.distributed as dist\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "assert 'torch.utils.flop_counter' not in sys.modules and 'triton' not in sys.modules\n"
        "names = torch._C._dispatch_get_all_op_names\n"
        "assert not [name for name in names() if name.startswith('ficco::')]\n"
        "def ask(at):\n"
        "    return torch.ops.ficco.experts_backward\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    assert len({id(op) for op in pool.map(ask, range(64))}) == 1\n"
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


@on_ranks(2)
def test_eager_calls_bypass_the_dispatcher(at: Rank) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for operator, needs in itertools.product(OPERATORS, ("", "ab")):
            y = called(*plain(operator, at, needs=needs))
            if needs:
                y.sum().backward()
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        product_of("all_gather_matmul")(torch.ones(2, 2), torch.ones(2, 2), name)
    seen = [event.name for event in profile.events() if event.name.startswith("ficco::")]
    assert seen == ["ficco::all_gather_matmul"]  # the last call


def _ranges(at: Rank, observer: str) -> tuple[list[str], list[str]]:
    """Ranges of a forward and its backward in a profiler, and ranges that a tool receives."""
    group, pushed = dist.new_group(list(range(at.world))), []
    case, a, b = plain("all_gather_matmul", at, schedule="serial", needs="a")

    def step() -> None:
        called(case, a, b, group).sum().backward()

    nvtx = SimpleNamespace(range_push=pushed.append, range_pop=lambda: pushed.append("pop"))
    stub = SimpleNamespace(is_available=lambda: True, nvtx=nvtx)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "STEPS", observer == "steps")
        if observer == "off":
            patch.setattr(ranges, "marked", None)  # must not be called
        if observer == "tool":
            patch.setattr(ranges, "TOOLED", True)
            patch.setattr(ranges, "active", lambda: True)
            patch.setattr(ranges, "gpu", stub)
        profiled = observer in ("profiler", "steps")
        with profile if profiled else nullcontext():
            step()
    leave(group)
    events = sorted(profile.events() if profiled else (), key=lambda event: event.time_range.start)
    names = [event.name for event in events]
    return [name for name in names if name.startswith("ficco: ") or " on " in name], pushed


def test_calls_are_ranges_of_profilers_and_tools() -> None:
    forward = "ficco: all_gather_matmul(m=8 (4 x 2 ranks), n=8, k=6, float32), serial"
    backward = "ficco: matmul_reduce_scatter(m=8 (4 x 2 ranks), n=6, k=8, float32), serial"
    assert run(2, _ranges, "off") == [([], [])] * 2
    assert run(2, _ranges, "profiler") == [([forward, backward], [])] * 2
    assert run(2, _ranges, "tool") == [([], [forward, "pop", backward, "pop"])] * 2
    for names, _ in run(2, _ranges, "steps"):
        inside = names[1 : names.index(backward)]
        assert names[0] == forward and inside and all(" on compute0)" in name for name in inside)


@on_ranks(2)
def test_selective_checkpointing_can_save_results_of_ficco(at: Rank) -> None:
    case, a, b = plain("matmul_reduce_scatter", at)

    def block(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(called(case, a, b)) ** 2

    def backward(y: torch.Tensor) -> tuple[Any, Counter[str]]:
        with counted() as counts:
            return torch.autograd.grad(y.sum(), (a, b)), counts

    expected, calls = backward(block(a, b))
    for saved in ([], [torch.ops.ficco.matmul_reduce_scatter.default]):
        contexts = partial(create_selective_checkpoint_contexts, saved)
        y = checkpoint(block, a, b, use_reentrant=False, context_fn=contexts)
        grads, counts = backward(y)
        assert all(map(torch.equal, grads, expected))
        assert counts == calls + Counter(() if saved else (case.operator,))


@on_two_ranks
def test_vmap_makes_many_calls(at: Rank) -> None:
    for operator in OPERATORS:
        case, a, b = plain(operator, at, needs="")
        many = torch.vmap(partial(called, case, b=b))(torch.stack([a, a + 1]))
        assert torch.equal(many, torch.stack([called(case, a, b), called(case, a + 1, b)]))


@on_two_ranks
def test_tracers_of_sizes_as_tensors_are_refused(at: Rank) -> None:
    a, b = torch.ones(4, 6), torch.ones(6, 8)
    q, tokens = torch.ones(1, 2, 4, 8), torch.ones(4, 8)
    x, weights = torch.ones(1, 4, 8), (torch.ones(4 * at.world, 8),) * 3
    indices, up, down = torch.zeros(4, 2).long(), torch.ones(1, 8, 6), torch.ones(1, 6, 8)
    for function, operand in (
        (lambda a: ficco.all_gather_matmul(a, b), a),
        (lambda q: ficco.all_gather_attention(q, q, q), q),
        (lambda q: ficco.ulysses_attention(q, q, q), q),
        (lambda x: ficco.ulysses_project(x, *weights, size=4), x),
        (lambda q: ficco.ulysses_output(q, torch.ones(8, 16 * at.world)), q),
        (lambda i: ficco.route(i, at.world, capacity=4).counts, indices),
        (lambda t: ficco.experts(t, indices, torch.ones(4, 2), up, down, capacity=4), tokens),
    ):
        failure = caught(partial(torch.jit.trace, function, (operand,)))
        assert failure.type == "NotImplementedError" and "torch.compile" in failure.text


@since("2.13", "cannot have its kernels replaced (2.6), or sums for avg with gloo (2.8)")
@on_ranks(2, fresh=True)
def test_pytorchs_fused_operators_run_ficco(at: Rank) -> None:
    import torch.distributed._symmetric_memory as stock

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ficco.behind_symm_mem()
        ficco.behind_symm_mem()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(5)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    def same_as_stock(operator: str, *operands: Any, **options: Any) -> list[torch.Tensor]:
        calls = getattr(torch.ops.symm_mem, operator), getattr(stock, f"_{operator}_fallback")
        results = [tree_leaves(call(*operands, name, **options)) for call in calls]
        outs, expected = ([leaf for leaf in leaves if leaf is not None] for leaves in results)
        for out, want in zip(outs, expected, strict=True):
            assert torch.equal(out, want) and out.stride() == want.stride(), (operands, options)
        return outs

    gathers, scatters = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
    for dim, shape in ((0, (4, 6)), (0, (4, 3, 6)), (1, (3, 4, 6)), (2, (3, 4, 6))):
        last = dim == len(shape) - 1
        x = integers(at.world, *shape)[at.rank]
        weights = [integers(shape[-1] * (at.world if last else 1), n) for n in (5, 7, 2)]
        whole = [size * (at.world if i == dim else 1) for i, size in enumerate(shape)]
        a, b = integers(at.world, *whole)[at.rank], integers(whole[-1], 8)
        with counted() as counts:
            for factors, keeps in ((weights, True), (weights, False), (weights[:1], False)):
                same_as_stock(gathers, x, factors, dim, return_A=keeps)
            for reduction in ("sum", "avg"):
                same_as_stock(scatters, a, b, reduction, dim)
        expected = {} if last else {"all_gather_matmul": 3, "matmul_reduce_scatter": 2}
        assert counts == expected, (dim, counts)
    empty, weight = torch.empty(4, 0, 6), integers(6, 5)
    for x, factors in ((empty, [weight]), (integers(4, 6), [])):  # a batch of 0; no weights
        assert len(same_as_stock(gathers, x, factors, 0)) == 1 + len(factors)
    (out,) = same_as_stock(scatters, empty, weight, "sum", 0)
    assert out.shape == (4 // at.world, 0, 5)
    # ficco's kernels replace PyTorch's kernels for GPUs, too.
    for operator in (gathers, scatters):
        kernels = torch._C._dispatch_dump(f"symm_mem::{operator}").splitlines()
        (active,) = [line for line in kernels if line.startswith("CUDA:")]
        assert "ficco/ops/operators.py" in active, active
