"""Times of training steps and `generate` of a Llama in Transformers, with stock and ficco plans.

    torchrun --nproc-per-node 2 -m benchmarks.transformers_step FOLDER out.csv

The script writes the bfloat16 weights of a random Llama of four layers (4096, 14336, 32 heads, 8 of
keys) to FOLDER. It compares losses, gradient norms and tokens of all variants before it times them.
Variants take turns in shuffled rounds; a figure is the median of the slower rank. A step is timed
from an idle GPU until its loss is read, and as a part of steps in a row that read no loss.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.tools.bench.frames import Schema, append, commit, describe

LAYERS = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
#: Sequences and positions of a step, positions of a prompt, and tokens that a request decodes.
BATCH, LENGTH, PROMPT, TOKENS = 2, 4096, 512, 32
ROUNDS, REQUESTS = 12, 6
#: Steps that the host enqueues before it waits for their end.
ROW = 4
#: Rounds before the timed ones. A turn is a call that is not timed, after which memory lies as in a
#: program of this variant alone, and a timed one.
WARM = 3
#: Relative difference of losses in bfloat16: plans round sums over ranks in another order.
TOLERANCE = 2e-3

ROWS = Schema(
    {
        **dict.fromkeys(("commit", "case", "way"), str),
        **dict.fromkeys(("ms", "ms_low", "ms_high"), float),
        "rounds": int,
    }
)


def slowest(value: float) -> float:
    """The largest value of all ranks."""
    shared = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared.item())


def milliseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return slowest((time.perf_counter() - begin) * 1e3)


def models(folder: str) -> dict[str, Any]:
    """Models with the same weights under the stock plan and under ficco's plans."""
    # Imported here: README's table reads ROWS without Transformers.
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from ficco.integrations.transformers import plan, register

    config = AutoConfig.for_model(
        "llama", **LAYERS, **HEADS, max_position_embeddings=16384, pad_token_id=0, eos_token_id=None
    )
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    register()
    plans = {
        "stock": "auto",
        "ficco": plan(config),
        "ficco, sequence": plan(config, sequence_parallel=True),
    }
    return {
        name: AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            distributed_config=DistributedConfig(tp_size=dist.get_world_size(), tp_plan=rules),
        )
        for name, rules in plans.items()
    }


def enqueue(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss of a step; its gradients stay in the parameters."""
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


def step(model: Any, ids: torch.Tensor) -> float:
    """As :func:`enqueue`; waits for the end of the step."""
    return float(enqueue(model, ids).item())


def row(model: Any, ids: torch.Tensor) -> None:
    for _ in range(ROW):
        model.zero_grad()
        enqueue(model, ids)


def gradient_norm(model: Any) -> float:
    total = 0.0
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None:
            full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            total += full.float().square().sum().item()
        parameter.grad = None
    return math.sqrt(total)


def trained(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    return {"loss": step(model, ids), "gradient norm": gradient_norm(model)}


def generated(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    with torch.no_grad():
        tokens = model.generate(ids[:1, :PROMPT], max_new_tokens=TOKENS, do_sample=False)
    return {"tokens": tokens[0, PROMPT:].tolist()}


def compare(exact: dict[str, dict[str, Any]]) -> None:
    """Count the tokens that are stock's. Ends the program if losses or gradient norms differ."""
    for variant, own in exact.items():
        stock = exact["stock"]
        if "tokens" in own:
            own["tokens as stock's"] = sum(map(int.__eq__, own["tokens"], stock["tokens"]))
        for name in ("loss", "gradient norm"):
            if not math.isclose(own[name], stock[name], rel_tol=TOLERANCE):
                sys.exit(f"{name} of {variant}: required {stock[name]} as stock's, got {own[name]}")


def main(folder: str, out: str) -> None:
    faulthandler.dump_traceback_later(150, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    variants = models(folder)
    torch.manual_seed(1)
    ids = torch.randint(1, HEADS["vocab_size"], (BATCH, LENGTH), device=device)
    Run = Callable[[Any, torch.Tensor], Any]
    training = f"training step, {BATCH} x {LENGTH} positions"
    # Rounds, the comparison, the timed function, and the number of steps or requests in it.
    cases: dict[str, tuple[int, Run, Run, int]] = {
        training: (ROUNDS, trained, step, 1),
        f"{training}, {ROW} in a row": (ROUNDS, trained, row, ROW),
        f"generate {TOKENS} tokens": (REQUESTS, generated, generated, 1),
    }
    exact: dict[str, dict[str, Any]] = {name: {} for name in variants}
    order, rows = random.Random(0), []
    for case, (rounds, check, run, calls) in cases.items():
        for name, model in variants.items():
            exact[name] |= check(model, ids)
        compare(exact)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(WARM + rounds):
            names = list(variants)
            order.shuffle(names)
            for name in names:
                for _ in range(2):
                    ms = milliseconds(partial(run, variants[name], ids)) / calls
                    variants[name].zero_grad()
                times[name].append(ms)
        for name, samples in times.items():
            ms = sorted(samples[WARM:])
            quartiles = ms[rounds // 2], ms[rounds // 4], ms[3 * rounds // 4]
            values = (commit(), case, name, *quartiles, rounds)
            rows.append(dict(zip(ROWS.columns, values, strict=True)))
    if dist.get_rank() == 0:
        path, command = Path(out), "torchrun --nproc-per-node 2 -m benchmarks.transformers_step"
        print(append(path, ROWS.frame(rows)).read_text())
        about = {**describe("cuda", command, dist.get_world_size()), "exact": exact}
        path.with_suffix(".json").write_text(json.dumps(about, indent=1))
        print(json.dumps(exact))
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
