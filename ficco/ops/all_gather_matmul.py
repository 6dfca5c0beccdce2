"""All-gather of a row shard, and the matrix product that depends on it."""

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
    """Multiply the gathered rows of all ranks by a local matrix, while they travel.

    With W ranks, it computes::

        a = torch.empty(W * a_shard.shape[0], k)
        torch.distributed.all_gather_into_tensor(a, a_shard)
        return a @ b

    =============  ==================================================================
    ``a_shard``    [m/W, k]; leading dimensions are flattened into the rows
    ``b``          [k, n], each rank's own; a transposed view costs no copy
    result         [m, n]; with ``return_gathered`` also the gathered A, [m, k]
    =============  ==================================================================

    The result has two dimensions, its rows in the order of the ranks. Put the sequence dimension
    first, ``[s/W, batch, k]``: the gathered rows are then ``[s, batch]``. With
    ``[batch, s/W, k]`` they would be grouped by rank instead of by batch. Layers of ``ficco.nn``
    accept that order with ``sequence_dim=1``.

    Copy engines move pieces of the shards, in the order that the schedule sets, while GEMMs of the
    vendor's library multiply the pieces that have arrived (FiCCO, sections V-A and VI-A). On a GPU
    the call is enqueued on the current stream and returns; it can be captured in a graph. 2D
    schedules add partial products in float32 and round once. Every rank of the group makes the
    same calls in the same order, with the same n.

    Gradients are those of the sum over all ranks of <result, its gradient>:

    - for ``a_shard``, a :func:`ficco.matmul_reduce_scatter`;
    - for ``b`` as well, a product with A, which is gathered again during the first, or kept from
      the forward with ``options(save_gathered=True)``;
    - for only ``b``, a :func:`ficco.all_gather_transposed_matmul`, unless A was kept.

    The same operands must need gradients on every rank. Forward and backward work under
    ``torch.compile`` and autocast.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=4,pull"``, or a Schedule.
        rows: rows of every rank's shard, if they are not equal; the same on every rank.
        return_gathered: also return the gathered A, a tensor of its own.

    Raises:
        ValueError: an argument is wrong. The text says what is required, what was given and what
            to do.
        NotImplementedError: the dtype is not bfloat16, float16, float32 or, on CPUs, float64; an
            operand is sparse; the device has no engine; the call is under forward-mode
            differentiation, ``torch.func.grad`` or ``torch.jit.trace``.
        RankMismatch: ranks disagree on the problem, the schedule or the options.
        SignalTimeout: a peer died, is stuck or did not call. On a GPU see ``options(on_timeout)``.
        PeerFailed: a call ended with an error on another rank, which the text names.
        BackendError: a call of the vendor's library failed.

    Example::

        y = ficco.all_gather_matmul(x_shard, linear.weight.t())
    """
    out, gathered = operate(NAME, a_shard, b, group, schedule, rows, return_gathered)
    return out if gathered is None else (out, gathered)
