"""Proving every candidate right, eager and replayed, before it is timed; errors of float sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import ficco
from ficco.accelerator import gpu
from ficco.errors import FiccoError
from ficco.problems.products import Problem
from ficco.tools.bench.calls import Runner, build, expected, unavailable
from ficco.tools.bench.candidates import BenchCandidate
from ficco.tools.bench.inputs import Operands, exact_calls, wrong_elements
from ficco.tools.bench.measure import capture, peak_bytes, pytorch_workspace_bytes
from ficco.tools.bench.series import Stopwatch

#: Calls with fresh inputs that must be right before a candidate is timed; as many replays.
CHECKS = 2

#: Rows of each rank's part of a result whose errors are looked at.
ERROR_ROWS = 64

#: Elements of B that are converted to float64 at once.
FLOAT64_ELEMENTS = 1 << 26

#: After one of ficco's own errors peers may be stuck: there is no way on.
FATAL = (FiccoError,)


@dataclass
class Checked:
    """A candidate that has passed, or why it has not.

    Attributes:
        runner: it, ready to be called; None if it is not to be timed.
        status, note, extra_bytes, error: as columns of ``ficco.tools.bench.frames.BENCH``.
        replay: it, captured in a graph.
        graph_status, graph_note: why there is no replay.
    """

    candidate: BenchCandidate
    runner: Runner | None = None
    status: str = "ok"
    note: str = ""
    extra_bytes: float = math.nan
    error: float = math.nan
    replay: Callable[[], None] | None = None
    graph_status: str = "skipped"
    graph_note: str = ""

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def is_part(self) -> bool:
        """Whether it is only a part of the operator."""
        return self.runner is not None and self.runner.expected != "result"


@dataclass
class Verifier:
    """The ranks of a group, which verify together: a candidate that fails on one is out on all."""

    watch: Stopwatch
    iteration: int = field(default=1, init=False)

    def free_bytes(self) -> int:
        """Free memory where there is least: of a GPU, or a rank's part of the host's."""
        if self.watch.on_gpu:
            gpu.empty_cache()
            free = gpu.mem_get_info()[0]
        else:
            lines = Path("/proc/meminfo").read_text().splitlines()
            kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
            free = int(kib) * 1024 // self.watch.world
        return min(self.watch.gather(free))

    def renew(self, operands: Operands, symmetric: bool) -> None:
        """Begin anew with ficco's memory, and with an operand in it if one is wanted."""
        operands.a_symmetric_LK = None
        self.watch.free()
        if symmetric:
            a = operands.a_LK
            operands.a_symmetric_LK = ficco.empty(
                a.shape, dtype=a.dtype, group=self.watch.group, device=self.watch.device
            )

    def eager(self, candidate: BenchCandidate, operands: Operands) -> Checked:
        """Build a candidate and prove its calls right; note what memory they take."""
        if why := unavailable(candidate, operands, self.watch.hosts.count):
            return Checked(candidate, status="skipped", note=why)
        if candidate.ours:
            self.renew(operands, candidate.symmetric)  # so that its memory is its own

        def action() -> tuple[Runner, bool, int]:
            runner = build(candidate, operands, self.watch.group)
            with runner.context():
                right, peak = self._prove(runner, operands, runner.proof or runner.run)
            return runner, right, peak + self._symmetric_bytes(candidate, operands.problem)

        value, why = self.watch.together(action, fatal=FATAL)
        if value is None:
            refused = why.startswith(("NotImplementedError", "ValueError"))
            return Checked(candidate, status="skipped" if refused else "failed", note=why)
        runner, right, extra = value
        if not all(rights := self.watch.gather(right)):
            return Checked(candidate, status="wrong", note=_wrong(rights))
        counted = (self.watch.on_gpu or candidate.ours) and runner.proof is None
        extra_bytes = float(max(self.watch.gather(extra))) if counted else math.nan
        return Checked(candidate, runner, extra_bytes=extra_bytes)

    def graph(self, checked: Checked, operands: Operands, pool: Any) -> None:
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
            return replay, bool(runner.proof) or self._prove(runner, operands, again)[0]

        value, why = self.watch.together(action, fatal=FATAL)
        if value is None:
            checked.graph_note = why
        elif not all(rights := self.watch.gather(value[1])):
            checked.graph_status, checked.graph_note = "wrong", _wrong(rights)
        else:
            checked.replay = value[0]

    def _prove(
        self, runner: Runner, operands: Operands, call: Callable[[], torch.Tensor]
    ) -> tuple[bool, int]:
        """Whether calls with inputs never used before are right, and the last one's peak memory."""
        how: dict[str, Any] = {
            "first": self.iteration,
            "compare": lambda result: wrong_elements(result, expected(runner, operands)),
            "measure": lambda one: peak_bytes(one, self.watch.device),
        }
        outcomes = list(exact_calls({"": call}, operands, CHECKS, **how))
        self.iteration += CHECKS
        right = not any(outcome.wrong.item() for outcome in outcomes)
        return right, int(outcomes[-1].figure)

    def _symmetric_bytes(self, candidate: BenchCandidate, problem: Problem) -> int:
        if candidate.ours:
            return ficco.memory(self.watch.group)
        if candidate.kind.startswith("pytorch") and pytorch_workspace_bytes(self.watch.group):
            # PyTorch's fused operator asks for a shard, or two blocks of the product.
            return max(problem.rows) * problem.moved_bytes * (1 + problem.kind.scatters)
        return 0


def _wrong(rights: Sequence[bool]) -> str:
    return f"wrong result on ranks {[rank for rank, right in enumerate(rights) if not right]}"


def accuracy(operands: Operands, group: ProcessGroup) -> Callable[[torch.Tensor], float]:
    """What gives the error of a result of an operator that sums: the root mean square of its
    differences over that of what the operands should give, in some rows of each rank. Collective.

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
    parts = [mine @ some.double() for some in operands.wide_b_KN.split(width, dim=1)]
    wanted = torch.cat(parts, dim=1)
    rows = picked[rank] + (problem.offsets[rank] if problem.kind.returns else 0)

    def error(result: torch.Tensor) -> float:
        off = (result[rows].double() - wanted).norm()
        return float(off / wanted.norm()) if wanted.numel() else 0.0

    return error
