"""Engines of the contract, each a row of data, and the way to run a function on their ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import hip_ranks
import pytest
import ranks
import thread_driver
from ranks import Rank

import ficco
import ficco.dma.cpu

#: Largest delay of a call of the double of HIP's library, in microseconds.
JITTER_US = 50


@dataclass(frozen=True)
class Engine:
    """An engine of the contract.

    Attributes:
        device: the type of device of its tensors.
        worlds: numbers of ranks of one host.
        hosts: numbers of hosts, and of ranks on each.
        graphs: whether its calls can be captured in graphs.
        traced: whether tests of compilers run on it; compiled code does not depend on the engine.
        lacks: subjects that it cannot run, and the reasons.
        marks: marks of its tests.
    """

    name: str
    device: str
    worlds: tuple[int, ...]
    hosts: tuple[tuple[int, int], ...]
    graphs: bool = False
    marks: tuple[pytest.MarkDecorator, ...] = ()
    traced: bool = True
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def tiled(self) -> bool:
        """Whether tiled products of all sizes can wait for pieces."""
        return self.name == "cpu"

    def run(self, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(at, *args)`` on the ranks of the engine; return the results by rank."""
        env = {}
        if self.name == "hip":
            hip_ranks.compile_kernels()
            env = {
                hip_ranks.LIBRARY: str(hip_ranks.library()),
                hip_ranks.WHEEL: str(hip_ranks.wheel("10")),
                "HIP_DOUBLE_JITTER_US": str(JITTER_US),
            }
        if self.name in DOUBLES:
            fn, env = partial(_on_a_double, fn, self.name), {**env, "FICCO_TESTS_ENGINE": self.name}
        return ranks.run(world, fn, *args, device=self.device, env=env)


def _on_a_double(fn: Callable[..., Any], name: str, at: Rank, *args: Any) -> Any:
    """Call a function on a double without the CPU engine, so that no call falls back to it."""
    ficco.dma.cpu.CpuEngine = None  # type: ignore[assignment,misc]
    return DOUBLES[name](fn, at, *args)


def _on_hip_double(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    """Call a function on the double of HIP's library; check for violations and leaks."""
    result = hip_ranks._with_library(fn, at, *args)
    hip_ranks.spotless()
    return result


def _on_threads(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    """Call a function on a driver of a third vendor, whose streams are threads."""
    thread_driver.serve()
    ficco.set_options(engine="threads", on_timeout="raise", timeout_s=20)
    return fn(at, *args)


#: Engines that use CPU tensors, by name, and the function that calls another on each.
DOUBLES = {"hip": _on_hip_double, "threads": _on_threads}
ENGINES = (
    Engine("cpu", "cpu", (1, 2, 3, 4), ((2, 2), (2, 1), (3, 1))),
    Engine(
        *("hip", "cpu", (2, 3), ((2, 2),)),
        traced=False,
        lacks={"all_gather_attention": "the double runs its products, but no later kernel"},
    ),
    Engine("threads", "cpu", (3,), ((2, 2),), traced=False),
    Engine("cuda", "cuda", (1, 2, 4), ((2, 1), (2, 2)), True, (pytest.mark.multigpu,)),
)
