"""Expert-parallel layers, which run in rounds (:mod:`ficco.ops.expert_rounds`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.ops.autograd import Needs
from ficco.ops.entry import check_traced, tells_refusals, under_autocast
from ficco.ops.expert_rounds import (
    NAME,
    ExpertCall,
    round_gradients,
    run_round,
    wide_of,
)
from ficco.ops.operands import check_dtype, process_group
from ficco.ops.record import Record, Request, Shapes
from ficco.ops.routing import Blocks, Routing, make_routing, route
from ficco.problems.specification import ACTIVATIONS, gated
from ficco.schedules import Schedule

#: Name of the compilers' operator for layers that serve all pairs.
ALL = "experts_all"

#: How the ranks split the experts.
SPLITS = ("experts", "columns")


@tells_refusals
def experts(
    tokens: torch.Tensor,
    indices: torch.Tensor | Routing,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    capacity: int | None = None,
    activation: str = "silu",
    on_overflow: str = "drop",
    split: str = "experts",
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
) -> torch.Tensor:
    """Apply a mixture of experts that is spread over the ranks: an all-to-all, grouped products and
    an all-to-all back, overlapped::

        y[t] = sum over j of weights[t, j] * f(tokens[t] @ up[e]) @ down[e],  e = indices[t, j]

    ===========  ==============================================================================
    ``tokens``   [t, k]; t may differ between ranks, and may be 0
    ``indices``  [t, top_k], integers, or the :class:`Routing` from :func:`ficco.route`
    ``weights``  [t, top_k], the router's, of any floating-point dtype
    ``up``       [E/W, k, h], this rank's experts: rank r has r * E/W and following; or
                 [E/W, k, 2h]: gate and up, f(gate) * up
    ``down``     [E/W, h, n]
    returns      [t, n]
    ===========  ==============================================================================

    With ``split="columns"`` every rank has a part of the columns of all experts instead: ``up`` is
    [E, k, h/W], or [E, k, 2h/W] with this rank's parts of gate and up, and ``down`` [E, h/W, n].
    The exchanges are then an all-gather and a reduce-scatter of the blocks (tensor parallelism
    within experts).

    Tokens travel in blocks of ``capacity`` rows for each expert. They are multiplied as they
    arrive, and results are sent back as they are computed. A token's results are summed in float32,
    in the order of its choices, and rounded once. With a capacity and ``on_overflow="drop"`` the
    host never waits for its device. Captured graphs of such calls serve other tokens and routes.

    Every rank makes the call and needs gradients of the same operands: any of ``tokens``,
    ``weights``, ``up`` and ``down``. Unless only ``weights`` needs one, the forward keeps the
    arrived rows and their products with ``up``, as large as the blocks of all experts.
    ``torch.compile`` traces the call. Without a capacity, or with further rounds, sizes depend on
    data, so the backward of compiled code recomputes the forward.

    Args:
        capacity, on_overflow: see :func:`ficco.route`; not with a :class:`Routing`.
        activation: f, one of relu, silu, gelu.
        split: ``"experts"``: a rank has some of the experts. ``"columns"``: it has some columns of
            all experts.
        group: the ranks, default WORLD.
        schedule: ``"auto"``, a name or a Schedule: how tokens are cut, and the order of products.
            Schedules with 2d, pull, beta, a tail or another mover are not served.

    Raises:
        ValueError: an operand or argument is wrong.
        NotImplementedError: the dtype is not served, or without a capacity more than 1024 experts.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call.
    """
    members = process_group(group)
    traced = check_traced(tokens=tokens, weights=weights, up=up, down=down)
    tokens, up, down = under_autocast(tokens, up, down)
    routed = partial(route, capacity=capacity, on_overflow=on_overflow, group=members)
    function = _function(tokens, weights, up, down, activation)
    gathers = check_split(split)
    total = up.shape[0] * (1 if gathers else members.size())
    if isinstance(indices, Routing):
        _check_routing(indices, total, capacity, on_overflow, members)
    _fits(indices, tokens, weights)
    if not isinstance(indices, Routing) and capacity is not None and on_overflow == "drop":
        indices = routed(indices, total)
    request = Request(members, schedule, {"function": function, "gathers": gathers})
    operands = tokens, weights, up, down
    if traced:
        return _trace(request, operands, indices, capacity, on_overflow)
    routing = indices if isinstance(indices, Routing) else routed(indices, total)
    return summed(_rounds(request, routing, operands), tokens.dtype)


def _rounds(
    request: Request, routing: Routing, operands: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the weighted sums of each round."""
    request = request._replace(facts={**request.facts, "blocks": routing})
    for slots in map(routing.slots, range(routing.rounds)):
        yield EXPERTS(request, (*operands, slots), traced=False)


