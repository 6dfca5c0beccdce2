"""The bench: workloads, the timing protocol, and reports.

==========  ======================================================================
module      subject
==========  ======================================================================
cases       shapes, in sets; settings of a bench
inputs      operands with one right product, and random ones; wrong elements of a result
candidates  candidates of a bench of products, and how each is called
measure     rounds, modes, clocks; calls timed exclusively or during other calls
harness     the one bench: workloads, variants, proofs, rounds, rows, timed calls
products    workload: a product by all candidates; errors of float sums
layers      workload: forward and backward of tensor-parallel layers
fsdp        workload: forward and backward of a stack of blocks under FSDP2
attention   workload: attention with one right answer
experts     workload: a layer of experts
replay      one rank on one GPU, whose peers a stream plays
frames      columns of the rows, their CSV files, descriptions of runs; tables of text
report      figures from times; reports, tables and pictures from rows
simulated   shapes on a machine, simulated; decisions in words and pictures
draw        Timelines as pictures and as traces; the style of all pictures
demo        every schedule and operator once, proven exact
==========  ======================================================================
"""
