"""Workspaces: the engine, board, symmetric memory and programs of a group, kept between calls."""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import math
import os
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_process_group_name

from ficco.compute.products import OVERRIDES, refuse_overrides
from ficco.compute.program import Groups, Program, Slot, Symmetric
from ficco.compute.ragged_blocks import groups_of, made_whole
from ficco.dma import engine_name, make_engine
from ficco.dma.engine import Engine
from ficco.dma.host import backend_of, hosts_of
from ficco.dma.patience import limit_of
from ficco.errors import (
    REVIVE,
    UNSCHEDULED,
    BackendError,
    FiccoError,
    PeerFailed,
    RankMismatch,
    carry_out,
    reason_of,
)
from ficco.heuristics import Decision, decide
from ficco.machine import Machine, digest, find, nearest
from ficco.machine.files import cache_dir
from ficco.options import Options, carried, current
from ficco.plan import Plan
from ficco.problems.specification import AnyProblem
from ficco.runtime import counters
from ficco.runtime.board import REFUSED, Board, published
from ficco.runtime.watchdog import Watchdog
from ficco.schedules import Schedule

#: Calls that may be in flight on a group at once. With two, a call does not wait until the peers
#: have finished the one before.
SLOTS = 2

#: Kinds of calls that are remembered, about 0.1 MB each in a group of 8. Without a limit, memory
#: would grow forever if rows change in every step, as those of experts do.
KINDS = 1024

#: Seconds that a process waits at its end for stuck calls, in addition to their timeout.
GRACE_S = 2.0


@dataclass(frozen=True)
class RankMachine:
    """The machine description that a rank uses. The ranks compare its text."""

    machine: Machine | None

    @cached_property
    def text(self) -> str:
        if self.machine is None:
            return "no machine description"
        return f"machine {self.machine.name} ({digest(self.machine):010x})"


