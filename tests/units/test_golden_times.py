"""Simulated times equal the record, ``tests/golden/simulated.json``."""

from __future__ import annotations

import json

import pytest
from golden import times


def test_simulated_times_are_as_recorded() -> None:
    changed = times.differences(json.loads(times.RECORD.read_text()), times.times())
    if changed:
        text = "\n".join(f"  {line}" for line in changed[:20])
        pytest.fail(
            f"{len(changed)} simulated times differ by more than {times.TOLERANCE:.0%}:\n{text}\n"
            "if intended, record anew in tests/: python -m golden record times",
            pytrace=False,
        )


def test_a_slower_a_new_and_a_missing_time_are_named() -> None:
    before = {"ask": {"serial": 1.0, "ring": 2.0, "growing": 3.0}}
    now = {"ask": {"serial": 1.019, "ring": 2.05, "tiled": 4.0}}
    assert times.differences(before, now) == [
        "ask | ring: 2 ms before, 2.05 ms now (+2.5%)",
        "ask | growing: only before",
        "ask | tiled: only now",
    ]
