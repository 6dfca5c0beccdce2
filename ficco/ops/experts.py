"""Expert-parallel layers, which run in rounds: Plans, and PyTorch code around them.

The PyTorch code follows the routing. Before a Plan it copies tokens to the rows of their experts.
After it, it sums the returned rows of each token, times the router's weights. The backward of a
round runs the same exchange twice. Let g be the gradient of the result, and s the row of a token's
pair:

===========  ===================================================================
dY           w g in row s, dispatched to the experts
dH           dY @ down.T, through the function's derivative
d tokens     the sum over a token's pairs of dH @ up.T, brought back
d weights    <row s that came back in the forward, g>
d up         X.T @ dH for each expert; X: tokens that the forward kept
d down       function(hidden).T @ dY for each expert; hidden: kept by the forward
===========  ===================================================================
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.compute.products import ACTIVATIONS
from ficco.compute.program import Call, Filled
from ficco.compute.ragged_blocks import ends_of, index_of
from ficco.dma.engine import Engine
from ficco.ops import problem_log
from ficco.ops.call import keep_to_cap, plain
from ficco.ops.entry import check_traced, tells_refusals, under_autocast
from ficco.ops.operands import check_dense, check_dtype, no_schedule, not_a_tensor, process_group
from ficco.ops.record import Needs, Record, Request, Saved, Shapes, Tensors
from ficco.ops.routing import Blocks, Routing, check_route, make_routing, rounded, route
from ficco.options import Options, current
from ficco.problems.experts import LANDING, ExpertLayer, block_starts
from ficco.problems.specification import FUNCTIONS, gated
from ficco.runtime.calls import Invocation, invoke, new_kind
from ficco.runtime.workspace import CachedCall, Workspace, workspace_for
from ficco.schedules import Schedule
from ficco.schedules.experts import expert_plans

#: Name of the operator in errors and on the board.
NAME = "experts"

#: An ExpertLayer of these fields, cached: calls repeat few kinds of layers.
_cached_layer = lru_cache(maxsize=256)(ExpertLayer)


class ExpertRound(NamedTuple):
    """Result of one round.

    Attributes:
        summed: [t, n], the weighted sums.
        back: the rows that came back, followed by a row of zeros, if the weights need a gradient.
        arrived, hidden: the rows that arrived, and their products with ``up``, if another operand
            needs a gradient.
    """

    summed: torch.Tensor
    back: torch.Tensor | None
    arrived: torch.Tensor | None
    hidden: torch.Tensor | None


@tells_refusals
def run_round(
    request: Request,
    blocks: Blocks,
    slots: torch.Tensor,
    operands: Sequence[torch.Tensor],
    needs: Needs,
    dtype: torch.dtype | None,
) -> ExpertRound:
    """Run one round; return its sums and the tensors that its gradients need. ``operands``: tokens,
    weights, up and down. ``dtype``: of the sums; None leaves them wide."""
    tokens, weights, up, down = operands
    needs_tokens, needs_weights, needs_up, needs_down = needs
    keeps = needs_tokens or needs_up or needs_down
    # The backward multiplies padding rows by zeros, so they must be finite.
    inputs = {**_dispatched(tokens, slots, blocks, keeps), "b": up, "c": down}
    layer = _layer(NAME, request, blocks, tokens, up, down, keeps)  # may wait for counts
    results = _run(layer, request, blocks, inputs)
    back = _returned_rows(results["out"], layer)
    summed = weighted_sum(back, slots, weights, dtype, _engine(request, tokens))
    intermediates = back if needs_weights else None, results.get("gathered"), results.get("hidden")
    return ExpertRound(summed, *intermediates)


@tells_refusals
def round_gradients(
    request: Request,
    blocks: Blocks,
    slots: torch.Tensor,
    grad: torch.Tensor,
    operands: Sequence[torch.Tensor],
    intermediates: Sequence[torch.Tensor | None],
    needs: Needs,
) -> list[torch.Tensor | None]:
    """Return the gradients of tokens, weights, up and down; None for those not needed. ``grad``:
    gradient of the round's sums. ``operands``: weights, up and down. ``intermediates``: back,
    arrived and hidden of the :class:`ExpertRound`."""
    (weights, up, down), (back, arrived, hidden) = operands, intermediates
    needs_tokens, needs_weights, needs_up, needs_down = needs
    grad, dtype = grad.to(wide_of(grad.dtype)), up.dtype
    d_tokens = d_weights = d_up = d_down = None
    if back is not None and needs_weights:
        d_weights = _inner_products(back, slots, grad).to(weights.dtype)
    if not (needs_tokens or needs_up or needs_down):
        return [None, d_weights, None, None]
    assert arrived is not None and hidden is not None
    d_out = _weighted_rows(grad, slots, blocks, weights, dtype)
    down_t, up_t = down.transpose(1, 2), up.transpose(1, 2)
    layer = _layer("dispatch_matmul", request, blocks, d_out, down_t, None, needs_down)
    results = _run(layer, request, blocks, {"a": d_out, "b": down_t}, "gradients")
    active, d_hidden = _activation_backward(request.facts["function"], hidden, results["hidden"])
    if needs_tokens:
        layer = _layer("matmul_combine", request, blocks, d_hidden, None, up_t, False)
        inputs = {"active": d_hidden, "c": up_t}
        terms = _returned_rows(_run(layer, request, blocks, inputs, "gradients")["out"], layer)
        d_tokens = weighted_sum(terms, slots, dtype=dtype, engine=_engine(request, grad))
    rank, starts = request.group.rank(), None
    if blocks.exact:
        starts = _cached_starts(layer, blocks)[LANDING[0]][rank].tolist()
    if needs_up:
        d_up = _expert_gradients(arrived, d_hidden, up, layer, starts)
    if needs_down:
        d_down = _expert_gradients(active, results["gathered"], down, layer, starts)
    return [d_tokens, d_weights, d_up, d_down]


def _activation_backward(
    function: str, hidden: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the function of ``hidden``, and the gradient of ``hidden`` given that of the function.
    Autograd does not record inside operators."""
    name, gates = FUNCTIONS[function]
    activation = ACTIVATIONS[name]
    if not gates:
        return activation.of(hidden), activation.derivative(grad, hidden)
    gate, linear = hidden.chunk(2, 1)
    activated = activation.of(gate)
    d_gate = activation.derivative(grad * linear, gate)
    return activated * linear, torch.cat([d_gate, grad * activated], 1)


