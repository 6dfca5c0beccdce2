"""Whether one rank stands for all, which one, and whether a host delays all steps alike: facts of
the arguments of a prediction."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ficco.machine import Machine
from ficco.problems.products import OPERATORS, Problem
from ficco.schedules import Schedule, plan
from ficco.schedules.groups import GRANULE, cut


class Mirror(NamedTuple):
    """How one rank stands for all: whether ranks go through their peers as ``rank - i``, and not as
    ``rank ^ i`` (see groups in ficco.schedules)."""

    subtracts: bool


def mirrored(problem: Problem, schedule: Schedule, machine: Machine, mode: str) -> Mirror | None:
    """How one rank stands for all; None where it does not, and all are to be simulated: ranks do
    not do the same, seen from each, or meet at the ports of their peers because they are out of
    step (they begin one after the other, or send products that differ)."""
    subtracts = schedule.grouping == "ring" or problem.local_world.bit_count() > 1
    # The neighbourhoods of these groups are alike for powers of two only.
    neighbourly = schedule.grouping in ("growing", "shrinking")
    whole = subtracts or problem.hosts > 1
    if schedule.own or not problem.equal or (whole and neighbourly):
        return None
    if machine.topology is not None and machine.topology.kind == "switch":
        skewed = mode == "idle" and machine.host is not None and machine.host.skew > 0
        differ = problem.kind.scatters and problem.world > 2 and _split_by_own(schedule)
        if (skewed or differ) and schedule.mover != "collective":
            return None
    return Mirror(subtracts)


def _split_by_own(schedule: Schedule) -> bool:
    """Whether steps have pieces of all peers and not the own one: their products fall in two at
    another place on every rank."""
    return schedule.grouping == "fused" and not schedule.uniform


def slowest(problem: Problem, schedule: Schedule, machine: Machine) -> list[int]:
    """Ranks that can be the last, of those that do the same but for the own shard's place.

    They have the longest products in all, or after the last copy.
    """
    world, gemm, kind = problem.world, machine.products(problem), problem.kind
    if not _split_by_own(schedule) or world < 3 or gemm is None:
        return [0]
    lengths = _lengths(problem, schedule)
    if not (problem.block(0, 1) and lengths):
        return [0]
    accumulated = not (schedule.dims == 1 or kind.scatters)
    in_all: list[float] = []
    after_last: list[float] = []
    parts_of = _parts(problem.operator, world, schedule.dims, min(len(lengths), 2))
    for rank, parts in enumerate(parts_of):
        seconds = {
            length: sum(
                gemm.launch
                + gemm.seconds(
                    *_sizes(problem, schedule.dims, shards, length),
                    batch=batch,
                    itemsize=problem.itemsize,
                    wide=accumulated or kind.inner,
                )
                for shards, batch in parts
            )
            for length in dict.fromkeys(lengths)
        }
        in_all.append(sum(seconds[length] for length in lengths))
        # The sums are rounded before and after the own shard's.
        rounded = accumulated and not kind.inner and machine.memory and 0 < rank < world - 1
        latency = machine.memory.latency if rounded and machine.memory else 0.0
        after_last.append(seconds[lengths[-1]] + latency)
    return sorted({times.index(max(times)) for times in (in_all, after_last)})


def _lengths(problem: Problem, schedule: Schedule) -> list[int]:
    """Of the pieces of a shard, or of a block that travels, in the order of their steps."""
    scatters = problem.kind.scatters
    whole = problem.n if scatters else problem.k
    if schedule.dims == 1:
        whole = problem.block(0, 1)
    pieces = cut(whole, schedule.pieces or problem.world)
    if pieces and not scatters:
        start, stop = pieces[-1]
        pieces[-1:] = cut(stop - start, schedule.tail)
    return [stop - start for start, stop in pieces]


def _sizes(problem: Problem, dims: int, shards: int, length: int) -> tuple[int, int, int]:
    """m, n and k of a product of one piece of ``shards`` shards."""
    rows, n, k = shards * problem.block(0, 1), problem.n, problem.k
    if problem.kind.inner:
        return (k, n, shards * length) if dims == 1 else (length, n, rows)
    if dims == 1:
        return shards * length, n, k
    return (rows, length, k) if problem.kind.scatters else (rows, n, length)


@lru_cache(maxsize=256)
def _parts(
    operator: str, world: int, dims: int, pieces: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Of each rank: the products of a fused step, as shards side by side and length of the batch.

    Read from plans of a small problem, since sizes do not matter.
    """
    rows = GRANULE * (pieces if dims == 1 else 1)
    cols = GRANULE * pieces
    if OPERATORS[operator].blocks:
        table = [(rows,) * world] * world
        problem = Problem.of_blocks(operator, table, cols, cols, "float32")
    else:
        problem = Problem(operator, (rows,) * world, cols, cols, "float32")
    schedule = Schedule(uniform=False, grouping="fused", dims=dims, pieces=pieces)
    parts = []
    for rank in range(world):
        steps = plan(problem, schedule, rank).steps
        fused = (one for one in steps if one.products and (one.waits or one.label != "own"))
        parts.append(tuple((p.a.rows // GRANULE, p.batch) for p in next(fused).products))
    return tuple(parts)


def delay_of_host(problem: Problem, schedule: Schedule, machine: Machine) -> float | None:
    """Seconds by which a host delays all steps of a call alike, as one that replays recorded calls
    does; None if it delays them differently."""
    host = machine.host
    if host is None or host.matmul or host.copy or host.signal or host.skew:
        return None
    if problem.hosts > 1 or schedule.grouping == "tiled":
        return None
    return host.collective_call if schedule.mover == "collective" else host.call
