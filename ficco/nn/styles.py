"""Parallel styles for ``torch.distributed.tensor.parallel.parallelize_module``.

They behave like PyTorch's own styles: parameters are the same DTensors, and layouts mean the same.
PyTorch still handles cases that ficco's operators do not support (embeddings, layouts without a
collective next to a product). So a parallelization plan needs to change only its imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import style as torch_style

from ficco.nn.functional import (
    biased,
    copied_linears,
    no_view,
    partial_linear,
    reduced_linear,
    scattered_linear,
    summed_linear,
)
from ficco.nn.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedInput,
    check_schedule,
    gathered,
    local_operands,
    ranks_of,
    share,
    shared_output,
)
from ficco.nn.plain import local_of, not_linear, own_kernel, part_of, placed, set_before_call
from ficco.ops.entry import tells_refusals
from ficco.ops.recipes import Float8Recipe, recipe_of
from ficco.ops.record import Differentiable, differentiable
from ficco.schedules import Schedule


class _ColwiseLinear(ColumnParallelLinear, nn.Linear):
    """A column-parallel layer between the layouts of a :class:`ColwiseParallel`."""

    style: ColwiseParallel

    @tells_refusals
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.style.usual_input and (own := self._inferring(x)) is not None:
            weight, bias = own
            part = nn.functional.linear(x, weight)
            part = part if bias is None else biased(part, bias)
            return part if self.style.usual else _laid_out(part, self, Shard(part.dim() - 1))
        if own_kernel(self.weight):
            return _by_own_kernel(self, x, Replicate())
        dim = _sequence(x, _layout(x, self))
        y = shared_output(x, self)
        if y is None:
            if dim is None:
                x = _redistributed(x, self, Replicate())
            (y,) = _multiplied(x, dim, (self,))
        return _laid_out(y, self, Shard(y.dim() - 1))


class _RowwiseLinear(RowParallelLinear, nn.Linear):
    """A row-parallel layer between the layouts of a :class:`RowwiseParallel`."""

    style: RowwiseParallel

    @tells_refusals
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if (style := self.style).usual and (own := self._inferring(x)) is not None:
            return summed_linear(x, *own, self.ranks.group, self.schedule)
        features = Shard(x.dim() - 1)
        if own_kernel(self.weight):
            return _by_own_kernel(self, x, features)
        local = _local(_redistributed(x, self, features))
        if style.output_layouts[0] == Partial():
            return _laid_out(self._partial(local), self, Partial())
        dim = _sequence(x, style.output_layouts[0])
        if dim is None:
            y = reduced_linear(local, *self.local(), **self._settings)
            return _laid_out(y, self, Replicate())
        rows = _uneven(local.shape[dim], self.mesh)
        y = scattered_linear(local, *self.local(), **self._settings, sequence_dim=dim, rows=rows)
        uneven = None if rows is None else torch.Size((*local.shape[:-1], y.shape[-1]))
        return _laid_out(y, self, Shard(dim), uneven)

    def _partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's term of the sum. Rank 0 adds the bias; all ranks have its gradient."""
        weight, bias = self.local()
        if bias is not None and self.group.rank() > 0:
            bias = bias - bias.detach()
        return partial_linear(x, weight, bias, self.recipe)


_StyledLinear = _ColwiseLinear | _RowwiseLinear


