"""Calls of every kind in the modes that PyTorch has: autocast, no gradients, a default device,
derivatives that are not served, results that are changed in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from programs import Program
from ranks import Failure, Rank, caught, run, since
from torch.autograd import forward_ad

import ficco
import ficco.nn
from ficco.compute.products import release_of_torch


class Kind(NamedTuple):
    """A function of one tensor, and the shape of that; ``needed``: its gradients are made of the
    result, which then must not be changed."""

    function: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, ...]
    needed: bool = False


def _kinds() -> dict[str, Kind]:
    made = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=made, device="cpu")
    k, weight, router = draw(1, 2, 4, 8), draw(16, 16), draw(4, 2)
    up, down = draw(2, 16, 6), draw(2, 6, 16)
    indices = torch.tensor([[0, 1], [1, 3], [2, 0], [3, 2]], device="cpu")

    def layer(x: torch.Tensor, capacity: int | None) -> torch.Tensor:
        return ficco.experts(x, indices, router, up, down, capacity=capacity)

    return {
        "product": Kind(lambda x: ficco.all_gather_matmul(x, weight), (4, 16)),
        "sum": Kind(lambda x: ficco.matmul_reduce_scatter(x, weight), (4, 16)),
        "attention": Kind(lambda q: ficco.all_gather_attention(q, k, k), (1, 4, 4, 8), True),
        "window": Kind(
            lambda q: ficco.all_gather_attention(q, k, k, causal=True, window=2),
            (1, 4, 4, 8),
            True,
        ),
        "heads": Kind(lambda q: ficco.ulysses_attention(q, k, k), (1, 4, 4, 8), True),
        "project": Kind(
            lambda x: ficco.ulysses_project(x, weight, weight[:8], weight[:8], size=4)[0],
            (1, 4, 16),
        ),
        "output": Kind(lambda out: ficco.ulysses_output(out, weight), (1, 2, 8, 4)),
        "experts": Kind(partial(layer, capacity=4), (4, 16)),
        "gathered layer": Kind(
            lambda x: ficco.nn.gathered_linears(x, (weight,), (None,))[0], (4, 16)
        ),
        "scattered layer": Kind(lambda x: ficco.nn.scattered_linear(x, weight), (4, 16)),
        "reduced layer": Kind(lambda x: ficco.nn.reduced_linear(x, weight), (4, 16)),
        "copied layer": Kind(lambda x: ficco.nn.copied_linear(x, weight), (4, 16)),
        "summed gradient": Kind(lambda x: ficco.nn.sum_gradient(x) @ weight, (4, 16)),
        "exact experts": Kind(partial(layer, capacity=None), (4, 16)),
    }


KINDS = tuple(_kinds())


def _modes(at: Rank, name: str) -> dict[str, Any]:
    function, shape, needed = _kinds()[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(at.rank), device="cpu")
    wanted = function(x)
    with torch.device("meta"):
        assert torch.equal(function(x), wanted), "with a default device"
    leaf = x.clone().requires_grad_()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(function(leaf), wanted)
    if not needed:
        changed = function(leaf)
        changed += 1
        (grad,) = torch.autograd.grad(changed.sum(), leaf)
        plain = function(leaf)
        assert torch.equal(changed, plain + 1)
        assert torch.equal(torch.autograd.grad(plain.sum(), leaf)[0], grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(x).dtype == torch.bfloat16

    def dual() -> Any:
        with forward_ad.dual_level():
            return function(forward_ad.make_dual(x, x))

    def batched() -> Any:
        out = function(leaf)
        return torch.autograd.grad(out, leaf, torch.stack([out, out]), is_grads_batched=True)

    def second() -> Any:
        (once,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        return once.sum().backward()

    refused = {
        "jvp": caught(lambda: torch.func.jvp(function, (x,), (x,))),
        "dual": caught(dual),
        "batched": caught(batched),
        "second": caught(second),
    }
    assert torch.equal(function(x), wanted), "the group goes on"
    return refused


@pytest.mark.parametrize("name", KINDS)
def test_modes(name: str) -> None:
    for refused in run(2, _modes, name):
        for mode, text in (
            ("jvp", "forward mode"),
            ("dual", "forward mode"),
            ("batched", "batched gradients"),
            ("second", "second derivatives"),
        ):
            failure = refused[mode]
            assert isinstance(failure, Failure) and text in failure.text, f"{mode}: {failure}"


def _overridden(at: Rank, kernel: str) -> tuple[Failure, Failure]:
    """Calls while a kernel is replaced; kinds of calls from before it are refused, too."""
    a, b = torch.ones(4, 8), torch.ones(8, 4)
    wanted = ficco.all_gather_matmul(a, b)

    def doubled(left: torch.Tensor, right: torch.Tensor, *_: Any) -> torch.Tensor:
        return 2 * torch.einsum("mk,kn->mn", left, right)

    mode = torch.library.Library("aten", "IMPL")
    own = {"allow_override": True} if release_of_torch() > (2, 6) else {}
    mode.impl(kernel, doubled, "CPU", **own)
    try:
        layer = ficco.nn.ColumnParallelLinear(8, 4)
        return (
            caught(lambda: ficco.all_gather_matmul(a, b)),
            caught(lambda: layer(a)),
        )
    finally:
        mode._destroy()
        assert torch.equal(ficco.all_gather_matmul(a, b), wanted)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("kernel", ["mm", "_scaled_mm"])
def test_replaced_products_are_refused(kernel: str) -> None:
    for failures in run(2, _overridden, kernel, fresh=True):
        for failure in failures:
            assert failure.type == "NotImplementedError", failure
            assert f"got aten/{kernel}/CPU replaced by torch.library" in failure.text, failure


def _mapped(at: Rank) -> list[Failure]:
    """``vmap`` over layers and functions that no operator of ``torch.library`` serves."""
    row = ficco.nn.RowParallelLinear(8 * at.world, 4)
    x, weight = torch.ones(3, 4, 8), torch.ones(4, 8)
    functions: list[Callable[[torch.Tensor], Any]] = [
        row,
        lambda part: ficco.nn.copied_linear(part, weight),
        lambda part: ficco.nn.reduced_linear(part, weight),
        ficco.nn.sum_gradient,
    ]
    return [caught(lambda call=call: torch.func.vmap(call)(x)) for call in functions]


def test_vmap_is_refused_in_words() -> None:
    for failures in run(2, _mapped):
        for failure in failures:
            assert failure.type == "NotImplementedError", failure
            assert "torch.func.vmap is not served here" in failure.text, failure


@since("2.13", "has no fake sum over ranks")
def test_a_fake_group_is_refused_in_words(tmp_path: Path) -> None:
    """The group is PyTorch's stand-in for ranks that do not exist."""
    ended = Program(tmp_path, "fake", _FAKE, (), {}).end(time.monotonic() + 60)
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
