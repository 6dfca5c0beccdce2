"""Public functions other than the operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from ficco.ops.entry import tells_refusals
from ficco.ops.operands import process_group
from ficco.problems.sizes import ASKABLE, problem_of
from ficco.problems.specification import MOST
from ficco.runtime.workspace import close as close_workspaces
from ficco.runtime.workspace import workspace_of, workspaces
from ficco.schedules import Schedule


@tells_refusals
def empty(
    shape: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """An uninitialised tensor in memory that every rank of a group can read.

    Pull schedules read an ``a_shard`` in such memory in place; any other they copy first.
    Collective: all ranks of the group call it in the same order with the same shape and dtype.
    In one call of an operator the shards lie in such memory on all ranks, or on none.

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
    if device is None:
        device = "cuda" if "nccl" in torch.distributed.get_backend_config(group) else "cpu"
    # First of all: in the workspace the peers are told of a refusal.
    workspace = workspace_of(group, _device(device), "empty")
    workspace.raise_error()
    if not isinstance(shape, Sequence) or any(not _is_size(size) for size in shape):
        raise ValueError(f"shape: required a sequence of sizes of at least 0, got {shape!r}")
    if math.prod(map(int, shape)) > MOST:
        raise ValueError(f"shape: required at most {MOST} elements, got {shape!r}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: required a torch.dtype or None, got {dtype!r}")
    return workspace.empty(tuple(map(int, shape)), dtype or torch.get_default_dtype())


def addresses(tensor: torch.Tensor, group: ProcessGroup | DeviceMesh | None = None) -> torch.Tensor:
    """Where the same element of every rank's memory is mapped in this process, for kernels that
    store to their peers (:func:`ficco.tile.push`).

    Args:
        tensor: from :func:`empty`, or a view of such a tensor.
        group: the ranks that it was allocated for; default WORLD.

    Returns:
        int64 [W] on the tensor's device: by rank, the address that belongs to the first element of
        ``tensor``, 0 for ranks of other hosts. Valid until the group is closed. Make it before a
        graph is captured.

    Raises:
        ValueError: the tensor is not in symmetric memory of the group.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"tensor: required a torch.Tensor, got {type(tensor).__name__}")
    for workspace in workspaces(process_group(group)):
        if (found := workspace.addresses(tensor)) is not None:
            return torch.tensor(found, dtype=torch.int64, device=tensor.device)
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
    """The schedule that a call would take, and why. Needs no device and no process group, and
    assumes that ficco's kernels can be compiled.

    The result's ``candidates`` and ``table()`` give the predictions for each schedule that was
    compared: seconds, share of the ideal, memory; of products also decomposition and contention
    loss.

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
        hosts: how many hosts the ranks are on, with as many each.
        schedule: as for the operator; any other than ``"auto"`` is compared with the candidates.
        captured: the call is captured in a graph, so that the host's cost does not count.
        machine: a Machine, or the name or path of one; None for this host's.
        sizes: those of the operator.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: no engine serves the dtype.
        ConfigError: there is no such machine, or its file is damaged.
    """
    numbers = {"world": world, "hosts": hosts}
    known = ASKABLE[operator].sizes if operator in ASKABLE else {}
    numbers |= {name: sizes[name] for name in sizes if name in known and known[name].kind is int}
    for name, number in numbers.items():
        if not _is_size(number):
            raise ValueError(f"{name}: required a whole number of at least 0, got {number!r}")
    sizes |= {name: int(number) for name, number in numbers.items() if name in sizes}
    world, hosts = int(world), int(hosts)
    each = world // max(hosts, 1)
    here = fingerprint("cuda" if gpu.is_available() else "cpu", each)
    setting = where(machine, each, here, captured=captured)
    name = str(dtype).removeprefix("torch.")
    problem = problem_of(operator, world, name, sizes, rows=rows, hosts=hosts)
    return decide(problem, schedule, machine=setting.machine, mode=setting.mode)


def memory(group: ProcessGroup | DeviceMesh | None = None) -> int:
    """Bytes of symmetric memory that ficco's calls hold for a group (default: for all groups).

    Tensors from :func:`empty` are not counted.

    Raises:
        ValueError: ``group`` is not a group that this rank is in.
    """
    return sum(workspace.nbytes for workspace in workspaces(_given(group)))


def synchronize(group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Wait until this rank's calls in a group have finished (default: in all groups).

    Raises:
        SignalTimeout, RankMismatch, PeerFailed: a call failed, under
            ``options(on_timeout="raise")``.
        ValueError: ``group`` is not a group that this rank is in.
    """
    for workspace in workspaces(_given(group)):
        try:
            workspace.engine.synchronize()
            workspace.raise_error()
            workspace.interrupt()
        except FiccoError as error:
            workspace.fail(error)
            raise


def close(group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Free what ficco holds for a group, or for all groups: symmetric memory, including that of
    :func:`empty`, threads and descriptors.

    Each rank calls it on its own, after its last call in the group and before
    ``destroy_process_group``. It waits for this rank's calls, unless one has failed, and for peers
    that map its memory at most 3 seconds. Groups still open when the process ends are closed then.

    Graphs that captured calls of the group must not be replayed afterwards. A later call makes a
    new workspace, which is collective: all ranks must have closed the old one.

    Does not report calls that failed in the meantime; use :func:`synchronize` for that.

    Raises:
        ValueError: ``group`` is not a group that this rank is in.
        RuntimeError: the device has failed (a BackendError is one case). Everything that can be
            freed is freed nevertheless.
    """
    close_workspaces(_given(group))


def _given(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """The group of an argument. None stands for all groups here, not for WORLD."""
    return None if group is None else process_group(group)


def _device(name: torch.device | str) -> torch.device:
    """A device as tensors name it: "cuda" gets the number of the current GPU."""
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
