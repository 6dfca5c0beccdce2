"""Layers and parallel styles on top of the operators.

``import ficco`` does not load this package, since PyTorch's DTensor takes a second to import. It is
loaded by ``import ficco.nn`` or by the first use of ``ficco.nn``.
"""

from torch.distributed.tensor.parallel import SequenceParallel

from ficco.nn.attention import UlyssesAttention
from ficco.nn.functional import (
    copied_linear,
    copied_linears,
    gathered_linears,
    reduced_linear,
    scattered_linear,
    sum_gradient,
)
from ficco.nn.linear import ColumnParallelLinear, RowParallelLinear, full_state_dict, gather_once
from ficco.nn.styles import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from ficco.nn.training import clip_grad_norm_, replicated
from ficco.ops.recipes import Float8Recipe

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "Float8Recipe",
    "PrepareModuleInput",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "UlyssesAttention",
    "clip_grad_norm_",
    "copied_linear",
    "copied_linears",
    "full_state_dict",
    "gather_once",
    "gathered_linears",
    "reduced_linear",
    "replicated",
    "scattered_linear",
    "sum_gradient",
]
