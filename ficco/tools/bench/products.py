"""Workload: an operator by all candidates, each proven right and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import ficco
from ficco.accelerator import gpu
from ficco.problems.products import Problem
from ficco.runtime.workspace import SLOTS, workspace_of
from ficco.tools.bench.candidates import (
    REPLAYED,
    WHOLE,
    BenchCandidate,
    build,
    moved_bytes,
    named_again,
    of_problem,
    taken,
    unavailable,
)
from ficco.tools.bench.cases import Case
from ficco.tools.bench.frames import BENCH
from ficco.tools.bench.harness import (
    CHECKS,
    FATAL,
    Checked,
    Subject,
    Tick,
    Workload,
    wrong_ranks,
)
from ficco.tools.bench.inputs import Operands, wrong_elements
from ficco.tools.bench.measure import (
    Runner,
    Stopwatch,
    capture,
    peak_bytes,
    pytorch_workspace_bytes,
)
from ficco.tools.bench.report import ERROR_ROWS, IDEAL, Series, show_shape, summarise

#: Elements of B that are converted to float64 at once.
FLOAT64_ELEMENTS = 1 << 26


class ProductWork(Workload):
    """A shape on one rank; its schedules are candidates, and a candidate that fails on one rank is
    skipped on all."""

    problem: Problem

    def __init__(
        self, case: Case, watch: Stopwatch, schedules: Sequence[BenchCandidate] = ()
    ) -> None:
        super().__init__(case, watch, schedules)
        free_bytes = self.free_bytes()
        self.case = case.fitted(watch.world, free_bytes)
        if why := self.case.skipped(watch.world, free_bytes):
            raise ValueError(why)
        self.problem = self.case.problem(watch.world)
        self.operands = watch.operands(self.problem)
        self.dtype = self.operands.a_LK.dtype
        self._iteration = 1

    @cached_property
    def candidates(self) -> tuple[BenchCandidate, ...]:
        """Candidates of the operator, those with equal plans included."""
        engine = workspace_of(self.group, self.device).engine
        chosen = [one for one in self.schedules if self.watch.has_peers or one.kind in REPLAYED]
        return of_problem(
            *(chosen, self.problem, engine),
            lambda: taken(self.problem, self.group, self.device).others,
        )

    @cached_property
    def again(self) -> dict[BenchCandidate, BenchCandidate]:
        """Candidates with the plan of an earlier candidate, which is timed for both."""
        return named_again(self.candidates, self.problem)

    @cached_property
    def offered(self) -> Mapping[str, BenchCandidate]:
        return {one.name: one for one in self.candidates if one not in self.again}

    def fill(self, seed: int, exact: bool = False) -> None:
        (self.operands.exact if exact else self.operands.random)(seed)

    # Proofs.

    def checked(self, graph: bool, tick: Tick) -> list[Checked]:
        self.operands.exact_b()
        checked = super().checked(graph, tick)
        # From here on all share one workspace, as in a program that uses several schedules.
        self.renew(any(candidate.symmetric for candidate in self.offered.values()))
        if graph:
            self._capture(checked, tick)
        if copies := self.watch.arrivals(self.problem):
            checked.append(Checked(copies, Runner(torch.Tensor, WHOLE)))
        return checked

    def free_bytes(self) -> int:
        """Free memory where there is least: of a GPU, or a rank's part of the host's."""
        if self.watch.on_gpu:
            gpu.empty_cache()
            free = gpu.mem_get_info()[0]
            if not self.watch.has_peers:  # the operands of all ranks are here
                free //= self.watch.world
        else:
            lines = Path("/proc/meminfo").read_text().splitlines()
            kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
            free = int(kib) * 1024 // self.watch.world
        return min(self.watch.gather(free))

    def renew(self, symmetric: bool) -> None:
        """Free ficco's memory. If ``symmetric``, allocate the left operand in symmetric memory."""
        self.operands.a_symmetric_LK = None
        self.watch.free()
        if symmetric:
            a, how = self.operands.a_LK, {"group": self.group, "device": self.device}
            self.operands.a_symmetric_LK = ficco.empty(a.shape, dtype=a.dtype, **how)

    def lacks(self, variant: BenchCandidate) -> str:
        if why := unavailable(variant, self.operands, self.watch.hosts.count):
            return f"not here: {why}"
        if variant.ours:
            self.renew(variant.symmetric)  # so that its memory is its own
        return ""

    def prove(self, variant: BenchCandidate) -> tuple[Runner, tuple[bool, float]]:
        """A candidate's calls; whether they are right here, and the memory that they take."""
        runner = build(variant, self.operands, self.group)
        with runner.context():
            right, extra = self._prove(runner, runner.proof or runner.run)
        if variant.ours:
            extra += ficco.memory(self.group)
        elif variant.kind.startswith("pytorch") and pytorch_workspace_bytes(self.group):
            # PyTorch's fused operator asks for a shard, or two blocks of the product.
            blocks = 1 + self.problem.kind.scatters
            extra += max(self.problem.rows) * self.problem.moved_bytes * blocks
        counted = (self.watch.on_gpu or variant.ours) and runner.proof is None
        return runner, (right, float(extra) if counted else math.nan)

    def judge(self, everyone: Sequence[tuple[bool, float]]) -> tuple[str, dict[str, Any]]:
        rights, extras = zip(*everyone, strict=True)
        why = wrong_ranks(rights)
        return why, {} if why else {"extra_bytes": max(extras)}

    def _capture(self, checked: Sequence[Checked], tick: Tick) -> None:
        runnable = [one for one in checked if one.runner is not None]
        # A graph owns the memory of its calls, which take turns on slots.
        need = sum(bool(one.schedule) for one in runnable) * SLOTS * moved_bytes(self.problem)
        free, pool = self.free_bytes(), gpu.graph_pool_handle()
        for one in runnable:
            tick(f"capture {one.name}")
            if need > free / 2:
                one.graph_note = f"all graphs would hold {need >> 30} of {free >> 30} GiB"
            else:
                self.graph(one, pool)

    def graph(self, checked: Checked, pool: Any) -> None:
        """Capture a candidate's call and prove its replays right."""
        runner = checked.runner
        assert runner is not None

        def action() -> tuple[Callable[[], None], bool]:
            with runner.context():
                runner.run()  # memory that cannot be grown in a capture
            gpu.synchronize()
            replay, result = capture(runner, pool)

            def again() -> torch.Tensor:
                replay()
                return result

            # Where another call is the proof, this result shows nothing; the eager call's did.
            return replay, bool(runner.proof) or self._prove(runner, again)[0]

        value, why = self.watch.together(action, fatal=FATAL)
        if value is None:
            checked.graph_note = why
        elif wrong := wrong_ranks(self.watch.gather(value[1])):
            checked.graph_status, checked.graph_note = "wrong", wrong
        else:
            checked.replay = value[0]

    def _prove(self, runner: Runner, call: Callable[[], torch.Tensor]) -> tuple[bool, int]:
        """Whether calls with inputs never used before are right, and the last one's peak memory."""
        proof, right = call, True
        if runner.expected is Operands.reference:
            proof = self.watch.proof(call, self.operands)
        for _ in range(CHECKS):
            self.operands.exact(self._iteration)
            self._iteration += 1
            result, peak = peak_bytes(proof, self.device)
            right &= not wrong_elements(result, runner.expected(self.operands)).item()
        return right, peak if proof is call else peak_bytes(runner.run, self.device)[1]

    # Rows.

    def annotate(self, checked: Sequence[Checked]) -> None:
        """Add the error on random operands, where products are summed."""
        if not self.problem.kind.sums or not self.watch.has_peers:
            return
        error = accuracy(self.operands, self.group)
        for one in checked:
            runner = one.runner
            if runner and runner.proof is None and runner.expected is Operands.reference:
                with runner.context():
                    mine = error(runner.run())
                one.columns["error"] = max(self.watch.gather(mine))

    def label(self, name: str) -> dict[str, str]:
        one = self.offered.get(name)
        kind = one.kind if one else "bound" if name == IDEAL else "arrivals"
        return {"candidate": name, "kind": kind}

    def columns(self, one: Checked, mode: str) -> dict[str, Any]:
        if one.schedule != "auto":
            return one.columns
        kind = "idle" if not self.watch.on_gpu else "queued" if mode == "graph" else "eager"
        decision = taken(self.problem, self.group, self.device, kind)
        return {**one.columns, "note": f"is {decision.schedule} ({decision.source})"}

    def figures(self, times: Series, queued: Series | None) -> pd.DataFrame:
        return summarise(times, queued)

    def renamed(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {**row, "candidate": one.name, "note": f"the same steps as {timed.name}"}
            for one, timed in self.again.items()
            for row in rows
            if row["candidate"] == timed.name
        ]


