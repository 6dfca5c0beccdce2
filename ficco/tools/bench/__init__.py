"""Measuring: the paired protocol, what is compared, and what the figures say.

==========  ======================================================================
module      subject
==========  ======================================================================
cases       shapes, in sets
inputs      operands with one right product, calls compared exactly in shuffled order
candidates  what is compared, as one table, and the movement without the product
calls       how each of it is called
measure     rounds, modes, clocks
series      several calls timed against each other, exclusively or under contention
harness     the one bench: workloads, their variants, proofs, rounds, rows and reports
products    workload: a product by all candidates; errors of float sums
layers      workload: forward and backward of tensor-parallel layers
attention   workload: attention with one right answer
experts     workload: a layer of experts
replay      one rank on one GPU, whose peers a stream plays; ``replay_run`` times it
frames      the columns of the rows, their CSV files, and the description of a run; tables of text
stats       figures from times; one line per shape: the fastest row in each role
report      reports, tables and pictures from rows
simulated   shapes on a machine, simulated; decisions in words and pictures
traces      a traced call per schedule, planned and measured
draw        Timelines as pictures and as traces; the style of all pictures
demo        every schedule and operator once, proven exact
==========  ======================================================================
"""