class _Scheduled:
    """Adds a schedule, a recipe and ficco's layers to the PyTorch style that is the next base
    class.

    Attributes:
        usual: the layouts are the style's default ones, and operands are not cast.
        usual_input: the same of the layout of the input.
    """

    _kind: type[_StyledLinear]
    _layouts: tuple[Placement, Placement]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        schedule: str | Schedule = "auto",
        recipe: Float8Recipe | str | None = None,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        check_schedule(schedule)
        self.schedule, self.recipe = schedule, recipe_of(recipe)
        self.usual_input = input_layouts in (None, self._layouts[0]) and self.recipe is None
        local = output_layouts in (None, self._layouts[1]) and use_local_output
        self.usual = self.usual_input and local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Linear):
            return self.convert(module, device_mesh, shard=True)
        applied: nn.Module = super()._apply(module, device_mesh)  # type: ignore[misc]
        return applied

    def convert(self, module: nn.Module, mesh: DeviceMesh, *, shard: bool = False) -> nn.Module:
        """Turn a layer into a parallel one in place, since its parent is not known here.

        Its parameters are this style's DTensors already, unless ``shard``.
        """
        if got := not_linear(module):
            raise NotImplementedError(
                f"{type(self).__name__}: required a torch.nn.Linear, or a subclass with the same "
                f"forward, got {got}, whose forward would be lost; use the style of "
                "torch.distributed.tensor.parallel for it"
            )
        layer: Any = module
        ranks = ranks_of(mesh)
        sizes = layer.in_features, layer.out_features
        self._kind.check_features(*sizes, ranks.group.size(), self.recipe)
        if shard:
            self._partition_linear_fn("", layer, mesh)  # type: ignore[attr-defined]
        layer.__class__ = _joined(self._kind, type(layer))  # type: ignore[arg-type]
        layer.settle(ranks, 0, self.schedule, self.recipe)
        layer.style = self
        return module


class ColwiseParallel(_Scheduled, torch_style.ColwiseParallel):
    """:class:`torch.distributed.tensor.parallel.ColwiseParallel` with overlapped communication.

    ===================  ================================  ===================================
    input                forward                           backward
    ===================  ================================  ===================================
    ``Shard(sequence)``  :func:`ficco.all_gather_matmul`   :func:`ficco.matmul_reduce_scatter`
    ``Replicate()``      a local product                   :func:`ficco.matmul_all_reduce`
    other                redistributed to ``Replicate()``  by DTensor
    ===================  ================================  ===================================

    The sequence may be any dimension but the last. An ``nn.Linear`` becomes a
    :class:`ficco.nn.ColumnParallelLinear` in place, with DTensor parameters ``Shard(0)``; an
    ``nn.Embedding`` is left to PyTorch's style.

    Args:
        input_layouts, output_layouts, use_local_output: as for PyTorch's.
        schedule: as for the operator.
        recipe: None, or how to multiply in float8, as for :class:`ficco.nn.ColumnParallelLinear`.

    Raises:
        ValueError: there is no such schedule or recipe, or (from ``parallelize_module``) the ranks
            cannot share the layer equally.
        NotImplementedError: (from ``parallelize_module``) the module is a subclass of
            ``nn.Linear`` that overrides ``forward``.
    """

    _kind = _ColwiseLinear
    _layouts = Replicate(), Shard(-1)


class RowwiseParallel(_Scheduled, torch_style.RowwiseParallel):
    """:class:`torch.distributed.tensor.parallel.RowwiseParallel` with overlapped communication.

    ===================  ====================================  =============================
    output               forward                               backward
    ===================  ====================================  =============================
    ``Shard(sequence)``  :func:`ficco.matmul_reduce_scatter`   :func:`ficco.all_gather_matmul`
    ``Replicate()``      :func:`ficco.matmul_all_reduce`       a local product
    ``Partial()``        a local product                       a local product
    other                ``Replicate()``, then redistributed   by DTensor
    ===================  ====================================  =============================

    An ``nn.Linear`` becomes a :class:`ficco.nn.RowParallelLinear` in place, its weight ``Shard(1)``
    and its bias ``Replicate()``. All else is as in :class:`ColwiseParallel`.
    """

    _kind = _RowwiseLinear
    _layouts = Shard(-1), Replicate()


