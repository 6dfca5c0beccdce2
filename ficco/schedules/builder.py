"""Parts of all builders of Plans: steps, signal words, and stages with their buffers.

:func:`merged`, :func:`contiguous` and :func:`joined` merge products into as few calls as possible:
products of contiguous rows, and batches of equal strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from ficco.plan import Applied, Attendings, Plan, Products, Reduction, Region, Signal, Step
from ficco.plan.model import Payload, Product, Transfer, new
from ficco.problems.products import Problem
from ficco.problems.scaling import ALL, CAST, factors_of
from ficco.problems.specification import AnyProblem, Buffer
from ficco.schedules.space import Schedule

#: The lane that sums arrived pieces, or copies them to their final place, while products run.
REDUCE_LANE = "reduce0"

#: By rank, rows and columns of a buffer.
Shapes = tuple[tuple[int, int], ...]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def remembered(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorator of a method that caches its results, by positional arguments, in the object."""
    name = f"results of {method.__name__}"

    def remembering(this: S, /, *arguments: P.args, **named: P.kwargs) -> R:
        results = this.__dict__.get(name)
        if results is None:
            results = this.__dict__[name] = {}
        result: R | S = results.get(arguments, this)
        if result is this:
            result = results[arguments] = method(this, *arguments, **named)
        return result  # type: ignore[return-value]

    return remembering


class EachRank(dict[int, S]):
    """A dict with an entry for each rank, which ``make`` creates at its first use. In a large group
    a rank exchanges rows with few peers."""

    def __init__(self, make: Callable[[int], S]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, rank: int) -> S:
        entry = self[rank] = self._make(rank)
        return entry


class Block(NamedTuple):
    """Signal words of one kind of signal: ``per_poster`` for each rank that posts.

    Attributes:
        base: number of the first word.
        per_poster: number of words of a rank.
    """

    base: int
    per_poster: int

    def first(self, poster: int) -> int:
        """The first word of a rank that posts."""
        return self.base + poster * self.per_poster

    def signal(
        self, kind: str, poster: int, waiter: int, slot: int = 0, rows: tuple[int, int] = (0, 0)
    ) -> Signal:
        """The signal of word ``slot`` of a poster; ``rows``: first and last row that it gates."""
        return new(Signal, (kind, poster, waiter, slot, self.first(poster) + slot, *rows))


class WordAllocator:
    """Allocates the signal words of a call, equally on all ranks.

    Each rank has one word for each peer that hands a slot over and rests at 1. All other words rest
    at 0.

    Attributes:
        count: number of words that each rank keeps.
    """

    def __init__(self, world: int) -> None:
        self.world = self.count = world

    def block(self, per_poster: int) -> Block:
        """Allocate ``per_poster`` words for each rank. Signals that are never in use at the same
        time may share a block."""
        block = Block(self.count, per_poster)
        self.count += self.world * per_poster
        return block


def whole(buffer: Buffer, rank: int) -> Region:
    """The region of all rows of a rank's buffer."""
    rows, cols = buffer.shapes[rank]
    return Region(buffer.name, rank, 0, rows, 0, cols)


def released(poster: int, waiter: int) -> Signal:
    """The signal that the poster's slot is free; its word is the waiter's first for that peer."""
    return Signal("released", poster, waiter, 0, poster)


class World:
    """Buffers of a stage, equal on all ranks. A stage gathers or scatters rows of one product.

    Attributes:
        world: number of ranks.
        largest: ranks among which is one with the most pieces and the most rows.
        a, b, out: buffers of the operands and of the result of the stage.
        buffers: buffers that the stage adds.
        suffix: last part of the names of added buffers, if a Plan has several stages.
        cap: most bytes of staging of a gather; None: no cap.
        packs_columns: pieces of columns are packed where they land, if they are pushed.
    """

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        words: WordAllocator,
        operands: tuple[Buffer, Buffer, Buffer] | None = None,
        suffix: str = "",
        cap: int | None = None,
        packs_columns: bool = False,
    ) -> None:
        self.problem, self.schedule, self.words, self.cap = problem, schedule, words, cap
        self.packs_columns = packs_columns and schedule.dims == 2 and not schedule.pull
        self.world = problem.world
        self.largest = range(1 if problem.same_blocks else problem.world)
        inputs, outs = problem.specification.operands, problem.specification.results
        self.a, self.b, self.out = operands or (problem.left, inputs[1], outs[0])
        self.suffix = suffix
        self.buffers: list[Buffer] = []
        if problem.given is not problem and operands is None:  # the call casts the caller's A
            read = schedule.pull and self.world > 1 and not problem.kind.scatters
            for cast in (problem.left, problem.factors):
                memory = "slot" if read else "local"
                self.buffer(cast.name, cast, cast.shapes, memory, leaves=cast.leaves)
            self.a = self.buffers[0]
        self.lay_out()

    def lay_out(self) -> None:
        """Allocate words and add buffers, equally on all ranks."""

    def stage_count(self, rank: int) -> int:
        """Number of stages of a rank's capped staging; 0 without a cap."""
        return 0

    def block(self, src: int, dst: int) -> tuple[int, int]:
        """Rows of a rank's block at its receiver."""
        first = self.problem.lands(src, dst)
        return first, first + self.problem.block(src, dst)

    def buffer(
        self, name: str, like: Buffer, shapes: Shapes, memory: str = "slot", **fields: Any
    ) -> Buffer:
        """Add a buffer that holds the same matrix as ``like``, and return it. ``shapes``: rows and
        columns by rank. ``fields``: fields of :class:`Buffer` that are not the default."""
        added = Buffer(name + self.suffix, like.holds, like.dtype, shapes, memory)
        self.buffers.append(added._replace(**fields))
        return self.buffers[-1]


