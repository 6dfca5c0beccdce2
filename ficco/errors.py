"""Exceptions that ficco raises, and warnings that appear once.

Built-in exceptions have their usual meaning. ``ValueError``: a wrong argument; the text states the
requirement, the value and the remedy, and an ``InvalidArgument`` also has the argument's name.
``NotImplementedError``: a valid request that is not supported here. All others are::

    FiccoError (RuntimeError)
      +-- RankMismatch    ranks disagree on problem, schedule, options or machine file
      +-- PeerFailed      another rank's call ended with an error, which the text quotes
      +-- SignalTimeout   a peer died, stalled or never called
      +-- BackendError    a call of the vendor's library failed
      +-- ConfigError     a file or an environment variable is wrong
      +-- NotOverlapped   a call would hide nothing, in a block of ficco.expect

If a rank is lost, all other ranks of its group wait for it. The rank whose limit passes first
raises ``SignalTimeout`` and tells the others. They raise ``PeerFailed``, unless their own limit
passes before they read the message. So the error that a survivor raises depends on the pace of the
machine. Both errors have all facts: the rank that waited, its peer, the step, the schedule, the
duration, and whether the peer's process has ended. ``PeerFailed.timeouts`` holds the
``SignalTimeout`` of each rank that gave up waiting::

    except (ficco.SignalTimeout, ficco.PeerFailed) as error:
        for timeout in error.timeouts.values():
            print(timeout.rank, timeout.peer, timeout.step, timeout.schedule, timeout.ended)
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


class InvalidArgument(ValueError):
    """A wrong argument, by name: the command line reports it for the option of that name.

    Attributes:
        argument: its name.
    """

    def __init__(self, argument: str, text: str) -> None:
        self.argument = argument
        super().__init__(argument, text)

    def __str__(self) -> str:
        return ": ".join(self.args)


#: The remedy for a group whose ranks are no longer in step.
REVIVE = (
    "To use the group again, call ficco.close(group) on every rank; if one of its processes has "
    "ended, make a new group"
)


class FiccoError(RuntimeError):
    """Base of the exceptions that only ficco raises. They can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by calling the class with self.args: subclasses take other arguments.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class RankMismatch(FiccoError):
    """Ranks of one group called ficco with different problems, schedules or options.

    Raised on every rank of the group.

    Attributes:
        values: the call of each rank, as text, by rank.
    """

    def __init__(self, values: Mapping[int, str]) -> None:
        self.values = dict(values)
        by_value: dict[str, list[int]] = {}
        for rank, value in sorted(self.values.items()):
            by_value.setdefault(value, []).append(rank)
        lines = [
            f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {value}"
            for value, ranks in by_value.items()
        ]
        super().__init__(
            "the ranks of this group disagree on what to compute:\n"
            + "\n".join(lines)
            + "\ncall ficco with the same sizes, schedule, options and machine file on every rank, "
            f"in the same order{_unequal(by_value)}. {REVIVE}"
        )


def _unequal(calls: Iterable[str]) -> str:
    """Return the advice for ranks with unequal parts, given the texts of their calls."""
    names = " ".join(call.partition("(")[0] for call in calls)
    if "attention" in names:
        return "; attention takes equal parts of a sequence: pad the sequence"
    if "fsdp_" in names:
        return "; ranks of FSDP2 run the same modules, with gradients of the same weights"
    exchanges = "all_gather", "all_to_all", "reduce_scatter"
    return "; unequal shards need rows=" if any(name in names for name in exchanges) else ""


#: Schedule names for errors during rendezvous, and for operations without a schedule.
MEETING, UNSCHEDULED = "none yet", "none"


