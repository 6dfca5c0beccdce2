"""torchtitan's own trainer with ficco's overrides, against the same trainings without."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import titan
import torch

pytestmark = pytest.mark.clients

OVERRIDES = [f"ficco.integrations.torchtitan.{name}" for name in ("attention", "feed_forward")]
SELECTIVE = "ficco.integrations.torchtitan.selective"

COMMON = (
    "--training.steps 3 --training.seq_len 64 --training.local_batch_size 2 "
    "--training.disable_cuda_graphs --training.mixed_precision_param float32 --debug.seed 1 "
    "--validator.no-enable --metrics.log_freq 1 --lr_scheduler.warmup_steps 1"
).split()


def training(config: str, flags: str, *overrides: str, how: str = "") -> list[str]:
    """The arguments of one training, as ``titan.py`` takes them."""
    imports = ["--override.imports", *overrides] if overrides else []
    return [how, "--module", "titan", "--config", config, *COMMON, *flags.split(), *imports]


def trained(ranks: int, trainings: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    """What rank 0 prints of each training."""
    titan.assets(folder)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in trainings]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    program = [titan.__file__, json.dumps(trainings), json.dumps(ports)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *program],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-9000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"losses"')]


#: Of a step: two layers, forward and backward, in which gathered rows are gathered again.
STEP = {"all_gather_matmul": 12, "matmul_reduce_scatter": 8}


def calls(found: dict[str, Any]) -> dict[str, float]:
    """ficco's operators of one step on rank 0."""
    return {name: count / len(found["losses"]) for name, count in found["calls"].items()}


TWO = "--parallelism.tensor_parallel_degree 2 --parallelism.spmd_backend"


def test_overrides_train_as_stock(tmp_path: Path) -> None:
    partial = f"{TWO} partial_dtensor"
    full, stock, ficco, unknown, replicated = trained(
        2,
        [
            training("fused", f"{TWO} full_dtensor", *OVERRIDES, SELECTIVE),
            training("fused", partial),
            training("fused", partial, *OVERRIDES, SELECTIVE),
            training("fused", partial, *OVERRIDES),
            training("fused", f"{partial} --parallelism.no-enable_sequence_parallel", *OVERRIDES),
        ],
        tmp_path,
    )
    assert len(stock["losses"]) == 3 and stock["calls"] == {}
    for found in (full, ficco, unknown):
        torch.testing.assert_close(found["losses"], stock["losses"], rtol=1e-6, atol=0)
    assert calls(full) == calls(ficco) == STEP
    # Selective checkpointing that does not know ficco's operators recomputes them all.
    assert calls(unknown) == {"all_gather_matmul": 16, "matmul_reduce_scatter": 12}
    # Without sequence parallelism blocks stay as they are, and the log says so.
    assert replicated["calls"] == {}


def test_overrides_serve_separate_weights_inside_fsdp(tmp_path: Path) -> None:
    partial = f"{TWO} partial_dtensor"
    stock, ficco = trained(
        4,
        [training("separate", partial), training("separate", partial, *OVERRIDES, SELECTIVE)],
        tmp_path,
    )
    torch.testing.assert_close(ficco["losses"], stock["losses"], rtol=1e-6, atol=0)
    assert calls(ficco) == STEP
