"""Files of records, and what differs from them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ficco.proof import check
from ficco.simulate import simulate
from golden import asks, canonical
from golden.asks import Case

FOLDER = Path(__file__).resolve().parent
TESTS = FOLDER.parent
PLANS = FOLDER / "plans.json"

#: Cases that a message names.
NAMED = 20

#: Machines and modes in which Plans are timed.
TIMED = [(name, mode) for name in ("h200-4", "mi300x-8") for mode in ("queued", "idle")]


def text(case: Case) -> str:
    """The text that is hashed; of a planning error, the error."""
    try:
        return canonical.text(case.all_plans())
    except Exception as error:  # of a builder that is being rewritten
        return f"{type(error).__name__}: {error}\n"


def record() -> None:
    """Write ``plans.json``: by ask and schedule, the hash of the Plans."""
    table: dict[str, dict[str, str]] = {}
    for case in asks.cases().values():
        table.setdefault(case.ask, {})[case.schedule] = canonical.digest(text(case))
    PLANS.write_text(json.dumps(table, indent=1) + "\n")


def differing(cases: Mapping[str, Case]) -> list[str]:
    """Names of cases that differ from the record, new and missing ones included."""
    table = json.loads(PLANS.read_text())
    golden = {f"{ask} | {name}": one for ask, row in table.items() for name, one in row.items()}
    wrong = [name for name in cases if golden.get(name) != canonical.digest(text(cases[name]))]
    return wrong + [name for name in golden if name not in cases]


def message(wrong: list[str]) -> str:
    """What to print of cases that differ, and what to do about them."""
    lines = [f"{len(wrong)} cases differ from tests/golden/plans.json:"]
    lines += [f"  {name}" for name in wrong[:NAMED]]
    if len(wrong) > NAMED:
        lines.append(f"  and {len(wrong) - NAMED} more")
    lines += [
        "In tests/, with the checkout on PYTHONPATH:",
        "  python -m golden show CASE      the Plans of a case",
        "  python -m golden judge          proof and simulated times of all that differ",
        "  python -m golden record plans   record anew, if the change is intended",
    ]
    return "\n".join(lines)


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> tuple[str, str]:
    """The first line that differs, before and now."""
    was, now = (one["text"].splitlines() if one else [] for one in (old, new))
    pairs = zip_longest(was, now, fillvalue="(no such line)")
    equal = ("(equal to that checkout)",) * 2
    one, other = next((pair for pair in pairs if pair[0] != pair[1]), equal)
    return f"before: {one.strip()}", f"now:    {other.strip()}"


# Another checkout.


@contextmanager
def before(checkout: str) -> Iterator[str]:
    """A checkout to compare with: the one that is named, else a copy of the commit that last
    changed the record."""
    if checkout:
        yield str(Path(checkout).resolve())
        return
    git = ["git", "-C", str(TESTS.parent)]
    log = [*git, "log", "-1", "--format=%H", "--", str(PLANS)]
    commit = subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()
    archive = [*git, "archive", commit or "HEAD", "ficco", "configs", "tests/golden"]
    packed = subprocess.run(archive, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(folder, filter="data")
        yield folder


def results(checkout: str, names: Iterable[str]) -> dict[str, Any]:
    """:func:`describe` in another checkout, with its own cases where it has some."""
    own = Path(checkout) / "tests"
    folder = own if (own / "golden" / "records.py").exists() else TESTS
    output = subprocess.run(
        [sys.executable, "-m", "golden", "describe"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": checkout},
        input=json.dumps(list(names)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    found: dict[str, Any] = json.loads(output)
    return found


def describe(names: Iterable[str]) -> dict[str, Any]:
    """By name of a case, its text and its simulated seconds."""
    cases = asks.cases()
    return {
        name: {"text": text(cases[name]), "seconds": seconds(cases[name])}
        for name in names
        if name in cases
    }


def seconds(case: Case) -> list[float]:
    """Simulated seconds for ``TIMED``; -1 on a machine without figures for the case."""
    times = []
    for name, mode in TIMED:
        try:
            times.append(simulate(case.all_plans(), asks.machine(name), mode).stop_s)
        except (ValueError, NotImplementedError, KeyError, IndexError):
            times.append(-1.0)
    return times


def judge(wrong: list[str], checkout: str) -> int:
    """Print which cases that differ are slower or not proven; return how many."""
    with before(checkout) as folder:
        old = results(folder, wrong)
    new, cases = describe(wrong), asks.cases()
    labels = bad = timed = 0
    changes = [0.0]
    for name in wrong:
        if name not in new:
            print(f"no longer asked: {name}")
            continue
        print(f"differs: {name}")
        try:
            check(cases[name].all_plans())
        except Exception as error:
            bad += 1
            print(f"  not proven: {type(error).__name__}: {error}")
        if name not in old:
            print("  not asked before")
            continue
        was, now = (canonical.without_labels(one[name]["text"]) for one in (old, new))
        labels += was == now
        print("\n".join(f"  {line}" for line in first_difference(old[name], new[name])))
        pairs = zip(old[name]["seconds"], new[name]["seconds"], strict=True)
        mine = [b / a - 1 for a, b in pairs if a > 0 and b > 0]
        timed += bool(mine)
        changes += mine
        if max(mine, default=0.0) > 1e-9:
            bad += 1
            print(f"  slower by {max(mine):.2%}")
    print(
        f"{len(wrong)} differ, {labels} of them in labels only; {timed} have simulated times, "
        f"which change by {min(changes):+.2%} to {max(changes):+.2%}; "
        f"{bad} are slower or not proven"
    )
    return bad
