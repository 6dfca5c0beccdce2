"""A plug-in for vLLM: the product and the all-reduce of ``RowParallelLinear`` are one operator.

vLLM loads every plug-in that is installed, in each of its processes. This one does nothing unless
the variable ``FICCO_VLLM`` is ``1``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.fx

from ficco.integrations import client
from ficco.passes import replace
from ficco.passes.graph import arguments


def register() -> None:
    """The entry point in the group ``vllm.general_plugins``."""
    if os.environ.get("FICCO_VLLM") != "1":
        return
    with client("vllm", "0.32"):
        from vllm.model_executor.custom_op import op_registry_oot
        from vllm.model_executor.layers.linear import RowParallelLinear

    if RowParallelLinear.__name__ not in op_registry_oot:
        RowParallelLinear.register_oot(name=RowParallelLinear.__name__)(_row_parallel_linear())


def _row_parallel_linear() -> Any:
    with client("vllm", "0.32"):
        from vllm.distributed import get_tp_group
        from vllm.logger import init_logger
        from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

    from ficco.ops.operators import matmul_all_reduce
    from ficco.runtime.counters import stays

    class FiccoReducedLinear(RowParallelLinear):
        """vLLM's layer where it is quantized, adds its bias, does not reduce or splits its input;
        otherwise one ``matmul_all_reduce``."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            serves = (
                self.tp_size > 1
                and self.reduce_results
                and self.input_is_parallel
                and type(self.quant_method) is UnquantizedLinearMethod
                and (self.bias is None or self.skip_bias_add)
            )
            self.ficco_group = get_tp_group().device_group if serves else None
            if serves:
                # On CPUs the weight would be packed for vLLM's own product.
                self._cpu_skip_gemm_dispatch = True
                logger.info_once("ficco: products and all-reduces of RowParallelLinear are one")

        def forward(self, input_: torch.Tensor) -> Any:
            if self.ficco_group is None:
                if self.tp_size > 1 and self.reduce_results:
                    reason = "vLLM's layer is quantized, adds its bias or splits its input"
                    name = get_tp_group().device_group.group_name
                    stays(name, "all-reduce", reason, "see docs/clients/vllm.md")
                return super().forward(input_)
            rows = input_.reshape(-1, input_.shape[-1])
            y = matmul_all_reduce(rows, self.weight.t(), group=self.ficco_group)
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
