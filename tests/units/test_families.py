"""Problems, plans, received bytes and bounds of every operator."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ficco.heuristics import decide
from ficco.heuristics.families import FAMILIES, family_of, last_arrival
from ficco.machine import Machine, find
from ficco.machine.model import flat
from ficco.problems.attention import AttentionProblem, HeadsProblem
from ficco.problems.experts import ExpertLayer
from ficco.problems.products import OPERATORS
from ficco.problems.sizes import ASKABLE, problem_of
from ficco.problems.specification import AnyProblem
from ficco.schedules import Schedule

WORLD = 4
HEADS = {"sequence": 64, "heads": 8, "kv_heads": 2, "head_size": 16}
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(OPERATORS, {"m": 66, "n": 24, "k": 48}),
    "all_gather_attention": HEADS | {"causal": True, "placement": "head-tail", "batch": 2},
    "ulysses_attention": HEADS,
    "experts": {"experts": 8, "capacity": 6, "k": 16, "h": 32, "n": 24},
}
SERIAL = Schedule.parse("serial")


def problems() -> dict[str, AnyProblem]:
    """Return a problem of every operator, including backwards."""
    by_name = {name: problem_of(name, WORLD, "bfloat16", sizes) for name, sizes in SIZES.items()}
    gathered, heads = by_name["all_gather_attention"], by_name["ulysses_attention"]
    layer = cast(ExpertLayer, by_name["experts"])
    assert isinstance(gathered, AttentionProblem) and isinstance(heads, HeadsProblem)
    by_name["keeps heads"] = replace(heads, saves="heads")
    by_name["backward of heads"] = replace(heads, backward=True, saves="shards")
    by_name["backward of kept heads"] = replace(heads, backward=True, saves="heads")
    by_columns = SIZES["experts"] | {"split": "columns"}
    by_name["columns of experts"] = problem_of("experts", WORLD, "bfloat16", by_columns)
    by_name["keeps rows"] = replace(layer, keeps=True)
    for half in ("dispatch_matmul", "matmul_combine"):
        by_name[half] = replace(layer, operator=half, function="")
    return by_name


PROBLEMS = problems()


def test_every_operator_has_a_family() -> None:
    gradient = cast(AttentionProblem, PROBLEMS["all_gather_attention"]).gradient()
    assert ASKABLE.keys() == SIZES.keys() < FAMILIES.keys()
    covered = {problem.operator for problem in (*PROBLEMS.values(), gradient)}
    assert covered == FAMILIES.keys()
    with pytest.raises(NotImplementedError, match=r"required one of .*experts.*, got sums"):
        family_of(cast(Any, SimpleNamespace(operator="sums")))


@pytest.mark.parametrize("name", PROBLEMS)
def test_received_bytes_are_those_of_the_copies(name: str) -> None:
    problem, machine = PROBLEMS[name], link()
    family = family_of(problem)
    plans = family.plans(problem, SERIAL)
    for rank in range(WORLD):
        copied = {peer: 0 for peer in range(WORLD) if peer != rank}
        for plan in plans:
            for move in (step.copy for step in plan.steps):
                if move is not None and move.dst.rank == rank:
                    copied[move.src.rank] += plan.moved_bytes(move)
        stages = family.received(problem, rank)
        assert [sum(sizes) for sizes in zip(*stages, strict=True)] == list(copied.values())
        assert all(copied.values()) and len(stages) in (1, 2)
        # A stage starts after 2 s and runs at 1000 bytes per second.
        seconds = 2.0 * len(stages) + sum(copied.values()) / 1e3
        assert last_arrival(stages, machine) == pytest.approx(seconds)
        separate = sum(2.0 + max(sizes) / 1e3 for sizes in stages)
        assert last_arrival(stages, link("mesh")) == pytest.approx(separate)


def link(kind: str = "switch") -> Machine:
    return flat(1e12, 1e3, 1e12, ranks=WORLD, start=2.0, kind=kind)


@pytest.mark.parametrize("name", PROBLEMS)
def test_serial_takes_as_long_as_its_parts(name: str) -> None:
    problem, machine = PROBLEMS[name], find("h200-4", None)
    assert machine is not None
    family = family_of(problem)
    bounds = family.bounds(problem, machine, "queued")
    computed, *moved = bounds.values()
    assert 0 < family.ideal(problem, machine) == max(computed, min(moved))
    seconds = family.seconds(problem, SERIAL, machine)
    assert family.ideal(problem, machine) < seconds
    slow = flat(1e3, 1e15, 1e15, ranks=WORLD)
    computed = next(iter(family.bounds(problem, slow, "queued").values()))
    assert computed == pytest.approx(family.seconds(problem, SERIAL, slow), rel=0.01)
    assert SERIAL in (schedules := family.schedules(problem, machine)) and len(schedules) > 5
    decision = decide(problem, machine=machine, mode="queued")
    assert decision.source == "model" and decision.problem == problem
    shares = {candidate.schedule: candidate.share for candidate in decision.candidates}
    assert shares["serial"] == pytest.approx(family.ideal(problem, machine) / seconds, rel=1e-3)
