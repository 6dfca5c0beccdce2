"""Slots, programs (a Plan compiled for a slot), and the tensors of a call."""

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
    """Memory of equal size on every rank of a group, mapped by every rank.

    Attributes:
        serial: number of the allocation, the same on every rank.
        nbytes: size of a part.
        tensor: this rank's part, as bytes.
        addresses: local addresses of all ranks' parts.
    """

    serial: int
    nbytes: int
    tensor: torch.Tensor
    addresses: list[int]

    @abstractmethod
    def part(self, rank: int) -> torch.Tensor:
        """A rank's part as bytes."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory now, not in a destructor: a garbage collector may run during a capture,
        which forbids freeing. Not collective."""


@dataclass
class Slot:
    """Signal words and buffers that calls use in turns.

    Attributes:
        memory: symmetric memory with the words and the data; None if calls only share a watchdog.
        words: number of signal words.
        nbytes: bytes of data, see :attr:`ficco.plan.Plan.offsets`.
        data: offset of the data in ``memory``, in bytes.
        captured: whether the slot belongs to a graph.
        programs: programs of the slot, by the number that a watchdog sees while one runs.
        state: private to the engine.
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
        """Unique number of a program on this slot, at least 1."""
        if not program.number:
            program.number = next(self._numbers)
            self.programs[program.number] = program
        return program.number


class Part(NamedTuple):
    """Attention of queries [first, last) over some keys.

    ``mean``: weighted mean of the values [batch, heads, queries, size]. ``lse``: logarithm of the
    sum of the weights [batch, heads, queries]."""

    first: int
    last: int
    mean: torch.Tensor
    lse: torch.Tensor

    def meets(self, first: int, last: int) -> bool:
        """Whether this part has queries of a range."""
        return max(self.first, first) < min(self.last, last)

    def rows(self, first: int, last: int) -> Part:
        """Sub-range of the queries."""
        queries = slice(first - self.first, last - self.first)
        return Part(first, last, self.mean[:, :, queries], self.lse[:, :, queries])

    def within(self, first: int, last: int) -> Part | None:
        """Intersection with a range, numbered from its first query; None if it is empty."""
        begin, end = max(self.first, first), min(self.last, last)
        if begin >= end:
            return None
        queries = slice(begin - self.first, end - self.first)
        return Part(begin - first, end - first, self.mean[:, :, queries], self.lse[:, :, queries])


#: The groups of a grouped product: the first block, how many each has, and how many groups.
Groups = tuple[int, int, int]


@dataclass
class Filled:
    """Rows that a call has in buffers of blocks (:attr:`ficco.plan.Buffer.block`).

    Attributes:
        starts: by buffer, rows before each block, and of all blocks: int64 [rank, blocks + 1].
        ends: by groups of a grouped product, the end row of each group, counted from the first
            row: int32 on the device.
        grouped: by buffer, results of grouped products with their first and last rows.
    """

    starts: Mapping[str, np.ndarray[Any, Any]]
    ends: Mapping[Groups, torch.Tensor] = field(default_factory=dict)
    grouped: dict[str, list[tuple[int, int, torch.Tensor]]] = field(default_factory=dict)


@dataclass
class Call:
    """One call of a Program.

    Attributes:
        tensors: operands, results and local buffers, by name.
        state: private to the engine.
        parts: parts of attention, by the step that computed them.
        filled: rows in buffers of blocks; None if all buffers are full.
        layout: strides of the tensors, in their order; empty if they are not known yet.
    """

    tensors: dict[str, torch.Tensor]
    state: Any = None
    parts: dict[int, list[Part]] = field(default_factory=dict)
    filled: Filled | None = None
    layout: tuple[Any, ...] = ()


Op = Callable[[Call], None]


def callers(call: Call) -> None:
    """Placeholder in a Program for the caller's own operations (:meth:`Engine.around`)."""


@dataclass
class Program:
    """A Plan compiled to operations on one slot.

    Attributes:
        ops: lane and operation, in enqueue order.
        source: symmetric memory and offset of the caller's shard, if peers read it in place.
        number: see :meth:`Slot.number`.
        batched: bytes of the largest copies of which the engine submits several at once; 0: none.
        siblings: the programs of the same kind of call, by slot, this one among them.
    """

    plan: Plan
    slot: Slot | None
    ops: list[tuple[str, Op]]
    source: tuple[Symmetric, int] | None = None
    number: int = 0
    batched: float = 0
    state: dict[Any, Any] = field(default_factory=dict)
    siblings: Mapping[int, Program] = field(default_factory=dict, repr=False)

    def clear(self) -> None:
        """Drop all references to the slot's memory."""
        self.ops.clear()
        self.state.clear()
        self.slot, self.siblings = None, {}


def in_turn(ops: Sequence[Op]) -> Op:
    """Combine operations into one."""
    if len(ops) == 1:
        return ops[0]

    def op(call: Call) -> None:
        for one in ops:
            one(call)

    return op
