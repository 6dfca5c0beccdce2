"""Workspaces: what a group keeps between calls. Engine, board, symmetric memory, programs."""

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

import torch
from torch.distributed import ProcessGroup

from ficco.compute.products import OVERRIDES, refuse_overrides
from ficco.compute.program import Program, Slot, Symmetric
from ficco.dma.choose import engine_name, make_engine
from ficco.dma.engine import Engine
from ficco.dma.host import backend_of
from ficco.dma.hosts import hosts_of
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
from ficco.machine import Machine, digest, find, nearest
from ficco.options import Options, current
from ficco.plan import Plan
from ficco.runtime.board import REFUSED, Board, published
from ficco.runtime.watchdog import Watchdog

#: Calls that may be in flight on a group at once. With two, a call does not wait until the peers
#: have finished the one before.
SLOTS = 2

#: Kinds of calls that are remembered, about 0.1 MB each in a group of 8. Without a limit, memory
#: would grow forever if rows change in every step, as those of experts do.
KINDS = 1024

#: Seconds that a process waits at its end for stuck calls, in addition to their timeout.
GRACE_S = 2.0


@dataclass(frozen=True)
class Known:
    """What a rank knows about its kind of host. The ranks compare its text."""

    machine: Machine | None

    @cached_property
    def text(self) -> str:
        if self.machine is None:
            return "no machine description"
        return f"machine {self.machine.name} ({digest(self.machine):010x})"


