"""The proof that the Plans of all ranks together compute the product, in any interleaving.

The proof runs the ranks' steps symbolically, each rank's plan as one queue in enqueue order, since
streams may share a hardware queue. If this run completes, no interleaving of the lanes deadlocks,
because lanes only relax the order. The run is a topological order of the steps, along which the
rules are checked. A rule that needs two steps in order makes a claim, and vector clocks over the
lanes prove the claim for every interleaving. The rules:

1. Every signal has one poster, one waiter and one word. Its waiter clears it, after the wait and
   before the word can be posted again.
2. Every read follows a write by the right step, and nothing overwrites data that may still be
   read. A rank accesses a peer's memory only if it is symmetric.
3. Every element of the result is written once, by products with matching rows of A and b. The
   products cover the summed dimension exactly once: k or, if A is transposed, A's rows, in any
   order. Partial sums have a dtype that does not round them. If products of several ranks are
   summed, each step that touches a sum states the ranks in it. No rank is in a sum twice, and all
   ranks are in the final sum. A library function reads and writes whole rows of the matrices, as
   the specification relates them. Parts of attention are written in any order, are kept
   separately, and are read after the last of them.
4. Calls compose: a rank touches the shared memory of a peer only after the peer has handed over its
   slot, and before the peer hands the slot on. The previous and the next call obey the same rule,
   so no pair of calls needs a proof. A rank reads a peer's operand, or writes a peer's result, only
   after the peer has begun this call. The peer's caller waits for the write.

The proof assumes two things about the engine: the steps of a call start after all steps of the
rank's previous call on the same slot, and work that the caller enqueues after the call starts after
all steps of the call.

Rows have two numberings. In buffers that rows leave (``a``, ``publish``, ``partial``) a row has its
number in the buffer. In all other buffers, where rows land, a row has its number among the rows
that the rank receives, as in :meth:`Problem.lands`. A step that moves rows from the first kind of
buffer to the second takes them from one block, and converts the numbers. Rows of summed blocks have
the same number everywhere: that of the row of the product. Columns have the same number everywhere;
the first column of a buffer may be a later one (``Buffer.left``).

Steps are numbered consecutively, rank by rank. Regions, accesses and uses of signals are columns of
numbers, with one array for each field: 64 ranks with 64 pieces have a million of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ficco.plan.model import Plan, paused
from ficco.proof.accesses import Footprint
from ficco.proof.columns import PlanError
from ficco.proof.memory import call_claims, memory_claims
from ficco.proof.order import SignalColumns, order_steps, settle
from ficco.proof.steps import Steps

__all__ = ["PlanError", "check"]


#: Most elements of a matrix: with them, all numbers of a proof fit into 64 bits.
MOST_ELEMENTS = 1 << 48


def check(plans: Sequence[Plan]) -> None:
    """Prove the Plans of all ranks of a Problem, or raise :class:`PlanError`.

    Raises:
        ValueError: a matrix has more than 2**48 elements.
    """
    for buffer in plans[0].buffers if plans else ():
        for rows, cols in buffer.shapes:
            if rows * cols > MOST_ELEMENTS:
                raise ValueError(
                    f"{buffer.name}: required at most {MOST_ELEMENTS} elements of a matrix, got "
                    f"{rows} x {cols}"
                )
    with paused():
        _prove(plans)  # returns before the collector runs again, so that it sees no objects


def _prove(plans: Sequence[Plan]) -> None:
    steps = Steps(plans)
    signals = SignalColumns(steps)
    order = order_steps(steps, signals)
    footprint = Footprint(steps, signals)
    claims = memory_claims(footprint, order)
    claims += call_claims(steps, signals, footprint, order)
    claims += signals.claims()
    settle(claims, order)
