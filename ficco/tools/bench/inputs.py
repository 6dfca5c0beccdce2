"""Operands of every operator: small integers with one right product, compared exactly, and random
ones to time with.

Legend: L rows of this rank's left operand, O rows of its result, P rows that it multiplies; K, N as
in the product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import torch

from ficco.compute.scaled import dequantized, multiply_scaled
from ficco.problems.products import Problem
from ficco.problems.scaling import ALL, Recipe, factor_count

#: Nonzero elements in a column of the exact B; of all ranks together, where products are summed.
#: With elements of A up to 3 in size no sum leaves +-192, which bfloat16 holds exactly (up to 256),
#: whatever k is, and in whatever order is added.
TERMS = 64
LARGEST = 3

#: Factor of random float8 operands before rounding, and the largest number of the narrowest float8
#: dtype.
GAIN, LIMIT = 64.0, 240.0

#: Elements of B that are drawn at once: a bound on the memory for 8-byte integers.
ELEMENTS = 1 << 26

#: Overwrites a tensor with numbers of a generator.
Draw = Callable[[torch.Tensor, torch.Generator], object]


def draw_normal(tensor: torch.Tensor, generator: torch.Generator | None = None) -> None:
    """Overwrite a tensor with normal numbers, those of float8 ``GAIN`` times as large."""
    if tensor.element_size() > 1:
        tensor.normal_(generator=generator)
        return
    for part in tensor.flatten().split(ELEMENTS) if tensor.is_contiguous() else (tensor,):
        numbers = torch.empty(part.shape, dtype=torch.bfloat16, device=part.device)
        part.copy_(numbers.normal_(generator=generator).mul_(GAIN).clamp_(-LIMIT, LIMIT))


def factors(
    rules: Recipe, device: torch.device, m: int, n: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of A [m, k] and of B [k, n] for operands that :func:`draw_normal` draws."""
    shapes = ((m, k), rules.a), ((k, n), rules.b)
    of_a, of_b = (
        torch.full(tuple(map(factor_count, shape, share)), 1 / GAIN, device=device)
        for shape, share in shapes
    )
    return of_a, of_b


