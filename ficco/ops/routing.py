"""The routing of an expert-parallel layer: the rows of blocks that the tokens of a rank take.

A *pair* is a token and one of the experts that the router chose for it. A rank has ``capacity``
rows for each expert of every rank, or exactly as many rows as pairs. Pairs take the rows of their
expert in the order of choices, then of tokens: first choices come first. Ranks exchange counts in
two cases: all counts if there are as many rows as pairs, and the largest one if pairs beyond the
capacity go in further rounds.
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
from ficco.ops.operands import check_dense, process_group
from ficco.ops.record import declare, overload
from ficco.options import current
from ficco.problems.specification import MOST
from ficco.runtime.board import COUNTS
from ficco.runtime.workspace import Workspace, workspace_for, workspaces

if TYPE_CHECKING:
    from ficco.dma.engine import Engine

#: Policies for pairs beyond the capacity.
OVERFLOWS = ("drop", "again")

#: Name of the operator in errors and on the board.
NAME = "route"

#: Dtypes of indices. PyTorch has too few operations for wider unsigned ones.
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Placed(NamedTuple):
    """The rows that the pairs of a rank take.

    Attributes:
        counts: int64 [experts], pairs for each expert.
        places: [t, top_k], number of earlier pairs of the same expert; None if not needed.
        rows: int64 [t, top_k], the row of each pair in the first round; None if not computed yet.
        held: int64 [t * top_k], the token in each row, without a capacity; None if not computed
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
        self._all_counts = np.zeros((0, experts), np.int64)
        self.filled: dict[Hashable, Any] = {}  # block starts of exact calls, cached

    @property
    def capacity(self) -> int:
        """Rows of this rank for each expert. If there are as many rows as pairs: an upper bound of
        all counts, after waiting for the other ranks."""
        self.settle()
        assert self._capacity is not None
        return self._capacity

    @property
    def every(self) -> np.ndarray[Any, Any]:
        """Counts of all ranks, [world, experts], if there are as many rows as pairs; waits for
        them."""
        self.settle()
        return self._all_counts

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        return self.experts * self.capacity

    @property
    def rounds(self) -> int:
        """Number of rounds, the same on every rank."""
        if not self.exact:  # exact blocks take one round: no need to wait
            self.settle()
        return self._rounds

    def settle(self) -> None:
        """Wait for the counts of the other ranks, if this rank needs them."""

    def tokens(self, slots: torch.Tensor, empty: int) -> torch.Tensor:
        """Return the token of each row in a round, int64, or ``empty`` for a row without a pair."""
        count, top_k = slots.shape
        tokens = slots.new_full((self.rows + 1,), empty)
        pairs = torch.arange(count, device=slots.device).expand(top_k, count).t()
        return tokens.index_put_((slots,), pairs)[:-1]


