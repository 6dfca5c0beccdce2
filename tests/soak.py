"""Soak: jittered calls of all operators, schedules and dtypes, each result compared: `make soak`.

    python tests/soak.py --seconds 300 --ranks 2 4 --seed 7

A round opens two groups, draws cases, and makes calls of them in a random order. All ranks draw the
same calls. Each rank draws its own sleeps, before calls and between the steps of a lane. The number
of the latest call begins near its maximum, so that it soon wraps on the board. On GPUs
(``--device cuda``) calls are on three streams, lanes sleep before calls, and graphs are replayed
between calls in three orders: the order of capture, reversed, shuffled. With
``FICCO_TESTS_RANKS_PER_GPU=4`` four ranks share a GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import secrets
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ranks
import subjects
import torch
import torch.distributed as dist
from disturbance import VERBS, Disturbance, disturb
from ranks import Died, Escaped, Rank
from subjects import SUBJECTS, Case, Subject, Tensors

import ficco
from ficco.dma.gpu import GpuEngine
from ficco.problems.products import OPERATORS
from ficco.runtime.board import _NUMBERS as NUMBERS
from ficco.runtime.workspace import workspace_of, workspaces

#: Cases of a round, and sets of operands of each.
CASES, VARIANTS = 24, 8
#: Calls of a round, and results that are compared only after later calls.
CALLS, KEPT = {"cpu": 2000, "cuda": 1000}, {"cpu": 4, "cuda": 64}
#: Graphs of a round on GPUs, and calls between replays of all graphs.
GRAPHS, REPLAYED_EVERY = 4, 20
#: Shares of calls that a rank begins late, of calls with delayed steps, and of their delayed steps.
LATE, DELAYED, STEPS = 0.05, 0.05, 0.3
#: The longest sleep in seconds, and about as long in cycles of torch.cuda._sleep.
SLEEP_S, CYCLES = 0.001, 1_800_000
#: Seconds that a call waits for a peer. Limit for a rank to finish as many calls or to prepare
#: a case; then it prints its stacks and ends. Rounds have no limit: machines are busy.
TIMEOUT_S, STUCK_S, WATCHED_CALLS, ROUND_S = 60.0, 300.0, 64, 86_400.0
#: Seconds between lines of progress.
PROGRESS_S = 10.0
#: A cap on symmetric memory that serves all cases with one slot. Under the smaller caps, calls run
#: by rings or by columns, or are refused.
CAP, SMALL_CAPS = 1 << 22, (1 << 11, 1 << 12, 1 << 13)
#: Share of cases with a cap, of cases with the left operand in symmetric memory, of cases that keep
#: gathered rows, and of cases with gradients.
SHARE = 0.3
#: Key of the number of calls, including calls of backwards and of rounds of experts.
MADE = "calls"


@dataclass(frozen=True)
class Round:
    """Work of the ranks in one round, which follows from the seed and the round's number."""

    seed: int
    number: int
    calls: int

    def generator(self, of: object = "all ranks") -> random.Random:
        return random.Random(f"{self.seed} {self.number} {of}")


class Arriving(Subject):
    """``ficco.arriving``: rows arrive for the caller, who copies them piece by piece."""

    name, operands, differentiable = "arriving", ("a_shard",), False
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"pieces": 1},
        {"pieces": 3, "order": "piece"},
        {"pieces": (3, 1), "pull": True},
    )

    def schedules(self, world: int, hosts: int = 1, tiled: bool = False) -> list[str]:
        return ["tiled"]

    def case(self, chance: random.Random, world: int, kind: str, engine: str) -> Case:
        rows = subjects.per_rank(kind, world)
        return Case(rows, (chance.choice((1, 8, 24)),), facts=chance.choice(self.ways))

    def make(self, case: Case, rank: int, iteration: int) -> Tensors:
        return [subjects.integers(9, rank, iteration, shape=(case.rows[rank], case.sizes[0]))]

    def together(self, case: Case, by_rank: Sequence[Tensors], iteration: int) -> list[Tensors]:
        return [[torch.cat([shard for (shard,) in by_rank])] for _ in by_rank]

    def call(self, case: Case, operands: Tensors, constants: Tensors, **where: Any) -> Tensors:
        with ficco.arriving(*operands, rows=case.rows, **case.facts, **where) as arriving:
            copied = torch.zeros_like(arriving.buffer)
            for first, last in arriving:
                copied[first:last] = arriving.buffer[first:last]
        return [copied]


