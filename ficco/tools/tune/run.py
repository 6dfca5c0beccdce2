"""A tuning run on all ranks, its files, and the check of a machine's file.

Each step measures one block of a Machine on all ranks together. Every rank ends a step with the
same figures, those of the slowest rank. Only rank 0 reads and writes files and prints: progress to
stderr, figures to stdout. A step that fails leaves its block unchanged, and the run goes on. The
next run measures the rest.

The journal lists the steps that are in the machine's file, so that an interrupted run can continue.
The machine is saved before the journal. Both files are replaced atomically.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
import yaml
from rich.console import Console

import ficco
from ficco.dma.engine import fingerprint
from ficco.dma.host import hosts_of
from ficco.errors import ConfigError
from ficco.heuristics.model import lacking
from ficco.machine import (
    COLLECTIVES,
    SCALED_PRODUCTS,
    Fingerprint,
    Gemm,
    Machine,
    Provenance,
    dumps,
    known,
    load,
    loads,
    save,
    tuned_key,
)
from ficco.machine.files import write
from ficco.problems.products import Problem
from ficco.schedules import Schedule
from ficco.simulate import predict
from ficco.tools import doctor
from ficco.tools.bench.frames import bar, commit
from ficco.tools.bench.measure import Stopwatch
from ficco.tools.launch import local_device
from ficco.tools.tune import calls, communication, fits, products
from ficco.tools.tune.effort import EFFORTS, NETWORK, STEPS, Shape, TuneSettings, name_of
from ficco.tools.tune.site import Site

# Files.


_LONG = re.compile(r"-?\d+\.?\d*(e[+-]?\d+)?")


def default_name(here: Fingerprint) -> str:
    """Name of the user's file for a host: ``nvidia-h200-4``."""
    slug = re.sub(r"[^a-z0-9]+", "-", here.accelerator.lower()).strip("-")
    return f"{slug}-{here.ranks}"


def damaged(path: Path) -> Path:
    """Where a damaged file is kept."""
    return path.with_name(f"{path.name}.damaged")


def opened(path: Path, here: Fingerprint, fresh: bool = False) -> Machine:
    """The initial machine: from the file, else the known machine of such a host, else an empty one.

    Raises:
        ConfigError: the path is no file, or the file is damaged or of another kind of host.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "something else"
        raise ConfigError(str(path), "file", f"required a file, got {kind}; name one with --out")
    if path.exists():
        try:
            machine = load(path)
        except ConfigError as error:
            if not fresh:
                why = f"{error.expected}. Nothing was measured; --fresh keeps this file as "
                why += f"{damaged(path).name} and begins anew"
                raise ConfigError(str(path), error.key, why) from None
            path.replace(damaged(path))
        else:
            for name in ("ranks", "accelerator"):
                wanted, got = getattr(here, name), getattr(machine, name)
                if not here.matches(machine) and got != wanted:
                    why = f"required {wanted}, as this run has, got {got}; figures of different "
                    why += "hosts are not merged: give another file with --out"
                    raise ConfigError(str(path), name, why)
            return machine
    alike = known(here)
    if alike is None:
        return Machine(path.stem, here.accelerator, here.ranks)
    return replace(alike, name=path.stem, source=str(path))


def rounded(value: Any) -> Any:
    """A block with its floats to five digits, which is more than measuring gives; the sizes of a
    curve's points stay as they are."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, tuple):
        if value and all(isinstance(item, tuple) for item in value):
            return tuple((size, *rounded(tuple(rest))) for size, *rest in value)
        return tuple(map(rounded, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: rounded(getattr(value, f.name)) for f in fields(value)})
    return value


def changes(old: Machine, new: Machine, block: str) -> list[tuple[str, str, str]]:
    """Name, figure before and figure after, of every figure of a block."""
    before, after = _figures(old, block), _figures(new, block)
    names = dict.fromkeys([*after, *before])
    return [(name, before.get(name, "-"), after.get(name, "-")) for name in names]


def _change(old: str, new: str) -> str:
    """A figure after a step, and before it unless it is new."""
    return f"{new} (new)" if old == "-" else f"{old} -> {new}"


def _figures(machine: Machine, block: str) -> dict[str, str]:
    """The figures of a block by name, as a file would hold them, rounded; empty without it."""
    value = getattr(machine, block)
    if value is None:
        return {}
    single = Machine(machine.name, machine.accelerator, machine.ranks, **{block: value})
    data = yaml.safe_load(dumps(single))[block]
    data.pop("provenance", None)
    return {name: _text(figure, ", ") for name, figure in data.items()}


