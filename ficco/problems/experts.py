"""Problems of mixture-of-experts layers, equal on every rank of the group."""

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

#: By operator: whether it dispatches tokens to the first product, and whether it returns the rows
#: of the second product.
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
    ``a``       [world * experts * capacity, k]: this rank's tokens, expert by expert; with
                ``gathers``, [experts * capacity, k]
    ``b``       [experts, k, h], or [experts, k, 2h] if the function is gated: matrices of this
                rank's experts
    ``hidden``  [experts * world * capacity, h or 2h]: expert by expert, source by source
    ``active``  ``function(hidden)``, [..., h]
    ``c``       [experts, h, n]
    ``out``     [world * experts * capacity, n]: results for this rank's tokens, rank by rank
    ==========  ==================================================================

    Attributes:
        operator: ``"experts"``; ``"dispatch_matmul"``, up to ``hidden``; or ``"matmul_combine"``,
            from ``active`` on.
        world: number of ranks.
        experts: number of experts of each rank.
        capacity: rows that each rank has for each expert.
        k, h, n: columns of ``a``, ``active`` and ``c``. In ``dispatch_matmul``, h is the columns of
            ``hidden``, and n is 0. In ``matmul_combine``, k is 0.
        dtype: name of the dtype.
        function: the function between the products; empty for an operator with one product.
        keeps: the rows that arrive, and ``hidden``, are results, too.
        gathers: every rank has a part of the columns of the same experts. All ranks then get all
            tokens (an all-gather), and the rows that return are terms of sums over the ranks.
        exact: a call has only some of the rows of each block, see :func:`block_starts`.
        indexed: ``a`` is passed as tokens, and the index of a token for each row.
        room: of an exact layer, the most rows that any rank multiplies, and the most rows that
            return to any rank; 0 if unknown. They only affect the memory that a Plan asks for.
        hosts: number of hosts. Each host has equally many ranks, numbered consecutively.

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
        summed = ("k",) * self.dispatches + ("h",) * self.combines
        for least, sizes in ((1, ("world", "experts", "capacity", *summed)), (0, "khn")):
            self._check(self.dtype, least, ((name, getattr(self, name)) for name in sizes))
        if self.function not in (FUNCTIONS if self.operator == "experts" else ("",)):
            raise InvalidArgument(
                "function", f"required one of {', '.join(FUNCTIONS)}, got {self.function!r}"
            )

    @property
    def gated(self) -> bool:
        """Whether the function multiplies the two halves of each row."""
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
        """Rows that a rank multiplies, and rows that return to it."""
        return self.world * self.experts * self.capacity

    @property
    def apart(self) -> int:
        """Rows that one expert multiplies: the distance between experts in ``hidden``."""
        return self.world * self.capacity

    def home(self, rank: int, expert: int = 0) -> int:
        """The first row, on every rank, that returns from an expert of ``rank``."""
        return (rank * self.experts + expert) * self.capacity

    def leaving(self, rank: int, expert: int = 0) -> int:
        """The first row, on every rank, that is sent to an expert of ``rank``."""
        return self.home(0 if self.gathers else rank, expert)

    def landing(self, source: int, expert: int = 0) -> int:
        """The first row from ``source``, on the rank of the expert."""
        return (expert * self.world + source) * self.capacity

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers of the caller and those between the products, by name."""

        def buffer(name: str, holds: str, rows: int, cols: int, memory: str) -> Buffer:
            shapes = ((rows, cols),) * self.world
            matrices = self.experts * (name in ("b", "c"))
            block = self.capacity * (self.exact and not matrices)
            return Buffer(name, holds, self.dtype, shapes, memory, matrices=matrices, block=block)

        a_rows = self.rows // self.world if self.gathers else self.rows
        gathered = "result" if self.keeps else "local"
        hidden = "result" if self.keeps or not self.combines else "local"
        active = "local" if self.dispatches else "operand"
        buffers = (
            buffer("a", "A", a_rows, self.k, "operand")._replace(leaves=True, indexed=self.indexed),
            buffer("b", "B", self.experts * self.k, self.wide, "operand"),
            buffer("gathered", "A", self.rows, self.k, gathered),
            buffer("hidden", "A @ B", self.rows, self.wide, hidden),
            buffer("active", "H", self.rows, self.h, active),
            buffer("c", "C", self.experts * self.h, self.n, "operand"),
            buffer("out", "H @ C", self.rows, self.n, "result"),
        )
        return {one.name: one for one in buffers}

    @cached_property
    def specification(self) -> Specification:
        """The matrices that its Plans must compute."""
        world = self.world
        names = (("a", "b", "gathered", "hidden") if self.dispatches else ()) + (
            ("active", "c", "out") if self.combines else ()
        )
        buffers = [self.buffers[name] for name in names]
        contractions, exchanges = [], {}
        parts = self.experts if world > 1 else 1  # of one rank, a block is contiguous at both ends
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
            operands=tuple(one for one in buffers if one.memory == "operand"),
            results=tuple(one for one in buffers if one.memory == "result"),
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


#: Buffers by the order of their rows: of sending, of multiplying, and of returning.
LEAVING = ("a", "leaving")
LANDING = ("gathered", "staging", "hidden", "active", "partial")
HOME = ("out", "staging out")


def block_starts(
    layer: ExpertLayer, counts: np.ndarray[Any, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """For each buffer, [rank, blocks + 1]: the first row of each block of a call, then the total.
    ``counts``: [rank, expert], the rows that ranks have for experts."""
    import numpy as np  # late, since the command line lists activations without it

    world = layer.world
    if layer.gathers:
        landing, home = np.tile(counts.T.ravel(), (world, 1)), np.tile(counts, (1, world))
    else:  # [rank, expert, source]
        landing = counts.reshape(world, world, -1).transpose(1, 2, 0).reshape(world, -1)
        home = counts
    by_buffer: dict[str, np.ndarray[Any, Any]] = {}
    for names, rows in ((LEAVING, counts), (LANDING, landing), (HOME, home)):
        starts = np.zeros((world, rows.shape[1] + 1), np.int64)
        rows.cumsum(1, out=starts[:, 1:])
        by_buffer |= dict.fromkeys(names, starts)
    return by_buffer
