"""Exceptions raised by ficco.

Built-in exceptions have their usual meaning: ``ValueError`` for a wrong argument (the text says
what is required, what was given and what to do; an ``InvalidArgument`` also has its name),
``NotImplementedError`` for a valid request that is not supported here. All others are::

    FiccoError (RuntimeError)
      +-- RankMismatch    ranks disagree on problem, schedule, options or machine file
      +-- PeerFailed      another rank's call ended with an error, which the text quotes
      +-- SignalTimeout   a peer died, stalled or never called
      +-- BackendError    a call of the vendor's library failed
      +-- ConfigError     a file or an environment variable is wrong
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any


class InvalidArgument(ValueError):
    """A wrong argument, by name: the command line says it of its option of that name.

    Attributes:
        argument: its name.
    """

    def __init__(self, argument: str, text: str) -> None:
        self.argument = argument
        super().__init__(argument, text)

    def __str__(self) -> str:
        return ": ".join(self.args)


#: What to do with a group whose ranks are no longer in step.
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
        values: what each rank asked for, by rank.
    """

    def __init__(self, values: Mapping[int, str]) -> None:
        self.values = dict(values)
        ranks: dict[str, list[int]] = {}
        for rank, value in sorted(self.values.items()):
            ranks.setdefault(value, []).append(rank)
        lines = [
            f"  rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {value}"
            for value, who in ranks.items()
        ]
        super().__init__(
            "the ranks of this group disagree on what to compute:\n"
            + "\n".join(lines)
            + "\ncall ficco with the same sizes, schedule, options and machine file on every rank, "
            f"in the same order; unequal shards need rows=. {REVIVE}"
        )


class PeerFailed(FiccoError):
    """A call of another rank ended with an error, so that this rank's cannot be finished.

    Attributes:
        reasons: class and first line of that error, by rank.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(sorted(reasons.items()))
        failed = "; ".join(
            f"rank {rank} failed: {why.rstrip('.')}" for rank, why in self.reasons.items()
        )
        ranks = " and ".join(f"rank {rank}" for rank in self.reasons)
        super().__init__(
            f"a call of this group cannot be finished, since {failed}. See the output of {ranks} "
            f"for the whole error and fix that. {REVIVE}."
        )


#: In place of a schedule: the ranks meet before there is one; they do what has none.
MEETING, UNSCHEDULED = "none yet", "none"


class SignalTimeout(FiccoError):
    """A wait for a peer did not end within the configured time.

    Attributes:
        operator, schedule: what was running; ``"none yet"`` while ranks meet before they run a
            schedule, ``"none"`` for what has none.
        rank: the rank that waited.
        peer: the rank whose signal is missing, or None if it is not known.
        step: the step of the plan that waited, or what the peer has not done.
        seconds: how long it waited.
        wanted, found: the value of the signal word that was waited for, and the one found; None
            if the word could not be read.
        ended: the peer's process is seen to have ended, so that this did not take the whole time
            limit.
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
        who = "a peer" if peer is None else f"rank {peer}"
        if host:
            who = f"{who} on host {host}"
        word = "" if wanted is None else f"; signal word: wanted {wanted}, found {found}"
        why = (
            f"The process of {who} has ended; see its output"
            if ended
            else f"{who} died, is stuck or did not make this call. If it is only slow, raise "
            "ficco.options(timeout_s=...)"
        )
        at = f"at step {step!r} of schedule {schedule!r}"
        if schedule in (MEETING, UNSCHEDULED):
            at = f"to {step}" if schedule == MEETING else f"at step {step!r}"
        super().__init__(
            f"{operator}: rank {rank} waited {seconds:.1f} s for {who} {at}{word}. {why}. {REVIVE}."
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
    """A configuration file or an environment variable holds something that cannot be used.

    Attributes:
        source: the file or the variable.
        key: the part of it that is wrong.
        expected: what was required there.
    """

    def __init__(self, source: str, key: str, expected: str) -> None:
        self.source, self.key, self.expected = source, key, expected
        super().__init__(f"{source}: {key}: {expected}")


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
