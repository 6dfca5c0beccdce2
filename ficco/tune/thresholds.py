"""The thresholds of the rule, fitted to what its schedules take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ficco
from ficco.bench.inputs import Operands
from ficco.heuristics.rule import ROWS, Observation, fit_thresholds
from ficco.machine import Thresholds
from ficco.problem import Problem
from ficco.tune.site import Site, needs_peers


def thresholds(site: Site) -> Thresholds:
    needs_peers(site)
    group, device = site.watch.group, site.watch.device
    observed = []
    for m, n, k in site.effort.rule:
        rows = (m // site.world,) * site.world
        problem = Problem("all_gather_matmul", rows, n, k, site.effort.dtype)
        operands = Operands(problem, site.watch.rank, device)
        operands.random(0)

        def call(name: str, o: Operands = operands) -> Callable[[], Any]:
            return lambda: ficco.all_gather_matmul(o.a_LK, o.b_KN, group=group, schedule=name)

        calls = {name: call(name) for name in ROWS}
        found = site.time("thresholds", calls, share=1 / len(site.effort.rule))
        seconds = {name: one.seconds for name, one in found.items()}
        observed.append(Observation(problem, seconds))
        site.watch.release()
    fitted = fit_thresholds(observed)
    return replace(fitted, provenance=site.provenance("fitted", fitted.provenance.note))
