"""Public functions beside the operators."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

import torch

from ficco.errors import FiccoError
from ficco.heuristics import Decision, decide, problem_of, where
from ficco.machine import Fingerprint, Machine
from ficco.ops.call import process_group
from ficco.schedules import Schedule
from ficco.workspace import workspace_of, workspaces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def empty(
    shape: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """An uninitialised tensor in memory that every rank of a group can read.

    A pull schedule reads such an ``a_shard`` in place, where it would copy any other first.
    Collective: all ranks of the group call it in the same order with the same shape.

    Args:
        shape, dtype: as for :func:`torch.empty`; dtype defaults to PyTorch's default.
        group: the ranks that can read it; default WORLD.
        device: default: the current GPU for a NCCL group, else cpu.
    """
    shape = tuple(shape)
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"shape: required sizes of at least 0, got {list(shape)}")
    group = process_group(group)
    if device is None:
        on_gpu = "nccl" in str(torch.distributed.get_backend(group))
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
    workspace = workspace_of(group, torch.device(device))
    workspace.raise_error()
    return workspace.empty(shape, dtype or torch.get_default_dtype())


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
    """The schedule that a call would take, and why; needs no device and no process group.

    The result's ``candidates`` and ``table()`` say what is predicted of each schedule that was
    compared: seconds, share of the ideal, decomposition and contention loss, memory.

    Args:
        operator: name of the operator, such as ``"matmul_reduce_scatter"``.
        m: rows that a rank multiplies (all-gather: those of the gathered A; all-to-all: of the rank
            with most); n, k: columns and rows of the local b.
        world: number of ranks.
        rows: as the operator takes it; None for as equal ones as there are.
        captured: the call is captured in a graph, so that the host's cost does not count.
        machine: a Machine, or the name or path of one; None for this host's.
        search: look beyond the named schedules.

    Raises:
        ValueError: an argument is wrong.
        ConfigError: there is no such machine, or its file is damaged.
    """
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    asked = where(machine, world, Fingerprint(here, world), captured=captured)
    name = str(dtype).removeprefix("torch.")
    problem = problem_of(operator, m, n, k, name, world, rows)
    return decide(problem, schedule, machine=asked.machine, mode=asked.mode, search=search)


def memory(group: ProcessGroup | None = None) -> int:
    """Bytes of symmetric memory that ficco's calls hold for a group (default: for all groups)."""
    return sum(workspace.nbytes for workspace in workspaces(group))


def synchronize(group: ProcessGroup | None = None) -> None:
    """Wait until this rank's calls are over (of a group, default: of all groups).

    Raises:
        SignalTimeout, RankMismatch: a call failed, under ``options(on_timeout="raise")``.
    """
    for workspace in workspaces(group):
        workspace.engine.synchronize()
        workspace.raise_error()
        try:
            workspace.interrupt()
        except FiccoError as error:
            workspace.fail(error)
            raise
