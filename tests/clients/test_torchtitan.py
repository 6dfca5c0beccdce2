"""torchtitan's own trainer with ficco's overrides, against the same trainings without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import titan
import torch
from ranks import run, since

pytestmark = pytest.mark.clients

OVERRIDES = [f"ficco.integrations.torchtitan.{name}" for name in ("attention", "feed_forward")]
SELECTIVE = "ficco.integrations.torchtitan.selective"

COMMON = (
    "--training.steps 3 --training.seq_len 64 --training.local_batch_size 2 "
    "--training.disable_cuda_graphs --training.mixed_precision_param float32 --debug.seed 1 "
    "--validator.no-enable --metrics.log_freq 1 --lr_scheduler.warmup_steps 1"
).split()


def trained(
    world: int, folder: Path, config: str, flags: str, *overrides: str, how: str = ""
) -> list[dict[str, Any]]:
    if not (folder / "tests").exists():
        titan.assets(folder)
    imports = ["--override.imports", *overrides] if overrides else []
    arguments = ["--module", "titan", "--config", config, *COMMON, *flags.split(), *imports]
    return run(world, titan.train, str(folder), how, arguments, fresh=True, timeout=250)


def calls(found: dict[str, Any]) -> dict[str, float]:
    """ficco's operators of one step on a rank."""
    return {name: count / len(found["losses"]) for name, count in found["calls"].items()}


def same(found: dict[str, Any], stock: dict[str, Any], since: int = 0) -> None:
    """Losses in the digits that torchtitan prints, five behind the point, and norms of gradients to
    float32's: sums are in another order."""
    torch.testing.assert_close(found["losses"], stock["losses"][since:], rtol=0, atol=5e-6)
    torch.testing.assert_close(found["norms"], stock["norms"][since:], rtol=2e-6, atol=0)


#: Of a step: two layers, forward and backward, in which gathered rows are gathered again.
STEP = {"all_gather_matmul": 12, "matmul_reduce_scatter": 8}
#: The same if the backward first runs all of them again.
TWICE = {"all_gather_matmul": 16, "matmul_reduce_scatter": 12}

ALL = [*OVERRIDES, SELECTIVE]
PARTIAL, FULL, TYPES = (
    f"--parallelism.spmd_backend {name}"
    for name in ("partial_dtensor", "full_dtensor", "spmd_types")
)
ONE, TWO = (f"--parallelism.tensor_parallel_degree {count}" for count in (1, 2))
REDUCES = "--parallelism.no-enable_sequence_parallel"
COMPILED = "--compile.enable --compile.backend aot_eager"
PIPELINE = (
    f"{TWO} --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B"
)

#: `make test-titan` runs these.
LATER = since("2.14", "lacks what torchtitan needs for its spmd_types, and to compile")
later = partial(pytest.param, marks=LATER)


def test_overrides_train_as_stock(tmp_path: Path) -> None:
    stock, _ = trained(2, tmp_path, "fused", f"{TWO} {PARTIAL}")
    assert len(stock["losses"]) == 3 and stock["calls"] == {}
    for config, backend, overrides, step in (
        ("fused", PARTIAL, ALL, STEP),
        ("fused", FULL, ALL, STEP),
        # Selective checkpointing that does not know ficco's operators recomputes them all.
        ("fused", PARTIAL, OVERRIDES, TWICE),
        ("full", PARTIAL, ALL, TWICE),
    ):
        for found in trained(2, tmp_path, config, f"{TWO} {backend}", *overrides):
            same(found, stock)
            assert calls(found) == step, (config, backend, overrides)


@pytest.mark.parametrize(
    ("flags", "count", "says", "left"),
    [
        # Checkpointing calls the blocks of both layers twice.
        (f"{TWO} {REDUCES}", 4, "set parallelism.enable_sequence", {"all-reduce": 8}),
        # FSDP2 alone.
        (ONE, 1, "tensor_parallel_degree of 2 or more, got 1", {}),
    ],
)
def test_what_stays_as_it_is_is_logged_and_counted(
    flags: str, count: int, says: str, left: dict[str, int], tmp_path: Path
) -> None:
    for found in trained(2, tmp_path, "fused", f"{flags} {PARTIAL} --training.steps 1", *OVERRIDES):
        assert found["calls"] == {} and len(found["warned"]) == count
        assert all(says in text for text in found["warned"])
        assert found["left"] == left


