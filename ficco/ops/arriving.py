"""An all-gather that runs around the caller's kernels, which wait for the rows that they read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.compute.buffers import gathered_rows
from ficco.compute.program import Call
from ficco.errors import FiccoError
from ficco.ops.call import keep_to_cap, row_major
from ficco.ops.entry import check_traced, tells_refusals
from ficco.ops.operands import check_dtype, frozen, process_group, rows_by_rank
from ficco.options import Options, current
from ficco.problems.products import OPERATORS
from ficco.runtime.calls import Invocation, begin, new_kind, program_of
from ficco.runtime.workspace import CachedCall, Workspace, workspace_for
from ficco.schedules import Schedule
from ficco.schedules.tiled import ArrivingPiece, Gathering, gathering, own_rows, pieces_of

#: Name of the operator in errors and on the board.
NAME = "arriving"


class Arriving:
    """The rows of all ranks while they arrive, as :func:`arriving` yields them. The tensors are
    valid only within the block.

    Attributes:
        buffer: [m, k], the rows of all ranks in the order of the ranks. The rank's own rows are
            present from the start.
        words: int32 [len(pieces)] on the device of the rows. A word is 0 until the rows of its
            piece have arrived, then ``ARRIVED``. Do not write to it.
        pieces: the rows of each word, in the expected order of arrival.
        own: first and last row, exclusive, of the rank's own rows.
    """

    #: Value of a word once its rows have arrived.
    ARRIVED = 1

    def __init__(
        self,
        buffer: torch.Tensor,
        words: torch.Tensor,
        pieces: tuple[ArrivingPiece, ...],
        own: tuple[int, int],
        wait: Callable[[int], None],
    ) -> None:
        self.buffer, self.words, self.pieces, self.own = buffer, words, pieces, own
        self._wait: Callable[[int], None] | None = wait

    def wait(self, piece: int) -> None:
        """Wait until a piece has arrived: on CPUs the caller waits, on a GPU the current stream.

        Raises:
            IndexError: there is no such piece.
            FiccoError: the block is over.
            SignalTimeout, RankMismatch, PeerFailed: on CPUs, the call failed.
        """
        if not 0 <= piece < len(self.pieces):
            raise IndexError(f"piece: required one of {len(self.pieces)} pieces, got {piece}")
        if self._wait is None:
            raise FiccoError("wait: the block of ficco.arriving is over; wait within the block")
        self._wait(piece)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield first and last row, exclusive: of the own rows, then of each piece after waiting
        for it (:meth:`wait`). Together they cover all rows."""
        yield self.own
        for index, piece in enumerate(self.pieces):
            self.wait(index)
            yield piece.first, piece.last

    def _close(self) -> None:
        del self.buffer, self.words
        self._wait = None


@contextmanager
def arriving(
    a_shard: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    rows: Sequence[int] | None = None,
    pieces: int | tuple[int, ...] = 4,
    order: str = "peer",
    pull: bool = False,
) -> Iterator[Arriving]:
    """Gather the rows of all ranks around the caller's own kernels (TileLink, section 3.2)::

        with ficco.arriving(a_shard) as rows:
            kernel[grid](rows.buffer, rows.words, ...)  # waits by ficco.tile.wait

    ================  ===============================================================
    ``a_shard``       [m/W, k]; leading dimensions are flattened into the rows
    ``rows.buffer``   [m, k], the rows of all ranks in the order of the ranks
    ``rows.words``    int32, one for each piece of a peer's rows: 1 once it has arrived
    ``rows.pieces``   the rows of each word, in the expected order of arrival
    ================  ===============================================================

    On a GPU, entering the block enqueues the copies and returns; the copies run concurrently with
    the block. Kernels that the block enqueues on the current stream start at once. They must wait
    for the word of a piece before they read it: in a kernel (:func:`ficco.tile.wait`), or between
    kernels (``rows.wait``). On CPUs threads copy, and ``rows.wait`` blocks. Leaving the block waits
    for all pieces, clears the words and releases the memory after the work on the block's stream.
    Other streams must have joined by then. A whole block can be captured in a graph. Where ranks
    share a GPU, a kernel that waits must leave multiprocessors for the copies.

    Every rank enters the block at the same place among its calls, with the same arguments except
    ``a_shard``. The group serves no other call within the block. There is no gradient.

    Args:
        a_shard: this rank's rows, which copies read: do not change them within the block.
        group: the ranks, default WORLD.
        rows: number of rows of each rank, if the ranks differ.
        pieces: number of pieces per shard, or their relative sizes.
        order: ``"peer"``: peer after peer, or ``"piece"``: a piece of each peer in turn.
        pull: receivers fetch the rows; otherwise senders push them.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: the dtype, the engine, a gradient or tracing is not served.
        RankMismatch: ranks make different calls.
        FiccoError: within a block, another call of its group.
        SignalTimeout, PeerFailed: as for any call: on CPUs from ``rows.wait`` or on leaving, on a
            GPU by the watchdog, which also ends kernels that wait. The time counts from the entry.

    An exception in the block propagates after the call has been completed: the peers get their
    rows and the group stays usable. Only an exception that is neither an ``Exception`` nor a
    GeneratorExit, such as KeyboardInterrupt, aborts the call.
    """
    workspace = _checked(a_shard, group)
    try:
        invocation = ArrivingCall(a_shard, rows, (pieces, order, pull))
        cached, call = begin(workspace, invocation, current())
        engine, program = workspace.engine, program_of(workspace, cached)
        if program.slot is None:  # the caller reads the only rank's rows
            call.tensors["a"] = call.tensors["a"].contiguous()
        around = engine.around(program, call)
        around.__enter__()
    except BaseException as error:
        workspace.end(error)
        raise
    arrivals = Arriving(
        gathered_rows(program, call),
        engine.words(program, call),
        pieces_of(program.plan),
        own_rows(program.plan),
        lambda piece: engine.await_rows(program, call, piece),
    )
    workspace.block_open, outcome = True, None
    try:
        yield arrivals
    except BaseException as error:
        outcome = error
    workspace.block_open = False
    arrivals._close()
    abort = None if isinstance(outcome, (Exception, GeneratorExit)) else outcome
    try:
        around.__exit__(type(abort) if abort else None, abort, None)
        workspace.raise_error()
    except BaseException as error:
        workspace.end(error)
        raise
    workspace.thread = 0
    if outcome is not None:
        if abort is not None:
            workspace.end(abort)
        raise outcome


