"""Products of scaled float8 operands by PyTorch's libraries, and the limits of each library."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from ficco.problems.products import Problem
from ficco.problems.scaling import ALL, FAMILIES, RECIPES, Scaling, factor_count

#: Rows or columns of a block that shares a factor.
BLOCK = 128
#: PyTorch's numbers of the recipes for blocks (torch.nn.functional.ScalingType).
_BY_1X128, _BY_128X128 = 4, 5
#: The first compute capability with float8, and the only one whose library takes blocks.
FIRST, HOPPER = (8, 9), 9
#: The first release of CUDA whose library has factors of rows and of blocks.
BY_LIBRARY = (12, 9)
#: The families of float8 of AMD's architectures.
ARCHITECTURES = {"gfx942": "fnuz", "gfx950": "OCP"}


@cache
def float8_of(device: torch.device) -> torch.dtype:
    """The e4m3 dtype that a device multiplies."""
    if device.type == "cuda" and torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        if ARCHITECTURES.get(name) == "fnuz":
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


# As torch.compiler.assume_constant_result does, which would import the compiler at once.
float8_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    """``out (+)= (a * scale) @ (b * scale) + bias`` for float8 matrices; scales as in a Plan.

    ``accumulate`` needs a float32 result. No library accumulates float8 products, so a temporary of
    the result's size is used.
    """
    into = out
    # PyTorch 2.11 writes wrong values on Intel's CPUs if the result's rows are not contiguous.
    if accumulate or not (a.is_cuda or out.is_contiguous()):
        into = torch.empty_like(out, memory_format=torch.contiguous_format)
    if a.is_cuda:
        _scaled_on_gpu(a, b, into, scales, recipe, bias, fast)
    else:
        with torch.autocast("cpu", enabled=False):  # it rounds the float32 within these products
            _scaled_on_cpu(a, b, into, scales, recipe, bias)
    if accumulate:
        out.add_(into)
    elif into is not out:
        out.copy_(into)


def _scaled_on_cpu(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    recipe: str,
    bias: torch.Tensor | None,
) -> None:
    if recipe in _recipes_on_cpu():
        torch._scaled_mm(a, b, *scales, bias=bias, out_dtype=out.dtype, out=out)
    else:
        total = dequantized(a, scales[0]) @ dequantized(b, scales[1])
        out.copy_(total if bias is None else total + bias)


def dequantized(matrix: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Matrix in float32, multiplied by the factors of its rows, columns or blocks."""
    for dim, size in enumerate(matrix.shape):
        if factors.shape[dim] not in (1, size):
            factors = factors.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return matrix.float() * factors


