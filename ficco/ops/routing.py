"""Which rows of the blocks of an expert-parallel layer the tokens of a rank take.

A rank has ``capacity`` rows for each expert of every rank, or as many as it has pairs. A *pair* is
a token and one of the experts that its router chose. Pairs take the rows of their expert in the
order of choices, then of tokens: first choices come first. Other ranks are asked only if there are
as many rows as pairs, for all their counts, or if what is left over goes in further rounds, for the
largest one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ficco.accelerator import gpu
from ficco.errors import UNSCHEDULED, FiccoError
from ficco.ops.entry import check_traced, tells_refusals
from ficco.ops.operands import process_group
from ficco.ops.record import Declared, declare, overload
from ficco.options import current
from ficco.runtime.board import TOLD
from ficco.runtime.workspace import Workspace, workspace_for, workspaces

if TYPE_CHECKING:
    from ficco.dma.engine import Engine

#: What becomes of pairs that find no room.
OVERFLOWS = ("drop", "again")

#: What errors and the board call it.
NAME = "route"


class Placed(NamedTuple):
    """Where the pairs of a rank go.

    Attributes:
        counts: int64 [experts], pairs for each expert.
        places: [t, top_k], how many pairs of its expert come before each; None if nobody asks.
        rows: int64 [t, top_k], the row of each pair in the first round; None if not made yet.
        held: int64 [t * top_k], without a capacity the token that has each row; None if not made
            yet.
    """

    counts: torch.Tensor
    places: torch.Tensor | None
    rows: torch.Tensor | None
    held: torch.Tensor | None = None


class Blocks:
    """The rows of a rank: ``capacity`` for each of all experts."""

    exact = False

    def __init__(self, experts: int, capacity: int | None) -> None:
        self.experts, self._capacity, self._rounds = experts, capacity, 1
        self._told = np.zeros((0, experts), np.int64)
        self.filled: dict[Hashable, Any] = {}  # what calls make of exact ones

    @property
    def capacity(self) -> int:
        """Rows of this rank for each expert; where there are as many rows as pairs, a number that
        is at least as large as any count. Then it waits for the other ranks."""
        self.settle()
        assert self._capacity is not None
        return self._capacity

    @property
    def every(self) -> np.ndarray[Any, Any]:
        """If there are as many rows as pairs, the counts of all ranks, [world, experts]; waits for
        them."""
        self.settle()
        return self._told

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        return self.experts * self.capacity

    @property
    def rounds(self) -> int:
        """How often the rows are used, the same on every rank."""
        if not self.exact:  # else once, which no rank has to be asked for
            self.settle()
        return self._rounds

    def settle(self) -> None:
        """Wait for what other ranks have to tell."""

    def tokens(self, slots: torch.Tensor, empty: int) -> torch.Tensor:
        """The token whose pair each row is in a round, int64, and ``empty`` where it is none."""
        many, top_k = slots.shape
        tokens = slots.new_full((self.rows + 1,), empty)
        pairs = torch.arange(many, device=slots.device).expand(top_k, many).t()
        return tokens.index_put_((slots,), pairs)[:-1]


class Routing(Blocks):
    """Where the tokens of a rank go: what :func:`route` gives.

    Attributes:
        indices: [t, top_k], the experts of each token.
        experts: number of experts of all ranks.
        counts: int64 [experts], the pairs of this rank for each expert, on the device of
            ``indices``.
        exact: there are as many rows as pairs.
        overflow: what becomes of pairs that find no room.
    """

    def __init__(
        self,
        indices: torch.Tensor,
        experts: int,
        capacity: int | None,
        overflow: str,
        placed: Placed,
    ) -> None:
        super().__init__(experts, capacity)
        self.indices, self.exact, self.overflow = indices, capacity is None, overflow
        self.counts, self._places, self._rows, self._held = placed
        self._asked: tuple[Workspace, int] | None = None
        self._group: ProcessGroup | None = None

    def known_to(self, group: ProcessGroup) -> bool:
        """Whether the ranks of a group can use it: those that it has asked, or any."""
        return self._group is None or self._group.group_name == group.group_name

    @property
    def limit(self) -> int | None:
        """The capacity that was asked for."""
        return None if self.exact else self._capacity

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        return self.indices.numel() if self.exact else self.experts * self.capacity

    @property
    def dropped(self) -> torch.Tensor:
        """Pairs of this rank that find no room, int64 [experts]."""
        return (self.counts - self.capacity * self.rounds).clamp(min=0)

    def slots(self, turn: int = 0) -> torch.Tensor:
        """The row that each pair takes in a round, int64 [t, top_k]; :attr:`rows` for pairs that
        take none."""
        if not turn and self._rows is not None:
            return self._rows
        assert self._places is not None
        if self.exact:
            return (self.counts.cumsum(0) - self.counts)[self.indices.long()] + self._places
        row = self._places - turn * self.capacity if turn else self._places
        taken = row < self.capacity
        if turn:
            taken &= row >= 0
        return torch.where(taken, self.indices.long() * self.capacity + row, self.rows)

    def tokens(self, slots: torch.Tensor, empty: int) -> torch.Tensor:
        """See :meth:`Blocks.tokens`."""
        return super().tokens(slots, empty) if self._held is None else self._held

    # What is asked of the other ranks.

    def ask(self, workspace: Workspace, number: int) -> None:
        """Tell the other ranks the counts of this one, or the largest, with the call of this
        number: at once on a CPU, otherwise when this rank asks for theirs, so that the host can go
        on until the device has counted."""
        told = self.counts if self.exact else self.counts.max()[None]
        self._asked, self._counted = (workspace, number), None
        self._group = workspace.group
        if told.is_cpu:
            self._tells = told
            workspace.board.tell(number, told.numpy())
            return
        self._tells = torch.empty_like(told, device="cpu", pin_memory=True)
        self._tells.copy_(told, non_blocking=True)
        self._counted = gpu.Event()
        self._counted.record()

    def settle(self) -> None:
        """Wait for what other ranks have to tell."""
        if self._asked is None:
            return
        workspace, number = self._asked
        if workspace.closed:  # a later call has another one, whose calls are numbered anew
            raise FiccoError(
                "routing: required one that was made, or first used, since ficco.close() was last "
                "called for its group, got one that waits for what the ranks told each other "
                "before; call ficco.route again"
            )
        self._asked = None
        try:
            workspace.raise_error()
            if self._counted is not None:
                self._counted.synchronize()
                workspace.board.tell(number, self._tells.numpy())
            seconds, board = current().timeout_s or workspace.limit_s, workspace.board
            board.agree(number, seconds, NAME, UNSCHEDULED)
            self._told = board.told(number, len(self._tells), seconds, NAME)
            if self.exact and self._told[board.rank].sum() != self.indices.numel():
                raise ValueError(f"{_numbers(self.experts)}, got others; {_ROUTER}")
        except BaseException as error:
            workspace.end(error)
            raise
        most = int(self._told.max())
        if self._capacity is None:
            self._capacity = rounded(most)
        elif self.overflow == "again":
            self._rounds = max(-(-most // self._capacity), 1)


def _placed(
    indices: torch.Tensor, experts: int, capacity: int | None, engine: Engine | None = None
) -> Placed:
    """Where pairs go; an engine may have a kernel for it."""
    made = None if engine is None else engine.route(indices.long(), experts, capacity or 0)
    if made is None:
        _check_experts(indices, experts)
        return Placed(*_counted(indices, experts), None)
    counts, places, rows, held = made
    if capacity is None:  # the host will look at the counts
        return Placed(counts, places, rows, held)
    # It leaves out what does not exist.
    torch._assert_async(counts.sum() == indices.numel(), _numbers(experts))
    return Placed(counts, places, rows)


def _counted(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many pairs each expert has, int64, and how many of its expert come before each pair."""
    many, top_k = indices.shape
    choices = indices.t().reshape(1, -1)  # a row; first choices first
    numbers = torch.arange(experts, device=indices.device)[:, None]
    # Of all pairs so far those of each expert: sums along rows, where a sort takes many passes.
    so_far = (choices == numbers).cumsum(1, dtype=torch.int32)
    last = so_far[:, -1:] if choices.numel() else so_far.new_zeros(experts, 1)
    places = so_far.gather(0, choices.long()).view(top_k, many) - 1
    return last.flatten().long(), places.t()


