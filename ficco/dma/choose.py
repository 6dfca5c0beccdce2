"""Choice of the engine for a device."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ficco.dma.engine import Engine
    from ficco.dma.hosts import Hosts


#: The engines by name: module, and function or class that makes one. Only these modules import
#: vendor libraries.
ENGINES = {
    "cpu": ("ficco.dma.cpu", "CpuEngine"),
    "cuda": ("ficco.dma.cuda_driver", "engine"),
    "hip": ("ficco.dma.hip_driver", "engine"),
}


def engine_name(device: torch.device, wanted: str | None = None) -> str:
    """The engine for a device and this build of PyTorch, or the requested engine, ``wanted``.

    Raises:
        ValueError: the requested engine does not serve the device. HIP's checks that itself.
        NotImplementedError: no engine serves the device.
    """
    if wanted in ("cpu", "cuda") and device.type != wanted:
        raise ValueError(
            f"options(engine={wanted!r}): required tensors on {wanted}, got some on {device.type}; "
            "leave the option out, and the tensors' device decides"
        )
    if wanted is not None:
        return wanted
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        import torch  # not at the top: callers need ``ENGINES`` without PyTorch

        return "hip" if torch.version.hip else "cuda"
    raise NotImplementedError(f"no engine serves tensors on {device.type}; use cpu or cuda")


def make_engine(
    name: str,
    group: ProcessGroup,
    device: torch.device,
    signals: str,
    timeout_s: float,
    hosts: Hosts | None = None,
    **more: Any,
) -> Engine:
    """Make an engine by name, whose ranks wait ``timeout_s`` for each other. ``more`` is passed to
    the engine's function."""
    module, function = ENGINES[name]
    make: Callable[..., Engine] = getattr(import_module(module), function)
    if name == "cpu":
        return make(group, device, hosts, timeout_s)
    return make(group, device, signals, timeout_s, hosts, **more)