class Builder:
    """The Plan of one rank, ``me``, to which stages add their steps. Its ``peers`` are the other
    ranks of its host, whose memory it can access."""

    def __init__(self, problem: AnyProblem, rank: int) -> None:
        self.problem, self.me = problem, rank
        host = problem.ranks_of(problem.host(rank))
        self.peers = [peer for peer in host if peer != rank]
        self.lane_of: dict[int, str] = {}  # peer -> the lane of copies from or to it, if any
        self.steps: list[Step] = []
        self.begun: dict[int, tuple[Signal, ...]] = {}  # by peer, signals that the call has begun
        self.silent: tuple[Signal, ...] = ()  # signals of peers that the last step waits for

    def add(self, step: Step) -> int:
        """Append a step, and return its index."""
        self.steps.append(step)
        return len(self.steps) - 1

    def assign_lanes(self, peers: list[int], lanes: int) -> None:
        """Assign peers to copy lanes in turns, unless an earlier stage has assigned them."""
        turns = {peer: f"copy{i % lanes}" for i, peer in enumerate(peers)}
        self.lane_of = self.lane_of or turns

    def copy_lanes(self) -> Iterable[tuple[str, list[int]]]:
        """Copy lanes, each with its peers."""
        by_lane: dict[str, list[int]] = {}
        for peer, lane in self.lane_of.items():
            by_lane.setdefault(lane, []).append(peer)
        return by_lane.items()

    def released_by(self, peers: list[int]) -> tuple[Signal, ...]:
        """The signals to wait for, and clear, before using the slots of peers."""
        return tuple(released(peer, self.me) for peer in peers)

    def acquire(self, after: tuple[int, ...] = ()) -> dict[int, int]:
        """Add a step to each copy lane: wait until its peers release their slots, and post that the
        call has begun. Return the index of the step by peer."""
        acquired: dict[int, int] = {}
        for lane, peers in self.copy_lanes():
            free = self.released_by(peers)
            posts = tuple(signal for peer in peers for signal in self.begun.get(peer, ()))
            step = Step(None, lane, "acquire", free, posts, clears=free, after=after)
            acquired.update(dict.fromkeys(peers, self.add(step)))
        return acquired

    def retire(self, waits: tuple[Signal, ...] = ()) -> None:
        """Add the last step: wait for ``waits`` and for silent peers, clear all words that this
        rank waited for, and hand its slot to the peers."""
        waits += self.silent
        cleared = {signal for step in self.steps for signal in step.clears}
        waited = [s for step in self.steps for s in (*step.waits, *step.gates) if s not in cleared]
        posts = tuple(released(self.me, peer) for peer in self.peers)
        after = () if self.steps[-1].lane == "sync" else self.lasts()
        self.add(Step(None, "sync", "retire", waits, posts, (*waited, *waits), after))

    def cast(self, problem: Problem, a: Region, lane: str = "compute0", label: str = "cast") -> int:
        """Add a step that casts a region of A to float8 and writes its factors, and return its
        index. No factor of the region may belong to other parts of A, too."""
        assert problem.scaling is not None
        wide = a._replace(buffer=problem.specification.operands[0].name)
        factors = factors_in("scale_a", a, problem.scaling.rules.a)
        move = Transfer(wide, a, function=CAST, factors=factors)
        return self.add(Step(move, lane, label))

    def lasts(self) -> tuple[int, ...]:
        """The last step of each lane."""
        return tuple({step.lane: i for i, step in enumerate(self.steps)}.values())

    def plan(
        self, schedule: str, buffers: Sequence[Buffer], words: WordAllocator, stages: int = 0
    ) -> Plan:
        """The Plan of the steps so far. It lists only local buffers that a step writes."""
        problem, specification = self.problem, self.problem.specification
        steps = self.steps if any(one.memory != "slot" for one in buffers) else []
        written = {one.buffer for step in steps for one in _written(step.work) if one}
        added = [one for one in buffers if one.memory == "slot" or one.name in written]
        return Plan(
            problem=problem,
            schedule=schedule,
            rank=self.me,
            steps=tuple(self.steps),
            buffers=(*specification.operands, *specification.results, *added),
            words=words.count if problem.world > 1 else 0,
            stages=stages,
        )


