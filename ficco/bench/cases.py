"""The shapes that are benched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from ficco.errors import ConfigError
from ficco.heuristics import problem_of_sizes
from ficco.machine import configs
from ficco.problem import OPERATORS, Problem

#: Ranks of the paper's machine. Its scenarios are benched as one of so many ranks sees them,
#: however many there are here.
PAPER_WORLD = 8

#: Largest m * n * k that is drawn: about 25 ms on one H200.
MOST_UNSEEN = 1e13

#: Part of the free memory of a device that a shape may need.
MEMORY_SHARE = 0.9


#: The operator that is benched unless another is named.
OPERATOR = "all_gather_matmul"

#: The operator that gives the gradient of its B.
WEIGHT_GRADIENT = "all_gather_transposed_matmul"


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        name: how reports call it.
        m: rows of the product; of an all-to-all those that one rank multiplies.
        n: columns of one rank's B.
        k: columns of one rank's A.
        dtype: name of the dtype.
        label: where the shape comes from, in words.
        skip: why it is not measured; empty if it is.
        operator: what is asked for.
        halves: where memory ends, m is halved until it fits.
    """

    name: str
    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    label: str = ""
    skip: str = ""
    operator: str = OPERATOR
    halves: bool = False

    def on(self, operator: str) -> Case:
        """The same layer for another operator.

        What scatters belongs to the row-parallel layer after the column-parallel one: its n and k
        are exchanged.
        """
        if operator == self.operator:
            return self
        n, k = self.n, self.k
        if OPERATORS[operator].scatters != OPERATORS[self.operator].scatters:
            n, k = k, n
        name = f"{self.m}x{n}x{k}" if self.name == f"{self.m}x{self.n}x{self.k}" else self.name
        return replace(self, name=name, n=n, k=k, operator=operator)

    def problem(self, world: int) -> Problem:
        """The Problem on so many ranks. Rows that do not divide go to the first ranks."""
        return problem_of_sizes(self.operator, self.m, self.n, self.k, self.dtype, world)

    def memory(self, world: int) -> int:
        """Bytes that measuring takes at most on one rank.

        Counted are B; A four times, as it is given, in symmetric memory, and published in two
        slots; and the result three times. What is gathered counts four times, as the reference's, a
        collective's and in the staging of two slots, and its product once in float32, for sums.
        What is scattered counts eight times: as the collective's, as what is only copied, as a
        call's own and as the plain product, in the staging of two slots, and published in two; what
        the reference is made of counts once.
        """
        problem = self.problem(world)
        left = max(map(problem.left_rows, range(world))) * problem.k
        multiplied = max(map(problem.product_rows, range(world)))
        result = max(map(problem.out_rows, range(world)))
        right = max(map(problem.b_rows, range(world)))
        elements = right * problem.n + 4 * left + 3 * result * problem.n
        if problem.kind.scatters:
            elements += 8 * multiplied * problem.n + result * problem.k
            return elements * problem.itemsize
        elements += 4 * multiplied * problem.k
        return elements * problem.itemsize + 4 * result * problem.n

    def fitted(self, world: int, free_bytes: int) -> Case:
        """The case, or one of half, a quarter ... of its rows, which fits into so much memory."""
        smaller, parts = self, 1
        while self.halves and smaller.m >= 2 * world and smaller.memory(world) > _limit(free_bytes):
            parts *= 2
            label = f"{self.label}, m / {parts} for lack of memory"
            smaller = replace(self, m=self.m // parts, label=label)
        return smaller

    def skipped(self, world: int, free_bytes: int) -> str:
        """Why this shape is not measured with so much free memory; empty if it is."""
        if self.skip:
            return self.skip
        if self.m % world:
            return f"{self.m} rows do not divide by {world} ranks, as the collective needs"
        need = self.memory(world)
        if need > _limit(free_bytes):
            return f"needs {need / 2**30:.0f} GiB on a rank, {free_bytes / 2**30:.0f} are free"
        return ""


def _limit(free_bytes: int) -> float:
    return MEMORY_SHARE * free_bytes


def _named(*sizes: tuple[int, int, int], **more: str) -> list[Case]:
    return [Case(f"{m}x{n}x{k}", m, n, k, **more) for m, n, k in sizes]  # type: ignore[arg-type]


def measured() -> list[Case]:
    """Layers of dense models, large and small, at four ranks."""
    return _named(
        (32768, 2048, 8192),
        (8192, 7168, 8192),
        (8192, 3584, 4096),
        (18432, 7168, 4096),
        (16384, 4096, 16384),
        (8192, 2048, 32768),
        (8192, 12288, 12288),
        (16384, 13312, 16384),
    )


def small() -> list[Case]:
    """Products of less than about half a millisecond on one H200."""
    return _named(*product((2048, 4096, 8192), (1024, 2048, 4096), (4096,)))


def decode() -> list[Case]:
    """A few rows for layers of Llama 3 8B and 70B on four ranks: the products in front of attention
    and in the MLP."""
    layers = ((1536, 4096), (3584, 4096), (2560, 8192), (7168, 8192))
    return _named(*((m, n, k) for m in (128, 512, 1024) for n, k in layers))


def tiny() -> list[Case]:
    """Shapes for the CPU engine."""
    return _named((256, 64, 256), (512, 128, 256), (512, 256, 512), dtype="float32")


def unseen(count: int = 32, seed: int = 17) -> list[Case]:
    """Problems drawn from the widths of real models, which nothing is fitted to.

    Hidden sizes are k; a rank's columns are a hidden or feed-forward size, or that of queries, keys
    and values together, over 1 to 8 ranks.
    """
    hidden = (2048, 2560, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 14336, 16384, 18432, 28672)
    columns = (1280, 2048, 3072, 4096, 5120, 6144, 8192, 10240, 11008, 14336, 18432, 28672, 53248)
    dice, drawn = random.Random(seed), dict[tuple[int, int, int], None]()
    while len(drawn) < count:
        m = 512 * round(2 ** dice.uniform(0, 7))
        n = dice.choice(columns) // dice.choice((1, 2, 4, 8))
        k = dice.choice(hidden)
        if 512 <= n <= 16384 and m * n * k <= MOST_UNSEEN:
            drawn[m, n, k] = None
    return _named(*drawn)


def scenarios() -> list[Case]:
    """Table I of the FiCCO paper, as one rank of eight sees it.

    Its all-to-alls stand for all-gathers of as many bytes, which are simulated and not measured.
    """
    return [
        case
        if case.operator == OPERATOR
        else Case(
            case.name,
            PAPER_WORLD * case.m,
            case.n,
            case.k,
            case.dtype,
            case.label.partition(",")[0],
            f"is of {case.operator}: set experts",
        )
        for case in read(configs() / "scenarios.csv")
    ]


def experts() -> list[Case]:
    """The all-to-alls of that table: large experts, whose products take far longer than the rows
    travel."""
    all_scenarios = read(configs() / "scenarios.csv")
    return [
        replace(case, halves=True) for case in all_scenarios if case.operator == "all_to_all_matmul"
    ]


def experts_gain() -> list[Case]:
    """Experts whose products take about as long as their rows travel: an eighth of the hidden layer
    of a large expert, or a small one."""
    tokens, layers = (4096, 8192, 16384, 32768), ((1024, 7168), (2048, 4096), (4096, 7168))
    return _named(*((m, n, k) for m in tokens for n, k in layers), operator="all_to_all_matmul")


def weight_gradients() -> list[Case]:
    """Scenarios of the paper whose k are tokens, each as it is listed and as the gradient of a
    weight that it stands for: tokens are gathered by rows, as in the forward, and summed over."""
    both = []
    for case in scenarios():
        if case.name in ("g1", "g3", "g5", "g7"):
            label = f"{case.label}; its k are the rows that are gathered"
            sizes = (case.k, case.n, case.m, case.dtype)
            turned = Case(f"{case.name}-gradient", *sizes, label, operator=WEIGHT_GRADIENT)
            both += [case, turned]
    return both


SETS: dict[str, Callable[[], list[Case]]] = {
    "measured": measured,
    "small": small,
    "decode": decode,
    "unseen": unseen,
    "scenarios": scenarios,
    "weight-gradients": weight_gradients,
    "experts": experts,
    "experts-gain": experts_gain,
    "cpu": tiny,
}


def default_sets(operator: str, device: str) -> tuple[str, ...]:
    """The sets that are benched unless one is named."""
    if device == "cpu":
        return ("cpu",)
    return ("experts-gain", "experts") if OPERATORS[operator].blocks else ("measured",)


def read(path: Path) -> Iterable[Case]:
    """Cases from a CSV file with the columns name, m, n and k.

    Optional columns: ``dtype``; ``op``, the operator; ``parallelism`` and ``model``, which mark a
    scenario of the paper: its n, or the m of an all-to-all, is that of all ranks together, and one
    rank of eight has an eighth.

    Raises:
        ConfigError: a column is missing, a size is not a whole number above 0, or there is no such
            operator.
    """
    from ficco.bench.frames import read_text

    rows = read_text(path, ("m", "n", "k")).fillna("").to_dict("records")
    if not rows:
        raise ConfigError(str(path), "file", "required a header and one line per shape, got none")
    return [_case(path, line, row) for line, row in enumerate(rows, 2)]


def _case(path: Path, line: int, row: dict[str, str]) -> Case:
    size = partial(_size, path, line, row)
    m, n, k = size("m"), size("n"), size("k")
    operator = row.get("op") or OPERATOR
    if operator not in OPERATORS:
        wanted = f"required one of {', '.join(OPERATORS)}, got {operator!r}"
        raise ConfigError(str(path), f"line {line}, column op", wanted)
    label = ""
    if row.get("parallelism"):
        label = f"{row['parallelism']} {row.get('model') or ''}".strip()
        label += f", one rank of {PAPER_WORLD}: "
        if OPERATORS[operator].blocks:
            m //= PAPER_WORLD
            label += f"m / {PAPER_WORLD}"
        else:
            n //= PAPER_WORLD
            label += f"n / {PAPER_WORLD}"
    name = row.get("name") or f"{m}x{n}x{k}"
    return Case(name, m, n, k, row.get("dtype") or "bfloat16", label, operator=operator)


def _size(path: Path, line: int, row: dict[str, str], column: str) -> int:
    value = row[column]
    if not value.isdecimal() or int(value) < 1:
        expected = f"required a whole number above 0, got {value!r}"
        raise ConfigError(str(path), f"line {line}, column {column}", expected)
    return int(value)
