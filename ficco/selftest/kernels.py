"""The check of ficco's own kernels, each by itself on this rank's device."""

from __future__ import annotations

import time
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from ficco.dma import probe
from ficco.hip_kernels import Kernels, Script, ScriptStep, Signals, TorchKernels
from ficco.hip_kernels.launch import REDUCTIONS
from ficco.selftest.rank import Found, Rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

HALVES = (torch.bfloat16, torch.float16)
#: Parts of matrices: rows, columns, the matrix's columns and the first of the part.
PARTS = ((64, 512, 512, 0), (33, 100, 160, 8), (17, 23, 40, 3))
#: The same for sums in place, which leave something beside them.
BESIDE = ((64, 512, 1024, 512), *PARTS[1:])
#: Places that copies of one launch lead to.
PLACES = 3
#: Words of one signal, more than a launch takes, and which of them nobody posts.
WORDS, NEVER = 70, 67
#: Seconds after which a kernel goes on by itself that waits for what nobody posts, and for what
#: somebody does.
DEADLINE_S, PATIENCE_S = 0.2, 2.0


def own(at: Rank, group: ProcessGroup) -> Found:
    kernels, stream = probe.own_kernels(at.device)
    generator = torch.Generator(at.device).manual_seed(at.rank)
    problems = _placed(at, generator, kernels, stream) + _summed(at, generator, kernels, stream)
    seen = _without(kernels)
    if not seen:
        problems += _copied(at, generator, kernels, stream) + _signalled(at, kernels, stream)
        problems += _scripted(at, generator, kernels, stream)
        arch = kernels.binding.target.arch
        seen = (
            "placement, sums, copies, posts, waits and scripts as they should be, compiled for "
            f"{arch}"
        )
    at.settle()
    at.conclude(problems)
    return Found(seen)


def _without(kernels: Kernels | TorchKernels) -> str:
    """What is to be said where PyTorch's operations take the place of kernels."""
    if isinstance(kernels, Kernels):
        return ""
    return (
        "placement and sums exact, by PyTorch's operations; copies to several places, posts and "
        "waits are not there: they need ficco's kernels"
    )


def _integers(
    at: Rank, generator: torch.Generator, dtype: torch.dtype, *shape: int
) -> torch.Tensor:
    """So small that their sums are exact."""
    made = torch.empty(shape, dtype=dtype, device=at.device)
    return made.random_(-3, 4, generator=generator)


def _placed(
    at: Rank, generator: torch.Generator, kernels: Kernels | TorchKernels, stream: Any
) -> list[str]:
    problems, half = [], torch.bfloat16
    for rows, cols, pitch, first in PARTS:
        source = _integers(at, generator, half, rows, cols)
        wide = torch.full((rows, pitch), 99.0, dtype=half, device=at.device)
        wanted = wide.clone()
        wanted[:, first : first + cols] = source
        kernels.place(wide[:, first : first + cols], source, stream)
        back = torch.empty_like(source)
        kernels.place(back, wide[:, first : first + cols], stream)
        if not (torch.equal(wide, wanted) and torch.equal(back, source)):
            problems.append(f"placement of {rows} x {cols} at {first} of {pitch} is wrong")
    return problems


def _summed(
    at: Rank, generator: torch.Generator, kernels: Kernels | TorchKernels, stream: Any
) -> list[str]:
    problems = []
    for part, out in sorted(REDUCTIONS, key=str):
        for count, size in ((2, 4096), (8, 1000), (16, 7)):
            parts = [_integers(at, generator, part, 1, size) for _ in range(count)]
            total = torch.empty(1, size, dtype=out, device=at.device)
            kernels.reduce(total, parts, stream)
            if not torch.equal(total, torch.stack(parts).double().sum(0).to(out)):
                problems.append(f"the sum of {count} x {size} {part} in {out} is wrong")
    for half in HALVES:
        for rows, cols, pitch, first in BESIDE:
            wide = [_integers(at, generator, half, rows, pitch) for _ in range(4)]
            wanted = wide[0].clone()
            blocks = [one[:, first : first + cols] for one in wide]
            wanted[:, first : first + cols] = torch.stack(blocks).double().sum(0).to(half)
            kernels.reduce(blocks[0], blocks, stream)  # in place, among columns that stay
            if not torch.equal(wide[0], wanted):
                problems.append(
                    f"the sum of 4 x {rows} x {cols} {half} at {first} of {pitch} is wrong"
                )
    return problems


