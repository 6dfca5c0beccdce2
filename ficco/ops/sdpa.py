"""ficco's attention in place of PyTorch's, for models that call PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch.backends import mha
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils import checkpoint

from ficco.ops.attention import all_gather_attention
from ficco.schedules import Schedule


@contextmanager
def behind_sdpa(
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    placement: str = "head-tail",
    schedule: str | Schedule = "auto",
) -> Iterator[None]:
    """Run ``torch.nn.functional.scaled_dot_product_attention`` as
    :func:`ficco.all_gather_attention` within a block, inside PyTorch's ``context_parallel``::

        with context_parallel(mesh, buffers=[x, labels], buffer_seq_dims=[1, 1]), \\
             ficco.behind_sdpa(mesh):
            model(x)

    Within the block, queries, keys and values are this rank's part of the sequence. The function is
    replaced for the whole process, as by ``context_parallel``; code that imported it by name
    earlier still calls PyTorch's. ``nn.MultiheadAttention`` calls it in evaluation, too, because
    its fused kernel is switched off. A ``torch.utils.checkpoint`` that records within the block
    also recomputes within it, even if its backward runs later.

    Args:
        group: the ranks that share the sequence: the mesh, or its group.
        placement: see :func:`ficco.all_gather_attention`. ``context_parallel`` places head and
            tail. If its load balancing is switched off, pass ``"ranks"``.
        schedule: see :func:`ficco.all_gather_attention`.

    Raises:
        ValueError: within the block, a call asks for a mask, dropout or the weights of
            ``nn.MultiheadAttention`` (``need_weights``, its default); else as
            :func:`ficco.all_gather_attention`.
    """

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise ValueError(
                "attn_mask: required none where ranks share the sequence, got one; pass "
                "is_causal=True, or call ficco.all_gather_attention with window= or cu_seqlens="
            )
        if dropout_p:
            raise ValueError(
                f"dropout_p: required 0 where ranks share the sequence, got {dropout_p}; pass 0.0"
            )
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise ValueError(
                f"enable_gqa: required True for {query.shape[1]} heads of queries and "
                f"{key.shape[1]} of keys, got False; pass it"
            )
        return all_gather_attention(
            *(query, key, value),
            causal=is_causal,
            scale=scale,
            placement=placement,
            group=group,
            schedule=schedule,
        )

    block = partial(behind_sdpa, group, placement=placement, schedule=schedule)
    layer, recorded = functional.multi_head_attention_forward, checkpoint.CheckpointFunction.forward
    recomputes = getattr(checkpoint, _RECOMPUTES)

    @wraps(layer)
    def attend_without_weights(*args: Any, **kwargs: Any) -> Any:
        call = _MULTI_HEAD.bind(*args, **kwargs)
        call.apply_defaults()
        if call.arguments["need_weights"]:
            raise ValueError(
                "need_weights: required False where ranks share the sequence, since no rank has "
                "all weights, got True, the default of nn.MultiheadAttention; pass "
                "need_weights=False"
            )
        return layer(*args, **kwargs)

    replaced = {
        (functional, "scaled_dot_product_attention"): attend,
        (functional, "multi_head_attention_forward"): attend_without_weights,
        (checkpoint.CheckpointFunction, "forward"): staticmethod(
            lambda ctx, run, *rest: recorded(ctx, _within(block, run), *rest)
        ),
        (checkpoint, _RECOMPUTES): lambda run, *rest, **options: recomputes(
            _within(block, run), *rest, **options
        ),
    }
    originals = {place: vars(place[0])[place[1]] for place in replaced}
    fast = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        for place, function in replaced.items():
            setattr(*place, function)
        yield
    finally:
        for place, function in originals.items():
            setattr(*place, function)
        mha.set_fastpath_enabled(fast)


_MULTI_HEAD = signature(functional.multi_head_attention_forward)

#: The function that records non-reentrant calls of ``torch.utils.checkpoint``.
_RECOMPUTES = "_checkpoint_without_reentrant_generator"


def _within(block: Callable[[], Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs within a block, also when a backward calls it again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with block():
            return run(*args, **kwargs)

    return call
