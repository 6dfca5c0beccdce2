"""The soak: a short run, and reports of wrong results and stuck ranks with a command to repeat."""

from __future__ import annotations

import re
from collections import Counter
from itertools import count
from typing import Any
from unittest import mock

import soak
from ranks import Rank

from ficco.dma.cpu import CpuEngine


def test_calls_are_right(capsys: Any) -> None:
    assert soak.main(["--calls", "100", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("seed 3, ranks [2], cpu\n")
    assert re.search(r"\n\d{3} calls, 1 rounds, \d+ s, seed 3: no failure\n$", printed), printed
    assert re.search(r"\n +[12] groups whose numbers wrapped, 2 ranks\n", printed), printed
    assert len(re.findall(r"\n +\d+ \w[\w, ]+, 2 ranks", printed)) > 5, printed


def loses_copies(at: Rank, settings: soak.Round) -> Counter[str]:
    """A round on an engine that omits every 40th copy."""
    copy, number = CpuEngine.copy, count(1)

    def forgetful(*args: Any) -> Any:
        op = copy(*args)
        return lambda call: op(call) if next(number) % 40 else None

    with mock.patch.object(CpuEngine, "copy", forgetful):
        return soak.of_rank(at, settings)


def test_a_lost_copy_is_seen(capsys: Any) -> None:
    assert soak.main(["--calls", "200", "--seed", "11", "--first", "4"], loses_copies) == 1
    printed = capsys.readouterr().out
    assert "FAILED with seed 11 after 0 calls" in printed
    wrong = (
        r"rank [01] of 2, round 4, call \d+, variant \d of SoakCase\(name='[\w, ]+'.*: result \d: "
    )
    assert re.search(wrong + r"(\d+ of \d+ are wrong: \(\d+.*, wanted |off by )", printed), printed
    command = "python tests/soak.py --seed 11 --ranks 2 --first 4 --calls 200 --device cpu"
    assert printed.endswith(f"to repeat it: {command}\n")


def stays(at: Rank, settings: soak.Round) -> Counter[str]:
    """A round with a stuck rank 1."""
    stuck_s = 3.0 if at.rank else 60.0  # rank 0 waits for rank 1
    with mock.patch.multiple(soak, STUCK_S=stuck_s, LATE=float(at.rank), SLEEP_S=500.0):
        return soak.of_rank(at, settings)


def test_a_stuck_rank_is_ended(capsys: Any) -> None:
    assert soak.main(["--calls", "50", "--seed", "5"], stays) == 1
    printed = capsys.readouterr().out
    assert "FAILED with seed 5 after 0 calls" in printed
    assert re.search(r"rank 1 ended with exit code 1: Timeout \(0:00:03", printed), printed
    assert "in make" in printed and printed.endswith("--first 0 --calls 50 --device cpu\n"), printed
