"""Scripts that write pages from committed results; run from a checkout."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def parsed(text: str | None, argument: str = "", **how: Any) -> Any:
    """The argument on the command line of the script whose docstring is ``text``; None if the
    script has none."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=formatter)
    if argument:
        parser.add_argument(argument, type=Path, **how)
    return getattr(parser.parse_args(), argument, None)
