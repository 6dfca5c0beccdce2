"""The compile pass: what it replaces gives the same numbers, what it leaves has a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Rank, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx

from ficco import passes
from ficco.passes.layout import Unclear, canonical, original, permuted, regrouped, rows_of

WORLD = 2

# Programs. Each is a function of tensors and of a group; ``expected`` are the operators that take
# the place of its collectives, in the order of the graph.


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


@dataclass(frozen=True)
class Program:
    name: str
    shapes: tuple[tuple[int, ...], ...]
    run: Callable[..., Any]
    expected: tuple[str, ...] = ()
    says: str = ""
    dtype: torch.dtype = torch.float32
    reference: Callable[..., Any] | None = None  #: what gloo can run, where it cannot run it

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


def _products(a: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(a @ w for w in weights)


def _unflattened(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    b, s, k = x.shape
    a = gather(x, 0, g).view(WORLD, b, s, k).transpose(0, 1).reshape(b, WORLD * s, k)
    return a @ w


def _interleaved(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    b, s, k = x.shape
    return gather(x, 0, g).view(WORLD, b, s, k).permute(1, 2, 0, 3).reshape(-1, k) @ w


def _viewed(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    a = gather(x, 0, g).view(WORLD, *x.shape).transpose(0, 1)
    return (a @ w).view(-1, w.shape[1]) + 1


def _sliced(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    """As DTensor gathers a tensor of dynamic sizes."""
    return torch.ops.aten.slice.Tensor(gather(x, 1, g), 1, 0, WORLD * x.shape[1]) @ w


def _scatter_interleaved(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    y = (x @ w).view(3, 4, WORLD, 5).permute(2, 0, 1, 3)
    return scatter(y.contiguous(), 0, g)


def _into(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    a = torch.empty(WORLD * x.shape[0], *x.shape[1:])
    return torch.ops.aten.copy(a, funcol.wait_tensor(gather(x, 0, g))) @ w


def _back_into(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    """As ``dist.all_reduce`` is traced."""
    y = nn.functional.linear(x, w)
    return torch.ops.aten.copy(y, funcol.wait_tensor(reduce(y, g))) + 1


def _late_b(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, g: Any) -> tuple[Any, ...]:
    a = gather(x, 0, g)
    return a @ w, a @ (v * 2)


def _fused_already(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    return scatter(gather(x, 0, g) @ w, 0, g)


def _saved(x: torch.Tensor, w: torch.Tensor, g: Any) -> tuple[Any, ...]:
    a = gather(x, 1, g)
    return a @ w, a.relu().sum(), a


REPLACED = [
    Program("gather", ((3, 8), (8, 5)), lambda x, w, g: gather(x, 0, g) @ w, (AGM,)),
    Program("transposed b", ((3, 8), (5, 8)), lambda x, w, g: gather(x, 0, g) @ w.t(), (AGM,)),
    Program(
        "bias",
        ((2, 3, 8), (5, 8), (5,)),
        lambda x, w, b, g: nn.functional.linear(gather(x, 0, g), w, b),
        (AGM,),
        "the bias is added to its result",
    ),
    Program("batch of one", ((1, 3, 8), (8, 5)), lambda x, w, g: gather(x, 1, g) @ w, (AGM,)),
    Program(
        "batch",
        ((3, 4, 8), (8, 5)),
        lambda x, w, g: gather(x, 1, g) @ w,
        (AGM,),
        "put in order by a copy",
    ),
    Program("by hand", ((3, 4, 8), (8, 5)), _unflattened, (AGM,), "put in order by a copy"),
    Program("interleaved", ((3, 4, 8), (8, 5)), _interleaved, (AGM,), "put in order by a copy"),
    Program("scatter interleaved", ((24, 8), (8, 5)), _scatter_interleaved, (MRS,), "by a copy"),
    Program(
        "flat",
        ((24,), (8, 5)),
        lambda x, w, g: gather(x, 0, g).view(-1, 8) @ w,
        (AGM,),
    ),
    Program("into a tensor", ((3, 8), (8, 5)), _into, (AGM,)),
    Program(
        "three products",
        ((3, 4, 8), (8, 2), (8, 6), (8, 3)),
        lambda x, q, k, v, g: _products(gather(x, 1, g), q, k, v),
        (AGM,),
        "is kept for",
    ),
    Program("a late b", ((3, 8), (8, 2), (8, 6)), _late_b, (AGM,), "is kept for"),
    Program("kept", ((3, 4, 8), (8, 5)), _saved, (AGM,), "is kept for"),
    Program(
        "converted",
        ((2, 3, 8), (8, 5)),
        lambda x, w, g: gather(x, 1, g).bfloat16() @ w.bfloat16(),
        (AGM,),
        "converted to bfloat16 before it travels",
    ),
    Program(
        "doubles",
        ((3, 8), (8, 5)),
        lambda x, w, g: gather(x, 0, g) @ w,
        (AGM,),
        dtype=torch.float64,
    ),
    Program("scatter", ((6, 8), (8, 5)), lambda x, w, g: scatter(x @ w, 0, g), (MRS,)),
    Program(
        "scatter batch of one", ((1, 6, 8), (8, 5)), lambda x, w, g: scatter(x @ w, 1, g), (MRS,)
    ),
    Program(
        "scatter batch",
        ((3, 4, 8), (8, 5)),
        lambda x, w, g: scatter(x @ w, 1, g),
        (MRS,),
        "in the order of the ranks by a copy",
    ),
    Program("scatter of rows", ((4, 3, 8), (8, 5)), lambda x, w, g: scatter(x @ w, 0, g), (MRS,)),
    Program(
        "scatter an average",
        ((6, 8), (8, 5)),
        lambda x, w, g: scatter(x @ w, 0, g, "avg"),
        (MRS,),
        "divided by 2",
        reference=lambda x, w, g: scatter(x @ w, 0, g) / WORLD,
    ),
    Program("reduce", ((6, 8), (8, 5)), lambda x, w, g: reduce(x @ w, g), (MAR,)),
    Program("reduce batch", ((2, 3, 8), (5, 8)), lambda x, w, g: reduce(x @ w.t(), g) * 2, (MAR,)),
    Program(
        "reduce transposed",
        ((2, 3, 8), (8, 5)),
        lambda x, w, g: reduce((x @ w).transpose(0, 1).contiguous(), g).view(-1, 5) * 2,
        (MAR,),
        "the result's rows are put in order by a copy",
    ),
    Program("reduce in place", ((6, 8), (5, 8)), _back_into, (MAR,)),
    Program("reduce a batch in place", ((2, 3, 8), (5, 8)), _back_into, (MAR,)),
    Program(
        "reduce a sum in place",
        ((2, 3, 8), (8, 5), (8, 5)),
        lambda x, w, v, g: torch.ops.aten.copy(y := x @ w + x @ v, reduce(y, g)) + 1,
        (MAR,),
    ),
    Program(
        "exchange before",
        ((6, 8), (8, 5)),
        lambda x, w, g: exchange(x, g) @ w,
        (A2AM,),
    ),
    Program(
        "exchange behind",
        ((6, 8), (8, 5)),
        lambda x, w, g: exchange(x @ w, g),
        (MA2A,),
    ),
    Program(
        "exchange experts",
        ((4, 3, 8), (8, 5)),
        lambda x, w, g: exchange(x @ w, g),
        (MA2A,),
    ),
    Program(
        "sum of products",
        ((3, 4, 8), (8, 5), (3, 4, 2), (5, 2), (12, 3), (3, 5)),
        lambda x, w, y, v, z, u, g: scatter(x @ w + y @ v.t() + (z @ u).view(3, 4, 5), 1, g),
        (MRS,),
        "sum of 3 products",
    ),
    Program(
        "reduced sum",
        ((6, 8), (8, 5), (6, 2), (2, 5)),
        lambda x, w, y, v, g: reduce(x @ w + y @ v, g),
        (MAR,),
        "sum of 2 products",
    ),
    Program("a layer", ((2, 3, 8), (8, 6), (6, 8)), _mlp, (AGM, MRS)),
    Program("collectives with gradients", ((6, 8), (8, 6), (6, 8)), _with_gradients, (AGM, MRS)),
    Program("a slice of all", ((2, 3, 8), (8, 6)), _sliced, (AGM,)),
]

#: Programs that are also traced with every size dynamic.
DYNAMIC = [
    "bias",
    "batch",
    "three products",
    "kept",
    "scatter an average",
    "reduce batch",
    "reduce transposed",
    "a layer",
    "a slice of all",
]


def inputs(program: Program, rank: int) -> list[torch.Tensor]:
    """Small integers that depend on the rank, so that every sum is exact in every dtype."""
    made = torch.Generator().manual_seed(97 * rank + len(program.name))
    return [
        torch.randint(-3, 4, shape, generator=made).to(program.dtype) for shape in program.shapes
    ]


def trace(
    fn: Callable[..., Any], tensors: list[torch.Tensor], group: Any, **options: Any
) -> torch.fx.GraphModule:
    options = {"tracing_mode": "fake"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # names of collectives that became older
        return make_fx(lambda *given: fn(*given, group), **options)(*tensors)


def operators(graph: torch.fx.GraphModule) -> list[str]:
    return [
        str(node.target._schema.name).partition("::")[2].removesuffix("_gathered")
        for node in graph.graph.nodes
        if getattr(node.target, "namespace", "") == "ficco"
    ]


def collectives(graph: torch.fx.GraphModule) -> int:
    return sum("c10d" in getattr(node.target, "namespace", "") for node in graph.graph.nodes)


# The same numbers, on two ranks, that lie as before.


def _same(at: Rank, program: Program, options: dict[str, Any]) -> list[str]:
    group, tensors = dist.group.WORLD, inputs(program, at.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        want = (program.reference or program.run)(*tensors, group)
    graph = trace(program.run, tensors, group, **options)
    report = passes.replace(graph)
    found = graph(*tensors)
    wants, founds = (list(t) if isinstance(t, tuple) else [t] for t in (want, found))
    assert len(wants) == len(founds)
    for one, other in zip(wants, founds, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert torch.equal(one, other), f"{program}: rank {at.rank}\n{graph.code}"
    assert tuple(operators(graph)) == program.expected, f"{report}\n{graph.code}"
    assert collectives(graph) == 0, graph.code
    assert program.says in report.entries[0].reason, f"{report}\n{graph.code}"
    return [str(entry) for entry in report]


def _all_same(at: Rank, names: list[str], options: dict[str, Any]) -> list[list[str]]:
    chosen = [program for program in REPLACED if program.name in names]
    return [_same(at, program, options) for program in chosen]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True}],
    ids=["static", "dynamic", "before autograd"],
)
def test_replaced_programs_give_the_same_integers(options: dict[str, Any]) -> None:
    names = [program.name for program in REPLACED]
    if options.get("tracing_mode") == "symbolic":  # slow; "flat" and "exchange" do not say how
        names = DYNAMIC  # their rows divide
    told = run(WORLD, _all_same, names, options, timeout=150)  # traces of many programs
    assert told[0] == told[1]  # the ranks decide alike


def test_a_product_whose_rows_are_put_in_order_can_be_viewed() -> None:
    program = Program("viewed", ((3, 8), (8, 5)), _viewed, (AGM,), "put in order by a copy")
    run(WORLD, _same, program, {"pre_dispatch": True})  # else it is a product of batches


# Whole models under torch.compile.


class FeedForward(nn.Module):
    """As in torchtitan, with weights of integers and without what would round."""

    def __init__(self, dim: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.w1(x))
        return self.w2(h if self.w3 is None else h * self.w3(x))


class Block(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.feed_forward = FeedForward(8, 12, gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed_forward(x)


def _parallel(gated: bool, sequence: bool) -> Block:
    """The block with PyTorch's own parallel styles, as a torchtitan plan writes them."""
    torch.manual_seed(5)
    block = Block(gated)
    with torch.no_grad():
        for weight in block.parameters():
            weight.copy_(torch.randint(-1, 2, weight.shape))
    mesh = init_device_mesh("cpu", (WORLD,))
    layout = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "feed_forward": PrepareModuleInput(
            input_layouts=(layout,), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": ColwiseParallel(use_local_output=True),
        "feed_forward.w2": RowwiseParallel(output_layouts=layout),
    }
    if gated:
        plan["feed_forward.w3"] = ColwiseParallel()
    return parallelize_module(block, mesh, plan)


