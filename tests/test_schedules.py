"""The names of schedules, how shards are cut and ordered, and the timelines in the docstrings."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficco.plan import check, render
from ficco.problem import Problem
from ficco.schedules import NAMED, Schedule, plan, plans
from ficco.schedules.groups import Arrivals, cut, peers_in_order, siblings

PIECES = st.one_of(
    st.integers(0, 9), st.lists(st.integers(1, 9), min_size=2, max_size=5).map(tuple)
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    base = NAMED[draw(st.sampled_from(list(NAMED)))]
    return Schedule(
        uniform=base.uniform,
        grouping=base.grouping,
        dims=base.dims,
        pieces=draw(PIECES),
        tail=draw(st.integers(1, 4)),
        order=draw(st.sampled_from(["piece", "peer"])),
        pull=draw(st.booleans()),
        mover=draw(st.sampled_from(["dma", "kernel"])),
        copy=draw(st.integers(1, 3)),
        compute=draw(st.integers(1, 3)),
    )


@given(schedules())
def test_what_was_printed_parses_to_the_same_schedule(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("name", [*NAMED, "serial:collective"])
def test_names_print_as_they_are_written(name: str) -> None:
    assert str(Schedule.parse(name)) == name


def test_knobs_print_in_a_fixed_order() -> None:
    written = "hetero-fused-1d:compute=2,pull,copy=3,pieces=4"
    assert str(Schedule.parse(written)) == "hetero-fused-1d:pieces=4,pull,copy=3,compute=2"
    assert Schedule.parse("uniform-fused-1d:pieces=1") == Schedule.parse("serial")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fastest", "required one of serial"),
        ("growing:pieces", "not a knob"),
        ("growing:pieces=0", "positive.* got 0$"),
        ("growing:pieces=4+0", "positive"),
        ("growing:tail=0", "at least 1"),
        ("growing:copy=0", "at least 1"),
        ("growing:order=any", "not a knob"),
        ("growing:pull,pull", "given twice"),
        ("growing:speed=9", "knobs are"),
        ("growing:collective", "required the schedule serial"),
        ("serial:pull,collective", "required the schedule serial"),
    ],
)
def test_bad_names_say_what_is_wrong(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule.parse(name)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grouping": "some"}, "grouping: required one of fused"),
        ({"dims": 3}, "dims: required one of 1, 2"),
        ({"order": "rank"}, "order: required one of piece, peer"),
        ({"mover": "hand"}, "mover: required one of dma"),
        ({"grouping": "growing", "dims": 2}, "use the grouping fused or unfused"),
        ({"grouping": "shrinking", "uniform": True}, "use the grouping fused or unfused"),
        ({"pieces": ()}, "positive"),
        ({"pieces": -1}, "positive"),
    ],
)
def test_bad_points_say_what_is_wrong(fields: dict[str, Any], words: str) -> None:
    point: dict[str, Any] = {"uniform": False, "grouping": "fused", "dims": 1}
    with pytest.raises(ValueError, match=words):
        Schedule(**(point | fields))


@pytest.mark.parametrize("name", ["hetero-fused-1d", "uniform-fused-2d", "shard-overlap"])
def test_knobs_are_clamped_to_what_there_is(name: str) -> None:
    problem = Problem("all_gather_matmul", (7,) * 4, 32, 64, "bfloat16")
    most = 10**9
    schedule = Schedule.parse(f"{name}:pieces={most},tail={most},copy={most},compute={most}")
    found = plans(problem, schedule)
    check(found)
    assert found[0].words < 1000 and len(found[0].steps) < 1000


@given(st.integers(0, 500), PIECES.filter(lambda pieces: pieces != 0))
def test_cuts_cover_a_length_once(length: int, pieces: int | tuple[int, ...]) -> None:
    bounds = cut(length, pieces)
    assert [a for a, _ in bounds] == [0, *(b for _, b in bounds)][: len(bounds)]
    assert all(a < b for a, b in bounds)
    assert (bounds[-1][1] if bounds else 0) == length
    assert len(bounds) <= (len(pieces) if isinstance(pieces, tuple) else pieces)


@given(st.integers(1, 33))
def test_siblings_tile_the_world(world: int) -> None:
    for rank in range(world):
        found = [peer for group in siblings(rank, world) for peer in group]
        assert sorted([rank, *found]) == list(range(world))


@given(st.integers(1, 33))
def test_no_two_ranks_receive_from_one_peer_at_a_time(world: int) -> None:
    orders = [peers_in_order(rank, world) for rank in range(world)]
    for turn in zip(*orders, strict=True):
        assert len(set(turn)) == world


def test_growing_takes_few_products() -> None:
    problem = Problem("all_gather_matmul", (64,) * 8, 32, 64, "bfloat16")
    for rank in range(8):
        made = plan(problem, NAMED["growing"], rank)
        products = [product for step in made.steps for product in step.products]
        assert [product.out.rows for product in products] == [64, 64, 128, 256]


def test_equal_pieces_of_all_peers_are_two_batches() -> None:
    problem = Problem("all_gather_matmul", (64,) * 4, 32, 64, "bfloat16")
    steps = plan(problem, NAMED["hetero-fused-1d"], 2).steps
    found = [[p.batch for p in step.products] for step in steps if step.op == "matmul"]
    assert found == [[1], [2, 1], [2, 1], [2, 1], [2, 1]]  # before and behind the own rows


def test_tail_cuts_the_last_shard_alone() -> None:
    problem = Problem("all_gather_matmul", (64,) * 4, 32, 64, "bfloat16")
    arrivals = Arrivals(problem, Schedule.parse("shard-overlap:tail=4"), 0)
    sizes = [[unit.stop - unit.start for unit in group] for group in arrivals.by_group]
    assert sizes == [[64], [64], [16], [16], [16], [16]]


@pytest.mark.parametrize("name", ["ficco.amounts", "ficco.schedules", "ficco.schedules.groups"])
def test_docstrings_show_what_is_so(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


@pytest.mark.parametrize("width", [40, 60, 100])
@pytest.mark.parametrize("name", NAMED)
def test_timelines_keep_to_their_width(name: str, width: int) -> None:
    problem = Problem("all_gather_matmul", (64,) * 8, 32, 64, "bfloat16")
    lines = render(plan(problem, NAMED[name], 3), width).splitlines()[2:]
    assert len(lines) == 3 and max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines] == ["compute0", "copy0", "sync"]
