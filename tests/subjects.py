"""References of all operators, computed in one process from the operands of all ranks.

A :class:`Subject` is an operator of the contract. Its reference is differentiable, so that one
formula gives the results and the gradients of all ranks. Operands are small integers that depend on
the iteration, the rank, the row and the column: every sum is exact in every dtype, and a stale,
missing or misplaced piece changes the result. Attention is the exception: it is compared with
float64, within roundings of its dtype.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from experts import Data, plain
from ranks import Rank
from torch.nn import functional

import ficco
from ficco.problems.attention import keys_of
from ficco.problems.products import OPERATORS
from ficco.problems.scaling import RECIPES, factor_count
from ficco.schedules import NAMED

Tensors = list[torch.Tensor]
#: Most wrong elements that an error lists.
SHOWN = 5

#: Rows of the ranks: equal, different and zero on some ranks, fewer than pieces, or zero on all.
KINDS = ("equal", "uneven", "few", "none")
#: Knobs of schedules of products.
KNOBS = (
    "",
    "pull",
    "pieces=1",
    "pieces=3,pull",
    "pieces=3+1",
    "tail=3",
    "pieces=2,tail=2,pull",
    "order=peer",
    "kernel",
    "copy=3,compute=2",
    "pieces=4,tail=2,order=peer,pull,copy=2,compute=3",
    "beta",
    "pieces=2,tail=3,copy=2,compute=2,beta",
)
TILED = ("tiled", "tiled:pieces=3,order=piece", "tiled:pieces=2,tail=3,pull", "tiled:pieces=3+1")
BY_HEADS = (
    "serial",
    "uniform-fused-1d:pieces=2",
    "uniform-fused-1d:pieces=3,copy=2",
    "uniform-fused-1d:pieces=3+1",
    "uniform-fused-1d",
    "uniform-fused-1d:pieces=4,compute=2",
)


@dataclass(frozen=True)
class Case:
    """One call, the same on every rank.

    Attributes:
        rows: rows of each rank, or from each rank to each rank.
        sizes: the other sizes, in an order that the subject defines.
        facts: arguments other than operands, group and schedule.
        layout: "" for contiguous matrices, or the name of one of the subject's layouts.
        needs: for each operand whether it needs a gradient.
        recipe: scaling recipe of float8 operands.
    """

    rows: tuple[Any, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    schedule: str = "auto"
    facts: dict[str, Any] = field(default_factory=dict)
    layout: str = ""
    needs: tuple[bool, ...] = ()
    recipe: str = ""

    def on(self, **changes: Any) -> Case:
        return replace(self, **changes)


def integers(most: int, *seed: int, shape: Sequence[int]) -> torch.Tensor:
    """Integers from -most to most, in float64."""
    mixed = 0
    for part in seed:
        mixed = mixed * 7919 + part + 1
    generator = torch.Generator().manual_seed(mixed)
    return torch.randint(-most, most + 1, tuple(shape), generator=generator).double()


class Subject(ABC):
    """An operator and its reference.

    Attributes:
        name: name of the operator.
        operands: names of its operands.
        roundings: tolerance of the root mean square error, in roundings of the dtype: of a result,
            of a gradient, and of both in a wide dtype. None if all sums are exact.
        layouts: layouts of operands other than contiguous.
        differentiable: whether its operands have gradients.
    """

    name: str
    operands: tuple[str, ...]
    roundings: tuple[float, float, float] | None = None
    layouts: tuple[str, ...] = ()
    differentiable = True

    @abstractmethod
    def schedules(self, world: int, hosts: int = 1, tiled: bool = False) -> list[str]:
        """Schedules that serve the operator; ``tiled``: also those with tiled products."""

    @abstractmethod
    def case(self, chance: random.Random, world: int, kind: str, engine: str) -> Case:
        """A case with rows of a kind and random sizes."""

    @abstractmethod
    def make(self, case: Case, rank: int, iteration: int) -> Tensors:
        """The operands of a rank, in float64."""

    @abstractmethod
    def together(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        """The results of each rank; ``by_rank``: operands of all ranks."""

    def constants(self, case: Case, rank: int, iteration: int) -> Tensors:
        """Operands of a rank without gradients."""
        return []

    def call(self, case: Case, operands: Tensors, constants: Tensors, **where: Any) -> Tensors:
        """Call the operator; return its results."""
        facts = {"schedule": case.schedule, **case.facts, **where}
        result = getattr(ficco, self.name)(*operands, *constants, **facts)
        return list(result) if isinstance(result, tuple) else [result]

    def traceable(self, case: Case) -> Case:
        """A similar case that compilers can trace."""
        return case

    def laid_out(self, case: Case, operands: Tensors) -> Tensors:
        """The operands of a rank in the layout of the case."""
        return operands

    def result(self, case: Case) -> str:
        """The dtype of results."""
        return case.dtype

    def dtypes(self, engine: str) -> tuple[str, ...]:
        """Dtypes of the operands on an engine."""
        return ("float32", "bfloat16", "float16", "float64")[: 4 if engine != "cuda" else 3]


def reference(
    subject: Subject, case: Case, world: int, iteration: int
) -> tuple[list[Tensors], list[Tensors], list[Tensors]]:
    """All ranks' operands with their gradients, results, and gradients of the results."""
    operands = [
        [one.requires_grad_(subject.differentiable) for one in subject.make(case, rank, iteration)]
        for rank in range(world)
    ]
    results = subject.together(case, operands, iteration)
    grads = [
        [gradient_of(result, rank, iteration, turn) for turn, result in enumerate(of_rank)]
        for rank, of_rank in enumerate(results)
    ]
    if not subject.differentiable:
        return operands, results, grads
    loss = sum(
        (result * grad).sum()
        for of_rank, rank_grads in zip(results, grads, strict=True)
        for result, grad in zip(of_rank, rank_grads, strict=True)
    )
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
    return operands, results, grads


