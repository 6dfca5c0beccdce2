"""Linear layers whose weights and activations are sharded over a group of ranks.

As in Megatron's sequence parallelism, a rank has the whole sequence and its part of the features
between a :class:`ColumnParallelLinear` and the :class:`RowParallelLinear` that follows it. Outside
the pair it has its part of the sequence and all features.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ficco.nn.functional import (
    equal_part,
    gathered_linears,
    no_view,
    scattered_linear,
    sequence_at,
    sum_gradient,
)
from ficco.nn.plain import (
    PARAMETERS,
    called,
    check_module,
    hooked,
    local_of,
    not_linear,
    of_dtensors,
    own_kernel,
    part_of,
    parts_of,
    readable,
    set_before_call,
)
from ficco.ops.entry import tells_refusals, watched
from ficco.ops.operands import not_a_tensor, process_group
from ficco.ops.recipes import Float8Recipe, check_multiples, recipe_of
from ficco.runtime.counters import stays
from ficco.schedules import Schedule


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a layer, and the mesh of its parameters if these are DTensors."""

    group: ProcessGroup
    mesh: DeviceMesh | None

    @cached_property
    def on_mesh(self) -> DeviceMesh:
        """The mesh, or a mesh created from the group."""
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        return self.mesh or DeviceMesh.from_group(self.group, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copied layer runs on the same ranks

    def __reduce__(self) -> Any:
        raise NotImplementedError(
            "pickling a parallel layer is not served, since its ranks are those of this process; "
            "save the state_dict of the model, or ficco.nn.full_state_dict(model)"
        )


def ranks_of(group: ProcessGroup | DeviceMesh | None) -> Ranks:
    """Return the ranks of an argument ``group``."""
    return Ranks(process_group(group), group if isinstance(group, DeviceMesh) else None)


def check_schedule(schedule: str | Schedule) -> None:
    """Raise ``ValueError`` for an invalid schedule when a layer is created, before it runs."""
    if isinstance(schedule, str) and schedule != "auto":
        Schedule.parse(schedule)
    elif not isinstance(schedule, (str, Schedule)):
        raise ValueError(f"schedule: required 'auto', a name or a Schedule, got {schedule!r}")


#: Whether layers put their unsharded weights into a state_dict. Only a layer knows its names there.
_gathers = ContextVar("_gathers", default=False)


#: All live layers of a ProcessGroup. PyTorch does not know that their gradients are sharded.
plain_layers: weakref.WeakSet[_ParallelLinear] = weakref.WeakSet()


class _ParallelLinear(nn.Module):
    """The base of both layers: its parameters are parts of an unsharded layer's.

    ``in_features`` and ``out_features`` are sizes of the unsharded layer. The class does not derive
    from ``nn.Linear``: tools that replace every ``nn.Linear``, such as torchao's
    ``convert_to_float8_training``, would lose the communication.
    """

    in_features: int
    out_features: int
    weight: torch.Tensor
    bias: Any

    #: Sharded dimension of the weight: 0 for outputs (the bias is sharded, too), 1 for inputs.
    cut: int
    ranks: Ranks
    sequence_dim: int
    schedule: str | Schedule
    recipe: Float8Recipe | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        sequence_dim: int = 0,
        schedule: str | Schedule = "auto",
        recipe: Float8Recipe | str | None = None,
    ) -> None:
        unsharded = nn.Linear(in_features, out_features, bias, device, dtype)
        self._become(unsharded, group, sequence_dim, schedule, recipe)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        sequence_dim: int = 0,
        schedule: str | Schedule = "auto",
        recipe: Float8Recipe | str | None = None,
    ) -> Self:
        """Return this rank's part of a layer that all ranks hold; ``linear`` is not changed.

        Raises:
            ValueError: ``linear`` is not an unsharded ``nn.Linear`` without hooks, or a subclass
                of it with the same forward; or the ranks cannot share it equally.
        """
        _check_source(linear)
        layer = cls.__new__(cls)
        layer._become(linear, group, sequence_dim, schedule, recipe)
        return layer.train(linear.training)

    def _become(
        self,
        linear: nn.Linear,
        group: ProcessGroup | DeviceMesh | None,
        sequence_dim: int,
        schedule: str | Schedule,
        recipe: Float8Recipe | str | None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.settle(ranks_of(group), sequence_dim, schedule, recipe)
        for name, full in linear.named_parameters():
            part = self._part(name, full.detach())
            # By identity: a tensor without memory, such as a fake one, has no address.
            if local_of(part).untyped_storage()._cdata == full.untyped_storage()._cdata:
                part = part.clone()  # neither share memory with the unsharded one nor keep it alive
            self.register_parameter(name, nn.Parameter(part, requires_grad=full.requires_grad))
        if linear.bias is None:
            self.register_parameter("bias", None)

    def settle(
        self,
        ranks: Ranks,
        sequence_dim: int,
        schedule: str | Schedule,
        recipe: Float8Recipe | str | None = None,
    ) -> None:
        """Set where and how this layer runs."""
        self.recipe = recipe_of(recipe)
        sizes = self.in_features, self.out_features
        self.check_features(*sizes, ranks.group.size(), self.recipe)
        check_schedule(schedule)
        if not isinstance(sequence_dim, int):
            raise ValueError(f"sequence_dim: required a dimension, got {sequence_dim!r}")
        self.ranks, self.sequence_dim, self.schedule = ranks, sequence_dim, schedule
        self.register_forward_hook(called)
        if ranks.mesh is None:
            plain_layers.add(self)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        # PyTorch's steps for ficco's own hook take longer than the product of a token.
        if not hooked(self) and torch._C._get_tracing_state() is None:
            return self.forward(*args, **kwargs)
        return super()._call_impl(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.mesh is None:  # of a copied layer
            plain_layers.add(self)

    @classmethod
    def check_features(
        cls, in_features: int, out_features: int, world: int, recipe: Float8Recipe | None = None
    ) -> None:
        """Raise ``ValueError`` if the ranks cannot share the layer equally, or with the recipe."""
        name, size = (("out_features", out_features), ("in_features", in_features))[cls.cut]
        if size % world:
            raise ValueError(
                f"{name}: required a multiple of the group's {world} ranks, got {size}; pad the "
                "layer or take a smaller group"
            )
        if recipe is not None:
            outputs, inputs = (world, 1) if cls.cut == 0 else (1, world)
            check_multiples(out_features // outputs, in_features // inputs)

    @property
    def group(self) -> ProcessGroup:
        """The ranks that share this layer."""
        return self.ranks.group

    @property
    def mesh(self) -> Any:
        """The mesh of the parameters if they are DTensors, else None."""
        return self.ranks.mesh

    @property
    def _settings(self) -> dict[str, Any]:
        """The arguments of a product that are set for this layer."""
        return {"group": self.group, "schedule": self.schedule, "recipe": self.recipe}

    def reset_parameters(self) -> None:
        """Initialise as an unsharded ``nn.Linear`` would with the same random state.

        All ranks must start from the same state. The unsharded weight is allocated temporarily.
        """
        device, dtype = self.weight.device, self.weight.dtype
        unsharded = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device, dtype
        )
        with torch.no_grad():
            for name, full in unsharded.named_parameters():
                param = self._of_layer(name)
                param.copy_(self._part(name, full.detach(), param))

    def local(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's weight and bias as plain tensors; gradients flow to the parameters.

        Raises:
            ValueError: FSDP has sharded the parameters once more, outside of its module's call.
        """
        _, (weight,), (bias,) = local_operands(None, [self])
        return weight, bias

    def _inferring(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return :meth:`local`, in less time, if a call multiplies plain tensors and does nothing
        else: no gradients, compilers or other modes; else None."""
        if torch.is_grad_enabled() or watched(x):
            return None
        parameters: dict[str, Any] = self._parameters  # attributes take longer
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # one is computed
            return None
        if type(weight) is not DTensor or type(part := weight._local_tensor) is not torch.Tensor:
            return None
        if (mesh := weight.device_mesh) is not self.ranks.mesh:
            if mesh != self.ranks.mesh:
                return None
            self.ranks = Ranks(self.ranks.group, mesh)  # equal: identity takes less time
        return part, None if bias is None else part_of(self._checked(bias))

    def _checked(self, tensor: Any) -> Any:
        """Return a parameter, or None, that is this rank's part."""
        if isinstance(tensor, DTensor) and tensor.device_mesh != self.ranks.mesh:
            raise ValueError(
                f"weight: required this rank's part over {self.ranks.mesh or 'the group'}, got a "
                f"part of it over {tensor.device_mesh}, as fully_shard leaves it between calls; "
                "call the layer within the forward of the module that fully_shard wraps"
            )
        return tensor

    def product(self, x: DTensor) -> Any:
        """Multiply without the bias, by the weight's own kernel, in the layout of the weight's
        cut. ``x`` has the layout that the cut needs: all features, or this rank's."""
        weight, (layout,) = self.weight, x.placements
        if of_dtensors(weight):
            return torch.nn.functional.linear(x, weight)
        outputs = self.cut == 0
        local = x.to_local(grad_placements=[Partial() if outputs else layout])
        part = torch.nn.functional.linear(local, weight)
        placement = Shard(part.dim() - 1) if outputs else Partial()
        return DTensor.from_local(part, x.device_mesh, [placement], run_check=False)

    def stays(self, collective: str) -> None:
        """Count a collective of PyTorch's that the weight's own kernel needs, or refuse it."""
        if self.group.size() > 1:
            kind = type(local_of(self.weight)).__name__
            stays(self.group.group_name, collective, f"a {kind} is multiplied by its own kernel")

    def _by_own_kernel(self, x: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
        """Multiply by the weight's own kernel, with a PyTorch collective."""
        if rows is not None:
            raise NotImplementedError(
                f"rows: required None for a layer like {not_linear(self, type(self).forward)}, got "
                f"{list(rows)}; pad the sequence to equal parts"
            )
        gathers, bias = self.cut == 0, self.bias
        self.stays("all-gather" if gathers else "reduce-scatter")
        dim, last = sequence_at(x, self.sequence_dim), x.dim() - 1
        if not gathers:
            equal_part(x, dim, self.group.size())
        layout = Shard(dim if gathers else last)
        operand: Any = DTensor.from_local(x, self.ranks.on_mesh, [layout], run_check=False)
        if gathers:
            operand = operand.redistribute(placements=[Replicate()])
        out = self.product(operand)
        if not gathers:
            out = out.redistribute(placements=[Shard(dim)])
        y = no_view(out.to_local())
        if bias is None:
            return y
        part = part_of(self._checked(bias))
        return y + (part if gathers else sum_gradient(part, self.group)).to(y.dtype)

    def _cut(self, name: str) -> int | None:
        """Return the sharded dimension of a parameter; None if every rank has all of it."""
        return self.cut if name == "weight" or self.cut == 0 else None

    def _part(
        self, name: str, full: torch.Tensor, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return this rank's part of an unsharded parameter, sharded as ``like`` is now (by FSDP,
        too); needs no communication."""
        cut, group, mesh = self._cut(name), self.group, self.ranks.mesh
        placements: Sequence[Placement] = [Replicate() if cut is None else Shard(cut)]
        if like is not None:
            mesh = None
        if isinstance(like, DTensor):
            mesh, placements = like.device_mesh, like.placements
        if mesh is None:
            return full if cut is None else full.chunk(group.size(), cut)[group.rank()].contiguous()
        replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return replicated.redistribute(placements=placements)

    def _of_layer(self, name: str) -> Any:
        """Return the weight or bias; None for no bias.

        Raises:
            NotImplementedError: it is not a parameter, but computed from other tensors.
        """
        if name not in self._parameters:
            raise NotImplementedError(
                f"the unsharded {name} of a layer whose {name} is computed (by a parametrization, "
                "weight_norm or pruning) is not served; remove that first, with "
                "remove_parametrizations, remove_weight_norm or prune.remove"
            )
        return self._parameters[name]

    def _full_shape(self, name: str) -> tuple[int, ...]:
        return (self.out_features, self.in_features)[: 2 if name == "weight" else 1]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not _gathers.get():
            return
        for name in PARAMETERS:
            if self._of_layer(name) is not None:
                destination[prefix + name] = self.whole(name)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Load a state_dict; of unsharded tensors take this rank's part."""
        *_, error_msgs = rest
        assigns = local_metadata.get("assign_to_params_buffers", False)
        for name in PARAMETERS:
            param = self._parameters.get(name)
            value = state_dict.get(prefix + name)
            if param is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == self._full_shape(name):
                part = self._part(name, value.detach(), param)
                local = local_of(part)
                if assigns and local.untyped_storage().nbytes() > local.nbytes:
                    part = part.clone()  # do not keep the unsharded tensor alive
                state_dict[prefix + name] = part
            elif value.shape != param.shape:
                error_msgs.append(
                    f"{prefix}{name}: required shape {list(self._full_shape(name))}, the unsharded "
                    f"layer's, or {list(param.shape)}, this rank's part, got {list(value.shape)}."
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def whole(self, name: str) -> torch.Tensor:
        """Gather the unsharded layer's weight or bias. All ranks of the group call it."""
        param: torch.Tensor = self._of_layer(name).detach()
        if isinstance(param, DTensor):
            if self.ranks.mesh is None:
                raise NotImplementedError(
                    f"the unsharded {name} of a layer of a ProcessGroup is not served after "
                    "fully_shard, which takes a part for a whole; give the layer a DeviceMesh"
                )
            return param.full_tensor()
        cut = self._cut(name)
        if cut is None:
            return param
        parts = [torch.empty_like(param) for _ in range(self.group.size())]
        dist.all_gather(parts, param.contiguous(), group=self.group)
        return torch.cat(parts, cut)

    def extra_repr(self) -> str:
        group = self.group
        recipe = "" if self.recipe is None else f", recipe={self.recipe}"
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return (
            f"{sizes}, bias={self.bias is not None}, rank {group.rank()} of {group.size()}, "
            f"sequence_dim={self.sequence_dim}, schedule={str(self.schedule)!r}{recipe}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer that gathers the sequence; each rank has the weights of some outputs.

    =============  ==================================================================
    input          [s/W, ..., in_features]: this rank's part of the sequence
    output         [s, ..., out_features/W]: the whole sequence, this rank's features
    ``weight``     [out_features/W, in_features]; ``bias`` [out_features/W]
    =============  ==================================================================

    The forward is one :func:`ficco.all_gather_matmul`, the backward its gradient. Activations are
    [sequence, batch, features], or [batch, sequence, features] with ``sequence_dim=1``. With
    ``sequence_dim=1`` the input is copied to the other order. The output is then a transposed view:
    ``reshape`` works on it, ``view`` may not.

    The layer is initialised as its part of an ``nn.Linear`` with the same random state, if all
    ranks have the same state. The unsharded weight is allocated temporarily. To avoid that, use
    ``device="meta"`` and load a checkpoint.

    Both the unsharded layer's state_dict and this layer's own, which has parts, can be loaded;
    :func:`full_state_dict` returns the unsharded one.

    Args:
        in_features, out_features: of the unsharded layer.
        bias, device, dtype: as for ``nn.Linear``.
        group: a ProcessGroup (default WORLD), which makes parameters plain tensors, or a
            DeviceMesh of one dimension, which makes them DTensors, as FSDP2 and
            ``torch.distributed.checkpoint`` want them.
        sequence_dim: the dimension of the sequence.
        schedule: as for the operator.
        recipe: None, or how to multiply in float8, a :class:`Float8Recipe` or ``"tensor"``,
            ``"row"`` or ``"block"``; this rank's inputs and outputs are then multiples of 16.

    Raises:
        ValueError: ``out_features`` is not a multiple of the number of ranks, or another argument
            is wrong.

    Example::

        up = ficco.nn.ColumnParallelLinear.from_linear(mlp.up)
        down = ficco.nn.RowParallelLinear.from_linear(mlp.down)
        y_shard = down(F.silu(up(x_shard)))
    """

    cut = 0

    @tells_refusals
    def forward(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Multiply the gathered sequence; ``rows``: all ranks' sequence lengths, if not equal."""
        if (shared := shared_output(x, self)) is not None:
            return shared
        _check_features(x, self.in_features, _ALL_FEATURES)
        if own_kernel(self.weight):
            return self._by_own_kernel(x, rows)
        (out,) = gathered(x, (self,), self.sequence_dim, rows)
        return out


class RowParallelLinear(_ParallelLinear):
    """A linear layer that scatters the sequence; each rank has the weights of some inputs.

    =============  ==================================================================
    input          [s, ..., in_features/W]: the whole sequence, this rank's features
    output         [s/W, ..., out_features]: this rank's part of the sequence
    ``weight``     [out_features, in_features/W]; ``bias`` [out_features], on all ranks
    =============  ==================================================================

    The forward is one :func:`ficco.matmul_reduce_scatter`, the backward its gradient. The bias is
    added once, to the sum. Its gradient is summed over the ranks, so that the bias stays the same
    on all ranks. With ``sequence_dim=1`` the input is copied, unless it is a transposed view such
    as :class:`ColumnParallelLinear` returns. Arguments and all else are as in that class.

    Raises:
        ValueError: ``in_features`` is not a multiple of the number of ranks, or another argument
            is wrong.
    """

    cut = 1

    @tells_refusals
    def forward(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return this rank's part of the sum; ``rows``: sequence lengths of all parts, if they are
        not equal."""
        _check_features(x, self.in_features // self.group.size(), "this rank's columns")
        if own_kernel(self.weight):
            return self._by_own_kernel(x, rows)
        weight, bias = self.local()
        dim = self.sequence_dim
        return scattered_linear(x, weight, bias, **self._settings, sequence_dim=dim, rows=rows)


@tells_refusals
def gather_once(
    x: torch.Tensor, *layers: ColumnParallelLinear, rows: Sequence[int] | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of several column-parallel layers for one input, gathered once for all.

    Equals ``tuple(layer(x) for layer in layers)``, with the shapes of
    :class:`ColumnParallelLinear`, but is one :func:`ficco.all_gather_matmul` with the layers'
    weights concatenated. The weights are joined anew in each forward and backward; no joined copy
    is kept. With a recipe they are cast as one. The first layer's schedule is used. The outputs
    have one backward: differentiate them together, or pass ``retain_graph``.

    Layers with hooks, and subclasses that override ``forward``, are called. A layer whose weight
    may be set when it is called (forward pre-hooks, as of FSDP2 and pruning, parametrizations,
    quantized weights) gathers the sequence separately.

    Example::

        q, k, v = ficco.nn.gather_once(x_shard, self.wq, self.wk, self.wv)

    Raises:
        ValueError: a layer is not a ColumnParallelLinear, or the layers differ in their group,
            ``sequence_dim``, ``in_features`` or ``recipe``.
    """
    if not layers:
        return ()
    first = layers[0]
    for layer in layers:
        if not isinstance(layer, ColumnParallelLinear):
            raise ValueError(
                "layers: required ColumnParallelLinear layers, each as an argument, got "
                f"{type(layer).__name__}"
            )
        shared = ("group", "sequence_dim", "in_features", "recipe")
        if any(getattr(layer, name) != getattr(first, name) for name in shared):
            raise ValueError(
                "layers: required one group, sequence_dim, in_features and recipe, got "
                f"{first} and {layer}; call them one by one"
            )
    _check_features(x, first.in_features, _ALL_FEATURES)
    forward, dim = ColumnParallelLinear.forward, first.sequence_dim
    if all(readable(layer, forward) for layer in layers):
        return gathered(x, layers, dim, rows)
    early = [layer for layer in layers if set_before_call(layer, forward)]
    with sharing(x, SharedInput(early, lambda x: gathered(x, early, dim, rows))):
        return tuple(layer(x) if rows is None else layer(x, rows) for layer in layers)


def gathered(
    x: torch.Tensor,
    layers: Sequence[ColumnParallelLinear],
    sequence_dim: int,
    rows: Sequence[int] | None,
) -> tuple[torch.Tensor, ...]:
    """Return the layers' outputs for a plain tensor, or a DTensor's part, that fits all of them."""
    x, weights, biases = local_operands(x, layers)
    settings = layers[0]._settings
    return gathered_linears(x, weights, biases, **settings, sequence_dim=sequence_dim, rows=rows)


def local_operands(x: Any, layers: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
    """Return the parts of an input, and of the layers' weights and biases, on this rank; gradients
    flow to all of them in one step of autograd.

    Raises:
        ValueError: FSDP has sharded the parameters once more, outside of its module's call.
    """
    parameters = [(layer, one) for layer in layers for one in (layer.weight, layer.bias)]
    part, *own = parts_of([x, *(layer._checked(one) for layer, one in parameters)])
    return part, own[::2], own[1::2]


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's state_dict as if it were unsharded. All ranks call it, and all get it.

    Weights and biases of this package's layers are gathered, and so are all other DTensors.
    Everything else is as on this rank, including parameters that users added to a layer.

    Parameters that all ranks hold are compared first. Each is read once, and one all-gather for
    each group carries two integers for each parameter.

    Raises:
        ValueError: ``module`` is no module.
        NotImplementedError: the weight or bias of a layer is computed from other tensors, or
            ``fully_shard`` has sharded a layer of a ProcessGroup.
        RuntimeError: a parameter that every rank holds is not the same on all ranks; on every rank.
    """
    check_module(module)
    _refuse_unequal(module)
    token = _gathers.set(True)
    try:
        state = module.state_dict()
    finally:
        _gathers.reset(token)
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def _refuse_unequal(module: nn.Module) -> None:
    """Raise ``RuntimeError`` if ranks differ in a parameter that all hold: a bias of a
    :class:`RowParallelLinear`, a replicated DTensor, or a plain tensor outside of the layers."""
    layer_of: dict[nn.Parameter, _ParallelLinear] = {}
    held: dict[ProcessGroup, dict[str, torch.Tensor]] = {}
    for submodule in module.modules():
        if isinstance(ranks := getattr(submodule, "ranks", None), Ranks):
            held[ranks.group] = {}
        if isinstance(submodule, _ParallelLinear):
            layer_of |= dict.fromkeys(submodule.parameters(), submodule)
    for name, param in module.named_parameters():
        layer = layer_of.get(param)
        groups: list[ProcessGroup] = []
        if isinstance(param, DTensor):
            mesh, placements = param.device_mesh, param.placements
            groups = [mesh.get_group(dim) for dim, on in enumerate(placements) if on == Replicate()]
        elif layer is None:
            groups = list(held)
        elif param is layer._parameters.get("bias") and layer._cut("bias") is None:
            groups = [layer.group]
        for group in groups if not param.is_meta else ():
            held.setdefault(group, {})[name] = local_of(param)
    for group, tensors in held.items():
        if indices := unequal(list(tensors.values()), group):
            names = list(tensors)
            raise RuntimeError(
                "module: required parameters that are the same on all ranks that hold them, got "
                f"different {', '.join(names[index] for index in indices)}; sum gradients of parts "
                "of the sequence by ficco.nn.replicated, and clip gradients of layers of a "
                "ProcessGroup by ficco.nn.clip_grad_norm_"
            )


def _check_source(linear: nn.Module) -> None:
    """Raise ``ValueError`` if a layer has more than a weight and a bias: it would be lost."""
    if got := not_linear(linear):
        pass
    elif hooked(linear):
        got = "one with hooks"
    elif linear._parameters.keys() != set(PARAMETERS) or linear._buffers or linear._modules:
        got = f"one with {', '.join(linear.state_dict())}"
    elif isinstance(linear.weight, DTensor):
        got = f"one that is sharded, {linear.weight.placements}"
    else:
        return
    raise ValueError(
        "linear: required an unsharded torch.nn.Linear, or a subclass with the same forward, with "
        "only a weight and a bias and without hooks, "
        f"got {got}; put those on the parallel layer instead"
    )


#: The required features of an input of a column-parallel layer, for errors.
_ALL_FEATURES = "all columns of this rank's part of the sequence"


def _check_features(x: torch.Tensor, size: int, description: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor("x", x)
    if isinstance(x, DTensor):
        raise ValueError(
            f"x: required a plain tensor, got a DTensor with {x.placements}; pass x.to_local(), or "
            "use ficco.nn.ColwiseParallel and RowwiseParallel, which take DTensors"
        )
    if x.dim() < 2 or x.shape[-1] != size:
        raise ValueError(
            f"x: required shape [..., {size}], {description}, got {list(x.shape)}; is it sharded "
            "as the layer's docstring says?"
        )


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
    odd = (torch.arange(1, 2 * part.numel() + 1, 2, device=part.device) for part in sums)
    return torch.stack([(part * number).sum() for part, number in zip(sums, odd, strict=True)])


#: The attribute that holds the :class:`SharedInput` of an input.
_ATTRIBUTE = "_ficco_shared"


class SharedInput:
    """The outputs of several layers for one input, computed when the first layer is called.

    The input refers to this object and not the reverse: a cycle would keep activations alive.

    Args:
        layers: layers whose weights may be read before they are called.
        multiply: computes the outputs of all layers from the input.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        multiply: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    ) -> None:
        self.layers, self.multiply = layers, multiply
        self.hooks = _saving_hooks()
        self.outs: dict[nn.Module, torch.Tensor] | None = None
        # Modes and weights when `outs` was computed.
        self.modes: tuple[Any, ...] = ()
        self.weights: dict[nn.Module, list[Any]] = {}

    def __reduce__(self) -> Any:
        return set, ()  # copies of the input share nothing, and `torch.load` may load a set

    def serves(self, layer: nn.Module, x: torch.Tensor) -> bool:
        """Return whether this object has, or will have, the output for a layer."""
        # A checkpoint within the module would gather differently when it recomputes.
        if self.hooks != _saving_hooks():
            return False
        if self.outs is None:
            return layer in self.layers
        # A layer gathers separately if it is called a second time, as in recomputation; if its
        # gradient or autocast mode differs from the first layer's call; or if the input or its
        # weight has changed since.
        if layer not in self.outs or self.modes != _modes(x):
            return False
        pairs = zip(self.weights[layer], _weights(layer), strict=True)
        return all(old is new and counts == now for (old, *counts), (new, *now) in pairs)

    def take(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the output for a layer, once."""
        if self.outs is None:
            self.modes = _modes(x)
            self.weights = {member: _weights(member) for member in self.layers}
            self.outs = dict(zip(self.layers, self.multiply(x), strict=True))
        return self.outs.pop(layer)


def shared_output(x: torch.Tensor, layer: nn.Module) -> torch.Tensor | None:
    """Return the output for a layer if the input is shared with others, else None."""
    shared: SharedInput | None = getattr(x, _ATTRIBUTE, None)
    return shared.take(layer, x) if shared and shared.serves(layer, x) else None


def share(x: torch.Tensor, shared: SharedInput) -> None:
    """Let layers that are called with ``x`` from now on share their communication."""
    setattr(x, _ATTRIBUTE, shared)


@contextmanager
def sharing(x: torch.Tensor, shared: SharedInput) -> Iterator[None]:
    """Let layers that are called with ``x`` within the block share their communication."""
    share(x, shared)
    try:
        yield
    finally:
        delattr(x, _ATTRIBUTE)


def _saving_hooks() -> Any:
    """Return the active hooks on tensors saved for a backward, such as checkpointing's."""
    if torch.compiler.is_compiling():
        return None
    # Available from PyTorch 2.8 on.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


def _modes(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the modes that affect a product of ``x``, and the versions of ``x``."""
    kind = x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    grad = torch.is_grad_enabled()
    if torch.compiler.is_compiling():  # compilers do not see version counts
        return grad, autocast
    return grad, autocast, *_versions(x)


def _weights(layer: nn.Module) -> list[tuple[Any, ...]]:
    """Return a layer's weight and bias with their version counts: see :func:`_versions`."""
    if torch.compiler.is_compiling():
        return []
    parameters: list[Any] = [param for param in (layer.weight, layer.bias) if param is not None]
    return [(param, *_versions(param)) for param in parameters]


def _versions(x: torch.Tensor) -> tuple[int | None, int | None]:
    """Return how often a tensor and its local part were changed in place; None for an inference
    tensor, which has no count."""
    own, local = (None if part.is_inference() else part._version for part in (x, local_of(x)))
    return own, local