def _layer(
    operator: str,
    request: Request,
    blocks: Blocks,
    left: torch.Tensor,
    b: torch.Tensor | None,
    c: torch.Tensor | None,
    keeps: bool,
) -> ExpertLayer:
    """Return the layer of an operator. ``left``: its ``a`` or, without ``b``, its ``active``. ``b``
    and ``c``: matrices of each expert, applied before and after the activation."""
    matrices, facts = b if b is not None else c, request.facts
    assert matrices is not None
    k, h, n = left.shape[1] if b is not None else 0, matrices.shape[2], 0
    if c is not None:
        h, n = c.shape[1:]
    dtype = str(left.dtype).removeprefix("torch.")
    function, indexed = (facts["function"], not blocks.exact) if operator == NAME else ("", False)
    experts = matrices.shape[0]
    sizes = request.group.size(), experts, blocks.capacity, k, h, n
    flags = keeps, facts["gathers"], blocks.exact, indexed
    room = _most_rows(blocks, experts, facts["gathers"]) if blocks.exact else (0, 0)
    of_group = _engine(request, left).group_facts
    return _cached_layer(operator, *sizes, dtype, function, *flags, room, **of_group)


def _mean_layer(layer: ExpertLayer, blocks: Blocks) -> ExpertLayer:
    """Return the layer that a schedule is chosen for. The capacity of an exact layer becomes the
    mean size of all blocks, instead of the largest."""
    if not layer.exact:
        return layer
    pairs, blocks_of_all = int(blocks.every.sum()), blocks.every.size
    return replace(layer, capacity=max(-(-pairs // blocks_of_all), 1))


def _most_rows(blocks: Blocks, experts: int, gathers: bool) -> tuple[int, int]:
    """Return the most rows that any rank multiplies, and the most that return to any rank. Both are
    rounded up, so that calls with close counts share a plan."""
    sent = blocks.every.sum(1)
    most_sent = int(sent.max())
    if gathers:
        return rounded(int(sent.sum())), rounded(len(sent) * most_sent)
    received = blocks.every.sum(0).reshape(-1, experts).sum(1)
    return rounded(int(received.max())), rounded(most_sent)


def _run(
    layer: ExpertLayer,
    request: Request,
    blocks: Blocks,
    operands: dict[str, torch.Tensor],
    purpose: str = "",
) -> dict[str, torch.Tensor]:
    """Run a layer or one of its halves; return its results by name. ``out`` has an extra last row.
    Pairs without a row read it, so it is zero unless the layer is exact."""
    invocation = RoundCall(layer, request.schedule, blocks, operands, purpose)
    invoke(request.group, invocation, invocation.like, current())
    return invocation.results


@dataclass(eq=False)
class RoundCall(Invocation):
    """A call of a layer of experts or one of its halves.

    Attributes:
        results: result tensors by name, once allocated.
    """

    layer: ExpertLayer
    schedule: str | Schedule
    blocks: Blocks
    operands: dict[str, torch.Tensor]
    purpose: str
    results: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.operator, self.like = NAME, next(iter(self.operands.values()))

    def key(self, workspace: Workspace, options: Options) -> Hashable:
        self.engine, layer = workspace.engine, self.layer
        if not isinstance(self.schedule, (str, Schedule)):
            raise no_schedule(self.schedule)
        setting = options.workspace_bytes, options.machine, self.like.device
        return NAME, layer, layer.room, self.schedule, *setting

    def plan(self, workspace: Workspace, options: Options) -> CachedCall:
        engine, layer, known = workspace.engine, self.layer, workspace.known(options.machine)
        mode = "idle" if layer.exact else "queued"  # the host has waited for the device
        mean = _mean_layer(layer, self.blocks)
        decision = workspace.decide(mean, self.schedule, options.machine, mode=mode)
        (plan,) = expert_plans(layer, decision.schedule, [engine.rank])
        problem_log.say(options.log, decision, plan.schedule, self.purpose, engine.rank)
        keep_to_cap(engine, plan, options.workspace_bytes)
        agreed = known.text, str(layer.room), self.purpose
        return new_kind(workspace, plan, options, decision, agreed)

    def allocate(self, cached: CachedCall) -> Call:
        tensors = {name: plain(tensor) for name, tensor in self.operands.items()}
        engine, like, filled, unallocated = self.engine, self.like, None, frozenset[str]()
        if self.layer.exact:
            starts = _cached_starts(self.layer, self.blocks)
            landing = starts[LANDING[0]][engine.rank]
            filled = Filled(starts, ends_of(cached.groups, landing, like.device))
            unallocated = cached.whole if engine.keeps_made else unallocated
        for buffer in cached.plan.buffers:
            if buffer.memory in ("result", "local") and buffer.name not in unallocated:
                rows, cols = buffer.shapes[engine.rank]
                if filled is not None:
                    rows = int(filled.starts[buffer.name][engine.rank, -1])
                memory = like.new_empty(rows + (buffer.name == "out"), cols)
                tensors[buffer.name] = memory[:rows]
                if buffer.memory == "result":
                    self.results[buffer.name] = memory
        if "out" in self.results and not self.layer.exact:
            self.results["out"][-1].zero_()
        return Call(tensors, filled=filled)


def _engine(request: Request, tensor: torch.Tensor) -> Engine:
    return workspace_for(request.group, tensor.device, NAME, current()).engine


def _cached_starts(layer: ExpertLayer, blocks: Blocks) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return :func:`block_starts` of an exact layer, which its halves share."""
    if layer.gathers not in blocks.filled:
        blocks.filled[layer.gathers] = block_starts(layer, blocks.every)
    starts: dict[str, np.ndarray[Any, Any]] = blocks.filled[layer.gathers]
    return starts


# Rows of tokens in blocks.


def _dispatched(
    tokens: torch.Tensor, slots: torch.Tensor, blocks: Blocks, zeros: bool
) -> dict[str, torch.Tensor]:
    """Return the operand ``a``. For exact blocks it is the rows of all pairs, which the device
    gathers while the host waits for counts. Otherwise it is the tokens and a row index. Padding
    rows index a zero row if ``zeros``, else an arbitrary row."""
    if blocks.exact:
        return {"a": tokens.index_select(0, blocks.tokens(slots, 0))}
    if zeros or not tokens.shape[0]:
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
    return {"a": tokens, index_of("a"): blocks.tokens(slots, tokens.shape[0] - 1)}


def _weighted_rows(
    grad: torch.Tensor,
    slots: torch.Tensor,
    blocks: Blocks,
    weights: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a row for each pair: the gradient of its token, times its weight. Padding is zeros.
    Pairs without a row are written to an extra row, which is cut off; exact blocks have none."""
    count, columns = blocks.rows, grad.shape[1]
    if blocks.exact:
        rows = grad.new_empty(count, columns, dtype=dtype)
    else:
        rows = grad.new_zeros(count + 1, columns, dtype=dtype)
    for choice in range(slots.shape[1]):
        scaled = grad * weights[:, choice, None].to(grad.dtype)
        rows.index_copy_(0, slots[:, choice], scaled.to(dtype))
    return rows[:count]


def _returned_rows(rows: torch.Tensor, layer: ExpertLayer) -> torch.Tensor:
    """Return the rows that came back to this rank. If each rank sent a term of every row, sum the
    terms in the order of the ranks."""
    if not layer.gathers:
        return rows
    terms = rows[:-1].view(layer.world, -1, layer.n)
    total = rows.new_zeros(terms.shape[1] + 1, layer.n, dtype=wide_of(rows.dtype))
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
    """Sum the rows of each token's pairs, times their weights, in float32 or float64, and round
    once to ``dtype``. Uses the engine's kernel if it has one."""
    wide = wide_of(rows.dtype)
    shape, choices = (slots.shape[0], rows.shape[1]), slots.shape[1]
    if engine is not None and dtype == rows.dtype:
        out = rows.new_empty(shape)
        factors = None if weights is None else weights.float().contiguous()
        if engine.combine(out, rows, slots, factors):
            return out
    total = rows.new_zeros(shape, dtype=dtype or wide) if not choices else None
    for choice in range(choices):  # each pass adds in the wide dtype; the last one also rounds
        picked = rows.index_select(0, slots[:, choice])
        factor = None if weights is None else weights[:, choice, None].to(wide)
        last = choice == choices - 1
        out = rows.new_empty(shape, dtype=dtype or wide if last else wide)
        if total is None:
            total = out.copy_(picked) if factor is None else torch.mul(picked, factor, out=out)
        elif factor is None:
            total = torch.add(total, picked, out=out)
        else:
            total = torch.addcmul(total, picked, factor, out=out)
    assert total is not None
    return total


def _inner_products(rows: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the inner product of each pair's row with the gradient of its token, [t, top_k]."""
    chosen = (rows.index_select(0, choice).to(grad.dtype) for choice in slots.unbind(1))
    products = [(picked * grad).sum(1) for picked in chosen]
    return torch.stack(products, 1) if products else grad.new_zeros(slots.shape)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _expert_gradients(
    left: torch.Tensor,
    right: torch.Tensor,
    weights: torch.Tensor,
    layer: ExpertLayer,
    starts: Sequence[int] | None,
) -> torch.Tensor:
    """Return ``left.T @ right`` over the rows of each expert. ``starts``: first rows of the blocks
    of an exact layer; None for blocks of equal size."""
    if starts is None:
        left, right = (rows.view(weights.shape[0], -1, rows.shape[1]) for rows in (left, right))
        return left.transpose(1, 2) @ right
    grad = torch.empty_like(weights, memory_format=torch.contiguous_format)
    for i, (first, last) in enumerate(pairwise(starts[:: layer.world])):
        torch.mm(left[first:last].t(), right[first:last], out=grad[i])
    return grad


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
    if split not in SPLITS:
        raise ValueError(f"split: required one of {', '.join(SPLITS)}, got {split!r}")
    gathers = split == SPLITS[1]  # every rank gets the tokens of all ranks
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
    return _in_rounds(request, routing, operands)


def _in_rounds(
    request: Request, routing: Routing, operands: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the result of a layer: the sum of its rounds, in the dtype of the tokens."""
    request = request._replace(facts={**request.facts, "blocks": routing})
    slots_of_rounds = map(routing.slots, range(routing.rounds))
    rounds = (EXPERTS(request, (*operands, slots), traced=False) for slots in slots_of_rounds)
    return reduce(torch.add, rounds).to(operands[0].dtype)


def _function(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> str:
    """Return the function between the products; refuse operands that do not fit."""
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: required one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    check_dense(tokens=tokens, weights=weights, up=up, down=down)
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
        raise not_a_tensor("indices", indices)
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
        check_route(indices, _total(request, operands[2]), capacity, overflow)
        return EXPERTS_ALL.trace(request, (*operands, indices))
    if capacity is None or overflow != "drop":
        return EXPERTS_ALL.trace(request, (*operands, indices.indices))
    return EXPERTS.trace(request, (*operands, indices.slots()))


def _total(request: Request, up: torch.Tensor) -> int:
    """Return the number of experts of all ranks."""
    return up.shape[0] * (1 if request.facts["gathers"] else request.group.size())


def _blocks(request: Request, up: torch.Tensor) -> Blocks:
    """Return the blocks of a round: the routing's, or under a compiler those of a capacity."""
    facts = request.facts
    return facts["blocks"] if "blocks" in facts else Blocks(_total(request, up), facts["capacity"])


def _forward(request: Request, operands: Tensors, needs: Needs) -> Saved:
    *operands, slots = operands
    blocks = _blocks(request, operands[2])
    dtype = operands[0].dtype if blocks.rounds == 1 else None
    return run_round(request, blocks, slots, operands, needs[:4], dtype)


def _fake_forward(request: Request, operands: Tensors, needs: Needs) -> Saved:
    (tokens, _, up, down, _), gathers = operands, request.facts["gathers"]
    own = _total(request, up) * request.facts["capacity"]
    arrived = own * (request.group.size() if gathers else 1)
    summed = tokens.new_empty(tokens.shape[0], down.shape[2])
    dtype = wide_of(tokens.dtype) if gathers else tokens.dtype
    back = tokens.new_empty(own + 1, down.shape[2], dtype=dtype) if needs[1] else None
    if not (needs[0] or needs[2] or needs[3]):
        return summed, back
    return summed, back, *(tokens.new_empty(arrived, columns) for columns in up.shape[1:])


def _save(tensors: Tensors, needs: Needs) -> Saved:
    _, *operands, _, back, arrived, hidden = tensors
    return None, *operands, None, back, arrived, hidden


def _backward(request: Request, grad: torch.Tensor, saved: Any, needs: Needs) -> Tensors:
    _, weights, up, down, slots, _, *intermediates = saved
    operands, blocks = (weights, up, down), _blocks(request, up)
    gradients = round_gradients(request, blocks, slots, grad, operands, intermediates, needs[:4])
    return [gradient for gradient in gradients if gradient is not None]


def _fake_backward(request: Request, grad: torch.Tensor, saved: Any, needs: Needs) -> Tensors:
    _, weights, up, down, *_ = saved
    d_tokens = up.new_empty(grad.shape[0], up.shape[1])
    others = (operand.new_empty(operand.shape) for operand in (weights, up, down))
    gradients = zip((d_tokens, *others), needs, strict=False)
    return [gradient for gradient, need in gradients if need]


def _routed(request: Request, up: torch.Tensor, indices: torch.Tensor) -> Routing:
    capacity = request.facts["capacity"]
    overflow = "drop" if capacity is None else "again"
    return make_routing(indices, _total(request, up), capacity, overflow, request.group)


def _all_forward(request: Request, operands: Tensors, needs: Needs) -> Saved:
    *operands, indices = operands
    routing = _routed(request, operands[2], indices)
    return (_in_rounds(request, routing, operands),)


def _all_fake_forward(request: Request, operands: Tensors, needs: Needs) -> Saved:
    tokens, _, _, down, _ = operands
    return (tokens.new_empty(tokens.shape[0], down.shape[2]),)


def _all_save(tensors: Tensors, needs: Needs) -> Saved:
    *operands, _ = tensors
    return *operands, None


def _all_backward(request: Request, grad: torch.Tensor, saved: Any, needs: Needs) -> Tensors:
    """Sum the gradients of all rounds, the last round first, as autograd does. Only operands were
    saved, so the routing and each round's forward run again."""
    *operands, indices, _ = saved
    routing, total = _routed(request, operands[2], indices), None
    for turn in reversed(range(routing.rounds)):
        slots = routing.slots(turn)
        _, *intermediates = run_round(request, routing, slots, operands, needs[:4], None)
        inputs = grad, operands[1:], intermediates, needs[:4]
        parts = round_gradients(request, routing, slots, *inputs)
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