def _train(block: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = block(x)
    y.backward(grad)
    grads = [weight.grad.to_local() for weight in block.parameters()]
    return [y.detach(), x.grad, *grads]


def _compiled(at: Rank, gated: bool, sequence: bool, inner: str) -> list[tuple[str, ...]]:
    torch._dynamo.reset()
    made = torch.Generator().manual_seed(at.rank if sequence else 7)
    rows = 3 if sequence else 3 * WORLD
    x, grad = (torch.randint(-2, 3, (2, rows, 8), generator=made).float() for _ in range(2))
    want = _train(_parallel(gated, sequence), x, grad)
    backend = passes.backend(inner)
    block = _parallel(gated, sequence)
    found = _train(torch.compile(block, backend=backend, fullgraph=True), x, grad)
    for one, other in zip(want, found, strict=True):
        assert torch.equal(one, other), backend.report
    return [(e.collective, e.operator, e.reason, e.where) for e in backend.report]


def _sums(entries: list[tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(collective, operator) for collective, operator, *_ in entries]


def test_a_parallelised_model_has_its_collectives_replaced() -> None:
    told = run(WORLD, _compiled, False, True, "aot_eager")
    both = [("all-gather", AGM), ("reduce-scatter", MRS)]
    assert _sums(told[0]) == both * 2  # forward, then backward
    assert told[0] == told[1]
    assert "passes.py:" in told[0][0][3] and "self.w1(x)" in told[0][0][3]


@pytest.mark.slow
def test_the_backward_of_a_gated_model_adds_products() -> None:
    told = run(WORLD, _compiled, True, True, "aot_eager")[0]
    assert _sums(told) == [("all-gather", AGM), ("reduce-scatter", MRS)] * 2
    assert "sum of 2 products is one" in told[3][2]


def test_a_model_without_sequence_parallelism_reduces() -> None:
    told = run(WORLD, _compiled, False, False, "aot_eager")[0]
    assert ("all-reduce", MAR) in _sums(told)


def _inductor(at: Rank) -> tuple[str, int]:
    torch._dynamo.reset()
    from torch._inductor import config

    seen = []
    x = torch.full((3, 8), at.rank + 1.0)
    w = torch.arange(40.0).view(8, 5)

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return gather(x, 0, dist.group.WORLD) @ w

    backend = passes.backend()
    with config.patch({passes.compiling.HOOK: lambda graph: seen.append(graph)}):
        found = torch.compile(layer, backend=backend, fullgraph=True)(x, w)
    assert torch.equal(found, layer(x, w))
    for hook in (passes.compiling.HOOK, "post_grad_custom_post_pass", "joint_custom_pre_pass"):
        own = passes.inductor_pass()
        torch._dynamo.reset()
        with config.patch({hook: own}):
            assert torch.equal(torch.compile(layer)(x, w), found)
        assert len(own.report.replaced) == 1 and not own.report.left, hook
    return str(backend.report), len(seen)


@pytest.mark.slow
def test_inductor_runs_the_pass_behind_the_users_own() -> None:
    report, others = run(WORLD, _inductor, timeout=150)[0]
    assert "1 collective in 1 graph: 1 replaced" in report and others == 1


# What stays, and why.


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Any]]:
    """Groups by their size in a world that has this process alone."""
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


