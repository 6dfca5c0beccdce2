"""Operands: small integers with one right product, and random ones to time with.

Legend: M rows of the gathered A, S rows of this rank's shard, K, N as in the product.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ficco.problem import Problem

#: Nonzero elements in a column of the exact B. With elements of A up to 3 in size no product
#: leaves +-192, which bfloat16 holds exactly (up to 256), whatever k is.
TERMS = 64
LARGEST = 3

#: Elements of B that are made at once: a bound on what making it takes, in 8-byte integers.
ELEMENTS = 1 << 26


@dataclass
class Operands:
    """The operands of one rank, overwritten in place, so that captured calls see new ones.

    ``a_full_MK`` is the gathered A, which each rank makes by itself: no communication that could
    be wrong takes part in the reference. ``a_symmetric_SK`` is the shard once more, in memory that
    peers can read; whoever needs it sets it.
    """

    problem: Problem
    rank: int
    device: torch.device
    a_shard_SK: torch.Tensor = field(init=False)
    a_full_MK: torch.Tensor = field(init=False)
    b_KN: torch.Tensor = field(init=False)
    a_symmetric_SK: torch.Tensor | None = None

    def __post_init__(self) -> None:
        problem = self.problem
        dtype = getattr(torch, problem.dtype)
        self.a_full_MK = torch.empty(problem.m, problem.k, dtype=dtype, device=self.device)
        self.b_KN = torch.empty(problem.k, problem.n, dtype=dtype, device=self.device)
        shape = (problem.rows[self.rank], problem.k)
        self.a_shard_SK = torch.empty(shape, dtype=dtype, device=self.device)

    def exact(self, iteration: int) -> None:
        """Small integers; A depends on iteration, rank and row, so that stale data shows.

        B depends on the sizes alone and is made anew only by :meth:`exact_b`.
        """
        generator = torch.Generator(self.device)
        for rank in range(self.problem.world):
            generator.manual_seed(iteration * self.problem.world + rank)
            self._shard(rank).random_(-LARGEST, LARGEST + 1, generator=generator)
        self._own()

    def exact_b(self) -> None:
        """A sparse B of 1 and -1 whose columns take their terms from different rows."""
        k_count, n_count = self.b_KN.shape
        stride = max(1, -(-k_count // TERMS))
        k = torch.arange(k_count, device=self.device)[:, None]
        width = max(1, ELEMENTS // max(k_count, 1))
        for first in range(0, n_count, width):
            n = torch.arange(first, min(first + width, n_count), device=self.device)
            sign = 1 - 2 * ((k // stride + n) % 2)
            self.b_KN[:, first : first + width] = torch.where((k + 7 * n) % stride == 0, sign, 0)

    def random(self, seed: int) -> None:
        """Normal data, as in training: GEMMs take longer on it than on small integers."""
        generator = torch.Generator(self.device)
        generator.manual_seed(seed)
        for tensor in (self.a_full_MK, self.b_KN):
            tensor.normal_(generator=generator)
        self.b_KN.mul_(max(self.problem.k, 1) ** -0.5)
        self._own()

    def reference(self) -> torch.Tensor:
        """The product by the library, from the A that this rank made."""
        return torch.mm(self.a_full_MK, self.b_KN)

    def _shard(self, rank: int) -> torch.Tensor:
        return self.a_full_MK[self.problem.offsets[rank] : self.problem.offsets[rank + 1]]

    def _own(self) -> None:
        for shard in (self.a_shard_SK, self.a_symmetric_SK):
            if shard is not None:
                shard.copy_(self._shard(self.rank))