def pair(
    world: int, folder: Path, config: str, flags: str, *overrides: str, how: str = ""
) -> list[dict[str, Any]]:
    """What each rank has of a training with ficco, whose losses are those of stock's: where ficco
    comes in otherwise than by overrides, those of the usual configuration."""
    # In a pipeline the last rank has losses.
    want = trained(world, folder, "fused" if how else config, flags)[-1]
    assert min(want["losses"]) > 0 and want["calls"] == {}
    found = trained(world, folder, config, flags, *overrides, how=how)
    same(found[-1], want)
    return found


@pytest.mark.parametrize(
    ("world", "config", "flags", "step"),
    [
        (4, "fused", f"--parallelism.tensor_parallel_degree 4 {PARTIAL}", STEP),
        # Inside FSDP.
        (4, "separate", f"{TWO} {PARTIAL}", STEP),
        later(4, "separate", f"{TWO} {TYPES}", STEP),
        later(2, "fused", f"{TWO} {TYPES}", STEP),
        later(2, "fused", f"{TWO} {TYPES} {COMPILED}", STEP),
        later(2, "fused", f"{TWO} {FULL} {COMPILED}", STEP),
        later(2, "full", f"{TWO} {TYPES} --debug.spmd_typechecking", TWICE),
        later(2, "full_separate", f"{TWO} {TYPES} --debug.spmd_typechecking", TWICE),
    ],
)
def test_every_backend_compiled_and_type_checked(
    world: int, config: str, flags: str, step: dict[str, int], tmp_path: Path
) -> None:
    ranks = pair(world, tmp_path, config, flags, *ALL)
    assert all(calls(each) == step for each in ranks)


@pytest.mark.parametrize("backend", [PARTIAL, later(TYPES)])
def test_the_last_rank_of_a_pipeline_has_stocks_losses(backend: str, tmp_path: Path) -> None:
    for found in pair(4, tmp_path, "fused", f"{PIPELINE} {backend}", *ALL):
        # One layer for two microbatches, and once more to learn the shapes that stages exchange.
        step = calls(found)
        assert all(STEP[name] <= step[name] < STEP[name] + 2.5 for name in STEP), step


def test_a_checkpoint_of_either_is_resumed_by_the_other(tmp_path: Path) -> None:
    saves = "--checkpoint.enable --checkpoint.interval 2 --dump_folder"
    flags = f"{TWO} {PARTIAL} --training.steps 4 {saves}"
    stock, _ = trained(2, tmp_path, "fused", f"{flags} stock")
    trained(2, tmp_path, "fused", f"{flags} ficco", *ALL)
    for folder, overrides, step in (("stock", ALL, STEP), ("ficco", [], {})):
        resume = f"{flags} {folder} --checkpoint.load_step 2 --checkpoint.load_only"
        found, _ = trained(2, tmp_path, "fused", resume, *overrides)
        same(found, stock, since=2)
        assert calls(found) == step


@LATER
def test_pytorchs_fused_operators_can_be_ficcos(tmp_path: Path) -> None:
    # Stock cannot run them on CPUs: it runs the collectives.
    ranks = pair(2, tmp_path, "dist_gemm", f"{TWO} {TYPES}", how="symm_mem")
    assert all(calls(each) == TWICE for each in ranks)


@LATER
def test_the_pass_runs_in_inductor(tmp_path: Path) -> None:
    ranks = pair(2, tmp_path, "fused", f"{TWO} {TYPES} --compile.enable", how="inductor")
    assert all(each["replaced"] == [9, 4] for each in ranks)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by what torchtitan imports
def test_a_layer_that_does_more_than_multiply_is_refused() -> None:
    """ficco's override reads the weights of q, k and v: an adapter would have no effect."""
    from torchtitan.models.common.linear import Linear

    from ficco.integrations.torchtitan import _require_readable

    class Adapted(Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    plain, adapted = (
        kind(Linear.Config(in_features=8, out_features=8)) for kind in (Linear, Adapted)
    )
    _require_readable(plain)
    with pytest.raises(ValueError, match="got Adapted, whose weight is a Parameter"):
        _require_readable(plain, adapted)
