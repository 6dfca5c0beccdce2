"""What a rank receives, and how soon a link can bring it."""

from __future__ import annotations

from collections.abc import Sequence

from ficco.machine import Machine
from ficco.plan import Plan
from ficco.problems.specification import AnyProblem

#: Bytes from each other rank, that all may travel at the same time.
Received = Sequence[int]


def crossing(machine: Machine, nbytes: int) -> float:
    """Seconds for which a copy between ranks occupies its lane."""
    assert machine.copies is not None and machine.topology is not None
    rate = min(machine.copies.rate(nbytes), machine.topology.bandwidth)
    return machine.copies.gap + nbytes / rate


def last_arrival(stages: Sequence[Received], machine: Machine) -> float:
    """Seconds in which a rank receives what it gets in one stage after the other, one copy from
    each peer, if nothing has to be computed before: over one port, or a link from each."""
    assert machine.copies is not None and machine.topology is not None
    together = sum if machine.topology.kind == "switch" else max
    return sum(
        machine.copies.latency
        + together([crossing(machine, size) - machine.copies.gap for size in sizes])
        for sizes in stages
    )


def crossed(plan: Plan, machine: Machine) -> float:
    """Seconds in which a rank receives what its Plan brings from other hosts, one message after the
    other."""
    moves = [move for step in plan.steps for move in step.moves if move.dst.rank == plan.rank]
    if not moves:
        return 0.0
    network = machine.network
    assert network is not None
    nbytes = sum(map(plan.moved_bytes, moves))
    return network.latency + nbytes * network.sharing / network.bandwidth


def received(problem: AnyProblem, rank: int) -> list[Received]:
    """What a problem moves to a rank according to its specification: what the callers hold, then
    what is made of it."""
    asked, stages = problem.specification, list[Received]()
    peers = [peer for peer in range(problem.world) if peer != rank]
    held = {buffer.holds for buffer in asked.operands}
    # What is kept of a matrix comes after what the caller has or gets of it.
    buffer_of = {one.holds: one for one in reversed((*asked.operands, *asked.results))}
    for given in (True, False):
        sizes = [0] * len(peers)
        for matrix, moved in asked.exchanges.items():
            if (matrix in held) is given:
                buffer = buffer_of[matrix]
                row_bytes = buffer.shapes[rank][1] * buffer.itemsize
                for i, peer in enumerate(peers):
                    sizes[i] += moved.block(peer, rank) * moved.parts * row_bytes
        if any(sizes):
            stages.append(sizes)
    return stages
