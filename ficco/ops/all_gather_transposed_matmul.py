"""All-gather of a row shard, and the product with its transpose: the gradient of a weight."""

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
    """Multiply the transposed gathered rows of all ranks by a local matrix, while they travel.

    With W ranks, it computes::

        a = torch.empty(W * a_shard.shape[0], k)
        torch.distributed.all_gather_into_tensor(a, a_shard)
        return a.t() @ b

    =============  ==================================================================
    ``a_shard``    [m/W, k]; leading dimensions are flattened into the rows
    ``b``          [m, n], each rank's own; a transposed view costs no copy
    result         [k, n]
    =============  ==================================================================

    This is the weight gradient of a column-parallel layer: m counts the tokens of all ranks, and
    ``b`` is the gradient of the layer's result (FiCCO, Table I, g1, g3, g5 and g7, read as k
    gathered tokens). The products of pieces of rows are added in float32 and rounded once, in an
    order that the schedule fixes for each rank, so that results repeat to the last bit. Pieces of
    rows are contiguous in memory. Pieces of columns, in 2D schedules, make rows of the result.

    Gradients: for ``a_shard`` a :func:`ficco.matmul_reduce_scatter`, for ``b`` a
    :func:`ficco.all_gather_matmul`.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"growing"``, or a Schedule.
        rows: rows of every rank's shard, if they are not equal; the same on every rank.

    Raises:
        As :func:`ficco.all_gather_matmul`; ``ValueError`` also if ``b`` does not have as many rows
            as all ranks' shards together.

    Example::

        weight_grad = ficco.all_gather_transposed_matmul(x_shard, y_grad).t()
    """
    return operate(NAME, a_shard, b, group, schedule, rows)[0]