def _text(value: Any, between: str = ": ") -> str:
    if isinstance(value, list):
        return between.join(map(_text, value))
    return _LONG.sub(lambda m: f"{float(m[0]):.4g}" if len(m[0]) > 5 else m[0], str(value))


@dataclass(frozen=True)
class Journal:
    """Steps of a run that are done.

    Attributes:
        settings: text of the run's settings; another run with the same text continues it.
        done: names of its steps that are in the file.
    """

    settings: str
    done: tuple[str, ...] = ()

    @staticmethod
    def path(machine: Path) -> Path:
        """Path of the journal of a machine's file, hidden from searches for machines."""
        return machine.with_name(f".{machine.stem}.tune.json")

    @classmethod
    def read(cls, machine: Path) -> Journal | None:
        """The journal of a machine's file; None if there is none, or a damaged one."""
        try:
            data: Any = json.loads(cls.path(machine).read_text())
            return cls(str(data["settings"]), tuple(map(str, data["done"])))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, machine: Path) -> None:
        """Write the journal atomically.

        Raises:
            ConfigError: the folder cannot be written, or the disk is full.
        """
        try:
            write(self.path(machine), json.dumps(asdict(self)))
        except OSError as error:
            why = f"cannot be written: {error.strerror}; give another file with --out, or another "
            why += "folder with FICCO_CONFIG_DIR"
            raise ConfigError(str(machine), "folder", why) from None


# The run.


#: Seconds that a call may wait for its peers while tuning.
TIMEOUT_S = 30.0

#: The function that measures each step's block. A text, the reason to skip the step, leaves the
#: block unchanged.
MEASURES: dict[str, Callable[[Site], Any]] = {
    "gemm": products.gemm,
    **products.MORE,
    "tiled": products.tiled,
    "attention": products.attention,
    "copies": communication.copies,
    "kernel_copies": communication.kernel_copies,
    "topology": communication.topology,
    **{name: partial(communication.collective, name=name) for name in communication.EXCHANGES},
    "memory": products.memory,
    "contention": communication.contention,
    "host": calls.host,
    "thresholds": calls.thresholds,
    NETWORK: communication.network,
}


@dataclass
class Outcome:
    """Result of a run.

    Attributes:
        machine: with all that was measured.
        done: steps of this run, in order; ``earlier`` those of the one that it continued.
        skipped, failures: steps that were skipped and that failed, with the reason.
        error: why the run could not begin, or could not save; empty otherwise.
    """

    machine: Machine | None = None
    done: list[str] = field(default_factory=list)
    earlier: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    error: str = ""


def tune(settings: TuneSettings) -> Outcome:
    """Measure and save; collective, of two ranks or more. The outcome is the same on every rank."""
    with ficco.options(timeout_s=TIMEOUT_S, on_timeout="raise"):
        return _TuningRun(settings).run()


