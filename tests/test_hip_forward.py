"""HIP's library on CUDA's driver (hip_forward/), as far as it can be run without a GPU.

Under it lies a driver that hands everything on to the strict double: hip-python, the forwarding
library, CUDA's API, and HIP's again. So every call goes through, with all of its arguments.
``hip_on_cuda.py`` runs the same library on GPUs.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import hip_ranks
import host_gpu
import test_operators as operators
from cases import all_exact, equal
from hip_ranks import asking, calls, clean, compiling
from ranks import Rank, caught
from subjects import Case
from test_hip import BY_KERNEL, BY_NOCU, BY_PEER, CODES, COPY, LAUNCH, Error, injected, replayed

import ficco

API = Path(__file__).parents[1] / "ficco" / "dma" / "hip_api.py"
#: Where the libraries of :mod:`hip_ranks` are found by what is below them.
LIBRARIES: dict[str, Callable[[], Path]] = {
    hip_ranks.LIBRARY: hip_ranks.forward,
    "HIP_FORWARD_DRIVER": hip_ranks.fake_driver,
    "HIP_FORWARD_DOUBLE": partial(hip_ranks.library, "libhipdouble.so"),
    hip_ranks.DOUBLE: partial(hip_ranks.library, "libhipdouble.so"),
}


def run(world: int, fn: Callable[..., Any], *args: Any) -> Any:
    """As :func:`hip_ranks.run`, with the forwarding library on the double; the ranks stay."""
    env = {name: str(library()) for name, library in LIBRARIES.items()}
    where: Any = {"env": env, "settings": {"WAIT_ANY": 1}, "series": "10", "fresh": False}
    return hip_ranks.run(world, _adopting, fn, *args, **where)


def _adopting(at: Rank, fn: Callable[..., Any], *args: Any) -> Any:
    """CPU tensors are the double's memory; the library above it knows nothing of that."""
    found = hip_ranks.double()
    adopt, forget = found.double_adopt, found.double_forget
    adopt.argtypes, forget.argtypes = [ctypes.c_void_p, ctypes.c_size_t], [ctypes.c_void_p]
    with mock.patch.object(host_gpu, "adopter", lambda: (adopt, forget)):
        return compiling(at, fn, *args)


def test_replays() -> None:
    run(3, replayed, ["hetero-fused-2d:pieces=2"], 6)


#: What is asked for, and a call that it takes.
WAYS = {
    "": COPY,
    "signals=uncached": "hipStreamWaitValue32",
    BY_KERNEL: LAUNCH,
    BY_PEER: "hipMemcpyPeerAsync",
    BY_NOCU: COPY,
    "events=write": "hipStreamWriteValue32",
}


def _by(at: Rank, ways: dict[str, str], products: Sequence[tuple[str, Case]]) -> None:
    names = "shard-overlap:pull", "hetero-fused-2d", "serial:kernel"
    for way, used in ways.items():
        with clean(), asking(way):
            before = calls(used)
            all_exact(at, [equal(2, 12, 20, 8, schedule=name) for name in names])
            operators.all_exact(at, products)
            ficco.synchronize()
            assert calls(used) > before, way


def test_ways() -> None:
    products = [
        (operator, Case(operators.rows_for(operator, 2, "ragged"), (24, 8), schedule=name))
        for operator, name in (
            ("matmul_reduce_scatter", "growing:pieces=2"),
            ("all_to_all_matmul", "uniform-fused-2d"),
        )
    ]
    run(2, _by, WAYS, products)


FAILING = [
    (Error("hipIpcOpenMemHandle", 2), 2),
    (Error("hipStreamWaitValue32", 1), 1),
    (Error("hipEventRecord", 5), 719),
]


def test_errors_come_out_as_they_are() -> None:
    """The double's codes reach the caller as HIP's, under the names of HIP's calls."""
    _, mine = run(2, injected, FAILING)
    for (error, code), found in zip(FAILING, mine, strict=True):
        fields = found.outcome.fields
        assert (fields["call"], fields["code"]) == (error.call, CODES[code])


def symbols(library: Path, *flags: str) -> set[str]:
    """Functions of a library."""
    command = ["nm", "-D", *flags, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines()}


def test_forwards_all_that_the_engine_calls() -> None:
    """Every function of the binding that the engine names, and nothing left to link."""
    named = re.findall(r"\bcalls\.(hip\w+)|\bhip\.(hip[A-Z]\w+)\(", API.read_text())
    names = {first or second for first, second in named}
    names |= {"hipThreadExchangeStreamCaptureMode", "hipGetErrorString"}
    made = {name for name in names if not re.search(r"_st$|_t$|Attributes$", name)}  # no structs
    assert len(made) > 30 and made <= symbols(hip_ranks.forward(), "--defined-only")
    undefined = symbols(hip_ranks.forward(), "--undefined-only")
    assert not {name for name in undefined if name.startswith("cu")}


def test_driver_functions_are_those_of_the_header() -> None:
    """The names by which the driver is asked are of the versions that the header says; the fake
    driver, compiled with the same header, has them all."""
    text = hip_ranks.forward().read_bytes()
    wanted = {name.decode() for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", b"\0" + text)}
    assert len(wanted) > 40
    assert wanted <= symbols(hip_ranks.fake_driver(), "--defined-only")


def _first(at: Rank) -> Any:
    from ficco.dma import hip_api

    return caught(hip_api.start)


def test_without_a_driver() -> None:
    """No driver is no device."""
    env = {hip_ranks.LIBRARY: str(hip_ranks.forward()), "HIP_FORWARD_DRIVER": os.devnull}
    (found,) = hip_ranks.run(1, _first, env=env)
    assert found.type == "BackendError" and "hipErrorNoDevice" in found.text
