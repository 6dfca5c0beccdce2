"""Tensor-parallel styles for Hugging Face Transformers.

:func:`register` adds styles to Transformers' own registry; a plan names them as it does its own::

    register()
    config = AutoConfig.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(tp_plan=plan(config, sequence_parallel=True))
    )

Parameters and checkpoints are those of Transformers' styles.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ficco.errors import warn_once
from ficco.integrations import client
from ficco.nn import ColumnParallelLinear, ColwiseParallel, RowParallelLinear, RowwiseParallel
from ficco.nn.plain import local_of, parts_of, placed
from ficco.nn.styles import arrived, share_inputs
from ficco.ops.entry import watched
from ficco.ops.record import Differentiable, differentiable
from ficco.runtime.counters import stays

with client("transformers", "5.23"):
    from transformers import AutoModelForCausalLM, PretrainedConfig
    from transformers.distributed import tensor_parallel as stock
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard


class _FiccoLinear:
    """Before a style of Transformers' among the base classes: it shards the parameters as that
    does, and the layer runs as one of ficco's."""

    def __init__(self, style: ColwiseParallel | RowwiseParallel) -> None:
        layouts = {"input_layouts": style.input_layouts[0]}
        super().__init__(**layouts, output_layouts=style.output_layouts[0])  # type: ignore[call-arg]
        self.style = style

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        try:
            return self.style.convert(module, mesh)
        except (NotImplementedError, ValueError) as error:
            warn_once(f"a layer is left to Transformers' own style: {error}")
            super().install_forward(module, mesh)  # type: ignore[misc]
            if mesh.size() > 1:
                count = partial(_count, self, mesh.get_group().group_name, str(error))
                module.register_forward_pre_hook(count)
            return module