def _written(work: Payload) -> Iterable[Region | None]:
    """Regions that work writes; of a batch the first."""
    if isinstance(work, Products):
        return [product.out for product in work.products]
    if isinstance(work, Attendings):
        return [region for one in work.attends for region in (one.out, one.back)]
    if isinstance(work, Transfer):
        return work.dst, work.factors
    if isinstance(work, Reduction):
        return (work.out,)
    return work.outs if isinstance(work, Applied) else ()


def factors_in(buffer: str, region: Region, share: tuple[int, int]) -> Region:
    """The region of a buffer with the factors of a region of an operand. ``share``: how many rows
    and columns share a factor."""
    rows, cols = factors_of(region[2:4], share[0]), factors_of(region[4:], share[1])
    return Region(buffer, region.rank, *rows, *cols)


def scaled(problem: Problem, product: Product, factors: Region | None = None) -> Product:
    """A product of scaled operands with the regions of their factors. ``factors``: those of a, by
    default in the caller's operand. The first of products that add up adds the bias."""
    scaling, (a, b, out) = problem.scaling, product[:3]
    assert scaling is not None
    left = factors or factors_in("scale_a", a, scaling.rules.a)
    scales = left, factors_in("scale_b", b, scaling.rules.b)
    first = scaling.bias and not b.row
    bias = Region("bias", out.rank, 0, 1, out.col, out.col_stop) if first else None
    return product._replace(factors=scales, bias=bias)


class Stage:
    """Steps of one rank in a stage.

    Attributes:
        problem, schedule: problem and schedule of the stage.
        builder, steps, add: of the Plan.
        me, peers: the rank, and the other ranks of its host.
        a, b: names of the operands.
    """

    world: World

    def __init__(self, world: World, builder: Builder) -> None:
        self.world = world
        self.problem, self.schedule = world.problem, world.schedule
        self.builder, self.steps, self.add = builder, builder.steps, builder.add
        self.me, self.peers = builder.me, builder.peers
        self.a, self.b = world.a.name, world.b.name
        self.casts: list[tuple[Region, int]] = []  # regions of A that are cast, with their steps

    def run(self) -> None:
        """Add all steps except the last one, which hands over the slot."""
        raise NotImplementedError

    def plan(self) -> Plan:
        """Add all steps, and return the Plan of a call with this stage only."""
        self.run()
        if self.builder.problem.world > 1 and self.steps:
            self.builder.retire()
        world, stages = self.world, self.world.stage_count(self.me)
        return self.builder.plan(str(self.schedule), world.buffers, world.words, stages)

    @property
    def lane_of(self) -> dict[int, str]:
        """The copy lane of each peer."""
        return self.builder.lane_of

    def compute_lane(self, turn: int) -> str:
        """The lane of a product; products take turns."""
        return f"compute{turn % self.schedule.compute}"

    def _right(self, row: int, row_stop: int, col: int, col_stop: int) -> Region:
        """The region of rows and columns of the local b."""
        return new(Region, (self.b, self.me, row, row_stop, col, col_stop))

    def _product(
        self, a: Region, b: Region, out: Region, accumulate: bool = False, terms: int = 0
    ) -> Product:
        """A product, with its factors if operands are scaled."""
        product = Product(a, b, out, accumulate, terms=terms)
        return scaled(self.problem, product) if self.problem.scaling else product

    def _cast(self, wanted: Region, lane: str) -> tuple[int, ...]:
        """Cast the remaining parts of a region of A, if the call casts A. Rows with a single factor
        are cast as a whole. Returns the steps on other lanes that cast parts of the region."""
        if self.problem.given is self.problem:
            return ()
        assert self.problem.scaling is not None
        if self.problem.scaling.rules.a[1] == ALL:
            wanted = wanted._replace(col=0, col_stop=self.problem.k)
        for rest in _without(wanted, [region for region, _ in self.casts]):
            index = self.builder.cast(self.problem, rest, lane, f"cast {len(self.casts)}")
            self.casts.append((rest, index))
        casts = [i for region, i in self.casts if _meet(region, wanted)]
        return tuple(i for i in casts if self.steps[i].lane != lane)

    def _place(
        self, lane: str, src: Region, dst: Region, after: tuple[int, ...] = (), terms: int = 0
    ) -> None:
        """Add a copy within the rank."""
        # The copy kernel brings own rows to their place in the launch that sends others.
        mover = "kernel" if self.schedule.mover == "kernel" and src.buffer == self.a else "dma"
        move, label = Transfer(src, dst, terms, mover=mover), f"{src.buffer}>{dst.buffer}"
        self.add(Step(move, lane, label, after=after))


