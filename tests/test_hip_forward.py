"""HIP's library on CUDA's driver (hip_forward/), without a GPU.

A fake driver forwards CUDA's calls to the strict double, so each call passes hip-python, the
forwarding library, CUDA's API and HIP's API with all of its arguments. ``hip_on_cuda.py`` runs the
forwarding library on GPUs.
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
#: Variables that name a library of :mod:`hip_ranks` to the layer that loads it.
LIBRARIES: dict[str, Callable[[], Path]] = {
    hip_ranks.LIBRARY: hip_ranks.forward,
    "HIP_FORWARD_DRIVER": hip_ranks.fake_driver,
    "HIP_FORWARD_DOUBLE": partial(hip_ranks.library, "libhipdouble.so"),
    hip_ranks.DOUBLE: partial(hip_ranks.library, "libhipdouble.so"),
}


def run(world: int, fn: Callable[..., Any], *args: Any) -> Any:
    """:func:`hip_ranks.run` with the forwarding library on the double, on ranks that stay."""
    env = {name: str(library()) for name, library in LIBRARIES.items()}
    options: Any = {"env": env, "settings": {"WAIT_ANY": 1}, "series": "10", "fresh": False}
    return hip_ranks.run(world, _adopting, fn, *args, **options)


def _adopting(at: Rank, fn: Callable[..., Any], *args: Any) -> Any:
    """Register CPU tensors as memory of the double, which the forwarding library cannot do."""
    double = hip_ranks.double()
    adopt, forget = double.double_adopt, double.double_forget
    adopt.argtypes, forget.argtypes = [ctypes.c_void_p, ctypes.c_size_t], [ctypes.c_void_p]
    with mock.patch.object(host_gpu, "adopter", lambda: (adopt, forget)):
        return compiling(at, fn, *args)


def test_replays() -> None:
    run(3, replayed, ["hetero-fused-2d:pieces=2"], 6)


#: Requests in FICCO_HIP, and a HIP call that each leads to.
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
    for way, name in ways.items():
        with clean(), asking(way):
            before = calls(name)
            all_exact(at, [equal(2, 12, 20, 8, schedule=name) for name in names])
            operators.all_exact(at, products)
            ficco.synchronize()
            assert calls(name) > before, way


def test_ways() -> None:
    names = {"matmul_reduce_scatter": "growing:pieces=2", "all_to_all_matmul": "uniform-fused-2d"}
    products = [
        (operator, Case(operators.rows_for(operator, 2, "ragged"), (24, 8), schedule=name))
        for operator, name in names.items()
    ]
    run(2, _by, WAYS, products)


FAILING = [
    (Error("hipIpcOpenMemHandle", 2), 2),
    (Error("hipStreamWaitValue32", 1), 1),
    (Error("hipEventRecord", 5), 719),
]


def test_errors_keep_their_codes() -> None:
    """The caller gets the double's codes as HIP's codes, with the names of HIP's calls."""
    _, results = run(2, injected, FAILING)
    for (error, code), result in zip(FAILING, results, strict=True):
        fields = result.outcome.fields
        assert (fields["call"], fields["code"]) == (error.call, CODES[code])


def symbols(library: Path, *flags: str) -> set[str]:
    """Functions of a library."""
    command = ["nm", "-D", *flags, str(library)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in process.stdout.splitlines()}


def test_forwards_all_that_the_engine_calls() -> None:
    """The library defines all functions that the engine names, and does not link to CUDA."""
    matches = re.findall(r"\bcalls\.(hip\w+)|\bhip\.(hip[A-Z]\w+)\(", API.read_text())
    names = {first or second for first, second in matches}
    names |= {"hipThreadExchangeStreamCaptureMode", "hipGetErrorString"}
    called = {name for name in names if not re.search(r"_st$|_t$|Attributes$", name)}  # no structs
    assert len(called) > 30 and called <= symbols(hip_ranks.forward(), "--defined-only")
    undefined = symbols(hip_ranks.forward(), "--undefined-only")
    assert not {name for name in undefined if name.startswith("cu")}


def test_driver_functions_are_those_of_the_header() -> None:
    """The fake driver, compiled with the header, defines all versioned names of the library."""
    text = hip_ranks.forward().read_bytes()
    names = {name.decode() for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", b"\0" + text)}
    assert len(names) > 40
    assert names <= symbols(hip_ranks.fake_driver(), "--defined-only")


def _start(at: Rank) -> Any:
    from ficco.dma import hip_api

    return caught(hip_api.start)


def test_without_a_driver() -> None:
    """A missing driver counts as no device."""
    env = {hip_ranks.LIBRARY: str(hip_ranks.forward()), "HIP_FORWARD_DRIVER": os.devnull}
    (error,) = hip_ranks.run(1, _start, env=env)
    assert error.type == "BackendError" and "hipErrorNoDevice" in error.text
