"""All-to-all of row blocks, and the product of their transpose: the gradient of experts."""

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
    """Sum over the rows that all ranks have for this one and those of a local matrix, while they
    travel.

    It computes, with W ranks::

        x = torch.empty_like(a)
        torch.distributed.all_to_all_single(x, a)
        return x.t() @ b

    ==========  ====================================================================
    ``a``       [W * r, k]; block p goes to rank p; leading dimensions are flattened
    ``b``       [W * r, n], each rank's own; block p meets the rows that come from
                rank p; a transposed view costs no copy
    result      [k, n]
    ==========  ====================================================================

    It is to :func:`ficco.all_to_all_matmul` what :func:`ficco.all_gather_transposed_matmul` is to
    :func:`ficco.all_gather_matmul`: the gradient of the weight of an expert-parallel layer, whose
    result has the gradient ``b`` (FiCCO, Table I, g13 to g16, in the backward). Pieces are
    multiplied as there: they add up in float32, rounded once, in an order that the schedule fixes
    for each rank, so that results repeat to the last bit. A rank that receives no rows gets zeros.

    Gradients: that of ``a`` is a :func:`ficco.matmul_all_to_all` with the table transposed, that of
    ``b`` a :func:`ficco.all_to_all_matmul`.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"growing"``, or a Schedule.
        rows: where blocks are not equal, the W x W table of their rows, ``rows[i][j]`` from rank i
            to rank j; the same on every rank. ``a`` then has sum(rows[rank]) rows, ``b`` as many as
            column ``rank`` of the table adds up to.

    Raises:
        As :func:`ficco.all_to_all_matmul`; ``ValueError`` where ``b`` has not as many rows as this
        rank receives.

    Example::

        weight_grad = ficco.all_to_all_transposed_matmul(tokens, y_grad).t()
    """
    return operate(NAME, a, b, group, schedule, rows)[0]