def _meet(one: Region, two: Region) -> bool:
    """Whether two regions of a buffer overlap; rows without columns do, too."""
    rows = one.row < two.row_stop and two.row < one.row_stop
    bare = one.cols == two.cols == 0
    return rows and (bare or (one.col < two.col_stop and two.col < one.col_stop))


def _without(region: Region, others: Iterable[Region]) -> list[Region]:
    """Parts of a region outside other regions."""
    parts = [region]
    for other in others:
        parts = [rest for part in parts for rest in _rest(part, other)]
    return parts


def _rest(part: Region, other: Region) -> list[Region]:
    if not _meet(part, other):
        return [part]
    row, row_stop = max(part.row, other.row), min(part.row_stop, other.row_stop)
    middle = part._replace(row=row, row_stop=row_stop)
    ends = part._replace(row_stop=row), part._replace(row=row_stop)
    sides = middle._replace(col_stop=other.col), middle._replace(col=other.col_stop)
    return [*(one for one in ends if one.rows > 0), *(one for one in sides if one.cols > 0)]


def merged(products: Sequence[Product]) -> tuple[Product, ...]:
    """The same products, merged into batches for as few library calls as possible."""
    if len(products) < 2:
        return tuple(products)
    batches: list[tuple[object, list[Product]]] = []
    for one in contiguous(products):
        kind = _kind(one)
        if batches and kind == batches[-1][0] and _repeats(batches[-1][1], one):
            batches[-1][1].append(one)
        else:
            batches.append((kind, [one]))
    return tuple([_batch(batch) for _, batch in batches])


def _repeats(batch: list[Product], one: Product) -> bool:
    """Whether a product has the rows and the strides of the batch before it."""
    first, last = batch[0], batch[-1]
    strides, rows = _strides(last, one), first.a.rows
    if one.a.rows != rows or min(strides) < rows:
        return False
    return first is last or strides == _strides(first, batch[1])


def _strides(one: Product, two: Product) -> tuple[int, int]:
    return two.a.row - one.a.row, two.out.row - one.out.row


def _batch(batch: list[Product]) -> Product:
    a_stride, out_stride = _strides(*batch[:2]) if len(batch) > 1 else (0, 0)
    return batch[0]._replace(batch=len(batch), a_stride=a_stride, out_stride=out_stride)


def contiguous(products: Iterable[Product]) -> tuple[Product, ...]:
    """The same products; products of contiguous rows of A and of the result become one."""
    runs: list[list[Product]] = []
    for product in products:
        last = runs[-1][-1] if runs else None
        follows = last and (last.a.row_stop, last.out.row_stop) == (product.a.row, product.out.row)
        if last and follows and _kind(last) == _kind(product):
            runs[-1].append(product)
        else:
            runs.append([product])
    return tuple([_spanning(run[0], run[-1]) if run[1:] else run[0] for run in runs])


def _spanning(first: Product, last: Product) -> Product:
    """One product of all rows between the first row of ``first`` and the last row of ``last``."""
    a = first.a._replace(row_stop=last.a.row_stop)
    out = first.out._replace(row_stop=last.out.row_stop)
    ends = zip(first.factors[:1], last.factors, strict=False)
    of_a = [one._replace(row_stop=two.row_stop) for one, two in ends]
    return first._replace(a=a, out=out, factors=(*of_a, *first.factors[1:]))


def joined(products: Iterable[Product]) -> list[Product]:
    """The same transposed products. Products with one result become one if their rows of A and of
    b are contiguous."""
    products_left: list[Product] = []
    for product in products:
        last = products_left[-1] if products_left else None
        if last and last.out == product.out and last.b.row_stop == product.b.row:
            longer = last.a._replace(row_stop=product.a.row_stop)
            if product.a == longer._replace(row=last.a.row_stop):
                rows_of_b = last.b._replace(row_stop=product.b.row_stop)
                products_left[-1] = last._replace(a=longer, b=rows_of_b)
                continue
        products_left.append(product)
    return products_left


def _kind(product: Product) -> tuple[object, ...]:
    """Key of a product: products of one call have equal keys."""
    a, out = product.a, product.out
    factors: tuple[object, ...] = product.factors
    if product.factors:  # factors of a follow its rows if each row has a factor
        left, right = product.factors
        follows = left.rows == a.rows
        factors = (left.buffer, left.row - a.row, left[4:]) if follows else left, right
    return (
        product.b, a[4:], out[4:], a.buffer, out.buffer, product.accumulate, product.terms,
        product.addend, factors, product.bias,
    )  # fmt: skip
