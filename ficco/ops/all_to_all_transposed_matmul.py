"""All-to-all of row blocks, and the product with their transpose: the gradient of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ficco.ops.operate import operate
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NAME = "all_to_all_transposed_matmul"


def all_to_all_transposed_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Exchange row blocks with all ranks, and multiply their transpose by a local matrix as they
    arrive.

    With W ranks, it computes::

        x = torch.empty_like(a)
        torch.distributed.all_to_all_single(x, a)
        return x.t() @ b

    ==========  ====================================================================
    ``a``       [W * r, k]; block p goes to rank p; leading dimensions are flattened
    ``b``       [W * r, n], each rank's own; block p meets the rows that come from
                rank p; a transposed view costs no copy
    result      [k, n]
    ==========  ====================================================================

    This is the weight gradient of an expert-parallel layer: ``b`` is the gradient of the layer's
    result (FiCCO, Table I, g13 to g16, in the backward). As in
    :func:`ficco.all_gather_transposed_matmul`, the products of pieces are added in float32 and
    rounded once, in an order that the schedule fixes for each rank, so that results repeat to the
    last bit. A rank that receives no rows gets zeros.

    Gradients: for ``a`` a :func:`ficco.matmul_all_to_all` with the table transposed, for ``b`` a
    :func:`ficco.all_to_all_matmul`.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"growing"``, or a Schedule.
        rows: if blocks are not equal, the W x W table of their rows, ``rows[i][j]`` from rank i to
            rank j; the same on every rank. ``a`` then has sum(rows[rank]) rows, and ``b`` has as
            many as column ``rank`` of the table sums to.

    Raises:
        As :func:`ficco.all_to_all_matmul`; ``ValueError`` also if ``b`` does not have as many rows
            as this rank receives.

    Example::

        weight_grad = ficco.all_to_all_transposed_matmul(tokens, y_grad).t()
    """
    return operate(NAME, a, b, group, schedule, rows)[0]
