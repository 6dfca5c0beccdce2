"""Plans that no operator builds yet are proven, simulated, rendered and exact on the CPU engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from edits import (
    Edit,
    adds,
    awaits_data,
    change,
    down,
    edited,
    idle,
    index,
    is_copy,
    mapped,
    move,
    multiplies,
    refused,
    retires,
)
from ranks import Rank, on_ranks, ranks
from test_cpu_engine import at_rest, engine, slot_for

from ficco import schedules
from ficco.compute.program import Call
from ficco.dma.engine import Capabilities
from ficco.dma.tiles import work_of
from ficco.machine import find
from ficco.plan import (
    Plan,
    Product,
    Products,
    Region,
    Signal,
    Step,
    Transfer,
    in_parts,
    product_rows,
    render,
)
from ficco.problems.products import Problem
from ficco.problems.scaling import Scaling
from ficco.problems.specification import AnyProblem, Buffer, Contraction, Exchange, Specification
from ficco.proof import check
from ficco.runtime.calls import compile
from ficco.schedules import Schedule
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.gather import GatherStage, GatherWorld
from ficco.schedules.scatter import ScatterStage, ScatterWorld
from ficco.simulate import simulate
from ficco.simulate.timeline import assemble

CHAINS = (
    ("shard-overlap", "shard-overlap"),
    ("hetero-fused-1d:pieces=2", "hetero-unfused-2d:pieces=2"),
    ("uniform-fused-1d:pieces=3,tail=2", "hetero-unfused-1d:pieces=2,tail=2"),
    ("uniform-unfused-1d:pieces=2", "shard-overlap:beta"),
    ("growing", "hetero-unfused-1d:pieces=2"),
)
TILED = ("tiled", "tiled:pieces=2,order=piece", "tiled:pieces=3+2+1,pull", "tiled:tail=2,copy=2")
ROWS = {1: (9,), 2: (8, 8), 3: (5, 0, 12), 4: (16,) * 4}
EQUAL = ROWS[4]
Plans = list[Plan]


@dataclass(frozen=True)
class Asked(AnyProblem):
    """A problem with any specification."""

    specification: Specification
    world: int = 1
    operator: str = "anything"
    hosts: int = 1


class Sizes(NamedTuple):
    """Sizes of ``reduce_scatter(relu(all_gather(a) @ b) @ c)``: a [m/W, k], b [k, h], c [h, n]."""

    rows: tuple[int, ...]
    h: int = 8
    n: int = 12
    k: int = 16
    dtype: str = "bfloat16"


def chained(sizes: Sizes, gathers: str, scatters: str) -> Plans:
    """The Plans of all ranks. The second product takes rows as soon as the first has computed them,
    so each block of the result leaves while later rows of A still arrive."""
    rows, h, n, k, dtype = sizes
    first = Problem("all_gather_matmul", rows, h, k, dtype)
    second = Problem("matmul_reduce_scatter", rows, n, h, dtype)
    gather_spec, scatter_spec = first.specification, second.specification
    (a, b), (active, c) = gather_spec.operands, scatter_spec.operands
    c = c._replace(name="c", holds="C")
    hidden = gather_spec.results[0]._replace(name="hidden", memory="local")
    active = active._replace(name="active", holds="H", memory="local")
    y = scatter_spec.results[0]._replace(name="y", holds="H @ C")
    product = Contraction("H", "C", "H @ C", scatter_spec.contractions[0].summed)
    specification = Specification(
        operands=(a, b, c),
        results=(y,),
        contractions=(*gather_spec.contractions, product),
        exchanges={"A": gather_spec.exchanges["A"], "H @ C": scatter_spec.exchanges["A @ B"]},
        functions={("relu", "A @ B"): "H"},
    )
    problem, words = Asked(specification, len(rows)), WordAllocator(len(rows))
    gathering = GatherWorld(first, Schedule.parse(gathers), words, operands=(a, b, hidden))
    scattering = ScatterWorld(second, Schedule.parse(scatters), words, (active, c, y), suffix=" 2")
    buffers, plans = [*gathering.buffers, hidden, active, *scattering.buffers], list[Plan]()
    for rank in range(problem.world):
        builder = Builder(problem, rank)
        gather, scatter = GatherStage(gathering, builder), ScatterStage(scattering, builder)
        computed, waiting = set[int](), list(enumerate(scatter.mine.by_group))
        for group in gather.flow():
            for begin, end in gather.completed(group):
                rows_in = Region("hidden", rank, begin, end, 0, h)
                relu = Transfer(rows_in, rows_in._replace(buffer="active"), function="relu")
                lane = builder.steps[-1].lane if builder.steps else "compute0"
                builder.add(Step(relu, lane, "relu"))
                computed.update(range(begin, end))
            ready = [item for item in waiting if computed.issuperset(rows_of(scatter, item[1]))]
            waiting = [item for item in waiting if item not in ready]
            for number, units in ready:
                if units:
                    scatter.multiply(number, units)
        assert not waiting
        scatter.finish()
        if builder.peers:
            builder.retire()
        plans.append(builder.plan(f"{gathers} then {scatters}", buffers, words))
    return plans


def rows_of(scatter: ScatterStage, units: list[Any]) -> Iterator[int]:
    """Rows of the units' products."""
    for unit in units:
        for region in scatter.mine.in_operand("active", unit.peer)[unit.ordinal : unit.ordinal + 1]:
            yield from range(region.row, region.row_stop)


