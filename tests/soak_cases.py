"""Cases of the soak, one class for each family of operators: what is drawn, and what is right.

A family draws a :class:`SoakCase`, makes a :class:`Variant` of it for a rank, and calls it. The
right results and gradients come from the operands of all ranks, in one process. Operands are small
integers that depend on the rank and the iteration, so that there is one right value in every dtype.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import experts
import test_arriving
import test_attention
import test_experts
import test_fp8
import test_gradients
import test_operators
import test_projections
import test_ulysses
import torch
from ranks import Rank
from torch.nn import functional

import ficco
from ficco.problems.sizes import problem_of
from ficco.tools.bench.attention import SCALE, exact_operands

Random = random.Random
#: Tensors of a rank by name.
Named = dict[str, torch.Tensor]

#: A cap on symmetric memory that no case needs.
CAP = 1 << 22


@dataclass(frozen=True)
class SoakCase:
    """One kind of call.

    Attributes:
        of: its description, as the tests of its family have it.
        family: key of :data:`FAMILIES`.
        needs: the operands whose gradients are asked for.
        group: number of the group.
        symmetric: the left operand lies in symmetric memory.
        capped: symmetric memory is capped, so that calls take one slot.
        keeps: the gathered operand is kept for the gradients, and returned where that can be.
        host_waits: the host waits for counts of other ranks, which no graph can hold.
    """

    operator: str
    of: Any
    schedule: str
    dtype: str
    needs: tuple[str, ...] = ()
    family: str = ""
    group: int = 0
    symmetric: bool = False
    capped: bool = False
    keeps: bool = False
    host_waits: bool = False


@dataclass
class Variant:
    """Operands of a call on a rank, gradients of its results, and what it must give: the results,
    then the gradients of the operands that need them."""

    operands: Named
    grads: list[torch.Tensor]
    wanted: list[torch.Tensor]


def by_reference(
    case: SoakCase,
    rank: int,
    everyone: Sequence[Named],
    together: Callable[[Any, Sequence[Named]], Sequence[Sequence[torch.Tensor]]],
) -> Variant:
    """A rank's variant; gradients are those of the sum over ranks of <result, its gradient>."""
    for operands in everyone:
        for name in case.needs:
            operands[name].requires_grad_()
    results = together(case.of, everyone)
    chance = torch.Generator().manual_seed(17)
    grads = [
        [torch.randint(-1, 2, y.shape, generator=chance).to(y) for y in of_rank]
        for of_rank in results
    ]
    mine = everyone[rank]
    kinds = {name: dtype_of(case, name, x) for name, x in mine.items()}
    typed = {name: x.detach().to(kinds[name]) for name, x in mine.items()}
    wanted = [y.detach().to(getattr(torch, case.dtype)) for y in results[rank]]
    if not case.needs:
        return Variant(typed, [], wanted)
    pairs = zip(results, grads, strict=True)
    terms = [(y * g).sum() for some in pairs for y, g in zip(*some, strict=True)]
    torch.stack(terms).sum().backward()
    for name in case.needs:
        grad = mine[name].grad
        wanted.append(torch.zeros_like(typed[name]) if grad is None else grad.to(kinds[name]))
    return Variant(typed, [g.to(wanted[0].dtype) for g in grads[rank]], wanted)


def dtype_of(case: SoakCase, name: str, operand: torch.Tensor) -> torch.dtype:
    """Weights of experts are float32, indices what they are."""
    kept = name == "weights" or not operand.is_floating_point()
    kind: torch.dtype = operand.dtype if kept else getattr(torch, case.dtype)
    return kind


def dtypes(device: str) -> tuple[str, ...]:
    return test_operators.DTYPES if device == "cpu" else test_operators.DTYPES[:3]


