"""A plug-in for vLLM: the product and the all-reduce of ``RowParallelLinear`` are one operator.

vLLM loads every plug-in that is installed, in each of its processes. This one does nothing unless
the variable ``FICCO_VLLM`` is ``1``. Batches of fewer rows than ``auto`` hides communication for
keep vLLM's all-reduce.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.fx
from torch.nn.functional import linear

from ficco.integrations import client
from ficco.passes import replace
from ficco.passes.graph import arguments

#: The variable that sets the fewest rows of an operator, in place of ``auto``'s figures.
ROWS = "FICCO_VLLM_ROWS"
#: The largest batch for which ``auto`` is asked.
MOST_ROWS = 8192


def register() -> None:
    """The entry point in the group ``vllm.general_plugins``."""
    if os.environ.get("FICCO_VLLM") != "1":
        return
    with client("vllm", "0.32"):
        from vllm.model_executor.custom_op import op_registry_oot
        from vllm.model_executor.layers.linear import RowParallelLinear

    if RowParallelLinear.__name__ not in op_registry_oot:
        RowParallelLinear.register_oot(name=RowParallelLinear.__name__)(_row_parallel_linear())


@cache
def _fewest_rows(world: int, n: int, k: int, dtype: torch.dtype) -> int:
    """The fewest rows of a captured product and all-reduce, a power of two, from which ``auto``
    hides communication on this machine; 0 if it hides none up to ``MOST_ROWS``. The variable
    ``FICCO_VLLM_ROWS`` sets another number.

    Args:
        n, k: columns and rows of each rank's weight.

    Raises:
        ValueError: the variable is not a whole number of at least 1.
    """
    if (text := os.environ.get(ROWS)) is not None:
        if not text.isdecimal() or not int(text):
            raise ValueError(f"{ROWS}: required a whole number of at least 1, got {text!r}")
        return int(text)
    from ficco.api import explain
    from ficco.heuristics.candidates import is_serial

    fewest, rows = 0, MOST_ROWS
    while rows:
        decision = explain(
            "matmul_all_reduce", world=world, dtype=dtype, captured=True, m=rows, n=n, k=k
        )
        if is_serial(decision.schedule) or decision.schedule.sums_in_place:
            break
        fewest, rows = rows, rows // 2
    return fewest


def _reduced_linear(x: torch.Tensor, weight: torch.Tensor, group: str, fewest: int) -> torch.Tensor:
    """The sum over ranks of ``x @ weight.t()``: by vLLM for fewer than ``fewest`` rows, which a
    compiled program knows only when it runs. ``group``: vLLM's name of the group."""
    from vllm.distributed import parallel_state

    from ficco.ops.operators import matmul_all_reduce

    coordinator = parallel_state._groups[group]()
    if len(x) < fewest:
        summed: torch.Tensor = coordinator._all_reduce_out_place(linear(x, weight))
        return summed
    return matmul_all_reduce(x, weight.t(), group=coordinator.device_group)


def _row_parallel_linear() -> Any:
    with client("vllm", "0.32"):
        from vllm.distributed import get_tp_group
        from vllm.logger import init_logger
        from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

    from ficco.runtime.counters import stays

    reduced_linear = torch.library.custom_op(
        "ficco::vllm_reduced_linear", _reduced_linear, mutates_args=()
    )
    reduced_linear.register_fake(
        lambda x, weight, group, fewest: x.new_empty(x.shape[0], weight.shape[0])
    )

    class FiccoReducedLinear(RowParallelLinear):
        """vLLM's layer where it is quantized, adds its bias, does not reduce or splits its input;
        otherwise one ``matmul_all_reduce`` for enough rows."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            serves = (
                self.tp_size > 1
                and self.reduce_results
                and self.input_is_parallel
                and type(self.quant_method) is UnquantizedLinearMethod
                and (self.bias is None or self.skip_bias_add)
            )
            self.ficco_rows = 0
            if not serves:
                self.ficco_leaves = "vLLM's layer is quantized, adds its bias or splits its input"
                return
            n, k = self.output_size_per_partition, self.input_size_per_partition
            rows = self.ficco_rows = _fewest_rows(self.tp_size, n, k, self.params_dtype)
            layer = f"ficco: RowParallelLinear of {k} features a rank to {n}"
            if not rows:
                self.ficco_leaves = f"auto hides nothing of it up to {MOST_ROWS} rows"
                logger.info_once(f"{layer} keeps vLLM's all-reduce: {self.ficco_leaves}")
                return
            # On CPUs the weight would be packed for vLLM's own product.
            self._cpu_skip_gemm_dispatch = True
            logger.info_once(f"{layer}: one matmul_all_reduce from {rows} rows, vLLM's below")

        def forward(self, input_: torch.Tensor) -> Any:
            if not self.ficco_rows:
                if self.tp_size > 1 and self.reduce_results:
                    name = get_tp_group().device_group.group_name
                    stays(name, "all-reduce", self.ficco_leaves, "see docs/clients/vllm.md")
                return super().forward(input_)
            x, group = input_.reshape(-1, input_.shape[-1]), get_tp_group().unique_name
            y = reduced_linear(x, self.weight, group, self.ficco_rows)
            y = y.view(*input_.shape[:-1], y.shape[-1])
            if not self.return_bias:
                return y
            return y, self.bias if self.skip_bias_add else None

    logger = init_logger("vllm.ficco")
    return FiccoReducedLinear


def inductor_pass(graph: torch.fx.Graph) -> None:
    """ficco's pass on vLLM's own all-reduces, for its compiled models::

        passes = {"post_grad_custom_pre_pass": CallableInductorPass(inductor_pass)}
        CompilationConfig(inductor_compile_config=passes)

    ``vllm::all_reduce`` is PyTorch's functional collective while :func:`ficco.passes.replace` runs;
    those that it leaves become vLLM's again.
    """
    from vllm.distributed import parallel_state

    functional, own = torch.ops._c10d_functional, torch.ops.vllm.all_reduce.default
    collectives: dict[torch.fx.Node, str] = {}
    for node in list(graph.nodes):
        if node.target is not own:
            continue
        by_name = arguments(node)
        tensor, name = by_name["tensor"], by_name["group_name"]
        coordinator = parallel_state._groups[name]()
        if coordinator is None:
            continue
        group = coordinator.device_group.group_name
        done = _before(node, functional.all_reduce.default, tensor, "sum", group)
        collectives[done] = name
        node.replace_all_uses_with(_before(node, functional.wait_tensor.default, done))
        graph.erase_node(node)
    try:
        replace(graph)
    finally:  # also where a collective that stays is refused
        for node in [node for node in graph.nodes if node in collectives]:
            (wait,) = node.users
            wait.replace_all_uses_with(_before(node, own, node.args[0], collectives[node]))
            graph.erase_node(wait)
            graph.erase_node(node)


def _before(node: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
    """A new node in front of another, which it is to replace."""
    with node.graph.inserting_before(node):
        created = node.graph.call_function(target, args)
    created.meta = dict(node.meta)
    return created
