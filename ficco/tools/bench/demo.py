"""Every schedule and every operator once, proven exact, timed, and drawn."""

from __future__ import annotations

import os
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
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
from ficco.heuristics import Decision
from ficco.machine import find
from ficco.problems.products import OPERATORS
from ficco.runtime.workspace import workspace_of
from ficco.schedules import NAMED
from ficco.tools.bench import attention, experts
from ficco.tools.bench.candidates import BenchCandidate, build, caller, of_problem, parse, taken
from ficco.tools.bench.cases import OPERATOR, Case, scenarios
from ficco.tools.bench.draw import draw, trace
from ficco.tools.bench.frames import bar, cells, show
from ficco.tools.bench.harness import Workload, taken_by_auto, trace_all
from ficco.tools.bench.inputs import ExactCall, Operands, exact_calls, seconds
from ficco.tools.bench.measure import Stopwatch
from ficco.tools.bench.simulated import examples, show_table_i
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

#: Rounds of calls, each with inputs of its own: of all schedules, then of each operator and torch's
#: composition. Times are medians over the rounds.
ROUNDS = 9

#: Hosts that the ranks stand for in the end.
HOSTS = 2

#: Sizes by device: rows per rank, n, k, dtype. On CPUs a call takes tens of milliseconds.
SIZES = {"cpu": (192, 384, 768, "float32"), "cuda": (2048, 2048, 4096, "bfloat16")}

#: The same for attention: rows, heads and heads of keys per rank, size of a head, dtype.
ATTENTION_SIZES = {"cpu": (192, 2, 1, 64, "float32"), "cuda": (2048, 4, 1, 128, "bfloat16")}

#: The machine of the printed decisions, and the machine of the simulated Table I.
DECIDED_ON = "h200-4"
SIMULATED_ON = "mi300x-8"

#: On CPUs the drawn calls copy at this many bytes per second: copies without a limit are too short
#: to see.
DRAWN_BANDWIDTH = 3e8


def demo(device_name: str, out: Path | None) -> int:
    """Run the demo on this rank; the exit code.

    Args:
        device_name: ``"cpu"`` or ``"cuda"``.
        out: folder of the pictures, the trace and the table; None for a new one.
    """
    group = dist.group.WORLD
    first = group.rank() == 0
    device = local_device(device_name)
    operands = _operands(OPERATOR, group, device)
    problem = operands.problem
    engine = workspace_of(group, device).engine
    decision = taken(problem, group, device)
    chosen = str(decision.schedule)
    served = of_problem(map(parse, (*NAMED, *KNOBS, chosen)), problem, engine)
    if first:
        print(f"{problem} on {device.type}", flush=True)
    console = Console(stderr=True, quiet=not first)
    total = (len(served) + 1) * (ROUNDS + 1) + len(OPERATORS)
    done = count(1)
    with bar(console, "demo", total) as show_step:
        results = _times(
            [TORCH, *served], operands, group, ROUNDS, lambda: show_step(next(done), "schedules")
        )
        taking = [_taking(OPERATOR, chosen, results)]
        for operator in OPERATORS:
            if operator != OPERATOR:
                taking.append(_operator(operator, group, device))
            show_step(next(done), operator)
        taking += _others(group, device)
        crossed = _over_hosts(group, device)
        ours = results["schedule"][results["exact"].notna()].iloc[1:]
        CpuEngine.bandwidth = DRAWN_BANDWIDTH  # the engines of GPUs have no such limit
        try:
            calls = {name: caller(operands, group, name) for name in ours}
            timelines = trace_all(calls, group, device)
        finally:
            CpuEngine.bandwidth = None
    if not first:
        return 0
    out = out or Path(tempfile.mkdtemp(prefix="ficco-demo-"))
    out.mkdir(parents=True, exist_ok=True)
    results.to_csv(out / "demo.csv", index=False, lineterminator="\n", float_format="%.4f")
    limit = f"copies limited to {DRAWN_BANDWIDTH / 1e6:.0f} MB/s, so that they can be seen"
    note = limit if device.type == "cpu" else ""
    picture = draw(timelines, out / "timelines.png", columns=2, ranks=[0], note=note)
    by_operator = pd.DataFrame(taking)
    marked = results.replace({"schedule": {chosen: f"{chosen} (auto)"}})
    _show(f"{OPERATOR} by every schedule", marked, results["ms"].iloc[0])
    _show("Every operator by schedule='auto'", by_operator, by_operator["torch ms"])
    print(about_times(decision, device))
    print(f"timelines, planned and measured{note and f' ({note})'}: {picture}")
    print(f"trace for https://ui.perfetto.dev: {trace(timelines, out / 'trace.json')}")
    machine, papers = find(DECIDED_ON, None), find(SIMULATED_ON, None)
    assert machine is not None and papers is not None
    print(f"\nschedule='auto' on {machine.name}:", *examples(machine), sep="\n")
    show_table_i(papers, scenarios())
    if crossed is not None:
        right = int(crossed["exact"].eq(True).sum())
        each = group.size() // HOSTS
        print(f"\n{HOSTS} hosts of {each} ranks, gloo between them: {right} operators exact")
        by_operator = pd.concat([by_operator, crossed])
    text, code = verdict(results, group.size(), by_operator)
    print(text, flush=True)
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


