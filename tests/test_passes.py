"""The compile pass: replacements give the same numbers, collectives that stay have a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Rank, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.fx.experimental.proxy_tensor import make_fx

from ficco import passes
from ficco.passes.graph import Unclear, canonical, original, permuted, regrouped, rows_of

WORLD = 2

# Programs. Each is a function of tensors and of a group; ``expected`` lists the operators that
# replace its collectives, in the order of the graph.


def gather(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    name = "all_gather_single" if hasattr(funcol, "all_gather_single") else "all_gather_tensor"
    return getattr(funcol, name)(x, dim, group)


def scatter(x: torch.Tensor, dim: int, group: Any, reduce_op: str = "sum") -> torch.Tensor:
    new = hasattr(funcol, "reduce_scatter_single")
    name = "reduce_scatter_single" if new else "reduce_scatter_tensor"
    return getattr(funcol, name)(x, reduce_op, dim, group)


def exchange(x: torch.Tensor, group: Any) -> torch.Tensor:
    return funcol.all_to_all_single(x, None, None, group)


def reduce(x: torch.Tensor, group: Any, reduce_op: str = "sum") -> torch.Tensor:
    return funcol.all_reduce(x, reduce_op, group)


MATRICES, BATCH = ((6, 8), (8, 4)), ((3, 4, 8), (8, 5))
ONES = [torch.ones(shape) for shape in MATRICES]  #: of graphs that never run


@dataclass(frozen=True)
class Program:
    name: str
    expected: tuple[str, ...]
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = MATRICES
    says: str = ""
    dtype: torch.dtype = torch.float32
    reference: Callable[..., Any] | None = None  #: an equivalent that gloo supports

    def __str__(self) -> str:
        return self.name


AGM, A2AM = "all_gather_matmul", "all_to_all_matmul"
MRS, MA2A, MAR = "matmul_reduce_scatter", "matmul_all_to_all", "matmul_all_reduce"


def _mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, g: Any) -> torch.Tensor:
    return scatter(torch.relu(gather(x, 1, g) @ up) @ down, 1, g)


def _with_gradients(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, g: Any) -> torch.Tensor:
    ops, wait, name = torch.ops._c10d_functional_autograd, funcol.wait_tensor, g.group_name
    h = wait(ops.all_gather_into_tensor(x, WORLD, name)) @ up
    return wait(ops.reduce_scatter_tensor(h @ down, "sum", WORLD, name))


def _by_ranks(x: torch.Tensor, g: Any) -> torch.Tensor:
    return gather(x, 0, g).view(WORLD, *x.shape)


def _unflattened(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    b, s, k = x.shape
    return _by_ranks(x, g).transpose(0, 1).reshape(b, WORLD * s, k) @ w


def _interleaved(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    return _by_ranks(x, g).permute(1, 2, 0, 3).reshape(-1, x.shape[2]) @ w


def _viewed(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    return (_by_ranks(x, g).transpose(0, 1) @ w).view(-1, w.shape[1]) + 1


def _sliced(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    """A gather of DTensor for dynamic sizes."""
    return torch.ops.aten.slice.Tensor(gather(x, 1, g), 1, 0, WORLD * x.shape[1]) @ w


def _scatter_interleaved(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    y = (x @ w).view(3, 4, WORLD, 5).permute(2, 0, 1, 3)
    return scatter(y.contiguous(), 0, g)


def _into(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    a = torch.empty(WORLD * x.shape[0], *x.shape[1:])
    return torch.ops.aten.copy(a, funcol.wait_tensor(gather(x, 0, g))) @ w


def _back_into(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    """The trace of ``dist.all_reduce``."""
    y = nn.functional.linear(x, w)
    return torch.ops.aten.copy(y, funcol.wait_tensor(reduce(y, g))) + 1


def _sum_into(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, g: Any) -> torch.Tensor:
    return torch.ops.aten.copy(y := x @ w + x @ v, reduce(y, g)) + 1


def _three_products(x: Any, q: Any, k: Any, v: Any, g: Any) -> tuple[torch.Tensor, ...]:
    return (a := gather(x, 1, g)) @ q, a @ k, a @ v


def _turned(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    return reduce((x @ w).transpose(0, 1).contiguous(), g).view(-1, 5) * 2


def _gathered(x: torch.Tensor, w: torch.Tensor, g: Any, dim: int = 0) -> torch.Tensor:
    return gather(x, dim, g) @ w


def _scattered(x: Any, w: Any, g: Any, dim: int = 0, reduce_op: str = "sum") -> torch.Tensor:
    return scatter(x @ w, dim, g, reduce_op)


_gathered_batch, _scattered_batch = partial(_gathered, dim=1), partial(_scattered, dim=1)
_averaged = partial(_scattered, reduce_op="avg")
COPY, KEPT, P, linear = "put in order by a copy", "is kept for", Program, nn.functional.linear
BIAS, CAST = "the bias is added to its result", "converted to bfloat16 before it travels"
CUBE, FLAT = ((2, 3, 8), (8, 5)), ((2, 3, 8), (5, 8))
TWO, THREE = ((3, 8), (8, 2), (8, 6)), ((3, 4, 8), (8, 2), (8, 6), (8, 3))
SUMMED = ((3, 4, 8), (8, 5), (3, 4, 2), (5, 2), (12, 3), (3, 5))
REPLACED = [
    P("gather", (AGM,), _gathered),
    P("bias", (AGM,), lambda x, w, b, g: linear(gather(x, 0, g), w, b), (*FLAT, (5,)), BIAS),
    P("batch of one", (AGM,), _gathered_batch, ((1, 3, 8), (8, 5))),
    P("batch", (AGM,), _gathered_batch, BATCH, COPY),
    P("by hand", (AGM,), _unflattened, BATCH, COPY),
    P("interleaved", (AGM,), _interleaved, BATCH, COPY),
    P("scatter interleaved", (MRS,), _scatter_interleaved, ((24, 8), (8, 5)), "by a copy"),
    P("flat", (AGM,), lambda x, w, g: gather(x, 0, g).view(-1, 8) @ w, ((24,), (8, 5))),
    P("into a tensor", (AGM,), _into),
    P("three products", (AGM,), _three_products, THREE, KEPT),
    P("a late b", (AGM,), lambda x, w, v, g: ((a := gather(x, 0, g)) @ w, a @ (v * 2)), TWO, KEPT),
    P("kept", (AGM,), lambda x, w, g: ((a := gather(x, 1, g)) @ w, a.relu().sum(), a), BATCH, KEPT),
    P("converted", (AGM,), lambda x, w, g: gather(x, 1, g).bfloat16() @ w.bfloat16(), CUBE, CAST),
    P("scatter", (MRS,), _scattered),
    P("scatter batch", (MRS,), _scattered_batch, BATCH, "in the order of the ranks by a copy"),
    P(
        *("scatter an average", (MRS,), _averaged, MATRICES, "divided by 2"),
        reference=lambda x, w, g: _scattered(x, w, g) / WORLD,
    ),
    P("reduce batch", (MAR,), lambda x, w, g: reduce(x @ w.t(), g) * 2, FLAT),
    P("reduce transposed", (MAR,), _turned, CUBE, f"the result's rows are {COPY}"),
    P("reduce in place", (MAR,), _back_into, FLAT),
    P("reduce a sum in place", (MAR,), _sum_into, (*CUBE, (8, 5))),
    P("exchange before", (A2AM,), lambda x, w, g: exchange(x, g) @ w),
    P("exchange behind", (MA2A,), lambda x, w, g: exchange(x @ w, g)),
    P(
        *("sum of products", (MRS,)),
        lambda x, w, y, v, z, u, g: scatter(x @ w + y @ v.t() + (z @ u).view(3, 4, 5), 1, g),
        *(SUMMED, "sum of 3 products"),
    ),
    P("a layer", (AGM, MRS), _mlp, ((2, 3, 8), (8, 6), (6, 8))),
    P("collectives with gradients", (AGM, MRS), _with_gradients, ((6, 8), (8, 6), (6, 8))),
    P("viewed", (AGM,), _viewed, ((3, 8), (8, 5)), COPY),  # batched after autograd
    P("a slice of all", (AGM,), _sliced, ((2, 3, 8), (8, 6))),
]

#: Programs that are also traced with every size dynamic.
DYNAMIC = (
    *("bias", "batch", "three products", "kept", "scatter an average", "reduce batch"),
    *("reduce transposed", "a layer", "a slice of all"),
)


def inputs(program: Program, rank: int) -> list[torch.Tensor]:
    """Small integers that depend on the rank, so that every sum is exact in every dtype."""
    rng = torch.Generator().manual_seed(97 * rank + len(program.name))
    return [torch.randint(-3, 4, size, generator=rng).to(program.dtype) for size in program.shapes]


def trace(fn: Callable[..., Any], tensors: Any, group: Any, **options: Any) -> torch.fx.GraphModule:
    options = {"tracing_mode": "fake"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated names of collectives
        return make_fx(lambda *inputs: fn(*inputs, group), **options)(*tensors)


def ficco_calls(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in graph.graph.nodes if getattr(n.target, "namespace", "") == "ficco"]


def operators(graph: torch.fx.GraphModule) -> list[str]:
    names = (str(node.target._schema.name) for node in ficco_calls(graph))
    return [name.partition("::")[2].removesuffix("_gathered") for name in names]


def collectives(graph: torch.fx.GraphModule) -> int:
    return sum("c10d" in getattr(node.target, "namespace", "") for node in graph.graph.nodes)


# The same numbers on two ranks, with the same strides.


def _same(at: Rank, program: Program, options: dict[str, Any]) -> list[str]:
    group, tensors = dist.group.WORLD, inputs(program, at.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        want = (program.reference or program.run)(*tensors, group)
    graph = trace(program.run, tensors, group, **options)
    report = passes.replace(graph)
    result = graph(*tensors)
    expected, results = (list(t) if isinstance(t, tuple) else [t] for t in (want, result))
    for one, other in zip(expected, results, strict=True):
        facts = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in (one, other)]
        assert facts[0] == facts[1], f"{program}: {facts}"
        assert torch.equal(one, other), f"{program}: rank {at.rank}\n{graph.code}"
    assert tuple(operators(graph)) == program.expected, f"{report}\n{graph.code}"
    assert collectives(graph) == 0, graph.code
    assert program.says in report.entries[0].reason, f"{report}\n{graph.code}"
    return [str(entry) for entry in report]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True}],
    ids=["static", "dynamic", "before autograd"],
)
@on_ranks(WORLD, timeout=150)  # traces of many programs
def test_replaced_programs_give_the_same_integers(at: Rank, options: dict[str, Any]) -> None:
    for program in REPLACED:
        # Symbolic traces are slow; in "flat" and "exchange" they do not know how rows divide.
        serves = program.name in DYNAMIC if "tracing_mode" in options else program.name != "viewed"
        if serves or "pre_dispatch" in options:
            reports = [""] * at.world
            dist.all_gather_object(reports, _same(at, program, options))
            assert reports == reports[:1] * at.world  # the ranks decide alike


class FeedForward(nn.Module):
    """The layer of torchtitan without operations that round; its weights are integers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (8, 12), (12, 8), (8, 12)
        self.w1, self.w2, self.w3 = (nn.Linear(*each, bias=False) for each in sizes)
        torch.manual_seed(5)
        for weight in self.parameters():
            weight.data.copy_(torch.randint(-1, 2, weight.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(torch.relu(self.w1(x)) * self.w3(x))


def _parallel(layout: Any) -> nn.Module:
    """The layer with PyTorch's parallel styles, in the form of a torchtitan plan."""
    layer = nn.Sequential(FeedForward())  # hooks of an inner layer are compiled, too
    whole = (Replicate(),)
    plan: dict[str, Any] = {
        "0": parallel.PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=whole),
        "0.w1": parallel.ColwiseParallel(use_local_output=True),
        "0.w2": parallel.RowwiseParallel(output_layouts=layout),
        "0.w3": parallel.ColwiseParallel(),
    }
    return parallel.parallelize_module(layer, init_device_mesh("cpu", (WORLD,)), plan)


def _train(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(weight.grad.to_local() for weight in layer.parameters())]


@on_ranks(WORLD)
def test_a_parallelised_model_has_its_collectives_replaced(at: Rank) -> None:
    """Forward and backward, which adds two products. Without sequence parallelism: all-reduces."""
    for layout in (Shard(1), Replicate()):
        torch._dynamo.reset()
        sequence = layout == Shard(1)
        rng = torch.Generator().manual_seed(at.rank if sequence else 7)
        rows = 3 if sequence else 3 * WORLD
        x, grad = (torch.randint(-2, 3, (2, rows, 8), generator=rng).float() for _ in range(2))
        want, backend = _train(_parallel(layout), x, grad), passes.backend("aot_eager")
        results = _train(torch.compile(_parallel(layout), backend=backend, fullgraph=True), x, grad)
        assert all(map(torch.equal, want, results)), backend.report
        entries = [*backend.report]
        names = [(entry.collective, entry.operator) for entry in entries]
        if sequence:
            assert names == [("all-gather", AGM), ("reduce-scatter", MRS)] * 2
            assert "passes.py:" in entries[0].where and "self.w1(x)" in entries[0].where
            assert "sum of 2 products is one" in entries[3].reason
        assert sequence or ("all-reduce", MAR) in names


@pytest.mark.slow
@on_ranks(WORLD, timeout=150)
def test_inductor_runs_the_pass_after_the_users_own(at: Rank) -> None:
    torch._dynamo.reset()
    from torch._inductor import config

    seen: list[Any] = []
    x, w = torch.full((3, 8), at.rank + 1.0), torch.arange(40.0).view(8, 5)
    layer, backend = partial(_gathered, g=dist.group.WORLD), passes.backend()
    with config.patch({passes.compiling.HOOK: seen.append}):
        result = torch.compile(layer, backend=backend, fullgraph=True)(x, w)
    assert torch.equal(result, layer(x, w))
    assert "1 collective in 1 graph: 1 replaced" in str(backend.report) and len(seen) == 1
    for hook in (passes.compiling.HOOK, "post_grad_custom_post_pass", "joint_custom_pre_pass"):
        own = passes.inductor_pass()
        torch._dynamo.reset()
        with config.patch({hook: own}):
            assert torch.equal(torch.compile(layer)(x, w), result)
        assert len(own.report.replaced) == 1 and not own.report.left, hook


# Collectives that stay, and the reasons.


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Any]]:
    """Groups by size; this process is their only real rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield {size: dist.new_group(list(range(size))) for size in (1, 2, 3, 4)}
    finally:
        dist.destroy_process_group()


def _unwaited(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    return torch.ops._c10d_functional.all_gather_into_tensor(x, g.size(), g.group_name)


def _write(target: str) -> Callable[..., Any]:
    def fn(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
        a = funcol.wait_tensor(gather(x, 0, g))
        b = a.relu() if target == "weight" else w
        {"operand": x, "result": a, "weight": w}[target].add_(1)
        return a @ w, b

    return fn


def _sum_into_weight(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    """The first user of the gathered tensor writes to the right operand."""
    torch.sum(a := gather(x, 0, g), 0, out=w[:, 0])
    return a @ w


def _written_operand(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
    y = x @ w
    x.add_(1)
    return scatter(y, 0, g)


def _of_two_orders(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    return scatter((x @ w).view(2, 2, 4).transpose(0, 1) + (x @ w).view(2, 2, 4), 0, g)


def left(says: str, run: Callable[..., Any], *shapes: tuple[int, ...], **more: Any) -> Program:
    return Program(says, (), run, shapes or MATRICES, **more)


#: Programs of two matrices whose collective stays, by the reason.
OF_MATRICES: dict[str, Callable[..., Any]] = {
    "mul.Tensor is no product": lambda x, w, g: gather(x, 0, g) * 2,
    "compile the parent module": lambda x, w, g: gather(x, 0, g),
    "an input of the graph (compile": lambda x, w, g: scatter(x, 0, g),
    "slice": lambda x, w, g: gather(x, 0, g)[1:] @ w,
    "before it is waited for": lambda x, w, g: _unwaited(x, w, g) @ w,
    "nothing in this graph waits": _unwaited,
    "used unconverted elsewhere": lambda x, w, g: ((a := gather(x, 0, g)).half() @ w.half(), a * 2),
    "converted twice": lambda x, w, g: gather(x, 0, g).half().float() @ w,
    "computed from the gathered tensor": lambda x, w, g: (a := gather(x, 0, g)) @ (a.t() @ a),
    "cannot move before": lambda x, w, g: ((a := gather(x, 0, g)) * 2, a @ torch.bernoulli(w)),
    "may write to": _write("operand"),
    "may write to the result": _write("result"),
    "may write to the right operand": _write("weight"),
    "sum_1 may write to the right operand": _sum_into_weight,
    "uneven blocks": lambda x, w, g: funcol.all_to_all_single(x, [4, 2], [2, 4], g) @ w,
    "uses what was exchanged, too": lambda x, w, g: ((a := exchange(x, g)) @ w, a * 2),
    "by max": lambda x, w, g: scatter(x @ w, 0, g, "max"),
    "columns of the product": _scattered_batch,
    "uses the product, too": lambda x, w, g: (scatter(y := x @ w, 0, g), y.relu()),
    "uses a part of the product": lambda x, w, g: (
        scatter(torch.cat(y := (x @ w).chunk(2, 1)), 0, g),
        y[0] * 2,
    ),
    "is no product": lambda x, w, g: scatter(x.relu(), 0, g),
    "the sum of a product and of something else": lambda x, w, g: scatter(x @ w + x[:, :4], 0, g),
    "rounded to another dtype": lambda x, w, g: scatter((x @ w).bfloat16(), 0, g),
    "may write to an operand": _written_operand,
    "several tensors": lambda x, w, g: funcol.all_reduce_coalesced([x @ w, x], "sum", g),
    "broadcast": lambda x, w, g: funcol.broadcast(x, 0, g) @ w,
}
LEFT = [
    *(left(says, fn) for says, fn in OF_MATRICES.items()),
    left("right operand", lambda x, w, g: w @ gather(x, 0, g), (4, 8), (5, 8)),
    left("or over gathered columns", lambda x, w, g: gather(x, 1, g) @ w, (6, 4), (8, 4)),
    left("sums over gathered rows", lambda x, w, g: gather(x, 0, g).t() @ w, (3, 8), (6, 4)),
    left("bmm", lambda x, w, g: torch.bmm(gather(x, 0, g), w), (2, 3, 8), (4, 8, 4)),
    left("beta", lambda x, w, b, g: torch.addmm(b, gather(x, 0, g), w, beta=2), *MATRICES, (4,)),
    left("int64 is not served", _gathered, dtype=torch.int64),
    left("without elements", _gathered, (0, 8), (8, 4)),
    left("overflow", lambda x, w, g: reduce(x @ w, g, "avg"), dtype=torch.float16),
    left(
        "aten.split.Tensor is no product",
        lambda x, w, g: torch.cat(gather(x, 0, g).chunk(2)[::-1], 1) @ w,
        *BATCH,
    ),
    left(
        "aten.cat.default is no product",
        lambda x, w, g: scatter(torch.cat((x @ w).chunk(2, 1)[::-1]), 0, g),
        *BATCH,
    ),
    left("rows lie in different orders", _of_two_orders, (4, 8), (8, 4)),
    left(
        "bias is added on every rank",
        lambda x, w, b, g: scatter(torch.addmm(b, x, w), 0, g),
        *(*MATRICES, (4,)),
    ),
]


@pytest.mark.parametrize("program", LEFT, ids=str)
def test_what_stays_has_a_reason(program: Program, groups: dict[int, Any]) -> None:
    graph = trace(program.run, inputs(program, 0), groups[2])
    before = graph.code
    report = passes.replace(graph)
    (entry,) = report
    assert program.name in entry.reason
    assert not entry.replaced and entry.operator == "" and not report
    assert graph.code == before
    assert entry.group == groups[2].group_name and entry.world == 2


def _received(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    """A received message overwrites the gathered tensor before the product."""
    a = gather(x, 0, g)
    funcol.wait_tensor(FUNCTIONAL.irecv(x, 0, 0, g.group_name))
    return a @ w


def _batched(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
    peers = [0, 0], [0, 0]
    return FUNCTIONAL.batch_p2p_ops(["isend", "irecv"], *peers, [x @ w, x], g.group_name)


FUNCTIONAL, MESSAGE = torch.ops._c10d_functional, "a message between two ranks"
WRITES = "irecv may write to the operand before the product"


@pytest.mark.skipif(
    not hasattr(FUNCTIONAL, "batch_p2p_ops"),
    reason=f"PyTorch {torch.__version__} has no functional messages",
)
@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda x, w, g: FUNCTIONAL.isend(x @ w, 0, 0, g.group_name), {"isend": MESSAGE}),
        (_batched, {"batch_p2p_ops": "messages between pairs of ranks"}),
        (_received, {"all-gather": WRITES, "irecv": MESSAGE}),
        (
            lambda x, w, g: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, g.group_name) @ w.t(),
            {"shard_dim_alltoall": "joins one dimension and cuts another"},
        ),
    ],
)
def test_other_collectives_are_reported_by_name(fn: Any, says: Any, groups: dict[int, Any]) -> None:
    report = passes.replace(trace(fn, ONES, groups[2]))
    assert not report and [entry.collective for entry in report] == list(says)
    for entry, text in zip(report, says.values(), strict=True):
        assert text in entry.reason and (entry.group, entry.world) == (groups[2].group_name, 2)


def test_a_collective_of_a_later_pytorch_is_reported_by_name(groups: dict[int, Any]) -> None:
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("later(Tensor input, str group_name) -> Tensor")
    library.impl("later", lambda x, group: x.clone(), "CompositeExplicitAutograd")

    def run(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
        return funcol.wait_tensor(torch.ops._c10d_functional.later(x @ w, g.group_name))

    (entry,) = passes.replace(trace(run, ONES, groups[2]))
    assert (entry.collective, entry.replaced) == ("later", False)
    assert entry.reason == "no operator of ficco stands for later"


def test_every_functional_collective_of_this_pytorch_has_a_row() -> None:
    from ficco.passes.graph import COLLECTIVES, OTHER_FORMS

    names = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(("_c10d_functional::", "_c10d_functional_autograd::"))
    }
    # Waits and a wrapper; the last is defined by a test of this file.
    names -= {"wait_tensor", "wait_tensors", "_wrap_tensor_autograd", "later"}
    assert names and names <= {*COLLECTIVES, *OTHER_FORMS}


def test_replacement_depends_on_the_group(groups: dict[int, Any]) -> None:
    def nowhere(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
        y = torch.ops._c10d_functional.all_reduce(x @ w, "sum", "nowhere")
        return funcol.wait_tensor(y)

    for fn, size, only, reason in (
        (_gathered, 1, None, "one rank"),
        (_averaged, 3, None, "average over 3 ranks"),
        (_gathered, 2, groups[3], "another group"),
        (nowhere, 2, None, "no process group of the name 'nowhere'"),
    ):
        (entry,) = passes.replace(trace(fn, ONES, groups[size]), group=only)
        assert reason in entry.reason and entry.world == (0 if fn is nowhere else size)
    graph = trace(_gathered, ONES, groups[2])
    (entry,) = passes.replace(graph, group=groups[2].group_name, schedule="hetero-fused-1d")
    assert entry.replaced
    (node,) = ficco_calls(graph)
    assert "hetero-fused-1d" in node.args and groups[2].group_name in node.args
    assert node.meta["val"].shape == (12, 4)


def test_ranks_in_columns_are_summed_over(groups: dict[int, Any]) -> None:
    def crossed(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
        return gather(x, 0, g).view(2, 2, 8).transpose(0, 1).reshape(4, 8) @ w

    def halves(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
        return gather(x, 0, g).view(2, 16) @ w

    (entry,) = passes.replace(trace(halves, [torch.ones(8), torch.ones(16, 3)], groups[4]))
    assert "sums over the ranks" in entry.reason
    graph = trace(crossed, [torch.ones(8), torch.ones(8, 3)], groups[4])
    (entry,) = passes.replace(graph)
    assert entry.replaced and "put in order" in entry.reason
    (node,) = ficco_calls(graph)
    assert node.args[0].meta["val"].shape == (1, 8) and node.meta["val"].shape == (4, 3)


def test_a_view_that_nothing_uses_goes(groups: dict[int, Any]) -> None:
    def run(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
        (a := gather(x, 1, g)).view(-1, 8)
        return a @ w

    assert passes.replace(trace(run, [torch.ones(shape) for shape in BATCH], groups[2]))


def test_a_product_is_taken_once(groups: dict[int, Any]) -> None:
    graph = trace(lambda x, w, g: scatter(gather(x, 0, g) @ w, 0, g), ONES, groups[2])
    first, second = passes.replace(graph)
    assert first.operator == AGM
    assert "one operator with another collective already" in second.reason


def test_the_widest_product_hides_the_gather(groups: dict[int, Any]) -> None:
    """Except where its right operand is computed after a write, over which it cannot move."""
    program = next(p for p in REPLACED if p.name == "three products")
    (entry,) = passes.replace(trace(program.run, inputs(program, 0), groups[2]))
    assert entry.replaced and entry.product == "mm_1" and "8x6" in entry.shapes, entry
    assert "kept for mm, mm_2" in entry.reason

    def late(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, g: Any) -> tuple[Any, ...]:
        a = gather(x, 0, g)
        y = a @ w
        v.add_(1)
        return y, a @ (v * 2)

    tensors = [torch.ones(3, 8), torch.ones(8, 2), torch.ones(8, 6)]
    (entry,) = passes.replace(trace(late, tensors, groups[2]))
    assert entry.product == "mm"


def test_a_graph_without_fake_tensors_is_left(groups: dict[int, Any]) -> None:
    graph, ops = torch.fx.Graph(), torch.ops._c10d_functional
    x = graph.placeholder("x")
    y = graph.call_function(ops.all_gather_into_tensor.default, (x, 2, groups[2].group_name))
    y = graph.call_function(ops.wait_tensor.default, (y,))
    graph.output(graph.call_function(torch.ops.aten.mm.default, (y, x)))
    (entry,) = passes.replace(graph)
    assert "without fake tensors" in entry.reason


def test_an_error_leaves_no_trace(groups: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    program = next(p for p in REPLACED if p.name == "batch")
    graph = trace(program.run, inputs(program, 0), groups[2])
    before, faked, faked_nodes = graph.code, passes.rewrite._faked, []

    def fails(node: torch.fx.Node) -> Any:
        faked_nodes.append(node)
        if len(faked_nodes) == 4:
            raise KeyError("an unforeseen error")
        return faked(node)

    monkeypatch.setattr(passes.rewrite, "_faked", fails)
    (entry,) = passes.replace(graph)
    assert "not understood: KeyError" in entry.reason and len(faked_nodes) == 4
    graph.recompile()
    assert graph.code == before


def test_wrong_arguments_say_what_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="required a torch.fx Graph"):
        passes.replace(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inner: required"):
        passes.backend("nonsense")
    for make in (passes.backend, passes.inductor_pass):
        for wrong, words in (
            ({"schedule": "slowing"}, "got 'slowing'"),
            ({"schedule": 3}, "schedule: required"),
            ({"group": 3}, "group: required"),
        ):
            with pytest.raises(ValueError, match=words):
                make(**wrong)
    with pytest.raises(ValueError, match="only with inner='inductor'"):
        passes.backend("aot_eager")(None, [], mode="max-autotune")
    monkeypatch.setattr(passes.compiling, "HOOK", "a_hook_of_another_version")
    with pytest.raises(NotImplementedError, match="Inductor does not take the pass"):
        passes.inductor_pass()


def test_regions_are_graphs_of_their_own(groups: dict[int, Any]) -> None:
    inner, outer = trace(_gathered, ONES, groups[2]), torch.fx.Graph()
    outer.output(outer.call_module("region", (outer.placeholder("x"), outer.placeholder("w"))))
    report = passes.replace(torch.fx.GraphModule({"region": inner}, outer))
    assert report.graphs == 2 and [entry.operator for entry in report] == [AGM]


def test_report_prints_a_table(groups: dict[int, Any]) -> None:
    report = passes.Report()
    assert str(report) == "0 collectives in 0 graphs: 0 replaced, 0 left"
    for fn in (_gathered, lambda x, w, g: reduce(x, g)):
        report.add(passes.replace(trace(fn, ONES, groups[2])))
    assert len(report) == 2 and len(report.replaced) == 1 and len(report.left) == 1
    head, names, first, second = str(report).splitlines()
    assert head == "2 collectives in 2 graphs: 1 replaced, 1 left"
    assert names.split()[:3] == ["collective", "node", "group"]
    assert "all-gather" in first and AGM in first and "6x8 @ 8x4 float32" in first
    assert "all-reduce" in second and "left" in second
    assert str(report.entries[0]).startswith("all-gather all_gather_into_tensor with mm: replaced")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_labels_follow_the_rows(data: st.DataObject) -> None:
    """Any mix of views, permutations and pieces changes labels and a tensor alike."""
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=4))
    now = torch.arange(prod(sizes)).view(sizes)
    order = original(sizes)
    for _ in range(data.draw(st.integers(0, 5))):
        kind = data.draw(st.sampled_from(["merge", "split", "permute", "pieces"]))
        shape = list(now.shape)
        dim = data.draw(st.integers(0, len(shape) - 1))
        if kind == "merge" and dim:
            now = now.reshape(*shape[: dim - 1], shape[dim - 1] * shape[dim], *shape[dim + 1 :])
        elif kind == "split" and shape[dim] % 2 == 0:
            now = now.reshape(*shape[:dim], 2, shape[dim] // 2, *shape[dim + 1 :])
        elif kind == "permute":
            perm = data.draw(st.permutations(range(len(shape))))
            try:
                order = permuted(order, shape, perm)
            except Unclear:
                return  # 3 x 2 was merged and split into 2 x 3
            now = now.permute(*perm)
        elif kind == "pieces" and shape[dim] % 2 == 0:
            target = data.draw(st.integers(0, len(shape) - 1))
            try:
                order = regrouped(order, shape, dim, target, 2)
            except Unclear:
                return  # labels are never cut at an odd index
            now = torch.cat(now.chunk(2, dim), target)
    first = canonical(order)
    relabeled = torch.arange(now.numel()).view([label.size for label in first] or [1])
    if order:
        relabeled = relabeled.permute(*(first.index(label) for label in order))
    assert torch.equal(relabeled.reshape(-1), now.reshape(-1))


def test_rows_are_known_where_columns_are_whole() -> None:
    order = original((2, 3, 4, 8))
    assert rows_of(order, (24, 8)) == order[:3]
    assert rows_of(order, (6, 32)) == order[:2]
    assert rows_of(permuted(order, (24, 8), (1, 0)), (8, 24)) is None
    with pytest.raises(Unclear):
        rows_of(order, (5, 38))
