"""Every schedule and every operator once, proven exact, timed, and drawn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
import torch.distributed as dist

from ficco.bench.calls import build, taken
from ficco.bench.candidates import Candidate, of_problem, parse
from ficco.bench.cases import OPERATOR, Case, scenarios
from ficco.bench.decisions import examples, show_table_i
from ficco.bench.draw import draw, trace
from ficco.bench.exact import Outcome, exact_calls, seconds
from ficco.bench.inputs import Operands
from ficco.bench.series import slowest
from ficco.bench.tables import show
from ficco.bench.traces import trace_all
from ficco.launch import local_device
from ficco.machine import find
from ficco.problem import OPERATORS
from ficco.schedules import NAMED

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Schedules beside the named ones: other movers, directions, lanes and pieces.
KNOBS = (
    "serial:collective",
    "shard-overlap:pull",
    "growing:tail=4",
    "hetero-fused-1d:pieces=4+2+1",
    "hetero-unfused-1d:pull,copy=2,compute=2",
    "hetero-fused-1d:kernel",
    "uniform-fused-2d:pull,compute=2",
)

#: What everything is compared with.
TORCH = Candidate("torch.distributed, then matmul", "serial-collective")

#: What is said of a product.
WORDS = {True: "exact", False: "WRONG", None: "not served"}

#: Rounds of calls of all schedules, each round with inputs of its own.
CALLS = 7

#: Rounds of an operator beside torch's composition.
TURNS = 15

#: Sizes by device: rows per rank, n, k, dtype. On CPUs a call takes tens of milliseconds.
SIZES = {"cpu": (192, 384, 768, "float32"), "cuda": (2048, 2048, 4096, "bfloat16")}

#: The machine on which the demo decides, and the one on which it simulates.
DECIDED_ON = "h200-4"
SIMULATED_ON = "mi300x-8"

#: On CPUs the drawn calls copy at this many bytes per second, or the copies could not be seen.
DRAWN_BANDWIDTH = 3e8


@dataclass(frozen=True)
class DemoSettings:
    """What the demo shows.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        out: folder of the pictures, the trace and the table; None for a new one.
    """

    device: str
    out: Path | None


@dataclass(frozen=True)
class DemoResult:
    """One schedule.

    Attributes:
        name: the schedule, or what it is compared with.
        exact: every call gave the one right product; None if it is not served here.
        ms: median of the slowest rank's milliseconds.
        note: why it is not served.
    """

    name: str
    exact: bool | None
    ms: float
    note: str = ""


@dataclass(frozen=True)
class Served:
    """One operator as a call with nothing else set does it, beside torch's own composition."""

    operator: str
    schedule: str
    result: DemoResult
    torchs: DemoResult


def demo(settings: DemoSettings) -> int:
    """Run the demo on this rank; the exit code."""
    from rich.console import Console
    from rich.progress import Progress

    group = dist.group.WORLD
    first = group.rank() == 0
    device = local_device(settings.device)
    operands = _operands(OPERATOR, group, device)
    problem = operands.problem
    candidates = [
        TORCH,
        *of_problem([parse(name) for name in (*NAMED, *KNOBS)], problem),
    ]
    if first:
        print(f"{problem} on {device.type}", flush=True)
    out = settings.out or Path(tempfile.mkdtemp(prefix="ficco-demo-") if first else "")
    show = Progress(console=Console(stderr=True, quiet=not first), transient=True)
    with show:
        calls = len(candidates) * (CALLS + 1)
        task = show.add_task("schedules", total=calls + len(OPERATORS) + 1)
        results = _rounds(candidates, operands, group, CALLS, lambda: show.advance(task))
        served = []
        for operator in OPERATORS:
            show.update(task, description=operator)
            served.append(_operator(operator, group, device))
            show.advance(task)
        show.update(task, description="timelines")
        drawn = [
            one.schedule
            for one, result in zip(candidates, results, strict=True)
            if one.ours and result.exact is not None
        ]
        with _slow_copies(device):
            timelines = trace_all(drawn, operands, group)
        if first:
            out.mkdir(parents=True, exist_ok=True)
            limited = f"; copies limited to {DRAWN_BANDWIDTH / 1e6:.0f} MB/s"
            note = f"{problem} on {device.type}, rank 0" + limited * (device.type == "cpu")
            picture = draw(timelines, out / "timelines.png", columns=2, ranks=[0], note=note)
            traced = trace(timelines, out / "trace.json")
    if not first:
        return 0
    pd.DataFrame(results).rename(columns={"name": "schedule"}).to_csv(
        out / "demo.csv", index=False, lineterminator="\n", float_format="%.4f", na_rep="nan"
    )
    _show_schedules(results)
    _show_operators(served)
    print(f"timelines, planned and measured: {picture}")
    print(f"trace for https://ui.perfetto.dev: {traced}")
    _decisions()
    text, code = verdict(results, group.size(), served)
    print(text, flush=True)
    return code


