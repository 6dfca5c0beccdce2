"""Plans: their data model, their proof and their rendering."""

from ficco.plan.check import AsymmetryError, PlanError, check, check_symmetric
from ficco.plan.launches import together
from ficco.plan.model import (
    OPS,
    Applied,
    Attending,
    LibraryCall,
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
from ficco.specification import Buffer

__all__ = [
    "OPS",
    "Applied",
    "AsymmetryError",
    "Attending",
    "Buffer",
    "LibraryCall",
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
    "check_symmetric",
    "in_parts",
    "product_rows",
    "render",
    "together",
    "unknown",
]