def _copied(at: Rank, generator: torch.Generator, kernels: Kernels, stream: Any) -> list[str]:
    """Copies to several places by one launch, with signals behind them and without: the ends lie
    alike within 16 bytes."""
    problems, half = [], torch.bfloat16
    words = torch.zeros(4, dtype=torch.int32, device=at.device)
    each = [words.data_ptr() + 4 * i for i in range(4)]
    front = Script((ScriptStep(each[1], 7), ScriptStep(each[1], 7, waits=True)), alone=1)
    rear = Script((ScriptStep(each[2], 9), ScriptStep(each[3], 0, waits=True)))
    seen_to = Signals(each[0], front, rear)
    for (rows, cols, pitch, first), signals in product(PARTS, (None, seen_to)):
        source = _integers(at, generator, half, PLACES, rows, pitch)
        wide = torch.full_like(source, 99.0)
        wanted = wide.clone()
        wanted[:, :, first : first + cols] = source[:, :, :cols]
        places = zip(wide[:, :, first:], source, strict=True)
        ends = tuple((to.data_ptr(), begin.data_ptr()) for to, begin in places)
        size = source.element_size()
        how = pitch * size, pitch * size, cols * size, rows, stream
        kernels.copies(ends, *how, signals=signals)
        wrong = [n for n in range(PLACES) if not torch.equal(wide[n], wanted[n])]
        if wrong:
            problems.append(
                f"copies of {rows} x {cols} at {first} of {pitch} to {PLACES} places: wrong at "
                f"{wrong}"
            )
        if signals is not None and words.tolist() != [0, 7, 9, 0]:
            problems.append(f"a launch of copies left {words.tolist()} in words, not 0, 7, 9, 0")
        words.zero_()
    return problems


def _signalled(at: Rank, kernels: Kernels, stream: Any) -> list[str]:
    """Posts and waits of two streams, in memory of the device's own. No wait lasts longer than its
    deadline."""
    words = torch.zeros(2, WORDS, dtype=torch.int32, device=at.device)
    late = torch.zeros(2, dtype=torch.int32, device=at.device)
    five = torch.full((1, 1), 5.0, device=at.device)
    data, seen = torch.zeros_like(five), torch.zeros_like(five)
    begin, never, missed = words.data_ptr(), words[1].data_ptr(), late.data_ptr()
    posted = [(begin + 4 * i, 1 + i) for i in range(WORDS)]
    unposted = [(never + 4 * i, int(i == NEVER)) for i in range(WORDS)]
    poster, waiter = _stream(at, stream), _stream(at, stream)
    # All of these are launched once before one of them spins: a first launch may wait for the
    # device.
    at.idle()
    kernels.place(seen, data, stream)
    kernels.post(posted, stream)
    kernels.wait(posted, PATIENCE_S, missed, stream)
    at.idle()
    if index := int(late[0]):
        return [f"a wait behind its own posts missed word {index - 1}"]
    words.zero_()
    at.idle()
    # What a wait is for is launched in front of it, in case that both streams share a queue. Until
    # the first wait has reached its deadline the second finds nothing posted.
    began = time.monotonic()
    kernels.wait(unposted, DEADLINE_S, missed + 4, poster)
    kernels.place(data, five, poster)
    kernels.post(posted, poster)
    kernels.wait(posted, PATIENCE_S, missed, waiter)
    kernels.place(seen, data, waiter)
    at.idle()
    took = time.monotonic() - began
    problems = []
    missing, told = late.tolist()
    if missing:
        problems.append(f"a wait missed word {missing - 1}, which another stream had posted")
    elif float(seen) != 5.0:
        problems.append("behind a wait was not seen what lay in front of the post")
    if words[0].tolist() != [value for _, value in posted] or words[1].any():
        problems.append("posts wrote something else than they should")
    if told != 1 + NEVER:
        problems.append(f"a wait that reached its deadline wrote {told}, {1 + NEVER} is right")
    if not (missing or 0.9 * DEADLINE_S <= took < PATIENCE_S):
        problems.append(f"a wait with a deadline of {DEADLINE_S} s was over after {took:.2f} s")
    return problems


def _scripted(at: Rank, generator: torch.Generator, kernels: Kernels, stream: Any) -> list[str]:
    """Sums that carry out scripts around them, and a script by itself. They wait for nothing but
    what they have written."""
    problems = []
    for dtype in sorted({part for part, out in REDUCTIONS if part == out}, key=str):
        for rows, cols, pitch, first in PARTS:
            words = torch.zeros(5, dtype=torch.int32, device=at.device)
            arrived, *each = (words.data_ptr() + 4 * i for i in range(5))
            wide = _integers(at, generator, dtype, PLACES, rows, pitch)
            parts = list(wide[:, :, first : first + cols])
            total = torch.empty(rows, cols, dtype=dtype, device=at.device)
            front = Script((ScriptStep(each[0], 7), ScriptStep(each[0], 7, waits=True)), alone=1)
            rear = Script((ScriptStep(each[1], 9), ScriptStep(each[1], 9, waits=True)), alone=2)
            kernels.one_shot(total, parts, Signals(arrived, front, rear), stream)
            steps = ScriptStep(each[1], 9, waits=True), ScriptStep(each[2], 5, behind=True)
            kernels.script(Script(steps, alone=2), stream)
            if not torch.equal(total, torch.stack(parts).double().sum(0).to(dtype)):
                problems.append(
                    f"the sum of {PLACES} x {rows} x {cols} {dtype} at {first} of {pitch} with "
                    "scripts is wrong"
                )
            if words.tolist() != [0, 7, 9, 5, 0]:
                problems.append(f"scripts left {words.tolist()} in words, not 0, 7, 9, 5, 0")
    return problems


def _stream(at: Rank, stream: Any) -> Any:
    """A stream of its own, as kernels take it; on a CPU, which has none, the one there is."""
    if at.device.type == "cpu":
        return stream
    with torch.cuda.stream(torch.cuda.Stream(at.device)):
        return probe.own_kernels(at.device)[1]
