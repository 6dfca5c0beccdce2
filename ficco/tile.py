"""Device functions for Triton kernels that wait for rows, notify peers, and push data to them
(TileLink, section 3.2).

A word is an int32: 0 until its data has arrived, then 1. Words come from :func:`ficco.arriving`
(``rows.words``), or are the caller's own, in memory from :func:`ficco.empty`. Kernels of peers
write the caller's words through the addresses from :func:`ficco.addresses`::

    @triton.jit
    def kernel(rows, words, ...):
        ficco.tile.wait(words, piece)  # from here on the rows of the piece can be read

The functions run on NVIDIA GPUs, compile for AMD's (gfx942), and run in Triton's interpreter
(``TRITON_INTERPRET=1``) on CPU tensors, where a wait polls memory that threads and other ranks
write.

A wait orders loads through pointers. Loads through tensor descriptors (TMA) belong to another proxy
of the memory model: do not use them to read rows that a kernel waited for.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
    from triton.language.target_info import is_hip
except ImportError as error:
    raise ImportError(
        "ficco.tile needs Triton 3.6, which comes with the GPU builds of PyTorch; install it by "
        "`pip install triton`"
    ) from error

#: AMD instructions that wait for a wavefront's memory operations.
STORED = tl.constexpr("s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1")

__all__ = ["notify", "peer", "push", "wait"]


@triton.jit
def wait(words, index):
    """Wait until a word is not 0. Writes by copies or by a peer that precede the word are then
    visible to all threads of the block.

    Args:
        words: pointer to int32 words.
        index: index of the word; a scalar.
    """
    # Adding 0 is a load that the interpreter, too, repeats in each iteration.
    while tl.atomic_add(words + index, 0, sem="acquire", scope="sys") == 0:
        pass


@triton.jit
def notify(words, index):
    """Set a word to 1 after all earlier writes of the block's threads, here or at a peer.

    Args:
        words: pointer to int32 words, of this rank or of a peer (:func:`peer`).
        index: index of the word; a scalar.
    """
    if is_hip():  # a barrier there does not wait for the stores of other wavefronts
        tl.inline_asm_elementwise(
            STORED, "=v,v,~{memory}", [index], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    tl.atomic_xchg(words + index, 1, sem="release", scope="sys")


@triton.jit
def peer(addresses, rank, dtype: tl.constexpr):
    """Return the pointer to a rank's memory.

    Args:
        addresses: pointer to int64 addresses of all ranks (:func:`ficco.addresses`).
        rank: the rank; a scalar.
        dtype: dtype of the elements, such as ``tl.bfloat16``.
    """
    return tl.load(addresses + rank).to(tl.pointer_type(dtype))


@triton.jit
def push(addresses, rank, offsets, tile, mask=None):
    """Store a tile in a rank's memory. :func:`notify` tells the rank that the tile has arrived.

    Args:
        addresses: pointer to int64 addresses of all ranks (:func:`ficco.addresses`).
        rank: the rank; a scalar.
        offsets: offset of each element, in elements.
        tile: the elements, of the dtype of that memory.
        mask: the elements to store; None for all.
    """
    tl.store(peer(addresses, rank, tile.dtype) + offsets, tile, mask=mask)
