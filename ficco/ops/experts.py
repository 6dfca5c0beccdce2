"""Expert-parallel layers: dispatch, two products and the way back as one Plan.

What depends on the routing is done by PyTorch, before and after: tokens are copied to the rows that
they have for their experts, and what comes back is summed by the router's weights. The backward is
the same exchange twice. Let g be the gradient of the result, and s the row of a token's pair:

===========  ===================================================================
dY           w g in row s, dispatched to the experts
dH           dY @ down.T, through the function's derivative
d tokens     the sum over a token's pairs of dH @ up.T, brought back
d weights    <row s of what the forward brought back, g>
d up         X.T @ dH for each expert, with the tokens X that the forward kept
d down       function(hidden).T @ dY for each expert, with hidden that it kept
===========  ===================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.dma.engine import Call, Engine, Filled, Groups
from ficco.dma.filled import ends_of, groups_of, index_of, made_whole
from ficco.dma.products import FUNCTIONS
from ficco.heuristics.experts import EXPERTS
from ficco.ops import problem_log
from ficco.ops.fit import keep_to_cap
from ficco.ops.operands import check_dtype, plain, process_group
from ficco.ops.operate import cast, refuse_sharded, watched
from ficco.ops.planned import execute, new_kind, number_call, post_call, workspace_for
from ficco.ops.routing import Routing, rounded, route
from ficco.options import Options, carried, current
from ficco.schedules import Schedule
from ficco.schedules.experts import (
    ACTIVATIONS,
    LANDING,
    ExpertLayer,
    block_starts,
    expert_plans,
)
from ficco.specification import gated
from ficco.workspace import CachedCall, Workspace

#: What errors and the board call it.
NAME = "experts"

#: Layers of calls: few kinds of them.
_known = lru_cache(maxsize=256)(ExpertLayer)

#: What of the experts a rank has.
SPLITS = ("experts", "columns")


@torch._disable_dynamo
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

    Every rank makes the call, and needs gradients of the same operands. In code that
    ``torch.compile`` compiles it is a graph break. There are gradients of ``tokens``, ``weights``,
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
        NotImplementedError: the dtype, several hosts, or tensors that are traced are not served.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call.
    """
    members = process_group(group)
    given = {"tokens": tokens, "weights": weights, "up": up, "down": down}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: required a torch.Tensor, got {type(tensor).__name__}")
    if watched(*given.values()):
        refuse_sharded(**given)
        raise NotImplementedError(
            "ficco.experts takes no tensors that are traced or wrapped; call it outside of what "
            "traces them"
        )
    kind = tokens.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        tokens, up, down = (cast(one, kind) for one in (tokens, up, down))
    workspace = workspace_for(members, tokens, "tokens", NAME)
    wanted = partial(route, capacity=capacity, on_overflow=on_overflow, group=members)
    with _telling(workspace):
        function = _function(tokens, weights, up, down, activation)
        gathers = check_split(split)
        total = up.shape[0] * (1 if gathers else members.size())
        if isinstance(indices, Routing):
            _check_routing(indices, total, capacity, on_overflow)
        elif capacity is not None and on_overflow == "drop":
            indices = wanted(indices, total)
        _fits(indices, tokens, weights)
    routing = indices if isinstance(indices, Routing) else wanted(indices, total)
    call = ExpertCall(members, schedule, function, gathers)
    summed: torch.Tensor | None = None
    for turn in range(routing.rounds):
        part = ExpertFunction.apply(tokens, weights, up, down, routing, turn, call)
        summed = part if summed is None else summed + part
    assert summed is not None
    return summed.to(tokens.dtype)


@contextmanager
def _telling(workspace: Workspace) -> Iterator[None]:
    """What refuses a call here, before any number is exchanged, is told to the peers."""
    try:
        yield
    except Exception as error:
        number_call(workspace, NAME)
        workspace.end(error)
        raise


class ExpertCall(NamedTuple):
    """What a call is, without its operands."""

    group: ProcessGroup
    schedule: str | Schedule
    function: str
    gathers: bool
    options: Options | None = None


