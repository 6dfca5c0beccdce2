"""HIP API forwarded to CUDA: the HIP engine on NVIDIA GPUs.

    python tests/hip_on_cuda.py --out build/hip-on-cuda

builds ``hip_forward/forward.cpp`` (g++ and cuda.h) as ``libamdhip64.so`` and runs the HIP engine
through the real hip-python on it, one rank per GPU. Copy engines, streams, graphs and memory of
other processes are CUDA's. With ``FICCO_TESTS_RANKS_PER_GPU`` ranks share GPUs, where copies are
kernels. It needs PyTorch for CUDA, pytest, and hip-python for this Python in
``build/hip-python/``, where ``hip_forward/fetch.sh`` puts it on a machine with a network.

Parts run one after the other, each in new processes. A failed part does not stop the rest, and a
stuck part prints its stacks. The output is also written to ``--out``. The exit status is 1 if any
part failed.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), *(str(HERE / room) for room in ("gpu", "faults"))]
# Processes that are started later inherit this path.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:4] + [os.environ.get("PYTHONPATH", "")])

import hip_ranks  # noqa: E402
import pytest  # noqa: E402
import ranks  # noqa: E402
import test_operators as operators  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cases import all_exact, call, equal, exact, make, verify  # noqa: E402
from ranks import Rank, leave  # noqa: E402
from subjects import SUBJECTS  # noqa: E402
from test_all_gather_matmul import KINDS, random_case  # noqa: E402
from test_gpu import Graphed, drawn, everyone, graphed_by  # noqa: E402

import ficco  # noqa: E402
from ficco.dma import WAYS  # noqa: E402
from ficco.problems.products import OPERATORS  # noqa: E402
from ficco.runtime.workspace import workspaces  # noqa: E402
from ficco.tools import doctor  # noqa: E402
from ficco.tools.bench.frames import commit  # noqa: E402

TITLE = "HIP API forwarded to CUDA on NVIDIA"
#: Cycles of torch.cuda._sleep that take about 100 us.
MOMENT = 180_000


def engine() -> Any:
    """The HIP engine of this rank."""
    (hip,) = (workspace.engine for workspace in workspaces() if workspace.name == "hip")
    return hip


# Parts. Each runs on every rank with the HIP engine, and returns a summary.


def exactly(at: Rank, calls: Sequence[Any], check: Any = operators.all_exact) -> str:
    """Consecutive calls, each compared in every element."""
    count = check(at, calls)
    ficco.synchronize()
    assert engine().name == "hip"
    return f"{count} calls exact"


def jittered(at: Rank, count: int, together: int = 8) -> str:
    """Random calls, several in flight, while random streams are delayed."""
    exact(at, equal(at.world, 8, 8, 8, schedule="growing"), 0)
    choice, own_choice = random.Random(11), random.Random(at.rank)
    for first in range(0, count, together):
        drawn_cases = [random_case(choice, at.world, "cuda") for _ in range(together)]
        data = [make(at, case, first + i) for i, case in enumerate(drawn_cases)]
        torch.cuda.synchronize()
        cap = choice.choice((None, at.world << 15))  # room for the largest possible step
        results_of = []
        for case, operands in zip(drawn_cases, data, strict=True):
            _delay(own_choice)
            with ficco.options(workspace_bytes=cap):
                results_of.append(call(case, operands.a, operands.b))
        ficco.synchronize()
        for case, results, wanted in zip(drawn_cases, results_of, data, strict=True):
            verify(case, results, wanted, f"rank {at.rank}, call {first} and following:")
    return f"{count} calls exact, {together} at a time"


def _delay(chance: random.Random) -> None:
    """Keep the caller's stream and some lanes busy for a moment."""
    for _, stream in sorted(engine()._streams[False].items()):
        if chance.random() < 0.3:
            with torch.cuda.stream(stream.torch):
                torch.cuda._sleep(chance.randrange(3 * MOMENT))
    torch.cuda._sleep(chance.randrange(3 * MOMENT))