def about_times(decision: Decision, device: torch.device) -> str:
    """Explain why ``auto`` takes its schedule, and how far the times can be trusted."""
    text = f"auto takes {decision.schedule} for {OPERATOR} ({decision.why})."
    if "margin" in decision.reason:
        text += " The margin stands for waits and smaller products, which the model leaves out."
    if device.type == "cpu":
        text += (
            " On CPUs, copies and products share the cores, so overlap can hide little. The times"
            f" are medians of {ROUNDS} rounds, which waits between ranks and other work on the"
            " machine change. They show that every schedule runs here, not which is best or how"
            " fast it is on GPUs."
        )
    return textwrap.fill(text, 100) + "\n"


def _operands(operator: str, group: ProcessGroup, device: torch.device) -> Operands:
    rows, n, k, dtype = SIZES[device.type]
    case = Case("", rows * group.size(), n, k, dtype).on(operator)
    operands = Operands(case.problem(group.size()), group.rank(), device)
    operands.exact_b()
    return operands


def _operator(operator: str, group: ProcessGroup, device: torch.device) -> dict[str, Any]:
    """An operator by what ``auto`` takes and by torch's collective, in turns: others may use the
    cores, too."""
    operands = _operands(operator, group, device)
    results = _times([TORCH, parse("auto")], operands, group, ROUNDS)
    return _taking(operator, str(taken(operands.problem, group, device).schedule), results)


def _taking(operator: str, schedule: str, results: pd.DataFrame) -> dict[str, Any]:
    """An operator's row, from the results of torch's composition and of ``auto`` or the schedule
    that ``auto`` takes."""
    torch_ms = results["ms"].iloc[0]
    (row,) = results[results["schedule"].isin([schedule, "auto"])].to_dict("records")
    times = {"ms": row["ms"], "torch ms": torch_ms}
    return {"operator": operator, "schedule": schedule, **times, "exact": row["exact"]}


