"""torchtitan's trainer on CPU ranks: small models, a tokenizer and a text made here, and a shim.

    torchrun --nproc-per-node 2 titan.py '[["", "--module", "titan", ...], ...]' '[PORT, ...]'

Each list is a training: how ficco comes in other than by overrides ("", "symm_mem", "inductor"),
then torchtitan's own arguments. Rank 0 prints a line for each: the losses, how often ficco's
operators ran, and what the pass replaced and left.

torchtitan has no CPU mode. The shim names the device, gives the functions that the trainer asks of
its module, takes dense causal attention in place of FlexAttention, and sums in place of NCCL's
divided sums. Nothing that concerns tensor parallelism is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._utils


def assets(folder: Path) -> None:
    """A tokenizer that knows 256 words, and lines of them, where torchtitan looks for its own."""
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
    chosen = random.Random(0)
    lines = [{"text": " ".join(chosen.choices(words, k=200))} for _ in range(200)]
    (folder / "tests/assets/c4_test").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "tests/assets/c4_test/data.json").write_text(text)


def _model(fuse_qkv: bool, tp_gemm_backend: str) -> Any:
    """torchtitan's Llama 3 with two layers."""
    import torchtitan.models.llama3 as llama3
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
    return config


def fused() -> Any:
    return _model(True, "default")


def separate() -> Any:
    return _model(False, "default")


def dist_gemm() -> Any:
    config = _model(True, "dist_gemm")
    config.parallelism.spmd_backend = "spmd_types"
    return config


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
    if not hasattr(torch.distributed, "set_timeout"):  # of a later PyTorch than 2.13
        torch.distributed.set_timeout = lambda timeout, group=None: None


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


@contextlib.contextmanager
def losses() -> Iterator[list[float]]:
    """The losses that the trainer logs, as numbers."""
    from torchtitan.components.metrics import MetricsProcessor

    values: list[float] = []
    stock = MetricsProcessor.log

    def log(self: Any, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        values.append(float(global_avg_loss))
        stock(self, step, global_avg_loss, *args, **kwargs)

    with mock.patch.object(MetricsProcessor, "log", log):
        yield values


def behind_symm_mem() -> None:
    import torch.distributed._symmetric_memory as symm_mem

    import ficco

    ficco.behind_symm_mem()
    symm_mem._is_test_mode = True  # Inductor's pass wants GPUs otherwise
    library = torch.library.Library("aten", "IMPL")  # for the backward; PyTorch has it on GPUs
    library.impl("mm.dtype", lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)), "CPU")
    LIBRARIES.append(library)


#: What is registered lasts as long as its library.
LIBRARIES: list[torch.library.Library] = []


def train(how: str, *arguments: str) -> dict[str, Any]:
    """One training by torchtitan's own main program."""
    from ranks import counted
    from torch._inductor import config
    from torchtitan.train import main as stock

    import ficco
    from ficco import passes

    torch._dynamo.reset()
    if how == "symm_mem":
        behind_symm_mem()
    found = passes.inductor_pass() if how == "inductor" else None
    sys.argv = ["train", *arguments]
    with counted() as counts, losses() as logged:
        with config.patch(post_grad_custom_pre_pass=found):
            stock()
    ficco.close()
    report = getattr(found, "report", passes.Report())
    replaced = [len(report.replaced), len(report.left)]
    return {"losses": logged, "calls": counts, "replaced": replaced}


def main() -> None:
    torch.set_num_threads(1)
    cpu_device()
    dense_attention()
    sums_on_gloo()
    # A store for each group: keys of an earlier one would be taken for those of the next.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    trainings, ports = (json.loads(argument) for argument in sys.argv[1:])
    for arguments, port in zip(trainings, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        line = train(*arguments)
        if os.environ["RANK"] == "0":
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