def gathered(rows: tuple[int, ...]) -> Problem:
    return Problem("all_gather_matmul", rows, 12, 16, "bfloat16")


def summed(rows: tuple[int, ...]) -> Problem:
    return Problem("matmul_reduce_scatter", rows, 12, 16, "bfloat16")


def scaled(name: str, k: int = 256, recipe: str = "row", bias: bool = False) -> Plans:
    """Plans that gather the factors of A together with its rows."""
    scaling = Scaling(recipe, "float8_e4m3fn", bias=bias)
    problem = Problem("all_gather_matmul", EQUAL, 16, k, "float8_e4m3fn", scaling=scaling)
    return schedules.plans(problem, Schedule.parse(name))


def tiled(problem: Problem, name: str = "tiled") -> Plans:
    return schedules.plans(problem, Schedule.parse(name))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_tiles_wait_for_the_rows_of_their_plan(world: int) -> None:
    """A launch's work gates and announces the same rows as the parts of its step."""
    for problem in (gathered(ROWS[world]), summed(ROWS[world])):
        for plan in (p for name in TILED for p in tiled(replace(problem, n=16), name)):
            (step,) = (step for step in plan.steps if not step.whole)
            work = work_of(plan, step)
            begins = list(accumulate(work.rows, initial=0))
            numbers = [n for product in step.products for n in range(*product_rows(plan, product))]
            signals, columns = step.gates + step.announces, (*work.gates, *work.announces)
            for signal, spans in zip(signals, columns, strict=True):
                rows: set[int] = set()
                for product, first, last in spans:
                    assert first < last <= work.rows[product]
                    rows.update(numbers[begins[product] + first : begins[product] + last])
                assert rows == set(range(signal.first, signal.last))
            assert list(work.opens) == sorted(work.opens)


@pytest.mark.parametrize("world", ROWS)
def test_chained_plans_are_proven(world: int) -> None:
    for names in CHAINS:
        check(chained(Sizes(ROWS[world]), *names))


def test_chained_plans_are_simulated_and_rendered() -> None:
    """A block of the result leaves before the last rows of A arrive."""
    plans = chained(Sizes((4096,) * 4, 4096, 4096, 4096), "shard-overlap", "shard-overlap")
    bars = simulate(plans, find("h200-4", None)).ranks[0]
    assert {bar.label for bar in bars} >= {step.label for step in plans[0].steps}
    assert "compute0 |" in render(plans[0]) and "copy0" in render(plans[0])
    sent = [step.label for step in plans[0].steps if is_copy(step)]
    blocks = [bar for bar in bars if bar.label in sent and "0." not in bar.label]
    last = [bar for bar in bars if bar.kind == "matmul" and bar.label.startswith("3.")]
    assert min(bar.start_s for bar in blocks) < max(bar.start_s for bar in last)


def multiplies_c(step: Step) -> bool:
    return any(product.b.buffer == "c" for product in step.products)


def is_biased(step: Step) -> bool:
    return any(product.bias for product in step.products)


def gated(step: Step) -> bool:
    return bool(step.gates)


def factor(**fields: Any) -> Callable[[Any], Any]:
    """Edit that changes fields of A's factors."""
    return lambda factors: (factors[0]._replace(**fields), factors[1])


def copy_instead(steps: list[Step]) -> None:
    i = index(steps, gated)
    first = steps[i].products[0]
    steps[i] = steps[i]._replace(work=Transfer(first.a, first.out))


