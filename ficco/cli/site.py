"""What the commands share that decide and simulate: the machine, and files that pictures go to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ficco.heuristics import Where

#: The machine that is simulated unless another is named; the one that was measured most.
MACHINE = "h200-4"


def site(
    machine: str | None, world: int | None, *, captured: bool = False, default: str | None = None
) -> Where:
    """The machine of ``--machine``, of the environment, or the default or this host's."""
    import torch

    from ficco.heuristics import where
    from ficco.launch import check_ranks, default_device
    from ficco.machine import Fingerprint

    def here() -> Fingerprint:
        device = default_device()
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        return Fingerprint(name, check_ranks(None, device))

    try:
        return where(machine, world, here() if default is None else default, captured=captured)
    except ValueError as error:
        raise ValueError(f"--{str(error).removeprefix('--')}") from None


def picture(path: Path | None, option: str = "--draw") -> None:
    """Refuse a file that no picture can be drawn to, before anything is computed.

    Raises:
        ValueError: its name has no suffix, or one of no format.
    """
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise ValueError(
            f"{option}: required a file with one of the suffixes {', '.join(known)}, got {path}"
        )
