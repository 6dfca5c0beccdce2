"""Recorded results that a refactoring must not change: Plans, simulated times and public names.

Commands, from ``tests/``::

    python -m golden compare                compare with the records; exit code 1 if any differs
    python -m golden show CASE              print the canonical text of a case
    python -m golden judge                  of Plans that differ: first line, proof, simulated time
    python -m golden judge --before FOLDER  the same against another checkout
    python -m golden record                 record anew, after a change that is intended

===============  =============================================================
module           contents
===============  =============================================================
``asks``         problems and schedules, and the calls that plan and simulate
``canonical``    text of a Plan without names of classes and fields
``records``      files of records, and comparison with them
``public``       public names with their signatures
===============  =============================================================
"""
