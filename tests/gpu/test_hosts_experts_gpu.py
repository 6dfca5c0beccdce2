"""Layers of experts over several hosts on GPUs, beyond the contract and :mod:`test_hosts_gpu`:
larger blocks."""

from __future__ import annotations

import pytest
from ranks import run
from test_experts_gpu import larger
from test_hosts_experts import over

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize(("hosts", "local"), [(2, 1), (2, 2)])
def test_larger_blocks(hosts: int, local: int) -> None:
    run(hosts * local, over, hosts, larger, device="cuda")
