"""Public functions other than the operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from os import PathLike
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.accelerator import gpu
from ficco.dma.engine import fingerprint
from ficco.errors import FiccoError
from ficco.heuristics import Decision, decide, where
from ficco.machine import Machine
from ficco.ops import operators
from ficco.ops.entry import tells_refusals
from ficco.ops.operands import process_group
from ficco.problems.products import OPERATORS
from ficco.problems.sizes import ASKABLE, problem_of
from ficco.problems.specification import MOST
from ficco.runtime.counters import Expectation, blocks, open_block
from ficco.runtime.workspace import SLOTS, workspace_of, workspaces
from ficco.runtime.workspace import close as close_workspaces
from ficco.schedules import Schedule


@tells_refusals
def empty(
    shape: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return an uninitialised tensor in memory that every rank of a group can read.

    Pull schedules read an ``a_shard`` in this memory in place, and copy any other ``a_shard``
    first. Collective: all ranks of the group call it in the same order with the same shape and
    dtype. In one call of an operator, all ranks or no rank have their shard in this memory. The
    memory stays until ``ficco.close()``, so allocate once and reuse the tensor.

    Args:
        shape, dtype: as for :func:`torch.empty`; dtype defaults to PyTorch's default.
        group: the ranks that can read it; default WORLD.
        device: default: the current GPU for a group with NCCL, else cpu.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: no engine serves the device.
        RankMismatch: the ranks ask for different shapes or dtypes, or another rank could not
            allocate.
    """
    group = process_group(group)
    # Before the checks: the workspace reports refusals to the peers.
    workspace = workspace_of(group, _device_of(group, device), "empty")
    workspace.raise_error()
    if not isinstance(shape, Sequence) or any(not _is_size(size) for size in shape):
        raise ValueError(f"shape: required a sequence of sizes of at least 0, got {shape!r}")
    if math.prod(map(int, shape)) > MOST:
        raise ValueError(f"shape: required at most {MOST} elements, got {shape!r}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: required a torch.dtype or None, got {dtype!r}")
    return workspace.empty(tuple(map(int, shape)), dtype or torch.get_default_dtype())


