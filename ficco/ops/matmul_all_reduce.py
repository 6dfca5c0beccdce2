"""A matrix product over a shard of k, and the all-reduce of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ficco.ops.operate import operate
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NAME = "matmul_all_reduce"


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
) -> torch.Tensor:
    """Multiply over a shard of k, and sum the products of all ranks while they travel.

    It computes::

        y = a @ b
        torch.distributed.all_reduce(y)
        return y

    ==========  ====================================================================
    ``a``       [m, k], the rank's columns of A; leading dimensions are flattened
    ``b``       [k, n], the rank's rows of B; a transposed view costs no copy
    result      [m, n], the sum, equal on all ranks to the last bit
    ==========  ====================================================================

    This is a :func:`ficco.matmul_reduce_scatter` whose sums are sent on to all ranks piece by
    piece as they are made. m may be any number of rows.

    Gradients are those of the sum over all ranks of <result, its gradient>. Each rank's product is
    in the results of all ranks, so the backward first sums their gradients over the ranks. If all
    ranks do the same with the result, and the loss counts it once, set
    ``options(all_reduce_gradients="equal")``: the backward then needs no communication.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=2,tail=4"``, or a Schedule.

    Raises:
        As :func:`ficco.all_gather_matmul`.

    Example::

        y = ficco.matmul_all_reduce(x, linear.weight.t())
    """
    return operate(NAME, a, b, group, schedule, None)[0]
