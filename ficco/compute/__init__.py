"""Functions on tensors that engines enqueue: libraries' products and attention, and what is around
them. Begin with ``program``, what a call is to them, and ``products``. Products whose tiles wait
are in ``tiled``.

=============  =================================================================================
module         subject
=============  =================================================================================
program        slots, programs and calls
buffers        where Regions lie: addresses for copies, views for PyTorch
products       products, sums and placement by PyTorch
ragged_blocks  the same of rows that only the call knows
scaled         products of float8 operands, and what libraries lack for them
cublaslt       ``c + a @ b`` without a copy of c
attention      libraries' attention, its backward, and merging what they give
heads          the same for all positions of some heads
=============  =================================================================================
"""
