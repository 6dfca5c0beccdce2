"""What PyTorch does of a Plan: products, sums and placement; and the name of its library."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from ficco.dma.buffers import buffers_of
from ficco.dma.engine import Call, Op, Program, in_turn
from ficco.plan import Product, Transfer
from ficco.problem import Problem

#: Does ``out = addend + a @ b`` without a copy of the addend, on a stream; False if it cannot.
AddProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Any], bool]
#: Rows or columns that share a factor of blocks.
BLOCK = 128
#: PyTorch's numbers of these recipes (torch.nn.functional.ScalingType).
_BY_1X128, _BY_128X128 = 4, 5
#: The elementwise functions that a place operation may apply, by name.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": torch.relu}
#: The libraries by PyTorch's names of preferred ones, for its two builds with GPUs.
_ON_CUDA = {"Cublas": "cuBLAS", "Cublaslt": "cuBLASLt"}
_ON_ROCM = {"Cublas": "rocBLAS (through hipBLAS)", "Cublaslt": "hipBLASLt", "Ck": "CK"}
#: The libraries by their names in the configuration of a build for CPUs.
_ON_CPU = {"mkl": "MKL", "open": "OpenBLAS", "accelerate": "Accelerate", "generic": "a plain BLAS"}


def library(device: torch.device) -> str:
    """The library of matrix products on a device, as PyTorch reports it; initializes no GPU."""
    return _cpu_library() if device.type == "cpu" else _gpu_library()


def _gpu_library() -> str:
    by_name = _ON_ROCM if torch.version.hip else _ON_CUDA
    names = " or ".join(by_name.values())
    if not torch.cuda.is_initialized():  # a build for ROCm decides by the devices
        return f"{names}, as PyTorch decides when it first uses a GPU"
    try:
        preferred: Any = torch.backends.cuda.preferred_blas_library()  # an enum of C++
        name = str(preferred.name)
    except (AttributeError, RuntimeError):
        return f"{names}; this PyTorch does not tell"
    return f"{by_name.get(name, name)}, which PyTorch prefers"


def _cpu_library() -> str:
    try:
        info = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
        has_onednn = torch.backends.mkldnn.is_available()
    except (AttributeError, RuntimeError):
        return "this PyTorch does not tell"
    name = _ON_CPU.get(info[1], info[1]) if info else "PyTorch's own loops"
    return name + (", oneDNN for the dtypes that PyTorch gives it" if has_onednn else "")


def accumulation() -> str:
    """How half-precision column pieces add up in float32 with this PyTorch."""
    if _has_out_dtype():
        return "torch.addmm(out_dtype=float32) on the pieces as they are"
    return "a float32 GEMM of upcast pieces (twice their memory while it runs)"


def _has_out_dtype() -> bool:
    """PyTorch 2.8 and later multiply half-precision matrices into float32."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8)


def multiply(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, addend: torch.Tensor | None = None
) -> None:
    """``out = a @ b``, or ``addend + a @ b``, for matrices or a batch of ``a`` and ``out``.

    ``out`` is of the operands' dtype or a wider one. ``addend`` may be ``out``; PyTorch copies any
    other to ``out`` first.
    """
    widened: dict[str, Any] = {}
    if a.dtype != out.dtype:
        if not _has_out_dtype() or not a.is_cuda:
            return multiply(a.float(), b.float(), out, addend)
        widened = {"out_dtype": out.dtype}
    batched = a.dim() == 3
    b = b.unsqueeze(0).expand(a.shape[0], -1, -1) if batched else b
    if addend is None:
        (torch.bmm if batched else torch.mm)(a, b, **widened, out=out)
    else:
        (torch.baddbmm if batched else torch.addmm)(addend, a, b, **widened, out=out)


