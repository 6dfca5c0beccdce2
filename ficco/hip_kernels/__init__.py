"""ficco's kernels: placement, peer copy, reduction, signals. One source for HIP and CUDA.

They are compiled on first use for the device (:mod:`ficco.hip_kernels.build`) and launched through
the vendor's driver on any stream (:mod:`ficco.hip_kernels.launch`). Where they cannot be compiled,
engines place and sum with PyTorch. Importing this package uses no device and no compiler.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ficco.errors import BackendError, warn_once
from ficco.hip_kernels.launch import Kernels


def kernels(device: torch.device | int) -> Kernels | None:
    """The kernels for a device of this build of PyTorch; None where they cannot be compiled, with a
    warning. The HIP engine makes :class:`Kernels` from its own binding."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return _on_cuda(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _on_cuda(index: int) -> Kernels | None:
    try:
        from ficco.hip_kernels.cuda_binding import CudaBinding

        return Kernels(CudaBinding(index))
    except (BackendError, ImportError) as error:
        warn_once(f"PyTorch's operations are used in place of ficco's kernels: {error}")
        return None
