"""The style of all pictures, and colours that can be told apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLUE, LIGHT, ORANGE, SAND = "#2a5d8f", "#6f9fca", "#e08a1e", "#f0c48a"
GREEN, PURPLE, GREY, BLACK = "#7a9a3a", "#a05a8a", "#b8b8b8", "#333333"

STYLE = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "lines.linewidth": 1,
    "lines.markersize": 4,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}


@contextmanager
def picture(path: Path, width: float, height: float, title: str = "") -> Iterator[Any]:
    """A figure of so many inches, written once it is drawn; the suffix is the format."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        if title:
            figure.suptitle(title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
