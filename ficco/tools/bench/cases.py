"""The shapes that are benched, and the settings of a bench."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ficco.errors import ConfigError
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.scaling import SCALED
from ficco.problems.specification import ITEMSIZES
from ficco.tools.baselines import COPY_ENGINES, PRODUCT

#: Ranks of the paper's machine. Each scenario is benched with the sizes that one of these ranks
#: has, on any number of ranks.
PAPER_WORLD = 8

#: Part of the free memory of a device that a shape may need.
MEMORY_SHARE = 0.9

#: The operator that is benched unless another is named.
OPERATOR = "all_gather_matmul"

#: Baselines that can be left out: no figure of the others needs them.
OPTIONAL = (
    *("pytorch-pieces", "pytorch-fused", "pytorch-native", "quack"),
    *(PRODUCT, *COPY_ENGINES),
    *("pytorch-one-shot", "pytorch-two-shot"),
)

#: The operator that gives the gradient of its B.
WEIGHT_GRADIENT = "all_gather_transposed_matmul"


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The rank that is replayed, and when rows of its peers arrive.

    Attributes:
        world: ranks of the group that is played.
        machine: name or path of the machine that says how ranks are joined; None: that of the GPU.
            Peers are GPUs like this one, if any machine has such GPUs.
        products: measures what products take here, in place of the machine's, from a stopwatch and
            the machine.
    """

    world: int
    rank: int = 0
    machine: str | None = None
    products: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of a bench.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        csv: the file that rows are appended to, case by case.
        command: the command line, for the description of the figures.
        subject: a :class:`ficco.tools.bench.harness.Subject`.
        cases: cases of the subject.
        rounds: limit for each case. ``seconds``: for all cases together.
        schedules: of ficco's variants, empty for those of the subject; candidates of products.
        timelines: the first case is traced and drawn.
        seed: of the order and the operands.
        quiet: print no table of each case.
        replayed: the rank that is replayed; None where all ranks run.
    """

    device: str
    rounds: int = 25
    seconds: float = 300.0
    csv: Path
    command: str = ""
    subject: Any
    cases: tuple[Any, ...]
    modes: tuple[str, ...]
    schedules: tuple[Any, ...] = ()
    timelines: bool = False
    quiet: bool = False
    seed: int = 0
    replayed: Replayed | None = None


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        name: how reports call it.
        m: rows of the product; of an all-to-all those that one rank multiplies.
        n: columns of one rank's B.
        k: columns of one rank's A.
        dtype: name of the dtype, or of a kind of float8 operands
        (``ficco.problems.scaling.SCALED``). label: where the shape comes from, in words.
        skip: why it is not measured; empty if it is.
        operator: what is asked for.
        halves: where memory ends, m is halved until it fits.
        rows: rows of each rank, or the table of an all-to-all; empty: as equal as can be.
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
    rows: tuple[Any, ...] = ()

    def on(self, operator: str) -> Case:
        """The same layer for another operator.

        A scattering operator belongs to the row-parallel layer after the column-parallel one, so
        that n and k are exchanged.
        """
        if operator == self.operator:
            return self
        n, k = self.n, self.k
        if OPERATORS[operator].scatters != OPERATORS[self.operator].scatters:
            n, k = k, n
        name = f"{self.m}x{n}x{k}" if self.name == f"{self.m}x{self.n}x{self.k}" else self.name
        return replace(self, name=name, n=n, k=k, operator=operator)

    def problem(self, world: int) -> Problem:
        """The Problem for ``world`` ranks. Rows that do not divide go to the first ranks."""
        from ficco.heuristics import problem_of_sizes

        sizes = self.m, self.n, self.k, self.dtype
        return problem_of_sizes(self.operator, *sizes, world, self.rows or None)

    def memory(self, world: int) -> int:
        """Upper bound of the bytes that a measurement needs on one rank.

        B counts once; A four times: the operand, the operand in symmetric memory, and two published
        slots; the result three times. Gathered rows count four times: the reference, a collective,
        and staging of two slots. Their product counts once in float32, for sums. Scattered rows
        count eight times: a collective, plain copies, a call's product, the plain product, staging
        of two slots, and two published slots. The operand of the reference counts once. Operands of
        float8 count once more in float32 and in the result's dtype.
        """
        problem = self.problem(world)
        left = max(map(problem.left_rows, range(world))) * problem.k
        multiplied = max(map(problem.product_rows, range(world)))
        result = max(map(problem.out_rows, range(world)))
        right = max(map(problem.b_rows, range(world)))
        elements, results = right * problem.n + 4 * left, 3 * result * problem.n
        wide = 4 * result * problem.n
        if problem.kind.scatters:
            elements, results = elements + result * problem.k, results + 8 * multiplied * problem.n
            wide = 0
        else:
            elements += 4 * multiplied * problem.k
        if problem.scaling:
            wide += 6 * max(multiplied * problem.k, right * problem.n)
        return elements * problem.itemsize + results * ITEMSIZES[problem.out_dtype] + wide

    def fitted(self, world: int, free_bytes: int) -> Case:
        """The case, or one of half, a quarter ... of its rows, which fits into so much memory."""
        smaller, parts, limit = self, 1, MEMORY_SHARE * free_bytes
        while self.halves and smaller.m >= 2 * world and smaller.memory(world) > limit:
            parts *= 2
            label = f"{self.label}, m / {parts} for lack of memory"
            smaller = replace(self, m=self.m // parts, label=label)
        return smaller

    def skipped(self, world: int, free_bytes: int) -> str:
        """Why this shape is not measured with so much free memory; empty if it is."""
        if self.skip:
            return self.skip
        try:
            self.problem(world)
        except (ValueError, NotImplementedError) as error:  # sizes that float8 operands cannot have
            return str(error)
        if self.m % world and not self.rows:
            return f"{self.m} rows do not divide by {world} ranks, as the collective needs"
        need = self.memory(world)
        if need > MEMORY_SHARE * free_bytes:
            return f"needs {need / 2**30:.0f} GiB on a rank, {free_bytes / 2**30:.0f} are free"
        return ""


def scenarios() -> list[Case]:
    """Table I of the FiCCO paper, as one rank of eight sees it.

    Its all-to-alls stand for all-gathers of as many bytes, which are simulated and not measured.
    """
    return [
        case
        if case.operator == OPERATOR
        else replace(
            case,
            m=PAPER_WORLD * case.m,
            operator=OPERATOR,
            label=case.label.partition(",")[0],
            skip=f"is of {case.operator}: set experts",
        )
        for case in _of_configs("scenarios.csv")
    ]


def experts() -> list[Case]:
    """The all-to-alls of that table: large experts, whose products take far longer than the rows
    travel."""
    every = _of_configs("scenarios.csv")
    return [replace(case, halves=True) for case in every if OPERATORS[case.operator].blocks]


def weight_gradients() -> list[Case]:
    """Scenarios of the paper whose k are tokens, each as it is listed and as the gradient of a
    weight that it stands for: tokens are gathered by rows, as in the forward, and summed over."""
    both = []
    for case in (case for case in scenarios() if case.name in ("g1", "g3", "g5", "g7")):
        label = f"{case.label}; its k are the rows that are gathered"
        changes = {"name": f"{case.name}-gradient", "label": label, "operator": WEIGHT_GRADIENT}
        both += [case, replace(case, m=case.k, k=case.m, **changes)]
    return both


#: Names of dtypes and of kinds of operands that shapes can be measured in.
DTYPES = ("bfloat16", "float16", "float32", *SCALED)


def of_dtypes(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Shapes in each of the dtypes ``names``, or in their own dtype without names. Several dtypes
    are appended to the names of the shapes."""
    if not names:
        return list(cases)
    return [
        replace(case, dtype=name, name=case.name if len(names) == 1 else f"{case.name} {name}")
        for name in names
        for case in cases
    ]


