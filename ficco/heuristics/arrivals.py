"""Bytes that a rank receives, and the least time of their transfers."""

from __future__ import annotations

from collections.abc import Sequence

from ficco.machine import Machine
from ficco.plan import Plan
from ficco.problems.specification import AnyProblem

#: Bytes from each peer. Transfers from all peers may run at the same time.
Received = Sequence[int]


def crossing(machine: Machine, nbytes: int) -> float:
    """Seconds that a copy between ranks occupies its lane."""
    assert machine.copies is not None and machine.topology is not None
    rate = min(machine.copies.rate(nbytes), machine.topology.bandwidth)
    return machine.copies.gap + nbytes / rate


def last_arrival(stages: Sequence[Received], machine: Machine) -> float:
    """Seconds until a rank has received all stages, one after the other, if it need not wait for
    computation. A stage is one copy per peer, over one port or over a link from each peer."""
    assert machine.copies is not None and machine.topology is not None
    together = sum if machine.topology.kind == "switch" else max
    return sum(
        machine.copies.latency
        + together([crossing(machine, size) - machine.copies.gap for size in sizes])
        for sizes in stages
    )


def crossed(plan: Plan, machine: Machine) -> float:
    """Seconds until a rank has received its Plan's messages from other hosts, one by one."""
    moves = [move for step in plan.steps for move in step.moves if move.dst.rank == plan.rank]
    if not moves:
        return 0.0
    network = machine.network
    assert network is not None
    nbytes = sum(map(plan.moved_bytes, moves))
    return network.latency + nbytes * network.sharing / network.bandwidth


def received(problem: AnyProblem, rank: int) -> list[Received]:
    """Bytes that a rank receives according to the specification, in up to two stages: matrices of
    the callers, then matrices computed from them."""
    specification, stages = problem.specification, list[Received]()
    peers = [peer for peer in range(problem.world) if peer != rank]
    operands = {buffer.holds for buffer in specification.operands}
    # The first buffer of a matrix counts: copies that are kept for a gradient are listed later.
    buffers = (*specification.operands, *specification.results)
    buffer_of = {buffer.holds: buffer for buffer in reversed(buffers)}
    for of_operands in (True, False):
        sizes = [0] * len(peers)
        for matrix, exchange in specification.exchanges.items():
            if (matrix in operands) is of_operands:
                buffer = buffer_of[matrix]
                row_bytes = buffer.shapes[rank][1] * buffer.itemsize
                for i, peer in enumerate(peers):
                    sizes[i] += exchange.block(peer, rank) * exchange.parts * row_bytes
        if any(sizes):
            stages.append(sizes)
    return stages