COLUMNS = "uniform-fused-2d:pieces=2"
#: Plans of four ranks, which the edits below break.
PLANS: dict[str, Callable[[], Plans]] = {
    "chain": lambda: chained(Sizes(EQUAL), "hetero-unfused-1d:pieces=2", "shard-overlap"),
    "scales": lambda: scaled("hetero-unfused-1d:pieces=2", 32),
    "one factor": lambda: scaled("growing", recipe="tensor", bias=True),
    "blocks": lambda: scaled("growing", recipe="block", bias=True),
    "bias": lambda: scaled("growing", bias=True),
    "bias of sums": lambda: scaled(COLUMNS, bias=True),
    "gates": lambda: tiled(gathered(EQUAL)),
}
BUFFERS = "multiplies in the wrong buffers"
EARLY, UNWRITTEN, UNFIT = "before it is written", "nobody has written", "do not fit"
UNSCALED, UNBIASED = "is not scaled as asked for", "does not add the bias once"
#: Faults of these Plans by name: the edit, and a part of the proof's error.
BROKEN: dict[str, dict[str, tuple[Edit, str]]] = {
    "chain": {
        "b in place of c": (change(multiplies_c, b={"buffer": "b"}), f"{BUFFERS}|leaves"),
    },
    "scales": {
        "none": (change(multiplies, factors=()), UNSCALED),
        "not sent": (idle("scale"), f"never waited|{UNWRITTEN}|holds"),
        "of missing columns": (change(multiplies, factors=lambda f: (f[0], down(1)(f[1]))), UNFIT),
        "a bias": (change(multiplies, bias=Region("b", 1, 0, 1, 0, 16)), UNBIASED),
    },
    "one factor": {
        "of the own rows": (
            change(awaits_data, factors=factor(buffer="scale_a", row=0, row_stop=1)),
            "factors of other rows|do not fit",
        )
    },
    "blocks": {"fewer": (change(awaits_data, factors=factor(col_stop=1)), UNFIT)},
    "bias": {
        "none": (change(is_biased, bias=None), UNBIASED),
        "of other columns": (change(is_biased, bias={"col_stop": 8}), UNBIASED),
        "a factor of columns": (change(is_biased, bias={"buffer": "scale_b"}), UNBIASED),
    },
    "bias of sums": {"twice": (change(adds, bias=Region("bias", 1, 0, 1, 0, 16)), UNBIASED)},
    "gates": {
        "another operation": (copy_instead, "'all': signals gate or announce rows of matrix"),
        "after the step before the first": (change(gated, after=(-1,)), "no earlier step"),
    },
}


@pytest.mark.parametrize(("kind", "fault"), [(one, name) for one in BROKEN for name in BROKEN[one]])
def test_broken_plans_are_caught(kind: str, fault: str) -> None:
    plans, (edit, words) = PLANS[kind](), BROKEN[kind][fault]
    check(plans)
    for rank in (1,) if kind not in ("chain", "gates") else (0, 3):
        refused(edited(plans, rank, edit), words)


@pytest.mark.parametrize("name", ["tiled:pieces=2", "tiled:pieces=2,pull"])
def test_wrong_announcements_are_caught(name: str) -> None:
    """Two signals announce each other's rows, or a copy does not wait for its rows' signal."""
    plans = tiled(summed(EQUAL), name)
    (product,) = (step for step in plans[1].steps if not step.whole)
    one, two, *_ = product.announces
    other = {one: two, two: one}

    def swapped(signal: Signal) -> Signal:
        announced = other.get(signal, signal)
        return signal._replace(first=announced.first, last=announced.last)

    check(plans)
    refused(mapped(plans, swapped), EARLY)
    if "pull" not in name:
        early = move(lambda step: is_copy(step) and one in step.waits, retires, "waits")
        refused(edited(plans, 1, early), EARLY)


# A Plan of one rank: the last four of six rows stay, and become the first four.


