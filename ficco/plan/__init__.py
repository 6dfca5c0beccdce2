"""Plans: their data model, their proof and their rendering."""

import typing

from ficco.plan.launches import together
from ficco.plan.model import (
    OPS,
    Applied,
    Attending,
    Plan,
    Planned,
    Product,
    Reduction,
    Region,
    Signal,
    Step,
    Transfer,
    aligned,
    unknown,
)
from ficco.plan.parts import in_parts, product_rows
from ficco.plan.render import render
from ficco.problems.specification import Buffer

__all__ = [
    "OPS",
    "Applied",
    "Attending",
    "Buffer",
    "Plan",
    "PlanError",
    "Planned",
    "Product",
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

if typing.TYPE_CHECKING:
    from ficco.plan.proof import PlanError, check
else:

    def __getattr__(name: str) -> object:
        """Load the proof on first use: few processes that import ficco need it."""
        if name not in ("PlanError", "check"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import ficco.plan.proof as proof

        return getattr(proof, name)
