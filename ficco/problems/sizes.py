"""Sizes that describe a call without its operands, and the problems of calls with given sizes.

The command line lists the sizes in its help before it imports a planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple

from ficco.errors import InvalidArgument
from ficco.problems.attention import AttentionProblem, HeadsProblem
from ficco.problems.experts import ExpertLayer
from ficco.problems.mask import PLACEMENTS
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.scaling import operands_of
from ficco.problems.specification import ACTIVATIONS, MOST, MOST_RANKS, AnyProblem, check_name
from ficco.problems.specification import gated as named_gated

#: Whether the host runs ahead of the GPU, or the GPU waits for its host.
MODES = ("queued", "idle")


class Size(NamedTuple):
    """A number, a switch or a name that describes a problem.

    Attributes:
        text: description, for help texts.
        default: value if it is not set; ``REQUIRED`` if it must be set.
        kind: its type.
        names: the allowed names, if it is a name.
    """

    text: str
    default: Any = None
    kind: type = int
    names: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raise on a value that is not allowed."""
        if self.names:
            check_name(name, value, self.names)
        elif self.kind is bool:
            if not isinstance(value, bool):
                raise InvalidArgument(name, f"required True or False, got {value!r}")
        elif value is not None and not 0 <= value <= MOST:
            raise InvalidArgument(name, f"required 0 to {MOST}, got {value!r}")


REQUIRED = object()

#: The sizes of operators that have a left operand, in the order of their arguments.
OF_PRODUCTS = {
    "m": Size("rows that a rank multiplies", REQUIRED),
    "n": Size("columns of one rank's B", REQUIRED),
    "k": Size("columns of A", REQUIRED),
}
OF_HEADS = {
    "sequence": Size("positions of the whole sequence", REQUIRED),
    "heads": Size("heads of queries", REQUIRED),
    "head_size": Size("size of a head", REQUIRED),
    "kv_heads": Size("heads of keys and values (default: as many as heads)"),
    "batch": Size("sequences (default: 1)", 1),
    "causal": Size("a query attends to no later position", False, bool),
    "window": Size("a query attends to at most this many positions before its own"),
}
OF_ATTENTION = OF_HEADS | {
    "placement": Size(
        "positions of each rank; not for ulysses_attention", PLACEMENTS[0], str, PLACEMENTS
    )
}
OF_EXPERTS = {
    "experts": Size("experts of all ranks", REQUIRED),
    "capacity": Size("rows of each rank for each expert", REQUIRED),
    "k": Size("columns of tokens", REQUIRED),
    "h": Size("columns of the second product's left operand", REQUIRED),
    "n": Size("columns of the result", REQUIRED),
    "activation": Size("the function between the products", "silu", str, ACTIVATIONS),
    "gated": Size("multiply it by the other half of 2h columns", True, bool),
    "split": Size("how ranks share the experts", "experts", str, ("experts", "columns")),
}


