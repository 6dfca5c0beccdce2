"""Measuring: the paired protocol, what it compares, and what the figures say.

==============  ====================================================================
module          subject
==============  ====================================================================
extra           the packages that figures, pictures and tables need
cases           shapes, in sets
inputs          operands with one right product, and operands to time with
candidates      what is compared, as one table, and the movement without the product
calls           how each of it is called
exact           calls in shuffled order, compared exactly, for demo, verify and self-test
verify          proving candidates right before they are timed; errors of float sums
measure         rounds, modes, clocks
series          several calls timed against each other, exclusively or under contention
run             one bench, on every rank
layers          forward and backward of tensor-parallel layers; ``ways`` of making them
characterize    what cutting and overlapping cost; ``characterize_plots`` draws it
frames          the columns of the rows, and their CSV files
about           the description of a run, next to its CSV
stats           figures from times
roles           one line per shape: the fastest row in each role
tables          frames as Markdown, and in a terminal
report, plots   reports and pictures from a CSV
pictures        the style of all pictures
simulated       shapes on a machine, simulated
decisions       decisions in words and pictures, and the paper's Table I
traces          a traced call per schedule, planned and measured
draw            Timelines as pictures and as traces
progress        a bar over something that takes long
demo            every schedule and operator once, proven exact
==============  ====================================================================
"""
