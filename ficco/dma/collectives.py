"""The exchange of a Problem by the collectives of a group's own library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from ficco.plan import LibraryMove, Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

#: The longest time limit that is passed to a library, whose durations cannot hold infinity.
LONGEST_S = 1e9

#: Options of collectives to keep for each exchange.
MAX_SETTINGS = 64

#: Starts one collective. Returns None if the library completes it at once.
Start = Callable[[], "Work | None"]


class LibraryExchange:
    """A Plan's whole exchange by collectives. Parts that its calls share are computed once.

    The all-gather and the reduce-scatter of most libraries require equal rows on all ranks. Unequal
    rows are broadcast from each rank, or reduced to each rank.
    """

    def __init__(self, plan: Plan, step: int, group: ProcessGroup) -> None:
        problem, rank, move = plan.problem, plan.rank, plan.steps[step].work
        assert isinstance(move, LibraryMove)
        self._group, self._rank = group, rank
        self._source, self._target = move.src.buffer, move.dst.buffer
        peers = range(problem.world)
        exchange = problem.specification.exchanges[plan.buffer[move.src.buffer].holds]
        pairs = [(rank, peer) if exchange.sums else (peer, rank) for peer in peers]
        sizes = [exchange.by_collective(*pair) for pair in pairs]
        self._rows = [slice(*bounds) for bounds in pairwise(accumulate(sizes, initial=0))]
        self._nonempty = [root for root in peers if sizes[root]]
        self._equal = len(set(sizes)) == 1
        self._sent = [exchange.block(rank, peer) for peer in peers]
        self._received = [exchange.block(peer, rank) for peer in peers]
        self._kind = plan.steps[step].label
        if self._kind == "all-to-all" and sum(self._sent) > move.src.rows:
            self._kind = "all-gather"  # every peer gets the same rows
        self._settings: dict[tuple[Any, ...], Any] = {}

    def starts(
        self, tensors: Mapping[str, torch.Tensor], timeout: timedelta | None = None
    ) -> Iterator[Start]:
        """The collectives of a call. Start each once the previous one is complete.

        Args:
            tensors: the buffers of the call by name.
            timeout: the library's timeout; None for the timeout of the group.
        """
        group, rows = self._group, self._rows
        src, target = tensors[self._source], tensors[self._target]
        if src.itemsize == 1:  # libraries do not support float8: move it as bytes
            src, target = src.view(torch.uint8), target.view(torch.uint8)
        match self._kind:
            case "all-gather" if self._equal:
                settings = self._options(c10d.AllgatherOptions, timeout)
                yield partial(group._allgather_base, target, src.contiguous(), settings)
            case "all-gather":
                target[rows[self._rank]].copy_(src)
                for root in self._nonempty:
                    settings = self._options(c10d.BroadcastOptions, timeout, root)
                    yield partial(group.broadcast, [target[rows[root]]], settings)
            case "reduce-scatter" if self._equal:
                settings = self._options(c10d.ReduceScatterOptions, timeout)
                yield partial(group._reduce_scatter_base, target, src, settings)
            case "reduce-scatter":
                for root in self._nonempty:
                    settings = self._options(c10d.ReduceOptions, timeout, root)
                    yield partial(group.reduce, [src[rows[root]]], settings)
                target.copy_(src[rows[self._rank]])
            case "all-to-all":
                settings = self._options(c10d.AllToAllOptions, timeout)
                sizes = self._received, self._sent
                yield partial(group.alltoall_base, target, src.contiguous(), *sizes, settings)
            case "all-reduce":
                settings = self._options(c10d.AllreduceOptions, timeout)
                yield partial(group.allreduce, [target], settings)

    def _options(
        self, make: Callable[[], Any], timeout: timedelta | None, root: int | None = None
    ) -> Any:
        """The library's options of a collective, made once for each time limit."""
        key = make, timeout, root
        if (settings := self._settings.get(key)) is None:
            if len(self._settings) >= MAX_SETTINGS:
                self._settings.clear()
            settings = self._settings[key] = make()
            if timeout is not None:
                settings.timeout = timeout
            if hasattr(settings, "asyncOp"):  # absent from some options of PyTorch 2.6
                settings.asyncOp = False
            if root is not None:
                settings.rootRank = root
        return settings
