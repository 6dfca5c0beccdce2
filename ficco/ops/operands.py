"""Checks of a call's operands, and the Problem that they define."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from operator import index
from typing import Any, NamedTuple, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.compute.scaled import in_columns
from ficco.plan import Plan
from ficco.problems.products import ITEMSIZE, OPERATORS, Operator, Problem
from ficco.problems.scaling import (
    CASTS,
    FAMILIES,
    MULTIPLE,
    RECIPES,
    RESULTS,
    Scaling,
    factor_count,
)

#: Attribute of a mesh whose order has been checked. Equal meshes can have different groups.
_IN_ORDER = "_ficco_in_order"


def not_a_tensor(name: str, value: Any) -> ValueError:
    """Return the error of an operand that is no tensor."""
    return ValueError(f"{name}: required a torch.Tensor, got {type(value).__name__}")


def no_schedule(value: Any) -> ValueError:
    """Return the error of a schedule that is neither a name nor a Schedule."""
    return ValueError(
        f"schedule: required a name or a ficco.Schedule, got {value!r}; pass one, or 'auto'"
    )


def process_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """Return the group of a call: WORLD by default, or the group of a one-dimensional mesh.

    Raises:
        ValueError: there is no default group, this rank is not in the group, or the mesh has more
            dimensions or another order of ranks.
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
        mesh, group = group, group.get_group()
        if isinstance(group, dist.ProcessGroup):
            _check_order(mesh, group)
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group: required a torch.distributed ProcessGroup that this rank is in, got {group!r}"
        )
    return group


def _check_order(mesh: DeviceMesh, group: ProcessGroup) -> None:
    """Raise ``ValueError`` if a mesh orders its ranks differently from its group: operators join
    the parts of ranks in the order of the group, DTensor in the order of the mesh."""
    if torch.compiler.is_compiling() or getattr(mesh, _IN_ORDER, False):
        return
    ranks = mesh.mesh.flatten().tolist()
    if ranks != dist.get_process_group_ranks(group):
        raise ValueError(
            f"group: required a DeviceMesh with its ranks in rising order, as their group has "
            f"them, got {ranks}; sort them"
        )
    setattr(mesh, _IN_ORDER, True)


def frozen(rows: Any) -> Any:
    """Return rows as a hashable key, valid or not. Integers of any type become ints, including
    those of NumPy and of CPU tensors."""
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
    integral = isinstance(rows, SupportsIndex) and not isinstance(rows, bool)
    return index(rows) if integral else _InvalidSize(rows)


def check_rows(rows: Any) -> None:
    """Raise ``ValueError`` unless rows, from :func:`frozen`, are None, numbers, or a table of them.
    The operators of ``torch.library``, which have no words of their own, take only these."""
    if rows is None:
        return
    sizes: list[Any] = [None]
    if isinstance(rows, tuple):
        sizes = [size for row in rows for size in (row if isinstance(row, tuple) else [row])]
    if not all(isinstance(size, (int, torch.SymInt)) for size in sizes):
        raise ValueError(f"rows: required a list of whole numbers, got {rows!r}; pass one")


def bounds_of(cu_seqlens: Any) -> Any:
    """Return ``cu_seqlens`` as a hashable key: () for None, and for a value that is not a list a
    key that :func:`check_bounds` refuses."""
    if cu_seqlens is None:  # most calls
        return ()
    bounds = frozen(cu_seqlens)
    return bounds if isinstance(bounds, tuple) and bounds else _InvalidSize(cu_seqlens)


def check_bounds(bounds: Any) -> None:
    """Raise ``ValueError`` unless bounds are integers, or empty if no sequences are packed."""
    if not isinstance(bounds, (tuple, list)) or not all(type(bound) is int for bound in bounds):
        raise ValueError(
            "cu_seqlens: required a list of whole numbers on the host, or None where no sequences "
            f"are packed, got {bounds!r}; pass a list, or a tensor on the CPU"
        )