def _of_configs(file: str, only: str = "") -> list[Case]:
    """Cases of a file that ships with ficco."""
    from ficco.machine import configs

    return read(configs() / file, only)


def _shipped(name: str) -> tuple[str, Callable[[], list[Case]]]:
    return name, lambda: _of_configs("shapes.csv", name)


#: By name: layers of dense models, large and small, at four ranks; products of less than about half
#: a millisecond on one H200; a few rows for layers of Llama 3 8B and 70B; few to many rows behind
#: which sums return to all ranks; problems drawn at random from the widths of real models, of at
#: most about 25 ms, which nothing is fitted to; the paper's; experts whose products take about as
#: long as their rows travel; fifteen of the first sets, mostly short ones, for products whose tiles
#: wait; shapes for the CPU engine.
SETS: dict[str, Callable[[], list[Case]]] = {
    **dict(map(_shipped, ("measured", "small", "decode", "sums", "unseen"))),
    "scenarios": scenarios,
    "weight-gradients": weight_gradients,
    "experts": experts,
    **dict(map(_shipped, ("experts-gain", "waiting", "cpu"))),
}


def default_sets(operator: str, device: str) -> tuple[str, ...]:
    """The sets that are benched unless one is named."""
    if device == "cpu":
        return ("cpu",)
    return ("experts-gain", "experts") if OPERATORS[operator].blocks else ("measured",)


