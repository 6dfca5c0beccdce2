"""Every schedule and every operator once, proven exact, timed, and drawn."""

from __future__ import annotations

import math
import re
import tempfile
import textwrap
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import ProcessGroup

import ficco
from ficco.dma.cpu import CpuEngine
from ficco.dma.host import VARIABLE
from ficco.heuristics import Decision, decide
from ficco.heuristics.candidates import is_serial
from ficco.machine import Machine, find
from ficco.problems.products import OPERATORS
from ficco.schedules import NAMED, Schedule
from ficco.tools.bench import attention, experts
from ficco.tools.bench.candidates import BenchCandidate, caller, environment, parse, taken
from ficco.tools.bench.cases import OPERATOR, Case
from ficco.tools.bench.draw import draw, trace
from ficco.tools.bench.frames import bar, cells, show
from ficco.tools.bench.harness import Tick, Workload, timelines_of
from ficco.tools.bench.measure import Stopwatch
from ficco.tools.bench.products import ProductWork
from ficco.tools.bench.simulated import examples
from ficco.tools.launch import local_device

#: Schedules besides the named ones: other movers, directions, lanes and pieces.
KNOBS = (
    "serial:collective",
    "shard-overlap:pull",
    "growing:tail=4",
    "hetero-fused-1d:pieces=4+2+1",
    "hetero-unfused-1d:pull,copy=2,compute=2",
    "hetero-fused-1d:kernel",
    "uniform-fused-2d:pull,compute=2",
)

#: The baseline of the demo.
TORCH = BenchCandidate("torch.distributed, then matmul", "serial-collective")

#: Operators of the demo besides products.
OTHERS = (attention.GATHERS, attention.BY_HEADS, "experts")

#: Rounds of all schedules, then of each operator and torch's composition. Times are medians.
ROUNDS = 9

#: Hosts that the ranks stand for in the end.
HOSTS = 2

#: Sizes by device: rows per rank, n, k, dtype. On CPUs a call takes tens of milliseconds.
SIZES = {"cpu": (192, 384, 768, "float32"), "cuda": (2048, 2048, 4096, "bfloat16")}

#: The same for attention: rows, heads and heads of keys per rank, size of a head, dtype.
ATTENTION_SIZES = {"cpu": (192, 2, 1, 64, "float32"), "cuda": (2048, 4, 1, 128, "bfloat16")}

#: The machine of the printed decisions.
DECIDED_ON = "h200-4"

#: Bytes per second of drawn copies on CPUs: without a limit they are too short to see.
DRAWN_BANDWIDTH = 3e8

#: Timed calls of each schedule. The shortest is drawn: other work on the machine delays some.
RUNS = 3


