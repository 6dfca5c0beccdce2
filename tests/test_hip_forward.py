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
from functools import partial
from typing import Any

import hip_ranks
import host_gpu
import pytest
import test_hip
from cases import all_exact, equal
from hip_ranks import clean
from ranks import Rank
from test_all_gather_matmul import KINDS

import ficco

#: Where the libraries of :mod:`hip_ranks` are found by what is below them.
ENV = {
    hip_ranks.LIBRARY: hip_ranks.forward,
    "HIP_FORWARD_DRIVER": hip_ranks.fake_driver,
    "HIP_FORWARD_DOUBLE": hip_ranks.double_beside,
    hip_ranks.DOUBLE: hip_ranks.double_beside,
}


def run(world: int, fn: Any, *args: Any, env: dict[str, str] | None = None, **kwargs: Any) -> Any:
    """As :func:`hip_ranks.run`, with the forwarding library on the double."""
    found = {name: str(library()) for name, library in ENV.items()} | (env or {})
    settings = {"WAIT_ANY": 1} | kwargs.pop("settings", {})
    call = partial(_adopting, fn)
    return hip_ranks.run(world, call, *args, env=found, settings=settings, **kwargs)


def _adopting(fn: Any, at: Rank, *args: Any) -> Any:
    """CPU tensors are the double's memory; the library above it knows nothing of that."""
    found = hip_ranks.double()
    adopt, forget = found.double_adopt, found.double_forget
    adopt.argtypes, forget.argtypes = [ctypes.c_void_p, ctypes.c_size_t], [ctypes.c_void_p]
    host_gpu.adopter = lambda: (adopt, forget)
    return fn(at, *args)


def test_schedules() -> None:
    cases = [equal(2, 9, 24, 8, schedule=name, dtype="bfloat16") for name in KINDS[::3]]
    run(2, test_hip._exact, cases, series="10")


def test_operators() -> None:
    cases = [case for one in test_hip.OPERATORS for case in test_hip._cases(one, 2, "")[::30]]
    run(2, test_hip._operators, cases, 100)


def test_replays() -> None:
    run(3, test_hip._replays, ["hetero-fused-2d:pieces=2"], test_hip.GLOBAL, 6)


@pytest.mark.parametrize(
    ("env", "used"),
    [
        ({"FICCO_HIP": "signals=uncached"}, "hipStreamWaitValue32"),
        ({"FICCO_HIP": "copy=peer"}, "hipMemcpyPeerAsync"),
        ({"FICCO_HIP": "copy=nocu"}, "hipMemcpyDtoDAsync"),
        ({"FICCO_HIP": "events=write"}, "hipStreamWriteValue32"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_ways(env: dict[str, str], used: str) -> None:
    run(2, _used, used, env=env)


def test_kernels() -> None:
    env = {"FICCO_HIP": "signals=kernel"}
    run(2, test_hip._compiling, _used, "hipModuleLaunchKernel", env=env, series="10")


def _used(at: Rank, name: str) -> None:
    with clean():
        names = ("shard-overlap:pull", "hetero-fused-2d")
        all_exact(at, [equal(2, 12, 20, 8, schedule=name) for name in names])
        ficco.synchronize()
        assert hip_ranks.calls(name) > 0


FAILING = [
    (test_hip.Error("hipIpcOpenMemHandle", 2), 2),
    (test_hip.Error("hipStreamWaitValue32", 1), 1),
    (test_hip.Error("hipEventRecord", 5), 719),
]


def test_errors_come_out_as_they_are() -> None:
    """The double's codes reach the caller as HIP's, under the names of HIP's calls."""
    _, mine = run(2, test_hip._injected, FAILING)
    for (error, code), found in zip(FAILING, mine, strict=True):
        fields = found["outcome"].fields
        assert (fields["call"], fields["code"]) == (error.call, test_hip.CODES[code])


def symbols(library: str, *flags: str) -> set[str]:
    """Functions of a library."""
    done = subprocess.run(["nm", "-D", *flags, library], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines()}


def test_forwards_all_that_the_engine_calls() -> None:
    """Every function of the binding that the engine names, and nothing left to link."""
    api = (test_hip.ROOT / "ficco" / "dma" / "hip_api.py").read_text()
    names = set(re.findall(r"\bcalls\.(hip\w+)|\bhip\.(hip[A-Z]\w+)\(", api))
    names = {first or second for first, second in names}
    names |= {"hipThreadExchangeStreamCaptureMode", "hipGetErrorString"}
    made = {name for name in names if not re.search(r"_st$|_t$", name)}
    library = str(hip_ranks.forward())
    assert len(made) > 30 and made <= symbols(library, "--defined-only")
    assert not {name for name in symbols(library, "--undefined-only") if name.startswith("cu")}


def test_driver_functions_are_those_of_the_header() -> None:
    """The names by which the driver is asked are of the versions that the header says; the fake
    driver, compiled with the same header, has them all."""
    text = hip_ranks.forward().read_bytes()
    wanted = {name.decode() for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", b"\0" + text)}
    assert len(wanted) > 40
    assert wanted <= symbols(str(hip_ranks.fake_driver()), "--defined-only")


def test_codes_are_those_of_the_binding() -> None:
    library = ctypes.CDLL(str(hip_ranks.forward()))
    library.hipGetErrorName.restype = ctypes.c_char_p
    known = [library.hipGetErrorName(code).decode() for code in range(1000)]
    ours = {name: code for code, name in enumerate(known) if name != "hipErrorUnknown"}
    script = "from hip import hip\nfor code in hip.hipError_t: print(int(code), code.name)"
    done = test_hip.python(script, wheel=str(hip_ranks.wheel("10")))
    theirs = dict(line.split()[::-1] for line in done.stdout.splitlines())
    assert len(ours) > 30 and {name: int(theirs[name]) for name in ours} == ours


def test_without_a_driver() -> None:
    """No driver is no device, in words that name the remedy."""
    env = {"LD_LIBRARY_PATH": str(hip_ranks.forward().parent), "HIP_FORWARD_DRIVER": os.devnull}
    done = test_hip.python(test_hip.CALL, wheel=str(hip_ranks.wheel("10")), **env)
    assert done.returncode == 0, done.stderr
    assert "hipErrorNoDevice" in done.stdout
