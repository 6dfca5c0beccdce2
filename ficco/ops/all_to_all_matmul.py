"""All-to-all of row blocks, and the matrix product that depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ficco.ops.operate import operate
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NAME = "all_to_all_matmul"


def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Exchange row blocks with all ranks, and multiply them as they arrive.

    With W ranks, it computes::

        x = torch.empty_like(a)
        torch.distributed.all_to_all_single(x, a)
        return x @ b

    ==========  ====================================================================
    ``a``       [W * r, k]; block p goes to rank p; leading dimensions are flattened
    ``b``       [k, n], each rank's own; a transposed view costs no copy
    result      [W * r, n]; block p comes from rank p
    ==========  ====================================================================

    This sends the tokens of an expert-parallel layer to their experts. Pieces travel and are
    multiplied as in :func:`ficco.all_gather_matmul` (FiCCO, Table I, g13 to g16).

    Gradients are as in :func:`ficco.all_gather_matmul`: for ``a`` a
    :func:`ficco.matmul_all_to_all` with the table transposed, for only ``b`` a
    :func:`ficco.all_to_all_transposed_matmul`.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=4"``, or a Schedule.
        rows: if blocks are not equal, the W x W table of their rows, ``rows[i][j]`` from rank i to
            rank j; the same on every rank. ``a`` then has sum(rows[rank]) rows, and the result
            has as many as column ``rank`` of the table sums to.

    Raises:
        As :func:`ficco.all_gather_matmul`.

    Example::

        y = ficco.all_to_all_matmul(tokens, expert.weight.t())
    """
    return operate(NAME, a, b, group, schedule, rows)[0]
