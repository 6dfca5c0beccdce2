"""Wrong plans over hosts: each breaks what a rule of the proof is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from edits import changed
from test_hosts import PIECES, crossing, network, problem_of
from test_hosts_attention import attention
from test_hosts_experts import layer_of

from ficco.plan import Crossing, Plan, Products, Region, Signal, Step
from ficco.proof import PlanError, check
from ficco.schedules import Schedule, plans
from ficco.schedules.attention import attention_plans
from ficco.schedules.experts import expert_plans

#: Of the steps of a rank.
Change = Callable[[list[Step], int], None]
SCATTER, IN_TWO = "hetero-unfused-1d:pieces=2,tail=2", Schedule.parse("shard-overlap:pieces=2")


def of_product(operator: str, schedule: str, local: int = 2) -> list[Plan]:
    return plans(problem_of(operator, 2, local, "equal"), Schedule.parse(schedule))


#: Right plans of two hosts.
PLANS: dict[str, Callable[[], list[Plan]]] = {
    "gather": lambda: of_product("all_gather_matmul", PIECES),
    "gather of two ranks": lambda: of_product("all_gather_matmul", "shard-overlap:pieces=2", 1),
    "scatter": lambda: of_product("matmul_reduce_scatter", SCATTER),
    "all-reduce": lambda: of_product("matmul_all_reduce", SCATTER),
    "gradients": lambda: attention_plans(attention(2, 2, 16).gradient(), IN_TWO),
    "experts": lambda: expert_plans(layer_of("experts", 2, 2), Schedule.parse("growing")),
}
KINDS: dict[str, Callable[[Step], Any]] = {
    "crosses": lambda step: step.op == "network",
    "crosses later": lambda step: step.op == "network" and step.after,
    "copies": lambda step: step.op == "copy" and not step.after,
    "passes on": lambda step: step.op == "copy" and step.after,
    "multiplies": lambda step: step.op == "matmul" and step.after,
    "sums": lambda step: step.op == "reduce",
}


def first(kind: str, **fields: Any) -> Change:
    """Sets fields of the first step of a kind, or changes them by functions."""

    def change(steps: list[Step], rank: int) -> None:
        index = next(i for i, step in enumerate(steps) if KINDS[kind](step))
        steps[index] = changed(steps[index], **fields)

    return change


def lower(region: Region, rows: int = 1) -> Region:
    return region._replace(row=region.row + rows, row_stop=region.row_stop + rows)


def without_one(reduction: Any) -> Any:
    return reduction._replace(parts=reduction.parts[1:], terms=reduction.terms[1:])


def swaps(steps: list[Step], rank: int) -> None:
    one, two = network(steps)[:2]
    steps[one], steps[two] = steps[two], steps[one]


def receives_first(steps: list[Step], rank: int) -> None:
    """And sends after all else."""
    for one in network(steps):
        step = steps[one]
        moves = crossing([step])
        received, sent = (
            Crossing(tuple(move for move in moves if move[end].rank == rank)) for end in (1, 0)
        )
        steps[one] = step._replace(work=received)
        steps.append(step._replace(work=sent))


def receives_in_turn(steps: list[Step], rank: int) -> None:
    """The second piece where the first one was, once that is multiplied: engines say at the
    beginning of a call what they expect, and no step of their own comes first."""
    one, two = network(steps)
    product, later = one + 2, one + 3
    assert (two, steps[product].after, steps[later].after) == (one + 1, (one,), (two,))
    before, after = (crossing([steps[i]]) for i in (one, two))
    rows = before[0].dst.rows
    moves = tuple(move._replace(dst=lower(move.dst, -rows)) for move in after)
    products = tuple(each._replace(a=lower(each.a, -rows)) for each in steps[later].products)
    send = steps[two]._replace(work=Crossing(moves), after=(two,))
    steps[two], steps[product] = steps[product], send
    steps[later] = steps[later]._replace(work=Products(products), after=(product,))


CHANGES: dict[str, Change] = {
    "sends less": first("crosses", moves=lambda moves: moves[1:]),
    "swaps": swaps,
    "passes on at once": first("passes on", after=()),
    "copies to another host": first("copies", dst={"rank": 2}),
    "signals another host": first("copies", posts=lambda posts: (posts[0]._replace(waiter=2),)),
    "copies by the network": first("copies", mover="network"),
    "sums at once": first("sums", waits=(), after=()),
    "sums less": first("sums", work=without_one),
    "sends before it sums": first("crosses later", after=()),
    "receives first": receives_first,
    "receives in turn": receives_in_turn,
}
UNWRITTEN = "read before it is written|nobody has written"
UNSUMMED = "products of other ranks than it says|never waited for"
#: Plans, the ranks that change, how, and what the proof says.
WRONG = [
    ("gather", (0,), "sends less", "rank 0 sends other pieces than rank 2 receives"),
    ("gather", (0,), "swaps", "rank 0 sends other pieces than rank 2 receives"),
    ("gather", (0,), "passes on at once", UNWRITTEN),
    ("gather", (0,), "copies to another host", "not symmetric, or elsewhere"),
    ("gather", (0,), "signals another host", "than it says|never|used twice|another host"),
    ("gather", (0,), "copies by the network", "does not move between hosts as a plan may"),
    ("gather", (0, 2), "receives first", "wait for each other in a circle|deadlock"),
    ("gather of two ranks", (0, 1), "receives in turn", "overwrites what may still be read"),
    ("scatter", (0,), "sums at once", f"never waited for|{UNWRITTEN}"),
    ("all-reduce", (0,), "sums less", UNSUMMED),
    ("gradients", (0,), "sends before it sums", UNWRITTEN),
    ("experts", (1,), "sends before it sums", UNWRITTEN),
]


@pytest.mark.parametrize(("name", "ranks", "change", "why"), WRONG)
def test_wrong_plans_are_found(name: str, ranks: Any, change: str, why: str) -> None:
    found = PLANS[name]()
    check(found)
    for rank in ranks:
        steps = list(found[rank].steps)
        CHANGES[change](steps, rank)
        found[rank] = replace(found[rank], steps=tuple(steps))
    with pytest.raises(PlanError, match=why):
        check(found)


def test_words_are_not_posted_to_another_host() -> None:
    """A signal that is right in all else: posted, waited for and cleared, in a word of its own."""
    found = [replace(plan, words=plan.words + 1) for plan in PLANS["gather"]()]
    check(found)
    signal = Signal("ready", 0, 2, 99, found[0].words - 1)
    post = Step(None, "network0", "tells", posts=(signal,))
    wait = Step(None, "network0", "hears", waits=(signal,), clears=(signal,))
    for rank, step in ((0, post), (2, wait)):
        found[rank] = replace(found[rank], steps=(*found[rank].steps, step))
    with pytest.raises(PlanError, match="is for a rank of another host"):
        check(found)
