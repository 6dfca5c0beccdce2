"""What the server of ranks does once for all of them, besides importing modules: it reads the
machines that ship, in which every new group of a rank looks for its host, asks AMD's compiler for
its version, and imports both series of hip-python. In the end it takes all of this out of sight of
its forks' collectors, which would copy it by reading it."""

import contextlib
import gc
import importlib
import sys
from pathlib import Path
from types import ModuleType

from ficco.hip_kernels import build
from ficco.machine import Fingerprint, nearest

#: The modules of each series, by its folder. They have the same names, and a rank takes one's.
BINDINGS: dict[str, dict[str, ModuleType]] = {}


def _binding(folder: Path) -> dict[str, ModuleType]:
    """Import a series; afterwards its names are free again."""
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
