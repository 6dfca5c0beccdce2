"""The sizes by which calls are described without their operands, and the problems of such calls.

The command line lists the sizes in its help before anything that plans is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ficco.errors import InvalidArgument
from ficco.problems.attention import AttentionProblem
from ficco.problems.experts import ExpertLayer
from ficco.problems.heads import HeadsProblem
from ficco.problems.mask import PLACEMENTS
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.scaling import operands_of
from ficco.problems.specification import ACTIVATIONS, MOST, MOST_RANKS, AnyProblem, check_name
from ficco.problems.specification import gated as named_gated

#: Whether the host runs ahead of the GPU, or the GPU waits for its host.
MODES = ("queued", "idle")


class Size(NamedTuple):
    """A number, a switch or a name that a problem is asked by.

    Attributes:
        text: what it is.
        default: without it; ``REQUIRED`` if there is none.
        kind: its type.
        names: those that it can be, if it is a name.
    """

    text: str
    default: Any = None
    kind: type = int
    names: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that is none of these."""
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
    "kv_heads": Size("heads of keys and values (default: as many)"),
    "batch": Size("sequences (default: 1)", 1),
    "causal": Size("a query attends to no later position", False, bool),
    "window": Size("and to so many positions before its own"),
}
OF_ATTENTION = OF_HEADS | {
    "placement": Size(
        "which positions a rank has, not of ulysses_attention", PLACEMENTS[0], str, PLACEMENTS
    )
}
OF_EXPERTS = {
    "experts": Size("experts of all ranks", REQUIRED),
    "capacity": Size("rows of each rank for each expert", REQUIRED),
    "k": Size("columns of tokens", REQUIRED),
    "h": Size("columns of what the second product multiplies", REQUIRED),
    "n": Size("columns of the result", REQUIRED),
    "activation": Size("the function between the products", "silu", str, ACTIVATIONS),
    "gated": Size("it is multiplied by the other half of 2h columns", True, bool),
    "split": Size("what of the experts a rank has", "experts", str, ("experts", "columns")),
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
    """The Problem of a call on so many ranks.

    Args:
        operator: name of the public operator.
        m: rows that a rank multiplies; where they differ, those of the rank with most.
        n, k: as :class:`Problem` has them.
        dtype: likewise, or a name of :data:`ficco.problems.scaling.SCALED`.
        world: number of ranks.
        rows: as the operators take it: rows of each rank, or the table of an all-to-all; None for
            as equal ones as there are.
        hosts: how many hosts the ranks are on.

    Raises:
        ValueError: an argument is wrong, or they do not fit together.
    """
    check_name("operator", operator, OPERATORS)
    if m < 0:
        raise InvalidArgument("m", f"required at least 0, got {m}")
    if world > MOST_RANKS:
        raise InvalidArgument("world", f"required at most {MOST_RANKS} ranks, got {world}")
    kind, ranks = OPERATORS[operator], range(world)
    dtype, scaling = operands_of(dtype)
    more: Any = {"scaling": scaling, "hosts": hosts}
    if rows is None:
        equal = tuple(m // world + (rank < m % world) for rank in ranks)
        if not kind.blocks:
            return Problem(operator, equal, n, k, dtype, **more)
        table = [equal] * world  # as many rows for each peer
        if not kind.scatters:
            table = list(zip(*table, strict=True))
        return Problem.of_blocks(operator, table, n, k, dtype, **more)
    if kind.returns:
        raise InvalidArgument(
            "rows", f"required none for {operator}, whose result is the same everywhere"
        )
    given = [list(one) if isinstance(one, Sequence) else one for one in rows]
    width = world if kind.blocks else None
    widths = [len(one) if isinstance(one, list) else None for one in given]
    if widths != [width] * world:
        numbers = f"a table of {world} x {world}" if kind.blocks else world
        raise InvalidArgument("rows", f"required {numbers} numbers, got {rows}")
    make: Any = Problem.of_blocks if kind.blocks else Problem
    sizes = given if kind.blocks else tuple(given), n, k, dtype
    problem: Problem = make(operator, *sizes, **more)
    if problem.m != m:
        most = "the largest sum" if kind.blocks else "the sum"
        raise InvalidArgument("rows", f"required {most} {m}, which is m, got {problem.m}")
    return problem


def _attention(
    operator: str, world: int, dtype: str, sequence: int, heads: int, head_size: int, **more: Any
) -> AttentionProblem | HeadsProblem:
    if sequence % world:
        raise InvalidArgument("sequence", f"required a multiple of {world} ranks, got {sequence}")
    kv_heads = heads if more["kv_heads"] is None else more["kv_heads"]
    if kv_heads < 1 or heads % kv_heads:
        raise InvalidArgument("kv_heads", f"required a divisor of {heads} heads, got {kv_heads}")
    del more["kv_heads"]
    shape = more.pop("batch"), heads, kv_heads, head_size
    problem = AttentionProblem(world, sequence // world, *shape, dtype, **more)
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
    **more: Any,
) -> ExpertLayer:
    gathers = split == "columns"
    if not gathers and experts % world:
        raise InvalidArgument("experts", f"required a multiple of {world} ranks, got {experts}")
    sizes = experts if gathers else experts // world, capacity, k, h, n
    function = named_gated(activation) if gated else activation
    return ExpertLayer(operator, world, *sizes, dtype, function, gathers=gathers, **more)


class Askable(NamedTuple):
    """An operator that sizes describe.

    Attributes:
        whose: name of all operators with these sizes.
        sizes: by name.
        make: the problem of an operator, ranks, a dtype and all sizes, by keyword.
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


_OF_PRODUCTS = Askable("products", OF_PRODUCTS, problem_of_sizes, ("rows", "hosts"))

#: The operators of which a call can be described without its operands.
ASKABLE: dict[str, Askable] = {
    **dict.fromkeys(OPERATORS, _OF_PRODUCTS),
    "all_gather_attention": Askable("attention", OF_ATTENTION, _attention),
    "ulysses_attention": Askable("attention", OF_HEADS, _attention),
    "experts": Askable("experts", OF_EXPERTS, _experts),
}


def problem_of(
    operator: str, world: int, dtype: str, sizes: Mapping[str, Any], **spread: Any
) -> AnyProblem:
    """The problem of a call on so many ranks.

    Args:
        sizes: by name, as :data:`ASKABLE` has them; those with a default may be missing.
        spread: ``hosts``, and for products ``rows``.

    Raises:
        ValueError: a size is wrong, missing or unknown.
        NotImplementedError: the dtype is not served.
    """
    check_name("operator", operator, ASKABLE)
    asked = ASKABLE[operator]
    spread = {name: value for name, value in spread.items() if value not in (None, 1)}
    for name in (*sizes, *spread):
        if name not in (asked.sizes if name in sizes else asked.spread):
            known = ", ".join(asked.sizes)
            raise InvalidArgument(name, f"required none for {operator}, which has {known}")
    if missing := [name for name in asked.required if name not in sizes]:
        needed = ", ".join(asked.required)
        raise InvalidArgument(missing[0], f"required, since {operator} needs {needed}; got none")
    if world < 1:
        raise InvalidArgument("world", f"required at least 1, got {world}")
    values = {name: size.default for name, size in asked.sizes.items()} | dict(sizes)
    for name, value in values.items():
        asked.sizes[name].check(name, value)
    return asked.make(operator=operator, world=world, dtype=dtype, **values, **spread)
