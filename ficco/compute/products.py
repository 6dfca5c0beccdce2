"""Products, sums and copies of a Plan by PyTorch, and the name of PyTorch's library."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ficco.compute.buffers import buffers_of
from ficco.compute.program import Call, Op, Program, in_turn
from ficco.compute.ragged_blocks import filled, move_op, pick_op, product_op
from ficco.compute.scaled import BLOCK, multiply_scaled, quantize_into
from ficco.plan import Product, Transfer
from ficco.problems.specification import FUNCTIONS


class Activation(NamedTuple):
    """An elementwise function.

    ``of``: out of place. ``into``: with ``out=``. ``derivative``: (gradient of the result, operand)
    to gradient of the operand."""

    of: Callable[[torch.Tensor], torch.Tensor]
    into: Callable[..., torch.Tensor]
    derivative: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


_aten = torch.ops.aten
#: By the names of :data:`ficco.problems.specification.ACTIVATIONS`.
ACTIVATIONS = {
    "relu": Activation(
        torch.relu,
        partial(torch.clamp_min, min=0),
        partial(_aten.threshold_backward, threshold=0),
    ),
    "silu": Activation(functional.silu, _aten.silu.out, _aten.silu_backward),
    "gelu": Activation(functional.gelu, _aten.gelu.out, _aten.gelu_backward),
}
#: Computes ``out = addend + a @ b`` on a stream without copying the addend; False if unsupported.
AddProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Any], bool]
#: Applies a function, by name, to rows, and writes the result to other rows.
Applies = Callable[[str, torch.Tensor, torch.Tensor], None]
#: The libraries by PyTorch's names of preferred ones, for its two builds with GPUs.
_ON_CUDA = {"Cublas": "cuBLAS", "Cublaslt": "cuBLASLt"}
_ON_ROCM = {"Cublas": "rocBLAS (through hipBLAS)", "Cublaslt": "hipBLASLt", "Ck": "CK"}
#: The libraries by their names in the configuration of a build for CPUs.
_ON_CPU = {"mkl": "MKL", "open": "OpenBLAS", "accelerate": "Accelerate", "generic": "a plain BLAS"}


#: Kernels of products that a program may replace. Not ``bmm``: PyTorch itself replaces it on some
#: GPUs.
KERNELS = ("mm", "addmm", "matmul", "linear", "_scaled_mm", "_grouped_mm")
#: These kernels as ``torch.library`` names them, by type of device.
OVERRIDES = {
    device: frozenset(f"aten/{name}/{key}" for name in KERNELS)
    for device, key in (("cpu", "CPU"), ("cuda", "CUDA"))
}


def refuse_overrides(kernels: frozenset[str]) -> None:
    """Refuse calls while ``torch.library`` replaces some of PyTorch's kernels of products.

    Batch-invariant and deterministic modes, such as vLLM's, replace these kernels. Engines call the
    vendor's library and their own kernels, and replay recorded products, so a call would silently
    bypass the mode.

    Raises:
        NotImplementedError: a replacement is registered.
    """
    if names := sorted(kernels & torch.library._impls):
        raise NotImplementedError(
            f"required PyTorch's own matrix products, got {', '.join(names)} replaced by "
            "torch.library, as batch-invariant modes do; leave the mode, or use collectives and "
            "products of PyTorch's"
        )


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


def release_of_torch() -> tuple[int, int]:
    """Major and minor number of PyTorch's release."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _has_out_dtype() -> bool:
    """PyTorch 2.8 and later multiply half-precision matrices into float32."""
    return release_of_torch() >= (2, 8)


def multiply(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, addend: torch.Tensor | None = None
) -> None:
    """``out = a @ b``, or ``addend + a @ b``, for matrices or a batch of ``a`` and ``out``.

    ``out`` is of the operands' dtype or a wider one. ``addend`` may be ``out``; PyTorch copies any
    other to ``out`` first.
    """
    widened: dict[str, Any] = {}
    if a.dtype != out.dtype:
        # cuBLASLt refuses a product of no terms into a wider dtype.
        if not a.shape[-1] or not _has_out_dtype() or not a.is_cuda:
            return multiply(a.float(), b.float(), out, addend)
        widened = {"out_dtype": out.dtype}
    batched = a.dim() == 3
    b = b.unsqueeze(0).expand(a.shape[0], -1, -1) if batched and b.dim() == 2 else b
    if addend is None:
        (torch.bmm if batched else torch.mm)(a, b, **widened, out=out)
    elif out.shape[0] == 1 and not batched and out.stride(0) < out.shape[1]:
        # One row that lies transposed: PyTorch 2.11 gives cuBLASLt the wrong one of its strides.
        torch.addmm(addend.t(), b.t(), a.t(), **widened, out=out.t())
    else:
        (torch.baddbmm if batched else torch.addmm)(addend, a, b, **widened, out=out)