def add_up(result: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """The sum of parts in their order, in float32, rounded once. ``result`` may be one of them.
    float64 is served on CPUs alone, and keeps its precision."""
    wide = torch.float64 if result.dtype == torch.float64 else torch.float32
    first, *others = parts
    # No pass over memory but the sums themselves. The result is written last.
    total = first.to(wide)
    for i, other in enumerate(others[:-1]):
        total = total + other if i == 0 else total.add_(other)
    if not others:
        result.copy_(total)
    elif result.dtype == wide:
        torch.add(total, others[-1], out=result)
    else:
        result.copy_(total + others[-1])


def place_op(program: Program, transfer: Transfer) -> Op:
    """A copy within this rank, through a function if the transfer names one."""
    src, dst = map(buffers_of(program).view, transfer[:2])
    function = FUNCTIONS.get(transfer.function)

    def op(call: Call) -> None:
        placed = src(call)
        dst(call).copy_(function(placed) if function else placed)

    return op


def matmul_op(
    program: Program,
    products: Sequence[Product],
    add_product: AddProduct | None = None,
    lane: str = "compute0",
) -> Op:
    """Products one after the other; ``add_product`` is tried on those that add to another buffer,
    on the stream of a lane."""
    return in_turn([_product(program, product, add_product, lane) for product in products])


def _product(program: Program, product: Product, add_product: AddProduct | None, lane: str) -> Op:
    places, batch = buffers_of(program), (product.batch, product.a_stride)
    left, right = places.batch(product.a, *batch), places.view(product.b)
    result = places.batch(product.out, product.batch, product.out_stride)
    before = None if product.addend is None else places.view(product.addend)
    accumulate, transposed = product.accumulate, product.transposed

    def op(call: Call) -> None:
        a, b, out = left(call), right(call), result(call)
        if transposed:
            a = a.t()
        addend = out if accumulate else None
        if before is not None:
            addend = before(call)
            if add_product is not None and add_product(addend, a, b, out, call.state[lane]):
                return
        multiply(a, b, out, addend)

    if not product.scales:
        return op
    problem = program.plan.problem
    assert isinstance(problem, Problem) and problem.scaling is not None
    recipe, fast = problem.scaling.recipe, problem.scaling.fast_accum
    rows = places.batch(product.scales[0], product.batch, product.scale_stride)
    cols = places.view(product.scales[1])
    added = None if product.bias is None else places.view(product.bias)

    def scaled(call: Call) -> None:
        a, b, out, factors = left(call), right(call), result(call), rows(call)
        if product.batch == 1:
            a, out, factors = a[None], out[None], factors[None]
        bias = None if added is None else added(call)[0]
        for some, into, of_a in zip(a, out, factors, strict=True):
            multiply_scaled(some, b, into, (of_a, cols(call)), recipe, bias, accumulate, fast)

    return scaled


def multiply_scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    recipe: str,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    fast: bool = False,
) -> None:
    """``out (+)= (a * scale) @ (b * scale) + bias`` for float8 matrices; scales row by row.

    Only float32 is added to. No library adds a float8 product to a sum, so that the product takes
    as much memory while it runs.
    """
    into = torch.empty_like(out) if accumulate else out
    if a.is_cuda:
        _scaled_on_gpu(a, b, into, scales, recipe, bias, fast)
    elif recipe in _recipes_on_cpu():
        torch._scaled_mm(a, b, *scales, bias=bias, out_dtype=into.dtype, out=into)
    else:
        total = dequantised(a, scales[0]) @ dequantised(b, scales[1])
        into.copy_(total if bias is None else total + bias)
    if accumulate:
        out.add_(into)


def dequantised(matrix: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """A matrix in float32, multiplied by factors that one or 128 rows or columns share, or all."""
    for dim, size in enumerate(matrix.shape):
        if factors.shape[dim] not in (1, size):
            factors = factors.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return matrix.float() * factors


@cache
def _recipes_on_cpu() -> tuple[str, ...]:
    """The recipes that ``torch._scaled_mm`` of this PyTorch has on CPUs."""
    one = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    rows, cols = torch.ones(16, 1), torch.ones(1, 16)
    try:
        torch._scaled_mm(one, one.t(), rows, cols, out_dtype=torch.float32)
    except RuntimeError:
        return ("tensor",)
    return ("tensor", "row")


def _scaled_on_gpu(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    recipe: str,
    bias: torch.Tensor | None,
    fast: bool,
) -> None:
    of_a, of_b = map(_aligned, scales)
    if recipe == "block":  # the first version takes no columns of scales that are padded
        how = [of_a.t().contiguous().t()], [_BY_1X128], [0], [_padded(of_b)], [_BY_128X128], [0]
        torch.ops.aten._scaled_mm_v2.out(a, b, *how, bias, out.dtype, [], fast, out=out)
    elif recipe == "row" and out.dtype not in row_results(a.device):  # of a sum
        one = of_a.new_ones(())
        wide = torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast)
        out.copy_(wide.mul_(of_a).mul_(of_b))
    else:
        more: Any = {"bias": bias, "out_dtype": out.dtype, "use_fast_accum": fast}
        torch._scaled_mm(a, b, of_a, of_b, **more, out=out)


def _aligned(scale: torch.Tensor) -> torch.Tensor:
    """A scale without gaps that begins at a multiple of 16 bytes, as the libraries read it."""
    scale = scale.contiguous()
    return scale.clone() if scale.data_ptr() % 16 else scale


def _padded(scale: torch.Tensor) -> torch.Tensor:
    """The scale of blocks of B column by column, each padded to four (cuBLAS, "1D and 2D Block
    Scaling for FP8 Data Types")."""
    rows, cols = scale.shape
    padded = scale.new_zeros((cols, -(-rows // 4) * 4))
    padded[:, :rows] = scale.t()
    return padded.t()


@cache
def row_results(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that a GPU's library makes products by rows in: cuBLASLt's all from CUDA 12.9 on
    and on compute capability 9.0, others bfloat16."""
    release = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if release >= (12, 9) and torch.cuda.get_device_capability(device)[0] == 9:
        return torch.bfloat16, torch.float16, torch.float32
    return (torch.bfloat16,)
