"""Attention over a sequence that the ranks of a group share, also in place of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from numbers import Integral, Real
from operator import index
from typing import Any

import torch
from torch.backends import mha
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils import checkpoint

from ficco.compute.attention import Result
from ficco.compute.program import Call, Symmetric
from ficco.errors import InvalidArgument
from ficco.ops import problem_log
from ficco.ops.call import keep_to_cap, ring
from ficco.ops.entry import check_traced, tells_refusals, under_autocast
from ficco.ops.operands import bounds_of, check_bounds, no_schedule, process_group
from ficco.ops.record import Needs, Record, Request, Saved, Shapes, Tensors, stand_in
from ficco.options import Options, current
from ficco.plan import Plan
from ficco.problems.attention import AttentionProblem
from ficco.problems.mask import PLACEMENTS
from ficco.runtime.calls import Invocation, invoke, new_kind
from ficco.runtime.workspace import CachedCall, Workspace
from ficco.schedules import Schedule
from ficco.schedules.attention import attention_plans

#: Name of the operator in errors and on the board.
NAME = "all_gather_attention"

#: On GPUs, the largest head size, and the number that head sizes are multiples of.
MOST_SIZE, MULTIPLE = 256, 8

#: Largest scale of scores, in C++ a double.
MOST_SCALE = torch.finfo(torch.float64).max


@tells_refusals
def all_gather_attention(
    q: torch.Tensor,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    placement: str = PLACEMENTS[0],
    window: int | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
) -> torch.Tensor:
    """Attend to the keys and values of all ranks while they travel (TileLink, section 5).

    With W ranks that hold S/W positions of a sequence each, it computes
    ``scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)`` over
    the whole sequence, for this rank's positions.

    =====================  ==============================================================
    ``q``                  [batch, heads, S/W, size]
    ``k_shard, v_shard``   [batch, kv_heads, S/W, size]; ``kv_heads`` divides ``heads``
    result                 [batch, heads, S/W, size]
    =====================  ==============================================================

    Copy engines move pieces of keys and values, in the order that the schedule sets. The vendor's
    attention library processes each group of arrived pieces in one call, and the results are
    merged in float32 by their log-sum-exp. Keys that a mask hides from all queries of a rank are
    not sent to it. On a GPU the call is enqueued on the current stream and returns.

    The backward gathers keys and values again. With ``options(save_gathered=True)`` the forward
    keeps the gathered ones, and only gradients travel. The same operands must need gradients on
    every rank.

    Args:
        causal: a query attends to no later position.
        scale: factor of the scores, above 0 if ``causal``; 1 / sqrt(size) by default.
        placement: the positions that rank r holds. ``"ranks"``: the r-th part of the sequence.
            ``"head-tail"``: chunks r and 2 W - 1 - r out of 2 W, in this order, which balances the
            work of causal calls, as in
            ``torch.distributed.tensor.experimental.context_parallel``.
        window: with ``causal``, a query attends to its own position and at most ``window`` earlier
            ones.
        cu_seqlens: first position of each packed sequence, followed by S; on the host. A query
            attends to its own sequence only.
        group: the ranks; the default group if None.
        schedule: a name, a :class:`Schedule`, or ``"auto"``: the fastest of a few in simulation.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: the dtype.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call.
    """
    traced = check_traced(q=q, k_shard=k_shard, v_shard=v_shard)
    q, k_shard, v_shard = under_autocast(q, k_shard, v_shard)
    facts = asked_for(traced, causal, scale, window, cu_seqlens, placement=placement)
    return ATTENTION(Request(process_group(group), schedule, facts), (q, k_shard, v_shard), traced)


@dataclass(eq=False)
class AttentionCall(Invocation):
    """A call of attention, or of its backward if ``of`` is set.

    Attributes:
        of: result, log-sum-exp and gradient that a backward starts from.
        keeps: the forward returns the tensors that its backward needs.
        gathered: the gathered keys and values of the forward, for a backward.
        results: the tensors that the caller gets, once allocated.
    """

    operator: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    schedule: str | Schedule
    facts: dict[str, Any]
    of: Result | None = None
    keeps: bool = False
    gathered: torch.Tensor | None = None
    results: tuple[torch.Tensor, ...] = ()
    source: tuple[Symmetric, int] | None = None
    purpose: str = ""

    def key(self, workspace: Workspace, options: Options) -> Hashable:
        operands = {"q": self.q, "k_shard": self.k, "v_shard": self.v}
        check_together(operands, self.schedule, self.facts)
        self.q, k = (q := _heads(self.q)), self.k
        if self.gathered is not None:
            self.kv = self.gathered
        else:
            self.kv = _packed(_heads(k), _heads(self.v))
            if workspace.allocations:
                self.source = workspace.symmetric_source(self.kv)
        place = self.source and (self.source[0].serial, self.source[1])
        self.gathers = self.keeps and options.save_gathered and workspace.engine.world > 1
        return (
            *(self.operator, q.shape, k.shape, q.dtype, self.schedule, *self.facts.values()),
            *(place, self.gathers, self.gathered is None, options.workspace_bytes, options.machine),
        )

    def plan(self, workspace: Workspace, options: Options) -> CachedCall:
        engine, source, (batch, heads, rows, size) = workspace.engine, self.source, self.q.shape
        sizes = engine.world, rows, batch, heads, self.k.shape[1], size
        dtype = str(self.q.dtype).removeprefix("torch.")
        facts: dict[str, Any] = {**self.facts, **engine.group_facts}
        facts |= {"symmetric": source is not None, "keeps": self.gathers}
        forward = AttentionProblem(*sizes, dtype, **facts)
        problem = forward if self.of is None else forward.gradient(self.gathered is not None)
        known, mode = workspace.known(options.machine), "queued" if engine.asynchronous else "idle"
        decision = workspace.decide(problem, self.schedule, options.machine, mode=mode)
        chosen = decision.schedule
        agreed = [known.text] * (self.schedule == "auto")
        if chosen.mover not in engine.capabilities().movers:
            raise NotImplementedError(
                f"schedule {chosen}: the {engine.name} engine has no mover {chosen.mover!r}; use "
                f"{', '.join(engine.capabilities().movers)}"
            )

        def make(staging_bytes: int | None = None) -> Plan:
            (plan,) = attention_plans(problem, chosen, [engine.rank], staging_bytes)
            return plan

        plan, cap = make(), options.workspace_bytes
        if cap is not None and "staging" in plan.buffer:
            plan = ring(engine, plan, cap, make)
        else:
            keep_to_cap(engine, plan, cap)
        problem_log.say(options.log, decision, plan.schedule, "", engine.rank)
        if source is not None and chosen.pull:
            agreed.append(f"keys in symmetric allocation {source[0].serial} at byte {source[1]}")
        read_in_place = None if "publish" in plan.buffer else source
        return new_kind(workspace, plan, options, decision, agreed, source=read_in_place)

    def allocate(self, cached: CachedCall) -> Call:
        if self.of is None:
            call, self.results = _forward(cached, self.q, self.kv, self.keeps)
        else:
            call, self.results = _backward(cached, self.q, self.k, self.kv, self.of)
        return call


def asked_for(
    traced: bool,
    causal: Any,
    scale: Any,
    window: Any,
    cu_seqlens: Any,
    **more: Any,
) -> dict[str, Any]:
    """Return the arguments of a call as hashable values. :func:`check_asked` refuses invalid ones:
    here if the call is traced, otherwise within the call, so that the peers learn of it."""
    facts = {
        "causal": causal,
        "scale": scale if scale is None else _number(scale, Real, float),
        "window": window if window is None else _number(window, Integral, index),
        "cu_seqlens": () if cu_seqlens is None or traced else bounds_of(cu_seqlens),
        **more,
    }
    if traced:
        facts["cu_seqlens"] = listed(cu_seqlens)
        check_asked(facts)
    return facts


def listed(bounds: Sequence[int] | torch.Tensor | None) -> list[int]:
    """Return ``cu_seqlens`` as a list for an operator of ``torch.library``; can be traced.

    Raises:
        ValueError: it is not a list of positions.
    """
    if not torch.compiler.is_compiling():
        positions = bounds_of(bounds)
        check_bounds(positions)
        return list(positions)
    if isinstance(bounds, torch.Tensor):
        raise ValueError("cu_seqlens: required a list in a compiled function, got a tensor")
    if isinstance(bounds, (int, float, str)) or bounds is not None and not len(bounds):
        raise ValueError(f"cu_seqlens: required a list or None, got {bounds!r}; pass one")
    return list(bounds or ())


def _number(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Convert a number of any type, such as NumPy's, to Python's; return other values unchanged."""
    if isinstance(value, (bool, int, float)) or not isinstance(value, kind):
        return value
    return convert(value)


