"""Calls of all operators and layers in PyTorch's modes: autocast, no gradients, a default device,
unsupported derivatives, results that are changed in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from programs import Program
from ranks import Failure, Rank, caught, on_ranks, since
from torch.autograd import forward_ad

import ficco
import ficco.nn
from ficco.compute.products import release_of_torch


class Kind(NamedTuple):
    """A function of one tensor, and the shape of the tensor. ``needed``: the gradients need the
    result, which must not be changed in place."""

    function: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, ...]
    needed: bool = False


def _kinds() -> dict[str, Kind]:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator, device="cpu")
    k, weight, router = draw(1, 2, 4, 8), draw(16, 16), draw(4, 2)
    up, down = draw(2, 16, 6), draw(2, 6, 16)
    indices = torch.tensor([[0, 1], [1, 3], [2, 0], [3, 2]], device="cpu")
    rows, heads, few = (4, 16), (1, 4, 4, 8), weight[:8]

    def layer(x: torch.Tensor, capacity: int | None) -> torch.Tensor:
        return ficco.experts(x, indices, router, up, down, capacity=capacity)

    def window(q: torch.Tensor) -> torch.Tensor:
        return ficco.all_gather_attention(q, k, k, causal=True, window=2)

    def project(x: torch.Tensor) -> torch.Tensor:
        return ficco.ulysses_project(x, weight, few, few, size=4)[0]

    return {
        "product": Kind(lambda x: ficco.all_gather_matmul(x, weight), rows),
        "sum": Kind(lambda x: ficco.matmul_reduce_scatter(x, weight), rows),
        "attention": Kind(lambda q: ficco.all_gather_attention(q, k, k), heads, True),
        "window": Kind(window, heads, True),
        "heads": Kind(lambda q: ficco.ulysses_attention(q, k, k), heads, True),
        "project": Kind(project, (1, 4, 16)),
        "output": Kind(lambda out: ficco.ulysses_output(out, weight), (1, 2, 8, 4)),
        "experts": Kind(partial(layer, capacity=4), rows),
        "exact experts": Kind(partial(layer, capacity=None), rows),
        "gathered layer": Kind(lambda x: ficco.nn.gathered_linears(x, (weight,), (None,))[0], rows),
        "scattered layer": Kind(lambda x: ficco.nn.scattered_linear(x, weight), rows),
        "reduced layer": Kind(lambda x: ficco.nn.reduced_linear(x, weight), rows),
        "copied layer": Kind(lambda x: ficco.nn.copied_linear(x, weight), rows),
        "summed gradient": Kind(lambda x: ficco.nn.sum_gradient(x) @ weight, rows),
    }


def _modes_of(at: Rank, name: str, function: Any, shape: tuple[int, ...], needed: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(at.rank), device="cpu")
    expected = function(x)
    with torch.device("meta"):
        assert torch.equal(function(x), expected), f"{name}, with a default device"
    leaf = x.clone().requires_grad_()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(function(leaf), expected), (name, mode)
    if not needed:
        changed = function(leaf)
        changed += 1
        (grad,) = torch.autograd.grad(changed.sum(), leaf)
        plain = function(leaf)
        assert torch.equal(changed, plain + 1), name
        assert torch.equal(torch.autograd.grad(plain.sum(), leaf)[0], grad), name
    with torch.autocast("cpu", torch.bfloat16):
        assert function(x).dtype == torch.bfloat16, name

    def dual() -> Any:
        with forward_ad.dual_level():
            return function(forward_ad.make_dual(x, x))

    def batched() -> Any:
        out = function(leaf)
        return torch.autograd.grad(out, leaf, torch.stack([out, out]), is_grads_batched=True)

    def second() -> Any:
        (once,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        return once.sum().backward()

    for text, call in (
        ("forward mode", lambda: torch.func.jvp(function, (x,), (x,))),
        ("forward mode", dual),
        ("func.grad", lambda: torch.func.grad(lambda x: function(x).sum())(x)),
        ("func.grad", lambda: torch.func.jacrev(function)(x)),
        ("batched gradients", batched),
        ("second derivatives", second),
    ):
        failure = caught(call)
        assert isinstance(failure, Failure) and text in failure.text, (name, failure)
    assert torch.equal(function(x), expected), f"{name}: the group does not work afterwards"


@on_ranks(2)
def test_modes(at: Rank) -> None:
    for name, kind in _kinds().items():
        _modes_of(at, name, *kind)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@on_ranks(2, fresh=True)
def test_replaced_products_are_refused(at: Rank) -> None:
    """Calls raise while a kernel is replaced, including cached kinds of calls."""
    a, b = torch.ones(4, 8), torch.ones(8, 4)
    expected, layer = ficco.all_gather_matmul(a, b), ficco.nn.ColumnParallelLinear(8, 4)

    def doubled(left: torch.Tensor, right: torch.Tensor, *_: Any) -> torch.Tensor:
        return 2 * torch.einsum("mk,kn->mn", left, right)

    options = {"allow_override": True} if release_of_torch() > (2, 6) else {}
    for kernel in ("mm", "_scaled_mm"):
        mode = torch.library.Library("aten", "IMPL")
        mode.impl(kernel, doubled, "CPU", **options)
        for call in (lambda: ficco.all_gather_matmul(a, b), lambda: layer(a)):
            failure = caught(call)
            assert failure.type == "NotImplementedError", failure
            assert f"got aten/{kernel}/CPU replaced by torch.library" in failure.text, failure
        mode._destroy()
        assert torch.equal(ficco.all_gather_matmul(a, b), expected)


@on_ranks(2)
def test_vmap_is_refused_by_name(at: Rank) -> None:
    """``vmap`` over layers and functions that are no operators of ``torch.library``."""
    row = ficco.nn.RowParallelLinear(8 * at.world, 4)
    x, weight = torch.ones(3, 4, 8), torch.ones(4, 8)
    functions: list[Callable[[torch.Tensor], Any]] = [
        row,
        partial(ficco.nn.copied_linear, weight=weight),
        partial(ficco.nn.reduced_linear, weight=weight),
        ficco.nn.sum_gradient,
    ]
    for function in functions:
        failure = caught(lambda function=function: torch.func.vmap(function)(x))
        assert failure.type == "NotImplementedError", failure
        assert "torch.func.vmap is not served here" in failure.text, failure


@since("2.13", "has no fake sum over ranks")
def test_a_fake_group_is_refused_by_name(tmp_path: Path) -> None:
    """A fake group is PyTorch's stand-in for ranks that do not exist."""
    ended = Program(tmp_path, "fake", _FAKE, (), {}).end(time.monotonic() + 240)
    assert ended.code == 0, ended


#: Real tensors are refused; fake ones are traced without a warning.
_FAKE = """
import warnings
import torch, torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
import ficco.nn

dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
try:
    ficco.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 4))
except ValueError as error:
    assert "got PyTorch's fake backend" in str(error), error
else:
    raise AssertionError("served")
with warnings.catch_warnings(), FakeTensorMode():
    warnings.simplefilter("error")
    up, down = ficco.nn.ColumnParallelLinear(8, 32), ficco.nn.RowParallelLinear(32, 8)
    y = down(up(torch.ones(4, 8)))
    assert y.shape == (4, 8)
    y.sum().backward()
"""