class Products:
    """The seven operators of products."""

    @staticmethod
    def draw(chance: Random, world: int, device: str) -> SoakCase:
        operator = chance.choice(test_gradients.OPERATORS)
        needs = chance.choice(("", "", "", "ab", "a", "b"))
        rows = test_operators.rows_for(
            operator, world, chance.choice(("equal", "ragged", "few", "sparse"))
        )
        found = ["auto", *test_operators.schedules_of(operator, device == "cpu")]
        schedule, dtype = chance.choice(found), chance.choice(dtypes(device))
        sizes = chance.choice((1, 8, 24, 64)), chance.choice((1, 8, 40, 64))
        more: dict[str, Any] = {"transposed": chance.random() < 0.5, "needs": needs}
        of = test_gradients.Case(operator, rows, *sizes, dtype, schedule, **more)
        travels = operator.startswith("all_") and not needs
        return SoakCase(
            *(operator, of, schedule, dtype, tuple(needs)),
            symmetric=travels and chance.random() < 0.3,
            capped=chance.random() < 0.3 and not needs,
            keeps=chance.random() < 0.3,
        )

    @staticmethod
    def variant(case: SoakCase, rank: int, world: int, iteration: int, device: Any) -> Variant:
        of, integers = case.of, test_gradients.integers

        def operands(rank: int) -> Named:
            a = integers(2, rank, iteration, 0, shape=(of.rows_in(rank), of.k))
            b = integers(1, rank, iteration, 1, shape=(of.rows_of_b(rank), of.n))
            return {"a": a, "b": b}

        def together(of: Any, everyone: Sequence[Named]) -> list[list[torch.Tensor]]:
            a, b = ([one[name] for one in everyone] for name in "ab")
            gathered = [torch.cat(a)] if Products.returns_gathered(case) else []
            return [[y, *gathered] for y in test_gradients.together(of, a, b)]

        made = by_reference(case, rank, [operands(one) for one in range(world)], together)
        if of.transposed:
            made.operands["b"] = made.operands["b"].t().contiguous().t()
        return made

    @staticmethod
    def call(case: SoakCase, operands: Named, group: Any) -> list[torch.Tensor]:
        a, b = operands.values()
        if Products.returns_gathered(case):
            how = {"return_gathered": True, "group": group, **case.of.arguments()}
            return list(ficco.all_gather_matmul(a, b, **how))
        return [test_gradients.product(case.of, a, b, group)]

    @staticmethod
    def returns_gathered(case: SoakCase) -> bool:
        return case.keeps and case.operator == "all_gather_matmul"


class Float8:
    """Products of float8 operands with scales."""

    @staticmethod
    def draw(chance: Random, world: int, device: str) -> SoakCase:
        operator = chance.choice(test_fp8.OPERATORS)
        found = [one for one in test_fp8.schedules(operator) if not one.startswith("tiled")]
        schedule = chance.choice(found)
        of = test_fp8.drawn(chance, operator, world, device, schedule)
        if of.recipe != "block":
            of = of.on(k=min(of.k, 48), n=min(of.n, 48))
        return SoakCase(operator, of, schedule, "float8")

    @staticmethod
    def variant(case: SoakCase, rank: int, world: int, iteration: int, device: Any) -> Variant:
        of, wanted = test_fp8.made(case.of, Rank(rank, world, device), iteration)
        tensors = {name: x for name, x in of.scales.items() if isinstance(x, torch.Tensor)}
        return Variant({"a": of.a, "b": of.b, **tensors}, [], [wanted])

    @staticmethod
    def call(case: SoakCase, operands: Named, group: Any) -> list[torch.Tensor]:
        scales = {name: x for name, x in operands.items() if name not in "ab"}
        out = {"out_dtype": case.of.out} if case.of.out else {}
        given = test_fp8.Operands(operands["a"], operands["b"], {**scales, **out}, *(None, None))  # type: ignore[arg-type]
        return [test_fp8.call(case.of, given, group)]


