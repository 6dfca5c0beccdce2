"""Whether a call fits into a machine's memory."""

from __future__ import annotations

from ficco.amounts import bytes_text
from ficco.machine import Machine
from ficco.problem import Problem


def held_bytes(problem: Problem, rank: int, extra_bytes: int) -> int:
    """Bytes of a rank's operands and product, and of what its schedule adds to them in one slot."""
    left, out = problem.left_rows(rank), problem.out_rows(rank)
    elements = left * problem.k + (problem.b_rows(rank) + out) * problem.n
    return elements * problem.itemsize + extra_bytes


def too_large(problem: Problem, rank: int, extra_bytes: int, machine: Machine | None) -> str:
    """Why a call does not fit; empty if it does, or if the machine's memory is unknown."""
    held = held_bytes(problem, rank, extra_bytes)
    if machine is None or machine.memory is None or held <= machine.memory.capacity:
        return ""
    return (
        f"does not fit: rank {rank} would hold {bytes_text(held)} with operands and product, "
        f"{machine.name} has {bytes_text(machine.memory.capacity)}"
    )