#: A replay takes the schema :data:`ficco.tools.bench.frames.REPLAY` instead.
SUBJECT = Subject("products", BENCH, ProductWork, gradients=True, show=show_shape)


def accuracy(operands: Operands, group: ProcessGroup) -> Callable[[torch.Tensor], float]:
    """A function for the error of a summed result: root mean square of its differences from
    float64, relative to the result, in some rows of each rank. Collective.

    All ranks have the same B, so that the sum of their products is the product of their sum; that
    is added up and multiplied in float64.
    """
    problem, rank = operands.problem, operands.rank
    picked = [
        torch.linspace(0, rows - 1, min(rows, ERROR_ROWS), device=operands.device).long()
        for rows in problem.rows
    ]
    everyone = zip(picked, problem.offsets, strict=False)
    left = operands.wide(operands.a_LK, operands.scales.get("scale_a"))
    sums = left[torch.cat([rows + first for rows, first in everyone])].double()
    dist.all_reduce(sums, group=group)
    mine = sums.split([len(rows) for rows in picked])[rank]
    width = max(1, FLOAT64_ELEMENTS // max(problem.k, 1))
    parts = [mine @ columns.double() for columns in operands.wide_b_KN.split(width, dim=1)]
    wanted = torch.cat(parts, dim=1)
    rows = picked[rank] + (problem.offsets[rank] if problem.kind.returns else 0)

    def error(result: torch.Tensor) -> float:
        off = (result[rows].double() - wanted).norm()
        return float(off / wanted.norm()) if wanted.numel() else 0.0

    return error