class Attention:
    """Keys that are gathered, and heads that are exchanged: every query finds one key."""

    SCHEDULES = {
        "all_gather_attention": test_attention.SCHEDULES,
        "ulysses_attention": test_ulysses.SCHEDULES,
    }

    @classmethod
    def draw(cls, chance: Random, world: int, device: str) -> SoakCase:
        operator, on_cpu = chance.choice([*cls.SCHEDULES]), device == "cpu"
        schedule = chance.choice(("auto", *cls.SCHEDULES[operator]))
        dtype = chance.choice(test_operators.DTYPES[0 if on_cpu else 1 : 3])
        causal, kv_heads = chance.random() < 0.5, world * chance.choice((1, 2))
        sizes: dict[str, Any] = {
            "sequence": world * chance.choice((4, 6, 16) if on_cpu else (64, 256)),
            "heads": kv_heads * chance.choice((1, 2)),
            "kv_heads": kv_heads,
            "head_size": 16 if on_cpu else 64,
            "causal": causal,
            "batch": chance.choice((1, 2)),
            "placement": "ranks",
        }
        if operator == "all_gather_attention" and causal:
            sizes["placement"] = chance.choice(("ranks", "head-tail"))
        of = problem_of("all_gather_attention", world, "float32", sizes)
        needs = dtype == "float32" and chance.random() < 0.3
        return SoakCase(operator, of, schedule, dtype, ("q", "k", "v") * needs)

    @staticmethod
    def variant(case: SoakCase, rank: int, world: int, iteration: int, device: Any) -> Variant:
        sign = test_gradients.integers(1, iteration, shape=(case.of.size,)).sign() * 2
        sign = (sign + 1).sign()  # -1 or 1 for each bit of a position

        def operands(rank: int) -> Named:
            made = exact_operands(case.of, rank, iteration, torch.device("cpu"))
            return {"q": made.q * sign, "k": made.k * sign, "v": made.v.double()}

        def together(of: Any, everyone: Sequence[Named]) -> list[list[torch.Tensor]]:
            shared = of.heads // of.kv_heads
            k, v = (torch.cat([one[name] for one in everyone], 2) for name in "kv")
            k, v = (one.repeat_interleave(shared, 1) for one in (k, v))
            scores = [SCALE * one["q"] @ k.transpose(2, 3) for one in everyone]
            return [[score.softmax(3) @ v] for score in scores]

        return by_reference(case, rank, [operands(one) for one in range(world)], together)

    @staticmethod
    def call(case: SoakCase, operands: Named, group: Any) -> list[torch.Tensor]:
        how: dict[str, Any] = {"causal": case.of.causal, "scale": SCALE, "group": group}
        if case.operator == "all_gather_attention":
            how["placement"] = case.of.placement
        function = getattr(ficco, case.operator)
        return [function(*operands.values(), schedule=case.schedule, **how)]