class _TuningRun:
    """A run on this rank; rank 0 prints progress, and the expected time."""

    def __init__(self, settings: TuneSettings) -> None:
        self.settings = settings
        self.group = dist.group.WORLD
        self.rank, self.world = self.group.rank(), self.group.size()
        self.device = local_device(settings.device)
        self.hosts = hosts_of(self.group, TIMEOUT_S, "tune")
        self.here = fingerprint(settings.device, self.hosts.near.size())
        self.date = datetime.now(UTC).strftime("%Y-%m-%d")
        self.console = Console(stderr=True, quiet=self.rank != 0)

    def run(self) -> Outcome:
        if (self.hosts.count > 1) != (self.settings.steps == (NETWORK,)):
            return Outcome(
                error="--only: ranks of one host measure all steps but 'network', and those of "
                f"several hosts that one alone; got {', '.join(self.settings.steps)} on "
                f"{self.hosts.count}"
            )
        error, begun = self._on_rank_0(self._begin)
        if error:
            return Outcome(error=error)
        machine, journal = begun
        outcome, settings = Outcome(machine, earlier=journal.done), self.settings
        todo = {n: settings.seconds(n) for n in settings.steps if n not in journal.done}
        steps, rest, whole = len(todo), dict(todo), sum(todo.values())
        planned = taken = 0.0  # seconds of the steps that were measured
        if journal.done:
            self._say(f"continues an interrupted run; done: {', '.join(journal.done)}")
        self._say(
            f"{self.here.accelerator}, {self.world} ranks: {steps} steps, about {whole:.0f} s; "
            f"every one is saved to {settings.path}"
        )
        watch = Stopwatch(self.group, self.device, hosts=self.hosts)
        for number, (name, own) in enumerate(todo.items(), 1):
            title, began = f"[{number}/{steps}] {name}", time.monotonic()
            site = Site(watch, settings.effort, machine, self._source)
            past = whole - sum(rest.values())

            def done(past: float = past, own: float = own, began: float = began) -> float:
                return past + min(time.monotonic() - began, own)

            with bar(self.console, title, whole, done) as site.tick:
                measured, why = watch.together(partial(self._measure, name, site), named=True)
            watch, closing = self._after(watch, bool(why))
            spent = time.monotonic() - began
            del rest[name]
            if why := why or closing:
                outcome.failures[name] = why
                self._say(f"{title}: failed after {spent:.1f} s: {why}")
                continue
            before, (machine, skipped) = machine, measured
            journal = replace(journal, done=(*journal.done, name))
            error, _ = self._on_rank_0(partial(self._keep, machine, journal))
            if error:
                outcome.error = error
                break
            outcome.machine = machine
            outcome.done.append(name)
            outcome.skipped |= {name: skipped} if skipped else {}
            planned, taken = planned + own, taken + spent
            seconds = sum(rest.values()) * taken / planned if planned else sum(rest.values())
            left = f"about {seconds:.0f} s left" if rest else "done"
            self._say(f"{title}: {f'skipped: {skipped}' if skipped else f'{spent:.1f} s'}; {left}")
            self._show(name, before, machine)
        if self.rank == 0 and outcome.done and self.hosts.count == 1:
            for line in calls.rechosen(begun[0], machine, self.world, settings):
                self._say(line, Console())
        watch.close()
        if not outcome.error and not outcome.failures and self.rank == 0:
            with suppress(OSError):  # the run is over
                Journal.path(settings.path).unlink()
        return outcome

    def _say(self, text: str, console: Console | None = None) -> None:
        (console or self.console).print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, name: str, before: Machine, after: Machine) -> None:
        """The figures of a step, old against new."""
        if name in STEPS:
            every = changes(before, after, name)
            lines = [f"{name}.{figure}: {_change(old, new)}" for figure, old, new in every]
        else:
            entry = after.tuned[-1]
            old = next((one for one in before.tuned if tuned_key(one) == tuned_key(entry)), None)
            lines = [
                f"{name}, {mode}: {_change(getattr(old, mode, '-'), getattr(entry, mode))}, "
                f"{seconds * 1e3:.3f} ms, {serial / seconds:.2f} times as fast as serial"
                for mode, seconds, serial in zip(
                    ("queued", "idle"), entry.seconds, entry.serial, strict=True
                )
            ]
        for line in lines:
            self._say(f"  {line}", Console(quiet=self.rank != 0))

    def _begin(self) -> tuple[Machine, Journal]:
        settings = self.settings
        machine = opened(settings.path, self.here, settings.fresh)
        text = settings.describe(self.here)
        journal = None if settings.fresh else Journal.read(settings.path)
        if journal is None or journal.settings != text or not settings.path.exists():
            journal = Journal(text)
        journal.write(settings.path)  # raises before anything is measured
        return machine, journal

    def _keep(self, machine: Machine, journal: Journal) -> None:
        save(machine, self.settings.path)
        journal.write(self.settings.path)

    def _on_rank_0(self, action: Callable[[], Any]) -> tuple[str, Any]:
        """The error of rank 0 in words, or its result, on every rank."""
        outcome: list[Any] = ["", None]
        if self.rank == 0:
            try:
                outcome[1] = action()
            except (ConfigError, OSError) as error:
                outcome[0] = str(error)
        dist.broadcast_object_list(outcome, group_src=0, group=self.group)
        return outcome[0], outcome[1]

    def _measure(self, name: str, site: Site) -> tuple[Machine, str]:
        """The machine with the block of a step, and the reason if the step was skipped."""
        if name in MEASURES:
            measured = MEASURES[name](site)
            if isinstance(measured, str):
                return site.machine, measured
            block = {name: rounded(measured)}
            single = Machine("block", self.here.accelerator, self.here.ranks, **block)
            loads(dumps(single), str(self.settings.path))  # raises for a wrong block
            return replace(site.machine, **block), ""
        problem = next(p for p in self.settings.problems if name_of(p) == name)
        entry, left_out = calls.best(site, problem)
        for other, why in left_out.items():
            self._say(f"  {other} was not measured: {why}")
        return calls.with_entry(site.machine, rounded(entry)), ""

    def _after(self, watch: Stopwatch, failed: bool) -> tuple[Stopwatch, str]:
        """Free the memory of a step. After a failure, ranks begin with a new barrier."""
        if failed:
            watch.close()
            watch = Stopwatch(self.group, self.device)
        try:
            watch.release()
        except RuntimeError as error:
            return watch, f"{type(error).__name__}: {error}"
        return watch, ""

    def _source(self, kind: str, note: str) -> Provenance:
        versions = doctor.versions()
        where = {name: str(versions[name]) for name in ("driver", "torch")}
        where |= {"command": self.settings.command, "note": note}
        return Provenance(kind, self.date, commit=commit() or f"ficco {versions['ficco']}", **where)


