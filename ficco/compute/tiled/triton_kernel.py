"""The product whose tiles wait, in Triton, for GPUs without Hopper's units (see ``hopper.cpp``).

A persistent program per processor follows its list of items (:mod:`ficco.compute.tiled.worklist`).
For each item it waits for the gates, multiplies with float32 sums, adds the parts of a tile that is
cut along k in a fixed order, stores, and announces complete rows. All counters rest at zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.compute.tiled import products, worklist

#: Fields of the kernel's int64 table: those of :class:`ficco.compute.tiled.products.Lists`, then
#: the address of the products' numbers of rows, the limit on polls, and the number of clusters.
TABLE = (
    *("items", "gates", "words", "targets", "counters", "ready", "parts", "late"),
    *("rows", "polls", "clusters"),
)
ITEM_INTS: tl.constexpr = tl.constexpr(worklist.ITEM_INTS)
MAX_GATES: tl.constexpr = tl.constexpr(worklist.MAX_GATES)
BK: tl.constexpr = tl.constexpr(worklist.BK)
#: Places in the table.
ITEMS: tl.constexpr = tl.constexpr(TABLE.index("items"))
GATES: tl.constexpr = tl.constexpr(TABLE.index("gates"))
WORDS: tl.constexpr = tl.constexpr(TABLE.index("words"))
TARGETS: tl.constexpr = tl.constexpr(TABLE.index("targets"))
COUNTERS: tl.constexpr = tl.constexpr(TABLE.index("counters"))
READY: tl.constexpr = tl.constexpr(TABLE.index("ready"))
PARTS: tl.constexpr = tl.constexpr(TABLE.index("parts"))
LATE: tl.constexpr = tl.constexpr(TABLE.index("late"))
ROWS: tl.constexpr = tl.constexpr(TABLE.index("rows"))
POLLS: tl.constexpr = tl.constexpr(TABLE.index("polls"))
CLUSTERS: tl.constexpr = tl.constexpr(TABLE.index("clusters"))
UNIT: tl.constexpr = tl.constexpr(products.UNIT_ELEMENTS)
UNIT_BYTES: tl.constexpr = tl.constexpr(products.UNIT)


@triton.jit
def wait(word, value, polls):
    """Poll a 32-bit word until it has a value (system-scope acquire). Returns the polls that are
    left; 0 after a timeout."""
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while (seen != value) & (polls > 0):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        polls -= 1
    return polls


@triton.jit
def notify(word):
    """Set a 32-bit word to 1 (system-scope release)."""
    tl.atomic_xchg(word, 1, sem="release", scope="sys")


@triton.jit
def release(AMD: tl.constexpr):
    """Barrier of the program's threads that makes their stores visible to the whole system."""
    if AMD:
        # On AMD a barrier does not wait for stores in flight, and Triton 3.6 lets an atomic release
        # overtake the write-back of the cache before it.
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nbuffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0",
            "=v,~{memory}",
            [],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def chosen(values, product):
    """Select the value of a product."""
    value = values[0]
    for index in tl.static_range(1, len(values)):
        value = tl.where(product == index, values[index], value)
    return value


@triton.jit
def at(table, index: tl.constexpr, kind: tl.constexpr):
    return tl.load(table + index).to(tl.pointer_type(kind))