#: Subjects of the calls; all are drawn equally often.
DRAWN: dict[str, Subject] = {**SUBJECTS, "arriving": Arriving()}


@dataclass(frozen=True)
class SoakCase:
    """One kind of call of a subject, in the group of a number. The left operand may be in symmetric
    memory, memory may have a cap in bytes, and the gathered operand may be kept for gradients."""

    name: str
    case: Case
    group: int
    symmetric: bool
    cap: int | None
    keeps: bool

    @property
    def subject(self) -> Subject:
        return DRAWN[self.name]

    def call(self, variant: Variant, operands: Tensors, group: Any) -> Tensors:
        """Results of one call and, if operands need gradients, the gradients."""
        subject, case = self.subject, self.case
        for operand, need in zip(operands, case.needs, strict=False):
            operand.requires_grad_(need)
        with ficco.options(workspace_bytes=self.cap, save_gathered=self.keeps):
            tensors = subject.laid_out(case, operands), variant.constants
            results = subject.call(case, *tensors, group=group)
            numbers = [number for number, result in enumerate(results) if result.requires_grad]
            if numbers:
                grads = [variant.grads[number] for number in numbers]
                torch.autograd.backward([results[number] for number in numbers], grads)
        needed = (operand.grad for operand in operands if operand.requires_grad)
        return [*(one.detach() for one in results), *(grad for grad in needed if grad is not None)]


@dataclass
class Variant:
    """Operands of a call on a rank, and gradients of its results. ``wanted``: results, then
    gradients of the operands that need them. ``size``: the magnitude of gradients."""

    operands: Tensors
    constants: Tensors
    grads: Tensors
    wanted: Tensors
    size: float


def draw(chance: random.Random, group: int, world: int, device: str) -> SoakCase:
    """Any case of a group of ``world`` ranks."""
    name = chance.choice([*DRAWN])
    subject = DRAWN[name]
    case = subject.case(chance, world, chance.choice(subjects.KINDS[:3]), device)
    needs = tuple(chance.random() < 0.5 for _ in subject.operands)
    differentiates = subject.differentiable and chance.random() < SHARE
    case = case.on(
        schedule=chance.choice(subject.schedules(world, tiled=device == "cpu")),
        dtype=chance.choice(subject.dtypes(device)),
        layout=chance.choice(("", *subject.layouts)),
        needs=needs if differentiates else (False,) * len(needs),
    )
    travels = name in OPERATORS and not OPERATORS[name].scatters and case.layout == ""
    symmetric, capped, keeps = (chance.random() < SHARE for _ in range(3))
    cap = chance.choice((CAP, *SMALL_CAPS)) if capped else None
    return SoakCase(name, case, group, symmetric and travels and not differentiates, cap, keeps)


def variant(soaked: SoakCase, at: Rank, iteration: int) -> Variant:
    """A variant on the device of a rank of the case's group."""
    subject, case = soaked.subject, soaked.case
    operands_of, results, grads = subjects.reference(subject, case, at.world, iteration)
    dtype, result_dtype = (getattr(torch, name) for name in (case.dtype, subject.result(case)))
    own = operands_of[at.rank]
    operands = [operand.detach().to(at.device, dtype) for operand in own]
    constants = [one.to(at.device) for one in subject.constants(case, at.rank, iteration)]
    wanted = [result.detach() for result in results[at.rank]]
    for operand, need in zip(own, case.needs, strict=True):
        if need:
            wanted.append(torch.zeros_like(operand) if operand.grad is None else operand.grad)
    size = max((subjects.root_mean_square(grad) for grad in grads[at.rank]), default=0.0)
    result_grads = [grad.to(at.device, result_dtype) for grad in grads[at.rank]]
    return Variant(operands, constants, result_grads, wanted, size)


