"""The library behind PyTorch's matrix products, in words."""

from __future__ import annotations

import re

import torch

#: What PyTorch's names of preferred libraries stand for, by the build.
_ON_CUDA = {"Cublas": "cuBLAS", "Cublaslt": "cuBLASLt"}
_ON_ROCM = {"Cublas": "rocBLAS (through hipBLAS)", "Cublaslt": "hipBLASLt", "Ck": "CK"}
#: What builds for CPUs call their library.
_ON_CPU = {"mkl": "MKL", "open": "OpenBLAS", "accelerate": "Accelerate", "generic": "a plain BLAS"}


def library(device: torch.device) -> str:
    """What multiplies matrices on a device, as PyTorch says. Never begins to use a GPU."""
    return _cpu_library() if device.type == "cpu" else _gpu_library()


def _gpu_library() -> str:
    by_name = _ON_ROCM if torch.version.hip else _ON_CUDA
    names = " or ".join(by_name.values())
    if not torch.cuda.is_initialized():  # a build for ROCm decides by the devices
        return f"{names}, as PyTorch decides when it first uses a GPU"
    try:
        name = torch.backends.cuda.preferred_blas_library().name
    except (AttributeError, RuntimeError):
        return f"{names}; this PyTorch does not tell"
    return f"{by_name.get(name, name)}, which PyTorch prefers"


def _cpu_library() -> str:
    try:
        found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
        halves = torch.backends.mkldnn.is_available()
    except (AttributeError, RuntimeError):
        return "this PyTorch does not tell"
    name = _ON_CPU.get(found[1], found[1]) if found else "PyTorch's own loops"
    return name + (", oneDNN for the dtypes that PyTorch gives it" if halves else "")