def gradient_of(result: torch.Tensor, *seed: int) -> torch.Tensor:
    """Integers from -1 to 1 that depend on the rank and the position."""
    numbers = torch.arange(result.numel(), dtype=torch.float64) + 7 * seed[0] + 3 * sum(seed)
    return ((numbers * 2654435761 % 4294967296) % 3 - 1).view(result.shape)


def root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def compare(
    result: torch.Tensor, want: torch.Tensor, subject: Subject, about: str, size: float = 0.0
) -> None:
    """Fail unless shapes are equal, and values are equal or within the subject's tolerance."""
    assert result.shape == want.shape, f"{about}: shape {result.shape}, wanted {want.shape}"
    wide = result.detach().double().cpu()
    if subject.roundings is None:
        most = {torch.bfloat16: 256, torch.float16: 2048}.get(result.dtype, 2**24)
        assert not want.numel() or want.abs().max() <= most, f"{about}: the case is not exact"
        wrong = [tuple(place) for place in (wide != want).nonzero()[:SHOWN].tolist()]
        places = (f"{place}: {result[place]}, wanted {want[place]}" for place in wrong)
        count = int((wide != want).sum())
        assert not wrong, f"{about}: {count} of {want.numel()} are wrong: {'; '.join(places)}"
    elif want.numel():
        error, scale = root_mean_square(wide - want), max(size, root_mean_square(want))
        which = 2 if result.dtype.itemsize > 2 else size > 0
        limit = subject.roundings[which] * torch.finfo(result.dtype).eps * scale
        assert error <= limit, f"{about}: off by {error}, at most {limit}"


def per_rank(kind: str, world: int) -> tuple[int, ...]:
    """Rows of each rank, for a kind."""
    uneven = (7, 18) if world == 2 else (7, 0, 13, 5)[:world]
    few = tuple(rank % 2 for rank in range(world))
    return {"equal": (24,) * world, "uneven": uneven, "few": few, "none": (0,) * world}[kind]


