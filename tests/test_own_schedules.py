"""User-defined schedules: registration, proof, and use by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, call, exact, make
from ranks import Rank, caught, leave, on_ranks, ranks

import ficco
from ficco.heuristics import candidates, decide
from ficco.machine import find
from ficco.plan import Plan, render
from ficco.problems.products import Problem
from ficco.schedules import Schedule, build, plan, space
from ficco.simulate import predict
from ficco.tools import cli

PAGE = Path(__file__).parent.parent / "docs" / "own-schedules.md"
HALVES = re.findall(r"```python\n(.*?)dist\.init", PAGE.read_text(), re.S)[0]
PROBLEM = Problem("all_gather_matmul", (64,) * 4, 32, 64, "bfloat16")


def defined(wrong: bool = False) -> build.PlanFunction:
    """The function of the page; ``wrong``: its products do not wait for their rows."""
    code = HALVES.replace("a.buffer, waits))", "a.buffer))") if wrong else HALVES
    assert (code != HALVES) == wrong
    names: dict[str, Any] = {}
    exec(code.replace("@ficco.schedules.register", "#"), names)
    function: build.PlanFunction = names["two_halves"]
    return function


def forget() -> None:
    space.OWN.clear()
    build._candidates.clear()
    space._parse.cache_clear()
    build.own_plans.cache_clear()


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    yield
    forget()


@ranks(2, 4)
@on_ranks()
def test_the_schedule_of_the_page_is_exact_and_a_wrong_one_is_refused(at: Rank) -> None:
    world, group = at.world, dist.new_group(list(range(at.world)))
    small, wrong = (Case((4,) * world, k, n, schedule="two-halves") for k, n in ((6, 8), (8, 16)))

    def refused(case: Case, register: bool = True, **how: Any) -> Any:
        """The error of a call with the page's function, or a wrong one."""
        forget()
        if register:
            build.register("two-halves")(defined(**how))
        operands = make(at, case, 0, group)
        return caught(lambda: call(case, operands.a, operands.b, group))

    forget()
    build.register("two-halves")(defined())
    for rows in ((4,) * world, (3, 0, 5, 1)[:world]):
        for iteration in range(3):
            exact(at, replace(small, rows=rows), iteration, group)
    a, b = torch.ones(4, 6, requires_grad=True), torch.ones(6, 8)
    ficco.all_gather_matmul(a, b, group=group, schedule="two-halves").sum().backward()
    assert a.grad is not None and (a.grad == 8 * world).all()  # by auto
    summed = {"group": group, "schedule": "two-halves"}
    other = caught(lambda: ficco.matmul_all_reduce(a.detach(), b, **summed))
    assert other.type == "ValueError" and "required all_gather_matmul of several" in other.text
    with ficco.options(workspace_bytes=100):
        assert "workspace_bytes: required at least" in refused(small).text
    failure = refused(wrong, wrong=True)
    text = " ".join(failure.text.split())
    assert failure.type == "ValueError", failure
    assert text.startswith("schedule two-halves: its plans for all_gather_matmul(m=")
    assert " are wrong: signal ready 0.0>1 is posted and never waited for" in text
    assert world > 2 or text in " ".join(PAGE.read_text().split())
    with ficco.options(timeout_s=5):
        one_sided = refused(wrong, register=at.rank > 0)
    assert one_sided.type == ("RankMismatch" if at.rank else "ValueError"), one_sided
    forget()
    leave(group)


def test_a_registered_name_works_wherever_names_do() -> None:
    build.register("two-halves")(defined())
    schedule = Schedule.parse("two-halves")
    assert str(schedule) == "two-halves" and Schedule.parse(str(schedule)) == schedule
    assert "copy0    | acquire | 0.0>1 | 0.1>1" in render(plan(PROBLEM, schedule, 0))
    machine = find("h200-4", None)
    assert machine and predict(PROBLEM, schedule, machine) > 0
    decision = decide(PROBLEM, "two-halves", machine=machine)
    assert decision.source == "caller" and "* two-halves" in decision.table()
    with pytest.raises(ValueError, match="has no knobs"):
        Schedule.parse("two-halves:pull")
    with pytest.raises(ValueError, match="no other axis"):
        Schedule(False, "own", 1, own="two-halves")


def test_each_setting_of_a_family_has_a_name() -> None:
    """A family of schedules, one name for each setting, like the example of the page."""

    def grown(problem: Problem, rank: int, pieces: int) -> Plan:
        return ficco.schedules.plan(problem, Schedule.parse(f"hetero-unfused-1d:{pieces=}"), rank)

    for pieces in (2, 3):
        build.register(f"grown-{pieces}", candidate=True)(partial(grown, pieces=pieces))
    both = [plan(PROBLEM, Schedule.parse(name), 1) for name in ("grown-2", "grown-3")]
    copies = [sum(step.op == "copy" for step in grown_plan.steps) for grown_plan in both]
    assert [one.schedule for one in both] == ["grown-2", "grown-3"] and copies == [6, 9]


def test_bad_names_and_functions_without_a_plan_are_refused() -> None:
    right = defined()
    build.register("two-halves")(right)
    for name in ("", "a b", "a:b", "auto", "growing", "pull", "two-halves"):
        with pytest.raises(ValueError, match="name: required"):
            build.register(name)(defined())
    with pytest.raises(ValueError, match="got 'three-halves'"):
        Schedule.parse("three-halves")
    build.register("none")(lambda problem, rank: None)  # type: ignore[arg-type, return-value]
    build.register("another-rank")(lambda problem, rank: right(problem, 0))
    for name in ("none", "another-rank"):
        with pytest.raises(ValueError, match="required the Plan of rank [01]"):
            plan(PROBLEM, Schedule.parse(name), 0)


def test_auto_compares_registered_candidates() -> None:
    machine = find("h200-4", None)
    for candidate in (False, True):
        forget()
        build.register("two-halves", candidate=candidate)(defined())
        schedule = Schedule.parse("two-halves")
        decision = decide(PROBLEM, machine=machine)
        assert (schedule in decision.others) == candidate
        assert ("two-halves" in [one.schedule for one in decision.candidates]) == candidate
    page = ficco.explain("all_gather_matmul", m=8192, n=3584, k=4096, world=4, machine=machine)
    queued = {one.schedule: f"{one.queued * 1e6:.0f}" for one in page.candidates}
    compared = [queued[name] for name in ("two-halves", "serial", "growing")]
    assert compared == ["389", "494", "355"]  # docs/own-schedules.md
    summed = Problem("matmul_all_reduce", (64,) * 4, 32, 64, "bfloat16")
    assert schedule not in candidates(summed, machine, ("two-halves",))  # serves no sums


def test_packages_offer_schedules(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    queries: list[dict[str, str]] = []

    class Point:
        @staticmethod
        def load() -> build.PlanFunction:
            return defined()

    def entry_points(**which: str) -> list[type[Point]]:
        queries.append(which)
        return [Point] if which["name"] == "two-halves" else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    sizes = ["--m", "256", "--n", "32", "--k", "64", "--machine", "h200-4"]
    for command in (
        ["plan", "two-halves", *sizes],
        ["explain", "--schedule", "two-halves", *sizes],
        ["simulate", "two-halves", *sizes],
    ):
        forget()
        assert cli.run(command) == 0, capsys.readouterr()
        assert "two-halves" in capsys.readouterr().out
    assert queries[0] == {"group": "ficco.schedules", "name": "two-halves"}
