"""Time the experts' product of ``examples/arriving_experts.py`` behind an all-gather on one GPU,
whose words are written when a link would bring the rows; writes ``arriving.csv`` and
``arriving.md`` to a folder.

    python -m benchmarks.arriving FOLDER

A second stream plays the peers. Its clock is the copy engine: before each word comes a copy from
the host that takes as long as is left until then. Two ways are timed in shuffled rounds, the host
ahead: one kernel that waits for words, and the whole all-gather, a permutation of the tokens and
``torch.nn.functional.grouped_mm``. The traffic of the link itself is not in it.
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
    """Of a call on the current stream, the host ahead."""
    torch.cuda._sleep(ahead)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3


class Courier:
    """Writes words at given times after an event of the current stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        self.room = torch.empty_like(self.host, device="cuda")
        word = torch.zeros(1, dtype=torch.int32, device="cuda")

        def several(nbytes: int) -> None:
            for _ in range(8):
                self.send(nbytes, word)

        sizes = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
        with torch.cuda.stream(self.stream):
            seconds = [
                median(seconds_of(lambda n=n: several(n), AHEAD // 8) for _ in range(9)) / 8
                for n in sizes
            ]
        seconds_a_byte, self.least = np.polyfit(sizes, seconds, 1)
        self.rate = 1 / seconds_a_byte

    def send(self, nbytes: int, word: torch.Tensor) -> None:
        """Copy so many bytes, then write a word."""
        while nbytes > 0:
            part = min(nbytes, len(self.room))
            self.room[:part].copy_(self.host[:part], non_blocking=True)
            nbytes -= part
        (error,) = driver.cuStreamWriteValue32(self.stream.cuda_stream, word.data_ptr(), 1, 0)
        assert not int(error), error

    def go(self, words: torch.Tensor, times: list[float]) -> None:
        """Write the words one by one; ``times`` are in seconds from now on."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            now = 0.0
            for word, at in enumerate(times):
                nbytes = max(4, int((at - now - self.least) * self.rate))
                self.send(nbytes, words[word])
                now += self.least + nbytes / self.rate


def measure(courier: Courier, world: int, experts: int, tokens: int) -> dict[str, Any]:
    """Median seconds of both ways, of the kernel with all rows there, and the paired ratio."""
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
    there = torch.ones_like(words)
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
        return example.product(a, there, weights, order, block)

    ways = {"arriving": arriving, "serial": serial, "at once": at_once, "grouped_mm": multiplied}
    one, two = arriving().view(tokens * 2, n)[slots].float(), serial().float()
    wrong = ((one - two).norm() / two.norm()).item()
    assert wrong < 2e-3, wrong  # both round once to bfloat16
    del one, two
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(WARM_UP + ROUNDS):
        for way in random.sample(list(ways), len(ways)):
            words.zero_()
            torch.cuda.synchronize()
            found[way].append(seconds_of(ways[way]))
    found = {way: seconds[WARM_UP:] for way, seconds in found.items()}
    ratios = [one / two for one, two in zip(found["serial"], found["arriving"], strict=True)]
    facts = {"world": world, "experts": experts, "tokens": tokens, "n": n}
    medians = {f"{way} us": median(seconds) * 1e6 for way, seconds in found.items()}
    shares = {"speed-up": median(ratios), "worst": min(ratios)}
    return {**facts, "last arrival us": times[-1] * 1e6, **medians, **shares}


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