def _written_operand(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
    y = x @ w
    x.add_(1)
    return scatter(y, 0, g)


def _converted_and_not(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
    a = gather(x, 0, g)
    return a.bfloat16() @ w.bfloat16(), a * 2


def _b_from_a(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
    a = gather(x, 0, g)
    return a @ (a.t() @ a)


def _uneven(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    return funcol.all_to_all_single(x, [4, 2], [2, 4], g) @ w


def _kept_exchange(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
    a = exchange(x, g)
    return a @ w, a * 2


def _used_product(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
    y = x @ w
    return scatter(y, 0, g), y.relu()


def _used_part(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
    parts = (x @ w).chunk(2, 1)
    return scatter(torch.cat(parts), 0, g), parts[0] * 2


def _random_b(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
    a = gather(x, 0, g)
    return a * 2, a @ torch.bernoulli(w)


MATRICES = ((6, 8), (8, 4))
LEFT = [
    Program(
        "unused", MATRICES, lambda x, w, g: gather(x, 0, g) * 2, says="mul.Tensor is no product"
    ),
    Program("a part", MATRICES, lambda x, w, g: gather(x, 0, g)[1:] @ w, says="slice"),
    Program(
        "left and right",
        ((4, 8), (5, 8)),
        lambda x, w, g: w @ gather(x, 0, g),
        says="right operand",
    ),
    Program(
        "columns", ((6, 4), (8, 4)), lambda x, w, g: gather(x, 1, g) @ w, says="or over columns"
    ),
    Program(
        "rows", ((3, 8), (6, 4)), lambda x, w, g: gather(x, 0, g).t() @ w, says="sums over the rows"
    ),
    Program(
        "bmm", ((2, 3, 8), (4, 8, 4)), lambda x, w, g: torch.bmm(gather(x, 0, g), w), says="bmm"
    ),
    Program(
        "beta",
        ((3, 8), (8, 4), (4,)),
        lambda x, w, b, g: torch.addmm(b, gather(x, 0, g), w, beta=2),
        says="beta",
    ),
    Program(
        "unwaited use",
        MATRICES,
        lambda x, w, g: _unwaited(x, w, g) @ w,
        says="before it is waited for",
    ),
    Program("never waited", MATRICES, _unwaited, says="nothing in this graph waits"),
    Program("half converted", MATRICES, _converted_and_not, says="used unconverted elsewhere"),
    Program(
        "converted twice",
        MATRICES,
        lambda x, w, g: gather(x, 0, g).half().float() @ w,
        says="converted twice",
    ),
    Program(
        "integers",
        MATRICES,
        lambda x, w, g: gather(x, 0, g) @ w,
        says="int64 is not served",
        dtype=torch.int64,
    ),
    Program("b from a", MATRICES, _b_from_a, says="computed from what was gathered"),
    Program("random b", MATRICES, _random_b, says="cannot move before"),
    Program(
        "empty", ((0, 8), (8, 4)), lambda x, w, g: gather(x, 0, g) @ w, says="without elements"
    ),
    Program("operand written", MATRICES, _write("operand"), says="may write to"),
    Program("result written", MATRICES, _write("result"), says="may write to the result"),
    Program("weight written", MATRICES, _write("weight"), says="may write to the right operand"),
    Program("uneven blocks", MATRICES, _uneven, says="uneven blocks"),
    Program("exchanged and kept", MATRICES, _kept_exchange, says="uses what was exchanged, too"),
    Program("largest", MATRICES, lambda x, w, g: scatter(x @ w, 0, g, "max"), says="by max"),
    Program(
        "half average",
        MATRICES,
        lambda x, w, g: reduce(x @ w, g, "avg"),
        says="overflow",
        dtype=torch.float16,
    ),
    Program(
        "columns scattered",
        MATRICES,
        lambda x, w, g: scatter(x @ w, 1, g),
        says="columns of the product",
    ),
    Program("product used", MATRICES, _used_product, says="uses the product, too"),
    Program("part used", MATRICES, _used_part, says="uses a part of the product"),
    Program("no product", MATRICES, lambda x, w, g: scatter(x.relu(), 0, g), says="is no product"),
    Program(
        "swapped pieces",
        ((3, 4, 8), (8, 4)),
        lambda x, w, g: torch.cat(gather(x, 0, g).chunk(2)[::-1], 1) @ w,
        says="aten.split.Tensor is no product",
    ),
    Program(
        "scattered swapped pieces",
        ((3, 4, 8), (8, 4)),
        lambda x, w, g: scatter(torch.cat((x @ w).chunk(2, 1)[::-1]), 0, g),
        says="aten.cat.default is no product",
    ),
    Program(
        "residual",
        MATRICES,
        lambda x, w, g: scatter(x @ w + x[:, :4], 0, g),
        says="the sum of a product and of something else",
    ),
    Program(
        "other orders",
        ((4, 8), (8, 4)),
        lambda x, w, g: scatter(
            (x @ w).view(2, 2, 4).transpose(0, 1) + (x @ w).view(2, 2, 4), 0, g
        ),
        says="rows lie in different orders",
    ),
    Program(
        "scattered bias",
        ((6, 8), (8, 4), (4,)),
        lambda x, w, b, g: scatter(torch.addmm(b, x, w), 0, g),
        says="bias is added on every rank",
    ),
    Program(
        "rounded",
        MATRICES,
        lambda x, w, g: scatter((x @ w).bfloat16(), 0, g),
        says="rounded to another dtype",
    ),
    Program("factor written", MATRICES, _written_operand, says="may write to an operand"),
    Program(
        "several",
        MATRICES,
        lambda x, w, g: funcol.all_reduce_coalesced([x @ w, x], "sum", g),
        says="several tensors",
    ),
    Program("broadcast", MATRICES, lambda x, w, g: funcol.broadcast(x, 0, g) @ w, says="broadcast"),
]


@pytest.mark.parametrize("program", LEFT, ids=str)
def test_what_stays_has_a_reason(program: Program, groups: dict[int, Any]) -> None:
    graph = trace(program.run, inputs(program, 0), groups[2])
    before = graph.code
    report = passes.replace(graph)
    (entry,) = report
    assert program.says in entry.reason
    assert not entry.replaced and entry.operator == "" and not report
    assert graph.code == before
    assert entry.group == groups[2].group_name and entry.world == 2


def _received(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    """What is received overwrites what was gathered, in front of the product."""
    a = gather(x, 0, g)
    funcol.wait_tensor(torch.ops._c10d_functional.irecv(x, 0, 0, g.group_name))
    return a @ w


def _batched(x: torch.Tensor, w: torch.Tensor, g: Any) -> Any:
    send = torch.ops._c10d_functional.batch_p2p_ops
    return send(["isend", "irecv"], [0, 0], [0, 0], [x @ w, x], g.group_name)


@pytest.mark.skipif(
    not hasattr(torch.ops._c10d_functional, "batch_p2p_ops"),
    reason=f"PyTorch {torch.__version__} has no functional messages",
)
@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (
            lambda x, w, g: torch.ops._c10d_functional.isend(x @ w, 0, 0, g.group_name),
            {"isend": "a message between two ranks"},
        ),
        (_batched, {"batch_p2p_ops": "messages between pairs of ranks"}),
        (
            _received,
            {
                "all-gather": "irecv may write to the operand before the product",
                "irecv": "a message between two ranks",
            },
        ),
        (
            lambda x, w, g: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, g.group_name) @ w.t(),
            {"shard_dim_alltoall": "joins one dimension and cuts another"},
        ),
    ],
    ids=["isend", "batch", "irecv", "dtensor"],
)
def test_what_is_no_collective_of_a_product_is_reported_by_name(
    fn: Callable[..., Any], says: dict[str, str], groups: dict[int, Any]
) -> None:
    tensors = [torch.ones(shape) for shape in MATRICES]
    report = passes.replace(trace(fn, tensors, groups[2]))
    assert not report and [entry.collective for entry in report] == list(says)
    for entry, text in zip(report, says.values(), strict=True):
        assert text in entry.reason and (entry.group, entry.world) == (groups[2].group_name, 2)


def test_a_collective_of_a_later_pytorch_is_reported_by_name(groups: dict[int, Any]) -> None:
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("later(Tensor input, str group_name) -> Tensor")
    library.impl("later", lambda x, group: x.clone(), "CompositeExplicitAutograd")
    run = lambda x, w, g: funcol.wait_tensor(  # noqa: E731
        torch.ops._c10d_functional.later(x @ w, g.group_name)
    )
    (entry,) = passes.replace(trace(run, [torch.ones(shape) for shape in MATRICES], groups[2]))
    assert (entry.collective, entry.replaced) == ("later", False)
    assert entry.reason == "no operator of ficco stands for later"


def test_every_functional_collective_of_this_pytorch_has_a_row() -> None:
    from ficco.passes.graph import COLLECTIVES, OTHER_FORMS

    names = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(("_c10d_functional::", "_c10d_functional_autograd::"))
    }
    # The first wait; the last is a test's.
    names -= {"wait_tensor", "wait_tensors", "_wrap_tensor_autograd", "later"}
    assert names and names <= {*COLLECTIVES, *OTHER_FORMS}


def _gathered(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    return gather(x, 0, g) @ w


def _averaged(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
    return scatter(x @ w, 0, g, "avg")


def test_groups_decide(groups: dict[int, Any]) -> None:
    tensors = [torch.ones(shape) for shape in MATRICES]
    reasons = [
        (trace(_gathered, tensors, groups[1]), None, "one rank"),
        (trace(_averaged, tensors, groups[3]), None, "average over 3 ranks"),
        (trace(_gathered, tensors, groups[2]), groups[3], "another group"),
    ]
    for graph, only, reason in reasons:
        (entry,) = passes.replace(graph, group=only)
        assert reason in entry.reason
    graph = trace(_gathered, tensors, groups[2])
    (entry,) = passes.replace(graph, group=groups[2].group_name)
    assert entry.replaced

    def nowhere(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
        y = torch.ops._c10d_functional.all_reduce(x @ w, "sum", "nowhere")
        return funcol.wait_tensor(y)

    (entry,) = passes.replace(trace(nowhere, tensors, None))
    assert "no process group of the name 'nowhere'" in entry.reason and entry.world == 0


def test_ranks_in_columns_are_summed_over(groups: dict[int, Any]) -> None:
    def halves(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
        return gather(x, 0, g).view(2, 16) @ w

    (entry,) = passes.replace(trace(halves, [torch.ones(8), torch.ones(16, 3)], groups[4]))
    assert "sums over the ranks" in entry.reason

    def crossed(x: torch.Tensor, w: torch.Tensor, g: Any) -> torch.Tensor:
        return gather(x, 0, g).view(2, 2, 8).transpose(0, 1).reshape(4, 8) @ w

    graph = trace(crossed, [torch.ones(8), torch.ones(8, 3)], groups[4])
    (entry,) = passes.replace(graph)
    assert entry.replaced and "put in order" in entry.reason
    (node,) = (n for n in graph.graph.nodes if getattr(n.target, "namespace", "") == "ficco")
    assert node.args[0].meta["val"].shape == (1, 8) and node.meta["val"].shape == (4, 3)


def test_a_product_is_taken_once(groups: dict[int, Any]) -> None:
    graph = trace(_fused_already, [torch.ones(6, 8), torch.ones(8, 4)], groups[2])
    first, second = passes.replace(graph)
    assert first.operator == AGM
    assert "one operator with another collective already" in second.reason


def test_the_widest_product_hides_the_gather(groups: dict[int, Any]) -> None:
    program = next(p for p in REPLACED if p.name == "three products")
    graph = trace(program.run, inputs(program, 0), groups[2])
    (entry,) = passes.replace(graph)
    assert entry.replaced, entry
    assert entry.product == "mm_1" and "kept for mm, mm_2" in entry.reason
    assert "8x6" in entry.shapes


def test_a_right_operand_does_not_move_over_a_write(groups: dict[int, Any]) -> None:
    def late(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, g: Any) -> tuple[Any, ...]:
        a = gather(x, 0, g)
        y = a @ w
        v.add_(1)
        return y, a @ (v * 2)

    tensors = [torch.ones(3, 8), torch.ones(8, 2), torch.ones(8, 6)]
    (entry,) = passes.replace(trace(late, tensors, groups[2]))
    assert entry.product == "mm"  # not the wider one, whose operand is made behind the write


def test_schedule_and_group_reach_the_operator(groups: dict[int, Any]) -> None:
    graph = trace(_gathered, [torch.ones(6, 8), torch.ones(8, 4)], groups[2])
    passes.replace(graph, schedule="hetero-fused-1d")
    (node,) = (n for n in graph.graph.nodes if getattr(n.target, "namespace", "") == "ficco")
    assert "hetero-fused-1d" in node.args and groups[2].group_name in node.args
    assert node.meta["val"].shape == (12, 4)


def test_a_graph_without_fake_tensors_is_left(groups: dict[int, Any]) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    name = groups[2].group_name
    y = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 2, name))
    y = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (y,))
    graph.output(graph.call_function(torch.ops.aten.mm.default, (y, x)))
    (entry,) = passes.replace(graph)
    assert "without fake tensors" in entry.reason


def test_an_error_leaves_no_trace(groups: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    program = next(p for p in REPLACED if p.name == "batch")
    graph = trace(program.run, inputs(program, 0), groups[2])
    before = graph.code
    made = []
    faked = passes.rewrite._faked

    def fails(node: torch.fx.Node) -> Any:
        made.append(node)
        if len(made) == 4:
            raise KeyError("what nobody thought of")
        return faked(node)

    monkeypatch.setattr(passes.rewrite, "_faked", fails)
    (entry,) = passes.replace(graph)
    assert "not understood: KeyError" in entry.reason and len(made) == 4
    graph.recompile()
    assert graph.code == before


def test_no_graph_is_an_error() -> None:
    with pytest.raises(ValueError, match="required a torch.fx Graph"):
        passes.replace(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inner: required"):
        passes.backend("nonsense")
    for make in (passes.backend, passes.inductor_pass):
        with pytest.raises(ValueError, match="got 'slowing'"):
            make(schedule="slowing")
        with pytest.raises(ValueError, match="schedule: required"):
            make(schedule=3)
        with pytest.raises(ValueError, match="group: required"):
            make(group=3)


def test_regions_are_graphs_of_their_own(groups: dict[int, Any]) -> None:
    inner = trace(_gathered, [torch.ones(3, 8), torch.ones(8, 5)], groups[2])
    outer = torch.fx.Graph()
    x, w = outer.placeholder("x"), outer.placeholder("w")
    outer.output(outer.call_module("region", (x, w)))
    report = passes.replace(torch.fx.GraphModule({"region": inner}, outer))
    assert report.graphs == 2 and [entry.operator for entry in report] == [AGM]


def test_a_pytorch_without_the_hook_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes.compiling, "HOOK", "a_hook_of_another_version")
    with pytest.raises(NotImplementedError, match="Inductor does not take the pass"):
        passes.inductor_pass()
    with pytest.raises(ValueError, match="only with inner='inductor'"):
        passes.backend("aot_eager")(None, [], mode="max-autotune")


def test_report_prints_a_table(groups: dict[int, Any]) -> None:
    tensors = [torch.ones(3, 8), torch.ones(8, 5)]
    report = passes.Report()
    assert str(report) == "0 collectives in 0 graphs: 0 replaced, 0 left"
    for fn in (_gathered, lambda x, w, g: reduce(x, g)):
        report.add(passes.replace(trace(fn, tensors, groups[2])))
    assert len(report) == 2 and len(report.replaced) == 1 and len(report.left) == 1
    head, names, first, second = str(report).splitlines()
    assert head == "2 collectives in 2 graphs: 1 replaced, 1 left"
    assert names.split()[:3] == ["collective", "node", "group"]
    assert "all-gather" in first and AGM in first and "3x8 @ 8x5 float32" in first
    assert "all-reduce" in second and "left" in second
    assert str(report.entries[0]).startswith("all-gather all_gather_into_tensor with mm: replaced")


# The order of rows.


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_labels_follow_the_rows(data: st.DataObject) -> None:
    """Any mix of views, permutations and pieces does to labels what it does to a tensor."""
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
                return  # labels never cut at an odd place
            now = torch.cat(now.chunk(2, dim), target)
    first = canonical(order)
    found = torch.arange(now.numel()).view([label.size for label in first] or [1])
    if order:
        found = found.permute(*(first.index(label) for label in order))
    assert torch.equal(found.reshape(-1), now.reshape(-1))


def test_rows_are_known_where_columns_are_whole() -> None:
    order = original((2, 3, 4, 8))
    assert rows_of(order, (24, 8)) == order[:3]
    assert rows_of(order, (6, 32)) == order[:2]
    assert rows_of(permuted(order, (24, 8), (1, 0)), (8, 24)) is None
    with pytest.raises(Unclear):
        rows_of(order, (5, 38))
