"""Decide the schedule of a call: the choice, its source and its reason.

The first source that applies:

========  ====================================================================================
caller    named a schedule
tuned     this problem was measured on this machine
model     every candidate is predicted from the machine's figures (:mod:`.model`)
rule      the paper's, with the machine's thresholds (:func:`.rule`)
fallback  the default of the family: the machine has no figures
========  ====================================================================================

Differences between operators are rows of :mod:`.families`. A decision depends only on the problem
and on facts that all ranks share, so it is the same on every rank. Every schedule computes the same
result: a wrong decision only costs time. Without a call, :func:`where` finds the machine, the
number of ranks and the mode of a decision.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ficco.errors import InvalidArgument, warn_once
from ficco.heuristics.candidates import ALL_OFFERS
from ficco.heuristics.families import FAMILIES, Family, family_of
from ficco.heuristics.model import (
    MODES,
    Losses,
    Predict,
    Prediction,
    by_loss,
    choose,
    lacking,
    predictions,
    shortlist,
)
from ficco.machine import COLLECTIVES, Fingerprint, Machine, find, nearest, tuned_key
from ficco.machine.files import write
from ficco.plan.render import BYTES, SECONDS, bytes_text, column, seconds_text
from ficco.problems.products import Problem, digest
from ficco.problems.specification import AnyProblem
from ficco.schedules import Schedule, own_candidates
from ficco.version import version

#: Advice for a machine without figures.
REMEDY = "`ficco tune` measures this machine"


class _Query(NamedTuple):
    """The inputs of predictions; the machine is described for the problem's ranks."""

    family: Family
    problem: Any
    machine: Machine
    mode: str
    offers: tuple[str, ...]
    predict: Predict


