"""vLLM's engine on CPU ranks: tokens of a small Llama with random weights.

    python serve.py FOLDER eager|compiled

Creates the model in FOLDER if FOLDER does not exist. Prints the tokens of each prompt, and the
number of ficco's calls on each rank.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12], [31, 7, 2], list(range(40, 80)))


def save_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=256,
        torch_dtype="float32",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.1) if param.dim() > 1 else param.uniform_(0.5, 1.5)
    model.save_pretrained(folder)


def calls(worker: Any) -> dict[str, int]:
    """Counts of ficco's calls by operator since the first call of this function on a worker."""
    from ficco.ops import library, operators

    counts = vars(worker).setdefault("ficco_calls", Counter())
    for module in (operators, library):
        if not hasattr(module.run, "counts"):

            def run(operator: str, *args: Any, _run: Any = module.run, **kwargs: Any) -> Any:
                counts[operator] += 1
                return _run(operator, *args, **kwargs)

            run.counts = True  # type: ignore[attr-defined]
            module.run = run
    return dict(counts)


def main(folder: Path, mode: str) -> None:
    from vllm import LLM, SamplingParams

    if not folder.exists():
        save_model(folder)
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        seed=0,
        enforce_eager=mode == "eager",
        distributed_executor_backend="mp",
    )
    llm.collective_rpc(calls)
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], sampling)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    print(json.dumps({"tokens": tokens, "calls": llm.collective_rpc(calls)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