class ExpertFunction(torch.autograd.Function):
    """One round: the weighted sums, not rounded yet."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        routing: Routing,
        turn: int,
        call: ExpertCall,
    ) -> torch.Tensor:
        of_tokens, of_weights, of_up, of_down = ctx.needs_input_grad[:4]
        keeps = of_tokens or of_up or of_down
        slots = routing.slots(turn)
        # What no token has is multiplied by zeros in the backward: it must be finite.
        operands = {**_sent(tokens, slots, routing, keeps), "b": up, "c": down}
        layer = _layer("experts", call, routing, tokens, up, down, keeps)  # may wait for counts
        made = _run(layer, call, routing, operands)
        out, kept = _terms(made.pop("out"), layer), tuple(made.values())
        ctx.save_for_backward(weights, slots, up, down, out if of_weights else None, *kept)
        ctx.call, ctx.routing, ctx.dtype = call._replace(options=current()), routing, tokens.dtype
        dtype = tokens.dtype if routing.rounds == 1 else None
        return weighted_sum(out, slots, weights, dtype, _engine(call, tokens))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights, slots, up, down, out, *kept = ctx.saved_tensors
        call: ExpertCall = ctx.call
        routing: Routing = ctx.routing
        of_tokens, of_weights, of_up, of_down = ctx.needs_input_grad[:4]
        grad = grad.to(_wide(grad.dtype))
        d_weights = _inner(out, slots, grad).to(weights.dtype) if of_weights else None
        if not (of_tokens or of_up or of_down):
            return (None, d_weights, *[None] * 5)
        arrived, hidden = kept
        assert call.options is not None
        with carried(call.options):
            dtype = ctx.dtype
            d_out = _leaving(grad, slots, routing, weights, dtype)
            down_t, up_t = down.transpose(1, 2), up.transpose(1, 2)
            layer = _layer("dispatch_matmul", call, routing, d_out, down_t, None, of_down)
            made = _run(layer, call, routing, {"a": d_out, "b": down_t}, "gradients")
            with torch.enable_grad():
                before = hidden.detach().requires_grad_()
                active = FUNCTIONS[call.function](before)
            (d_hidden,) = torch.autograd.grad(active, before, made["hidden"])
            d_tokens = d_up = d_down = None
            if of_tokens:
                layer = _layer("matmul_combine", call, routing, d_hidden, None, up_t, False)
                operands = {"active": d_hidden, "c": up_t}
                back = _run(layer, call, routing, operands, "gradients")["out"]
                back, engine = _terms(back, layer), _engine(call, grad)
                d_tokens = weighted_sum(back, slots, dtype=dtype, engine=engine)
            rank, starts = call.group.rank(), None
            if routing.exact:
                starts = _starts(layer, routing, rank)[LANDING[0], rank].tolist()
            if of_up:
                d_up = _of_weights(arrived, d_hidden, up, layer, starts)
            if of_down:
                d_down = _of_weights(active.detach(), made["gathered"], down, layer, starts)
        return (d_tokens, d_weights, d_up, d_down, *[None] * 3)


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


def _check_routing(routing: Routing, experts: int, capacity: int | None, overflow: str) -> None:
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


def _layer(
    operator: str,
    call: ExpertCall,
    routing: Routing,
    left: torch.Tensor,
    b: torch.Tensor | None,
    c: torch.Tensor | None,
    keeps: bool,
) -> ExpertLayer:
    some = b if b is not None else c
    assert some is not None
    k, h = (left.shape[1], b.shape[2]) if b is not None else (0, left.shape[1])
    n, dtype = c.shape[2] if c is not None else 0, str(left.dtype).removeprefix("torch.")
    function = call.function if operator == NAME else ""
    each = some.shape[0]
    sizes = call.group.size(), each, routing.capacity, k, h, n
    flags = keeps, call.gathers, routing.exact, operator == NAME and not routing.exact
    room = _room(routing, each, call.gathers) if routing.exact else (0, 0)
    return _known(operator, *sizes, dtype, function, *flags, room)


def _usual(layer: ExpertLayer, routing: Routing) -> ExpertLayer:
    """The layer by which a schedule is chosen: blocks of an exact one are as large as the mean of
    all, not as the largest."""
    if not layer.exact:
        return layer
    pairs, blocks = sum(map(sum, routing.every)), layer.world * len(routing.every[0])
    return replace(layer, capacity=max(-(-pairs // blocks), 1))


def _room(routing: Routing, experts: int, gathers: bool) -> tuple[int, int]:
    """The most rows that any rank multiplies, and gets back, rounded up: few numbers."""
    sent = [sum(counts) for counts in routing.every]
    if gathers:
        return rounded(sum(sent)), rounded(len(sent) * max(sent))
    there = [sum(column) for column in zip(*routing.every, strict=True)]
    landing = max(sum(there[i : i + experts]) for i in range(0, len(there), experts))
    return rounded(landing), rounded(max(sent))


def _run(
    layer: ExpertLayer,
    given: ExpertCall,
    routing: Routing,
    operands: dict[str, torch.Tensor],
    purpose: str = "",
) -> dict[str, torch.Tensor]:
    """Run a layer, or a half of one; returns its results by name. The result has a row of zeros at
    its end, which pairs without a row read."""
    first = next(iter(operands.values()))
    workspace = workspace_for(given.group, first, "tokens", NAME)
    try:
        engine, options = workspace.engine, number_call(workspace, NAME)
        if engine.hosts.count > 1:
            raise NotImplementedError(
                f"ficco.experts: the ranks of this group are on {engine.hosts.count} hosts, which "
                "is not served yet; pass a group of ranks of one host"
            )
        schedule = given.schedule
        key = (
            NAME,
            layer,
            layer.room,
            schedule,
            options.workspace_bytes,
            options.machine,
            first.device,
        )
        cached: ExpertKind | None = workspace.programs.get(key)  # type: ignore[assignment]
        if cached is None:
            known = workspace.known(options.machine)
            mode = "idle" if layer.exact else "queued"  # the host has waited for the device
            usual = _usual(layer, routing)
            decision = EXPERTS.decide(usual, schedule, machine=known.machine, mode=mode)
            (plan,) = expert_plans(layer, decision.schedule, [engine.rank])
            problem_log.say(options.log, decision, plan.schedule, purpose, engine.rank)
            keep_to_cap(engine, plan, options.workspace_bytes)
            single, agreed = options.workspace_bytes is not None, [str(known), str(layer.room)]
            known_as = [*agreed, purpose]
            cached = new_kind(workspace, plan, options, known_as, single, kind=ExpertKind)
        tensors = {name: plain(tensor) for name, tensor in operands.items()}
        plan, results, filled, whole = cached.plan, {}, None, frozenset[str]()
        if layer.exact:
            starts = _starts(layer, routing, engine.rank)
            landing = starts[LANDING[0], engine.rank]
            filled = Filled(starts, ends_of(cached.groups, landing, first.device))
            whole = cached.whole if engine.keeps_made else whole
        for buffer in plan.buffers:
            if buffer.memory in ("result", "local") and buffer.name not in whole:
                rows, cols = buffer.shapes[engine.rank]
                if filled is not None:
                    rows = int(filled.starts[buffer.name, engine.rank][-1])
                made = first.new_empty(rows + (buffer.name == "out"), cols)
                tensors[buffer.name] = made[:rows]
                if buffer.memory == "result":
                    results[buffer.name] = made
        if "out" in results:
            results["out"][-1].zero_()
        post_call(workspace, key, cached, options, purpose)
        execute(workspace, cached, Call(tensors, filled=filled))
    except BaseException as error:
        workspace.end(error)
        raise
    return results


def _engine(call: ExpertCall, tensor: torch.Tensor) -> Engine:
    return workspace_for(call.group, tensor, "tokens", NAME).engine


class ExpertKind(CachedCall):
    """What is kept for a kind of layer."""

    @cached_property
    def groups(self) -> list[Groups]:
        """Those of its grouped products."""
        return groups_of(self.plan)

    @cached_property
    def whole(self) -> frozenset[str]:
        """Buffers that these make."""
        return made_whole(self.plan)


def _starts(
    layer: ExpertLayer, routing: Routing, rank: int
) -> Mapping[tuple[str, int], np.ndarray[Any, Any]]:
    """What calls of an exact layer, and of its halves, have before each block."""
    if layer.gathers not in routing.blocks:
        routing.blocks[layer.gathers] = block_starts(layer, routing.every, rank)
    found: dict[tuple[str, int], np.ndarray[Any, Any]] = routing.blocks[layer.gathers]
    return found


# What depends on the routing.


def _sent(
    tokens: torch.Tensor, slots: torch.Tensor, routing: Routing, zeros: bool
) -> dict[str, torch.Tensor]:
    """What ``a`` is: the rows of all pairs, where there are exactly these, which a device brings
    there while the host waits for counts. Else tokens, and which of them each row of a block is;
    where it is none it is zeros or, unless these are asked for, any."""
    many = tokens.shape[0]
    if routing.exact:
        return {"a": tokens.index_select(0, routing.tokens(slots, 0))}
    if zeros or not many:
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
    return {"a": tokens, index_of("a"): routing.tokens(slots, tokens.shape[0] - 1)}


def _leaving(
    grad: torch.Tensor,
    slots: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The rows of all pairs, those of a gradient times their weights."""
    if not routing.exact:
        return spread(grad, slots, routing.rows, weights, dtype)
    rows = grad.new_empty(routing.rows, grad.shape[1], dtype=dtype)
    for choice in range(slots.shape[1]):
        some = grad * weights[:, choice, None].to(grad.dtype)
        rows.index_copy_(0, slots[:, choice], some.to(dtype))
    return rows


