"""The interface of an engine: what moves bytes and signals, and enqueues matrix products.

An engine belongs to one group and one rank. :func:`ficco.runtime.program.compile` walks a Plan once
and asks the engine for an operation per verb; running the Plan is then a loop over those
operations. Everything that knows a vendor is behind this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ficco.compute.program import (
    Call,
    Op,
    Program,
    Slot,
    Symmetric,
    in_turn,
)
from ficco.dma import collectives
from ficco.dma.hosts import Hosts
from ficco.dma.patience import DEFAULT_S
from ficco.errors import BackendError, SignalTimeout
from ficco.machine import Fingerprint
from ficco.plan import Applied, Attending, Plan, Product, Reduction, Signal, Transfer
from ficco.problems.products import Problem
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do on this machine, and how it does it, in words for ``doctor``.

    Attributes:
        engine: its name.
        post: how a signal is posted at a peer.
        wait: how a signal is waited for, and what orders the data behind it.
        copy: what moves the bytes.
        movers: the values of the mover axis that are served.
        products: the library that multiplies matrices.
        accumulate: how partial sums of column pieces are accumulated, and what memory that costs.
        capture: whether calls can be captured in a graph.
        partial_signals: whether signals may gate or announce rows of a product.
        tiles: whether such a product is one launch, whose tiles wait and tell.
        scaled: whether products may be scaled.
        functions: functions that a place may apply.
        network: what moves bytes between hosts; empty where the ranks share one.
    """

    engine: str
    post: str
    wait: str
    copy: str
    movers: tuple[str, ...]
    products: str
    accumulate: str
    capture: bool
    partial_signals: bool = False
    tiles: bool = False
    scaled: bool = False
    functions: tuple[str, ...] = ()
    network: str = ""

    @property
    def offers(self) -> tuple[str, ...]:
        """What a decision depends on: the movers, and ``"tiled"``."""
        return (*self.movers, "tiled") if self.tiles else self.movers


@dataclass(frozen=True)
class Missing:
    """What a step waits for in vain: a signal of a peer's, with the values of its word that are
    wanted and found, or a collective, of which it may know the peer that is absent. ``signal`` is
    known if it may be one of several that the step waits for piece by piece."""

    step: int
    peer: int | None = None
    wanted: int | None = None
    found: int | None = None
    signal: Signal | None = None


@dataclass(frozen=True)
class Span:
    """When one step of a Plan ran, in seconds after the call began on this rank."""

    step: int
    lane: str
    start: float
    stop: float


def fingerprint(device: torch.device | str, ranks: int) -> Fingerprint:
    """What a host is known by to the files of machines: its devices' name and how many ranks."""
    on_gpu = torch.device(device).type == "cuda"
    return Fingerprint(torch.cuda.get_device_name(device) if on_gpu else "cpu", ranks)