def problem_of_sizes(
    operator: str,
    m: int,
    n: int,
    k: int,
    dtype: str,
    world: int,
    rows: Sequence[int] | Sequence[Sequence[int]] | None = None,
    hosts: int = 1,
) -> Problem:
    """The Problem of a product with given sizes.

    Args:
        operator: name of the public operator.
        m: rows that a rank multiplies; if ranks differ, the most rows of a rank.
        n, k: see :class:`Problem`.
        dtype: a dtype, or a name of :data:`ficco.problems.scaling.SCALED`.
        world: number of ranks.
        rows: rows of each rank, or the table of an all-to-all; None: rows are spread as equally as
            possible.
        hosts: number of hosts.

    Raises:
        ValueError: an argument is wrong, or two arguments contradict each other.
    """
    check_name("operator", operator, OPERATORS)
    if m < 0:
        raise InvalidArgument("m", f"required at least 0, got {m}")
    if world > MOST_RANKS:
        raise InvalidArgument("world", f"required at most {MOST_RANKS} ranks, got {world}")
    kind, ranks = OPERATORS[operator], range(world)
    dtype, scaling = operands_of(dtype)
    options: Any = {"scaling": scaling, "hosts": hosts}
    if rows is None:
        equal = tuple(m // world + (rank < m % world) for rank in ranks)
        if not kind.blocks:
            return Problem(operator, equal, n, k, dtype, **options)
        table = [equal] * world
        if not kind.scatters:
            table = list(zip(*table, strict=True))
        return Problem.of_blocks(operator, table, n, k, dtype, **options)
    if kind.returns:
        raise InvalidArgument(
            "rows", f"required none for {operator}, whose result is the same everywhere"
        )
    each = rows if isinstance(rows, Iterable) else ()
    counts: list[Any] = [list(count) if isinstance(count, Sequence) else count for count in each]
    width = world if kind.blocks else None
    widths = [len(count) if isinstance(count, list) else None for count in counts]
    fits = widths == [width] * world
    numbers = chain.from_iterable(counts) if fits and kind.blocks else counts
    if not fits or not all(isinstance(number, Integral) for number in numbers):
        shape = f"a table of {world} x {world}" if kind.blocks else world
        raise InvalidArgument(
            "rows",
            f"required {shape} whole numbers, got {rows!r}; pass the number of rows of each rank",
        )
    build: Any = Problem.of_blocks if kind.blocks else Problem
    sizes = counts if kind.blocks else tuple(counts), n, k, dtype
    problem: Problem = build(operator, *sizes, **options)
    if problem.m != m:
        total = "the largest sum" if kind.blocks else "the sum"
        raise InvalidArgument("rows", f"required {total} {m}, which is m, got {problem.m}")
    return problem


def _attention(
    operator: str, world: int, dtype: str, sequence: int, heads: int, head_size: int, **options: Any
) -> AttentionProblem | HeadsProblem:
    if sequence % world:
        raise InvalidArgument("sequence", f"required a multiple of {world} ranks, got {sequence}")
    for name, count in (("heads", heads), ("head_size", head_size)):
        if count < 1:
            raise InvalidArgument(name, f"required at least 1, got {count}")
    kv_heads = heads if options["kv_heads"] is None else options["kv_heads"]
    if kv_heads < 1 or heads % kv_heads:
        raise InvalidArgument("kv_heads", f"required a divisor of {heads} heads, got {kv_heads}")
    del options["kv_heads"]
    shape = options.pop("batch"), heads, kv_heads, head_size
    problem = AttentionProblem(world, sequence // world, *shape, dtype, **options)
    return problem if operator == problem.operator else HeadsProblem(problem)


def _experts(
    operator: str,
    world: int,
    dtype: str,
    experts: int,
    capacity: int,
    k: int,
    h: int,
    n: int,
    activation: str,
    gated: bool,
    split: str,
    **options: Any,
) -> ExpertLayer:
    gathers = split == "columns"
    if not gathers and experts % world:
        raise InvalidArgument("experts", f"required a multiple of {world} ranks, got {experts}")
    sizes = experts if gathers else experts // world, capacity, k, h, n
    function = named_gated(activation) if gated else activation
    return ExpertLayer(operator, world, *sizes, dtype, function, gathers=gathers, **options)


class Askable(NamedTuple):
    """Operators whose calls are described by sizes.

    Attributes:
        whose: common name of the operators.
        sizes: the sizes, by name.
        make: returns the problem; takes operator, world, dtype and all sizes as keywords.
        spread: options that spread rows over ranks, and ranks over hosts.
    """

    whose: str
    sizes: Mapping[str, Size]
    make: Callable[..., AnyProblem]
    spread: tuple[str, ...] = ("hosts",)

    @property
    def required(self) -> list[str]:
        """Names of the sizes without a default."""
        return [name for name, size in self.sizes.items() if size.default is REQUIRED]


_PRODUCTS = Askable("products", OF_PRODUCTS, problem_of_sizes, ("rows", "hosts"))

#: The operators whose calls can be described without operands.
ASKABLE: dict[str, Askable] = {
    **dict.fromkeys(OPERATORS, _PRODUCTS),
    "all_gather_attention": Askable("attention", OF_ATTENTION, _attention),
    "ulysses_attention": Askable("attention", OF_HEADS, _attention),
    "experts": Askable("experts", OF_EXPERTS, _experts),
}


def problem_of(
    operator: str, world: int, dtype: str, sizes: Mapping[str, Any], **spread: Any
) -> AnyProblem:
    """The problem of a call with given sizes.

    Args:
        sizes: by name, see :data:`ASKABLE`; sizes with a default may be missing.
        spread: ``hosts``, and for products ``rows``.

    Raises:
        ValueError: a size is wrong, missing or unknown.
        NotImplementedError: the dtype is not served.
    """
    check_name("operator", operator, ASKABLE)
    askable = ASKABLE[operator]
    spread = {name: value for name, value in spread.items() if value not in (None, 1)}
    for name in (*sizes, *spread):
        if name not in (askable.sizes if name in sizes else askable.spread):
            known = ", ".join(askable.sizes)
            raise InvalidArgument(name, f"required none for {operator}, which has {known}")
    if missing := [name for name in askable.required if name not in sizes]:
        needed = ", ".join(askable.required)
        raise InvalidArgument(missing[0], f"required, since {operator} needs {needed}; got none")
    if world < 1:
        raise InvalidArgument("world", f"required at least 1 rank, got {world}")
    values = {name: size.default for name, size in askable.sizes.items()} | dict(sizes)
    for name, value in values.items():
        askable.sizes[name].check(name, value)
    return askable.make(operator=operator, world=world, dtype=dtype, **values, **spread)
