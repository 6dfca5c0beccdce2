"""Recorded results that a refactoring must not change: Plans, simulated times and public names.

Commands, from ``tests/``::

    python -m golden compare                compare Plans; exit code 1 if any differs
    python -m golden show CASE              print the canonical text of a case
    python -m golden judge                  of Plans that differ: first line, proof, simulated time
    python -m golden judge --before FOLDER  the same against another checkout
    python -m golden record [WHAT]          after an intended change: plans, public, times, or all

``judge`` compares with the commit that last changed ``plans.json`` unless it is given a checkout.

===============  =============================================================
module           contents
===============  =============================================================
``asks``         problems and schedules, and the calls that plan them
``canonical``    text of a Plan without names of classes and fields
``records``      ``plans.json``: hashes of the text, and what differs
``times``        ``simulated.json``: simulated times
``public``       ``public.txt``: public names with their parameters
===============  =============================================================
"""
