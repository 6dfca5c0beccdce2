"""Fixtures of the tests on GPUs."""

import pytest


@pytest.fixture(scope="session")
def device() -> str:
    """Device type of the ranks, also in tests of other folders that are collected here."""
    return "cuda"