def add_up(result: torch.Tensor, parts: Sequence[torch.Tensor], factor: float = 1.0) -> None:
    """The sum of parts in their order, times a factor, in float32, rounded once. ``result`` may be
    one of them. float64 is served on CPUs alone, and keeps its precision."""
    wide = torch.float64 if result.dtype == torch.float64 else torch.float32
    first, *others = parts
    # No pass over memory but the sums themselves. The result is written last.
    total = first.to(wide)
    for i, other in enumerate(others[:-1]):
        total = total + other if i == 0 else total.add_(other)
    if factor != 1:
        result.copy_((total + others[-1] if others else total) * factor)
    elif not others:
        result.copy_(total)
    elif result.dtype == wide:
        torch.add(total, others[-1], out=result)
    else:
        result.copy_(total + others[-1])


def apply(function: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """Apply a function to x, in few passes over memory."""
    name, gates = FUNCTIONS[function]
    gate, *up = x.chunk(1 + gates, dim=-1)
    ACTIVATIONS[name].into(gate, out=out)
    for factor in up:
        out.mul_(factor)


def place_op(program: Program, transfer: Transfer, applies: Applies = apply) -> Op:
    """Copy within this rank, through the transfer's function if it names one."""
    function = transfer.function
    if program.plan.buffer[transfer.src.buffer].indexed:
        return pick_op(program, transfer)
    if filled(program.plan, transfer.src):
        move = partial(_applied, applies, function) if function else torch.Tensor.copy_
        return move_op(program, transfer, move)
    places, batch = buffers_of(program), transfer.batch
    src = places.batch(transfer.src, batch, transfer.src_stride)
    dst = places.batch(transfer.dst, batch, transfer.dst_stride)
    if transfer.factors is not None:
        factors = places.view(transfer.factors)
        share = 1, transfer.dst.cols if transfer.factors.cols == 1 else BLOCK  # rows, columns
        return lambda call: quantize_into(dst(call), factors(call), src(call), share)
    if function:
        return lambda call: applies(function, src(call), dst(call))

    def op(call: Call) -> None:
        to, at = dst(call), src(call)
        if to.data_ptr() != at.data_ptr():  # a caller may pass its part of the result
            to.copy_(at)

    return op


def _applied(applies: Applies, function: str, out: torch.Tensor, x: torch.Tensor) -> None:
    applies(function, x, out)


def matmul_op(
    program: Program,
    products: Sequence[Product],
    add_product: AddProduct | None = None,
    lane: str = "compute0",
) -> Op:
    """Products, one after the other. ``add_product`` is tried for products that add another buffer,
    on the stream of a lane."""
    return in_turn([_product(program, product, add_product, lane) for product in products])


def _product(program: Program, product: Product, add_product: AddProduct | None, lane: str) -> Op:
    if filled(program.plan, product.a):
        return product_op(program, product)
    places, batch = buffers_of(program), (product.batch, product.a_stride)
    left = places.batch(product.a, *batch)
    right = places.view(product.b)
    if product.b_stride:
        right = places.batch(product.b, product.batch, product.b_stride)
    result = places.batch(product.out, product.batch, product.out_stride)
    before = None if product.addend is None else places.view(product.addend)
    accumulate, transposed = product.accumulate, product.transposed
    dtypes = {program.plan.buffer[one.buffer].dtype for one in (product.a, product.out)}
    if len(dtypes) == 1 and product == Product(*product[:3], terms=product.terms):

        def plain(call: Call) -> None:
            torch.mm(left(call), right(call), out=result(call))

        return plain

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

    if not product.factors:
        return op
    scaling = program.plan.problem.scaling
    assert scaling is not None
    recipe, fast = scaling.recipe, scaling.fast_accum
    rows = places.batch(product.factors[0], product.batch, product.factor_stride)
    cols = places.view(product.factors[1])
    added = None if product.bias is None else places.view(product.bias)

    def scaled(call: Call) -> None:
        whole = left(call), result(call), rows(call)
        b, of_b, bias = right(call), cols(call), None if added is None else added(call)[0]
        for a, out, of_a in [whole] if product.batch == 1 else zip(*whole, strict=True):
            multiply_scaled(a, b, out, (of_a, of_b), recipe, bias, accumulate, fast)

    return scaled
