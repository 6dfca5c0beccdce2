"""Simulate layers of large models with tensor parallelism over several hosts.

python -m docs.make.hosts_layers [docs/results/hosts-simulated.md]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.make import parsed
from ficco.heuristics import decide, problem_of_sizes
from ficco.heuristics.decide import described
from ficco.heuristics.model import bounds
from ficco.machine import Machine, find
from ficco.schedules import Schedule
from ficco.simulate import predict
from ficco.tools.bench.frames import markdown

MACHINES = ("h100-8", "mi300x-8")
#: Ranks in all, and the hosts that they are on.
WORLDS = {8: 1, 16: 2, 32: 4}
TOKENS = (8192, 32768)
MODE = "queued"


@dataclass(frozen=True)
class Model:
    """A layer's sizes: of tokens, of the queries, keys and values of all heads, of the MLP."""

    name: str
    hidden: int
    qkv: int
    mlp: int

    def products(self, tokens: int, world: int) -> dict[str, tuple[str, int, int, int]]:
        """The forward products of a layer on a rank: operator, m, n, k."""
        gathers, scatters = "all_gather_matmul", "matmul_reduce_scatter"
        return {
            "qkv": (gathers, tokens, self.qkv // world, self.hidden),
            "out": (scatters, tokens, self.hidden, self.hidden // world),
            "up": (gathers, tokens, 2 * self.mlp // world, self.hidden),
            "down": (scatters, tokens, self.hidden, self.mlp // world),
        }


#: From the models' published configurations; of 405B queries have 128 heads of 128.
MODELS = (
    Model("Llama-3-70B", 8192, 8192 + 2 * 1024, 28672),
    Model("Llama-3.1-405B", 16384, 16384 + 2 * 1024, 53248),
)


@dataclass(frozen=True)
class Layer:
    """Seconds of all products of a layer: by the better serial composition of each, by what auto
    takes, and of the products alone; and what auto takes."""

    serial: float
    auto: float
    gemm: float
    taken: tuple[str, ...]


@cache
def layer(machine: Machine, model: Model, tokens: int, world: int) -> Layer:
    """The forward of one layer, simulated."""
    serial = auto = gemm = 0.0
    taken = []
    hosts = WORLDS[world]
    on = described(machine, world // hosts)
    assert on is not None
    for operator, m, n, k in model.products(tokens, world).values():
        problem = problem_of_sizes(operator, m, n, k, "bfloat16", world, None, hosts)
        chosen = decide(problem, machine=machine, mode=MODE).schedule
        both = (Schedule.parse(name) for name in ("serial", "serial:collective"))
        serial += min(predict(problem, one, on, MODE) for one in both)
        auto += predict(problem, chosen, on, MODE)
        gemm += bounds(problem, on, predict, MODE)["gemm"]
        taken.append(str(chosen))
    return Layer(serial, auto, gemm, tuple(taken))


def rows_of(machine: Machine) -> Iterator[list[str]]:
    """The lines of a machine's table."""
    for model in MODELS:
        for tokens in TOKENS:
            one = layer(machine, model, tokens, 8)
            for world, hosts in WORLDS.items():
                this = layer(machine, model, tokens, world)
                yield [
                    model.name,
                    f"{tokens}",
                    f"{world} on {hosts}",
                    f"{this.serial * 1e3:.2f}",
                    f"{this.auto * 1e3:.2f}",
                    f"{this.gemm * 1e3:.2f}",
                    f"{this.serial / this.auto:.2f}",
                    f"{one.auto / this.auto:.2f}",
                    ", ".join(f"`{name}`" for name in dict.fromkeys(this.taken)),
                ]


HEAD = ["model", "tokens", "ranks, hosts", "serial, ms", "auto, ms", "GEMMs alone, ms"]
HEAD += ["auto x serial", "x 8 ranks", "taken"]

TEXT = """# Layers over several hosts, simulated

**Nothing on this page was measured.** Times are simulated from plans and from
[h100-8](../../configs/h100-8.yaml) and [mi300x-8](../../configs/mi300x-8.yaml), whose network,
a card of 400 Gb/s for each GPU, is an assumption. Made by
`{command}`. [Several hosts](../hosts.md)
with GPUs have not been tried yet.

The four products of a layer's forward with sequence parallelism (queries, keys and values;
output; gate and up; down), host ahead, bfloat16. *Serial* is the better of the library's
collective and copies, then the product. *x 8 ranks* is how many times as fast as 8 ranks on one
host, which keep twice or four times as much of each weight.

The products of a rank shrink with the number of ranks, while what a rank receives does not.
With 8192 tokens of the smaller model a second host makes a layer {least} as fast; with 32768 of
the larger one {most} ({machine}). {lost} Data parallelism over hosts would give 2 times with
two and 4 times with four; no line here reaches that. So let tensor parallelism cross hosts
where weights or activations do not fit, or where one sequence has to be faster, and not for
throughput.
"""


def page(command: str) -> str:
    """The page."""
    machines = {name: find(name, None) for name in MACHINES}
    parts = []
    first = machines[MACHINES[0]]
    assert first is not None
    gains = [
        layer(first, model, tokens, 8).auto / layer(first, model, tokens, 16).auto
        for model, tokens in ((MODELS[0], TOKENS[0]), (MODELS[1], TOKENS[1]))
    ]
    least, most = (f"{gain:.2f} times" for gain in gains)
    where = {"command": command, "least": least, "most": most, "machine": MACHINES[0]}
    parts.append(TEXT.format(**where, lost=_lost(list(filter(None, machines.values())))))
    for name, machine in machines.items():
        assert machine is not None
        parts.append(f"## {name}\n\n{markdown(HEAD, list(rows_of(machine)))}\n")
    return "\n".join(parts)


def _lost(machines: list[Machine]) -> str:
    """Where four hosts are no faster than two."""
    cases = [
        f"{model.name} with {tokens} tokens on {machine.name}"
        for machine in machines
        for model in MODELS
        for tokens in TOKENS
        if layer(machine, model, tokens, 32).auto >= layer(machine, model, tokens, 16).auto
    ]
    return f"Four hosts are no faster than two for {', '.join(cases)}." if cases else ""


def main(path: Path) -> None:
    path.write_text(page(f"python -m docs.make.hosts_layers {path}"))
    print(f"wrote {path}")


if __name__ == "__main__":
    main(parsed(__doc__, "page", nargs="?", default="docs/results/hosts-simulated.md"))