def check_together(
    operands: Mapping[str, torch.Tensor], schedule: str | Schedule, facts: dict[str, Any]
) -> None:
    """Raise on queries, keys and values, passed by name, that do not fit together."""
    q, k, _ = operands.values()
    _, keys, _ = operands
    if not isinstance(schedule, (str, Schedule)):
        raise no_schedule(schedule)
    for name, tensor in operands.items():
        if tensor.layout is not torch.strided or tensor.dim() != 4:
            raise ValueError(
                f"{name}: required a dense [batch, heads, S/W, size], got {tensor.layout} of shape "
                f"{list(tensor.shape)}; reshape it"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: required {q.dtype} on {q.device}, as q is, got {tensor.dtype} on "
                f"{tensor.device}; convert it"
            )
    batch, _, rows, size = q.shape
    for name, tensor in list(operands.items())[1:]:
        required = [batch, k.shape[1], rows, size]
        if list(tensor.shape) != required:
            raise ValueError(
                f"{name}: required [batch, kv_heads, S/W, size] {required} for q of shape "
                f"{list(q.shape)}, got {list(tensor.shape)}; pass this rank's part of the sequence"
            )
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads < 1 or heads % kv_heads:
        raise InvalidArgument(
            keys,
            f"required a number of heads that divides the {heads} of q, got {kv_heads}; repeat "
            "them",
        )
    if q.device.type != "cpu":
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise NotImplementedError(
                f"dtype {q.dtype} is not served on {q.device.type}; use bfloat16 or float16"
            )
        if size > MOST_SIZE or size % MULTIPLE:
            raise NotImplementedError(
                f"q: required heads of a multiple of {MULTIPLE} up to {MOST_SIZE}, got {size}; pad "
                "with zeros and pass scale="
            )
    check_asked(facts)


