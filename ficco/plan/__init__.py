"""Plans: their data model, their proof and their rendering."""

from ficco.plan.check import PlanError, check
from ficco.plan.launches import together
from ficco.plan.model import (
    SHARED_BUFFERS,
    Plan,
    Product,
    Reduction,
    Region,
    Signal,
    Step,
    Transfer,
)
from ficco.plan.render import render

__all__ = [
    "SHARED_BUFFERS",
    "Plan",
    "PlanError",
    "Product",
    "Reduction",
    "Region",
    "Signal",
    "Step",
    "Transfer",
    "check",
    "render",
    "together",
]
