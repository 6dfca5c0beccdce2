"""Which schedule a call takes, who chose it, and why.

The first of these that applies:

========  ====================================================================================
caller    named a schedule
tuned     this problem was measured on this machine
model     every candidate is predicted from the machine's figures (:mod:`.model`)
rule      the paper's, with the machine's thresholds (:mod:`.rule`)
fallback  serial, on CPUs growing (over hosts in pieces): nothing is known of the machine
========  ====================================================================================

A decision depends on the problem and on facts that all ranks share, so that it is the same on
every rank. Every schedule computes the same product: a wrong decision costs time only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from ficco.heuristics.candidates import ALL_OFFERS, candidates, predictable, suited
from ficco.heuristics.losses import ideal, losses
from ficco.heuristics.model import (
    MODES,
    Predict,
    Prediction,
    by_loss,
    choose,
    lacking,
    predictions,
    shortlist,
)
from ficco.heuristics.rule import rule
from ficco.heuristics.table import Candidate, Measured, table
from ficco.machine import COLLECTIVES, Machine, tuned_key
from ficco.plan import Planned
from ficco.plan.amounts import seconds_text
from ficco.problems.products import Problem
from ficco.schedules import Schedule, own_candidates, plan, refusal
from ficco.simulate import predict as simulated
from ficco.warn import warn_once

#: How to give ficco the figures of a machine.
REMEDY = "`ficco tune` measures this machine"

#: What a call takes on a machine that nobody described: on a GPU the vendor's collective, then the
#: product, which never does harm; on CPUs, whose calls do not wait for a host, few products.
FALLBACK = {"eager": "serial:collective", "queued": "serial:collective", "idle": "growing"}
#: On CPUs over several hosts what crosses goes in pieces, so that products begin with the first, or
#: the first is sent early. Wide blocks of a product are cut by columns: a library's product of few
#: rows can take twice as long (docs/results/hosts-cpu-16.md).
IN_ROWS, IN_COLUMNS = "shard-overlap:pieces=8", "hetero-unfused-2d:pieces=8,order=peer"

#: For problems with unequal rows all ranks are simulated, in time quadratic in their number. This
#: is the most schedules times ranks squared: for four ranks all schedules, for eight the serial
#: ones and five others, the best ones if rows were equal. That loses, in predicted time and in the
#: mean, nothing where rows differ by up to 30 %, 0.1 % where by one, and 0.5 to 0.8 % where half of
#: them are 0 or their distribution is exponential; 14 % at worst (300 problems of 8 ranks on h100-8
#: and mi300x-8).
SIMULATION_BUDGET = 320
#: At least so many schedules, and no more where rows differ by at most 1/64.
FEWEST, NEARLY_EQUAL = 3, 64


class _Query(NamedTuple):
    """What a prediction of the candidates depends on; the machine as the problem's ranks see it."""

    problem: Problem
    machine: Machine
    mode: str
    offers: tuple[str, ...]
    predict: Predict


