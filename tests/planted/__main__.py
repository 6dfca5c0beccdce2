"""Commands of the package; see its docstring."""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import planted
from planted import faults, mutants
from planted.runs import PURE, ROOT, Edit, Outcome, applied, copied, rest, run

HEADER = ("commit", "set", "name", "found by", "seconds")
NOT_FOUND = "not found"
#: Most seconds of all tests of a fault or a mutant, also on a machine that others use.
LIMIT_S = 1800


def confirmed(tree: Path, names: Sequence[str], limit_s: float, marks: str) -> Outcome:
    """The first test that fails, and fails again: a busy machine may be too slow for it once."""
    outcome = run(tree, names, limit_s, marks)
    if "::" not in outcome.found_by:
        return outcome
    again = run(tree, [outcome.found_by], limit_s, marks)
    if again.found_by:
        return outcome._replace(seconds=outcome.seconds + again.seconds)
    repeated = run(tree, names, limit_s, marks)
    return repeated._replace(seconds=outcome.seconds + again.seconds + repeated.seconds)


def find(tree: Path, edit: Edit, stages: Sequence[Sequence[str]], marks: str) -> Outcome:
    """The test that finds an edit: one of the first stage, or else of the next."""
    outcome, seconds = Outcome("", 0.0), 0.0
    with applied(tree, edit):
        for names in filter(None, stages):
            outcome = confirmed(tree, names, max(LIMIT_S - seconds, 1), marks)
            seconds += outcome.seconds
            if outcome.found_by:
                break
    return Outcome(outcome.found_by, seconds)


def stages_of(likely: Sequence[str]) -> list[Sequence[str]]:
    """The likely tests, those of the pure half, and all others."""
    pure = [name for name in PURE if name not in likely]
    return [likely, pure, rest((*likely, *pure))]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m planted",
        description=planted.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("set", choices=("faults", "mutants"))
    parser.add_argument("names", nargs="*", help="faults: those to plant (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--out", type=Path, help="CSV file to append to; its rows are not repeated")
    text = "run only the likely tests; what these do not find is not recorded"
    parser.add_argument("--likely", action="store_true", help=text)
    given = parser.parse_args()
    rows: dict[str, list[str]] = {}
    if given.out and given.out.exists():
        rows = {row[2]: row for row in csv.reader(given.out.open()) if row[1] == given.set}
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    with copied() as tree:
        if fails := run(tree, PURE[:1], LIMIT_S, mutants.MARKS).found_by:
            raise SystemExit(f"without any fault {fails} must pass; nothing was planted")
        planned: list[tuple[Edit, Sequence[str]]]
        if given.set == "faults":
            every = [one for one in faults.FAULTS if one.name in (given.names or one.name)]
            planned, marks, most = [(one, one.tests) for one in every], faults.MARKS, 3
        else:  # of the pure half
            chosen = mutants.chosen(given.seed, given.count)
            planned = [(one, mutants.ROOMS[one.room]) for one in chosen]
            marks, most = mutants.MARKS, 2
        for edit, likely in planned:
            if edit.name in rows:
                continue
            stages = stages_of(likely)[: 1 if given.likely else most]
            outcome = find(tree, edit, stages, marks)
            if given.likely and not outcome.found_by:
                continue
            found_by = outcome.found_by or NOT_FOUND
            row = [commit.strip(), given.set, edit.name, found_by, f"{outcome.seconds:.0f}"]
            rows[edit.name] = row
            print(*row[2:], sep=" | ", flush=True)
            if given.out:
                new = not given.out.exists()
                with given.out.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows([HEADER, row] if new else [row])
    missed = [name for name, row in rows.items() if row[3] == NOT_FOUND]
    print(f"{len(rows) - len(missed)} of {len(rows)} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
