"""Problems for which ``auto`` simulates a few schedules and takes the fastest.

Attention and layers of experts are such families: what differs between them is data. The products
of :mod:`ficco.problems.products` have more candidates, and are decided by :mod:`.decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from ficco.errors import InvalidArgument
from ficco.heuristics.arrivals import Received, crossed, last_arrival, received
from ficco.heuristics.decide import REMEDY, Decision, described
from ficco.heuristics.model import lacking
from ficco.heuristics.table import Candidate
from ficco.machine import Machine
from ficco.plan import Plan, Planned
from ficco.plan.amounts import seconds_text
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
        refusal: why a schedule cannot serve a problem; empty if it can.
    """

    make: Callable[..., Sequence[Plan]]
    compared: tuple[str, ...]
    default: str
    margin: float = 0.0
    tie: float = 0.0
    alike: Callable[[Any], Any] | None = None
    rings: bool = False
    refusal: Callable[[Any, Schedule], str] = lambda problem, schedule: ""

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
    ) -> Decision:
        """The schedule that was asked for; for ``"auto"`` the fastest on the machine as simulated,
        with the host ahead unless the mode is ``"idle"``.

        Raises:
            ValueError: this is no schedule.
        """
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
        known = described(machine, problem.world // problem.hosts) if machine else None
        if known is None or (lacks := lacking(known, mode, problem.hosts)):
            why = f"lacks {', '.join(lacks)}" if known else "is not described for these ranks"
            return decision(self.default, "fallback", f"the machine {why}; {REMEDY}")
        asked = self.alike(problem) if self.alike else problem
        seconds = {
            str(one): self.seconds(asked, one, known, mode)
            for one in self.schedules(problem, known)
        }
        names = sorted(seconds, key=seconds.__getitem__)
        least, ratio = seconds[names[0]], seconds[SERIAL] / seconds[names[0]]
        chosen = next(name for name in seconds if seconds[name] <= (1 + self.tie) * least)
        on = f"on {known.name}"

        def takes(name: str) -> str:
            return f"predicted to take {seconds_text(seconds[name])} {mode} {on}"

        if seconds[SERIAL] < (1 + self.margin) * least:
            chosen, others = SERIAL, [name for name in names if name != SERIAL]
            if names[0] != SERIAL:
                less = f"less than the margin of {_percent(self.margin)}"
                why = f"{names[0]} is predicted to gain {_percent(ratio - 1)} {on}, {less}"
            elif others:
                why = f"{others[0]} is {takes(others[0])}, serial {seconds_text(least)}"
            else:
                why = takes(SERIAL)
        else:
            ratio = seconds[SERIAL] / seconds[chosen]
            why = f"{takes(chosen)}, {ratio:.2f} times as fast as serial"
            if chosen != names[0]:
                why += f"; the first of those within {_percent(self.tie)}"
        if asked != problem:
            why += f" (simulated as {asked})"
        return decision(chosen, "model", why)

    def schedules(self, problem: Planned, machine: Machine) -> list[Schedule]:
        """Those that are simulated unless others are named."""
        named = map(Schedule.parse, self.compared)
        return [schedule for schedule in named if not self.refusal(problem, schedule)]

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
        plans = self.plans(problem, Schedule.parse(SERIAL))
        timeline = simulate(plans, machine, mode)
        spent = [
            sum(bar.stop_s - bar.start_s for bar in bars if bar.kind in COMPUTED)
            for bars in timeline.ranks
        ]
        arrivals = [
            max(last_arrival(self.received(problem, plan.rank), machine), crossed(plan, machine))
            for plan in plans
        ]
        return {"computed": max(spent), "copies": max(arrivals)}

    def ideal(self, problem: Planned, machine: Machine, mode: str = "queued") -> float:
        """Lower bound in seconds: what is computed, the first of the parts, or what travels by the
        fastest mover, if that takes longer."""
        computed, *moved = self.bounds(problem, machine, mode).values()
        return max(computed, min(moved, default=0.0))


def _percent(share: float) -> str:
    """With a decimal where there is one."""
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


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
        local, hosts = problem.world // problem.hosts, problem.hosts
        known = described(self.machine, local) if self.machine else None
        if known is None or lacking(known, "queued", hosts) or problem.world == 1:
            return ()
        bound = family.ideal(problem, known)
        idle = not lacking(known, "idle")
        found = []
        for schedule in dict.fromkeys((*family.schedules(problem, known), self.schedule)):
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
