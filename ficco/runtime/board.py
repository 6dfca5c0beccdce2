"""The board in shared memory on which ranks post their calls, to detect disagreement.

Posting a call costs one store to host memory. Three kinds of calls wait for the entries of their
peers: ``ficco.empty``, calls whose problem is new to this rank, and calls whose slots were freed.
Other calls are compared while they wait for their peers' signals, or by the watchdog.

Between hosts a thread of each rank publishes the rank's part of the board in the group's store
whenever that part changes. It reads the parts of other hosts continuously while a call waits for
agreement, otherwise for a short time after each call. Counts that ranks publish with a call are
published at once, and read while a call waits for them. When a call times out, its watchdog calls
the roll. A rank whose thread does not answer has ended or is stopped.
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.distributed import ProcessGroup, Store

from ficco.dma.host import HostMemory, Hosts, dead, first_call
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

#: Seconds between two polls: while a call waits for agreement, and otherwise.
AT_ONCE_S, SOON_S = 0.002, 0.05
#: Seconds for which the thread reads the parts of other hosts after a call asked for them.
WAITING_S = 0.2
#: Seconds that ranks get to answer a roll call.
ANSWER_S = 2.0

#: Keys of the store: the number of roll calls, and the latest one that a rank has answered.
ROLL, HERE = "roll", "here/{}"
#: Answer of a rank that has closed the group.
LEFT = 1 << 62


class BoardRelay:
    """Thread that publishes this rank's part of the board and copies those of other hosts."""

    def __init__(
        self,
        store: Store,
        rank: int,
        mine: memoryview,
        far_parts: Mapping[int, memoryview],
        ring: int,
        counts: Mapping[int, np.ndarray[Any, Any]],
        world: int,
    ) -> None:
        """``mine``: this rank's part; its first ``ring`` bytes change with every call.
        ``far_parts``: copies of the parts of other hosts. ``counts``: their counts by call."""
        self._others = [other for other in range(world) if other != rank]
        self._store: Any = store  # `set` also takes bytes
        self._rank, self._mine, self._far_parts = rank, mine, far_parts
        self._ring, self._counts = ring, counts
        self._unpublished: deque[tuple[int, bytes]] = deque()
        self._awaited_row: int | None = None  # row that a call waits for
        self._known: dict[str, bytes] = {}
        self._sent: dict[str, bytes] = {}
        self._pause = SOON_S
        self._complete = False  # whether all ranks have published
        self._answered = 0
        self._waits_until = 0.0
        self._changed, self._stop = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="ficco board relay", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Publish this rank's part soon, because a peer may wait for it."""
        self._changed.set()

    def waiting(self, agrees: bool = False) -> None:
        """Read the parts of other hosts for a while. ``agrees``: a call waits for agreement."""
        self._waits_until = time.monotonic() + WAITING_S
        if agrees:
            self._pause = AT_ONCE_S
            self._changed.set()

    def flush(self) -> None:
        """Wait until what this rank has posted is published. The caller may then wait for a peer in
        the store: in releases whose stores cannot be cloned, such a wait holds up the thread."""
        ring = self._mine[: self._ring]
        while self._thread.is_alive() and self._sent.get("calls") != bytes(ring):
            self._changed.set()
            time.sleep(AT_ONCE_S / 10)

    def publish_counts(self, row: int, numbers: bytes) -> None:
        """Publish this rank's counts of a call."""
        self._unpublished.append((row, numbers))
        self._changed.set()

    def await_counts(self, row: int | None) -> None:
        """Keep reading the counts of other ranks in a row of the ring, until ``row`` is None."""
        self._awaited_row = row

    def silent(self) -> list[int]:
        """Call the roll, and return the ranks that do not answer; empty if the store fails."""
        silent: list[list[int]] = []

        def call() -> None:
            silent.append(self._call_roll())

        thread = threading.Thread(target=call, name="ficco roll", daemon=True)
        thread.start()
        thread.join(ANSWER_S + 1.0)
        return silent[0] if silent else []

    def _call_roll(self) -> list[int]:
        if not self._complete:
            return []
        try:
            number, end = self._store.add(ROLL, 1), time.monotonic() + ANSWER_S
            keys = [HERE.format(rank) for rank in self._others]
            while True:
                self.waiting()  # and answer roll calls of other ranks
                answers = zip(self._others, map(int, self._store.multi_get(keys)), strict=True)
                silent = [rank for rank, answer in answers if answer < number]
                if not silent or time.monotonic() > end:
                    return silent
                time.sleep(AT_ONCE_S)
        except RuntimeError:  # the store is gone
            return []

    def stop(self) -> None:
        """Publish this rank's part, then end the thread."""
        self._stop = True
        self._changed.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self._answer(self._store.add(ROLL, 0))
            while True:
                stop = self._stop
                self._publish()
                if stop:
                    return self._answer(LEFT)
                if reading := time.monotonic() < self._waits_until:
                    self._read()
                if self._changed.wait(self._pause if reading else SOON_S):
                    self._changed.clear()
                elif not reading:
                    self._pause = SOON_S
        except RuntimeError:  # the store is gone; from here on only timeouts end waits
            return

    def _publish(self) -> None:
        for kind, of in (("texts", slice(self._ring, None)), ("calls", slice(self._ring))):
            data = bytes(self._mine[of])
            if data != self._sent.get(kind):
                self._store.set(f"{kind}/{self._rank}", zlib.compress(data, 1))
                self._sent[kind] = data
        while self._unpublished:
            row, numbers = self._unpublished.popleft()
            self._store.set(f"counts/{self._rank}/{row}", numbers)

    def _answer(self, number: int) -> None:
        """Answer the roll call with this number."""
        self._answered = number
        self._store.set(HERE.format(self._rank), str(number))

    def _read(self) -> None:
        keys = [f"{kind}/{rank}" for rank in self._far_parts for kind in ("texts", "calls")]
        self._complete = self._complete or self._store.check(
            keys + list(map(HERE.format, self._others))
        )
        if not self._complete:
            return
        *parts, roll = self._store.multi_get([*keys, ROLL])
        if int(roll) != self._answered:
            self._answer(int(roll))
        for key, data in zip(keys, parts, strict=True):
            if data != self._known.get(key):
                self._known[key] = data
                kind, _, rank = key.partition("/")
                begin, end = (0, self._ring) if kind == "calls" else (self._ring, None)
                self._far_parts[int(rank)][begin:end] = zlib.decompress(data)
        if (row := self._awaited_row) is not None:
            keys = [f"counts/{rank}/{row}" for rank in self._counts]
            if self._store.check(keys):
                for rows, data in zip(
                    self._counts.values(), self._store.multi_get(keys), strict=True
                ):
                    numbers = np.frombuffer(data, np.uint64)
                    rows[row, : len(numbers)] = numbers


