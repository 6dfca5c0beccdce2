"""Which rows of the blocks of an expert-parallel layer the tokens of a rank take.

A rank has ``capacity`` rows for each expert of every rank, or as many as it has pairs. A *pair* is
a token and one of the experts that its router chose. Pairs take the rows of their expert in the
order of choices, then of tokens: first choices come first. Other ranks are asked only if there are
as many rows as pairs, for all their counts, or if what is left over goes in further rounds, for the
largest one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.accelerator import gpu
from ficco.board import TOLD
from ficco.ops.operands import process_group
from ficco.ops.operate import refuse_sharded, watched
from ficco.ops.planned import number_call, workspace_for
from ficco.options import current
from ficco.workspace import Workspace, workspaces

if TYPE_CHECKING:
    from ficco.dma.engine import Engine

#: What becomes of pairs that find no room.
OVERFLOWS = ("drop", "again")

#: What errors and the board call it.
NAME = "route"


class Routing:
    """Where the tokens of a rank go: what :func:`route` gives.

    Attributes:
        indices: [t, top_k], the experts of each token.
        experts: number of experts of all ranks.
        counts: int64 [experts], the pairs of this rank for each expert, on the device of
            ``indices``.
        exact: there are as many rows as pairs.
    """

    def __init__(
        self,
        indices: torch.Tensor,
        experts: int,
        capacity: int | None,
        overflow: str,
        engine: Engine | None = None,
    ) -> None:
        self.indices, self.experts, self.exact = indices, experts, capacity is None
        made = None if engine is None else engine.route(indices.long(), experts, capacity or 0)
        #: The rows of pairs in the first round, and whose they are, if these are known.
        self._rows: torch.Tensor | None = None
        self._held: torch.Tensor | None = None
        if made is None:
            _check_experts(indices, experts)
            self.counts, self._places = _counted(indices, experts)
        else:
            self.counts, self._places, self._rows, self._held = made
            if not self.exact:  # the kernel leaves out experts that do not exist
                torch._assert_async(self.counts.sum() == indices.numel())
        self._capacity, self._overflow, self._rounds = capacity, overflow, 1
        self._asked: tuple[Workspace, int] | None = None
        self._told: list[list[int]] = []
        self.blocks: dict[Hashable, Any] = {}  # what calls make of them

    @property
    def capacity(self) -> int:
        """Rows of this rank for each expert; where there are as many rows as pairs, a number that
        is at least as large as any count. Then it waits for the other ranks."""
        self.settle()
        assert self._capacity is not None
        return self._capacity

    @property
    def every(self) -> list[list[int]]:
        """If there are as many rows as pairs, the counts of all ranks; waits for them."""
        self.settle()
        return self._told

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        return self.indices.numel() if self.exact else self.experts * self.capacity

    @property
    def rounds(self) -> int:
        """How often the rows are used, the same on every rank."""
        if not self.exact:  # else once, which no rank has to be asked for
            self.settle()
        return self._rounds

    @property
    def dropped(self) -> torch.Tensor:
        """Pairs of this rank that find no room, int64 [experts]."""
        return (self.counts - self.capacity * self.rounds).clamp(min=0)

    def slots(self, turn: int = 0) -> torch.Tensor:
        """The row that each pair takes in a round, int64 [t, top_k]; :attr:`rows` for pairs that
        take none."""
        if not turn and self._rows is not None:
            return self._rows
        if self.exact:
            return (self.counts.cumsum(0) - self.counts)[self.indices.long()] + self._places
        row = self._places - turn * self.capacity if turn else self._places
        taken = row < self.capacity
        if turn:
            taken &= row >= 0
        return torch.where(taken, self.indices.long() * self.capacity + row, self.rows)

    def tokens(self, slots: torch.Tensor, empty: int) -> torch.Tensor:
        """The token whose pair each row is in a round, int64, and ``empty`` where it is none."""
        if self.exact and self._held is not None:
            return self._held
        many, top_k = slots.shape
        tokens = slots.new_full((self.rows + 1,), empty)
        pairs = torch.arange(many, device=slots.device).expand(top_k, many).t()
        return tokens.index_put_((slots,), pairs)[:-1]

    # What is asked of the other ranks.

    def ask(self, workspace: Workspace, number: int) -> None:
        """Tell the other ranks the counts of this one, or the largest, with the call of this
        number: at once on a CPU, otherwise when this rank asks for theirs, so that the host can go
        on until the device has counted."""
        told = self.counts if self.exact else self.counts.max()[None]
        self._asked, self._counted = (workspace, number), None
        if told.is_cpu:
            self._tells = told
            workspace.board.tell(number, told.tolist())
            return
        self._tells = torch.empty_like(told, device="cpu", pin_memory=True)
        self._tells.copy_(told, non_blocking=True)
        self._counted = gpu.Event()
        self._counted.record()

    def settle(self) -> None:
        """Wait for what other ranks have to tell."""
        if self._asked is None:
            return
        (workspace, number), self._asked = self._asked, None
        try:
            workspace.raise_error()
            if self._counted is not None:
                self._counted.synchronize()
                workspace.board.tell(number, self._tells.tolist())
            seconds, board = current().timeout_s, workspace.board
            board.agree(number, seconds, NAME, "none")
            self._told = board.told(number, len(self._tells), seconds, NAME)
            if self.exact and sum(self._told[board.rank]) != self.indices.numel():
                raise ValueError(
                    f"indices: required experts from 0 to {self.experts - 1}, got others"
                )
        except BaseException as error:
            workspace.end(error)
            raise
        most = max(map(max, self._told))
        if self._capacity is None:
            self._capacity = rounded(most)
        elif self._overflow == "again":
            self._rounds = max(-(-most // self._capacity), 1)


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


@torch._disable_dynamo
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

    Returns:
        Routing: ``counts``, ``dropped``, ``capacity`` and ``rounds`` tell what became of them.

    Raises:
        ValueError: an argument is wrong. On CPUs also if there is no expert of that number; on a
            GPU that is an assertion of the device or, without a capacity, raised when the counts of
            other ranks are asked for.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call, when the result is used.
    """
    members = process_group(group)
    if not isinstance(indices, torch.Tensor):
        raise ValueError(f"indices: required a torch.Tensor, got {type(indices).__name__}")
    if watched(indices):
        refuse_sharded(indices=indices)
        raise NotImplementedError(
            "ficco.route takes no tensors that are traced or wrapped; call it outside of what "
            "traces them"
        )
    _check(indices, experts, capacity, on_overflow)
    with torch.no_grad():
        if capacity is not None and on_overflow == "drop":
            known = (one.engine for one in workspaces(members))
            engine = next((one for one in known if one.device == indices.device), None)
            return Routing(indices, experts, capacity, on_overflow, engine)
        workspace = workspace_for(members, indices, "indices", NAME)
        return _asking(workspace, indices, experts, capacity, on_overflow)


