"""The record of Plans, and comparisons with the record and with another checkout."""

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

#: Number of cases that a message names.
NAMED = 20

#: Machines and modes of the simulated times.
TIMED = [(name, mode) for name in ("h200-4", "mi300x-8") for mode in ("queued", "idle")]


def text(case: Case) -> str:
    """The text for the hash of a case: the text of its Plans, or the error of planning."""
    try:
        return canonical.text(case.all_plans())
    except Exception as error:  # from a builder under development
        return f"{type(error).__name__}: {error}\n"


def record() -> None:
    """Write ``plans.json``: the hash of the Plans by problem and schedule."""
    table: dict[str, dict[str, str]] = {}
    for case in asks.cases().values():
        table.setdefault(case.ask, {})[case.schedule] = canonical.digest(text(case))
    PLANS.write_text(json.dumps(table, indent=1) + "\n")


def differing(cases: Mapping[str, Case]) -> list[str]:
    """Names of cases that differ from the record, including new and missing cases."""
    table = json.loads(PLANS.read_text())
    golden = {f"{ask} | {name}": code for ask, row in table.items() for name, code in row.items()}
    changed = [name for name in cases if golden.get(name) != canonical.digest(text(cases[name]))]
    return changed + [name for name in golden if name not in cases]


def message(names: list[str]) -> str:
    """A message with the names of cases that differ, and with commands to inspect them."""
    lines = [f"{len(names)} cases differ from tests/golden/plans.json:"]
    lines += [f"  {name}" for name in names[:NAMED]]
    if len(names) > NAMED:
        lines.append(f"  and {len(names) - NAMED} more")
    lines += [
        "In tests/, with the checkout on PYTHONPATH:",
        "  python -m golden show CASE      the Plans of a case",
        "  python -m golden judge          proof and simulated times of these cases",
        "  python -m golden record plans   record anew, if the change is intended",
    ]
    return "\n".join(lines)


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> tuple[str, str]:
    """The first line that differs, before and now."""
    texts = (result["text"].splitlines() if result else [] for result in (old, new))
    pairs = zip_longest(*texts, fillvalue="(no such line)")
    equal = ("(equal to that checkout)",) * 2
    old_line, new_line = next((pair for pair in pairs if pair[0] != pair[1]), equal)
    return f"before: {old_line.strip()}", f"now:    {new_line.strip()}"


# Another checkout.


@contextmanager
def before(checkout: str) -> Iterator[str]:
    """The path of the named checkout; without a name, of a copy of the commit that last changed the
    record."""
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
    """:func:`describe` in another checkout, with the cases of that checkout if it has any."""
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
    described: dict[str, Any] = json.loads(output)
    return described


def describe(names: Iterable[str]) -> dict[str, Any]:
    """The text and the simulated seconds of each case, by name."""
    cases = asks.cases()
    return {
        name: {"text": text(cases[name]), "seconds": seconds(cases[name])}
        for name in names
        if name in cases
    }


def seconds(case: Case) -> list[float]:
    """Simulated seconds for each of ``TIMED``; -1 on machines without figures for the case."""
    times = []
    for name, mode in TIMED:
        try:
            times.append(simulate(case.all_plans(), asks.machine(name), mode).stop_s)
        except (ValueError, NotImplementedError, KeyError, IndexError):
            times.append(-1.0)
    return times


def judge(names: list[str], checkout: str) -> int:
    """Print which of the differing cases are slower or not proven; return their number."""
    with before(checkout) as folder:
        old = results(folder, names)
    new, cases = describe(names), asks.cases()
    labels = bad = timed = 0
    changes = [0.0]
    for name in names:
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
        was, now = (canonical.without_labels(texts[name]["text"]) for texts in (old, new))
        labels += was == now
        print("\n".join(f"  {line}" for line in first_difference(old[name], new[name])))
        pairs = zip(old[name]["seconds"], new[name]["seconds"], strict=True)
        relative = [b / a - 1 for a, b in pairs if a > 0 and b > 0]
        timed += bool(relative)
        changes += relative
        if max(relative, default=0.0) > 1e-9:
            bad += 1
            print(f"  slower by {max(relative):.2%}")
    print(
        f"{len(names)} differ, {labels} of them in labels only; {timed} have simulated times, "
        f"which change by {min(changes):+.2%} to {max(changes):+.2%}; "
        f"{bad} are slower or not proven"
    )
    return bad