#: Calls that the board holds for each rank.
ENTRIES = 256
#: Texts that it holds for each rank, and the bytes of each, with its header.
TEXTS, TEXT_BYTES = 128, 2048
#: Counts that a rank can publish with a call. Unused pages take no memory.
COUNTS = 1024

_DIGEST_BITS = 40
_DIGEST = (1 << _DIGEST_BITS) - 1
_NUMBERS = 1 << (64 - _DIGEST_BITS)
_ONE, _DIGEST_MASK = np.uint64(1), np.uint64(_DIGEST)  # a conversion takes longer than a sum

#: How a call fails: refused before it was posted; by an error of its own; by a timeout.
REFUSED, FAILED, LATE = "refused", "broken off", "timed out"
_REFUSED, _FAILED, _LATE = map(digest, (REFUSED, FAILED, LATE))

#: Characters of a step's name that are published; the name can quote the error of a library.
LONGEST_STEP = 400

#: digest, checksum and length of a text
_HEADER = struct.Struct("=QII")

#: Polls before a waiting rank sleeps between polls, and the longest sleep.
SPINS, SLEEP_S = 200, 0.002
#: Seconds that a rank waits after a mismatch for further entries, and for a text that a peer is
#: still writing.
GRACE_S, TEXT_GRACE_S = 0.5, 0.05
#: Seconds that a rank keeps waiting after another rank timed out. By then its own wait may time out
#: and name the missing rank.
LATE_S = 0.7