class PrepareModuleInput(torch_style.PrepareModuleInput):
    """PyTorch's ``PrepareModuleInput``, but the layers inside gather the sequence.

    If the plan asks for a sequence shard to be gathered, ``Shard(sequence)`` to ``Replicate()``,
    the module gets the DTensor still sharded. Its shape is the global one, as before, and the
    :class:`ColwiseParallel` layers that receive it gather it while they multiply. Direct children
    of the module that receive the very same tensor gather it only once (see
    :func:`ficco.nn.gather_once`), or sum its gradient once if every rank has it (``Replicate()``).
    With ``use_local_output=True`` it behaves as PyTorch's.

    If the input or a weight is changed in place between the calls of two children, the later
    child gathers anew. Under ``torch.compile`` and in inference mode the change goes unnoticed:
    pass a new tensor instead. A child whose weight may be set when it is called gathers separately:
    a child with a forward pre-hook, such as FSDP2's or pruning's, or with a parametrization.
    """

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        gathers = isinstance(input_layout, Shard) and isinstance(desired_layout, Replicate)
        if gathers and not self.use_local_output and _sequence(input, input_layout) is not None:
            desired_layout = None
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_pre_hook(share_inputs, with_kwargs=True)
        return module


def share_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: mark each input with the layers that share it.

    Layers share a plain tensor, for its gradient, if their style says that every rank has it.
    """
    inputs = *args, *kwargs.values()
    if not torch.is_grad_enabled() and DTensor not in [*map(type, inputs)]:
        return  # a token that is decoded
    layers = [
        child
        for child in module.children()
        if isinstance(child, _ColwiseLinear) and set_before_call(child, _ColwiseLinear.forward)
    ]
    for x in inputs if len(layers) > 1 else ():
        if not isinstance(x, torch.Tensor) or not x.dim():
            continue
        mesh: Any = layers[0].mesh
        placements: tuple[Placement, ...] = (Replicate(),)
        if sharded := isinstance(x, DTensor):
            mesh, placements = x.device_mesh, x.placements
        if mesh.ndim != 1:
            continue
        dim = _sequence(x, placements[0])
        if dim is None and not (placements[0] == Replicate() and torch.is_grad_enabled()):
            continue
        alike = tuple(
            layer
            for layer in layers
            if layer.mesh == mesh
            and layer.in_features == x.shape[-1]
            and layer.recipe == layers[0].recipe
            and (sharded or layer.style.input_layouts == placements)
        )
        if len(alike) > 1:
            share(x, SharedInput(alike, partial(_multiplied, dim=dim, layers=alike)))


def _multiplied(
    x: torch.Tensor, dim: int | None, layers: Sequence[_ColwiseLinear]
) -> tuple[torch.Tensor, ...]:
    """Return the layers' local outputs for a sequence sharded at ``dim``, or a replicated input."""
    operand = _local(x) if isinstance(local_of(x), AsyncCollectiveTensor) else x
    if dim is None:
        operand, weights, biases = local_operands(operand, layers)
        kwargs: dict[str, Any] = {"group": layers[0].group, "recipe": layers[0].recipe}
        return copied_linears(operand, weights, biases, **kwargs)
    rows = _uneven(x.shape[dim], x.device_mesh) if isinstance(x, DTensor) else None
    return gathered(operand, layers, dim, rows)


def _by_own_kernel(layer: _StyledLinear, x: torch.Tensor, wanted: Placement) -> torch.Tensor:
    """Return the layer's output by the weight's own kernels, redistributed by DTensor as PyTorch's
    styles do. ``wanted``: the layout of the input that the weight's cut needs."""
    style = layer.style
    output = style.output_layouts[0]
    if layer.cut == 0 and isinstance(_layout(x, layer), Shard):
        layer.stays("all-gather")
    elif layer.cut == 1 and output != Partial():
        layer.stays("reduce-scatter" if isinstance(output, Shard) else "all-reduce")
    x = _redistributed(x, layer, wanted)
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, layer.mesh, [wanted], run_check=False)
    out: Any = layer.product(x)
    if layer.bias is not None and layer.cut == 0:
        out = out + layer.bias
    if out.placements != style.output_layouts:
        out = out.redistribute(placements=style.output_layouts)
    if layer.bias is not None and layer.cut == 1:
        out = out + layer.bias
    return no_view(_local(out)) if style.use_local_output else out


