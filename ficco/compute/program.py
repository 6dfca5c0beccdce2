"""A Plan as operations on the memory of a slot, and what one call brings to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from ficco.plan import Plan


class Symmetric(ABC):
    """Memory of the same size on every rank of a group, that every rank can reach.

    Attributes:
        serial: number of the allocation, the same on every rank.
        nbytes: its size.
        tensor: this rank's part, as bytes.
        addresses: of all ranks' parts, mapped here.
    """

    serial: int
    nbytes: int
    tensor: torch.Tensor
    addresses: list[int]

    @abstractmethod
    def part(self, rank: int) -> torch.Tensor:
        """A rank's part as bytes, to be read here."""

    @abstractmethod
    def free(self) -> None:
        """Give it back at once: a garbage collector may come while a graph is captured, when
        freeing is forbidden. Not collective."""


@dataclass
class Slot:
    """The signal words and the buffers of the calls that take turns on them.

    Attributes:
        memory: the symmetric memory with its data; None where calls have nothing but a watchdog in
            common.
        words: how many signal words it has.
        nbytes: bytes of its data, see :attr:`ficco.plan.Plan.offsets`.
        data: the byte of ``memory`` at which the data begin.
        captured: it belongs to a graph.
        programs: what runs on it, by the number that tells a watchdog which one is running.
        state: what the engine keeps with it.
    """

    memory: Symmetric | None
    words: int = 0
    nbytes: int = 0
    data: int = 0
    captured: bool = False
    programs: dict[int, Program] = field(default_factory=dict)
    state: Any = None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def number(self, program: Program) -> int:
        """The number of a program of this slot, never 0 and never that of another."""
        if not program.number:
            program.number = next(self._numbers)
            self.programs[program.number] = program
        return program.number


class Part(NamedTuple):
    """What some queries get of some keys: ``mean`` [batch, heads, queries, size], of the values,
    and ``lse`` [batch, heads, queries], the logarithm of the sum of the weights."""

    first: int
    last: int
    mean: torch.Tensor
    lse: torch.Tensor

    def meets(self, first: int, last: int) -> bool:
        """Whether it has queries of a range."""
        return max(self.first, first) < min(self.last, last)

    def rows(self, first: int, last: int) -> Part:
        """Those of a range, of which it has all."""
        some = slice(first - self.first, last - self.first)
        return Part(first, last, self.mean[:, :, some], self.lse[:, :, some])

    def within(self, first: int, last: int) -> Part | None:
        """What it has of a range, whose first query becomes number 0; None for nothing."""
        begin, end = max(self.first, first), min(self.last, last)
        if begin >= end:
            return None
        some = slice(begin - self.first, end - self.first)
        return Part(begin - first, end - first, self.mean[:, :, some], self.lse[:, :, some])


#: The groups of a grouped product: the first block, how many each has, and how many groups.
Groups = tuple[int, int, int]


@dataclass
class Filled:
    """What a call has of buffers whose rows are in blocks (:attr:`ficco.plan.Buffer.block`).

    Attributes:
        starts: by buffer, int64 [rank, blocks + 1]: the rows before each block, and in all.
        ends: of grouped products, the row after each group, from its first row on: int32 on the
            device.
        made: of buffers that are made in parts, the rows of each part and the part.
    """

    starts: Mapping[str, np.ndarray[Any, Any]]
    ends: Mapping[Groups, torch.Tensor] = field(default_factory=dict)
    made: dict[str, list[tuple[int, int, torch.Tensor]]] = field(default_factory=dict)


@dataclass
class Call:
    """One call: its operands, results and local buffers by name, and what the engine keeps for its
    duration.

    Attributes:
        parts: of attention, what each step has made.
        filled: what it has of blocks; None where it has all rows of all buffers.
    """

    tensors: dict[str, torch.Tensor]
    state: Any = None
    parts: dict[int, list[Part]] = field(default_factory=dict)
    filled: Filled | None = None


Op = Callable[[Call], None]


def callers(call: Call) -> None:
    """Stands among the operations of a Program for what its caller does (:meth:`Engine.around`)."""


@dataclass
class Program:
    """A Plan as operations, ready to run again and again on one slot.

    Attributes:
        plan, slot: what it was made from.
        ops: operations in enqueue order, each with its lane.
        source: the symmetric memory that holds the caller's shard, and where, if peers read it
            in place.
        number: see :meth:`Slot.number`.
    """

    plan: Plan
    slot: Slot | None
    ops: list[tuple[str, Op]]
    source: tuple[Symmetric, int] | None = None
    number: int = 0
    state: dict[Any, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """Let go of the slot's memory."""
        self.ops.clear()
        self.state.clear()
        self.slot = None


def in_turn(ops: Sequence[Op]) -> Op:
    """Several operations as one."""
    if len(ops) == 1:
        return ops[0]

    def op(call: Call) -> None:
        for one in ops:
            one(call)

    return op