def quantized(
    matrix: torch.Tensor, share: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix to float8. Blocks of ``share`` rows and columns share a float32 scale.

    The scale of zeros is not zero. Values that share a scale with NaN or infinity become NaN when
    they are dequantized.
    """
    sizes = matrix.shape
    counts = [factor_count(size, one) for size, one in zip(sizes, share, strict=True)]
    each = [max(size, 1) if one == ALL else one for size, one in zip(sizes, share, strict=True)]
    spare = [count * one - size for count, one, size in zip(counts, each, sizes, strict=True)]
    padded = F.pad(matrix, (0, spare[1], 0, spare[0])) if any(spare) else matrix
    blocks = padded.reshape(counts[0], each[0], counts[1], each[1])
    largest = torch.linalg.vector_norm(blocks, torch.inf, (1, 3)).float() / torch.finfo(dtype).max
    # Up to a power of two: with any bit of the significand set, the addition carries into the
    # exponent, and the mask takes the significand off.
    bits = largest.clamp(min=torch.finfo(torch.float32).tiny).view(torch.int32)
    scale = (bits + 0x7FFFFF & 0x7F800000).view(torch.float32)
    # A power of two is exact in all dtypes but one with few exponents.
    inverse = scale.reciprocal()[:, None, :, None]
    if blocks.dtype != torch.float16:
        inverse = inverse.to(blocks.dtype)
    cast = (blocks * inverse).to(dtype).view(padded.shape)
    return cast[: sizes[0], : sizes[1]].contiguous(), scale


def quantize_into(
    out: torch.Tensor, factors: torch.Tensor, matrix: torch.Tensor, share: tuple[int, int]
) -> None:
    """:func:`quantized`, into existing tensors."""
    cast, scale = quantized(matrix, share, out.dtype)
    out.copy_(cast)
    factors.copy_(scale)


@cache
def _recipes_on_cpu() -> tuple[str, ...]:
    """Recipes that ``torch._scaled_mm`` of this PyTorch supports on CPUs."""
    one = torch.zeros(16, 16, device="cpu").to(torch.float8_e4m3fn)
    rows, cols = (torch.ones(shape, device="cpu") for shape in ((16, 1), (1, 16)))
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
    if bias is not None and out.dtype == torch.float32:  # unsupported; occurs in sums over k
        _scaled_on_gpu(a, b, out, scales, recipe, None, fast)
        out.add_(bias)
        return
    of_a, of_b = scales if recipe == "block" else map(_aligned, scales)
    if recipe == "block":  # `_scaled_mm` (v1) takes no padded columns of scales
        flat = of_a.t().flatten().contiguous()  # sets the stride of a single column, too
        columns = flat.view(of_a.shape[::-1]).t()
        how = [columns], [_BY_1X128], [0], [_padded(of_b)], [_BY_128X128], [0]
        torch.ops.aten._scaled_mm_v2.out(a, b, *how, bias, out.dtype, [], False, out=out)
    elif recipe == "row" and out.dtype not in row_results(a.device):  # for a sum of parts of k
        one = of_a.new_ones(())
        wide = torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast)
        out.copy_(wide.mul_(of_a).mul_(of_b))
    else:
        more: Any = {"bias": bias, "out_dtype": out.dtype, "use_fast_accum": fast}
        torch._scaled_mm(a, b, of_a, of_b, **more, out=out)


def _aligned(scale: torch.Tensor) -> torch.Tensor:
    """Contiguous scale, aligned to 16 bytes as the libraries require."""
    scale = scale.contiguous()
    return scale.clone() if scale.data_ptr() % 16 else scale


def in_columns(scale: torch.Tensor) -> torch.Tensor:
    """Scale in column-major order, each column padded to a multiple of four, as the library reads
    scales of B's blocks (cuBLAS, "1D and 2D Block Scaling for FP8 Data Types")."""
    rows, cols = scale.shape
    if rows % 4 == 0:
        return scale.t().contiguous().t()
    padded = scale.new_zeros((cols, -(-rows // 4) * 4))
    padded[:, :rows] = scale.t()
    return padded.t()[:rows]


def _padded(scale: torch.Tensor) -> torch.Tensor:
    """Scale with the padding of its columns; a copy unless :func:`in_columns` created it."""
    rows, cols = scale.shape
    pitch = -(-rows // 4) * 4
    needed = (scale.storage_offset() + pitch * cols) * scale.element_size()
    if scale.stride() != (1, pitch) or scale.untyped_storage().nbytes() < needed:
        scale = in_columns(scale)
    return scale.as_strided((pitch, cols), (1, pitch))


@cache
def row_results(device: torch.device) -> tuple[torch.dtype, ...]:
    """Result dtypes of a GPU's library for products with factors of rows."""
    names = _row_results(torch.cuda.get_device_capability(device), cuda_release())
    return tuple(getattr(torch, name) for name in names)


def cuda_release() -> tuple[int, ...]:
    """Release of CUDA that PyTorch was built with; (0, 0) if none."""
    return tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))


def _row_results(capability: tuple[int, int], release: tuple[int, ...]) -> tuple[str, ...]:
    if release >= BY_LIBRARY and capability[0] == HOPPER:
        return "bfloat16", "float16", "float32"
    return ("bfloat16",)


def lacking_on_cuda(problem: Problem, capability: tuple[int, int], release: tuple[int, ...]) -> str:
    """Reason why NVIDIA's library cannot multiply the float8 operands of a problem, for a compute
    capability and a release of CUDA; empty if it can."""
    scaling = problem.scaling
    assert scaling is not None
    dtypes, (major, minor) = (problem.dtype, scaling.right), capability
    if capability < FIRST:
        return f"float8 needs compute capability 8.9 or higher, got {major}.{minor}; pass bfloat16"
    if "fnuz" in map(FAMILIES.get, dtypes):
        return f"{problem.dtype} is for gfx942; quantize to float8_e4m3fn"
    if dtypes == ("float8_e5m2", "float8_e5m2"):
        return (
            "the library multiplies no float8_e5m2 by float8_e5m2; quantize one of them to "
            "float8_e4m3fn"
        )
    if scaling.recipe == "block":
        if "float8_e5m2" in dtypes:
            return "factors of blocks are for float8_e4m3fn, got float8_e5m2; quantize to that"
        if major != HOPPER or release < BY_LIBRARY or not hasattr(torch, "_scaled_mm_v2"):
            return (
                "factors of blocks need compute capability 9.0, CUDA 12.9 or later and a PyTorch "
                f"with torch.nn.functional.scaled_mm, got {major}.{minor}, "
                f"{'.'.join(map(str, release))} and {torch.__version__}; pass those of rows"
            )
        if odd := [rows for rows in problem.heights if rows % scaling.rules.rows]:
            return (
                f"factors of blocks need {RECIPES['block'].rows} rows or a multiple for each rank, "
                f"got {odd[0]}; pad with zeros"
            )
    return _by_rows(scaling, _row_results(capability, release))


def lacking_on_hip(problem: Problem, arch: str) -> str:
    """Reason why AMD's library cannot multiply the float8 operands of a problem on an architecture;
    empty if it can. Never run on a card."""
    scaling = problem.scaling
    assert scaling is not None
    dtypes, name = (problem.dtype, scaling.right), arch.partition(":")[0]
    family = ARCHITECTURES.get(name)
    if family is None:
        return f"float8 needs {' or '.join(ARCHITECTURES)}, got {name}; pass bfloat16"
    if set(map(FAMILIES.get, dtypes)) != {family}:
        right = " or ".join(dtype for dtype, one in FAMILIES.items() if one == family)
        return f"{name} multiplies {right}, got {' and '.join(dtypes)}; quantize to that"
    if scaling.recipe == "block":
        return "the library takes no factors of blocks; pass those of rows"
    if scaling.recipe == "row" and "float8_e5m2" in scaling.right:
        return "the library takes no float8_e5m2 as b by rows; quantize it to float8_e4m3fn"
    return _by_rows(scaling, ("bfloat16",))


def _by_rows(scaling: Scaling, served: tuple[str, ...]) -> str:
    if scaling.recipe != "row" or scaling.out in served:
        return ""
    return (
        f"the library makes products by rows in {', '.join(served)}, got out_dtype {scaling.out}; "
        "pass bfloat16"
    )
