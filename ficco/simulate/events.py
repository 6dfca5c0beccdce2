"""Plans on a Machine, as a discrete-event simulation.

What is modelled, and how:

- *Copies.* A lane of copies is a queue. A copy holds it for ``gap`` and its bytes' time, and its
  signal is seen ``latency`` and its bytes' time after it began. Bytes move at the copy's own rate
  or at its share of what it shares: on a switch the sender's port out and the receiver's port in,
  on a mesh the link between the two. A rank has no more copies in flight than it has engines.
  Copies by the kernel that go together (:func:`ficco.plan.together`) move at the rate of all their
  bytes, without gaps; they are enqueued once, and who waits for one of them waits for all. On a
  compute lane, where nothing is forked and joined, they are seen sooner (``Copies.in_front``).
- *Ranks out of step.* Cards multiply at different rates, so that products which are sent are ready
  sooner on one rank than on the next. Copies that go from peer to peer by turns then meet copies of
  other ranks at the ports of a switch, for as long as those are early or late: see ``APART``. Rows
  of copies to one peer (a ring) meet nobody.
- *Products.* The GPU of a rank serves the products of all its compute lanes in the order in which
  they begin, each for its ``Gemm.seconds``. The next one begins in the last wave of the one before
  and fills part of it: of what ``Gemm.dense`` is less than that, see ``UNFILLED``. Copies within
  the rank are served likewise, at the rate of its memory. Of products that can begin at the same
  time on several lanes those come last that are sent: a GPU may take either, and where it takes a
  product that stays, the copies of the other wait for both (up to 32 % slower with two products on
  2 H200). A card that multiplies for long gets slower (``Gemm.heated``).
- *Sums* of what arrives read all their parts and write the result, at the rate of the rank's
  memory. They come before products that are not yet served, whose lanes have a lower priority, but
  ``Memory.latency`` after what they wait for: the next product of a lane does not wait for as long
  behind the one before it, so that a sum of what that one made comes behind both.
- *Collectives* take as long as a curve says (``Machine.exchange``), and nothing runs beside them.
- *Contention.* While a rank sends or receives, its products take longer by a factor, and while it
  multiplies, its copies do (FiCCO, section IV-D). Copy kernels slow products as a collective does.
- *The host.* In the mode ``"idle"`` an operation is there for the GPU when the host has enqueued
  it, after all those before it in the plan; in the mode ``"queued"`` all are there at 0. Hosts do
  not begin at the same time (``Host.skew``), so that on a switch copies that would go by turns
  meet at a port: on 4 H200 that, not the host's own time, is most of what many small pieces lose
  (docs/results/measured-h200-4.csv, hetero-fused-1d:pieces=4 where copies take as long as GEMMs).
- *The end* is when the caller's stream is through, which waits for all lanes but ``sync``. Slots
  are free: nothing waits for the call before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import comb, floor
from typing import Any, NamedTuple

from ficco.machine import (
    COLLECTIVES,
    Contention,
    Copies,
    Gemm,
    Host,
    Machine,
    Memory,
    Topology,
)
from ficco.plan import OPS, Plan, Product, Region, Signal, Step, in_parts, together, unknown
from ficco.problem import Problem
from ficco.simulate.mirror import Mirror
from ficco.timeline import SYNC_LANE

#: Whether the host runs ahead of the GPU, or the GPU waits for its host.
MODES = ("queued", "idle")

#: Points of time per second: what differs by less than a femtosecond happens at the same time.
GRID = 2.0**50

#: Share of the start and of the last wave of a product that the next one on another lane does not
#: fill. Fitted: with it, the times with two compute lanes over those with one are 1.1 % from those
#: in docs/results/measured-h200-4.csv in the mean, with 0 they are 2.2 % from them.
UNFILLED = 0.5

#: How far ranks are out of step, as a share of the seconds that they have multiplied. Fitted to 104
#: all-reduces and 136 reduce-scatters on 4 H200 (docs/results, 2026-11-22): with it predictions are
#: 4.7 and 3.0 % from them in the mean, with 0 they are 6.9 and 3.0 % from them.
APART = 0.03

#: A step with its start and stop.
Ran = tuple[Step, float, float]


def _exchanged(problem: Problem) -> int:
    """Bytes that a rank has for another, as curves of collectives count them; where ranks or
    blocks differ, those of the rank that has most to send or to receive."""
    if not problem.kind.blocks:
        rows: float = max(problem.rows)
    else:
        peers = range(problem.world)
        sent = [sum(problem.block(i, j) for j in peers if j != i) for i in peers]
        received = [sum(problem.block(i, j) for i in peers if i != j) for j in peers]
        rows = max(*sent, *received) / max(problem.world - 1, 1)
    return round(rows * (problem.n if problem.kind.scatters else problem.k) * problem.itemsize)


def _reads(step: Step) -> bool:
    """Whether a step sums what lies at peers."""
    reduction = step.reduction
    return reduction is not None and any(p.rank != reduction.out.rank for p in reduction.parts)


class _Uses(NamedTuple):
    """What the steps of all plans use: operations, sums that read at peers, a kernel that moves
    bytes, collectives; and whether they send products."""

    ops: frozenset[str]
    reads: bool
    kernel: bool
    collectives: frozenset[str]
    products: bool


def _uses(plans: Sequence[Plan]) -> _Uses:
    steps = [step for plan in plans for step in plan.steps]
    reads = any(_reads(step) for step in steps)
    for step in steps:
        if step.op not in OPS:
            raise unknown(step, "the simulator")
    copied = any(step.op == "copy" and step.mover == "kernel" for step in steps)
    collectives = frozenset(step.label for step in steps if step.op == "collective")
    products = any(
        step.op == "copy" and step.transfer is not None and step.transfer.terms for step in steps
    )
    ops = frozenset(step.op for step in steps)
    return _Uses(ops, reads, reads or copied, collectives, products)


class _Lane:
    """A queue of steps of one rank, and the step at its head once that has begun."""

    __slots__ = (
        "rank", "computes", "steps", "turns", "at", "free", "version", "start", "launched",
        "served", "left", "pace", "since", "alone", "ports", "ends", "peer",
    )  # fmt: skip

    def __init__(self, rank: int, computes: bool) -> None:
        self.rank = rank  # index among those that are simulated
        self.computes = computes  # other lanes have a higher priority
        self.steps: list[int] = []
        self.turns: list[int] = []  # of the steps, among those that could begin at the same time
        self.at = 0  # which of the steps is at the head
        self.free = 0.0  # when that can begin, as far as the lane is concerned
        self.version = 0  # of its end, which moves with its pace
        self.start = 0.0
        self.launched = False  # whether a product ran before
        self.served = 0.0  # when its product is, on its rank's clock
        #: Of a product: when it ends on its rank's clock. Of a copy: bytes to move, at a pace in
        #: bytes per second, since when, its pace if nothing else ran, what it shares with others,
        #: and the ranks whose products it slows down.
        self.left = self.pace = self.since = self.alone = 0.0
        self.ports: tuple[int, ...] = ()
        self.ends: tuple[int, ...] = ()
        self.peer = -1  # of its last copy


def _head(lane: _Lane) -> int:
    """Of lanes that can begin at the same time, that with the smallest does first."""
    return lane.turns[lane.at] if lane.at < len(lane.steps) else -1


class _Rank:
    """The GPU of a rank. Its products go by a clock that runs slower while copies are in flight."""

    __slots__ = (
        "plan", "lanes", "clock", "since", "slowed", "worked", "served", "multiplying", "busy",
        "copying", "in_flight", "engines", "queue", "enqueued", "ran",
        "posts", "runs", "bytes", "rides",
    )  # fmt: skip

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan = plan
        self.lanes: dict[str, _Lane] = {}
        steps = plan.steps
        sent = {i for step in steps if step.op == "copy" for i in step.after}
        for index, step in enumerate(steps):
            if step.lane not in self.lanes:
                self.lanes[step.lane] = _Lane(number, step.lane.startswith("compute"))
            lane = self.lanes[step.lane]
            lane.steps.append(index)
            lane.turns.append(index + len(steps) * (index in sent and step.op == "matmul"))
        self.clock = self.since = 0.0
        self.slowed = 1.0  # seconds per second of the clock
        self.worked = 0.0  # seconds of products, had the card stayed cold
        self.served = 0.0  # when the next product can begin, on the clock
        self.multiplying: dict[_Lane, None] = {}
        self.busy = False  # whether copies are slowed down by products
        self.copying: dict[_Lane, None] = {}  # lanes, of any rank, with a copy to or from this one
        self.in_flight = 0  # copies of its own lanes
        self.engines = 0  # how many there can be; 0 for no limit
        self.queue: deque[_Lane] = deque()  # lanes that wait for an engine
        self.enqueued: list[tuple[float, float]] = []  # step -> when it is there, and its posts
        self.ran: list[tuple[float, int, float]] = []  # start, step, stop
        self.posts = [step.posts for step in steps]
        #: Copies that go together, and the bytes of all, by each of them.
        self.runs: dict[int, tuple[int, ...]] = {}
        self.bytes: dict[int, int] = {}
        self.rides: set[int] = set()  # what a launch of copies brings to its place here

    def join(self) -> None:
        """Let copies go together, as on a GPU, where one launch carries them out. What it brings
        to its place within the rank is there before what travels."""
        steps = self.plan.steps
        for whole in together(self.plan):
            run = tuple(i for i in whole if steps[i].op == "copy")
            if len(whole) > 1:
                self.rides.update(set(whole) - set(run))
            if len(run) < 2:
                continue
            moved = [one for i in run if (one := steps[i].transfer) is not None]
            nbytes = sum(self.plan.nbytes(one.src) for one in moved)
            self.runs.update(dict.fromkeys(run, run))
            self.bytes.update(dict.fromkeys(run, nbytes))
            self.posts[run[-1]] = tuple(post for i in run for post in steps[i].posts)
            for i in run[:-1]:
                self.posts[i] = ()

    def waiting(self) -> list[_Lane]:
        """The compute lanes whose products are not yet served."""
        return [lane for lane in self.multiplying if lane.computes and lane.served > self.clock]

    def tick(self, now: float) -> float:
        """What the clock says now."""
        self.clock += (now - self.since) / self.slowed
        self.since = now
        return self.clock


#: Kinds of events.
_BEGIN, _END, _ENGINE, _REACH = range(4)


class Simulation:
    """Plans of all ranks, or the plan of one that stands for all."""

    def __init__(
        self, plans: Sequence[Plan], machine: Machine, mode: str, mirror: Mirror | None = None
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode: required one of {', '.join(MODES)}, got {mode!r}")
        self.machine, self.mode, self.mirror = machine, mode, mirror
        plans = [in_parts(plan) for plan in plans]
        self.problem, self.name = plans[0].problem, plans[0].schedule
        self.itemsize = {one.name: one.itemsize for plan in plans for one in plan.buffers}
        self.world = self.problem.world
        self.ranks = [_Rank(plan, number) for number, plan in enumerate(plans)]
        self.now = 0.0
        self.pushed = 0
        self.events: list[tuple[float, int, int, int, _Lane, int]] = []
        self.ready: list[_Lane] = []  # lanes to look at
        #: When a signal is seen, or a step is over; lanes that wait for it to be known.
        self.known: dict[object, float] = {}
        self.waiting: dict[object, list[_Lane]] = {}
        self.sharers: dict[int, dict[_Lane, None]] = {}  # lanes whose copies use a port or link
        self.changed_ranks: dict[int, None] = {}
        self.changed_copies: dict[_Lane, None] = {}
        self.gathering: list[_Lane] = []
        self._seconds: dict[tuple[int, ...], tuple[float, float]] = {}
        self._rates: dict[int, float] = {}
        uses = _uses(plans)
        self._take(uses)
        self._contend(uses)
        #: What a copy that meets those of other ranks moves in addition, as a share of its bytes.
        self.met = self._met(uses)
        for rank in self.ranks:
            self._prepare(rank, uses)

    def _take(self, uses: _Uses) -> None:
        """The blocks of the machine that the plans need, and of others what is there."""
        ops, machine = uses.ops, self.machine
        self.gemm: Gemm = self._block("gemm", "matmul" in ops)
        self.memory: Memory = self._block("memory", bool({"place", "reduce"} & ops))
        for name in uses.collectives:
            if getattr(machine, COLLECTIVES[name]) is None:
                self._block("all_gather", True)
        self.topology: Topology = self._block("topology", uses.reads or "copy" in ops)
        self.copies: Copies = self._block("copies", uses.reads or "copy" in ops)
        if uses.kernel and machine.kernel_copies is not None:
            self.copies = machine.kernel_copies
        self.contention: Contention = self._block("contention", {"copy", "matmul"} <= ops)
        self.host: Host = self._block("host", self.mode == "idle")

    def _block(self, name: str, needed: bool) -> Any:
        found = getattr(self.machine, name)
        if needed and found is None:
            raise ValueError(
                f"machine {self.machine.name}: required the block {name!r} to simulate {self.name} "
                f"({self.mode}), got none; measure it, or add it to the file"
            )
        return found

    def _contend(self, uses: _Uses) -> None:
        """By what factors products and copies take longer beside each other."""
        contention = self.contention
        self.product_factor = self.copy_factor = 1.0
        if contention is not None and uses.kernel:
            self.product_factor = contention.gemm_under_collective
            self.copy_factor = contention.collective_under_gemm
        elif contention is not None:
            self.product_factor = contention.gemm_under_copies
            self.copy_factor = contention.copies_under_gemm

    def _prepare(self, rank: _Rank, uses: _Uses) -> None:
        """What goes together on a rank, how many copies it has in flight, and when its host has
        enqueued what."""
        if uses.kernel and self.machine.accelerator != "cpu":
            rank.join()
        lanes = sum(name.startswith("copy") for name in rank.lanes)
        if self.copies is not None and lanes > self.copies.engines:
            rank.engines = self.copies.engines
        if self.mode == "idle":
            late = 1.0 if self.mirror else rank.plan.rank / max(self.world - 1, 1)
            rank.enqueued = _enqueued(rank, self.host, late * self.host.skew)

    def run(self) -> list[list[Ran]]:
        """The steps of every rank that is simulated, in the order of their start."""
        for rank in self.ranks:
            self.ready.extend(rank.lanes.values())
        events = self.events
        self._go_on()
        while events:
            self.now = now = events[0][0]
            while events and events[0][0] == now:
                _, _, _, kind, lane, version = heappop(events)
                if kind == _BEGIN:
                    self._begin(lane)
                elif kind == _ENGINE:
                    self._free_engine(lane)
                elif kind == _REACH:
                    rank = self.ranks[lane.rank]
                    self._begin_product(lane, rank, rank.plan.steps[lane.steps[lane.at]])
                elif version == lane.version:
                    self._end(lane)
            self._go_on()
        if any(len(rank.ran) < len(rank.plan.steps) for rank in self.ranks):
            raise ValueError(f"{self.name}: the plans wait for each other for ever")
        return [
            [(rank.plan.steps[index], start, stop) for start, index, stop in sorted(rank.ran)]
            for rank in self.ranks
        ]

    def _go_on(self) -> None:
        """Begin what can begin now, then see who slows whom down."""
        while self.ready:
            ready, self.ready = self.ready, []
            for lane in sorted(ready, key=_head) if len(ready) > 1 else ready:
                self._advance(lane)
        if self.changed_ranks or self.changed_copies:
            self._settle()

    def _push(self, at: float, kind: int, lane: _Lane) -> None:
        self.pushed += 1
        at = floor(at * GRID + 0.5) / GRID
        heappush(self.events, (at, _head(lane), self.pushed, kind, lane, lane.version))

    # What a step waits for.

    def _wait_key(self, signal: Signal) -> object:
        """What a signal is known by: its word, or this rank's own signal that mirrors it."""
        if not self.mirror:
            return signal.waiter, signal.word
        me, poster = signal.waiter, signal.poster
        # The peer at the same distance the other way round.
        mirror = (2 * me - poster) % self.world if self.mirror.turns else poster
        return signal.kind, mirror, signal.slot

    def _post_key(self, signal: Signal) -> object:
        if not self.mirror:
            return signal.waiter, signal.word
        return signal.kind, signal.waiter, signal.slot

    def _tell(self, key: object, at: float) -> None:
        self.known[key] = at
        if key in self.waiting:
            self.ready.extend(self.waiting.pop(key))

    def _advance(self, lane: _Lane) -> None:
        """Begin the step at the head, now or later, once it is known when all it waits for is."""
        if lane.at == len(lane.steps):
            return
        rank = self.ranks[lane.rank]
        index = lane.steps[lane.at]
        step = rank.plan.steps[index]
        begin = lane.free
        if rank.enqueued:
            begin = max(begin, rank.enqueued[index][0])
        keys = [self._wait_key(signal) for signal in step.waits if signal.kind != "released"]
        if step.after:
            keys += [(-1, lane.rank, earlier) for earlier in step.after]
        for key in keys:
            at = self.known.get(key)
            if at is None:
                self.waiting.setdefault(key, []).append(lane)
                return
            if at > begin:
                begin = at
        if begin > self.now:
            self._push(begin, _BEGIN, lane)
        else:
            self._begin(lane)

    # Steps.

    def _begin(self, lane: _Lane) -> None:
        rank = self.ranks[lane.rank]
        step = rank.plan.steps[lane.steps[lane.at]]
        if step.op == "copy":
            if rank.engines and rank.in_flight == rank.engines:
                rank.queue.append(lane)
                return
            lane.start = self.now
            self._begin_copy(lane, rank, step)
            return
        lane.start = self.now
        if step.op == "matmul":
            self._begin_product(lane, rank, step)
        elif step.op in ("place", "reduce"):
            if self._move(step) and lane.steps[lane.at] not in rank.rides:
                reads = _reads(step)
                latency = self.copies.seen(lane.computes) if reads else self.memory.latency
                self._push(self.now + latency, _REACH, lane)
            else:
                self._over(lane, self.now, self.now)
        elif step.op == "collective":
            self.gathering.append(lane)
            if len(self.gathering) == len(self.ranks):
                self._gather()
        else:  # sync: no operation
            self._over(lane, self.now, self.now)

    def _end(self, lane: _Lane) -> None:
        rank = self.ranks[lane.rank]
        if lane in rank.multiplying:
            del rank.multiplying[lane]
            self.changed_ranks[lane.rank] = None
        elif lane.ends:
            self._end_copy(lane, rank)
            return
        self._over(lane, self.now, self.now)

    def _over(self, lane: _Lane, seen: float, free: float) -> None:
        """The step at the head is over: for others when that is seen, for the lane when free."""
        rank = self.ranks[lane.rank]
        index = lane.steps[lane.at]
        rank.ran.append((lane.start, index, free))
        lane.free = free
        lane.at += 1
        lane.version += 1
        posted = max(seen, rank.enqueued[index][1]) if rank.enqueued else seen
        for signal in rank.posts[index]:
            if signal.kind != "released":
                self._tell(self._post_key(signal), posted)
        run = rank.runs.get(index, (index,))
        if run[-1] == index:
            for one in run:
                self._tell((-1, lane.rank, one), seen)
        self.ready.append(lane)

    def _gather(self) -> None:
        """The collective begins once all ranks have reached it."""
        assert isinstance(self.problem, Problem)
        kind = self.problem.kind.collective
        end = self.now + self.machine.exchange(kind, _exchanged(self.problem))
        for lane in self.gathering:
            self._push(end, _END, lane)
        self.gathering = []

    # Products, and copies within a rank.

    def _begin_product(self, lane: _Lane, rank: _Rank, step: Step) -> None:
        whole, filled = self._multiply(step) if step.op == "matmul" else (self._move(step),) * 2
        if not whole:
            self._over(lane, self.now, self.now)
            return
        if step.op == "matmul":  # the more was multiplied, the hotter the card
            worked, rank.worked = rank.worked, rank.worked + whole
            slower = (self.gemm.heated(rank.worked) - self.gemm.heated(worked)) / whole
            whole, filled = whole * slower, filled * slower
        begin = rank.tick(self.now)
        if lane.launched and step.op == "matmul":
            begin += self.gemm.launch
        lane.launched = True
        takes = filled + UNFILLED * (whole - filled)
        begin = max(begin, rank.served)
        overtaken = [] if lane.computes else rank.waiting()
        for other in overtaken:
            begin = min(begin, other.served)
            other.served += takes
            other.left += takes
            other.version += 1
            self._push(self.now + (other.left - rank.clock) * rank.slowed, _END, other)
        rank.served = (rank.served if overtaken else begin) + takes
        lane.served, lane.left = begin, begin + whole
        lane.ends = ()
        rank.multiplying[lane] = None
        self.changed_ranks[lane.rank] = None
        self._push(self.now + (lane.left - rank.clock) * rank.slowed, _END, lane)

    def _multiply(self, step: Step) -> tuple[float, float]:
        """Seconds of a step's products alone, and with their last waves filled by others."""
        whole = filled = 0.0
        for product in step.products:
            key = self._kind(product)
            found = self._seconds.get(key)
            if found is None:
                found = self._seconds[key] = self._product(*key)
            between = self.gemm.launch if whole else 0.0
            whole += found[0] + between
            filled += found[1] + between
        return whole, filled

    def _kind(self, product: Product) -> tuple[int, int, int, int, int, bool, bool]:
        """What the seconds of a product depend on."""
        out, itemsize = product.out, self.itemsize[product.a.buffer]
        wide = itemsize < 4 <= self.itemsize[out.buffer]
        adds = not wide and (product.accumulate or product.addend is not None)
        return out.rows, out.cols, product.b.rows, product.batch, itemsize, wide, adds

    def _product(
        self, m: int, n: int, k: int, batch: int, itemsize: int, wide: bool, adds: bool
    ) -> tuple[float, float]:
        if not (m and n and k):
            return 0.0, 0.0
        how: dict[str, Any] = {"batch": batch, "itemsize": itemsize}
        whole = self.gemm.seconds(m, n, k, **how, wide=wide, adds=adds)
        return whole, self.gemm.dense(m, n, k, **how, wide=wide, adds=adds)

    def _move(self, step: Step) -> float:
        """Seconds to read here, or at the peers, and write here."""
        regions: tuple[Region, ...]
        if step.reduction is not None:
            regions = (*step.reduction.parts, step.reduction.out)
        else:
            assert step.transfer is not None
            regions = step.transfer[:2]
        near, far = 0, []
        for one in regions:
            nbytes = one.elements * self.itemsize[one.buffer]
            if one.rank == regions[-1].rank:
                near += nbytes
            else:
                far.append(nbytes)
        seconds = near / self.memory.bandwidth
        if any(far):
            nbytes = max(far) if self.topology.kind == "mesh" else sum(far)
            seconds += nbytes / self.copies.rate(nbytes)
        return seconds

    # Copies between ranks.

    def _begin_copy(self, lane: _Lane, rank: _Rank, step: Step) -> None:
        assert step.transfer is not None
        src, dst = step.transfer.src, step.transfer.dst
        nbytes = src.elements * self.itemsize[src.buffer]
        if not nbytes:
            self._over(lane, self.now, self.now)
            return
        rank.in_flight += 1
        size = rank.bytes.get(lane.steps[lane.at], nbytes)
        if size not in self._rates:
            self._rates[size] = self.copies.rate(size)
        lane.left, lane.alone = float(nbytes), self._rates[size]
        lane.pace, lane.since = 0.0, self.now
        peer = dst.rank if src.rank == rank.plan.rank else src.rank
        if self.met and peer != lane.peer:
            lane.left += self.met * min(APART * rank.worked * lane.alone, lane.left)
            lane.peer = peer
        if not self.mirror:
            lane.ends = src.rank, dst.rank
            one = src.rank * self.world + dst.rank
            lane.ports = (
                (one,) if self.topology.kind == "mesh" else (2 * src.rank, 2 * dst.rank + 1)
            )
        else:  # what uses the peer's port mirrors what uses this rank's
            lane.ends = (0,)
            lane.ports = (peer,) if self.topology.kind == "mesh" else (0,)
        for port in lane.ports:
            sharers = self.sharers.setdefault(port, {})
            sharers[lane] = None
            self.changed_copies.update(sharers)
        for end in lane.ends:
            self.ranks[end].copying[lane] = None
            self.changed_ranks[end] = None

    def _end_copy(self, lane: _Lane, rank: _Rank) -> None:
        for port in lane.ports:
            sharers = self.sharers[port]
            del sharers[lane]
            self.changed_copies.update(sharers)
        for end in lane.ends:
            del self.ranks[end].copying[lane]
            self.changed_ranks[end] = None
        self.changed_copies.pop(lane, None)
        lane.ends = ()
        free = self.now
        index = lane.steps[lane.at]
        if rank.runs.get(index, (index,))[-1] == index:
            free += self.copies.gap
        self._push(free, _ENGINE, lane)
        self._over(lane, self.now + self.copies.seen(lane.computes), free)

    def _free_engine(self, lane: _Lane) -> None:
        rank = self.ranks[lane.rank]
        rank.in_flight -= 1
        if rank.queue:
            self._begin(rank.queue.popleft())

    def _settle(self) -> None:
        """New paces for what began to share, or to be in the way of, something else."""
        for number in self.changed_ranks:
            rank = self.ranks[number]
            slowed = self.product_factor if rank.copying else 1.0
            if slowed != rank.slowed:
                clock = rank.tick(self.now)
                rank.slowed = slowed
                for lane in rank.multiplying:
                    lane.version += 1
                    self._push(self.now + (lane.left - clock) * slowed, _END, lane)
            if bool(rank.multiplying) != rank.busy:
                rank.busy = not rank.busy
                self.changed_copies.update(rank.copying)
        self.changed_ranks.clear()
        for lane in self.changed_copies:
            pace = lane.alone
            for port in lane.ports:
                pace = min(pace, self._share(len(self.sharers[port])))
            if any(self.ranks[end].busy for end in lane.ends):
                pace /= self.copy_factor
            if pace != lane.pace:
                lane.left -= lane.pace * (self.now - lane.since)
                lane.pace, lane.since = pace, self.now
                lane.version += 1
                self._push(self.now + max(lane.left, 0.0) / pace, _END, lane)
        self.changed_copies.clear()

    def _met(self, uses: _Uses) -> float:
        """By how much longer a copy takes, relatively, at a port that it may have to share: each
        other rank sends to one of its peers, to any as likely as to another."""
        peers = self.world - 1
        if not uses.products or peers < 2:
            return 0.0
        if self.topology is None or self.topology.kind != "switch":
            return 0.0
        others, each = peers - 1, 1 / peers
        left = sum(
            comb(others, n) * each**n * (1 - each) ** (others - n) * self._share(n + 1)
            for n in range(peers)
        )
        return self.topology.bandwidth / left - 1.0

    def _share(self, sharers: int) -> float:
        """Bytes per second of one of so many copies on a port or link."""
        whole = self.topology.bandwidth
        return whole if sharers == 1 else whole * self.topology.sharing / sharers


def _enqueued(rank: _Rank, host: Host, begin: float) -> list[tuple[float, float]]:
    """When the host has enqueued each step, and what the step posts.

    The lane ``sync`` comes last, as engines enqueue it. A collective is part of its call; a place
    or a sum is as much work for the host as a product.
    """
    plan = rank.plan
    at = begin + (host.collective_call if plan.collective else host.call)
    found = [(0.0, 0.0)] * len(plan.steps)
    for last in (False, True):
        for index, step in enumerate(plan.steps):
            run = rank.runs.get(index, (index,))
            if (step.lane == SYNC_LANE) != last or run[0] != index:
                continue
            if step.waits or step.after:
                at += host.signal
            there = at
            if step.op == "copy":
                there = at = at + host.copy
            elif step.op in ("place", "reduce") and index not in rank.rides:
                there = at = at + host.matmul
            elif step.op == "matmul":
                there = at + host.matmul  # of the first product: the next come while that runs
                at += host.matmul * len(step.products)
            if rank.posts[run[-1]]:
                at += host.signal
            for one in run:
                found[one] = there, at
    return found
