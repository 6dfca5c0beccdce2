"""torchtitan's trainer on CPU ranks: small models, a generated tokenizer and text, and a shim.

torchtitan has no CPU mode. The shim names the device and adds the functions that the trainer calls
on the device's module. It replaces FlexAttention by dense causal attention, and NCCL's averages by
sums. It does not change tensor parallelism.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._utils
import torch.distributed as dist
from ranks import Rank, counted


def assets(folder: Path) -> None:
    """Save a tokenizer of 256 words and lines of these words where torchtitan looks for its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{i}" for i in range(256)]
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    (folder / "tests/assets/tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tests/assets/tokenizer/tokenizer.json"))
    names = {"bos_token": special[0], "eos_token": special[1]}
    (folder / "tests/assets/tokenizer/tokenizer_config.json").write_text(json.dumps(names))
    generator = random.Random(0)
    lines = [{"text": " ".join(generator.choices(words, k=200))} for _ in range(200)]
    (folder / "tests/assets/c4_test").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "tests/assets/c4_test/data.json").write_text(text)


def _model(fuse_qkv: bool, tp_gemm_backend: str = "default", full: bool = False) -> Any:
    """Configuration of torchtitan's Llama 3 with two layers."""
    import torchtitan.models.llama3 as llama3
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    stock = llama3._debugmodel("flex", tp_gemm_backend)
    stock.layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=stock.dim,
        n_heads=16,
        n_kv_heads=8,
        hidden_dim=512,
        rope=stock.layers[0].attention.rope,
        fuse_qkv=fuse_qkv,
        attn_backend="flex",
        tp_gemm_backend=tp_gemm_backend,
    )
    config.model_spec.model = stock
    if tp_gemm_backend != "default":
        config.parallelism.spmd_backend = "spmd_types"
    if full:
        config.activation_checkpoint = FullAC.Config()
    return config


#: Configurations, which torchtitan looks up by name. ``full`` ones recompute complete blocks.
fused, separate = partial(_model, True), partial(_model, False)
full, full_separate = partial(_model, True, full=True), partial(_model, False, full=True)
dist_gemm = partial(_model, True, "dist_gemm")


def cpu_device() -> None:
    import torchtitan.tools.utils as utils

    stats = ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
    module: Any = types.ModuleType("cpu_device")
    module.set_device = module.synchronize = module.empty_cache = lambda *_: None
    module.reset_peak_memory_stats = lambda *_: None
    module.current_device, module.device_count = lambda: 0, lambda: 8
    module.get_device_name = lambda *_: "cpu"
    module.get_device_properties = lambda *_: types.SimpleNamespace(
        total_memory=1 << 34, name="cpu"
    )
    module.memory_stats = lambda *_: dict.fromkeys(stats, 0)
    torch._utils._get_available_device_type = lambda: "cpu"
    utils.device_type, utils.device_module = "cpu", module
    utils.get_local_device = lambda: torch.device("cpu")


def as_in_later_pytorch() -> None:
    """Add the functions that torchtitan 0.3.0 needs and PyTorch 2.13 lacks."""
    from torch.distributed.pipelining.schedules import Schedule1F1B

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: None
    if "arg_mbs" in inspect.signature(Schedule1F1B.step).parameters:
        return

    def step(self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **kwargs: Any) -> None:
        """Run one step on microbatches that the trainer has split."""
        self._stage.has_backward = True
        self._stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, **kwargs)

    Schedule1F1B.step = step


def dense_attention() -> None:
    from torchtitan.models.common import attention, decoder

    def forward(
        self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, scale: Any = None, **kwargs: Any
    ) -> Any:
        y = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH)),
            is_causal=True,
            scale=scale,
            enable_gqa=kwargs.get("enable_gqa", False),
        )
        return y.transpose(1, 2).contiguous()

    attention.FlexAttention.forward = forward
    decoder.Decoder.get_attention_masks = lambda self, *args, **kwargs: None


def sums_on_gloo() -> None:
    import torchtitan.distributed.fsdp as fsdp

    stock = fsdp.disable_fsdp_gradient_division

    def disable(model: Any) -> None:
        stock(model)
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = disable


def behind_symm_mem() -> None:
    import torch.distributed._symmetric_memory as symm_mem

    import ficco

    ficco.behind_symm_mem()
    symm_mem._is_test_mode = True  # otherwise Inductor's pass requires GPUs
    library = torch.library.Library("aten", "IMPL")  # for the backward; PyTorch has GPU kernels
    library.impl("mm.dtype", lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)), "CPU")
    LIBRARIES.append(library)


#: References that keep registered kernels alive: a kernel lives as long as its library.
LIBRARIES: list[torch.library.Library] = []


def train(at: Rank, folder: str, entry: str, arguments: list[str]) -> dict[str, Any]:
    """Run torchtitan's main program once in a separate process. The result on this rank: losses and
    gradient norms, number of calls of ficco's operators, ficco's warnings, and numbers of products
    that the pass replaced and left.

    Args:
        entry: entry point of ficco besides overrides: "", "symm_mem" or "inductor".
        arguments: arguments of torchtitan.
    """
    os.chdir(folder)
    os.environ |= {"RANK": f"{at.rank}", "LOCAL_RANK": f"{at.rank}", "WORLD_SIZE": f"{at.world}"}
    dist.init_process_group = lambda *args, **kwargs: None  # the group exists
    cpu_device()
    dense_attention()
    sums_on_gloo()
    as_in_later_pytorch()
    import torchtitan.trainer as trainer
    from torch._inductor import config
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.tools.logging import logger
    from torchtitan.train import main

    import ficco
    from ficco import passes

    # At the end rank 0 would sleep for two seconds.
    trainer.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    if entry == "symm_mem":
        behind_symm_mem()
    inductor_pass = passes.inductor_pass() if entry == "inductor" else None
    sys.argv = ["train", *arguments]
    stock = MetricsProcessor.log
    with (
        counted() as counts,
        mock.patch.object(MetricsProcessor, "log", autospec=True, side_effect=stock) as log,
        mock.patch.object(logger, "warning", wraps=logger.warning) as warning,
        config.patch(post_grad_custom_pre_pass=inductor_pass),
    ):
        main()
    ficco.close()
    counters = ficco.counters().items()
    left = {operator: counts.left for (_, operator), counts in counters if counts.left}
    warned = [text % tuple(parts) for text, *parts in (w.args for w in warning.call_args_list)]
    warned = [text for text in warned if text.startswith("ficco:")]
    report = getattr(inductor_pass, "report", passes.Report())
    replaced = [len(report.replaced), len(report.left)]
    # A row per step: the step, the mean and the largest loss, and the norm of all gradients.
    rows = [logged.args[1:] for logged in log.call_args_list]
    values = {"losses": [float(row[1]) for row in rows], "norms": [float(row[3]) for row in rows]}
    return {**values, "calls": counts, "warned": warned, "replaced": replaced, "left": left}
