"""Model of Plans in Promela: the model checker SPIN tries every interleaving.

The model is a second opinion on :func:`ficco.plan.check`. It shares no code with the proof.
Gated products and moves between hosts are first split into steps (:func:`ficco.plan.in_parts`,
:mod:`ficco.plan.network`). Each lane of each rank is a
process. A step that uses memory is two events: it begins when its waits hold, and its end posts its
signals. Between the two, other steps may not write its inputs and may not use its outputs.

The edges of all regions cut memory into rectangles that no step divides. Rectangles that the same
steps use in the same way are one *atom* of the model. SPIN proves that in every interleaving:

- nothing deadlocks, with concurrent lanes and with each rank's Plan as one queue;
- a step reads only atoms that were written in the same call and that no step is writing; no two
  steps write at once; every atom of the results is written in the end;
- a slot of a rank, and its words, are used between two moments: the previous call has handed the
  slot to the peers, and this call has not yet. Inputs of a peer are read during the peer's call;
- a word is posted while it is clear, waited for once, then cleared; in the end all words are as
  they began.

Of the call before the first, the model has only the end: each rank hands its slot on. The model is
about order. Only ``check`` proves that a step reads the right rows and computes the right terms.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ficco.errors import InvalidArgument
from ficco.plan import Applied, Attendings, LibraryMove, Plan, Product, Products, Reduction
from ficco.plan.model import Region, Signal, Step, Transfer
from ficco.plan.network import networked
from ficco.plan.parts import in_parts, together

#: Most processes that SPIN runs.
MOST = 255

HEAD = """\
#ifndef CALLS
#define CALLS 2
#endif
#define CLEAR  0
#define POSTED 1
#define SEEN   2

byte lanes;             /* 1: those of a rank are concurrent, 2: they are one queue */
byte call[{ranks}];           /* by rank, how many calls have begun */
byte returned;          /* how many ranks have made all calls */
byte slot[{ranks}];           /* by rank, the call that may use its slot */
byte word[{words}];
byte over[{steps}];          /* by step, in how many calls it is over */
byte entered[{collectives}];        /* by collective, how often ranks have entered it */
byte written[{atoms}];       /* by atom, the last call that wrote it */
byte readers[{atoms}], writers[{atoms}];
byte parts[{atoms}];         /* by atom, how many of the writes in any order are over */

inline wait(w)          {{ assert(word[w] == POSTED); word[w] = SEEN }}
inline clear(w)         {{ assert(word[w] == SEEN); word[w] = CLEAR }}
inline post(w)          {{ assert(word[w] == CLEAR); word[w] = POSTED }}
inline owned(r, c)      {{ assert(slot[r] == c) }}
inline read(x, c)       {{ assert(written[x] == c && !writers[x]); readers[x]++ }}
inline write(x, c)      {{ assert(!readers[x] && !writers[x]); writers[x]++ }}
inline add(x, c)        {{ assert(written[x] == c); write(x, c) }}
inline beside(x, c)     {{ assert(!readers[x]); writers[x]++ }}
inline left(x)          {{ readers[x]-- }}
inline filled(x, c)     {{ writers[x]--; written[x] = c }}
inline parted(x, c, n)  {{
  writers[x]--; parts[x]++;
  if :: parts[x] == n -> parts[x] = 0; written[x] = c :: else fi
}}

init {{ if :: lanes = 1 :: lanes = 2 fi }}
"""

#: Who uses memory: a rank and one of its steps, or -1 for its caller.
User = tuple[int, int]


class Atom(NamedTuple):
    """Memory of one rank that the same users use in the same way."""

    buffer: str
    rank: int
    slot: bool
    uses: dict[User, str]


def promela(plans: Sequence[Plan]) -> str:
    """The model of the Plans of all ranks: two calls after each other, one with ``-DCALLS=1``.

    :func:`ficco.plan.check` has found that steps name steps and buffers that are there.

    Raises:
        InvalidArgument: the Plans are too large for SPIN.
        ValueError: ranks of different hosts send other pieces than their peers receive.
    """
    plans = networked([in_parts(plan, concurrent=True) for plan in plans])
    return "\n".join(_Model(plans).lines()) + "\n"


def _uses(step: Step) -> Iterator[tuple[str, Region]]:
    """Accesses of a step to memory, in order: "read", "write", "add" to an earlier write, or
    "beside", a write that other steps' writes to the same place may precede or follow."""
    match step.work:
        case Transfer() as move:
            for i in range(move.batch):
                yield "read", _down(move.src, i * move.src_stride)
                yield "write", _down(move.dst, i * move.dst_stride)
            yield from (("write", region) for region in (move.factors,) if region)
        case LibraryMove(src, dst):
            yield from (("read", src), ("write", dst))
        case Products(products):
            yield from chain.from_iterable(map(_product_uses, products))
        case Reduction(parts, _, out):
            yield from (("read", part) for part in parts)
            yield "write", out
        case Applied() as applied:
            yield from (("read", region) for region in applied.inputs)
            yield from (("write", region) for region in applied.outs)
        case Attendings(attends):
            for one in attends:
                yield from (("read", region) for region in (one.q, one.kv))
                yield "add" if one.accumulate else "write" if one.back else "beside", one.out
                yield from (("write", region) for region in (one.back,) if region)