class Engine(ABC):
    """One rank's means to run Plans with the other ranks of a group.

    Attributes:
        name: ``"cpu"``, ``"cuda"`` or ``"hip"``.
        asynchronous: calls return before they are over, so that a watchdog has to look for stuck
            ones. Otherwise a call raises itself.
        timeout_s: seconds that the next call may wait for a peer.
        interrupt: called while a call waits; may raise.
        operator: what is being called, for errors.
        replays: it may record what a call enqueues, and replay that for calls that are alike.
        hosts: where the ranks of the group are.
        packs_columns: Plans have to pack columns, since copies cannot leave gaps between rows.
        keeps_made: what PyTorch has returned copies may read (:attr:`Filled.made`), and kernels of
            ficco's may be launched on its current stream.
    """

    name: str
    asynchronous: bool = False
    timeout_s: float = DEFAULT_S
    interrupt: Callable[[], None]
    operator: str = "ficco"
    replays: bool = True
    packs_columns: bool = False
    keeps_made: bool = True

    def __init__(
        self, group: ProcessGroup, device: torch.device, hosts: Hosts | None = None
    ) -> None:
        self.group = group
        self.hosts = hosts or Hosts.one(group)
        self.device = device
        self.rank = group.rank()
        self.world = group.size()
        self.interrupt = lambda: None

    @property
    def kind(self) -> str:
        """What has to be the same on all ranks, in words: Plans follow from it."""
        return f"the {self.name} engine" + ", which packs columns" * self.packs_columns

    def connect(self) -> None:
        """Connect with the ranks of other hosts, once all ranks have an engine of the same kind.
        Collective."""
        return None

    @property
    def out_of_step(self) -> bool:
        """Whether a collective of the library was broken off: what a rank still sends for it would
        be taken for data of the next one."""
        return False

    def fingerprint(self) -> Fingerprint:
        """What this kind of host is known by."""
        return fingerprint(self.device, self.hosts.near.size())

    # Memory.

    @abstractmethod
    def symmetric(self, nbytes: int) -> Symmetric:
        """Allocate symmetric memory, zeroed. Collective."""

    def discard(self, slot: Slot) -> None:
        """Give back what a slot holds. Not collective."""
        slot.programs.clear()
        if slot.memory is not None:
            slot.memory.free()

    @abstractmethod
    def slot(self, memory: Symmetric, words: int, nbytes: int, captured: bool) -> Slot:
        """Make a slot of fresh symmetric memory: its words are at rest on every rank.
        Collective."""

    def retire(self, slot: Slot) -> None:
        """Wait until the latest call on a slot is over here, so that it can be freed."""
        return None

    @abstractmethod
    def slot_bytes(self, words: int, nbytes: int) -> int:
        """Bytes of symmetric memory that a slot with so many words and bytes of data takes."""

    # Watching, for an asynchronous engine.

    def watch(self, captured: bool) -> Slot | None:
        """A slot without memory, for calls that share nothing; None if they need no watching."""
        return None

    def pulse(self, slot: Slot) -> tuple[int, bool]:
        """The number of the program that has begun on a slot and is not over, or 0; and whether
        any has ended on it since the last pulse. Must not disturb a capture."""
        raise NotImplementedError

    def missing(self, slot: Slot, program: Program) -> Missing | None:
        """What a stuck program waits for; None if the words cannot be read."""
        raise NotImplementedError

    @property
    def lost(self) -> set[int]:
        """Ranks of other hosts whose connection has broken."""
        return set()

    def release(self, slots: Sequence[Slot], seconds: float) -> bool:
        """Satisfy all waits of this rank so that its streams drain; whether that worked."""
        raise NotImplementedError

    def combine(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        picked: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> bool:
        """``out[t] = sum over j of weights[t, j] * rows[picked[t, j]]`` in float32, rounded once,
        on the current stream; False, and nothing done, if PyTorch's operations are as good."""
        return False

    def route(
        self, chosen: torch.Tensor, experts: int, capacity: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """As :meth:`ficco.hip_kernels.launch.Kernels.route`, on the current stream; None if
        PyTorch's operations are as good."""
        return None

    # Verbs: each returns the operation that enqueues it. `program` gives the slot.

    @abstractmethod
    def wait(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        """Wait until every signal is posted."""

    @abstractmethod
    def post(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        """Post signals behind what the step's lane did."""

    def clear(self, program: Program, step: int, signals: Sequence[Signal]) -> Op | None:
        """Put words back to their first value, if the engine needs it."""
        return None

    def enter(self, program: Program, lane: str) -> Op | None:
        """Begin a lane behind what the caller did before the call."""
        return None

    @abstractmethod
    def record(self, program: Program, step: int) -> Op | None:
        """Mark the end of a step for steps on other lanes of this rank."""

    @abstractmethod
    def join(self, program: Program, step: int, earlier: int) -> Op | None:
        """Let the step's lane wait for a marked step of another lane of this rank."""

    @abstractmethod
    def copy(self, program: Program, step: int, transfer: Transfer, mover: str) -> Op:
        """Copy a region between ranks."""

    def copies(self, program: Program, steps: Sequence[int]) -> Op:
        """The copies of several steps that go together, within this rank, too
        (:func:`ficco.plan.together`)."""
        found = []
        for index in steps:
            step = program.plan.steps[index]
            assert step.transfer is not None
            if step.op == "place":
                found.append(self.place(program, index, step.transfer))
            elif step.transfer.src.elements:
                found.append(self.copy(program, index, step.transfer, step.mover))

        return in_turn(found)

    def collective(self, program: Program, step: int) -> Op:
        """The collective of the group's library that does a Plan's whole exchange."""
        plan, group, name = program.plan, self.group, program.plan.steps[step].label

        def op(call: Call) -> None:
            try:
                for start in collectives.starts(plan, step, group, call.tensors):
                    if (work := start()) is not None:
                        work.wait()
            except RuntimeError as error:
                library = str(dist.get_backend(group))
                raise BackendError(f"{name} of {library}", "error", str(error)) from error

        return op

    def network(self, program: Program, step: int) -> Op:
        """Send and receive what a step moves between hosts."""
        raise NotImplementedError(f"the {self.name} engine does not serve several hosts")

    @abstractmethod
    def place(self, program: Program, step: int, transfer: Transfer) -> Op:
        """Copy a region within this rank, to another dtype if need be."""

    @abstractmethod
    def matmul(self, program: Program, step: int, products: Sequence[Product]) -> Op:
        """Enqueue matrix products of the vendor's library."""

    def attend(self, program: Program, step: int, attends: Sequence[Attending]) -> Op:
        """Enqueue attention of the vendor's library."""
        raise NotImplementedError(f"the {self.name} engine does not serve attention yet")

    def apply(self, program: Program, step: int, applied: Applied) -> Op:
        """Enqueue a function of the vendor's library."""
        raise NotImplementedError(
            f"the {self.name} engine does not serve the function {applied.function!r} yet"
        )

    def tiled(self, program: Program, step: int) -> Op:
        """Enqueue the products of a step whose signals gate or announce rows, as one launch."""
        raise NotImplementedError(f"the {self.name} engine has no product whose tiles wait")

    def tiled_product(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], None]:
        """One such launch, on the current stream, which waits for nothing: to be timed."""
        raise NotImplementedError(f"the {self.name} engine has no product whose tiles wait")

    def arrived(self, program: Program, step: int) -> Op:
        """Wait, after what the caller does, until all rows that it may use are there: words that
        it did not wait for must not be cleared before they are posted."""
        return self.wait(program, step, program.plan.steps[step].gates)

    @abstractmethod
    def reduce(self, program: Program, step: int, reduction: Reduction) -> Op:
        """Add parts in float32, in their order, and round once."""

    @abstractmethod
    def stamp(self, program: Program, step: int, end: bool) -> Op:
        """Note the time at which the step begins or ends, for :meth:`spans`."""

    # Running.

    @abstractmethod
    def execute(self, program: Program, call: Call) -> None:
        """Run a program: enqueue it (GPU) or carry it out (CPU).

        Raises:
            SignalTimeout, RankMismatch, PeerFailed: on an engine that carries calls out.
            BackendError: the vendor's library refused a call.
        """

    @abstractmethod
    def around(self, program: Program, call: Call) -> AbstractContextManager[None]:
        """Run a program around what its caller does: on entering up to that step (:func:`callers`),
        on leaving the rest. Raises as :meth:`execute`, on leaving too."""

    # Within that block.

    @abstractmethod
    def words(self, program: Program, call: Call) -> torch.Tensor:
        """The words of the gates of the caller's step, int32, contiguous: 0, then 1 for good."""

    @abstractmethod
    def rows(self, program: Program, call: Call) -> torch.Tensor:
        """The rows that the caller's step reads, all of A [m, k]."""

    @abstractmethod
    def await_rows(self, program: Program, call: Call, gate: int) -> None:
        """Let the caller (CPU), or the current stream (GPU), wait for one of these gates."""

    @abstractmethod
    def spans(self, program: Program, call: Call) -> list[Span]:
        """When the steps of a traced call ran. Waits for it."""

    def capturing(self) -> int:
        """A number that tells graph captures apart, 0 outside of one."""
        return 0

    def synchronize(self) -> None:
        """Wait until every call of this rank is over."""
        return None

    def idle(self, slots: Sequence[Slot]) -> bool:
        """Whether all calls on some slots are over. Does not wait."""
        return True

    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    def refuses(self, problem: Problem, schedule: Schedule) -> str:
        """Why this engine cannot carry out a schedule; empty if it can."""
        if schedule.mover not in (*self.capabilities().movers, "collective"):
            return (
                f"schedule {schedule}: the {self.name} engine has no mover {schedule.mover!r} yet; "
                "leave the knob out"
            )
        if problem.transposed and self.packs_columns:
            return (
                f"{problem.operator}: the {self.name} engine has no copies that leave gaps between "
                "rows, as rows that lie as columns need"
            )
        if why := self.unscaled(problem):
            return f"{problem.operator}: {why}"
        if schedule.grouping == "tiled" and (why := self.untiled(problem, schedule)):
            return f"schedule {schedule}: {why}; take another schedule"
        return ""

    def unscaled(self, problem: Problem) -> str:
        """Why no product of the library serves the factors of a problem's operands; empty if one
        does, or there are none."""
        return ""

    def wordless(self) -> str:
        """Why kernels of the caller cannot wait for rows; empty if they can."""
        return ""

    def untiled(self, problem: Problem, schedule: Schedule) -> str:
        """Why no product whose tiles wait can serve a problem; empty if one can."""
        return ""

    @abstractmethod
    def copy_engines(self) -> int | None:
        """Copies that this rank's device can have in flight; None if the engine cannot say."""

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds. Does not wait for peers."""


def timed_out(
    plan: Plan, missing: Missing, seconds: float, ended: bool = False, host: str = ""
) -> SignalTimeout:
    """The error of a step that has waited too long, or for a peer whose process has ended."""
    step, signal = plan.steps[missing.step], missing.signal
    if signal is not None and signal in step.gates:  # the piece that did not come
        step = step._replace(label=f"{step.label} {signal.first}:{signal.last}")
    return SignalTimeout(
        operator=plan.problem.operator,
        rank=plan.rank,
        peer=missing.peer,
        step=f"{step.label} ({step.op} on {step.lane})",
        schedule=plan.schedule,
        seconds=seconds,
        wanted=missing.wanted,
        found=missing.found,
        ended=ended,
        host=host,
    )
