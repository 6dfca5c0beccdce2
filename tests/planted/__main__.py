"""Commands of the package; see the package's docstring."""

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
#: Limit in seconds for all tests of one fault or mutant; generous for a shared machine.
LIMIT_S = 1800


def confirmed(tree: Path, names: Sequence[str], limit_s: float, marks: str) -> Outcome:
    """The first test that fails twice: on a busy machine a test may time out once."""
    outcome = run(tree, names, limit_s, marks)
    if "::" not in outcome.found_by:
        return outcome
    second = run(tree, [outcome.found_by], limit_s, marks)
    if second.found_by:
        return outcome._replace(seconds=outcome.seconds + second.seconds)
    repeated = run(tree, names, limit_s, marks)
    return repeated._replace(seconds=outcome.seconds + second.seconds + repeated.seconds)


def find(tree: Path, edit: Edit, stages: Sequence[Sequence[str]], marks: str) -> Outcome:
    """The test that finds an edit; a later stage runs only if no test of the earlier ones fails."""
    outcome, seconds = Outcome("", 0.0), 0.0
    with applied(tree, edit):
        for names in filter(None, stages):
            outcome = confirmed(tree, names, max(LIMIT_S - seconds, 1), marks)
            seconds += outcome.seconds
            if outcome.found_by:
                break
    return Outcome(outcome.found_by, seconds)


def stages_of(likely: Sequence[str]) -> list[Sequence[str]]:
    """The likely tests, the tests of the pure half, and all other tests."""
    pure = [name for name in PURE if name not in likely]
    return [likely, pure, rest((*likely, *pure))]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m planted",
        description=planted.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("set", choices=("faults", "mutants"))
    parser.add_argument("names", nargs="*", help="for faults: names of the faults (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--out", type=Path, help="CSV file to append to; skips edits in the file")
    text = "run only the likely tests; record only the edits that they find"
    parser.add_argument("--likely", action="store_true", help=text)
    options = parser.parse_args()
    rows: dict[str, list[str]] = {}
    if options.out and options.out.exists():
        rows = {row[2]: row for row in csv.reader(options.out.open()) if row[1] == options.set}
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    with copied() as tree:
        if fails := run(tree, PURE[:1], LIMIT_S, mutants.MARKS).found_by:
            raise SystemExit(f"without any fault {fails} must pass; nothing was planted")
        planned: list[tuple[Edit, Sequence[str]]]
        if options.set == "faults":
            named = [f for f in faults.FAULTS if f.name in (options.names or f.name)]
            planned, marks, limit = [(fault, fault.tests) for fault in named], faults.MARKS, 3
        else:  # tests outside of the pure half do not run
            chosen = mutants.chosen(options.seed, options.count)
            planned = [(mutant, mutants.ROOMS[mutant.room]) for mutant in chosen]
            marks, limit = mutants.MARKS, 2
        for edit, likely in planned:
            if edit.name in rows:
                continue
            stages = stages_of(likely)[: 1 if options.likely else limit]
            outcome = find(tree, edit, stages, marks)
            if options.likely and not outcome.found_by:
                continue
            found_by = outcome.found_by or NOT_FOUND
            row = [commit.strip(), options.set, edit.name, found_by, f"{outcome.seconds:.0f}"]
            rows[edit.name] = row
            print(*row[2:], sep=" | ", flush=True)
            if options.out:
                new = not options.out.exists()
                with options.out.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows([HEADER, row] if new else [row])
    missed = [name for name, row in rows.items() if row[3] == NOT_FOUND]
    print(f"{len(rows) - len(missed)} of {len(rows)} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
