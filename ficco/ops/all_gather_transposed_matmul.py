"""All-gather of a row shard, and the product of its transpose: the gradient of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ficco.ops.operate import operate
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NAME = "all_gather_transposed_matmul"


def all_gather_transposed_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """Sum over the gathered rows of all ranks and those of a local matrix, while they travel.

    It computes, with W ranks::

        a = torch.empty(W * a_shard.shape[0], k)
        torch.distributed.all_gather_into_tensor(a, a_shard)
        return a.t() @ b

    =============  ==================================================================
    ``a_shard``    [m/W, k]; leading dimensions are flattened into the rows
    ``b``          [m, n], each rank's own; a transposed view costs no copy
    result         [k, n]
    =============  ==================================================================

    It is the gradient of the weight of a column-parallel layer, with the tokens of all ranks for m:
    ``b`` is that of the layer's result (FiCCO, Table I, g1, g3, g5 and g7, read as k gathered
    tokens). Pieces of rows add up as pieces of columns do in :func:`ficco.all_gather_matmul`, in
    float32, rounded once, and are contiguous in memory; pieces of columns, of 2D schedules, make
    rows of the result. The sums are added in an order that the schedule fixes for each rank, so
    that results repeat to the last bit.

    Gradients: that of ``a_shard`` is a :func:`ficco.matmul_reduce_scatter`, that of ``b`` a
    :func:`ficco.all_gather_matmul`.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"growing"``, or a Schedule.
        rows: rows of every rank's shard, where they are not equal; the same on every rank.

    Raises:
        As :func:`ficco.all_gather_matmul`.

    Example::

        weight_grad = ficco.all_gather_transposed_matmul(x_shard, y_grad).t()
    """
    return operate(NAME, a_shard, b, group, schedule, rows)[0]