def read(path: Path, only: str = "") -> list[Case]:
    """Cases from a CSV file with the columns name, m, n and k.

    Optional columns: ``dtype``; ``op``, the operator; ``parallelism`` and ``model``, which mark a
    scenario of the paper: its n, or the m of an all-to-all, is that of all ranks together, and one
    rank of eight has an eighth; ``set``: ``only`` takes the lines of one set.

    Raises:
        ConfigError: a column is missing, a size is not a whole number above 0, there is no such
            operator, or shapes of an operator share a name.
    """
    from ficco.tools.bench.frames import read_text

    rows = read_text(path, ("m", "n", "k")).fillna("").to_dict("records")
    if not rows:
        raise ConfigError(str(path), "file", "required a header and one line per shape, got none")
    lines = enumerate(rows, 2)
    read = [_case(path, line, row) for line, row in lines if not only or row["set"] == only]
    for (name, operator), number in Counter((one.name, one.operator) for one in read).items():
        if number > 1:  # their times would be taken for those of one shape
            wanted = f"required another name for each shape of {operator}, got {name!r} {number}"
            raise ConfigError(str(path), "column name", f"{wanted} times")
    return read


def _case(path: Path, line: int, row: dict[str, str]) -> Case:
    for column in ("m", "n", "k"):
        if not row[column].isdecimal() or int(row[column]) < 1:
            wanted = f"required a whole number above 0, got {row[column]!r}"
            raise ConfigError(str(path), f"line {line}, column {column}", wanted)
    m, n, k = (int(row[column]) for column in ("m", "n", "k"))
    operator = row.get("op") or OPERATOR
    if operator not in OPERATORS:
        wanted = f"required one of {', '.join(OPERATORS)}, got {operator!r}"
        raise ConfigError(str(path), f"line {line}, column op", wanted)
    label = ""
    if row.get("parallelism"):
        blocks = OPERATORS[operator].blocks
        m, n = (m // PAPER_WORLD, n) if blocks else (m, n // PAPER_WORLD)
        label = f"{row['parallelism']} {row.get('model') or ''}".strip()
        label += f", one rank of {PAPER_WORLD}: {'m' if blocks else 'n'} / {PAPER_WORLD}"
    name = row.get("name") or f"{m}x{n}x{k}"
    return Case(name, m, n, k, row.get("dtype") or "bfloat16", label, operator=operator)