@dataclass
class Operands:
    """The operands of one rank, overwritten in place, so that captured calls see new ones.

    ``whole_OK`` is the left operand of the one product that equals this rank's result: the gathered
    A, transposed or not; the blocks of all ranks for this rank; or, where products are summed, the
    sum of all ranks' A, since all ranks have the same B. ``scales`` are the scales of float8
    operands, as operators take them. ``whole_scale`` is the scale of ``whole_OK``, whose sums have
    a wider dtype. Each rank computes ``whole_OK`` without communication, so that the reference does
    not depend on the tested code. ``a_symmetric_LK`` is the left operand in memory that peers can
    read; set by users that need it.
    """

    problem: Problem
    rank: int
    device: torch.device
    a_LK: torch.Tensor = field(init=False)
    whole_OK: torch.Tensor = field(init=False)
    b_KN: torch.Tensor = field(init=False)
    a_symmetric_LK: torch.Tensor | None = None
    scales: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    whole_scale: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        problem, rank, scaling = self.problem, self.rank, self.problem.scaling
        left, n, k = problem.left_rows(rank), problem.n, problem.k
        rows = (problem.product_rows if problem.kind.inner else problem.out_rows)(rank)
        self.a_LK = self.empty(left, k)
        if scaling is None:
            self.whole_OK, self.b_KN = self.empty(rows, k), self.empty(problem.b_rows(rank), n)
            return
        self.whole_OK = self.empty(rows, k, scaling.out if problem.kind.sums else problem.dtype)
        self.b_KN = self.empty(n, k, scaling.right).t()
        of_a, of_b = factors(scaling.rules, self.device, left, n, k)
        self.scales = {"scale_a": of_a, "scale_b": of_b}
        self.whole_scale = factors(scaling.rules, self.device, rows, n, k)[0]

    def empty(self, rows: int, cols: int, dtype: str = "") -> torch.Tensor:
        """A matrix like A, or of another dtype, not initialised."""
        kind = getattr(torch, dtype or self.problem.dtype)
        return torch.empty(rows, cols, dtype=kind, device=self.device)

    @property
    def _multiplied_PK(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The left operand of this rank's product, its own A or the gathered A, and its scale."""
        if self.problem.kind.scatters:
            return self.a_LK, self.scales.get("scale_a")
        return self._whole, self.whole_scale

    def product(self) -> torch.Tensor:
        """The product of this rank by the library."""
        return self.multiplied(*self._multiplied_PK)

    def multiplied(self, a: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Some rows times B, by the library."""
        scaling = self.problem.scaling
        if scaling is None or scale is None:
            return torch.mm(a, self.b_KN)
        out = self.empty(len(a), self.problem.n, scaling.out)
        multiply_scaled(a, self.b_KN, out, (scale, self.scales["scale_b"]), scaling.recipe)
        return out

    def wide(self, matrix: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """An operand as numbers of the result's dtype, which integers fit into."""
        if scale is None:
            return matrix
        return dequantized(matrix, scale).to(getattr(torch, self.problem.out_dtype))

    @property
    def wide_b_KN(self) -> torch.Tensor:
        return self.wide(self.b_KN, self.scales.get("scale_b"))

    def exact(self, iteration: int) -> None:
        """Small integers; A depends on iteration, rank, block and row, so that stale data shows.
        Of float8, so do its factors, powers of two, but for the one for all.

        B depends only on the sizes; :meth:`exact_b` sets it.
        """
        self._fill(
            iteration,
            lambda tensor, generator: tensor.random_(-LARGEST, LARGEST + 1, generator=generator),
            lambda factors, generator: factors.random_(0, 2, generator=generator).add_(1.0),
        )

    def exact_b(self) -> None:
        """A sparse B of 1 and -1 whose columns take their terms from different rows."""
        k_count, n_count = self.b_KN.shape
        terms, scaling = TERMS, self.problem.scaling
        if scaling is not None:  # one factor for each column, whose terms A's factors double
            of_b = self.scales["scale_b"]
            of_b.copy_(1 + torch.arange(of_b.shape[1], device=self.device) % 2)
            terms //= 1 + (scaling.rules.a[1] != ALL)
        terms = max(1, terms // self.problem.world) if self.problem.kind.sums else terms
        stride = max(1, -(-k_count // terms))
        k = torch.arange(k_count, device=self.device)[:, None]
        width = max(1, ELEMENTS // max(k_count, 1))
        for first in range(0, n_count, width):
            n = torch.arange(first, min(first + width, n_count), device=self.device)
            sign = 1 - 2 * ((k // stride + n) % 2)
            columns = torch.where((k + 7 * n) % stride == 0, sign, 0)
            self.b_KN[:, first : first + width] = columns.to(self.b_KN.dtype)

    def random(self, seed: int) -> None:
        """Normal data, as in training: GEMMs take longer on it than on small integers."""
        scaled = self.problem.scaling is not None
        self._fill(seed, draw_normal, lambda factors, _: factors.fill_(1 / GAIN))
        generator = torch.Generator(self.device)
        generator.manual_seed(seed)
        norm = max(self.b_KN.shape[0], 1) ** -0.5
        draw_normal(self.b_KN.t() if scaled else self.b_KN, generator)
        if scaled:
            self.scales["scale_b"].fill_(norm / GAIN)
        else:
            self.b_KN.mul_(norm)

    def reference(self) -> torch.Tensor:
        """The result by the library, from what only this rank computed."""
        return torch.mm(self.wide(self._whole, self.whole_scale), self.wide_b_KN)

    def reference_product(self) -> torch.Tensor:
        """The product of this rank, computed locally."""
        return torch.mm(self.wide(*self._multiplied_PK), self.wide_b_KN)

    @property
    def _whole(self) -> torch.Tensor:
        return self.whole_OK.t() if self.problem.kind.inner else self.whole_OK

    def _fill(self, iteration: int, draw: Draw, draw_factors: Draw) -> None:
        """Draw all blocks of A that this rank has, and those that its result consists of."""
        generator = torch.Generator(self.device)
        problem, rank, ranks = self.problem, self.rank, range(self.problem.world)
        scaling, of_a, of_whole = problem.scaling, self.scales.get("scale_a"), self.whole_scale
        # Whether A has a block for each rank; else all of it is for all.
        in_blocks = problem.kind.scatters or problem.kind.blocks

        def seeded(src: int, part: int) -> torch.Generator:
            generator.manual_seed((iteration * len(ranks) + src) * len(ranks) + part)
            return generator

        def draw_block(tensor: torch.Tensor, src: int, part: int) -> None:
            wide = tensor if scaling is None else torch.empty_like(tensor, dtype=torch.bfloat16)
            draw(wide, seeded(src, part))
            if wide is not tensor:
                tensor.copy_(wide)

        def draw_scale(scale: torch.Tensor | None, rows: slice, src: int, part: int) -> None:
            if scale is None or scaling is None:
                return
            if scaling.by_rank:  # equal on all ranks, as PyTorch's fused operators need it
                draw_factors(scale, seeded(0, 0))
            else:  # equal where products are summed, which stay small then
                draw_factors(scale[rows], seeded(0 if problem.kind.sums else src, part))

        for dst in ranks if in_blocks else (0,):
            first, rows = problem.leaves(rank, dst), problem.block(rank, dst)
            draw_block(self.a_LK[first : first + rows], rank, dst)
            draw_scale(of_a, slice(first, first + rows), rank, dst)
        for src, dst in product(ranks, ranks if problem.kind.returns else (rank,)):
            part, rows = dst if in_blocks else 0, problem.block(src, dst)
            if problem.kind.returns:
                first, rows = problem.offsets[dst], problem.rows[dst]
            else:
                first = 0 if problem.kind.sums else problem.lands(src, rank)
            block_of_whole = self.whole_OK[first : first + rows]
            if src and problem.kind.sums:
                block = torch.empty_like(block_of_whole)
                draw_block(block, src, part)
                block_of_whole += block
            else:
                draw_block(block_of_whole, src, part)
            draw_scale(of_whole, slice(first, first + rows), src, part)
        if self.a_symmetric_LK is not None:
            self.a_symmetric_LK.copy_(self.a_LK)


def wrong_elements(result: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Number of elements that differ from ``wanted``, on the device; all elements if the shapes
    differ. Elements of float8 are compared bit by bit."""
    if result.shape != wanted.shape:
        return torch.tensor(max(result.numel(), wanted.numel(), 1), device=wanted.device)
    if result.element_size() == 1:
        result, wanted = result.view(torch.uint8), wanted.view(torch.uint8)
    return (result != wanted).sum()
