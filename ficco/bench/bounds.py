"""What of a problem goes alone: its movement without a product. Pure."""

from __future__ import annotations

from dataclasses import replace

from ficco.problem import Problem


def movements(problem: Problem) -> tuple[Problem, ...]:
    """Problems without products which, one behind the other, move what a problem moves.

    What is scattered travels as blocks of an all-to-all. The sum of what arrives is not in it, nor
    the memory traffic of that; sums that return are gathered.

    >>> [str(one) for one in movements(Problem("matmul_reduce_scatter", (2, 2), 8, 4, "float32"))]
    ['all_to_all_matmul(m=4 (2 x 2 ranks), n=0, k=8, float32)']
    """
    kind, width, dtype = problem.kind, problem.n, problem.dtype
    if not kind.scatters:
        return (replace(problem, n=0),)
    table = problem.blocks or (problem.rows,) * problem.world
    away = Problem.of_blocks("all_to_all_matmul", table, 0, width, dtype)
    if not kind.returns:
        return (away,)
    return away, Problem("all_gather_matmul", problem.rows, 0, width, dtype)


def moved_bytes(problem: Problem) -> int:
    """Bytes of what is exchanged on a rank: the gathered A, or the product."""
    return problem.m * (problem.n if problem.kind.scatters else problem.k) * problem.itemsize


def product(problem: Problem) -> Problem:
    """The product of one rank, alone: of the one that multiplies most."""
    return Problem("all_gather_matmul", (problem.m,), problem.n, problem.k, problem.dtype)
