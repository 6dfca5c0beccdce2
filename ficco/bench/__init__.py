"""Measuring: the paired protocol, what it compares, and what is made of the figures.

=============  =====================================================================
module         subject
=============  =====================================================================
cases          shapes, in sets
inputs         operands with one right product, and operands to time with
candidates     what is compared, as one table
calls          how each of it is called
bounds         what of a problem goes alone
accuracy       how far sums are from those in float64
exact          calls in shuffled order, compared exactly, for demo, verify and self-test
verify         proving candidates right before they are timed
measure        rounds, modes, clocks
stats          figures from times; knows no device
about          the description of a run, beside its CSV
table          rows: CSV, and the printed table
run            one bench, on every rank
layers         forward and backward of tensor-parallel layers
traces         a traced call per schedule, planned and measured
draw           Timelines as pictures and as traces
lines          one line per shape: what reports say of the rows
simulated      shapes on a machine, simulated
paper          the paper's claims beside a simulation of its scenarios
plots, report  pictures and Markdown from a CSV alone
rows           dataclasses as lines of CSV files
regret         what ``auto`` loses, from the figures of a bench
decisions      what the rule takes for a list of problems; pictures of candidates
series         several calls timed against each other, alone and beside others
characterize   what cutting and overlapping cost; ``characterize_plots`` draws it
progress       a bar over something that takes long
command        the options of ``ficco bench``
extra          the packages that figures, pictures and tables need
demo           every schedule and operator once, proven exact
=============  =====================================================================
"""
