"""What people and machines read of a self-test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from ficco import doctor
from ficco.selftest.run import START_S, Selftest

#: Characters of what was seen in a check that tables show.
SHOWN = 300


def as_json(run: Selftest, path: Path) -> str:
    """The results, and where the report is."""
    fields = {name: getattr(run, name) for name in ("device", "ranks", "failed", "starts")}
    results = [asdict(result) for result in run.results]
    return json.dumps(
        {**fields, "seconds": round(run.seconds, 1), "report": str(path), "results": results}
    )


def show(run: Selftest, path: Path) -> None:
    """Print the results."""
    print(f"Self-test of {run.ranks} ranks on {run.device}")
    for result in run.results:
        print(f"{result.verdict:11} {result.check}: {result.seen[:SHOWN]}")
        if result.instead:
            print(f"{'':11}   used instead: {result.instead}")
    print(_summary(run))
    print(f"The report is in {path}; attach it to a bug report.")


def _summary(run: Selftest) -> str:
    verdicts = [result.verdict for result in run.results]
    counts = [f"{verdicts.count(one)} {one}" for one in ("ok", "not offered", "failed")]
    return f"{', '.join(counts)}; {run.seconds:.0f} s."


def about() -> dict[str, Any]:
    """What ``ficco doctor`` says, in a process of its own: this one leaves the devices to ranks,
    and a device that hangs must not keep the report from being written."""
    command = [sys.executable, "-m", "ficco", "doctor", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=True)
        said: dict[str, Any] = json.loads(done.stdout)
        return said
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"versions": f"ficco doctor cannot tell: {error}"}


def report(run: Selftest, about: dict[str, Any]) -> str:
    """All that was found, in Markdown; ``about`` is what :func:`about` found."""
    return "\n".join(_lines(run, about))


def _lines(run: Selftest, about: dict[str, Any]) -> Iterator[str]:
    verdicts = [result.verdict for result in run.results]
    later = len(verdicts) - 1 - verdicts.index("failed") if "failed" in verdicts else None
    after = "" if later is None else f"; {later} checks came after the first that failed"
    yield from ("# ficco self-test", "")
    yield f"{datetime.now():%Y-%m-%d %H:%M}, {run.ranks} ranks on {run.device}: {_summary(run)}"
    yield f"New ranks were started {run.starts} times{after}."
    yield from ("", "| check | verdict | what was seen | used instead | seconds |")
    yield "|---|---|---|---|---|"
    for result in run.results:
        cells = (result.check, result.verdict, result.seen[:SHOWN], result.instead)
        text = " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells)
        yield f"| {text} | {result.seconds:.1f} |"
    yield from _block("Settings", "\n".join(f"{k}: {v}" for k, v in asdict(run.settings).items()))
    for part in ("versions", "devices", "links", "engines", "use"):
        yield from _block(part.capitalize(), json.dumps(about.get(part), indent=1))
    variables = "\n".join(f"{name}={value}" for name, value in doctor.environment().items())
    yield from _block("Environment", variables or "none of the variables that matter is set")
    for result in run.results:
        if result.details or result.verdict == "failed":
            text = "\n".join(filter(None, (result.seen, result.details)))
            yield from _block(f"{result.check}: {result.verdict}", text)
    for name, log in run.logs.items():
        if log:
            yield from _block(f"Output of {name}", log)


def _block(title: str, text: str) -> Iterator[str]:
    yield from ("", f"## {title}", "", "```text", text.replace("```", "'''"), "```")
