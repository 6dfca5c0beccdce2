"""Settings, steps and efforts of a tuning run, as data: for GPUs and CPUs, full and quick."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ficco.problems.products import OPERATORS, Problem

KIB, MIB = 1 << 10, 1 << 20
Sizes = tuple[int, ...]


class Shape(NamedTuple):
    """A product of one rank, or a batch of products; ``wide`` ones accumulate into float32. Each of
    a batch that is ``apart`` has a right operand of its own; ``turned`` ones lie transposed."""

    m: int
    n: int
    k: int
    batch: int = 1
    wide: bool = False
    apart: bool = False
    turned: bool = False

    @property
    def rights(self) -> int:
        """Right operands."""
        return self.batch if self.apart else 1

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def plain(self) -> bool:
        """Whether it is one product, and is not added to anything."""
        return self.batch == 1 and not self.wide

    @property
    def in_a_row(self) -> int:
        """How many products are timed at once: with small ones the time between two counts."""
        return 4 if self.flops < 2e11 else 1


class Attends(NamedTuple):
    """A call of attention; there are as many queries as keys under a causal mask."""

    queries: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    causal: bool = False
    back: bool = False


def attends(queries: Sizes, keys: Sizes, heads: tuple[Sizes, ...]) -> tuple[Attends, ...]:
    """Whole rectangles, squares under a causal mask, and backwards of the two smaller squares with
    and without it, of heads: their number, that of keys, and their size."""
    squares = [(k, k) for k in keys]
    return tuple(
        Attends(*rows, *one, causal, back)
        for one in heads
        for causal, back, pairs in (
            (False, False, [(q, k) for q in queries for k in keys]),
            (True, False, squares),
            (False, True, squares[:2]),
            (True, True, squares[:2]),
        )
        for rows in pairs
    )


@dataclass(frozen=True)
class Effort:
    """Extent of a tuning run.

    Attributes:
        dtype: of all operands.
        gemms: products. ``reference``: a product that shows the temperature of the device.
        heating: products, with many terms and with many columns, and ``rows`` how many of them
            follow each other until the device is at its power limit; three numbers or more.
        sizes: bytes of a copy.
        pieces: copies to each peer in a row; two different numbers.
        least_bytes: copies of more than this are measured with fewer pieces.
        attends: calls of attention, of two numbers of queries and keys or more for every size.
        experts: batches of products with a matrix each.
        products: products that are measured during communication, and
            ``traffic``: bytes of the shards that are communicated meanwhile.
        moves: bytes of copies within a rank.
        tiny: rows of a rank, columns of b and of A of calls whose host time counts.
        rule: m, n and k of products for the thresholds of the rule.
        seconds: time for each step, 0 for one that this device does not need, and ``takes``: factor
            of these seconds for preparation and the ``least`` rounds.
        shape_seconds: time for each given problem.
        least: rounds of everything that is timed.
        exchanges: bytes that a rank has for another in a collective, whose library changes its
            algorithm from size to size.
    """

    dtype: str
    gemms: tuple[Shape, ...]
    reference: Shape
    heating: tuple[Shape, ...]
    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[int, int]
    least_bytes: int
    attends: tuple[Attends, ...]
    experts: tuple[Shape, ...]
    products: tuple[Shape, ...]
    traffic: int
    moves: tuple[int, ...]
    tiny: tuple[int, int, int]
    rule: tuple[tuple[int, int, int], ...]
    seconds: dict[str, float]
    shape_seconds: float
    least: int
    exchanges: tuple[int, ...]
    takes: float = 1.25


def grid(ms: Sizes, ns: Sizes, ks: Sizes, most_flops: float, count: int) -> tuple[Shape, ...]:
    """About ``count`` products: of a grid, of odd sizes between its ends, batches, and wide ones.

    Always the same ones: the numbers are drawn with a fixed seed.
    """
    draw = random.Random(0)
    regular = [Shape(m, n, k) for m in ms for n in ns for k in ks]
    odd = []
    for _ in range(count):
        m, n, k = (draw.randint(sizes[0], sizes[-1]) for sizes in (ms, ns, ks))
        odd.append(Shape(m, n // 8 * 8 or 8, k // 8 * 8 or 8))
    batches = [
        Shape(m, n, k, batch)
        for batch in (3, 7)
        for m in ms[: len(ms) // 2 + 1]
        for n, k in ((ns[0], ks[-1]), (ns[-1], ks[0]))
    ]
    wide = [Shape(m, n, k, 1, True) for m in ms[1:] for n in (ns[0], ns[-1]) for k in ks[:2]]
    chosen = []
    for kind, share in ((regular, 0.6), (odd, 0.2), (batches, 0.12), (wide, 0.08)):
        small = [shape for shape in kind if shape.flops <= most_flops]
        wanted = max(1, round(count * share))
        chosen += small if len(small) <= wanted else draw.sample(small, wanted)
    return tuple(dict.fromkeys(chosen))


def by_experts(
    experts: Sizes, rows: Sizes, widths: tuple[tuple[int, int], ...], most_flops: float
) -> tuple[Shape, ...]:
    """Products of expert layers with at most ``most_flops``, by number of experts, rows of each,
    and inner and outer columns: the first product, whose result is gated, and the second; for every
    other number of rows also the two products of their gradients, by the same matrices."""
    sizes = [(n, k) for inner, outer in widths for n, k in ((2 * inner, outer), (outer, inner))]
    every = [Shape(m, n, k, b, apart=True) for b in experts for m in rows for n, k in sizes]
    back = [(m, k, n, b) for b in experts for m in rows[::2] for n, k in sizes]
    every += [Shape(*size, apart=True, turned=True) for size in back]
    return tuple(one for one in every if one.flops <= most_flops)


#: Seconds of the steps on GPUs and on CPUs, in their order: a step follows those it depends on.
_SECONDS = {
    "gemm": (45.0, 8.0), "fp8_tensor": (9.0, 0.0), "fp8_row": (9.0, 0.0), "fp8_block": (9.0, 0.0),
    "experts": (6.0, 1.2), "tiled": (12.0, 0.0), "attention": (5.0, 1.2), "copies": (20.0, 6.0),
    "kernel_copies": (12.0, 4.0), "topology": (5.0, 3.0), "all_gather": (12.0, 4.0),
    "reduce_scatter": (6.0, 1.5), "all_to_all": (6.0, 1.5), "all_reduce": (6.0, 1.5),
    "memory": (3.0, 2.0), "contention": (24.0, 7.0), "host": (6.0, 4.0), "thresholds": (20.0, 6.0),
    "network": (20.0, 5.0),
}  # fmt: skip

#: Name of the steps of all ``problems`` in ``only``.
SHAPES = "shapes"

#: Names of the steps, in order.
STEPS = (*_SECONDS, SHAPES)

GPU = Effort(
    dtype="bfloat16",
    gemms=grid(
        (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        (512, 1024, 2048, 4096, 8192, 14336),
        (1024, 2048, 4096, 8192, 16384),
        3e12,
        200,
    ),
    reference=Shape(4096, 4096, 4096),
    heating=(Shape(4096, 4096, 8192), Shape(8192, 8192, 2048)),
    rows=(1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
    sizes=tuple(size * KIB for size in (64, 256, 1024, 4096, 16384, 65536, 131072)),
    pieces=(1, 4),
    least_bytes=16 * MIB,
    # Enough heads that no library splits the keys of a head between processors.
    attends=attends(
        (512, 1024, 4096), (1024, 4096, 8192), ((32, 8, 64), (32, 8, 128), (32, 8, 256))
    ),
    experts=by_experts(
        (2, 4, 8, 16), (40, 80, 160, 320, 640, 1280, 2560), ((1408, 4096), (14336, 4096)), 1.5e12
    ),
    products=(Shape(8192, 2048, 8192), Shape(8192, 3584, 4096), Shape(4096, 4096, 16384)),
    traffic=64 * MIB,
    moves=(1 * MIB, 16 * MIB, 256 * MIB),
    tiny=(64, 256, 256),
    rule=tuple(
        (m, n, 4096)
        for m, n in ((8192, 1024), (8192, 2048), (8192, 4096), (16384, 4096), (16384, 8192),
                     (32768, 8192))
    ),
    seconds={step: seconds for step, (seconds, _) in _SECONDS.items()},
    shape_seconds=12.0,
    least=3,
    exchanges=tuple(
        size * KIB for size in (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 131072)
    ),
)  # fmt: skip

CPU = Effort(
    dtype="float32",
    gemms=grid((16, 64, 128, 256, 512), (32, 64, 128, 256), (64, 128, 256, 512), 1.5e8, 28),
    reference=Shape(128, 128, 128),
    heating=(Shape(128, 128, 512), Shape(128, 512, 128)),
    rows=(1, 2, 4, 8, 16),
    sizes=tuple(size * KIB for size in (16, 64, 256, 1024, 4096)),
    pieces=(1, 4),
    least_bytes=4 * MIB,
    attends=attends((128, 256), (256, 512), ((4, 2, 64), (4, 2, 128))),
    experts=by_experts((2, 4), (16, 64, 256), ((64, 64), (128, 128)), 1.5e8),
    # Long compared with the time slices of shared cores: a shorter product waits for whole slices
    # of other ranks, and seems ten times as slow.
    products=(Shape(512, 512, 512), Shape(1024, 512, 512)),
    traffic=4 * MIB,
    moves=(256 * KIB, 1 * MIB, 16 * MIB),
    tiny=(8, 8, 8),
    rule=((256, 32, 64), (256, 128, 128), (512, 128, 256), (512, 256, 256)),
    seconds={step: seconds for step, (_, seconds) in _SECONDS.items()},
    shape_seconds=6.0,
    least=5,
    exchanges=tuple(size * KIB for size in (16, 64, 256, 1024, 4096)),
)  # fmt: skip

#: By device, in full and for ``--quick``.
EFFORTS = {
    ("cuda", False): GPU,
    ("cuda", True): replace(
        GPU,
        gemms=GPU.gemms[::3],
        seconds={step: most / 5 for step, most in GPU.seconds.items()},
        shape_seconds=GPU.shape_seconds / 5,
        rule=GPU.rule[1::2],
    ),
    ("cpu", False): CPU,
    ("cpu", True): replace(
        CPU,
        gemms=CPU.gemms[::2],
        sizes=(*CPU.sizes[:4:2], 1 * MIB),
        products=CPU.products[:1],
        traffic=256 * KIB,
        moves=(256 * KIB, 4 * MIB),
        rule=CPU.rule[:3],
        seconds={step: 0.38 if most else 0.0 for step, most in CPU.seconds.items()},
        shape_seconds=CPU.shape_seconds / 5,
        least=2,
        exchanges=(*CPU.exchanges[:4:2], 1 * MIB),
        takes=6.0,
    ),
}

#: The step that ranks on several hosts measure, and no others.
NETWORK = "network"


def name_of(problem: Problem) -> str:
    """The name of a problem as a step of a run."""
    rows = "/".join("+".join(map(str, line)) for line in problem.blocks or (problem.rows,))
    return f"{problem.operator} {rows}x{problem.n}x{problem.k} {problem.kind_of_operands}"


@dataclass(frozen=True)
class TuneSettings:
    """Settings of a tuning run.

    Attributes:
        path: the machine's file.
        device: ``"cpu"`` or ``"cuda"``.
        quick: measure for less time, and less exactly.
        only: names of steps; empty for all.
        operators: whose collectives are measured; empty for all. The all-gather always is, since
            collectives that were not measured are derived from it.
        problems: problems whose candidates are all measured.
        fresh: begin anew instead of continuing an interrupted run.
        command: the command line, for the provenance of the figures.
    """

    path: Path
    device: str
    quick: bool = False
    only: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    fresh: bool = False
    command: str = ""

    @property
    def effort(self) -> Effort:
        return EFFORTS[self.device, self.quick]

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the steps, in order."""
        usual = {*STEPS} - {NETWORK}
        wanted = [name for name in STEPS if name in (self.only or usual) and name != SHAPES]
        if self.operators:
            from ficco.machine import COLLECTIVES

            kinds = {OPERATORS[name].collective for name in self.operators}
            others = {COLLECTIVES[kind] for kind in {*COLLECTIVES} - {*kinds, "all-gather"}}
            wanted = [name for name in wanted if name not in others]
        if not self.only or SHAPES in self.only:
            wanted += map(name_of, self.problems)
        return tuple(wanted)

    def describe(self, fingerprint: Any) -> str:
        """Text that another run must share to continue this run."""
        kind = "gpu" if self.device == "cuda" else "cpu"
        return f"{fingerprint} {kind}{'-quick' * self.quick} {' '.join(self.steps)}"

    def seconds(self, step: str) -> float:
        """About how long a step takes."""
        seconds = self.effort.seconds.get(step, 2 * self.effort.shape_seconds)
        return seconds * self.effort.takes
