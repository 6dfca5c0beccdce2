"""Recorded results that a refactoring must not change: Plans, simulated times and public names.

Commands, from ``tests/``::

    python -m golden compare                compare Plans; exit code 1 if any differs
    python -m golden show CASE              print the canonical text of a case
    python -m golden judge                  first line, proof and times of Plans that differ
    python -m golden judge --before FOLDER  the same against another checkout
    python -m golden record [WHAT]          after an intended change: plans, public, times, or all

Without a checkout ``judge`` compares with the commit that last changed ``plans.json``.

===============  =============================================================
module           contents
===============  =============================================================
``asks``         problems and schedules, and the calls that plan them
``canonical``    text of a Plan that is independent of renamed classes and fields
``records``      ``plans.json``: hashes of the text, and comparisons with them
``times``        ``simulated.json``: simulated times
``public``       ``public.txt``: public names with their parameters
===============  =============================================================
"""
