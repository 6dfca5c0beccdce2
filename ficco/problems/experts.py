"""What a layer of experts asks, equal on every rank of the group."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ficco.errors import InvalidArgument
from ficco.problems.specification import (
    FUNCTIONS,
    AnyProblem,
    Buffer,
    Contraction,
    Exchange,
    Specification,
    check_name,
)

if TYPE_CHECKING:
    import numpy as np

#: By operator, whether tokens are dispatched to a first product, and whether those of a last one
#: are brought back.
EXPERT_OPERATORS = {
    "experts": (True, True),
    "dispatch_matmul": (True, False),
    "matmul_combine": (False, True),
}


@dataclass(frozen=True)
class ExpertLayer(AnyProblem):
    """The experts of all ranks, applied to tokens in blocks of a fixed capacity::

        hidden[e] = a[e] @ b[e];  out[e] = function(hidden[e]) @ c[e]    for each expert e

    ==========  ==================================================================
    ``a``       [world * experts * capacity, k]: this rank's tokens, expert by expert; if all ranks
                get the same, [experts * capacity, k]
    ``b``       [experts, k, h], or [experts, k, 2h] if the function is gated: those of this rank's
                experts
    ``hidden``  [experts * world * capacity, h or 2h]: expert by expert, source by source
    ``active``  the same after the function, [..., h]
    ``c``       [experts, h, n]
    ``out``     [world * experts * capacity, n]: rank by rank, what each made of this one's tokens
    ==========  ==================================================================

    Attributes:
        operator: ``"experts"``; ``"dispatch_matmul"``, up to ``hidden``; or ``"matmul_combine"``,
            from ``active`` on.
        world: number of ranks.
        experts: number of experts of each rank.
        capacity: rows that each rank has for each expert.
        k, h, n: columns of ``a``, ``active`` and ``c``; of ``dispatch_matmul``, h is that of
            ``hidden``, and n is 0; of ``matmul_combine``, k is 0.
        dtype: name of the dtype.
        function: what is between the products; empty for a half.
        keeps: the rows that arrive, and ``hidden``, are results, too.
        gathers: every rank has a part of the columns of the same experts, so that all get all
            tokens (an all-gather), and what comes back are terms of sums over the ranks.
        exact: a call has only some of the rows of each block, see :func:`block_starts`.
        indexed: ``a`` is given as tokens, and which of them each row is.
        room: of an exact layer, the most rows that any rank multiplies, and that any gets back, if
            these are known. No Plan depends on them but for the memory that it asks for.
        hosts: how many hosts the ranks are on, each with as many, which follow each other.

    Raises:
        ValueError: a value is wrong.
        NotImplementedError: the dtype is not served.
    """

    operator: str
    world: int
    experts: int
    capacity: int
    k: int
    h: int
    n: int
    dtype: str
    function: str = ""
    keeps: bool = False
    gathers: bool = False
    exact: bool = False
    indexed: bool = False
    room: tuple[int, int] = field(default=(0, 0), compare=False)
    hosts: int = 1

    def __post_init__(self) -> None:
        check_name("operator", self.operator, EXPERT_OPERATORS)
        for least, sizes in ((1, ("world", "experts", "capacity")), (0, "khn")):
            self._check(self.dtype, least, ((name, getattr(self, name)) for name in sizes))
        if self.function not in (FUNCTIONS if self.operator == "experts" else ("",)):
            raise InvalidArgument(
                "function", f"required one of {', '.join(FUNCTIONS)}, got {self.function!r}"
            )

    @property
    def gated(self) -> bool:
        """Whether the function multiplies the two halves of its rows."""
        return bool(self.function) and FUNCTIONS[self.function][1]

    @property
    def dispatches(self) -> bool:
        return EXPERT_OPERATORS[self.operator][0]

    @property
    def combines(self) -> bool:
        return EXPERT_OPERATORS[self.operator][1]

    @property
    def wide(self) -> int:
        """Columns of ``hidden``."""
        return 2 * self.h if self.gated else self.h

    @property
    def rows(self) -> int:
        """Rows that a rank multiplies, and that it gets back."""
        return self.world * self.experts * self.capacity

    @property
    def apart(self) -> int:
        """Rows of an expert where they are multiplied."""
        return self.world * self.capacity

    def home(self, rank: int, expert: int = 0) -> int:
        """At every rank, the first row that comes back from an expert of a rank."""
        return (rank * self.experts + expert) * self.capacity

    def leaving(self, rank: int, expert: int = 0) -> int:
        """At every rank, the first row for an expert of a rank."""
        return self.home(0 if self.gathers else rank, expert)

    def landing(self, source: int, expert: int = 0) -> int:
        """At the rank of an expert, the first row of a source for it."""
        return (expert * self.world + source) * self.capacity

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """Those of the caller, and what lies between the products."""

        def buffer(name: str, holds: str, rows: int, cols: int, memory: str) -> Buffer:
            shapes = ((rows, cols),) * self.world
            matrices = self.experts * (name in ("b", "c"))
            block = self.capacity * (self.exact and not matrices)
            return Buffer(name, holds, self.dtype, shapes, memory, matrices=matrices, block=block)

        sent = self.rows // self.world if self.gathers else self.rows
        kept = "result" if self.keeps or not self.combines else "local"
        made = "local" if self.dispatches else "operand"
        arrived = "result" if self.keeps else "local"
        found = (
            buffer("a", "A", sent, self.k, "operand")._replace(leaves=True, indexed=self.indexed),
            buffer("b", "B", self.experts * self.k, self.wide, "operand"),
            buffer("gathered", "A", self.rows, self.k, arrived),
            buffer("hidden", "A @ B", self.rows, self.wide, kept),
            buffer("active", "H", self.rows, self.h, made),
            buffer("c", "C", self.experts * self.h, self.n, "operand"),
            buffer("out", "H @ C", self.rows, self.n, "result"),
        )
        return {one.name: one for one in found}

    @cached_property
    def specification(self) -> Specification:
        """What its Plans have to compute."""
        buffers, world = self.buffers, self.world
        names = (("a", "b", "gathered", "hidden") if self.dispatches else ()) + (
            ("active", "c", "out") if self.combines else ()
        )
        own = [buffers[name] for name in names]
        contractions, exchanges = [], {}
        parts = self.experts if world > 1 else 1  # that land as they leave
        rows = self.experts * self.capacity // parts
        exchange = partial(Exchange, lambda src, dst: rows, parts=parts)
        if self.dispatches:
            leaves, lands = lambda src, dst: self.leaving(dst), lambda src, dst: self.landing(src)
            exchanges["A"] = exchange(
                leaves, lands, leaves_apart=self.capacity, lands_apart=self.apart
            )
            contractions.append(Contraction("A", "B", "A @ B", (self.k,) * world, share=self.apart))
        if self.combines:
            leaves, lands = lambda src, dst: self.landing(dst), lambda src, dst: self.home(src)
            exchanges["H @ C"] = exchange(
                leaves, lands, leaves_apart=self.apart, lands_apart=self.capacity
            )
            contractions.append(Contraction("H", "C", "H @ C", (self.h,) * world, share=self.apart))
        return Specification(
            operands=tuple(one for one in own if one.memory == "operand"),
            results=tuple(one for one in own if one.memory == "result"),
            contractions=tuple(contractions),
            exchanges=exchanges,
            functions={(self.function, "A @ B"): "H"} if self.function else {},
        )

    def __str__(self) -> str:
        between = f", {self.function}" if self.function else ""
        keeps = ", keeps" if self.keeps else ""
        of = "columns of" if self.gathers else "x"
        most = "exact rows, at most " if self.exact else "capacity="
        over = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        return (
            f"{self.operator}({self.experts} experts {of} {self.world} ranks{over}, {most}"
            f"{self.capacity}, k={self.k}, h={self.h}, n={self.n}, {self.dtype}{between}{keeps})"
        )


#: Buffers from which rows leave, where they are multiplied, and where they come back.
LEAVING = ("a", "leaving")
LANDING = ("gathered", "staging", "hidden", "active", "partial")
HOME = ("out", "staging out")


def block_starts(
    layer: ExpertLayer, counts: np.ndarray[Any, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """For each buffer, [rank, blocks + 1]: how many rows a call has before each block, and in all.
    ``counts``: [rank, expert], the rows that ranks have for experts."""
    import numpy as np  # not above: the command line lists activations without it

    world = layer.world
    if layer.gathers:
        landing, home = np.tile(counts.T.ravel(), (world, 1)), np.tile(counts, (1, world))
    else:  # [rank, expert, source]
        landing = counts.reshape(world, world, -1).transpose(1, 2, 0).reshape(world, -1)
        home = counts
    found: dict[str, np.ndarray[Any, Any]] = {}
    for names, rows in ((LEAVING, counts), (LANDING, landing), (HOME, home)):
        starts = np.zeros((world, rows.shape[1] + 1), np.int64)
        rows.cumsum(1, out=starts[:, 1:])
        found |= dict.fromkeys(names, starts)
    return found