def block(kind: str, rank: int, peer: int) -> int:
    """Rows from a rank to another, for a kind."""
    uneven = (7 * rank + 5 * peer + 3) % 17 * ((rank + 2 * peer) % 4 != 1)
    return {"equal": 12, "uneven": uneven, "few": (rank + peer) % 3, "none": 0}[kind]


class Product(Subject):
    """A product whose rows are communicated before it or after it."""

    operands = "a", "b"
    layouts = ("leading", "transposed")

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, OPERATORS[name]

    def schedules(self, world: int, hosts: int = 1, tiled: bool = False) -> list[str]:
        sums, inner = self.kind.sums, self.kind.inner
        supported = ["auto", "serial:collective", *(TILED if tiled and not inner else ())]
        for name, base in NAMED.items():
            for knobs in KNOBS if name != "tiled" else ():
                beta = "beta" in knobs or base.beta
                if (beta and base.uniform) or (name == "ring" and "pull" in knobs):
                    continue
                if not sums and (beta or base.sums_in_place):
                    continue
                if name == "two-shot" and not self.kind.returns:
                    continue
                reads = "pull" in knobs or name == "ring" or base.pull
                if hosts > 1 and (reads or beta):
                    continue
                supported.append(f"{name}:{knobs}" if knobs else name)
        return supported

    def case(self, chance: random.Random, world: int, kind: str, engine: str) -> Case:
        if self.kind.blocks:
            ranks = range(world)
            rows: Any = tuple(tuple(block(kind, rank, peer) for peer in ranks) for rank in ranks)
        else:
            rows = per_rank(kind, world)
            if self.kind.returns:  # the operator splits m rows like this
                m = sum(rows)
                rows = tuple(m // world + (rank < m % world) for rank in range(world))
        sizes = chance.choice((8, 24)), chance.choice((1, 8, 40))
        return Case(rows, sizes, needs=(True, True))

    def make(self, case: Case, rank: int, iteration: int) -> Tensors:
        k, n = case.sizes
        blocks, rows = self.kind.blocks, case.rows
        held = sum(rows[rank]) if blocks else sum(rows) if self.kind.sums else rows[rank]
        inner = k
        if self.kind.inner:
            inner = sum(line[rank] for line in rows) if blocks else sum(rows)
        return [
            integers(2, rank, iteration, 0, shape=(held, k)),
            integers(1, rank, iteration, 1, shape=(inner, n)),
        ]

    def together(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        def exchanged(matrices: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
            if not self.kind.blocks:
                return torch.cat(list(matrices))
            blocks = zip(matrices, case.rows, strict=True)
            return torch.cat([matrix.split(list(rows))[rank] for matrix, rows in blocks])

        a, b = zip(*by_rank, strict=True)
        ranks = range(len(a))
        if self.kind.inner:
            return [[exchanged(a, rank).t() @ b[rank]] for rank in ranks]
        if not self.kind.scatters:
            return [[exchanged(a, rank) @ b[rank]] for rank in ranks]
        products = [left @ right for left, right in by_rank]
        if self.kind.blocks:
            return [[exchanged(products, rank)] for rank in ranks]
        total = torch.stack(products).sum(0)
        if self.kind.returns:
            return [[total] for _ in ranks]
        return [[part] for part in total.split(list(case.rows))]

    def call(self, case: Case, operands: Tensors, constants: Tensors, **where: Any) -> Tensors:
        rows = {} if self.kind.returns else {"rows": case.rows}
        return super().call(case.on(facts={**case.facts, **rows}), operands, constants, **where)

    def laid_out(self, case: Case, operands: Tensors) -> Tensors:
        a, b = operands
        if case.layout == "transposed":
            b = b.t().contiguous().t()
        if case.layout == "leading" and len(a) % 2 == 0:
            a = a.view(2, len(a) // 2, a.shape[1])
        return [a, b]


class Float8(Product):
    """A product of float8 operands with their factors, powers of two, in float32."""

    differentiable = False
    layouts = ()

    def schedules(self, world: int, hosts: int = 1, tiled: bool = False) -> list[str]:
        names = super().schedules(world, hosts)
        return [name for name in names if "beta" not in name and not name.startswith("ring")]

    def case(self, chance: random.Random, world: int, kind: str, engine: str) -> Case:
        recipes = [name for name, rules in RECIPES.items() if not rules.needs]
        recipe = "tensor" if engine == "hip" else chance.choice(recipes)
        if recipe == "block" and engine == "cuda":  # needs multiples of four rows
            kind = "equal"
        sizes = 256 if recipe == "block" else chance.choice((16, 48)), chance.choice((16, 48))
        return super().case(chance, world, kind, engine).on(sizes=sizes, recipe=recipe)

    def dtypes(self, engine: str) -> tuple[str, ...]:
        return ("float8_e4m3fnuz" if engine == "hip" else "float8_e4m3fn",)

    def result(self, case: Case) -> str:
        return "float32"

    def constants(self, case: Case, rank: int, iteration: int) -> Tensors:
        a, b = self.make(case, rank, iteration)
        rules, factors = RECIPES[case.recipe], []
        for turn, (matrix, share) in enumerate(((a, rules.a), (b, rules.b))):
            counts = [factor_count(*pair) for pair in zip(matrix.shape, share, strict=True)]
            powers = 2.0 ** integers(1, rank, iteration, 5 + turn, shape=counts)
            factors.append(powers.float().t().contiguous().t() if turn == 0 else powers.float())
        return factors

    def together(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        wide = []
        for rank, operands in enumerate(by_rank):
            factors = self.constants(case, rank, iteration)
            pairs = zip(operands, factors, strict=True)
            wide.append([matrix * spread(factor, matrix.shape) for matrix, factor in pairs])
        return super().together(case, wide, iteration)

    def call(self, case: Case, operands: Tensors, constants: Tensors, **where: Any) -> Tensors:
        a, b = operands
        scale_a, scale_b = constants
        facts = {**case.facts, "scale_a": scale_a, "scale_b": scale_b, "out_dtype": torch.float32}
        column_major = b.t().contiguous().t()
        return super().call(case.on(facts=facts), [a, column_major], [], **where)


def spread(factors: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Factors of blocks, rows, columns or a tensor, expanded to its elements."""
    wide = factors.double()
    for dim, (size, count) in enumerate(zip(shape, factors.shape, strict=True)):
        share = size if count == 1 else 1 if count == size else 128
        wide = wide.repeat_interleave(share, dim).narrow(dim, 0, size) if size else wide[:0]
    return wide


class GatheredToo(Product):
    """``all_gather_matmul`` that returns the gathered rows as well."""

    def together(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        whole = torch.cat([a for a, _ in by_rank])
        return [[*out, whole] for out in super().together(case, by_rank, iteration)]

    def call(self, case: Case, operands: Tensors, constants: Tensors, **where: Any) -> Tensors:
        return super().call(case.on(facts={"return_gathered": True}), operands, constants, **where)


MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "window": 5},
    {"causal": True, "window": 0},
    {"causal": True, "window": 30, "scale": 0.5},
    {"cu_seqlens": 3},
    {"cu_seqlens": 5, "causal": True, "window": 4},
)


def attended(facts: dict[str, Any], queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Mask of the keys of each query, for positions [queries, 1] and [1, keys]."""
    mask = torch.ones(len(queries), keys.shape[1], dtype=torch.bool)
    if facts.get("causal"):
        mask &= keys <= queries
    if (window := facts.get("window")) is not None:
        mask &= queries - keys <= window
    if bounds := facts.get("cu_seqlens"):
        ends = torch.tensor(bounds)
        documents = (torch.bucketize(at, ends, right=True) for at in (queries, keys))
        mask &= torch.eq(*documents)
    return mask


class GatheredAttention(Subject):
    """Attention of the own queries to the keys of all ranks; sizes: rows of a rank, batch, heads of
    queries and of keys, and elements of a head."""

    name = "all_gather_attention"
    operands = "q", "k_shard", "v_shard"
    roundings = 1.5, 3.0, 8.0
    layouts = ("interleaved",)
    placements: tuple[str, ...] = ("ranks", "head-tail")

    def schedules(self, world: int, hosts: int = 1, tiled: bool = False) -> list[str]:
        reads = ["shard-overlap:pull,compute=2", "serial:pull", "hetero-unfused-1d:pieces=3,pull"]
        rest = "growing:compute=2", "growing:tail=3,compute=2", "hetero-fused-1d:pieces=2"
        more = "shard-overlap:tail=2", "serial", "shrinking:copy=2"
        of_one_host = [] if hosts > 1 else ["ring", "growing:pull", *reads]
        return ["auto", "growing", *rest, *more, *of_one_host]

    def heads(self, chance: random.Random, world: int) -> tuple[int, int]:
        return chance.choice(((4, 2), (6, 6), (4, 1)))

    def case(self, chance: random.Random, world: int, kind: str, engine: str) -> Case:
        placement = chance.choice(self.placements)
        rows = {"equal": 12, "uneven": 10, "few": 2, "none": 0, "many": 256}[kind]
        facts = dict(chance.choice(MASKS))
        batch = chance.choice((1, 2))
        if count := facts.pop("cu_seqlens", 0):
            length = world * rows
            bounds = {0, length, *(min(length, 3 + 7 * turn) for turn in range(count))}
            facts |= {"cu_seqlens": tuple(sorted(bounds))} if rows else {}
            batch = 1  # of packed sequences
        if len(self.placements) > 1:
            facts["placement"] = placement
        size = chance.choice((8, 16) if engine != "cuda" else (64, 128))
        sizes = rows, batch, *self.heads(chance, world), size
        return Case((rows,) * world, sizes, facts=facts, needs=(True,) * 3)

    def dtypes(self, engine: str) -> tuple[str, ...]:
        return super().dtypes(engine) if engine != "cuda" else ("bfloat16", "float16")

    def make(self, case: Case, rank: int, iteration: int) -> Tensors:
        rows, batch, heads, kv_heads, size = case.sizes
        generator = torch.Generator().manual_seed(1000 * iteration + rank)
        # Exact in every dtype: with large scores the rounding of operands alone would exceed the
        # tolerance.
        return [
            torch.randn(batch, count, rows, size, generator=generator).bfloat16().double()
            for count in (heads, kv_heads, kv_heads)
        ]

    def positions(self, case: Case, rank: int) -> torch.Tensor:
        """Positions of a rank's rows in the sequence, in the order of the rows."""
        world, rows = len(case.rows), case.sizes[0]
        if case.facts.get("placement", "ranks") == "ranks":
            return torch.arange(rank * rows, (rank + 1) * rows)
        chunks = torch.arange(world * rows).view(2 * world, rows // 2)
        return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])

    def together(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        world, (rows, _, heads, kv_heads, size) = len(by_rank), case.sizes
        order = torch.cat([self.positions(case, rank) for rank in range(world)])
        back = order.argsort()
        q, k, v = (torch.cat(list(shards), 2)[:, :, back] for shards in zip(*by_rank, strict=True))
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        i, j = torch.arange(world * rows)[:, None], torch.arange(world * rows)[None]
        scores = q @ k.transpose(-1, -2) * case.facts.get("scale", size**-0.5)
        scores = scores.masked_fill(~attended(case.facts, i, j), -torch.inf)
        out = scores.softmax(-1) @ v
        return [[out[:, :, self.positions(case, rank)]] for rank in range(world)]

    def laid_out(self, case: Case, operands: Tensors) -> Tensors:
        if case.layout == "interleaved":  # [batch, rows, heads, size], as from projections
            return [one.transpose(1, 2).contiguous().transpose(1, 2) for one in operands]
        return operands


class AttentionByHeads(GatheredAttention):
    """Attention over all positions by each rank's heads."""

    name = "ulysses_attention"
    operands = "q", "k", "v"
    placements = ("ranks",)

    def schedules(self, world: int, hosts: int = 1, tiled: bool = False) -> list[str]:
        return ["auto", *BY_HEADS]

    def heads(self, chance: random.Random, world: int) -> tuple[int, int]:
        heads, each = chance.choice(((1, 1), (2, 2), (4, 2), (6, 3), (6, 1), (4, 4)))
        return heads * world, chance.choice((heads * world // each, 1))


class Projections(Subject):
    """The projections around attention by heads; sizes: rows of a rank, batch, heads of queries and
    of keys, elements of a head, features."""

    layouts = ("transposed",)

    def schedules(self, world: int, hosts: int = 1, tiled: bool = False) -> list[str]:
        more = "hetero-fused-1d:pieces=4", "uniform-fused-1d:pieces=3,copy=2", "uniform-fused-2d"
        rest = "hetero-unfused-1d:pieces=2,tail=2", "hetero-fused-2d:pieces=3+1,tail=2"
        return ["auto", "growing", "serial", "shrinking:compute=2", *more, *rest]

    def case(self, chance: random.Random, world: int, kind: str, engine: str) -> Case:
        rows = {"equal": 6, "uneven": 5, "few": 1, "none": 0}[kind]
        heads, kv_heads = chance.choice(((2, 2), (2, 1), (4, 2), (3, 3)))
        kv = chance.choice((kv_heads * world, 1))
        size, features = chance.choice(((4, 12), (8, 32)))
        sizes = rows, chance.choice((1, 2, 3)), heads * world, kv, size, features
        return Case((rows,) * world, sizes, needs=(True,) * len(self.operands))

    def dtypes(self, engine: str) -> tuple[str, ...]:
        return ("float32", "float64")[: 2 if engine != "cuda" else 1]

    def laid_out(self, case: Case, operands: Tensors) -> Tensors:
        if case.layout == "transposed":
            return [one.mT.contiguous().mT for one in operands]
        return operands


def by_heads(x: torch.Tensor, size: int) -> torch.Tensor:
    """[batch, positions, heads * size] as [batch, heads, positions, size]."""
    return x.unflatten(2, (-1, size)).transpose(1, 2)


class ProjectionIn(Projections):
    """Queries, keys and values of all positions for each rank's heads."""

    name = "ulysses_project"
    operands = "x", "q_weight", "k_weight", "v_weight"

    def make(self, case: Case, rank: int, iteration: int) -> Tensors:
        rows, batch, heads, kv_heads, size, features = case.sizes
        weights = [
            integers(1, iteration, turn, shape=(count * size, features))  # equal on all ranks
            for turn, count in enumerate((heads, kv_heads, kv_heads))
        ]
        return [integers(2, rank, iteration, 9, shape=(batch, rows, features)), *weights]

    def together(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        world, (_, _, heads, kv_heads, size, _) = len(by_rank), case.sizes
        each = heads // world
        projected = [
            torch.cat([by_heads(functional.linear(one[0], one[turn]), size) for one in by_rank], 2)
            for turn in (1, 2, 3)
        ]
        results = []
        for rank in range(world):
            own = list(range(rank * each, (rank + 1) * each))
            keys = list(keys_of(rank, world, heads, kv_heads))
            parts = zip(projected, (own, keys, keys), strict=True)
            results.append([tensor[:, indices] for tensor, indices in parts])
        return results

    def call(self, case: Case, operands: Tensors, constants: Tensors, **where: Any) -> Tensors:
        return super().call(case.on(facts={"size": case.sizes[4]}), operands, constants, **where)


class ProjectionOut(Projections):
    """The output of each rank's positions from the heads of all ranks."""

    name = "ulysses_output"
    operands = "out", "weight"

    def make(self, case: Case, rank: int, iteration: int) -> Tensors:
        world, (rows, batch, heads, _, size, features) = len(case.rows), case.sizes
        own = batch, heads // world, world * rows, size
        weight = integers(1, iteration, 5, shape=(features, heads * size))  # equal on all ranks
        return [integers(2, rank, iteration, 3, shape=own), weight]

    def together(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        rows = case.sizes[0]
        heads = torch.cat([one[0] for one in by_rank], 1).transpose(1, 2).flatten(2)
        return [
            [functional.linear(heads[:, rank * rows : (rank + 1) * rows], weight)]
            for rank, (_, weight) in enumerate(by_rank)
        ]


class Experts(Subject):
    """A layer of experts, split equally among ranks; sizes: experts of a rank, experts of a token,
    k, h, n, and 1 if the activation is gated."""

    name = "experts"
    operands = "tokens", "weights", "up", "down"

    def schedules(self, world: int, hosts: int = 1, tiled: bool = False) -> list[str]:
        more = "hetero-fused-1d:pieces=2", "uniform-unfused-1d:pieces=2,copy=2"
        rest = "shrinking:compute=2", "uniform-fused-1d:pieces=1+3+3+1,copy=3,compute=2"
        return ["auto", "serial", "shard-overlap", "growing", *more, *rest]

    def case(self, chance: random.Random, world: int, kind: str, engine: str) -> Case:
        rows = {
            "equal": (6,) * world,
            "uneven": tuple((5 * rank + 6) % 11 * (rank % 3 != 1) for rank in range(world)),
            "few": tuple(rank % 2 for rank in range(world)),
            "none": (0,) * world,
        }[kind]
        each, gated = chance.choice((1, 2, 3)), chance.choice((0, 1))
        sizes = each, min(2, each * world), 8, 6, 8, gated
        facts = {"capacity": chance.choice((2, 5, None)), "activation": "relu"}
        if facts["capacity"] == 5:
            facts |= {"on_overflow": "again"}
        return Case(rows, sizes, facts=facts, needs=(True,) * 4)

    def dtypes(self, engine: str) -> tuple[str, ...]:
        return ("float32",)

    def indices(self, case: Case, rank: int, iteration: int) -> torch.Tensor:
        """The experts of a rank's tokens."""
        each, top_k = case.sizes[:2]
        generator = torch.Generator().manual_seed(10 * iteration + rank)
        scores = torch.rand((case.rows[rank], each * len(case.rows)), generator=generator)
        return scores.argsort(1)[:, :top_k]

    def make(self, case: Case, rank: int, iteration: int) -> Tensors:
        each, top_k, k, h, n, gated = case.sizes
        tokens = case.rows[rank]
        return [
            integers(2, rank, iteration, 0, shape=(tokens, k)),
            (integers(1, rank, iteration, 1, shape=(tokens, top_k)) + 2) / 2,
            integers(1, rank, iteration, 2, shape=(each, k, h * (1 + gated))),
            integers(1, rank, iteration, 3, shape=(each, h, n)),
        ]

    def together(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        up, down = (torch.cat([one[turn] for one in by_rank]) for turn in (2, 3))
        whole = [[tokens, weights, up, down] for tokens, weights, _, _ in by_rank]
        return self.of_all(case, whole, iteration)

    def of_all(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        """The results of each rank from its tokens and all experts."""
        again = case.facts.get("on_overflow") == "again"
        results = []
        for rank, (tokens, weights, up, down) in enumerate(by_rank):
            data = Data(tokens, self.indices(case, rank, iteration), weights)
            results.append([plain(data, up, down, None if again else case.facts["capacity"])])
        return results

    def constants(self, case: Case, rank: int, iteration: int) -> Tensors:
        return [self.indices(case, rank, iteration)]

    def call(self, case: Case, operands: Tensors, constants: Tensors, **where: Any) -> Tensors:
        tokens, *rest = operands
        facts = {"schedule": case.schedule, **case.facts, **where}
        return [ficco.experts(tokens, *constants, *rest, **facts)]

    def traceable(self, case: Case) -> Case:
        facts = {name: fact for name, fact in case.facts.items() if name != "on_overflow"}
        return case.on(facts={**facts, "capacity": 5})


class ExpertsByColumns(Experts):
    """A layer of experts whose hidden columns are split among ranks."""

    def case(self, chance: random.Random, world: int, kind: str, engine: str) -> Case:
        case = super().case(chance, world, kind, engine)
        return case.on(facts={**case.facts, "split": "columns"})

    def make(self, case: Case, rank: int, iteration: int) -> Tensors:
        each, top_k, k, _, n, gated = case.sizes
        narrow = case.on(sizes=(each * len(case.rows), top_k, k, 3, n, gated))
        return super().make(narrow, rank, iteration)

    def together(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        halves = [one[2].chunk(1 + case.sizes[5], 2) for one in by_rank]  # gate and up
        up = torch.cat([part for half in zip(*halves, strict=True) for part in half], 2)
        down = torch.cat([one[3] for one in by_rank], 1)
        whole = [[tokens, weights, up, down] for tokens, weights, _, _ in by_rank]
        return self.of_all(case, whole, iteration)


SUBJECTS: dict[str, Subject] = {
    **{name: Product(name) for name in OPERATORS},
    **{f"{name}, float8": Float8(name) for name, kind in OPERATORS.items() if not kind.inner},
    "all_gather_matmul, gathered": GatheredToo("all_gather_matmul"),
    **{subject.name: subject for subject in (GatheredAttention(), AttentionByHeads())},
    **{subject.name: subject for subject in (ProjectionIn(), ProjectionOut(), Experts())},
    "experts, by columns": ExpertsByColumns(),
}


def exact(
    at: Rank, subject: Subject, case: Case, iteration: int, group: Any = None, saves: bool = False
) -> None:
    """Check the results of a call and the gradients of operands that need them."""
    operands, wanted, grads = reference(subject, case, at.world, iteration)
    dtype, result_dtype = (getattr(torch, name) for name in (case.dtype, subject.result(case)))
    about = f"rank {at.rank}, iteration {iteration}, {case}"
    needs = case.needs or (False,) * len(operands[at.rank])
    leaves = [
        one.detach().to(at.device, dtype, copy=True).requires_grad_(need)
        for one, need in zip(operands[at.rank], needs, strict=True)
    ]
    before = [leaf.detach().clone() for leaf in leaves]
    with ficco.options(save_gathered=saves):
        tensors = subject.laid_out(case, leaves), constants_of(at, subject, case, iteration)
        results = subject.call(case, *tensors, group=group)
    assert len(results) == len(wanted[at.rank])
    for turn, (result, want) in enumerate(zip(results, wanted[at.rank], strict=True)):
        assert (result.dtype, result.device.type) == (result_dtype, at.device.type), about
        compare(result, want.detach(), subject, f"{about}: result {turn}")
    if any(needs):
        roots = [one for one in results if one.requires_grad]
        own = [grad for one, grad in zip(results, grads[at.rank], strict=True) if one.requires_grad]
        torch.autograd.backward(roots, [grad.to(one) for one, grad in zip(roots, own, strict=True)])
    size = max((root_mean_square(grad) for grad in grads[at.rank]), default=0.0)
    for name, leaf, want in zip(subject.operands, leaves, operands[at.rank], strict=True):
        if not leaf.requires_grad:
            assert leaf.grad is None, f"{about}: {name} has a gradient"
            continue
        assert leaf.grad is not None and want.grad is not None, f"{about}: {name} has none"
        compare(leaf.grad, want.grad, subject, f"{about}: the gradient of {name}", size)
    for name, leaf, old in zip(subject.operands, leaves, before, strict=True):
        assert torch.equal(leaf.detach(), old), f"{about}: the call changed {name}"


def constants_of(at: Rank, subject: Subject, case: Case, iteration: int) -> Tensors:
    return [one.to(at.device) for one in subject.constants(case, at.rank, iteration)]
