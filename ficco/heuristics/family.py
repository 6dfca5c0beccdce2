"""Problems for which ``auto`` simulates a few schedules and takes the fastest.

Attention and layers of experts are such families: what differs between them is data. The products
of :mod:`ficco.problem` have more candidates, and are decided by :mod:`.decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from ficco.amounts import seconds_text
from ficco.errors import InvalidArgument
from ficco.heuristics.arrivals import Received, last_arrival, received
from ficco.heuristics.decide import REMEDY, Decision, described
from ficco.heuristics.model import lacking
from ficco.heuristics.table import Candidate
from ficco.machine import Machine
from ficco.plan import Plan, Planned
from ficco.schedules import Schedule
from ficco.simulate import simulate

SERIAL = "serial"

#: Kinds of bars that are what a rank computes, apart from copies and sums of parts.
COMPUTED = ("matmul", "attend", "apply")


@dataclass(frozen=True)
class Family:
    """Problems that are planned and compared alike.

    Attributes:
        make: the Plans of a problem under a schedule, of some ranks or, for None, of all.
        compared: names of the schedules that are simulated, ``serial`` among them.
        default: what is taken where the machine's figures do not allow that.
        margin: predicted gain over ``serial`` below which that is taken.
        tie: share by which predictions differ that are equal; of equal ones the first is taken.
        alike: of a problem, the one that is simulated for it and for others; None: itself.
        rings: ``make`` takes a cap on staging, too, in bytes.
    """

    make: Callable[..., Sequence[Plan]]
    compared: tuple[str, ...]
    default: str
    margin: float = 0.0
    tie: float = 0.0
    alike: Callable[[Any], Any] | None = None
    rings: bool = False

    def plans(
        self,
        problem: Any,
        schedule: Schedule,
        packs_columns: bool = False,
        staging_bytes: int | None = None,
    ) -> Sequence[Plan]:
        """The Plans of all ranks, with at most so many bytes of staging. No copy of theirs leaves
        gaps that would have to be packed.

        Raises:
            ValueError: the schedule cannot serve the problem, or not with such a cap.
        """
        if staging_bytes is None:
            return self.make(problem, schedule, None)
        if not self.rings:
            raise InvalidArgument(
                "workspace_bytes",
                f"required none for {problem.operator}, whose steps do not take turns on staging, "
                f"got {staging_bytes}",
            )
        return self.make(problem, schedule, None, staging_bytes)

    def decide(
        self,
        problem: Planned,
        wanted: str | Schedule = "auto",
        *,
        machine: Machine | None = None,
        mode: str = "eager",
        search: bool = False,
    ) -> Decision:
        """The schedule that was asked for; for ``"auto"`` the fastest on the machine as simulated,
        with the host ahead unless the mode is ``"idle"``.

        Raises:
            ValueError: this is no schedule, or ``search`` is asked for.
        """
        if search:
            raise ValueError(f"search: required False for {problem.operator}, got True; leave it")
        if not isinstance(wanted, (str, Schedule)):
            raise ValueError(f"schedule: required 'auto', a name or a Schedule, got {wanted!r}")
        mode = "idle" if mode == "idle" else "queued"

        def decision(schedule: str | Schedule, source: str, reason: str) -> Decision:
            if isinstance(schedule, str):
                schedule = Schedule.parse(schedule)
            return FamilyDecision(schedule, source, reason, problem, machine, mode, family=self)

        if wanted != "auto":
            return decision(wanted, "caller", "given")
        if problem.world == 1:
            return decision(SERIAL, "rule", "one rank has nothing to wait for")
        known = described(machine, problem.world) if machine else None
        if known is None or (lacks := lacking(known, mode)):
            why = f"lacks {', '.join(lacks)}" if known else "is not described for these ranks"
            return decision(self.default, "fallback", f"the machine {why}; {REMEDY}")
        asked = self.alike(problem) if self.alike else problem
        seconds = {
            name: self.seconds(asked, Schedule.parse(name), known, mode) for name in self.compared
        }
        names = sorted(seconds, key=seconds.__getitem__)
        least, why = seconds[names[0]], ""
        chosen = next(name for name in seconds if seconds[name] <= (1 + self.tie) * least)
        if chosen != names[0]:
            why = f"; the first of those within {self.tie:.0%}"
        if seconds[SERIAL] < (1 + self.margin) * least:
            why = f"; serial unless others gain {self.margin:.0%}" * (names[0] != SERIAL)
            chosen = SERIAL
        times = ", ".join(f"{name} {seconds_text(seconds[name])}" for name in names)
        what = f"{asked} " if self.alike else ""
        return decision(chosen, "model", f"{what}simulated on {known.name}: {times}{why}")

    def schedules(self, problem: Planned, machine: Machine) -> list[Schedule]:
        """Those that are simulated unless others are named."""
        return list(map(Schedule.parse, self.compared))

    def seconds(
        self, problem: Any, schedule: Schedule, machine: Machine, mode: str = "queued"
    ) -> float:
        """What a call takes, simulated."""
        return _simulated(self, problem, str(schedule), machine, mode)

    def received(self, problem: Planned, rank: int) -> list[Received]:
        """Bytes that a rank gets, in stages."""
        return received(problem, rank)

    def bounds(self, problem: Planned, machine: Machine, mode: str) -> dict[str, float]:
        """Seconds of the parts of a call, with nothing else running, on the slowest rank: what is
        computed if all is there, and the last arrival if nothing is computed."""
        timeline = simulate(self.plans(problem, Schedule.parse(SERIAL)), machine, mode)
        spent = [
            sum(bar.stop_s - bar.start_s for bar in bars if bar.kind in COMPUTED)
            for bars in timeline.ranks
        ]
        ranks = range(problem.world)
        arrivals = [last_arrival(self.received(problem, rank), machine) for rank in ranks]
        return {"computed": max(spent), "copies": max(arrivals)}

    def ideal(self, problem: Planned, machine: Machine, mode: str = "queued") -> float:
        """Lower bound in seconds: what is computed, the first of the parts, or what travels by the
        fastest mover, if that takes longer."""
        computed, *moved = self.bounds(problem, machine, mode).values()
        return max(computed, min(moved, default=0.0))


@lru_cache(maxsize=2048)
def _simulated(family: Family, problem: Any, name: str, machine: Machine, mode: str) -> float:
    return simulate(family.plans(problem, Schedule.parse(name)), machine, mode).stop_s


@dataclass(frozen=True)
class FamilyDecision(Decision):
    """A decision for a problem of a family."""

    family: Family | None = field(default=None, repr=False, compare=False)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """As of any decision, without losses."""
        family, problem = self.family, self.problem
        assert family is not None and problem is not None
        known = described(self.machine, problem.world) if self.machine else None
        if known is None or lacking(known, "queued") or problem.world == 1:
            return ()
        bound = family.ideal(problem, known)
        names = dict.fromkeys((*family.compared, str(self.schedule)))
        idle = not lacking(known, "idle")
        found = []
        for schedule in map(Schedule.parse, names):
            queued = family.seconds(problem, schedule, known)
            found.append(
                Candidate(
                    schedule=str(schedule),
                    queued=queued,
                    idle=family.seconds(problem, schedule, known, "idle") if idle else None,
                    share=bound / queued,
                    losses=None,
                    extra_bytes=family.make(problem, schedule, [0])[0].extra_bytes,
                )
            )
        if self.mode == "idle" and idle:
            return tuple(sorted(found, key=lambda one: one.idle or 0.0))
        return tuple(sorted(found, key=lambda one: one.queued))