def _asking(
    workspace: Workspace, indices: torch.Tensor, experts: int, capacity: int | None, overflow: str
) -> Routing:
    """A routing for which ranks tell each other something."""
    try:
        number_call(workspace, NAME)
        if workspace.engine.hosts.count > 1:
            raise NotImplementedError(
                f"ficco.route: the ranks of this group are on {workspace.engine.hosts.count} "
                "hosts, and they tell each other numbers on one; pass a capacity"
            )
        if capacity is None and experts > TOLD:
            raise NotImplementedError(
                f"ficco.route: ranks tell each other the counts of at most {TOLD} experts, got "
                f"{experts}; pass a capacity"
            )
        found = Routing(indices, experts, capacity, overflow, workspace.engine)
        found.ask(workspace, workspace.calls)
        text = f"route(experts={experts}, capacity={capacity}, on_overflow={overflow})"
        workspace.board.post(workspace.calls, workspace.board.describe(text))
        workspace.raise_error()
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


def _check_experts(indices: torch.Tensor, experts: int) -> None:
    """All experts that are named exist: on a GPU without waiting for it."""
    if not indices.numel():
        return
    low, high = torch.aminmax(indices)
    if indices.is_cpu:
        if low < 0 or high >= experts:
            raise ValueError(
                f"indices: required experts from 0 to {experts - 1}, got {int(low)} to {int(high)}"
            )
        return
    torch._assert_async((low >= 0) & (high < experts))
