"""Wrong plans over hosts: each breaks what a rule of the proof is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from edits import Edit, change, down, edited, is_copy, refused, sums, swap, without_first
from test_attention import problem_of as attention
from test_hosts import PIECES, crossing, network, problem_of
from test_hosts_experts import layer_of

from ficco.plan import Crossing, Plan, Products, Signal, Step
from ficco.proof import check
from ficco.schedules import Schedule, plans
from ficco.schedules.attention import attention_plans
from ficco.schedules.experts import expert_plans

SCATTER, IN_TWO = "hetero-unfused-1d:pieces=2,tail=2", Schedule.parse("shard-overlap:pieces=2")


def of_product(operator: str, schedule: str, local: int = 2) -> list[Plan]:
    return plans(problem_of(operator, 2, local, "equal"), Schedule.parse(schedule))


#: Right plans of two hosts.
PLANS: dict[str, Callable[[], list[Plan]]] = {
    "gather": lambda: of_product("all_gather_matmul", PIECES),
    "gather of two ranks": lambda: of_product("all_gather_matmul", "shard-overlap:pieces=2", 1),
    "scatter": lambda: of_product("matmul_reduce_scatter", SCATTER),
    "all-reduce": lambda: of_product("matmul_all_reduce", SCATTER),
    "gradients": lambda: attention_plans(attention(4, 16, hosts=2).gradient(), IN_TWO),
    "experts": lambda: expert_plans(layer_of("experts", 2, 2), Schedule.parse("growing")),
}


def crosses(step: Step) -> bool:
    return step.op == "network"


def crosses_later(step: Step) -> bool:
    return crosses(step) and bool(step.after)


def copies(step: Step) -> bool:
    return is_copy(step) and not step.after


def passes_on(step: Step) -> bool:
    return is_copy(step) and bool(step.after)


def receives_first(rank: int) -> Edit:
    """The rank sends after all else."""

    def edit(steps: list[Step]) -> None:
        for one in network(steps):
            step = steps[one]
            moves = crossing([step])
            received, sent = (
                Crossing(tuple(move for move in moves if move[end].rank == rank)) for end in (1, 0)
            )
            steps[one] = step._replace(work=received)
            steps.append(step._replace(work=sent))

    return edit


def receives_in_turn(steps: list[Step]) -> None:
    """The second piece where the first one was, once that is multiplied: engines say at the
    beginning of a call what they expect, and no step of their own comes first."""
    one, two = network(steps)
    product, later = one + 2, one + 3
    assert (two, steps[product].after, steps[later].after) == (one + 1, (one,), (two,))
    before, after = (crossing([steps[i]]) for i in (one, two))
    rows = before[0].dst.rows
    moves = tuple(move._replace(dst=down(-rows)(move.dst)) for move in after)
    products = tuple(each._replace(a=down(-rows)(each.a)) for each in steps[later].products)
    send = steps[two]._replace(work=Crossing(moves), after=(two,))
    steps[two], steps[product] = steps[product], send
    steps[later] = steps[later]._replace(work=Products(products), after=(product,))


UNWRITTEN = "read before it is written|nobody has written"
OTHER_PIECES = "rank 0 sends other pieces than rank 2 receives"
UNSUMMED = "products of other ranks than it says|never waited for"
#: Plans, edits by rank, and what the proof says.
WRONG: list[tuple[str, dict[int, Edit], str]] = [
    ("gather", {0: change(crosses, moves=without_first)}, OTHER_PIECES),
    ("gather", {0: swap(crosses, "moves")}, OTHER_PIECES),
    ("gather", {0: change(passes_on, after=())}, UNWRITTEN),
    ("gather", {0: change(copies, dst={"rank": 2})}, "not symmetric, or elsewhere"),
    (
        *("gather", {0: change(copies, posts=lambda posts: (posts[0]._replace(waiter=2),))}),
        "than it says|never|used twice|another host",
    ),
    ("gather", {0: change(copies, mover="network")}, "does not move between hosts as a plan may"),
    ("gather", {rank: receives_first(rank) for rank in (0, 2)}, "in a circle|deadlock"),
    ("gather of two ranks", dict.fromkeys((0, 1), receives_in_turn), "overwrites what may still"),
    ("scatter", {0: change(sums, waits=(), after=())}, f"never waited for|{UNWRITTEN}"),
    ("all-reduce", {0: change(sums, parts=without_first, terms=without_first)}, UNSUMMED),
    ("gradients", {0: change(crosses_later, after=())}, UNWRITTEN),
    ("experts", {1: change(crosses_later, after=())}, UNWRITTEN),
]


@pytest.mark.parametrize(("name", "edits", "why"), WRONG)
def test_wrong_plans_are_found(name: str, edits: dict[int, Edit], why: str) -> None:
    found = PLANS[name]()
    check(found)
    for rank, edit in edits.items():
        found = edited(found, rank, edit)
    refused(found, why)


def test_words_are_not_posted_to_another_host() -> None:
    """A signal that is right in all else: posted, waited for and cleared, in a word of its own."""
    found = [replace(plan, words=plan.words + 1) for plan in PLANS["gather"]()]
    check(found)
    signal = Signal("ready", 0, 2, 99, found[0].words - 1)
    post = Step(None, "network0", "tells", posts=(signal,))
    wait = Step(None, "network0", "hears", waits=(signal,), clears=(signal,))
    for rank, step in ((0, post), (2, wait)):
        found[rank] = replace(found[rank], steps=(*found[rank].steps, step))
    refused(found, "is for a rank of another host")
