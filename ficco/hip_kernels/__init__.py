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


@lru_cache
def kernels(device: torch.device) -> Kernels | None:
    """The kernels for a device of CUDA, which has an index; None where they cannot be compiled,
    with a warning. The HIP engine makes :class:`Kernels` from its own binding."""
    try:
        from ficco.hip_kernels.cuda_binding import CudaBinding

        return Kernels(CudaBinding(device.index))
    except (BackendError, ImportError) as error:
        warn_once(f"PyTorch's operations are used in place of ficco's kernels: {error}")
        return None
