"""The backward of attention: keys are gathered again, unless the forward has kept them, and their
gradients go back.

The gradient of what a rank's queries took from rows of KV is sent to their rank as soon as it is
made, and summed there in float32. That of the queries grows as rows arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from ficco.attention.mask import BACKWARD_PRODUCTS
from ficco.attention.problem import AttentionProblem, KeyGather
from ficco.attention.stage import AttentionStage, AttentionWorld, KeyRun
from ficco.plan.model import Attending, Reduction, Region, Signal, Step, Transfer
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.groups import Unit
from ficco.schedules.space import Schedule
from ficco.specification import Exchange, Specification


@dataclass(frozen=True)
class AttentionGradient:
    """The gradients of a call of attention.

    Attributes:
        forward: the call.
        kept: the rows of KV that a rank has got are an operand.
    """

    forward: AttentionProblem
    kept: bool = False

    @property
    def operator(self) -> str:
        return f"{self.forward.operator}_backward"

    @property
    def world(self) -> int:
        return self.forward.world

    @property
    def hosts(self) -> int:
        return self.forward.hosts

    @property
    def keys(self) -> KeyGather:
        return self.forward.keys

    def senders(self, rank: int, first: int, last: int) -> int:
        """The ranks whose queries may attend to all of some rows of a rank's, rank r as bit r; 0 if
        some attend to a part of them."""
        found = 0
        for other in range(self.world):
            begin, end = self.keys.spans[rank][other]
            if begin <= first and last <= end:
                found |= 1 << other
            elif begin < last and first < end:
                return 0
        return found

    @cached_property
    def specification(self) -> Specification:
        """What comes back has a place for each rank that may attend to it."""
        asked, keys = self.forward.specification, self.keys
        kv, q = asked.operands
        (out,), (made,) = asked.results, asked.attentions
        travels = {} if self.kept else asked.exchanges
        given = [
            out._replace(name=name, holds=holds, memory="operand")
            for name, holds in (("o", "O"), ("grad", "dO"))
        ]
        firsts = kv._replace(memory="result", symmetric=False, leaves=False)
        return Specification(
            operands=(self.forward.landing("operand") if self.kept else kv, q, *given),
            results=(out._replace(name="dq", holds="dQ"), firsts._replace(name="dkv", holds="dKV")),
            contractions=(),
            exchanges={
                **travels,
                "dKV": Exchange(
                    block=lambda src, dst: keys.block(dst, src),
                    leaves=lambda src, dst: keys.lands(dst, src),
                    lands=lambda src, dst: keys.leaves(dst, src),
                    sums=True,
                    terms=True,
                    senders=self.senders,
                ),
            },
            attentions=(made._replace(out="dQ", back="dKV"),),
        )

    def __str__(self) -> str:
        text = str(self.forward).replace(self.forward.operator, self.operator, 1)
        return text.removesuffix(")") + ", kept" * self.kept + ")"


class GradientWorld(AttentionWorld):
    """What all ranks know. Gradients of a rank's own keys are summed of those of its own queries
    (``own``) and those that peers send (``returned``); what it sends waits in ``leaving``."""

    def __init__(
        self, asked: AttentionGradient, schedule: Schedule, words: WordAllocator, cap: int | None
    ) -> None:
        self.kept = asked.kept
        if asked.kept:  # there is nothing to fetch
            schedule, cap = replace(schedule, pull=False), None
        super().__init__(asked.forward, schedule, words, cap, asked.specification)
        keys, ranks, dkv = asked.keys, range(self.world), asked.specification.results[1]
        counts = [len(self.arrivals[i].units(j)) for i in ranks for j in ranks if i != j]
        self.back = words.block(max(counts, default=0))
        #: By rank and peer, the row at which the peer's gradients begin.
        self.places: list[dict[int, int]] = []
        returned = []
        for rank in ranks:
            peers = [peer for peer in ranks if peer != rank]
            ends = list(accumulate((keys.block(rank, peer) for peer in peers), initial=0))
            self.places.append(dict(zip(peers, ends, strict=False)))
            returned.append((ends[-1], asked.forward.kv_cols))
        self.buffer("own", dkv, dkv.shapes, "local")
        if self.world > 1:
            leaving = tuple((keys.product_rows(rank), asked.forward.kv_cols) for rank in ranks)
            self.buffer("leaving", dkv, leaving, "local", leaves=True)
            self.buffer("returned", dkv, tuple(returned))

    def _add_slot_buffers(self, packs_columns: bool) -> None:
        if not self.kept:
            super()._add_slot_buffers(packs_columns)

    def came_back(self, sender: int, rank: int) -> list[Signal]:
        """The signals that gradients are back, one for each unit that went to the sender."""
        first, last = self.problem.leaves(rank, sender), self.problem.lands(rank, sender)
        units = self.arrivals[sender].units(rank)
        rows = [(a - last + first, b - last + first) for a, b in self.arrivals[sender].rows(rank)]
        return [
            self.back.signal("returned", sender, rank, unit.ordinal, at)
            for unit, at in zip(units, rows, strict=True)
        ]


class GradientStage(AttentionStage):
    """One rank's steps: gradients leave on a lane of their own, since they must not hold up the
    keys that others wait for."""

    world: GradientWorld

    #: The gradients of keys are made of those of all queries at once.
    cuts_queries = False
    products = BACKWARD_PRODUCTS

    def __init__(self, world: GradientWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.compute_lanes = ["compute0"]  # all add to the same sums
        self.return_lane = f"copy{self.schedule.copy}"

    def run(self) -> None:
        super().run()
        if self.asked.rows:
            self._sum()

    def _runs_of(self, units: list[Unit]) -> list[KeyRun]:
        """Own rows apart, and first: their gradients stay."""
        own = [unit for unit in units if unit.peer == self.me]
        rest = [unit for unit in units if unit.peer != self.me]
        return super()._runs_of(own) + super()._runs_of(rest)

    def _run(self, kv: Region, first: int, last: int) -> KeyRun:
        """Also of rows that no query attends to: their gradients are zeros."""
        return super()._run(kv, first, last) or KeyRun(kv, first, (0, 0), ())

    def _attending(self, run: KeyRun, adds: bool) -> Attending:
        own, rows = self._block(self.me, self.me), run.kv.rows
        row, buffer = run.first, "leaving"
        if (run.first, run.first + rows) == own:
            row, buffer = 0, "own"
        back = Region(buffer, self.me, row, row + rows, 0, self.asked.kv_cols)
        return super()._attending(run, adds)._replace(back=back)

    def _consume(self, group: int) -> None:
        before = len(self.steps)
        super()._consume(group)
        made = [i for i, s in enumerate(self.steps[before:], before) if s.op == "attend"]
        for unit in self.groups[group]:
            if unit.peer != self.me:
                self._send_back(unit, made[0])

    def _send_back(self, unit: Unit, made: int) -> None:
        """Send the gradients of a unit's rows to where it came from."""
        me, peer, cols = self.me, unit.peer, (0, self.asked.kv_cols)
        first, last = self.mine.rows(peer)[unit.ordinal]
        place = self.world.places[peer][me] - self.problem.lands(peer, me)
        src = Region("leaving", me, first, last, *cols)
        dst = Region("returned", peer, first + place, last + place, *cols)
        move, posts = Transfer(src, dst, 1 << me), (self.world.came_back(me, peer)[unit.ordinal],)
        after = (made, self.acquired[peer])
        label = f"d{peer}.{unit.ordinal}>{peer}"
        self.add(Step("copy", self.return_lane, label, posts=posts, after=after, transfer=move))

    def _sum(self) -> None:
        """Add up the gradients of the own keys, all ranks' in their order."""
        me, problem, cols = self.me, self.problem, (0, self.asked.kv_cols)
        senders = [rank for rank in range(problem.world) if problem.block(me, rank)]
        spans = {rank: problem.spans[me][rank] for rank in senders}
        waits = [s for rank in senders if rank != me for s in self.world.came_back(rank, me)]
        for first, last in pairwise(sorted({end for span in spans.values() for end in span})):
            parts, terms = [], []
            for rank, (begin, end) in spans.items():
                if begin <= first and last <= end:
                    place = 0 if rank == me else self.world.places[me][rank] - begin
                    buffer = "own" if rank == me else "returned"
                    parts.append(Region(buffer, me, first + place, last + place, *cols))
                    terms.append(1 << rank)
            total = Reduction(tuple(parts), tuple(terms), Region("dkv", me, first, last, *cols))
            step = Step("reduce", "compute0", f"sum {first}:{last}", tuple(waits), reduction=total)
            self.add(step)
            waits = []


class KeptGradientStage(GradientStage):
    """The same where the forward has kept the rows: they are all there, and only gradients
    travel."""

    def __init__(self, world: GradientWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        cols = (0, self.asked.kv_cols)
        self.regions = {
            peer: [Region(self.a, self.me, *rows, *cols) for rows in self.mine.rows(peer)]
            for peer in self.regions
        }
        self.ready = [[] for _ in self.groups]
        self.own_in_group: dict[int, list[Unit]] = {}

    def _own_rows(self) -> Region:
        return Region(self.a, self.me, *self._block(self.me, self.me), 0, self.asked.kv_cols)

    def _pushes(self) -> list[list[Step]]:
        return [[] for _ in self.groups]

    def _begun(self) -> dict[int, tuple[Signal, ...]]:
        return {
            peer: ()
            if self.problem.block(peer, self.me)
            else (self.world.data.signal("ready", self.me, peer),)
            for peer in self.peers
        }

    def silent(self) -> tuple[Signal, ...]:
        return tuple(
            self.world.data.signal("ready", peer, self.me)
            for peer in self.peers
            if not self.problem.block(self.me, peer)
        )