@cache
def _joined(kind: type[Any], layer: type[Any]) -> type[Any]:
    """Return a class that is both a parallel layer and the original layer's class: a client's
    subclass keeps its methods and its initialisation."""
    if layer is nn.Linear:
        return kind
    reset = layer.reset_parameters
    own = {} if reset is nn.Linear.reset_parameters else {"reset_parameters": reset}
    return type(layer.__name__, (kind, layer), {"__module__": layer.__module__, **own})


def _layout(x: torch.Tensor, layer: _StyledLinear) -> Placement:
    """Return the layout of an input of a layer; for a plain tensor, the style's layout."""
    if not isinstance(x, DTensor):
        return layer.style.input_layouts[0]
    if x.device_mesh != layer.mesh:
        raise ValueError(
            f"x: required a plain tensor, or a DTensor on the layer's {layer.mesh}, got one on "
            f"{x.device_mesh}; pass x.to_local(), or x as it lies on the layer's mesh"
        )
    return x.placements[0]


def _redistributed(x: torch.Tensor, layer: _StyledLinear, wanted: Placement) -> torch.Tensor:
    """Return the input in the wanted layout; a plain tensor that has it already stays plain."""
    if _same(_layout(x, layer), wanted, x.dim()):
        return x
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, layer.mesh, layer.style.input_layouts, run_check=False)
    return x.redistribute(placements=[wanted])


def _laid_out(
    y: torch.Tensor, layer: _StyledLinear, layout: Placement, uneven: torch.Size | None = None
) -> torch.Tensor:
    """Return the output in the style's layout, from a local part in ``layout``.

    ``uneven`` is the global shape if the ranks' parts are not equal.
    """
    style, mesh = layer.style, layer.mesh
    (wanted,) = style.output_layouts
    same = _same(layout, wanted, y.dim())
    if same and style.use_local_output:
        return y
    if uneven is None:
        out = placed(y, mesh, layout)
    else:
        stride = torch.empty(uneven, device="meta").stride()
        out = DTensor.from_local(
            y.contiguous(), mesh, [layout], run_check=False, shape=uneven, stride=stride
        )
    if not same:
        out = out.redistribute(placements=[wanted])
    return no_view(_local(out)) if style.use_local_output else out


def _same(left: Placement, right: Placement, dims: int) -> bool:
    if type(left) is Shard and type(right) is Shard:
        return left.dim % dims == right.dim % dims
    return left == right


def _sequence(x: torch.Tensor, placement: Placement | None) -> int | None:
    """Return the dimension that a placement shards, if it is not the last; else None."""
    if type(placement) is not Shard:
        return None
    if placement.dim >= x.dim():
        raise ValueError(f"x: required the dimensions of {placement!r}, got shape {list(x.shape)}")
    dim = placement.dim % x.dim()
    return dim if dim < x.dim() - 1 else None


def _uneven(length: int, mesh: DeviceMesh) -> list[int] | None:
    """Return the ranks' sequence lengths as DTensor shards them; None if they are equal."""
    world = mesh.size()
    if length % world == 0:
        return None
    longest = -(-length // world)
    return [max(0, min(longest, length - rank * longest)) for rank in range(world)]


def _local(x: torch.Tensor) -> torch.Tensor:
    return arrived(part_of(x))


def arrived(local: torch.Tensor) -> torch.Tensor:
    """Return the result of an asynchronous collective, if a tensor is one; else the tensor."""
    if isinstance(local, AsyncCollectiveTensor):
        local = differentiable(_ARRIVED, None, local)[0]
    return local


#: Waits for the result of an asynchronous collective, whose own ``wait`` has no gradient. The
#: tensor inside must not get a gradient function.
_ARRIVED = Differentiable(
    lambda request, operands, needs: ((operands[0].wait().detach(),), ()),  # type: ignore[attr-defined]
    lambda request, grads, saved, needs: grads,
)
