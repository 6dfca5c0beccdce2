"""Mechanisms that an environment variable selects, for each engine that has alternatives.

``FICCO_HIP="signals=kernel,copy=peer"`` selects those of the HIP engine, the same on all ranks. The
machine's capabilities decide about other options. Read at the first call of a group.
"""

from __future__ import annotations

import os

from ficco.errors import ConfigError

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
        # excludes kernels.
        "copy": {
            "dtod": "hipMemcpyDtoDAsync",
            "peer": "hipMemcpyPeerAsync",
            "nocu": "hipMemcpyAsync without compute units",
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


def asked(engine: str) -> dict[str, str]:
    """The mechanisms that the environment selects: the value of each option that is set.

    Raises:
        ConfigError: an option or a value does not exist.
    """
    name, options = variable(engine), WAYS[engine]
    text = os.environ.get(name, "")
    selected: dict[str, str] = {}
    for setting in filter(None, map(str.strip, text.split(","))):
        option, _, value = setting.partition("=")
        if option not in options or value not in options[option]:
            allowed = ", ".join(f"{key}={'|'.join(values)}" for key, values in options.items())
            raise ConfigError(name, text, f"required a comma-separated list of {allowed}")
        selected[option] = value
    return selected
