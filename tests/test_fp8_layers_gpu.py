"""Layers of float8 on GPUs. With ``FICCO_TESTS_RANKS_PER_GPU=2`` two ranks share a card."""

from __future__ import annotations

import pytest
from test_fp8_layers import (  # noqa: F401  collected here, with this module's device
    test_functions_are_exact,
    test_gradients_have_a_scaling_of_their_own,
    test_layers_are_exact,
    test_losses_follow_those_of_the_unsharded,
)

pytestmark = pytest.mark.multigpu


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"