@dataclass(frozen=True)
class Decision:
    """The schedule chosen, who chose it, and why.

    Attributes:
        schedule: the choice.
        source: ``"caller"``, ``"tuned"``, ``"model"``, ``"rule"`` or ``"fallback"``.
        reason: in words.
        problem, machine, mode, offers: what it was decided for; machine None if it is unknown.
    """

    schedule: Schedule
    source: str
    reason: str
    problem: Planned | None = field(default=None, repr=False, compare=False)
    machine: Machine | None = field(default=None, repr=False, compare=False)
    mode: str = field(default="eager", repr=False, compare=False)
    offers: tuple[str, ...] = field(default=ALL_OFFERS, repr=False, compare=False)
    _predict: Predict = field(default=simulated, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.schedule} ({self.why})"

    @property
    def why(self) -> str:
        """Source and reason in words."""
        return "requested" if self.source == "caller" else f"{self.source}: {self.reason}"

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """What is predicted of every schedule that was compared and of the one chosen, the fastest
        first; empty where the machine's figures do not allow it."""
        if (query := self._query("queued")) is None:
            return ()
        problem, machine = query.problem, query.machine
        modes = MODES["queued"] if lacking(machine, "idle") else MODES["eager"]
        if not lacking(machine, self.mode):
            query = query._replace(mode=self.mode)
        by_schedule = {one.schedule: dict(one.seconds) for one in _compared(query)}
        by_schedule.setdefault(self.schedule, {})
        for schedule, seconds in by_schedule.items():
            for mode in modes:
                if mode not in seconds:
                    seconds[mode] = self._predict(problem, schedule, machine, mode)
        bound = ideal(problem, machine, self._predict)
        order = "idle" if self.mode == "idle" and "idle" in modes else "queued"
        return tuple(
            Candidate(
                schedule=str(schedule),
                queued=seconds["queued"],
                idle=seconds.get("idle"),
                share=bound / seconds["queued"],
                losses=losses(problem, schedule, machine, self._predict),
                extra_bytes=plan(problem, schedule, 0).extra_bytes,
            )
            for schedule, seconds in sorted(by_schedule.items(), key=lambda one: one[1][order])
        )

    @property
    def others(self) -> tuple[Schedule, ...]:
        """The schedules that were compared, the one that loses least first; for unequal rows
        followed by those that were compared as if rows were equal. Empty where the machine's
        figures do not allow it. Those of the vendor's collective are left out."""
        if (query := self._query(self.mode)) is None:
            return ()
        compared = [_compared(query), _compared(query._replace(problem=query.problem.evened))]
        ranked = (one.schedule for some in compared for one in by_loss(some, MODES[self.mode]))
        return tuple(one for one in dict.fromkeys(ranked) if one.mover != "collective")

    def _query(self, mode: str) -> _Query | None:
        """What was decided, in a mode; None where the machine's figures do not allow predictions
        in it, or there is nothing to predict."""
        problem, machine = self.problem, self.machine
        if not isinstance(problem, Problem) or machine is None:
            return None
        if problem.flops == 0 or problem.world == 1:
            return None
        machine = described(machine, problem.local_world)
        if machine is None or lacking(machine, mode, problem.hosts):
            return None
        return _Query(problem, machine, mode, self.offers, self._predict)

    def table(self, measured: Measured | None = None, width: int | None = None) -> str:
        """The candidates as text, the chosen one marked with a star.

        Args:
            measured: seconds by schedule and mode.
            width: most columns; the last line names what does not fit and is left out.
        """
        return table(self.candidates, str(self.schedule), measured or {}, width)


def decide(
    problem: Problem,
    wanted: str | Schedule = "auto",
    *,
    machine: Machine | None = None,
    mode: str = "eager",
    offers: tuple[str, ...] = ALL_OFFERS,
    predict: Predict = simulated,
) -> Decision:
    """Choose the schedule.

    Args:
        problem: what is asked.
        wanted: ``"auto"``, a name, or a Schedule.
        machine: what is known of this kind of host; None if nobody described it.
        mode: ``"eager"``, on a GPU whose host may or may not run ahead; ``"queued"``, captured in
            a graph; ``"idle"``, carried out by the caller itself (the CPU engine).
        offers: what the engine offers, as far as the machine's figures say how fast.
        predict: seconds of a problem under a schedule on a machine in a mode.

    Raises:
        ValueError: no schedule or mode is called that, or the operator cannot take the schedule.
    """
    offers = (*offers, *(name for name in own_candidates() if name not in offers))
    if mode not in MODES:
        raise ValueError(f"mode: required one of {', '.join(MODES)}, got {mode!r}")
    if not isinstance(wanted, (str, Schedule)):
        raise ValueError(f"schedule: required 'auto', a name or a Schedule, got {wanted!r}")

    def decision(schedule: str | Schedule, source: str, reason: str) -> Decision:
        if isinstance(schedule, str):
            schedule = Schedule.parse(schedule)
        return Decision(schedule, source, reason, problem, machine, mode, offers, predict)

    otherwise = FALLBACK[mode]
    if problem.transposed:  # which no collective serves
        otherwise = FALLBACK["idle"]
    elif problem.hosts > 1 and mode == "idle":
        wide = problem.kind.scatters and problem.n > max(problem.rows)
        otherwise = IN_COLUMNS if wide else IN_ROWS
    if wanted != "auto":
        given = decision(wanted, "caller", "given")
        if why := refusal(problem, given.schedule):
            raise ValueError(why)
        return given
    if problem.world == 1:
        return decision("serial", "rule", "one rank has nothing to wait for")
    if problem.flops == 0:
        return decision(otherwise, "rule", "there is nothing to multiply")
    if machine is None:
        return decision(otherwise, "fallback", f"nobody described this machine; {REMEDY}")
    # Entries are of one host.
    if problem.hosts == 1 and (tuned := _tuned(problem, machine, mode, offers)):
        return decision(tuned[0], "tuned", tuned[1])
    known = described(machine, problem.local_world)
    if known is None:
        why = f"machine {machine.name} describes {machine.ranks} ranks, not {problem.local_world}"
        return decision(otherwise, "fallback", f"{why}; {REMEDY}")
    missing = lacking(known, mode, problem.hosts)
    if not missing:
        chosen, reason = _modelled(_Query(problem, known, mode, offers, predict))
        if block := known.unmeasured(problem.scaling):
            lacks = f"{known.name} lacks {block}, products are predicted by gemm; {REMEDY}"
            reason = f"{reason} ({lacks})"
        return decision(chosen, "model", reason)
    lacks = f"machine {machine.name} lacks {', '.join(missing)}"
    if known.thresholds is not None:
        name, reason = rule(problem, known.thresholds)
        return decision(
            suited(Schedule.parse(name), problem, known), "rule", f"{reason} ({lacks}; {REMEDY})"
        )
    return decision(otherwise, "fallback", f"{lacks} and thresholds; {REMEDY}")


