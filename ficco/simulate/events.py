"""Discrete-event simulation of Plans on a Machine.

The model:

- *Copies.* A copy lane is a queue. A copy occupies the lane for ``gap`` and the time of its bytes.
  Its signal is visible ``latency`` and the time of its bytes after the copy began. A copy runs at
  its own rate, or at its share of the links it uses: on a switch the sender's egress port and the
  receiver's ingress port, on a mesh the link between both. A rank has at most as many copies in
  flight as it has engines. Copies of one kernel launch (:func:`ficco.plan.together`) run at the
  rate of all their bytes, without gaps. The launch is enqueued once, and a wait for one of its
  copies is a wait for all. On a compute lane, without fork and join, its signals are visible sooner
  (``Copies.in_front``). Of a two-shot the copies are part of the launch that sums
  (``Copies.two_shot``).
- *Drift.* GPUs multiply at different rates, so products to be sent are ready sooner on one rank
  than on another. While ranks are early or late, copies that go to the peers in turns meet copies
  of other ranks at the ports of a switch: see ``DRIFT``. Copies to a single peer (a ring) meet
  none.
- *Products.* A rank's GPU serves the products of all compute lanes in the order of their begin,
  each for ``Gemm.seconds``. A product begins in the last wave of its predecessor and fills part of
  that wave: see ``UNFILLED``. Copies within a rank are served
  likewise, at the rate of the rank's memory. Of products that can begin at the same time on several
  lanes, products to be sent come last: a GPU may take either, and if it takes a product that stays,
  the copies of the other wait for both (up to 32 % slower with two products on 2 H200). A GPU that
  multiplies for long gets slower (``Gemm.heated``). A product with gates or announcements
  (``Step.gates``, ``Step.announces``) is one kernel. Each of its parts takes its share of the
  processors' time; the last part also takes the unused rest of the last wave. A part that was
  waited for ends no sooner than a separate product would, but leaves processors to the next part.
- *Batches* of products with one matrix each, as in layers of experts, use the machine's block
  ``experts``, or ``gemm`` if the machine has no such block.
- *Attention* runs at a share of the rate of full waves of products (``Machine.attends``), in turn
  with products. Calls on several lanes fill each other's first and last blocks, as products do.
- *Sums* of arrived parts read all parts and write the result, at the rate of the rank's memory.
  They run before products that are not yet served, whose lanes have a lower priority, but start
  ``Memory.latency`` after their inputs. The gap between successive products of a lane is shorter,
  so a sum of the first product's result runs after the second product.
- *Hosts.* A network step begins when both sides of a move have reached it; if one rank stands for
  all, both do so at the same time. A rank's traffic gets its share of the cards at both ends
  (``Network``), and slows products like copies. The moves of a step run one after the other, with
  one network latency.
- *Collectives* take the time of a measured curve (``Machine.exchange``), nothing else runs then.
- *Contention.* Products take longer by a factor while their rank sends or receives, and copies take
  longer while their ranks multiply (FiCCO, section IV-D). Copy kernels slow products as a
  collective does.
- *The host.* In the mode ``"idle"`` the GPU can begin an operation once the host has enqueued it
  and all operations before it; in the mode ``"queued"`` all are enqueued at 0. Hosts do not begin
  at the same time (``Host.skew``), so copies that would take turns on a switch meet at a port. On 4
  H200 that, not the host's own time, is most of the loss with many small pieces
  (docs/results/measured-h200-4.csv, hetero-fused-1d:pieces=4 where copies take as long as GEMMs).
- *The end* is the end of the caller's stream, which waits for all lanes but ``sync``. Slots are
  free: nothing waits for the previous call.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from math import comb, floor
from typing import Any

from ficco.machine import (
    COLLECTIVES,
    Copies,
    Gemm,
    Host,
    Machine,
    Memory,
    Network,
    Topology,
)
from ficco.plan import Plan, Product, Reduction, Region, Signal, Step, Transfer, in_parts, together
from ficco.plan.model import OPS, Applied, Attendings, Crossing, LibraryMove, Products, unknown
from ficco.plan.network import MOVER, networked
from ficco.problems.mask import LibraryCall
from ficco.problems.sizes import MODES
from ficco.problems.specification import AnyProblem
from ficco.simulate.mirror import Mirror
from ficco.simulate.timeline import SYNC_LANE

#: Delay of a product whose tiles wait, as a share of the call's host time, if the machine file has
#: no ``Host.tiled``. Medians over 30 calls on three hosts with one H200 each, 2026-11-24: 0.45
#: (docs/results/replay-h200-1.csv), 0.52 and 0.62.
LIVE = 0.6

#: Grid of times, per second: events within a femtosecond are simultaneous.
GRID = 2.0**50

#: Seconds of the host for each launch or copy of exact rows, to look up the call's numbers of rows.
#: Calls of four pieces took 831 us longer to enqueue than calls of one, with seven more for
#: each piece (64 experts, two H100, 2026-11-26, commit 841d812).
LOOK_UP = 40e-6

#: Share of a product's start and last wave that the next product on another lane does not fill.
#: Fitted: with it, the times with two compute lanes over those with one are 1.1 % from those
#: in docs/results/measured-h200-4.csv in the mean, with 0 they are 2.2 % from them.
UNFILLED = 0.5

#: Drift between ranks, as a share of the seconds that they have multiplied. Fitted to 104
#: all-reduces and 136 reduce-scatters on 4 H200 (docs/results, 2026-11-22): with it predictions are
#: 4.7 and 3.0 % from them in the mean, with 0 they are 6.9 and 3.0 % from them.
DRIFT = 0.03

#: A step with its start and stop.
TimedStep = tuple[Step, float, float]

#: Types of work that the GPU serves at the rate of products, and at the rate of its memory.
MULTIPLIES, MOVES = (Products, Attendings, Applied), (Transfer, Reduction)

#: Kinds of events: a step begins, a step ends, a copy engine is free, the GPU serves a sum.
_BEGIN, _END, _ENGINE, _SERVE = range(4)


@dataclass(slots=True, eq=False)
class _SimulatedLane:
    """A queue of steps of one rank, and the state of its first step."""

    rank: int  # index among those that are simulated
    computes: bool  # compute lanes have a lower priority than others
    steps: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # priorities of the steps: :meth:`head_order`
    position: int = 0  # of the head in ``steps``
    free: float = 0.0  # time at which the head may begin
    version: int = 0  # of the event of the head's end, which changes with its rate
    start: float = 0.0
    launched: bool = False  # whether a product ran before
    #: Of a product: times of its service and end, on the rank's clock.
    served: float = 0.0
    ends: float = 0.0
    #: Of a part of a product: seconds from the begin of the next part to the end of this part; end
    #: of all parts so far, on the rank's clock; rows since all processors began together, and the
    #: time of that begin.
    late: float = 0.0
    parts_end: float = 0.0
    rows: int = 0
    rows_begin: float = 0.0
    #: Of a copy: bytes left at the time ``since``; bytes per second now, and without contention;
    #: ports that it uses; ranks whose products it slows down.
    remaining: float = 0.0
    since: float = 0.0
    rate: float = 0.0
    full_rate: float = 0.0
    ports: tuple[int, ...] = ()
    endpoints: tuple[int, ...] = ()
    peer: int = -1  # peer of the lane's last copy

    def head_order(self) -> int:
        """Priority of the head: the smallest of simultaneous heads begins first."""
        return self.order[self.position] if self.position < len(self.steps) else -1


@dataclass(slots=True, eq=False)
class _SimulatedRank:
    """The GPU of a rank. Its products follow a clock that slows down while copies are in flight."""

    plan: Plan
    number: int
    lanes: dict[str, _SimulatedLane] = field(default_factory=dict)
    clock: float = 0.0  # value at the time ``since``
    since: float = 0.0
    slowdown: float = 1.0  # seconds of time per second of the clock
    worked: float = 0.0  # seconds of products on a cold GPU
    served: float = 0.0  # earliest begin of the next product, on the clock
    multiplying: dict[_SimulatedLane, None] = field(default_factory=dict)
    busy: bool = False  # whether products slow copies down
    #: Lanes, of any rank, with a copy to or from this one.
    copying: dict[_SimulatedLane, None] = field(default_factory=dict)
    in_flight: int = 0  # copies of this rank's lanes
    engines: int = 0  # limit of copies in flight; 0 for none
    queue: deque[_SimulatedLane] = field(default_factory=deque)  # lanes waiting for a copy engine
    #: By step: times when the GPU can begin the step, and when its signals can be seen.
    enqueued: list[tuple[float, float]] = field(default_factory=list)
    ran: list[tuple[float, int, float]] = field(default_factory=list)  # start, step, stop
    posts: list[tuple[Signal, ...]] = field(default_factory=list)
    #: By step: steps of its launch, and bytes of all copies of the launch.
    launches: list[tuple[int, ...]] = field(default_factory=list)
    launch_bytes: dict[int, int] = field(default_factory=dict)
    placed: set[int] = field(default_factory=set)  # steps included in a launch of copies
    exchanges: set[int] = field(default_factory=set)  # steps of launches of two-shots
    #: By part of a product: rows of all parts, and whether any part waits.
    tiled: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = self.plan.steps
        self.posts = [step.posts for step in steps]
        self.launches = [(index,) for index in range(len(steps))]
        sent = {i for step in steps if step.after and step.copy for i in step.after}
        for index, step in enumerate(steps):
            if step.lane not in self.lanes:
                computes = step.lane.startswith("compute")
                self.lanes[step.lane] = _SimulatedLane(self.number, computes)
            lane = self.lanes[step.lane]
            lane.steps.append(index)
            last = index in sent and isinstance(step.work, Products)
            lane.order.append(index + len(steps) * last)
        for parts in _launches_in_parts(steps):
            rows = sum(product.out.rows for i in parts for product in steps[i].products)
            gated = any(steps[i].waits for i in parts)
            self.tiled.update(dict.fromkeys(parts, (rows, gated)))

    def launch_together(self) -> None:
        """Group copies into launches, as a GPU engine does. Copies within the rank are complete
        before the copies between ranks."""
        steps = self.plan.steps
        for whole in together(self.plan, exchanges=True):
            if len(whole) > 1 and isinstance(steps[whole[0]].work, Reduction):
                self.exchanges.update(whole)
                self.launches = [
                    whole if i in whole else one for i, one in enumerate(self.launches)
                ]
                continue
            moved = {i: move for i in whole if (move := steps[i].copy)}
            copies = tuple(moved)
            if len(whole) > 1:
                self.placed.update(set(whole) - set(copies))
            if len(copies) < 2:
                continue
            nbytes = sum(map(self.plan.moved_bytes, moved.values()))
            self.launch_bytes.update(dict.fromkeys(copies, nbytes))
            for i in copies:
                self.launches[i], self.posts[i] = copies, ()
            self.posts[copies[-1]] = tuple(post for i in copies for post in steps[i].posts)

    def enqueue(self, host: Host, begin: float) -> None:
        """Compute when the GPU can begin each step, and when the signals of the step can be seen.

        The host enqueues one operation after the other, the lane ``sync`` last. A collective is
        part of its call. A place or a sum costs the host as much as a product.
        """
        plan = self.plan
        now = begin + (host.collective_call if plan.collective else host.call)
        self.enqueued = [(0.0, 0.0)] * len(plan.steps)
        for index, step in sorted(enumerate(plan.steps), key=lambda one: one[1].lane == SYNC_LANE):
            launch = self.launches[index]
            if launch[0] != index:
                continue
            same_launch = step.part > 1  # as the part before
            if (step.waits or step.after) and not same_launch:
                now += host.signal
            available = now
            work = step.work
            if isinstance(work, Transfer) and work.src.rank != work.dst.rank:
                available = now = now + host.copy + self._looks_up(step)
            elif isinstance(work, MOVES) and index not in self.placed:
                available = now = now + host.matmul + self._looks_up(step)
            elif isinstance(work, Products) and not same_launch:
                tiled = LIVE * host.call if host.tiled is None else host.tiled
                now += tiled * (index in self.tiled)
                now += self._looks_up(step)
                available = now + host.matmul  # the first product: the host goes on during it
                now += host.matmul * (1 if step.part else len(work.products))
            elif isinstance(work, (Attendings, Applied)):
                available = now + host.matmul
                now += host.matmul * (len(work.attends) if isinstance(work, Attendings) else 1)
            if self.posts[launch[-1]] and not step.part:
                now += host.signal
            for one in launch:
                self.enqueued[one] = available, now

    def _looks_up(self, step: Step) -> float:
        """Seconds of the host to look up the exact rows of a step's blocks."""
        buffer, work = self.plan.buffer, step.work
        if isinstance(work, Transfer):  # the Plan may not list the peer's end of a move
            mine = work.src if work.src.rank == self.plan.rank else work.dst
            return LOOK_UP * (buffer[mine.buffer].block > 0)
        products = [one for one in step.products if buffer[one.a.buffer].block]
        return LOOK_UP * sum(one.batch if self.plan.runs_one_by_one(one) else 1 for one in products)

    def unserved(self) -> list[_SimulatedLane]:
        """Compute lanes whose products are not served yet."""
        return [lane for lane in self.multiplying if lane.computes and lane.served > self.clock]

    def tick(self, now: float) -> float:
        """Advance the clock to a time, and return the clock's value."""
        self.clock += (now - self.since) / self.slowdown
        self.since = now
        return self.clock


