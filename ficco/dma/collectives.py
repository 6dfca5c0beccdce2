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

#: Starts one collective. Returns None if the library completes it at once.
Start = Callable[[], "Work | None"]


def starts(
    plan: Plan,
    step: int,
    group: ProcessGroup,
    tensors: Mapping[str, torch.Tensor],
    timeout: timedelta | None = None,
) -> Iterator[Start]:
    """The collectives of a Plan's whole exchange. Start each once the previous one is complete.

    The all-gather and the reduce-scatter of most libraries require equal rows on all ranks. Unequal
    rows are broadcast from each rank, or reduced to each rank.

    Args:
        tensors: the buffers of the call by name.
        timeout: the library's timeout; None for the timeout of the group.
    """

    def options(make: Callable[[], Any], **fields: Any) -> Any:
        settings = make()
        if timeout is not None:
            fields["timeout"] = timeout
        if hasattr(settings, "asyncOp"):  # absent from some options of PyTorch 2.6
            fields["asyncOp"] = False
        for name, value in fields.items():
            setattr(settings, name, value)
        return settings

    problem, rank, move = plan.problem, plan.rank, plan.steps[step].work
    assert isinstance(move, LibraryMove)
    # Libraries do not support float8: move it as bytes.
    src, dst = (
        tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        for tensor in (tensors[move.src.buffer], tensors[move.dst.buffer])
    )
    peers, world = range(problem.world), problem.world
    exchange = problem.specification.exchanges[plan.buffer[move.src.buffer].holds]
    pairs = [(rank, peer) if exchange.sums else (peer, rank) for peer in peers]
    sizes = [exchange.by_collective(*pair) for pair in pairs]
    rows = [slice(*bounds) for bounds in pairwise(accumulate(sizes, initial=0))]
    nonempty = [root for root in range(world) if sizes[root]]
    sent = [exchange.block(rank, peer) for peer in peers]
    kind = plan.steps[step].label
    if kind == "all-to-all" and sum(sent) > len(src):  # every peer gets the same rows
        kind = "all-gather"
    match kind:
        case "all-gather":
            if len(set(sizes)) == 1:
                equal = options(c10d.AllgatherOptions)
                yield partial(group._allgather_base, dst, src.contiguous(), equal)
                return
            dst[rows[rank]].copy_(src)
            for root in nonempty:
                from_root = options(c10d.BroadcastOptions, rootRank=root)
                yield partial(group.broadcast, [dst[rows[root]]], from_root)
        case "reduce-scatter":
            if len(set(sizes)) == 1:
                equal = options(c10d.ReduceScatterOptions)
                yield partial(group._reduce_scatter_base, dst, src, equal)
                return
            for root in nonempty:
                to_root = options(c10d.ReduceOptions, rootRank=root)
                yield partial(group.reduce, [src[rows[root]]], to_root)
            dst.copy_(src[rows[rank]])
        case "all-to-all":
            received = [exchange.block(peer, rank) for peer in peers]
            settings = options(c10d.AllToAllOptions)
            yield partial(group.alltoall_base, dst, src.contiguous(), received, sent, settings)
        case "all-reduce":
            yield partial(group.allreduce, [dst], options(c10d.AllreduceOptions))
