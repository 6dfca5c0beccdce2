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

#: Time limits whose collectives each exchange keeps.
MAX_TIMEOUTS = 64

#: The buffers of a call, by name.
Tensors = Mapping[str, torch.Tensor]
#: Starts one collective of a call. Returns None if the library completes it at once.
Start = Callable[[Tensors], "Work | None"]


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
        # Libraries do not support float8: it is moved as bytes.
        self._as_bytes = plan.buffer[move.src.buffer].itemsize == 1
        self._starts: dict[timedelta | None, list[Start]] = {}

    def starts(self, timeout: timedelta | None = None) -> list[Start]:
        """The collectives of a call. Start each once the previous one is complete. ``timeout``: the
        library's timeout; None for the timeout of the group."""
        starts = self._starts.get(timeout)
        if starts is None:
            if len(self._starts) >= MAX_TIMEOUTS:
                self._starts.clear()
            starts = self._starts[timeout] = [*self._collectives(timeout)]
            if self._as_bytes:
                starts[:] = [partial(self._on_bytes, start) for start in starts]
        return starts

    def _collectives(self, timeout: timedelta | None) -> Iterator[Start]:
        group, source, target, rows = self._group, self._source, self._target, self._rows
        settings = partial(_settings, timeout)
        match self._kind:
            case "all-gather" if self._equal:
                gather, options = group._allgather_base, settings(c10d.AllgatherOptions)
                yield lambda of: gather(of[target], of[source].contiguous(), options)
            case "all-gather":
                yield lambda of: _copy(of[source], of[target][rows[self._rank]])
                for root in self._nonempty:
                    options = settings(c10d.BroadcastOptions, root)
                    yield partial(_on_rows, group.broadcast, target, rows[root], options)
            case "reduce-scatter" if self._equal:
                scatter, options = group._reduce_scatter_base, settings(c10d.ReduceScatterOptions)
                yield lambda of: scatter(of[target], of[source], options)
            case "reduce-scatter":
                for root in self._nonempty:
                    options = settings(c10d.ReduceOptions, root)
                    yield partial(_on_rows, group.reduce, source, rows[root], options)
                yield lambda of: _copy(of[source][rows[self._rank]], of[target])
            case "all-to-all":
                exchange, options = group.alltoall_base, settings(c10d.AllToAllOptions)
                sizes = self._received, self._sent
                yield lambda of: exchange(of[target], of[source].contiguous(), *sizes, options)
            case "all-reduce":
                reduce, options = group.allreduce, settings(c10d.AllreduceOptions)
                yield lambda of: reduce([of[target]], options)

    def _on_bytes(self, start: Start, tensors: Tensors) -> Work | None:
        ends = self._source, self._target
        return start({name: tensors[name].view(torch.uint8) for name in ends})


def _on_rows(start: Any, name: str, rows: slice, options: Any, tensors: Tensors) -> Work:
    work: Work = start([tensors[name][rows]], options)
    return work


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _settings(timeout: timedelta | None, make: Callable[[], Any], root: int | None = None) -> Any:
    """The library's options of a collective."""
    settings = make()
    if timeout is not None:
        settings.timeout = timeout
    if hasattr(settings, "asyncOp"):  # absent from some options of PyTorch 2.6
        settings.asyncOp = False
    if root is not None:
        settings.rootRank = root
    return settings