def rounded(rows: int) -> int:
    """A number of rows that is at least as large, by at most an eighth or 8 rows: one of few, so
    that there are few kinds of calls.

    >>> [rounded(rows) for rows in (0, 1, 8, 9, 65, 1000, 1025)]
    [8, 8, 8, 16, 72, 1024, 1152]
    """
    granule = 1 << max((rows - 1).bit_length() - 4, 3)
    return max(-(-rows // granule), 1) * granule


@tells_refusals
def route(
    indices: torch.Tensor,
    experts: int,
    *,
    capacity: int | None = None,
    on_overflow: str = "drop",
    group: ProcessGroup | DeviceMesh | None = None,
) -> Routing:
    """Give the tokens of this rank their rows in the blocks of an expert-parallel layer.

    :func:`ficco.experts` does this itself if it gets indices. Call it before work that can go on
    meanwhile, such as a shared expert, where ranks have to tell each other how many tokens they
    have: without a capacity, or with ``on_overflow="again"``. Every rank then makes the call, among
    its others in the same place.

    Args:
        indices: [t, top_k], whole numbers: the experts of each token, all of them different.
        experts: number of all experts.
        capacity: rows of each rank for each expert. None: as many as it has pairs, no more and no
            less; the host waits for its device.
        on_overflow: what becomes of pairs beyond the capacity: ``"drop"``, they count as zero; or
            ``"again"``, all are served, in as many rounds as that takes.
        group: the ranks, default WORLD.

    ``torch.compile`` traces it with a capacity and ``on_overflow="drop"``; otherwise it is a graph
    break there.

    Returns:
        Routing: ``counts``, ``dropped``, ``capacity`` and ``rounds`` tell what became of them.

    Raises:
        ValueError: an argument is wrong. On CPUs also if there is no expert of that number; on a
            GPU that is an assertion of the device or, without a capacity, raised when the counts of
            other ranks are asked for.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call, when the result is used.
    """
    traced, compiling = _watched(indices)
    members = process_group(group)
    _check(indices, experts, capacity, on_overflow)
    if traced and capacity is not None and on_overflow == "drop":
        counts, rows = overload(NAME)(indices, experts, capacity, members.group_name)
        return Routing(indices, experts, capacity, on_overflow, Placed(counts, None, rows))
    if traced and not compiling:
        raise NotImplementedError(
            "ficco.route: tensors that are traced or wrapped are not served without a capacity, or "
            "by further rounds; pass indices to ficco.experts"
        )
    return make_routing(indices, experts, capacity, on_overflow, members)


def _watched(indices: torch.Tensor) -> tuple[bool, bool]:
    """Whether a call is traced or watched, and whether by a compiler. In one function: PyTorch 2.6
    runs what has a graph break uncompiled, and compiles what that calls."""
    return check_traced(indices=indices), torch.compiler.is_compiling()


@torch._disable_dynamo
def make_routing(
    indices: torch.Tensor, experts: int, capacity: int | None, overflow: str, group: ProcessGroup
) -> Routing:
    """The same of indices that have data, and of arguments that are right."""
    with torch.no_grad():
        if capacity is not None and overflow == "drop":
            engine = _engine(indices, group)
            placed = _placed(indices, experts, capacity, engine)
            return Routing(indices, experts, capacity, overflow, placed)
        workspace = workspace_for(group, indices, "indices", NAME, current())
        return _asking(workspace, indices, experts, capacity, overflow)


def _engine(indices: torch.Tensor, group: ProcessGroup) -> Engine | None:
    """The engine of a group that has made calls on the device of indices."""
    known = (one.engine for one in workspaces(group))
    return next((one for one in known if one.device == indices.device), None)


def _asking(
    workspace: Workspace, indices: torch.Tensor, experts: int, capacity: int | None, overflow: str
) -> Routing:
    """A routing for which ranks tell each other something."""
    try:
        workspace.begin(NAME, current())
        if capacity is None and experts > TOLD:
            raise NotImplementedError(
                f"ficco.route: ranks tell each other the counts of at most {TOLD} experts, got "
                f"{experts}; pass a capacity"
            )
        placed = _placed(indices, experts, capacity, workspace.engine)
        found = Routing(indices, experts, capacity, overflow, placed)
        found.ask(workspace, workspace.calls)
        text = f"route(experts={experts}, capacity={capacity}, on_overflow={overflow})"
        workspace.board.post(workspace.calls, workspace.board.describe(text))
        workspace.raise_error()
        workspace.thread = 0
    except BaseException as error:
        workspace.end(error)
        raise
    return found


def _check(indices: torch.Tensor, experts: int, capacity: int | None, overflow: str) -> None:
    whole = (
        not (indices.is_floating_point() or indices.is_complex()) and indices.dtype != torch.bool
    )
    if indices.dim() != 2 or not whole:
        raise ValueError(
            f"indices: required whole numbers [t, top_k], got {indices.dtype} of shape "
            f"{list(indices.shape)}; reshape them"
        )
    if type(experts) is not int or experts < 1:
        raise ValueError(f"experts: required at least 1 in all, got {experts!r}")
    if capacity is not None and (type(capacity) is not int or capacity < 1):
        raise ValueError(
            f"capacity: required at least 1 row, or None for as many as are needed, got "
            f"{capacity!r}"
        )
    if overflow not in OVERFLOWS:
        raise ValueError(f"on_overflow: required one of {', '.join(OVERFLOWS)}, got {overflow!r}")


#: What to do about experts that do not exist.
_ROUTER = "pass the choices of a router among these"


def _numbers(experts: int) -> str:
    """What is required of indices, for errors."""
    whose = f"{experts} in all, for ficco.experts those of up on every rank"
    return f"indices: required experts from 0 to {experts - 1} ({whose})"


def _check_experts(indices: torch.Tensor, experts: int) -> None:
    """All experts that are named exist: on a GPU without waiting for it."""
    if not indices.numel():
        return
    low, high = torch.aminmax(indices)
    if indices.is_cpu:
        if low < 0 or high >= experts:
            raise ValueError(f"{_numbers(experts)}, got {int(low)} to {int(high)}; {_ROUTER}")
        return
    torch._assert_async((low >= 0) & (high < experts), _numbers(experts))


# What compilers see: with a capacity, and nothing in further rounds.


def _traced(
    indices: torch.Tensor, experts: int, capacity: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The counts of a routing, and its slots, which lie choice after choice."""
    members = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    placed = _placed(indices, experts, capacity, _engine(indices, members))
    slots = Routing(indices, experts, capacity, "drop", placed).slots()
    return placed.counts, slots.t().contiguous().t()


def _fake(
    indices: torch.Tensor, experts: int, capacity: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    many, top_k = indices.shape
    counts = indices.new_empty(experts, dtype=torch.int64)
    return counts, indices.new_empty(top_k, many, dtype=torch.int64).t()


declare(
    NAME,
    Declared(
        "(Tensor indices, SymInt experts, SymInt capacity, str group) -> (Tensor, Tensor)",
        _traced,
        _fake,
    ),
)
