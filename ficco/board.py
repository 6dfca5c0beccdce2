"""The board on which the ranks of a group write what they compute, to find out if they disagree.

A call costs one store to host memory. Only a problem that a rank has not met before waits for the
entries of the others; all other calls are compared while they wait for their peers anyway, or by
the watchdog.
"""

from __future__ import annotations

import struct
import time
import zlib
from typing import TYPE_CHECKING

import numpy as np

from ficco.dma.host import HostMemory
from ficco.errors import RankMismatch, SignalTimeout
from ficco.problem import digest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Calls of a rank that the board remembers.
ENTRIES = 256
#: Texts of a rank that it remembers, and bytes of each with its header.
TEXTS, TEXT_BYTES = 128, 2048

_DIGEST_BITS = 40
_DIGEST = (1 << _DIGEST_BITS) - 1
_NUMBERS = 1 << (64 - _DIGEST_BITS)

#: digest, checksum and length of a text
_HEADER = struct.Struct("=QII")

#: Looks at the board before a waiting rank begins to sleep between them, and the longest sleep.
SPINS, SLEEP_S = 200, 0.002
#: Seconds that a rank that has found a difference waits for the entries of the rest, and for a
#: text that is still being written.
GRACE_S, TEXT_GRACE_S = 0.5, 0.05

# An entry is 64 bits: the lower 24 bits of the number of the call, then 40 bits of digest. It is
# written by one aligned 8-byte store and read by one aligned 8-byte load (numpy accesses an element
# of an aligned array as its C type), which x86-64 and Arm carry out as one: no reader sees half an
# entry. Nothing is ever read *because* an entry was seen, the data of a call wait for signals; so
# the order of entries among other accesses does not matter, only that they become visible, which
# cache coherence promises. The one exception are the texts of an error message: they carry a
# checksum, and a text that is not there yet shows as unknown.


