"""Groups the copies of a Plan that one launch of the copy kernel carries out."""

from __future__ import annotations

from ficco.plan.model import Plan, Step, Transfer

#: Most bytes of one launch on a copy lane. With more, waiting for the first copy would take longer
#: than separate launches do: 6.5 us each (``kernel_copies`` in configs/h200-4.yaml). On a compute
#: lane there is no limit: the product there waits for all copies anyway.
TOGETHER_BYTES = 4 << 20
#: Most copies of one launch.
MOST = 16


def together(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The runs of steps of a Plan that are enqueued at once, ordered by the first step of each.

    Kernel copies that follow each other on a lane go together if they have one shape, each has
    another peer, and none waits for more than the first; their signals are posted after the last.
    A place of the same shape that follows them joins them. On copy lanes this holds for small
    copies only. Every other step is a run of its own.
    """
    runs: list[list[int]] = []
    latest: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        run = latest.get(step.lane)
        if run is not None and _joins(plan, run, step):
            run.append(index)
        else:
            run = latest[step.lane] = [index]
            runs.append(run)
    return tuple(map(tuple, runs))


def _joins(plan: Plan, run: list[int], step: Step) -> bool:
    """Whether one launch can carry out a step with ``run``, the steps before it on its lane, by the
    conditions of :func:`together`."""
    if not (isinstance(step.work, Transfer) and step.work.mover == "kernel"):
        return False
    steps = [plan.steps[i] for i in run]
    first = steps[0]
    if first.copy is None or first.copy.mover != "kernel" or len(run) == MOST:
        return False
    if step.waits or step.clears or not set(step.after) <= set(first.after):
        return False
    transfers = [one.work for one in (*steps, step) if isinstance(one.work, Transfer)]
    shapes = {(t.src.buffer, t.dst.buffer, t.src.rows, t.src.cols) for t in transfers}
    peers = {t.src.rank + t.dst.rank - plan.rank for t in transfers}
    nbytes = sum(plan.nbytes(t.src) for t in transfers)
    few = nbytes <= TOGETHER_BYTES or step.lane.startswith("compute")
    return len(shapes) == 1 and len(peers) == len(transfers) and few
