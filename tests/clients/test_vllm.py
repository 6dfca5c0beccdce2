"""vLLM with ficco's plug-in returns the same tokens as vLLM without the plug-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pages import snippet
from ranks import Rank, run

pytestmark = pytest.mark.clients

ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the test calls functions on workers
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def served(model: Path, mode: str, **env: str) -> dict[str, Any]:
    program = str(Path(__file__).with_name("serve.py"))
    process = subprocess.run(
        [sys.executable, program, str(model), mode],
        env={**os.environ, **ENV, **env},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
    (line,) = [line for line in process.stdout.splitlines() if line.startswith('{"tokens"')]
    result: dict[str, Any] = json.loads(line)
    return result


@pytest.mark.timeout(2700)
def test_tokens_are_stocks(tmp_path: Path) -> None:
    stock = served(tmp_path / "model", "eager")
    assert stock["calls"] == [{}, {}]  # without FICCO_VLLM the plug-in does nothing
    # Two layers with two row-parallel products each, in a prefill of 51 rows and 11 steps of three.
    for rows, calls in (("1", 48), ("16", 4)):
        ficco = served(tmp_path / "model", "compiled", FICCO_VLLM="1", FICCO_VLLM_ROWS=rows)
        assert ficco["tokens"] == stock["tokens"]
        assert ficco["calls"] == [{"matmul_all_reduce": calls}] * 2


def _passed(at: Rank) -> list[str]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from vllm.distributed import parallel_state

    with mock.patch("vllm.LLM") as engine:
        exec(snippet("vllm"), {"MODEL": "model"})
    config = engine.call_args.kwargs["compilation_config"].inductor_compile_config
    coordinator = SimpleNamespace(
        device_group=dist.group.WORLD,
        world_size=at.world,
        _all_reduce_out_place=lambda x: x.clone(),
    )
    parallel_state._groups["tp:0"] = lambda: coordinator

    def layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        summed = torch.ops.vllm.all_reduce(x @ w, group_name="tp:0")
        return summed.relu(), torch.ops.vllm.all_reduce(x, group_name="tp:0")

    x, w = torch.arange(12.0).view(3, 4) + at.rank, torch.arange(8.0).view(4, 2)
    with FakeTensorMode() as mode:
        graph = make_fx(layer)(mode.from_tensor(x), mode.from_tensor(w))
    config["post_grad_custom_pre_pass"](graph.graph)
    graph.recompile()
    expected = sum((torch.arange(12.0).view(3, 4) + rank) @ w for rank in range(at.world))
    result, left = graph(x, w)
    assert torch.equal(result, expected) and torch.equal(left, x)
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_the_pass_knows_vllms_all_reduce() -> None:
    first, second = run(2, _passed, timeout=150)
    assert first == second
    assert sum("ficco.matmul_all_reduce" in name for name in first) == 1
    assert first.count("vllm.all_reduce.default") == 1  # without a product: left to vLLM
    assert not any("c10d" in name for name in first)
