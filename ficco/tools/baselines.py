"""Ways of AMD's libraries that a bench compares with: RCCL's collectives by copy engines, and
products by hipBLASLt.

The libraries decide by themselves whether they serve a call in these ways. This module sets them
up, and gives the reason if a library lacks a way.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the command line lists the variants without PyTorch
    import torch
    from torch.distributed import ProcessGroup


class CopyEngineCollective(NamedTuple):
    """A kind of RCCL's collectives by copy engines.

    Attributes:
        collectives: names of the collectives that it has.
        variables: variables that RCCL reads when it starts.
    """

    collectives: tuple[str, ...]
    variables: dict[str, str]


_SDMA = {"NCCL_CTA_POLICY": "2", "NCCL_CUMEM_ENABLE": "1", "NCCL_LOCAL_REGISTER": "2"}
#: The kinds, by the name of the variant (ROCm/rocm-systems #6771, #8936).
COPY_ENGINES = {
    "rccl-sdma": CopyEngineCollective(("all-gather", "all-to-all"), _SDMA),
    "rccl-ce-all-reduce": CopyEngineCollective(
        ("all-reduce",), {**_SDMA, "RCCL_CE_ALLREDUCE": "1"}
    ),
}
#: The variant of products by hipBLASLt.
PRODUCT = "hipblaslt"


def lacking(name: str, device: torch.device, equal: bool) -> str:
    """Why a variant does not exist here; empty if it exists. ``equal``: the ranks' shards have one
    size."""
    import torch

    if device.type != "cuda" or torch.version.hip is None:
        return "it needs GPUs and PyTorch for ROCm"
    if name == PRODUCT:
        with preferred():
            taken = torch.backends.cuda.preferred_blas_library()
        if taken != torch._C._BlasBackend.Cublaslt:
            return f"PyTorch takes {taken} on this GPU"
        return ""
    unset = [
        f"{variable}={value}"
        for variable, value in COPY_ENGINES[name].variables.items()
        if os.environ.get(variable) != value
    ]
    if unset:
        return f"RCCL reads its variables once: start all ranks with {' '.join(unset)}"
    if not equal:
        return "RCCL registers memory of one size on all ranks"
    if not hasattr(_rccl(), "ncclCommWindowRegister"):
        return "this RCCL registers no symmetric memory, or PyTorch has not loaded RCCL"
    return ""


def _rccl() -> ctypes.CDLL | None:
    """The RCCL that PyTorch has loaded, if any."""
    try:
        return ctypes.CDLL("librccl.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def registered(
    group: ProcessGroup, device: torch.device, call: Callable[[], Any]
) -> Callable[[], AbstractContextManager[None]]:
    """Register the memory that a call takes from PyTorch with RCCL, and return the context of later
    calls, which take the same memory. Collective.

    Raises:
        NotImplementedError: this PyTorch, or its RCCL, registers no symmetric memory.
    """
    from ficco.accelerator import gpu

    try:
        backend = group._get_backend(device)
        pool = gpu.MemPool(backend.mem_allocator)
        with gpu.use_mem_pool(pool):
            call()
        gpu.synchronize()
        backend.register_mem_pool(pool, symm=True)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise NotImplementedError(f"memory cannot be registered with RCCL: {error}") from error
    return partial(gpu.use_mem_pool, pool)


@contextmanager
def preferred() -> Iterator[None]:
    """Let PyTorch multiply by hipBLASLt."""
    import torch

    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(PRODUCT)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