class Board:
    """One rank's view of the board of a group. Making one is collective."""

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        self.rank, self.world = group.rank(), group.size()
        size = ENTRIES * 8 + TEXTS * TEXT_BYTES
        memory = HostMemory(group, size, timeout_s, "the agreement board")
        # Numpy arrays and memoryviews keep the maps behind them alive.
        self._rings = [np.frombuffer(part, np.uint64, ENTRIES) for part in memory.maps]
        self._texts = [
            memoryview(part)[ENTRIES * 8 : ENTRIES * 8 + TEXTS * TEXT_BYTES] for part in memory.maps
        ]
        memory.close()
        self._ring: np.ndarray | None = self._rings[self.rank]
        self._cells: dict[int, int] = {}  # digest -> where this rank wrote its text
        self._cell = 0

    def describe(self, text: str) -> int:
        """The digest of what a call computes; others can look up the text. Texts beyond the
        latest 128 are forgotten, and written again by the next call of this."""
        found = digest(text) or 1  # an entry of 0 is none
        if found not in self._cells and self._ring is not None:
            cell, self._cell = self._cell, (self._cell + 1) % TEXTS
            self._cells = {key: at for key, at in self._cells.items() if at != cell}
            data = text.encode()
            if len(data) > TEXT_BYTES - _HEADER.size:
                rest = f" ... (digest {found:010x})".encode()
                data = text.encode("ascii", "replace")[: TEXT_BYTES - _HEADER.size - len(rest)]
                data += rest
            record = _HEADER.pack(found, zlib.crc32(data), len(data)) + data
            at = cell * TEXT_BYTES
            self._texts[self.rank][at : at + len(record)] = record
            self._cells[found] = cell
        return found

    def post(self, number: int, digest: int) -> None:
        """Write down a call. Numbers count from 1."""
        if self._ring is not None:
            self._ring[number % ENTRIES] = (number % _NUMBERS) << _DIGEST_BITS | digest

    def agree(self, number: int, timeout_s: float, operator: str, schedule: str) -> None:
        """Wait until all ranks have written down a call, which this rank has.

        Raises:
            RankMismatch: they differ.
            SignalTimeout: a rank did not come.
        """
        begin = time.monotonic()
        absent = [rank for rank in range(self.world) if rank != self.rank]
        looks = 0
        while absent := [rank for rank in absent if not self._passed(rank, number)]:
            looks += 1
            if looks > SPINS:
                time.sleep(min(SLEEP_S, 2e-5 * (looks - SPINS)))
            if looks % 16 and looks < SPINS:
                continue
            if found := self._differs(number):
                raise found
            seconds = time.monotonic() - begin
            if seconds > timeout_s:
                raise SignalTimeout(
                    operator=operator,
                    rank=self.rank,
                    peer=absent[0],
                    step="agree on what to compute",
                    schedule=schedule,
                    seconds=seconds,
                    wanted=number,
                    found=self._latest(absent[0], number),
                )
        if found := self._differs(number):
            raise found

    def mismatch(self, latest: int) -> RankMismatch | None:
        """What the ranks disagree on, if they do, in this rank's remembered calls up to a number.

        Safe to call from another thread than that which posts.
        """
        ring = self._ring
        if ring is None:
            return None
        mine = ring.copy()
        for rank in range(self.world):
            if rank == self.rank:
                continue
            # Equal numbers and other digests leave something in the lower bits alone.
            other = self._rings[rank]
            differs = ((mine ^ other) - np.uint64(1) < np.uint64(_DIGEST)) & (other != 0)
            for index in np.flatnonzero(differs & (mine != 0)):
                number = latest - (latest - (int(mine[index]) >> _DIGEST_BITS)) % _NUMBERS
                if number > latest - ENTRIES and (found := self._differs(number)):
                    return found
        return None

    def close(self) -> None:
        """Leave the board. Peers still see what was written."""
        self._ring = None
        self._rings, self._texts = [], []

    def _entry(self, rank: int, number: int) -> int:
        """A rank's digest for a call, 0 if it is not there (any more)."""
        entry = self._rings[rank].item(number % ENTRIES)
        return entry & _DIGEST if entry >> _DIGEST_BITS == number % _NUMBERS else 0

    def _passed(self, rank: int, number: int) -> bool:
        """Whether a rank has made a call. One that is a whole ring ahead has, too."""
        entry = self._rings[rank].item(number % ENTRIES)
        ahead = ((entry >> _DIGEST_BITS) - number) % _NUMBERS
        return entry != 0 and ahead < _NUMBERS // 2

    def _latest(self, rank: int, number: int) -> int:
        """The number of a rank's latest call, as seen from a call nearby; 0 if there is none."""
        half = _NUMBERS // 2
        behind = [
            (number - (int(entry) >> _DIGEST_BITS) + half) % _NUMBERS - half
            for entry in self._rings[rank]
            if entry
        ]
        return number - min(behind) if behind else 0

    def _differs(self, number: int) -> RankMismatch | None:
        """The disagreement on one call, if there is one among the entries written so far."""

        def entries() -> dict[int, int]:
            found = {rank: self._entry(rank, number) for rank in range(self.world)}
            return {rank: value for rank, value in found.items() if value}

        if len(set(entries().values())) < 2:
            return None
        deadline = time.monotonic() + GRACE_S
        while len(found := entries()) < self.world and time.monotonic() < deadline:
            time.sleep(SLEEP_S)
        return RankMismatch({rank: self._text(rank, value) for rank, value in found.items()})

    def _text(self, rank: int, digest: int) -> str:
        texts = self._texts[rank]
        deadline = time.monotonic() + TEXT_GRACE_S
        while True:
            for at in range(0, TEXTS * TEXT_BYTES, TEXT_BYTES):
                found, checksum, length = _HEADER.unpack_from(texts, at)
                if found == digest and length <= TEXT_BYTES - _HEADER.size:
                    start = at + _HEADER.size
                    data = bytes(texts[start : start + length])
                    if zlib.crc32(data) == checksum:
                        return data.decode()
            if time.monotonic() > deadline:
                return f"unknown (digest {digest:010x})"
            time.sleep(SLEEP_S)
