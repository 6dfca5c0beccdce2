"""The machine, number of ranks and kind of call that something is decided or simulated for, and
whether a call fits there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ficco.errors import InvalidArgument
from ficco.heuristics.decide import described
from ficco.machine import Fingerprint, Machine, find, nearest
from ficco.plan.amounts import bytes_text
from ficco.problems.products import MOST_RANKS, OPERATORS, Problem
from ficco.problems.scaling import operands_of

_KNOWN = "with --machine or FICCO_MACHINE"


@dataclass(frozen=True)
class Where:
    """The machine, the ranks and the kind of call that something is decided or simulated for.

    Attributes:
        machine: as in its file; None if nobody described it.
        world: number of ranks.
        mode: as :func:`ficco.heuristics.decide` takes it.
    """

    machine: Machine | None
    world: int
    mode: str

    @property
    def simulated(self) -> Machine:
        """The machine as so many ranks see it.

        Raises:
            ValueError: no machine is known, or its figures do not hold for so many ranks.
        """
        if self.machine is None:
            raise InvalidArgument("machine", f"required one to simulate, {_KNOWN}, got none")
        machine = described(self.machine, self.world)
        if machine is None:
            raise InvalidArgument(
                "world",
                f"required {self.machine.ranks} ranks, got {self.world}: the figures of machine "
                f"{self.machine.name} hold for its own number of ranks only; `ficco tune --ranks "
                f"{self.world}` measures another",
            )
        return machine


def problem_of_sizes(
    operator: str,
    m: int,
    n: int,
    k: int,
    dtype: str,
    world: int,
    rows: Sequence[int] | Sequence[Sequence[int]] | None = None,
    hosts: int = 1,
) -> Problem:
    """The Problem of a call on so many ranks.

    Args:
        operator: name of the public operator.
        m: rows that a rank multiplies; where they differ, those of the rank with most.
        n, k: as :class:`Problem` has them.
        dtype: likewise, or a name of :data:`ficco.problems.scaling.SCALED`.
        world: number of ranks.
        rows: as the operators take it: rows of each rank, or the table of an all-to-all; None for
            as equal ones as there are.
        hosts: how many hosts the ranks are on.

    Raises:
        ValueError: an argument is wrong, or they do not fit together.
    """
    if operator not in OPERATORS:
        raise InvalidArgument(
            "operator", f"required one of {', '.join(OPERATORS)}, got {operator!r}"
        )
    if m < 0:
        raise InvalidArgument("m", f"required at least 0, got {m}")
    if world > MOST_RANKS:
        raise InvalidArgument("world", f"required at most {MOST_RANKS} ranks, got {world}")
    kind, ranks = OPERATORS[operator], range(world)
    dtype, scaling = operands_of(dtype)
    more: Any = {"scaling": scaling, "hosts": hosts}
    if rows is None:
        equal = tuple(m // world + (rank < m % world) for rank in ranks)
        if not kind.blocks:
            return Problem(operator, equal, n, k, dtype, **more)
        table = [equal] * world  # as many rows for each peer
        if not kind.scatters:
            table = list(zip(*table, strict=True))
        return Problem.of_blocks(operator, table, n, k, dtype, **more)
    if kind.returns:
        raise InvalidArgument(
            "rows", f"required none for {operator}, whose result is the same everywhere"
        )
    given = [list(one) if isinstance(one, Sequence) else one for one in rows]
    width = world if kind.blocks else None
    widths = [len(one) if isinstance(one, list) else None for one in given]
    if widths != [width] * world:
        numbers = f"a table of {world} x {world}" if kind.blocks else world
        raise InvalidArgument("rows", f"required {numbers} numbers, got {rows}")
    make: Any = Problem.of_blocks if kind.blocks else Problem
    sizes = given if kind.blocks else tuple(given), n, k, dtype
    problem: Problem = make(operator, *sizes, **more)
    if problem.m != m:
        most = "the largest sum" if kind.blocks else "the sum"
        raise InvalidArgument("rows", f"required {most} {m}, which is m, got {problem.m}")
    return problem


def where(
    machine: Machine | str | os.PathLike[str] | None,
    world: int | None,
    here: Fingerprint | str,
    *,
    captured: bool = False,
) -> Where:
    """Find the machine, and how calls are made on it.

    Args:
        machine: one, or the name or path of one.
        world: number of ranks; None for those of the machine.
        here: what this host is known by, or the name of the machine to take in its place.
        captured: calls are captured in graphs.

    Raises:
        ValueError: an argument is wrong, or neither ranks nor a machine are known.
        ConfigError: there is no such machine, or its file is damaged.
    """
    if not (machine is None or isinstance(machine, (Machine, str, os.PathLike))):
        raise InvalidArgument(
            "machine", f"required a Machine, a name, a path or None, got {machine!r}"
        )
    if world is not None and world < 1:
        raise InvalidArgument("world", f"required world >= 1, got {world}")
    if not isinstance(machine, Machine):
        name = None if machine is None else os.fspath(machine)
        if isinstance(here, str):
            machine = find(name, None) or find(here, None)
        else:
            asked = here if world is None else Fingerprint(here.accelerator, world)
            machine = find(name, asked) or nearest(asked)
    accelerator = here if isinstance(here, str) else here.accelerator
    if world is None:
        if machine is None:
            raise InvalidArgument(
                "world",
                f"required the number of ranks, or a machine {_KNOWN}, since nobody described "
                f"{accelerator}; got none",
            )
        world = machine.ranks
    on_cpu = (accelerator if machine is None else machine.accelerator) == "cpu"
    # A captured call does not wait for its host; on CPUs the caller carries the call out.
    mode = "queued" if captured else "idle" if on_cpu else "eager"
    return Where(machine, world, mode)


def held_bytes(problem: Problem, rank: int, extra_bytes: int) -> int:
    """Bytes of a rank's operands and product, and of what its schedule adds to them in one slot."""
    asked = problem.specification
    return sum(one.nbytes(rank) for one in (*asked.operands, asked.results[0])) + extra_bytes


def too_large(problem: Problem, rank: int, extra_bytes: int, machine: Machine | None) -> str:
    """Why a call does not fit; empty if it does, or if the machine's memory is unknown."""
    held = held_bytes(problem, rank, extra_bytes)
    if machine is None or machine.memory is None or held <= machine.memory.capacity:
        return ""
    return (
        f"does not fit: rank {rank} would hold {bytes_text(held)} with operands and product, "
        f"{machine.name} has {bytes_text(machine.memory.capacity)}"
    )
