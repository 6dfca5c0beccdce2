"""Choosing by prediction: the fastest candidate that loses to serial in no mode.

A captured call, or one whose host runs ahead, is *queued*: the host's time does not count. One
whose GPU waits for its host is *idle*: it does. An eager call on a GPU may be either, and the
ranks of a group may differ in it, so that no rank can choose by what it sees. Such a call takes
what is predicted to lose to serial in neither mode, and of that what loses least against the best
of each mode, in the worse of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ficco.heuristics.candidates import is_serial
from ficco.machine import Machine
from ficco.plan.amounts import seconds_text
from ficco.problems.products import Problem
from ficco.schedules import Schedule

#: The modes that a call of a kind may be in.
MODES: dict[str, tuple[str, ...]] = {
    "eager": ("queued", "idle"),
    "queued": ("queued",),
    "idle": ("idle",),
}

#: Predictions that differ by less are equal, since no model is more exact; of equal ones the first
#: wins: see the order in :mod:`ficco.heuristics.candidates`.
TIE = 0.01

#: What one product whose tiles wait must gain beyond ``TIE`` over the products of the library,
#: since the simulator does not know which of its tiles are cut. Of 49 all-gathers of
#: configs/shapes.csv on h200-4, 33 gain as much; by the product's own lists
#: (ficco/compute/tiled/worklist.py) 31 of them are faster than the library's, and two of 128 rows a
#: rank 5 and 7 % slower, which TILED_ROWS leaves out. Simulated, with the rates of one H100.
TILED_MARGIN = 0.02

#: Smaller differences are 0.0 % when rounded to one decimal.
ROUNDING = 0.0005

#: The blocks of a machine that every prediction needs.
REQUIRED = ("topology", "copies", "all_gather", "gemm", "memory", "contention")

#: Seconds of a problem under a schedule on a machine in a mode.
Predict = Callable[[Problem, Schedule, Machine, str], float]


@dataclass(frozen=True)
class Prediction:
    """A schedule and its predicted seconds by mode."""

    schedule: Schedule
    seconds: dict[str, float]

    @property
    def serial(self) -> bool:
        """Whether communication and product follow each other."""
        return self.schedule.mover == "collective" or is_serial(self.schedule)


@dataclass(frozen=True)
class Choice:
    """The prediction that was chosen, its serial baseline, and why."""

    chosen: Prediction
    serial: Prediction
    reason: str


def lacking(machine: Machine, mode: str, hosts: int = 1) -> tuple[str, ...]:
    """Blocks of a machine that a prediction needs and that were never measured."""
    needed = [*REQUIRED, *(["host"] if "idle" in MODES[mode] else [])]
    needed += ["network"] if hosts > 1 else []
    return tuple(name for name in needed if getattr(machine, name) is None)


def predictions(
    problem: Problem,
    schedules: Iterable[Schedule],
    machine: Machine,
    modes: Sequence[str],
    predict: Predict,
) -> tuple[Prediction, ...]:
    """Every schedule's predicted seconds in some modes."""
    return tuple(
        Prediction(schedule, {mode: predict(problem, schedule, machine, mode) for mode in modes})
        for schedule in schedules
    )


def by_loss(predicted: Sequence[Prediction], modes: Sequence[str]) -> list[Prediction]:
    """Predictions in the order of what they lose against the best in their worse mode."""
    best = {m: min(one.seconds[m] for one in predicted) for m in modes}
    return sorted(predicted, key=lambda one: max(one.seconds[m] / best[m] for m in modes))


def shortlist(predicted: Sequence[Prediction], modes: Sequence[str], most: int) -> list[Schedule]:
    """The serial schedules and ``most`` others, in the order of ``predicted``: those that lose
    least and, so that they are not all of a kind, the best of another grouping."""
    ranked = [one.schedule for one in by_loss(predicted, modes) if not one.serial]
    short = ranked[: most - 1]
    kinds = {one.grouping for one in short}
    rest = ranked[most - 1 :]
    short += [one for one in rest if one.grouping not in kinds][:1] or rest[:1]
    return [one.schedule for one in predicted if one.serial or one.schedule in short]


def choose(
    predicted: Sequence[Prediction],
    machine: Machine,
    mode: str,
    scatters: bool = False,
    margin: float | None = None,
    tie: float = TIE,
) -> Choice:
    """The prediction to take; serial where the gain is under the margin.

    The baseline is one of serial's two forms, the one that loses less in its worse mode: the better
    form of each mode would be a schedule that does not exist. Of predictions within ``tie`` of the
    best the first in ``predicted`` is taken. ``scatters``: the product travels. With a ``margin``
    in place of the machine's, the fastest must gain it, and the first may gain less.
    """
    modes, own = MODES[mode], margin is not None
    margin = machine.margin if margin is None else margin
    best = {m: min(one.seconds[m] for one in predicted) for m in modes}
    others = [one for one in predicted if not one.serial]

    def loss(one: Prediction) -> tuple[float, float]:
        losses = [one.seconds[m] / best[m] - 1.0 for m in modes]
        return max(losses) + TILED_MARGIN * (one.schedule.grouping == "tiled"), sum(losses)

    def first(some: Sequence[Prediction]) -> Prediction:
        least = min(map(loss, some))[0]
        return next(one for one in some if loss(one)[0] <= least + tie)

    serial = min((one for one in predicted if one.serial), key=loss)

    def gains(one: Prediction) -> list[float]:
        return [serial.seconds[m] / one.seconds[m] - 1.0 for m in modes]

    least = 0.0 if own else -margin
    harmless = [one for one in others if min(gains(one)) >= least]
    winner = first(harmless) if harmless else serial
    on = f"on {machine.name}"
    if winner is serial:
        fastest = min(others, key=loss, default=serial)
        taken = seconds_text(serial.seconds[mode]) if own else _times(serial, modes)
        reason = (
            f"{fastest.schedule} is predicted to take {_times(fastest, modes)} {on}, serial {taken}"
        )
        return Choice(serial, serial, reason)
    judged = min(harmless, key=loss) if own else winner
    most = max(gains(judged))
    if most < margin:
        share = f"{100 * margin:g}%" if own else f"{margin:.1%}"
        outcome = f"gain {most:.1%} {on}, less than the margin of {share}"
        if most <= -ROUNDING:
            outcome = f"lose {-most:.1%} {on}"
        elif most < ROUNDING:
            outcome = f"gain nothing {on}"
        return Choice(serial, serial, f"{judged.schedule} is predicted to {outcome}")
    ratios = " and ".join(f"{1 + gain:.2f}" for gain in gains(winner))
    reason = f"predicted to take {_times(winner, modes)} {on}, {ratios} times as fast as serial"
    if own and winner is not judged:
        reason += f"; the first of those within {100 * tie:g}%"
    if winner.schedule.grouping == "tiled":
        library = first([one for one in others if one.schedule.grouping != "tiled"])
        gained = (library.seconds[mode] / winner.seconds[mode] for mode in modes)
        over = " and ".join(f"{ratio:.2f}" for ratio in gained)
        what = "announce what is done" if scatters else "wait for what arrives"
        reason = (
            f"one product whose tiles {what}, {reason} and {over} times as fast as products of the "
            f"library ({library.schedule})"
        )
    return Choice(winner, serial, reason)


def _times(one: Prediction, modes: Sequence[str]) -> str:
    return " and ".join(f"{seconds_text(one.seconds[mode])} {mode}" for mode in modes)
