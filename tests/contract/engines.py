"""The engines on which the contract runs, each a row of data, and how a rank gets there."""

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
        traced: whether compilers are tried on it: they see operators, and no engine.
        lacks: subjects that it cannot run, and why.
        marks: of its tests.
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
        """Whether products of all sizes can wait inside."""
        return self.name == "cpu"

    def run(self, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(at, *args)`` on the ranks of the engine: what each returns."""
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
    """A call that no other engine serves, not even in a thread of its own."""
    ficco.dma.cpu.CpuEngine = None  # type: ignore[assignment,misc]
    return DOUBLES[name](fn, at, *args)


def _of_hip(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    """On the double of HIP's library: a call violates nothing and leaks nothing."""
    found = hip_ranks._with_library(fn, at, *args)
    hip_ranks.spotless()
    return found


def _of_threads(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    """On a driver of a third vendor, whose streams are threads."""
    thread_driver.serve()
    ficco.set_options(engine="threads", on_timeout="raise", timeout_s=20)
    return fn(at, *args)


#: Engines whose tensors are the CPU's, by name, and how a rank calls a function on them.
DOUBLES = {"hip": _of_hip, "threads": _of_threads}
ENGINES = (
    Engine("cpu", "cpu", (1, 2, 3, 4), ((2, 2), (2, 1), (3, 1))),
    Engine(
        *("hip", "cpu", (2, 3), ((2, 2),)),
        traced=False,
        lacks={"all_gather_attention": "the double runs its products, and no kernel after them"},
    ),
    Engine("threads", "cpu", (3,), ((2, 2),), traced=False),
    Engine("cuda", "cuda", (1, 2, 4), ((2, 1), (2, 2)), True, (pytest.mark.multigpu,)),
)