def check_asked(facts: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for arguments that are invalid with any operands."""
    for name, kinds in (("scale", (float, int)), ("window", (int,))):
        value = facts[name]
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ValueError(f"{name}: required a number or None, got {value!r}; pass one")
    if not isinstance(facts["causal"], bool):
        raise ValueError(f"causal: required True or False, got {facts['causal']!r}")
    scale = facts["scale"]
    if scale is not None and not (abs(scale) <= MOST_SCALE and (scale > 0 or not facts["causal"])):
        raise ValueError(
            "scale: required a finite number, above 0 with causal=True since libraries also "
            f"multiply the -inf of masked scores by it, got {scale!r}; negate q for a negative one"
        )
    if facts["cu_seqlens"] != ():
        check_bounds(facts["cu_seqlens"])
    placement = facts.get("placement", PLACEMENTS[0])
    if placement not in PLACEMENTS:
        raise InvalidArgument(
            "placement", f"required one of {', '.join(PLACEMENTS)}, got {placement!r}; pass one"
        )


def _heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values, with contiguous elements in each head."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return k and v as the matrix that travels, [rows, 2 * batch * heads * size]: a view if they
    are stored that way, else a copy."""
    batch, heads, rows, size = k.shape
    columns = batch * heads * size
    strides = heads * size, size, 2 * columns, 1
    if v.data_ptr() - k.data_ptr() == columns * k.element_size() and all(
        half.shape[i] == 1 or half.stride(i) == strides[i] for half in (k, v) for i in range(4)
    ):
        storage = k.untyped_storage()
        end = k.storage_offset() * k.element_size() + rows * 2 * columns * k.element_size()
        if v.untyped_storage().data_ptr() == storage.data_ptr() and end <= storage.nbytes():
            return k.as_strided((rows, 2 * columns), (2 * columns, 1))
    kv = k.new_empty(rows, 2, batch, heads, size)
    for i, tensor in enumerate((k, v)):
        kv[:, i].copy_(tensor.permute(2, 0, 1, 3))
    return kv.view(rows, 2 * columns)


def _forward(
    cached: CachedCall, q: torch.Tensor, kv: torch.Tensor, keeps: bool
) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """Allocate the results of a forward. Return the call, whose tensors have rows first, and the
    results in the caller's layout."""
    batch, heads, rows, size = q.shape
    out = q.new_empty(batch, rows, heads, size)
    call = Call({"kv": kv, "q": _by_rows(q), "out": out.transpose(0, 1)})
    if not keeps:
        return call, (out.transpose(1, 2),)
    saved = [q.new_empty(batch, heads, rows, dtype=_wide(q))]
    call.tensors["lse"] = saved[0]
    if "gathered" in cached.plan.buffer:
        saved.append(kv.new_empty(cached.plan.shape("gathered")))
        call.tensors["gathered"] = saved[1]
    return call, (out.transpose(1, 2), *saved)


def _backward(
    cached: CachedCall, q: torch.Tensor, k: torch.Tensor, kv: torch.Tensor, of: Result
) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """Do the same for a backward. The results are the gradients of q, and of k and v packed."""
    batch, heads, rows, size = q.shape
    sums, dq = (q.new_empty(batch, rows, heads, size, dtype=dtype) for dtype in (_wide(q), q.dtype))
    tensors = {"q": _by_rows(q), "o": _by_rows(of.out), "grad": _by_rows(of.grad)}
    tensors[cached.plan.buffers[0].name] = kv
    tensors |= {"lse": of.lse, "sum": sums.transpose(0, 1), "dq": dq.transpose(0, 1)}
    for name, shape, dtype in cached.allocated:
        if name not in tensors:
            tensors[name] = q.new_empty(shape, dtype=dtype)
    dkv = tensors["dkv"].view(rows, 2, batch, k.shape[1], size)
    return Call(tensors), (dq.transpose(1, 2), dkv)


def _gradients(results: Tensors, needs: Needs) -> Tensors:
    """Return the gradients of q, k and v, from those of q and of k and v packed."""
    dq, dkv = results
    return dq, *(half.permute(1, 2, 0, 3) for half in dkv.unbind(1))


def _by_rows(heads: torch.Tensor) -> torch.Tensor:
    """View [batch, heads, rows, size] as [rows, batch, heads, size]."""
    return heads.permute(2, 0, 1, 3)


def _wide(q: torch.Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


# The record.

#: Types of the facts of attention in a schema.
FACTS = {"causal": "bool", "scale": "float?", "window": "int?", "cu_seqlens": "int[]"}


def _record_forward(request: Request, operands: Tensors, needs: Needs) -> Saved:
    """Return the result. If a gradient is needed, also return the log-sum-exp [batch, heads, S/W]
    and, with ``save_gathered``, the gathered keys and values as rows."""
    q, k, v = operands
    invocation = AttentionCall(NAME, q, k, v, request.schedule, request.facts, keeps=any(needs))
    invoke(request.group, invocation, q, current())
    return invocation.results


def _save(tensors: Tensors, needs: Needs) -> Saved:
    """Return all tensors, which every gradient needs. If the gathered rows are kept, only the
    shapes of k and v are saved."""
    q, k, v, out, lse, *gathered = tensors
    return (q, stand_in(k), stand_in(v), out, lse, *gathered) if gathered else tensors


def _record_backward(request: Request, grad: torch.Tensor, saved: Any, needs: Needs) -> Tensors:
    """Return the gradients of q, and of k and v packed, [S/W, 2, batch, kv_heads, size]."""
    q, k, v, out, lse, *gathered = saved
    of, rows = Result(out, lse, _heads(grad)), gathered[0] if gathered else None
    name, schedule, facts = f"{NAME}_backward", request.schedule, request.facts
    invocation = AttentionCall(name, q, k, v, schedule, facts, of=of, gathered=rows)
    invoke(request.group, invocation, q, current())
    return invocation.results


def _fake_forward(request: Request, operands: Tensors, needs: Needs) -> Saved:
    q, k, v = operands
    check_together({"q": q, "k_shard": k, "v_shard": v}, request.schedule, request.facts)
    batch, heads, rows, size = q.shape
    out = q.new_empty(batch, rows, heads, size).transpose(1, 2)
    return (out, q.new_empty(batch, heads, rows, dtype=_wide(q))) if any(needs) else (out,)


def _fake_backward(request: Request, grad: torch.Tensor, saved: Any, needs: Needs) -> Tensors:
    q, k, *_ = saved
    batch, heads, rows, size = q.shape
    dq = q.new_empty(batch, rows, heads, size).transpose(1, 2)
    return [dq, q.new_empty(rows, 2, batch, k.shape[1], size)]


def flops(request: Request, shapes: Shapes, result: Sequence[int], needs: Needs | None) -> int:
    """Count two products for a forward, five for a backward, over every key, masked or not, as
    PyTorch does."""
    batch, heads, rows, size = shapes[0]
    products = 2 if needs is None else 5
    return 2 * products * batch * heads * rows * rows * request.group.size() * size


ATTENTION = Record(
    NAME,
    ("q", "k_shard", "v_shard"),
    {**FACTS, "placement": "str"},
    ("lse",),
    _record_forward,
    _fake_forward,
    _save,
    _record_backward,
    _fake_backward,
    _gradients,
    flops,
)


@contextmanager
def behind_sdpa(
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    placement: str = "head-tail",
    schedule: str | Schedule = "auto",
) -> Iterator[None]:
    """Run ``torch.nn.functional.scaled_dot_product_attention`` as
    :func:`ficco.all_gather_attention` within a block, inside PyTorch's ``context_parallel``::

        with context_parallel(mesh, buffers=[x, labels], buffer_seq_dims=[1, 1]), \\
             ficco.behind_sdpa(mesh):
            model(x)

    Within the block, queries, keys and values are this rank's part of the sequence. The function is
    replaced for the whole process, as by ``context_parallel``; code that imported it by name
    earlier still calls PyTorch's. ``nn.MultiheadAttention`` calls it in evaluation, too, because
    its fused kernel is switched off. A ``torch.utils.checkpoint`` that records within the block
    also recomputes within it, even if its backward runs later.

    Args:
        group: the ranks that share the sequence: the mesh, or its group.
        placement: see :func:`ficco.all_gather_attention`. ``context_parallel`` places head and
            tail. If its load balancing is switched off, pass ``"ranks"``.
        schedule: see :func:`ficco.all_gather_attention`.

    Raises:
        ValueError: within the block, a call asks for a mask, dropout or the weights of
            ``nn.MultiheadAttention`` (``need_weights``, its default); else as
            :func:`ficco.all_gather_attention`.
    """

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise ValueError(
                "attn_mask: required none where ranks share the sequence, got one; pass "
                "is_causal=True, or call ficco.all_gather_attention with window= or cu_seqlens="
            )
        if dropout_p:
            raise ValueError(
                f"dropout_p: required 0 where ranks share the sequence, got {dropout_p}; pass 0.0"
            )
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise ValueError(
                f"enable_gqa: required True for {query.shape[1]} heads of queries and "
                f"{key.shape[1]} of keys, got False; pass it"
            )
        return all_gather_attention(
            *(query, key, value),
            causal=is_causal,
            scale=scale,
            placement=placement,
            group=group,
            schedule=schedule,
        )

    block = partial(behind_sdpa, group, placement=placement, schedule=schedule)
    layer, recorded = functional.multi_head_attention_forward, checkpoint.CheckpointFunction.forward
    recomputes = getattr(checkpoint, _RECOMPUTES)

    @wraps(layer)
    def attend_without_weights(*args: Any, **kwargs: Any) -> Any:
        call = _MULTI_HEAD.bind(*args, **kwargs)
        call.apply_defaults()
        if call.arguments["need_weights"]:
            raise ValueError(
                "need_weights: required False where ranks share the sequence, since no rank has "
                "all weights, got True, the default of nn.MultiheadAttention; pass "
                "need_weights=False"
            )
        return layer(*args, **kwargs)

    replaced = {
        (functional, "scaled_dot_product_attention"): attend,
        (functional, "multi_head_attention_forward"): attend_without_weights,
        (checkpoint.CheckpointFunction, "forward"): staticmethod(
            lambda ctx, run, *rest: recorded(ctx, _within(block, run), *rest)
        ),
        (checkpoint, _RECOMPUTES): lambda run, *rest, **options: recomputes(
            _within(block, run), *rest, **options
        ),
    }
    originals = {place: vars(place[0])[place[1]] for place in replaced}
    fast = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        for place, function in replaced.items():
            setattr(*place, function)
        yield
    finally:
        for place, function in originals.items():
            setattr(*place, function)
        mha.set_fastpath_enabled(fast)


_MULTI_HEAD = signature(functional.multi_head_attention_forward)

#: The function that records non-reentrant calls of ``checkpoint``; ``_impl`` since 2.14.
_RECOMPUTES = "_checkpoint_without_reentrant_generator"
_RECOMPUTES += "_impl" if hasattr(checkpoint, f"{_RECOMPUTES}_impl") else ""


def _within(block: Callable[[], Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs within a block, also when a backward calls it again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with block():
            return run(*args, **kwargs)

    return call
