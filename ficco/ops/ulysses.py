"""Attention by heads of a sequence that the ranks of a group share (DeepSpeed-Ulysses), and the
projections around it, fused with its exchanges.

In projections, rows that travel are channels, grouped by rank and head; columns are positions. So
the projection of queries, keys and values is a ``matmul_all_to_all`` of the weights with the
transposed input, and the output projection an ``all_to_all_transposed_matmul``. Matrices that
travel are stored transposed, position after position, which is the layout of attention libraries.

============  ======================================  ====================================
gradient of   ``ulysses_project``                     ``ulysses_output``
============  ======================================  ====================================
the operand   ``all_to_all_transposed_matmul``        ``matmul_all_to_all``
the weights   ``all_to_all_matmul``                   ``all_to_all_matmul``
============  ======================================  ====================================
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.compute.program import Call
from ficco.ops import problem_log
from ficco.ops.attention import FACTS, asked_for, check_together, flops
from ficco.ops.call import keep_to_cap, plain, row_major
from ficco.ops.call import run_unwatched as run
from ficco.ops.entry import check_traced, tells_refusals, under_autocast
from ficco.ops.operands import process_group
from ficco.ops.record import Needs, Record, Request, Saved, Shapes, Tensors, stand_in
from ficco.options import Options, current
from ficco.problems.attention import AttentionProblem, HeadsProblem, keys_of
from ficco.runtime.calls import Invocation, invoke, new_kind
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
        scale: factor of the scores, above 0 if ``causal``; 1 / sqrt(size) by default.
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


def _forward(request: Request, operands: Tensors, needs: Needs) -> Saved:
    """Return the result. If a gradient is needed, also return the log-sum-exp and, with
    ``save_gathered``, the arrived heads, in the order of ``KEPT``."""
    q, k, v = operands
    saves = ("heads" if current().save_gathered else "shards") if any(needs) else ""
    invocation = HeadsCall(request, (q.shape, k.shape), {"q": q, "k": k, "v": v}, saves)
    invoke(request.group, invocation, q, current())
    results = invocation.results
    return _by_batch(results["out"], q.shape), *(results[name] for name in KEPT if name in results)


def _save(tensors: Tensors, needs: Needs) -> Saved:
    """Return all tensors, which every gradient needs. If the arrived heads are kept, only the
    shapes of the operands and the result are saved."""
    if len(tensors) <= 5:
        return tensors
    return *map(stand_in, tensors[:4]), *tensors[4:]


def _backward(request: Request, grad: torch.Tensor, saved: Any, needs: Needs) -> Tensors:
    """Return the gradients of q, k and v, summed for heads of keys that several ranks have."""
    q, k, v, out, *intermediates = saved
    operands = {"grad": grad, **dict(zip(KEPT, intermediates, strict=False))}
    if len(intermediates) == 1:
        operands |= {"q": q, "k": k, "v": v, "out": out}
    saves = "shards" if len(intermediates) == 1 else "heads"
    invocation = HeadsCall(request, (q.shape, k.shape), operands, saves, backward=True)
    invoke(request.group, invocation, grad, current())
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
        facts: dict[str, Any] = {**self.of.facts, **engine.group_facts}
        attention = AttentionProblem(*sizes, dtype, **facts)
        problem = HeadsProblem(attention, saves=self.saves, backward=self.backward)
        known, mode = workspace.known(options.machine), "queued" if engine.asynchronous else "idle"
        decision = workspace.decide(problem, self.of.schedule, options.machine, mode=mode)
        agreed = [known.text] * (self.of.schedule == "auto")
        (plan,) = heads_plans(problem, decision.schedule, [engine.rank])
        problem_log.say(options.log, decision, plan.schedule, "", engine.rank)
        keep_to_cap(engine, plan, options.workspace_bytes)
        return new_kind(workspace, plan, options, decision, agreed)

    def allocate(self, cached: CachedCall) -> Call:
        tensors = {
            name: plain(operand) if name.startswith("kept ") else _by_heads(operand)
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
    return row_major(tensor.permute(1, 2, 0, 3).reshape(heads, rows * batch * size))


def _by_batch(matrix: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return rows of heads as [batch, heads, S/W, size]."""
    batch, heads, rows, size = shape
    return matrix.view(heads, rows, batch, size).permute(2, 0, 1, 3)


# The operators that compilers see.


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, size = tensor.shape
    return tensor.new_empty(heads, rows, batch, size).permute(2, 0, 1, 3)