class Routing(Blocks):
    """The rows that the tokens of a rank take: the result of :func:`route`.

    Attributes:
        indices: [t, top_k], the experts of each token.
        experts: number of experts of all ranks.
        counts: int64 [experts], the pairs of this rank for each expert, on the device of
            ``indices``.
        exact: there are as many rows as pairs.
        overflow: policy for pairs beyond the capacity, one of :data:`OVERFLOWS`.
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
        self.exact, self.overflow = capacity is None, overflow
        self.counts, self._places, self._rows, self._held = placed
        # Rows that are computed later must not change with the caller's tensor.
        fixed = self._rows is not None and overflow == "drop"
        self.indices = indices if fixed else indices.clone()
        self._pending: tuple[Workspace, int] | None = None
        self._group: ProcessGroup | None = None

    def known_to(self, group: ProcessGroup) -> bool:
        """Whether a group can use it: the group that exchanged counts, or any without exchange."""
        return self._group is None or self._group.group_name == group.group_name

    @property
    def limit(self) -> int | None:
        """The capacity that the caller set, or None."""
        return None if self.exact else self._capacity

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        return self.indices.numel() if self.exact else self.experts * self.capacity

    @property
    def dropped(self) -> torch.Tensor:
        """Number of this rank's pairs that get no row, int64 [experts]."""
        return (self.counts - self.capacity * self.rounds).clamp(min=0)

    def slots(self, turn: int = 0) -> torch.Tensor:
        """Return the row of each pair in a round, int64 [t, top_k], or :attr:`rows` for a pair
        without a row."""
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

    # The exchange of counts.

    def ask(self, workspace: Workspace, number: int) -> None:
        """Publish this rank's counts, or the largest one, with the call of this number. On a GPU
        this is deferred to :meth:`settle`, so that the host can run ahead of the device."""
        counts = self.counts if self.exact else self.counts.max()[None]
        self._pending, self._counted = (workspace, number), None
        self._group = workspace.group
        if counts.is_cpu:
            self._published = counts
            workspace.board.publish_counts(number, counts.numpy())
            return
        self._published = torch.empty_like(counts, device="cpu", pin_memory=True)
        self._published.copy_(counts, non_blocking=True)
        self._counted = gpu.Event()
        self._counted.record()

    def settle(self) -> None:
        """Wait for the counts of the other ranks, if this rank needs them."""
        if self._pending is None:
            return
        workspace, number = self._pending
        if workspace.closed:  # the group's next workspace numbers its calls anew
            raise FiccoError(
                "routing: required one that was made, or first used, since ficco.close() was last "
                "called for its group, got one whose exchange of counts it ended; call ficco.route "
                "again"
            )
        try:
            workspace.raise_error()
            if self._counted is not None:
                self._counted.synchronize()
                workspace.board.publish_counts(number, self._published.numpy())
            seconds, board = current().timeout_s or workspace.limit_s, workspace.board
            board.agree(number, seconds, NAME, UNSCHEDULED)
            self._all_counts = board.gather_counts(number, len(self._published), seconds, NAME)
            if self.exact and self._all_counts[board.rank].sum() != self.indices.numel():
                raise ValueError(f"{_required(self.experts)}, got others; {_ROUTER}")
        except BaseException as error:
            workspace.end(error)
            raise
        self._pending = None
        largest = int(self._all_counts.max())
        if self._capacity is None:
            self._capacity = rounded(largest)
        elif self.overflow == "again":
            self._rounds = max(-(-largest // self._capacity), 1)


def _placed(
    indices: torch.Tensor, experts: int, capacity: int | None, engine: Engine | None = None
) -> Placed:
    """Place the pairs of a rank, by the engine's kernel if it has one."""
    result = None if engine is None else engine.route(indices.long(), experts, capacity or 0)
    if result is None:
        _check_experts(indices, experts)
        return Placed(*_counted(indices, experts), None)
    counts, places, rows, held = result
    if capacity is None:  # the host checks the counts
        return Placed(counts, places, rows, held)
    # The kernel does not count pairs of experts that do not exist.
    torch._assert_async(counts.sum() == indices.numel(), _required(experts))
    return Placed(counts, places, rows)


def _counted(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of pairs of each expert, int64, and the number of earlier pairs of the same
    expert for each pair."""
    count, top_k = indices.shape
    choices = indices.t().reshape(1, -1)  # a row; first choices first
    numbers = torch.arange(experts, device=indices.device)[:, None]
    # Pairs of each expert so far, by sums along rows: a sort takes many passes.
    so_far = (choices == numbers).cumsum(1, dtype=torch.int32)
    last = so_far[:, -1:] if choices.numel() else so_far.new_zeros(experts, 1)
    places = so_far.gather(0, choices.long()).view(top_k, count) - 1
    return last.flatten().long(), places.t()


def rounded(rows: int) -> int:
    """Round a number of rows up, by at most an eighth or 8 rows, so that calls have few kinds.

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
    """Assign the tokens of this rank to rows in the blocks of an expert-parallel layer.

    :func:`ficco.experts` does this itself if it gets indices. Without a capacity, or with
    ``on_overflow="again"``, ranks exchange the numbers of their tokens. Call this function first
    to overlap that exchange with other work, such as a shared expert. Every rank then makes the
    call, at the same place among its calls.

    Args:
        indices: [t, top_k], integers: the experts of each token, all of them different.
        experts: number of all experts.
        capacity: rows of each rank for each expert. None: exactly as many as it has pairs; the
            host waits for its device.
        on_overflow: policy for pairs beyond the capacity. ``"drop"``: they count as zero.
            ``"again"``: all pairs are served, in as many rounds as that takes.
        group: the ranks, default WORLD.

    ``torch.compile`` traces it with a capacity and ``on_overflow="drop"``; otherwise it is a graph
    break.

    Returns:
        Routing: has ``counts``, ``dropped``, ``capacity`` and ``rounds``.

    Raises:
        ValueError: an argument is wrong. On CPUs also if an expert does not exist; on a GPU the
            device asserts that or, without a capacity, it is raised when the counts of other ranks
            are read.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call, when the result is used.
    """
    traced, compiling = _watched(indices)
    members = process_group(group)
    check_route(indices, experts, capacity, on_overflow)
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
    """Return whether a call is traced or watched, and whether a compiler is tracing. One function
    asks both: PyTorch 2.6 runs a function with a graph break eagerly, and compiles its callees."""
    return check_traced(indices=indices), torch.compiler.is_compiling()


@torch._disable_dynamo
def make_routing(
    indices: torch.Tensor, experts: int, capacity: int | None, overflow: str, group: ProcessGroup
) -> Routing:
    """Do the same for indices that hold data and for valid arguments."""
    with torch.no_grad():
        if capacity is not None and overflow == "drop":
            engine = _engine(indices, group)
            placed = _placed(indices, experts, capacity, engine)
            return Routing(indices, experts, capacity, overflow, placed)
        workspace = workspace_for(group, indices.device, NAME, current())
        return _asking(workspace, indices, experts, capacity, overflow)


def _engine(indices: torch.Tensor, group: ProcessGroup) -> Engine | None:
    """Return the group's engine on the device of ``indices``, if the group has made calls there."""
    engines = (workspace.engine for workspace in workspaces(group))
    return next((engine for engine in engines if engine.device == indices.device), None)


def _asking(
    workspace: Workspace, indices: torch.Tensor, experts: int, capacity: int | None, overflow: str
) -> Routing:
    """Return a routing after publishing this rank's counts to the others."""
    try:
        workspace.begin(NAME, current())
        if capacity is None and experts > COUNTS:
            raise NotImplementedError(
                f"ficco.route: ranks tell each other the counts of at most {COUNTS} experts, "
                f"got {experts}; pass a capacity"
            )
        placed = _placed(indices, experts, capacity, workspace.engine)
        routing = Routing(indices, experts, capacity, overflow, placed)
        routing.ask(workspace, workspace.calls)
        text = f"route(experts={experts}, capacity={capacity}, on_overflow={overflow})"
        workspace.board.post(workspace.calls, workspace.board.describe(text))
        workspace.raise_error()
        workspace.thread = 0
    except BaseException as error:
        workspace.end(error)
        raise
    return routing


def check_route(indices: torch.Tensor, experts: int, capacity: int | None, overflow: str) -> None:
    """Raise ``ValueError`` for arguments of :func:`route` that are invalid in any call."""
    check_dense(indices=indices)
    if indices.dim() != 2 or indices.dtype not in _INTEGERS:
        raise ValueError(
            f"indices: required whole numbers [t, top_k], got {indices.dtype} of shape "
            f"{list(indices.shape)}; pass int64 of that shape"
        )
    if type(experts) is not int or not 1 <= experts <= MOST:
        raise ValueError(f"experts: required at least 1 in all, at most {MOST}, got {experts!r}")
    most = MOST // experts
    if capacity is not None and (type(capacity) is not int or not 1 <= capacity <= most):
        raise ValueError(
            f"capacity: required at least 1 row and at most {most} for each of {experts} experts, "
            f"or None for as many as are needed, got {capacity!r}; pass such an int"
        )
    if overflow not in OVERFLOWS:
        raise ValueError(f"on_overflow: required one of {', '.join(OVERFLOWS)}, got {overflow!r}")


#: The remedy for experts that do not exist.
_ROUTER = "pass the choices of a router among these"


def _required(experts: int) -> str:
    """Return the requirement on indices, for errors."""
    total = f"{experts} in all; for ficco.experts, the experts of up on all ranks"
    return f"indices: required experts from 0 to {experts - 1} ({total})"


def _check_experts(indices: torch.Tensor, experts: int) -> None:
    """Refuse experts that do not exist: on a GPU by an assertion, without waiting for it."""
    if not indices.numel():
        return
    low, high = torch.aminmax(indices)
    if indices.is_cpu:
        if low < 0 or high >= experts:
            raise ValueError(f"{_required(experts)}, got {int(low)} to {int(high)}; {_ROUTER}")
        return
    torch._assert_async((low >= 0) & (high < experts), _required(experts))


# The operator that compilers see, for a capacity and one round.


def _traced(
    indices: torch.Tensor, experts: int, capacity: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the counts and the slots of a routing. Slots are stored choice by choice."""
    members = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    placed = _placed(indices, experts, capacity, _engine(indices, members))
    slots = Routing(indices, experts, capacity, "drop", placed).slots()
    return placed.counts, slots.t().contiguous().t()


def _fake(
    indices: torch.Tensor, experts: int, capacity: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    count, top_k = indices.shape
    counts = indices.new_empty(experts, dtype=torch.int64)
    return counts, indices.new_empty(top_k, count, dtype=torch.int64).t()


declare(
    NAME,
    "(Tensor indices, SymInt experts, SymInt capacity, str group) -> (Tensor, Tensor)",
    _traced,
    _fake,
)
