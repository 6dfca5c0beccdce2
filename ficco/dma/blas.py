"""The name of the library behind PyTorch's matrix products."""

from __future__ import annotations

import re
from typing import Any

import torch

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