def demo(device_name: str, out: Path | None) -> int:
    """Run the demo on this rank, whose device is ``"cpu"`` or ``"cuda"``; the exit code.

    ``out`` is the folder of the picture, the trace and the table; None for a new one.
    """
    group, device = dist.group.WORLD, local_device(device_name)
    first, watch = group.rank() == 0, Stopwatch(group, device)
    problem = _case(OPERATOR, watch).problem(group.size())
    decision = taken(problem, group, device)
    chosen = str(decision.schedule)
    work = _product(OPERATOR, watch, *map(parse, dict.fromkeys((*NAMED, *KNOBS, chosen))))
    if first:
        print(f"{problem} on {device.type}", flush=True)
    console = Console(stderr=True, quiet=not first)
    others = len(OPERATORS) - 1 + len(OTHERS)
    total = len(work.offered) + ROUNDS + others * (2 + ROUNDS)
    with bar(console, "demo", total, partial(next, count())) as tick:
        results = _table(work, ROUNDS, tick)
        by_operator = [_row(OPERATOR, decision, results)]
        for operator in OPERATORS:
            if operator != OPERATOR:
                other = _product(operator, watch, parse("auto"))
                why = taken(other.problem, group, device)
                by_operator.append(_row(operator, why, _table(other, ROUNDS, tick)))
        by_operator += [_other(operator, watch, decision.machine, tick) for operator in OTHERS]
        crossed = _over_hosts(group, device)
        served = results["schedule"][results["exact"].notna()].iloc[1:]
        calls = {one: caller(work.operands, group, one) for one in served if one in work.offered}
        CpuEngine.bandwidth = DRAWN_BANDWIDTH  # the engines of GPUs have no such limit
        try:
            runs = [timelines_of(calls, watch) for _ in range(RUNS)]
        finally:
            CpuEngine.bandwidth = None
    watch.close()
    if not first:
        return 0
    out = out or Path(tempfile.mkdtemp(prefix="ficco-demo-"))
    out.mkdir(parents=True, exist_ok=True)
    order = [one.name for one in work.candidates]
    results = results.sort_values("schedule", key=lambda names: names.map(order.index))
    gains = _gains(decision)
    if gains:
        results.insert(1, "predicted gain", cells(results["schedule"].map(gains), "+.1%"))
    results.to_csv(out / "demo.csv", index=False, lineterminator="\n", float_format="%.4f")
    limit = f"copies limited to {DRAWN_BANDWIDTH / 1e6:.0f} MB/s, or they would be too short to see"
    note = limit if device.type == "cpu" else ""
    by_name = zip(*(zip(run[::2], run[1::2], strict=True) for run in runs), strict=True)
    timelines = [one for pairs in by_name for one in min(pairs, key=lambda pair: pair[1].stop_s)]
    picture = draw(timelines, out / "timelines.png", columns=2, ranks=[0], note=note)
    operators = pd.DataFrame(by_operator)
    marked = results.replace({"schedule": {chosen: f"{chosen} (auto)"}})
    _show(f"{OPERATOR} by every schedule", marked, results["ms"].iloc[0])
    legend = "; serial (predicted gain < required gain)" if gains else ""
    _show(f"Every operator by schedule='auto'{legend}", operators, operators["torch ms"])
    print(about_times(decision, device))
    print(f"schedule='auto' on {DECIDED_ON}:")
    for line in "\n".join(examples(find(DECIDED_ON, None))).splitlines():
        print(textwrap.fill(line, 100, subsequent_indent="    "))
    if crossed is not None:
        right = int(crossed["exact"].eq(True).sum())
        print(f"\n{HOSTS} hosts, gloo between them: {right} operators exact")
        operators = pd.concat([operators, crossed])
    text, code = verdict(results, group.size(), operators)
    print(text)
    print(f"trace for https://ui.perfetto.dev: {trace(timelines, out / 'trace.json')}")
    print(f"open {picture}: each schedule on rank 0, planned and measured", flush=True)
    return code


def verdict(results: pd.DataFrame, world: int, by_operator: pd.DataFrame) -> tuple[str, int]:
    """The last line, and the exit code. The first result is not a schedule's."""
    wrong = [
        *results["schedule"][results["exact"].eq(False)],
        *by_operator["operator"][by_operator["exact"].ne(True)],
    ]
    if wrong:
        return f"demo failed: wrong results of {', '.join(wrong)}", 1
    right = results["exact"].iloc[1:].eq(True).sum()
    return f"demo ok: {right} schedules exact on {world} ranks", 0


def _gains(decision: Decision) -> dict[str, float]:
    """Predicted gain over serial of each compared schedule; empty if the machine lacks figures."""
    seconds = {one.schedule: one.idle or one.queued for one in decision.candidates}
    serial = min((t for name, t in seconds.items() if is_serial(Schedule.parse(name))), default=0.0)
    return {name: serial / t - 1 for name, t in seconds.items()}


def _chosen(decision: Decision) -> str:
    """The schedule; if a gain is below the margin, also both."""
    short = re.search(r"predicted to gain (\S+) .* margin of (\S+?%)", decision.reason)
    return f"{decision.schedule} ({short[1]} < {short[2]})" if short else str(decision.schedule)


def about_times(decision: Decision, device: torch.device) -> str:
    """Explain why ``auto`` takes its schedule, and how far the times can be trusted."""
    text = f"auto takes {decision.schedule} for {OPERATOR} ({decision.why})."
    if "margin" in decision.reason:
        text += " The margin stands for waits and smaller products, which the model leaves out."
    if device.type == "cpu":
        text += (
            " On CPUs, copies and products share the cores, so overlap can hide little, and other"
            f" work on the machine changes the times, medians of {ROUNDS} rounds. They show that"
            " every schedule runs here, not how fast it is on GPUs."
        )
    return textwrap.fill(text, 100) + "\n"


def _case(operator: str, watch: Stopwatch) -> Case:
    rows, n, k, dtype = SIZES[watch.device.type]
    return Case("", rows * watch.world, n, k, dtype).on(operator)


def _product(operator: str, watch: Stopwatch, *schedules: BenchCandidate) -> ProductWork:
    """An operator by torch's collective and by schedules."""
    return ProductWork(_case(operator, watch), watch, (TORCH, *schedules))


