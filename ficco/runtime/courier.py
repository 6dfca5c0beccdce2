"""Copies the board between hosts.

Within a host the board is shared memory. Between hosts a thread of each rank publishes the rank's
part of the board in the group's store whenever that part changes. It reads the parts of other hosts
continuously while a call waits for agreement, otherwise for a short time after each call. Numbers
that ranks tell with a call are published at once, and read while a call waits for them.

When a call times out, its watchdog calls the roll. A rank whose thread does not answer has ended or
is stopped.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.distributed import Store

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


class BoardCourier:
    """Thread that publishes this rank's part of the board and copies those of other hosts."""

    def __init__(
        self,
        store: Store,
        rank: int,
        mine: memoryview,
        theirs: Mapping[int, memoryview],
        ring: int,
        told: Mapping[int, np.ndarray[Any, Any]],
        world: int,
    ) -> None:
        """``mine``: this rank's part; its first ``ring`` bytes change with every call.
        ``theirs``: copies of the parts of other hosts. ``told``: their numbers, a row a call."""
        self._others = [other for other in range(world) if other != rank]
        self._store: Any = store  # `set` also takes bytes
        self._rank, self._mine, self._theirs = rank, mine, theirs
        self._ring, self._told = ring, told
        self._tells: deque[tuple[int, bytes]] = deque()
        self._asked: int | None = None  # row that a call waits for
        self._known: dict[str, bytes] = {}
        self._sent: dict[str, bytes] = {}
        self._pause = SOON_S
        self._there = False  # whether all ranks have published
        self._answered = 0
        self._waits_until = 0.0
        self._changed, self._stop = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="ficco courier", daemon=True)
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

    def tell(self, row: int, numbers: bytes) -> None:
        """Publish the numbers that this rank tells with a call."""
        self._tells.append((row, numbers))
        self._changed.set()

    def ask(self, row: int | None) -> None:
        """Keep reading the numbers that other ranks tell with a call, until the row is None."""
        self._asked = row

    def silent(self) -> list[int]:
        """Call the roll, and return the ranks that do not answer; empty if the store fails."""
        found: list[list[int]] = []

        def call() -> None:
            found.append(self._call_roll())

        thread = threading.Thread(target=call, name="ficco roll", daemon=True)
        thread.start()
        thread.join(ANSWER_S + 1.0)
        return found[0] if found else []

    def _call_roll(self) -> list[int]:
        if not self._there:
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
                if waits := time.monotonic() < self._waits_until:
                    self._read()
                if self._changed.wait(self._pause if waits else SOON_S):
                    self._changed.clear()
                elif not waits:
                    self._pause = SOON_S
        except RuntimeError:  # the store is gone; from here on only timeouts end waits
            return

    def _publish(self) -> None:
        for kind, of in (("texts", slice(self._ring, None)), ("calls", slice(self._ring))):
            data = bytes(self._mine[of])
            if data != self._sent.get(kind):
                self._store.set(f"{kind}/{self._rank}", zlib.compress(data, 1))
                self._sent[kind] = data
        while self._tells:
            row, numbers = self._tells.popleft()
            self._store.set(f"told/{self._rank}/{row}", numbers)

    def _answer(self, number: int) -> None:
        """Answer the roll call with this number."""
        self._answered = number
        self._store.set(HERE.format(self._rank), str(number))

    def _read(self) -> None:
        keys = [f"{kind}/{rank}" for rank in self._theirs for kind in ("texts", "calls")]
        self._there = self._there or self._store.check(keys + list(map(HERE.format, self._others)))
        if not self._there:
            return
        *parts, roll = self._store.multi_get([*keys, ROLL])
        if int(roll) != self._answered:
            self._answer(int(roll))
        for key, data in zip(keys, parts, strict=True):
            if data != self._known.get(key):
                self._known[key] = data
                kind, _, rank = key.partition("/")
                begin, end = (0, self._ring) if kind == "calls" else (self._ring, None)
                self._theirs[int(rank)][begin:end] = zlib.decompress(data)
        if (row := self._asked) is not None:
            keys = [f"told/{rank}/{row}" for rank in self._told]
            if self._store.check(keys):
                for rows, data in zip(
                    self._told.values(), self._store.multi_get(keys), strict=True
                ):
                    numbers = np.frombuffer(data, np.uint64)
                    rows[row, : len(numbers)] = numbers
