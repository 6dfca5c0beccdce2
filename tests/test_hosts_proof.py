"""Wrong plans over hosts: each violates a rule of the proof."""

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


#: Correct plans for two hosts.
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
    """Move the sends of the rank to the end of its plan."""

    def edit(steps: list[Step]) -> None:
        for index in network(steps):
            step = steps[index]
            moves = crossing([step])
            ends = ([move for move in moves if move[end].rank == rank] for end in (1, 0))
            received, sent = (Crossing(tuple(part)) for part in ends)
            steps[index] = step._replace(work=received)
            steps.append(step._replace(work=sent))

    return edit


def receives_in_turn(steps: list[Step]) -> None:
    """Receive the second piece in the place of the first, after its product. Engines post receives
    at the beginning of a call, so a receive cannot follow a step of its own rank."""
    first, second = network(steps)
    product, later = first + 2, first + 3
    assert (second, steps[product].after, steps[later].after) == (first + 1, (first,), (second,))
    before, after = (crossing([steps[i]]) for i in (first, second))
    rows = before[0].dst.rows
    moves = tuple(move._replace(dst=down(-rows)(move.dst)) for move in after)
    products = tuple(item._replace(a=down(-rows)(item.a)) for item in steps[later].products)
    send = steps[second]._replace(work=Crossing(moves), after=(second,))
    steps[second], steps[product] = steps[product], send
    steps[later] = steps[later]._replace(work=Products(products), after=(product,))


UNWRITTEN = "read before it is written|nobody has written"
OTHER_PIECES = "rank 0 sends other pieces than rank 2 receives"
UNSUMMED = "products of other ranks than it says|never waited for"
#: Plans, edits by rank, and the error of the proof.
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


@pytest.mark.parametrize(("name", "edits", "reason"), WRONG)
def test_wrong_plans_are_rejected(name: str, edits: dict[int, Edit], reason: str) -> None:
    edited_plans = PLANS[name]()
    check(edited_plans)
    for rank, edit in edits.items():
        edited_plans = edited(edited_plans, rank, edit)
    refused(edited_plans, reason)


def test_signals_to_another_host_are_refused() -> None:
    """The signal is correct otherwise: posted, waited for and cleared, in a word of its own."""
    extended = [replace(plan, words=plan.words + 1) for plan in PLANS["gather"]()]
    check(extended)
    signal = Signal("ready", 0, 2, 99, extended[0].words - 1)
    post = Step(None, "network0", "post", posts=(signal,))
    wait = Step(None, "network0", "wait", waits=(signal,), clears=(signal,))
    for rank, step in ((0, post), (2, wait)):
        extended[rank] = replace(extended[rank], steps=(*extended[rank].steps, step))
    refused(extended, "is for a rank of another host")
