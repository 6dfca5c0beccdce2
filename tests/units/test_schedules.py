"""Names of schedules, pieces and orders of shards, and the page that draws the schedules."""

from __future__ import annotations

import doctest
import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden.asks import product
from hypothesis import given
from hypothesis import strategies as st

from ficco.plan import Region, Step, render
from ficco.problems.products import OPERATORS, Problem
from ficco.proof import check
from ficco.schedules import NAMED, Schedule, plan, plans, refusal, same_plans
from ficco.schedules.exchange import Parcel, Traffic
from ficco.schedules.groups import cut, peers_in_order, siblings, targets_in_order

PIECES = st.one_of(
    st.integers(0, 9), st.lists(st.integers(1, 9), min_size=2, max_size=5).map(tuple)
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    base = NAMED[draw(st.sampled_from(list(NAMED)))]
    ring, one_shot = base.grouping == "ring", base.sums_in_place
    tiled = base.grouping == "tiled"
    movers = ["kernel"] if one_shot else ["dma"] if tiled else ["dma", "kernel"]
    return replace(
        base,
        pieces=draw(PIECES),
        tail=draw(st.integers(1, 4)),
        order=draw(st.sampled_from(["piece", "peer"])),
        pull=one_shot or (draw(st.booleans()) and not ring),
        mover=draw(st.sampled_from(movers)),
        copy=draw(st.integers(1, 3)),
        compute=draw(st.integers(1, 1 if tiled else 3)),
        beta=ring or (draw(st.booleans()) and not base.uniform and not tiled),
    )


@given(schedules())
def test_a_printed_schedule_parses_to_the_same_schedule(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


def test_names_print_as_they_are_written_and_knobs_in_a_fixed_order() -> None:
    for name in (*NAMED, "serial:collective"):
        assert str(Schedule.parse(name)) == name
    written = "hetero-fused-1d:compute=2,pull,copy=3,pieces=4"
    assert str(Schedule.parse(written)) == "hetero-fused-1d:pieces=4,pull,copy=3,compute=2"
    assert Schedule.parse("uniform-fused-1d:pieces=1") == Schedule.parse("serial")
    assert str(Schedule.parse("growing:beta,pieces=2")) == "growing:pieces=2,beta"
    assert str(Schedule.parse("ring:beta,pieces=4")) == "ring:pieces=4"


RING = "ring: required uniform=False, pull=False and beta=True"
NO_SCHEDULES: list[tuple[str | dict[str, Any], str]] = [
    ("fastest", "required one of serial"),
    ("growing:pieces", "not a knob"),
    ("growing:pieces=0", "positive.* got 0$"),
    ("growing:pieces=4+0", "positive"),
    ("growing:tail=0", "at least 1"),
    ("growing:copy=0", "at least 1"),
    ("growing:order=any", "'order=any': not a value of order"),
    ("growing:pull,pull", "pull is given twice"),
    ("growing:speed=9", "knobs are"),
    ("growing:beta=yes", "not a value of beta"),
    ("growing:collective", "required the schedule serial"),
    ("serial:pull,collective", "required the schedule serial"),
    ("ring:pull", RING),
    ("ring:beta=0", RING),
    ("uniform-fused-1d:beta", "beta: required the own product last"),
    ({"grouping": "some"}, "grouping: required one of fused"),
    ({"dims": 3}, "dims: required one of 1, 2"),
    ({"order": "rank"}, "order: required one of piece, peer"),
    ({"mover": "hand"}, "mover: required one of dma"),
    ({"grouping": "growing", "dims": 2}, "use the grouping fused or unfused"),
    ({"grouping": "shrinking", "uniform": True}, "use the grouping fused or unfused"),
    *(
        ({"grouping": "tiled", **fields}, "tiled: required uniform=False, dims=1")
        for fields in ({"uniform": True}, {"dims": 2}, {"compute": 2}, {"beta": True})
    ),
    ({"grouping": "tiled", "mover": "kernel"}, "tiled: required mover='dma'"),
    ({"pieces": ()}, "positive"),
    ({"pieces": -1}, "positive"),
    ({"pieces": [4, 2, 1]}, "positive"),
    ({"copy": "4"}, "copy: required at least 1, got '4'"),
]


@pytest.mark.parametrize(("invalid", "words"), NO_SCHEDULES)
def test_invalid_names_and_points_raise_a_precise_error(invalid: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        if isinstance(invalid, str):
            Schedule.parse(invalid)
        else:
            Schedule(**({"uniform": False, "grouping": "fused", "dims": 1} | invalid))


def test_knobs_are_clamped_to_the_problem() -> None:
    problem = Problem("all_gather_matmul", (7,) * 4, 32, 64, "bfloat16")
    for name in ("hetero-fused-1d", "uniform-fused-2d", "shard-overlap"):
        knobs = ",".join(f"{knob}={10**9}" for knob in ("pieces", "tail", "copy", "compute"))
        clamped = plans(problem, Schedule.parse(f"{name}:{knobs}"))
        check(clamped)
        assert clamped[0].words < 1000 and len(clamped[0].steps) < 1000


@pytest.mark.parametrize("operator", OPERATORS)
def test_schedules_that_accumulate_are_refused_without_sums(operator: str) -> None:
    problem, kind = product(operator, (8, 8)), OPERATORS[operator]
    assert ("tiled is for" in refusal(problem, Schedule.parse("tiled"))) == kind.inner
    assert not refusal(problem, Schedule.parse("growing"))
    for name, knob in (("ring", "ring"), ("growing:beta", "beta")):
        schedule = Schedule.parse(name)
        assert bool(refusal(problem, schedule)) != kind.sums
        if kind.sums:
            check(plans(problem, schedule))
        else:
            with pytest.raises(ValueError, match=f"{knob} is for operators that sum.*leave it out"):
                plans(problem, schedule)


@given(st.integers(0, 500), PIECES.filter(lambda pieces: pieces != 0))
def test_cuts_cover_a_length_once(length: int, pieces: int | tuple[int, ...]) -> None:
    bounds = cut(length, pieces)
    assert [a for a, _ in bounds] == [0, *(b for _, b in bounds)][: len(bounds)]
    assert all(a < b for a, b in bounds)
    assert (bounds[-1][1] if bounds else 0) == length
    assert len(bounds) <= (len(pieces) if isinstance(pieces, tuple) else pieces)


@given(st.integers(1, 33))
def test_orders_of_peers(world: int) -> None:
    """Siblings tile the world. No two ranks receive from the same peer at a time. The order of
    sends is the order of receives."""
    orders = [peers_in_order(rank, world) for rank in range(world)]
    for rank in range(world):
        peers = [peer for group in siblings(rank, world) for peer in group]
        assert sorted([rank, *peers]) == list(range(world))
        for turn, target in enumerate(targets_in_order(rank, world)):
            assert orders[target][turn] == rank
    for turn in zip(*orders, strict=True):
        assert len(set(turn)) == world


def test_with_one_peer_many_schedules_have_the_same_plan() -> None:
    names = ("growing", "shrinking:tail=2", "shard-overlap", "serial", "growing:compute=2")
    schedules = [Schedule.parse(name) for name in names]
    pair, three = (product("all_gather_matmul", rows) for rows in ((256, 128), (256, 128, 64)))
    first = {str(name): str(same) for name, same in same_plans(pair, schedules).items()}
    alike = {"shard-overlap": "growing", "growing:compute=2": "growing"}
    assert first == {name: alike.get(name, name) for name in names}
    assert all(name == same for name, same in same_plans(three, schedules).items())
    # Rank 0 has no own rows to multiply before the peer's rows arrive; rank 1 has own rows.
    problem, growing, serial = product("all_gather_matmul", (0, 64)), schedules[0], schedules[3]
    assert plan(problem, growing, 0).steps == plan(problem, serial, 0).steps
    assert plan(problem, growing, 1).steps != plan(problem, serial, 1).steps
    assert same_plans(problem, [growing, serial]) == {growing: growing, serial: serial}


@pytest.mark.parametrize("name", ["ficco.plan.render", "ficco.schedules.groups"])
def test_examples_in_docstrings_are_right(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed


def test_every_name_is_drawn() -> None:
    page = Path(__file__).parents[2] / "docs" / "schedules.md"
    results = doctest.testfile(str(page), module_relative=False)
    assert results.attempted and not results.failed
    assert set(re.findall(r'show\("([^":]+)', page.read_text())) == set(NAMED)


@pytest.mark.parametrize("operator", OPERATORS)
def test_only_the_exchange_copies_between_ranks(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanged, copies = set[tuple[Region, Region]](), Traffic._copies

    def recording(self: Traffic, peer: int, piece: Parcel, *args: Any) -> Step:
        exchanged.update((move.src, move.dst) for move in piece.moves)
        return copies(self, peer, piece, *args)

    monkeypatch.setattr(Traffic, "_copies", recording)
    for name in NAMED:
        for hosts in (1, 2):
            problem = product(operator, (64,) * 4, n=72, hosts=hosts)
            if not refusal(problem, NAMED[name]) and not NAMED[name].sums_in_place:
                steps = plan(problem, NAMED[name], 1).steps
                assert {(s.copy.src, s.copy.dst) for s in steps if s.copy} <= exchanged, name
    assert exchanged


@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_all_reduce"])
@pytest.mark.parametrize("name", NAMED)
def test_timelines_keep_to_their_width(name: str, operator: str) -> None:
    problem = Problem(operator, (64,) * 8, 32, 64, "bfloat16")
    if refusal(problem, NAMED[name]):
        return
    lanes = ["compute0", "copy0", *["reduce0"] * problem.kind.scatters, "sync"]
    if NAMED[name].sums_in_place:  # no lanes run concurrently
        lanes = ["compute0", "sync"]
    for width in (20, 30, 40, 60, 100):
        lines = render(plan(problem, NAMED[name], 3), width).splitlines()[2:]
        assert max(map(len, lines)) <= width
        assert [line.split()[0] for line in lines] == lanes
        if width < 60 and lanes != ["compute0", "sync"]:
            assert any(".." in line for line in lines), "a cut has a mark"
