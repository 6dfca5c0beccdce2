"""What of a problem goes alone: its movement without a product. Pure."""

from __future__ import annotations

from dataclasses import replace

from ficco.problem import Problem


def movements(problem: Problem) -> tuple[Problem, ...]:
    """Problems without products which, one behind the other, move what a problem moves.

    What is scattered travels as blocks of an all-to-all. The sum of what arrives is not in it, nor
    the memory traffic of that; sums that return are gathered.

    >>> [str(one) for one in movements(Problem("matmul_reduce_scatter", (2, 2), 8, 4, "float32"))]
    ['all_to_all_matmul(m=4 (4 x 2 ranks), n=0, k=8, float32)']
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
    return problem.m * _width(problem) * problem.itemsize


def block_bytes(problem: Problem) -> int:
    """Bytes of the largest block that a rank sends to another."""
    ranks = range(problem.world)
    rows = [problem.block(src, dst) for src in ranks for dst in ranks if src != dst]
    return max(rows, default=0) * _width(problem) * problem.itemsize


def _width(problem: Problem) -> int:
    """Columns of what travels."""
    return problem.n if problem.kind.scatters else problem.k
