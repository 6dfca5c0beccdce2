"""Measure whether the tests find wrong code: planted faults, and mutants of the pure half.

    python -m planted faults [NAME ...]              plant each fault, or the named faults
    python -m planted mutants --seed 1 --count 60    plant mutants, one changed operation each

Both commands change a copy of the files that git tracks, and run tests in the copy until one fails.
A line of the output, and of the CSV file of ``--out``, names the fault or mutant, the test that
found it, and the seconds until then. ``results.csv`` has the recorded results with their commits.
"""
