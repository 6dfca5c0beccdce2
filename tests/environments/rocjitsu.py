"""Run the self-test and the contract's small shapes on two GPUs that AMD's rocjitsu emulates.

    python tests/environments/rocjitsu.py CONFIG

Needs a container with ROCm, rocjitsu, PyTorch for ROCm, hip-python, pytest and this checkout, and
a configuration of rocjitsu with two GPUs, such as its ``gfx950_mi355x_kmd_2gpu.json``. Needs no GPU
and no driver. Prints a line for each result and for each skipped part, without times and rates: an
emulator has no speed. The script has never run under rocjitsu.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
#: Limits in seconds of the run, of a check or a subject, and of a wait for a peer: an emulated GPU
#: is thousands of times slower than a GPU.
RUN_S, CHECK_S, WAIT_S = 6 * 3600, 1800.0, 600.0
#: Checks of the self-test that only measure.
SPEEDS = (
    "bandwidth of pairs",
    "bandwidth of all pairs",
    "products beside copies",
    "batches of copies",
    "figures of the machine",
)
#: One of this many schedules of a subject runs.
STRIDE = 4


def lacking(config: Path) -> str:
    """The requirement that the container does not meet; empty if it meets all."""
    if shutil.which("rocjitsu") is None:
        return "required the command rocjitsu (ROCm/rocm-systems, emulation/rocjitsu), got none"
    try:
        gpus = json.loads(config.read_text())["vm"]["gpu"].get("num_gpus", 1)
    except (OSError, ValueError, KeyError) as error:
        return f"{config}: required a configuration of rocjitsu with GPUs (vm.gpu), got {error!r}"
    if gpus < 2:
        return f"{config}: required two GPUs (vm.gpu.num_gpus), got {gpus}"
    return ""


def lacking_inside() -> str:
    """The requirement that the emulated GPUs do not meet; empty if they meet all."""
    import torch

    if torch.version.hip is None:
        return f"required PyTorch for ROCm, got {torch.__version__}"
    if (count := torch.cuda.device_count()) < 2:
        return f"required two emulated GPUs, PyTorch sees {count}"
    unreached = [gpu for gpu in (0, 1) if not torch.cuda.can_device_access_peer(gpu, 1 - gpu)]
    if unreached:
        return (
            f"required copies between the emulated GPUs, but GPU {unreached[0]} cannot access the "
            "other's memory: the emulator cannot run the HIP engine"
        )
    return ""


def selftest(device: str) -> Iterator[str]:
    """Run the self-test with few calls of small shapes; yield a line for each check."""
    from ficco.tools.selftest import run
    from ficco.tools.selftest.checks import SelftestSettings

    yield from (f"skipped: {name}: an emulator has no speed" for name in SPEEDS)
    run.CHECKS = tuple(check for check in run.CHECKS if check.name not in SPEEDS)
    run.WAYS = {
        engine: tuple(check for check in checks if check.name not in SPEEDS)
        for engine, checks in run.WAYS.items()
    }
    settings = SelftestSettings(
        iterations=8,
        repeat=1,
        large=(96, 64, 16),
        pair_bytes=1 << 16,
        rounds=1,
        timeout_s=WAIT_S,
        limit_s=CHECK_S,
    )
    for result in run.selftest(device, 2, settings).results:
        parts = [part for part in result.seen.split("; ") if "GB/s" not in part]
        why = "" if result.verdict == "ok" else f": {'; '.join(parts).partition(chr(10))[0]}"
        yield f"{result.verdict}: self-test: {result.check}{why}"


def contract(device: str) -> Iterator[str]:
    """Run the contract on two ranks: all operators, some schedules, small integers; yield lines."""
    sys.path[:0] = [str(TESTS), str(TESTS / "contract")]
    import pytest
    import ranks
    from engines import ENGINES
    from subjects import KINDS, SUBJECTS
    from test_contract import all_exact, drawn, none

    engine = next(engine for engine in ENGINES if engine.device == device)
    for name, subject in SUBJECTS.items():
        schedules = subject.schedules(2)
        chosen = schedules[::STRIDE]
        cases = drawn(name, engine, 2, chosen, KINDS, none)
        try:
            ranks.run(2, all_exact, name, cases, device=device, backend="gloo", timeout=CHECK_S)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            yield f"failed: contract: {name}: {str(error).strip().splitlines()[-1:]}"
        else:
            yield f"ok: contract: {name}: {len(cases)} calls exact"
        skipped = len(schedules) - len(chosen)
        yield f"skipped: contract: {name}: {skipped} other schedules, gradients"
    ranks.close()


def inside(device: str = "cuda") -> int:
    """Run all parts in the emulator; return the exit status."""
    if device == "cuda" and (why := lacking_inside()):
        print(why)
        return 2
    failures = 0
    for line in (line for part in (selftest, contract) for line in part(device)):
        print(line, flush=True)
        failures += line.startswith("failed")
    print(f"{failures} failed; nothing here says anything about speed")
    return int(failures > 0)


def main(arguments: list[str]) -> int:
    if arguments == ["--inside"]:
        return inside()
    if len(arguments) != 1:
        print(__doc__)
        return 2
    config = Path(arguments[0])
    if why := lacking(config):
        print(why)
        return 2
    command = ["rocjitsu", "--daemon", "--config", str(config), "--"]
    try:
        process = subprocess.run([*command, sys.executable, __file__, "--inside"], timeout=RUN_S)
    except subprocess.TimeoutExpired:
        print(f"failed: the run did not end in {RUN_S // 3600} hours")
        return 1
    return process.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
