"""All-gather of a row shard, and the product that depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch

from ficco.ops.operate import operate
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NAME = "all_gather_matmul"


@overload
def all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
    return_gathered: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
    return_gathered: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
    return_gathered: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multiply the gathered rows of all ranks with a local matrix, while they travel.

    It computes, with W ranks::

        a = torch.empty(W * a_shard.shape[0], k)
        torch.distributed.all_gather_into_tensor(a, a_shard)
        return a @ b

    =============  ==================================================================
    ``a_shard``    [m/W, k]; leading dimensions are flattened into the rows
    ``b``          [k, n], each rank's own; a transposed view costs no copy
    result         [m, n]; with ``return_gathered`` also the gathered A, [m, k]
    =============  ==================================================================

    The result has two dimensions, its rows in the order of the ranks. A shard of a sequence comes
    with the sequence first, [s/W, batch, k]; of [batch, s/W, k] the rows would come rank by rank,
    not batch by batch. Layers of ``ficco.nn`` take that order with ``sequence_dim=1``.

    Pieces of the shards travel on the copy engines while the GEMMs of the vendor's library multiply
    what has arrived, as the schedule lays down (FiCCO, sections V-A and VI-A). On a GPU the call
    returns once it is enqueued, on the current stream, and can be captured in a graph. 2D schedules
    add partial products up in float32 and round once. Every rank of the group makes the same calls
    in the same order; n must be equal, too.

    Gradients are those of the sum over all ranks of <result, its gradient>. That of ``a_shard`` is
    a :func:`ficco.matmul_reduce_scatter`; beside it A is gathered again for that of ``b``, or kept
    since the forward with ``options(save_gathered=True)``; that of ``b`` alone is a
    :func:`ficco.all_gather_transposed_matmul`. The same operands need gradients on
    every rank. Forward and backward can be compiled by ``torch.compile`` and cast by autocast.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=4,pull"``, or a Schedule.
        rows: rows of every rank's shard, where they are not equal; the same on every rank.
        return_gathered: also return the gathered A, a tensor of its own.

    Raises:
        ValueError: an argument is wrong; the text says what is required, what was given, and what
            to do.
        NotImplementedError: the dtype is none of bfloat16, float16, float32 and, on CPUs, float64;
            an operand is sparse; the device has no engine; derivatives in forward mode and
            ``torch.jit.trace``.
        RankMismatch: ranks disagree on the problem, the schedule or the options.
        SignalTimeout: a peer died, is stuck or did not call. On a GPU see ``options(on_timeout)``.
        PeerFailed: a call ended by an error on another rank, which this names.
        BackendError: a call of the vendor's library failed.

    Example::

        y = ficco.all_gather_matmul(x_shard, linear.weight.t())
    """
    out, gathered = operate(NAME, a_shard, b, group, schedule, rows, return_gathered)
    return out if gathered is None else (out, gathered)