def _count(style: Any, group: str, reason: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    """Count the collective of a layer that is left to Transformers, or refuse it."""
    (x, *_) = args
    if isinstance(style, stock.RowwiseParallel):
        collective = "all-reduce"
    elif isinstance(style.output_layouts, Replicate) or isinstance(x, DTensor):
        collective = "all-gather"
    elif x.requires_grad:  # whose gradient is summed over ranks
        collective = "all-reduce"
    else:
        return
    stays(group, collective, reason, "see docs/clients/transformers.md")


class FiccoColwise(_FiccoLinear, stock.ColwiseParallel):
    """Weights ``Shard(0)``. The sequence is gathered if the input is a DTensor ``Shard(1)``; for
    any other input the backward sums its gradient over ranks."""


class FiccoRowwise(_FiccoLinear, stock.RowwiseParallel):
    """Weights ``Shard(1)``; the product is summed over ranks, and scattered between layers that
    share the sequence (:class:`FiccoModule`)."""


#: Styles of a row-parallel layer: where ranks share the sequence, and where each has all of it.
_SCATTERED = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
_REDUCED = RowwiseParallel()


class FiccoModule(stock.TensorParallelLayer):
    """On the attention and the MLP: column-parallel layers that share the input share their
    communication. With ``sequence`` a row-parallel layer lays its result out as that input is."""

    def __init__(self, sequence: bool) -> None:
        self.sequence = sequence

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _check_heads(module, mesh.size())
        before = _share_sequence if self.sequence else share_inputs
        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


def _share_sequence(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: let the layers of a module take and return its input's layout."""
    x = args[0] if args else kwargs["hidden_states"]
    style: Any = _REDUCED
    if isinstance(x, DTensor):
        _check_adapters(module)
        style = _SCATTERED
    for child in module._modules.values():
        if isinstance(child, RowParallelLinear) and child.style is not style:
            child.style = style
    share_inputs(module, args, kwargs)


#: The layers whose results have the heads of keys, by their names in Transformers.
_KEYS = ("k_proj", "qkv_proj", "query_key_value")


def _check_heads(module: nn.Module, ranks: int) -> None:
    """``ValueError`` if a module is an attention whose heads of keys the ranks cannot share."""
    config = getattr(module, "config", None)
    heads = getattr(config, "num_key_value_heads", None)
    if any(hasattr(module, name) for name in _KEYS) and isinstance(heads, int) and heads % ranks:
        raise ValueError(
            f"config: required num_key_value_heads that {ranks} ranks can share, got {heads} in "
            f"{type(module).__name__}; use fewer ranks"
        )


def _check_adapters(module: nn.Module) -> None:
    """``NotImplementedError`` if something wraps a parallel layer: its own parameters are no
    DTensors, and would be trained on a part of the sequence on each rank."""
    parallel = ColumnParallelLinear, RowParallelLinear
    for name, child in module.named_children():
        wraps = child._modules and not isinstance(child, parallel)
        if wraps and any(isinstance(inner, parallel) for inner in child.modules()):
            raise NotImplementedError(
                f"sequence_parallel: required parallel layers in {type(module).__name__}, got "
                f"{name} wrapped in a {type(child).__module__}.{type(child).__name__}, such as an "
                "adapter of peft, whose parameters do not share the sequence; use "
                "plan(config, sequence_parallel=False)"
            )


def _own_part(group: ProcessGroup, x: Any) -> torch.Tensor:
    """This rank's part [b, s/W, h] of [b, s, h]. Its memory is [s/W, b, h], as of layers' results:
    otherwise each layer would copy its rows, and sums with results would be strided."""
    part: torch.Tensor = x.chunk(group.size(), 1)[group.rank()]
    return part.movedim(1, 0).contiguous().movedim(0, 1)


def _all_parts(group: ProcessGroup, part: Any) -> torch.Tensor:
    """Gather the ranks' parts [b, s/W, h] into [b, s, h]. Its memory is [s, b, h], as gathered."""
    rows: torch.Tensor = part.movedim(1, 0).contiguous()
    out = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    dist.all_gather_into_tensor(out, rows, group=group)
    return out.movedim(0, 1)


def _between(forward: Any, backward: Any) -> Differentiable:
    """A step between whole hidden states and their parts; each function reverses the other."""
    return Differentiable(
        lambda group, operands, needs: ((forward(group, *operands),), ()),
        lambda group, grads, saved, needs: (backward(group, *grads),),
    )


#: All ranks have the same gradient of whole hidden states.
_CUT, _GATHERED = _between(_own_part, _all_parts), _between(_all_parts, _own_part)


class FiccoLayer(stock.TensorParallelLayer):
    """On a decoder layer: from the first on hidden states are DTensors ``Shard(1)``, if the ranks
    can share the sequence equally. If not, as where one token is decoded, every rank has them."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        forward, group = module.forward, mesh.get_group()

        def sharing(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, DTensor) and x.shape[1] % group.size() == 0:
                x = arrived(x)
                if watched(x):
                    x = placed(x, mesh, Replicate()).redistribute(placements=[Shard(1)])
                else:
                    x = placed(differentiable(_CUT, group, x)[0], mesh, Shard(1))
            return forward(x, *args, **kwargs)

        module.forward = sharing
        return module


def _of_plain_tensors(
    module: nn.Module, x: torch.Tensor, gradients: Placement
) -> tuple[nn.Module, torch.Tensor]:
    """The module with its local parameters, for one call, and the local part of its input: DTensors
    take longer than a norm. ``gradients``: placement of the gradients of the parameters."""
    plain, own = object.__new__(type(module)), module._parameters
    part, *parts = parts_of([x, *own.values()], [None, *([gradients],) * len(own)])
    plain.__dict__ = {**module.__dict__, "_parameters": dict(zip(own, parts, strict=True))}
    return plain, part


class FiccoNorm(stock.SequenceParallel):
    """A norm between such layers. The last one returns a plain tensor that every rank has."""

    def __init__(self, last: bool) -> None:
        super().__init__(sequence_dim=1, use_local_output=False)
        self.last = last

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        forward, group = module.forward, mesh.get_group()
        method: Any = getattr(forward, "__func__", None)  # None: another tool replaced it
        super().install_forward(module, mesh)  # makes DTensors of the parameters

        def sharing(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, DTensor):
                if method and not watched(x):
                    return method(*_of_plain_tensors(module, x, Replicate()), *args, **kwargs)
                x = placed(x, mesh, Replicate())
            if method and x.placements == (Shard(1),) and not watched(local_of(x)):
                out = method(*_of_plain_tensors(module, x, Partial()), *args, **kwargs)
                if self.last:
                    return differentiable(_GATHERED, group, out)[0]
                out = placed(out, mesh, Shard(1))
            else:
                out = forward(x, *args, **kwargs)
            if self.last:
                out = out.redistribute(placements=[Replicate()])
            return out.to_local() if out.placements == (Replicate(),) else out

        module.forward = sharing
        return module


#: Styles of Transformers' that ficco's operators serve. All others stay as they are in a plan.
_LINEAR = {
    "colwise": FiccoColwise(ColwiseParallel()),
    "colwise_gather_output": FiccoColwise(ColwiseParallel(output_layouts=Replicate())),
    "colwise_rep": FiccoColwise(ColwiseParallel(output_layouts=Replicate())),
    "rowwise": FiccoRowwise(_REDUCED),
    "rowwise_split_input": FiccoRowwise(RowwiseParallel(input_layouts=Replicate())),
    "rowwise_rep": FiccoRowwise(RowwiseParallel(input_layouts=Replicate())),
}
_OTHERS = {
    "ficco_module": FiccoModule(sequence=False),
    "ficco_sequence_module": FiccoModule(sequence=True),
    "ficco_layer": FiccoLayer(),
    "ficco_norm": FiccoNorm(last=False),
    "ficco_last_norm": FiccoNorm(last=True),
}
#: Styles that a plan with a shared sequence may contain.
_IN_SEQUENCE = {
    "colwise",
    "rowwise",
    "colwise_gather_output",  # of lm_head, behind the last norm
    "embedding_rowwise",
    "embedding_colwise",
    "replicated_with_grad_allreduce",  # of norms of heads
}


def register(*, replace: bool = False) -> None:
    """Add ficco's styles to ``transformers.distributed``: ``ficco_colwise``, ``ficco_rowwise`` and
    those that :func:`plan` names.

    Args:
        replace: also put them under Transformers' own names, so that ``tp_plan="auto"`` runs them.
            Needed with a static cache, which finds the heads of a rank by the name ``colwise``.
    """
    for name, style in _LINEAR.items():
        stock.ALL_PARALLEL_STYLES.register(f"ficco_{name}", style)
        if replace:
            stock.ALL_PARALLEL_STYLES.register(name, style)
    for name, other in _OTHERS.items():
        stock.ALL_PARALLEL_STYLES.register(name, other)


def plan(
    config: PretrainedConfig,
    *,
    sequence_parallel: bool = False,
    auto_class: Any = AutoModelForCausalLM,
) -> dict[str, str]:
    """The plan for ``DistributedConfig(tp_plan=...)``: the model's own, with ficco's styles.

    Args:
        config: of the model; ``auto_class.from_config`` makes it without memory, for its names.
        sequence_parallel: between the layers every rank has its part of the sequence, [b, s/W, h].
            A sequence that the ranks cannot share equally is treated as without.

    Raises:
        NotImplementedError: (``sequence_parallel``) the model is not a stack of decoder layers with
            norms, an attention and an MLP whose plan has column- and row-parallel layers only.
        ValueError: the model has no plan, or one without layers that ficco serves.
    """
    with torch.device("meta"):
        model = auto_class.from_config(config)
    own: dict[str, str] = dict(model.tp_plan or {})
    if not own:
        raise ValueError(
            f"config: required a model that has a tensor-parallel plan, {type(model).__name__} has "
            "none; write one of the styles ficco_colwise and ficco_rowwise"
        )
    linears = {
        replace_layer_number_by_wildcard(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    served = {
        name: f"ficco_{style}"
        for name, style in own.items()
        if style in _LINEAR and name in linears
    }
    if not served:
        raise ValueError(
            "config: required a model whose plan has column- or row-parallel nn.Linear layers, got "
            f"{type(model).__name__} with {', '.join(sorted({*own.values()}))}; use its own plan"
        )
    # Those in the model itself, such as lm_head, share their input with no other.
    parents = {name.rpartition(".")[0] for name in served if ".*." in name}
    rules = {**dict.fromkeys(sorted(parents - own.keys()), "ficco_module"), **served}
    return {**rules, **_of_sequence(model, own, rules)} if sequence_parallel else rules


def _of_sequence(model: nn.Module, own: dict[str, str], rules: dict[str, str]) -> dict[str, str]:
    """The rules that share the sequence between the layers of a model."""

    def refuse(got: str) -> NotImplementedError:
        return NotImplementedError(
            "sequence_parallel: required one stack of decoder layers with norms, an attention and "
            f"an MLP of column- and row-parallel layers, got {type(model).__name__} with {got}; "
            "use sequence_parallel=False"
        )

    if others := sorted({*own.values()} - _IN_SEQUENCE):
        raise refuse(f"the styles {', '.join(others)}")
    stacks = {name[: name.index(".*")] for name in rules if ".*" in name}
    if len(stacks) != 1:
        raise refuse(f"the stacks {', '.join(sorted(stacks)) or 'none'}")
    (stack,) = stacks
    modules = [name for name, style in rules.items() if style == "ficco_module"]
    styles = {f"{stack}.*": "ficco_layer", **dict.fromkeys(modules, "ficco_sequence_module")}
    for layer in model.get_submodule(stack).children():
        for name, child in layer.named_children():
            name = f"{stack}.*.{name}"
            if name in modules or not list(child.parameters()):
                continue
            if list(child.children()) or any(weight.dim() > 1 for weight in child.parameters()):
                raise refuse(f"{name}, a {type(child).__name__}")
            styles[name] = "ficco_norm"
    if deep := [name for name in modules if name.count(".") != stack.count(".") + 2]:
        raise refuse(", ".join(deep))
    parent = stack.rpartition(".")[0]
    last = [
        name
        for name, child in model.get_submodule(parent).named_children()
        if not isinstance(child, nn.Embedding) and [*child.parameters(False)]
    ]
    if len(last) != 1:
        raise refuse(f"{', '.join(last) or 'nothing'} behind its layers")
    return {**styles, f"{parent}.{last[0]}" if parent else last[0]: "ficco_last_norm"}
