"""torchtitan's trainer with ficco's overrides, compared with the same training without them."""

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
    world: int, folder: Path, config: str, flags: str, *overrides: str, entry: str = ""
) -> list[dict[str, Any]]:
    if not (folder / "tests").exists():
        titan.assets(folder)
    imports = ["--override.imports", *overrides] if overrides else []
    arguments = ["--module", "titan", "--config", config, *COMMON, *flags.split(), *imports]
    return run(world, titan.train, str(folder), entry, arguments, fresh=True, timeout=250)


def calls(result: dict[str, Any]) -> dict[str, float]:
    """Numbers of ficco's calls in one step on a rank, by operator."""
    return {name: count / len(result["losses"]) for name, count in result["calls"].items()}


def same(result: dict[str, Any], stock: dict[str, Any], since: int = 0) -> None:
    """Compare losses to the five decimal places that torchtitan prints, and gradient norms to
    float32's precision: the order of sums differs."""
    torch.testing.assert_close(result["losses"], stock["losses"][since:], rtol=0, atol=5e-6)
    torch.testing.assert_close(result["norms"], stock["norms"][since:], rtol=2e-6, atol=0)


#: Calls in a step of two layers: the backward gathers rows of the forward again.
STEP = {"all_gather_matmul": 12, "matmul_reduce_scatter": 8}
#: The same if the backward first recomputes the forward.
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
        # Selective checkpointing recomputes all of ficco's operators unless it knows them.
        ("fused", PARTIAL, OVERRIDES, TWICE),
        ("full", PARTIAL, ALL, TWICE),
    ):
        for result in trained(2, tmp_path, config, f"{TWO} {backend}", *overrides):
            same(result, stock)
            assert calls(result) == step, (config, backend, overrides)


@pytest.mark.parametrize(
    ("flags", "count", "message", "left"),
    [
        # Checkpointing runs the blocks of both layers twice.
        (f"{TWO} {REDUCES}", 4, "set parallelism.enable_sequence", {"all-reduce": 8}),
        # FSDP2 without tensor parallelism.
        (ONE, 1, "tensor_parallel_degree of 2 or more, got 1", {}),
    ],
)
def test_layers_left_to_torchtitan_are_logged_and_counted(
    flags: str, count: int, message: str, left: dict[str, int], tmp_path: Path
) -> None:
    for each in trained(2, tmp_path, "fused", f"{flags} {PARTIAL} --training.steps 1", *OVERRIDES):
        assert each["calls"] == {} and len(each["warned"]) == count
        assert all(message in text for text in each["warned"])
        assert each["left"] == left


def pair(
    world: int, folder: Path, config: str, flags: str, *overrides: str, entry: str = ""
) -> list[dict[str, Any]]:
    """Results of all ranks of a training with ficco, whose losses equal those of stock. With an
    ``entry`` stock trains the configuration "fused"."""
    # In a pipeline only the last rank has losses.
    stock = trained(world, folder, "fused" if entry else config, flags)[-1]
    assert min(stock["losses"]) > 0 and stock["calls"] == {}
    results = trained(world, folder, config, flags, *overrides, entry=entry)
    same(results[-1], stock)
    return results


@pytest.mark.parametrize(
    ("world", "config", "flags", "step"),
    [
        (4, "fused", f"--parallelism.tensor_parallel_degree 4 {PARTIAL}", STEP),
        # Combined with FSDP.
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
    for result in pair(4, tmp_path, "fused", f"{PIPELINE} {backend}", *ALL):
        # One layer for two microbatches, and one more forward to infer the shapes between stages.
        step = calls(result)
        assert all(STEP[name] <= step[name] < STEP[name] + 2.5 for name in STEP), step


def test_stock_and_ficco_resume_checkpoints_of_each_other(tmp_path: Path) -> None:
    saves = "--checkpoint.enable --checkpoint.interval 2 --dump_folder"
    flags = f"{TWO} {PARTIAL} --training.steps 4 {saves}"
    stock, _ = trained(2, tmp_path, "fused", f"{flags} stock")
    trained(2, tmp_path, "fused", f"{flags} ficco", *ALL)
    for folder, overrides, step in (("stock", ALL, STEP), ("ficco", [], {})):
        resume = f"{flags} {folder} --checkpoint.load_step 2 --checkpoint.load_only"
        result, _ = trained(2, tmp_path, "fused", resume, *overrides)
        same(result, stock, since=2)
        assert calls(result) == step


@LATER
def test_ficco_replaces_pytorchs_fused_operators(tmp_path: Path) -> None:
    # Stock runs the collectives: the fused operators do not run on CPUs.
    ranks = pair(2, tmp_path, "dist_gemm", f"{TWO} {TYPES}", entry="symm_mem")
    assert all(calls(each) == TWICE for each in ranks)


@LATER
def test_the_pass_runs_in_inductor(tmp_path: Path) -> None:
    ranks = pair(2, tmp_path, "fused", f"{TWO} {TYPES} --compile.enable", entry="inductor")
    assert all(each["replaced"] == [9, 4] for each in ranks)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # an import of torchtitan
def test_a_layer_that_does_more_than_multiply_is_refused() -> None:
    """ficco's override reads the weights of q, k and v, so an adapter would have no effect."""
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
