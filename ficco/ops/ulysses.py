"""Attention by heads of a sequence that the ranks of a group share (DeepSpeed-Ulysses)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.compute.program import Call
from ficco.heuristics import decide
from ficco.ops import problem_log
from ficco.ops.attention import FACTS, asked_for, check_together, flops
from ficco.ops.autograd import Needs
from ficco.ops.entry import check_traced, tells_refusals, under_autocast
from ficco.ops.fit import keep_to_cap
from ficco.ops.operands import plain, process_group
from ficco.ops.record import Record, Request, stand_in
from ficco.options import Options, current
from ficco.problems.attention import AttentionProblem, HeadsProblem
from ficco.runtime.invoke import Invocation, invoke, new_kind
from ficco.runtime.workspace import CachedCall, Workspace
from ficco.schedules import Schedule
from ficco.schedules.heads import heads_plans

#: Name of the operator in errors and on the board.
NAME = "ulysses_attention"

#: Buffers that a forward keeps for its backward; heads only with ``options(save_gathered=True)``.
KEPT = ("kept lse", "kept q", "kept k", "kept v", "kept out")


@tells_refusals
def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
) -> torch.Tensor:
    """Attend to the whole sequence with a part of the heads on each rank (DeepSpeed-Ulysses,
    section 3).

    With W ranks that hold S/W positions of a sequence each, in the order of the ranks, it computes
    ``scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)`` over
    the whole sequence, for this rank's positions.

    ==========  ==========================================================================
    ``q``       [batch, heads, S/W, size]; W divides ``heads``
    ``k, v``    [batch, kv_heads, S/W, size]; ``kv_heads`` divides ``heads``
    result      [batch, heads, S/W, size]
    ==========  ==========================================================================

    Each rank gets all positions of ``heads / W`` heads from its peers, attends with the vendor's
    library and sends the results back. Attention runs on one group of heads while copy engines
    bring the next one; results travel back as soon as they are computed. A head of keys goes to
    every rank with a query head that uses it, so ``kv_heads`` may be smaller than W. Heads land
    where the library reads them. ``q``, ``k`` and ``v`` are copied before they travel unless each
    head is contiguous in the order [S/W, batch, size], as usual for a batch of 1. On a GPU the
    call is enqueued on the current stream and returns.

    Gradients of all three operands travel the same way; gradients of a head of keys are summed in
    float32. For the backward the call keeps its operands, result and log-sum-exp, which travel
    again. With ``options(save_gathered=True)`` it keeps the arrived heads and their result instead.
    The same operands must need gradients on every rank.

    Args:
        causal: a query attends to no later position.
        scale: factor of the scores; 1 / sqrt(size) by default.
        window: with ``causal``, a query attends to its own position and at most ``window`` earlier
            ones.
        cu_seqlens: first position of each packed sequence, followed by S; on the host. A query
            attends to its own sequence only.
        group: the ranks; the default group if None.
        schedule: ``"serial"``, ``"uniform-fused-1d"`` with ``pieces=`` groups of heads on each rank
            and ``copy=`` lanes, a :class:`Schedule`, or ``"auto"``: the fastest in simulation.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: the dtype.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call.
    """
    traced = check_traced(q=q, k=k, v=v)
    q, k, v = under_autocast(q, k, v)
    facts = asked_for(traced, causal, scale, window, cu_seqlens)
    return HEADS(Request(process_group(group), schedule, facts), (q, k, v), traced)


def _forward(
    request: Request, operands: Sequence[torch.Tensor], needs: Needs
) -> tuple[torch.Tensor, ...]:
    """Return the result. If a gradient is needed, also return the log-sum-exp and, with
    ``save_gathered``, the arrived heads, in the order of ``KEPT``."""
    q, k, v = operands
    saves = ("heads" if current().save_gathered else "shards") if any(needs) else ""
    invocation = HeadsCall(request, (q.shape, k.shape), {"q": q, "k": k, "v": v}, saves)
    invoke(request.group, invocation, q, "q")
    results = invocation.results
    return _by_batch(results["out"], q.shape), *(results[name] for name in KEPT if name in results)


def _save(tensors: Sequence[torch.Tensor], needs: Needs) -> Sequence[torch.Tensor]:
    """Return all tensors, which every gradient needs. If the arrived heads are kept, only the
    shapes of the operands and the result are saved."""
    if len(tensors) <= 5:
        return tensors
    return *map(stand_in, tensors[:4]), *tensors[4:]


def _backward(
    request: Request, grad: torch.Tensor, saved: Sequence[torch.Tensor], needs: Needs
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v, summed for heads of keys that several ranks have."""
    q, k, v, out, *kept = saved
    operands = {"grad": grad, **dict(zip(KEPT, kept, strict=False))}
    if len(kept) == 1:
        operands |= {"q": q, "k": k, "v": v, "out": out}
    saves = "shards" if len(kept) == 1 else "heads"
    invocation = HeadsCall(request, (q.shape, k.shape), operands, saves, backward=True)
    invoke(request.group, invocation, grad, "gradient")
    results = invocation.results
    heads, shared = q.shape[1] // request.group.size(), q.shape[1] // k.shape[1]
    owners = [
        key
        for first in range(0, q.shape[1], heads)
        for key in range(first // shared, (first + heads - 1) // shared + 1)
    ]
    dk, dv = (_summed(results[name], owners, k.shape[1]) for name in ("dk", "dv"))
    return _by_batch(results["dq"], q.shape), _by_batch(dk, k.shape), _by_batch(dv, k.shape)


def _summed(parts: torch.Tensor, owners: list[int], heads: int) -> torch.Tensor:
    """Sum the rows of each head in at least float32 and round once. Rows of a head are adjacent;
    ``owners``: head of each row."""
    if len(owners) == heads:
        return parts
    wide, sums = torch.promote_types(parts.dtype, torch.float32), parts[:heads].clone()
    for head in range(heads):
        first = owners.index(head)
        rows = parts[first : first + owners.count(head)]
        sums[head].copy_(rows.sum(0, dtype=wide))
    return sums


@dataclass(eq=False)
class HeadsCall(Invocation):
    """A call of attention by heads, or of its backward.

    Attributes:
        of: the request of the call.
        results: result tensors by name, rows of heads, once allocated.
    """

    of: Request
    shapes: tuple[torch.Size, torch.Size]
    operands: dict[str, torch.Tensor]
    saves: str
    backward: bool = False
    results: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.operator, self.purpose = NAME, NAME + " backward" * self.backward
        self.like = next(iter(self.operands.values()))

    def key(self, workspace: Workspace, options: Options) -> Hashable:
        if not self.backward:
            check_together(self.operands, self.of.schedule, self.of.facts)
        return (
            *(NAME, *self.shapes, self.like.dtype, self.of.schedule, *self.of.facts.values()),
            *(self.saves, self.backward, options.workspace_bytes, options.machine),
        )

    def plan(self, workspace: Workspace, options: Options) -> CachedCall:
        engine, (batch, heads, rows, size) = workspace.engine, self.shapes[0]
        sizes = engine.world, rows, batch, heads, self.shapes[1][1], size
        dtype = str(self.like.dtype).removeprefix("torch.")
        attention = AttentionProblem(*sizes, dtype, **self.of.facts, hosts=engine.hosts.count)
        problem = HeadsProblem(attention, saves=self.saves, backward=self.backward)
        known, mode = workspace.known(options.machine), "queued" if engine.asynchronous else "idle"
        decision = decide(problem, self.of.schedule, machine=known.machine, mode=mode)
        agreed = [known.text] * (self.of.schedule == "auto")
        (plan,) = heads_plans(problem, decision.schedule, [engine.rank])
        problem_log.say(options.log, decision, plan.schedule, "", engine.rank)
        keep_to_cap(engine, plan, options.workspace_bytes)
        return new_kind(workspace, plan, options, agreed, options.workspace_bytes is not None)

    def allocate(self, cached: CachedCall) -> Call:
        tensors = {
            name: plain(operand) if name.startswith("kept ") else _by_heads(plain(operand))
            for name, operand in self.operands.items()
        }
        for buffer in cached.plan.buffers:
            if buffer.memory in ("result", "local"):
                shape, dtype = cached.plan.shape(buffer.name), getattr(torch, buffer.dtype)
                tensors[buffer.name] = self.like.new_empty(shape, dtype=dtype)
                if buffer.memory == "result":
                    self.results[buffer.name] = tensors[buffer.name]
        return Call(tensors)


def _by_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, S/W, size] as rows of heads, [heads, S/W * batch * size]."""
    batch, heads, rows, size = tensor.shape
    matrix = tensor.permute(1, 2, 0, 3).reshape(heads, rows * batch * size)
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _by_batch(matrix: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return rows of heads as [batch, heads, S/W, size]."""
    batch, heads, rows, size = shape
    return matrix.view(heads, rows, batch, size).permute(2, 0, 1, 3)


# The operators that compilers see.


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, size = tensor.shape
    return tensor.new_empty(heads, rows, batch, size).permute(2, 0, 1, 3)


def _fake_forward(
    request: Request, operands: Sequence[torch.Tensor], needs: Needs
) -> tuple[torch.Tensor, ...]:
    q, k, v = operands
    check_together({"q": q, "k": k, "v": v}, request.schedule, request.facts)
    if not any(needs):
        return (_fake_like(q),)
    (batch, heads, rows, _), world = q.shape, request.group.size()
    wide = torch.promote_types(q.dtype, torch.float32)
    return _fake_like(q), q.new_empty(heads // world, world * rows * batch, dtype=wide)


def _fake_backward(
    request: Request, grad: torch.Tensor, saved: Sequence[torch.Tensor], needs: Needs
) -> list[torch.Tensor]:
    return [_fake_like(operand) for operand in saved[:3]]


HEADS = Record(
    NAME,
    ("q", "k", "v"),
    FACTS,
    ("lse",),
    _forward,
    _fake_forward,
    _save,
    _backward,
    _fake_backward,
    lambda gradients, needs: gradients,
    flops,
)