def spread(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    rows: int,
    weights: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The rows of all pairs in blocks, zeros in rows that no pair has. Pairs without a row share
    another one."""
    spread = tokens.new_zeros(rows + 1, tokens.shape[1], dtype=dtype or tokens.dtype)
    for choice in range(slots.shape[1]):
        some = tokens if weights is None else tokens * weights[:, choice, None].to(tokens.dtype)
        spread.index_copy_(0, slots[:, choice], some.to(spread.dtype))
    return spread[:-1]


def _terms(rows: torch.Tensor, layer: ExpertLayer) -> torch.Tensor:
    """What comes back to a rank; where these are terms from all ranks, their sums, in the order of
    the ranks."""
    if not layer.gathers:
        return rows
    terms = rows[:-1].view(layer.world, -1, layer.n)
    total = rows.new_zeros(terms.shape[1] + 1, layer.n, dtype=_wide(rows.dtype))
    for term in terms:
        total[:-1] += term
    return total


def weighted_sum(
    rows: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    engine: Engine | None = None,
) -> torch.Tensor:
    """The sum of the rows of each token's pairs, by their weights, in float32 or float64; rounded
    once if that is not the dtype. An engine may have a kernel for it."""
    wide = _wide(rows.dtype)
    shape, choices = (slots.shape[0], rows.shape[1]), slots.shape[1]
    if engine is not None and dtype == rows.dtype:
        out = rows.new_empty(shape)
        factors = None if weights is None else weights.float().contiguous()
        if engine.combine(out, rows, slots, factors):
            return out
    total = rows.new_zeros(shape, dtype=dtype or wide) if not choices else None
    for choice in range(choices):  # each pass widens, and the last one rounds, as it goes
        some = rows.index_select(0, slots[:, choice])
        factor = None if weights is None else weights[:, choice, None].to(wide)
        last = choice == choices - 1
        out = rows.new_empty(shape, dtype=dtype or wide if last else wide)
        if total is None:
            total = out.copy_(some) if factor is None else torch.mul(some, factor, out=out)
        elif factor is None:
            total = torch.add(total, some, out=out)
        else:
            total = torch.addcmul(total, some, factor, out=out)
    assert total is not None
    return total


def _inner(rows: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The products of the rows of each token's pairs with a gradient."""
    chosen = (rows.index_select(0, some).to(grad.dtype) for some in slots.unbind(1))
    inner = [(one * grad).sum(1) for one in chosen]
    return torch.stack(inner, 1) if inner else grad.new_zeros(slots.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _of_weights(
    left: torch.Tensor,
    right: torch.Tensor,
    weights: torch.Tensor,
    layer: ExpertLayer,
    starts: Sequence[int] | None,
) -> torch.Tensor:
    """For each expert the product of its rows of two matrices, the first one transposed.
    ``starts``: of the blocks of an exact layer."""
    if starts is None:
        left, right = (one.view(weights.shape[0], -1, one.shape[1]) for one in (left, right))
        return left.transpose(1, 2) @ right
    grad = torch.empty_like(weights, memory_format=torch.contiguous_format)
    for i, (first, last) in enumerate(pairwise(starts[:: layer.world])):
        torch.mm(left[first:last].t(), right[first:last], out=grad[i])
    return grad