def _decisions() -> None:
    """What ``auto`` takes elsewhere, and the paper's Table I on its machine, both on paper."""
    machine = find(DECIDED_ON, None)
    assert machine is not None
    print(f"\nschedule='auto' on {machine.name}:", *examples(machine), sep="\n")
    machine = find(SIMULATED_ON, None)
    assert machine is not None
    show_table_i(machine, scenarios())


def verdict(
    results: list[DemoResult], world: int, served: Sequence[Served] = ()
) -> tuple[str, int]:
    """The last line, and the exit code. The first result is not a schedule's."""
    wrong = [result.name for result in results if result.exact is False]
    wrong += [one.operator for one in served if not one.result.exact]
    if wrong:
        return f"demo failed: wrong results of {', '.join(wrong)}", 1
    count = sum(result.exact is True for result in results[1:])
    return f"demo ok: {count} schedules exact on {world} ranks", 0


def _operands(operator: str, group: ProcessGroup, device: torch.device) -> Operands:
    rows, n, k, dtype = SIZES[device.type]
    case = Case("", rows * group.size(), n, k, dtype).on(operator)
    operands = Operands(case.problem(group.size()), group.rank(), device)
    operands.exact_b()
    return operands


def _operator(operator: str, group: ProcessGroup, device: torch.device) -> Served:
    """An operator by what ``auto`` takes and by torch's collective, in turns: others may use the
    cores, too."""
    operands = _operands(operator, group, device)
    torchs, result = _rounds([TORCH, parse("auto")], operands, group, TURNS)
    schedule = str(taken(operands.problem, group, device).schedule)
    return Served(operator, schedule, result, torchs)


def _rounds(
    candidates: Sequence[Candidate],
    operands: Operands,
    group: ProcessGroup,
    count: int,
    advance: Callable[[], object] = lambda: None,
) -> list[DemoResult]:
    """Call all candidates ``count`` times and once to warm up; compare every result, and time.

    ``advance`` is called after every call.
    """
    served: dict[str, Callable[[], torch.Tensor]] = {}
    outcomes: list[Outcome] = []
    notes: dict[str, str] = {}
    measure = seconds(group, operands.device)
    for number, candidate in enumerate(candidates):
        one = {candidate.name: build(candidate, operands, group).run}
        try:
            outcomes += exact_calls(one, operands, 1, first=number, measure=measure)
        except NotImplementedError as error:
            notes[candidate.name] = str(error)
        else:
            served |= one
            advance()
    warm = len(outcomes)
    for outcome in exact_calls(served, operands, count, first=len(candidates), measure=measure):
        outcomes.append(outcome)
        advance()
    times: dict[str, list[float]] = {name: [] for name in served}
    exact = dict.fromkeys(served, True)
    for number, (name, wrong, taken_s) in enumerate(outcomes):
        exact[name] = exact[name] and not wrong.item()
        if number >= warm:
            times[name].append(taken_s)
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, (times, exact), group=group)
    return [
        DemoResult(
            name,
            all(right[name] for _, right in by_rank),
            median(slowest([taken_s[name] for taken_s, _ in by_rank])) * 1e3,
        )
        if name in served
        else DemoResult(name, None, float("nan"), notes[name])
        for name in (candidate.name for candidate in candidates)
    ]


def _slow_copies(device: torch.device) -> Any:
    if device.type != "cpu":
        return nullcontext()
    from ficco.dma.disturbance import Disturbance, disturb

    return disturb(Disturbance(bandwidth=DRAWN_BANDWIDTH))


def _show_schedules(results: Sequence[DemoResult]) -> None:
    torch_ms = results[0].ms  # of torch's own composition
    rows = [
        (one.name, "", "", WORDS[None])
        if one.exact is None
        else (one.name, f"{one.ms:.2f}", f"{torch_ms / one.ms:.2f}", WORDS[one.exact])
        for one in results
    ]
    heads = ["schedule", "ms", "x torch", "product"]
    title = "all_gather_matmul by every schedule"
    show(title, pd.DataFrame(rows, columns=heads), left=(0, 3), width=100)


def _show_operators(served: Sequence[Served]) -> None:
    rows = [
        (
            *(one.operator, one.schedule, f"{one.result.ms:.2f}"),
            *(f"{one.torchs.ms / one.result.ms:.2f}", WORDS[one.result.exact]),
        )
        for one in served
    ]
    heads = ["operator", "took", "ms", "x torch", "result"]
    title = "Every operator by schedule='auto'"
    show(title, pd.DataFrame(rows, columns=heads), left=(0, 1, 4), width=100)
