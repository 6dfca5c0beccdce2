"""The pass in torch.compile: as a backend, or as a pass of Inductor's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule

from ficco.passes.rewrite import Entry, Report, named, refuse_left, replace_in
from ficco.runtime import counters

#: The setting of Inductor's that holds the pass. The pass runs on each forward and backward graph,
#: before all passes of Inductor's own that look for collectives.
HOOK = "post_grad_custom_pre_pass"


class Backend:
    """A backend of torch.compile that runs the pass; see :func:`backend`."""

    def __init__(self, inner: str | Callable[..., Any], group: str | None, schedule: str) -> None:
        self.inner = inner
        self.group = group
        self.schedule = schedule
        self.report = Report()

    def __call__(self, module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        left: list[Entry] = []  # of the forward and the backward, which may be compiled later
        if self.inner == "inductor":
            compiled = self._inductor(module, inputs, left, **kwargs)
        elif kwargs:
            raise ValueError(
                f"required mode and options only with inner='inductor', got {sorted(kwargs)}; "
                "leave them out"
            )
        else:
            compiled = self._aot(module, inputs, left)

        @wraps(compiled)
        def call(*args: Any) -> Any:
            if counters.blocks:
                refuse_left(left)
            return compiled(*args)

        return call

    def replace(self, graph: GraphModule | Graph, left: list[Entry]) -> None:
        """Run the pass on a graph. Collectives that stay are added to ``left``."""
        report = replace_in(graph, self.group, self.schedule)
        self.report.add(report)
        left += report.left

    def _inductor(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        left: list[Entry],
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        _hook()
        from torch._inductor import config, list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
        run = partial(self.replace, left=left)
        patches[HOOK] = _pass_class()(run, patches.get(HOOK, getattr(config, HOOK)))
        return compile_fx(module, inputs, config_patches=patches)

    def _aot(self, module: GraphModule, inputs: Sequence[Any], left: list[Entry]) -> Any:
        from functorch.compile import (  # type: ignore[import-untyped]
            make_boxed_func,
            min_cut_rematerialization_partition,
        )
        from torch._dynamo.backends.common import aot_autograd

        def compile(graph: GraphModule, examples: Sequence[Any]) -> Any:
            self.replace(graph, left)
            if callable(self.inner):
                return make_boxed_func(self.inner(graph, examples))
            return make_boxed_func(graph.forward)

        compiled = aot_autograd(
            fw_compiler=compile,
            bw_compiler=compile,
            partition_fn=min_cut_rematerialization_partition,
        )
        return compiled(module, inputs)


def backend(
    inner: str | Callable[..., Any] = "inductor",
    *,
    group: ProcessGroup | DeviceMesh | str | None = None,
    schedule: str = "auto",
) -> Backend:
    """A backend for torch.compile that puts ficco's operators into forward and backward graphs.

    ``report`` accumulates every graph compiled on this rank.

    Args:
        inner: the compiler for the changed graphs: ``"inductor"``, ``"aot_eager"`` to run them as
            they are, or a function that takes a GraphModule of ATen operations and example inputs
            and returns a callable.
        group, schedule: as in :func:`replace`.

    Raises:
        ValueError: ``inner`` is none of these, or the group or the schedule is not valid.

    Example::

        passes = ficco.passes.backend()
        step = torch.compile(model, backend=passes)
        step(x).sum().backward()
        print(passes.report)
    """
    if not callable(inner) and inner not in ("inductor", "aot_eager"):
        raise ValueError(
            f"inner: required 'inductor', 'aot_eager' or a function, got {inner!r}; other "
            "backends take replace() as a function on their own graphs"
        )
    return Backend(inner, named(group, schedule), schedule)


def inductor_pass(
    *, group: ProcessGroup | DeviceMesh | str | None = None, schedule: str = "auto"
) -> Callable[[Graph], None]:
    """The pass for ``torch._inductor.config.post_grad_custom_pre_pass``, with a ``report``.

    It also works in ``post_grad_custom_post_pass`` and ``joint_custom_pre_pass``. Inductor does not
    cache graphs that went through it, since a graph from the cache would not be reported.

    Args:
        group, schedule: as in :func:`replace`.

    Raises:
        NotImplementedError: this PyTorch has no such setting.
        ValueError: the group or the schedule is not valid.
    """
    _hook()
    report, name = Report(), named(group, schedule)

    def run(graph: Graph) -> None:
        part = replace_in(graph, name, schedule)
        report.add(part)
        refuse_left(part.left)

    hook: Callable[[Graph], None] = _pass_class()(run, report=report)
    return hook


def _hook() -> None:
    """``NotImplementedError`` if this version's Inductor does not take passes."""
    from torch._inductor import config

    try:
        getattr(config, HOOK)
        _pass_class()
    except (AttributeError, ImportError) as error:
        raise NotImplementedError(
            f"PyTorch {torch.__version__}: Inductor does not take the pass ({error}); compile with "
            "ficco.passes.backend('aot_eager'), or use a PyTorch from 2.6 to 2.15"
        ) from error


def _pass_class() -> Any:
    """The class of passes, made on first use because importing Inductor takes a second."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __init__(
            self, run: Callable[[Graph], None], first: Any = None, report: Report | None = None
        ) -> None:
            self.run = run
            self.first = [] if first is None else first
            self.report = report

        def __call__(self, graph: Graph) -> None:
            for other in self.first if isinstance(self.first, list | tuple) else [self.first]:
                other(graph)
            self.run(graph)

        def uuid(self) -> None:
            """No identity, so that graphs are not cached: a cached one would not be reported."""

    return Pass
