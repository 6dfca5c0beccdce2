"""The space of schedules: its axes, the named points, and the names.

A name is a base, and knobs after a colon: ``hetero-fused-1d:pieces=4,pull,compute=2``. The API,
files, the command line and reports use the same names. Parsing a printed name returns an equal
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from numbers import Integral
from typing import Any

#: How pieces share steps. Of the first two, a kernel sums products where they are, at the peers.
SUMS_IN_PLACE = ("one-shot", "two-shot")
GROUPINGS = ("fused", "unfused", "growing", "shrinking", "ring", *SUMS_IN_PLACE, "tiled", "own")

#: Group of entry points by which a package registers own schedules. The name of an entry point is
#: the name of the schedule; its object is the function for :func:`ficco.schedules.register`.
ENTRY_POINTS = "ficco.schedules"

#: Functions of own schedules by name, once they are registered or loaded.
OWN: dict[str, Callable[..., Any]] = {}

#: The order in which pieces travel; the first is the default.
ORDERS = ("piece", "peer")

#: Movers of the bytes; the first is the default.
MOVERS = ("dma", "kernel", "collective")

NO_SIZE = "pieces: required a positive number or positive relative sizes such as 4+2+1, got {}"


@dataclass(frozen=True)
class Schedule:
    """A point of the space of schedules (FiCCO, section V-A, and its extensions).

    The axes are the same in both directions. *Gather*: pieces of A are multiplied as they arrive.
    *Scatter*: pieces of the product are sent as they are made.

    Attributes:
        uniform: the rank's own pieces are part of every step. Otherwise (hetero) the own part has a
            separate product: first, while the first pieces travel (gather), or last, while the last
            pieces travel (scatter).
        grouping: which pieces share a step.

            - ``"fused"``: one piece of every peer.
            - ``"unfused"``: a single piece.
            - ``"growing"``: pieces of 1, 2, 4, ... neighbouring peers, whose rows are contiguous,
              so that log2(W) + 1 products suffice. ``"shrinking"``: the reverse.
            - ``"ring"``, for operators that sum: a block goes from rank to rank, and each rank adds
              its product to it. In attention keys and values go from rank to rank.
            - ``"one-shot"``, for operators that sum: each rank reads its peers' products in place
              and sums what it needs. In an all-reduce every rank makes the whole sum.
            - ``"two-shot"``, for an all-reduce: as one-shot, but each rank sums its rows only, and
              writes the sums to all peers.
            - ``"tiled"``: all pieces. Each tile of one product waits for its piece (gather; Flux,
              section 4, TileLink), or each piece is sent as soon as its last tile is done (scatter;
              FlashOverlap, section 3).
            - ``"own"``: as the registered function ``own`` decides. Other axes have no meaning.
        dims: 1 cuts the matrix that travels by rows, 2 by columns. Products of columns of A
            accumulate; columns of a product are columns of b.
        pieces: pieces per shard or block, or their relative sizes. 0 means one per rank, the
            paper's choice. At most as many as there are rows or columns.
        tail: pieces that the last group is cut into once more, which shortens the work after the
            last copy: a product (gather), or a sum (scatter).
        order: ``"piece"``: one piece of every peer, then the next piece of every peer, which keeps
            all links of a mesh busy. ``"peer"``: peer after peer, which suits a switch.
        pull: receivers fetch; otherwise senders push.
        mover: ``"dma"``: copy engines. ``"kernel"``: a copy kernel on a few SMs or CUs per peer; in
            a one-shot or two-shot the kernel that sums, on more of them. ``"collective"``: the
            operator's collective by the group's library, for serial only.
        copy: number of copy lanes. Transfers with the same peer share a lane.
        compute: number of compute lanes.
        own: the name of a schedule that :func:`ficco.schedules.register` or an entry point added.
        beta: for operators that sum. The products of the peers are summed and rounded first, and
            the GEMM of the own product adds to that sum (beta = 1), so that no work is left after
            the GEMM. A ring requires beta.

    Raises:
        ValueError: a value is not allowed, or values contradict each other.
    """

    uniform: bool
    grouping: str
    dims: int
    pieces: int | tuple[int, ...] = 0
    tail: int = 1
    order: str = "piece"
    pull: bool = False
    mover: str = "dma"
    copy: int = 1
    compute: int = 1
    beta: bool = False
    own: str = ""

    def __post_init__(self) -> None:
        for name, known in (
            ("grouping", GROUPINGS),
            ("dims", (1, 2)),
            ("order", ORDERS),
            ("mover", MOVERS),
        ):
            if getattr(self, name) not in known:
                one_of = ", ".join(map(str, known))
                raise ValueError(f"{name}: required one of {one_of}, got {getattr(self, name)!r}")
        if self.grouping in ("growing", "shrinking") and (self.uniform or self.dims == 2):
            raise ValueError(
                f"{self.grouping}: required the own shard first (uniform=False) and rows (dims=1); "
                "for other steps use the grouping fused or unfused"
            )
        if self.grouping == "ring" and (self.uniform or self.pull or not self.beta):
            raise ValueError(
                "ring: required uniform=False, pull=False and beta=True, since a block is pushed "
                "from rank to rank and ends where it belongs"
            )
        if self.sums_in_place and not (
            self.uniform and self.dims == 1 and self.pull and self.mover == "kernel"
        ):
            raise ValueError(
                f"{self.grouping}: required uniform=True, dims=1, pull=True and mover='kernel', "
                "since a kernel reads rows at the peers and sums them"
            )
        once = not self.uniform and self.dims == self.compute == 1 and not self.beta
        if self.grouping == "tiled" and not once:
            raise ValueError(
                "tiled: required uniform=False, dims=1, compute=1 and beta=False, since one "
                "product makes all rows, each of them once"
            )
        if self.grouping == "tiled" and self.mover != "dma":
            raise ValueError(
                "tiled: required mover='dma', since a copy kernel may find no processor beside a "
                "product that waits for it"
            )
        if (self.grouping == "own") != bool(self.own) or (
            self.own and replace(self, grouping="fused", own="") != NAMED["serial"]
        ):
            raise ValueError(
                "own: required the grouping own, the name of a schedule of one's own and no other "
                f"axis, got {self.grouping!r} and {self.own!r}"
            )
        if self.beta and self.uniform:
            raise ValueError(
                "beta: required the own product last (uniform=False), since it adds itself to the "
                "sum of all others"
            )
        several = isinstance(self.pieces, tuple)  # sizes of at least 1; a number may be 0
        weights: Any = self.pieces if several else (self.pieces,)
        if not weights or any(not isinstance(one, Integral) or one < several for one in weights):
            raise ValueError(NO_SIZE.format(self.pieces))
        if several and len(set(weights)) == 1:
            object.__setattr__(self, "pieces", len(weights))
        if self.mover == "collective" and replace(self, mover="dma") != NAMED["serial"]:
            raise ValueError(
                "collective: required the schedule serial without other knobs, since a collective "
                "moves everything at once, in its own way"
            )
        for name in ("tail", "copy", "compute"):
            if not isinstance(count := getattr(self, name), Integral) or count < 1:
                raise ValueError(f"{name}: required at least 1, got {count!r}")

    @property
    def sums_in_place(self) -> bool:
        """Whether a kernel sums products in the memory of the peers."""
        return self.grouping in SUMS_IN_PLACE

    @classmethod
    def parse(cls, name: str) -> Schedule:
        """The schedule of a name.

        Raises:
            ValueError: the name is no schedule; the text lists the names and knobs.
        """
        return _parse(name)

    def __str__(self) -> str:
        def knobs(base: Schedule) -> list[str]:
            return [knob.print(self) for knob in KNOBS if knob.get(self) != knob.get(base)]

        def fixed(schedule: Schedule) -> tuple[bool, str, int]:
            return schedule.uniform, schedule.grouping, schedule.dims

        if self.own:
            return self.own
        bases = [name for name, base in NAMED.items() if fixed(base) == fixed(self)]
        # An omitted knob has the base's value. Take the base that needs the fewest knobs.
        # Of several such bases take serial last, since other schedules overlap.
        name = min(bases, key=lambda base: (len(knobs(NAMED[base])), base == "serial"))
        rest = knobs(NAMED[name])
        return f"{name}:{','.join(rest)}" if rest else name


@dataclass(frozen=True)
class Knob:
    """One axis, as written after the colon of a name."""

    axis: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    flags: Mapping[str, Any] = field(default_factory=dict)  # words that stand for a value

    def get(self, schedule: Schedule) -> Any:
        return getattr(schedule, self.axis)

    def print(self, schedule: Schedule) -> str:
        value = self.get(schedule)
        for flag, meaning in self.flags.items():
            if value == meaning:
                return flag
        return f"{self.axis}={self.show(value)}"


def _pieces(text: str) -> int | tuple[int, ...]:
    if text == "W":
        return 0
    weights = tuple(int(weight) for weight in text.split("+"))
    return weights if len(weights) > 1 else weights[0]


def _show_pieces(pieces: int | tuple[int, ...]) -> str:
    if isinstance(pieces, tuple):
        return "+".join(map(str, pieces))
    return str(pieces) if pieces else "W"


#: The knobs in the order in which names print them.
KNOBS = (
    Knob("pieces", _pieces, _show_pieces),
    Knob("tail", int),
    Knob("order", lambda text: ORDERS[ORDERS.index(text)]),
    Knob("pull", lambda text: {"1": True, "0": False}[text], "{:d}".format, {"pull": True}),
    Knob("mover", lambda text: MOVERS[MOVERS.index(text)], str, {m: m for m in MOVERS[1:]}),
    Knob("copy", int),
    Knob("compute", int),
    Knob("beta", lambda text: {"1": True, "0": False}[text], "{:d}".format, {"beta": True}),
)

#: The named points. The paper studies four of the eight FiCCO schedules (section V-B).
#: ``shard-overlap`` is PyTorch's Async TP. ``growing`` and ``shrinking`` are hypercube orders.
#: ``ring`` needs two pieces, so that one travels while the other is multiplied, also at the end.
#: ``one-shot`` and ``two-shot`` sum as PyTorch's ``one_shot_all_reduce`` and
#: ``two_shot_all_reduce_`` do.
#: ``tiled`` is one kernel.
NAMED: dict[str, Schedule] = {
    "serial": Schedule(True, "fused", 1, pieces=1),
    "shard-overlap": Schedule(False, "unfused", 1, pieces=1, order="peer"),
    "growing": Schedule(False, "growing", 1, pieces=1, order="peer"),
    "shrinking": Schedule(False, "shrinking", 1, pieces=1, order="peer"),
    "ring": Schedule(False, "ring", 1, pieces=2, tail=2, order="peer", beta=True),
    **{
        name: Schedule(True, name, 1, pieces=1, pull=True, mover="kernel") for name in SUMS_IN_PLACE
    },
    "tiled": Schedule(False, "tiled", 1, pieces=1, order="peer"),
    **{
        f"{'uniform' if uniform else 'hetero'}-{grouping}-{dims}d": Schedule(
            uniform, grouping, dims
        )
        for uniform in (True, False)
        for grouping in ("fused", "unfused")
        for dims in (1, 2)
    },
}


def _is_own(name: str) -> bool:
    """Whether an own schedule has this name. Loads it from an entry point if necessary."""
    if name not in OWN and name:
        from importlib.metadata import entry_points

        for point in entry_points(group=ENTRY_POINTS, name=name):
            OWN.setdefault(name, point.load())
    return name in OWN


@lru_cache(maxsize=4096)
def _parse(name: str) -> Schedule:
    base, _, text = name.partition(":")
    if base not in NAMED and _is_own(base):
        if text:
            raise ValueError(f"schedule {name!r}: {base} is one of your own, and has no knobs")
        return Schedule(True, "own", 1, pieces=1, own=base)
    if base not in NAMED:
        near = [f"; did you mean {one!r}?" for one in get_close_matches(base, NAMED, 1)]
        raise ValueError(
            f"schedule: required one of {', '.join(NAMED)}, or 'auto', got {name!r}{''.join(near)}"
        )
    values: dict[str, Any] = {}
    for item in text.split(",") if text else []:
        key, equals, value = item.partition("=")
        if item == "pieces=0":  # in a Schedule, 0 is W
            raise ValueError(NO_SIZE.format(0))
        knob = next((k for k in KNOBS if (key == k.axis if equals else key in k.flags)), None)
        wrong = "not a knob"
        if knob is not None and knob.axis in values:
            wrong = f"{knob.axis} is given twice"
        elif knob is not None:
            with suppress(KeyError, ValueError):
                values[knob.axis] = knob.parse(value) if equals else knob.flags[key]
                continue
            wrong = f"not a value of {knob.axis}"
        usage = (
            "pieces=4 or pieces=4+2+1, tail=4, order=peer, pull, kernel or collective, copy=2, "
            "compute=2, beta"
        )
        raise ValueError(f"schedule {name!r}: {item!r}: {wrong}; knobs are {usage}")
    return replace(NAMED[base], **values)
