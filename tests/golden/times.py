"""Simulated times, with the values of ``ficco simulate --csv``, computed in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ficco.problems.sizes import problem_of
from ficco.tools.bench.simulated import simulate_problem
from golden.asks import machine, named

RECORD = Path(__file__).with_name("simulated.json")

#: Largest relative difference of a time from the record.
TOLERANCE = 0.02

OPERATORS = (
    *("all_gather_matmul", "all_gather_transposed_matmul", "all_to_all_matmul"),
    *("matmul_reduce_scatter", "matmul_all_to_all", "matmul_all_reduce"),
)
#: m, n and k.
SHAPES = ((8192, 3584, 4096), (6144, 2048, 4608), (1024, 14336, 8192), (32768, 896, 5120))
HEADS = {"heads": 32, "kv_heads": 8, "head_size": 128, "causal": True}
EXPERTS = {"experts": 64, "k": 4096, "h": 1408, "n": 4096, "capacity": 160}

#: Times of a problem in milliseconds, by candidate.
Times = dict[str, float]


def asks() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Machines, operators, and options of ``ficco simulate``."""
    shapes = [dict(zip("mnk", shape, strict=True)) for shape in SHAPES]
    for operator in OPERATORS:
        for name in ("h200-4", "mi300x-8"):
            for shape in shapes:
                yield name, operator, shape
        yield "mi300x-8", operator, {**shapes[0], "hosts": 2}
    yield "h100-8", "all_gather_matmul", {**shapes[2], "hosts": 2}
    for dtype in ("fp8-row", "fp8-block"):
        yield "h100-2", "all_gather_matmul", {**shapes[0], "dtype": dtype}
    for operator in ("all_gather_attention", "ulysses_attention"):
        for sequence in (16384, 65536):
            yield "h200-4", operator, {"sequence": sequence, **HEADS}
    yield "h200-4", "experts", EXPERTS
    yield "mi300x-8", "experts", EXPERTS


def simulated(
    name: str, operator: str, *, dtype: str = "bfloat16", hosts: int = 1, **sizes: Any
) -> Times:
    """Simulated milliseconds by candidate, on all ranks of a machine, with the host ahead."""
    described = machine(name)
    problem = problem_of(operator, described.ranks * hosts, dtype, sizes, hosts=hosts)
    rows = simulate_problem(problem, {"case": operator}, described, "queued")
    return dict(zip(rows["candidate"], map(float, rows["ms"]), strict=True))


def times() -> dict[str, Times]:
    """All simulated times by problem."""
    return {
        named(f"{name} {operator}", options): simulated(name, operator, **options)
        for name, operator, options in asks()
    }


def differences(before: Mapping[str, Times], now: Mapping[str, Times]) -> list[str]:
    """A line for each time that differs by more than the tolerance, or is missing in one table."""
    lines = []
    for ask in dict.fromkeys((*before, *now)):
        old, new = before.get(ask, {}), now.get(ask, {})
        for name in dict.fromkeys((*old, *new)):
            if name not in old or name not in new:
                lines.append(f"{ask} | {name}: only {'before' if name in old else 'now'}")
            elif abs(new[name] - old[name]) > TOLERANCE * old[name]:
                was, ms = old[name], new[name]
                change = f" ({ms / was - 1:+.1%})" if was else ""
                lines.append(f"{ask} | {name}: {was:.6g} ms before, {ms:.6g} ms now{change}")
    return lines


def record() -> None:
    """Write ``simulated.json`` with four digits per time."""
    rounded = {
        ask: {name: float(f"{ms:.4g}") for name, ms in row.items()} for ask, row in times().items()
    }
    rows = [f"{json.dumps(ask)}: {json.dumps(row)}" for ask, row in rounded.items()]
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")
