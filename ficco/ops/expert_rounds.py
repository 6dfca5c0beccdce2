"""One round of an expert-parallel layer, and its gradients, as Plans and what surrounds them.

What depends on the routing is done by PyTorch, before and after a Plan: tokens are copied to the
rows that they have for their experts, and what comes back is summed by the router's weights. The
backward is the same exchange twice. Let g be the gradient of the result, and s the row of a token's
pair:

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

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup

from ficco.compute.products import ACTIVATIONS
from ficco.compute.program import Call, Filled, Groups
from ficco.compute.ragged_blocks import ends_of, groups_of, index_of, made_whole
from ficco.dma.engine import Engine
from ficco.heuristics import decide
from ficco.ops import problem_log
from ficco.ops.autograd import Needs
from ficco.ops.entry import tells_refusals
from ficco.ops.fit import keep_to_cap
from ficco.ops.operands import plain
from ficco.ops.routing import Blocks, rounded
from ficco.options import Options, current
from ficco.problems.experts import LANDING, ExpertLayer, block_starts
from ficco.problems.specification import FUNCTIONS
from ficco.runtime.invoke import Invocation, invoke, new_kind
from ficco.runtime.workspace import CachedCall, Workspace, workspace_for
from ficco.schedules import Schedule
from ficco.schedules.experts import expert_plans

#: What errors and the board call it.
NAME = "experts"

#: Layers of calls: few kinds of them.
_known = lru_cache(maxsize=256)(ExpertLayer)


class ExpertCall(NamedTuple):
    """What a call is, without its operands."""

    group: ProcessGroup
    schedule: str | Schedule
    function: str
    gathers: bool


class ExpertRound(NamedTuple):
    """One round.

    Attributes:
        summed: [t, n], the weighted sums.
        back: the rows that came back, with one of zeros, if the weights need a gradient.
        arrived, hidden: the rows that arrived, and their products with ``up``, if anything else
            needs one.
    """

    summed: torch.Tensor
    back: torch.Tensor | None
    arrived: torch.Tensor | None
    hidden: torch.Tensor | None


@tells_refusals
def run_round(
    call: ExpertCall,
    blocks: Blocks,
    slots: torch.Tensor,
    operands: Sequence[torch.Tensor],
    needs: Needs,
    dtype: torch.dtype | None,
) -> ExpertRound:
    """One round of tokens, weights, up and down, with what the gradients that these need are made
    of. ``dtype``: that to which its sums are rounded."""
    tokens, weights, up, down = operands
    of_tokens, of_weights, of_up, of_down = needs
    keeps = of_tokens or of_up or of_down
    # What no token has is multiplied by zeros in the backward: it must be finite.
    given = {**_sent(tokens, slots, blocks, keeps), "b": up, "c": down}
    layer = _layer(NAME, call, blocks, tokens, up, down, keeps)  # may wait for counts
    made = _run(layer, call, blocks, given)
    back = _terms(made["out"], layer)
    summed = weighted_sum(back, slots, weights, dtype, _engine(call, tokens))
    return ExpertRound(
        summed, back if of_weights else None, made.get("gathered"), made.get("hidden")
    )


@tells_refusals
def round_gradients(
    call: ExpertCall,
    blocks: Blocks,
    slots: torch.Tensor,
    grad: torch.Tensor,
    operands: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor | None],
    needs: Needs,
) -> list[torch.Tensor | None]:
    """The gradients of tokens, weights, up and down that are needed, of that of a round's sums; of
    the last three operands, and of what the round kept."""
    (weights, up, down), (back, arrived, hidden) = operands, kept
    of_tokens, of_weights, of_up, of_down = needs
    grad, dtype = grad.to(wide_of(grad.dtype)), up.dtype
    d_tokens = d_weights = d_up = d_down = None
    if back is not None and of_weights:
        d_weights = _inner(back, slots, grad).to(weights.dtype)
    if not (of_tokens or of_up or of_down):
        return [None, d_weights, None, None]
    assert arrived is not None and hidden is not None
    d_out = _leaving(grad, slots, blocks, weights, dtype)
    down_t, up_t = down.transpose(1, 2), up.transpose(1, 2)
    layer = _layer("dispatch_matmul", call, blocks, d_out, down_t, None, of_down)
    made = _run(layer, call, blocks, {"a": d_out, "b": down_t}, "gradients")
    active, d_hidden = _derived(call.function, hidden, made["hidden"])
    if of_tokens:
        layer = _layer("matmul_combine", call, blocks, d_hidden, None, up_t, False)
        given = {"active": d_hidden, "c": up_t}
        terms = _terms(_run(layer, call, blocks, given, "gradients")["out"], layer)
        d_tokens = weighted_sum(terms, slots, dtype=dtype, engine=_engine(call, grad))
    rank, starts = call.group.rank(), None
    if blocks.exact:
        starts = _starts(layer, blocks)[LANDING[0]][rank].tolist()
    if of_up:
        d_up = _of_weights(arrived, d_hidden, up, layer, starts)
    if of_down:
        d_down = _of_weights(active, made["gathered"], down, layer, starts)
    return [d_tokens, d_weights, d_up, d_down]


def _derived(
    function: str, hidden: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A function of rows, and the gradient of these of that of the result. Autograd does not record
    inside operators."""
    name, gates = FUNCTIONS[function]
    activation = ACTIVATIONS[name]
    if not gates:
        return activation.of(hidden), activation.derivative(grad, hidden)
    gate, rest = hidden.chunk(2, 1)
    through = activation.of(gate)
    of_gate = activation.derivative(grad * rest, gate)
    return through * rest, torch.cat([of_gate, grad * through], 1)


