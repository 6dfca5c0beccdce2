"""``ficco doctor``."""

from __future__ import annotations

import argparse
import json
from typing import Any

#: Seconds after which the ranks of ``doctor`` have hung.
DOCTOR_S = 120.0


def add(commands: Any) -> None:
    """Add the command to the parser."""
    text = "print versions, devices, links, engines, and what would be used and why"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--ranks",
        type=int,
        help="start so many ranks and make a call, to see what reaches a peer",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of those ranks")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from ficco import doctor
    from ficco.launch import default_device, launch

    found = doctor.report()
    if arguments.ranks is not None:
        device = arguments.device or default_device()
        name, seen = launch(
            doctor.after_a_call, arguments.ranks, device, device=device, timeout_s=DOCTOR_S
        )
        found["engines"][name] = seen
    if arguments.json:
        print(json.dumps(found))
    else:
        doctor.show(found)
    return 0