def _fake_forward(request: Request, operands: Tensors, needs: Needs) -> Saved:
    q, k, v = operands
    check_together({"q": q, "k": k, "v": v}, request.schedule, request.facts)
    if not any(needs):
        return (_fake_like(q),)
    (batch, heads, rows, _), world = q.shape, request.group.size()
    wide = torch.promote_types(q.dtype, torch.float32)
    return _fake_like(q), q.new_empty(heads // world, world * rows * batch, dtype=wide)


def _fake_backward(request: Request, grad: torch.Tensor, saved: Any, needs: Needs) -> Tensors:
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


#: Names of the operators in errors and on the board.
PROJECT, OUTPUT = "ulysses_project", "ulysses_output"


@tells_refusals
def ulysses_project(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    *,
    size: int,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the queries, keys and values of a rank's heads at all positions (DeepSpeed-Ulysses,
    section 3), from an input sharded by positions. With W ranks it computes, for its heads::

        x_whole = torch.cat([the x of each rank], dim=1)  # [batch, S, features]
        q, k, v = (functional.linear(x_whole, weight) for weight in (q_weight, k_weight, v_weight))

    ======================  ===================================================================
    ``x``                   [batch, S/W, features], this rank's positions
    ``q_weight``            [heads * size, features], as ``nn.Linear`` has it; W divides heads
    ``k_weight, v_weight``  [kv_heads * size, features]; ``kv_heads`` divides heads
    q                       [batch, heads/W, S, size]: the heads of rank r start at r * heads/W
    k, v                    [batch, n, S, size]: the n heads that these queries attend to, for
                            ``scaled_dot_product_attention(..., enable_gqa=True)``
    ======================  ===================================================================

    Each rank multiplies its positions by the weights of a peer's heads, and a copy engine sends the
    product while the next one is computed (:func:`ficco.matmul_all_to_all`). Results are stored
    [S, batch, heads, size], which attention libraries read by strides: no pass reorders them. A
    head of keys that several ranks use is computed and sent for each of them. Each call copies the
    weights into the order of the ranks. It also copies ``x`` for a batch of more than 1, unless
    memory holds it as [S/W, batch, features].

    All operands have gradients. A weight's gradient covers this rank's positions, as under data
    parallelism. All ranks need gradients of the same operands. The gradients of q, k and v are
    copied once, into one tensor. On a GPU the call is enqueued on the current stream and returns.

    Args:
        size: number of channels of a head.
        group: the ranks; the default group if None.
        schedule: of a :func:`ficco.matmul_all_to_all`: a name, a :class:`Schedule` or ``"auto"``.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: the dtype.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call.
    """
    operands = {"x": x, "q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}
    traced, group = check_traced(**operands), process_group(group)
    operands = dict(zip(operands, under_autocast(*operands.values()), strict=True))
    _check_project(size, group, operands)
    x, *weights = operands.values()
    request = Request(group, schedule, {"size": size, "batch": x.shape[0]})
    keys = _Shares.of(request, weights[0].shape, weights[1].shape).keys_each
    rows = x.transpose(0, 1).flatten(0, 1)  # [S/W * batch, features]
    heads = PROJECTION(request, (rows, *weights), traced)
    return _split(heads.unflatten(0, (-1, x.shape[0])), keys)


@tells_refusals
def ulysses_output(
    out: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
) -> torch.Tensor:
    """Return the output projection of attention by heads, at this rank's positions
    (DeepSpeed-Ulysses, section 3). With W ranks it computes, for its positions::

        whole = torch.cat([the out of each rank], dim=1)  # [batch, heads, S, size]
        functional.linear(whole.transpose(1, 2).flatten(2), weight)

    ===========  =====================================================================
    ``out``      [batch, heads/W, S, size], the attention of this rank's heads
    ``weight``   [features, heads * size], as ``nn.Linear`` has it
    result       [batch, S/W, features]
    ===========  =====================================================================

    Copy engines bring each rank its positions of the peers' heads. The products of arrived heads
    are summed in float32 (:func:`ficco.all_to_all_transposed_matmul`). ``out`` is read in place if
    memory holds it as [S, batch, heads/W, size], as from flash attention for a batch of 1; other
    orders are copied first. On a GPU the call is enqueued on the current stream and returns.

    Both operands have gradients. The weight's gradient covers this rank's positions; ``out``
    travels again for it. All ranks need gradients of the same operands.

    Args:
        group: the ranks; the default group if None.
        schedule: of a :func:`ficco.all_to_all_transposed_matmul`: a name, a :class:`Schedule` or
            ``"auto"``.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: the dtype.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call.
    """
    traced, group = check_traced(out=out, weight=weight), process_group(group)
    out, weight = under_autocast(out, weight)
    _check_output(group, {"out": out, "weight": weight})
    (batch, heads, positions, size), world = out.shape, group.size()
    request = Request(group, schedule, {"heads": heads, "batch": batch})
    # Rows of positions, one block for each rank.
    rows = out.permute(2, 0, 1, 3)
    blocks = rows.reshape(world, positions // world * batch, heads * size)
    y = OUTPUT_PROJECTION(request, (blocks, weight), traced)  # [S/W * batch, features]
    return y.view(-1, batch, y.shape[1]).transpose(0, 1)


def _check_project(size: int, group: ProcessGroup, operands: Mapping[str, torch.Tensor]) -> None:
    (x, q, k, v), world = operands.values(), group.size()
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"size: required that of a head, at least 1, got {size!r}")
    if x.dim() != 3 or not x.shape[0]:
        raise ValueError(
            f"x: required [batch, S/W, features], a batch of at least 1, got {list(x.shape)}; "
            "reshape it"
        )
    for name, tensor in list(operands.items())[1:]:
        rows = tensor.shape[0] if tensor.dim() == 2 else 0
        if tensor.dim() != 2 or tensor.shape[1] != x.shape[2] or not rows or rows % size:
            raise ValueError(
                f"{name}: required [heads * size, features], heads of {size} and {x.shape[2]} "
                f"features as x has, got {list(tensor.shape)}; pass the weight of an nn.Linear"
            )
    heads, kv_heads = q.shape[0] // size, k.shape[0] // size
    if k.shape != v.shape or heads % kv_heads:
        raise ValueError(
            f"k_weight, v_weight: required as many heads of both, a divisor of the {heads} of "
            f"q_weight, got {kv_heads} and {v.shape[0] // size}; pass those of one layer"
        )
    if heads % world:
        raise ValueError(
            f"q_weight: required a number of heads that the {world} ranks share equally, got "
            f"{heads}; use fewer ranks, or ficco.all_gather_attention"
        )
    _check_alike(operands)


def _check_output(group: ProcessGroup, operands: Mapping[str, torch.Tensor]) -> None:
    (out, weight), world = operands.values(), group.size()
    if out.dim() != 4 or not out.shape[0] or out.shape[2] % world:
        raise ValueError(
            f"out: required [batch, heads/W, S, size], positions that the {world} ranks share "
            f"equally, got {list(out.shape)}; reshape it"
        )
    channels = out.shape[1] * out.shape[3] * world
    if weight.dim() != 2 or not weight.shape[0] or weight.shape[1] != channels:
        raise ValueError(
            f"weight: required [features, {channels}], at least 1 feature of the heads of all "
            f"{world} ranks, got {list(weight.shape)}; pass the weight of an nn.Linear"
        )
    _check_alike(operands)


def _check_alike(operands: Mapping[str, torch.Tensor]) -> None:
    first = next(iter(operands.values()))
    for name, tensor in operands.items():
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{name}: required {first.dtype} on {first.device}, as {next(iter(operands))} is, "
                f"got {tensor.dtype} on {tensor.device}; convert it"
            )


def _purpose(operator: str, names: Sequence[str], needs: Sequence[bool]) -> str:
    needed = " and ".join(name for name, need in zip(names, needs, strict=True) if need)
    return f"for the gradients of {needed} of {operator}"


def _split(heads: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split heads [S, batch, heads, size] into queries, ``keys`` keys and as many values, each as
    [batch, heads, S, size]."""
    sizes = heads.shape[2] - 2 * keys, keys, keys
    q, k, v = heads.unsafe_split_with_sizes(sizes, 2)  # unsafe: each may be changed in place
    return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


class _Shares(NamedTuple):
    """The channels of each rank: those of its heads of queries, keys and values."""

    world: int
    rank: int
    heads_in_all: int
    kv_heads: int
    size: int

    @classmethod
    def of(cls, request: Request, q: Sequence[int], k: Sequence[int]) -> _Shares:
        """Return the shares for two shapes of weights. A compiler must know the number of heads."""
        size = request.facts["size"]
        heads, keys = int(q[0] // size), int(k[0] // size)
        return cls(request.group.size(), request.group.rank(), heads, keys, size)

    def keys(self, rank: int) -> list[int]:
        return keys_of(rank, self.world, self.heads_in_all, self.kv_heads)

    @property
    def queries_each(self) -> int:
        """Number of heads of queries of a rank."""
        return self.heads_in_all // self.world

    @property
    def keys_each(self) -> int:
        """Number of heads of keys of this rank."""
        return len(self.keys(self.rank))

    @property
    def channels(self) -> tuple[int, ...]:
        """Number of channels of each rank."""
        ranks = range(self.world)
        return tuple((self.queries_each + 2 * len(self.keys(rank))) * self.size for rank in ranks)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield runs of adjacent heads in the order of the ranks: weight, first head and end."""
        for rank in range(self.world):
            yield 0, rank * self.queries_each, (rank + 1) * self.queries_each
            keys = self.keys(rank)
            adjacent = keys == list(range(keys[0], keys[-1] + 1))
            for weight in (1, 2):
                if adjacent:
                    yield weight, keys[0], keys[-1] + 1
                else:
                    yield from ((weight, key, key + 1) for key in keys)

    def packed(self, *weights: torch.Tensor) -> torch.Tensor:
        """Return the rows of the weights in the order of the ranks."""
        size, runs = self.size, self.runs()
        return torch.cat([weights[i][first * size : last * size] for i, first, last in runs])

    def unpacked(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the weights' gradients, from rows in the order of the ranks. The rows of a head
        that several ranks have are summed in at least float32, and rounded once."""
        counts = self.heads_in_all, self.kv_heads, self.kv_heads
        parts: list[list[list[torch.Tensor]]] = [[[] for _ in range(count)] for count in counts]
        rows = iter(packed.split(self.size))
        for weight, first, last in self.runs():
            for head in range(first, last):
                parts[weight][head].append(next(rows))
        wide = torch.promote_types(packed.dtype, torch.float32)

        def summed(terms: list[torch.Tensor]) -> torch.Tensor:
            if len(terms) == 1:
                return terms[0]
            return torch.stack(terms).sum(0, dtype=wide).to(packed.dtype)

        return [torch.cat([summed(terms) for terms in heads]) for heads in parts]


# The records. Their first operands are rows of positions, and blocks of rows of positions.


def _run(
    request: Request,
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    rows: Any = None,
    gathers: bool = False,
    out: torch.Tensor | None = None,
    purpose: str = "",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run an operator whose travelling matrix is stored transposed."""
    arguments = request.group, request.schedule, rows, gathers, out, purpose
    return run(operator, a, b, *arguments, transposed=True)


def _save_rows(tensors: Tensors, needs: Needs) -> Saved:
    """Return the first operand if a weight needs a gradient, and the weights, or only their shapes
    if the first operand needs no gradient."""
    first, *weights, _ = tensors
    if not needs[0]:
        weights = [stand_in(weight) for weight in weights]
    return first if any(needs[1:]) else None, *weights, None


def _project(request: Request, operands: Tensors, needs: Needs) -> Saved:
    """Return this rank's heads of queries, then keys, then values at all positions, [S * batch,
    heads, size]. Operands: rows of this rank's positions, and the weights of all heads."""
    rows, *weights = operands
    shares = _Shares.of(request, weights[0].shape, weights[1].shape)
    table = (shares.channels,) * shares.world
    purpose = (
        f"for {PROJECT} of {shares.heads_in_all} heads, {shares.kv_heads} of keys, size "
        f"{shares.size}, batch {request.facts['batch']}"
    )
    packed = shares.packed(*weights)
    blocks, _ = _run(request, "matmul_all_to_all", packed, rows.t(), table, purpose=purpose)
    return (blocks.transpose(1, 2).reshape(-1, blocks.shape[1] // shares.size, shares.size),)


def _fake_project(request: Request, operands: Tensors, needs: Needs) -> Saved:
    rows, *weights = operands
    shares = _Shares.of(request, weights[0].shape, weights[1].shape)
    heads = shares.queries_each + 2 * shares.keys_each
    return (rows.new_empty(shares.world * rows.shape[0], heads, shares.size),)


def _project_backward(request: Request, grad: torch.Tensor, saved: Any, needs: Needs) -> Tensors:
    """Return the gradients of the rows, which need all weights, and of each weight, which need the
    rows. ``grad``: of the result of :func:`_project`."""
    rows, *weights, _ = saved
    shares = _Shares.of(request, weights[0].shape, weights[1].shape)
    blocks = grad.contiguous().view(shares.world, -1, shares.channels[shares.rank])
    blocks, packed = blocks.transpose(1, 2), shares.packed(*weights) if needs[0] else None
    table = tuple((channels,) * shares.world for channels in shares.channels)
    purpose = _purpose(PROJECT, PROJECTION.operands, needs)
    if rows is None:
        assert packed is not None
        operator = "all_to_all_transposed_matmul"
        return [_run(request, operator, blocks, packed, table, purpose=purpose)[0]]
    d_packed, gathered = _run(
        request, "all_to_all_matmul", blocks, rows, table, packed is not None, purpose=purpose
    )
    gradients = [None, *shares.unpacked(d_packed)]
    if packed is not None and gathered is not None:
        gradients[0] = torch.mm(gathered.t(), packed)
    needed = (grad for grad, need in zip(gradients, needs, strict=True) if need)
    return [gradient for gradient in needed if gradient is not None]


def _fake_project_backward(
    request: Request, grad: torch.Tensor, saved: Any, needs: Needs
) -> Tensors:
    (_, *weights, _), world = saved, request.group.size()
    shapes = (grad.shape[0] // world, weights[0].shape[1]), *(weight.shape for weight in weights)
    return [grad.new_empty(shape) for shape, need in zip(shapes, needs, strict=True) if need]


def _output(request: Request, operands: Tensors, needs: Needs) -> Saved:
    """Return the projection at this rank's positions, [S/W * batch, features]."""
    blocks, weight = operands
    facts, operator = request.facts, "all_to_all_transposed_matmul"
    purpose = f"for {OUTPUT} of {facts['heads']} heads a rank, batch {facts['batch']}"
    return _run(request, operator, blocks.transpose(1, 2), weight.t(), purpose=purpose)[:1]


def _fake_output(request: Request, operands: Tensors, needs: Needs) -> Saved:
    blocks, weight = operands
    return (blocks.new_empty(blocks.shape[1], weight.shape[0]),)


def _output_backward(request: Request, grad: torch.Tensor, saved: Any, needs: Needs) -> Tensors:
    """Return the gradients of the blocks, which need the weight, and of the weight, which need the
    blocks."""
    (blocks, weight, _), gradients = saved, []
    purpose = _purpose(OUTPUT, OUTPUT_PROJECTION.operands, needs)
    if needs[0]:
        sent, _ = _run(request, "matmul_all_to_all", weight.t(), grad.t(), purpose=purpose)
        gradients.append(sent.transpose(1, 2))
    if needs[1]:
        d_weight = grad.new_empty(grad.shape[1], blocks.shape[0] * blocks.shape[2])
        arguments = "all_to_all_matmul", blocks.transpose(1, 2), grad, None, False, d_weight.t()
        _run(request, *arguments, purpose=purpose)
        gradients.append(d_weight)
    return gradients


def _fake_output_backward(
    request: Request, grad: torch.Tensor, saved: Any, needs: Needs
) -> Tensors:
    (_, weight, _), world = saved, request.group.size()
    shapes = (world, grad.shape[0], weight.shape[1] // world), weight.shape
    return [grad.new_empty(shape) for shape, need in zip(shapes, needs, strict=True) if need]


def _project_flops(
    request: Request, shapes: Shapes, result: Sequence[int], needs: Needs | None
) -> int:
    """Count products of this rank's positions with the weights of all heads."""
    (_, q, k, _), world = shapes, request.group.size()
    products = 1 if needs is None else needs[0] + any(needs[1:])
    channels = sum(_Shares.of(request, q, k).channels)
    return 2 * products * result[0] // world * q[1] * channels


def _output_flops(
    request: Request, shapes: Shapes, result: Sequence[int], needs: Needs | None
) -> int:
    features, channels = shapes[1]
    return 2 * (1 if needs is None else sum(needs)) * result[0] * features * channels


PROJECTION = Record(
    PROJECT,
    ("x", "q_weight", "k_weight", "v_weight"),
    {"size": "int", "batch": "SymInt"},
    (),
    _project,
    _fake_project,
    _save_rows,
    _project_backward,
    _fake_project_backward,
    flops=_project_flops,
)

OUTPUT_PROJECTION = Record(
    OUTPUT,
    ("out", "weight"),
    {"heads": "SymInt", "batch": "SymInt"},
    (),
    _output,
    _fake_output,
    _save_rows,
    _output_backward,
    _fake_output_backward,
    flops=_output_flops,
)
