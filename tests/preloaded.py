"""Preparation of the server of ranks, besides imports. It reads the shipped machines for new
groups, queries the version of AMD's compiler, and imports both series of hip-python. At the end it
freezes all objects, so that garbage collection in its forks does not copy their pages."""

import contextlib
import gc
import importlib
import sys
from pathlib import Path
from types import ModuleType

from ficco.hip_kernels import build
from ficco.machine import Fingerprint, nearest

#: Modules of each series by folder. Both series use the same names; a rank uses one series.
BINDINGS: dict[str, dict[str, ModuleType]] = {}


def _binding(folder: Path) -> dict[str, ModuleType]:
    """Import a series and remove its names from ``sys.modules``."""
    sys.path.insert(0, str(folder))
    with contextlib.suppress(ImportError):
        importlib.import_module("hip")
    sys.path.pop(0)
    names = [name for name in sys.modules if name.split(".")[0] in ("hip", "rocm")]
    return {name: sys.modules.pop(name) for name in names}


for series in ("7", "10"):
    folder = Path(__file__).parents[1] / "build" / "hip-python" / series
    if folder.is_dir():
        BINDINGS[str(folder)] = _binding(folder)
with contextlib.suppress(build.CompilerNotFound):
    build.clang()
nearest(Fingerprint("none", 1))
gc.freeze()
