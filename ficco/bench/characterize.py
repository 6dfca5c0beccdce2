"""What cutting and overlapping cost, each by itself (FiCCO, sections IV-B to IV-E).

Decomposition loss: the parts one after the other, against the whole. Contention loss: the same
work while other work runs beside it, against the same work alone. Both are medians of ratios that
are taken round by round, of the slowest rank's times.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.bench.about import describe, write_description
from ficco.bench.cases import MEMORY_SHARE, Case
from ficco.bench.rows import append
from ficco.bench.rows import read as read_rows
from ficco.bench.series import Parts, Series, Stopwatch, behind, beside
from ficco.bench.stats import paired
from ficco.launch import local_device

#: What a row is about. ``dil``: decomposition, ``cil``: contention loss.
GEMM_DIL, COPY_DIL, GEMM_CIL, COPY_CIL = "gemm-dil", "communication-dil", "gemm-cil", "copy-cil"

#: How communication goes in contention: FiCCO's pieces, whole shards, and the vendor's collective.
PIECES, SHARDS, COLLECTIVE = "dma-pieces", "dma-shards", "collective"

#: Seconds that a call may wait for its peers.
TIMEOUT_S = 30.0

#: Parts of the seconds of a run that communication alone and each shape may take.
COMMUNICATION_SHARE = 0.15


@dataclass(frozen=True)
class Row:
    """One loss.

    Attributes:
        loss: ``gemm-dil``, ``communication-dil``, ``gemm-cil`` or ``copy-cil``.
        case, m, n, k, dtype: the product; its sizes are 0 where only communication is measured.
        world: ranks.
        nbytes: of a shard that is communicated; 0 where nothing is.
        cut: ``rows`` or ``columns`` of A; of a communication always rows.
        parts: the product's, or a shard's.
        mover: ``dma-pieces``, ``dma-shards`` or ``collective``, where something is communicated.
        rounds: how many there are.
        alone_ms, ms: medians of the whole, or of the work alone, and of the parts, or of the work
            beside other work.
        ratio: the loss: median of the ratios of the rounds.
        alone_us, us: the times of the rounds in microseconds, with blanks between them.
        status, note: ``ok``, or ``skipped`` or ``failed`` and why.
    """

    loss: str
    case: str
    m: int
    n: int
    k: int
    dtype: str
    world: int
    nbytes: int = 0
    cut: str = ""
    parts: int = 1
    mover: str = ""
    rounds: int = 0
    alone_ms: float = math.nan
    ms: float = math.nan
    ratio: float = math.nan
    alone_us: str = ""
    us: str = ""
    status: str = "ok"
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class Settings:
    """What is characterised, and where the rows go.

    Attributes:
        cases: products.
        sizes: bytes of the shards whose communication is measured alone.
        device: ``"cpu"`` or ``"cuda"``.
        seconds: time for everything.
        csv: the file that rows are appended to, shape by shape.
        command: the command line, for the description of the figures.
    """

    cases: tuple[Case, ...]
    sizes: tuple[int, ...]
    device: str
    seconds: float
    csv: Path
    command: str = ""
    rounds: int = 25


def characterize(settings: Settings) -> list[Row]:
    """Measure; collective. The rows on rank 0, nothing elsewhere."""
    run = _Run(settings)
    with ficco.options(timeout_s=TIMEOUT_S, on_timeout="raise"):
        return run.run()


class _Run:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.group = dist.group.WORLD
        self.device = local_device(settings.device)
        self.watch = Stopwatch(self.group, self.device)
        self.world, self.rank = self.watch.world, self.watch.rank
        self.began = time.monotonic()

    def run(self) -> list[Row]:
        settings = self.settings
        found: list[Row] = []
        if self.rank == 0:
            write_description(settings.csv, describe(settings.device, self.world, settings.command))
        steps: list[tuple[str, Callable[[float], list[Row]], float]] = [
            ("communication", self._communication, settings.seconds * COMMUNICATION_SHARE)
        ]
        each = settings.seconds * (1 - COMMUNICATION_SHARE) / max(len(settings.cases), 1)
        for case in settings.cases:
            steps.append((case.name, self._shape(case), each))
        for number, (name, action, seconds) in enumerate(steps):
            left = len(steps) - number
            self._say(f"[{number + 1}/{len(steps)}] {name} ...")
            rows = self._tried(name, action, seconds)
            if self.rank == 0:
                found += rows
                write(settings.csv, rows)
            spent = time.monotonic() - self.began
            about = spent / (number + 1) * (left - 1)
            self._say(f"[{number + 1}/{len(steps)}] {name}: about {about:.0f} s left")
            for row in rows:
                self._say(f"  {line(row)}")
        self.watch.close()
        return found

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def _tried(self, name: str, action: Callable[[float], list[Row]], seconds: float) -> list[Row]:
        """The rows of a step, or one that says why there are none; the same on every rank."""
        rows: list[Row]
        rows, why = self.watch.together(partial(action, seconds))
        if why:
            self.watch.close()
            self.watch = Stopwatch(self.group, self.device)  # the ranks are in step again
            rows = [Row("", name, 0, 0, 0, "", self.world, status="failed", note=why)]
        self.watch.release()
        return rows

    # Communication alone.

    def _communication(self, seconds: float) -> list[Row]:
        """Whole shards against pieces, by copies and by the collective (figure 8)."""
        dtype = torch.float32 if self.settings.device == "cpu" else torch.bfloat16
        parts = Parts(self.group, self.device, dtype)
        sizes, world = self.settings.sizes, self.world
        parts.collective(max(sizes))  # grows the memory that the others share
        calls: dict[str, Any] = {}
        for size in sizes:
            calls[f"{SHARDS} {size}"] = parts.copies("shard-overlap", size)
            calls[f"{PIECES} {size}"] = parts.copies(pieces(world), size)
            calls[f"{COLLECTIVE} {size} 1"] = parts.collective(size)
            calls[f"{COLLECTIVE} {size} {world}"] = parts.collective(size, world)
        found = self._time(calls, seconds)
        rows = []
        for size in sizes:
            for mover, whole, cut in (
                (PIECES, f"{SHARDS} {size}", f"{PIECES} {size}"),
                (COLLECTIVE, f"{COLLECTIVE} {size} 1", f"{COLLECTIVE} {size} {world}"),
            ):
                rows.append(
                    _row(
                        found[whole],
                        found[cut],
                        loss=COPY_DIL,
                        case=f"{size}",
                        m=0,
                        n=0,
                        k=0,
                        dtype=_name(dtype),
                        world=world,
                        nbytes=size,
                        cut="rows",
                        parts=world,
                        mover=mover,
                    )  # fmt: skip
                )
        return rows

    def _time(self, calls: dict[str, Any], seconds: float, most: int = 0) -> dict[str, Series]:
        most = most or self.settings.rounds
        return self.watch.time(calls, seconds=seconds, most=most)

    # A product.

    def _shape(self, case: Case) -> Callable[[float], list[Row]]:
        def action(seconds: float) -> list[Row]:
            if why := self._skipped(case):
                what = (case.name, case.m, case.n, case.k, case.dtype, self.world)
                return [Row("", *what, status="skipped", note=why)]
            return [*self._decomposed(case, seconds * 0.4), *self._contended(case, seconds * 0.6)]

        return action

    def _skipped(self, case: Case) -> str:
        if case.skip:
            return case.skip
        if self.settings.device == "cuda":
            torch.cuda.empty_cache()
            free = min(self.watch.gather(torch.cuda.mem_get_info()[0]))
            need = case.memory(self.world)
            if need > MEMORY_SHARE * free:
                return f"needs {need / 2**30:.0f} GiB on a rank, {free / 2**30:.0f} are free"
        return ""

    def _decomposed(self, case: Case, seconds: float) -> Iterator[Row]:
        """The product cut by rows and by columns into W and W * W parts (figure 7)."""
        made = Parts(self.group, self.device, getattr(torch, case.dtype))
        m, n, k = case.m, case.n, case.k
        calls: dict[str, Any] = {"whole": made.matmul(m, n, k)}
        numbers = tuple(dict.fromkeys((self.world, self.world**2)))
        for parts in numbers:
            calls[f"rows {parts}"] = made.matmul(m, n, k, parts=parts)
            calls[f"columns {parts}"] = made.accumulated(m, n, k, parts, rounding=True)
        found = self._time(calls, seconds)
        for cut in ("rows", "columns"):
            for parts in numbers:
                yield _row(
                    found["whole"], found[f"{cut} {parts}"], loss=GEMM_DIL, case=case.name, m=m,
                    n=n, k=k, dtype=case.dtype, world=self.world, cut=cut, parts=parts,
                )  # fmt: skip

    def _contended(self, case: Case, seconds: float) -> Iterator[Row]:
        """The product in W parts and the communication of its A, beside each other (figure 9)."""
        made = Parts(self.group, self.device, getattr(torch, case.dtype))
        m, n, k, world = case.m, case.n, case.k, self.world
        nbytes = m // world * k * made.dtype.itemsize
        product = made.matmul(m, n, k, parts=world)
        moves = {
            PIECES: made.copies(pieces(world), nbytes),
            SHARDS: made.copies("shard-overlap", nbytes),
            COLLECTIVE: made.collective(nbytes),
        }
        alone: dict[str, Any] = {"product": product, **moves}
        guess = self._time(alone, seconds * 0.2, most=5)
        calls = dict(alone)
        for mover, move in moves.items():
            back = behind(guess["product"].times, guess[mover].times)
            calls[f"product beside {mover}"] = beside(product, move, back, self.device)
            back = behind(guess[mover].times, guess["product"].times)
            calls[f"{mover} beside product"] = beside(move, product, back, self.device)
        found = self._time(calls, seconds * 0.8)
        for loss, front in ((GEMM_CIL, "product"), (COPY_CIL, "")):
            for mover in moves:
                name = front or mover
                other = mover if front else "product"
                yield _row(
                    found[name], found[f"{name} beside {other}"], loss=loss, case=case.name, m=m,
                    n=n, k=k, dtype=case.dtype, world=world, nbytes=nbytes, cut="rows",
                    parts=world, mover=mover,
                )  # fmt: skip


def pieces(world: int) -> str:
    """The copies of FiCCO: a piece of every peer before the next piece of any, W of a shard."""
    return f"hetero-fused-1d:pieces={world}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _row(alone: Series, other: Series, **what: Any) -> Row:
    return Row(
        **what,
        rounds=len(alone.times),
        alone_ms=alone.seconds * 1e3,
        ms=other.seconds * 1e3,
        ratio=paired(other.times, alone.times),
        alone_us=_series(alone.times),
        us=_series(other.times),
    )


def _series(times: Sequence[float]) -> str:
    return " ".join(f"{seconds * 1e6:.6g}" for seconds in times)


def line(row: Row) -> str:
    """A row for people."""
    if not row.ok:
        return f"{row.case}: {row.status}: {row.note}"
    what = " ".join(part for part in (row.mover, f"{row.parts} {row.cut}") if part)
    times = f"{row.alone_ms:.4g} -> {row.ms:.4g} ms, median of paired ratios {row.ratio:.3f}"
    return f"{row.loss:18} {row.case:20} {what:24} {times}"


def write(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a CSV file; a new one gets the header."""
    append(path, Row, rows)


def read(path: Path) -> list[Row]:
    """The rows of a CSV file of losses. Raises as :func:`ficco.bench.rows.read`."""
    return read_rows(path, Row)
