"""Losses of a schedule by decomposition and by contention (FiCCO, section IV).

The decomposition inefficiency loss (DIL) of a product is the total time of its parts, run one by
one with no other work, over the time of the undivided product. The DIL of communication is defined
likewise. The contention inefficiency loss (CIL) is the time of a call over its time if copies and
products did not slow each other down. All are predicted from a machine's figures; 1.0 is no loss.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import inf

from ficco.heuristics.candidates import on_mesh, suited
from ficco.heuristics.model import Predict
from ficco.machine import Contention, Copies, Machine
from ficco.plan import Plan
from ficco.problems.products import Problem
from ficco.schedules import Schedule, plan


@dataclass(frozen=True)
class Losses:
    """The inefficiency signature of a schedule, as factors.

    Attributes:
        gemm: decomposition loss of the product.
        copies: decomposition loss of the communication; 1.0 for the vendor's collective.
        contention: contention loss of the call.
    """

    gemm: float
    copies: float
    contention: float


def losses(problem: Problem, schedule: Schedule, machine: Machine, predict: Predict) -> Losses:
    """The signature of a schedule; ``predict`` returns the seconds of a call."""
    rank0 = plan(problem, schedule, 0)
    contended = predict(problem, schedule, machine, "queued")
    assert machine.contention is not None
    no_contention = Contention(1.0, 1.0, 1.0, 1.0, machine.contention.provenance)
    free = predict(problem, schedule, replace(machine, contention=no_contention), "queued")
    return Losses(gemm_loss(problem, rank0, machine), copy_loss(rank0, machine), contended / free)


def gemm_loss(problem: Problem, plan: Plan, machine: Machine) -> float:
    """DIL of the products of one rank: the time of its parts over the time of the undivided
    product; 1.0 if the rank has no rows."""
    gemm = machine.products(problem)
    assert gemm is not None
    rows = problem.product_rows(plan.rank)
    whole = gemm.seconds(rows, problem.n, problem.k, itemsize=problem.itemsize)
    if not whole:
        return 1.0
    products = [product for step in plan.steps for product in step.products]
    parts = sum(  # scaled products run one by one: no library has batches of them
        (p.batch if p.factors else 1)
        * gemm.seconds(
            p.out.rows,
            p.out.cols,
            p.b.rows,
            batch=1 if p.factors else p.batch,
            itemsize=problem.itemsize,
            wide=plan.wide(p),
            adds=not plan.wide(p) and (p.accumulate or p.addend is not None),
        )
        for p in products
    )
    return (parts + gemm.launch * (len(products) - 1)) / whole


def copy_loss(plan: Plan, machine: Machine) -> float:
    """DIL of the copies of one rank: the time of its pieces over the time of undivided shards or
    blocks. On a mesh every peer has a separate link, so the slowest peer counts."""
    spent: dict[int, float] = defaultdict(float)
    whole: dict[int, float] = defaultdict(float)
    sizes: dict[tuple[int, int], int] = defaultdict(int)  # of a shard or block to or from a peer
    for step in plan.steps:
        if step.op != "copy" or step.transfer is None:
            continue
        src, dst, terms = step.transfer.src, step.transfer.dst, step.transfer.terms
        peer = dst.rank if src.rank == plan.rank else src.rank
        nbytes = plan.nbytes(src)
        spent[peer] += copy_seconds(nbytes, _copies(step.mover, machine))
        sizes[peer, terms] += nbytes
    for (peer, _), size in sizes.items():
        whole[peer] += copy_seconds(size, _copies("dma", machine))
    if not spent:
        return 1.0
    total = max if on_mesh(machine) else sum
    return float(total(spent.values()) / total(whole.values()))


def _copies(mover: str, machine: Machine) -> Copies:
    copies = machine.kernel_copies if mover == "kernel" else machine.copies
    assert copies is not None
    return copies


def copy_seconds(nbytes: float, copies: Copies) -> float:
    """Seconds that a copy occupies its queue."""
    return copies.gap + nbytes / copies.rate(nbytes) if nbytes else 0.0


def bounds(problem: Problem, machine: Machine, predict: Predict, mode: str) -> dict[str, float]:
    """Seconds of each part of a call by itself: ``"gemm"``, the undivided product; ``"copies"``,
    the transfers by copy engines; ``"collective"``, the transfers by the vendor's collective, if
    the machine has its figures. Sums and placement after the copies do not count, nor does a cast
    before them."""
    problem = replace(problem.given, transposed=False)  # it moves the same bytes
    operator = "all_gather_transposed_matmul" if problem.kind.inner else "all_gather_matmul"
    sizes = problem.n, problem.k, problem.dtype
    product = Problem(operator, (problem.m,), *sizes, scaling=problem.scaling)
    seconds = {"gemm": predict(product, Schedule.parse("serial"), machine, mode)}
    transfers = replace(problem, k=0) if problem.kind.scatters else replace(problem, n=0)
    free = machine
    if machine.memory is not None and problem.kind.scatters:
        free = replace(machine, memory=replace(machine.memory, bandwidth=inf, latency=0.0))
    by_copies = suited(Schedule.parse("shard-overlap"), problem, machine)
    seconds["copies"] = predict(transfers, by_copies, free, mode)
    if machine.all_gather is not None:
        by_library = Schedule.parse("serial:collective")
        seconds["collective"] = predict(transfers, by_library, machine, mode)
    return seconds
