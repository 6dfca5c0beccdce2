"""The exchange of a Problem by the collectives of a group's own library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from ficco.problem import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

#: Begins one collective; a library that needs no waiting for gives None.
Start = Callable[[], "Work | None"]


class Collectives:
    """What does a Problem's exchange with all ranks at once.

    The all-gather and the reduce-scatter of most libraries want equal rows of all ranks. Elsewhere
    a broadcast from each rank, or a reduction to each, does the same.
    """

    def __init__(self, problem: Problem, rank: int, group: ProcessGroup) -> None:
        self.problem, self.rank, self.group = problem, rank, group
        self.bounds = list(zip(problem.offsets, problem.offsets[1:], strict=False))

    def starts(
        self,
        a: torch.Tensor,
        partial_: torch.Tensor | None,
        gathered: torch.Tensor | None,
        out: torch.Tensor,
        timeout: timedelta | None = None,
    ) -> Iterator[Start]:
        """The collectives of one call, each to be begun once the one before is over.

        Args:
            a, partial_, gathered, out: the buffers of :mod:`ficco.plan.model`.
            timeout: after which the library gives up by itself; None for the group's own.
        """

        def options(make: Callable[[], Any], **fields: Any) -> Any:
            found = make()
            found.asyncOp = False
            if timeout is not None:
                found.timeout = timeout
            for name, value in fields.items():
                setattr(found, name, value)
            return found

        problem, rank, group = self.problem, self.rank, self.group
        made = out if partial_ is None else partial_
        match problem.kind.collective:
            case "all-gather":
                assert gathered is not None
                if problem.equal:
                    yield partial(
                        group._allgather_base,
                        gathered,
                        a.contiguous(),
                        options(c10d.AllgatherOptions),
                    )
                    return
                gathered[slice(*self.bounds[rank])].copy_(a)
                for root, (first, last) in enumerate(self.bounds):
                    if first < last:
                        one = options(c10d.BroadcastOptions, rootRank=root)
                        yield partial(group.broadcast, [gathered[first:last]], one)
            case "reduce-scatter":
                if problem.equal:
                    equal = options(c10d.ReduceScatterOptions)
                    yield partial(group._reduce_scatter_base, out, made, equal)
                    return
                for root, (first, last) in enumerate(self.bounds):
                    if first < last:
                        one = options(c10d.ReduceOptions, rootRank=root)
                        yield partial(group.reduce, [made[first:last]], one)
                out.copy_(made[slice(*self.bounds[rank])])
            case "all-to-all":
                src, dst = (made, out) if problem.kind.scatters else (a, gathered)
                assert dst is not None
                peers = range(problem.world)
                sent = [problem.block(rank, peer) for peer in peers]
                received = [problem.block(peer, rank) for peer in peers]
                how = options(c10d.AllToAllOptions)
                yield partial(group.alltoall_base, dst, src.contiguous(), received, sent, how)
            case "all-reduce":
                yield partial(group.allreduce, [out], options(c10d.AllreduceOptions))
