"""``ficco doctor``: print versions, devices, links, engines, and what would be used and why."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ficco.tools import launch
from ficco.tools.cli.site import FLAG, add_ranks

#: Seconds after which the ranks of ``doctor`` have hung.
DOCTOR_S = 120.0


def options(parser: Any) -> None:
    parser.add_argument("--json", **FLAG, help="print JSON")
    add_ranks(
        parser,
        "start so many ranks and make a call, which shows what reaches a peer; the report on auto "
        "is then for as many (default: start none; auto for a GPU each, or 4)",
    )
    parser.add_argument(
        "--selftest",
        **FLAG,
        help="start ranks (default: a GPU each, or 2) and test what the engine assumes",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="report of --selftest (default: ficco-selftest-<date>.md)"
    )


def run(arguments: argparse.Namespace) -> int:
    from ficco.tools import doctor

    if arguments.selftest:
        return _selftest(arguments)
    if arguments.out is not None:
        raise ValueError("--out: required with --selftest, which writes a report; got it alone")
    device, ranks = arguments.device or launch.default_device(), arguments.ranks
    if ranks is not None:
        launch.check_ranks(ranks, device)  # before the report, which takes seconds
    found = doctor.report(ranks, device)
    if ranks is not None:
        name, seen = launch.launch(
            doctor.after_a_call, ranks, device, device=device, timeout_s=DOCTOR_S
        )
        found["engines"][name] = seen
        found["call"] = {"ranks": ranks, "engine": name, "result": "right on every rank"}
    if arguments.json:
        print(json.dumps(found))
    else:
        doctor.show(found)
    return 0


def _selftest(arguments: argparse.Namespace) -> int:
    from datetime import date

    from ficco.tools.selftest import run as selftest

    path = Path(arguments.out or f"ficco-selftest-{date.today()}.md")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"--out: required a file that can be written, got {path}")
    run = selftest.selftest(arguments.device or launch.default_device(), arguments.ranks)
    path.write_text(selftest.report(run, selftest.about()))
    if arguments.json:
        print(selftest.as_json(run, path))
    else:
        selftest.show(run, path)
    return 1 if run.failed else 0
