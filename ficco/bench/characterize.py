"""What cutting and overlapping cost, each by itself (FiCCO, sections IV-B to IV-E).

Decomposition loss: the parts one after the other, against the whole. Contention loss: the same
work during other work, against the same work by itself. Both are medians of ratios that
are taken round by round, of the slowest rank's times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from rich.console import Console

import ficco
from ficco.bench.cases import Case
from ficco.bench.frames import LOSSES, RunSettings
from ficco.bench.series import MeasuredCalls, Stopwatch, Times, timed_during
from ficco.bench.tables import Forecast, bar
from ficco.bench.verify import Verifier
from ficco.launch import local_device
from ficco.scaling import operands_of

#: What a row is about. ``dil``: decomposition, ``cil``: contention loss.
GEMM_DIL, COPY_DIL, GEMM_CIL, COPY_CIL = "gemm-dil", "communication-dil", "gemm-cil", "copy-cil"

#: How communication goes in contention: FiCCO's pieces, whole shards, and the vendor's collective.
PIECES, SHARDS, COLLECTIVE = "dma-pieces", "dma-shards", "collective"

#: Seconds that a call may wait for its peers.
TIMEOUT_S = 30.0

#: Parts of the seconds of a run that pure communication and each shape may take.
COMMUNICATION_SHARE = 0.15

#: One loss, as columns of ``ficco.bench.frames.LOSSES``.
Loss = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LossSettings(RunSettings):
    """What is characterised.

    Attributes:
        cases: products.
        sizes: bytes of the shards whose communication is measured without products.
        parts: measure decomposed products only, cut as so many ranks cut them; 0: everything, on
            the ranks there are.
    """

    cases: tuple[Case, ...]
    sizes: tuple[int, ...]
    parts: int = 0


def characterize(settings: LossSettings) -> pd.DataFrame | None:
    """Measure; collective. The losses on rank 0, None elsewhere."""
    with ficco.options(timeout_s=TIMEOUT_S, on_timeout="raise"):
        return LossBench(settings).run()


class LossBench:
    """The ranks of a job, which measure losses together."""

    def __init__(self, settings: LossSettings) -> None:
        self.settings = settings
        self.group = dist.group.WORLD
        self.device = local_device(settings.device)
        self.watch = Stopwatch(self.group, self.device)
        self.world, self.rank = settings.parts or self.watch.world, self.watch.rank

    def run(self) -> pd.DataFrame | None:
        hosts = self.watch.hosts.count
        rows = self.settings.record(LOSSES, self._steps(), self.rank, self.world, hosts=hosts)
        self.watch.close()
        return rows

    def _steps(self) -> Iterator[list[Loss]]:
        settings, console = self.settings, Console(stderr=True, quiet=self.rank != 0)
        each = settings.seconds * (1 - COMMUNICATION_SHARE) / max(len(settings.cases), 1)
        actions = {"communication": (self.communication, settings.seconds * COMMUNICATION_SHARE)}
        if settings.parts:
            each, actions = settings.seconds / max(len(settings.cases), 1), {}
        actions |= {case.name: (partial(self.shape, case), each) for case in settings.cases}
        forecast = Forecast({name: seconds for name, (_, seconds) in actions.items()})
        for number, (name, (action, seconds)) in enumerate(actions.items()):
            title = f"[{number + 1}/{len(actions)}] {name}, about {forecast.left:.0f} s left"
            began = time.monotonic()
            with bar(console, title, len(actions), number):
                rows = self.attempt(name, partial(action, seconds))
            forecast.over(name, time.monotonic() - began)
            yield rows
            for row in rows:
                console.print(f"  {line(row)}", markup=False, highlight=False, soft_wrap=True)

    def attempt(self, name: str, action: Callable[[], list[Loss]]) -> list[Loss]:
        """The rows of a step, or one that says why there are none; the same on every rank."""
        rows, why = self.watch.together(action)
        if why:
            self.watch.close()
            self.watch = Stopwatch(self.group, self.device)  # the ranks are in step again
            rows = [{"case": name, "world": self.world, "status": "failed", "note": why}]
        self.watch.release()
        return list(rows)

    def _calls(self, dtype: str) -> MeasuredCalls:
        name, scaling = operands_of(dtype)
        return MeasuredCalls(self.group, self.device, getattr(torch, name), scaling)

    def communication(self, seconds: float) -> list[Loss]:
        """Whole shards against pieces, by copies and by the collective (figure 8)."""
        dtype = "float32" if self.settings.device == "cpu" else "bfloat16"
        parts, sizes, world = self._calls(dtype), self.settings.sizes, self.world
        parts.collective(max(sizes))  # grows the memory that the others share
        calls: dict[str, Any] = {}
        for size in sizes:
            calls[f"{SHARDS} {size}"] = parts.copies("shard-overlap", size)
            calls[f"{PIECES} {size}"] = parts.copies(pieces(world), size)
            calls[f"{COLLECTIVE} {size} 1"] = parts.collective(size)
            calls[f"{COLLECTIVE} {size} {world}"] = parts.collective(size, world)
        times = self._time(calls, seconds)
        what = {"loss": COPY_DIL, "dtype": dtype, "world": world, "cut": "rows", "parts": world}
        return [
            {**what, "case": str(size), "nbytes": size, "mover": mover, **ratio(times, whole, cut)}
            for size in sizes
            for mover, whole, cut in (
                (PIECES, f"{SHARDS} {size}", f"{PIECES} {size}"),
                (COLLECTIVE, f"{COLLECTIVE} {size} 1", f"{COLLECTIVE} {size} {world}"),
            )
        ]

    def _time(
        self, calls: Mapping[str, Any], seconds: float, share: float = 1.0, most: int = 0
    ) -> dict[str, Times]:
        return self.watch.time(calls, seconds=seconds * share, most=most or self.settings.rounds)

    def shape(self, case: Case, seconds: float) -> list[Loss]:
        """The losses of a product."""
        sizes = {"m": case.m, "n": case.n, "k": case.k}
        what = {"case": case.name, **sizes, "dtype": case.dtype, "world": self.world}
        if why := case.skipped(self.world, Verifier(self.watch).free_bytes()):
            return [{**what, "status": "skipped", "note": why}]
        share = 1.0 if self.settings.parts else 0.4
        rows = list(self._decomposed(case, seconds * share))
        if not self.settings.parts:
            rows += self._contended(case, seconds * (1 - share))
        return [{**what, **row} for row in rows]

    def _decomposed(self, case: Case, seconds: float) -> Iterator[Loss]:
        """The product cut by rows and by columns into W and W * W parts (figure 7)."""
        operands, sizes = self._calls(case.dtype), (case.m, case.n, case.k)
        calls: dict[str, Any] = {"whole": operands.matmul(*sizes)}
        numbers = tuple(dict.fromkeys((self.world, self.world**2)))
        for parts in numbers:
            calls[f"rows {parts}"] = operands.matmul(*sizes, parts=parts)
            calls[f"columns {parts}"] = operands.accumulated(*sizes, parts, rounding=True)
        times = self._time(calls, seconds)
        for cut, parts in product(("rows", "columns"), numbers):
            measured = ratio(times, "whole", f"{cut} {parts}")
            yield {"loss": GEMM_DIL, "cut": cut, "parts": parts, **measured}

    def _contended(self, case: Case, seconds: float) -> Iterator[Loss]:
        """The product in W parts and the communication of A, each under the other (figure 9)."""
        operands, world = self._calls(case.dtype), self.world
        nbytes = case.m // world * case.k * operands.dtype.itemsize
        calls = {
            "product": operands.matmul(case.m, case.n, case.k, parts=world),
            PIECES: operands.copies(pieces(world), nbytes),
            SHARDS: operands.copies("shard-overlap", nbytes),
            COLLECTIVE: operands.collective(nbytes),
        }
        _, *moves = calls
        under = {GEMM_CIL: [("product", move) for move in moves]}
        under[COPY_CIL] = [(move, "product") for move in moves]
        time = partial(self._time, seconds=seconds)
        times = timed_during(time, calls, [*under[GEMM_CIL], *under[COPY_CIL]], self.device)
        what = {"nbytes": nbytes, "cut": "rows", "parts": world}
        for loss, pairs in under.items():
            for mover, (one, other) in zip(moves, pairs, strict=True):
                measured = ratio(times, one, f"{one} during {other}")
                yield {"loss": loss, "mover": mover, **what, **measured}


def pieces(world: int) -> str:
    """The copies of FiCCO: a piece of every peer before the next piece of any, W of a shard."""
    return f"hetero-fused-1d:pieces={world}"


def ratio(times: Mapping[str, Times], reference: str, other: str) -> Loss:
    """The figures of a loss: the times under one name against those under another."""
    before, after = (1e6 * times[name] for name in (reference, other))
    return {
        "status": "ok",
        "rounds": len(before),
        "alone_ms": np.median(before) / 1e3,
        "ms": np.median(after) / 1e3,
        "ratio": np.median(after / before),
        "alone_us": " ".join(f"{us:.6g}" for us in before),
        "us": " ".join(f"{us:.6g}" for us in after),
    }


def line(row: Loss) -> str:
    """A row for people."""
    if row["status"] != "ok":
        return f"{row['case']}: {row['status']}: {row['note']}"
    what = " ".join(part for part in (row.get("mover"), f"{row['parts']} {row['cut']}") if part)
    times = f"{row['alone_ms']:.4g} -> {row['ms']:.4g} ms, median of paired ratios"
    return f"{row['loss']:18} {row['case']:20} {what:24} {times} {row['ratio']:.3f}"