@dataclass(eq=False)
class Kind:
    """A case on a rank, without variants if the rank is not in the group. ``symmetric``: memory of
    the left operand. ``graph``: a captured call of ``operands`` with ``results``, replayed on the
    ``stream`` that captured it: products that one stream captured share a workspace of cuBLAS, so
    their graphs may not overlap (pytorch/pytorch#193402). ``refused``: number of calls that did not
    fit under the cap and were repeated without it."""

    case: SoakCase
    group: Any
    variants: list[Variant] = field(default_factory=list)
    symmetric: torch.Tensor | None = None
    graph: Any = None
    stream: Any = None
    operands: Tensors = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    refused: int = 0

    def call(self, index: int) -> list[torch.Tensor]:
        """Results for a variant. The call reads a copy of the operands, which is then erased."""
        chosen, operands = self.variants[index], self.operands
        if self.graph is not None:
            for operand, new in zip(operands, chosen.operands + chosen.constants, strict=True):
                operand.copy_(new)
            self.graph.replay()
            results = [result.clone() for result in self.results]
        else:
            operands = [operand.clone() for operand in chosen.operands]
            if self.symmetric is not None:
                operands[0] = self.symmetric[: len(operands[0])].copy_(operands[0])
            try:
                results = self.case.call(chosen, operands, self.group)
            except ValueError as error:  # on all ranks
                if "workspace_bytes: required" not in str(error):
                    raise
                self.refused += 1
                results = replace(self.case, cap=None).call(chosen, operands, self.group)
        for operand in operands:
            operand.detach().zero_()
        return results

    def capture(self) -> None:
        first = self.variants[0]
        operands, constants = (
            [one.clone() for one in tensors] for tensors in (first.operands, first.constants)
        )
        self.operands = operands + constants
        graph, still = torch.cuda.CUDAGraph(), replace(first, constants=constants)
        with torch.cuda.graph(graph, stream=self.stream):
            self.results = self.case.call(still, operands, self.group)
        self.graph = graph


class Done(NamedTuple):
    """A finished call: its number in the round, kind, variant and results."""

    number: int
    kind: Kind
    chosen: int
    results: Sequence[torch.Tensor] = ()

    def where(self, at: Rank, task: Round) -> str:
        action = "replay" if self.kind.graph else "call"
        place = f"rank {at.rank} of {at.world}, round {task.number}, {action} {self.number}"
        return f"{place}, variant {self.chosen} of {self.kind.case}"

    def verify(self, at: Rank, task: Round) -> None:
        """Fail unless all elements are as expected."""
        chosen, subject = self.kind.variants[self.chosen], self.kind.case.subject
        for which, (result, expected) in enumerate(zip(self.results, chosen.wanted, strict=True)):
            about = f"{self.where(at, task)}: result {which}"
            subjects.compare(result, expected, subject, about, chosen.size)


