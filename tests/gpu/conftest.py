"""What tests on GPUs share."""

import pytest


@pytest.fixture(scope="session")
def device() -> str:
    """The type of the devices of ranks, also in tests of other folders that are collected here."""
    return "cuda"
