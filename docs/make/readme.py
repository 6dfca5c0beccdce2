"""Write the tables of results: of README.md, and of docs/results/README.md.

python -m docs.make.readme

README.md has the claims of CLAIMS, docs/results/README.md a line per operator and mode of BENCHES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.fsdp import BASELINE, STEPS
from benchmarks.transformers_step import ROWS
from docs.make import parsed
from ficco.errors import ConfigError
from ficco.tools.bench.frames import (
    ATTENTION,
    BENCH,
    EXPERTS,
    Schema,
    markdown,
    read_description,
)
from ficco.tools.bench.report import (
    HINDSIGHT,
    MODE_WORDS,
    RATIOS,
    by_operator,
    geomean,
    lines,
    modes,
)

DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS / "results"

#: A bench in a table of several: its rows, the description of the machine, a link to its report.
Results = tuple[pd.DataFrame, dict[str, Any], str]

#: The benches of the table of docs/results/README.md.
BENCHES = (
    "measured-h200-4-1130",
    "measured-h200-4",
    "reduce-scatter-h200-4",
    "all-reduce-h200-4",
    "all-to-all-h200-4",
    "unseen-h200-2-1130",
    "measured-h200-2-1130",
    "reduce-scatter-h200-2-1130",
    "measured-h200-2",
    "measured-h100-2",
)

MEANS = "Geometric mean over the shapes, and the worst shape."


Gains = Callable[[pd.DataFrame], pd.Series]


class Claim(NamedTuple):
    """A line of README's table.

    Attributes:
        workload, baseline: in words.
        bench: its result file, without the suffix.
        schema: the kind of that file.
        gains: of the rows of the file, how many times as fast as the baseline each shape is.
    """

    workload: str
    baseline: str
    bench: str
    schema: Schema
    gains: Gains


def _ways(ours: str, baseline: str, operator: str = "") -> Gains:
    """Gains of the fastest way that matches ``ours`` over the fastest that matches ``baseline``."""

    def gains(rows: pd.DataFrame) -> pd.Series:
        rows = rows[rows["status"].eq("ok") & rows["mode"].eq("queued")]
        rows = rows[rows["operator"].eq(operator)] if operator else rows
        fastest = [
            rows[rows["way"].str.match(way)].groupby("case")["ms"].min() for way in (ours, baseline)
        ]
        return fastest[1] / fastest[0]

    return gains


def _step(rows: pd.DataFrame) -> pd.Series:
    """Gains of a training step, the first case, with ficco's plan over Transformers' own: of each
    run."""
    steps = rows[rows["case"] == rows["case"].iloc[0]]
    times = steps.pivot(index="commit", columns="way", values="ms")
    return times["stock"] / times["ficco"]


def _fsdp(column: str) -> Gains:
    """Gains of FSDP2's step of 2,048 tokens with ficco's collectives: of each run, the median over
    its rounds. ``column``: has the times."""

    def gains(rows: pd.DataFrame) -> pd.Series:
        rows = rows[rows["tokens"].eq(2048)].dropna(subset=column)
        times = rows.pivot(index=["commit", "round"], columns="variant", values=column)
        return (times[BASELINE] / times["both"]).groupby("commit").median()

    return gains


def _auto(mode: str, ratio: str) -> Gains:
    """Gains of ``auto`` in a mode: the column ``speedup`` or ``vs_pytorch``."""
    return lambda rows: lines(rows, mode)["auto", ratio].dropna()


#: The lines of README's table: reasons to switch first. Each is of ``auto``.
CLAIMS = (
    Claim(
        "MoE layer of 64 experts, blocks of one capacity",
        "NCCL all-to-alls, then batched GEMMs",
        "experts-h100-2",
        EXPERTS,
        _ways("(ficco|auto)$", "collectives, blocks"),
    ),
    Claim(
        "the same layer, exact rows",
        "NCCL all-to-alls, then `grouped_mm`",
        "experts-h100-2",
        EXPERTS,
        _ways("ficco, exact rows", "collectives, exact rows"),
    ),
    Claim(
        "causal attention, 16384 positions",
        "NCCL all-gather, then cuDNN",
        "attention-h100-2",
        ATTENTION,
        _ways("(ficco|auto)$", "all-gather, attention", "all_gather_attention"),
    ),
    Claim(
        "training step of a Llama, four layers",
        "Transformers' tensor parallelism",
        "transformers-h200-2",
        ROWS,
        _step,
    ),
    Claim(
        "FSDP2 training step of six Llama-8B blocks, 2,048 tokens",
        "FSDP2 with NCCL",
        "fsdp-h200-2",
        STEPS,
        _fsdp("queued_ms"),
    ),
    Claim(
        "the same step, the GPU waits for the host",
        "FSDP2 with NCCL",
        "fsdp-h200-2",
        STEPS,
        _fsdp("ms"),
    ),
    Claim(
        "rowwise float8 all-gather + GEMM, 8 shapes",
        "PyTorch Async TP",
        "fp8-row-h100-2",
        BENCH,
        _auto("queued", "vs_pytorch"),
    ),
    Claim(
        "bfloat16 all-gather + GEMM, 29 shapes that nothing was fitted to",
        "NCCL or copy engines, then cuBLAS",
        "unseen-h200-2-1130",
        BENCH,
        _auto("queued", "speedup"),
    ),
    Claim(
        "the same shapes, the GPU waits for the host",
        "NCCL or copy engines, then cuBLAS",
        "unseen-h200-2-1130",
        BENCH,
        _auto("idle", "speedup"),
    ),
    Claim(
        "the same shapes, the host runs ahead",
        "PyTorch Async TP",
        "unseen-h200-2-1130",
        BENCH,
        _auto("queued", "vs_pytorch"),
    ),
    Claim(
        "bfloat16 all-gather + GEMM, 8 shapes",
        "NCCL or copy engines, then cuBLAS",
        "measured-h200-4",
        BENCH,
        _auto("queued", "speedup"),
    ),
)


def claims() -> str:
    """README's table: a line per claim, with the geometric mean of its gains and the smallest."""
    body = []
    for claim in CLAIMS:
        path = RESULTS / f"{claim.bench}.csv"
        gains = claim.gains(claim.schema.read(path))
        worst = f" ({gains.min():.2f})" if len(gains) > 1 else ""
        times = f"**{geomean(gains):.2f}**{worst}"
        place = _place(read_description(path), f"docs/results/{claim.bench}.md")
        body.append((claim.workload, claim.baseline, times, place))
    return markdown(("workload", "baseline", "times as fast (worst)", "measured on"), body)


