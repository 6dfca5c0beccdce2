"""The check of ficco's own kernels, each by itself on this rank's device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ficco.accelerator import gpu
from ficco.hip_kernels import launch
from ficco.hip_kernels.launch import Kernels, Script, ScriptStep, Signals
from ficco.tools import probe
from ficco.tools.selftest.checks import Passed, Rank

HALVES = (torch.bfloat16, torch.float16)
#: Parts of matrices: rows, columns, the matrix's columns and the first of the part.
PARTS = ((64, 512, 512, 0), (33, 100, 160, 8), (17, 23, 40, 3))
#: The same for sums in place, which leave the other columns as they were.
IN_PLACE = ((64, 512, 1024, 512), *PARTS[1:])
#: Places that copies of one launch lead to.
PLACES = 3
#: Words of one signal, more than a launch takes, and the word that is never posted.
WORDS, NEVER = 70, 67
#: Deadlines in seconds of a kernel that waits for the word that is never posted, and for posted
#: words.
DEADLINE_S, PATIENCE_S = 0.2, 2.0


def own(at: Rank, group: ProcessGroup) -> Passed:
    kernels, stream = probe.own_kernels(at.device)
    tried = _Trial(at, kernels, stream, torch.Generator(at.device).manual_seed(at.rank))
    parts = [tried.placed, tried.summed]
    if isinstance(kernels, Kernels):
        parts += [tried.copied, tried.cast, tried.merged, tried.combined]
        parts += [tried.gated, tried.routed, tried.signalled, tried.scripted]
        seen = (
            "placement, sums, copies, casts, merges, combinations, gates, routes, posts, waits and "
            "scripts as they should be, "
            f"compiled for {kernels.binding.target.arch}"
        )
    else:
        seen = (
            "placement and sums exact, by PyTorch's operations; copies to several places, posts "
            "and waits are not there: they need ficco's kernels"
        )
    problems = [line for part in parts for line in part()]
    at.settle()
    at.conclude(problems)
    return Passed(seen)


@dataclass
class _Trial:
    """Each method launches kernels of one kind, and yields problems."""

    at: Rank
    kernels: Any
    stream: Any
    generator: torch.Generator

    def integers(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Integers whose sums are exact."""
        numbers = torch.empty(shape, dtype=dtype, device=self.at.device)
        return numbers.random_(-3, 4, generator=self.generator)

    def words(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.at.device)

    def placed(self) -> Iterator[str]:
        half = torch.bfloat16
        for rows, cols, pitch, first in PARTS:
            source = self.integers(half, rows, cols)
            wide = torch.full((rows, pitch), 99.0, dtype=half, device=self.at.device)
            wanted, part, back = wide.clone(), slice(first, first + cols), torch.empty_like(source)
            wanted[:, part] = source
            self.kernels.place(wide[:, part], source, self.stream)
            self.kernels.place(back, wide[:, part], self.stream)
            if not (torch.equal(wide, wanted) and torch.equal(back, source)):
                yield f"placement of {rows} x {cols} at {first} of {pitch} is wrong"

    def summed(self) -> Iterator[str]:
        for part, out in sorted(launch.REDUCTIONS, key=str):
            for count, size in ((2, 4096), (8, 1000), (16, 7)):
                parts = [self.integers(part, 1, size) for _ in range(count)]
                total = torch.empty(1, size, dtype=out, device=self.at.device)
                self.kernels.reduce(total, parts, self.stream)
                if not torch.equal(total, _sum(parts, out)):
                    yield f"the sum of {count} x {size} {part} in {out} is wrong"
        for half, (rows, cols, pitch, first) in product(HALVES, IN_PLACE):
            wide = self.integers(half, 4, rows, pitch)
            blocks, wanted = list(wide[:, :, first : first + cols]), wide[0].clone()
            wanted[:, first : first + cols] = _sum(blocks, half)
            self.kernels.reduce(blocks[0], blocks, self.stream)
            if not torch.equal(wide[0], wanted):
                shape = f"4 x {rows} x {cols} {half} at {first} of {pitch}"
                yield f"the sum of {shape} is wrong"

    def copied(self) -> Iterator[str]:
        """Copies to several places by one launch, with signals and without: the ends lie alike
        within 16 bytes."""
        half = torch.bfloat16
        words = self.words(4)
        each = [words.data_ptr() + 4 * i for i in range(4)]
        front = Script((ScriptStep(each[1], 7), ScriptStep(each[1], 7, waits=True)), alone=1)
        rear = Script((ScriptStep(each[2], 9), ScriptStep(each[3], 0, waits=True)))
        for (rows, cols, pitch, first), signals in product(
            PARTS, (None, Signals(each[0], front, rear))
        ):
            source = self.integers(half, PLACES, rows, pitch)
            wide = torch.full_like(source, 99.0)
            wanted = wide.clone()
            wanted[:, :, first : first + cols] = source[:, :, :cols]
            places = zip(wide[:, :, first:], source, strict=True)
            ends = tuple((to.data_ptr(), begin.data_ptr()) for to, begin in places)
            size = source.element_size()
            shape = pitch * size, pitch * size, cols * size, rows
            self.kernels.copies(ends, shape, self.stream, signals=signals)
            wrong = [n for n in range(PLACES) if not torch.equal(wide[n], wanted[n])]
            if wrong:
                part = f"{rows} x {cols} at {first} of {pitch} to {PLACES} places"
                yield f"copies of {part}: wrong at {wrong}"
            if signals is not None and (left := words.tolist()) != [0, 7, 9, 0]:
                yield f"a launch of copies left {left} in words, not 0, 7, 9, 0"
            words.zero_()

    def cast(self) -> Iterator[str]:
        """Small integers, which casts to float8 keep, by factors of rows and of blocks."""
        device = self.at.device
        for dtype, to, parts in product(launch.CASTS, launch.E4M3, (1, 4)):
            matrix, out = self.integers(dtype, 9, 512), torch.zeros(9, 512, device=device).to(to)
            factors = torch.zeros(9, parts, device=device)
            self.kernels.cast(out, factors, matrix, self.stream)
            back = out.float() * factors.repeat_interleave(512 // parts, 1)
            if not torch.equal(back, matrix.float()):
                yield f"the cast of {dtype} to {to} by {parts} factors a row is wrong"

    def merged(self) -> Iterator[str]:
        """Parts of attention: four that weigh the same, whose mean is exact, and one without
        weight."""
        for dtype in launch.MERGES:
            parts = [self.integers(dtype, 2, 3, 5, 64) for _ in range(5)]
            weights = list(torch.zeros(5, 2, 3, 5, device=self.at.device))
            weights[-1] -= 1e4
            out, lse = torch.empty_like(parts[0]), torch.empty_like(weights[0])
            attended = [(0, 5, *one) for one in zip(parts, weights, strict=True)]
            self.kernels.merge(out, lse, attended, self.stream)
            wanted = torch.stack(parts[:4]).float().mean(0).to(dtype)
            # The instructions for exponents and logarithms are off by some units in the last place.
            if not (torch.equal(out, wanted) and (lse - math.log(4)).abs().max() < 1e-5):
                yield f"the merge of five parts of {dtype} is wrong"

    def gated(self) -> Iterator[str]:
        """Gates of half a row: ReLU of small integers, and SiLU of numbers with exact results."""
        for function, dtype in product(launch.GATES, launch.GATED):
            rows = self.integers(dtype, 2, 9, 128)
            rows[..., :64] = rows[..., :64].sign() * 128
            out = torch.empty_like(rows[..., :64], memory_format=torch.contiguous_format)
            self.kernels.gate(function, out, rows, self.stream)
            if not torch.equal(out, rows[..., :64].relu() * rows[..., 64:]):
                yield f"{function} of {dtype} is wrong"

    def routed(self) -> Iterator[str]:
        """Pairs of tokens and experts, counted in their order."""
        chosen = torch.arange(1400, device=self.at.device).view(700, 2) ** 2 % 11
        counts, places, rows, _ = self.kernels.route(chosen, 11, 100, self.stream)
        flat = chosen.t().flatten()
        order = flat.argsort(stable=True)
        begins = counts.cumsum(0) - counts
        right = torch.equal(counts, flat.bincount(minlength=11))
        positions = (begins[flat] + places.t().flatten())[order]
        right &= torch.equal(positions, torch.arange(1400, device=positions.device))
        right &= torch.equal(rows, (chosen * 100 + places).where(places < 100, 1100))
        *_, rows, held = self.kernels.route(chosen, 11, 0, self.stream)
        right &= torch.equal(rows, begins[chosen] + places)
        right &= torch.equal(held, order % 700)
        if not right:
            yield "the route of 700 tokens to 11 experts is wrong"

    def combined(self) -> Iterator[str]:
        """Rows of experts: small integers, whose sums by small weights are exact."""
        device = self.at.device
        for dtype in launch.COMBINES:
            rows, out = self.integers(dtype, 20, 64), torch.empty(9, 64, dtype=dtype, device=device)
            picked = torch.arange(27, device=device).view(3, 9).t() % 20
            weights = (torch.arange(27, device=device).view(9, 3) % 3).float()
            self.kernels.combine(out, rows, picked, weights, self.stream)
            wanted = (rows[picked].float() * weights[..., None]).sum(1).to(dtype)
            if not torch.equal(out, wanted):
                yield f"the combination of three rows of {dtype} is wrong"

    def signalled(self) -> Iterator[str]:
        """Posts and waits of two streams, in memory of the device's own. No wait lasts longer than
        its deadline."""
        at, kernels, words, late = self.at, self.kernels, self.words(2, WORDS), self.words(2)
        five = torch.full((1, 1), 5.0, device=at.device)
        data, seen = torch.zeros_like(five), torch.zeros_like(five)
        begin, never, missed = words.data_ptr(), words[1].data_ptr(), late.data_ptr()
        posted = [(begin + 4 * i, 1 + i) for i in range(WORDS)]
        unposted = [(never + 4 * i, int(i == NEVER)) for i in range(WORDS)]
        poster, waiter = self.new_stream(), self.new_stream()
        # Each is launched once before one of them spins: a first launch may wait for the device.
        at.idle()
        kernels.place(seen, data, self.stream)
        kernels.post(posted, self.stream)
        kernels.wait(posted, PATIENCE_S, missed, self.stream)
        at.idle()
        if index := int(late[0]):
            yield f"a wait after its own posts missed word {index - 1}"
            return
        words.zero_()
        at.idle()
        # Posts are launched before the wait for them, since both streams may share a queue. The
        # wait sees no post until the first wait has reached its deadline.
        began = time.monotonic()
        kernels.wait(unposted, DEADLINE_S, missed + 4, poster)
        kernels.place(data, five, poster)
        kernels.post(posted, poster)
        kernels.wait(posted, PATIENCE_S, missed, waiter)
        kernels.place(seen, data, waiter)
        at.idle()
        took = time.monotonic() - began
        missing, deadline_word = late.tolist()
        if missing:
            yield f"a wait missed word {missing - 1}, which another stream had posted"
        elif float(seen) != 5.0:
            yield "after a wait was not seen what came before the post"
        if words[0].tolist() != [value for _, value in posted] or words[1].any():
            yield "posts wrote something else than they should"
        if deadline_word != 1 + NEVER:
            yield f"a wait that reached its deadline wrote {deadline_word}, {1 + NEVER} is right"
        if not (missing or 0.9 * DEADLINE_S <= took < PATIENCE_S):
            yield f"a wait with a deadline of {DEADLINE_S} s was over after {took:.2f} s"

    def scripted(self) -> Iterator[str]:
        """Sums with scripts before and after, and a script by itself. Scripts wait only for words
        that they have written."""
        dtypes = sorted({part for part, out in launch.REDUCTIONS if part == out}, key=str)
        for dtype, (rows, cols, pitch, first) in product(dtypes, PARTS):
            words = self.words(5)
            arrived, *each = (words.data_ptr() + 4 * i for i in range(5))
            wide = self.integers(dtype, PLACES, rows, pitch)
            parts = list(wide[:, :, first : first + cols])
            total = torch.empty(rows, cols, dtype=dtype, device=self.at.device)
            front = Script((ScriptStep(each[0], 7), ScriptStep(each[0], 7, waits=True)), alone=1)
            rear = Script((ScriptStep(each[1], 9), ScriptStep(each[1], 9, waits=True)), alone=2)
            self.kernels.one_shot(total, parts, Signals(arrived, front, rear), self.stream)
            steps = ScriptStep(each[1], 9, waits=True), ScriptStep(each[2], 5, behind=True)
            self.kernels.script(Script(steps, alone=2), self.stream)
            if not torch.equal(total, _sum(parts, dtype)):
                tile = f"{PLACES} x {rows} x {cols} {dtype} at {first} of {pitch}"
                yield f"the sum of {tile} with scripts is wrong"
            if words.tolist() != [0, 7, 9, 5, 0]:
                yield f"scripts left {words.tolist()} in words, not 0, 7, 9, 5, 0"
        for dtype in dtypes:  # a rank that is its own peer
            words, parts = self.words(1 + PLACES), self.integers(dtype, PLACES, 17, 512)
            total, come, home = torch.empty_like(parts)
            first = words.data_ptr() + 4
            ends = [(come.data_ptr(), first)], [(come.data_ptr(), first, home)], PLACES
            signals = Signals(words.data_ptr())
            self.kernels.two_shot(total, list(parts), *ends, signals, self.stream)
            if not total.equal(_sum(list(parts), dtype)) or not home.equal(total) or words.any():
                yield f"the exchanged sum of 17 x 512 {dtype} is wrong"

    def new_stream(self) -> Any:
        """A new stream, as kernels take it; on a CPU the current one."""
        if self.at.device.type == "cpu":
            return self.stream
        with gpu.stream(gpu.Stream(self.at.device)):
            return probe.own_kernels(self.at.device)[1]


def _sum(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack(parts).double().sum(0).to(dtype)
