"""SPIN proves the Plans of two and three ranks and finds the faults that the proof finds. Its
models share no code with the proof."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import edits
import pytest
from edits import awaits_data, change, edited, idle, index, is_copy, move, refused, retires
from test_plan import PROBLEM, RETURNED, SUMMED, TURNED, build

from ficco.plan import Plan, Step
from ficco.problems.attention import AttentionProblem, HeadsProblem
from ficco.problems.experts import ExpertLayer
from ficco.problems.products import Problem
from ficco.proof import check
from ficco.schedules import Schedule
from ficco.schedules.attention import attention_plans
from ficco.schedules.experts import expert_plans
from ficco.schedules.heads import heads_plans
from ficco.schedules.tiled import Gathering, gathering
from ficco.tools.promela import promela

Plans = Sequence[Plan]


def two(problem: Problem, **changes: Any) -> Problem:
    """Return the problem of the same operator for two ranks."""
    return replace(problem, rows=(16,) * 2, **changes)


def sent(operator: str, world: int = 2) -> Problem:
    return Problem.of_blocks(operator, ((4,) * world,) * world, 24, 32, "bfloat16")


def attention(name: str, backward: bool = False, **fields: Any) -> list[Plan]:
    forward = AttentionProblem(2, 16, 1, 2, 2, 8, "bfloat16", causal=True, **fields)
    problem = replace(forward, keeps=False).gradient() if backward else forward
    return attention_plans(problem, Schedule.parse(name))


def heads(name: str) -> list[Plan]:
    problem = HeadsProblem(AttentionProblem(2, 16, 1, 4, 2, 8, "bfloat16"))
    return heads_plans(problem, Schedule.parse(name))


def experts(name: str, world: int = 2) -> list[Plan]:
    layer = ExpertLayer("experts", world, 2, 5, 16, n=8, dtype="bfloat16", h=12, function="silu")
    return expert_plans(layer, Schedule.parse(name))


def arriving(name: str, symmetric: bool = False) -> list[Plan]:
    problem = Gathering((16,) * 2, 32, "bfloat16", symmetric)
    return gathering(problem, Schedule.parse(name), range(2))


GATHERS = (
    *("serial", "growing", "hetero-fused-2d:pieces=2", "growing:pull", "serial:collective"),
    *("tiled", "growing:pieces=2,copy=2,compute=2"),
)
THREE = (16,) * 3
#: Plans that SPIN proves, and the number of calls.
CASES: list[tuple[Callable[..., Plans], tuple[Any, ...], int]] = [
    *((build, (name, two(PROBLEM)), 2) for name in GATHERS),
    (build, ("growing:pull", two(PROBLEM, symmetric=True)), 2),
    (build, ("growing", two(PROBLEM, return_gathered=True)), 2),
    (build, ("hetero-unfused-1d:pieces=4", two(PROBLEM), 512), 2),
    (build, ("growing", two(PROBLEM, hosts=2)), 2),
    *((build, (name, two(SUMMED)), 2) for name in ("hetero-fused-1d:pieces=2", "ring", "one-shot")),
    *((build, (name, two(SUMMED)), 2) for name in ("serial:kernel", "growing:beta")),
    *(
        (build, (name, two(RETURNED)), 2)
        for name in ("uniform-fused-2d:pieces=2", "one-shot", "two-shot")
    ),
    *((build, (name, two(TURNED)), 2) for name in ("growing", "growing:pull,pieces=2")),
    (build, ("growing", sent("all_to_all_matmul")), 2),
    (build, ("growing:pull", sent("matmul_all_to_all")), 2),
    (build, ("hetero-fused-1d:pieces=2", sent("all_to_all_transposed_matmul")), 2),
    *((attention, (name,), 2) for name in ("growing", "ring", "growing:compute=2")),
    (attention, ("growing", True), 2),
    (heads, ("uniform-fused-1d:pieces=2",), 2),
    *((experts, (name,), 1) for name in ("serial", "shard-overlap")),
    *((arriving, (name, name == "tiled:pull"), 2) for name in ("tiled:pieces=2", "tiled:pull")),
    (build, ("growing", replace(PROBLEM, rows=THREE)), 2),
    (build, ("serial:kernel", replace(PROBLEM, rows=(9, 0, 17))), 2),
    (build, ("growing:pull", replace(PROBLEM, rows=THREE)), 1),
    (build, ("hetero-fused-1d:pieces=2", replace(PROBLEM, rows=THREE)), 1),
    (build, ("one-shot", replace(SUMMED, rows=THREE)), 2),
    (build, ("two-shot", replace(RETURNED, rows=THREE)), 1),
    (build, ("ring", replace(SUMMED, rows=THREE)), 1),
    (build, ("shard-overlap", sent("all_to_all_matmul", 3)), 2),
]


def open_gates(steps: list[Step]) -> None:
    """Multiply rows before their signal; only the last step waits for it."""
    i = index(steps, lambda step: step.gates)
    change(retires, waits=lambda waits: (*waits, *steps[i].gates))(steps)
    steps[i] = steps[i]._replace(gates=())


def on_one_word(plans: list[Plan]) -> Plans:
    """Let the two signals of rank 1 to rank 0 share a word."""
    posts = [post for step in plans[1].steps if is_copy(step) for post in step.posts]
    first, second = posts
    return edits.renamed(plans, second, word=first.word)


def on_rank(edit: edits.Edit) -> Callable[[list[Plan]], Plans]:
    return partial(edited, rank=1, edit=edit)


def on_both(edit: edits.Edit) -> Callable[[list[Plan]], Plans]:
    return partial(edits.everywhere, edit=edit)


DEADLOCK, WRITTEN = "invalid end state", r"assertion violated.*written\["
WORD, SLOT = (rf"assertion violated.*{name}\[" for name in ("word", "slot"))
SYMMETRIC = replace(PROBLEM, symmetric=True)
#: A problem, a schedule, a fault of its Plans, and a part of SPIN's error.
FAULTS: dict[str, tuple[Problem, str, Callable[[list[Plan]], Plans], str]] = {
    **{
        name: (PROBLEM, "growing", on_rank(edit), error)
        for name, edit, error in (
            ("no wait", change(awaits_data, waits=()), ""),
            ("no post", change(is_copy, posts=()), DEADLOCK),
            ("two posts", change(is_copy, posts=edits.twice), WORD),
            ("no clear", change(retires, clears=()), WORD),
            ("no release", change(retires, posts=()), SLOT),
            ("early release", change(retires, after=()), ""),
            ("late acquire", move("acquire", retires, "waits"), WORD),
            ("no acquire", change("acquire", waits=(), clears=()), ""),
            ("late wait", move(awaits_data, retires, "waits"), WRITTEN),
            ("early clear", edits.clear_first, WORD),
            ("late clear", edits.clear_late, WORD),
            ("no copy", idle(is_copy), WRITTEN),
            ("no product", idle(awaits_data), WRITTEN),
        )
    },
    "early post": (PROBLEM, "growing:pieces=2", on_rank(move("1.1>0", is_copy, "posts")), ""),
    "shared word": (PROBLEM, "growing:pieces=2", on_one_word, WORD),
    "early pull": (PROBLEM, "growing:pull", on_rank(move(is_copy, retires, "waits")), ""),
    "release before readers end": (
        *(PROBLEM, "growing:pull"),
        on_rank(change(retires, after=edits.without_first)),
        SLOT,
    ),
    "no valid": (SYMMETRIC, "growing:pull", edits.without_kinds("valid"), WRITTEN),
    "no valid, no done": (PROBLEM, "growing:pull", edits.without_kinds("valid", "done"), ""),
    "no ready": (PROBLEM, "growing", edits.without_kinds("ready"), WRITTEN),
    "full stage": (PROBLEM, "hetero-unfused-1d:pieces=4", on_rank(edits.reuse_early), ""),
    "circle": (PROBLEM, "shard-overlap", on_both(edits.on_one_lane), DEADLOCK),
    "circle of queues": (PROBLEM, "shard-overlap", on_both(edits.wait_first), DEADLOCK),
    "open gates": (PROBLEM, "tiled:pieces=2", on_rank(open_gates), WRITTEN),
    "early sum": (SUMMED, "growing:pieces=2", on_rank(edits.sum_before_it_is_due), WRITTEN),
    "no wait for the product": (SUMMED, "growing", on_rank(change(is_copy, after=())), ""),
    "no ready sums": (SUMMED, "ring", edits.without_kinds("ready"), WRITTEN),
    "no sum": (SUMMED, "growing", on_rank(idle(edits.sums)), WRITTEN),
    "no summed": (RETURNED, "growing", edits.without_kinds("summed"), ""),
    "other collectives": (PROBLEM, "serial:collective", on_rank(idle(edits.is_collective)), ""),
}


def output(*command: str, folder: Path) -> str:
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout + process.stderr


def spin(model: str, folder: Path, calls: int = 2) -> str:
    """The error that SPIN reports; empty if it has proven the complete model."""
    compiler = shutil.which("tcc") or shutil.which("gcc")
    if shutil.which("spin") is None or compiler is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "spin, and tcc or gcc: tests/toolchain.sh installs them"
        )
    (folder / "model.pml").write_text(model)
    assert not output("spin", "-a", f"-DCALLS={calls}", "model.pml", folder=folder)
    output(compiler, "-w", "-DSAFETY", "-DMEMLIM=1024", "-o", "pan", "pan.c", folder=folder)
    printed = output("./pan", "-m10000", "-w18", folder=folder)
    assert "too small" not in printed and "memory" not in printed.partition("Stats on memory")[0]
    if error := re.search(r"^pan:1: (.*)$", printed, re.MULTILINE):
        return error[1]
    assert "errors: 0" in printed and "not completed" not in printed, printed
    # All states of the processes are reached, except the ends of processes that run forever.
    unreached = re.findall(r"state \d+, (.*)$", printed, re.MULTILINE)
    assert {*unreached} <= {'"-end-"'}, printed
    assert re.search(r"unreached in proctype end\n\s+\(0 of", printed), printed
    return ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1][0]}")
def test_spin_proves_what_the_proof_proves(
    case: tuple[Callable[..., Plans], tuple[Any, ...], int], tmp_path: Path
) -> None:
    build, arguments, calls = case
    plans = build(*arguments)
    check(plans)
    assert spin(promela(plans), tmp_path, calls) == ""


@pytest.mark.parametrize("name", FAULTS)
def test_spin_finds_the_faults_that_the_proof_finds(name: str, tmp_path: Path) -> None:
    problem, schedule, fault, message = FAULTS[name]
    plans = build(schedule, two(problem), 512 if name == "full stage" else None)
    check(plans)
    broken = fault(plans)
    refused(broken)
    error = spin(promela(broken), tmp_path)
    assert error and re.search(message, error), error


def test_the_command_writes_a_model_for_spin(tmp_path: Path, ran: Any) -> None:
    plan, path = "plan growing --m 32 --n 24 --k 32 --world 2 --promela", tmp_path / "new" / "m.pml"
    model = promela(build("growing", two(PROBLEM)))
    assert ran(plan, "-").out == model
    assert "checked for all 2 ranks" in ran(plan, path).out and path.read_text() == model