@dataclass
class CachedCall:
    """The cached Plan of a kind of call, and its Program on each slot.

    Attributes:
        columns: columns of b in each of several calls, where one call would need more memory than
            ``workspace_bytes``; 0 if one call suffices.
        single: see :meth:`Workspace.slot`.
        eager: programs of eager calls, by the turn of their slot.
        latest: number of the latest call of this kind.
        increment: addition of a call to the counters; calls by columns add their own.
        exposure: why a call hides nothing; None if it overlaps.
    """

    plan: Plan
    digest: int
    single: int
    source: tuple[Symmetric, int] | None
    columns: int = 0
    programs: dict[int, Program] = field(default_factory=dict)
    eager: dict[int, Program] = field(default_factory=dict)
    latest: int = 0
    increment: counters.Increment = field(
        default_factory=lambda: counters.Increment(counters.Sums())
    )
    exposure: counters.Exposure | None = None

    @cached_property
    def out(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        return self.plan.shape("out")

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        dtype: torch.dtype = getattr(torch, self.plan.buffer["out"].dtype)
        return dtype

    @cached_property
    def fresh(self) -> list[tuple[str, tuple[int, int], tuple[int, int], torch.dtype]]:
        """Name, shape, strides and dtype of each buffer that a repeated call allocates."""
        buffers = [("out", self.out, self.dtype), *self.allocated]
        return [(name, shape, (shape[1], 1), dtype) for name, shape, dtype in buffers]

    @cached_property
    def left(self) -> str:
        """Name of the first operand: ``a``, or the source that the call casts to ``a``."""
        return self.plan.buffers[0].name

    @cached_property
    def allocated(self) -> list[tuple[str, tuple[int, int], torch.dtype]]:
        """Name, shape and dtype of each buffer that a call allocates besides the result."""
        return [
            (buffer.name, self.plan.shape(buffer.name), getattr(torch, buffer.dtype))
            for buffer in self.plan.buffers
            if buffer.memory in ("result", "local") and buffer.name != "out"
        ]

    @cached_property
    def groups(self) -> list[Groups]:
        """Groups of the plan's grouped products."""
        return groups_of(self.plan)

    @cached_property
    def whole(self) -> frozenset[str]:
        """Buffers written only by grouped products, whose output can be kept instead."""
        return made_whole(self.plan)

    def forget(self, slot: Slot | None = None) -> None:
        """Drop the program of a slot that is about to be freed; by default, all programs."""
        self.eager.clear()
        for key in list(self.programs) if slot is None else [id(slot)]:
            if (program := self.programs.pop(key, None)) is not None:
                if program.slot is not None:
                    program.slot.programs.pop(program.number, None)
                program.clear()

    @property
    def captured(self) -> bool:
        """Whether a graph that may still be replayed holds a call of this kind."""
        return any(program.slot and program.slot.captured for program in self.programs.values())


class Known(NamedTuple):
    """A kind of eager call that :func:`repeat` can run.

    Attributes:
        options: those of the calls.
        layout: strides of the call's tensors, in their order.
        guard: PyTorch's check, in one call of C++, that operands have the types, devices, dtypes,
            sizes and strides of the ones that were remembered, require gradients as they did, and
            are under the same modes: of autocast, dispatch, transforms and tracing. None if the key
            tells enough.
        inert: no operand requires a gradient; otherwise only calls without gradients are known.
        autocast: the operands were cast before; the guard does not see the dtype of autocast.
    """

    workspace: Workspace
    cached: CachedCall
    options: Options
    layout: tuple[Any, ...]
    guard: Any = None
    inert: bool = True
    autocast: bool = False


#: Eager calls that can be repeated, by their arguments; for each, operands in a few layouts.
repeatable: dict[Hashable, tuple[Known, ...]] = {}
#: Layouts of operands that are remembered for the same arguments.
LAYOUTS = 4


def remember(key: Hashable, known: Known, *operands: torch.Tensor) -> None:
    """Let :func:`repeat` run the next calls with these arguments and operands like these."""
    if len(repeatable) >= KINDS:  # calls with other layouts or options share a kind
        repeatable.clear()
    earlier = repeatable.get(key, ())
    others = [one for one in earlier if one.guard and not one.guard.check(*operands)]
    repeatable[key] = (known, *others[: LAYOUTS - 1])


def _opened(
    group: ProcessGroup, device: torch.device, options: Options, operator: str
) -> tuple[Board, Engine]:
    """Open the board and the engine of a group. Collective.

    Raises:
        ValueError: the group has PyTorch's fake backend.
        PeerFailed: a rank of another host could not make its engine.
        RankMismatch: a rank of another host has another kind of engine.
    """
    if backend_of(group) == "fake":
        raise ValueError(
            f"{operator}: required a group of ranks that exist, such as of gloo or NCCL, got "
            "PyTorch's fake backend, whose peers send nothing; trace with fake tensors "
            "(FakeTensorMode), or use PyTorch's collectives"
        )
    name = engine_name(device, options.engine)
    seconds = options.timeout_s or limit_of(group, device)
    hosts = hosts_of(group, seconds, operator)
    board, engine = Board(group, seconds, operator, hosts), None
    try:
        engine = make_engine(name, group, device, options.signals, seconds, hosts)
        board.begin(engine.kind, seconds, operator)
        engine.connect()
    except BaseException as error:
        if not isinstance(error, (RankMismatch, PeerFailed)):  # both come from the board
            text, how = published(error)
            board.post(0, board.describe(text, same_as=how))
        if engine is not None:
            with contextlib.suppress(BackendError):  # the first error is the cause
                engine.close()
        board.close()  # ends the thread that serves other hosts
        raise
    return board, engine


class Workspace:
    """State of one group on one device.

    Attributes:
        engine: runs the calls.
        board: compares the calls with those of the other ranks.
        calls: number of the latest call, the same on every rank.
        limit_s: seconds that a call waits for a peer, unless the options set a limit.
        allocations: symmetric memory of tensors from :meth:`empty`, by address.
        held: buffers of ficco's own in ``allocations``, which have ``nbytes``.
        programs: cached Plans and Programs, by the key of a kind of call.
        error: the error that made the group unusable; None while the group is usable.
        block_open: whether a block of :func:`ficco.arriving` is open.
        thread: identifier of the thread inside a call; 0 if there is none.
        enqueued: kind of the latest call while the thread enqueues it before posting it.
    """

    block_open = False
    thread = 0
    enqueued: CachedCall | None = None

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        options: Options,
        operator: str,
        opened: tuple[Board, Engine] | None = None,
    ) -> None:
        """``opened``: an existing board and engine; by default the group opens its own."""
        self.group, self.limit_s = group, limit_of(group, device)
        self.group_name = _get_process_group_name(group)  # also of a group that has none
        self.board, self.engine = opened or _opened(group, device, options, operator)
        self.name, self._overrides = self.engine.name, OVERRIDES[device.type]
        self.calls = 0
        self.programs: dict[Hashable, CachedCall] = {}
        self.error: FiccoError | None = None
        self._published: tuple[str, str] | None = None  # text and kind of `error` for the peers
        self.closed = False
        self._known: dict[str | None, RankMachine] = {}
        # Slots by capture id, 0 for eager calls. A graph owns its slots, because a replay may run
        # at the same time as eager calls.
        self._slots: dict[int, list[Slot | None]] = {}
        self._watched: dict[int, Slot | None] = {}  # slots of collectives
        self._pinned: list[Slot] = []
        self.allocations: dict[int, Symmetric] = {}
        self.held: list[Any] = []
        self.watchdog = Watchdog(self) if self.engine.asynchronous else None
        self.engine.interrupt = self.interrupt

    def interrupt(self) -> None:
        """Raise if the ranks disagree or a rank has failed. An engine calls this while it waits."""
        if mismatch := self.board.mismatch(self.calls):
            raise mismatch

    def begin(self, operator: str, options: Options) -> None:
        """Begin the next call under the current options.

        Raises:
            NotImplementedError: ``torch.library`` replaces PyTorch's matrix products.
        """
        engine, thread = self.engine, get_ident()
        limit = options.timeout_s or self.limit_s
        if self.thread and self.thread != thread:  # it came after `workspace_for` had looked
            refusal = FiccoError(_THREADS.format(operator))
            refusal._unnumbered = True  # type: ignore[attr-defined]
            raise refusal
        self.thread = thread
        engine.timeout_s, engine.operator, engine.replays = limit, operator, options.replay
        if (watchdog := self.watchdog) is not None:
            watchdog.timeout_s, watchdog.on_timeout = limit, options.on_timeout
        self.calls += 1
        if not self._overrides.isdisjoint(torch.library._impls):
            refuse_overrides(self._overrides)

    def meet(self, operator: str, request: str) -> None:
        """Wait until all ranks have made this request, which counts as a call. Collective.

        Raises:
            SignalTimeout, PeerFailed, RankMismatch: a rank is absent, or requests something else.
        """
        try:
            self.begin(operator, current())
            self.board.post(self.calls, self.board.describe(request))
            self.board.agree(self.calls, self.engine.timeout_s, operator, UNSCHEDULED)
        except BaseException as error:
            self.end(error)
            raise
        self.thread = 0

    def end(self, error: BaseException) -> None:
        """Publish that this rank's latest call ended with an error, so that peers stop waiting.

        If all ranks refuse a call before posting it, the group stays usable, even if their errors
        differ. An error of a part of a call has already been published by that part. A call that
        is refused because another thread is inside one has no number.
        """
        if getattr(error, "_unnumbered", False):
            return
        self.thread = 0
        note_told(error)
        if self.board.refused(self.calls):
            return
        if self.board.posted(self.calls):
            self.fail(error)
        else:
            self._tell(reason_of(error), REFUSED)

    def fail(self, error: BaseException) -> None:
        """Mark the group as unusable, because its signal words are out of step, and publish the
        error unless the peers know it.

        Each later call publishes the error again: the entry of that call on the board may have
        overwritten the watchdog's entry about an earlier call.
        """
        if self.error is None:
            if not isinstance(error, (RankMismatch, PeerFailed)):  # both come from the board
                self._published = published(error)
            if not isinstance(error, FiccoError):
                error = FiccoError(
                    f"a call of this group was broken off by {reason_of(error)}. Its ranks are no "
                    f"longer in step. {REVIVE}"
                )
            self.error = copy.copy(error)  # without its traceback, which keeps tensors alive
        if self._published is not None:
            self._tell(*self._published)

    def post_enqueued(self) -> None:
        """Post the latest call if its thread has not finished enqueueing it, so that the ranks can
        compare it. The watchdog calls this, since the driver can block that thread."""
        number, cached = self.calls, self.enqueued
        if cached is not None and number == self.calls:
            self.board.post(number, cached.digest)
            if self.error is not None:  # the entry may overwrite that of the error
                self.fail(self.error)

    def _tell(self, text: str, how: str) -> None:
        self.board.post(self.calls, self.board.describe(text, same_as=how))

    def raise_error(self) -> None:
        """Raise the error that made the group unusable, if there is one."""
        if self.closed:
            raise FiccoError("the workspace of this group is closed; make a new group")
        if self.error is not None:
            raise _repeated(self.error)

    @property
    def occupied(self) -> bool:
        """Whether another thread is inside a call, or a block of :func:`ficco.arriving` is open."""
        return self.block_open or self.thread not in (0, get_ident())

    def refuse_within_block(self, operation: str) -> None:
        """Raise ``FiccoError`` if a block of :func:`ficco.arriving` is open on the group."""
        if self.block_open:
            raise FiccoError(
                f"{operation}: a block of ficco.arriving on this group is not over; leave it "
                "first, or use another group"
            )

    def known(self, wanted: str | None) -> RankMachine:
        """The machine description with this name or path; by default, that of this host.

        Raises:
            ConfigError: the file, or the file that ``FICCO_MACHINE`` names, cannot be used.
        """
        if wanted not in self._known:
            fingerprint = self.engine.fingerprint()
            self._known[wanted] = RankMachine(find(wanted, fingerprint) or nearest(fingerprint))
        return self._known[wanted]

    def decide(
        self, problem: AnyProblem, wanted: str | Schedule, machine: str | None, **how: Any
    ) -> Decision:
        """A decision (``how``: :func:`ficco.heuristics.decide`) for the machine with this name or
        path. The model's choice is stored in the user's cache folder."""
        known, folder = self.known(machine).machine, cache_dir() / "decisions"
        return decide(problem, wanted, machine=known, folder=folder, **how)

    def keep(self, key: Hashable, cached: CachedCall) -> None:
        """Cache a kind of call.

        With ``KINDS`` kinds in the cache, the least recently called half of the kinds that no graph
        holds is evicted. The next call of an evicted kind waits for the peers to agree, like a new
        kind.
        """
        if len(self.programs) >= KINDS and not self.engine.capturing():
            self.engine.synchronize()  # the watchdog looks up the programs of running calls
            self._forget()
            old = [(call.latest, key) for key, call in self.programs.items() if not call.captured]
            for _, gone in sorted(old, key=lambda pair: pair[0])[: len(old) // 2]:
                self.programs.pop(gone).forget()
        self.programs[key] = cached

    def _forget(self) -> None:
        """Let no call repeat an earlier one of this group."""
        for key, kinds in list(repeatable.items()):  # threads may add others
            if any(known.workspace is self for known in kinds):
                repeatable.pop(key, None)

    def slot(self, plan: Plan, single: int) -> Slot | None:
        """Slot of the latest call. A slot that is too small for the plan grows, which is
        collective.

        ``single``: 0 for slots by turns, otherwise the number, from 1, of the slot that all calls
        of this kind use. Such calls wait for each other, and take the memory of one slot.
        """
        capture = self.engine.capturing() if self.engine.asynchronous else 0
        if plan.collective:
            if capture not in self._watched:
                self._watched[capture] = self.engine.watch(bool(capture))
            return self._watched[capture]
        if not plan.words:
            return None
        slots = self._slots.get(capture) or self._slots.setdefault(capture, [None] * SLOTS)
        index = single - 1 if single else self.calls % SLOTS
        slot = slots[index]
        if slot is None or plan.words > slot.words or plan.slot_bytes > slot.nbytes:
            slot = slots[index] = self._grow(slots, index, plan, bool(capture))
        return slot

    def _grow(self, slots: list[Slot | None], index: int, plan: Plan, captured: bool) -> Slot:
        words, nbytes, old = plan.words, plan.slot_bytes, slots[index]
        if old is not None:
            words, nbytes = max(words, old.words), max(nbytes, old.nbytes)
            if captured:
                slots[index] = None
                self._pinned.append(old)
            else:
                # Freeing memory blocks all threads of the process until the device is idle, the
                # watchdog included. So calls on this slot must end before it is freed.
                self.engine.retire(old)
                self.engine.synchronize()
                slots[index] = None
                self._free(old)
        memory = self.engine.symmetric(self.engine.slot_bytes(words, nbytes))
        return self.engine.slot(memory, words, nbytes, captured)

    def _free(self, slot: Slot) -> None:
        for cached in self.programs.values():
            cached.forget(slot)
        self.engine.discard(slot)

    @property
    def slots(self) -> list[Slot]:
        """All slots of this workspace."""
        pools = [*self._slots.values(), list(self._watched.values())]
        return [slot for pool in pools for slot in pool if slot is not None] + self._pinned

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory of all slots and of :attr:`held`, without other tensors from
        :meth:`empty`."""
        slots = [slot.memory for slot in self.slots if slot.memory is not None]
        return sum(memory.nbytes for memory in (*slots, *self.held))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor in symmetric memory. Collective.

        The allocation counts as two calls on the board: in the first the ranks agree on the
        request, in the second they learn whether every rank got the memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        engine, board, seconds = self.engine, self.board, current().timeout_s or self.limit_s
        engine.timeout_s, engine.operator, self.thread = seconds, "empty", get_ident()
        request = board.describe(f"empty(shape={shape}, dtype={dtype})")
        try:
            self.calls += 1
            board.post(self.calls, request)
            board.agree(self.calls, seconds, "empty", UNSCHEDULED)
            self.calls += 1
            board.post(self.calls, request)
            memory = engine.symmetric(max(nbytes, dtype.itemsize))
        except FiccoError as error:
            self.end(error)
            raise
        except BaseException as error:  # out of memory, say: harmless if all ranks fail
            self._tell(reason_of(error), REFUSED)
            board.await_same(self.calls)
            self.end(error)
            raise
        tensor = memory.tensor[:nbytes].view(dtype).view(shape)
        start = memory.tensor.data_ptr()
        self.allocations[start] = memory
        self.thread = 0
        return tensor

    def symmetric_source(self, a: torch.Tensor) -> tuple[Symmetric, int] | None:
        """Symmetric allocation that holds a matrix, and the matrix's offset in bytes; None if the
        matrix is not row-major or is in other memory.

        The test compares strides. ``is_contiguous()`` is True for any matrix of at most one row, so
        ranks with different numbers of rows could disagree.
        """
        if a.stride() != (a.shape[1], 1):
            return None
        memory = self.allocations.get(a.untyped_storage().data_ptr())
        if memory is None:
            return None
        return memory, int(a.storage_offset()) * a.itemsize  # an empty tensor has no address

    def addresses(self, tensor: torch.Tensor) -> list[int] | None:
        """Local addresses of every rank's part of a tensor from :meth:`empty`, by rank; None for
        any other tensor."""
        start = tensor.untyped_storage().data_ptr()
        memory = self.allocations.get(start)
        if memory is None:
            return None
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return [address + offset for address in memory.addresses]

    def settle(self) -> None:
        """Wait for this rank's calls, at most until the watchdog must have reported a fault."""
        if self.watchdog is None:
            return
        end = time.monotonic() + self.watchdog.timeout_s + GRACE_S
        while self.error is None and not self.engine.idle(self.slots) and time.monotonic() < end:
            time.sleep(0.001)

    def close(self) -> None:
        """Free all memory and end all threads, without waiting for peers, also after an error."""
        if self.closed:
            return
        self.closed = True
        steps: list[Callable[[], object]] = []
        if self.watchdog is not None:
            steps.append(self.watchdog.stop)
        steps += [partial(self._free, slot) for slot in self.slots]
        steps += [memory.free for memory in self.allocations.values()]
        try:
            carry_out([*steps, self.engine.close, self.board.close])
        finally:
            pools = self._slots, self._watched, self._pinned
            allocated = self.allocations, self.held
            self._forget()
            for cache in (self.programs, *pools, *allocated):
                cache.clear()


def _repeated(error: FiccoError) -> FiccoError:
    """Copy of an earlier call's error, for a later call to raise."""
    again = copy.copy(error)
    again.args = (f"an earlier call of this group failed: {error}",)
    return again


def note_told(error: BaseException) -> None:
    """Mark an error as published, so that no caller publishes it again."""
    error._told_peers = True  # type: ignore[attr-defined]


def is_told(error: BaseException) -> bool:
    """Whether an error has been published to the peers."""
    return getattr(error, "_told_peers", False)


#: Error text for a call while another thread is inside a call of the group.
_THREADS = (
    "{}: required one thread at a time in a group, got a call while another thread is inside one; "
    "let the threads take turns in an order that is the same on all ranks, or give each thread a "
    "group of its own"
)

_Key = tuple[ProcessGroup, torch.device, str | None]
_workspaces: dict[_Key, Workspace] = {}
_failed: dict[_Key, FiccoError] = {}
_begun: set[_Key] = set()  # workspaces under construction
_inherited: dict[_Key, Workspace | None] = {}  # the parent's, after a fork


def workspace_of(group: ProcessGroup, device: torch.device, operator: str = "ficco") -> Workspace:
    """Workspace of a group on a device. The first call for a group is collective; its errors name
    the operator."""
    options = current()
    key = (group, device, options.engine)
    workspace = _workspaces.get(key)
    if workspace is None or workspace.closed:
        if key in _failed:
            raise _repeated(_failed[key])
        if key in _inherited:
            raise FiccoError(
                f"{operator}: this process was forked after ficco was used on this group, whose "
                "engine and place among the ranks stay with its parent; start processes with spawn "
                "or forkserver, or make the first call in the child"
            )
        if key in _begun:
            raise FiccoError(_THREADS.format(operator))
        if device.type == "cpu" and options.engine is None and backend_of(group) == "nccl":
            raise ValueError(
                f"{operator}: required a CUDA tensor for a NCCL group, got one on cpu; move it to "
                "the GPU or use a gloo group"
            )
        _begun.add(key)
        try:
            workspace = _workspaces[key] = Workspace(group, device, options, operator)
        except BaseException as error:
            note_told(error)  # `_opened` has published it
            if isinstance(error, FiccoError):  # the next call fails without waiting
                _failed[key] = copy.copy(error)
            raise
        finally:
            _begun.discard(key)
    workspace.refuse_within_block(operator)
    if workspace.occupied:
        raise FiccoError(_THREADS.format(operator))
    return workspace


def open_workspace(group: ProcessGroup, device: torch.device, options: Options) -> Workspace | None:
    """Workspace of a group in which a call can begin now; None if there is none."""
    workspace = _workspaces.get((group, device, options.engine))
    if workspace is None or (
        workspace.error or workspace.closed or workspace.thread or workspace.block_open
    ):
        return None
    return workspace


def workspace_for(
    group: ProcessGroup, device: torch.device, operator: str, options: Options
) -> Workspace:
    """Workspace of a call under ``options``."""
    if (workspace := open_workspace(group, device, options)) is None:
        with carried(options):
            workspace = workspace_of(group, device, operator)
        workspace.raise_error()
    return workspace


def adopt(group: ProcessGroup, device: torch.device, board: Board, engine: Engine) -> Workspace:
    """Make a workspace from an existing board and engine; calls of the group under the current
    options use it."""
    options = current()
    workspace = Workspace(group, device, options, "ficco", (board, engine))
    _workspaces[group, device, options.engine] = workspace
    return workspace


def workspaces(group: ProcessGroup | None = None) -> list[Workspace]:
    """Open workspaces of a group; by default, of all groups."""
    return [
        workspace
        for (owner, _, _), workspace in list(_workspaces.items())  # threads may add others
        if group is None or owner is group
    ]


def close(group: ProcessGroup | None = None) -> None:
    """Close the workspaces of a group; by default, of all groups. See :func:`ficco.close`."""
    wanted = [key for key in list(_workspaces) if group is None or key[0] is group]
    for key in wanted:
        _workspaces[key].refuse_within_block("close")
    for key in [key for key in list(_failed) if group is None or key[0] is group]:
        del _failed[key]
    carry_out(partial(_leave, key) for key in wanted)


def _leave(key: _Key) -> None:
    workspace = _workspaces[key]

    def finish() -> None:
        try:
            if workspace.error is None:
                workspace.engine.synchronize()
        except BaseException as error:
            workspace.fail(error)  # its calls may be stuck
            raise

    carry_out([finish, workspace.close, partial(_workspaces.pop, key, None)])


def _close_at_exit() -> None:
    workspaces = list(_workspaces.values())
    # `close` stops the watchdog; a call that is stuck after that would block the exit.
    carry_out(step for workspace in workspaces for step in (workspace.settle, workspace.close))
    _workspaces.clear()


atexit.register(_close_at_exit)


def _leave_to_parent() -> None:
    """After a fork, in the child: leave the parent's workspaces alone. The extra reference also
    keeps destructors of events and graphs from running at exit."""
    for workspace in _workspaces.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(workspace))
    _inherited.update(dict.fromkeys(_begun))  # peers cannot tell this process from its parent
    _inherited.update(_workspaces)
    _begun.clear()
    _workspaces.clear()
    repeatable.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
