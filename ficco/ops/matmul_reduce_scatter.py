"""A matrix product of a shard of k, and the reduce-scatter of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ficco.ops.operate import operate
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NAME = "matmul_reduce_scatter"


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """Multiply a shard of k, and sum the products of all ranks while they travel; keep a row block.

    It computes, with W ranks::

        y = torch.empty(m // W, n)
        torch.distributed.reduce_scatter_tensor(y, a @ b)
        return y

    ==========  ====================================================================
    ``a``       [m, k], the rank's columns of A; leading dimensions are flattened
    ``b``       [k, n], the rank's rows of B; a transposed view costs no copy
    result      [m/W, n], the rank's rows of the sum
    ==========  ====================================================================

    Blocks of the product travel on the copy engines as they are made, the rank's own is multiplied
    last, so that the last copies are hidden, too; small ones are read where they lie
    (``one-shot``). Every product is rounded to its dtype; they are added in float32 in the order of
    the ranks and rounded once. The result is the same in every run, to the last bit.

    With u the unit round-off of the dtype, p_r the product of rank r, s their sum, and besides the
    error of the GEMMs themselves and of adding in float32, the result is at most this far from s:

    ============  ==================================================================
    as a rule     u (sum of all abs(p_r) + abs(s))
    ``beta``      u (sum of the others' abs(p_r) + abs(s - own p) + abs(s)): the sum of the others
                  is rounded, the own product adds itself to it in the GEMM
    ``ring``      u (abs(t_1) + abs(t_2) + ... + abs(s)), t_i the sum of the first i products on
                  the ring: every rank's GEMM adds to what it received, and rounds
    ============  ==================================================================

    Gradients are those of the sum over all ranks of <result, its gradient>: an
    :func:`ficco.all_gather_matmul` of the result's gradient, whose gathered rows serve ``b``, too.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=2,tail=4"``, or a Schedule.
        rows: rows of the result on every rank, where they are not equal; the same on every rank.

    Raises:
        As :func:`ficco.all_gather_matmul`.

    Example::

        y_shard = ficco.matmul_reduce_scatter(x, linear.weight.t())
    """
    return operate(NAME, a, b, group, schedule, rows)[0]