def addresses(tensor: torch.Tensor, group: ProcessGroup | DeviceMesh | None = None) -> torch.Tensor:
    """Return the addresses of the same element in every rank's memory, as mapped in this process,
    for kernels that store to their peers (:func:`ficco.tile.push`).

    Args:
        tensor: from :func:`empty`, or a view of such a tensor.
        group: the ranks that it was allocated for; default WORLD.

    Returns:
        int64 [W] on the tensor's device: by rank, the address of the first element of ``tensor``,
        0 for ranks of other hosts. Valid until the group is closed. Call the function before a
        graph is captured.

    Raises:
        ValueError: the tensor is not in symmetric memory of the group.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"tensor: required a torch.Tensor, got {type(tensor).__name__}")
    for workspace in workspaces(process_group(group)):
        if (by_rank := workspace.addresses(tensor)) is not None:
            return torch.tensor(by_rank, dtype=torch.int64, device=tensor.device)
    raise ValueError(
        "tensor: required one from ficco.empty of this group, or a view of one, got memory that "
        "peers cannot reach"
    )


def explain(
    operator: str,
    *,
    world: int,
    dtype: torch.dtype | str = "bfloat16",
    rows: Sequence[int] | Sequence[Sequence[int]] | None = None,
    hosts: int = 1,
    schedule: str | Schedule = "auto",
    captured: bool = False,
    machine: str | PathLike[str] | Machine | None = None,
    **sizes: Any,
) -> Decision:
    """Return the schedule that a call would take, and why. Needs no device and no process group,
    and assumes that ficco's kernels can be compiled.

    The result's ``candidates`` and ``table()`` give the predictions for each compared schedule:
    seconds, share of the ideal, memory; for products also decomposition and contention loss.

    =================================  ============================================================
    operator                           sizes
    =================================  ============================================================
    of products, such as               ``m``: rows that a rank multiplies. All-gather: the rows of
    ``"matmul_reduce_scatter"``        the gathered A. All-to-all: the rows of the rank that has
                                       most. ``n, k``: columns and rows of the local b
    ``"all_gather_attention"``,        ``sequence``: all positions; ``heads``, ``head_size``; as
    ``"ulysses_attention"``            for the call ``kv_heads``, ``batch``, ``causal``,
                                       ``window`` and, for the first, ``placement``
    ``"experts"``                      ``experts``: number of all; ``capacity``: rows of each rank
                                       for each of them; ``k, h, n``: as for the call, with
                                       ``gated`` (the default) up has 2h columns; ``activation``,
                                       ``split``
    =================================  ============================================================

    Args:
        operator: its name.
        world: number of ranks.
        dtype: of the operands, or its name.
        rows: as for operators of products; None for rows as equal as their number allows.
        hosts: number of hosts, each with the same number of ranks.
        schedule: as for the operator; any other than ``"auto"`` is compared with the candidates.
        captured: the call is captured in a graph, so that the host's cost does not count.
        machine: a Machine, or the name or path of one; None for this host's.
        sizes: the sizes of the operator, see the table.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: no engine serves the dtype.
        ConfigError: there is no such machine, or its file is damaged.
    """
    numbers = {"world": world, "hosts": hosts}
    known = ASKABLE[operator].sizes if operator in ASKABLE else {}
    numbers |= {
        name: size
        for name, size in sizes.items()
        if name in known and known[name].kind is int and size is not known[name].default
    }
    for name, number in numbers.items():
        if not _is_size(number):
            raise ValueError(f"{name}: required a whole number of at least 0, got {number!r}")
    sizes |= {name: int(number) for name, number in numbers.items() if name in sizes}
    name = str(dtype).removeprefix("torch.")
    problem = problem_of(operator, int(world), name, sizes, rows=rows, hosts=int(hosts))
    this_host = fingerprint("cuda" if gpu.is_available() else "cpu", problem.local_world)
    setting = where(machine, problem.local_world, this_host, captured=captured)
    return decide(problem, schedule, machine=setting.machine, mode=setting.mode)


@contextmanager
def expect(
    *, overlapped: bool = True, group: ProcessGroup | DeviceMesh | None = None
) -> Iterator[None]:
    """Raise :class:`ficco.NotOverlapped` at each call of ficco's within a block that would hide
    nothing, before it communicates::

        with ficco.expect(overlapped=True):
            model(x).sum().backward()

    Such a call takes ``serial``, with or without a collective. The error names the operator, its
    sizes, the schedule and the reason of the decision. A collective that the compile pass left, of
    a layer with a kernel of its own, or of a layer that an integration leaves to its client raises,
    too. A call of one rank, or with an empty result, has nothing to hide.

    All ranks enter the block; they decide alike, so all of them raise and the group stays usable.
    Blocks hold in all threads, and so in a backward within the block, in compiled functions and in
    captures of graphs, but not in replays. Of nested blocks the innermost one that includes the
    group counts. Within a compiled function, a block breaks the graph.

    Args:
        overlapped: False allows all calls, such as one call within a larger block.
        group: only the calls of this group; default: of all groups.

    Raises:
        ValueError: an argument is wrong.
        NotOverlapped: at a call within the block, see above.
    """
    if not isinstance(overlapped, bool):
        raise ValueError(f"overlapped: required True or False, got {overlapped!r}")
    block = Expectation(overlapped, None if group is None else process_group(group).group_name)
    open_block(block)
    try:
        yield
    finally:
        blocks.remove(block)


#: Passes of :func:`prepare` over each slot, and rounds of calls in a pass. Slots grow in the first
#: pass, which frees the programs of smaller kinds. A slot makes a program in the first round, and
#: records the call in the second, whose operands are at the same addresses.
PASSES, ROUNDS = 2, 2


@tells_refusals
def prepare(
    calls: Callable[[], object] | Sequence[tuple[str, Sequence[int], Sequence[int]]],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> None:
    """Prepare kinds of calls, so that later calls of these kinds take no longer than others.

    The first call of a group connects its ranks, and the first calls of a kind decide its schedule,
    allocate memory, compile kernels and record graphs. A server does this before its first request.
    The calls run several times without gradients. Collective: all ranks of the group call this
    function at the same point of the order of their calls.

    Args:
        calls: a function that makes the calls, such as ``lambda: model(sample)``; or a list of
            products, each with an operator's name, the shape of its left operand on this rank, and
            the shape of ``b``.
        dtype: of the operands of a list; default: PyTorch's default.
        device: of the calls; default: the current GPU for a group with NCCL, else cpu.
        group: the ranks of the calls; default WORLD. Prepare calls of several groups separately.

    Raises:
        ValueError: an argument is wrong.
        SignalTimeout, PeerFailed: a rank does not call this function in time, or has failed.
        RankMismatch: a rank prepares another list, or makes another call.

    Example::

        ficco.prepare(lambda: model(torch.zeros_like(tokens)))
        ficco.prepare([("all_gather_matmul", (1024, 8192), (8192, 1792))], dtype=torch.bfloat16)
    """
    group = process_group(group)
    workspace = workspace_of(group, _device_of(group, device), "prepare")
    workspace.raise_error()
    run: Callable[[], object]
    if callable(calls):
        request, run = "prepare()", calls
    else:
        try:
            listed = [(name, tuple(a), tuple(b)) for name, a, b in calls]
        except (TypeError, ValueError):
            raise ValueError(
                "calls: required a function, or a list of names of operators, each with two "
                f"shapes, got {calls!r}"
            ) from None
        for name, a, b in listed:
            if name not in OPERATORS or len(b) != 2 or not all(map(_is_size, a + b)):
                raise ValueError(
                    f"calls: required one of {', '.join(OPERATORS)}, a shape, and a shape of two "
                    f"dimensions, got {(name, a, b)!r}"
                )
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype: required a torch.dtype, got {dtype!r}; pass torch.bfloat16")
        request = f"prepare({listed}, dtype={dtype})"
        run = partial(_multiply, listed, group, dtype, workspace.engine.device)
    for _ in range(PASSES * SLOTS):
        workspace.meet("prepare", request)  # counts as a call, so that each kind gets every slot
        with torch.no_grad():
            for _ in range(ROUNDS):
                run()
    synchronize(group)


def _multiply(
    listed: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
    group: ProcessGroup,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Call operators of products, named with the shapes of their operands."""
    for name, shape, (k, n) in listed:
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        getattr(operators, name)(zeros(shape), zeros(n, k).t(), group=group)


