"""The ways among which an engine can be told to choose, for each vendor that has some.

``FICCO_HIP="signals=kernel,copy=peer"`` names those of the HIP engine, the same on all ranks. What
is not named is chosen by what the machine allows. Read when a group makes its first call.
"""

from __future__ import annotations

import os

from ficco.errors import ConfigError

#: By engine: what can be chosen, and the values, each with what it is called in reports.
WAYS: dict[str, dict[str, dict[str, str]]] = {
    "cpu": {},
    "cuda": {},
    "hip": {
        # Where signal words lie and what waits for them, the best first. The API promises the
        # first, but not that processes can share such memory. AMD's runtime waits on any memory by
        # default.
        "signals": {
            "signal": "hipStreamWaitValue32 on signal memory",
            "uncached": "hipStreamWaitValue32 on uncached memory, which the API does not promise",
            "kernel": "a kernel of ficco's that polls uncached memory",
        },
        # How whole runs of bytes are copied between devices. "nocu" asks for the copy engines and
        # never for a kernel.
        "copy": {
            "dtod": "hipMemcpyDtoDAsync",
            "peer": "hipMemcpyPeerAsync",
            "nocu": "hipMemcpyAsync without compute units",
        },
        # Where buffers come from.
        "memory": {"torch": "PyTorch's", "ipc": "its own"},
        # How pieces of columns travel. In the source of AMD's runtime of 2024 a 2D copy is a
        # kernel's, so that packing alone leaves the way to the peer to SDMA engines.
        "columns": {"2d": "hipMemcpy2DAsync", "pack": "packing or ficco's kernel"},
        # How the end of a copy is told to other lanes of the same rank. On NVIDIA's GPUs an event
        # right after a copy is not seen before the copies after it are over, too; after a write it
        # is.
        "events": {
            "plain": "an event right behind the copy",
            "write": "an event behind a stream write behind the copy",
        },
    },
}


def variable(engine: str) -> str:
    """The environment variable that names an engine's ways."""
    return f"FICCO_{engine.upper()}"


def asked(engine: str) -> dict[str, str]:
    """What was asked for, by what can be chosen.

    Raises:
        ConfigError: there is no such choice.
    """
    name, known = variable(engine), WAYS[engine]
    given = os.environ.get(name, "")
    found: dict[str, str] = {}
    for part in filter(None, map(str.strip, given.split(","))):
        what, _, value = part.partition("=")
        if what not in known or value not in known[what]:
            allowed = ", ".join(f"{one}={'|'.join(values)}" for one, values in known.items())
            raise ConfigError(name, given, f"required some of {allowed}, with commas")
        found[what] = value
    return found
