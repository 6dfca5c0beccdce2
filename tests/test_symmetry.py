"""The proof of many ranks by that of one: what passes, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from test_hosts import changed, problem_of, served

from ficco.heuristics import problem_of_sizes
from ficco.plan import AsymmetryError, Plan, PlanError, Region, Step, check, check_symmetric
from ficco.problem import OPERATORS, Problem
from ficco.schedules import Schedule, plans

TOPOLOGIES = ((3, 2), (2, 4), (1, 4))

#: What depends on a rank's number: the sets of neighbours, on more than two hosts or where ranks
#: are no power of two; the direction of a ring; the order in which a kernel sums; how many rows are
#: rounded at once.
UNLIKE = {"growing", "shrinking", "ring", "one-shot", "hetero-fused-2d"}


def tried(prove: Callable[[Sequence[Plan]], None], found: Sequence[Plan]) -> type | None:
    try:
        prove(found)
    except PlanError as error:
        return type(error)
    return None


@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_of_equal_ranks_are_images_of_one(operator: str) -> None:
    for hosts, local in TOPOLOGIES:
        problem = problem_of(operator, hosts, local, "equal")
        for schedule in served(problem):
            found = plans(problem, schedule)
            verdict = tried(check_symmetric, found)
            base = str(schedule).partition(":")[0]
            refused = verdict is AsymmetryError and base in UNLIKE
            assert refused or verdict is None, (str(problem), str(schedule))


def test_unequal_ranks_are_refused_by_name() -> None:
    problem = problem_of("all_gather_matmul", 2, 2, "ragged")
    with pytest.raises(AsymmetryError, match="as many rows for every pair of ranks"):
        check_symmetric(plans(problem, Schedule.parse("serial")))
    found = plans(problem_of("all_gather_matmul", 2, 2, "equal"), Schedule.parse("serial"))
    with pytest.raises(AsymmetryError, match="is not that of rank 0"):
        check_symmetric(found[1:])
    with pytest.raises(AsymmetryError, match="rank 1: its plan has other words than rank 0's"):
        check_symmetric([found[0], replace(found[1], words=found[1].words + 1)])


CROSSING = problem_of("all_gather_matmul", 3, 2, "equal")
ROWS = CROSSING.rows[0]


def crossing() -> list[Plan]:
    return plans(CROSSING, Schedule.parse("shard-overlap:pieces=2"))


def first(steps: Sequence[Step], suits: Callable[[Step], object], nth: int = 0) -> int:
    return [i for i, step in enumerate(steps) if suits(step)][nth]


def _at_once(steps: list[Step]) -> None:
    one = first(steps, lambda step: step.op == "matmul" and step.after)
    steps[one] = steps[one]._replace(after=())


def _does_not_wait(steps: list[Step]) -> None:
    one = first(steps, lambda step: step.waits and step.op != "sync")
    gone = steps[one].waits[0]
    steps[one] = steps[one]._replace(waits=steps[one].waits[1:])
    end = first(steps, lambda step: gone in step.clears)
    steps[end] = steps[end]._replace(waits=(*steps[end].waits, gone))


def _on_another_lane(steps: list[Step]) -> None:
    one = first(steps, lambda step: step.label == "retire")
    steps[one] = steps[one]._replace(after=())


def _other_rows(steps: list[Step]) -> None:
    one = first(steps, lambda step: step.moves, -1)
    moves = []
    for move in steps[one].moves:
        ends = (end._replace(row=end.row - 1, row_stop=end.row_stop - 1) for end in move[:2])
        moves.append(move._replace(**dict(zip(("src", "dst"), ends, strict=True))))
    steps[one] = steps[one]._replace(moves=tuple(moves))


def _sends_in_another_order(steps: list[Step]) -> None:
    one, two = (first(steps, lambda step: step.moves, nth) for nth in (0, 2))
    steps[one], steps[two] = (
        steps[i]._replace(moves=(steps[i].moves[0], steps[j].moves[1]))
        for i, j in ((one, two), (two, one))
    )


def _copies_before_its_turn(steps: list[Step]) -> None:
    one = first(steps, lambda step: step.label == "acquire")
    assert steps[one + 1].op == "copy"
    steps[one], steps[one + 1] = steps[one + 1], steps[one]


def _clears_at_once(steps: list[Step]) -> None:
    """Words of signals, before they are waited for."""
    last = first(steps, lambda step: step.label == "retire")
    gone = steps[last].clears
    steps[last] = steps[last]._replace(clears=())
    one = first(steps, lambda step: step.label == "acquire")
    steps[one] = steps[one]._replace(clears=(*steps[one].clears, *gone))


def _in_one_place(steps: list[Step]) -> None:
    """All blocks, as if staging were used in turn."""

    def up(region: Region) -> Region:
        if region.buffer != "staging":
            return region
        row = region.row % ROWS
        return region._replace(row=row, row_stop=row + region.rows)

    for i, step in enumerate(steps):
        moves = [move._replace(src=up(move.src), dst=up(move.dst)) for move in step.moves]
        products = [one._replace(a=up(one.a)) for one in step.products]
        move = step.transfer
        move = move and move._replace(src=up(move.src), dst=up(move.dst))
        steps[i] = step._replace(moves=tuple(moves), products=tuple(products), transfer=move)


def _sends_late(steps: list[Step]) -> None:
    """Behind what waits for it at the receiver."""
    one = first(steps, lambda step: step.op == "copy" and step.posts)
    last = first(steps, lambda step: step.label == "retire")
    steps.insert(last, steps.pop(one))


MUTANTS = {
    "products that do not wait for the network": (_at_once, "read before|nobody has written"),
    "products that do not wait for a signal": (_does_not_wait, "may read before it is written"),
    "a slot that is handed on while it is used": (_on_another_lane, "may still use a slot|cleared"),
    "pieces of other rows": (_other_rows, "another block|rows|nobody has written"),
    "a slot that is used before it is handed over": (_copies_before_its_turn, "has not handed"),
    "words that are cleared early": (_clears_at_once, "cleared before it was waited for"),
    "blocks that share a place": (_in_one_place, "share row"),
    "pieces in another order than they are expected": (
        _sends_in_another_order,
        "sends other pieces than their receivers",
    ),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_plans_that_are_alike_and_wrong_are_caught(what: str) -> None:
    change, words = MUTANTS[what]
    found = crossing()
    wrong = [changed(plan, change) for plan in found]
    with pytest.raises(PlanError):
        check(wrong)
    with pytest.raises(PlanError, match=words):
        check_symmetric(wrong)


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("what", MUTANTS)
def test_a_plan_that_is_unlike_the_others_is_caught(what: str, rank: int) -> None:
    found = crossing()
    found[rank] = changed(found[rank], MUTANTS[what][0])
    with pytest.raises(PlanError):
        check_symmetric(found)


def test_what_only_other_ranks_can_see_is_caught() -> None:
    """A word, and rows of staging, that one rank takes for other ones than its peers."""
    found = plans(problem_of("all_gather_matmul", 2, 2, "equal"), Schedule.parse("shard-overlap"))

    def other_word(steps: list[Step]) -> None:
        one = first(steps, lambda step: step.op == "copy" and step.posts)
        (signal,) = steps[one].posts
        steps[one] = steps[one]._replace(posts=(signal._replace(word=signal.word + 1),))

    def other_place(steps: list[Step]) -> None:
        one = first(steps, lambda step: step.op == "copy" and step.posts)
        move = steps[one].transfer
        assert move is not None
        dst = move.dst._replace(row=move.dst.row - 1, row_stop=move.dst.row_stop - 1)
        steps[one] = steps[one]._replace(transfer=move._replace(dst=dst))

    for change, words in (
        (other_word, "is not the same for both its ranks"),
        (other_place, "takes another place for a block than other steps"),
    ):
        with pytest.raises(AsymmetryError, match=words):
            check_symmetric([*found[:3], changed(found[3], change)])


def test_plans_that_only_a_looser_order_serves_are_refused_by_name() -> None:
    problem = problem_of("all_gather_matmul", 1, 4, "equal")
    found = [changed(plan, _sends_late) for plan in plans(problem, Schedule.parse("serial"))]
    with pytest.raises(AsymmetryError, match="which is no earlier step"):
        check_symmetric(found)


def thousand(operator: str) -> Problem:
    return replace(problem_of_sizes(operator, 1 << 16, 512, 512, "bfloat16", 1024), hosts=128)


@pytest.mark.parametrize("operator", OPERATORS)
def test_1024_ranks_on_128_hosts_are_proven(operator: str) -> None:
    found = plans(thousand(operator), Schedule.parse("shard-overlap"), ranks=[0, 517])
    check_symmetric(found)
    one = first(found[1].steps, lambda step: step.moves, 99)

    def swaps(steps: list[Step]) -> None:
        steps[one], steps[one + 1] = steps[one + 1], steps[one]

    with pytest.raises(AsymmetryError, match="rank 517 step"):
        check_symmetric([found[0], changed(found[1], swaps)])
