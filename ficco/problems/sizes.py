"""The sizes, switches and names by which calls are described without their operands.

Plain data, which the command line lists in its help before anything that plans is imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ficco.errors import InvalidArgument
from ficco.problems.products import MOST, OPERATORS

#: Which positions a rank holds. ``"ranks"``: the sequence in the order of the ranks.
#: ``"head-tail"``: of 2 W chunks, rank r the chunks r and 2 W - 1 - r, so that under a causal mask
#: all ranks attend to equally many keys.
PLACEMENTS = ("ranks", "head-tail")

#: The functions between the products of experts.
ACTIVATIONS = ("relu", "silu", "gelu")

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
            if value not in self.names:
                raise InvalidArgument(
                    name, f"required one of {', '.join(self.names)}, got {value!r}"
                )
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

#: Of the operators of which a call can be described: what all with such sizes are called, and the
#: sizes by name.
SIZES: dict[str, tuple[str, dict[str, Size]]] = {
    **dict.fromkeys(OPERATORS, ("products", OF_PRODUCTS)),
    "all_gather_attention": ("attention", OF_ATTENTION),
    "ulysses_attention": ("attention", OF_HEADS),
    "experts": ("experts", OF_EXPERTS),
}
