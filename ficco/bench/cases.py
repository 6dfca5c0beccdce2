"""The shapes that are benched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ficco.bench.rows import lines
from ficco.errors import ConfigError
from ficco.machine import configs
from ficco.problem import Problem

#: Ranks of the paper's machine. Its scenarios are benched as one of so many ranks sees them,
#: however many there are here.
PAPER_WORLD = 8

#: Largest m * n * k that is drawn: about 25 ms on one H200.
MOST_UNSEEN = 1e13

#: Part of the free memory of a device that a shape may need.
MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        name: how reports call it.
        m: rows of the gathered A.
        n: columns of one rank's B.
        k: columns of A.
        dtype: name of the dtype.
        label: where the shape comes from, in words.
        skip: why it is not measured; empty if it is.
    """

    name: str
    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    label: str = ""
    skip: str = ""

    def problem(self, world: int) -> Problem:
        """The Problem on so many ranks. Rows that do not divide go to the first ranks."""
        rows = tuple(self.m // world + (rank < self.m % world) for rank in range(world))
        return Problem("all_gather_matmul", rows, self.n, self.k, self.dtype)

    def memory(self, world: int) -> int:
        """Bytes that measuring takes at most on one rank.

        Counted are B; the gathered A four times, as the reference's, a collective's and in the
        staging of two slots; the shard four times, as it is given, in symmetric memory, and
        published in two slots; and the product three times, once more in float32 for sums.
        """
        problem = self.problem(world)
        itemsize = problem.itemsize
        a = 4 * problem.gathered_bytes + 4 * max(problem.rows) * self.k * itemsize
        return a + self.k * self.n * itemsize + self.m * self.n * (3 * itemsize + 4)

    def skipped(self, world: int, free_bytes: int) -> str:
        """Why this shape is not measured with so much free memory; empty if it is."""
        if self.skip:
            return self.skip
        if self.m % world:
            return f"{self.m} rows do not divide by {world} ranks, as the collective needs"
        need = self.memory(world)
        if need > MEMORY_SHARE * free_bytes:
            return f"needs {need / 2**30:.0f} GiB on a rank, {free_bytes / 2**30:.0f} are free"
        return ""


def measured() -> list[Case]:
    """Layers of dense models, large and small, at four ranks."""
    shapes = [
        (32768, 2048, 8192),
        (8192, 7168, 8192),
        (8192, 3584, 4096),
        (18432, 7168, 4096),
        (16384, 4096, 16384),
        (8192, 2048, 32768),
        (8192, 12288, 12288),
        (16384, 13312, 16384),
    ]
    return [Case(f"{m}x{n}x{k}", m, n, k) for m, n, k in shapes]


def small() -> list[Case]:
    """Products of less than about half a millisecond on one H200."""
    return [
        Case(f"{m}x{n}x4096", m, n, 4096) for m in (2048, 4096, 8192) for n in (1024, 2048, 4096)
    ]


def tiny() -> list[Case]:
    """Shapes for the CPU engine."""
    return [
        Case(f"{m}x{n}x{k}", m, n, k, "float32")
        for m, n, k in ((256, 64, 256), (512, 128, 256), (512, 256, 512))
    ]


def unseen(count: int = 32, seed: int = 17) -> list[Case]:
    """Problems drawn from the widths of real models, which nothing is fitted to.

    Hidden sizes are k; a rank's columns are a hidden or feed-forward size, or that of queries, keys
    and values together, over 1 to 8 ranks.
    """
    hidden = (2048, 2560, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 14336, 16384, 18432, 28672)
    columns = (1280, 2048, 3072, 4096, 5120, 6144, 8192, 10240, 11008, 14336, 18432, 28672, 53248)
    dice, found = random.Random(seed), dict[str, Case]()
    while len(found) < count:
        m = 512 * round(2 ** dice.uniform(0, 7))
        n = dice.choice(columns) // dice.choice((1, 2, 4, 8))
        k = dice.choice(hidden)
        if 512 <= n <= 16384 and m * n * k <= MOST_UNSEEN:
            found.setdefault(f"{m}x{n}x{k}", Case(f"{m}x{n}x{k}", m, n, k))
    return list(found.values())


def scenarios() -> list[Case]:
    """Table I of the FiCCO paper, as one rank of eight sees it."""
    return list(read(configs() / "scenarios.csv"))


SETS: dict[str, Callable[[], list[Case]]] = {
    "measured": measured,
    "small": small,
    "unseen": unseen,
    "scenarios": scenarios,
    "cpu": tiny,
}


def read(path: Path) -> Iterable[Case]:
    """Cases from a CSV file with the columns name, m, n and k.

    Optional columns: ``dtype``; ``op``, an operator other than all_gather_matmul being listed as
    waiting for it; ``parallelism`` and ``model``, which mark a scenario of the paper: its n is
    that of all ranks together, and one rank of eight has an eighth.

    Raises:
        ConfigError: a column is missing, or a size is not a whole number above 0.
    """
    rows = lines(path, ("m", "n", "k"))
    if not rows:
        raise ConfigError(str(path), "file", "required a header and one line per shape, got none")
    return [_case(path, line, row) for line, row in enumerate(rows, 2)]


def _case(path: Path, line: int, row: dict[str, str]) -> Case:
    size = partial(_size, path, line, row)
    m, n, k = size("m"), size("n"), size("k")
    op = row.get("op") or "all_gather_matmul"
    label, skip = "", ""
    if row.get("parallelism"):
        label = f"{row['parallelism']} {row.get('model') or ''}".strip()
        if op == "all_gather_matmul":
            n //= PAPER_WORLD
            label += f", one rank of {PAPER_WORLD}: n / {PAPER_WORLD}"
    if op != "all_gather_matmul":
        skip = f"waits for {op}"
    name = row.get("name") or f"{m}x{n}x{k}"
    return Case(name, m, n, k, row.get("dtype") or "bfloat16", label, skip)


def _size(path: Path, line: int, row: dict[str, str], column: str) -> int:
    value = row.get(column)
    if value is None or not value.isdigit() or int(value) < 1:
        expected = f"required a whole number above 0, got {value!r}"
        raise ConfigError(str(path), f"line {line}, column {column}", expected)
    return int(value)
