"""Measuring: the paired protocol, what it compares, and what the figures say.

==========  ======================================================================
module      subject
==========  ======================================================================
cases       shapes, in sets
inputs      operands with one right product, calls compared exactly in shuffled order
candidates  what is compared, as one table, and the movement without the product
calls       how each of it is called
verify      proving candidates right before they are timed; errors of float sums
measure     rounds, modes, clocks
series      several calls timed against each other, exclusively or under contention
run         one bench, on every rank
replay      one rank on one GPU, whose peers a stream plays; ``replay_run`` benches it
layers      forward and backward of tensor-parallel layers, and ways of making them
ways        ways of making something else, timed against each other and their parts
attention   attention with one right answer, and ways of making it
experts     layers of experts, and ways of making them
frames      the columns of the rows, their CSV files, and the description of a run
stats       figures from times; one line per shape: the fastest row in each role
tables      frames as Markdown, and in a terminal; a bar over something that takes long
report      reports and tables from rows
plots       pictures from rows
simulated   shapes on a machine, simulated; decisions in words and pictures
traces      a traced call per schedule, planned and measured
draw        Timelines as pictures and as traces; the style of all pictures
demo        every schedule and operator once, proven exact
==========  ======================================================================
"""
