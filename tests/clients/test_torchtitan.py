"""torchtitan's own trainer with ficco's overrides, against the same trainings without."""

from __future__ import annotations

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
    """What each rank has of one training."""
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
TWO = "--parallelism.tensor_parallel_degree 2"
COMPILED = "--compile.enable --compile.backend aot_eager"
PIPELINE = (
    f"{TWO} --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B"
)

#: `make test-titan` runs these.
later = since("2.14", "lacks what torchtitan needs for its spmd_types, and to compile")


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
        (
            f"{TWO} --parallelism.no-enable_sequence_parallel",
            4,
            "set parallelism.enable_sequence",
            {"all-reduce": 8},  # checkpointing calls the blocks of both layers twice
        ),
        # FSDP2 alone.
        (
            "--parallelism.tensor_parallel_degree 1",
            1,
            "tensor_parallel_degree of 2 or more, got 1",
            {},
        ),
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
    world: int,
    folder: Path,
    config: str,
    flags: str,
    *overrides: str,
    how: str = "",
    stock: str = "",
) -> list[dict[str, Any]]:
    """What each rank has of a training with ficco, whose losses are those of stock's.

    Args:
        stock: the configuration without ficco, if it is another one.
    """
    want = trained(world, folder, stock or config, flags)[
        -1
    ]  # in a pipeline, the rank that has any
    assert min(want["losses"]) > 0 and want["calls"] == {}
    found = trained(world, folder, config, flags, *overrides, how=how)
    same(found[-1], want)
    return found


def test_tensor_parallelism_alone_on_four_ranks(tmp_path: Path) -> None:
    flags = f"--parallelism.tensor_parallel_degree 4 {PARTIAL}"
    assert all(calls(found) == STEP for found in pair(4, tmp_path, "fused", flags, *ALL))


@pytest.mark.parametrize("backend", [PARTIAL, pytest.param(TYPES, marks=later)])
def test_separate_weights_inside_fsdp(backend: str, tmp_path: Path) -> None:
    ranks = pair(4, tmp_path, "separate", f"{TWO} {backend}", *ALL)
    assert all(calls(found) == STEP for found in ranks)


@pytest.mark.parametrize("backend", [PARTIAL, pytest.param(TYPES, marks=later)])
def test_the_last_rank_of_a_pipeline_has_stocks_losses(backend: str, tmp_path: Path) -> None:
    for found in pair(4, tmp_path, "fused", f"{PIPELINE} {backend}", *ALL):
        # One layer for two microbatches, and once more to learn the shapes that stages exchange.
        step = calls(found)
        assert all(STEP[name] <= step[name] < STEP[name] + 2.5 for name in STEP), step


def test_a_checkpoint_of_either_is_resumed_by_the_other(tmp_path: Path) -> None:
    flags = (
        f"{TWO} {PARTIAL} --training.steps 4 --checkpoint.enable --checkpoint.interval 2 "
        "--dump_folder"
    )
    stock, _ = trained(2, tmp_path, "fused", f"{flags} stock")
    trained(2, tmp_path, "fused", f"{flags} ficco", *ALL)
    for folder, overrides, step in (("stock", ALL, STEP), ("ficco", [], {})):
        resume = f"{flags} {folder} --checkpoint.load_step 2 --checkpoint.load_only"
        found, _ = trained(2, tmp_path, "fused", resume, *overrides)
        same(found, stock, since=2)
        assert calls(found) == step


@pytest.mark.parametrize(
    ("config", "flags", "step"),
    [
        ("fused", TYPES, STEP),
        ("fused", f"{TYPES} {COMPILED}", STEP),
        ("fused", f"{FULL} {COMPILED}", STEP),
        ("full", f"{TYPES} --debug.spmd_typechecking", TWICE),
        ("full_separate", f"{TYPES} --debug.spmd_typechecking", TWICE),
    ],
)
@later
def test_every_backend_compiled_and_type_checked(
    config: str, flags: str, step: dict[str, int], tmp_path: Path
) -> None:
    found = pair(2, tmp_path, config, f"{TWO} {flags}", *ALL)
    assert all(calls(each) == step for each in found)


@later
def test_pytorchs_fused_operators_can_be_ficcos(tmp_path: Path) -> None:
    # Stock cannot run them on CPUs: it runs the collectives.
    found = pair(2, tmp_path, "dist_gemm", f"{TWO} {TYPES}", how="symm_mem", stock="fused")
    assert all(calls(each) == TWICE for each in found)


@later
def test_the_pass_runs_in_inductor(tmp_path: Path) -> None:
    for found in pair(
        2, tmp_path, "fused", f"{TWO} {TYPES} --compile.enable", how="inductor", stock="fused"
    ):
        assert found["replaced"] == [9, 4]


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
