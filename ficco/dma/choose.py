"""Which engine serves a device."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ficco.dma.engine import Engine
    from ficco.dma.hosts import Hosts


#: The engines there are, by name, and what makes one: module and function. Vendor libraries are
#: imported by these modules alone.
ENGINES = {
    "cpu": ("ficco.dma.cpu", "CpuEngine"),
    "cuda": ("ficco.dma.cuda_driver", "engine"),
    "hip": ("ficco.dma.hip_driver", "engine"),
}


def engine_name(device: torch.device, wanted: str | None = None) -> str:
    """The engine for a device and this build of PyTorch, or the one that was asked for.

    Raises:
        ValueError: the one that was asked for serves other tensors. HIP's decides by itself.
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
        import torch  # not above: the names of the engines are needed without it

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
    """The engine of a name; its ranks wait ``timeout_s`` for each other. ``more`` is for the
    engine's module."""
    module, function = ENGINES[name]
    make: Callable[..., Engine] = getattr(import_module(module), function)
    if name == "cpu":
        return make(group, device, hosts, timeout_s)
    return make(group, device, signals, timeout_s, hosts, **more)
