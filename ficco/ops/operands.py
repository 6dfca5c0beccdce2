"""Checks of a call's operands, and the Problem that they make up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import index
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.dma.engine import Symmetric
from ficco.problem import ITEMSIZE, OPERATORS, Operator, Problem
from ficco.workspace import Workspace


def process_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """The group of a call: WORLD by default, and for a mesh of one dimension that of the mesh.

    Raises:
        ValueError: this is not a group that this rank is in, or the mesh has more dimensions.
    """
    if group is None and (group := dist.group.WORLD) is None:
        raise ValueError(
            "group: required an initialised default process group, got none; call "
            "torch.distributed.init_process_group or pass group="
        )
    if isinstance(group, dist.ProcessGroup):  # most calls; the rest costs them a microsecond
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: required a mesh of one dimension, got one of {group.ndim}, "
                f"{group.mesh_dim_names}; pass the dimension that the operands are sharded over, "
                "as mesh['tp']"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group: required a torch.distributed ProcessGroup that this rank is in, got {group!r}"
        )
    return group


def frozen(rows: Any) -> Any:
    """Rows as a hashable key, valid or not. Whole numbers of any type, including NumPy's and those
    of tensors on the CPU, become ints."""
    if rows is None:  # most calls; the checks below take microseconds
        return None
    if isinstance(rows, (list, tuple)):
        return tuple([row if type(row) is int else frozen(row) for row in rows])
    if isinstance(rows, torch.Tensor) and rows.device.type != "cpu":
        return rows  # refused by problem_of_operands: reading it would wait for the device
    if hasattr(rows, "tolist"):
        return frozen(rows.tolist())
    if isinstance(rows, Iterable) and not isinstance(rows, str):
        return tuple([frozen(row) for row in rows])
    if isinstance(rows, torch.SymInt):
        return rows
    whole = isinstance(rows, SupportsIndex) and not isinstance(rows, bool)
    return index(rows) if whole else _NoSize(rows)


@dataclass(frozen=True)
class _NoSize:
    """What was given as a number of rows and is none. As a key ``4.0`` would equal ``4``, and a
    call that must be refused would be taken for one that was served before."""

    given: Any

    def __repr__(self) -> str:
        return repr(self.given)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """An operand whose memory holds its values; the memory of a view such as ``z.conj().imag``
    holds their negatives."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def flat(a: torch.Tensor) -> torch.Tensor:
    """A with its leading dimensions flattened into rows."""
    return a.flatten(0, -2) if a.dim() > 2 and a.layout is torch.strided else a


def readable(
    workspace: Workspace, a: torch.Tensor
) -> tuple[torch.Tensor, tuple[Symmetric, int] | None]:
    """A with contiguous rows, for copies to read; and its place in symmetric memory, if it is in
    any."""
    if a.layout is not torch.strided or a.dim() < 2:
        return a, None  # refused by problem_of_operands
    if (a.stride(1) != 1 and a.shape[1] > 1) or (a.stride(0) < a.shape[1] and a.shape[0] > 1):
        a = a.contiguous()  # copy engines cannot move strided elements
    return a, workspace.symmetric_source(a)


def left_of(operator: str) -> str:
    """The operator's name for its left operand."""
    return "a_shard" if OPERATORS[operator].collective == "all-gather" else "a"


