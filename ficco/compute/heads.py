"""Attention of heads of a Plan, and its gradient, by the libraries of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ficco.compute.attention import Heads, LibraryCalls, Result
from ficco.compute.buffers import buffers_of
from ficco.compute.program import Call, Op, Program
from ficco.plan import Applied
from ficco.problems.heads import HeadsProblem

#: By matrix, tensors [batch, heads, positions, size]; without a size for the log-sum-exp.
Tensors = Mapping[str, torch.Tensor]


def apply_op(program: Program, one: Applied) -> Op:
    """A function of heads: a run of them is one call of a library, or one for each document."""
    problem, rank, places = program.plan.problem, program.plan.rank, buffers_of(program)
    assert isinstance(problem, HeadsProblem)
    asked, names = problem.attention, problem.inputs + problem.outs
    views = dict(zip(names, map(places.view, one.inputs + one.outs), strict=True))
    scale = asked.scale if asked.scale is not None else asked.size**-0.5
    function, calls = _backward if problem.backward else _forward, LibraryCalls(problem.rectangles)
    begin = {name: problem.rows(name, rank, one.first, one.last)[0] for name in names}
    runs = [
        {
            name: slice(*(row - begin[name] for row in problem.rows(name, rank, *run)))
            for name in names
        }
        for run in problem.alike(rank, one.first, one.last)
    ]

    def op(call: Call) -> None:
        tensors = {name: _by_batch(name, view(call), problem) for name, view in views.items()}
        for heads in runs:
            some = {name: one[:, heads[name]] for name, one in tensors.items()}
            function(some, calls, scale)

    return op


def _by_batch(name: str, matrix: torch.Tensor, problem: HeadsProblem) -> torch.Tensor:
    """Rows of a matrix as [batch, heads, positions, size]."""
    asked, heads = problem.attention, matrix.shape[0]
    if name == "lse":  # which is [heads, batch, positions]
        return matrix.view(heads, asked.batch, asked.length).transpose(0, 1)
    return matrix.view(heads, asked.length, asked.batch, asked.size).permute(2, 0, 1, 3)


def _forward(of: Tensors, calls: LibraryCalls, scale: float) -> None:
    heads = Heads(of["q"], of["k"], of["v"])
    for part in calls.attended(heads, scale):
        of["out"][:, :, part.first : part.last].copy_(part.mean)
        if "lse" in of:
            of["lse"][:, :, part.first : part.last].copy_(part.lse)


def _backward(of: Tensors, calls: LibraryCalls, scale: float) -> None:
    heads, result = Heads(of["q"], of["k"], of["v"]), Result(of["out"], of["lse"], of["grad"])
    for rows, made in calls.differentiated(heads, result, scale):
        for name, one in zip(("dq", "dk", "dv"), made, strict=True):
            of[name][:, :, rows.q : rows.q_stop].copy_(one)
