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

If a rank is lost, all other ranks of its group wait for it. The rank whose limit passes first
raises ``SignalTimeout`` and tells the others, which raise ``PeerFailed`` unless their own limit
passes before they read that. Which survivor raises which of both errors depends on the pace of the
machine. Both have all facts: who waited for whom, at which step, under which schedule, for how
long, and whether the process that was waited for has ended. ``PeerFailed.timeouts`` holds the
``SignalTimeout`` of each rank that gave up waiting::

    except (ficco.SignalTimeout, ficco.PeerFailed) as error:
        for timeout in error.timeouts.values():
            print(timeout.rank, timeout.peer, timeout.step, timeout.schedule, timeout.ended)
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
            f"in the same order{_unequal(ranks)}. {REVIVE}"
        )


def _unequal(calls: Iterable[str]) -> str:
    """What ranks do whose parts are not equal, by the calls that they asked for."""
    names = " ".join(call.partition("(")[0] for call in calls)
    if "attention" in names:
        return "; attention takes equal parts of a sequence: pad the sequence"
    exchanges = "all_gather", "all_to_all", "reduce_scatter"
    return "; unequal shards need rows=" if any(name in names for name in exchanges) else ""


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
        super().__init__(f"{self.story}. {REVIVE}.")

    @property
    def _who(self) -> str:
        who = "a peer" if self.peer is None else f"rank {self.peer}"
        return f"{who} on host {self.host}" if self.host else who

    @property
    def wait(self) -> str:
        """Who waited for whom, at which step, under which schedule and for how long, in words."""
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
        """:attr:`wait`, and whether the process that was waited for has ended, in words."""
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
        """The arguments that make an equal error on another rank."""
        names = "operator", "rank", "seconds", "peer", "step", "schedule", "wanted", "found"
        return {name: getattr(self, name) for name in (*names, "ended", "host")}


class PeerFailed(FiccoError):
    """A call of another rank ended with an error, so that this rank's cannot be finished.

    Attributes:
        reasons: class and first line of that error, by rank.
        timeouts: the ``SignalTimeout`` of each rank that gave up waiting for a peer, by rank; all
            facts of that wait are attributes of the error.
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
    """A configuration file or an environment variable holds something that cannot be used.

    Attributes:
        source: the file or the variable.
        key: the part of it that is wrong.
        expected: what was required there.
    """

    def __init__(self, source: str, key: str, expected: str) -> None:
        self.source, self.key, self.expected = source, key, expected
        super().__init__(f"{source}: {key}: {expected}")


def reason_of(error: BaseException) -> str:
    """Class and text of an error, as peers read it."""
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