def _product_uses(one: Product) -> Iterator[tuple[str, Region]]:
    fixed = one.addend, one.bias, *one.factors[1:]
    yield from (("read", region) for region in fixed if region)
    for i in range(one.batch):
        yield "read", _down(one.a, i * one.a_stride)
        yield "read", _down(one.b, i * one.b_stride)
        yield from (("read", _down(f, i * one.factor_stride)) for f in one.factors[:1])
        yield "add" if one.accumulate else "write", _down(one.out, i * one.out_stride)


def _down(region: Region, rows: int) -> Region:
    return region._replace(row=region.row + rows, row_stop=region.row_stop + rows)


def _together(modes: Sequence[str]) -> str:
    """Access of a step to memory that it uses several times."""
    if len({*modes}) == 1:
        return modes[0]
    return "write" if modes[0] == "write" and "read" not in modes else "add"


def _atoms(plans: Sequence[Plan]) -> Iterator[Atom]:
    """Memory, cut at the edges of all regions and grouped. The caller reads the results and writes
    the operands. An operand is listed only if peers read it."""
    uses_of = defaultdict[tuple[str, int], list[tuple[User, str, Region]]](list)
    for plan in plans:
        for index, step in enumerate(plan.steps):
            for mode, region in _uses(step):
                uses_of[region.buffer, region.rank].append(((plan.rank, index), mode, region))
        for name, buffer in plan.buffer.items():
            if buffer.memory in ("operand", "result"):
                whole = Region(name, plan.rank, 0, plan.shape(name)[0], 0, plan.shape(name)[1])
                uses_of[name, plan.rank].append(((plan.rank, -1), buffer.memory, whole))
    for (name, rank), uses in uses_of.items():
        memory = plans[rank].buffer[name].memory
        if memory == "operand" and all(user[0] == rank for user, *_ in uses):
            continue
        rows = sorted({edge for *_, one in uses for edge in (one.row, one.row_stop)})
        cols = sorted({edge for *_, one in uses for edge in (one.col, one.col_stop)})
        cells = defaultdict[tuple[int, int], dict[User, list[str]]](dict)
        for user, mode, one in uses:
            for row in rows[rows.index(one.row) : rows.index(one.row_stop)]:
                for col in cols[cols.index(one.col) : cols.index(one.col_stop)]:
                    cells[row, col].setdefault(user, []).append(mode)
        atoms = (tuple((who, _together(did)) for who, did in one.items()) for one in cells.values())
        yield from (Atom(name, rank, memory == "slot", dict(one)) for one in sorted({*atoms}))