def _layer(
    operator: str,
    call: ExpertCall,
    blocks: Blocks,
    left: torch.Tensor,
    b: torch.Tensor | None,
    c: torch.Tensor | None,
    keeps: bool,
) -> ExpertLayer:
    some = b if b is not None else c
    assert some is not None
    k, h, n = left.shape[1] if b is not None else 0, some.shape[2], 0
    if c is not None:
        h, n = c.shape[1:]
    dtype = str(left.dtype).removeprefix("torch.")
    function = call.function if operator == NAME else ""
    each = some.shape[0]
    sizes = call.group.size(), each, blocks.capacity, k, h, n
    flags = keeps, call.gathers, blocks.exact, operator == NAME and not blocks.exact
    room = _room(blocks, each, call.gathers) if blocks.exact else (0, 0)
    hosts = _engine(call, left).hosts.count
    return _known(operator, *sizes, dtype, function, *flags, room, hosts)


def _usual(layer: ExpertLayer, blocks: Blocks) -> ExpertLayer:
    """The layer by which a schedule is chosen: blocks of an exact one are as large as the mean of
    all, not as the largest."""
    if not layer.exact:
        return layer
    pairs, blocks_of_all = int(blocks.every.sum()), blocks.every.size
    return replace(layer, capacity=max(-(-pairs // blocks_of_all), 1))


def _room(blocks: Blocks, experts: int, gathers: bool) -> tuple[int, int]:
    """The most rows that any rank multiplies, and gets back, rounded up: few numbers."""
    sent = blocks.every.sum(1)
    most = int(sent.max())
    if gathers:
        return rounded(int(sent.sum())), rounded(len(sent) * most)
    there = blocks.every.sum(0).reshape(-1, experts).sum(1)
    return rounded(int(there.max())), rounded(most)


def _run(
    layer: ExpertLayer,
    given: ExpertCall,
    blocks: Blocks,
    operands: dict[str, torch.Tensor],
    purpose: str = "",
) -> dict[str, torch.Tensor]:
    """Run a layer, or a half of one; returns its results by name. The result has one more row at
    its end, of zeros if there are pairs without a row, which read it."""
    invocation = RoundCall(layer, given.schedule, blocks, operands, purpose)
    invoke(given.group, invocation, invocation.like, "tokens")
    return invocation.results


@dataclass(eq=False)
class RoundCall(Invocation):
    """A call of a layer of experts, or of a half of one.

    Attributes:
        results: by name, once allocated.
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
        given = options.workspace_bytes, options.machine, self.like.device
        return NAME, layer, layer.room, self.schedule, *given

    def plan(self, workspace: Workspace, options: Options) -> ExpertKind:
        engine, layer, known = workspace.engine, self.layer, workspace.known(options.machine)
        mode = "idle" if layer.exact else "queued"  # the host has waited for the device
        usual = _usual(layer, self.blocks)
        decision = decide(usual, self.schedule, machine=known.machine, mode=mode)
        (plan,) = expert_plans(layer, decision.schedule, [engine.rank])
        problem_log.say(options.log, decision, plan.schedule, self.purpose, engine.rank)
        keep_to_cap(engine, plan, options.workspace_bytes)
        single, agreed = options.workspace_bytes is not None, [known.text, str(layer.room)]
        return new_kind(workspace, plan, options, [*agreed, self.purpose], single, kind=ExpertKind)

    def allocate(self, cached: CachedCall) -> Call:
        assert isinstance(cached, ExpertKind)
        tensors = {name: plain(tensor) for name, tensor in self.operands.items()}
        engine, like, filled, whole = self.engine, self.like, None, frozenset[str]()
        if self.layer.exact:
            starts = _starts(self.layer, self.blocks)
            landing = starts[LANDING[0]][engine.rank]
            filled = Filled(starts, ends_of(cached.groups, landing, like.device))
            whole = cached.whole if engine.keeps_made else whole
        for buffer in cached.plan.buffers:
            if buffer.memory in ("result", "local") and buffer.name not in whole:
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


def _engine(call: ExpertCall, tensor: torch.Tensor) -> Engine:
    return workspace_for(call.group, tensor, "tokens", NAME, current()).engine


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


def _starts(layer: ExpertLayer, blocks: Blocks) -> Mapping[str, np.ndarray[Any, Any]]:
    """What calls of an exact layer, and of its halves, have before each block."""
    if layer.gathers not in blocks.filled:
        blocks.filled[layer.gathers] = block_starts(layer, blocks.every)
    found: dict[str, np.ndarray[Any, Any]] = blocks.filled[layer.gathers]
    return found


# What depends on the blocks.


def _sent(
    tokens: torch.Tensor, slots: torch.Tensor, blocks: Blocks, zeros: bool
) -> dict[str, torch.Tensor]:
    """What ``a`` is: the rows of all pairs, where there are exactly these, which a device brings
    there while the host waits for counts. Else tokens, and which of them each row of a block is;
    where it is none it is zeros or, unless these are asked for, any."""
    many = tokens.shape[0]
    if blocks.exact:
        return {"a": tokens.index_select(0, blocks.tokens(slots, 0))}
    if zeros or not many:
        tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
    return {"a": tokens, index_of("a"): blocks.tokens(slots, tokens.shape[0] - 1)}


def _leaving(
    grad: torch.Tensor,
    slots: torch.Tensor,
    blocks: Blocks,
    weights: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The rows of all pairs, those of a gradient times their weights."""
    if not blocks.exact:
        return spread(grad, slots, blocks.rows, weights, dtype)
    rows = grad.new_empty(blocks.rows, grad.shape[1], dtype=dtype)
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
    """The sum of the rows of each token's pairs, by their weights, in float32 or float64; rounded
    once if that is not the dtype. An engine may have a kernel for it."""
    wide = wide_of(rows.dtype)
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


def wide_of(dtype: torch.dtype) -> torch.dtype:
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