# The check of a file.


#: Products that are measured again, of those that a tuning run measures.
PRODUCTS = 4

#: Schedules of whole calls that are predicted.
CALLS = ("serial", "shard-overlap")


@dataclass(frozen=True)
class Point:
    """Seconds by the stored figures, and measured seconds, of one check point."""

    block: str
    subject: str
    stored: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.stored if self.stored > 0 else float("inf")

    def holds(self, tolerance: float) -> bool:
        """Whether the ratio, or its inverse, is at most ``1 + tolerance``."""
        return 1 / (1 + tolerance) <= self.ratio <= 1 + tolerance


def check(machine: Machine, device: str) -> list[Point]:
    """Measure a few points of a machine on ``"cpu"`` or ``"cuda"``; collective, of two ranks or
    more. The same on every rank."""
    watch = Stopwatch(dist.group.WORLD, local_device(device))
    site = Site(watch, EFFORTS[device, True], machine, lambda kind, note: Provenance(kind))
    points: list[Point] = []
    with ficco.options(timeout_s=TIMEOUT_S, on_timeout="raise"):
        for block, points_of in CHECKED.items():
            model = getattr(machine, block)
            if model is not None:
                points += points_of(site, block, model)
                watch.release()
        points += _calls(site)
        watch.release()
    watch.close()
    return points


def _gemm(site: Site, block: str, model: Gemm) -> Iterator[Point]:
    yield from _products(site, block, model, _plain(site))
    shape, longest = site.effort.heating[0], site.effort.rows[-1]
    (time,) = products.row_times(site, (shape,), (longest,))
    stored = longest * model.seconds(*shape[:3], itemsize=site.itemsize)
    yield Point(block, f"{longest} of {time.product} in a row", model.heated(stored), time.seconds)


def _plain(site: Site) -> list[Shape]:
    return [one for one in site.effort.gemms if one.plain]


