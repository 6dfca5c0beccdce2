"""The problems and schedules of the records, and the calls that plan and simulate them.

This module derives the names of cases from the arguments, so the names do not depend on ficco's
text of a problem. If ficco's functions change, change the calls in this module and keep the names.

The cases run all lines of the builders of Plans, except refusals and a few branches for one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ficco.machine import Machine, find
from ficco.plan.model import Plan
from ficco.problems.attention import AttentionProblem, HeadsProblem
from ficco.problems.experts import ExpertLayer
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.scaling import Scaling
from ficco.schedules import Schedule, StagingTooSmall, plans, refusal
from ficco.schedules.attention import attention_plans
from ficco.schedules.attention import refusal as attention_refusal
from ficco.schedules.experts import expert_plans
from ficco.schedules.heads import heads_plans
from ficco.schedules.tiled import Gathering, gathering


class Case(NamedTuple):
    """A problem under a schedule.

    Attributes:
        ask: name of the problem.
        schedule: name of the schedule.
        plans: function that plans for all ranks.
    """

    ask: str
    schedule: str
    plans: Callable[[], Sequence[Plan]]

    @property
    def name(self) -> str:
        return f"{self.ask} | {self.schedule}"

    def all_plans(self) -> Sequence[Plan]:
        """The Plans of all ranks; empty if staging is too small for the schedule."""
        try:
            return self.plans()
        except StagingTooSmall:
            return ()


PRODUCTS = (
    *("serial", "serial:pull", "serial:kernel", "serial:collective"),
    *("shard-overlap", "shard-overlap:pull,copy=2", "growing", "growing:tail=2,compute=2"),
    *("shrinking:pieces=2", "hetero-fused-1d", "hetero-fused-1d:pieces=3,tail=2,kernel,pull"),
    *("hetero-unfused-1d:pieces=3+2+1,order=peer", "hetero-unfused-2d:pieces=2,compute=2"),
    *("hetero-fused-2d:pieces=4,pull", "uniform-fused-1d:pieces=4,copy=2,compute=2"),
    *("uniform-fused-2d:pieces=2,tail=2", "uniform-unfused-1d:order=peer", "uniform-unfused-2d"),
    *("ring", "ring:pieces=1", "one-shot", "one-shot:pieces=3,tail=2,compute=2", "two-shot"),
    *("tiled", "tiled:pieces=3", "tiled:pull,pieces=2", "two-shot:pieces=3,tail=2,compute=2"),
    *("shard-overlap:beta", "hetero-fused-1d:pieces=2,pull,beta,tail=2", "growing:beta,compute=2"),
)
FEWER = (
    *("serial", "growing:compute=2", "hetero-fused-1d:pieces=2,tail=2", "shard-overlap:pull"),
    *("uniform-fused-1d:pieces=3", "uniform-unfused-2d:pieces=2", "hetero-fused-2d:kernel"),
    *("ring", "one-shot:pieces=2", "tiled:pieces=2", "shrinking:order=piece,pieces=2,copy=3"),
    *("hetero-unfused-2d:pieces=3,tail=2,order=peer", "uniform-fused-1d:pieces=2,compute=2"),
    *("serial:collective", "serial:pull"),
)
ONE_RANK = ("serial", "hetero-fused-1d", "one-shot", "tiled")
ATTENTION = (
    *("serial", "shard-overlap", "growing", "growing:tail=2,compute=2", "hetero-fused-1d:pieces=2"),
    *("hetero-unfused-1d:pieces=3,tail=2", "shard-overlap:pull,copy=2", "serial:kernel", "ring"),
    "shrinking:pieces=2",
)
#: Schedules of attention with additional cases under a cap on staging.
CAPPED = ("growing", "hetero-unfused-1d:pieces=3,tail=2")
HEADS = ("serial", "uniform-fused-1d:pieces=2", "uniform-fused-1d:pieces=4,compute=2,copy=2")
EXPERTS = (
    *("serial", "shard-overlap", "growing", "shrinking:copy=2,compute=2"),
    *("hetero-fused-1d:pieces=2", "hetero-unfused-1d:pieces=3", "uniform-fused-1d:pieces=1+3+3+1"),
    *("uniform-unfused-1d:pieces=2,order=peer", "uniform-fused-1d:pieces=4,compute=2"),
)
ARRIVING = ("tiled", "tiled:pieces=3,copy=2", "tiled:pull,pieces=2")


def named(first: str, arguments: Mapping[str, Any]) -> str:
    """The name of a problem: ``first`` and the arguments that differ from their defaults."""
    parts = [first]
    for name, value in arguments.items():
        if value is True:
            parts.append(name)
        elif isinstance(value, tuple):
            parts.append(f"{name}={'+'.join(map(str, value))}")
        elif value not in (None, False, "", 1):
            parts.append(f"{name}={value}")
    return " ".join(parts)


# Plans.


def product(
    operator: str,
    rows: Sequence[int],
    *,
    n: int = 24,
    k: int = 32,
    dtype: str = "bfloat16",
    recipe: str = "",
    source: str = "",
    bias: bool = False,
    **options: Any,
) -> Problem:
    """A matrix product. Operators with a table of blocks spread the rows over the table."""
    if recipe:
        unscaled: Any = {"source": source} if source else {}
        options["scaling"] = Scaling(recipe, dtype, bias=bias, replicated=bias, **unscaled)
    if not OPERATORS[operator].blocks:
        return Problem(operator, tuple(rows), n, k, dtype, **options)
    world = len(rows)
    table = [[rows[(3 * i + j) % world] for j in range(world)] for i in range(world)]
    return Problem.of_blocks(operator, table, n, k, dtype, **options)


def product_asks(operator: str) -> Iterator[tuple[dict[str, Any], Sequence[str], dict[str, Any]]]:
    """Arguments of :func:`product`, schedules, and arguments of :func:`ficco.schedules.plans`."""
    kind = OPERATORS[operator]
    size = 4 if kind.blocks else 16
    yield {"rows": (size,) * 4}, PRODUCTS, {}
    yield {"rows": (16,) * 3}, FEWER, {}
    yield {"rows": (16,) * 2}, FEWER, {}
    yield {"rows": (16,)}, ONE_RANK, {}
    yield {"rows": (17, 0, 40, 9)}, PRODUCTS, {}
    yield {"rows": (0, 33, 8), "dtype": "float32"}, FEWER, {}
    yield {"rows": (16,) * 4, "hosts": 2}, PRODUCTS, {}
    yield {"rows": (9, 20, 0, 31, 16, 5), "hosts": 2}, FEWER, {}
    yield {"rows": (16,) * 3, "hosts": 3}, FEWER, {}
    yield {"rows": (24,) * 4, "n": 64}, FEWER, {"packs_columns": True}
    if not kind.scatters:
        yield {"rows": (24,) * 4, "k": 64}, PRODUCTS, {"staging_bytes": 6 << 10}
        yield {"rows": (17, 0, 40, 9)}, PRODUCTS, {"staging_bytes": 3 << 10}
        if not kind.inner:
            yield {"rows": (16,) * 4, "return_gathered": True}, FEWER, {}
            gathered = {"rows": (12,) * 4, "return_gathered": True}
            yield gathered, FEWER, {"staging_bytes": 2 << 10}
        yield {"rows": (16,) * 4, "symmetric": True}, FEWER, {}
    if kind.blocks:
        yield {"rows": (8,) * 4, "transposed": True}, FEWER, {}
    if kind.inner:
        return
    float8 = {"rows": (16, 24, 8, 16), "n": 128, "k": 384, "dtype": "float8_e4m3fn"}
    for recipe in ("tensor", "row", "block"):
        for options in ({}, {"bias": True}, {"source": "bfloat16"}):
            for hosts in (1, 2):
                yield {**float8, "recipe": recipe, **options, "hosts": hosts}, FEWER, {}


def of_products() -> Iterator[Case]:
    for operator in OPERATORS:
        for arguments, schedules, options in product_asks(operator):
            try:
                problem = product(operator, **arguments)
            except (ValueError, NotImplementedError):
                continue  # the operator does not take float8
            for name in schedules:
                schedule = Schedule.parse(name)
                by_library = schedule.mover == "collective" and problem.transposed
                if refusal(problem, schedule) or by_library:
                    continue
                plan = partial(plans, problem, schedule, **options)
                yield Case(named(operator, arguments | options), name, plan)


def attention(
    world: int, rows: int, heads: tuple[int, int, int, int], **options: Any
) -> tuple[str, Any]:
    """Name and problem of attention. ``heads``: batch, heads, heads of keys, size of a head."""
    dtype = options.pop("dtype", "bfloat16")
    problem = AttentionProblem(world, rows, *heads, dtype, **options)
    sizes = {"ranks": world, "rows": rows, "heads": heads, "dtype": dtype}
    return named("", sizes | options).strip(), problem


def of_attention() -> Iterator[Case]:
    asks = [
        attention(4, 16, (1, 4, 2, 8), causal=True),
        attention(4, 16, (2, 2, 2, 8), causal=True, placement="head-tail"),
        attention(3, 12, (1, 2, 1, 8), dtype="float32", keeps=True),
        attention(2, 16, (1, 2, 2, 8), causal=True, window=9, symmetric=True),
        attention(4, 16, (1, 2, 2, 8), causal=True, cu_seqlens=(0, 5, 40, 64)),
        attention(4, 16, (1, 2, 2, 8), causal=True, hosts=2),
        attention(6, 8, (1, 2, 2, 8), placement="head-tail", hosts=2, keeps=True),
        attention(1, 16, (1, 2, 2, 8), causal=True),
    ]
    for sizes, forward in asks:
        gradient = replace(forward, keeps=False)
        problems = {
            "all_gather_attention": forward,
            "backward": gradient.gradient(),
            "backward of kept operands": gradient.gradient(saved=True),
        }
        for first, problem in problems.items():
            for name in ATTENTION:
                schedule = Schedule.parse(name)
                if attention_refusal(problem, schedule):
                    continue
                for cap in (None, 2500) if name in CAPPED else (None,):
                    plan = partial(attention_plans, problem, schedule, staging_bytes=cap)
                    yield Case(f"{first} {named(sizes, {'staging_bytes': cap})}", name, plan)


def of_heads() -> Iterator[Case]:
    asks = [
        attention(4, 16, (1, 8, 8, 8), causal=True),
        attention(4, 16, (2, 8, 2, 8)),
        attention(3, 16, (1, 12, 4, 8), causal=True),
        attention(2, 16, (1, 6, 3, 8), dtype="float32"),
        attention(4, 16, (1, 8, 4, 8), hosts=2),
        attention(1, 16, (1, 4, 2, 8)),
    ]
    modes = [(False, ""), (False, "heads"), (False, "shards"), (True, "heads"), (True, "shards")]
    for sizes, forward in asks:
        for back, saves in modes:
            problem = HeadsProblem(forward, back, saves)
            for name in HEADS:
                ask = named(f"ulysses_attention {sizes}", {"backward": back, "saves": saves})
                yield Case(ask, name, partial(heads_plans, problem, Schedule.parse(name)))


def of_experts() -> Iterator[Case]:
    gated: dict[str, Any] = {"h": 12, "function": "silu gated"}
    asks: list[tuple[str, int, int, dict[str, Any]]] = [
        ("experts", 4, 2, gated),
        ("experts", 4, 3, gated | {"keeps": True, "indexed": True}),
        ("experts", 3, 2, gated | {"exact": True, "indexed": True}),
        ("experts", 2, 4, gated | {"gathers": True, "keeps": True, "indexed": True}),
        ("experts", 4, 2, gated | {"hosts": 2, "keeps": True}),
        ("experts", 6, 2, gated | {"hosts": 2, "indexed": True}),
        ("experts", 1, 2, gated),
        ("dispatch_matmul", 4, 2, {"h": 24, "keeps": True}),
        ("matmul_combine", 4, 2, {"h": 24}),
        ("matmul_combine", 4, 2, {"h": 24, "hosts": 2, "gathers": True}),
    ]
    for operator, world, experts, options in asks:
        problem = ExpertLayer(operator, world, experts, 5, 16, n=8, dtype="bfloat16", **options)
        ask = named(operator, {"ranks": world, "experts": experts, **options})
        for name in EXPERTS:
            yield Case(ask, name, partial(expert_plans, problem, Schedule.parse(name)))


def of_arriving() -> Iterator[Case]:
    for rows in ((16,) * 4, (9, 0, 17), (16,)):
        for symmetric in (False, True):
            problem = Gathering(rows, 32, "bfloat16", symmetric)
            ask = named("arriving", {"rows": rows, "symmetric": symmetric})
            for name in ARRIVING:
                plan = partial(gathering, problem, Schedule.parse(name), range(problem.world))
                yield Case(ask, name, plan)


def cases() -> dict[str, Case]:
    """All cases by name."""
    by_name: dict[str, Case] = {}
    for source in (of_products, of_attention, of_heads, of_experts, of_arriving):
        for case in source():
            assert case.name not in by_name, case.name
            by_name[case.name] = case
    return by_name


def machine(name: str) -> Machine:
    """A machine that ships with ficco."""
    described = find(name, None)
    assert described is not None
    return described
