"""Tensor functions that engines enqueue: matrix products, attention, sums and copies. Begin with
``program`` (slots, programs, calls) and ``products``. ``tiled`` has products whose tiles wait.

=============  =================================================================================
module         subject
=============  =================================================================================
program        slots, programs and calls
buffers        addresses (for copies) and views (for PyTorch) of Regions
products       products, sums and placement by PyTorch
ragged_blocks  the same for numbers of rows that only the call knows
scaled         products of float8 operands, and limits of the libraries
cublaslt       ``c + a @ b`` without a copy of c
attention      attention by libraries, its backward, merging of parts, and attention by heads
=============  =================================================================================
"""
