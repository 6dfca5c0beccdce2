"""The exchange of a Problem by the collectives of a group's own library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from ficco.plan import Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

#: The longest time limit that is passed to a library, whose durations cannot hold infinity.
LONGEST_S = 1e9

#: Starts one collective; None from a library that completes it at once.
Start = Callable[[], "Work | None"]


def starts(
    plan: Plan,
    step: int,
    group: ProcessGroup,
    tensors: Mapping[str, torch.Tensor],
    timeout: timedelta | None = None,
) -> Iterator[Start]:
    """The collectives that carry out the whole exchange of a Plan, each to be started once the
    previous one has completed.

    The all-gather and the reduce-scatter of most libraries require equal rows on all ranks. For
    unequal ones a broadcast from each rank, or a reduction to each, does the same.

    Args:
        tensors: the buffers of the call by name.
        timeout: after which the library gives up; None for the group's own.
    """

    def options(make: Callable[[], Any], **fields: Any) -> Any:
        made = make()
        if timeout is not None:
            fields["timeout"] = timeout
        if hasattr(made, "asyncOp"):  # not all options of PyTorch 2.6 do
            fields["asyncOp"] = False
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    problem, rank, transfer = plan.problem, plan.rank, plan.steps[step].transfer
    assert transfer is not None
    # Libraries do not know float8; they move it as bytes.
    src, dst = (
        one.view(torch.uint8) if one.itemsize == 1 else one
        for one in (tensors[transfer.src.buffer], tensors[transfer.dst.buffer])
    )
    peers, world = range(problem.world), problem.world
    exchange = problem.specification.exchanges[plan.buffer[transfer.src.buffer].holds]
    whose = [(rank, peer) if exchange.sums else (peer, rank) for peer in peers]
    sizes = [exchange.by_collective(*pair) for pair in whose]
    rows = [slice(*bounds) for bounds in pairwise(accumulate(sizes, initial=0))]
    nonempty = [root for root in range(world) if sizes[root]]
    sent = [exchange.block(rank, peer) for peer in peers]
    kind = plan.steps[step].label
    if kind == "all-to-all" and sum(sent) > len(src):  # each peer gets the same
        kind = "all-gather"
    match kind:
        case "all-gather":
            if len(set(sizes)) == 1:
                equal = options(c10d.AllgatherOptions)
                yield partial(group._allgather_base, dst, src.contiguous(), equal)
                return
            dst[rows[rank]].copy_(src)
            for root in nonempty:
                one = options(c10d.BroadcastOptions, rootRank=root)
                yield partial(group.broadcast, [dst[rows[root]]], one)
        case "reduce-scatter":
            if len(set(sizes)) == 1:
                equal = options(c10d.ReduceScatterOptions)
                yield partial(group._reduce_scatter_base, dst, src, equal)
                return
            for root in nonempty:
                one = options(c10d.ReduceOptions, rootRank=root)
                yield partial(group.reduce, [src[rows[root]]], one)
            dst.copy_(src[rows[rank]])
        case "all-to-all":
            received = [exchange.block(peer, rank) for peer in peers]
            how = options(c10d.AllToAllOptions)
            yield partial(group.alltoall_base, dst, src.contiguous(), received, sent, how)
        case "all-reduce":
            yield partial(group.allreduce, [dst], options(c10d.AllreduceOptions))
