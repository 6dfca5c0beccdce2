"""Programs on the pages of the clients."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs/clients"


def snippet(client: str) -> str:
    """The first Python program on a client's page."""
    text = (FOLDER / f"{client}.md").read_text()
    (first, *_) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(first)
