"""Trim the committed results to what their pages use.

    python -m docs.make.trim

A table of a bench loses its quartiles, and optional columns that only have their default value. A
picture gets a palette. A bench keeps its picture of shares; `ficco plot FILE.csv` draws
its picture of speed-ups from the table. Rows, digits and the figures of pages stay.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
from PIL import Image

from docs.make import parsed
from docs.make.check import DOCS, RESULTS, header, result_files
from ficco.tools.bench.frames import Schema, append

#: Columns that no page shows.
UNUSED = ("ms_low", "ms_high")

#: Colours of a picture: enough for bars and for the edges of text, in a third of the bytes of full
#: colour.
COLOURS = 64


def trim_table(path: Path, schema: Schema) -> None:
    """Drop the optional columns that no page shows or that only have the value of a file without
    them."""
    rows = schema.read(path)
    empty = pd.DataFrame(dict(schema.optional), rows.index).astype(rows.dtypes[[*schema.optional]])
    dropped = {name for name in empty if name in UNUSED or rows[name].equals(empty[name])}
    names = [name for name in header(path) if name not in dropped]
    path.unlink()
    append(path, rows[names])


def trim_picture(path: Path) -> None:
    """Replace the colours of a picture by a palette."""
    with Image.open(path) as image:
        indexed = image.copy() if image.mode == "P" else image.convert("RGB").quantize(COLOURS)
    indexed.save(path, optimize=True)


def main() -> None:
    for path in RESULTS.glob("*_speedup.png"):
        path.unlink()
    for page in RESULTS.glob("*.md"):
        page.write_text(re.sub(r"!\[(\S+_speedup)\]\(\1\.png\)\n\n", "", page.read_text()))
    for path in DOCS.rglob("*.png"):
        trim_picture(path)
    for path, schema in result_files():
        trim_table(path, schema)


if __name__ == "__main__":
    parsed(__doc__)
    main()
