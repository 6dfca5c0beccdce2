"""The projections around attention by heads, with its exchanges (DeepSpeed-Ulysses).

Rows that travel are channels, those of a rank's heads one after the other, and columns are
positions. So the projection of queries, keys and values is a ``matmul_all_to_all`` of the weights
with the transposed input, and that of the results an ``all_to_all_transposed_matmul``. What travels
lies transposed: position after position, as the libraries of attention read it and write it.

============  ======================================  ====================================
gradient of   ``ulysses_project``                     ``ulysses_output``
============  ======================================  ====================================
the operand   ``all_to_all_transposed_matmul``        ``matmul_all_to_all``
the weights   ``all_to_all_matmul``                   ``all_to_all_matmul``
============  ======================================  ====================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.attention import keys_of
from ficco.ops.call import run_unwatched as run
from ficco.ops.gradients import refusing_second
from ficco.ops.operands import process_group
from ficco.ops.operate import cast, check_eager
from ficco.ops.planned import number_call, workspace_for
from ficco.options import carried, current
from ficco.schedules import Schedule

#: What errors and the board call them.
PROJECT, OUTPUT = "ulysses_project", "ulysses_output"


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
    """The queries, keys and values of a rank's heads at all positions (DeepSpeed-Ulysses, section
    3), from an input whose positions the ranks share. With W ranks it computes, for its heads::

        x_whole = torch.cat([the x of each rank], dim=1)  # [batch, S, features]
        q, k, v = (functional.linear(x_whole, weight) for weight in (q_weight, k_weight, v_weight))

    ======================  ===================================================================
    ``x``                   [batch, S/W, features], this rank's positions
    ``q_weight``            [heads * size, features], as ``nn.Linear`` has it; W divides heads
    ``k_weight, v_weight``  [kv_heads * size, features]; ``kv_heads`` divides heads
    q                       [batch, heads/W, S, size]: rank r has those from r * heads/W on
    k, v                    [batch, n, S, size]: those that these attend to, as
                            ``scaled_dot_product_attention(..., enable_gqa=True)`` takes them
    ======================  ===================================================================

    Each rank multiplies its positions by the weights of a peer's heads, and a copy engine sends the
    product while it goes on with the next (:func:`ficco.matmul_all_to_all`). What arrives lies
    [S, batch, heads, size], where libraries of attention read it by strides: no pass brings it into
    another order. A head of keys that several ranks attend with is made and sent for each of them.
    The weights are copied into the order of the ranks in each call; ``x`` is, too, for a batch of
    more than 1, unless it lies [S/W, batch, features].

    There are gradients of all operands; those of weights are of this rank's positions, as under
    data parallelism. All ranks need gradients of the same operands. The gradients of q, k and v are
    copied once, side by side. On a GPU the call is enqueued on the current stream and returns.

    Args:
        size: of a head.
        group: the ranks, which are on one host; the default group if None.
        schedule: of a :func:`ficco.matmul_all_to_all`: a name, a :class:`Schedule` or ``"auto"``.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: the dtype, tracing, or a group over several hosts.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call.
    """
    weights = {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}
    call = ProjectionCall(process_group(group), schedule, size)
    x, *rest = _checked(PROJECT, call, {"x": x, **weights}, _check_project)
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Project.apply(x, *rest, call)
    return made


def ulysses_output(
    out: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
) -> torch.Tensor:
    """The output projection of attention by heads, at a rank's positions (DeepSpeed-Ulysses,
    section 3). With W ranks it computes, for its positions::

        whole = torch.cat([the out of each rank], dim=1)  # [batch, heads, S, size]
        functional.linear(whole.transpose(1, 2).flatten(2), weight)

    ===========  =====================================================================
    ``out``      [batch, heads/W, S, size], the attention of this rank's heads
    ``weight``   [features, heads * size], as ``nn.Linear`` has it
    result       [batch, S/W, features]
    ===========  =====================================================================

    Copy engines bring each rank its positions of its peers' heads, and the products of those that
    have arrived add up in float32 (:func:`ficco.all_to_all_transposed_matmul`). ``out`` is read in
    place if it lies [S, batch, heads/W, size], as flash attention makes it for a batch of 1;
    other orders are copied first. On a GPU the call is enqueued on the current stream and returns.

    There are gradients of both; that of the weight is of this rank's positions, for which ``out``
    travels again. All ranks need gradients of the same operands.

    Args:
        group: the ranks, which are on one host; the default group if None.
        schedule: of a :func:`ficco.all_to_all_transposed_matmul`: a name, a :class:`Schedule` or
            ``"auto"``.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: the dtype, tracing, or a group over several hosts.
        RankMismatch: ranks make different calls.
        SignalTimeout, PeerFailed: as for any call.
    """
    call = ProjectionCall(process_group(group), schedule)
    out, weight = _checked(OUTPUT, call, {"out": out, "weight": weight}, _check_output)
    made: torch.Tensor = _Output.apply(out, weight, call)
    return made


class ProjectionCall(NamedTuple):
    """What a call is, without its operands."""

    group: ProcessGroup
    schedule: str | Schedule
    size: int = 0

    def run(
        self,
        operator: str,
        a: torch.Tensor,
        b: torch.Tensor,
        rows: Any = None,
        gathers: bool = False,
        out: torch.Tensor | None = None,
        purpose: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One call of an operator, of what travels transposed."""
        what = self.group, self.schedule, rows, gathers, out, purpose
        return run(operator, a, b, *what, transposed=True)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: ProjectionCall,
    ) -> tuple[torch.Tensor, ...]:
        world, rank = call.group.size(), call.group.rank()
        shares = _Shares(world, q.shape[0] // call.size, k.shape[0] // call.size, call.size)
        matrix, weights = _by_positions(x), shares.packed(q, k, v)
        table = (shares.channels,) * world
        blocks, _ = call.run("matmul_all_to_all", weights, matrix.t(), table)
        ctx.call, ctx.shares, ctx.options, ctx.shape = call, shares, current(), x.shape
        ctx.set_materialize_grads(False)
        of_x, *of_weights = ctx.needs_input_grad[:4]
        ctx.save_for_backward(matrix if any(of_weights) else None, weights if of_x else None)
        return shares.heads(blocks, x.shape[0], rank)

    @staticmethod
    @refusing_second
    def backward(
        ctx: Any, tensors: Sequence[torch.Tensor | None], *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        (matrix, weights), call, shares = tensors, ctx.call, ctx.shares
        batch, rows, features = ctx.shape
        blocks = shares.blocks(grads, batch, rows, call.group.rank())
        table = tuple((channels,) * shares.world for channels in shares.channels)
        needs, made = ctx.needs_input_grad[:4], [None] * 3
        purpose, of_x = _purpose(PROJECT, ("x", "q_weight", "k_weight", "v_weight"), needs), None
        with carried(ctx.options):
            if matrix is None:
                operator = "all_to_all_transposed_matmul"
                of_x, _ = call.run(operator, blocks, weights, table, purpose=purpose)
            else:
                given = blocks, matrix, table, weights is not None
                of_weights, gathered = call.run("all_to_all_matmul", *given, purpose=purpose)
                made = shares.unpacked(of_weights)
                if weights is not None and gathered is not None:
                    of_x = torch.mm(gathered.t(), weights)
        if of_x is not None:
            of_x = of_x.view(rows, batch, features).transpose(0, 1)
        return (
            of_x,
            *(one if need else None for one, need in zip(made, needs[1:], strict=True)),
            None,
        )


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, weight: torch.Tensor, call: ProjectionCall
    ) -> torch.Tensor:
        batch, heads, positions, size = out.shape
        world = call.group.size()
        lies = out.permute(2, 0, 1, 3).reshape(world, positions // world * batch, heads * size)
        made, _ = call.run("all_to_all_transposed_matmul", lies.transpose(1, 2), weight.t())
        ctx.call, ctx.options, ctx.shape = call, current(), out.shape
        of_out, of_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(lies if of_weight else None, weight if of_out else None)
        return made.view(positions // world, batch, weight.shape[0]).transpose(0, 1)

    @staticmethod
    @refusing_second
    def backward(
        ctx: Any, tensors: Sequence[torch.Tensor | None], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (lies, weight), call = tensors, ctx.call
        batch, heads, positions, size = ctx.shape
        matrix, of_out, of_weight = _by_positions(grad), None, None
        purpose = _purpose(OUTPUT, ("out", "weight"), ctx.needs_input_grad[:2])
        with carried(ctx.options):
            if weight is not None:
                operands = weight.t(), matrix.t()
                blocks, _ = call.run("matmul_all_to_all", *operands, purpose=purpose)
                of_out = blocks.transpose(1, 2).reshape(positions, batch, heads, size)
                of_out = of_out.permute(1, 2, 0, 3)
            if lies is not None:
                channels = heads * size * call.group.size()
                of_weight = matrix.new_empty(matrix.shape[1], channels)
                given = lies.transpose(1, 2), matrix, None, False, of_weight.t()
                call.run("all_to_all_matmul", *given, purpose=purpose)
        return of_out, of_weight, None


def _by_positions(x: torch.Tensor) -> torch.Tensor:
    """[batch, S/W, features] as rows of positions, each of all of a batch."""
    return x.transpose(0, 1).flatten(0, 1)


def _checked(
    operator: str,
    call: ProjectionCall,
    operands: dict[str, torch.Tensor],
    check: Callable[[ProjectionCall, dict[str, torch.Tensor]], None],
) -> list[torch.Tensor]:
    """The operands, cast under autocast. What refuses them is told to the peers."""
    check_eager(operator, **operands)
    first = next(iter(operands))
    workspace = workspace_for(call.group, operands[first], first, operator)
    try:
        kind = operands[first].device.type
        if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
            operands = {name: cast(one, kind) for name, one in operands.items()}
        check(call, operands)
    except BaseException as error:
        number_call(workspace, operator)
        workspace.end(error)
        raise
    return list(operands.values())


def _check_project(call: ProjectionCall, operands: Mapping[str, torch.Tensor]) -> None:
    x, q, k, v = operands.values()
    size, world = call.size, call.group.size()
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


def _check_output(call: ProjectionCall, operands: Mapping[str, torch.Tensor]) -> None:
    out, weight = operands.values()
    world = call.group.size()
    if out.dim() != 4 or not out.shape[0] or out.shape[2] % world:
        raise ValueError(
            f"out: required [batch, heads/W, S, size], positions that the {world} ranks share "
            f"equally, got {list(out.shape)}; reshape it"
        )
    channels = out.shape[1] * out.shape[3] * world
    if weight.dim() != 2 or weight.shape[1] != channels:
        raise ValueError(
            f"weight: required [features, {channels}], for the heads of all {world} ranks, got "
            f"{list(weight.shape)}; pass the weight of an nn.Linear"
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
    wanted = " and ".join(name for name, need in zip(names, needs, strict=True) if need)
    return f"for the gradients of {wanted} of {operator}"


class _Shares(NamedTuple):
    """Which channels each rank has: of its heads of queries, of keys, and of values."""

    world: int
    heads_in_all: int
    kv_heads: int
    size: int

    def keys(self, rank: int) -> list[int]:
        return keys_of(rank, self.world, self.heads_in_all, self.kv_heads)

    @property
    def each(self) -> int:
        """Heads of queries of a rank."""
        return self.heads_in_all // self.world

    @property
    def channels(self) -> tuple[int, ...]:
        """Of each rank."""
        ranks = range(self.world)
        return tuple((self.each + 2 * len(self.keys(rank))) * self.size for rank in ranks)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Heads side by side, in the order of the ranks: of which weight, and which."""
        for rank in range(self.world):
            yield 0, rank * self.each, (rank + 1) * self.each
            keys = self.keys(rank)
            adjacent = keys == list(range(keys[0], keys[-1] + 1))
            for weight in (1, 2):
                if adjacent:
                    yield weight, keys[0], keys[-1] + 1
                else:
                    yield from ((weight, key, key + 1) for key in keys)

    def packed(self, *weights: torch.Tensor) -> torch.Tensor:
        """The weights in the order of the ranks."""
        size = self.size
        return torch.cat([weights[i][a * size : b * size] for i, a, b in self.runs()])

    def unpacked(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of the weights from those in the order of the ranks. A head that several ranks
        have is summed in float32 at least, and rounded once."""
        counts = self.heads_in_all, self.kv_heads, self.kv_heads
        parts: list[list[list[torch.Tensor]]] = [[[] for _ in range(count)] for count in counts]
        rows = iter(packed.split(self.size))
        for weight, first, last in self.runs():
            for head in range(first, last):
                parts[weight][head].append(next(rows))
        wide = torch.promote_types(packed.dtype, torch.float32)

        def summed(some: list[torch.Tensor]) -> torch.Tensor:
            if len(some) == 1:
                return some[0]
            return torch.stack(some).sum(0, dtype=wide).to(packed.dtype)

        return [torch.cat([summed(some) for some in heads]) for heads in parts]

    def heads(self, blocks: torch.Tensor, batch: int, rank: int) -> tuple[torch.Tensor, ...]:
        """What has arrived as [batch, heads, S, size], of each weight."""
        world, channels, rows = blocks.shape
        sizes = world * rows // batch, batch, channels // self.size, self.size
        whole = blocks.transpose(1, 2).reshape(sizes)
        keys = len(self.keys(rank))
        return tuple(whole.permute(1, 2, 0, 3).split((self.each, keys, keys), 1))

    def blocks(
        self, heads: Sequence[torch.Tensor | None], batch: int, rows: int, rank: int
    ) -> torch.Tensor:
        """The reverse; what is None is zero."""
        like = next(one for one in heads if one is not None)
        keys, positions = len(self.keys(rank)), self.world * rows
        whole = like.new_empty(positions, batch, self.each + 2 * keys, self.size)
        parts = whole.permute(1, 2, 0, 3).split((self.each, keys, keys), 1)
        for part, given in zip(parts, heads, strict=True):
            part.zero_() if given is None else part.copy_(given)
        return whole.view(self.world, rows * batch, self.channels[rank]).transpose(1, 2)
