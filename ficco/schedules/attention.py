"""Plans of attention and of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ficco.plan.collector import paused
from ficco.plan.model import Plan
from ficco.problems.attention import AttentionProblem
from ficco.schedules.attention_gradient import GradientStage, GradientWorld, KeptGradientStage
from ficco.schedules.attention_stage import AttentionStage, AttentionWorld
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.space import Schedule


def refusal(problem: AttentionProblem, schedule: Schedule) -> str:
    """Why a schedule cannot serve attention; empty if it can."""
    name, why = f"schedule {schedule}", ""
    if schedule.own or schedule.grouping in ("one-shot", "tiled"):
        why = "attention gathers rows, in steps of a library's calls"
    elif schedule.dims == 2:
        why = "attention needs whole rows of keys"
    elif schedule.mover == "collective":
        why = "no collective brings each rank only the rows that it attends to"
    elif schedule.uniform and (schedule.grouping, schedule.pieces) != ("fused", 1):
        why = "the own rows are all there before the first piece is"
    elif problem.hosts > 1 and (schedule.pull or schedule.grouping == "ring"):
        does = "read memory of their peers (pull)" if schedule.pull else "pass rows on (ring)"
        why = f"ranks {does}, which no rank can do between hosts"
    return why and f"{name}: {why}; take growing, shard-overlap, hetero-fused-1d or serial"


def attention_plans(
    problem: AttentionProblem,
    schedule: Schedule,
    ranks: Sequence[int] | None = None,
    staging_bytes: int | None = None,
) -> list[Plan]:
    """The Plans of some ranks, or of all.

    Raises:
        ValueError: the schedule cannot serve attention, or ``staging_bytes``, a cap on the memory
            where pieces land, is too small for the largest step.
    """
    if why := refusal(problem, schedule):
        raise ValueError(why)
    if schedule.grouping == "ring":
        problem = replace(problem, ring=True)
    words = WordAllocator(problem.world)
    with paused():
        every = range(problem.world) if ranks is None else ranks
        builders = [Builder(problem, rank) for rank in every]
        if problem.backward:
            back = GradientWorld(problem, schedule, words, staging_bytes)
            stage = KeptGradientStage if problem.saved else GradientStage
            return [_plan(stage(back, one)) for one in builders]
        world = AttentionWorld(problem, schedule, words, staging_bytes)
        return [_plan(AttentionStage(world, one)) for one in builders]


def _plan(stage: AttentionStage) -> Plan:
    builder, world = stage.builder, stage.world
    stage.run()
    if builder.peers and builder.steps:
        builder.retire(stage.silent())
    stages = stage.stages.count if stage.stages else 0
    return builder.plan(str(world.schedule), world.buffers, world.words, stages)