@dataclass(frozen=True)
class Decision:
    """The chosen schedule, the source of the choice, and its reason.

    Attributes:
        schedule: the choice.
        source: ``"caller"``, ``"tuned"``, ``"model"``, ``"rule"`` or ``"fallback"``.
        reason: in words.
        problem, machine, mode, offers: inputs of the decision; machine None if it is unknown.
        hidden_s: seconds that serial takes longer, measured (``"tuned"``) or predicted; an eager
            call counts as queued. None if the decision compared no times.
    """

    schedule: Schedule
    source: str
    reason: str
    problem: AnyProblem | None = field(default=None, repr=False, compare=False)
    machine: Machine | None = field(default=None, repr=False, compare=False)
    mode: str = field(default="eager", repr=False, compare=False)
    offers: tuple[str, ...] = field(default=ALL_OFFERS, repr=False, compare=False)
    hidden_s: float | None = field(default=None, repr=False, compare=False)
    _predict: Predict | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.schedule} ({self.why})"

    @property
    def why(self) -> str:
        """Source and reason in words."""
        return "requested" if self.source == "caller" else f"{self.source}: {self.reason}"

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Predictions for the compared schedules and the chosen one, the fastest first; empty if
        the machine lacks figures."""
        if (query := self._query("queued")) is None:
            return ()
        family, problem, machine, _, _, predict = query
        modes = MODES["queued"] if lacking(machine, "idle") else MODES["eager"]
        if not lacking(machine, self.mode):
            query = query._replace(mode=self.mode)
        by_schedule = {p.schedule: dict(p.seconds) for p in _compared(query)}
        by_schedule.setdefault(self.schedule, {})
        for schedule, seconds in by_schedule.items():
            for mode in modes:
                if mode not in seconds:
                    seconds[mode] = predict(problem, schedule, machine, mode)
        bound = family.ideal(problem, machine, predict=predict)
        order = "idle" if self.mode == "idle" and "idle" in modes else "queued"
        return tuple(
            Candidate(
                schedule=str(schedule),
                queued=seconds["queued"],
                idle=seconds.get("idle"),
                share=bound / seconds["queued"],
                losses=family.losses(problem, schedule, machine, predict),
                extra_bytes=family.plans(problem, schedule, [0])[0].extra_bytes,
            )
            for schedule, seconds in sorted(by_schedule.items(), key=lambda pair: pair[1][order])
        )

    @property
    def others(self) -> tuple[Schedule, ...]:
        """The compared schedules, the one with the smallest loss first. With unequal rows, the
        schedules that were compared for equal rows follow. Schedules of the vendor's collective are
        left out. Empty if the machine lacks figures."""
        if (query := self._query(self.mode)) is None:
            return ()
        even, _ = query.family.evened(query.problem)
        both = [_compared(query), _compared(query._replace(problem=even))]
        ranked = [by_loss(predicted, MODES[self.mode]) for predicted in both]
        schedules = dict.fromkeys(prediction.schedule for prediction in chain(*ranked))
        return tuple(schedule for schedule in schedules if schedule.mover != "collective")

    def _query(self, mode: str) -> _Query | None:
        """The inputs of predictions in a mode; None if the machine lacks figures for the mode, or
        there is nothing to predict."""
        problem, machine = self.problem, self.machine
        if problem is None or machine is None or problem.operator not in FAMILIES:
            return None
        family = family_of(problem)
        if problem.world == 1 or family.empty(problem):
            return None
        machine = described(machine, problem.local_world)
        if machine is None or lacking(machine, mode, problem):
            return None
        predict = self._predict or family.seconds
        return _Query(family, problem, machine, mode, self.offers, predict)

    def table(self, measured: Measured | None = None, width: int | None = None) -> str:
        """The candidates as text, a line each, the chosen one marked with a star.

        Args:
            measured: seconds by schedule and mode.
            width: most characters of a line if the required columns fit; the last line names the
                optional columns that were left out.
        """
        cells = _columns(self.candidates, str(self.schedule), measured or {})
        columns = {head: [head, *texts] for head, texts in cells}
        optional, dropped = [head for head in OPTIONAL if head in columns], list[str]()
        while True:
            widths = [max(map(len, texts)) for texts in columns.values()]
            fits = width is None or sum(widths) + 2 * (len(widths) - 1) <= width
            if fits or len(dropped) == len(optional):
                break
            dropped.append(optional[len(dropped)])
            del columns[dropped[-1]]
        lines = [
            "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
            for first, *rest in zip(*columns.values(), strict=True)
        ]
        if dropped:
            lines.append(f"left out: {', '.join(reversed(dropped))}")
        return "\n".join(lines)


def decide(
    problem: AnyProblem,
    wanted: str | Schedule = "auto",
    *,
    machine: Machine | None = None,
    mode: str = "eager",
    offers: tuple[str, ...] = ALL_OFFERS,
    predict: Predict | None = None,
    folder: Path | None = None,
) -> Decision:
    """Choose the schedule of a problem, and give the reason.

    Args:
        problem: the problem.
        wanted: ``"auto"``, a name, or a Schedule.
        machine: figures of this kind of host; None if no file describes it.
        mode: ``"eager"``, on a GPU whose host may or may not run ahead; ``"queued"``, captured in
            a graph; ``"idle"``, carried out by the caller itself (the CPU engine). For operators
            other than products, ``"eager"`` is decided as ``"queued"``.
        offers: features of the engine. They are used only if the machine has figures for them.
        predict: seconds of a problem under a schedule on a machine in a mode; None: the family's.
        folder: where choices of the model are stored for later processes; None: nowhere.

    Raises:
        ValueError: the schedule or mode is unknown, or the operator cannot take the schedule.
        NotImplementedError: the problem belongs to no family.
    """
    family = family_of(problem)
    offers = (*offers, *(name for name in own_candidates() if name not in offers))
    if mode not in MODES:
        raise ValueError(f"mode: required one of {', '.join(MODES)}, got {mode!r}")
    if not isinstance(wanted, (str, Schedule)):
        raise ValueError(f"schedule: required 'auto', a name or a Schedule, got {wanted!r}")
    mode = "queued" if mode == "eager" and not family.measured else mode

    def decision(
        schedule: str | Schedule, source: str, reason: str, hidden_s: float | None = None
    ) -> Decision:
        if isinstance(schedule, str):
            schedule = Schedule.parse(schedule)
        inputs = problem, machine, mode, offers
        return Decision(schedule, source, reason, *inputs, hidden_s, predict)

    if wanted != "auto":
        requested = decision(wanted, "caller", "given")
        if why := family.refusal(problem, requested.schedule):
            raise ValueError(why)
        return requested
    default, local_world = family.default(problem, mode), problem.local_world
    if problem.world == 1:
        return decision("serial", "rule", "one rank has nothing to wait for")
    if family.empty(problem):
        return decision(default, "rule", "there is nothing to multiply")
    if machine is None:
        return decision(default, "fallback", f"nobody described this machine; {REMEDY}")
    if family.tunable(problem) and (tuned := _tuned(problem, machine, mode, offers)):
        return decision(tuned[0], "tuned", *tuned[1:])
    known = described(machine, local_world)
    if known is None:
        why = f"machine {machine.name} describes {machine.ranks} ranks, not {local_world}"
        return decision(default, "fallback", f"{why}; {REMEDY}")
    if missing := lacking(known, mode, problem):
        lacks = f"machine {machine.name} lacks {', '.join(missing)}"
        if by_rule := family.rule(problem, known):
            return decision(by_rule[0], "rule", f"{by_rule[1]} ({lacks}; {REMEDY})")
        lacks += " and thresholds" * family.measured
        return decision(default, "fallback", f"{lacks}; {REMEDY}")
    rounded = family.rounded(problem)
    query = _Query(family, rounded, known, mode, offers, predict or family.seconds)
    # The name of a stored file covers neither own schedules nor another prediction.
    if folder is None or predict is not None or own_candidates() or not _IMPORTED:
        schedule, reason, hidden_s = _chosen(query)
    else:
        schedule, reason, hidden_s = _stored(query, folder)
    if rounded != problem:
        reason += f" (simulated as {rounded})"
    if block := known.unmeasured(problem):
        reason += f" ({known.name} lacks {block}, products are predicted by gemm; {REMEDY})"
    return decision(schedule, "model", reason, hidden_s)


def _tuned(
    problem: Any, machine: Machine, mode: str, offers: tuple[str, ...]
) -> tuple[Schedule, str, float] | None:
    """The schedule that was measured as the fastest for a problem, the reason, and the seconds that
    serial takes longer; None if there is no entry or its schedule no longer runs. An eager call
    takes the schedule of ``idle`` calls."""
    key = tuned_key(problem)
    for entry in machine.tuned:
        if tuned_key(entry) != key:
            continue
        column = 0 if mode == "queued" else 1
        name = (entry.queued, entry.idle)[column]
        seconds, serial = entry.seconds[column], entry.serial[column]
        try:
            schedule = Schedule.parse(name)
            if schedule.mover not in (*offers, "collective"):
                raise ValueError(f"the engine has no mover {schedule.mover!r}")
            if schedule.grouping == "tiled" and "tiled" not in offers:
                raise ValueError("the engine has no product whose tiles wait")
            if why := family_of(problem).refusal(problem, schedule):
                raise ValueError(why)
        except ValueError as error:
            warn_once(
                f"machine {machine.name}: the tuned entry of {problem} is skipped: {error}; "
                "`ficco tune --shapes` measures it again"
            )
            continue
        gain = f"{serial / seconds:.2f} times as fast as serial"
        reason = f"measured on {machine.name}: {seconds_text(seconds)}, {gain}"
        return schedule, reason, serial - seconds
    return None


@lru_cache(maxsize=16)
def _compared(query: _Query) -> tuple[Prediction, ...]:
    """Predictions of the schedules that the model compares: all candidates. If rows are unequal and
    there are too many candidates, only the best ones for equal rows are compared."""
    family, problem, machine, mode, offers, predict = query
    schedules, (even, most) = family.schedules(problem, machine, offers), family.evened(problem)
    if even != problem and len(schedules) > most:
        schedules = shortlist(_compared(query._replace(problem=even)), MODES[mode], most)
    return predictions(problem, schedules, machine, MODES[mode], predict)


@lru_cache(maxsize=4096)
def _chosen(query: _Query) -> tuple[Schedule, str, float]:
    """The schedule that the model chooses, the reason, and the seconds that serial takes longer."""
    family, problem, machine, mode, *_ = query
    scatters = any(exchange.terms for exchange in problem.specification.exchanges.values())
    choice = choose(_compared(query), machine, mode, scatters, family.margin, family.tie)
    serial_s, chosen_s = (p.seconds[MODES[mode][0]] for p in (choice.serial, choice.chosen))
    return choice.chosen.schedule, choice.reason, serial_s - chosen_s


#: Packages that the choices of the model depend on.
_MODEL = "heuristics", "machine", "plan", "problems", "schedules", "simulate"

#: Most files in a machine's folder: each packing of documents is another problem.
MOST_STORED = 4096


def _files() -> list[tuple[str, int, int]]:
    """Name, size and time of change of each module of the model."""
    folders = (Path(__file__).resolve().parents[1] / name for name in _MODEL)
    stats = [(file.name, file.stat()) for one in folders for file in one.glob("*.py")]
    return sorted((name, status.st_size, status.st_mtime_ns) for name, status in stats)


#: The files at import. A later upgrade may replace them while this process runs the old code.
_IMPORTED = _files()


@lru_cache(maxsize=16)
def _subfolder(machine: Machine) -> str:
    """Name of the folder with a machine's choices by this code."""
    return f"{digest(version() + repr((_IMPORTED, machine))):010x}"


