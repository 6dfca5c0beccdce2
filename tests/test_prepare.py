"""``ficco.prepare``: later calls are warm; a rank that does not take part is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import own_group
from ranks import Rank, caught, run
from torch import nn

import ficco
import ficco.nn
from ficco.runtime.workspace import workspaces

#: The seconds that a rank waits for one that does not prepare.
SHORT_S = 2.0
PRODUCTS = [("all_gather_matmul", (8, 4), (4, 6)), ("matmul_reduce_scatter", (2, 8, 4), (4, 6))]


def _kinds(group: Any) -> set[str]:
    """The operators whose kinds a rank knows, each with a program on every slot."""
    (workspace,) = workspaces(group)
    cached = workspace.programs.values()
    return {one.plan.problem.operator for one in cached if len(one.programs) == 2}


def _prepared(at: Rank) -> list[Any]:
    with own_group(at) as group:
        ficco.prepare(PRODUCTS, group=group)
        (workspace,) = workspaces(group)
        found: list[Any] = [_kinds(group) == {name for name, *_ in PRODUCTS}]
        before = set(workspace.programs)
        out = ficco.all_gather_matmul(torch.ones(8, 4), torch.ones(4, 6), group=group)
        return [*found, set(workspace.programs) == before, out.eq(4).all().item(), out.shape[0]]


def test_a_list_of_products_is_prepared() -> None:
    assert run(2, _prepared) == [[True, True, True, 16]] * 2


def _of_a_model(at: Rank) -> list[Any]:
    with own_group(at) as group:
        up = ficco.nn.ColumnParallelLinear(8, 16, group=group)
        model = nn.Sequential(up, nn.ReLU(), ficco.nn.RowParallelLinear(16, 8, group=group))
        ficco.prepare(lambda: model(torch.zeros(4, 8)), group=group)
        (workspace,) = workspaces(group)
        before = set(workspace.programs)
        model(torch.randn(4, 8)).sum()
        gradients = [one.grad for one in model.parameters()]
        return [len(_kinds(group)), set(workspace.programs) == before, gradients]


def test_the_calls_of_a_model_are_prepared_without_gradients() -> None:
    assert run(2, _of_a_model) == [[2, True, [None] * 4]] * 2


def _alone(at: Rank, other: str) -> Any:
    """An error of a rank that prepares while the other rank does something else."""
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


@pytest.mark.parametrize("other", ["absent from the start", "absent later"])
def test_a_rank_that_does_not_prepare_is_named(other: str) -> None:
    error, _ = run(2, _alone, other, fresh=True)
    assert (error.type, error.fields["peer"]) == ("SignalTimeout", 1), error
    assert "prepare" in error.text and "rank 1" in error.text


@pytest.mark.parametrize("other", ["another list", "a call"])
def test_ranks_that_prepare_something_else_are_told_apart(other: str) -> None:
    for error in run(2, _alone, other, fresh=True):
        assert error.type == "RankMismatch" and "prepare([" in error.text, error


def _refused(at: Rank) -> list[Any]:
    with own_group(at) as group:
        return [
            caught(lambda calls=calls: ficco.prepare(calls, group=group)).type
            for calls in ([("matmul", (8, 4), (4, 6))], [("all_gather_matmul", (8, 4), (4,))])
        ]


def test_what_is_no_product_is_refused() -> None:
    assert run(2, _refused) == [["ValueError"] * 2] * 2
