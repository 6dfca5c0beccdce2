"""How far sums over ranks are from those in float64, on random operands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ficco.bench.inputs import Operands

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Rows of each rank's part of a result whose errors are looked at.
ERROR_ROWS = 64

#: Elements of B that are converted to float64 at once.
ELEMENTS = 1 << 26


class Accuracy:
    """What the operands of an operator that sums should give, in some rows of each rank.

    All ranks have the same B, so that the sum of their products is the product of their sum; that
    is added up and multiplied in float64. Collective.
    """

    def __init__(self, operands: Operands, group: ProcessGroup) -> None:
        problem, rank = operands.problem, operands.rank
        picked = [
            torch.linspace(0, rows - 1, min(rows, ERROR_ROWS), device=operands.device).long()
            for rows in problem.rows
        ]
        everyone = zip(picked, problem.offsets, strict=False)
        sums = operands.a_LK[torch.cat([rows + first for rows, first in everyone])].double()
        dist.all_reduce(sums, group=group)
        mine = sums.split([len(rows) for rows in picked])[rank]
        width = max(1, ELEMENTS // max(problem.k, 1))
        parts = [mine @ some.double() for some in operands.b_KN.split(width, dim=1)]
        self._wanted = torch.cat(parts, dim=1)
        self._rows = picked[rank] + (problem.offsets[rank] if problem.kind.returns else 0)

    def error(self, result: torch.Tensor) -> float:
        """Root mean square of a result's errors over that of what it should be."""
        wanted = self._wanted
        away = (result[self._rows].double() - wanted).norm()
        return float(away / wanted.norm()) if wanted.numel() else 0.0