def graphs(at: Rank, replays: int) -> str:
    """Captured calls, replayed with new operands between eager calls."""
    schedules = graphed_by(dist.get_backend())
    for schedule in schedules:
        group = everyone(at)
        case = equal(at.world, 48, 64, 40, dtype="bfloat16", schedule=schedule, gathered=True)
        other = equal(at.world, 31, 24, 8, dtype="float16", schedule="hetero-fused-1d:pieces=3")
        exact(at, case, 0, group)
        graphed = Graphed(at, case, group)
        for first in range(0, replays, 5):
            graphed.exact(first, 5)
            exact(at, other, first, group)
            exact(at, case, first, group)
        del graphed
        leave(group)
    return f"{replays} replays of each of {len(schedules)} schedules exact, eager calls between"


# In the parent.


class Part(NamedTuple):
    """The function of a part on each rank, its arguments, time limit and environment."""

    fn: Any
    args: tuple[Any, ...] = ()
    seconds: float = 120
    env: dict[str, str] = {}


def parts(world: int, calls: int) -> dict[str, Part]:
    calls_of = {
        name: drawn(name, world, SUBJECTS[name].schedules(world), ("equal", "uneven", "few"))
        for name in (*OPERATORS, "all_gather_matmul, gathered")
    }
    gathers = [*calls_of.pop("all_gather_matmul"), *calls_of.pop("all_gather_matmul, gathered")]
    large = [equal(world, 1024, 2048, 512, dtype="bfloat16", schedule=name) for name in KINDS]
    by_name = {
        "exact": Part(exactly, (gathers,), 200),
        "large": Part(exactly, (large, all_exact)),
        "operators": Part(exactly, ([*chain(*calls_of.values())],), 200),
        "jittered": Part(jittered, (calls,), 200),
        "graphs": Part(graphs, (20,), 150),
    }
    usual = {"signal", "dtod", "ipc", "2d", "write"}  # defaults, which all other parts use
    for axis, values in WAYS["hip"].items():
        for value in sorted(values.keys() - usual):
            # Loading a kernel may wait for running kernels, and some of them wait for peers.
            eager = {"CUDA_MODULE_LOADING": "EAGER"} if value == "kernel" else {}
            env = {"FICCO_HIP": f"{axis}={value}", **eager}
            by_name[f"FICCO_HIP={axis}={value}"] = Part(exactly, (gathers[::7],), env=env)
    return by_name


def wheel() -> Path:
    """The folder of hip-python for this Python."""
    folder = HERE.parent / "build" / "hip-python"
    for candidate in (folder / f"cp{sys.version_info[0]}{sys.version_info[1]}", folder / "10"):
        if (candidate / "hip").exists():
            return candidate
    raise SystemExit(f"no hip-python in {folder}: run tests/hip_forward/fetch.sh and carry it here")


def about(world: int) -> str:
    """A line that describes the machine, the software and the command."""
    gpus = min(world, torch.cuda.device_count())
    return (
        f"{TITLE}: {world} ranks on {gpus} x {torch.cuda.get_device_name()}, driver "
        f"{doctor.driver()}, PyTorch {torch.__version__}, commit {commit() or 'unknown'}, "
        f"`python tests/hip_on_cuda.py {shlex.join(sys.argv[1:])}`, {date.today()}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--out", type=Path, default=Path("build/hip-on-cuda"))
    parser.add_argument("--world", type=int, default=torch.cuda.device_count(), help="ranks")
    parser.add_argument("--parts", default="", help="names with commas, FICCO for its variables")
    parser.add_argument("--calls", type=int, default=2000, help="jittered calls")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    env = {hip_ranks.LIBRARY: str(hip_ranks.forward()), hip_ranks.WHEEL: str(wheel())}
    wanted, failed = tuple(filter(None, options.parts.split(","))), False
    with (options.out / "hip-on-cuda.txt").open("w") as file:
        for out in (file, sys.stdout):
            print(about(options.world), file=out, flush=True)
        for name, (fn, args, seconds, more) in parts(options.world, options.calls).items():
            if wanted and not name.startswith(wanted):
                continue
            where: Any = {"env": {**env, **more}, "device": "cuda", "timeout": seconds}
            try:
                text = f"passed: {hip_ranks.run(options.world, fn, *args, **where)[0]}"
            except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                text, failed = f"FAILED: {type(error).__name__}: {error}", True
            for out in (file, sys.stdout):
                print(f"{name} {text}", file=out, flush=True)
    return int(failed)


if __name__ == "__main__":
    import hip_on_cuda  # ranks look its functions up by the name of the module

    try:
        status = hip_on_cuda.main()
    finally:
        ranks.close()
    sys.exit(status)
