"""What all tests share: GPU markers, stacks of what is stuck, the end of the workers."""

from __future__ import annotations

import pytest
import ranks
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine has too few GPUs for."""
    wanted = {"gpu": 1, "multigpu": 2}
    marked = [(item, name) for item in items for name in wanted if item.get_closest_marker(name)]
    count = torch.cuda.device_count() if marked else 0
    for item, name in marked:
        if count < wanted[name]:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted[name]} GPUs, found {count}"))


def pytest_sessionfinish() -> None:
    """End the workers while what they need is still there."""
    ranks.close()
