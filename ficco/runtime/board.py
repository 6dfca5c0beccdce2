"""The board in shared memory on which ranks post their calls, to detect disagreement.

A call costs one store to host memory. Three kinds of calls wait for their peers' entries:
``ficco.empty``, calls whose problem is new to this rank, and calls whose slots were freed since.
All other calls are compared while they wait for their peers in any case, or by the watchdog.
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.distributed import ProcessGroup

from ficco.dma.host import HostMemory, dead, first_call
from ficco.dma.hosts import Hosts
from ficco.dma.patience import Patience
from ficco.errors import (
    MEETING,
    UNSCHEDULED,
    FiccoError,
    PeerFailed,
    RankMismatch,
    SignalTimeout,
    reason_of,
)
from ficco.problems.products import digest
from ficco.runtime.courier import BoardCourier

#: Calls that the board holds for each rank.
ENTRIES = 256
#: Texts that it holds for each rank, and the bytes of each, with its header.
TEXTS, TEXT_BYTES = 128, 2048
#: Numbers that a rank can tell with a call. What no call uses takes no memory.
TOLD = 1024

_DIGEST_BITS = 40
_DIGEST = (1 << _DIGEST_BITS) - 1
_NUMBERS = 1 << (64 - _DIGEST_BITS)

#: How a call fails: refused before it was posted; by an error of its own; by a timeout.
REFUSED, FAILED, LATE = "refused", "broken off", "timed out"
_REFUSED, _FAILED, _LATE = map(digest, (REFUSED, FAILED, LATE))

#: Characters of a step that peers learn of; the step can quote the error of a library.
LONGEST_STEP = 400

#: digest, checksum and length of a text
_HEADER = struct.Struct("=QII")

#: Polls of the board before a waiting rank sleeps between polls, and the longest sleep.
SPINS, SLEEP_S = 200, 0.002
#: Seconds that a rank waits after a mismatch for the entries of the other ranks, and for a text
#: that is still being written.
GRACE_S, TEXT_GRACE_S = 0.5, 0.05
#: Seconds that a rank still waits after another rank timed out. Its own wait may time out by then
#: and name the rank that both miss.
LATE_S = 0.7

# An entry is 64 bits: the lower 24 bits of the number of the call, then 40 bits of digest. It is
# written by one aligned 8-byte store and read by one aligned 8-byte load (numpy accesses an element
# of an aligned array as its C type), which are atomic on x86-64 and Arm: no reader sees a torn
# entry. No read depends on an entry: the data of a call wait for signals. So entries need no
# ordering relative to other accesses; they only have to become visible, which cache coherence
# guarantees. The one exception is the texts of error messages: they carry a checksum, and a text
# that has not arrived shows as unknown. What a call tells are numbers that are each written like an
# entry, in a ring of their own, and a reader waits until all have the number of the call.


def published(error: BaseException) -> tuple[str, str]:
    """The text that tells the peers of an error that ended a call, and how that call failed.

    The text of a ``SignalTimeout`` holds its facts: what peers raise has the same."""
    if isinstance(error, SignalTimeout):
        facts = error.facts | {"step": error.step[:LONGEST_STEP]}
        return json.dumps(facts, ensure_ascii=False), LATE
    return reason_of(error).splitlines()[0], FAILED


class Board:
    """One rank's view of the board of a group. The constructor is collective."""

    def __init__(
        self,
        group: ProcessGroup,
        timeout_s: float,
        operator: str = "ficco",
        hosts: Hosts | None = None,
    ) -> None:
        self.rank, self.world, self._ranks = group.rank(), group.size(), range(group.size())
        self._hosts = hosts = hosts or Hosts.one(group)
        texts = ENTRIES * 8
        shown = texts + TEXTS * TEXT_BYTES  # to other hosts, too
        size = shown + ENTRIES * TOLD * 8
        what = hosts.near, size, timeout_s, "the agreement board", operator
        memory = HostMemory(*what, begins=True)
        self._pids = hosts.spread(memory.pids, 0)
        # For each rank a ring of entries, and texts. Arrays and memoryviews keep their maps alive.
        parts = hosts.spread([memoryview(part)[:size] for part in memory.maps], None)
        for rank in hosts.far:
            parts[rank] = memoryview(bytearray(shown))
        self._rings = [np.frombuffer(part, np.uint64, ENTRIES) for part in parts]
        self._texts = [part[texts : texts + TEXTS * TEXT_BYTES] for part in parts]
        self._told = [
            np.frombuffer(part, np.uint64, offset=shown).reshape(ENTRIES, TOLD)
            if len(part) > shown
            else np.zeros((ENTRIES, TOLD), np.uint64)  # of another host
            for part in parts
        ]
        self._courier: BoardCourier | None = None
        if hosts.far:
            theirs = {rank: parts[rank][:shown] for rank in hosts.far}
            store, mine = hosts.store("board"), parts[self.rank][:shown]
            told = {rank: self._told[rank] for rank in hosts.far}
            ends = ENTRIES * 8, told, self.world
            self._courier = BoardCourier(store, self.rank, mine, theirs, *ends)
        memory.close()
        self._closed = False
        self._late: dict[int, float] = {}  # by call: when a rank's timeout was first seen
        self._writing = threading.Lock()  # the watchdog writes, too
        self._cells: dict[int, int] = {}  # by digest: where this rank wrote its text
        self._cell = 0  # where it writes the next new one

    def describe(self, text: str, same_as: str = "") -> int:
        """Publish a text that says what a call computes; returns the digest that stands for it.

        The latest 128 texts are kept; describing an older one writes it again. Texts with the same
        ``same_as`` share its digest, which stands for the latest of them.
        """
        key = digest(same_as or text) or 1  # an entry of 0 means none
        with self._writing:
            if key in self._cells and not same_as:
                return key
            cell = self._cells.get(key, self._cell)
            if key not in self._cells:
                self._cell = (self._cell + 1) % TEXTS
            self._cells = {other: at for other, at in self._cells.items() if at != cell}
            data = text.encode(errors="replace")  # file names can contain lone surrogates
            if len(data) > TEXT_BYTES - _HEADER.size:
                rest = f" ... (digest {key:010x})".encode()
                data = text.encode("ascii", "replace")[: TEXT_BYTES - _HEADER.size - len(rest)]
                data += rest
            record = _HEADER.pack(key, zlib.crc32(data), len(data)) + data
            at = cell * TEXT_BYTES
            self._texts[self.rank][at : at + len(record)] = record
            self._cells[key] = cell
        return key

    def begin(self, kind: str, timeout_s: float, operator: str) -> None:
        """Post, as call 0, the kind of engine that carries out this rank's calls; where ranks are
        on several hosts, wait until all ranks have.

        Raises:
            RankMismatch, PeerFailed, SignalTimeout: as :meth:`agree`.
        """
        self.post(0, self.describe(kind))
        if self._courier is not None:
            self._agree(0, timeout_s, operator, MEETING, first_call("make an engine"))

    def post(self, number: int, digest: int) -> None:
        """Post a call. Numbers of calls start at 1."""
        self._rings[self.rank][number % ENTRIES] = (number % _NUMBERS) << _DIGEST_BITS | digest
        if self._courier is not None and digest in (_REFUSED, _FAILED, _LATE):
            self._courier.changed()

    def tell(self, number: int, values: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Tell the other ranks up to ``TOLD`` numbers below 2**40 - 1 with a call."""
        # One more than each: 0 means none, also where the number of the call has wrapped to 0.
        one_more = np.array(values, np.uint64) + np.uint64(1)
        told = one_more | np.uint64((number % _NUMBERS) << _DIGEST_BITS)
        self._told[self.rank][number % ENTRIES, : len(values)] = told
        if self._courier is not None:
            self._courier.tell(number % ENTRIES, told.tobytes())

    def told(
        self, number: int, count: int, timeout_s: float, operator: str
    ) -> np.ndarray[Any, Any]:
        """What every rank tells with a call that all agree on and tell so many numbers with, int64
        [world, count].

        Raises:
            FiccoError: a rank has told something 256 calls later.
            RankMismatch, PeerFailed, SignalTimeout: as :meth:`agree`.
        """
        rings = [ring[number % ENTRIES, :count] for ring in self._told]

        def there(rank: int) -> bool:
            entries = rings[rank].copy()  # which may arrive meanwhile
            behind = number - (entries >> np.uint64(_DIGEST_BITS)).astype(np.int64)
            behind[entries == 0] = 1
            if (behind % _NUMBERS > _NUMBERS // 2).any():
                raise FiccoError(
                    f"what ranks told with call {number} is gone; use it within {ENTRIES} calls"
                )
            return not (behind % _NUMBERS).any()

        if self._courier is not None:
            self._courier.ask(number % ENTRIES)
        try:
            step = "learn the counts of other ranks"
            self._await(there, number, timeout_s, operator, UNSCHEDULED, step)
        finally:
            if self._courier is not None:
                self._courier.ask(None)
        return (np.stack(rings) & np.uint64(_DIGEST)).astype(np.int64) - 1

    def posted(self, number: int) -> bool:
        """Whether this rank has posted a call, or its refusal."""
        return self._closed or self._entry(self.rank, number) != 0

    def refused(self, number: int) -> bool:
        """Whether this rank has posted that it refused a call."""
        return self._entry(self.rank, number) == _REFUSED

    def silent(self) -> list[int]:
        """Of a group on several hosts, the ranks whose processes do not answer within two seconds;
        empty if that cannot be told."""
        return [] if self._courier is None else self._courier.silent()

    def ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended."""
        return bool(self._pids[rank]) and dead(self._pids[rank])

    def await_same(self, number: int) -> None:
        """Wait briefly until all ranks have the same entry for a call, such as a refusal."""
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            if len({self._entry(rank, number) for rank in self._ranks}) == 1:
                return
            time.sleep(SLEEP_S)

    def agree(
        self, number: int, timeout_s: float, operator: str, schedule: str, purpose: str = ""
    ) -> None:
        """Wait until all ranks have posted a call that this rank has posted.

        A rank that is at least 256 calls ahead counts as agreeing, since its entry is overwritten.
        The wait also ends on a mismatch of an earlier call, which this rank may have refused.

        Raises:
            RankMismatch: the ranks' entries differ.
            PeerFailed: a call of a peer failed.
            SignalTimeout: a rank did not post the call in time.
        """
        step = f"agree on what to compute {purpose}".rstrip()
        self._agree(number, timeout_s, operator, schedule, step)

    def _agree(
        self, number: int, timeout_s: float, operator: str, schedule: str, step: str
    ) -> None:
        self._await(
            lambda rank: self._passed(rank, number), number, timeout_s, operator, schedule, step
        )
        if self._courier is not None:
            self._courier.flush()
        if error := self._mismatch_of(number):
            raise error

    def _await(
        self,
        there: Callable[[int], bool],
        number: int,
        timeout_s: float,
        operator: str,
        schedule: str,
        step: str,
    ) -> None:
        """Wait until something of a call is there of every other rank."""
        if self._closed:
            return

        def waits(absent: list[int], ended: list[int], seconds: float) -> SignalTimeout:
            peer = (ended or absent)[0]
            return SignalTimeout(
                operator=operator,
                rank=self.rank,
                peer=peer,
                step=step,
                schedule=schedule,
                seconds=seconds,
                wanted=number,
                found=self._latest(peer, number),
                ended=bool(ended),
                host=self._hosts.named(peer),
            )

        patience = Patience()
        absent = [rank for rank in self._ranks if rank != self.rank]
        polls = 0
        if self._courier is not None:
            self._courier.waiting(agrees=True)
        while absent := [rank for rank in absent if not there(rank)]:
            polls += 1
            if polls <= SPINS:  # the checks below take longer than a poll
                continue
            time.sleep(min(SLEEP_S, 2e-5 * (polls - SPINS)))
            if polls % 16:
                continue
            if self._courier is not None:
                self._courier.waiting()
            if error := self.mismatch(number):
                raise error
            ended = [rank for rank in absent if self.ended(rank) and not there(rank)]
            if late := patience.ends(0 if ended else timeout_s, partial(waits, absent, ended)):
                raise late

    def mismatch(self, latest: int) -> RankMismatch | PeerFailed | None:
        """The first mismatch or failure among this rank's calls on the board up to a number; None
        if there is none. Thread-safe."""
        if self._courier is not None:
            self._courier.waiting()
        for number in self._differing(latest):
            if error := self._mismatch_of(number):
                return error
        return None

    def close(self) -> None:
        """Leave the board; peers still see this rank's entries. Who still reads finds nothing."""
        self._closed = True
        if self._courier is not None:
            self._courier.stop()
        self._rings = [np.zeros(ENTRIES, np.uint64)] * self.world
        self._told = [np.zeros((ENTRIES, TOLD), np.uint64)] * self.world
        self._texts = [memoryview(bytearray(TEXTS * TEXT_BYTES))] * self.world

    # What is on it.

    def _entry(self, rank: int, number: int) -> int:
        """A rank's digest for a call; 0 if it is not posted yet or overwritten."""
        entry = self._rings[rank].item(number % ENTRIES)
        return entry & _DIGEST if entry >> _DIGEST_BITS == number % _NUMBERS else 0

    def _passed(self, rank: int, number: int) -> bool:
        """Whether a rank has posted a call, including one that has been overwritten since."""
        entry = self._rings[rank].item(number % ENTRIES)
        return not self._behind(entry, number)

    @staticmethod
    def _behind(entry: int, number: int) -> bool:
        """Whether an entry is none, or of a call before that of a number."""
        return not entry or ((entry >> _DIGEST_BITS) - number) % _NUMBERS >= _NUMBERS // 2

    def _latest(self, rank: int, number: int) -> int:
        """The number of a rank's latest call, near ``number``; 0 if there is none."""
        half = _NUMBERS // 2
        distances = [
            (number - (int(entry) >> _DIGEST_BITS) + half) % _NUMBERS - half
            for entry in self._rings[rank]
            if entry
        ]
        return number - min(distances) if distances else 0

    def _differing(self, latest: int) -> Iterator[int]:
        """Numbers, up to ``latest``, of this rank's calls on the board for which another rank has
        posted a different digest."""
        ring = self._rings[self.rank].copy()
        for rank in self._ranks:
            if rank == self.rank:
                continue
            # The XOR has only digest bits set if the numbers are equal and the digests differ.
            other = self._rings[rank]
            differs = (ring ^ other) - np.uint64(1) < np.uint64(_DIGEST)
            if not differs.any():  # the common case, and waiting ranks poll
                continue
            for index in np.flatnonzero(differs & (other != 0) & (ring != 0)):
                number = latest - (latest - (int(ring[index]) >> _DIGEST_BITS)) % _NUMBERS
                if number > latest - ENTRIES:
                    yield number

    def _mismatch_of(self, number: int) -> RankMismatch | PeerFailed | None:
        """The mismatch of one call among the entries posted so far, or the ranks on which it
        failed; None if there is neither."""

        def entries() -> dict[int, int]:
            values = {rank: self._entry(rank, number) for rank in self._ranks}
            return {rank: value for rank, value in values.items() if value}

        posted = entries()
        if len(set(posted.values())) < 2:
            return None
        failed = {rank: value for rank, value in posted.items() if value in (_FAILED, _LATE)}
        if failed:
            now = time.monotonic()
            if _FAILED in failed.values() or now - self._late.setdefault(number, now) >= LATE_S:
                return self._failed(failed)
            return None
        deadline = time.monotonic() + GRACE_S
        while len(posted := entries()) < len(self._ranks) and time.monotonic() < deadline:
            time.sleep(SLEEP_S)
        return RankMismatch({rank: self._text(rank, value) for rank, value in posted.items()})

    def _failed(self, entries: dict[int, int]) -> PeerFailed:
        """The error of a call that failed on other ranks; ``entries`` are theirs."""
        reasons, timeouts = {}, {}
        for rank, entry in entries.items():
            reasons[rank] = self._text(rank, entry)
            if entry == _LATE:
                with contextlib.suppress(ValueError):  # a text that has not arrived
                    timeouts[rank] = SignalTimeout(**json.loads(reasons[rank]))
                    reasons[rank] = reason_of(timeouts[rank])
            if host := self._hosts.named(rank):
                reasons[rank] += f" (host {host})"
        return PeerFailed(reasons, timeouts)

    def _text(self, rank: int, digest: int) -> str:
        texts = self._texts[rank]
        deadline = time.monotonic() + TEXT_GRACE_S
        while True:
            for at in range(0, TEXTS * TEXT_BYTES, TEXT_BYTES):
                key, checksum, length = _HEADER.unpack_from(texts, at)
                if key == digest and length <= TEXT_BYTES - _HEADER.size:
                    start = at + _HEADER.size
                    data = bytes(texts[start : start + length])
                    if zlib.crc32(data) == checksum:
                        return data.decode()
            if time.monotonic() > deadline:
                return f"unknown (digest {digest:010x})"
            time.sleep(SLEEP_S)
