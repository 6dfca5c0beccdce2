"""Engines: they move bytes and signals and enqueue matrix products. Begin with ``engine``, the
interface, and ``cpu``, the reference engine.

``FICCO_HIP="signals=kernel,copy=peer"`` selects mechanisms of the HIP engine, the same on all
ranks. The machine's capabilities decide about other options. The variable is read at the first call
of a group.

=======================  ===========================================================================
module                   subject
=======================  ===========================================================================
engine                   the interface
cpu                      the CPU engine: threads as lanes, collectives, transfers between hosts
host                     hosts of a group, and host memory that ranks share, with semaphores
patience                 timeouts of waits for peers, and the warnings before the timeout
gpu                      the GPU engine
gpu_network              its transfers between hosts: by NCCL, or by gloo through the host
driver                   the interface of a vendor's runtime; waits and writes of words on a stream
cuda_driver, hip_driver  the vendors: NVIDIA, AMD
hip_api                  HIP's calls, in both series of the binding
memories                 GPU memory that ranks share, the signal words in it, waits for the device
watch                    progress of calls for the watchdog, by words or events; frees stuck ones
lane_ops                 operations of a call on a lane, how neighbours are merged, their recordings
messages                 messages of a network step, and their exchange by a separate gloo group
tiles                    a product whose tiles wait, as one launch
collectives              the exchange by the group's own library
=======================  ===========================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ficco.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ficco.dma.engine import Engine
    from ficco.dma.host import Hosts

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


#: The options of each engine, and their values with the names that reports use.
WAYS: dict[str, dict[str, dict[str, str]]] = {
    "cpu": {},
    "cuda": {},
    "hip": {
        # The memory of signal words and how a stream waits for them, the best first. The API
        # documents the first, but not that processes can share signal memory. AMD's runtime waits
        # on any memory by default.
        "signals": {
            "signal": "hipStreamWaitValue32 on signal memory",
            "uncached": "hipStreamWaitValue32 on uncached memory, which the API does not promise",
            "kernel": "a kernel of ficco's that polls uncached memory",
        },
        # How contiguous bytes are copied between devices. "nocu" requires the copy engines and
        # excludes kernels. "batch" submits neighbouring copies of a lane by one call.
        "copy": {
            "dtod": "hipMemcpyDtoDAsync",
            "peer": "hipMemcpyPeerAsync",
            "nocu": "hipMemcpyAsync without compute units",
            "batch": "hipMemcpyBatchAsync",
        },
        # The allocator of symmetric memory.
        "memory": {"torch": "PyTorch's", "ipc": "its own"},
        # How pieces of columns are sent. In the source of AMD's runtime of 2024 a 2D copy is a
        # kernel, so only packed columns can go to the peer through SDMA engines.
        "columns": {"2d": "hipMemcpy2DAsync", "pack": "packing or ficco's kernel"},
        # How other lanes of the rank learn that a copy is complete. On NVIDIA's GPUs an event
        # right after a copy completes only once later copies are complete, too; an event after a
        # stream write completes at once.
        "events": {
            "plain": "an event right after the copy",
            "write": "an event after a stream write after the copy",
        },
    },
}


def variable(engine: str) -> str:
    """The environment variable that selects an engine's mechanisms."""
    return f"FICCO_{engine.upper()}"


def selected(engine: str) -> dict[str, str]:
    """The mechanisms that the environment selects: the value of each option that is set.

    Raises:
        ConfigError: an option or a value does not exist.
    """
    name, options = variable(engine), WAYS[engine]
    text = os.environ.get(name, "")
    values: dict[str, str] = {}
    for setting in filter(None, map(str.strip, text.split(","))):
        option, _, value = setting.partition("=")
        if option in values or value not in options.get(option, ()):
            allowed = ", ".join(f"{key}={'|'.join(values)}" for key, values in options.items())
            raise ConfigError(name, text, f"required a list with commas, each once, of {allowed}")
        values[option] = value
    return values
