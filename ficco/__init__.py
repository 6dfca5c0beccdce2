"""ficco hides communication behind the matrix product that depends on it.

Start: replace a collective and the product next to it by one call. ``group`` is any process group;
on CPUs, one of gloo. Every rank calls with its own shard::

    y = ficco.all_gather_matmul(x_shard, weight, group=group)  # gather(x) @ weight
    z = ficco.matmul_reduce_scatter(h, weight, group=group)  # reduce_scatter(h @ weight)
    ficco.close(group)

Operators, each differentiable:
    all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, all_to_all_matmul,
    matmul_all_to_all, and for gradients of weights all_gather_transposed_matmul,
    all_to_all_transposed_matmul
    all_gather_attention, ulysses_attention, with ulysses_project and ulysses_output
    experts, with route and Routing
    arriving and Arriving, for products of a kernel of your own
Modules and compiled models:
    ficco.nn has the layers. torch.compile(model, backend="ficco") and ficco.passes replace
    collectives in a graph. behind_symm_mem and behind_sdpa replace PyTorch's own operators.
    ficco.fsdp.use serves the collectives of FSDP2.
Choice of the schedule:
    explain returns the Decision for a Problem: which Schedule a call takes, and why.
    schedule="auto" is the default.
    options and set_options hold settings of calls, such as timeout_s, and Options lists them.
    ficco.machine, heuristics, schedules, plan and simulate need no GPU and no group.
    expect(overlapped=True) raises NotOverlapped where a call hides nothing, and counters returns
    the CallCounts of each group and operator.
Memory and the end:
    empty allocates shards that need no copy; memory, addresses, synchronize, close
    prepare makes the kinds of calls of a server warm before its first request.
Errors:
    FiccoError, and its kinds PeerFailed, RankMismatch, SignalTimeout, BackendError, ConfigError

Read on: ``help(ficco.all_gather_matmul)``; ``ficco --help``, for ``demo``, ``doctor`` and
``tune``; docs/start.md and docs/limits.md. ``dir(ficco)`` lists all public names.
"""

# In a program that has imported PyTorch, ``import ficco`` loads every public name, and declares the
# operators to ``torch.ops``. Before PyTorch is imported, a name is loaded on first use, so that
# ``ficco --help`` does not wait for PyTorch.

import importlib
import sys
import typing

# Not on first use: the import of the module ``ficco.options`` would take the function's name.
from ficco.options import Options, options, set_options

if typing.TYPE_CHECKING:
    from ficco import fsdp as fsdp
    from ficco import heuristics as heuristics
    from ficco import machine as machine
    from ficco import nn as nn
    from ficco import passes as passes
    from ficco import plan as plan
    from ficco import schedules as schedules
    from ficco import simulate as simulate
    from ficco import tile as tile
    from ficco.api import addresses, close, empty, expect, explain, memory, prepare, synchronize
    from ficco.errors import (
        BackendError,
        ConfigError,
        FiccoError,
        NotOverlapped,
        PeerFailed,
        RankMismatch,
        SignalTimeout,
    )
    from ficco.heuristics import Decision
    from ficco.ops.arriving import Arriving, arriving
    from ficco.ops.attention import all_gather_attention, behind_sdpa
    from ficco.ops.experts import experts
    from ficco.ops.operators import (
        all_gather_matmul,
        all_gather_transposed_matmul,
        all_to_all_matmul,
        all_to_all_transposed_matmul,
        behind_symm_mem,
        matmul_all_reduce,
        matmul_all_to_all,
        matmul_reduce_scatter,
    )
    from ficco.ops.routing import Routing, route
    from ficco.ops.ulysses import ulysses_attention, ulysses_output, ulysses_project
    from ficco.problems.products import Problem
    from ficco.runtime.counters import CallCounts, counters
    from ficco.schedules import Schedule

__all__ = [
    "Arriving",
    "BackendError",
    "CallCounts",
    "ConfigError",
    "Decision",
    "FiccoError",
    "NotOverlapped",
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
    "counters",
    "empty",
    "expect",
    "experts",
    "explain",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "memory",
    "options",
    "prepare",
    "route",
    "set_options",
    "synchronize",
    "ulysses_attention",
    "ulysses_output",
    "ulysses_project",
]

__version__: str

#: The names that a module gives.
_NAMES = {
    "ficco.api": "addresses close empty expect explain memory prepare synchronize",
    "ficco.errors": "BackendError ConfigError FiccoError NotOverlapped PeerFailed RankMismatch "
    "SignalTimeout",
    "ficco.heuristics": "Decision",
    "ficco.ops.arriving": "Arriving arriving",
    "ficco.ops.attention": "all_gather_attention behind_sdpa",
    "ficco.ops.experts": "experts",
    "ficco.ops.operators": "all_gather_matmul all_gather_transposed_matmul all_to_all_matmul "
    "all_to_all_transposed_matmul behind_symm_mem matmul_all_reduce matmul_all_to_all "
    "matmul_reduce_scatter",
    "ficco.ops.ulysses": "ulysses_attention ulysses_output ulysses_project",
    "ficco.ops.routing": "Routing route",
    "ficco.problems.products": "Problem",
    "ficco.runtime.counters": "CallCounts counters",
    "ficco.schedules": "Schedule",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

#: Public modules, imported on first use.
_MODULES = (
    "fsdp",
    "heuristics",
    "integrations",
    "machine",
    "nn",
    "passes",
    "plan",
    "schedules",
    "simulate",
    "tile",
)

if not typing.TYPE_CHECKING:  # a checker would take ficco to have any name

    def __getattr__(name: str) -> object:
        """Load a public name or module, or ``__version__``."""
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        elif name in _MODULES:
            try:
                value = importlib.import_module(f"{__name__}.{name}")
            except ImportError as error:  # ficco.tile without Triton
                raise AttributeError(str(error)) from error
        elif name == "__version__":
            from ficco.version import version

            value = version()
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, value)

    def __dir__() -> list[str]:
        return sorted([*__all__, *_MODULES, "__version__"])

    if "torch" in sys.modules:
        for _name in _MODULE_OF:
            __getattr__(_name)