def _tuned(
    problem: Problem, machine: Machine, mode: str, offers: tuple[str, ...]
) -> tuple[Schedule, str] | None:
    """The schedule that was measured best for a problem, and the reason, if it can still run.

    An eager call takes the one that was best where the GPU waits for its host.
    """
    asked = tuned_key(problem)
    for entry in machine.tuned:
        if tuned_key(entry) != asked:
            continue
        which = 0 if mode == "queued" else 1
        name = (entry.queued, entry.idle)[which]
        seconds, serial = entry.seconds[which], entry.serial[which]
        try:
            schedule = Schedule.parse(name)
            if schedule.mover not in (*offers, "collective"):
                raise ValueError(f"nothing here moves bytes by {schedule.mover!r}")
            if schedule.grouping == "tiled" and "tiled" not in offers:
                raise ValueError("no product whose tiles wait is here")
            if why := refusal(problem, schedule):
                raise ValueError(why)
        except ValueError as error:
            warn_once(
                f"machine {machine.name}: the tuned entry of {problem} is passed over: {error}; "
                "`ficco tune --shapes` measures it again"
            )
            continue
        gain = f"{serial / seconds:.2f} times as fast as serial"
        return schedule, f"measured on {machine.name}: {seconds_text(seconds)}, {gain}"
    return None


@lru_cache(maxsize=16)
def _compared(query: _Query) -> tuple[Prediction, ...]:
    """Predictions of the schedules that the model compares: all candidates or, where rows are not
    equal, those that would be the best if they were."""
    problem, machine, mode, offers, predict = query
    modes = MODES[mode]
    named = [
        one for one in candidates(problem, machine, offers) if predictable(one, problem, machine)
    ]
    sizes = [size for row in problem.blocks for size in row] or problem.rows
    alike = max(sizes) - min(sizes) <= max(sizes) // NEARLY_EQUAL
    most = FEWEST if alike else max(SIMULATION_BUDGET // problem.world**2, FEWEST)
    if not problem.equal and len(named) > most:
        named = shortlist(_compared(query._replace(problem=problem.evened)), modes, most)
    return predictions(problem, named, machine, modes, predict)


@lru_cache(maxsize=4096)
def _modelled(query: _Query) -> tuple[Schedule, str]:
    """What the model takes, and why."""
    scatters = query.problem.kind.scatters
    choice = choose(_compared(query), query.machine, query.mode, scatters)
    return choice.chosen.schedule, choice.reason


def described(machine: Machine, world: int) -> Machine | None:
    """The machine as a group of so many ranks sees it; None where its figures do not hold for it.

    Copies, links and products are those of a rank. The vendor's collectives take as long as those
    of the machine's own ranks that receive as many bytes. Ranks on CPUs share their cores, so that
    figures hold for their own number only.
    """
    if machine.ranks == world:
        return machine
    if machine.accelerator == "cpu" or machine.ranks < 2:
        return None
    name = f"{machine.name} (as {world} rank{'s' * (world > 1)})"
    changes: dict[str, Any] = {"ranks": world, "name": name}
    share = (machine.ranks - 1) / max(world - 1, 1)
    for block in COLLECTIVES.values() if world > 1 else ():
        if (exchange := getattr(machine, block)) is not None:
            curve = tuple((size * share, seconds) for size, seconds in exchange.curve)
            changes[block] = replace(exchange, curve=curve)
    return replace(machine, **changes)
