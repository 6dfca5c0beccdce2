"""PyTorch's attention by way of ficco, for models that call it."""

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
    """Serve ``torch.nn.functional.scaled_dot_product_attention`` by
    :func:`ficco.all_gather_attention` within a block, as one line inside PyTorch's::

        with context_parallel(mesh, buffers=[x, labels], buffer_seq_dims=[1, 1]), \\
             ficco.behind_sdpa(mesh):
            model(x)

    Within it, queries, keys and values are this rank's part of the sequence. The function is
    replaced for the process, as ``context_parallel`` replaces it: code that has imported it by name
    before calls PyTorch's. ``nn.MultiheadAttention`` calls it in evaluation, too: the fused kernel
    that it has there is switched off. What ``torch.utils.checkpoint`` recomputes in a backward
    after the block is recomputed as within it.

    Args:
        group: the ranks that share the sequence: that mesh, or its group.
        placement: as of :func:`ficco.all_gather_attention`. ``context_parallel`` places head and
            tail unless its load balancing is switched off; then it is ``"ranks"``.
        schedule: as of :func:`ficco.all_gather_attention`.

    Raises:
        ValueError: within the block, a mask, dropout or the weights of ``nn.MultiheadAttention``
            (``need_weights``, its default) are asked for; else as
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
    before = {place: vars(place[0])[place[1]] for place in replaced}
    fast = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        for place, function in replaced.items():
            setattr(*place, function)
        yield
    finally:
        for place, function in before.items():
            setattr(*place, function)
        mha.set_fastpath_enabled(fast)


_MULTI_HEAD = signature(functional.multi_head_attention_forward)

#: The function by which ``torch.utils.checkpoint`` records a call that is not reentrant.
_RECOMPUTES = "_checkpoint_without_reentrant_generator"


def _within(block: Callable[[], Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs within a block, also when it is called again in a backward."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with block():
            return run(*args, **kwargs)

    return call
