"""Launches kernels through the CUDA driver, by cuda-bindings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuda.bindings import driver

from ficco.errors import BackendError
from ficco.hip_kernels.build import Target
from ficco.hip_kernels.launch import Packed

_MOST_SHARED = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def check(call: str, result: Sequence[Any]) -> Any:
    """The value of a driver call, or :class:`BackendError`."""
    if result[0]:
        _, text = driver.cuGetErrorString(result[0])
        raise BackendError(call, result[0].name, text.decode() if text else "no explanation")
    return result[1] if len(result) == 2 else None


def attribute(name: str, device: int) -> int:
    """A device attribute, 0 where the driver does not know it."""
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if attribute is None:
        return 0
    error, value = driver.cuDeviceGetAttribute(attribute, device)
    return 0 if error else int(value)


class CudaBinding:
    """See :class:`ficco.hip_kernels.launch.Binding`."""

    ticks_per_s = 1e9

    def __init__(self, index: int) -> None:
        check("cuInit", driver.cuInit(0))
        self._index = index
        parts = [attribute(f"COMPUTE_CAPABILITY_{part}", index) for part in ("MAJOR", "MINOR")]
        self.target = Target("cuda", f"sm_{parts[0]}{parts[1]}")
        self.processors = attribute("MULTIPROCESSOR_COUNT", index)

    def load(self, image: bytes, names: Sequence[str], shared: int = 0) -> Mapping[str, Any]:
        # PyTorch's context. It is never released: the module lives in it.
        retained = driver.cuDevicePrimaryCtxRetain(self._index)
        context = check("cuDevicePrimaryCtxRetain", retained)
        check("cuCtxPushCurrent", driver.cuCtxPushCurrent(context))
        try:
            module = check("cuModuleLoadData", driver.cuModuleLoadData(image))
            kernels = {}
            for name in names:
                lookup = driver.cuModuleGetFunction(module, name.encode())
                kernels[name] = check("cuModuleGetFunction", lookup)
                # Loaded now, since the first launch may be part of a graph capture.
                check("cuFuncLoad", driver.cuFuncLoad(kernels[name]))
                if shared:
                    limit = kernels[name], _MOST_SHARED, shared
                    check("cuFuncSetAttribute", driver.cuFuncSetAttribute(*limit))
            return kernels
        finally:
            driver.cuCtxPopCurrent()

    def launch(
        self,
        kernel: Any,
        blocks: int,
        threads: int,
        arguments: Packed,
        stream: Any,
        shared: int = 0,
    ) -> None:
        at = arguments.address
        result = driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared, stream, at, 0)
        if result[0]:
            check("cuLaunchKernel", result)
