"""One bench, on every rank: verify, then time, shape by shape."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import ficco
from ficco.bench import table
from ficco.bench.candidates import Candidate, Runner, build, unavailable
from ficco.bench.cases import Case
from ficco.bench.inputs import Operands
from ficco.bench.measure import (
    DeviceClock,
    Gate,
    HostClock,
    Item,
    capture,
    peak_bytes,
    pytorch_workspace_bytes,
    rounds,
)
from ficco.bench.stats import slowest, summarise
from ficco.bench.table import Row
from ficco.bench.traces import trace_all
from ficco.errors import FiccoError
from ficco.heuristics import decide
from ficco.timeline import draw, trace

if TYPE_CHECKING:
    from rich.console import Console
    from torch.distributed import ProcessGroup

#: Calls with fresh inputs that must be right before a candidate is timed; as many replays.
CHECKS = 2


@dataclass(frozen=True)
class Settings:
    """What is benched, and how.

    Attributes:
        cases, candidates, modes: what.
        device: ``"cpu"`` or ``"cuda"``.
        rounds: most rounds of a shape.
        seconds: time for everything, shared among the shapes.
        csv: the file that rows are appended to, shape by shape.
        timelines: draw one traced call per schedule of the first shape.
        quiet: print no tables.
        seed: of the order in a round and of the random operands.
    """

    cases: tuple[Case, ...]
    candidates: tuple[Candidate, ...]
    modes: tuple[str, ...]
    device: str
    rounds: int
    seconds: float
    csv: Path
    timelines: bool = False
    quiet: bool = False
    seed: int = 0


def bench(settings: Settings) -> list[Row]:
    """Measure; collective. The rows on rank 0, nothing elsewhere."""
    return _Bench(settings).run()


@dataclass
class _Checked:
    """A candidate that has passed, or why it has not."""

    candidate: Candidate
    runner: Runner | None = None
    status: str = "ok"
    note: str = ""
    extra_bytes: float = math.nan
    no_graph: str = ""


@dataclass
class _Bench:
    settings: Settings
    group: ProcessGroup = field(init=False)
    iteration: int = 0

    def __post_init__(self) -> None:
        from rich.console import Console

        self.group = dist.group.WORLD
        self.rank, self.world = self.group.rank(), self.group.size()
        self.on_gpu = self.settings.device == "cuda"
        here = torch.cuda.current_device() if self.on_gpu else None
        self.device = torch.device(self.settings.device, here)
        self.console: Console = Console(stderr=True, quiet=self.rank != 0)
        self.out: Console = Console(quiet=self.rank != 0 or self.settings.quiet)
        self.deadline = time.monotonic() + self.settings.seconds

    def run(self) -> list[Row]:
        self.gate = Gate(self.group)
        self.clock = (DeviceClock if self.on_gpu else HostClock)(self.group, self.gate)
        cases = self.settings.cases
        found: list[Row] = []
        for number, case in enumerate(cases):
            left = self.deadline - time.monotonic()
            rows = self._case(case, number, left / (len(cases) - number))
            if self.rank == 0:
                found += rows
                table.write(self.settings.csv, rows)
                self.out.print(table.show(rows))
        self.gate.close()
        return found

    # One shape.

    def _case(self, case: Case, number: int, seconds: float) -> list[Row]:
        began = time.monotonic()
        why = case.skipped(self.world, self._free_bytes())
        if self.gate.decide(seconds <= 0):
            why = why or f"out of time ({self.settings.seconds:.0f} s)"
        if why:
            return [self._row(case, "", Candidate("", ""), "skipped", why)]
        operands = Operands(case.problem(self.world), self.rank, self.device)
        operands.exact_b()
        title = f"[{number + 1}/{len(self.settings.cases)}] {case.name}"
        with self._progress(title) as tick:
            checked = [self._verify(candidate, operands, tick) for candidate in self._candidates()]
            self._renew(operands)
            graphs, no_graphs = self._graphs(case, checked, operands, tick)
            operands.random(self.settings.seed)
            items = [
                Item(mode, one.candidate, one.runner, graphs.get(one.candidate.name))
                for mode in self.settings.modes
                for one in checked
                if one.runner is not None and (mode != "graph" or one.candidate.name in graphs)
            ]
            spent = time.monotonic() - began
            done = rounds(
                items,
                self.clock,
                self.gate,
                self.settings.rounds,
                seconds - spent,
                seed=self.settings.seed + number,
                tick=tick,
            )
        rows = self._rows(case, checked, items, done, no_graphs)
        if self.settings.timelines and number == 0:
            self._timelines(operands, [one for one in checked if one.runner is not None])
        del items, graphs
        self._close()
        return rows

    def _candidates(self) -> tuple[Candidate, ...]:
        return self.settings.candidates

    def _free_bytes(self) -> int:
        """Free memory of the device that has least."""
        if self.on_gpu:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
        else:
            lines = Path("/proc/meminfo").read_text().splitlines()
            kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
            free = int(kib) * 1024 // self.world
        return min(self._gather(free))

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found

    def _close(self) -> None:
        """Free ficco's memory everywhere: no rank may still reach a peer's."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.gate.wait()
        ficco.close(self.group)
        self.gate.wait()

    def _renew(self, operands: Operands) -> None:
        """Begin anew with ficco's memory, and with the shard that lies in it."""
        self._close()
        if any(candidate.symmetric for candidate in self._candidates()):
            shape, dtype = operands.a_shard_SK.shape, operands.a_shard_SK.dtype
            operands.a_symmetric_SK = ficco.empty(
                shape, dtype=dtype, group=self.group, device=self.device
            )

    # Verifying.

    def _verify(
        self, candidate: Candidate, operands: Operands, tick: Callable[[str], None]
    ) -> _Checked:
        """Build a candidate and prove it right on fresh inputs; note what memory it takes."""
        tick(f"verify {candidate.name}")
        if why := unavailable(candidate, operands):
            return _Checked(candidate, status="skipped", note=why)
        if candidate.ours:
            self._renew(operands)  # so that its memory is what it takes alone

        def check() -> tuple[Runner, bool, float]:
            runner = build(candidate, operands, self.group)
            with runner.context():
                peaks = [self._check(runner, operands, runner.run) for _ in range(CHECKS)]
            right = all(equal for equal, _ in peaks)
            return runner, right, peaks[-1][1] + self._symmetric_bytes(candidate, operands)

        value, why = self._together(check)
        if value is None:
            served = why.startswith(("NotImplementedError", "ValueError"))
            return _Checked(candidate, status="skipped" if served else "failed", note=why)
        runner, right, extra = value
        wrong = [rank for rank, equal in enumerate(self._gather(right)) if not equal]
        if wrong:
            return _Checked(candidate, status="wrong", note=f"wrong result on ranks {wrong}")
        counted = self.on_gpu or candidate.ours
        extra = max(self._gather(extra)) if counted else math.nan
        return _Checked(candidate, runner, extra_bytes=extra)

    def _check(
        self, runner: Runner, operands: Operands, call: Callable[[], torch.Tensor]
    ) -> tuple[bool, int]:
        """Whether a call with inputs never used before is right, and its peak memory."""
        self.iteration += 1
        operands.exact(self.iteration)
        result, peak = peak_bytes(call, self.device)
        gathered = runner.expected == "gathered"
        expected = operands.a_full_MK if gathered else operands.reference()
        return torch.equal(result, expected), peak

    def _symmetric_bytes(self, candidate: Candidate, operands: Operands) -> int:
        if candidate.ours:
            return ficco.memory(self.group)
        if candidate.kind.startswith("pytorch") and pytorch_workspace_bytes(self.group):
            return operands.a_shard_SK.untyped_storage().nbytes()  # it asks for one shard
        return 0

    def _together(self, action: Callable[[], Any]) -> tuple[Any, str]:
        """The result of an action that every rank carried out, or why one could not."""
        value, why = None, ""
        try:
            value = action()
            if self.on_gpu:
                torch.cuda.synchronize()
        except FiccoError:
            raise  # peers may be stuck: there is no way on
        except Exception as error:
            value, why = None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        failed = [text for text in self._gather(why) if text]
        return (None, failed[0]) if failed else (value, "")

    # Graphs.

    def _graphs(
        self,
        case: Case,
        checked: list[_Checked],
        operands: Operands,
        tick: Callable[[str], None],
    ) -> tuple[dict[str, Callable[[], None]], str]:
        """Replays of the candidates that can be captured, and why there are none."""
        if "graph" not in self.settings.modes:
            return {}, ""
        there = [one for one in checked if one.runner is not None]
        # A graph owns the memory of its calls.
        need = sum(one.candidate.ours for one in there) * operands.problem.gathered_bytes
        free = self._free_bytes()
        if need > free / 2:
            return {}, f"the graphs would hold {need / 2**30:.0f} of {free / 2**30:.0f} GiB"
        pool = torch.cuda.graph_pool_handle()
        found: dict[str, Callable[[], None]] = {}
        for one in there:
            tick(f"capture {one.candidate.name}")
            runner = one.runner
            assert runner is not None

            def record(runner: Runner = runner) -> tuple[Callable[[], None], bool]:
                with runner.context():
                    runner.run()  # memory that a capture cannot grow
                torch.cuda.synchronize()
                replay, result = capture(runner, pool)

                def again() -> torch.Tensor:
                    replay()
                    return result

                checks = [self._check(runner, operands, again)[0] for _ in range(CHECKS)]
                return replay, all(checks)

            value, why = self._together(record)
            if value is None:
                one.no_graph = why
            elif not all(self._gather(value[1])):
                one.no_graph = "a replay was wrong"
                one.status = "wrong"
            else:
                found[one.candidate.name] = value[0]
        return found, ""

    # Rows.

    def _rows(
        self, case: Case, checked: list[_Checked], items: list[Item], done: int, no_graphs: str
    ) -> list[Row]:
        mine = {(i.mode, i.candidate.name): (i.times_s, i.host_s) for i in items}
        everyone = self._gather(mine)
        if self.rank != 0:
            return []
        times: dict[str, dict[str, list[float]]] = {mode: {} for mode in self.settings.modes}
        host: dict[tuple[str, str], float] = {}
        for mode, name in mine:
            times[mode][name] = slowest([found[mode, name][0] for found in everyone])
            host[mode, name] = max(median(found[mode, name][1]) for found in everyone) * 1e6
        by_name = {one.candidate.name: one for one in checked}
        rows = []
        for mode, series in times.items():
            queued = times.get("queued") if mode == "graph" else None
            summaries = summarise(series, queued)
            for name, summary in summaries.items():
                one = by_name.get(name) or _Checked(Candidate(name, "bound"))
                row = self._row(case, mode, one.candidate, "ok", self._chosen(case, one), done)
                rows.append(
                    replace(
                        row,
                        **vars(summary),
                        host_us=host.get((mode, name), math.nan) if self.on_gpu else math.nan,
                        extra_bytes=one.extra_bytes,
                    )
                )
            for one in checked:
                if one.candidate.name in summaries:
                    continue
                status = one.status if one.runner is None or one.status == "wrong" else "skipped"
                note = one.note or one.no_graph or no_graphs
                rows.append(self._row(case, mode, one.candidate, status, note))
        return rows

    def _chosen(self, case: Case, one: _Checked) -> str:
        """What ``auto`` stands for."""
        if one.candidate.schedule != "auto":
            return ""
        return f"is {decide(case.problem(self.world)).schedule}"

    def _row(
        self,
        case: Case,
        mode: str,
        candidate: Candidate,
        status: str,
        note: str = "",
        rounds: int = 0,
    ) -> Row:
        return Row(
            case=case.name,
            label=case.label,
            m=case.m,
            n=case.n,
            k=case.k,
            dtype=case.dtype,
            world=self.world,
            mode=mode,
            candidate=candidate.name,
            kind=candidate.kind,
            status=status,
            note=note,
            rounds=rounds,
        )

    def _timelines(self, operands: Operands, there: list[_Checked]) -> None:
        names = [one.candidate.schedule for one in there if one.candidate.ours]
        found = trace_all(list(dict.fromkeys(names)), operands, self.group)
        if self.rank == 0:
            stem = self.settings.csv.with_suffix("")
            note = f"{operands.problem}, rank 0 of {self.world}; planned at the rates measured"
            draw(found, f"{stem}_timelines.png", columns=2, ranks=[0], note=note)
            trace(found, f"{stem}_trace.json")

    @contextmanager
    def _progress(self, title: str) -> Iterator[Callable[[str], None]]:
        """A bar over the steps of one shape; on rank 0."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        graphs = "graph" in self.settings.modes
        total = len(self._candidates()) * (1 + graphs) + self.settings.rounds
        if not self.console.is_terminal:
            self.console.print(f"{title} ...")
        columns = (
            TextColumn("{task.fields[title]}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        shown = Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        )
        with shown:
            task = shown.add_task("", total=total, title=title)
            yield lambda what: shown.update(task, advance=1, description=what)
