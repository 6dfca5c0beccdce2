"""Expert-parallel layers, of rounds as :mod:`ficco.ops.expert_rounds` runs them."""

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

#: The operator of compilers for layers that serve all pairs.
ALL = "experts_all"

#: What of the experts a rank has.
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
    """A mixture of experts that is spread over the ranks, as an all-to-all, grouped products and an
    all-to-all back, overlapped::

        y[t] = sum over j of weights[t, j] * f(tokens[t] @ up[e]) @ down[e],  e = indices[t, j]

    ===========  ==============================================================================
    ``tokens``   [t, k]; t may differ between ranks, and may be 0
    ``indices``  [t, top_k], whole numbers, or what :func:`ficco.route` made of them
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

    Tokens travel in blocks of ``capacity`` rows for each expert. They are multiplied as they arrive
    and sent back as they are made. Sums over a token's experts are in float32, in the order of its
    choices, and rounded once. With a capacity and ``on_overflow="drop"`` the host never waits for
    its device, and calls can be captured in graphs, which serve other tokens and routes.

    Every rank makes the call, and needs gradients of the same operands. ``torch.compile`` traces
    it; without a capacity, or with further rounds, compiled code makes the forward again for its
    gradients, whose sizes it would have to know. There are gradients of ``tokens``, ``weights``,
    ``up`` and ``down``; for others than that of ``weights`` the forward keeps the rows that
    arrived, and the products with ``up``, as large as the blocks of all experts.

    Args:
        capacity, on_overflow: see :func:`ficco.route`; not if ``indices`` is what that made.
        activation: f, one of relu, silu, gelu.
        split: what of the experts a rank has: ``"experts"``, some of them, or ``"columns"``, some
            columns of all.
        group: the ranks, default WORLD.
        schedule: ``"auto"``, a name or a Schedule: how tokens are cut and in which order they are
            multiplied. Those with 2d, pull, beta, a tail or another mover are not served.

    Raises:
        ValueError: an operand or argument is wrong.
        NotImplementedError: the dtype is not served, or without a capacity more than 1024 experts.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call.
    """
    members = process_group(group)
    given = {"tokens": tokens, "weights": weights, "up": up, "down": down}
    traced = check_traced(**given)
    tokens, up, down = under_autocast(tokens, up, down)
    wanted = partial(route, capacity=capacity, on_overflow=on_overflow, group=members)
    function = _function(tokens, weights, up, down, activation)
    gathers = check_split(split)
    total = up.shape[0] * (1 if gathers else members.size())
    if isinstance(indices, Routing):
        _check_routing(indices, total, capacity, on_overflow, members)
    _fits(indices, tokens, weights)
    if not isinstance(indices, Routing) and capacity is not None and on_overflow == "drop":
        indices = wanted(indices, total)
    request = Request(members, schedule, {"function": function, "gathers": gathers})
    operands = tokens, weights, up, down
    if traced:
        return _trace(request, operands, indices, capacity, on_overflow)
    routing = indices if isinstance(indices, Routing) else wanted(indices, total)
    return summed(_rounds(request, routing, operands), tokens.dtype)


