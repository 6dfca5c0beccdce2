"""Time the experts' product of ``examples/arriving_experts.py`` on one GPU that replays a gather.

    python -m benchmarks.arriving FOLDER

Writes ``arriving.csv`` and ``arriving.md``. A second stream replaces the peers: it writes the word
of a piece when a link would bring its rows. Its clock is the copy engine: a copy from the host that
takes the remaining time precedes each word. Shuffled rounds compare one kernel that waits for words
with the complete all-gather, a permutation of the tokens and ``torch.nn.functional.grouped_mm``.
The host runs ahead of the GPU. The traffic of the link is not replayed.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
import triton
from cuda.bindings import driver

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples")]

import arriving_experts as example  # noqa: E402

K, FFN = 4096, 14336
SHAPES = [(world, e, t) for world in (4, 8) for e in (8, 64) for t in (4096, 16384)]
PIECES = 4
ROUNDS, WARM_UP = 15, 3
#: Cycles of torch.cuda._sleep that let the host get ahead, about 2 ms.
AHEAD = 4_000_000


def seconds_of(call: Callable[[], Any], ahead: int = AHEAD) -> float:
    """Seconds of a call on the current stream, with the host ahead of the GPU."""
    torch.cuda._sleep(ahead)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3


class Courier:
    """Write words at chosen times after the current work of the current stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        self.buffer = torch.empty_like(self.host, device="cuda")
        word = torch.zeros(1, dtype=torch.int32, device="cuda")

        def eight_copies(nbytes: int) -> None:
            for _ in range(8):
                self.send(nbytes, word)

        sizes = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
        with torch.cuda.stream(self.stream):
            seconds = [
                median(seconds_of(lambda n=n: eight_copies(n), AHEAD // 8) for _ in range(9)) / 8
                for n in sizes
            ]
        seconds_a_byte, self.least = np.polyfit(sizes, seconds, 1)
        self.rate = 1 / seconds_a_byte

    def send(self, nbytes: int, word: torch.Tensor) -> None:
        """Copy ``nbytes`` bytes, then write a word."""
        while nbytes > 0:
            part = min(nbytes, len(self.buffer))
            self.buffer[:part].copy_(self.host[:part], non_blocking=True)
            nbytes -= part
        (error,) = driver.cuStreamWriteValue32(self.stream.cuda_stream, word.data_ptr(), 1, 0)
        assert not int(error), error

    def go(self, words: torch.Tensor, times: list[float]) -> None:
        """Write the words in order; ``times`` are in seconds from now."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            now = 0.0
            for word, due in enumerate(times):
                nbytes = max(4, int((due - now - self.least) * self.rate))
                self.send(nbytes, words[word])
                now += self.least + nbytes / self.rate


def measure(courier: Courier, world: int, experts: int, tokens: int) -> dict[str, Any]:
    """Sizes, median times of all variants, and paired ratios of serial to arriving."""
    n, each, device = FFN // world, tokens // world, torch.device("cuda", 0)
    torch.manual_seed(tokens + experts)
    a = torch.randn(tokens, K, device=device, dtype=torch.bfloat16)
    weights = torch.randn(experts, K, n, device=device, dtype=torch.bfloat16)
    choice, cut = example.routed(tokens, experts, 1, device), each // PIECES
    firsts = [peer * each + i * cut for peer in range(1, world) for i in range(PIECES)]
    pieces = tuple((first, first + cut) for first in firsts)
    times = [example.LATENCY_S + (i + 1) * cut * K * 2 / example.LINK for i in range(len(pieces))]
    block = example.block_for(tokens * 2 / experts, device)
    turn = example.turns(pieces, tokens, device)
    order = example.order_of(choice, turn, experts, n, K, block)
    words = torch.zeros(len(pieces), dtype=torch.int32, device=device)
    arrived = torch.ones_like(words)
    slots = choice.flatten().long().argsort(stable=True)
    offsets = torch.bincount(choice.flatten().long(), minlength=experts).cumsum(0).int()
    source = slots // 2

    def arriving() -> torch.Tensor:
        courier.go(words, times)
        return example.product(a, words, weights, order, block)

    def multiplied() -> torch.Tensor:
        return torch.nn.functional.grouped_mm(a[source], weights, offs=offsets)

    def serial() -> torch.Tensor:
        courier.go(words, times[-1:])
        torch.cuda.current_stream().wait_stream(courier.stream)
        return multiplied()

    def at_once() -> torch.Tensor:
        return example.product(a, arrived, weights, order, block)

    calls = {"arriving": arriving, "serial": serial, "at once": at_once, "grouped_mm": multiplied}
    result, expected = arriving().view(tokens * 2, n)[slots].float(), serial().float()
    error = ((result - expected).norm() / expected.norm()).item()
    assert error < 2e-3, error  # both round once to bfloat16
    del result, expected
    timed: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UP + ROUNDS):
        for name in random.sample(list(calls), len(calls)):
            words.zero_()
            torch.cuda.synchronize()
            timed[name].append(seconds_of(calls[name]))
    timed = {name: seconds[WARM_UP:] for name, seconds in timed.items()}
    ratios = [slow / fast for slow, fast in zip(timed["serial"], timed["arriving"], strict=True)]
    sizes = {"world": world, "experts": experts, "tokens": tokens, "n": n}
    medians = {f"{name} us": median(seconds) * 1e6 for name, seconds in timed.items()}
    speeds = {"speed-up": median(ratios), "worst": min(ratios)}
    return {**sizes, "last arrival us": times[-1] * 1e6, **medians, **speeds}


def main(folder: Path) -> None:
    """Measure all shapes and write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    random.seed(1)
    courier, rows = Courier(), []
    for shape in SHAPES:
        rows.append(measure(courier, *shape))
        print(rows[-1], flush=True)
    table = pd.DataFrame(rows).round(3)
    table.to_csv(folder / "arriving.csv", index=False)
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    cells = [list(table.columns), ["---"] * len(table.columns), *table.astype(str).values.tolist()]
    text = [
        "# Experts behind an all-gather, one kernel whose tiles wait",
        "",
        f"{torch.cuda.get_device_name()}, {date.today()}, PyTorch {torch.__version__}, Triton "
        f"{triton.__version__}, commit {commit}, `python -m benchmarks.arriving`. Top-2, k {K}, "
        f"bf16, {PIECES} pieces a shard. One GPU, arrivals replayed: a link of "
        f"{example.LINK / 1e9:.0f} GB/s and {example.LATENCY_S * 1e6:.0f} us.",
        "",
        *("| " + " | ".join(row) + " |" for row in cells),
    ]
    (folder / "arriving.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