@triton.jit
def ficco_tiled(
    a,
    a_pitch,
    out,
    out_pitch,
    b,
    b_pitch,
    n_units,
    k_units,
    table,
    BM: tl.constexpr,
    BN: tl.constexpr,
    B_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
    AMD: tl.constexpr,
):
    """``out[p] = a[p] @ b`` for each product p.

    Args:
        a, out: addresses per product, in units of 16 bytes.
        a_pitch, out_pitch: likewise, from one row to the next.
        b: pointer to B; ``B_ROWS``: it is [k, n], otherwise [n, k], each with contiguous rows.
        b_pitch, n_units, k_units: pitch of B, n and k in units of 8 elements.
        table: what :data:`TABLE` says. It is read where it is needed: arguments would
            be kept in registers, of which there are not enough.
        EVEN_K: k is a multiple of ``BK``.
    """
    k = k_units * UNIT
    word = tl.pointer_type(tl.int32)
    ms, ns, ks = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    inside = ms[:, None] * BN + ns[None, :]
    polls = tl.load(table + POLLS)
    low, high = 0, -1  # gates that were seen open
    item = at(table, ITEMS, tl.int32) + tl.program_id(0) * ITEM_INTS
    kn = tl.load(item + 4)
    while kn > 0:
        product, row, column = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        k0, tile, slot = tl.load(item + 3), tl.load(item + 5), tl.load(item + 6)
        others, first, last = tl.load(item + 7), tl.load(item + 8), tl.load(item + 9)
        if first <= last:
            adjoins = (first >= low) & (first <= high + 1)
            for gate in range(tl.where(adjoins, high + 1, first), last + 1):
                if polls > 0:
                    polls = wait(tl.load(at(table, GATES, tl.int64) + gate).to(word), 1, polls)
                    if polls == 0:
                        tl.store(at(table, LATE, tl.int32), 1 + gate)
            low = tl.where(adjoins, low, first)
            high = tl.where(adjoins, tl.maximum(high, last), last)

        height = tl.load(at(table, ROWS, tl.int32) + product)
        # Threads outside of the matrix compute, and store, the last row or columns once more.
        ms_at = tl.minimum(row + ms, height - 1).to(tl.int64)
        units = tl.minimum(column // UNIT + ns // UNIT, n_units - 1)
        ns_at = tl.max_contiguous(tl.multiple_of(units * UNIT + ns % UNIT, UNIT), UNIT)
        x_at = tl.multiple_of((chosen(a, product) * UNIT_BYTES).to(b.dtype), UNIT_BYTES) + k0 * BK
        x_at = x_at + ms_at[:, None] * (chosen(a_pitch, product) * UNIT) + ks[None, :]
        if B_ROWS:
            y_at = b + (k0 * BK + ks).to(tl.int64)[:, None] * (b_pitch * UNIT) + ns_at[None, :]
            y_step = b_pitch * (UNIT * BK)
        else:
            y_at = b + ns_at.to(tl.int64)[None, :] * (b_pitch * UNIT) + (k0 * BK + ks)[:, None]
            y_step = BK
        sums = tl.full((BM, BN), 0.0, tl.float32)
        for step in range(k0, k0 + kn):
            if EVEN_K:
                x, y = tl.load(x_at), tl.load(y_at)
            else:
                in_k = ks < k - step * BK
                x = tl.load(x_at, mask=in_k[None, :], other=0.0)
                y = tl.load(y_at, mask=in_k[:, None], other=0.0)
            sums = tl.dot(x, y, sums)
            x_at += BK
            y_at += y_step

        part = tl.load(table + PARTS).to(tl.pointer_type(tl.float32))
        part = tl.multiple_of(part, UNIT_BYTES) + slot.to(tl.int64) * (BM * BN)
        if (tile >= 0) & (others == 0):
            tl.store(part + inside, sums)
            release(AMD)
            tl.atomic_add(at(table, READY, tl.int32) + tile, 1, sem="release", scope="gpu")
        else:
            if others > 0:
                # Other programs wait for gates up to the limit, then write their parts.
                ready = at(table, READY, tl.int32) + tile
                if wait(ready, others, 2 * tl.load(table + POLLS)) == 0:
                    tl.store(at(table, LATE, tl.int32), 1 + MAX_GATES)
                tl.store(ready, 0)
                for _ in tl.range(0, others, num_stages=1):
                    sums += tl.load(part + inside)
                    part += BM * BN
            to = tl.multiple_of((chosen(out, product) * UNIT_BYTES).to(b.dtype), UNIT_BYTES)
            to = to + ms_at[:, None] * (chosen(out_pitch, product) * UNIT) + ns_at[None, :]
            tl.store(to, sums.to(b.dtype.element_ty))
            release(AMD)
            for index in range(tl.load(item + 10), tl.load(item + 11) + 1):
                counter = at(table, COUNTERS, tl.int32) + index
                before = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys")
                if before + 1 == tl.load(at(table, TARGETS, tl.int32) + index):
                    tl.store(counter, 0)
                    notify(tl.load(at(table, WORDS, tl.int64) + index).to(word))
        item += tl.load(table + CLUSTERS) * ITEM_INTS
        kn = tl.load(item + 4)
