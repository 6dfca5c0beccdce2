"""An attention layer over a sharded sequence, which attends by heads (DeepSpeed-Ulysses)."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention  # bound before others replace it

from ficco.nn.linear import check_schedule, ranks_of
from ficco.nn.plain import readable
from ficco.ops.ulysses import ulysses_output, ulysses_project
from ficco.problems.attention import keys_of
from ficco.runtime.counters import stays
from ficco.schedules import Schedule

#: Transforms queries and keys of the whole sequence, [batch, heads, S, size].
Rotate = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
#: Attention over queries, keys and values of the whole sequence. Keys may have fewer heads.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _count(name: str, value: SupportsIndex) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < 1:
        raise ValueError(f"{name}: required a whole number, at least 1, got {value!r}; pass one")
    return index(value)


class UlyssesAttention(nn.Module):
    """Projections, attention and output projection of a sequence that is sharded over the ranks:
    :func:`ficco.ulysses_project`, ``scaled_dot_product_attention`` and
    :func:`ficco.ulysses_output`.

    Every rank holds all parameters, named as in the Llama models of Transformers: ``q_proj``,
    ``k_proj``, ``v_proj`` and ``o_proj``, each an ``nn.Linear``. Their gradients cover this rank's
    positions; sum them over the ranks, as data parallelism does.

    Args:
        features: number of features of the input and the result.
        heads: number of query heads; a multiple of the number of ranks.
        kv_heads: number of heads of keys and of values, a divisor of ``heads``; ``heads`` by
            default.
        size: size of a head; ``features // heads`` by default.
        bias: queries, keys and values have a bias, as in the Qwen2 models of Transformers.
        causal: a query attends to no later position.
        group: the ranks; the default group if None.
        schedule: schedule of both exchanges.

    Raises:
        ValueError: a size is invalid, or the ranks cannot share the heads equally.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        size: int | None = None,
        bias: bool = False,
        causal: bool = False,
        group: ProcessGroup | DeviceMesh | None = None,
        schedule: str | Schedule = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_schedule(schedule)
        self.ranks, self.schedule, self.causal = ranks_of(group), schedule, causal
        features, heads = _count("features", features), _count("heads", heads)
        keys = heads if kv_heads is None else _count("kv_heads", kv_heads)
        if size is None and features < heads:
            raise ValueError(
                f"size: required that of a head, at least 1, got {features} features for {heads} "
                "heads; pass size=, or fewer heads"
            )
        self.heads, self.kv_heads, world = heads, keys, self.group.size()
        self.size = features // heads if size is None else _count("size", size)
        if heads % world or heads % keys:
            raise ValueError(
                f"heads: required a multiple of the {world} ranks and of kv_heads, got {heads} and "
                f"{keys}; use fewer ranks, or ficco.all_gather_attention"
            )

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias, device, dtype)

        self.q_proj = linear(features, heads * self.size, bias)
        self.k_proj, self.v_proj = (linear(features, keys * self.size, bias) for _ in range(2))
        self.o_proj = linear(heads * self.size, features, False)

    @property
    def group(self) -> ProcessGroup:
        """The ranks that share the sequence."""
        return self.ranks.group

    def forward(
        self, x: torch.Tensor, rotate: Rotate | None = None, attend: Attend | None = None
    ) -> torch.Tensor:
        """Attend at this rank's positions: [batch, S/W, features] to the same shape.

        Args:
            rotate: transforms the projected queries and keys of this rank's heads, such as a rotary
                embedding of the positions 0 to S.
            attend: replaces ``scaled_dot_product_attention``; may mask any of all positions.
        """
        q, k, v = self._project(x)
        if rotate is not None:
            q, k = rotate(q, k)
        out = self._attend(q, k, v) if attend is None else attend(q, k, v)
        if readable(self.o_proj):
            weight, schedule = self.o_proj.weight, self.schedule
            y = ulysses_output(out, weight, group=self.group, schedule=schedule)
            return y if self.o_proj.bias is None else y + self.o_proj.bias.to(y.dtype)
        heads = out.permute(2, 0, 1, 3)
        parts = self._exchanged(heads, [len(heads) // self.group.size()] * self.group.size())
        own = parts.unflatten(0, (self.group.size(), -1)).permute(2, 1, 0, 3, 4)
        result: torch.Tensor = self.o_proj(own.flatten(2))
        return result

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values of this rank's heads at all positions."""
        layers = self.q_proj, self.k_proj, self.v_proj
        world = self.group.size()
        per_rank = self.heads // world
        queries = [list(range(peer * per_rank, (peer + 1) * per_rank)) for peer in range(world)]
        keys = [list(keys_of(peer, world, self.heads, self.kv_heads)) for peer in range(world)]
        shares = queries, keys, keys
        if not all(map(readable, layers)):
            return tuple(map(self._by_layer, layers, (x,) * 3, shares))
        weights = [layer.weight for layer in layers]
        kwargs: dict[str, Any] = {"group": self.group, "schedule": self.schedule}
        parts = ulysses_project(x, *weights, size=self.size, **kwargs)
        return tuple(map(self._biased, parts, layers, shares))

    def _biased(self, part: torch.Tensor, layer: nn.Linear, shares: list[list[int]]) -> Any:
        """Add the bias of a layer to this rank's heads. ``shares``: the heads of each rank."""
        if layer.bias is None:
            return part
        biases: torch.Tensor = layer.bias.view(-1, 1, self.size)
        return part + biases[shares[self.group.rank()]].to(part.dtype)

    def _by_layer(self, layer: nn.Module, x: torch.Tensor, shares: list[list[int]]) -> torch.Tensor:
        """Call a layer at this rank's positions; return this rank's heads at all positions.

        ``shares``: the heads of each rank.
        """
        rank, world = self.group.rank(), self.group.size()
        heads = layer(x).unflatten(-1, (-1, self.size)).permute(2, 1, 0, 3)
        sent = heads[[head for share in shares for head in share]]
        count = len(shares[rank])
        parts = self._exchanged(sent, [count] * world, [len(share) for share in shares])
        own: torch.Tensor = parts.unflatten(0, (world, count)).permute(3, 1, 0, 2, 4)
        return own.flatten(2, 3)

    def _exchanged(
        self, parts: torch.Tensor, received: list[int], sent: list[int] | None = None
    ) -> torch.Tensor:
        """Exchange rows by PyTorch's all-to-all; ``received``, ``sent``: rows from and to ranks."""
        stays(self.group.group_name, "all-to-all", "a projection is no plain torch.nn.Linear")
        sizes = received, received if sent is None else sent
        arrived: torch.Tensor = all_to_all_single_autograd(parts.contiguous(), *sizes, self.group)
        return arrived.wait() if isinstance(arrived, AsyncCollectiveTensor) else arrived

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = k.shape[1] < q.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)

    def extra_repr(self) -> str:
        return f"size={self.size}, causal={self.causal}, schedule={self.schedule}"
