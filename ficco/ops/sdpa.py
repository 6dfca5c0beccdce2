"""PyTorch's attention by way of ficco, for models that call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import mha
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

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
    that it has there is switched off.

    Args:
        group: the ranks that share the sequence: that mesh, or its group.
        placement: as of :func:`ficco.all_gather_attention`. ``context_parallel`` places head and
            tail unless its load balancing is switched off; then it is ``"ranks"``.
        schedule: as of :func:`ficco.all_gather_attention`.

    Raises:
        ValueError: within the block, a mask or dropout is asked for; else as
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

    before, fast = functional.scaled_dot_product_attention, mha.get_fastpath_enabled()
    functional.scaled_dot_product_attention = attend
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before
        mha.set_fastpath_enabled(fast)
