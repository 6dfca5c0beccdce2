"""``ficco.prepare``: later calls are warm; errors name a rank that does not take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import own_group
from ranks import Rank, caught, on_ranks, run
from torch import nn

import ficco
import ficco.nn
from ficco.runtime.workspace import workspaces

#: Seconds that a rank waits for another rank that does not prepare.
SHORT_S = 2.0
PRODUCTS = [("all_gather_matmul", (8, 4), (4, 6)), ("matmul_reduce_scatter", (2, 8, 4), (4, 6))]


def _kinds(group: Any) -> set[str]:
    """Operators of the cached kinds of calls that have a program on both slots."""
    (workspace,) = workspaces(group)
    cached = workspace.programs.values()
    return {kind.plan.problem.operator for kind in cached if len(kind.programs) == 2}


@on_ranks(2)
def test_a_list_of_products_is_prepared(at: Rank) -> None:
    with own_group(at) as group:
        ficco.prepare(PRODUCTS, group=group)
        (workspace,) = workspaces(group)
        assert _kinds(group) == {name for name, *_ in PRODUCTS}
        before = set(workspace.programs)
        out = ficco.all_gather_matmul(torch.ones(8, 4), torch.ones(4, 6), group=group)
        assert set(workspace.programs) == before
        assert torch.equal(out, torch.full((16, 6), 4.0))


@on_ranks(2)
def test_the_calls_of_a_model_are_prepared_without_gradients(at: Rank) -> None:
    with own_group(at) as group:
        up = ficco.nn.ColumnParallelLinear(8, 16, group=group)
        model = nn.Sequential(up, nn.ReLU(), ficco.nn.RowParallelLinear(16, 8, group=group))
        ficco.prepare(lambda: model(torch.zeros(4, 8)), group=group)
        (workspace,) = workspaces(group)
        before = set(workspace.programs)
        model(torch.randn(4, 8)).sum()
        assert len(_kinds(group)) == 2 and set(workspace.programs) == before
        assert all(weight.grad is None for weight in model.parameters())


def _differing(at: Rank, other: str) -> Any:
    """The error of ``ficco.prepare`` or of a call where ranks do not prepare the same list."""
    with own_group(at) as group, ficco.options(timeout_s=SHORT_S):
        if other != "absent from the start":
            ficco.all_gather_matmul(torch.ones(2, 4), torch.ones(4, 6), group=group)
        at.barrier()
        if at.rank == 0 or other == "another list":
            error = caught(lambda: ficco.prepare(PRODUCTS[at.rank :], group=group))
        elif other == "a call":
            a, b = torch.ones(2, 4), torch.ones(4, 7)
            error = caught(lambda: ficco.all_gather_matmul(a, b, group=group))
        else:
            error = None
        at.barrier()
        return error


@pytest.mark.parametrize(
    "other", ["absent from the start", "absent later", "another list", "a call"]
)
def test_a_rank_that_does_not_prepare_or_something_else_is_named(other: str) -> None:
    errors = [error for error in run(2, _differing, other, fresh=True) if error is not None]
    assert len(errors) == (1 if "absent" in other else 2)
    for error in errors:
        assert "prepare" in error.text, error
        if "absent" in other:
            assert (error.type, error.fields["peer"]) == ("SignalTimeout", 1), error
            assert "rank 1" in error.text
        else:
            assert error.type == "RankMismatch" and "prepare([" in error.text, error


@on_ranks(2)
def test_invalid_lists_are_refused(at: Rank) -> None:
    with own_group(at) as group:
        gather, rows, b = "all_gather_matmul", (8, 4), (4, 6)
        shapes = ((rows, (4,)), (rows,), ((8, -4), b), (rows, (4, "n")))
        for wrong in (5, [("matmul", rows, b)], *([(gather, *each)] for each in shapes)):
            failure = caught(lambda calls=wrong: ficco.prepare(calls, group=group))
            assert (failure.type, failure.text[:15]) == ("ValueError", "calls: required"), failure
        failure = caught(lambda: ficco.prepare([(gather, rows, b)], dtype="half", group=group))
        assert (failure.type, failure.text[:15]) == ("ValueError", "dtype: required"), failure