@pytest.mark.parametrize(("first", "words"), [(2, ""), (0, "another block")])
def test_rows_of_b_are_numbered_by_their_destination(first: int, words: str) -> None:
    a, b = (Buffer(x, x.upper(), "float32", ((4, 4),), "operand") for x in "ab")
    b = b._replace(shapes=((6, 3),), leaves=True)
    out = Buffer("out", "C", "float32", ((4, 3),), "result")
    last = Exchange(lambda src, dst: 4, lambda src, dst: 2, lambda src, dst: 0)
    specification = Specification((a, b), (out,), (Contraction(*"ABC", (4,)),), {"B": last})
    rows = Region("a", 0, 0, 4, 0, 4), Region("b", 0, first, first + 4, 0, 3)
    step = Step(Products((Product(*rows, Region("out", 0, 0, 4, 0, 3)),)), "compute0", "")
    plans = [Plan(Asked(specification), "by hand", 0, (step,), (a, b, out), 0)]
    if words:
        refused(plans, words)
    else:
        check(plans)


NOTHING = dict.fromkeys(("engine", "post", "wait", "copy", "products", "accumulate"), "")
#: An engine with only the steps that all engines support.
GPU: Any = SimpleNamespace(
    name="gpu",
    capabilities=lambda: Capabilities(**NOTHING, movers=("dma",), capture=False),
    enter=lambda program, lane: None,
    exchanges=lambda plan: False,
)


def test_parts_of_batches_are_refused_by_name() -> None:
    (plan, *_) = edited(tiled(gathered(EQUAL)), 0, change(gated, batch=2))
    with pytest.raises(NotImplementedError, match="neither a batch nor transposed"):
        in_parts(plan)


def test_readers_of_plans_refuse_unknown_steps_by_name() -> None:
    (plan, *_) = tiled(gathered((16,)), "shard-overlap")
    divine: Any = type("Divine", (), {})()
    strange = replace(plan, steps=(Step(divine, "compute0", "new"),))
    machine = find("h200-4", None)
    readers: dict[str, Callable[[Plan], object]] = {
        "render": render,
        "the simulator": lambda plan: simulate([plan], machine),
        "the gpu engine": lambda plan: compile(plan, GPU, None),
    }
    for name, read in readers.items():
        words = f"{name} does not know the operation 'divine' of step 'new' on compute0"
        with pytest.raises(NotImplementedError, match=words):
            read(strange)
    with pytest.raises(NotImplementedError, match="a timeline does not know .* 'divine'"):
        assemble("", [strange], [[(strange.steps[0], 0.0, 1.0)]])
    refused([strange], "holds no work that engines know")


def test_an_engine_says_what_it_does_not_offer() -> None:
    chain = chained(Sizes((16,)), "hetero-unfused-1d:pieces=2", "shard-overlap")
    for plans, words in (
        (tiled(gathered((16,) * 2)), "gpu engine does not offer signals that gate"),
        (scaled("serial"), "gpu engine does not offer products of scaled"),
        (chain, "does not offer the function 'relu'"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            compile(plans[0], GPU, None)


def integers(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


def on_cpu(cpu: Any, plan: Plan, slot: Any, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """The result of a call, in float64; its buffers hold NaN at first."""
    tensors = {name: operand.float() for name, operand in operands.items()}
    for buffer in plan.buffers:
        if buffer.memory in ("result", "local"):
            dtype, shape = getattr(torch, buffer.dtype), plan.shape(buffer.name)
            tensors[buffer.name] = torch.full(shape, float("nan"), dtype=dtype)
    cpu.execute(compile(plan, cpu, slot), Call(tensors))
    (result,) = [buffer.name for buffer in plan.buffers if buffer.memory == "result"]
    return tensors[result].double()


@ranks(1, 2, 3)
@on_ranks()
def test_chained_plans_are_exact(at: Rank) -> None:
    rows = ROWS[at.world]
    m, own_rows = sum(rows), slice(sum(rows[: at.rank]), sum(rows[: at.rank + 1]))
    plans = [chained(Sizes(rows, dtype="float32"), *names)[at.rank] for names in CHAINS]
    with engine() as cpu:
        slot = slot_for(cpu, plans)
        for turn, plan in enumerate(plans):
            a = integers(turn, m, 16)
            b = [integers(100 * turn + 10 * rank + 1, 16, 8) for rank in range(at.world)]
            c = [integers(100 * turn + 10 * rank + 2, 8, 12) for rank in range(at.world)]
            expected = sum(torch.relu(a @ x) @ y for x, y in zip(b, c, strict=True))
            out = on_cpu(cpu, plan, slot, {"a": a[own_rows], "b": b[at.rank], "c": c[at.rank]})
            assert torch.equal(out, expected[own_rows]), plan.schedule
        if slot.words:
            at_rest(cpu, slot)