def memory(group: ProcessGroup | DeviceMesh | None = None) -> int:
    """Return the bytes of symmetric memory that calls hold for a group (default: for all groups).

    Tensors from :func:`empty` are not counted.

    Raises:
        ValueError: ``group`` is not a group that this rank is in.
    """
    return sum(workspace.nbytes for workspace in workspaces(_group_or_all(group)))


def synchronize(group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Wait until this rank's calls in a group have finished (default: in all groups).

    Raises:
        SignalTimeout, RankMismatch, PeerFailed: a call failed, under
            ``options(on_timeout="raise")``.
        ValueError: ``group`` is not a group that this rank is in.
    """
    for workspace in workspaces(_group_or_all(group)):
        try:
            workspace.engine.synchronize()
            workspace.raise_error()
            workspace.interrupt()
        except FiccoError as error:
            workspace.fail(error)
            raise


def close(group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Free the resources of a group, or of all groups: symmetric memory, including tensors from
    :func:`empty`, threads and descriptors.

    Each rank calls it independently, after its last call in the group and before
    ``destroy_process_group``. It waits for this rank's calls, unless one has failed, and at most 3
    seconds for peers that map its memory. Groups still open when the process ends are closed then.

    Graphs that captured calls of the group must not be replayed afterwards. A later call creates a
    new workspace, which is collective: all ranks must have closed the old one.

    The function does not report calls that failed in the meantime; use :func:`synchronize`.

    Raises:
        ValueError: ``group`` is not a group that this rank is in.
        RuntimeError: the device has failed (a BackendError is one case). Everything that can be
            freed is freed nevertheless.
    """
    close_workspaces(_group_or_all(group))


def _group_or_all(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """Return the group of an argument. None stands for all groups here, not for WORLD."""
    return None if group is None else process_group(group)


def _device_of(group: ProcessGroup, name: torch.device | str | None) -> torch.device:
    """Return a device as tensors name it: "cuda" gets the number of the current GPU. Default: the
    device of the group's backend."""
    if name is None:
        name = "cuda" if "nccl" in torch.distributed.get_backend_config(group) else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: required one such as cpu or cuda:0, got {name!r}") from None
    if device.type != "cuda":
        return device
    if not gpu.is_available():
        raise ValueError(f"device: required a GPU that torch sees, got {device} and none is seen")
    return torch.empty(0, device=device).device


def _is_size(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