@torch.no_grad()
def _others(group: ProcessGroup, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of attention over a sharded sequence, and of a layer of experts."""
    watch, world = Stopwatch(group, device), group.size()
    rows, heads, kv_heads, size, dtype = ATTENTION_SIZES[device.type]
    for operator in (attention.GATHERS, attention.BY_HEADS):
        sizes = rows * world, heads * world, kv_heads * world, size
        case = attention.AttentionCase(operator, operator, *sizes, dtype=dtype)
        yield {
            "operator": operator,
            **_work(attention.AttentionData(case, watch, ("auto",)), watch),
        }
    rows, _, k, dtype = SIZES[device.type]
    layer = experts.ExpertCase("experts", 2 * world, rows, k // 4, k // 4, dtype=dtype)
    yield {"operator": "experts", **_work(experts.ExpertData(layer, watch, ("auto",)), watch)}
    watch.close()


def _work(work: Workload, watch: Stopwatch) -> dict[str, Any]:
    """Time ``auto`` and the first baseline of a workload, in turns."""
    variants = work.variants()
    baseline = next(one for one in variants.values() if one.baseline and not one.lacks)
    calls = [one.call for one in (baseline, variants["ficco"])]
    measure, times, right = seconds(watch.group, watch.device), list[list[float]](), True
    for turn in range(ROUNDS):
        work.fill(turn, exact=True)
        times.append([])
        for call in calls:
            result, taken_s = measure(call)
            times[-1].append(max(watch.gather(taken_s)))
            right = work.right(result) and right
    torch_ms, ms = np.median(times, axis=0) * 1e3
    schedule, exact = taken_by_auto(work.problem, watch), all(watch.gather(right))
    return {"schedule": schedule, "ms": ms, "torch ms": torch_ms, "exact": exact}


def _over_hosts(group: ProcessGroup, device: torch.device) -> pd.DataFrame | None:
    """Every operator by the same ranks as if they were on two hosts, which share no memory; None
    where there are too few ranks, or on GPUs, whose engines do not cross hosts."""
    if device.type != "cpu" or group.size() % HOSTS or group.size() < 2 * HOSTS:
        return None
    apart = dist.new_group(list(range(group.size())))
    assert isinstance(apart, ProcessGroup)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = f"demo {group.rank() * HOSTS // group.size()}"
    try:
        rows = []
        for operator in OPERATORS:
            operands = _operands(operator, apart, device)
            times = _times([parse("auto")], operands, apart, 1)
            rows.append({"operator": f"{operator} on {HOSTS} hosts", **times.iloc[0]})
        ficco.close(apart)
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
    dist.destroy_process_group(apart)
    return pd.DataFrame(rows)


def _times(
    candidates: Sequence[BenchCandidate],
    operands: Operands,
    group: ProcessGroup,
    rounds: int,
    advance: Callable[[], object] = lambda: None,
) -> pd.DataFrame:
    """Call all candidates ``rounds`` times and once to warm up, compare every result, and time.

    ``advance`` is called after every call. A row per candidate: its name as ``schedule``; whether
    every result was ``exact`` on all ranks, None if it is not served here; the median of the
    slowest rank's ``ms``; and a ``note`` that says why it is not served.
    """
    served: dict[str, Callable[[], torch.Tensor]] = {}
    outcomes: list[ExactCall] = []
    table = pd.DataFrame({"schedule": [one.name for one in candidates], "note": ""})
    measure = seconds(group, operands.device)
    for number, candidate in enumerate(candidates):
        one = {candidate.name: build(candidate, operands, group).run}
        try:
            outcomes += exact_calls(one, operands, 1, first=number, measure=measure)
        except NotImplementedError as error:
            table.loc[number, "note"] = str(error)
        else:
            served |= one
            advance()
    for outcome in exact_calls(served, operands, rounds, first=len(candidates), measure=measure):
        outcomes.append(outcome)
        advance()
    names, wrong, taken_s = zip(*outcomes, strict=True)
    by_rank: list[Any] = [None] * group.size()
    mine = [int(one) for one in wrong], taken_s
    dist.all_gather_object(by_rank, mine, group=group)
    wrong, taken_s = np.max(by_rank, axis=0)  # of every call the worst rank
    calls = pd.DataFrame({"exact": wrong == 0, "ms": taken_s * 1e3}, index=names)
    exact = calls["exact"].groupby(level=0).min().astype(object)
    ms = calls["ms"].iloc[len(served) :].groupby(level=0).median()
    exact = table["schedule"].map(exact)
    table.insert(1, "exact", exact.where(exact.notna(), None))
    table.insert(2, "ms", table["schedule"].map(ms))
    return table


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