def _products(site: Site, block: str, model: Gemm, shapes: Sequence[Shape]) -> Iterator[Point]:
    usual = sorted(shapes, key=lambda one: one.flops)
    chosen = usual[len(usual) // 4 :: max(len(usual) // (PRODUCTS + 1), 1)][:PRODUCTS]
    rows = {shape[:4]: shape.in_a_row for shape in chosen}
    for one in products.samples(site, chosen, products.row_of, step=block):
        size = one.m, one.n, one.k
        row = rows[(*size, one.batch)]
        how = {"batch": one.batch, "rights": one.rights, "itemsize": site.itemsize}
        stored = model.heated(row * model.seconds(*size, **how)) / row
        product = f"{one.batch} of " * (one.batch > 1) + "{} x {} x {}".format(*size)
        yield Point(block, product, stored, one.seconds)


def _experts(site: Site, block: str, model: Gemm) -> Iterator[Point]:
    return _products(site, block, model, site.effort.experts)


def _scaled(site: Site, block: str, model: Gemm) -> Iterator[Point]:
    """Products of float8 operands, by the recipe of a block."""
    recipe = next(recipe for recipe, own in SCALED_PRODUCTS.items() if own == block)
    scaled = products.scaled_site(site, recipe)
    if not isinstance(scaled, str):
        yield from _products(scaled, block, model, _plain(scaled))


def _attention(site: Site, block: str, model: Any) -> Iterator[Point]:
    if (gemm := site.machine.gemm) is None:
        return
    chosen = site.effort.attends[2::4]
    for call, seconds in zip(chosen, products.attention_seconds(site, chosen), strict=True):
        stored, _ = model.times(gemm, site.itemsize, *products.call_of(call))
        attended = f"{call.queries} x {call.keys}, size {call.size}" + ", causal" * call.causal
        attended += ", backward" * call.back
        yield Point(block, attended, stored, seconds)


def _copies(site: Site, block: str, model: Any) -> Iterator[Point]:
    sizes = site.effort.sizes
    if site.crowded:  # the block has the bytes' time alone; the rest is in the block host
        curve = fits.copies(communication.copy_times(site, sizes, site.effort.pieces)).curve
        for nbytes, rate in curve[1:]:
            stored = nbytes / model.rate(nbytes)
            yield Point(block, f"{nbytes / 1024:.0f} KiB", stored, nbytes / rate)
        return
    for one in communication.copy_times(site, (sizes[1], sizes[-1]), (1,)):
        row = one.count * one.nbytes / model.rate(one.nbytes) + (one.count - 1) * model.gap
        copies = f"{one.count} of {one.nbytes / 1024:.0f} KiB"
        yield Point(block, copies, model.latency + row, one.seconds)


def _collective(site: Site, block: str, model: Any) -> Iterator[Point]:
    for nbytes, seconds in communication.collective(site, block).curve[1::2]:
        yield Point(block, f"{nbytes / 1024:.0f} KiB a rank", model.seconds(nbytes), seconds)


def _memory(site: Site, block: str, model: Any) -> Iterator[Point]:
    now, size = products.memory(site), 2 * site.effort.moves[-1]
    stored = model.latency + size / model.bandwidth
    yield Point(block, f"{size >> 20} MiB", stored, now.latency + size / now.bandwidth)


#: The blocks that are checked.
CHECKED: dict[str, Callable[[Site, str, Any], Iterator[Point]]] = {
    "gemm": _gemm,
    **dict.fromkeys(SCALED_PRODUCTS.values(), _scaled),
    "attention": _attention,
    "experts": _experts,
    "copies": _copies,
    **dict.fromkeys(COLLECTIVES.values(), _collective),
    "memory": _memory,
}


def _calls(site: Site) -> Iterator[Point]:
    """Whole calls, as the simulation predicts them from all blocks together."""
    mode = site.watch.mode
    if lacking(site.machine, mode):
        return
    m, n, k = site.effort.rule[-1]
    rows = (m // site.world,) * site.world
    problem = Problem("all_gather_matmul", rows, n, k, site.effort.dtype)
    parts = site.parts()
    a, b = parts.matrix("a", rows[0], k), parts.matrix("b", k, n)
    names = CALLS
    if site.machine.kernel_copies is not None and communication.copies_by_kernel(site):
        names = (*CALLS, communication.IN_FRONT)
    series = site.time("thresholds", site.gathers(a, b, names), share=0.5)
    for name in names:
        stored = predict(problem, Schedule.parse(name), site.machine, mode)
        yield Point("call", f"{name}, {m} x {n} x {k}", stored, median(series[name]))


def report(points: list[Point], tolerance: float, again: str = "ficco tune") -> str:
    """The points as text, and whether all hold; ``again``: the command that measures the machine
    anew."""
    lines = [f"{'':44} {'stored':>12} {'measured':>12} {'ratio':>6}"]
    for point in points:
        stored, measured = (f"{s * 1e3:.4g} ms" for s in (point.stored, point.measured))
        mark = "" if point.holds(tolerance) else "  off"
        name = f"{point.block} {point.subject}"
        lines.append(f"{name:44} {stored:>12} {measured:>12} {point.ratio:6.2f}{mark}")
    off = [point.block for point in points if not point.holds(tolerance)]
    rule = f"no more than {1 + tolerance:g} times as much or as little"
    end = f"all {len(points)} points hold ({rule})"
    if not points:
        end = "the file holds nothing that could be checked"
    elif off:
        blocks = " ".join(dict.fromkeys(block for block in off if block != "call"))
        remedy = f"{again} --only {blocks}" if blocks else again
        end = f"{len(off)} of {len(points)} points are off ({rule} holds); measure again: {remedy}"
    return "\n".join([*lines, end])