@dataclass
class CachedCall:
    """What is kept for a kind of call: its Plan, and a Program per slot.

    Attributes:
        columns: if not 0, the whole call would need more memory than ``workspace_bytes``, and runs
            as several calls, each on so many columns of b.
        latest: number of the latest call of the kind.
    """

    plan: Plan
    digest: int
    single: bool
    source: tuple[Symmetric, int] | None
    columns: int = 0
    programs: dict[int, Program] = field(default_factory=dict)
    latest: int = 0

    @cached_property
    def out(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        return self.plan.shape("out")

    @cached_property
    def dtype(self) -> torch.dtype:
        """That of the result."""
        dtype: torch.dtype = getattr(torch, self.plan.buffer["out"].dtype)
        return dtype

    @cached_property
    def allocated(self) -> list[tuple[str, tuple[int, int], torch.dtype]]:
        """Name, shape and dtype of what a call allocates apart from the result."""
        return [
            (buffer.name, self.plan.shape(buffer.name), getattr(torch, buffer.dtype))
            for buffer in self.plan.buffers
            if buffer.memory in ("result", "local") and buffer.name != "out"
        ]

    def forget(self, slot: Slot | None = None) -> None:
        """Let go of the program of a slot that is about to be freed, or of all."""
        for key in list(self.programs) if slot is None else [id(slot)]:
            if (program := self.programs.pop(key, None)) is not None:
                if program.slot is not None:
                    program.slot.programs.pop(program.number, None)
                program.clear()

    @property
    def captured(self) -> bool:
        """Whether a graph holds a call of the kind, and may be replayed."""
        return any(program.slot and program.slot.captured for program in self.programs.values())


def _opened(
    group: ProcessGroup, device: torch.device, options: Options, operator: str
) -> tuple[Board, Engine]:
    """A board and an engine. Collective.

    Raises:
        ValueError: the group has PyTorch's fake backend.
        PeerFailed: a rank of another host has none.
        RankMismatch: engines of ranks on other hosts are of another kind.
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
        if not isinstance(error, (RankMismatch, PeerFailed)):  # peers read these off the board
            text, how = published(error)
            board.post(0, board.describe(text, same_as=how))
        if engine is not None:
            with contextlib.suppress(BackendError):  # the first error tells more
                engine.close()
        board.close()  # between hosts a thread looks after it
        raise
    return board, engine


class Workspace:
    """One group on one device.

    Attributes:
        engine, board: run the calls, and compare them with those of the other ranks.
        calls: number of the latest call, the same on every rank.
        limit_s: seconds that a call waits for a peer unless the options say otherwise.
        allocations: symmetric memory of tensors from :meth:`empty`, by its address.
        programs: what is kept for each kind of call, by a key of all that distinguishes kinds.
        error: why the group can no longer be used; None if it can.
        block_open: the latest call is a block of the caller's that is not over
            (:func:`ficco.arriving`).
        thread: the thread that is inside a call; 0 if none is.
    """

    block_open = False
    thread = 0

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        options: Options,
        operator: str,
        given: tuple[Board, Engine] | None = None,
    ) -> None:
        """``given``: a board and an engine to use instead of making them with the group."""
        self.group, self.limit_s = group, limit_of(group, device)
        self.board, self.engine = given or _opened(group, device, options, operator)
        self.name, self._overrides = self.engine.name, OVERRIDES[device.type]
        self.calls = 0
        self.programs: dict[Hashable, CachedCall] = {}
        self.error: FiccoError | None = None
        self._told: tuple[str, str] | None = None  # what the peers learn of it
        self.closed = False
        self._known: dict[str | None, Known] = {}
        # By capture, 0 for eager calls: a graph owns its slots, since a replay may run while eager
        # calls do.
        self._slots: dict[int, list[Slot | None]] = {}
        self._watched: dict[int, Slot | None] = {}  # for collectives
        self._pinned: list[Slot] = []
        self.allocations: dict[int, Symmetric] = {}
        self.watchdog = Watchdog(self) if self.engine.asynchronous else None
        self.engine.interrupt = self.interrupt

    def interrupt(self) -> None:
        """Raise if the ranks disagree or one has failed; called by an engine while it waits."""
        if mismatch := self.board.mismatch(self.calls):
            raise mismatch

    def begin(self, operator: str, options: Options) -> None:
        """Begin the next call, under the options in force.

        Raises:
            NotImplementedError: ``torch.library`` replaces PyTorch's matrix products.
        """
        engine = self.engine
        limit = options.timeout_s or self.limit_s
        engine.timeout_s, engine.operator, engine.replays = limit, operator, options.replay
        if (watchdog := self.watchdog) is not None:
            watchdog.timeout_s, watchdog.on_timeout = limit, options.on_timeout
        self.calls += 1
        self.thread = get_ident()
        if not self._overrides.isdisjoint(torch.library._impls):
            refuse_overrides(self._overrides)

    def end(self, error: BaseException) -> None:
        """Tell the peers that this rank's latest call ended with an error: they must not wait.

        A call that was refused before it was posted breaks nothing if all ranks refuse it, even
        with different errors. If the error comes from a part of a call, that part has already told
        the peers.
        """
        self.thread = 0
        note_told(error)
        if self.board.refused(self.calls):
            return
        if self.board.posted(self.calls):
            self.fail(error)
        else:
            self._tell(reason_of(error), REFUSED)

    def fail(self, error: BaseException) -> None:
        """Remember why the group can no longer be used (its signal words no longer say which rank
        is where), and tell the peers unless they know.

        Each call that ends because of this tells them again: its entry on the board may have
        overwritten the watchdog's entry about another call.
        """
        if self.error is None:
            if not isinstance(error, (RankMismatch, PeerFailed)):  # peers read these off the board
                self._told = published(error)
            if not isinstance(error, FiccoError):
                error = FiccoError(
                    f"a call of this group was broken off by {reason_of(error)}. Its ranks are no "
                    f"longer in step. {REVIVE}"
                )
            self.error = copy.copy(error)  # without its traceback, which keeps tensors alive
        if self._told is not None:
            self._tell(*self._told)

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

    def refuse_thread(self, operator: str) -> None:
        """``FiccoError`` if another thread is inside a call of this group."""
        if self.thread and self.thread != get_ident():
            raise FiccoError(_THREADS.format(operator))

    def refuse_within_block(self, what: str) -> None:
        """``FiccoError`` within a block of :func:`ficco.arriving`: calls of a group follow each
        other."""
        if self.block_open:
            raise FiccoError(
                f"{what}: a block of ficco.arriving on this group is not over; leave it first, or "
                "use another group"
            )

    def known(self, wanted: str | None) -> Known:
        """What is known about this kind of host, or about the machine of a name or path.

        Raises:
            ConfigError: that file, or the one that ``FICCO_MACHINE`` names, cannot be used.
        """
        if wanted not in self._known:
            fingerprint = self.engine.fingerprint()
            self._known[wanted] = Known(find(wanted, fingerprint) or nearest(fingerprint))
        return self._known[wanted]

    def keep(self, key: Hashable, cached: CachedCall) -> None:
        """Remember a kind of call.

        Once there are ``KINDS``, half of those that no graph holds are forgotten, the least
        recently called first. When such a kind is called again, the rank waits for its peers to
        agree, as for a new one.
        """
        if len(self.programs) >= KINDS and not self.engine.capturing():
            self.engine.synchronize()  # the watchdog looks up the programs of running calls
            old = [(kept.latest, key) for key, kept in self.programs.items() if not kept.captured]
            for _, gone in sorted(old, key=lambda pair: pair[0])[: len(old) // 2]:
                self.programs.pop(gone).forget()
        self.programs[key] = cached

    def slot(self, plan: Plan, single: bool) -> Slot | None:
        """The slot for the latest call. If the plan needs more, it is grown, which is collective.

        ``single``: always use the first slot, for calls whose memory is capped.
        """
        capture = self.engine.capturing() if self.engine.asynchronous else 0
        if plan.collective:
            if capture not in self._watched:
                self._watched[capture] = self.engine.watch(bool(capture))
            return self._watched[capture]
        if not plan.words:
            return None
        slots = self._slots.get(capture) or self._slots.setdefault(capture, [None] * SLOTS)
        index = 0 if single else self.calls % SLOTS
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
                # Freeing memory waits for the device while nothing else runs, not even the
                # watchdog. It must be able to find stuck calls before that, on this slot, too.
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
        """Bytes of symmetric memory that calls take, not counting tensors from :meth:`empty`."""
        return sum(slot.memory.nbytes for slot in self.slots if slot.memory is not None)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in symmetric memory. Collective.

        It counts as two calls on the board: on the first the ranks agree on the request, and the
        second tells whether they got the memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        engine, board, seconds = self.engine, self.board, current().timeout_s or self.limit_s
        engine.timeout_s, engine.operator, self.thread = seconds, "empty", get_ident()
        asked = board.describe(f"empty(shape={shape}, dtype={dtype})")
        try:
            self.calls += 1
            board.post(self.calls, asked)
            board.agree(self.calls, seconds, "empty", UNSCHEDULED)
            self.calls += 1
            board.post(self.calls, asked)
            memory = engine.symmetric(max(nbytes, dtype.itemsize))
        except FiccoError as error:
            self.end(error)
            raise
        except BaseException as error:  # such as out of memory: breaks nothing if all ranks fail
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
        """The symmetric memory that holds a contiguous matrix, and the byte at which it begins;
        None if it is in none.

        With one row or none a tensor is contiguous whatever its strides: they must tell, so that
        the slices of all ranks are in it, or none.
        """
        if a.stride() != (a.shape[1], 1):
            return None
        memory = self.allocations.get(a.untyped_storage().data_ptr())
        if memory is None:
            return None
        return memory, int(a.storage_offset()) * a.itemsize  # an empty tensor has no address

    def addresses(self, tensor: torch.Tensor) -> list[int] | None:
        """By rank, where what belongs to a tensor from :meth:`empty` is mapped here; None for any
        other tensor."""
        start = tensor.untyped_storage().data_ptr()
        memory = self.allocations.get(start)
        if memory is None:
            return None
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return [address + offset for address in memory.addresses]

    def settle(self) -> None:
        """Wait for this rank's calls, at most until the watchdog has had time to find a fault."""
        if self.watchdog is None:
            return
        end = time.monotonic() + self.watchdog.timeout_s + GRACE_S
        while self.error is None and not self.engine.idle(self.slots) and time.monotonic() < end:
            time.sleep(0.001)

    def close(self) -> None:
        """Free everything. Does not wait for peers; works after an error."""
        if self.closed:
            return
        self.closed = True
        steps: list[Callable[[], object]] = []
        if self.watchdog is not None:
            steps.append(self.watchdog.stop)
            if self.error is not None:  # calls that were broken off may wait forever
                steps.append(partial(self.engine.release, self.slots, GRACE_S))
        steps += [partial(self._free, slot) for slot in self.slots]
        steps += [memory.free for memory in self.allocations.values()]
        try:
            carry_out([*steps, self.engine.close, self.board.close])
        finally:
            for kept in (self.programs, self._slots, self._watched, self._pinned, self.allocations):
                kept.clear()


def _repeated(error: FiccoError) -> FiccoError:
    """The error of an earlier call, as a later one raises it."""
    again = copy.copy(error)
    again.args = (f"an earlier call of this group failed: {error}",)
    return again


def note_told(error: BaseException) -> None:
    """Note in an error that the peers know of it: whoever catches it tells them nothing more."""
    error._told_peers = True  # type: ignore[attr-defined]


def is_told(error: BaseException) -> bool:
    """Whether the peers know of an error."""
    return getattr(error, "_told_peers", False)


#: What a thread is told that calls while another one is inside a call of the group.
_THREADS = (
    "{}: required one thread at a time in a group, got a call while another thread is inside one; "
    "let the threads take turns in an order that is the same on all ranks, or give each thread a "
    "group of its own"
)

_Key = tuple[ProcessGroup, torch.device, str | None]
_workspaces: dict[_Key, Workspace] = {}
_failed: dict[_Key, FiccoError] = {}
_begun: set[_Key] = set()  # those that are being made
_inherited: dict[_Key, Workspace | None] = {}  # those of the parent process, after a fork


def workspace_of(group: ProcessGroup, device: torch.device, operator: str = "ficco") -> Workspace:
    """The workspace of a group on a device. The first call for a group is collective, and its
    errors name the operator."""
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
        _begun.add(key)
        try:
            workspace = _workspaces[key] = Workspace(group, device, options, operator)
        except BaseException as error:
            note_told(error)  # by the board, if there is one
            if isinstance(error, FiccoError):  # the next call does not wait for the same peers
                _failed[key] = copy.copy(error)
            raise
        finally:
            _begun.discard(key)
    workspace.refuse_within_block(operator)
    workspace.refuse_thread(operator)
    return workspace


def workspace_for(
    group: ProcessGroup, a: torch.Tensor, name: str, operator: str, options: Options
) -> Workspace:
    """The workspace of a call with an operand of that name, under the options in force."""
    workspace = _workspaces.get((group, a.device, options.engine))
    if workspace is not None and not (
        workspace.error or workspace.closed or workspace.thread or workspace.block_open
    ):
        return workspace
    if a.is_cpu and options.engine is None and backend_of(group) == "nccl":
        raise ValueError(
            f"{name}: required a CUDA tensor for a NCCL group, got one on cpu; move it to the GPU "
            "or use a gloo group"
        )
    workspace = workspace_of(group, a.device, operator)
    workspace.raise_error()
    return workspace


def adopt(group: ProcessGroup, device: torch.device, board: Board, engine: Engine) -> Workspace:
    """Let calls of a group on a device use a board and an engine that were made for it elsewhere,
    under the options in force."""
    options = current()
    workspace = Workspace(group, device, options, "ficco", (board, engine))
    _workspaces[group, device, options.engine] = workspace
    return workspace


def workspaces(group: ProcessGroup | None = None) -> list[Workspace]:
    """The open workspaces of a group, or of all."""
    return [
        workspace
        for (owner, _, _), workspace in _workspaces.items()
        if group is None or owner is group
    ]


def close(group: ProcessGroup | None = None) -> None:
    """As :func:`ficco.close`."""
    wanted = [key for key in _workspaces if group is None or key[0] is group]
    for key in wanted:
        _workspaces[key].refuse_within_block("close")
    for key in [key for key in _failed if group is None or key[0] is group]:
        del _failed[key]
    carry_out(partial(_leave, key) for key in wanted)


def _leave(key: _Key) -> None:
    workspace = _workspaces[key]

    def finish() -> None:
        try:
            if workspace.error is None:
                workspace.engine.synchronize()
        except BaseException as error:
            workspace.fail(error)  # running calls may be stuck
            raise

    carry_out([finish, workspace.close, partial(_workspaces.pop, key, None)])


def _close_at_exit() -> None:
    workspaces = list(_workspaces.values())
    # Once closing has stopped the watchdog, a stuck call would keep the process from ending.
    carry_out(step for workspace in workspaces for step in (workspace.settle, workspace.close))
    _workspaces.clear()


atexit.register(_close_at_exit)


def _leave_to_parent() -> None:
    """After a fork, in the child: neither use nor free what the parent made, not even by the
    destructors of events and graphs when the interpreter ends."""
    for workspace in _workspaces.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(workspace))
    _inherited.update(dict.fromkeys(_begun))  # of which the peers would take this for the parent
    _inherited.update(_workspaces)
    _begun.clear()
    _workspaces.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