def summed(rounds: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the result of a layer: the sum of its rounds in ``dtype``."""
    total = reduce(torch.add, rounds)
    return total.to(dtype)


def check_split(split: str) -> bool:
    """Return whether every rank gets the tokens of all ranks.

    Raises:
        ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split: required one of {', '.join(SPLITS)}, got {split!r}")
    return split == SPLITS[1]


def _function(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> str:
    """Return the function between the products; refuse operands that do not fit."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: required one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    shapes = f"{list(tokens.shape)}, {list(up.shape)} and {list(down.shape)}"
    if tokens.dim() != 2 or up.dim() != 3 or down.dim() != 3:
        raise ValueError(
            "required tokens [t, k], up [E/W, k, h] or [E/W, k, 2h] and down [E/W, h, n], got "
            f"{shapes}; reshape them"
        )
    wide, h = up.shape[2], down.shape[1]
    if up.shape[1] != tokens.shape[1] or up.shape[0] != down.shape[0] or wide not in (h, 2 * h):
        raise ValueError(
            "required tokens [t, k], up [E/W, k, h] or [E/W, k, 2h] and down [E/W, h, n] with one "
            f"k, h and number of experts, got {shapes}; transpose the weights of nn.Linear"
        )
    if not up.shape[0]:
        raise ValueError("up: required at least one expert on each rank, got none")
    for name, tensor in (("up", up), ("down", down)):
        if tensor.dtype != tokens.dtype or tensor.device != tokens.device:
            raise ValueError(
                f"required one dtype and device, got tokens {tokens.dtype} on {tokens.device} and "
                f"{name} {tensor.dtype} on {tensor.device}; convert one of them"
            )
    check_dtype(tokens)
    if weights.dim() != 2 or not weights.is_floating_point() or weights.device != tokens.device:
        raise ValueError(
            f"weights: required floating-point numbers [t, top_k] on {tokens.device}, got "
            f"{weights.dtype} of shape {list(weights.shape)} on {weights.device}; convert them"
        )
    return gated(activation) if wide == 2 * h and h else activation


def _check_routing(
    routing: Routing, experts: int, capacity: int | None, overflow: str, group: ProcessGroup
) -> None:
    if capacity is not None or overflow != "drop":
        raise ValueError(
            f"capacity, on_overflow: required none with a routing, which has its own, got "
            f"{capacity} and {overflow!r}; pass them to ficco.route"
        )
    if routing.experts != experts:
        raise ValueError(
            f"up: required {routing.experts} experts in all, as the routing has, got {experts}; "
            "pass this rank's experts"
        )
    if not routing.known_to(group):
        raise ValueError(
            "indices: required a routing made for the group of the call, since its ranks exchange "
            "counts, got one of another group; pass group= to ficco.route"
        )


def _fits(routing: torch.Tensor | Routing, tokens: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a routing, or its indices, fits the tokens and weights."""
    indices = routing.indices if isinstance(routing, Routing) else routing
    if not isinstance(indices, torch.Tensor):
        raise ValueError(f"indices: required a torch.Tensor, got {type(indices).__name__}")
    if indices.shape != weights.shape or indices.shape[:1] != tokens.shape[:1]:
        raise ValueError(
            f"required indices and weights [t, top_k] for {tokens.shape[0]} tokens, got "
            f"{list(indices.shape)} and {list(weights.shape)}; pass those of these tokens"
        )
    if indices.device != tokens.device:
        raise ValueError(
            f"indices: required the device of the tokens, {tokens.device}, got {indices.device}; "
            "move them"
        )


# The records. EXPERTS is one round; compilers see it for layers with a capacity and one round.
# EXPERTS_ALL, for compilers only, serves all pairs. Its rows depend on data, so its backward
# computes the forward again.


def _trace(
    request: Request,
    operands: Sequence[torch.Tensor],
    indices: torch.Tensor | Routing,
    capacity: int | None,
    overflow: str,
) -> torch.Tensor:
    if isinstance(indices, Routing):
        capacity, overflow = indices.limit, indices.overflow
    request = request._replace(facts={"capacity": capacity, **request.facts})
    if not isinstance(indices, Routing):
        return EXPERTS_ALL.trace(request, (*operands, indices))
    if capacity is None or overflow != "drop":
        return EXPERTS_ALL.trace(request, (*operands, indices.indices))
    return EXPERTS.trace(request, (*operands, indices.slots()))


def _call_of(request: Request) -> ExpertCall:
    group, schedule, facts = request
    return ExpertCall(group, schedule, facts["function"], facts["gathers"])


def _total(request: Request, up: torch.Tensor) -> int:
    """Return the number of experts of all ranks."""
    return up.shape[0] * (1 if request.facts["gathers"] else request.group.size())


def _blocks(request: Request, up: torch.Tensor) -> Blocks:
    """Return the blocks of a round: the routing's, or under a compiler those of a capacity."""
    facts = request.facts
    return facts["blocks"] if "blocks" in facts else Blocks(_total(request, up), facts["capacity"])


def _forward(
    request: Request, operands: Sequence[torch.Tensor], needs: Needs
) -> Sequence[torch.Tensor | None]:
    *operands, slots = operands
    blocks = _blocks(request, operands[2])
    dtype = operands[0].dtype if blocks.rounds == 1 else None
    return run_round(_call_of(request), blocks, slots, operands, needs[:4], dtype)


def _fake_forward(
    request: Request, operands: Sequence[torch.Tensor], needs: Needs
) -> Sequence[torch.Tensor | None]:
    (tokens, _, up, down, _), gathers = operands, request.facts["gathers"]
    own = _total(request, up) * request.facts["capacity"]
    arrived = own * (request.group.size() if gathers else 1)
    summed = tokens.new_empty(tokens.shape[0], down.shape[2])
    dtype = wide_of(tokens.dtype) if gathers else tokens.dtype
    back = tokens.new_empty(own + 1, down.shape[2], dtype=dtype) if needs[1] else None
    if not (needs[0] or needs[2] or needs[3]):
        return summed, back
    return summed, back, *(tokens.new_empty(arrived, columns) for columns in up.shape[1:])


def _save(tensors: Sequence[torch.Tensor], needs: Needs) -> Sequence[torch.Tensor | None]:
    _, *operands, _, back, arrived, hidden = tensors
    return None, *operands, None, back, arrived, hidden


def _backward(
    request: Request, grad: torch.Tensor, saved: Sequence[Any], needs: Needs
) -> list[torch.Tensor]:
    _, weights, up, down, slots, _, *kept = saved
    operands, blocks = (weights, up, down), _blocks(request, up)
    gradients = round_gradients(_call_of(request), blocks, slots, grad, operands, kept, needs[:4])
    return [gradient for gradient in gradients if gradient is not None]


def _fake_backward(
    request: Request, grad: torch.Tensor, saved: Sequence[Any], needs: Needs
) -> list[torch.Tensor]:
    _, weights, up, down, *_ = saved
    d_tokens = up.new_empty(grad.shape[0], up.shape[1])
    others = (operand.new_empty(operand.shape) for operand in (weights, up, down))
    gradients = zip((d_tokens, *others), needs, strict=False)
    return [gradient for gradient, need in gradients if need]


def _routed(request: Request, up: torch.Tensor, indices: torch.Tensor) -> Routing:
    capacity = request.facts["capacity"]
    overflow = "drop" if capacity is None else "again"
    return make_routing(indices, _total(request, up), capacity, overflow, request.group)


def _all_forward(
    request: Request, operands: Sequence[torch.Tensor], needs: Needs
) -> tuple[torch.Tensor]:
    *operands, indices = operands
    routing = _routed(request, operands[2], indices)
    return (summed(_rounds(request, routing, operands), operands[0].dtype),)


def _all_fake_forward(
    request: Request, operands: Sequence[torch.Tensor], needs: Needs
) -> tuple[torch.Tensor]:
    tokens, _, _, down, _ = operands
    return (tokens.new_empty(tokens.shape[0], down.shape[2]),)


def _all_save(tensors: Sequence[torch.Tensor], needs: Needs) -> Sequence[torch.Tensor | None]:
    *operands, _ = tensors
    return *operands, None


def _all_backward(
    request: Request, grad: torch.Tensor, saved: Sequence[Any], needs: Needs
) -> list[torch.Tensor]:
    """Sum the gradients of all rounds, the last round first, which is autograd's order."""
    (*operands, indices, _), call = saved, _call_of(request)
    routing, total = _routed(request, operands[2], indices), None
    for turn in reversed(range(routing.rounds)):
        slots = routing.slots(turn)
        _, *kept = run_round(call, routing, slots, operands, needs[:4], None)
        parts = round_gradients(call, routing, slots, grad, operands[1:], kept, needs[:4])
        gradients = [part for part in parts if part is not None]
        total = gradients if total is None else list(map(torch.add, total, gradients))
    assert total is not None
    return total


def _flops(request: Request, shapes: Shapes, result: Sequence[int], needs: Needs | None) -> int:
    """Count the products of all rows of this rank's blocks, padding included."""
    _, _, up, down, _ = shapes
    rows: int = up[0] * request.facts["capacity"] * request.group.size()
    up_flops, down_flops = 2 * rows * up[1] * up[2], 2 * rows * down[1] * down[2]
    if needs is None:
        return up_flops + down_flops
    tokens, _, d_up, d_down, _ = needs
    return up_flops * (tokens + d_up) + down_flops * ((tokens or d_up or d_down) + d_down)


EXPERTS = Record(
    NAME,
    ("tokens", "weights", "up", "down", "slots"),
    {"capacity": "SymInt", "function": "str", "gathers": "bool"},
    ("back", "arrived", "hidden"),
    _forward,
    _fake_forward,
    _save,
    _backward,
    _fake_backward,
    flops=_flops,
)

EXPERTS_ALL = Record(
    ALL,
    ("tokens", "weights", "up", "down", "indices"),
    {"capacity": "SymInt?", "function": "str", "gathers": "bool"},
    (),
    _all_forward,
    _all_fake_forward,
    _all_save,
    _all_backward,
    _fake_backward,
)
