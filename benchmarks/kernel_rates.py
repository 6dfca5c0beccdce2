"""Rates of the kernels on NVIDIA GPUs, compared with their limits.

    python -m benchmarks.kernel_rates
    torchrun --nproc-per-node 2 -m benchmarks.kernel_rates

The first command prints the bandwidth of placement, sums and casts, read and written bytes, as
parts of the bandwidth of PyTorch's copy in the same round; exits with 1 if a part is below its
limit. The second prints the microseconds of a copy to a peer by the copy engine and by the kernel
on 4 to 32 blocks, while all ranks copy. The machine file states the crossover.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from benchmarks.gpu_rounds import Staged, rounds
from ficco.dma.driver import WRITE_32, MemOp
from ficco.hip_kernels import kernels
from ficco.hip_kernels.launch import E4M3, REDUCTIONS, Kernels

#: Smallest part of the bandwidth of PyTorch's copy that placement and sums may reach.
SHARE = 0.8
#: The same for casts: at most 1.1 times one pass over the bytes that they read and write. In 4
#: pieces each launch but the first waits for the previous one: 3.5 us each, 5 % of the pass (H200).
CASTS = {"cast rows": 1 / 1.1, "cast blocks": 1 / 1.1, "cast rows in 4 pieces": 0.85}
#: Cycles of torch.cuda._sleep, about half a millisecond.
AHEAD = 900_000
ROWS, COLS = 32768, 8192  # 512 MiB in half precision: far more than the L2 cache
#: Sizes of the copies of both movers, in bytes.
SIZES = tuple(1 << power for power in range(16, 27))
BLOCKS = (4, 8, 16, 32)
REPEAT = 20


def loaded(device: torch.device) -> tuple[Kernels, int]:
    """The kernels of a device, and its current stream."""
    compiled = kernels(device)
    assert isinstance(compiled, Kernels), "the kernels could not be compiled here"
    return compiled, torch.cuda.current_stream().cuda_stream


def candidates(compiled: Kernels, stream: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Names, numbers of bytes read and written, and calls."""
    a, b = (torch.empty(ROWS, COLS, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    wide = torch.empty(ROWS, COLS + 64, dtype=torch.bfloat16, device="cuda")
    odd = torch.empty(ROWS, COLS + 1, dtype=torch.bfloat16, device="cuda")
    a.normal_()
    size, half = a.nbytes, COLS // 2
    yield "copy_", 2 * size, partial(b.copy_, a)
    for name, target, source in (
        ("", b, a),
        (" rows", wide[:, 32 : 32 + COLS], a),
        (" columns", b[:, :half], wide[:, 64 : 64 + half]),
        (" odd rows", odd[:, 1:], a),
        (" rows from odd ones", b, odd[:, 1:]),
        (" odd columns", odd[:, 5 : 5 + half - 3], wide[:, 3:half]),
    ):
        yield f"place{name}", 4 * target.numel(), partial(compiled.place, target, source, stream)
    for part, out in sorted(REDUCTIONS, key=str):
        parts = a.view(part).view(4, -1)
        total = torch.empty(parts.shape[1], dtype=out, device="cuda")
        reduce = partial(compiled.reduce, total, [*parts], stream)
        yield f"sum of {part} to {out}", size + total.nbytes, reduce
    for part in (torch.bfloat16, torch.float32):
        parts = a.view(part).view(4, 4096, -1)[:, :, :-64]
        total = torch.empty(4096, parts.shape[2] + 64, dtype=torch.bfloat16, device="cuda")[:, :-64]
        moved = parts.numel() * parts.itemsize + total.numel() * total.itemsize
        reduce = partial(compiled.reduce, total, [*parts], stream)
        yield f"sum of rows apart, {part} to {total.dtype}", moved, reduce
    for name, length, pieces in (
        ("rows", COLS, 1),
        ("blocks", 128, 1),
        ("rows in 4 pieces", COLS, 4),
    ):
        narrow = torch.empty(ROWS, COLS, dtype=E4M3[0], device="cuda")
        factors = torch.empty(ROWS, COLS // length, device="cuda")
        operands = [*zip(*(each.chunk(pieces) for each in (narrow, factors, a)), strict=True)]

        def cast(operands: Any = operands) -> None:
            for piece in operands:
                compiled.cast(*piece, stream)

        yield f"cast {name}", size + narrow.nbytes + factors.nbytes, cast


def shares() -> dict[str, float]:
    """Bandwidths as parts of that of PyTorch's ``copy_``, which is in bytes per second."""
    entries = [*candidates(*loaded(torch.device("cuda", torch.cuda.current_device())))]
    times = rounds({name: call for name, _, call in entries}, AHEAD, count=17)
    rates = {name: [moved / us * 1e6 for us in times[name]] for name, moved, _ in entries}
    copied = rates.pop("copy_")
    parts = {
        name: statistics.median(x / y for x, y in zip(rate, copied, strict=True))
        for name, rate in rates.items()
    }
    return {"copy_": statistics.median(copied), **parts}


def too_slow(parts: dict[str, float]) -> list[str]:
    return [name for name, part in parts.items() if part < CASTS.get(name, SHARE)]


def movers(device: torch.device) -> dict[tuple[str, int], float]:
    """Microseconds of a copy to the next rank and a stream write, with the host far ahead."""
    from ficco.dma.cuda_driver import CudaDriver

    (compiled, handle), rank, world = loaded(device), dist.get_rank(), dist.get_world_size()
    memory = symm_mem.empty(2 * SIZES[-1], dtype=torch.uint8, device=device)
    addresses = symm_mem.rendezvous(memory, group=dist.group.WORLD).buffer_ptrs
    begin, end = addresses[rank], addresses[(rank + 1) % world] + SIZES[-1]
    word = torch.zeros(1, dtype=torch.int32, device=device)
    driver = CudaDriver(device)
    write = driver.batch([MemOp(WRITE_32, word.data_ptr(), 1)])
    stream = driver.stream(handle)

    def pushed(push: Callable[[], object]) -> None:
        for _ in range(REPEAT):
            push()
            write.enqueue(stream)

    calls = {}
    for size in SIZES:
        pushes = {"dma": partial(driver.copy(end, size), begin, stream)}
        for blocks in BLOCKS:
            shape = size, size, size, 1
            kernel = partial(compiled.copies, ((end, begin),), shape, handle, blocks)
            pushes[f"kernel {blocks}"] = kernel
        for name, push in pushes.items():
            calls[name, size] = Staged(partial(pushed, push), dist.barrier)
    times = rounds(calls, 4 * AHEAD, count=7, warm_up=1)
    medians = torch.tensor([statistics.median(us) / REPEAT for us in times.values()], device=device)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def main() -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        times = movers(device)
        if dist.get_rank() == 0:
            names = [*dict.fromkeys(name for name, _ in times)]
            print(f"{'KiB':>8}" + "".join(f"{name:>12}" for name in names) + "  microseconds")
            for size in SIZES:
                print(f"{size >> 10:8}" + "".join(f"{times[name, size]:12.1f}" for name in names))
        dist.destroy_process_group()
        return 0
    parts = shares()
    print(f"copy_ moves {parts.pop('copy_') / 1e9:.0f} GB/s read and written; parts of that:")
    slow = too_slow(parts)
    for name, part in parts.items():
        print(f"  {name:56} {part:.3f}{' TOO SLOW' * (name in slow)}")
    return int(bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
