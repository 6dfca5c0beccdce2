"""The instruments: commands, benches, tuning, the self-test and the launcher of ranks.

They import the rest of ficco, which never imports them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

#: Packages of the extra ``bench``, for figures, pictures and tables; ``import ficco`` needs none.
EXTRA = ("pandas", "matplotlib", "rich")


def legend(meanings: Mapping[str, str], width: int = 100) -> str:
    """Meanings of the headings of a table, each on lines of at most ``width`` columns."""
    indent = max(map(len, meanings), default=0) + 2
    return "\n".join(
        textwrap.fill(
            text, width, initial_indent=head.ljust(indent), subsequent_indent=" " * indent
        )
        for head, text in meanings.items()
    )