def _exchanged_bytes(problem: AnyProblem, row_bytes: int) -> int:
    """Bytes per pair of ranks, the argument of collectives' curves, for rows of ``row_bytes``. If
    ranks or blocks differ, this is the mean over the peers of the busiest rank."""
    peers, rows = range(problem.world), problem.specification.exchange.by_collective
    table = [[0 if i == j else rows(i, j) for j in peers] for i in peers]
    most = max(map(sum, (*table, *zip(*table, strict=True))))
    return round(most / max(problem.world - 1, 1) * row_bytes)


def _launches_in_parts(steps: Sequence[Step]) -> Iterator[list[int]]:
    """Parts of each step that was split. The parts of a step are consecutive."""
    parts: list[int] = []
    for index, step in enumerate(steps):
        if parts and step.part <= steps[parts[-1]].part:
            yield parts
            parts = []
        if step.part:
            parts.append(index)
    if parts:
        yield parts


def _reads_peers(work: Transfer | Reduction) -> bool:
    """Whether work sums parts in the memory of peers."""
    return isinstance(work, Reduction) and any(p.rank != work.out.rank for p in work.parts)


def _by_network(work: object) -> bool:
    """Whether work is a copy between hosts, which replaces a move of a crossing."""
    return isinstance(work, Transfer) and work.mover == MOVER


