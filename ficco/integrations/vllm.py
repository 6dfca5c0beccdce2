"""A plug-in for vLLM: the product and the all-reduce of ``RowParallelLinear`` are one operator.

vLLM loads every plug-in that is installed, in each of its processes. This one does nothing unless
the variable ``FICCO_VLLM`` is ``1``.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def register() -> None:
    """The entry point in the group ``vllm.general_plugins``."""
    if os.environ.get("FICCO_VLLM") != "1":
        return
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.linear import RowParallelLinear

    if RowParallelLinear.__name__ not in op_registry_oot:
        RowParallelLinear.register_oot(name=RowParallelLinear.__name__)(_row_parallel_linear())


def _row_parallel_linear() -> Any:
    from vllm.distributed import get_tp_group
    from vllm.logger import init_logger
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

    from ficco.ops.operators import matmul_all_reduce

    class FiccoRowParallelLinear(RowParallelLinear):
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
                return super().forward(input_)
            rows = input_.reshape(-1, input_.shape[-1])
            y = matmul_all_reduce(rows, self.weight.t(), group=self.ficco_group)
            y = y.view(*input_.shape[:-1], y.shape[-1])
            if not self.return_bias:
                return y
            return y, self.bias if self.skip_bias_add else None

    logger = init_logger("vllm.ficco")
    return FiccoRowParallelLinear
