"""A matrix product, and the all-to-all of its row blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ficco.ops.operate import operate
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NAME = "matmul_all_to_all"


def matmul_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Multiply row blocks, and exchange the products with all ranks as they are made.

    With W ranks, it computes::

        y = torch.empty(a.shape[0], n)
        torch.distributed.all_to_all_single(y, a @ b)
        return y

    ==========  ====================================================================
    ``a``       [W * r, k]; the product of block p goes to rank p; leading dimensions
                are flattened
    ``b``       [k, n], each rank's own; a transposed view costs no copy
    result      [W * r, n]; block p comes from rank p
    ==========  ====================================================================

    This brings the tokens of an expert-parallel layer back. Copy engines send blocks of the
    product as they are made. The rank's own block is multiplied last, while the last copies
    travel.

    Gradients are those of the sum over all ranks of <result, its gradient>: for ``a`` an
    :func:`ficco.all_to_all_matmul` of the result's gradient with the table transposed, whose
    exchanged rows serve ``b``, too.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=4"``, or a Schedule.
        rows: if blocks are not equal, the W x W table of their rows, ``rows[i][j]`` from rank i to
            rank j; the same on every rank. ``a`` then has sum(rows[rank]) rows, and the result
            has as many as column ``rank`` of the table sums to.

    Raises:
        As :func:`ficco.all_gather_matmul`.

    Example::

        tokens = ficco.matmul_all_to_all(hidden, expert.weight.t())
    """
    return operate(NAME, a, b, group, schedule, rows)[0]
