"""Plans: their data model and their rendering; ``check`` is that of ``ficco.proof``."""

import importlib
import typing

from ficco.plan.model import (
    OPS,
    Applied,
    Attending,
    Attendings,
    Crossing,
    LibraryMove,
    Plan,
    Product,
    Products,
    Reduction,
    Region,
    Signal,
    Step,
    Transfer,
    aligned,
    unknown,
)
from ficco.plan.parts import in_parts, product_rows, together
from ficco.plan.render import render
from ficco.problems.specification import Buffer

__all__ = [
    "OPS",
    "Applied",
    "Attending",
    "Attendings",
    "Buffer",
    "Crossing",
    "LibraryMove",
    "Plan",
    "PlanError",
    "Product",
    "Products",
    "Reduction",
    "Region",
    "Signal",
    "Step",
    "Transfer",
    "aligned",
    "check",
    "in_parts",
    "product_rows",
    "render",
    "together",
    "unknown",
]


def __getattr__(name: str) -> typing.Any:
    """Load the proof on first use: few processes that import ficco need it."""
    if name not in ("PlanError", "check"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # By its name: the proof is above this room, and imports it.
    return getattr(importlib.import_module("ficco.proof"), name)
