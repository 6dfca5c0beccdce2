"""The engines on which the contract runs, each a row of data, and how a rank gets there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import hip_ranks
import pytest
import ranks
from ranks import Rank

#: What calls of the double of HIP's library are late by, at most.
JITTER_US = 50


@dataclass(frozen=True)
class Engine:
    """An engine of the contract.

    Attributes:
        device: the type of device of its tensors.
        worlds: numbers of ranks of one host.
        hosts: numbers of hosts, and of ranks on each.
        graphs: whether its calls can be captured in graphs.
        marks: of its tests.
    """

    name: str
    device: str
    worlds: tuple[int, ...]
    hosts: tuple[tuple[int, int], ...]
    graphs: bool = False
    marks: tuple[pytest.MarkDecorator, ...] = ()

    @property
    def tiled(self) -> bool:
        """Whether products of all sizes can wait inside."""
        return self.name == "cpu"

    def run(self, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(at, *args)`` on the ranks of the engine: what each returns."""
        if self.name != "hip":
            return ranks.run(world, fn, *args, device=self.device)
        hip_ranks.compile_kernels()
        env = {
            hip_ranks.LIBRARY: str(hip_ranks.library()),
            hip_ranks.WHEEL: str(hip_ranks.wheel("10")),
            "HIP_DOUBLE_JITTER_US": str(JITTER_US),
        }
        return ranks.run(world, partial(_on_the_double, fn), *args, env=env)


def _on_the_double(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    """A call that no other engine serves, which violates nothing and leaks nothing."""
    import ficco.dma.cpu

    ficco.dma.cpu.CpuEngine = None  # type: ignore[assignment,misc]
    found = hip_ranks._with_library(fn, at, *args)
    hip_ranks.spotless()
    return found


ENGINES = (
    Engine("cpu", "cpu", (1, 2, 3, 4), ((2, 2), (2, 1), (3, 1))),
    Engine("hip", "cpu", (2, 3), ((2, 2),)),
    Engine("cuda", "cuda", (1, 2, 4), ((2, 1), (2, 2)), True, (pytest.mark.multigpu,)),
)