# An entry is 64 bits: the lower 24 bits of the number of the call, then 40 bits of digest. It is
# written by one aligned 8-byte store and read by one aligned 8-byte load (numpy accesses an element
# of an aligned array as its C type), which are atomic on x86-64 and Arm: no reader sees a torn
# entry. No read depends on an entry: the data of a call wait for signals. So entries need no
# ordering relative to other accesses; they only have to become visible, which cache coherence
# guarantees. The texts of error messages are an exception: they carry a checksum, and a text that
# has not arrived shows as unknown. Counts have a ring of their own. Each count
# is written like an entry, and a reader waits until all counts carry the number of the call.


def published(error: BaseException) -> tuple[str, str]:
    """Text and kind of an error that ended a call, as published to the peers.

    The text of a ``SignalTimeout`` holds its facts, so that peers raise the same facts."""
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
        shown = texts + TEXTS * TEXT_BYTES  # copied to other hosts
        size = shown + ENTRIES * COUNTS * 8
        mapping = hosts.near, size, timeout_s, "the agreement board", operator
        memory = HostMemory(*mapping, begins=True)
        self._pids = hosts.spread(memory.pids, 0)
        # Each rank has a ring of entries, and texts. Arrays and memoryviews keep their maps alive.
        parts = hosts.spread([memoryview(part)[:size] for part in memory.maps], None)
        for rank in hosts.far:
            parts[rank] = memoryview(bytearray(shown))
        self._rings = [np.frombuffer(part, np.uint64, ENTRIES) for part in parts]
        self._mine = self._rings[self.rank].data  # writing a memoryview is faster
        self._texts = [part[texts : texts + TEXTS * TEXT_BYTES] for part in parts]
        self._counts = [
            np.frombuffer(part, np.uint64, offset=shown).reshape(ENTRIES, COUNTS)
            if len(part) > shown
            else np.zeros((ENTRIES, COUNTS), np.uint64)  # a rank of another host
            for part in parts
        ]
        self._relay: BoardRelay | None = None
        if hosts.far:
            far_parts = {rank: parts[rank][:shown] for rank in hosts.far}
            store, mine = hosts.store("board"), parts[self.rank][:shown]
            counts = {rank: self._counts[rank] for rank in hosts.far}
            ends = ENTRIES * 8, counts, self.world
            self._relay = BoardRelay(store, self.rank, mine, far_parts, *ends)
        memory.close()
        self._closed = False
        self._late: dict[int, float] = {}  # by call: time at which a rank's timeout was first seen
        self._writing = threading.Lock()  # the watchdog writes, too
        self._cells: dict[int, int] = {}  # by digest: cell of this rank's text
        self._cell = 0  # cell of the next new text

    def describe(self, text: str, same_as: str = "") -> int:
        """Publish the description of a call, and return its digest.

        The board keeps the latest 128 texts of a rank; describing an older one writes it again.
        Texts with the same ``same_as`` share its digest, which stands for the latest of them.
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

    def begin(self, engine: str, timeout_s: float, operator: str) -> None:
        """Post this rank's kind of engine as call 0. Between hosts, wait until all ranks have
        posted their kinds.

        Raises:
            RankMismatch, PeerFailed, SignalTimeout: as :meth:`agree`.
        """
        self.post(0, self.describe(engine))
        if self._relay is not None:
            self._agree(0, timeout_s, operator, MEETING, first_call("make an engine"))

    def post(self, number: int, digest: int) -> None:
        """Post the digest of a call's description, or of the error that ended it. Calls count from
        1; 0 is the start of the engine. Errors are published to other hosts at once."""
        self._mine[number % ENTRIES] = (number % _NUMBERS) << _DIGEST_BITS | digest
        if self._relay is not None and digest in (_REFUSED, _FAILED, _LATE):
            self._relay.changed()

    def publish_counts(self, number: int, values: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Publish up to ``COUNTS`` counts, each below 2**40 - 1, with a call."""
        # One more than each: 0 means none, also where the number of the call has wrapped to 0.
        one_more = np.array(values, np.uint64) + np.uint64(1)
        numbers = one_more | np.uint64((number % _NUMBERS) << _DIGEST_BITS)
        self._counts[self.rank][number % ENTRIES, : len(values)] = numbers
        if self._relay is not None:
            self._relay.publish_counts(number % ENTRIES, numbers.tobytes())

    def gather_counts(
        self, number: int, count: int, timeout_s: float, operator: str
    ) -> np.ndarray[Any, Any]:
        """Wait for the ``count`` counts of every rank for a call; return int64 [world, count].

        Raises:
            FiccoError: a rank has overwritten its counts, 256 calls later.
            RankMismatch, PeerFailed, SignalTimeout: as :meth:`agree`.
        """
        rings = [ring[number % ENTRIES, :count] for ring in self._counts]

        def arrived(rank: int) -> bool:
            entries = rings[rank].copy()  # the rank may be writing
            behind = number - (entries >> np.uint64(_DIGEST_BITS)).astype(np.int64)
            behind[entries == 0] = 1
            if (behind % _NUMBERS > _NUMBERS // 2).any():
                raise FiccoError(
                    f"the counts of call {number} are overwritten; use them within {ENTRIES} calls"
                )
            return not (behind % _NUMBERS).any()

        if self._relay is not None:
            self._relay.await_counts(number % ENTRIES)
        try:
            step = "learn the counts of other ranks"
            self._await(arrived, number, timeout_s, operator, UNSCHEDULED, step)
        finally:
            if self._relay is not None:
                self._relay.await_counts(None)
        return (np.stack(rings) & np.uint64(_DIGEST)).astype(np.int64) - 1

    def posted(self, number: int) -> bool:
        """Whether this rank has posted a call or refused it."""
        return self._closed or self._entry(self.rank, number) != 0

    def refused(self, number: int) -> bool:
        """Whether this rank has posted that it refused a call."""
        return self._entry(self.rank, number) == _REFUSED

    def silent(self) -> list[int]:
        """Ranks whose processes do not answer within two seconds; empty within one host, where
        nobody asks."""
        return [] if self._relay is None else self._relay.silent()

    def ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended."""
        return bool(self._pids[rank]) and dead(self._pids[rank])

    def await_same(self, number: int) -> None:
        """Wait briefly for all ranks to post the same entry for a call, such as a refusal."""
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            if len({self._entry(rank, number) for rank in self._ranks}) == 1:
                return
            time.sleep(SLEEP_S)

    def agree(
        self, number: int, timeout_s: float, operator: str, schedule: str, purpose: str = ""
    ) -> None:
        """Wait until all ranks have posted a call that this rank has posted.

        A rank that is at least 256 calls ahead has overwritten its entry and counts as agreeing.
        A mismatch of an earlier call, which this rank may have refused, also ends the wait.

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
        if self._relay is not None:
            self._relay.flush()
        if error := self._mismatch_of(number):
            raise error

    def _await(
        self,
        arrived: Callable[[int], bool],
        number: int,
        timeout_s: float,
        operator: str,
        schedule: str,
        step: str,
    ) -> None:
        """Wait until ``arrived`` is true of every other rank."""
        if self._closed:
            return

        def timed_out(absent: list[int], ended: list[int], seconds: float) -> SignalTimeout:
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
        if self._relay is not None:
            self._relay.waiting(agrees=True)
        while absent := [rank for rank in absent if not arrived(rank)]:
            polls += 1
            if polls <= SPINS:  # the checks below take longer than a poll
                continue
            time.sleep(min(SLEEP_S, 2e-5 * (polls - SPINS)))
            if polls % 16:
                continue
            if self._relay is not None:
                self._relay.waiting()
            if error := self.mismatch(number):
                raise error
            ended = [rank for rank in absent if self.ended(rank) and not arrived(rank)]
            if late := patience.ends(0 if ended else timeout_s, partial(timed_out, absent, ended)):
                raise late

    def mismatch(self, latest: int) -> RankMismatch | PeerFailed | None:
        """First mismatch or failure among this rank's calls up to ``latest``; None if all agree.
        Thread-safe."""
        if self._relay is not None:
            self._relay.waiting()
        for number in self._differing(latest):
            if error := self._mismatch_of(number):
                return error
        return None

    def close(self) -> None:
        """Leave the board. Peers still see this rank's entries; this rank reads an empty board."""
        self._closed = True
        if self._relay is not None:
            self._relay.stop()
        self._rings = [np.zeros(ENTRIES, np.uint64)] * self.world
        self._mine = self._rings[self.rank].data
        self._counts = [np.zeros((ENTRIES, COUNTS), np.uint64)] * self.world
        self._texts = [memoryview(bytearray(TEXTS * TEXT_BYTES))] * self.world

    # Entries.

    def _entry(self, rank: int, number: int) -> int:
        """A rank's digest of a call; 0 if the call is not posted yet, or overwritten."""
        entry = self._rings[rank].item(number % ENTRIES)
        return entry & _DIGEST if entry >> _DIGEST_BITS == number % _NUMBERS else 0

    def _passed(self, rank: int, number: int) -> bool:
        """Whether a rank has posted a call, even if its entry has been overwritten."""
        entry = self._rings[rank].item(number % ENTRIES)
        return bool(entry) and ((entry >> _DIGEST_BITS) - number) % _NUMBERS < _NUMBERS // 2

    def _latest(self, rank: int, number: int) -> int:
        """Number of a rank's latest call, near ``number``; 0 if the rank has posted none."""
        half = _NUMBERS // 2
        distances = [
            (number - (int(entry) >> _DIGEST_BITS) + half) % _NUMBERS - half
            for entry in self._rings[rank]
            if entry
        ]
        return number - min(distances) if distances else 0

    def _differing(self, latest: int) -> Iterator[int]:
        """Numbers up to ``latest`` of calls for which this rank and another have posted different
        digests, in no order and perhaps repeated."""
        ring = self._rings[self.rank].copy()
        for rank in self._ranks:
            if rank == self.rank:
                continue
            # The XOR has only digest bits set if the numbers are equal and the digests differ.
            # Equal entries give 0, which wraps to the maximum.
            other = self._rings[rank]
            differs = (ring ^ other) - _ONE < _DIGEST_MASK
            if not np.count_nonzero(differs):  # the common case, and waiting ranks poll
                continue
            for index in np.flatnonzero(differs & (other != 0) & (ring != 0)):
                number = latest - (latest - (int(ring[index]) >> _DIGEST_BITS)) % _NUMBERS
                if number > latest - ENTRIES:
                    yield number

    def _mismatch_of(self, number: int) -> RankMismatch | PeerFailed | None:
        """Mismatch of one call among the entries posted so far, or its failure on other ranks. None
        if the entries agree, and for LATE_S if ranks only timed out."""

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
        """Error of a call that failed on other ranks, from their entries."""
        reasons, timeouts = {}, {}
        for rank, entry in entries.items():
            reasons[rank] = self._text(rank, entry)
            if entry == _LATE:
                with contextlib.suppress(ValueError):  # the text has not arrived
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
