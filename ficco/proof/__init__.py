"""The proof that the Plans of all ranks together compute the product, in any interleaving.

The ranks' steps are executed symbolically, each rank's whole plan as one queue in enqueue order
(streams may share a hardware queue). If that completes, no interleaving of the lanes deadlocks
either, since lanes only relax the order. The execution is also a topological order of the steps,
along which the rules are checked. If a rule requires that two steps are in order, that is a claim,
which is proved for every interleaving by vector clocks over the lanes. The rules:

1. Every signal has one poster, one waiter and one word. Its waiter clears it, after the wait and
   before the word can be posted again.
2. Whatever is read was written before, by the right step, and is not overwritten while it may
   still be read. A rank accesses no memory of a peer that is not symmetric.
3. Every element of the product is written once, by products whose rows of A and of b belong
   together. Together they cover exactly once the dimension that is summed over: k or, if A is
   transposed, its rows, in any order. Partial sums are kept in a dtype that does not round them.
   If products of ranks are summed, all steps that touch a sum state whose products are in it. No
   product is in it twice, and in the end all are. A function of a library reads and makes whole
   rows: those, of the matrices, that the specification names together. What attention gives
   of several keys stays side by side, written in any order, and is read after all of it.
4. Calls compose: a rank touches the shared memory of a peer only after that peer has handed over
   its slot, and all who touch it do so before the peer hands the slot on. The previous and the next
   call, whatever they are, obey the same rule, so that no pair of calls needs a proof of its own.
   A peer's input is read only after that peer has begun this call.

The proof assumes two things about whoever runs a plan: its steps start after all steps of the
rank's previous call on the same slot, and work that the caller enqueues after the call starts
after all its steps.

Rows have two numberings. Where they leave (``a``, ``publish``, ``partial``) the number is that of
the buffer. Where they land (all other buffers) it is that of the row among those that the rank
gets, as in :meth:`Problem.lands`. A step that moves rows from the former to the latter takes them
from one block, and converts the numbers. Blocks that are summed have the same number everywhere,
that of the row of the product. Columns have the same number everywhere; a buffer may begin with a
later one (``Buffer.left``).

Steps are numbered consecutively, rank by rank. Regions, accesses and uses of signals are columns of
numbers, one array for each field: 64 ranks with 64 pieces make a million of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ficco.plan.collector import paused
from ficco.plan.model import Plan
from ficco.proof.accesses import Footprint
from ficco.proof.calls import call_claims
from ficco.proof.execution import execute, settle
from ficco.proof.memory import memory_claims
from ficco.proof.rules import PlanError
from ficco.proof.signals import SignalColumns
from ficco.proof.steps import Steps

__all__ = ["PlanError", "check"]


def check(plans: Sequence[Plan]) -> None:
    """Prove the Plans of all ranks of a Problem, or raise :class:`PlanError`."""
    with paused():
        _prove(plans)  # whose objects are gone when the collector comes back


def _prove(plans: Sequence[Plan]) -> None:
    steps = Steps(plans)
    signals = SignalColumns(steps)
    order = execute(steps, signals)
    footprint = Footprint(steps, signals)
    claims = memory_claims(footprint, order)
    claims += call_claims(steps, signals, footprint, order)
    claims += signals.claims()
    settle(claims, order)