@lru_cache(maxsize=4096)
def _stored(query: _Query, folder: Path) -> tuple[Schedule, str, float]:
    """The model's choice. It is read from the file of an earlier process, or else computed and
    written."""
    key = repr((query.problem, query.mode, query.offers))
    path = folder / _subfolder(query.machine) / f"{digest(key):010x}"
    with suppress(OSError, ValueError):  # there is no file, or it is damaged
        text, name, hidden_s, reason = path.read_text("utf-8").splitlines()
        if text == key:
            return Schedule.parse(name), reason, float(hidden_s)
    schedule, reason, seconds = choice = _chosen(query)
    if len([*path.parent.glob("*")]) < MOST_STORED:
        with suppress(OSError):
            write(path, "\n".join((key, str(schedule), repr(seconds), reason)), durable=False)
    return choice


def described(machine: Machine, world: int) -> Machine | None:
    """The machine described for a group of ``world`` ranks; None if its figures do not hold for it.

    Figures of copies, links and products are per rank. A collective takes as long as on the
    machine's own ranks for the same bytes received per rank. Ranks on CPUs share their cores, so
    figures of CPUs hold for their own number of ranks only.
    """
    if machine.ranks == world:
        return machine
    if machine.accelerator == "cpu" or machine.ranks < 2:
        return None
    name = f"{machine.name} (as {world} rank{'s' * (world > 1)})"
    changes: dict[str, Any] = {"ranks": world, "name": name}
    share = (machine.ranks - 1) / max(world - 1, 1)
    for block in COLLECTIVES.values() if world > 1 else ():
        if (collective := getattr(machine, block)) is not None:
            curve = tuple((size * share, seconds) for size, seconds in collective.curve)
            changes[block] = replace(collective, curve=curve)
    return replace(machine, **changes)


