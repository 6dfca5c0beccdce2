"""A matrix product over a shard of k, and the reduce-scatter of it."""

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
    """Multiply over a shard of k, sum the products of all ranks while they travel, and keep this
    rank's rows of the sum.

    With W ranks, it computes::

        y = torch.empty(m // W, n)
        torch.distributed.reduce_scatter_tensor(y, a @ b)
        return y

    ==========  ====================================================================
    ``a``       [m, k], the rank's columns of A; leading dimensions are flattened
    ``b``       [k, n], the rank's rows of B; a transposed view costs no copy
    result      [m/W, n], the rank's rows of the sum
    ==========  ====================================================================

    Copy engines send blocks of the product as they are made. The rank's own block is multiplied
    last, which hides the last copies, too. With ``one-shot``, for small problems, ranks read
    their peers' blocks in place instead. Every product is rounded to its dtype; the products are
    added in float32 in the order of the ranks and rounded once. The result is the same in every
    run, to the last bit.

    Let u be the unit round-off of the dtype, p_r the product of rank r and s the sum of all p_r.
    Apart from the errors of the GEMMs themselves and of adding in float32, the result differs from
    s by at most:

    ============  ==================================================================
    as a rule     u (sum of all abs(p_r) + abs(s))
    ``beta``      u (sum of the others' abs(p_r) + abs(s - own p) + abs(s)): the sum of the others
                  is rounded, and the GEMM of the own product adds to it
    ``ring``      u (abs(t_1) + abs(t_2) + ... + abs(s)), t_i the sum of the first i products on
                  the ring: every rank's GEMM adds to the sum that it received, and rounds
    ============  ==================================================================

    A library may round a product before it adds it to a sum, as cuBLAS does with some small ones.
    Then ``beta`` may be off by another u abs(own p), ``ring`` by u abs(p_r) of every rank but the
    first on the ring.

    Gradients are those of the sum over all ranks of <result, its gradient>: for ``a`` an
    :func:`ficco.all_gather_matmul` of the result's gradient, whose gathered rows serve ``b``, too.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=2,tail=4"``, or a Schedule.
        rows: rows of the result on every rank, if they are not equal; the same on every rank.

    Raises:
        As :func:`ficco.all_gather_matmul`.

    Example::

        y_shard = ficco.matmul_reduce_scatter(x, linear.weight.t())
    """
    return operate(NAME, a, b, group, schedule, rows)[0]
