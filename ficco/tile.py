"""Device functions for Triton kernels that wait for rows, tell, and push (TileLink, section 3.2).

A word is an int32: 0 until what it is about is there, then 1. Words are those of
:func:`ficco.arriving` (``rows.words``), or words of the caller's own in memory that
:func:`ficco.empty` gave, where kernels of peers write them through the addresses that
:func:`ficco.addresses` gives::

    @triton.jit
    def kernel(rows, words, ...):
        ficco.tile.wait(words, piece)  # from here on the rows of the piece can be read

They run on NVIDIA GPUs, compile for AMD's (gfx942), and run in Triton's interpreter
(``TRITON_INTERPRET=1``) on CPU tensors, where a wait polls memory that threads and other ranks
write.

A wait orders loads through pointers. Loads through tensor descriptors (TMA) are of another proxy
of the memory model: do not read the rows that a kernel waited for by these.
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

#: Waits for the memory operations of a wavefront of AMD's.
STORED = tl.constexpr("s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1")

__all__ = ["notify", "peer", "push", "wait"]


@triton.jit
def wait(words, index):
    """Wait until a word is not 0. What was written before it was set, by copies or by
    a peer, is visible from then on to all threads of the block.

    Args:
        words: pointer to int32 words.
        index: of the word; a scalar.
    """
    # An addition of nothing is a load that the interpreter, too, makes anew each time.
    while tl.atomic_add(words + index, 0, sem="acquire", scope="sys") == 0:
        pass


@triton.jit
def notify(words, index):
    """Set a word to 1 after all that the threads of the block wrote, here or at a peer.

    Args:
        words: pointer to int32 words, of this rank or of a peer (:func:`peer`).
        index: of the word; a scalar.
    """
    if is_hip():  # where a barrier does not wait for the stores of the other wavefronts
        tl.inline_asm_elementwise(
            STORED, "=v,v,~{memory}", [index], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    tl.atomic_xchg(words + index, 1, sem="release", scope="sys")


@triton.jit
def peer(addresses, rank, dtype: tl.constexpr):
    """The pointer to a rank's memory.

    Args:
        addresses: pointer to int64, those of all ranks (:func:`ficco.addresses`).
        rank: whose; a scalar.
        dtype: of the elements, such as ``tl.bfloat16``.
    """
    return tl.load(addresses + rank).to(tl.pointer_type(dtype))


@triton.jit
def push(addresses, rank, offsets, tile, mask=None):
    """Store a tile in a rank's memory. :func:`notify` tells the rank that it is there.

    Args:
        addresses: pointer to int64, those of all ranks (:func:`ficco.addresses`).
        rank: whose memory; a scalar.
        offsets: where each element goes, in elements.
        tile: the elements, of the dtype of that memory.
        mask: which of them to store; None for all.
    """
    tl.store(peer(addresses, rank, tile.dtype) + offsets, tile, mask=mask)
