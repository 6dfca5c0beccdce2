"""Which copies of a Plan one launch of the copy kernel carries out."""

from __future__ import annotations

from ficco.plan.model import Plan, Step

#: Most bytes that go together on a copy lane. More would keep those who wait for the first copy
#: waiting for longer than launches of their own take: 6.5 us each (``kernel_copies`` in
#: configs/h200-4.yaml). In front of a product, on its own lane, whoever waits does so for all.
TOGETHER_BYTES = 4 << 20
#: Most copies of a launch.
MOST = 16


def together(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The steps of a Plan by what is enqueued at once, in the order of the first of each.

    Copies by the kernel that follow each other on a lane go together if they are of one shape, each
    to or from another peer, and none waits for more than the first; what they post is then posted
    behind the last. A place of the same shape that follows them joins them. On copy lanes only
    small ones do. Every other step stands alone.
    """
    runs: list[list[int]] = []
    latest: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        run = latest.get(step.lane)
        if run is not None and _follows(plan, run, step):
            run.append(index)
        else:
            run = latest[step.lane] = [index]
            runs.append(run)
    return tuple(map(tuple, runs))


def _follows(plan: Plan, run: list[int], step: Step) -> bool:
    """Whether a step goes together with those before it on its lane."""
    first = plan.steps[run[0]]
    if not (first.op == "copy" and first.mover == step.mover == "kernel"):
        return False
    if step.op not in ("copy", "place"):
        return False
    if len(run) == MOST:
        return False
    if step.waits or step.clears or not set(step.after) <= set(first.after):
        return False
    transfers = [other.transfer for other in (*(plan.steps[i] for i in run), step)]
    shapes = {(t.src.buffer, t.dst.buffer, t.src.rows, t.src.cols) for t in transfers if t}
    peers = {t.src.rank + t.dst.rank - plan.rank for t in transfers if t}
    nbytes = sum(t.src.elements for t in transfers if t) * plan.problem.itemsize
    few = nbytes <= TOGETHER_BYTES or step.lane.startswith("compute")
    return len(shapes) == 1 and len(peers) == len(transfers) and few
