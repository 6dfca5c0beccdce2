"""Public functions beside the operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING

import torch

from ficco.errors import FiccoError
from ficco.heuristics import Decision, decide, problem_of, where
from ficco.machine import Fingerprint, Machine
from ficco.ops.operands import process_group
from ficco.problem import MOST
from ficco.schedules import Schedule
from ficco.workspace import close as close_workspaces
from ficco.workspace import workspace_of, workspaces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def empty(
    shape: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """An uninitialised tensor in memory that every rank of a group can read.

    A pull schedule reads such an ``a_shard`` in place, where it would copy any other first.
    Collective: all ranks of the group call it in the same order with the same shape. The shards of
    a call lie in such memory on all ranks, or on none.

    Args:
        shape, dtype: as for :func:`torch.empty`; dtype defaults to PyTorch's default.
        group: the ranks that can read it; default WORLD.
        device: default: the current GPU for a NCCL group, else cpu.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: no engine serves the device.
        RankMismatch: the ranks ask for different ones, or one of them gets no memory.
    """
    if not isinstance(shape, Sequence) or any(not _is_size(size) for size in shape):
        raise ValueError(f"shape: required a sequence of sizes of at least 0, got {shape!r}")
    if math.prod(map(int, shape)) > MOST:
        raise ValueError(f"shape: required at most {MOST} elements, got {shape!r}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: required a torch.dtype or None, got {dtype!r}")
    group = process_group(group)
    if device is None:
        device = "cuda" if "nccl" in str(torch.distributed.get_backend(group)) else "cpu"
    workspace = workspace_of(group, _device(device))
    workspace.raise_error()
    return workspace.empty(tuple(map(int, shape)), dtype or torch.get_default_dtype())


def explain(
    operator: str,
    *,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype | str = "bfloat16",
    world: int,
    rows: Sequence[int] | Sequence[Sequence[int]] | None = None,
    schedule: str | Schedule = "auto",
    captured: bool = False,
    machine: str | PathLike[str] | Machine | None = None,
    search: bool = False,
) -> Decision:
    """The schedule that a call would take, and why; needs no device and no process group. That
    ficco's kernels can be compiled is taken for granted.

    The result's ``candidates`` and ``table()`` say what is predicted of each schedule that was
    compared: seconds, share of the ideal, decomposition and contention loss, memory.

    Args:
        operator: name of the operator, such as ``"matmul_reduce_scatter"``.
        m: rows that a rank multiplies (all-gather: those of the gathered A; all-to-all: of the rank
            with most); n, k: columns and rows of the local b.
        dtype: of the operands, or its name.
        world: number of ranks.
        rows: as the operator takes it; None for rows as equal as their number allows.
        schedule: as the operator takes it; another than ``"auto"`` is compared with the others.
        captured: the call is captured in a graph, so that the host's cost does not count.
        machine: a Machine, or the name or path of one; None for this host's.
        search: look beyond the named schedules.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: no engine serves the dtype.
        ConfigError: there is no such machine, or its file is damaged.
    """
    for size_of, size in (("m", m), ("n", n), ("k", k), ("world", world)):
        if not _is_size(size):
            raise ValueError(f"{size_of}: required a whole number of at least 0, got {size!r}")
    m, n, k, world = int(m), int(n), int(k), int(world)  # NumPy's, too
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    asked = where(machine, world, Fingerprint(here, world), captured=captured)
    name = str(dtype).removeprefix("torch.")
    problem = problem_of(operator, m, n, k, name, world, rows)
    return decide(problem, schedule, machine=asked.machine, mode=asked.mode, search=search)


def memory(group: ProcessGroup | DeviceMesh | None = None) -> int:
    """Bytes of symmetric memory that ficco's calls hold for a group (default: for all groups)."""
    return sum(workspace.nbytes for workspace in workspaces(_asked(group)))


def synchronize(group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Wait until this rank's calls are over (of a group, default: of all groups).

    Raises:
        SignalTimeout, RankMismatch, PeerFailed: a call failed, under
            ``options(on_timeout="raise")``.
    """
    for workspace in workspaces(_asked(group)):
        try:
            workspace.engine.synchronize()
            workspace.raise_error()
            workspace.interrupt()
        except FiccoError as error:
            workspace.fail(error)
            raise


def close(group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Free what ficco holds for a group, or for all groups: symmetric memory, that of
    :func:`empty` too, threads and descriptors.

    Every rank calls it for itself, behind its last call of the group and before
    ``destroy_process_group``. It waits for this rank's calls, unless one has failed, and for no
    peer. The end of the process closes what is open. Graphs that captured calls of the group must
    not be replayed any more. A later call makes a new workspace, which is collective: all ranks
    have to have closed the old one.

    That a call failed in the meantime is not told; :func:`synchronize` tells it.

    Raises:
        ValueError: ``group`` is none that this rank is in.
        RuntimeError: the device has failed, of which a BackendError is one case; all that can be
            freed is freed nevertheless.
    """
    close_workspaces(_asked(group))


def _asked(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """The group that is meant, None for all: what holds nothing is no reason to do nothing."""
    return None if group is None else process_group(group)


def _device(asked: torch.device | str) -> torch.device:
    """A device as tensors name it, with the number that "cuda" leaves out."""
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: required one such as cpu or cuda:0, got {asked!r}") from None
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device: required a GPU that torch sees, got {device} and none is seen")
    return torch.empty(0, device=device).device


def _is_size(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
