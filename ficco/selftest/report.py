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


def as_json(run: Selftest, path: Path) -> str:
    """The results, and where the report is."""
    return json.dumps(
        {
            "device": run.device,
            "ranks": run.ranks,
            "failed": run.failed,
            "starts": run.starts,
            "seconds": round(run.seconds, 1),
            "report": str(path),
            "results": [asdict(result) for result in run.results],
        }
    )


def show(run: Selftest, path: Path) -> None:
    """Print the results as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "failed": "red", "not offered": "yellow"}
    table = Table(title=f"Self-test of {run.ranks} ranks on {run.device}", title_justify="left")
    for column in ("check", "verdict", "what was seen", "used instead"):
        table.add_column(column, overflow="fold")
    for result in run.results:
        verdict = f"[{colours[result.verdict]}]{result.verdict}[/]"
        table.add_row(
            escape(result.check), verdict, escape(_short(result.seen)), escape(result.instead)
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(escape(_summary(run)))
    console.print(f"The report is in {escape(str(path))}; attach it to a bug report.")


def _summary(run: Selftest) -> str:
    counts = [f"{_count(run, verdict)} {verdict}" for verdict in ("ok", "not offered", "failed")]
    return f"{', '.join(counts)}; {run.seconds:.0f} s."


def _went_on(run: Selftest) -> str:
    """Which checks ran although one in front of them had failed."""
    verdicts = [result.verdict for result in run.results]
    if "failed" not in verdicts:
        return ""
    behind = len(verdicts) - 1 - verdicts.index("failed")
    return f"; {behind} checks came behind the first that failed"


def _count(run: Selftest, verdict: str) -> int:
    return sum(result.verdict == verdict for result in run.results)


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def about() -> dict[str, Any]:
    """What ``ficco doctor`` says, in a process of its own: this one leaves the devices to ranks,
    and a device that hangs must not keep the report from being written."""
    command = [sys.executable, "-m", "ficco", "doctor", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"versions": f"ficco doctor cannot tell: {error}"}


def report(run: Selftest, about: dict[str, Any]) -> str:
    """All that was found, in Markdown; ``about`` is what :func:`about` found."""
    return "\n".join(_lines(run, about))


def _lines(run: Selftest, about: dict[str, Any]) -> Iterator[str]:
    yield from ("# ficco self-test", "")
    yield f"{datetime.now():%Y-%m-%d %H:%M}, {run.ranks} ranks on {run.device}: {_summary(run)}"
    yield f"New ranks were started {run.starts} times{_went_on(run)}."
    yield from (
        "",
        "| check | verdict | what was seen | used instead | seconds |",
        "|---|---|---|---|---|",
    )
    for result in run.results:
        cells = (result.check, result.verdict, _short(result.seen), result.instead)
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
