"""Commands on the records; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import sys

import golden
from golden import asks, public, records, times

RECORDS = {"plans": records.record, "public": public.record, "times": times.record}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m golden",
        description=golden.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = ("record", "compare", "show", "judge", "describe")
    parser.add_argument("command", choices=commands)
    text = f"for show: the name of a case; for record: {', '.join(RECORDS)} (default: all)"
    parser.add_argument("what", nargs="?", default="", help=text)
    parser.add_argument("--before", default="", help="for judge: another checkout")
    arguments = parser.parse_args()
    if arguments.command == "record":
        for name in [arguments.what] if arguments.what else RECORDS:
            RECORDS[name]()
    elif arguments.command == "show":
        print(records.text(asks.cases()[arguments.what]), end="")
    elif arguments.command == "describe":  # judge runs this in another checkout
        print(json.dumps(records.describe(json.load(sys.stdin))))
    else:
        differing = records.differing(asks.cases())
        if arguments.command == "judge":
            return min(records.judge(differing, arguments.before), 1)
        print(records.message(differing) if differing else "all Plans are as recorded")
        return bool(differing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
