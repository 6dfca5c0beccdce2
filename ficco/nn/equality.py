"""A check that tensors are equal on all ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: The integer dtype for each element size in bytes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unequal(tensors: Sequence[torch.Tensor], group: ProcessGroup) -> list[int]:
    """Return the indices of tensors whose bits are not the same on all ranks of a group.

    All ranks call it with the same number of tensors, of the same shapes. It takes one all-gather
    of two integers for each tensor. Different tensors with equal digests, one in 2^64 by chance,
    are missed.
    """
    if not tensors:
        return []
    own = torch.stack([_digest(tensor.detach()) for tensor in tensors])
    gathered = own.new_empty(group.size(), *own.shape)
    dist.all_gather_into_tensor(gathered.flatten(), own.flatten(), group=group)
    return (gathered != own).any(0).any(-1).nonzero().flatten().tolist()


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums of a tensor's bits over rows and over columns, each weighted by its index."""
    if is_traceable_wrapper_subclass(tensor):  # a quantized tensor: its integers and its scales
        names, _ = tensor.__tensor_flatten__()
        return torch.stack([_digest(getattr(tensor, name)) for name in names]).sum(0)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    rows = tensor.contiguous().view(_BITS[tensor.element_size()])
    rows = rows.reshape(rows.shape[0] if rows.dim() else 1, -1)
    # Sums in int64 wrap around, in the same way on every rank.
    sums = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
    return torch.stack([(part * _odd_numbers(part)).sum() for part in sums])


def _odd_numbers(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, 2 * like.numel() + 1, 2, device=like.device)
