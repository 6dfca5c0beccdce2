"""``ficco plan``: print or draw what a schedule does for given sizes; needs no GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ficco.tools.cli.simulate import write
from ficco.tools.cli.site import (
    FILE,
    FLAG,
    MACHINE,
    add_ranks_of_rows,
    add_sizes,
    picture,
    problem,
    ranks_per_host,
    site,
)


def options(parser: Any) -> None:
    parser.add_argument("schedule", help="a name such as hetero-fused-1d:pieces=4,pull, or auto")
    add_sizes(parser)
    add_ranks_of_rows(parser)
    parser.add_argument("--rank", type=int, default=0, help="the rank to print (default: 0)")
    parser.add_argument(
        "--workspace-bytes",
        type=int,
        help="cap on staging (gathering operators); pieces then share it as a ring",
    )
    parser.add_argument(
        "--machine",
        help=f"machine that auto and --draw go by: a name or a file (default: {MACHINE})",
    )
    parser.add_argument("--draw", **FILE, help="draw the timeline (png, svg)")
    parser.add_argument("--trace", **FILE, help="write a trace for Perfetto")
    parser.add_argument("--json", **FLAG, help="print the steps as JSON")
    parser.add_argument(
        "--promela", **FILE, help="write a model of all ranks for SPIN; - prints it, and only it"
    )


def run(arguments: argparse.Namespace) -> int:
    from ficco.heuristics import decide
    from ficco.heuristics.decide import too_large
    from ficco.heuristics.families import family_of
    from ficco.plan import render
    from ficco.proof import check
    from ficco.simulate import simulate
    from ficco.tools.promela import promela

    asked = site(arguments.machine, ranks_per_host(arguments), default=MACHINE)
    asked_of = problem(arguments, asked.world)
    if not 0 <= arguments.rank < asked_of.world:
        raise ValueError(f"--rank: required 0 to {asked_of.world - 1}, got {arguments.rank}")
    picture(arguments.draw)
    drawn = asked.simulated if arguments.draw or arguments.trace else None
    family = family_of(asked_of)
    decision = decide(asked_of, arguments.schedule, machine=asked.machine, mode=asked.mode)
    made = family.plans(asked_of, decision.schedule, staging_bytes=arguments.workspace_bytes)
    check(made)
    one = made[arguments.rank]
    if arguments.promela is not None:
        model = promela(made)
        if str(arguments.promela) == "-":
            print(model, end="")
            return 0
        arguments.promela.parent.mkdir(parents=True, exist_ok=True)
        arguments.promela.write_text(model)
    if arguments.json:
        print(json.dumps(_plan_json(one, decision)))
    else:
        print(render(one))
        print(_plan_text(one, decision))
        if why := too_large(asked_of, one.rank, one.extra_bytes, asked.machine):
            print(why)
    if drawn is not None:
        mode = "idle" if asked.mode == "idle" else "queued"
        write([simulate(made, drawn, mode)], arguments)
    return 0


def _plan_text(plan: Any, decision: Any) -> str:
    ring = f", {plan.stages} steps at once" if plan.stages else ""
    return (
        f"schedule {decision}\n"
        f"checked for all {plan.problem.world} ranks: exact cover, no race, no deadlock\n"
        f"{len(plan.steps)} steps on {len(plan.lanes)} lanes, {plan.words} signal words{ring}"
    )


def _plan_json(plan: Any, decision: Any) -> dict[str, Any]:
    return {
        "problem": asdict(plan.problem),
        **{name: getattr(plan, name) for name in ("schedule", "rank", "lanes", "words")},
        **{name: getattr(decision, name) for name in ("source", "reason")},
        "buffers": [
            {
                **{name: getattr(one, name) for name in ("name", "holds", "dtype")},
                "shape": plan.shape(one.name),
                **{name: getattr(one, name) for name in ("memory", "layout")},
            }
            for one in plan.buffers
        ],
        "stages": plan.stages,
        "extra_bytes": plan.extra_bytes,
        "steps": [
            {
                **{name: getattr(step, name) for name in ("op", "lane", "label", "after")},
                "waits": [signal.name for signal in step.waits],
                "posts": [signal.name for signal in step.posts],
                **{
                    key: [{"signal": one.name, "rows": (one.first, one.last)} for one in signals]
                    for key, signals in (("gates", step.gates), ("announces", step.announces))
                },
                "work": _plain(step.work),
            }
            for step in plan.steps
        ],
    }


def _plain(value: Any) -> Any:
    """Regions, and what consists of them, as JSON has them."""
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return list(map(_plain, value)) if isinstance(value, tuple) else value