def of_rank(at: Rank, task: Round) -> Counter[str]:
    """Run a round on one rank; count its calls by operator, and its replays."""
    try:
        with ficco.options(timeout_s=TIMEOUT_S, on_timeout="raise"), groups(at, task) as opened:
            kinds = drawn(at, task, opened)
            graphs = captured(at, kinds) if at.device.type == "cuda" else []
            before = sum(workspace.calls for workspace in workspaces())
            with ficco.options(replay=task.number % 2 == 0):
                try:
                    counts = calls(at, task, kinds, graphs)
                except BaseException as error:
                    for workspace in workspaces():  # otherwise the peers wait for this rank
                        workspace.fail(error)
                    raise
            counts[MADE] = sum(one.calls for one in workspaces()) - before
            counts["groups whose numbers wrapped"] = sum(w.calls >= NUMBERS for w in workspaces())
            for kind in graphs:  # NCCL does not destroy a group that a graph holds
                kind.graph = None
            watch()
            return counts
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def groups(at: Rank, task: Round) -> Iterator[list[Any]]:
    """Groups of all ranks, and of all but the first of more than two; call numbers wrap soon."""
    members = range(at.world > 2, at.world)
    opened = [dist.group.WORLD, dist.new_group([*members])]
    before_wrap = task.generator("number").randrange(20, 30 + task.calls // 4)
    for group in opened[: 1 + (at.rank in members)]:
        dist.barrier(group)
        workspace = workspace_of(group, torch.empty(0, device=at.device).device)
        workspace.board._rings[workspace.board.rank][:] = 0  # the entry of call 0
        workspace.calls = NUMBERS - before_wrap
    settle(at)
    yield opened
    settle(at)
    ficco.close()
    dist.barrier()
    if at.rank in members:
        dist.destroy_process_group(opened[1])


def settle(at: Rank) -> None:
    """Wait for all ranks and for idle devices."""
    if at.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def watch() -> None:
    """End this process unless this function is called again in time."""
    faulthandler.dump_traceback_later(STUCK_S, exit=True)


def drawn(at: Rank, task: Round, opened: Sequence[Any]) -> list[Kind]:
    """The cases of a round, alternately of both groups."""
    chance, kinds, device = task.generator(), [], at.device.type
    on_gpu = device == "cuda"
    for number in range(CASES):
        watch()
        second = number % 2
        world = at.world - (second and at.world > 2)
        case = draw(chance, second, world, device)
        while on_gpu and (by_gloo(case) or (second and may_spin(case))):
            case = draw(chance, second, world, device)
        kind = Kind(case, opened[second])
        kinds.append(kind)
        if (rank := at.rank - (at.world - world)) < 0:
            continue
        first = VARIANTS * (CASES * task.number + number)
        member = replace(at, rank=rank, world=world)
        kind.variants = [variant(case, member, first + i) for i in range(VARIANTS)]
        if case.symmetric:
            a, rows = kind.variants[0].operands[0], case.case.rows
            most = max(sum(each) if isinstance(each, tuple) else each for each in rows)
            how: dict[str, Any] = {"group": kind.group, "device": at.device}
            kind.symmetric = ficco.empty((most, a.shape[1]), dtype=a.dtype, **how)
    return kinds


def by_gloo(case: SoakCase) -> bool:
    """Whether a call may run a collective of gloo, the backend of ranks that share GPUs."""
    return dist.get_backend() == "gloo" and case.case.schedule in ("auto", "serial:collective")


def may_spin(case: SoakCase) -> bool:
    """Whether blocks of a call may wait for peers on a GPU. A GPU runs few such blocks at once, so
    only eager calls of one group use them."""
    return any(part in case.case.schedule for part in ("auto", "-shot", "kernel"))


def captured(at: Rank, kinds: Sequence[Kind]) -> list[Kind]:
    """Graphs of the first cases that can be captured."""

    def can(case: SoakCase) -> bool:
        waits = case.subject.traceable(case.case) != case.case  # for counts of peers
        return not (any(case.case.needs) or case.cap or waits or may_spin(case))

    graphs = [replace(kind, symmetric=None) for kind in kinds if can(kind.case)][:GRAPHS]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for number, kind in enumerate(graphs):
        kind.stream = streams[number % 3]
        watch()
        if kind.variants:
            for _ in range(3):
                kind.call(0)
        settle(at)
        if kind.variants:
            kind.capture()
    return graphs


def calls(at: Rank, task: Round, kinds: Sequence[Kind], graphs: Sequence[Kind]) -> Counter[str]:
    """Make the calls of a round, out of step with the other ranks, and compare their results."""
    chance, local = task.generator("calls"), task.generator(at.rank)
    jitter = Disturbance(SLEEP_S, seed=task.seed + task.number, verbs=VERBS, share=STEPS)
    on_gpu, pending, counts = at.device.type == "cuda", deque[Done](), Counter[str]()
    streams = [torch.cuda.Stream() for _ in range(3)] if on_gpu else []

    def make(number: int, which: int, kind: Kind) -> None:
        index = chance.randrange(VARIANTS)
        if not kind.variants:  # this rank is not in the group
            return
        within: Any = nullcontext()
        if on_gpu:
            within = torch.cuda.stream(kind.stream or streams[which % 3])
        elif local.random() < DELAYED:
            within = disturb(jitter)
        if local.random() < LATE:
            time.sleep(local.random() * SLEEP_S)
        done = Done(number, kind, index)
        with within:
            if on_gpu:
                sleep_on_lanes(local, kind, at.device)
            try:
                pending.append(done._replace(results=kind.call(index)))
            except Exception as error:
                raise RuntimeError(f"{done.where(at, task)}: {error!r}") from error
        counts["replays" if kind.graph else kind.case.name] += 1
        counts["under a small cap"] += kind.case.cap in SMALL_CAPS

    def compare(most: int) -> None:
        if len(pending) <= most:
            return
        if on_gpu:  # rarely, so that calls are in flight together
            torch.cuda.synchronize()
            most = 0
        while len(pending) > most:
            pending.popleft().verify(at, task)

    settle(at)
    for number in range(task.calls):
        if number % WATCHED_CALLS == 0:
            watch()
        make(number, which := chance.randrange(CASES), kinds[which])
        if graphs and number % REPLAYED_EVERY == 0:
            shuffled = chance.sample(graphs, len(graphs))
            orders = graphs, graphs[::-1], shuffled
            for kind in orders[number // REPLAYED_EVERY % 3]:
                make(number, graphs.index(kind), kind)
        compare(KEPT[at.device.type])
    compare(0)
    counts["refused under a cap"] = sum(kind.refused for kind in kinds)
    return counts


def sleep_on_lanes(local: random.Random, kind: Kind, device: torch.device) -> None:
    """Let random streams of a group and of the caller sleep before the next call."""
    engine = workspace_of(kind.group, device).engine
    assert isinstance(engine, GpuEngine)
    lanes = [torch.cuda.current_stream(), *(s.torch for s in engine._streams[False].values())]
    for lane in lanes:
        if local.random() < DELAYED:
            with torch.cuda.stream(lane):
                torch.cuda._sleep(local.randrange(CYCLES))


def parser() -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parsed.add_argument("--seconds", type=float, help="no round begins later (default: 300)")
    parsed.add_argument("--calls", type=int, help="calls to make, in place of seconds")
    parsed.add_argument("--seed", type=int, help="default: a random one")
    parsed.add_argument("--first", type=int, default=0, help="number of the first round")
    parsed.add_argument("--ranks", type=int, nargs="+", default=[2], help="of the rounds, in turn")
    parsed.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parsed


def failure(results: Sequence[Any]) -> str:
    """Text of the wrong results or, without these, of the ranks' errors; empty on success."""
    wrong, rest = [], []
    for rank, result in enumerate(results):
        if isinstance(result, Died):
            rest.append(f"rank {rank} ended with exit code {result.exitcode}: {result.output}")
        elif isinstance(result, Escaped) and result.type == "AssertionError":
            wrong.append(result.text)
        elif isinstance(result, Escaped):
            rest.append(f"rank {rank}: {result.traceback}")
    return "\n".join(wrong or rest)  # the rest follows from a wrong result


def main(
    arguments: Sequence[str] | None = None, on_rank: Callable[[Rank, Round], Counter[str]] = of_rank
) -> int:
    """Run the soak; return the exit code, 1 after a failure."""
    args = parser().parse_args(arguments)
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    seconds = args.seconds or (300.0 if args.calls is None else float("inf"))
    most = float("inf") if args.calls is None else args.calls
    shared = f", {ranks.RANKS_PER_GPU} ranks a GPU" * (ranks.RANKS_PER_GPU > 1)
    print(f"seed {seed}, ranks {args.ranks}, {args.device}{shared}", flush=True)
    totals: Counter[str] = Counter()
    number, total, began, printed_s = args.first, 0, time.monotonic(), 0.0
    while total < most and time.monotonic() - began < seconds:
        world = args.ranks[number % len(args.ranks)]
        task = Round(seed, number, int(min(CALLS[args.device], most - total)))
        again = (
            f"python tests/soak.py --seed {seed} --ranks {world} --first {number} "
            f"--calls {task.calls} --device {args.device}"
        )
        how: Any = {"device": args.device, "catch": True, "timeout": ROUND_S}
        if text := failure(results := ranks.run(world, on_rank, task, **how)):
            print(f"FAILED with seed {seed} after {total} calls:\n{text}\nto repeat it: {again}")
            return 1
        totals.update({f"{name}, {world} ranks": n for name, n in results[-1].items()})
        total, number = total + results[-1][MADE], number + 1  # the last rank is in both groups
        if (now := time.monotonic() - began) - printed_s > PROGRESS_S:
            printed_s = now
            print(f"{total} calls, {number - args.first} rounds, {now:.0f} s", flush=True)
    for name, count in sorted(totals.items()):
        print(f"{count:8} {name}")
    spent = time.monotonic() - began
    print(f"{total} calls, {number - args.first} rounds, {spent:.0f} s, seed {seed}: no failure")
    return 0


if __name__ == "__main__":
    # Ranks look functions up by the name of their module.
    import conftest  # sets the environment of the ranks, too
    import soak

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(soak.main())
    finally:
        conftest.pytest_sessionfinish()
