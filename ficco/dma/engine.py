"""The interface of an engine, which moves bytes and signals and enqueues matrix products.

An engine belongs to one group and one rank. :func:`ficco.runtime.calls.compile` walks a Plan once
and asks the engine for an operation per verb; running the Plan is then a loop over those
operations. Everything that knows a vendor is behind this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ficco.compute.program import Call, Op, Program, Slot, Symmetric, in_turn
from ficco.dma import collectives
from ficco.dma.host import Hosts
from ficco.dma.patience import DEFAULT_S
from ficco.errors import BackendError, SignalTimeout
from ficco.machine import Fingerprint, Machine
from ficco.plan import Applied, Attending, Plan, Product, Reduction, Signal, Transfer
from ficco.problems.products import Problem
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of an engine on this machine, with descriptions for ``ficco doctor``.

    Attributes:
        engine: name of the engine.
        post: how a signal is posted to a peer.
        wait: how a signal is waited for, and what orders the data before it.
        copy: the mechanism that moves the bytes.
        movers: the supported values of the mover axis.
        products: the library that multiplies matrices.
        accumulate: how partial sums of column pieces are accumulated, and the memory it takes.
        capture: whether calls can be captured in a graph.
        partial_signals: whether signals may gate or announce rows of a product.
        tiles: whether such a product is one launch, whose tiles wait for signals and post them.
        scaled: whether products may be scaled.
        functions: functions that a place step may apply.
        network: the library that moves bytes between hosts; empty if the ranks share one host.
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
        """The capabilities that affect the choice of a schedule: movers, and ``"tiled"``."""
        return (*self.movers, "tiled") if self.tiles else self.movers


@dataclass(frozen=True)
class Missing:
    """A signal or collective that a stuck step waits for.

    Attributes:
        peer: the poster of the signal, or the rank absent from a collective; None if unknown.
        wanted, actual: the expected and the actual value of the signal word.
        signal: the signal, if it may be one of several that the step waits for piece by piece.
    """

    step: int
    peer: int | None = None
    wanted: int | None = None
    actual: int | None = None
    signal: Signal | None = None


@dataclass(frozen=True)
class Span:
    """Start and end of one step of a Plan, in seconds after the call began on this rank."""

    step: int
    lane: str
    start: float
    stop: float


def fingerprint(device: torch.device | str, ranks: int) -> Fingerprint:
    """The key of a host in machine files: the name of its devices and its number of ranks."""
    on_gpu = torch.device(device).type == "cuda"
    return Fingerprint(torch.cuda.get_device_name(device) if on_gpu else "cpu", ranks)


#: PyTorch's functions that allocate without its dispatcher.
ALLOCATORS: Any = torch._C._dynamo.guards


class Engine(ABC):
    """Runs Plans on one rank, together with the other ranks of a group.

    Attributes:
        name: ``"cpu"``, ``"cuda"`` or ``"hip"``.
        asynchronous: calls return before they complete, so that a watchdog has to detect stuck
            ones. Otherwise a call raises its own errors.
        timeout_s: seconds that the next call may wait for a peer.
        interrupt: called while a call waits; may raise.
        operator: name of the current operator, for errors.
        replays: the engine may record the operations of a call and replay them for equal calls.
        hosts: the hosts of the ranks of the group.
        packs_columns: Plans have to pack columns, since copies cannot leave gaps between rows.
        keeps_made: copies may read tensors that PyTorch has returned (:attr:`Filled.grouped`), and
            ficco's kernels may be launched on PyTorch's current stream.
    """

    name: str
    asynchronous: bool = False
    #: Allocates a tensor of a shape, strides and a dtype on the engine's device, as Inductor's
    #: programs do: 2.1 us in place of 4.4 for ``new_empty`` (H200, PyTorch 2.11, 2026-11-29).
    allocate: Callable[..., torch.Tensor] = staticmethod(ALLOCATORS._empty_strided_cpu)
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
        """Description of the properties that affect Plans, which all ranks must share."""
        return f"the {self.name} engine" + ", which packs columns" * self.packs_columns

    @property
    def group_facts(self) -> dict[str, Any]:
        """Facts of the group that are fields of every problem, by name."""
        return {"hosts": self.hosts.count}

    def connect(self) -> None:
        """Connect with the ranks of other hosts. Collective; all ranks must have an engine of the
        same kind."""
        return None

    @property
    def out_of_step(self) -> bool:
        """Whether a collective of the library was aborted. Data that a rank still sends for it
        would be received as data of the next collective."""
        return False

    def fingerprint(self) -> Fingerprint:
        """The key of this host in machine files."""
        return fingerprint(self.device, self.hosts.near.size())

    # Memory.

    @abstractmethod
    def symmetric(self, nbytes: int) -> Symmetric:
        """Allocate symmetric memory, zeroed. Collective."""

    def discard(self, slot: Slot) -> None:
        """Free the resources of a slot. Not collective."""
        slot.programs.clear()
        if slot.memory is not None:
            slot.memory.free()

    @abstractmethod
    def slot(self, memory: Symmetric, words: int, nbytes: int, captured: bool) -> Slot:
        """Make a slot of newly allocated symmetric memory, with its words at rest on every rank.
        Collective."""

    def retire(self, slot: Slot) -> None:
        """Wait until the latest call on a slot is complete on this rank, before it is freed."""
        return None

    @abstractmethod
    def slot_bytes(self, words: int, nbytes: int) -> int:
        """Bytes of symmetric memory of a slot with ``words`` signals and ``nbytes`` of data."""

    # Watchdog support of an asynchronous engine.

    def watch(self, captured: bool) -> Slot | None:
        """A slot without memory, to watch calls that use no slot; None if the engine needs none."""
        return None

    def pulse(self, slot: Slot) -> tuple[int, bool]:
        """The number of the program that runs on a slot, 0 if none; and whether any has ended on
        it since the last pulse. Must not disturb a capture."""
        raise NotImplementedError

    def begun(self, slot: Slot) -> tuple[int, bool]:
        """As :meth:`pulse`, without a call of the driver: a program that has begun and is not known
        to have ended counts as running."""
        raise NotImplementedError

    def missing(self, slot: Slot, program: Program) -> Missing | None:
        """The signal or collective that a stuck program waits for; None if nothing is missing.

        Raises:
            BackendError: the signal words cannot be read.
        """
        raise NotImplementedError

    @property
    def lost(self) -> set[int]:
        """Ranks of other hosts whose connection has broken."""
        return set()

    def release(self, slots: Sequence[Slot], seconds: float) -> bool:
        """Satisfy all waits of this rank, so that its streams drain; True if they did in time."""
        raise NotImplementedError

    def combine(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        picked: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> bool:
        """``out[t] = sum over j of weights[t, j] * rows[picked[t, j]]`` in float32, rounded once,
        on the current stream. False, without any work, if PyTorch's operations are as good."""
        return False

    def route(
        self, chosen: torch.Tensor, groups: int, capacity: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """:meth:`ficco.hip_kernels.launch.Kernels.route` on the current stream; None if PyTorch's
        operations are as good."""
        return None

    # Verbs: each returns the operation that enqueues it. `program` gives the slot.

    @abstractmethod
    def wait(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        """Wait until every signal is posted."""

    @abstractmethod
    def post(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        """Post signals after all earlier work of the step's lane."""

    def clear(self, program: Program, step: int, signals: Sequence[Signal]) -> Op | None:
        """Operation that sets words back to "not posted"; None for an engine whose waits do so."""
        return None

    def enter(self, program: Program, lane: str) -> Op | None:
        """Order a lane after the caller's earlier work; None if it needs no operation."""
        return None

    @abstractmethod
    def record(self, program: Program, step: int) -> Op | None:
        """Record the end of a step, for steps on other lanes of this rank to wait for."""

    @abstractmethod
    def join(self, program: Program, step: int, earlier: int) -> Op | None:
        """Let the step's lane wait for a recorded step of another lane of this rank."""

    def batched(self, machine: Machine | None) -> float:
        """Bytes of the largest copies of which this engine submits several at once, on a machine;
        0: none."""
        return 0.0

    @abstractmethod
    def copy(self, program: Program, step: int, transfer: Transfer) -> Op:
        """Copy a region between ranks."""

    def exchanges(self, plan: Plan) -> bool:
        """Whether :meth:`copies` also serves the sum of a two-shot with all that follows it
        (:func:`ficco.plan.parts.exchanged`): one launch, which posts and waits by itself."""
        return False

    def copies(self, program: Program, steps: Sequence[int]) -> Op:
        """The copies of several steps that are enqueued together, including copies within this
        rank (:func:`ficco.plan.together`)."""
        ops = []
        for index in steps:
            move = program.plan.steps[index].work
            assert isinstance(move, Transfer)
            if move.local:
                ops.append(self.place(program, index, move))
            elif move.src.elements:
                ops.append(self.copy(program, index, move))

        return in_turn(ops)

    def collective(self, program: Program, step: int) -> Op:
        """The group library's collective, for the whole exchange of a Plan."""
        group, name = self.group, program.plan.steps[step].label
        starts = collectives.LibraryExchange(program.plan, step, group).starts()

        def op(call: Call) -> None:
            try:
                for start in starts:
                    if (work := start(call.tensors)) is not None:
                        work.wait()
            except RuntimeError as error:
                library = str(dist.get_backend(group))
                raise BackendError(f"{name} of {library}", "error", str(error)) from error

        return op

    def cross(self, program: Program, step: int) -> Op:
        """Send and receive the data that a step moves between hosts."""
        raise NotImplementedError(f"the {self.name} engine does not serve several hosts")

    @abstractmethod
    def place(self, program: Program, step: int, transfer: Transfer) -> Op:
        """Copy a region within this rank, and convert its dtype if the two differ."""

    @abstractmethod
    def matmul(self, program: Program, step: int, products: Sequence[Product]) -> Op:
        """Enqueue matrix products of the vendor's library."""

    def attend(self, program: Program, step: int, parts: Sequence[Attending]) -> Op:
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
        """One such launch on the current stream, without signals, for measurements."""
        raise NotImplementedError(f"the {self.name} engine has no product whose tiles wait")

    def arrived(self, program: Program, step: int) -> Op:
        """Wait for all gates of the caller's step, after that step. The caller may not have waited
        for every word, and a word must not be cleared before it is posted."""
        return self.wait(program, step, program.plan.steps[step].gates)

    @abstractmethod
    def reduce(self, program: Program, step: int, reduction: Reduction) -> Op:
        """Add parts in float32, in their order, and round once."""

    @abstractmethod
    def stamp(self, program: Program, step: int, end: bool) -> Op:
        """Record the time at which the step begins or ends, for :meth:`spans`."""

    # Running.

    @abstractmethod
    def execute(self, program: Program, call: Call) -> None:
        """Run a program: enqueue it (GPU) or execute it (CPU).

        Raises:
            SignalTimeout, RankMismatch, PeerFailed: on a synchronous engine.
            BackendError: the vendor's library refused a call.
        """

    @abstractmethod
    def around(self, program: Program, call: Call) -> AbstractContextManager[None]:
        """Run a program around the caller's own step (:func:`callers`): the operations before it
        on entry, the rest on exit. Entry and exit raise the errors of :meth:`execute`."""

    # Within the block of `around`.

    @abstractmethod
    def words(self, program: Program, call: Call) -> torch.Tensor:
        """The gate words of the caller's step, int32, contiguous: 0, then 1 when rows are there."""

    @abstractmethod
    def await_rows(self, program: Program, call: Call, gate: int) -> None:
        """Let the caller (CPU) or the current stream (GPU) wait for one of the step's gates."""

    @abstractmethod
    def spans(self, program: Program, call: Call) -> list[Span]:
        """Start and end of the steps of a timed call. Waits for the call."""

    def capturing(self) -> int:
        """Identifier of the current graph capture, 0 outside of captures."""
        return 0

    def in_capture(self) -> bool:
        """Whether the caller's work is captured in a graph, be this supported or not."""
        return False

    def synchronize(self) -> None:
        """Wait until every call of this rank is complete."""
        return None

    def idle(self, slots: Sequence[Slot]) -> bool:
        """Whether all calls on the slots are complete. Does not wait."""
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
                "rows, which rows that lie as columns need; multiply by PyTorch, beside "
                "ulysses_attention"
            )
        if why := self.unscaled(problem):
            return f"{problem.operator}: {why}"
        if schedule.grouping == "tiled" and (why := self.untiled(problem, schedule)):
            return f"schedule {schedule}: {why}; take another schedule"
        return ""

    def unscaled(self, problem: Problem) -> str:
        """Why the library cannot multiply operands with a problem's scales; empty if it can, or if
        the problem is not scaled."""
        return ""

    def wordless(self) -> str:
        """Why kernels of the caller cannot wait for rows; empty if they can."""
        if self.hosts.count == 1:
            return ""
        return (
            f"the ranks of this group are on {self.hosts.count} hosts, and a block has words for "
            "rows of one host only; pass a group of ranks of one host"
        )

    def untiled(self, problem: Problem, schedule: Schedule) -> str:
        """Why a product whose tiles wait cannot serve a problem; empty if it can."""
        return ""

    def timed_out(
        self, plan: Plan, missing: Missing, seconds: float, ended: bool = False
    ) -> SignalTimeout:
        """The error of a step that has waited too long, or for a peer whose process has ended."""
        step, signal = plan.steps[missing.step], missing.signal
        if signal is not None and signal in step.gates:  # name the piece that has not arrived
            step = step._replace(label=f"{step.label} {signal.first}:{signal.last}")
        return SignalTimeout(
            operator=plan.problem.operator,
            rank=plan.rank,
            peer=missing.peer,
            step=f"{step.label} ({step.op} on {step.lane})",
            schedule=plan.schedule,
            seconds=seconds,
            wanted=missing.wanted,
            found=missing.actual,
            ended=ended,
            host=self.hosts.named(missing.peer),
        )

    @abstractmethod
    def copy_engines(self) -> int | None:
        """Number of copies that the device can run at once; None if the engine cannot say."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the engine. Does not wait for peers."""