class Projections:
    """Projections in front of attention by heads and after it."""

    @staticmethod
    def draw(chance: Random, world: int, device: str) -> SoakCase:
        operator = chance.choice(("ulysses_project", "ulysses_output"))
        schedule = chance.choice(("auto", *test_projections.SCHEDULES))
        heads, on_cpu = world * chance.choice((1, 2)), device == "cpu"
        sizes = (4, 12) if on_cpu else (8, 32)
        shape = chance.choice((3, 6)), 2 * heads, heads, *sizes, chance.choice((1, 2))
        of = test_projections.ProjectionCase(*shape)
        dtype = chance.choice(("float32", "float64") if on_cpu else ("float32",))
        names = ("x", "q", "k", "v") if operator == "ulysses_project" else ("out", "weight")
        return SoakCase(operator, of, schedule, dtype, names if chance.random() < 0.3 else ())

    @staticmethod
    def variant(case: SoakCase, rank: int, world: int, iteration: int, device: Any) -> Variant:
        of, project = case.of, case.operator == "ulysses_project"
        features, wide = of.features, of.heads * of.size
        names = {
            "x": (of.batch, of.rows, features),
            **{name: (n * of.size, features) for name, n in
               zip("qkv", (of.heads, of.kv_heads, of.kv_heads), strict=True)},
        }  # fmt: skip
        if not project:
            names = {"out": (of.batch, of.heads // world, world * of.rows, of.size)}
            names |= {"weight": (features, wide)}

        def operands(rank: int) -> Named:
            return {
                name: test_gradients.integers(1, rank, iteration, i, shape=shape)
                for i, (name, shape) in enumerate(names.items())
            }

        def together(of: Any, everyone: Sequence[Named]) -> list[list[torch.Tensor]]:
            ranks = range(world)
            if not project:
                flat = torch.cat([one["out"] for one in everyone], 1).transpose(1, 2).flatten(2)
                parts = flat.split(of.rows, 1)
                pairs = zip(parts, everyone, strict=True)
                return [[functional.linear(part, one["weight"])] for part, one in pairs]
            made = {
                name: torch.cat([functional.linear(one["x"], one[name]) for one in everyone], 1)
                for name in "qkv"
            }
            by_heads = {name: y.unflatten(2, (-1, of.size)).transpose(1, 2) for name, y in
                        made.items()}  # fmt: skip
            _, *heads = zip(*(of.share(rank, world) for rank in ranks), strict=True)
            chosen = {"q": heads[0], "k": heads[1], "v": heads[1]}
            return [[by_heads[name][:, chosen[name][rank]] for name in "qkv"] for rank in ranks]

        return by_reference(case, rank, [operands(one) for one in range(world)], together)

    @staticmethod
    def call(case: SoakCase, operands: Named, group: Any) -> list[torch.Tensor]:
        how: dict[str, Any] = {"schedule": case.schedule, "group": group}
        if case.operator == "ulysses_project":
            return list(ficco.ulysses_project(*operands.values(), size=case.of.size, **how))
        return [ficco.ulysses_output(*operands.values(), **how)]


class Experts:
    """Layers of experts: exactly the rows that there are, blocks that drop, and second rounds."""

    @staticmethod
    def draw(chance: Random, world: int, device: str) -> SoakCase:
        tokens = tuple(chance.choice((0, 3, 5, 9, 19)) for _ in range(world))
        count, narrow = world * chance.choice((1, 2)), chance.random() < 0.4
        sizes = (4, 3, 8) if narrow else (8, 6, 8)
        routes, split = chance.choice(("spread", "one", "few")), "experts"
        top_k = min(count, chance.choice((1, 2)))
        gated = count >= 2 and chance.random() < 0.5
        if not gated and chance.random() < 0.3:
            split, sizes = "columns", (sizes[0], 12, 8)
        of = experts.Layer(tokens, count, top_k, *sizes, gated, "spread" if count < 2 else routes)
        ways: dict[str, Any] = {"capacity": chance.choice((None, 2, 5)), "split": split}
        if ways["capacity"] and chance.random() < 0.3:
            ways["on_overflow"] = "again"
        dtype = "bfloat16" if narrow and split == "experts" else "float32"
        needs: tuple[str, ...] = ("tokens", "weights", "up", "down")
        asks = dtype == "float32" and chance.random() < 0.3
        schedule = chance.choice(test_experts.SCHEDULES)
        waits = not ways["capacity"] or "on_overflow" in ways
        of_both, needs = (of, ways), needs if asks else ()
        return SoakCase("experts", of_both, schedule, dtype, needs, host_waits=waits)

    @staticmethod
    def variant(case: SoakCase, rank: int, world: int, iteration: int, device: Any) -> Variant:
        layer, ways = case.of
        columns = ways["split"] == "columns"

        def operands(rank: int) -> Named:
            mine, whole = experts.data(layer, rank, iteration), experts.weights_of(layer, iteration)
            at = Rank(rank, world, torch.device("cpu"))
            up, down = test_experts.own(whole, at, ways["split"])
            return {"tokens": mine.tokens, "indices": mine.indices, "weights": mine.weights,
                    "up": up, "down": down}  # fmt: skip

        def together(of: Any, everyone: Sequence[Named]) -> list[list[torch.Tensor]]:
            up = torch.cat([one["up"] for one in everyone], 2 if columns else 0)
            down = torch.cat([one["down"] for one in everyone], 1 if columns else 0)
            given = [experts.Data(*list(one.values())[:3]) for one in everyone]
            capacity = None if "on_overflow" in ways else ways["capacity"]
            return [[experts.plain(one, up, down, capacity)] for one in given]

        return by_reference(case, rank, [operands(one) for one in range(world)], together)

    @staticmethod
    def call(case: SoakCase, operands: Named, group: Any) -> list[torch.Tensor]:
        how = {"activation": "relu", "schedule": case.schedule, "group": group, **case.of[1]}
        return [ficco.experts(*operands.values(), **how)]


class Blocks:
    """Rows that arrive for the caller, who copies them piece by piece."""

    @staticmethod
    def draw(chance: Random, world: int, device: str) -> SoakCase:
        ways = chance.choice(test_arriving.WAYS)
        rows = test_operators.rows_for("arriving", world, chance.choice(("equal", "ragged", "few")))
        of = {"rows": rows, "k": chance.choice((1, 8, 24))}, ways
        return SoakCase("arriving", of, "tiled", chance.choice(dtypes(device)))

    @staticmethod
    def variant(case: SoakCase, rank: int, world: int, iteration: int, device: Any) -> Variant:
        of, _ = case.of
        everyone = [
            {"a": test_gradients.integers(9, other, iteration, shape=(rows, of["k"]))}
            for other, rows in enumerate(of["rows"])
        ]

        def together(of: Any, everyone: Sequence[Named]) -> list[list[torch.Tensor]]:
            return [[torch.cat([one["a"] for one in everyone])]] * world

        return by_reference(case, rank, everyone, together)

    @staticmethod
    def call(case: SoakCase, operands: Named, group: Any) -> list[torch.Tensor]:
        of, ways = case.of
        with ficco.arriving(operands["a"], rows=of["rows"], group=group, **ways) as arriving:
            copied = torch.zeros_like(arriving.buffer)
            for first, last in arriving:
                copied[first:last] = arriving.buffer[first:last]
        return [copied]


FAMILIES: dict[str, Any] = {
    "products": Products,
    "float8": Float8,
    "attention": Attention,
    "projections": Projections,
    "experts": Experts,
    "blocks": Blocks,
}
#: How often a family is drawn.
SHARES = (8, 1, 2, 2, 2, 1)


def draw(chance: Random, group: int, world: int, device: str) -> SoakCase:
    """Any case of a group of so many ranks."""
    (family,) = chance.choices([*FAMILIES], SHARES)
    case: SoakCase = FAMILIES[family].draw(chance, world, device)
    return replace(case, family=family, group=group)


def variant(case: SoakCase, at: Rank, iteration: int) -> Variant:
    """A variant on the device of a rank of the case's group."""
    made = FAMILIES[case.family].variant(case, at.rank, at.world, iteration, at.device)
    operands = {name: x.to(at.device) for name, x in made.operands.items()}
    return Variant(
        operands, *([x.to(at.device) for x in some] for some in (made.grads, made.wanted))
    )


def call(case: SoakCase, variant: Variant, operands: Named, group: Any) -> list[torch.Tensor]:
    """One call and, where gradients are asked for, its backward, on operands like the variant's."""
    for name in case.needs:
        operands[name].requires_grad_()
    with ficco.options(workspace_bytes=CAP if case.capped else None, save_gathered=case.keeps):
        results: list[torch.Tensor] = FAMILIES[case.family].call(case, operands, group)
        if not case.needs:
            return results
        torch.autograd.backward(results, variant.grads)
    grads = [operands[name].grad for name in case.needs]
    return [*(y.detach() for y in results), *(grad for grad in grads if grad is not None)]