#: Columns that are dropped from a table that is too wide, in this order.
OPTIONAL = ("DIL gemm", "DIL copies", "CIL", "of ideal", "memory")

#: Seconds by schedule and mode.
Measured = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Candidate:
    """Predictions for one schedule.

    Attributes:
        schedule: its name.
        queued, idle: seconds if the host runs ahead, and if the GPU waits for it; None if the
            machine lacks the figures.
        share: ideal time over queued time.
        losses: decomposition and contention loss (DIL and CIL); None if they are not known.
        extra_bytes: memory besides operands and result, on rank 0.
    """

    schedule: str
    queued: float
    idle: float | None
    share: float
    losses: Losses | None
    extra_bytes: int


def _columns(
    candidates: Sequence[Candidate], chosen: str, measured: Measured
) -> Iterable[tuple[str, list[str]]]:
    names = [candidate.schedule for candidate in candidates]
    yield "  schedule", [f"{'*' if name == chosen else ' '} {name}" for name in names]
    yield "queued", column([candidate.queued for candidate in candidates], SECONDS)
    yield "idle", column([candidate.idle for candidate in candidates], SECONDS)
    for mode in MODES["eager"]:
        seconds = [measured.get(name, {}).get(mode) for name in names]
        if any(seconds):
            yield f"measured {mode}", column(seconds, SECONDS)
    yield "of ideal", [f"{candidate.share:.2f}" for candidate in candidates]
    if losses := [candidate.losses for candidate in candidates if candidate.losses]:
        yield "DIL gemm", [f"{loss.gemm:.2f}" for loss in losses]
        yield "DIL copies", [f"{loss.copies:.2f}" for loss in losses]
        yield "CIL", [f"{loss.contention:.2f}" for loss in losses]
    yield "memory", column([candidate.extra_bytes for candidate in candidates], BYTES)