@tells_refusals
def _checked(a_shard: torch.Tensor, group: ProcessGroup | DeviceMesh | None) -> Workspace:
    """Check the operand of a call, and return the workspace of its group and device."""
    if check_traced(a_shard=a_shard):
        raise NotImplementedError(
            "ficco.arriving is not traced; keep it out of compiled functions, or decorate its "
            "function with torch.compiler.disable"
        )
    if torch.is_grad_enabled() and a_shard.requires_grad:
        raise NotImplementedError(
            "a_shard: ficco.arriving has no gradient; pass a_shard.detach() within a "
            "torch.autograd.Function of your own"
        )
    return workspace_for(process_group(group), a_shard.device, NAME, current())


@dataclass(eq=False)
class ArrivingCall(Invocation):
    """An all-gather around a block of the caller's code."""

    a: torch.Tensor
    rows: Any
    request: tuple[int | tuple[int, ...], str, bool]
    operator: str = NAME
    purpose: str = ""

    def key(self, workspace: Workspace, options: Options) -> Hashable:
        engine, a = workspace.engine, self.a
        if why := engine.wordless():
            raise NotImplementedError(f"ficco.arriving: {why}")
        self.schedule = _schedule(*self.request)
        if a.layout is not torch.strided or a.dim() < 2:
            raise ValueError(
                f"a_shard: required a dense [..., m/W, k], got {a.layout} of shape "
                f"{list(a.shape)}; reshape it"
            )
        check_dtype(a)
        self.a = row_major(a)
        self.source = workspace.symmetric_source(self.a)
        self.rows = frozen(self.rows)
        self.place = self.source and (self.source[0].serial, self.source[1])
        sizes = NAME, self.a.shape, a.dtype, self.schedule, self.rows
        return *sizes, options.workspace_bytes, self.place

    def plan(self, workspace: Workspace, options: Options) -> CachedCall:
        engine, a, source = workspace.engine, self.a, self.source
        kind = OPERATORS["all_gather_matmul"]
        by_rank = rows_by_rank(kind, self.rows, a.shape[0], engine.rank, engine.world)
        dtype = str(a.dtype).removeprefix("torch.")
        problem = Gathering(by_rank, a.shape[1], dtype, source is not None)
        (plan,) = gathering(problem, self.schedule, [engine.rank])
        keep_to_cap(engine, plan, options.workspace_bytes)
        pulls = source is not None and self.schedule.pull
        agreed = [f"a_shard in symmetric allocation {self.place}"] if pulls else []
        return new_kind(workspace, plan, options, None, agreed, source=source)

    def allocate(self, cached: CachedCall) -> Call:
        return Call({"a": self.a})


def _schedule(pieces: int | tuple[int, ...], order: str, pull: bool) -> Schedule:
    sizes = (pieces,) if isinstance(pieces, int) else pieces
    if not isinstance(sizes, tuple) or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(
            f"pieces: required a positive number, or a tuple of relative sizes, got {pieces!r}"
        )
    if not isinstance(pull, bool):
        raise ValueError(f"pull: required True or False, got {pull!r}")
    return Schedule(False, "tiled", 1, pieces=pieces, order=order, pull=pull)
