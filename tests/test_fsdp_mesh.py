"""FSDP2 on meshes of 2 x 2 ranks: shards with replicas, and shards with tensor parallelism. Ranks
sleep at random, or one of them is killed.

Models and whole numbers are those of ``test_fsdp.py``. The tests marked ``multigpu`` also run on
two GPUs, which four ranks share: ``FICCO_TESTS_RANKS_PER_GPU=2``. Their models are compared with
models on CPUs, since gloo has few collectives on GPUs.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import hip_ranks
import pytest
import torch
from disturbance import VERBS, Disturbance, disturb
from ranks import SLOW, Died, Failure, Rank, caught, gave_up, run
from test_fsdp import HOOKS, Model, multiplied, trained
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ficco
from ficco import fsdp
from ficco.dma.gpu import GpuEngine
from ficco.fsdp import GATHER, SUM
from ficco.runtime.workspace import workspaces

#: Names of the dimensions of the mesh. Ranks 0 and 1, and ranks 2 and 3, differ in the second one.
MESHES = {"replicas": ("replicate", "shard"), "tensors": ("shard", "tensor")}
#: Probability of a sleep, and the longest sleep, in seconds and in cycles of a GPU's clock.
SHARE, LATE_S, CYCLES = 0.3, 0.003, 5_000_000
#: Steps with sleeps.
STEPS = 6
#: Timeout of calls in seconds.
PATIENCE_S = 5.0
#: On CPUs, on the double of HIP and on GPUs.
DEVICES = ["cpu", pytest.param("hip", marks=SLOW), pytest.param("cuda", marks=pytest.mark.multigpu)]


def meshed(at: Rank, kind: str) -> Model:
    """Return a model on the mesh. FSDP2 scales the sums, since gloo has no means on GPUs."""
    mesh = init_device_mesh(at.device.type, (2, 2), mesh_dim_names=MESHES[kind])
    model, options = Model().to(at.device), {"mesh": mesh if kind == "replicas" else mesh["shard"]}
    for block in model.blocks:
        if kind == "tensors":
            tensor = mesh["tensor"].get_group()
            block.register_forward_hook(partial(multiplied, tensor, at.rank))
        fully_shard(block, **options)
    served: Any = fully_shard(model, **options)
    for module in (served, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    return model


def late(at: Rank, chance: random.Random, *_: Any) -> None:
    """Make this rank sleep at random and, on GPUs, its streams."""
    if chance.random() < SHARE:
        time.sleep(chance.random() * LATE_S)
    if at.device.type == "cuda":
        engines = [w.engine for w in workspaces() if isinstance(w.engine, GpuEngine)]
        streams = [s.torch for engine in engines for s in engine._streams[False].values()]
        for stream in (torch.cuda.current_stream(), *streams):
            if chance.random() < SHARE:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(chance.randrange(CYCLES))


def jittered(at: Rank, kind: str, steps: int) -> int:
    """Compare steps with a CPU model that uses PyTorch's collectives. Return how many there are."""
    on_cpu = replace(at, device=torch.device("cpu"))
    reference, model = meshed(on_cpu, kind), meshed(at, kind)
    assert not any(row.left for row in fsdp.use(model))
    chance, on_gpu = random.Random(at.rank), at.device.type == "cuda"
    for block in model.blocks:
        block.register_forward_pre_hook(partial(late, at, chance))
        block.down.register_full_backward_pre_hook(partial(late, at, chance))
    jitter = Disturbance(LATE_S, seed=5, verbs=VERBS, share=SHARE)
    for step in range(steps):
        expected = trained(on_cpu, reference, "plain", step)
        with nullcontext() if on_gpu else disturb(jitter):
            results = trained(at, model, "plain", step)
        for want, result in zip(expected, results, strict=True):
            assert torch.equal(want, result.cpu()), (kind, step)
    calls = {name: count.calls for (_, name), count in ficco.counters(reset=True).items()}
    # The weights of the root are gathered once a step, those of the blocks twice.
    assert (calls[GATHER], calls[SUM]) == (9 * steps, 5 * steps)
    ficco.close()
    return steps


@HOOKS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MESHES)
def test_jittered_meshes(kind: str, device: str) -> None:
    if device == "hip":
        counts = hip_ranks.run(4, jittered, kind, STEPS, settings={"JITTER_US": 100})
    else:
        counts = run(4, jittered, kind, STEPS, device=device, backend="gloo")
    assert counts == [STEPS] * 4


def _killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def with_a_casualty(at: Rank, kind: str, victim: int, when: str) -> Any:
    """Return a rank's outcomes of the step in which a rank is killed, and of the next forward."""
    with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
        model = meshed(at, kind)
        fsdp.use(model)
        trained(at, model, "plain", 0)
        ficco.synchronize()
        if at.rank == victim:
            block = model.blocks[2]
            if when == "forward":
                block.register_forward_pre_hook(_killed)
            else:
                block.down.register_full_backward_hook(_killed)
        first = caught(lambda: (trained(at, model, "plain", 1), ficco.synchronize()))
        again = caught(lambda: model(torch.zeros(4, 3, device=at.device)))
    return first, again


#: Operators of :func:`multiplied` and of their backwards.
PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter")


@HOOKS
@pytest.mark.parametrize("device", [DEVICES[0], DEVICES[2]])
@pytest.mark.parametrize(
    ("kind", "victim", "when"),
    [("tensors", 3, "forward"), ("tensors", 0, "backward"), ("replicas", 3, "backward")],
)
def test_a_killed_rank_of_a_mesh(kind: str, victim: int, when: str, device: str) -> None:
    """Ranks that share a group of ficco with the killed rank name it. The other rank gives up on
    one of those ranks; on GPUs its enqueued calls may still run. Replicas wait in the groups of
    PyTorch that they share with the killed rank."""
    neighbours = {victim ^ 1: victim % 2}  # rank: the victim's rank in their group
    lost = {victim ^ 2, victim ^ 3}
    if kind == "tensors":
        neighbours, lost = {**neighbours, victim ^ 2: victim // 2}, set()
    options: dict[str, Any] = {"fresh": True, "catch": True, "lost": lost, "device": device}
    outcomes = run(4, with_a_casualty, kind, victim, when, backend="gloo", **options)
    assert isinstance(outcomes[victim], Died) and outcomes[victim].exitcode == -signal.SIGKILL
    for rank, place in neighbours.items():
        first, again = outcomes[rank]
        for facts in gave_up(first):
            assert facts["operator"] in (GATHER, SUM, *PRODUCTS), first.text
            assert facts["peer"] == place and facts["ended"], first.text
        assert isinstance(again, Failure), again
    for rank in {0, 1, 2, 3} - {victim, *neighbours, *lost}:
        for outcome in outcomes[rank] if device == "cpu" else ():
            gave_up(outcome)