@dataclass(frozen=True)
class _InvalidSize:
    """An invalid number of rows, or invalid bounds. As a key ``4.0`` would equal ``4``, and an
    invalid call would be taken for an earlier valid one."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


#: Name of each operator's left operand.
LEFT = {
    name: "a_shard" if operator.collective == "all-gather" else "a"
    for name, operator in OPERATORS.items()
}


def flat(a: torch.Tensor) -> torch.Tensor:
    """Return A with its leading dimensions flattened into rows."""
    return a.flatten(0, -2) if a.dim() > 2 and a.layout is torch.strided else a


class Scales(NamedTuple):
    """The arguments of a call that concern float8 operands, as the caller passed them."""

    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    quantize: str | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the caller passed, by name."""
        tensors = {"scale_a": self.scale_a, "scale_b": self.scale_b, "bias": self.bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def key(self, b: torch.Tensor) -> tuple[Any, ...]:
        """Return a key of the kind of call. It has the strides of ``b``, since some are refused."""
        tensors = [item is not None and (item.shape, item.dtype, item.device) for item in self[:3]]
        return *tensors, *self[3:], b.stride()

    def columns(self, first: int, last: int, n: int) -> Scales:
        """Return the arguments for a range of columns of b. A piece may begin at ``first``."""
        assert self.scale_b is not None
        scale_b = self.scale_b
        if scale_b.numel() > 1 and (count := scale_b.shape[1]) > 1:
            share = 1 if count == n else RECIPES["block"].b[1]
            scale_b = scale_b[:, first // share : -(-last // share)]
        bias = None if self.bias is None else self.bias[first:last]
        return self._replace(scale_b=scale_b, bias=bias)


def check_types(scales: Scales) -> None:
    """Raise ``ValueError`` for arguments that no call can have, before the call has a number."""
    if scales.quantize is not None:
        if scales.quantize not in CASTS:
            raise ValueError(
                f"quantize: required None or one of {', '.join(map(repr, CASTS))}, got "
                f"{scales.quantize!r}; one scale for all rows is known only when all have been "
                "read: cast them yourself and pass scale_a"
            )
        if scales.scale_a is not None:
            raise ValueError(
                "scale_a: required none with quantize, which makes the scales of the rows that it "
                "casts, got one; leave out one of both"
            )
    for position, value in enumerate(scales[:3]):
        required = position == 1 or position == 0 and scales.quantize is None
        if not isinstance(value, torch.Tensor) and (value is not None or required):
            raise ValueError(
                f"{scales._fields[position]}: required a torch.Tensor, got {type(value).__name__}; "
                "scale_a, scale_b, bias, out_dtype and use_fast_accum are for operands of float8: "
                "pass both scales, or none of these"
            )
    if scales.out_dtype is not None and not isinstance(scales.out_dtype, torch.dtype):
        raise ValueError(f"out_dtype: required a torch.dtype or None, got {scales.out_dtype!r}")
    if not isinstance(scales.use_fast_accum, bool):
        raise ValueError(f"use_fast_accum: required True or False, got {scales.use_fast_accum!r}")


def check_scales(scales: Scales, a: torch.Tensor, b: torch.Tensor, left: str) -> None:
    """Raise ``ValueError`` for scales and memory orders of b that are invalid in any call."""
    for name, tensor in scales.tensors.items():
        if tensor.device != a.device:
            raise ValueError(
                f"{name}: required it on {a.device}, where {left} is, got one on {tensor.device}; "
                "move it"
            )
    rows, cols = b.shape
    column_major = rows < 2 or b.stride(0) == 1 and (cols < 2 or b.stride(1) >= rows)
    aligned = cols < 2 or b.stride(1) % MULTIPLE == 0 or rows % MULTIPLE  # the Problem checks k
    if b.numel() and not (column_major and aligned):
        raise ValueError(
            f"b: required columns that are contiguous, {MULTIPLE} bytes or a multiple apart, for "
            f"operands of float8, got strides {list(b.stride())}; pass weight.t(), or "
            "b.t().contiguous().t()"
        )


def scaling_of(
    scales: Scales, a: torch.Tensor, b: torch.Tensor, each: tuple[int, ...], left: str
) -> Scaling:
    """Return how a call's operands are scaled, which the shapes of the scales tell. ``each``: rows
    by rank if every rank may have the scales of all rows, else empty."""
    scale_a, scale_b = scales.scale_a, scales.scale_b
    assert scale_b is not None
    dtype, right = (str(operand.dtype).removeprefix("torch.") for operand in (a, b))
    out = str(scales.out_dtype or torch.bfloat16).removeprefix("torch.")
    source = dtype if scales.quantize is not None else ""
    if source and (source not in RESULTS or right not in FAMILIES):
        raise ValueError(
            f"quantize: required {left} of {', '.join(RESULTS)} and b of float8, got {a.dtype} and "
            f"{b.dtype}; quantize casts only {left}"
        )
    tensors = [scale_b] if scale_a is None else [scale_a, scale_b]
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}

    def scaling(recipe: str, replicated: bool = False) -> Scaling:
        biased = scales.bias is not None
        return Scaling(recipe, right, out, biased, scales.use_fast_accum, replicated, source)

    if dtype.startswith("float4"):
        return scaling("mxfp4" if "float8_e8m0fnu" in dtypes else "nvfp4")
    if "float8_e8m0fnu" in dtypes:
        return scaling("mxfp8")
    if dtypes != {"float32"}:
        names = " and ".join(f"torch.{name}" for name in sorted(dtypes))
        raise ValueError(
            f"scale_a, scale_b: required torch.float32, got {names}; convert them with .float()"
        )
    if scales.bias is not None and out != "float32":
        expected = getattr(torch, out, None), (b.shape[1],)
        if (scales.bias.dtype, tuple(scales.bias.shape)) != expected:
            raise ValueError(
                f"bias: required [{b.shape[1]}] of out_dtype torch.{out}, got "
                f"{list(scales.bias.shape)} of {scales.bias.dtype}; convert it"
            )
    if scale_a is None:
        assert scales.quantize is not None
        rules = RECIPES[scales.quantize]
        shape = factor_count(b.shape[0], rules.b[0]), factor_count(b.shape[1], rules.b[1])
        if tuple(scale_b.shape) != shape:
            raise ValueError(
                f"scale_b: required {list(shape)} with quantize={scales.quantize!r}, got "
                f"{list(scale_b.shape)}; scale b alike"
            )
        return scaling(scales.quantize)
    got = tuple(flat(scale_a).shape), tuple(scale_b.shape)
    row_counts = {False: a.shape[0], **({True: sum(each)} if each else {})}
    accepted = []
    for recipe, rules in RECIPES.items():
        for replicated, rows in row_counts.items() if not rules.needs else ():
            shapes = (
                (factor_count(rows, rules.a[0]), factor_count(a.shape[1], rules.a[1])),
                (factor_count(b.shape[0], rules.b[0]), factor_count(b.shape[1], rules.b[1])),
            )
            single = recipe == "tensor" and scale_a.numel() == scale_b.numel() == 1
            if single or recipe != "tensor" and got == shapes:
                # If one rank has all rows, its own scales and those of all rows look alike.
                return scaling(recipe, replicated and max(each) < rows)
            accepted.append(" and ".join(str(list(shape)) for shape in shapes))
    raise ValueError(
        f"scale_a, scale_b: required, for these {left} and b, one of the pairs of shapes "
        f"{'; '.join(dict.fromkeys(accepted))}, got {list(scale_a.shape)} and "
        f"{list(scale_b.shape)}; pass one scale for all, one for each row and column, or one for "
        "each 1 x 128 and 128 x 128"
    )


def check_scaled(
    operator: str, a: torch.Tensor, b: torch.Tensor, scales: Scales, each: tuple[int, ...]
) -> None:
    """Raise on scales and sizes that are invalid in any call, as far as a tracer knows them."""
    scaling = scaling_of(scales, flat(a), b, each, LEFT[operator])
    sizes = b.shape[1], b.shape[0]
    if all(isinstance(size, int) for size in sizes):
        rows, dtype = (RECIPES[scaling.recipe].rows,), travelling(a, b, scales)
        common = replace(scaling, replicated=False, source="")  # all operators check these fields
        Problem("matmul_reduce_scatter", rows, *sizes, dtype, scaling=common)


def travelling(a: torch.Tensor, b: torch.Tensor, scales: Scales | None) -> str:
    """Return the name of the dtype of A when it travels, or when it is multiplied."""
    if scales is None or scales.quantize is None:
        return str(a.dtype).removeprefix("torch.")
    family = FAMILIES.get(str(b.dtype).removeprefix("torch."), "OCP")
    return next(name for name, candidate in FAMILIES.items() if candidate == family)


def plain_scales(scales: Scales, plan: Plan) -> dict[str, torch.Tensor]:
    """Return scales and bias as operands of a Plan: row-major if copies move them, else
    column-major and padded, as libraries read scales of blocks."""
    operands, buffers, rank = {}, plan.buffer, plan.rank
    for name, tensor in scales.tensors.items():
        buffer = buffers[name]
        rows, cols = shape = buffer.shapes[rank]
        tensor = tensor.resolve_neg()
        if tensor.shape != shape:
            tensor = tensor.reshape(-1 if cols else rows, cols)[:rows]
        by_rows = buffer.leaves or rows < 2 or (cols < 2 and name != "scale_b")
        operands[name] = tensor.contiguous() if by_rows else in_columns(tensor)
    return operands


def check_operands(
    operator: str, a: torch.Tensor, b: torch.Tensor, scales: Scales | None = None
) -> None:
    """Raise on shapes, dtypes and devices that are invalid in any call; works under a tracer."""
    left, inner = LEFT[operator], OPERATORS[operator].inner
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
    if scales is None and a.dtype != b.dtype:
        raise ValueError(
            f"required one dtype, got {left} {a.dtype} and b {b.dtype}; convert one of them"
        )
    if a.device != b.device:
        raise ValueError(
            f"required one device, got {left} on {a.device} and b on {b.device}; move one of them"
        )
    if scales is not None:
        check_scales(scales, a, b, left)
        return
    if str(a.dtype).removeprefix("torch.") in FAMILIES and not inner:
        raise ValueError(
            f"scale_a, scale_b: required for operands of {a.dtype}, got none; pass the factors of "
            "both operands, one factor for each operand if need be"
        )
    check_dtype(a)


def check_dense(**tensors: torch.Tensor) -> None:
    """Raise ``NotImplementedError`` for sparse tensors, passed by name."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise NotImplementedError(
                f"{name}: sparse tensors are not served; pass a dense one (.to_dense())"
            )


def check_dtype(a: torch.Tensor) -> None:
    """Raise ``NotImplementedError`` for a dtype that no engine of the device serves."""
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
    scales: Scales | None,
) -> Problem:
    """Return the Problem that the operands define; a transposed A that travels is [W, rows, k].

    Raises:
        ValueError, NotImplementedError: an operand is wrong, or not supported.
    """
    left, inner = LEFT[operator], OPERATORS[operator].inner
    check_dense(**{left: a, "b": b}, **(scales.tensors if scales else {}))
    if isinstance(rows, torch.Tensor):
        raise ValueError(
            f"rows: required numbers on the CPU, got a tensor on {rows.device}; pass its "
            ".tolist(), which waits for the device"
        )
    check_operands(operator, a, b, scales)
    sizes = b.shape[1], a.shape[-1], travelling(a, b, scales)
    held, rank, world = prod(a.shape[:-1]), group.rank(), group.size()
    if OPERATORS[operator].blocks:
        table = _blocks(rows, held, rank, world)
        scaling = scaling_of(scales, a, b, (), left) if scales else None
        problem = Problem.of_blocks(operator, table, *sizes, scaling=scaling)
        if inner and problem.product_rows(rank) != b.shape[0]:
            raise ValueError(
                f"required as many rows of b as rank {rank} receives of all ranks' a, got "
                f"{b.shape[0]} and {problem.product_rows(rank)}; pass b with a row for each of "
                "them, and rows= where blocks are not equal"
            )
        return problem
    by_rank = rows_by_rank(OPERATORS[operator], rows, held, rank, world)
    if inner and sum(by_rank) != b.shape[0]:
        raise ValueError(
            f"required as many rows of b as all ranks have of {left}, got {b.shape[0]} and "
            f"{sum(by_rank)}; pass all rows of b, and rows= where ranks have different numbers"
        )
    shared = () if OPERATORS[operator].scatters else by_rank
    scaling = scaling_of(scales, a, b, shared, left) if scales else None
    return Problem(operator, by_rank, *sizes, scaling=scaling)


def rows_by_rank(kind: Operator, rows: Any, held: int, rank: int, world: int) -> tuple[int, ...]:
    """Return the number of rows of each rank. ``held``: rows of this rank's left operand."""
    if kind.returns:  # all-reduce: any split of the sums gives the same result
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
    """Return the table of rows from each rank to each rank."""
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
