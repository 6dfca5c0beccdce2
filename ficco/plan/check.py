"""The proof that the Plans of all ranks together compute the product, in any interleaving.

The ranks' steps are executed symbolically, each rank's whole plan as one queue in enqueue order
(streams may share a hardware queue). If that completes, no interleaving of the lanes deadlocks
either, since lanes only take order away. The execution is also a topological order of what happens
before what, in which vector clocks over the lanes decide for any two accesses whether they are
ordered. With them:

1. every signal has one poster, one waiter, one word, and is cleared by its waiter;
2. whatever is read was written before, by the step that should have, and is not overwritten while
   it may still be read;
3. every element of the product is written once, by products whose rows of A and of b belong
   together and that cover all of k once;
4. calls compose: all access to a rank's shared memory by a peer comes after that rank has begun
   this call, and all access by anyone comes before that rank hands its slot on. The call before
   and the call behind, whatever they are, obey the same rule, so that no pair of calls needs a
   proof of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.plan.model import SHARED_BUFFERS, Plan, Region, Signal, Step

Clock = npt.NDArray[np.int32]


class PlanError(AssertionError):
    """A Plan breaks a rule. That is an error of ficco, never of its caller."""


class _Access(NamedTuple):
    when: int  # position in the execution
    write: bool
    rows: tuple[int, int]
    cols: tuple[int, int]
    shift: tuple[int, int]  # what is there: gathered A's (row, column) less the buffer's
    adds: tuple[int, int] | None = None  # rows of b that a product adds up


def check(plans: Sequence[Plan]) -> None:
    """Prove the Plans of all ranks of a Problem; raise :class:`PlanError` where they break a rule."""
    _Proof(plans).run()


class _Proof:
    def __init__(self, plans: Sequence[Plan]) -> None:
        if not plans:
            raise PlanError("no plans")
        self.plans = plans
        self.problem = plans[0].problem
        for rank, plan in enumerate(plans):
            if plan.rank != rank or (plan.problem, plan.schedule, plan.words) != (
                self.problem,
                plans[0].schedule,
                plans[0].words,
            ):
                raise PlanError(f"rank {rank} holds a plan of something else")
        if len(plans) != self.problem.world:
            raise PlanError(f"{len(plans)} plans for {self.problem.world} ranks")
        self.lanes: dict[tuple[int, str], int] = {}
        for plan in plans:
            for lane in plan.lanes:
                self.lanes[plan.rank, lane] = len(self.lanes)
        self.lanes_of = [
            [i for (owner, _), i in self.lanes.items() if owner == rank]
            for rank in range(len(plans))
        ]

    def name(self, rank: int, index: int) -> str:
        step = self.plans[rank].steps[index]
        return f"rank {rank} step {index} ({step.op} {step.label!r} on {step.lane})"

    def run(self) -> None:
        self._words()
        self._execute()
        self._compose()
        self._memory()

    # 1. Signals.

    def _words(self) -> None:
        self.poster: dict[Signal, tuple[int, int]] = {}
        waiter: dict[Signal, tuple[int, int]] = {}
        cleared: set[Signal] = set()
        words: dict[tuple[int, int], Signal] = {}
        for plan in self.plans:
            for index, step in enumerate(plan.steps):
                here = (plan.rank, index)
                for found, signals in ((self.poster, step.posts), (waiter, step.waits)):
                    for signal in signals:
                        if signal in found:
                            raise PlanError(
                                f"{signal.name}: used twice, at {self.name(*found[signal])} and "
                                f"{self.name(*here)}"
                            )
                        found[signal] = here
                for signal in step.clears:
                    if signal.waiter != plan.rank or signal in cleared:
                        raise PlanError(f"{signal.name}: cleared twice or by a stranger")
                    cleared.add(signal)
        for signal in self.poster.keys() | waiter.keys():
            if signal not in self.poster:
                raise PlanError(f"{signal.name}: waited for and never posted")
            if signal not in waiter:
                raise PlanError(f"{signal.name}: posted and never waited for, its word stays dirty")
            if signal not in cleared:
                raise PlanError(f"{signal.name}: never cleared, its word stays dirty")
            if (self.poster[signal][0], waiter[signal][0]) != (signal.poster, signal.waiter):
                raise PlanError(f"{signal.name}: posted or waited for by another rank than it says")
            if not 0 <= signal.word < self.plans[0].words:
                raise PlanError(f"{signal.name}: word {signal.word} is outside the pad")
            if signal.released != (signal.word < len(self.plans)):
                raise PlanError(f"{signal.name}: word {signal.word} rests at another value")
            if words.setdefault((signal.waiter, signal.word), signal) != signal:
                raise PlanError(f"{signal.name}: shares its word with another signal")
        if cleared - waiter.keys():
            raise PlanError("a word is cleared that nobody waits for")
        self.waiter = waiter

    # 2. Execution in enqueue order, and clocks.

    def _execute(self) -> None:
        order = self._order(one_queue=True)
        if order is None:
            stuck = self._order(one_queue=False)
            kind = (
                "wait for each other in a circle"
                if stuck is None
                else "deadlock where lanes share one hardware queue"
            )
            raise PlanError(f"steps {kind}: {self._stuck}")
        self.order = order
        self.when = {here: i for i, here in enumerate(order)}
        self._clocks()

    def _order(self, one_queue: bool) -> list[tuple[int, int]] | None:
        """An order in which every step can run, or None."""
        posted: set[Signal] = set()
        complete: list[set[int]] = [set() for _ in self.plans]
        queues: list[tuple[int, list[int]]] = []
        for plan in self.plans:
            if one_queue:
                queues.append((plan.rank, list(range(len(plan.steps)))))
            else:
                for lane in plan.lanes:
                    queue = [i for i, step in enumerate(plan.steps) if step.lane == lane]
                    queues.append((plan.rank, queue))
        heads = [0] * len(queues)
        order: list[tuple[int, int]] = []
        moved = True
        while moved:
            moved = False
            for number, (rank, queue) in enumerate(queues):
                steps = self.plans[rank].steps
                while heads[number] < len(queue):
                    index = queue[heads[number]]
                    step = steps[index]
                    if any(not s.released and s not in posted for s in step.waits):
                        break
                    if any(i not in complete[rank] for i in step.after):
                        break
                    posted.update(step.posts)
                    complete[rank].add(index)
                    order.append((rank, index))
                    heads[number] += 1
                    moved = True
        stuck = [
            self.name(rank, queue[head])
            for head, (rank, queue) in zip(heads, queues, strict=True)
            if head < len(queue)
        ]
        self._stuck = "; ".join(stuck[:4])
        return None if stuck else order

    def _clocks(self) -> None:
        """For every step the latest step of every lane that happens before it.

        Only a step that joins another lane changes more than its own lane's entry, so that a step
        holds its own position and shares the rest with the last join of its lane.
        """
        lanes = len(self.lanes)
        joined: list[Clock] = [np.zeros(lanes, np.int32) for _ in range(lanes)]
        count = [0] * lanes
        self.base: list[Clock] = []
        self.spot: list[tuple[int, int]] = []  # lane and position on it
        for rank, index in self.order:
            step = self.plans[rank].steps[index]
            lane = self.lanes[rank, step.lane]
            sources = [self.when[self.poster[s]] for s in step.waits if not s.released]
            sources += [self.when[rank, i] for i in step.after]
            if sources:
                clock = joined[lane].copy()
                for source in sources:
                    there, position = self.spot[source]
                    if clock[there] < position:
                        np.maximum(clock, self.base[source], out=clock)
                        clock[there] = position
                joined[lane] = clock
            count[lane] += 1
            self.spot.append((lane, count[lane]))
            self.base.append(joined[lane])

    def before(self, first: int, second: int) -> bool:
        """Whether one position of the execution happens before another in every interleaving."""
        lane, position = self.spot[first]
        if lane == self.spot[second][0]:
            return position <= self.spot[second][1]
        return bool(self.base[second][lane] >= position)

    def begun(self, rank: int, when: int) -> bool:
        """Whether some step of ``rank`` in this call happens before ``when``."""
        return bool(self.base[when][self.lanes_of[rank]].any())

    # 4. Composition with the calls before and behind.

    def _compose(self) -> None:
        world = len(self.plans)
        if world == 1:
            return
        hand_over: list[list[int]] = [[] for _ in self.plans]
        acquired: list[dict[int, int]] = [{} for _ in self.plans]
        for signal, here in self.poster.items():
            if signal.released:
                hand_over[signal.poster].append(self.when[here])
                acquired[signal.waiter][signal.poster] = self.when[self.waiter[signal]]
        for rank in range(world):
            if len(hand_over[rank]) != world - 1:
                raise PlanError(f"rank {rank} does not hand its slot to every peer")
            for signal, here in self.poster.items():
                if signal.released and signal.poster == rank:
                    wait = self.when[self.waiter[signal]]
                    if not self.before(wait, self.when[here]):
                        raise PlanError(f"{signal.name}: may be posted before it is cleared")
        released = [min(found) for found in hand_over]
        for when, (rank, index) in enumerate(self.order):
            step = self.plans[rank].steps[index]
            homes = {region.rank for region in _regions(step) if region.buffer in SHARED_BUFFERS}
            homes |= {region.rank for region in _regions(step) if region.rank != rank}
            homes |= {s.waiter for s in step.posts if not s.released}
            if step.waits or step.clears:
                homes.add(rank)
            for home in homes:
                if home != rank and not (
                    self.begun(home, when)
                    or (home in acquired[rank] and self.before(acquired[rank][home], when))
                ):
                    raise PlanError(
                        f"{self.name(rank, index)} reaches rank {home} before it has taken over "
                        "its slot"
                    )
                if not self.before(when, released[home]):
                    raise PlanError(
                        f"{self.name(rank, index)} may still use memory of rank {home} when that "
                        "hands its slot on"
                    )

    # 3. Memory.

    def _memory(self) -> None:
        self.accesses: dict[tuple[str, int], list[_Access]] = defaultdict(list)
        for when, (rank, index) in enumerate(self.order):
            for key, access in self._of(when, rank, self.plans[rank].steps[index]):
                self.accesses[key].append(access)
        for plan in self.plans:
            for name in ("out", "gathered"):
                rows, cols = self._shape(name, plan.rank)
                if rows and cols and (name == "out" or self.problem.return_gathered):
                    self._cover(name, plan.rank, rows, cols)
        for (name, rank), accesses in self.accesses.items():
            rows, cols = self._shape(name, rank)
            for access in accesses:
                if access.rows[1] > rows or access.cols[1] > cols or access.rows[0] < 0:
                    self._fail(access, name, "leaves the buffer")
            if name != "a":
                self._cells(name, accesses)

    def _shape(self, name: str, rank: int) -> tuple[int, int]:
        problem, plan = self.problem, self.plans[rank]
        return {
            "a": (problem.rows[rank], problem.k),
            "publish": (problem.rows[rank] if plan.publish else 0, problem.k),
            "staging": plan.staging,
            "sum": (problem.m if plan.sums else 0, problem.n),
            "out": (problem.m, problem.n),
            "gathered": (problem.m if problem.return_gathered else 0, problem.k),
        }[name]

    def _of(self, when: int, rank: int, step: Step) -> Iterator[tuple[tuple[str, int], _Access]]:
        """What a step reads and writes."""
        if step.transfer:
            src, dst = step.transfer
            if (src.rows, src.cols) != (dst.rows, dst.cols):
                self._fail_at(when, "copies between regions of different sizes")
            if dst.buffer == "a" or (step.op == "place" and {src.rank, dst.rank} != {rank}):
                self._fail_at(when, "writes where it must not")
            if src.buffer in ("a", "publish"):
                here = (self.problem.offsets[src.rank], 0)
                moved = (here[0] + src.row - dst.row, src.col - dst.col)
            else:
                here, moved = (dst.row - src.row, dst.col - src.col), (0, 0)
            if dst.buffer in ("gathered", "out") and moved != (0, 0):
                self._fail_at(when, "puts rows where others belong")
            yield _access(src, when, False, here)
            yield _access(dst, when, True, moved)
        for product in step.products:
            a, out = product.a, product.out
            if a.cols != product.k_last - product.k_first or a.rows != out.rows:
                self._fail_at(when, "multiplies regions that do not fit")
            if (out.col, out.col_stop) != (0, self.problem.n) or {a.rank, out.rank} != {rank}:
                self._fail_at(when, "multiplies at a peer or in part of the columns")
            for i in range(product.batch):
                down_a, down_out = i * product.a_stride, i * product.out_stride
                part_a = a._replace(row=a.row + down_a, row_stop=a.row_stop + down_a)
                part = out._replace(row=out.row + down_out, row_stop=out.row_stop + down_out)
                shift = (part.row - part_a.row, product.k_first - a.col)
                adds = (product.k_first, product.k_last)
                if a.buffer == "a":
                    if shift != (self.problem.offsets[rank], 0):
                        self._fail_at(when, "multiplies its own rows into a peer's")
                yield _access(part_a, when, False, shift)
                if product.accumulate:
                    yield _access(part, when, False, (0, 0), adds)
                yield _access(part, when, True, (0, 0), adds)

    def _cover(self, name: str, rank: int, rows: int, cols: int) -> None:
        """Every row of a result is written: what no access bounds is a gap."""
        spans = sorted(
            (a.rows, a.cols) for a in self.accesses[name, rank] if a.write and a.rows[0] < a.rows[1]
        )
        area = 0
        seen: set[tuple[tuple[int, int], tuple[int, int]]] = set()
        for span in spans:
            if span not in seen:
                seen.add(span)
                area += (span[0][1] - span[0][0]) * (span[1][1] - span[1][0])
        if area != rows * cols:
            raise PlanError(f"rank {rank}: {area} of {rows * cols} elements of {name} are written")

    def _cells(self, name: str, accesses: list[_Access]) -> None:
        """Check the accesses to every rectangle that no access divides."""
        row_cuts = sorted({bound for access in accesses for bound in access.rows})
        col_cuts = sorted({bound for access in accesses for bound in access.cols})
        row_at = {row: i for i, row in enumerate(row_cuts)}
        col_at = {col: i for i, col in enumerate(col_cuts)}
        cells: dict[tuple[int, int], list[_Access]] = defaultdict(list)
        for access in accesses:
            for i in range(row_at[access.rows[0]], row_at[access.rows[1]]):
                for j in range(col_at[access.cols[0]], col_at[access.cols[1]]):
                    cells[i, j].append(access)
        for found in cells.values():
            self._cell(name, found)

    def _cell(self, name: str, accesses: list[_Access]) -> None:
        last: _Access | None = None
        readers: list[_Access] = []
        added = 0
        for access in accesses:
            if not access.write:
                if last is None:
                    self._fail(access, name, "reads what nobody has written")
                elif not self.before(last.when, access.when):
                    self._fail(access, name, "may read before it is written")
                elif name in ("staging", "publish") and last.shift != access.shift:
                    self._fail(access, name, "reads another piece than it should")
                elif name == "sum" and access.adds is None and added != self.problem.k:
                    self._fail(access, name, "rounds before the last term")
                readers.append(access)
                continue
            for reader in readers:
                if not self.before(reader.when, access.when):
                    self._fail(access, name, "overwrites what may still be read")
            if last is not None and not self.before(last.when, access.when):
                self._fail(access, name, "may be overwritten by an unordered step")
            if last is not None and name in ("out", "gathered") and not self._adds_on(last, access):
                self._fail(access, name, "is written twice")
            if access.adds is not None:
                if last is not None and access.adds[0] < added and access.adds[1] > 0:
                    self._fail(access, name, "adds the same part of k twice")
                if access.adds[0] != added:
                    self._fail(access, name, "leaves out part of k")
                added = access.adds[1]
            last, readers = access, []
        if any(access.adds is not None for access in accesses) and added != self.problem.k:
            self._fail(accesses[-1], name, "does not cover all of k")

    def _adds_on(self, last: _Access, access: _Access) -> bool:
        return access.adds is not None and last.adds is not None and access.adds[0] > 0

    def _fail(self, access: _Access, name: str, why: str) -> None:
        self._fail_at(access.when, f"{why} ({name}, rows {access.rows}, columns {access.cols})")

    def _fail_at(self, when: int, why: str) -> None:
        raise PlanError(f"{self.name(*self.order[when])} {why}")


def _access(
    region: Region,
    when: int,
    write: bool,
    shift: tuple[int, int],
    adds: tuple[int, int] | None = None,
) -> tuple[tuple[str, int], _Access]:
    rows, cols = (region.row, region.row_stop), (region.col, region.col_stop)
    return (region.buffer, region.rank), _Access(when, write, rows, cols, shift, adds)


def _regions(step: Step) -> Iterator[Region]:
    if step.transfer:
        yield from step.transfer
    for product in step.products:
        yield product.a
        yield product.out
