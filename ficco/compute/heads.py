"""Attention of heads of a Plan, and its gradient, by the libraries of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ficco.compute.attention import Heads, LibraryCalls, Result
from ficco.compute.buffers import buffers_of
from ficco.compute.program import Call, Op, Program
from ficco.plan import Applied

#: By matrix, tensors [batch, heads, positions, size]; without a size for the log-sum-exp.
Tensors = Mapping[str, torch.Tensor]


def apply_op(program: Program, one: Applied) -> Op:
    """Attention of heads, or its gradient: one library call for each run of heads and document."""
    (applies,), rank = program.plan.problem.specification.applications, program.plan.rank
    rows_of = {row.matrix: row.of for row in applies.inputs + applies.outs}
    places = buffers_of(program)
    views = dict(zip(rows_of, map(places.view, one.inputs + one.outs), strict=True))
    function, calls = _backward if "dq" in rows_of else _forward, LibraryCalls(applies.rectangles)
    begin = {name: rows(rank, one.first, one.last)[0] for name, rows in rows_of.items()}
    runs = [
        {
            name: slice(*(row - begin[name] for row in rows(rank, *run)))
            for name, rows in rows_of.items()
        }
        for run in applies.runs(rank, one.first, one.last)
    ]

    def op(call: Call) -> None:
        tensors = {name: _by_batch(name, view(call), applies.heads) for name, view in views.items()}
        for heads in runs:
            of_run = {name: one[:, heads[name]] for name, one in tensors.items()}
            function(of_run, calls, applies.scale)

    return op


def _by_batch(name: str, matrix: torch.Tensor, heads: tuple[int, int]) -> torch.Tensor:
    """Rows of a matrix as [batch, heads, positions, size]."""
    if name == "lse":  # [heads, batch, positions]
        return matrix.view(matrix.shape[0], heads[0], -1).transpose(0, 1)
    return matrix.view(matrix.shape[0], -1, *heads).permute(2, 0, 1, 3)


def _forward(of: Tensors, calls: LibraryCalls, scale: float) -> None:
    heads = Heads(of["q"], of["k"], of["v"])
    for part in calls.attended(heads, scale):
        of["out"][:, :, part.first : part.last].copy_(part.mean)
        if "lse" in of:
            of["lse"][:, :, part.first : part.last].copy_(part.lse)


def _backward(of: Tensors, calls: LibraryCalls, scale: float) -> None:
    heads, result = Heads(of["q"], of["k"], of["v"]), Result(of["out"], of["lse"], of["grad"])
    for rows, gradients in calls.differentiated(heads, result, scale):
        for name, one in zip(("dq", "dk", "dv"), gradients, strict=True):
            of[name][:, :, rows.q : rows.q_stop].copy_(one)
