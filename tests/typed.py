"""Types of a user's code in a type checker.

``make lint`` is the test: mypy is strict, so it reports an ignored error that does not occur.
"""

from __future__ import annotations

from typing import assert_type

import torch

import ficco

Both = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def calls(a: torch.Tensor, b: torch.Tensor, gathered: bool) -> None:
    both = ficco.all_gather_matmul(a, b, return_gathered=True)
    assert_type(both, tuple[torch.Tensor, torch.Tensor])
    assert_type(ficco.all_gather_matmul(a, b), torch.Tensor)
    assert_type(ficco.all_gather_matmul(a, b, return_gathered=gathered), Both)


def scaled(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, gathered: bool) -> None:
    """The arguments of float8, with each type of ``return_gathered``."""
    assert_type(ficco.all_gather_matmul(a, b, scale_a=scale, scale_b=scale), torch.Tensor)
    both = ficco.all_gather_matmul(a, b, return_gathered=True, scale_a=scale, scale_b=scale)
    assert_type(both, tuple[torch.Tensor, torch.Tensor])
    either = ficco.all_gather_matmul(
        *(a, b), return_gathered=gathered, bias=scale, out_dtype=torch.half, use_fast_accum=True
    )
    assert_type(either, Both)
    cast = ficco.all_gather_matmul(a, b, return_gathered=gathered, scale_b=scale, quantize="row")
    assert_type(cast, Both)


def options() -> None:
    with ficco.options(timeout_s=5, machine="h200-4") as changed:
        assert_type(changed, ficco.Options)
    ficco.options(timeout=5)  # type: ignore[call-arg]
    ficco.options(timeout_s="5")  # type: ignore[arg-type]
    ficco.set_options(on_timeout="stop")  # type: ignore[arg-type]


def module() -> None:
    assert_type(ficco.__version__, str)
    assert_type(ficco.nn.ColumnParallelLinear(8, 8), ficco.nn.ColumnParallelLinear)
    ficco.all_gather(1)  # type: ignore[attr-defined]