_KNOWN = "with --machine or FICCO_MACHINE"


@dataclass(frozen=True)
class Where:
    """The target of a decision or a simulation.

    Attributes:
        machine: the machine as in its file; None if no file describes it.
        world: number of ranks.
        mode: a mode of :func:`ficco.heuristics.decide`.
    """

    machine: Machine | None
    world: int
    mode: str

    @property
    def simulated(self) -> Machine:
        """The machine described for the number of ranks.

        Raises:
            ValueError: no machine is known, or its figures do not hold for the number of ranks.
        """
        if self.machine is None:
            raise InvalidArgument("machine", f"required one to simulate, {_KNOWN}, got none")
        machine = described(self.machine, self.world)
        if machine is None:
            raise InvalidArgument(
                "world",
                f"required {self.machine.ranks} ranks, got {self.world}: the figures of machine "
                f"{self.machine.name} hold for its own number of ranks only; `ficco tune --ranks "
                f"{self.world}` measures another",
            )
        return machine


def where(
    machine: Machine | str | os.PathLike[str] | None,
    world: int | None,
    here: Fingerprint | str,
    *,
    captured: bool = False,
) -> Where:
    """Find the machine, the number of ranks and the mode of calls.

    Args:
        machine: a machine, or its name or path.
        world: number of ranks; None: the ranks of the machine.
        here: fingerprint of this host, or the name of a machine to use instead.
        captured: calls are captured in graphs.

    Raises:
        ValueError: an argument is wrong, or neither ranks nor a machine are known.
        ConfigError: the machine does not exist, or its file is damaged.
    """
    if not (machine is None or isinstance(machine, (Machine, str, os.PathLike))):
        raise InvalidArgument(
            "machine", f"required a Machine, a name, a path or None, got {machine!r}"
        )
    if world is not None and world < 1:
        raise InvalidArgument("world", f"required at least 1 rank, got {world}")
    if not isinstance(machine, Machine):
        name = None if machine is None else os.fspath(machine)
        if isinstance(here, str):
            machine = find(name, None) or find(here, None)
        else:
            fingerprint = here if world is None else Fingerprint(here.accelerator, world)
            machine = find(name, fingerprint) or nearest(fingerprint)
    accelerator = here if isinstance(here, str) else here.accelerator
    if world is None:
        if machine is None:
            raise InvalidArgument(
                "world",
                f"required the number of ranks, or a machine {_KNOWN}, since nobody described "
                f"{accelerator}; got none",
            )
        world = machine.ranks
    on_cpu = (accelerator if machine is None else machine.accelerator) == "cpu"
    # A captured call does not wait for its host. On CPUs the caller executes the call.
    mode = "queued" if captured else "idle" if on_cpu else "eager"
    return Where(machine, world, mode)


def held_bytes(problem: Problem, rank: int, extra_bytes: int) -> int:
    """Bytes of a rank's operands and product, plus the extra bytes of its schedule in one slot."""
    buffers = *problem.specification.operands, problem.specification.results[0]
    return sum(buffer.nbytes(rank) for buffer in buffers) + extra_bytes


def too_large(problem: Problem, rank: int, extra_bytes: int, machine: Machine | None) -> str:
    """Why a call does not fit; empty if it does, or if the machine's memory is unknown."""
    held = held_bytes(problem, rank, extra_bytes)
    if machine is None or machine.memory is None or held <= machine.memory.capacity:
        return ""
    return (
        f"does not fit: rank {rank} would hold {bytes_text(held)} with operands and product, "
        f"{machine.name} has {bytes_text(machine.memory.capacity)}"
    )