def whole_table(benches: Sequence[Results]) -> str:
    """Ratios of the fastest schedules and of ``auto``: a line for each operator and mode of each
    bench."""
    heads = ("measured on", "operator", "mode", "shapes", *RATIOS.values())
    of_auto = [f"`auto`: {name}" for name in RATIOS.values()]
    body, seen = [], set()
    for place, operator, mine in _operators(benches):
        for mode in modes(mine):
            if mode != "graph":
                shapes = lines(mine, mode)
                seen.add(mode)
                reached = [*_reached(shapes["best"]), *_reached(shapes["auto"])]
                body.append((place, f"`{operator}`", mode, len(shapes), *reached))
    words = "; ".join(f"*{mode}*: {text}" for mode, text in MODE_WORDS.items() if mode in seen)
    return f"{MEANS} {words}. {HINDSIGHT}\n\n" + markdown((*heads, *of_auto), body)


def _operators(benches: Sequence[Results]) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Where each operator of each bench was measured, as a link, its name, and its rows."""
    for rows, about, link in benches:
        for operator, mine in by_operator(rows):
            yield _place(about, link), operator, mine


def _place(about: Mapping[str, Any], link: str) -> str:
    """Ranks, device and date of a bench, as a link to its report."""
    where = f"{about.get('ranks', '?')} x {about.get('device', 'an unnamed machine')}"
    date = str(about.get("date", "")).split(" ")[0]
    return f"[{where}, {date}]({link})"


def _reached(role: pd.DataFrame) -> list[str]:
    """The ratios of a role over several shapes: their mean, and the worst."""
    both = [(geomean(role[name]), role[name].min()) for name in RATIOS]
    return ["" if pd.isna(mean) else f"{mean:.2f} ({worst:.2f})" for mean, worst in both]


def put_between(path: Path, name: str, text: str) -> None:
    """Replace what stands between the two markers of a name in a Markdown file.

    Raises:
        ConfigError: it does not have both markers, in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    try:
        whole = path.read_text()
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be read: {error.strerror}") from None
    start, stop = whole.find(begin), whole.find(end)
    if start < 0 or stop < start:
        raise ConfigError(str(path), "markers", f"required {begin} and then {end}")
    path.write_text(f"{whole[: start + len(begin)]}\n{text}\n{whole[stop:]}")


def tables() -> dict[str, str]:
    """The tables by the page that has them, from docs/."""
    files = [(RESULTS / f"{name}.csv", f"{name}.md") for name in BENCHES]
    benches = [(BENCH.read(csv), read_description(csv), link) for csv, link in files]
    return {"../README.md": claims(), "results/README.md": whole_table(benches)}


def main() -> None:
    for page, table in tables().items():
        put_between(DOCS / page, "results", table)
        print(f"wrote {DOCS / page}")


if __name__ == "__main__":
    parsed(__doc__)
    main()
