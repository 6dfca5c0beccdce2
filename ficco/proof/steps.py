"""The steps of all ranks as columns, and the rules for single plans and steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from ficco.plan.model import OPS, Attendings, LibraryMove, Plan, Products, Step, Transfer
from ficco.plan.network import MOVER, networked
from ficco.plan.parts import in_parts
from ficco.problems.specification import Buffer
from ficco.proof.columns import Ints, PlanError, Who, ints, unzipped


class Steps:
    """The steps of all ranks, numbered consecutively rank by rank.

    Attributes:
        all: the steps.
        of: their fields as columns.
        start: by rank, the number of its first step; and the end.
        rank, lane: by step.
        host: by rank.
        own_words, words: signal words of each rank, without and with the words of network moves.
        lanes: by number of each lane, its rank and name.
        works: by type of work, the steps with work of that type.
        buffers: distinct buffers of all ranks, in one order.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        if not plans:
            raise PlanError("no plans")
        self._lanes(plans)
        self._calls(plans)
        try:
            plans = [in_parts(plan, concurrent=True) for plan in plans]
        except NotImplementedError as error:
            raise PlanError(str(error)) from None
        except KeyError as error:
            raise PlanError(f"there is no earlier step, or no buffer, {error}") from None
        self.own_words = plans[0].words
        try:
            plans = networked(plans)
        except ValueError as error:
            raise PlanError(str(error)) from None
        self.plans = plans
        self.specification = plans[0].problem.specification
        self.world = len(plans)
        self.words = plans[0].words
        self.host = np.arange(self.world) // max(self.world // plans[0].problem.hosts, 1)
        self.buffers: list[Buffer] = []
        self.all: list[Step] = list(chain.from_iterable(plan.steps for plan in plans))
        sizes = [len(plan.steps) for plan in plans]
        self.start = np.cumsum([0, *sizes])
        self.rank = np.repeat(np.arange(self.world), sizes)
        self.of = unzipped(self.all, Step)
        self.lanes: list[tuple[int, str]] = []
        lane_of: list[int] = []
        for rank, (first, last) in enumerate(pairwise(self.start.tolist())):
            lanes = self.of.lane[first:last]
            number = {lane: len(self.lanes) + i for i, lane in enumerate(dict.fromkeys(lanes))}
            self.lanes += [(rank, lane) for lane in number]
            lane_of += map(number.__getitem__, lanes)
        self.lane = np.array(lane_of, np.int64)
        self._whole()
        self._group_works()

    def name(self, step: int) -> str:
        rank = int(self.rank[step])
        index, this = step - int(self.start[rank]), self.all[step]
        return f"rank {rank} step {index} ({this.op} {this.label!r} on {this.lane})"

    def by_step(self, step: Ints) -> Who:
        return lambda index: self.name(int(step[index]))

    def held(self, column: Sequence[Sequence[Any]]) -> tuple[list[Any], Ints]:
        """The items of a field of all steps, and the step of each item."""
        step = np.repeat(np.arange(len(column)), ints(map(len, column)))
        return list(chain.from_iterable(column)), step

    def of_type(self, kind: type[Any]) -> tuple[list[Any], Ints]:
        """The work of a type, and the step of each."""
        numbers = self.works.get(kind, [])
        return [self.of.work[number] for number in numbers], np.array(numbers, np.int64)

    def _whole(self) -> None:
        """Check that the plans are those of all ranks for one problem."""
        first = self.plans[0]
        if self.world != first.problem.world:
            raise PlanError(f"{self.world} plans for {first.problem.world} ranks")
        shared = attrgetter("problem", "schedule", "words", "offsets")
        by_name: dict[str, Buffer] = {}
        for rank, plan in enumerate(self.plans):
            if plan.rank != rank or shared(plan) != shared(first):
                raise PlanError(f"rank {rank} holds a plan of something else")
            for buffer in plan.buffers:
                if buffer != by_name.setdefault(buffer.name, buffer):
                    raise PlanError(f"rank {rank} has another buffer {buffer.name} than others")
            if len(plan.buffer) != len(plan.buffers):
                raise PlanError(f"rank {rank} has two buffers of one name")
        self.buffers = list(by_name.values())
        external = [buffer for buffer in self.buffers if buffer.memory in ("operand", "result")]
        if external != [*self.specification.operands, *self.specification.results]:
            raise PlanError("the operands and results are not those that are specified")
        for rank, plan in enumerate(self.plans):
            if not plan.buffer.keys() >= {buffer.name for buffer in external}:
                raise PlanError(f"rank {rank} lacks operands or results")
        for buffer in self.buffers:
            counts = len(buffer.first), len(buffer.left)
            if len(buffer.shapes) != self.world or not {*counts} <= {0, self.world}:
                raise PlanError(f"buffer {buffer.name} does not have a shape for each rank")
            self._buffer(buffer)

    def _buffer(self, buffer: Buffer) -> None:
        """Check that engines offer each buffer, and that the specification names its matrix."""
        slot = buffer.memory == "slot"
        known = buffer.memory in ("operand", "result", "local", "slot")
        known &= buffer.layout in ("rows", "columns", "transposed")
        known &= buffer.memory in ("operand", "result") or not buffer.symmetric
        known &= slot or buffer.layout != "columns"
        known &= buffer.memory == "result" or buffer.factor == 1
        # All ranks know one row pitch.
        known &= not slot or len({cols for _, cols in buffer.shapes}) == 1
        if not known:
            raise PlanError(f"there are no buffers such as {buffer.name}")
        for one in (*self.specification.operands, *self.specification.results):
            narrower = one.dtype != buffer.dtype and buffer.itemsize <= one.itemsize
            if one.holds == buffer.holds and narrower:
                raise PlanError(f"buffer {buffer.name} rounds what {one.name} does not")

    @staticmethod
    def _lanes(plans: Sequence[Plan]) -> None:
        """Check that plans name existing lanes, and no lane of parts of steps."""
        for plan in plans:
            for lane in plan.lanes:
                if not re.fullmatch(r"(compute|copy|network|reduce)\d+|sync", lane):
                    raise PlanError(f"rank {plan.rank}: there is no lane {lane!r}")

    @staticmethod
    def _calls(plans: Sequence[Plan]) -> None:
        """Check that the caller's work is one step on the caller's lane, on all ranks or none."""
        counts = [sum(map(_callers, plan.steps)) for plan in plans]
        for plan, count in zip(plans, counts, strict=True):
            if count > 1 or count != counts[0]:
                wanted = "one step of its caller's" if count > 1 else f"{counts[0]}, as rank 0 has"
                raise PlanError(f"rank {plan.rank} has {count} calls, required {wanted}")
            for step in plan.steps:
                if _callers(step) and (step.lane != "compute0" or step.announces):
                    raise PlanError(
                        f"rank {plan.rank}: {step.label!r} is not on the caller's own lane, or "
                        "announces what only its caller knows"
                    )

    def shape(self, buffer: Buffer, rank: int) -> tuple[int, int]:
        """Rows and columns of a buffer; 0 if the rank's plan does not list the buffer."""
        return buffer.shapes[rank] if buffer.name in self.plans[rank].buffer else (0, 0)

    def _group_works(self) -> None:
        """Group the steps by type of work. Checks that engines know each work."""
        self.works: dict[type, list[int]] = {}
        for number, work in enumerate(self.of.work):
            self.works.setdefault(type(work), []).append(number)
        movers = {False: ("dma", "kernel", MOVER), True: ("dma", "kernel")}
        for kind, numbers in self.works.items():
            wrong = self.all[numbers[0]].op not in OPS
            for number in numbers:
                work = self.of.work[number]
                if kind is Transfer:
                    wrong = work.mover not in movers[work.local]
                elif kind in (Products, Attendings):
                    wrong = not work[0]  # no products, or no attends
                if wrong:
                    raise PlanError(f"{self.name(number)} holds no work that engines know")
        if LibraryMove in self.works:
            self._alike()

    def _alike(self) -> None:
        """Check that all ranks run the same collectives, and no other step that could wait."""
        labels: list[list[tuple[str, str]]] = [[] for _ in self.plans]
        for number in self.works[LibraryMove]:
            step = self.all[number]
            labels[self.rank[number]].append((step.label, step.lane))
        for rank, collectives in enumerate(labels):
            if collectives != labels[0]:
                raise PlanError(f"rank {rank} takes part in other collectives than rank 0")
        for number, step in enumerate(self.all):
            if step.waits or step.posts or step.clears:
                raise PlanError(f"{self.name(number)} mixes signals with collectives")


def _callers(step: Step) -> bool:
    """Whether the work of a step is the caller's."""
    return isinstance(step.work, Products) and step.work.callers