def _table(work: Workload, rounds: int, tick: Tick = lambda action: None) -> pd.DataFrame:
    """Prove the variants of a workload right, and time them in rounds. Collective.

    A row per variant: its name as ``schedule``; whether it is ``exact``, None if it is not served;
    median ``ms``; and a ``note``, the reason if it is not served.

    Raises:
        RuntimeError: a variant failed.
    """
    checked = work.checked(False, tick)
    if failed := [f"{one.name}: {one.note}" for one in checked if one.status == "failed"]:
        raise RuntimeError("; ".join(failed))
    work.fill(0)
    calls = {one.name: one.runner for one in checked if one.runner is not None}
    times = work.watch.time(calls, seconds=math.inf, most=rounds, least=1, tick=tick)
    exact = {"ok": True, "wrong": False}
    rows = [
        (one.name, exact.get(one.status), np.median(times.get(one.name, math.nan)) * 1e3, one.note)
        for one in checked
    ]
    by_name = {row[0]: row[1:] for row in rows}
    if isinstance(work, ProductWork):
        rows += [(one.name, *by_name[timed.name]) for one, timed in work.again.items()]
    return pd.DataFrame(rows, columns=["schedule", "exact", "ms", "note"]).astype({"exact": object})


def _row(operator: str, decision: Decision, results: pd.DataFrame) -> dict[str, Any]:
    """The row of an operator, from its decision and the results of the baseline, and of ``auto`` or
    of the schedule that ``auto`` takes."""
    ours = [str(decision.schedule), "auto"]
    (row,) = results[results["schedule"].isin(ours)].to_dict("records")
    times = {"ms": row["ms"], "torch ms": results["ms"].iloc[0]}
    return {"operator": operator, "schedule": _chosen(decision), **times, "exact": row["exact"]}


@torch.no_grad()
def _other(operator: str, watch: Stopwatch, machine: Machine | None, tick: Tick) -> dict[str, Any]:
    """The row of attention over a sharded sequence, or of a layer of experts: a baseline and
    ``auto``."""
    kind, world = watch.device.type, watch.world
    if operator == "experts":
        rows, _, k, dtype = SIZES[kind]
        layer = experts.ExpertCase(operator, 2 * world, rows, k // 4, k // 4, dtype=dtype)
        work: Workload = experts.ExpertData(layer, watch, ("auto",))
    else:
        rows, heads, kv_heads, size, dtype = ATTENTION_SIZES[kind]
        sizes = rows * world, heads * world, kv_heads * world, size
        case = attention.AttentionCase(operator, operator, *sizes, dtype=dtype)
        work = attention.AttentionData(case, watch, ("auto",))
    variants = work.variants()
    baseline = next(name for name, one in variants.items() if one.baseline and not one.lacks)
    work.offered = {name: variants[name] for name in (baseline, "auto")}
    results = _table(work, ROUNDS, tick)
    decision = decide(work.problem, machine=machine, mode="idle" if kind == "cpu" else "queued")
    return _row(operator, decision, results)


def _over_hosts(group: ProcessGroup, device: torch.device) -> pd.DataFrame | None:
    """Every operator by the same ranks as if they were on two hosts, which share no memory; None
    for too few ranks, or on GPUs, whose engines do not cross hosts."""
    if device.type != "cpu" or group.size() % HOSTS or group.size() < 2 * HOSTS:
        return None
    apart = dist.new_group(list(range(group.size())))
    assert isinstance(apart, ProcessGroup)
    host = f"demo {group.rank() * HOSTS // group.size()}"
    with environment(**{VARIABLE: host}), closing(Stopwatch(apart, device)) as watch:
        rows = [
            {"operator": f"{operator} on {HOSTS} hosts", **_table(work, 1).iloc[1]}
            for operator in OPERATORS
            for work in [_product(operator, watch, parse("auto"))]
        ]
        ficco.close(apart)
    dist.destroy_process_group(apart)
    return pd.DataFrame(rows)


def _show(title: str, rows: pd.DataFrame, torch_ms: Any) -> None:
    table = rows.drop(columns=["exact", "note"], errors="ignore")
    times = [name for name in table if name.endswith("ms")]
    table[times] = table[times].apply(cells)
    table["x torch"] = cells(torch_ms / rows["ms"])
    table["result"] = [
        "not served" if x is None else "exact" if x else "WRONG" for x in rows["exact"]
    ]
    last = table.shape[1] - 1
    show(title, table, left=(0, *([1] if "operator" in table else []), last), width=100)
