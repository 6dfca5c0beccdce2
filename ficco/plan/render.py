"""A Plan as text."""

from __future__ import annotations

from ficco.plan.model import Plan


def render(plan: Plan) -> str:
    """stub"""
    return str(plan)
