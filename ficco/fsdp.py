"""FSDP2's all-gathers of weights and reduce-scatters of gradients, by copy engines.

:func:`use` gives every parameter group that ``fully_shard`` has made its own hooks. Each collective
is then a call like those of the operators: numbered, compared with the peers, and run by a Plan.
The operator itself is :class:`WeightProblem`, :class:`WeightRoute` and :func:`weight_plans`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ficco.accelerator import gpu
from ficco.compute.program import Call, Symmetric
from ficco.errors import InvalidArgument
from ficco.options import Options, carried, current
from ficco.plan import Plan, Reduction, Region, Signal, Step, Transfer
from ficco.problems.mask import Span
from ficco.problems.specification import SUMS, AnyProblem, Buffer, Exchange, Specification
from ficco.runtime import counters
from ficco.runtime.calls import Invocation, new_kind, perform, repeat
from ficco.runtime.workspace import (
    CachedCall,
    Known,
    Workspace,
    remember,
    repeatable,
    workspace_for,
    workspaces,
)
from ficco.schedules import Schedule
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.exchange import Parcel, Route, Traffic
from ficco.schedules.groups import cut, targets_in_order

#: Names of the operators.
GATHER, SUM = "fsdp_all_gather", "fsdp_reduce_scatter"

#: Bytes of a copy of a gather. A copy of another call on the same link waits for at most one.
PIECE_BYTES = 32 << 20
#: Bytes of staging of sums; a larger sum is several calls (50.9 ms a step with 64 MiB, 2 H200).
STAGING_BYTES = 512 << 20
#: Slots of sums and of gathers: no gather waits for a sum, and only one slot has staging.
SUM_SLOT, GATHER_SLOT = 1, 2
#: Pieces of a slice of gradients, and the least bytes of a piece.
SUM_PIECES, SUM_BYTES = 4, 1 << 20

#: Gathers move bytes: these dtypes stand for all dtypes of their size.
CONTAINERS = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32", 8: "float64"}
#: Reductions that are served.
SUMMING = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM


@dataclass(frozen=True)
class WeightProblem(AnyProblem):
    """An all-gather of slices, or a reduce-scatter of gradients.

    Row r of the gathered weights is the slice of rank r. Row r of the gradients is the slice that
    rank r sums.

    Attributes:
        operator: :data:`GATHER` or :data:`SUM`.
        world: number of ranks.
        count: elements of a slice.
        dtype: name of their dtype.
        factor: factor of the sums.
    """

    operator: str
    world: int
    count: int
    dtype: str
    factor: float = 1.0

    @property
    def gathers(self) -> bool:
        """Whether this is an all-gather."""
        return self.operator == GATHER

    @cached_property
    def specification(self) -> Specification:
        """The matrices that its Plans must compute."""
        world, dtype, each = self.world, self.dtype, tuple(range(self.world))
        one, every = ((1, self.count),) * world, ((world, self.count),) * world
        if self.gathers:
            shard = Buffer("shard", "weights", dtype, one, "operand", leaves=True)
            out = Buffer("out", "weights", dtype, every, "result", symmetric=True)
            exchange = Exchange(lambda src, dst: 1, lambda src, dst: 0, lambda src, dst: src)
            return Specification((shard,), (out,), (), {"weights": exchange})
        grads = Buffer("grads", "sums", dtype, every, "operand", leaves=True)
        out = Buffer("out", "sums", dtype, one, "result", first=each, factor=self.factor)
        rows = lambda src, dst: world, lambda src, dst: 0, lambda src, dst: 0  # noqa: E731
        summed = Exchange(*rows, sums=True, terms=True, added=lambda src, dst: 1)
        return Specification((grads,), (out,), (), {"sums": summed})

    def __str__(self) -> str:
        scaled = f", times {self.factor}" * (self.factor != 1)
        return f"{self.operator}({self.count} x {self.world} ranks, {self.dtype}{scaled})"


class WeightRoute(Route):
    """The slices that ranks push to each other.

    A gather writes into results of peers, which first post ``begun``: the caller has passed one.
    Gradients land in the slot, with a signal for each piece, which is summed while others travel.
    """

    kind = "ready"

    def __init__(self, problem: WeightProblem, schedule: Schedule) -> None:
        assert isinstance(schedule.pieces, int)
        self.problem, self.words = problem, WordAllocator(problem.world)
        self.spans = cut(problem.count, schedule.pieces)
        self.data = self.words.block(2 if problem.gathers else len(self.spans))
        rows = ((problem.world - 1, problem.count),) * problem.world
        staging = Buffer("staging", "sums", problem.dtype, rows, "slot")
        self.buffers = [] if problem.gathers else [staging]

    def posts_begun(self, src: int, dst: int) -> bool:
        return self.problem.gathers

    def begun(self, poster: int, waiter: int) -> Signal:
        return self.data.signal("begun", poster, waiter, 1)

    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        row, count = (src, 1) if self.problem.gathers else (dst, len(self.spans))
        return [self.data.signal(self.kind, src, dst, i, (row, row + 1)) for i in range(count)]

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        gathers, signals = self.problem.gathers, self.signals(src, dst, owner)
        terms = 0 if gathers else 1 << src
        moves = [Transfer(*self.ends(src, dst, span), terms) for span in self.spans]
        labels = [f"{src}>{dst}.{i}" for i in range(len(moves))]
        if gathers:
            begun = self.begun(dst, src)
            return [Parcel(tuple(moves), tuple(labels), (begun,), tuple(signals), 0)]
        each = enumerate(zip(moves, labels, signals, strict=True))
        return [Parcel((move,), (label,), (), (signal,), i) for i, (move, label, signal) in each]

    def ends(self, src: int, dst: int, span: Span) -> tuple[Region, Region]:
        """Columns of the slice of a rank for another rank: at its sender, and where they land."""
        if self.problem.gathers:
            return Region("shard", src, 0, 1, *span), Region("out", dst, src, src + 1, *span)
        place, left = src - (src > dst), Region("grads", src, dst, dst + 1, *span)
        return left, Region("staging", dst, place, place + 1, *span)


def weight_plans(
    problem: WeightProblem, schedule: Schedule, ranks: Sequence[int] | None = None
) -> list[Plan]:
    """The Plans of ``ranks``, by default of all ranks."""
    route, every = WeightRoute(problem, schedule), range(problem.world)
    return [_composed(route, schedule, rank) for rank in (every if ranks is None else ranks)]


def _composed(route: WeightRoute, schedule: Schedule, me: int) -> Plan:
    problem, builder = route.problem, Builder(route.problem, me)
    targets = targets_in_order(me, problem.world)
    # Sums have lanes of their own: a gather that waits for a slow peer does not delay them.
    first = 0 if problem.gathers else schedule.copy
    builder.lane_of = {peer: f"copy{first + i % schedule.copy}" for i, peer in enumerate(targets)}
    traffic, every = Traffic(builder, schedule, route), range(problem.world)
    traffic.announce()
    builder.acquire()
    for items in traffic.leaving(targets):
        traffic.push(items)
    if problem.gathers:
        builder.add(Step(Transfer(*route.ends(me, me, (0, problem.count))), "compute0", "own"))
        waits, _ = traffic.arrivals(((peer, 0) for peer in targets), "compute0")
        builder.add(Step(None, "compute0", "arrived", waits))
    for piece, span in enumerate(() if problem.gathers else route.spans):
        parts = tuple(route.ends(rank, me, span)[rank != me] for rank in every)
        waits, _ = traffic.arrivals(((peer, piece) for peer in targets), "compute0")
        work = Reduction(parts, tuple(1 << one for one in every), Region("out", me, 0, 1, *span))
        builder.add(Step(work, "compute0", f"sum {piece}", waits))
    builder.retire()
    return builder.plan(str(schedule), route.buffers, route.words)


@dataclass(eq=False)
class WeightCall(Invocation):
    """A gather or a sum on this rank.

    Attributes:
        source: the slice [1, count], or the gradients [W, count].
        out: the gathered slices [W, count] in symmetric memory, or the summed slice [1, count].
        factor: factor of the sums.
    """

    operator: str
    source: Tensor
    out: Tensor
    factor: float = 1.0
    purpose: str = ""
    place: tuple[Symmetric, int] | None = None

    def key(self, workspace: Workspace, options: Options) -> Hashable:
        if self.operator == GATHER:
            self.place = workspace.symmetric_source(self.out)
        place = self.place and (self.place[0].serial, self.place[1])
        return self.operator, self.out.shape, self.out.dtype, self.factor, place

    def plan(self, workspace: Workspace, options: Options) -> CachedCall:
        engine, (world, count) = workspace.engine, max(self.source.shape, self.out.shape)
        dtype = str(self.out.dtype).removeprefix("torch.")
        nbytes = count * self.out.itemsize
        pieces, slot = max(1, min(SUM_PIECES, nbytes // SUM_BYTES)), SUM_SLOT
        if self.operator == GATHER:
            pieces, slot = -(-nbytes // PIECE_BYTES), GATHER_SLOT
        lanes = min(world - 1, engine.copy_engines() or 1)
        schedule = Schedule.parse(f"hetero-fused-1d:pieces={pieces},copy={lanes}")
        problem = WeightProblem(self.operator, world, count, dtype, self.factor)
        (plan,) = weight_plans(problem, schedule, (engine.rank,))
        places = [] if self.place is None else [self.place]
        agreed = [f"result in symmetric allocation {one.serial} at byte {at}" for one, at in places]
        return new_kind(workspace, plan, options, None, agreed, slot, self.place)

    def allocate(self, cached: CachedCall) -> Call:
        return Call({cached.left: self.source, "out": self.out})


@dataclass(eq=False)
class _Buffer:
    """A buffer of gathers, which its workspace keeps.

    Ranks take and drop tensors in one order, and so take the same buffers. A tensor that dies with
    its parameter group frees its buffer only in :func:`use`: when garbage is collected differs.
    """

    memory: Tensor
    nbytes: int
    user: weakref.ref[Tensor] | None = None  # None while the buffer is free

    def free(self, param_group: weakref.ref[Any], user: weakref.ref[Tensor]) -> None:
        """Free the buffer after the death of its tensor, unless the parameter group died, too."""
        self.user = None if param_group() is not None else user


class _Arrival(dist.Work):
    """A gather that runs on a stream of its own. FSDP only waits for a subclass of ``Work``."""

    def __init__(self, event: Any) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: Any = None) -> bool:
        gpu.current_stream().wait_event(self._event)
        return True


@cache
def _side_stream(device: torch.device) -> Any:
    """The stream of gathers that FSDP starts on the stream of the products."""
    return gpu.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class _Hook:
    """A hook of one parameter group.

    Attributes:
        before: the hook that the parameter group had, for collectives that ficco leaves.
        options: the options in force when :func:`use` was called.
        limit: see ``buffer_bytes`` of :func:`use`.
    """

    param_group: Any
    before: Any
    options: Options
    limit: int | None

    def run(self, workspace: Workspace, key: Hashable, call: WeightCall) -> None:
        """Run a call. ``key``: of its kind, by what can be read fast."""
        if kinds := repeatable.get((workspace, key)):
            tensors = {kinds[0].cached.left: call.source, "out": call.out}
            return repeat(kinds[0], call.operator, "", self.options, tensors)
        with carried(self.options):
            perform(workspace, call, self.options)
            cached = workspace.programs[call.key(workspace, self.options)]
        remember((workspace, key), Known(workspace, cached, self.options, ()))


class Gathers(_Hook):
    """FSDP's all-gathers, as ``AllGather`` of ``torch.distributed.fsdp._fully_shard._fsdp_api``."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for a gather."""
        group = self.param_group._all_gather_process_group
        workspace = workspace_for(group, device, GATHER, self.options)
        tensor = self._take(workspace, int(size[0]), dtype) if size[0] else None
        return self.before.allocate(size, dtype=dtype, device=device) if tensor is None else tensor

    def _take(self, workspace: Workspace, count: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor in the smallest free buffer that is large enough, or in a new buffer; None if
        all buffers would exceed the limit. A buffer is free once FSDP has dropped its tensor. FSDP
        does so after its streams have been told to wait for the copies out of the tensor."""
        buffers, nbytes = workspace.held, count * dtype.itemsize
        fitting = [one for one in buffers if one.nbytes >= nbytes and one.user is None]
        buffer = min(fitting, key=lambda one: one.nbytes, default=None)
        if buffer is None:
            if self.limit is not None and sum(one.nbytes for one in buffers) + nbytes > self.limit:
                return None
            with carried(self.options):
                memory = workspace.empty((nbytes,), torch.uint8)
            buffers.append(buffer := _Buffer(memory, nbytes))
        tensor, owner = buffer.memory[:nbytes].view(dtype), weakref.ref(self.param_group)
        buffer.user = weakref.ref(tensor, partial(buffer.free, owner))
        return tensor

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the slices of all ranks into a tensor of :meth:`allocate`."""
        source, out = input_tensor, output_tensor
        workspace = workspace_for(group, out.device, GATHER, self.options)
        if out.untyped_storage().data_ptr() not in workspace.allocations:
            if out.numel():  # else there is nothing to gather
                counters.stays(group.group_name, "all-gather", "no room", "raise buffer_bytes")
            return self.before(out, source, group, async_op)  # type: ignore[no-any-return]
        container = getattr(torch, CONTAINERS[min(out.itemsize, max(CONTAINERS))])
        if out.dtype is not container:
            source, out = source.view(container), out.view(container)
        call = WeightCall(GATHER, source.view(1, -1), out.view(group.size(), -1))
        key = GATHER, out.data_ptr(), out.shape, out.dtype
        if not async_op or out.is_cpu:
            self.run(workspace, key, call)
            return None
        # FSDP calls on the stream of the products, which must not wait for the gather yet.
        stream = _side_stream(out.device)
        stream.wait_stream(gpu.current_stream())
        with gpu.stream(stream):
            self.run(workspace, key, call)
        return _Arrival(stream.record_event())


class GradientSums(_Hook):
    """FSDP's reduce-scatters: float32 sums in the order of ranks, times a factor, rounded once."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return plain memory: copies read gradients where they are."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum the slices of all ranks for this rank."""
        dtype, world = str(output_tensor.dtype).removeprefix("torch."), group.size()
        dtypes = [one for one in SUMS if output_tensor.is_cpu or one != "float64"]
        if dtype not in dtypes or not any(op == one for one in SUMMING):  # not `one == op`
            why = f"required a sum or a mean of {', '.join(dtypes)}, got {op} of {dtype}"
            counters.stays(group.group_name, "reduce-scatter", why, "see docs/fsdp.md")
            work: dist.Work | None = self.before(output_tensor, input_tensor, group, op, async_op)
            return work
        grads, out = input_tensor.view(world, -1), output_tensor.view(1, -1)
        room = min(STAGING_BYTES, self.options.workspace_bytes or STAGING_BYTES)
        most = max(1, room // ((world - 1) * out.itemsize))
        factor = 1 / world if op == dist.ReduceOp.AVG else 1.0
        if op == dist.ReduceOp.PREMUL_SUM:
            factor = float(op.__getstate__()[1])  # a tensor would be a new kind of call
        workspace = workspace_for(group, out.device, SUM, self.options)
        for first, last in cut(out.shape[1], -(-out.shape[1] // most)):
            call = WeightCall(SUM, grads[:, first:last], out[:, first:last], factor)
            self.run(workspace, (SUM, last - first, out.dtype, factor), call)
        return None


class Served(NamedTuple):
    """A parameter group of a model; as text, a line of a report.

    Attributes:
        module: name of its module in the model.
        elements: elements of its parameters on all ranks.
        ranks: ranks that share them.
        left: why its collectives stay with PyTorch; empty if copy engines carry them.
    """

    module: str
    elements: int
    ranks: int
    left: str

    def __str__(self) -> str:
        how = f"left to PyTorch: {self.left}" if self.left else "copy engines"
        return f"{self.module or 'model'}: {self.elements} elements, {self.ranks} ranks: {how}"


def use(
    model: nn.Module, *, reduce_scatter: bool = True, buffer_bytes: int | None = None
) -> list[Served]:
    """Let copy engines carry FSDP2's all-gathers and reduce-scatters::

        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        print(*ficco.fsdp.use(model))

    Returns the parameter groups, served and left. Collective: all ranks call it once, after the
    last ``fully_shard``. Calls run under the options in force here.

    Args:
        model: the outermost module.
        reduce_scatter: serve gradients, too, by float32 sums in the order of ranks.
        buffer_bytes: most bytes of the buffers of gathers for each group of ranks. A gather that
            finds no room stays with PyTorch. None: as many buffers as FSDP uses at once, usually 2.

    Raises:
        ValueError: an argument is wrong, no module is sharded, or a module is served already.
        NotImplementedError: PyTorch is older than 2.9 and has no hooks, parameters are offloaded,
            or no engine serves the device.
        SignalTimeout, PeerFailed: a rank does not call this function.
        RankMismatch: the ranks have different models or arguments.
    """
    sharded = _checked(model, reduce_scatter, buffer_bytes)
    if used := [one for workspace in workspaces() for one in workspace.held if one.user]:
        gc.collect()  # a model that failed within a step may be gone on some ranks only
    for buffer in used:
        buffer.user = None if buffer.user and buffer.user() is None else buffer.user
    rows = [_row(*each) for each in sharded]
    served = [(row, *each) for row, each in zip(rows, sharded, strict=True) if not row.left]
    for group, device in {one._all_gather_process_group: one.device for *_, one in served}.items():
        same = [tuple(row) for row, *_, one in served if one._all_gather_process_group is group]
        request = f"fsdp.use({same}, {reduce_scatter=}, {buffer_bytes=})"
        workspace_for(group, device, "fsdp.use", current()).meet("fsdp.use", request)
    for *_, module, one in served:
        rest = current(), buffer_bytes
        module.set_custom_all_gather(Gathers(one, one._all_gather_comm, *rest))
        if reduce_scatter:
            module.set_custom_reduce_scatter(GradientSums(one, one._reduce_scatter_comm, *rest))
    return rows


def _checked(
    model: nn.Module, reduce_scatter: bool, buffer_bytes: int | None
) -> list[tuple[str, Any, Any]]:
    """Name, module and FSDP's object of each parameter group. Refuses wrong arguments."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        required = "required PyTorch 2.9 or later, whose FSDPModule has set_custom_all_gather"
        raise NotImplementedError(f"fsdp.use: {required}, got {torch.__version__}; update PyTorch")
    if not isinstance(reduce_scatter, bool):
        raise InvalidArgument("reduce_scatter", f"required True or False, got {reduce_scatter!r}")
    if buffer_bytes is not None and (type(buffer_bytes) is not int or buffer_bytes < 0):
        required = f"required a number of at least 0, or None, got {buffer_bytes!r}"
        raise InvalidArgument("buffer_bytes", required)
    sharded: dict[Any, tuple[str, Any, Any]] = {}  # modules of one fully_shard share a group
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        for one in _param_groups(module) if isinstance(module, FSDPModule) else ():
            sharded.setdefault(one, (name, module, one))
    if not sharded:
        got = f"got {type(model).__name__} without; call fully_shard first"
        raise InvalidArgument("model", f"required a module with sharded parameters, {got}")
    for name, _, param_group in sharded.values():
        if isinstance(param_group.offload_policy, CPUOffloadPolicy):
            raise NotImplementedError(
                "fsdp.use: required parameters that stay on the device, got CPUOffloadPolicy for "
                f"module {name!r}; leave out the policy, or do not call fsdp.use"
            )
        if isinstance(param_group._all_gather_comm, Gathers):
            text = f"required modules that are not served yet, got {name!r}, which is served; call "
            raise InvalidArgument("model", f"{text}fsdp.use once, with the outermost module")
    return list(sharded.values())


def _param_groups(module: Any) -> list[Any]:
    """FSDP's objects of a module's parameter groups. Until PyTorch 2.11 it has at most one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [one for one in ([state._fsdp_param_group] if groups is None else groups) if one]


def _row(name: str, module: Any, param_group: Any) -> Served:
    """Whether a parameter group can be served, or why not. Collective: opens its workspace."""
    elements, left = sum(one.sharded_param.numel() for one in param_group.fsdp_params), ""
    if not hasattr(param_group.mesh_info, "shard_process_group"):
        return Served(name, elements, 1, "its parameters are not sharded")
    group = param_group._all_gather_process_group
    if group.size() == 1:
        left = "it has one rank"
    elif len(_param_groups(module)) > 1:
        left = "PyTorch has no hooks for a module with several parameter groups"
    else:
        workspace = workspace_for(group, param_group.device, "fsdp.use", current())
        if (hosts := workspace.engine.hosts.count) > 1:
            left = f"its ranks are on {hosts} hosts"
    return Served(name, elements, group.size(), left)
