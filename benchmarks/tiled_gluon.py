"""The tiled product in Gluon, Triton's language of warps and shared memory.

``benchmarks.tiled_ways`` compares it with the kernel in CUDA C++, on the same work lists. It takes
lists of one product without announcements, and tilings without clusters, of powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ficco.compute.tiled.worklist import BK, ITEM_INTS, MAX_GATES, TileList

#: Columns of C in one store.
BOX = gl.constexpr(64)
INTS = gl.constexpr(ITEM_INTS)
LATE_PARTS = gl.constexpr(1 + MAX_GATES)
# TMA reads the rows through another proxy than the load of the gate's word.
GATE = gl.constexpr("ld.acquire.sys.global.u32 $0, [$1];\nfence.proxy.async.global;")
PART = gl.constexpr("ld.acquire.gpu.global.u32 $0, [$1];")


@gluon.jit
def now_ns():
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def look(address, LOAD: gl.constexpr):
    return gl.inline_asm_elementwise(LOAD, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for(address, value, deadline, late, code, LOAD: gl.constexpr):
    seen = look(address, LOAD)
    while (seen != value) & (now_ns() < deadline):
        seen = look(address, LOAD)
    if seen != value:
        gl.store(late, code)


@gluon.jit
def load_tiles(a, b, items, gates, late, limit_ns, ring, B_ROWS: gl.constexpr):
    """One warp: wait for the gates of each item, then load its steps along k into the ring."""
    full, empty, a_ring, b_ring = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    STEP: gl.constexpr = a_ring.shape[2]
    deadline = now_ns() + limit_ns
    passed = deadline * 0  # a bit per gate
    count = 0
    item = items + INTS * gl.program_id(0)
    steps = gl.load(item + 4)
    while steps > 0:
        row = gl.load(item + 1)
        column = gl.load(item + 2)
        first = gl.load(item + 3)
        for gate in range(gl.load(item + 8), gl.load(item + 9) + 1):
            if ((passed >> gate) & 1) == 0:
                wait_for(gl.load(gates + gate), 1, deadline, late, 1 + gate, GATE)
                passed |= (passed * 0 + 1) << gate
        for step in range(first, first + steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES + 1) & 1)
            mbarrier.expect(full.index(stage), a.block_type.nbytes + b.block_type.nbytes)
            k = step * STEP
            tma.async_copy_global_to_shared(a, [row, k], full.index(stage), a_ring.index(stage))
            place = [k, column] if B_ROWS else [column, k]
            tma.async_copy_global_to_shared(b, place, full.index(stage), b_ring.index(stage))
            count += 1
        item += INTS * gl.num_programs(0)
        steps = gl.load(item + 4)


@gluon.jit
def finish(
    sums, c, boxes, part, row, column, is_part, others, SIZE: gl.constexpr, AT: gl.constexpr
):
    """Write a part of a tile, or add the parts of other blocks and store the tile, box by box."""
    COLUMNS: gl.constexpr = sums.shape[1]
    if COLUMNS > BOX:
        HALF: gl.constexpr = COLUMNS // 2
        low, high = sums.reshape((sums.shape[0], 2, HALF)).permute((0, 2, 1)).split()
        finish(low, c, boxes, part, row, column, is_part, others, SIZE, AT)
        finish(high, c, boxes, part, row, column, is_part, others, SIZE, AT + HALF)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BOX, 16])
        x = gl.convert_layout(sums, layout, assert_trivial=True)
        rows = gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
        columns = gl.arange(0, BOX, gl.SliceLayout(0, layout))
        place = part + AT * sums.shape[0] + rows[:, None] * BOX + columns[None, :]
        if is_part:
            gl.store(place, x)
        else:
            for other in range(others):
                x += gl.load(place + other * SIZE, cache_modifier=".cg")
            box = boxes.index(AT // BOX % 2)
            tma.store_wait(1)
            box.store(x.to(c.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(c, [row, column + AT], box)


@gluon.jit
def multiply_tiles(c, items, ready, parts, late, limit_ns, ring, boxes, B_ROWS: gl.constexpr):
    """The other warps: multiply the steps in the ring and finish the tiles."""
    full, empty, a_ring, b_ring = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    BM: gl.constexpr = a_ring.shape[1]
    BN: gl.constexpr = b_ring.shape[2] if B_ROWS else b_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    deadline = now_ns() + limit_ns
    count = 0
    item = items + INTS * gl.program_id(0)
    steps = gl.load(item + 4)
    while steps > 0:
        row = gl.load(item + 1)
        column = gl.load(item + 2)
        tile = gl.load(item + 5)
        part = parts + gl.load(item + 6) * (BM * BN)
        others = gl.load(item + 7)
        sums = gl.zeros((BM, BN), gl.float32, layout)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            b = b_ring.index(stage) if B_ROWS else b_ring.index(stage).permute((1, 0))
            sums = warpgroup_mma(a_ring.index(stage), b, sums, use_acc=step > 0, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
        is_part = (tile >= 0) & (others == 0)
        if others > 0:
            wait_for((ready + tile).to(gl.int64), others, deadline, late, LATE_PARTS, PART)
            gl.thread_barrier()
            gl.store(ready + tile, 0)
        finish(sums, c, boxes, part, row, column, is_part, others, BM * BN, 0)
        if is_part:
            gl.thread_barrier()
            gl.atomic_add(ready + tile, 1, sem="release", scope="gpu")
        item += INTS * gl.num_programs(0)
        steps = gl.load(item + 4)
    tma.store_wait(0)


@gluon.jit
def tiled(
    a, b, c, items, gates, ready, parts, late, limit_ns, STAGES: gl.constexpr, B_ROWS: gl.constexpr
):
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    boxes = gl.allocate_shared_memory(c.dtype, [2] + c.block_type.shape, c.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    ring = full, empty, a_ring, b_ring
    gl.warp_specialize(
        [
            (multiply_tiles, (c, items, ready, parts, late, limit_ns, ring, boxes, B_ROWS)),
            (load_tiles, (a, b, items, gates, late, limit_ns, ring, B_ROWS)),
        ],
        [1],
        [40],
    )


def launcher(
    tiles: TileList, b_rows: bool, operands: Sequence[torch.Tensor], late: torch.Tensor
) -> Callable[[], None]:
    """A launch of ``out = a @ b`` by a list with open gates; ``operands`` are a, b, out."""
    a, b, out = operands
    tiling = tiles.tiling
    boxes = (
        (a, [tiling.bm, BK]),
        (b, [BK, tiling.bn]) if b_rows else (b.t(), [tiling.bn, BK]),
        (out, [tiling.bm, BOX.value]),
    )
    described = [
        TensorDescriptor.from_tensor(
            matrix, box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
        )
        for matrix, box in boxes
    ]
    word = torch.ones(1, dtype=torch.int32, device=a.device)
    gates = torch.full((len(tiles.work.gates) + 1,), word.data_ptr(), device=a.device)
    items = torch.from_numpy(tiles.items).to(a.device)
    ready = torch.zeros(tiles.tiles + 1, dtype=torch.int32, device=a.device)
    parts = torch.empty(tiles.slots * tiling.rows * tiling.columns + 1, device=a.device)
    lists = items, gates, ready, parts, late, 1_000_000_000

    def launch(word: torch.Tensor = word) -> None:  # keeps the word alive
        grid = (tiles.clusters,)
        tiled[grid](*described, *lists, tiling.stages, b_rows, num_warps=8, maxnreg=160)

    return launch
