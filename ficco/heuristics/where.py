"""The target of a decision or a simulation (machine, ranks, mode), and its memory limit."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ficco.errors import InvalidArgument
from ficco.heuristics.decide import described
from ficco.machine import Fingerprint, Machine, find, nearest
from ficco.plan.amounts import bytes_text
from ficco.problems.products import Problem

_KNOWN = "with --machine or FICCO_MACHINE"


@dataclass(frozen=True)
class Where:
    """The target of a decision or a simulation.

    Attributes:
        machine: the machine as in its file; None if no file describes it.
        world: number of ranks.
        mode: a mode of :func:`ficco.heuristics.decide`.
    """

    machine: Machine | None
    world: int
    mode: str

    @property
    def simulated(self) -> Machine:
        """The machine described for the number of ranks.

        Raises:
            ValueError: no machine is known, or its figures do not hold for the number of ranks.
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


def where(
    machine: Machine | str | os.PathLike[str] | None,
    world: int | None,
    here: Fingerprint | str,
    *,
    captured: bool = False,
) -> Where:
    """Find the machine, the number of ranks and the mode of calls.

    Args:
        machine: a machine, or its name or path.
        world: number of ranks; None: the ranks of the machine.
        here: fingerprint of this host, or the name of a machine to use instead.
        captured: calls are captured in graphs.

    Raises:
        ValueError: an argument is wrong, or neither ranks nor a machine are known.
        ConfigError: the machine does not exist, or its file is damaged.
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
            fingerprint = here if world is None else Fingerprint(here.accelerator, world)
            machine = find(name, fingerprint) or nearest(fingerprint)
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
    # A captured call does not wait for its host. On CPUs the caller executes the call.
    mode = "queued" if captured else "idle" if on_cpu else "eager"
    return Where(machine, world, mode)


def held_bytes(problem: Problem, rank: int, extra_bytes: int) -> int:
    """Bytes of a rank's operands and product, plus the extra bytes of its schedule in one slot."""
    buffers = *problem.specification.operands, problem.specification.results[0]
    return sum(buffer.nbytes(rank) for buffer in buffers) + extra_bytes


def too_large(problem: Problem, rank: int, extra_bytes: int, machine: Machine | None) -> str:
    """Why a call does not fit; empty if it does, or if the machine's memory is unknown."""
    held = held_bytes(problem, rank, extra_bytes)
    if machine is None or machine.memory is None or held <= machine.memory.capacity:
        return ""
    return (
        f"does not fit: rank {rank} would hold {bytes_text(held)} with operands and product, "
        f"{machine.name} has {bytes_text(machine.memory.capacity)}"
    )
