"""Megatron-core's parallel linear layers over ficco's operators::

    spec = ficco_spec(get_gpt_layer_local_spec())
    model = GPTModel(config, spec, ...)

The layers are subclasses of Megatron's: parameters, their initialisation and checkpoints stay.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from ficco.integrations import client
from ficco.nn import copied_linear, gathered_linears, reduced_linear, scattered_linear
from ficco.runtime.counters import stays

with client("megatron", "megatron-core 0.16"):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec


def _check(layer: Any) -> None:
    if layer.gradient_accumulation_fusion:
        raise NotImplementedError(
            "gradient_accumulation_fusion: required False, since gradients of weights come from "
            "ficco's operators, got True; set --no-gradient-accumulation-fusion"
        )


class FiccoColumnParallelLinear(ColumnParallelLinear):
    """With sequence parallelism one ``all_gather_matmul``; without, the gradient of the input is
    summed over ranks while it is computed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> Any:
        bias, group = kwargs["bias"], kwargs["tp_group"]
        if kwargs["sequence_parallel"]:
            return gathered_linears(input, [weight], [bias], group=group)[0]
        if kwargs["allreduce_dgrad"]:
            return copied_linear(input, weight, bias, group=group)
        return super()._forward_impl(input=input, weight=weight, **kwargs)


class FiccoRowParallelLinear(RowParallelLinear):
    """One ``matmul_reduce_scatter`` with sequence parallelism, one ``matmul_all_reduce`` without;
    Megatron's own layer for experts and for inputs that it splits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self)

    def forward(self, input_: torch.Tensor) -> Any:
        if self.explicit_expert_comm or self.tp_group.size() == 1:
            return super().forward(input_)
        if not self.input_is_parallel:
            reason, remedy = "Megatron's layer splits its input", "pass input_is_parallel=True"
            stays(self.tp_group.group_name, "all-reduce", reason, remedy)
            return super().forward(input_)
        linear = scattered_linear if self.sequence_parallel else reduced_linear
        # Without the bias: Megatron sums the gradients of such parameters over ranks by itself.
        y = linear(input_, self.weight, group=self.tp_group)
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias, None


_OURS = {
    ColumnParallelLinear: FiccoColumnParallelLinear,
    RowParallelLinear: FiccoRowParallelLinear,
}


def ficco_spec(spec: ModuleSpec) -> ModuleSpec:
    """A copy of a layer's specification with ficco's layers in place of Megatron's.

    Raises:
        ValueError: there are none in it, as in a specification of Transformer Engine's layers.
    """
    replaced, count = _replaced(spec)
    if not count:
        raise ValueError(
            "spec: required one with Megatron's ColumnParallelLinear or RowParallelLinear, got "
            "none; use a local specification, such as get_gpt_layer_local_spec()"
        )
    return replaced


def _replaced(part: Any) -> tuple[Any, int]:
    """A part of a specification with ficco's layers, and how many."""
    if isinstance(part, type):
        return _OURS.get(part, part), int(part in _OURS)
    if isinstance(part, list | tuple):
        pairs = [_replaced(each) for each in part]
        return type(part)(each for each, _ in pairs), sum(count for _, count in pairs)
    if not dataclasses.is_dataclass(part):
        return part, 0
    replaced, total = copy.copy(part), 0
    for field in dataclasses.fields(part):
        each, count = _replaced(getattr(part, field.name))
        setattr(replaced, field.name, each)
        total += count
    return replaced, total