def _rounds(
    request: Request, routing: Routing, operands: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The weighted sums of each round, one after the other."""
    request = request._replace(facts={**request.facts, "blocks": routing})
    for slots in map(routing.slots, range(routing.rounds)):
        yield EXPERTS(request, (*operands, slots), traced=False)


def summed(rounds: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The result of a layer, of its rounds."""
    total = reduce(torch.add, rounds)
    return total.to(dtype)


def check_split(split: str) -> bool:
    """Whether all ranks get the tokens of all.

    Raises:
        ValueError: nothing is split like that.
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
    """The function between the products; refuses operands that do not fit."""
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
            f"up: required those of {routing.experts} experts in all, as the routing has, got "
            f"those of {experts}; pass this rank's"
        )
    if not routing.known_to(group):
        raise ValueError(
            "indices: required a routing of the group of the call, with whose ranks it has "
            "exchanged counts, got one of another group; pass group= to ficco.route"
        )


def _fits(given: torch.Tensor | Routing, tokens: torch.Tensor, weights: torch.Tensor) -> None:
    """Whether a routing is one of these tokens."""
    indices = given.indices if isinstance(given, Routing) else given
    if not isinstance(indices, torch.Tensor):
        raise ValueError(f"indices: required a torch.Tensor, got {type(indices).__name__}")
    if indices.shape != weights.shape or indices.shape[:1] != tokens.shape[:1]:
        raise ValueError(
            f"required indices and weights [t, top_k] for {tokens.shape[0]} tokens, got "
            f"{list(indices.shape)} and {list(weights.shape)}; pass those of these tokens"
        )
    if indices.device != tokens.device:
        raise ValueError(
            f"indices: required them on {tokens.device} as the tokens, got {indices.device}; move "
            "them"
        )


# The records: of one round of a layer, which compilers see of layers with a capacity, of which
# nothing goes in further rounds; and, for compilers only, of a layer that serves all pairs, whose
# rows depend on data, and which is computed again for its gradients.


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
    """Experts of all ranks."""
    return up.shape[0] * (1 if request.facts["gathers"] else request.group.size())


def _blocks(request: Request, up: torch.Tensor) -> Blocks:
    """The blocks of a round: those of the routing, or as many as a compiler knows."""
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
    there = own * (request.group.size() if gathers else 1)
    summed = tokens.new_empty(tokens.shape[0], down.shape[2])
    dtype = wide_of(tokens.dtype) if gathers else tokens.dtype
    back = tokens.new_empty(own + 1, down.shape[2], dtype=dtype) if needs[1] else None
    if not (needs[0] or needs[2] or needs[3]):
        return summed, back
    return summed, back, *(tokens.new_empty(there, columns) for columns in up.shape[1:])


def _save(tensors: Sequence[torch.Tensor], needs: Needs) -> Sequence[torch.Tensor | None]:
    _, *operands, _, back, arrived, hidden = tensors
    return None, *operands, None, back, arrived, hidden


def _backward(
    request: Request, grad: torch.Tensor, saved: Sequence[Any], needs: Needs
) -> list[torch.Tensor]:
    _, weights, up, down, slots, _, *kept = saved
    operands, blocks = (weights, up, down), _blocks(request, up)
    gradients = round_gradients(_call_of(request), blocks, slots, grad, operands, kept, needs[:4])
    return [one for one in gradients if one is not None]


def _fake_backward(
    request: Request, grad: torch.Tensor, saved: Sequence[Any], needs: Needs
) -> list[torch.Tensor]:
    _, weights, up, down, *_ = saved
    d_tokens = up.new_empty(grad.shape[0], up.shape[1])
    others = (one.new_empty(one.shape) for one in (weights, up, down))
    return [one for one, need in zip((d_tokens, *others), needs, strict=False) if need]


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
    """Round by round, the last one first, as autograd goes."""
    (*operands, indices, _), call = saved, _call_of(request)
    routing, total = _routed(request, operands[2], indices), None
    for turn in reversed(range(routing.rounds)):
        slots = routing.slots(turn)
        _, *kept = run_round(call, routing, slots, operands, needs[:4], None)
        more = round_gradients(call, routing, slots, grad, operands[1:], kept, needs[:4])
        gradients = [one for one in more if one is not None]
        total = gradients if total is None else list(map(torch.add, total, gradients))
    assert total is not None
    return total


def _flops(request: Request, shapes: Shapes, result: Sequence[int], needs: Needs | None) -> int:
    """Those of the products of all rows of this rank's blocks, empty ones too."""
    _, _, up, down, _ = shapes
    rows: int = up[0] * request.facts["capacity"] * request.group.size()
    of_up, of_down = 2 * rows * up[1] * up[2], 2 * rows * down[1] * down[2]
    if needs is None:
        return of_up + of_down
    tokens, _, d_up, d_down, _ = needs
    return of_up * (tokens + d_up) + of_down * ((tokens or d_up or d_down) + d_down)


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