class SignalTimeout(FiccoError):
    """A wait for a peer did not end within the configured time.

    Attributes:
        operator, schedule: names of the call that waited. The schedule is ``"none yet"`` during
            rendezvous, before one is chosen, and ``"none"`` for operations without a schedule.
        rank: the rank that waited.
        peer: the rank whose signal is missing, or None if it is not known.
        step: the step of the plan that waited, or the action that the peer has not taken.
        seconds: duration of the wait.
        wanted, found: the expected value of the signal word, and its actual value; None if the
            word could not be read.
        ended: the peer's process has ended, so the wait ended before the time limit.
        host: the peer's host, if the group has several.
    """

    def __init__(
        self,
        *,
        operator: str,
        rank: int,
        seconds: float,
        peer: int | None = None,
        step: str = "unknown",
        schedule: str = "unknown",
        wanted: int | None = None,
        found: int | None = None,
        ended: bool = False,
        host: str = "",
    ) -> None:
        self.host = host
        self.operator, self.schedule = operator, schedule
        self.rank, self.peer, self.step = rank, peer, step
        self.seconds, self.wanted, self.found, self.ended = seconds, wanted, found, ended
        super().__init__(f"{self.story}. {REVIVE}.")

    @property
    def _who(self) -> str:
        who = "a peer" if self.peer is None else f"rank {self.peer}"
        return f"{who} on host {self.host}" if self.host else who

    @property
    def wait(self) -> str:
        """The rank that waited, its peer, the step, the schedule and the duration, in words."""
        at = f"at step {self.step!r} of schedule {self.schedule!r}"
        if self.schedule in (MEETING, UNSCHEDULED):
            at = f"to {self.step}" if self.schedule == MEETING else f"at step {self.step!r}"
        word = ""
        if self.wanted is not None:
            word = f"; signal word: wanted {self.wanted}, found {self.found}"
        return (
            f"{self.operator}: rank {self.rank} waited {self.seconds:.1f} s for {self._who} "
            f"{at}{word}"
        )

    @property
    def story(self) -> str:
        """:attr:`wait`, and whether the peer's process has ended, in words."""
        if self.ended:
            return f"{self.wait}. The process of {self._who} has ended; see its output"
        return (
            f"{self.wait}. {self._who} died, is stuck or did not make this call. If it is only "
            "slow, raise ficco.options(timeout_s=...)"
        )

    @property
    def timeouts(self) -> dict[int, SignalTimeout]:
        """This error by its rank, as :attr:`PeerFailed.timeouts`."""
        return {self.rank: self}

    @property
    def facts(self) -> dict[str, Any]:
        """The constructor arguments for an equal error on another rank."""
        names = "operator", "rank", "seconds", "peer", "step", "schedule", "wanted", "found"
        return {name: getattr(self, name) for name in (*names, "ended", "host")}


class PeerFailed(FiccoError):
    """A call of another rank ended with an error, so this rank's call cannot be finished.

    Attributes:
        reasons: class and first line of the error, by rank.
        timeouts: the ``SignalTimeout`` of each rank that gave up waiting for a peer, by rank. The
            facts of the wait are its attributes.
    """

    def __init__(
        self, reasons: Mapping[int, str], timeouts: Mapping[int, SignalTimeout] | None = None
    ) -> None:
        self.timeouts = dict(sorted((timeouts or {}).items()))
        self.reasons = dict(sorted(reasons.items()))
        failed = "; ".join(
            f"rank {rank} failed: {why.rstrip('.')}" for rank, why in self.reasons.items()
        )
        ranks = " and ".join(f"rank {rank}" for rank in self.reasons)
        super().__init__(
            f"a call of this group cannot be finished, since {failed}. See the output of {ranks} "
            f"for the whole error and fix that. {REVIVE}."
        )


class BackendError(FiccoError):
    """A call of the vendor's library failed.

    Attributes:
        call: name of the function.
        code: the vendor's name of its return code.
        text: the vendor's explanation, with the remedy if one is known.
    """

    def __init__(self, call: str, code: str, text: str) -> None:
        self.call, self.code, self.text = call, code, text
        super().__init__(f"{call} failed with {code}: {text}")


class ConfigError(FiccoError):
    """A configuration file or an environment variable has an invalid value.

    Attributes:
        source: the file or the variable.
        key: the invalid part of it.
        expected: the requirement.
    """

    def __init__(self, source: str, key: str, expected: str) -> None:
        self.source, self.key, self.expected = source, key, expected
        super().__init__(f"{source}: {key}: {expected}")


class NotOverlapped(FiccoError):
    """A call within :func:`ficco.expect` would hide nothing.

    Raised on every rank, before the call communicates; the group stays usable.

    Attributes:
        call: operator and sizes, or the collective and its group.
        schedule: the schedule of the call; ``"collective"`` for a collective of PyTorch's.
        reason: source and reason of the decision, as :func:`ficco.explain` prints them, or the
            reason why the collective stays.
    """

    def __init__(self, call: str, schedule: str, reason: str, remedy: str) -> None:
        self.call, self.schedule, self.reason = call, schedule, reason
        super().__init__(
            f"{call}: required an overlapped schedule within ficco.expect(overlapped=True), got "
            f"{schedule} ({reason}); {remedy}, or make the call within "
            "ficco.expect(overlapped=False)"
        )


def reason_of(error: BaseException) -> str:
    """Return class and text of an error, for the peers."""
    text = error.story if isinstance(error, SignalTimeout) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def carry_out(steps: Iterable[Callable[[], object]]) -> None:
    """Run all steps even if some fail, then raise the first error."""
    errors: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


# Warnings, at the line of the caller's code.

_PACKAGE = f"{Path(__file__).resolve().parent}{os.sep}"
_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warn, unless this process has already issued the same warning."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=_outside())


def _outside() -> int:
    """Return the ``stacklevel`` of the first frame outside of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
