"""ficco hides communication behind the matrix product that depends on it."""

import typing

from ficco.api import addresses, close, empty, explain, memory, synchronize
from ficco.errors import (
    BackendError,
    ConfigError,
    FiccoError,
    PeerFailed,
    RankMismatch,
    SignalTimeout,
)
from ficco.heuristics import Decision
from ficco.ops.arriving import Arriving, arriving
from ficco.ops.attention import all_gather_attention
from ficco.ops.experts import experts
from ficco.ops.operators import (
    all_gather_matmul,
    all_gather_transposed_matmul,
    all_to_all_matmul,
    all_to_all_transposed_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from ficco.ops.projections import ulysses_output, ulysses_project
from ficco.ops.routing import Routing, route
from ficco.ops.sdpa import behind_sdpa
from ficco.ops.symm_mem import behind_symm_mem
from ficco.ops.ulysses import ulysses_attention
from ficco.options import Options, options, set_options
from ficco.problem import Problem
from ficco.schedules import Schedule

__all__ = [
    "Arriving",
    "BackendError",
    "ConfigError",
    "Decision",
    "FiccoError",
    "Options",
    "PeerFailed",
    "Problem",
    "RankMismatch",
    "Routing",
    "Schedule",
    "SignalTimeout",
    "addresses",
    "all_gather_attention",
    "all_gather_matmul",
    "all_gather_transposed_matmul",
    "all_to_all_matmul",
    "all_to_all_transposed_matmul",
    "arriving",
    "behind_sdpa",
    "behind_symm_mem",
    "close",
    "empty",
    "experts",
    "explain",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "memory",
    "options",
    "route",
    "set_options",
    "synchronize",
    "ulysses_attention",
    "ulysses_output",
    "ulysses_project",
]


__version__: str

if typing.TYPE_CHECKING:
    from ficco import nn as nn
    from ficco import tile as tile
else:

    def __getattr__(name: str) -> object:
        """Load ``__version__``, ``nn`` and ``tile`` on first use: importing ficco stays cheap, and
        does not need Triton. Hidden from type checkers, which would take it to have any name."""
        if name == "nn":
            import ficco.nn as nn

            return nn
        if name == "tile":
            import ficco.tile as tile

            return tile
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ficco.version import version

        return version()