class Simulation:
    """Simulation of the plans of all ranks, or of one rank that stands for all."""

    def __init__(
        self, plans: Sequence[Plan], machine: Machine, mode: str, mirror: Mirror | None = None
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode: required one of {', '.join(MODES)}, got {mode!r}")
        self.machine, self.mode, self.mirror = machine, mode, mirror
        plans = [in_parts(plan) for plan in plans]
        if mirror is None:
            plans = networked(plans)
        self.problem, self.name = plans[0].problem, plans[0].schedule
        self.itemsize = {one.name: one.itemsize for plan in plans for one in plan.buffers}
        self.world, self.local_world = self.problem.world, self.problem.local_world
        self.ranks = [_SimulatedRank(plan, number) for number, plan in enumerate(plans)]
        self.now = 0.0
        self.pushed = 0
        self.events: list[tuple[float, int, int, int, _SimulatedLane, int]] = []
        self.ready: list[_SimulatedLane] = []  # lanes whose head may be able to begin
        #: Times of signals and of ends of steps, and lanes that wait for one of them.
        self.known: dict[object, float] = {}
        self.waiting: dict[object, list[_SimulatedLane]] = {}
        #: Lanes with a copy in flight, by port or link.
        self.sharers: dict[int, dict[_SimulatedLane, None]] = {}
        self.changed_ranks: dict[int, None] = {}
        self.changed_copies: dict[_SimulatedLane, None] = {}
        self.at_collective: list[_SimulatedLane] = []
        self._seconds: dict[tuple[int, ...], tuple[float, float]] = {}
        self._rates: dict[int, float] = {}
        self._read_machine([step for plan in plans for step in plan.steps])

    def _read_machine(self, steps: Sequence[Step]) -> None:
        """Read the machine's blocks. Blocks that the steps do not need may be missing."""
        of = defaultdict[type, list[Any]](list)  # work by type
        for step in steps:
            if type(step.work) not in of and step.op not in OPS:
                raise unknown(step, "the simulator")
            of[type(step.work)].append(step.work)
        callers = [s.label for s in steps if isinstance(s.work, Products) and s.work.callers]
        if callers:
            raise NotImplementedError(
                f"{self.name}: the simulator cannot tell how long step {callers[0]!r} takes, which "
                "is the caller's"
            )
        machine = self.machine
        reads_peers = any(map(_reads_peers, of[Reduction]))
        moves = [move for move in of[Transfer] if not move.local]
        copies = [move for move in moves if move.mover != MOVER]
        crosses = bool(of[Crossing]) or len(copies) < len(moves)
        by_kernel = reads_peers or any(move.mover == "kernel" for move in copies)
        multiplies = any(of[kind] for kind in MULTIPLIES)
        self.gemm: Gemm = self._block("gemm", multiplies)
        #: Whether operands have factors: no library has a batch of such products.
        self.scaled = any(one.factors for one in self.problem.specification.contractions)
        self.gemm = machine.products(self.problem) or self.gemm
        self.tiled = machine.tiled or self.gemm
        self.experts = machine.experts or self.gemm
        if self.gemm:
            self.attention = machine.attends(self.gemm)
        places = len(of[Transfer]) > len(moves)
        self.memory: Memory = self._block("memory", places or bool(of[Reduction]))
        for name in {step.label for step in steps if isinstance(step.work, LibraryMove)}:
            if getattr(machine, COLLECTIVES[name]) is None:
                self._block("all_gather", True)
        self.topology: Topology = self._block("topology", reads_peers or bool(copies))
        self.copies: Copies = self._block("copies", reads_peers or bool(copies))
        self.network: Network = self._block("network", crosses)
        if by_kernel and machine.kernel_copies is not None:
            self.copies = machine.kernel_copies
        contention = self._block("contention", multiplies and bool(moves))
        #: By what factors products and copies take longer during each other.
        self.product_factor = self.copy_factor = 1.0
        if contention is not None and by_kernel:
            self.product_factor = contention.gemm_under_collective
            self.copy_factor = contention.collective_under_gemm
        elif contention is not None:
            self.product_factor = contention.gemm_under_copies
            self.copy_factor = contention.copies_under_gemm
        host: Host = self._block("host", self.mode == "idle")
        sends_products = any(move.terms for move in copies)
        #: Penalty for a copy that may meet copies of other ranks, as a share of its bytes.
        self.collision = self._collision() if sends_products else 0.0
        for rank in self.ranks:
            if by_kernel and machine.accelerator != "cpu":
                rank.launch_together()
            lanes = sum(name.startswith("copy") for name in rank.lanes)
            if self.copies is not None and lanes > self.copies.engines:
                rank.engines = self.copies.engines
            if self.mode == "idle":
                late = 1.0 if self.mirror else rank.plan.rank / max(self.world - 1, 1)
                rank.enqueue(host, late * host.skew)

    def _block(self, name: str, needed: bool) -> Any:
        block = getattr(self.machine, name)
        if needed and block is None:
            raise ValueError(
                f"machine {self.machine.name}: required the block {name!r} to simulate {self.name} "
                f"({self.mode}), got none; measure it, or add it to the file"
            )
        return block

    def _collision(self) -> float:
        """Expected relative delay of a copy at a shared port, if each other rank sends to a random
        one of its peers."""
        peers = self.local_world - 1
        if peers < 2 or self.topology is None or self.topology.kind != "switch":
            return 0.0
        others, each = peers - 1, 1 / peers
        left = sum(
            comb(others, n) * each**n * (1 - each) ** (others - n) * self._share(n + 1)
            for n in range(peers)
        )
        return self.topology.bandwidth / left - 1.0

    def _share(self, sharers: int) -> float:
        """Bytes per second of each of ``sharers`` copies on a port or link."""
        whole = self.topology.bandwidth
        return whole if sharers == 1 else whole * self.topology.sharing / sharers

    def run(self) -> list[list[TimedStep]]:
        """Simulate, and return the steps of each simulated rank in the order of their start."""
        for rank in self.ranks:
            self.ready.extend(rank.lanes.values())
        events = self.events
        self._begin_ready()
        while events:
            self.now = now = events[0][0]
            while events and events[0][0] == now:
                _, _, _, kind, lane, version = heappop(events)
                if kind == _BEGIN:
                    self._begin(lane)
                elif kind == _ENGINE:
                    self._free_engine(lane)
                elif kind == _SERVE:
                    rank = self.ranks[lane.rank]
                    self._serve(lane, rank, rank.plan.steps[lane.steps[lane.position]])
                elif version == lane.version:
                    self._end(lane)
            self._begin_ready()
        if any(len(rank.ran) < len(rank.plan.steps) for rank in self.ranks):
            raise ValueError(f"{self.name}: the plans wait for each other for ever")
        return [
            [(rank.plan.steps[index], start, stop) for start, index, stop in sorted(rank.ran)]
            for rank in self.ranks
        ]

    def _begin_ready(self) -> None:
        """Begin all heads that can begin now, then update the affected rates."""
        while self.ready:
            ready, self.ready = self.ready, []
            for lane in sorted(ready, key=_SimulatedLane.head_order) if len(ready) > 1 else ready:
                self._advance(lane)
        if self.changed_ranks or self.changed_copies:
            self._update_rates()

    def _push(self, at: float, kind: int, lane: _SimulatedLane) -> None:
        self.pushed += 1
        at = floor(at * GRID + 0.5) / GRID
        heappush(self.events, (at, lane.head_order(), self.pushed, kind, lane, lane.version))

    # Waits.

    def _wait_key(self, signal: Signal) -> object:
        """Key of a signal: its word, or this rank's own signal that mirrors it."""
        if not self.mirror or signal.poster == signal.waiter:
            return signal.waiter, signal.word
        peer = signal.poster
        if self.mirror.subtracts:  # the peer at the same distance in the other direction
            local = self.local_world
            first = signal.waiter // local * local
            peer = first + (2 * signal.waiter - peer - first) % local
        return signal.kind, peer, signal.slot

    def _post_key(self, signal: Signal) -> object:
        if not self.mirror or signal.poster == signal.waiter:
            return signal.waiter, signal.word
        return signal.kind, signal.waiter, signal.slot

    def _announce(self, key: object, at: float) -> None:
        self.known[key] = at
        if key in self.waiting:
            self.ready.extend(self.waiting.pop(key))

    def _advance(self, lane: _SimulatedLane) -> None:
        """Begin the head, now or later, once it is known when all that it waits for is over."""
        if lane.position == len(lane.steps):
            return
        rank = self.ranks[lane.rank]
        index = lane.steps[lane.position]
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

    def _begin(self, lane: _SimulatedLane) -> None:
        rank = self.ranks[lane.rank]
        index = lane.steps[lane.position]
        step = rank.plan.steps[index]
        work, lane.start = step.work, self.now
        if isinstance(work, Transfer) and work.src.rank != work.dst.rank:
            if work.mover == MOVER:
                self._begin_crossing(lane, rank, (work,))
            elif rank.engines and rank.in_flight == rank.engines:
                rank.queue.append(lane)
            else:
                self._begin_copy(lane, rank, work)
        elif isinstance(work, MULTIPLIES):
            self._serve(lane, rank, step)
        elif isinstance(work, MOVES) and index not in rank.placed and self._move_seconds(work):
            reads = _reads_peers(work)
            latency = self.copies.seen(lane.computes) if reads else self.memory.latency
            if index in rank.exchanges:
                latency = self.copies.exchanged if reads else 0.0
            self._push(self.now + latency, _SERVE, lane)
        elif isinstance(work, Crossing):
            self._begin_crossing(lane, rank, work.moves)
        elif isinstance(work, LibraryMove):
            self.at_collective.append(lane)
            if len(self.at_collective) == len(self.ranks):  # it begins when all have reached it
                row_bytes = work.src.cols * self.itemsize[work.src.buffer]
                nbytes = _exchanged_bytes(self.problem, row_bytes)
                end = self.now + self.machine.exchange(step.label, nbytes, self.problem.hosts)
                for one in self.at_collective:
                    self._push(end, _END, one)
                self.at_collective = []
        else:  # nothing to do: signals only, nothing to move, or moved by a launch of copies
            self._finish(lane, self.now, self.now)

    def _end(self, lane: _SimulatedLane) -> None:
        rank = self.ranks[lane.rank]
        if lane in rank.multiplying:
            del rank.multiplying[lane]
            self.changed_ranks[lane.rank] = None
            late, lane.late = lane.late * rank.slowdown, 0.0
            self._finish(lane, self.now + late, self.now)
            return
        if lane.endpoints:
            self._end_copy(lane, rank)
        else:
            self._finish(lane, self.now, self.now)

    def _finish(self, lane: _SimulatedLane, seen: float, free: float) -> None:
        """The head is over: for others when that is seen, for the lane when it is free."""
        rank = self.ranks[lane.rank]
        index = lane.steps[lane.position]
        rank.ran.append((lane.start, index, free))
        lane.free = free
        lane.position += 1
        lane.version += 1
        posted = max(seen, rank.enqueued[index][1]) if rank.enqueued else seen
        for signal in rank.posts[index]:
            if signal.kind != "released":
                self._announce(self._post_key(signal), posted)
        launch = rank.launches[index]
        if launch[-1] == index:
            for one in launch:
                self._announce((-1, lane.rank, one), seen)
        self.ready.append(lane)

    # Products, and copies within a rank.

    def _serve(self, lane: _SimulatedLane, rank: _SimulatedRank, step: Step) -> None:
        """Serve a step's products, or its copies within the rank, on the GPU."""
        work = step.work
        multiplies = isinstance(work, MULTIPLIES)
        if isinstance(work, Products) and step.part:
            products = work.products
            whole = filled = self._part_seconds(lane, rank, step, products, rank.tick(self.now))
        elif isinstance(work, Products):
            whole, filled = self._product_seconds(work.products, rank.plan)
        elif isinstance(work, Attendings):
            calls = chain.from_iterable(one.calls for one in work.attends)
            itemsize = self.itemsize[work.attends[0].q.buffer]
            whole, filled = self._attention_seconds(calls, itemsize)
        elif isinstance(work, Applied):
            itemsize = self.itemsize[work.inputs[0].buffer]
            whole, filled = self._attention_seconds(work.calls, itemsize)
        else:
            assert isinstance(work, MOVES)
            whole = filled = self._move_seconds(work)
        if not whole:
            self._finish(lane, self.now, self.now)
            return
        begin = rank.tick(self.now)
        if multiplies:  # the GPU is hotter the more it has multiplied
            worked, rank.worked = rank.worked, rank.worked + whole
            slower = (self.gemm.heated(rank.worked) - self.gemm.heated(worked)) / whole
            whole, filled = whole * slower, filled * slower
            if lane.launched and step.part < 2:
                begin += self.gemm.launch
        lane.launched = True
        takes = filled + UNFILLED * (whole - filled)
        begin = max(begin, rank.served)
        overtaken = [] if lane.computes else rank.unserved()
        for other in overtaken:
            begin = min(begin, other.served)
            other.served += takes
            other.ends += takes
            other.version += 1
            self._push(self.now + (other.ends - rank.clock) * rank.slowdown, _END, other)
        rank.served = (rank.served if overtaken else begin) + takes
        lane.served, lane.ends = begin, begin + whole
        lane.endpoints = ()
        rank.multiplying[lane] = None
        self.changed_ranks[lane.rank] = None
        self._push(self.now + (lane.ends - rank.clock) * rank.slowdown, _END, lane)

    def _product_seconds(self, products: Iterable[Product], plan: Plan) -> tuple[float, float]:
        """Seconds of a step's products alone, and with their last waves filled by others."""
        whole = filled = 0.0
        for product in products:
            out, itemsize = product.out, self.itemsize[product.a.buffer]
            sizes = m, n, k = out.rows, out.cols, product.b.rows
            wide = itemsize < 4 <= self.itemsize[out.buffer]
            adds = not wide and (product.accumulate or product.addend is not None)
            rights = product.batch if product.b_stride else 1
            apart = self.scaled or plan.runs_one_by_one(product)
            key = (*sizes, product.batch, itemsize, wide, adds, rights, apart)
            if key not in self._seconds:
                how: dict[str, Any] = {"itemsize": itemsize, "wide": wide, "adds": adds}
                if rights > 1 and not apart:
                    how["rights"] = rights
                self._seconds[key] = self._batch_seconds(*sizes, product.batch, apart, how)
            seconds = self._seconds[key]
            between = self.gemm.launch if whole else 0.0
            whole += seconds[0] + between
            filled += seconds[1] + between
        return whole, filled

    def _attention_seconds(
        self, calls: Iterable[LibraryCall], itemsize: int
    ) -> tuple[float, float]:
        """Seconds of attention calls alone, and with their starts and last blocks filled by
        others."""
        times = [self.attention.times(self.gemm, itemsize, *call) for call in calls]
        return sum(whole for whole, _ in times), sum(filled for _, filled in times)

    def _batch_seconds(
        self, m: int, n: int, k: int, batch: int, apart: bool, how: dict[str, Any]
    ) -> tuple[float, float]:
        if not (m and n and k):
            return 0.0, 0.0
        if not apart:
            library = self.experts if "rights" in how else self.gemm
            return library.times(m, n, k, batch=batch, **how)
        one, filled = self.gemm.times(m, n, k, **how)
        between = self.gemm.launch * (batch - 1)
        return one * batch + between, filled * batch + between

    def _part_seconds(
        self,
        lane: _SimulatedLane,
        rank: _SimulatedRank,
        step: Step,
        products: Sequence[Product],
        now: float,
    ) -> float:
        """Seconds until the next part can begin or, for the last part, until the product ends."""
        index, here = lane.steps[lane.position], lane.position + 1
        last = here == len(lane.steps) or rank.plan.steps[lane.steps[here]].part <= step.part
        (rows, gated), itemsize = rank.tiled[index], self.itemsize[products[0].a.buffer]
        n, k = products[0].out.cols, products[0].b.rows
        mine = sum(product.out.rows for product in products)
        begin = max(now, rank.served)
        if step.part == 1:
            lane.rows, lane.rows_begin, lane.parts_end = 0, begin, 0.0
        if not (mine and n and k):
            return 0.0
        whole, dense = self.tiled.times(rows, n, k, itemsize=itemsize)
        share, start = dense * mine / rows, self.tiled.start
        waves = partial(self.tiled.waves, itemsize=itemsize)
        lane.rows += mine
        if not gated:  # whole waves of the tiles chosen for all rows
            waved = waves(lane.rows, rows, n, k) / waves(rows, rows, n, k)
            ends = [lane.rows_begin + (whole - start) * waved]
        else:  # waves of tiles chosen for the available rows
            seconds = partial(self.tiled.seconds, n=n, k=k, itemsize=itemsize)
            ends = [lane.rows_begin + seconds(lane.rows) - start]
            keys = [self._wait_key(gate) for gate in step.waits if gate.kind != "released"]
            if keys:
                opened = max(self.known[key] for key in keys) - self.now
                ends.append(now + opened / rank.slowdown + seconds(mine) - start)
            if self.now > lane.free:
                lane.rows, lane.rows_begin = mine, begin  # all processors begin with this part
        lane.parts_end = max(lane.parts_end, begin + share, *ends)
        lane.late = max(max(ends) - begin - share, 0.0) * (not last)
        return max(share + whole - dense, lane.parts_end + start - begin) if last else share

    def _move_seconds(self, work: Transfer | Reduction) -> float:
        """Seconds to read from here or from peers, and to write here."""
        regions: tuple[Region, ...]
        times = 1
        if isinstance(work, Reduction):
            regions = (*work.parts, work.out)
        else:
            src, dst, _, _, factors, times, *_ = work
            regions = (src, factors, dst) if factors else (src, dst)
        local, remote = 0, []
        for one in regions:
            nbytes = times * one.elements * self.itemsize[one.buffer]
            if one.rank == regions[-1].rank:
                local += nbytes
            else:
                remote.append(nbytes)
        seconds = local / self.memory.bandwidth
        if any(remote):
            nbytes = max(remote) if self.topology.kind == "mesh" else sum(remote)
            seconds += nbytes / self.copies.rate(nbytes)
        return seconds

    # Copies between ranks.

    def _begin_copy(self, lane: _SimulatedLane, rank: _SimulatedRank, move: Transfer) -> None:
        src, dst = move.src, move.dst
        nbytes = move.elements * self.itemsize[src.buffer]
        if not nbytes:
            self._finish(lane, self.now, self.now)
            return
        rank.in_flight += 1
        size = rank.launch_bytes.get(lane.steps[lane.position], nbytes)
        if size not in self._rates:
            self._rates[size] = self.copies.rate(size)
        lane.remaining, lane.full_rate = float(nbytes), self._rates[size]
        lane.rate, lane.since = 0.0, self.now
        peer = dst.rank if src.rank == rank.plan.rank else src.rank
        if self.collision and peer != lane.peer:
            lane.remaining += self.collision * min(
                DRIFT * rank.worked * lane.full_rate, lane.remaining
            )
            lane.peer = peer
        mesh = self.topology.kind == "mesh"
        if not self.mirror:
            lane.endpoints = src.rank, dst.rank
            link = src.rank * self.world + dst.rank
            lane.ports = (link,) if mesh else (2 * src.rank, 2 * dst.rank + 1)
        else:  # the peer's port mirrors this rank's port
            lane.endpoints = (0,)
            lane.ports = (peer,) if mesh else (0,)
        self._enter_ports(lane)

    def _begin_crossing(
        self, lane: _SimulatedLane, rank: _SimulatedRank, moves: Sequence[Transfer]
    ) -> None:
        """Begin a move between hosts; if one rank stands for all, all moves of the step."""
        me = rank.plan.rank
        sent = received = 0
        for move in moves:
            nbytes = move.elements * self.itemsize[move.src.buffer]
            if move.src.rank == me:
                sent += nbytes
            else:
                received += nbytes
        if not (nbytes := max(sent, received)):
            self._finish(lane, self.now, self.now)
            return
        lane.remaining, lane.full_rate = float(nbytes), self.network.bandwidth
        lane.rate, lane.since = 0.0, self.now
        if self.mirror:  # the card's other ranks do the same
            lane.full_rate /= self.network.sharing
            lane.ports, lane.endpoints = (), (0,)
        else:
            ends = moves[0].src.rank, moves[0].dst.rank
            source, target = map(self._card, ends)
            lane.ports, lane.endpoints = (source, target + 1), ends
        self._enter_ports(lane)

    def _card(self, rank: int) -> int:
        """Number of the port through which a rank sends to other hosts. The next number is its port
        for receiving. These numbers follow those of the links and ports within hosts."""
        first = rank // self.local_world * self.local_world
        return 2 * (self.world**2 + first + (rank - first) // self.network.sharing)

    def _enter_ports(self, lane: _SimulatedLane) -> None:
        """Add a copy to its ports and ends; mark the copies and ranks whose rates change."""
        for port in lane.ports:
            sharers = self.sharers.setdefault(port, {})
            sharers[lane] = None
            self.changed_copies.update(sharers)
        self.changed_copies[lane] = None
        for end in lane.endpoints:
            self.ranks[end].copying[lane] = None
            self.changed_ranks[end] = None

    def _end_copy(self, lane: _SimulatedLane, rank: _SimulatedRank) -> None:
        for port in lane.ports:
            sharers = self.sharers[port]
            del sharers[lane]
            self.changed_copies.update(sharers)
        for end in lane.endpoints:
            del self.ranks[end].copying[lane]
            self.changed_ranks[end] = None
        self.changed_copies.pop(lane, None)
        lane.endpoints = ()
        free = self.now
        index = lane.steps[lane.position]
        steps = rank.plan.steps
        if _by_network(work := steps[index].work) or isinstance(work, Crossing):
            seen = self.now + self.network.latency
            following = lane.steps[lane.position + 1 : lane.position + 2]
            together = any(_by_network(steps[one].work) for one in following)
            self._finish(lane, seen, self.now if together else seen)
            return
        if rank.launches[index][-1] == index:
            free += self.copies.gap
        if rank.engines:
            self._push(free, _ENGINE, lane)
        seen = 0.0 if index in rank.exchanges else self.copies.seen(lane.computes)
        self._finish(lane, self.now + seen, free)

    def _free_engine(self, lane: _SimulatedLane) -> None:
        rank = self.ranks[lane.rank]
        rank.in_flight -= 1
        if rank.queue:
            self._begin(rank.queue.popleft())

    def _update_rates(self) -> None:
        """Update the rates of products and copies after a change of sharing or contention."""
        for number in self.changed_ranks:
            rank = self.ranks[number]
            slowdown = self.product_factor if rank.copying else 1.0
            if slowdown != rank.slowdown:
                clock = rank.tick(self.now)
                rank.slowdown = slowdown
                for lane in rank.multiplying:
                    lane.version += 1
                    self._push(self.now + (lane.ends - clock) * slowdown, _END, lane)
            if bool(rank.multiplying) != rank.busy:
                rank.busy = not rank.busy
                self.changed_copies.update(rank.copying)
        self.changed_ranks.clear()
        for lane in self.changed_copies:
            rate = lane.full_rate
            for port in lane.ports:
                sharers = len(self.sharers[port])
                crosses = port >= 2 * self.world**2
                share = self.network.bandwidth / sharers if crosses else self._share(sharers)
                rate = min(rate, share)
            if any(self.ranks[end].busy for end in lane.endpoints):
                rate /= self.copy_factor
            if rate != lane.rate:
                lane.remaining -= lane.rate * (self.now - lane.since)
                lane.rate, lane.since = rate, self.now
                lane.version += 1
                self._push(self.now + max(lane.remaining, 0.0) / rate, _END, lane)
        self.changed_copies.clear()