class _Model:
    """The text of a model.

    Attributes:
        number: of each step, by its user.
        signals: by the rank and place of their words; ``words``: the numbers of these.
        uses: by user, the numbers of the atoms that it uses, each with the kind of access.
        collectives: by rank, its steps that are collectives.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans, self.atoms = plans, list(_atoms(plans))
        self.per_host = len(plans) // plans[0].problem.hosts
        users = [(plan.rank, index) for plan in plans for index in range(len(plan.steps))]
        self.number = {user: number for number, user in enumerate(users)}
        self.signals: dict[tuple[int, int], Signal] = {}
        for step in chain.from_iterable(plan.steps for plan in plans):
            for one in (*step.waits, *step.clears, *step.posts):
                self.signals.setdefault((one.waiter, one.word), one)
        self.words = {place: number for number, place in enumerate(self.signals)}
        self.uses = defaultdict[User, list[tuple[int, str]]](list)
        for number, atom in enumerate(self.atoms):
            for user, mode in atom.uses.items():
                self.uses[user].append((number, mode))
        self.collectives = [
            [i for i, step in enumerate(plan.steps) if isinstance(step.work, LibraryMove)]
            for plan in plans
        ]

    def lines(self) -> Iterator[str]:
        processes = sum(len(plan.lanes) + 1 for plan in self.plans) + 2
        if processes > MOST:
            said = f"required at most {MOST} processes, got {processes}; plan fewer ranks or pieces"
            raise InvalidArgument("promela", said)
        sizes = {"ranks": self.plans, "words": self.words, "steps": self.number}
        sizes |= {"atoms": self.atoms, "collectives": max(self.collectives, key=len)}
        yield f"/* {self.plans[0].problem}: {self.plans[0].schedule} */"
        yield HEAD.format(**{name: max(len(held), 1) for name, held in sizes.items()})
        yield from (f"/* word {self.words[w]}: {one.name} */" for w, one in self.signals.items())
        for number, atom in enumerate(self.atoms):
            yield f"/* atom {number}: {atom.buffer} of rank {atom.rank} */"
        for plan in self.plans:
            yield from self._caller(plan)
            for lane in plan.lanes:
                yield from self._lane(plan, lane)
        rest = [(self._word(one), int(one.released)) for one in self.signals.values()]
        yield "\nactive proctype end() {"
        begun = [f"assert(word[{word}] == {value})" for word, value in rest]
        yield from _event([f"returned == {len(self.plans)}"], begun)
        yield "}"

    def _word(self, signal: Signal) -> int:
        return self.words[signal.waiter, signal.word]

    def _near(self, one: int, two: int) -> bool:
        """Whether two ranks are on one host. Both sides take part in a move between hosts."""
        return one // self.per_host == two // self.per_host

    def _caller(self, plan: Plan) -> Iterator[str]:
        """The process of a rank's caller: after the end of another call, it makes the calls."""
        rank, call, uses = plan.rank, f"call[{plan.rank}]", self.uses[plan.rank, -1]
        own = [one for one in self.signals.values() if one.released and one.poster == rank]
        hands_on = [f"slot[{rank}] = 1", *(f"post({self._word(one)})" for one in own)]
        last = {step.lane: self.number[rank, index] for index, step in enumerate(plan.steps)}
        end = [f"assert(written[{x}] == {call})" for x, mode in uses if mode == "result"]
        for x, mode in uses:
            end += [f"assert(!readers[{x}]); written[{x}] = 0"] if mode == "operand" else []
        if self.per_host == 1:  # there is no peer to hand the slot to
            end.append(f"slot[{rank}]++")
        yield f"\nactive proctype rank{rank}() {{"
        yield from _event(["lanes"], hands_on)
        yield "end: do ::"
        begin = [f"written[{x}] = {call}" for x, mode in uses if mode == "operand"]
        yield from _event([f"{call} < CALLS"], [f"{call}++", *begin])
        over = [f"over[{number}] == {call}" for number in last.values()]
        yield from _event(over, [*end, f"returned = returned + ({call} == CALLS)"])
        yield "od }"

    def _lane(self, plan: Plan, lane: str) -> Iterator[str]:
        """The process of a lane. All steps of a launch begin before the first of them ends."""
        call, name = f"call[{plan.rank}]", re.sub("[^a-z0-9]", "_", lane)
        yield f"\nactive proctype rank{plan.rank}_{name}() {{\nend: do ::"
        first, before = True, -1
        for run in together(plan):
            ends = []
            for index in run if plan.steps[run[0]].lane == lane else ():
                step = plan.steps[index]
                guard = [f"over[{self.number[plan.rank, index]}] < {call}"] if first else []
                guard += [f"word[{self._word(signal)}]" for signal in step.waits]
                guard += [f"over[{self.number[plan.rank, i]}] == {call}" for i in step.after]
                if index == run[0] and before >= 0 and plan.steps[before].lane != lane:
                    queued = f"over[{self.number[plan.rank, before]}] == {call}"
                    guard.append(f"(lanes == 1 || {queued})")
                begin, entered, end = self._events(plan.rank, index, step)
                yield f"  /* {step.op} {step.label} */"
                if self.uses[plan.rank, index]:
                    ends.append((entered, end))
                else:
                    begin += end
                yield from _event(guard, begin)
                first = False
            for entered, end in ends:
                yield from _event(entered, end)
            before = run[-1]
        yield "od }"

    def _events(self, rank: int, index: int, step: Step) -> tuple[list[str], list[str], list[str]]:
        """Effects at the begin of a step, guards of its end, and effects at its end."""
        call, number = f"call[{rank}]", self.number[rank, index]
        near = [one for one in (*step.waits, *step.clears) if self._near(one.poster, rank)]
        begin = [f"owned({rank}, {call})"] if near else []
        begin += [f"wait({self._word(one)})" for one in step.waits]
        begin += [f"clear({self._word(one)})" for one in step.clears]
        slots = {self.atoms[x].rank for x, _ in self.uses[rank, index] if self.atoms[x].slot}
        owned = [f"owned({home}, {call})" for home in sorted(slots) if self._near(home, rank)]
        begin += owned
        end = [*owned]
        for x, mode in self.uses[rank, index]:
            begin.append(f"{mode}({x}, {call})")
            if mode == "beside":
                count = sum(mode == "beside" for mode in self.atoms[x].uses.values())
                end.append(f"parted({x}, {call}, {count})")
            else:
                end.append(f"left({x})" if mode == "read" else f"filled({x}, {call})")
        for one in step.posts:
            if one.released:
                end.append(f"slot[{rank}] = {call} + 1")
            elif self._near(one.waiter, rank):
                end.append(f"owned({one.waiter}, {call})")
            end.append(f"post({self._word(one)})")
        entered = []
        if isinstance(step.work, LibraryMove):
            turn = self.collectives[rank].index(index)
            begin.append(f"entered[{turn}]++")
            entered = [f"entered[{turn}] >= {len(self.plans)} * {call}"]
        return begin, entered, [*end, f"over[{number}]++"]


def _event(guard: Sequence[str], effects: Sequence[str]) -> Iterator[str]:
    """An atomic event, which happens as soon as all guards hold."""
    yield f"  d_step {{ {' && '.join(guard) or 1};"
    yield from (f"    {effect};" for effect in effects)
    yield "  }"