def check_operands(operator: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Refuse shapes, dtypes and devices that no call can have; a tracer can check this much."""
    left, inner = left_of(operator), OPERATORS[operator].inner
    if a.dim() < 2 or b.dim() != 2:
        shape = "[..., m/W, k]" if left == "a_shard" else "[..., m, k]"
        raise ValueError(
            f"required {left} {shape} and b [{'m' if inner else 'k'}, n], got shapes "
            f"{list(a.shape)} and {list(b.shape)}; reshape them"
        )
    if not inner and a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"required as many columns of {left} as rows of b, got k={a.shape[-1]} and "
            f"k={b.shape[0]}; pass b as [k, n] (an nn.Linear weight as weight.t())"
        )
    if a.dtype != b.dtype:
        raise ValueError(
            f"required one dtype, got {left} {a.dtype} and b {b.dtype}; convert one of them"
        )
    if a.device != b.device:
        raise ValueError(
            f"required one device, got {left} on {a.device} and b on {b.device}; move one of them"
        )
    check_dtype(a)


def check_dtype(a: torch.Tensor) -> None:
    """Refuse a dtype that no engine of the device serves."""
    served = [name for name in ITEMSIZE if name != "float64" or a.device.type == "cpu"]
    if str(a.dtype).removeprefix("torch.") not in served:
        raise NotImplementedError(
            f"dtype {a.dtype} is not served on {a.device.type}; use one of {', '.join(served)}"
        )


def problem_of_operands(
    group: ProcessGroup,
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    rows: Any,
    return_gathered: bool,
    symmetric: bool,
) -> Problem:
    """The Problem that the operands make up.

    Raises:
        ValueError, NotImplementedError: they are wrong, or not supported.
    """
    left, inner = left_of(operator), OPERATORS[operator].inner
    for name, tensor in ((left, a), ("b", b)):
        if tensor.layout is not torch.strided:
            raise NotImplementedError(
                f"{name}: sparse tensors are not served; pass a dense one (.to_dense())"
            )
    if isinstance(rows, torch.Tensor):
        raise ValueError(
            f"rows: required numbers on the CPU, got a tensor on {rows.device}; pass its "
            ".tolist(), which waits for the device"
        )
    check_operands(operator, a, b)
    sizes = b.shape[1], a.shape[1], str(a.dtype).removeprefix("torch.")
    held, rank, world = a.shape[0], group.rank(), group.size()
    if OPERATORS[operator].blocks:
        table = _blocks(rows, held, rank, world)
        problem = Problem.of_blocks(operator, table, *sizes)
        if inner and problem.product_rows(rank) != b.shape[0]:
            raise ValueError(
                f"required as many rows of b as rank {rank} receives of all ranks' a, got "
                f"{b.shape[0]} and {problem.product_rows(rank)}; pass b with a row for each of "
                "them, and rows= where blocks are not equal"
            )
        return replace(problem, symmetric=symmetric, return_gathered=return_gathered)
    each = rows_by_rank(OPERATORS[operator], rows, held, rank, world)
    if inner and sum(each) != b.shape[0]:
        raise ValueError(
            f"required as many rows of b as all ranks have of {left}, got {b.shape[0]} and "
            f"{sum(each)}; pass all rows of b, and rows= where ranks have different numbers"
        )
    return Problem(operator, each, *sizes, return_gathered, symmetric)


def rows_by_rank(kind: Operator, rows: Any, held: int, rank: int, world: int) -> tuple[int, ...]:
    """Rows that belong to each rank. ``held``: rows of this rank's left operand."""
    if kind.returns:  # all-reduce: which rank sums which rows does not show in the result
        return tuple(held // world + (peer < held % world) for peer in range(world))
    if rows is None:
        if not kind.scatters:
            return (held,) * world
        if held % world:
            raise ValueError(
                f"a: required rows that {world} ranks can share equally, got {held}; say by rows= "
                "how many each of them gets"
            )
        return (held // world,) * world
    if not isinstance(rows, tuple):
        raise ValueError(f"rows: required {world} numbers of rows, one per rank, got {rows!r}")
    if len(rows) != world or not all(map(_is_size, rows)):
        raise ValueError(
            f"rows: required {world} numbers of rows, one per rank, none negative, got {list(rows)}"
        )
    if kind.scatters and sum(rows) != held:
        raise ValueError(
            f"rows: required numbers that add up to the {held} rows of a, got {list(rows)} with "
            f"the sum {sum(rows)}"
        )
    if not kind.scatters and rows[rank] != held:
        raise ValueError(
            f"rows: required a_shard to have rows[{rank}]={rows[rank]} rows on rank {rank}, got "
            f"{held}"
        )
    return rows


def _blocks(rows: Any, held: int, rank: int, world: int) -> tuple[tuple[int, ...], ...]:
    """The table of rows from each rank to each rank."""
    if rows is None:
        if held % world:
            raise ValueError(
                f"a: required rows for {world} equal blocks, got {held}; say by rows= how many "
                "each rank sends to each"
            )
        return ((held // world,) * world,) * world
    square = isinstance(rows, tuple) and len(rows) == world
    square = square and all(isinstance(row, tuple) and len(row) == world for row in rows)
    if not square or not all(_is_size(size) for row in rows for size in row):
        raise ValueError(
            f"rows: required a table of {world} x {world} numbers of rows, rows[i][j] from rank i "
            f"to rank j, none negative, got {rows!r}"
        )
    if sum(rows[rank]) != held:
        raise ValueError(
            f"rows: required a to have the {sum(rows[rank])} rows of rows[{rank}] on rank {rank}, "
            f"got {held}"
        )
    table: tuple[tuple[int, ...], ...] = rows
    return table


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
