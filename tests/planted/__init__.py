"""Whether the tests still find wrong code: faults planted by hand, and mutants of the pure half.

    python -m planted faults [NAME ...]              plant each fault, or those named
    python -m planted mutants --seed 1 --count 60    change one operation of the pure rooms each

Both change a copy of the files that git tracks, and run tests there until one fails. Each line of
the output, and of the CSV file of ``--out``, says what was planted, which test found it and after
how many seconds. ``results.csv`` has the latest recorded results, each with its commit.
"""
