"""``ficco doctor --selftest``: proves or refutes, on real ranks, what the engine here assumes.

Each check has a process group of its own, so that what one leaves behind does not reach the next.
Ranks note what they begin and how it ends in files. Where one dies, stands still or meets an error
after which it cannot be trusted, what it noted tells which check did it, and the checks that are
left run on new ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import ficco
from ficco import doctor
from ficco.bench.calls import call
from ficco.bench.candidates import of_problem, parse
from ficco.bench.cases import OPERATOR as GATHER
from ficco.bench.cases import Case
from ficco.bench.inputs import Operands
from ficco.dma import probe
from ficco.dma.choose import engine_name
from ficco.dma.engine import Engine
from ficco.errors import BackendError, PeerFailed, RankMismatch, SignalTimeout
from ficco.launch import RankFailed, check_ranks, launch, under_torchrun
from ficco.options import current
from ficco.problem import OPERATORS, Problem
from ficco.schedules import NAMED, refusal
from ficco.workspace import workspace_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Seconds that ranks may take to start, with everything that a first use of a library takes.
START_S = 60.0
#: Seconds beyond the timeout within which a peer that stays away is noticed: the look of the
#: watchdog, and freeing the streams.
SLACK_S = 6.0
#: What a rank says of a check, in the order in which it goes before what others say: "left", its
#: peers were gone, and "late", it waited in vain, follow from what befell another.
ORDER = ("ok", "left", "late", "not offered", "failed")
#: How many times as long as alone products and copies may take beside each other, if the copies
#: look as if they left the compute units alone. By DMA engines the FiCCO paper saw 1.11 and 1.12 in
#: the mean on MI300X; ``ficco tune`` saw 1.05 and 1.02 on 2 H200.
BESIDE = 1.3
#: Products, or calls, that are enqueued in front of each other at most.
MANY = 400
#: Wrong calls that are named; the others are counted.
NAMED_CALLS = 4
#: Lines of what a rank printed that go to the report.
LOG_LINES = 60


@dataclass(frozen=True)
class Settings:
    """How much is tried.

    Attributes:
        iterations: calls with small pieces per schedule that is to show the order of copy and
            signal; an eighth of them with large ones.
        repeat: calls per schedule where that is not the question.
        small, large: rows per rank, k and n of calls.
        dtype: of the operands.
        pair_bytes: bytes that a rank receives from a peer where bandwidth is measured.
        rounds: times that each bandwidth is measured; the best counts.
        timeout_s: seconds that a call may wait for a peer.
        limit_s: seconds after which a check has hung.
    """

    iterations: int = 100
    repeat: int = 3
    small: tuple[int, int, int] = (24, 40, 16)
    large: tuple[int, int, int] = (512, 512, 32)
    dtype: str = "float32"
    pair_bytes: int = 8 << 20
    rounds: int = 3
    timeout_s: float = 3.0
    limit_s: float = 30.0

    @classmethod
    def of(cls, device: str) -> Settings:
        """What suits a device."""
        if device == "cpu":
            return cls()
        return cls(
            iterations=400,
            repeat=5,
            small=(48, 64, 40),
            large=(4096, 4096, 256),
            dtype="bfloat16",
            pair_bytes=64 << 20,
            timeout_s=5.0,
            limit_s=45.0,
        )


@dataclass(frozen=True)
class Result:
    """What came out of a check: ``verdict`` is ``"ok"``, ``"failed"`` or ``"not offered"``."""

    check: str
    verdict: str
    seen: str
    instead: str = ""
    seconds: float = 0.0
    details: str = ""


@dataclass(frozen=True)
class Found:
    """What a check that passed has seen, in a line, and what the report says of it."""

    seen: str
    details: str = ""


class Wrong(Exception):
    """A check has failed on ranks that are still in step."""


class NotOffered(Exception):
    """This machine does not have what was to be checked."""


class PeerLeft(Exception):
    """A peer is no longer in this check."""


@dataclass
class Rank:
    """One rank of the self-test; ``talk`` is a group by which ranks tell each other what they saw,
    whatever their devices do."""

    rank: int
    world: int
    device: torch.device
    settings: Settings
    talk: ProcessGroup
    iteration: int = 0

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, on every rank; :class:`PeerLeft` if one has left the check."""
        found = self._exchange((False, value))
        if gone := [rank for rank, (left, _) in enumerate(found) if left]:
            raise PeerLeft(f"ranks {gone} left the check")
        return [value for _, value in found]

    def _exchange(self, mine: tuple[bool, Any]) -> list[tuple[bool, Any]]:
        found: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(found, mine, group=self.talk)
        except RuntimeError as error:
            raise PeerLeft(f"a peer's process is gone: {error}") from error
        return found

    def settle(self) -> None:
        """Every rank is here, and its device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.gather(None)

    def leave(self, group: ProcessGroup) -> None:
        """Take a group down, once every rank has left the check and nothing uses its memory."""
        self._outside()
        ficco.close(group)
        self._outside()
        dist.destroy_process_group(group)

    def _outside(self) -> None:
        """Every rank has left the check; one that has not learns by this that it is over."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        while not all(left for left, _ in self._exchange((True, None))):
            pass

    def conclude(self, problems: Iterable[str]) -> None:
        """Raise on all ranks what any of them found wrong."""
        found = self.gather(list(problems))
        lines = [f"rank {rank}: {line}" for rank, some in enumerate(found) for line in some]
        if lines:
            raise Wrong("\n".join(lines))

    def engine(self, group: ProcessGroup) -> Engine:
        return workspace_of(group, self.device).engine


def _operands(at: Rank, shape: tuple[int, int, int], operator: str = GATHER) -> Operands:
    """Operands with so many rows per rank, or per pair of ranks."""
    rows, k, n = shape
    case = Case("", rows * at.world, n, k, at.settings.dtype, operator=operator)
    made = Operands(case.problem(at.world), at.rank, at.device)
    made.exact_b()
    return made


def _uneven(at: Rank, operator: str) -> Operands:
    """Operands of which some ranks, or pairs of ranks, have no rows."""
    rows, k, n = _odd(at.settings.small)
    ranks = range(at.world)
    table = [[rows * ((i + 2 * j) % 3) for j in ranks] for i in ranks]
    sizes = (n, k, at.settings.dtype)
    if OPERATORS[operator].blocks:
        problem = Problem.of_blocks(operator, table, *sizes)
    elif OPERATORS[operator].returns:  # which says by itself who sums what
        problem = Case("", sum(table[0]) + 1, *sizes, operator=operator).problem(at.world)
    else:
        problem = Problem(operator, tuple(table[0]), *sizes)
    made = Operands(problem, at.rank, at.device)
    made.exact_b()
    return made


def _wrong_rows(found: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Wrong elements in the rows that each rank gave or has summed, on the device; one number where
    every row is of all ranks, or of this one."""
    problem, rank = operands.problem, operands.rank
    wrong = (found != operands.reference()).sum(1)
    kind = problem.kind
    if kind.inner or (kind.sums and not kind.returns):
        return wrong.sum()[None]
    of = [
        problem.rows[peer] if kind.sums else problem.block(peer, rank)
        for peer in range(problem.world)
    ]
    return torch.stack([part.sum() for part in wrong.split(of)])


def _problems(wrong: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Sentences about calls whose results were wrong. Reads the device."""
    counts = [(name, many.tolist()) for name, many in wrong]
    lines = [
        f"{name}: {sum(many)} wrong elements{_whose(many)}" for name, many in counts if any(many)
    ]
    if len(lines) > NAMED_CALLS:
        lines[NAMED_CALLS:] = [f"so were {len(lines) - NAMED_CALLS} more of {len(wrong)} calls"]
    return lines


def _whose(wrong: Sequence[int]) -> str:
    """Whose rows are wrong, where they are of several ranks."""
    ranks = [rank for rank, count in enumerate(wrong) if count]
    return f", in the rows of ranks {ranks}" if len(wrong) > 1 else ""


def _exact(
    at: Rank, group: ProcessGroup, schedules: Sequence[str], shape: tuple[int, int, int], count: int
) -> list[str]:
    """Calls of the all-gather with changing integers, and what was wrong with them."""
    return _exact_on(at, group, schedules, _operands(at, shape), count)


def _exact_on(
    at: Rank, group: ProcessGroup, schedules: Sequence[str], operands: Operands, count: int
) -> list[str]:
    """Calls with changing integers one behind the other, and what was wrong with them.

    The left operand is overwritten as soon as its call is enqueued, and nothing waits in between:
    stale data, and data read too late, change the result.
    """
    wrong = []
    for schedule in schedules:
        for number in range(count):
            at.iteration += 1
            operands.exact(at.iteration)
            found = call(operands.problem, operands.a_LK, operands.b_KN, group, schedule)
            name = f"{schedule}, call {number + 1} of {count}"
            wrong.append((name, _wrong_rows(found, operands)))
    ficco.synchronize(group)
    return _problems(wrong)


def _in_turn(at: Rank, group: ProcessGroup, schedules: Sequence[str], what: str) -> Found:
    """Small and large calls of some schedules."""
    settings = at.settings
    problems = _exact(at, group, schedules, settings.small, settings.repeat)
    problems += _exact(at, group, schedules, _odd(settings.small), settings.repeat)
    problems += _exact(at, group, schedules, settings.large, 1)
    at.conclude(problems)
    calls = len(schedules) * (2 * settings.repeat + 1)
    return Found(f"{calls} calls exact{what}")


def _odd(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Sizes that nothing divides."""
    rows, k, n = shape
    return rows - 7, k - 3, n - 1


# The checks.


def _device(at: Rank, group: ProcessGroup) -> Found:
    at.conclude(_exact(at, group, ["serial"], at.settings.small, 1))
    engine = at.engine(group)
    mine = {
        "device": engine.fingerprint().accelerator,
        **asdict(engine.capabilities()),
        "attributes": doctor.attributes(at.device),
    }
    found = at.gather(mine)
    problems = [] if found[0] == mine else [f"differs from rank 0: {mine}"]
    if at.device.type == "cuda":
        here = torch.cuda.current_device()
        problems += [
            f"device {here} cannot access the memory of device {peer}"
            for peer in at.gather(here)
            if peer != here and not torch.cuda.can_device_access_peer(here, peer)
        ]
    at.conclude(problems)
    details = "\n".join(f"{name}: {value}" for name, value in mine.items())
    return Found(f"{mine['engine']} engine on {at.world} x {mine['device']}", details)


#: Schedules that copy whole rows, and columns, in both directions.
MOVED = (
    *("shard-overlap", "shard-overlap:pull"),
    *("hetero-fused-2d:pieces=3", "hetero-fused-2d:pieces=3,pull"),
)


def _memory(at: Rank, group: ProcessGroup) -> Found:
    rows, k, _ = at.settings.large
    count = torch.arange(rows * k, device=at.device, dtype=torch.int64)

    def pattern(rank: int, turn: int) -> torch.Tensor:
        """24-bit numbers, which float32 holds."""
        mixed = (count + 1) * (2654435761 + 2 * rank) + 40503 * turn
        return ((mixed >> 3) % (1 << 24)).to(torch.float32).view(rows, k)

    b = torch.zeros(k, 1, device=at.device)[:, :0]
    plain = torch.empty(rows, k, device=at.device)
    shared = ficco.empty((rows, k), dtype=torch.float32, group=group, device=at.device)
    problems = []
    for where, shard in (("its own memory", plain), ("symmetric memory", shared)):
        for schedule in MOVED:
            for turn in (1, 2):
                shard.copy_(pattern(at.rank, turn))
                _, found = ficco.all_gather_matmul(
                    shard, b, group=group, schedule=schedule, return_gathered=True
                )
                ficco.synchronize(group)
                for rank, part in enumerate(found.view(at.world, rows, k)):
                    wrong = int((part != pattern(rank, turn)).sum())
                    if wrong:
                        problems.append(
                            f"{schedule} from {where}: {wrong} of {rows * k} elements that rank "
                            f"{rank} wrote arrived wrong"
                        )
    at.conclude(problems)
    nbytes = rows * k * 4
    return Found(f"each rank read {nbytes / 2**20:.3g} MiB of every peer, push and pull")


def _signals(at: Rank, group: ProcessGroup, way: str) -> Found:
    names = ["growing", "shrinking:pull", "hetero-fused-1d:pieces=2"]
    with ficco.options(signals=way):
        try:
            problems = _exact(at, group, names, at.settings.small, at.settings.repeat)
        except BackendError as error:
            raise NotOffered(f"{error}") from error
        post = at.engine(group).capabilities().post
    at.conclude(problems)
    if way != "auto" and "asked for" not in post:
        raise NotOffered(f"this engine has one way: {post}")
    return Found(post)


#: Schedules whose products come right behind a signal, by pushed and by pulled pieces.
ORDERED = (
    *("growing", "shard-overlap:pull", "hetero-fused-1d:pieces=4", "hetero-unfused-1d:pull"),
    *("uniform-fused-1d:pieces=2,copy=2", "hetero-fused-2d:pieces=2"),
)


def _ordering(at: Rank, group: ProcessGroup) -> Found:
    settings, problems, calls = at.settings, [], 0
    for replay in (True, False):
        with ficco.options(replay=replay):
            few = max(2, settings.iterations // 8)
            for shape, count in ((settings.small, settings.iterations), (settings.large, few)):
                problems += _exact(at, group, ORDERED, shape, count)
                calls += count * len(ORDERED)
    at.conclude(problems)
    return Found(f"{calls} calls with changing data, none stale")


def _columns(at: Rank, group: ProcessGroup) -> Found:
    names = [f"{name}:{knob}" for name in NAMED if "2d" in name for knob in ("pieces=3", "pull")]
    return _in_turn(at, group, names, " with pieces of columns")


def _schedule(at: Rank, group: ProcessGroup, name: str) -> Found:
    names = [name, f"{name}:pull", f"{name}:pieces=3", f"{name}:pieces=3,pull,copy=2"]
    return _in_turn(at, group, names, ", push and pull, whole and in pieces")


#: Schedules of each operator in its check: every named one, and knobs of each kind.
VARIED = (
    *(
        *NAMED,
        "serial:collective",
        "shard-overlap:pull",
        "growing:tail=2",
        "shrinking:pieces=2,pull",
    ),
    *("hetero-fused-1d:pieces=3,copy=2,compute=2", "hetero-fused-2d:pieces=3,pull"),
    *("shard-overlap:beta", "hetero-fused-1d:pieces=3,beta", "ring:pieces=3"),
)


def _operator(at: Rank, group: ProcessGroup, operator: str) -> Found:
    settings = at.settings
    uneven = _uneven(at, operator)
    names = [one.schedule for one in of_problem(map(parse, VARIED), uneven.problem)]
    few, problems, calls = min(settings.repeat, 2), [], 0
    rows, k, n = settings.large
    if OPERATORS[operator].scatters:  # what travels is wide
        n, k = k, n
    large = (max(rows // at.world, 1), k, n)
    for operands, some, count in (
        (_operands(at, settings.small, operator), names, settings.repeat),
        (_operands(at, large, operator), names, few),
        (_operands(at, large, operator), ORDERED, max(2, settings.iterations // 8)),
        (uneven, names, few),
    ):
        problems += _exact_on(at, group, some, operands, count)
        calls += count * len(some)
    at.conclude(problems)
    return Found(f"{calls} calls of {len(names)} schedules exact, equal and uneven")


def _collective(at: Rank, group: ProcessGroup) -> Found:
    return _in_turn(at, group, ["serial:collective"], f" by {dist.get_backend(group)}")


def _mover(at: Rank, group: ProcessGroup) -> Found:
    at.conclude(_exact(at, group, ["serial"], at.settings.small, 1))
    engine = at.engine(group)
    if "kernel" not in engine.capabilities().movers:
        raise NotOffered("the engine has no such mover: no compiler for ficco's kernels is here")
    names = ["growing:kernel", "hetero-fused-1d:pieces=3,pull,kernel", "uniform-fused-2d:kernel"]
    return _in_turn(at, group, names, " with copies by the kernel")


def _kernels(at: Rank, group: ProcessGroup) -> Found:
    kernels, stream = doctor.own_kernels(at.device)
    generator = torch.Generator(at.device).manual_seed(at.rank)

    def integers(dtype: torch.dtype, rows: int, cols: int) -> torch.Tensor:
        made = torch.empty(rows, cols, dtype=dtype, device=at.device)
        return made.random_(-3, 4, generator=generator)

    problems = []
    half = torch.bfloat16
    for rows, cols, pitch, first in ((64, 512, 512, 0), (33, 100, 160, 8), (17, 23, 40, 3)):
        source = integers(half, rows, cols)
        wide = torch.full((rows, pitch), 99.0, dtype=half, device=at.device)
        wanted = wide.clone()
        wanted[:, first : first + cols] = source
        kernels.place(wide[:, first : first + cols], source, stream)
        back = torch.empty_like(source)
        kernels.place(back, wide[:, first : first + cols], stream)
        if not (torch.equal(wide, wanted) and torch.equal(back, source)):
            problems.append(f"placement of {rows} x {cols} at {first} of {pitch} is wrong")
    for part, out in ((half, half), (torch.float32, half), (torch.float32, torch.float32)):
        for count, size in ((2, 4096), (8, 1000), (16, 7)):
            parts = [integers(part, 1, size) for _ in range(count)]
            total = torch.empty(1, size, dtype=out, device=at.device)
            kernels.reduce(total, parts, stream)
            if not torch.equal(total, torch.stack(parts).double().sum(0).to(out)):
                problems.append(f"the sum of {count} x {size} {part} in {out} is wrong")
    for rows, cols, pitch, first in ((64, 512, 1024, 512), (33, 100, 160, 8), (17, 23, 40, 3)):
        wide = [integers(half, rows, pitch) for _ in range(4)]
        wanted = wide[0].clone()
        blocks = [one[:, first : first + cols] for one in wide]
        wanted[:, first : first + cols] = torch.stack(blocks).double().sum(0).to(half)
        kernels.reduce(blocks[0], blocks, stream)  # in place, among columns that stay
        if not torch.equal(wide[0], wanted):
            problems.append(f"the sum of 4 x {rows} x {cols} at {first} of {pitch} is wrong")
    at.settle()
    at.conclude(problems)
    target = kernels.binding.target
    return Found(f"placement and sums exact, compiled for {target.arch}")


def _graph(at: Rank, group: ProcessGroup) -> Found:
    problems = _exact(at, group, ["growing"], at.settings.small, 1)
    at.conclude(problems)
    if at.device.type == "cpu" or not at.engine(group).capabilities().capture:
        raise NotOffered("this engine does not serve captured calls")
    names, count = ("growing", "shrinking:pull", "hetero-fused-1d:pieces=4"), 10
    for name in names:
        operands = _operands(at, at.settings.small)
        operands.exact(0)
        at.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            product = ficco.all_gather_matmul(
                operands.a_LK, operands.b_KN, group=group, schedule=name
            )
        wrong = []
        for number in range(count):
            at.iteration += 1
            operands.exact(at.iteration)
            graph.replay()
            wrong.append((f"{name}, replay {number}", _wrong_rows(product, operands)))
        ficco.synchronize(group)
        problems += _problems(wrong)
        at.settle()
        del graph, product
    at.conclude(problems)
    return Found(f"{len(names) * count} replays of {len(names)} graphs exact")


def _timeout(at: Rank, group: ProcessGroup) -> Found:
    if at.world == 1:
        raise NotOffered("one rank has no peer to wait for")
    at.conclude(_exact(at, group, ["growing"], at.settings.small, 2))
    at.settle()
    absent, limit = at.world - 1, at.settings.timeout_s / 2
    problems, waited = [], 0.0
    if at.rank != absent:
        operands = _operands(at, at.settings.small)
        operands.exact(1)
        began = time.monotonic()
        try:
            with ficco.options(timeout_s=limit, on_timeout="raise"):
                ficco.all_gather_matmul(
                    operands.a_LK, operands.b_KN, group=group, schedule="growing"
                )
                ficco.synchronize(group)
            problems.append(f"a call ended although rank {absent} made none")
        except SignalTimeout:
            waited = time.monotonic() - began
            if not limit * 0.9 <= waited <= limit + SLACK_S:
                problems.append(f"SignalTimeout came after {waited:.1f} s, {limit:.1f} s were set")
    longest = max(at.gather(waited))
    at.conclude(problems)
    at.settle()
    ficco.close(group)
    other = dist.new_group(list(range(at.world)))
    at.conclude(_exact(at, other, ["growing"], at.settings.small, 2))
    at.settle()
    ficco.close(other)
    at.settle()
    dist.destroy_process_group(other)
    return Found(f"SignalTimeout after {longest:.1f} s of {limit:.1f} s set; other groups are well")


def _gb_per_s(at: Rank, group: ProcessGroup | None, schedule: str, peers: int) -> float:
    """GB/s that each rank of a group receives, by the slowest of them; 0 for ranks outside it.
    Collective over all ranks."""
    rows = 1024
    k = at.settings.pair_bytes // (rows * 2)
    seconds = []
    if group is not None:
        shard = torch.ones(rows, k, dtype=torch.bfloat16, device=at.device)
        b = torch.ones(k, 1, dtype=torch.bfloat16, device=at.device)[:, :0]
    for number in range(at.settings.rounds + 1):
        calls = 5 if number else 3  # to warm up: both slots, and what is recorded
        at.settle()
        began = time.perf_counter()
        if group is not None:
            for _ in range(calls):
                ficco.all_gather_matmul(shard, b, group=group, schedule=schedule)
            ficco.synchronize(group)
        seconds.append(max(at.gather((time.perf_counter() - began) / calls)))
    return peers * rows * k * 2 / min(seconds[1:]) / 1e9


def _way(at: Rank, group: ProcessGroup, variable: str, value: str) -> Found:
    """One of the ways that an engine can be told to go."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        count = max(2, at.settings.iterations // 8)
        problems = _exact(at, group, ORDERED, at.settings.small, count)
        problems += _exact(at, group, ORDERED, at.settings.large, 2)
        at.conclude(problems)
        rate = _gb_per_s(at, group, _all_at_once(at), at.world - 1)
    except (SignalTimeout, RankMismatch, PeerFailed, NotImplementedError):
        raise
    except RuntimeError as error:  # of the engine, or of PyTorch's memory
        raise NotOffered(f"{type(error).__name__}: {error}") from error
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
    capabilities = at.engine(group).capabilities()
    details = "\n".join(map(str, (capabilities.post, capabilities.wait, capabilities.copy)))
    calls = (count + 2) * len(ORDERED)
    return Found(f"{calls} calls exact; {rate:.1f} GB/s received per rank", details)


def _attribute(at: Rank, group: ProcessGroup, engine: str, name: str) -> Found:
    found = at.gather(probe.attribute(engine, name, at.device, at.rank))
    if not all(found):
        raise NotOffered(f"0 on ranks {[rank for rank, value in enumerate(found) if not value]}")
    return Found(", ".join(map(str, dict.fromkeys(found))))


def _sharing(at: Rank, group: ProcessGroup, kind: str) -> Found:
    if at.world == 1:
        raise NotOffered("one rank has nobody to share with")
    seen = probe.share(kind, at.device, at.rank, at.gather)
    for rank, (refused, _) in enumerate(at.gather(seen)):
        if refused:
            raise NotOffered(f"rank {rank}: {refused[0]}")
    at.conclude(seen.wrong)
    return Found("every rank read what its peers wrote in theirs, and what one wrote in its own")


def _beside(at: Rank, group: ProcessGroup) -> Found:
    """Whether copies seem to leave the compute units to products that fill the device."""
    if at.device.type == "cpu":
        raise NotOffered("there are no DMA engines: on a CPU all work is the cores'")
    if at.world == 1:
        raise NotOffered("one rank has no peer to copy to")
    a = torch.ones(4096, 4096, dtype=torch.bfloat16, device=at.device)
    out = torch.empty_like(a)
    rows, k = 1024, at.settings.pair_bytes // 2048
    shard = torch.ones(rows, k, dtype=torch.bfloat16, device=at.device)
    b = torch.ones(k, 1, dtype=torch.bfloat16, device=at.device)[:, :0]
    beside = torch.cuda.Stream()

    def milliseconds(products: int, calls: int) -> tuple[float, float]:
        """Times of the slowest rank for products and for copies that begin together."""
        at.settle()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        with torch.cuda.stream(beside):
            marks[0].record()
            for _ in range(products):
                torch.mm(a, a, out=out)
            marks[1].record()
        marks[2].record()
        for _ in range(calls):
            ficco.all_gather_matmul(shard, b, group=group, schedule=_all_at_once(at))
        marks[3].record()
        torch.cuda.synchronize()
        ficco.synchronize(group)
        mine = marks[0].elapsed_time(marks[1]), marks[2].elapsed_time(marks[3])
        return tuple(map(max, zip(*at.gather(mine), strict=True)))  # type: ignore[return-value]

    def best(products: int, calls: int) -> tuple[float, float]:
        found = zip(*(milliseconds(products, calls) for _ in range(3)), strict=True)
        return tuple(map(min, found))  # type: ignore[return-value]

    products, calls = 50, 20
    milliseconds(products, 3)  # to warm up
    product_ms, copies_ms = best(products, 0)[0], best(0, calls)[1]
    # What is timed is under way for half as long as what it is beside.
    enough = min(MANY, 1 + int(2 * product_ms / copies_ms * calls))
    slower_products = best(products, enough)[0] / product_ms
    enough = min(MANY, 1 + int(2 * copies_ms / product_ms * products))
    slower_copies = best(enough, calls)[1] / copies_ms
    return _looks(slower_products, slower_copies)


def _looks(products: float, copies: float) -> Found:
    """What it looks like if products and copies take so many times as long beside each other."""
    seen = (
        f"beside each other products take {products:.2f} and copies {copies:.2f} times as long as "
        "alone; a profile alone proves it"
    )
    if max(products, copies) > BESIDE:
        raise NotOffered(f"looks like copies by compute units: {seen}")
    return Found(f"looks like copies by DMA engines: {seen}")


def _all_at_once(at: Rank) -> str:
    """A schedule in which every peer has a copy lane."""
    return f"hetero-fused-1d:pieces=4,copy={max(1, at.world - 1)}"


def _bandwidth_of_pairs(at: Rank, group: ProcessGroup) -> Found:
    if at.world == 1:
        raise NotOffered("one rank has no peer")
    rates = {}
    for pair in combinations(range(at.world), 2):
        made = dist.new_group(list(pair))
        mine = made if at.rank in pair else None
        rates[pair] = _gb_per_s(at, mine, "shard-overlap", 1)
        at.settle()
        if mine is not None:
            ficco.close(mine)
        at.gather(None)
        if mine is not None:
            dist.destroy_process_group(mine)
    worst = min(rates, key=lambda pair: rates[pair])
    middle = statistics.median(rates.values())
    seen = f"{middle:.1f} GB/s received per rank, both ways at once"
    if len(rates) > 1:
        least, most = min(rates.values()), max(rates.values())
        seen += f" (median of {len(rates)} pairs, {least:.1f} to {most:.1f})"
    if rates[worst] < 0.7 * middle:
        seen += f"; ranks {worst[0]} and {worst[1]} are slower than the others"
    details = "\n".join(
        f"ranks {one} and {two}: {rate:.1f} GB/s" for (one, two), rate in rates.items()
    )
    return Found(seen, details)


def _bandwidth_of_all(at: Rank, group: ProcessGroup) -> Found:
    if at.world == 1:
        raise NotOffered("one rank has no peer")
    peers = at.world - 1
    names = ("shard-overlap", _all_at_once(at))
    rates = {name: _gb_per_s(at, group, name, peers) for name in names}
    best = max(rates, key=lambda name: rates[name])
    details = "\n".join(f"{name}: {rate:.1f} GB/s" for name, rate in rates.items())
    return Found(f"{rates[best]:.1f} GB/s received per rank from {peers}, by {best}", details)


@dataclass(frozen=True)
class Check:
    """A thing that is assumed; ``instead`` says what is used where it does not hold.

    ``alone`` is for one that leaves ranks in a state that the next should not meet; ``limits`` is
    the time that it may take, in limits of the settings.
    """

    name: str
    run: Callable[[Rank, ProcessGroup], Found]
    instead: str
    alone: bool = False
    limits: int = 1


_COLLECTIVE = "schedule='serial:collective', or PyTorch's own collectives"

CHECKS = (
    Check("device and engine", _device, _COLLECTIVE),
    Check("memory of peers", _memory, _COLLECTIVE),
    Check(
        "signals, first way",
        partial(_signals, way="auto"),
        "options(signals='copy'); on AMD cards the variable FICCO_HIP_SIGNALS",
    ),
    Check("signals by write", partial(_signals, way="write"), "the first way"),
    Check("signals by copy", partial(_signals, way="copy"), "the first way"),
    Check(
        "order of copy and signal",
        _ordering,
        "options(signals='copy'); options(replay=False) if that alone is right",
        limits=2,
    ),
    Check("2D copies", _columns, "schedules whose names end in 1d"),
    *(
        Check(
            f"schedule {name}",
            partial(_schedule, name=name),
            "another schedule=; 'auto' does not know that it fails",
        )
        for name in NAMED
        if not refusal(Problem(GATHER, (1, 1), 1, 1, "float32"), NAMED[name])
    ),
    Check("schedule serial:collective", _collective, "schedule='serial'"),
    *(
        Check(
            f"operator {name}",
            partial(_operator, operator=name),
            "PyTorch's own collective and product",
            limits=2,
        )
        for name in OPERATORS
        if name != GATHER
    ),
    Check("copies by kernel", _mover, "the mover dma: leave the knob kernel out"),
    Check("kernels", _kernels, "PyTorch's operations"),
    Check("graphs", _graph, "calls outside of graphs"),
    Check("bandwidth of pairs", _bandwidth_of_pairs, "nothing", limits=2),
    Check("bandwidth of all pairs", _bandwidth_of_all, "nothing"),
    Check(
        "products beside copies",
        _beside,
        "copies by compute units, which slow products down; on AMD cards try FICCO_HIP_COPY=nocu, "
        "and leave HSA_ENABLE_SDMA out",
    ),
    Check("timeouts", _timeout, "a limit of your own for each call", alone=True),
)

#: What each engine goes by: attributes of the device, kinds of memory, and the ways that it can be
#: told to go. Those of the other engines are not tried.
WAYS = {
    engine: (
        *(
            Check(f"attribute {name}", partial(_attribute, engine=engine, name=name), instead)
            for name, instead in probe.ATTRIBUTES[engine].items()
        ),
        *(
            Check(f"sharing of {kind} memory", partial(_sharing, kind=kind), instead)
            for kind, instead in probe.SHARED[engine].items()
        ),
        *(
            Check(
                f"{variable}={value}",
                partial(_way, variable=variable, value=value),
                f"leave {variable} out, or set another of {', '.join(values)}",
            )
            for variable, values in variables.items()
            for value in values
        ),
    )
    for engine, variables in doctor.CHOICES.items()
}


# On the ranks.


@dataclass
class _Journal:
    """What a rank begins, finds and ends, a JSON object per line."""

    path: Path

    def note(self, check: str, event: str, **more: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"check": check, "event": event, **more}) + "\n")

    def read(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The events of each check."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the rank died while it wrote
                    event = json.loads(line)
                    found.setdefault(event["check"], {})[event["event"]] = event
        return found


def _files(folder: Path, rank: int) -> tuple[_Journal, Path]:
    """Where a rank notes what it does, and where its output goes."""
    return _Journal(folder / f"rank{rank}.jsonl"), folder / f"rank{rank}.log"


def _on_a_rank(names: Sequence[str], settings: Settings, device: str, folder: str) -> None:
    """Run checks on this rank, one behind the other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    journal, log = _files(Path(folder), rank)
    screen = os.fdopen(os.dup(2), "w")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks share this machine
    patience = timedelta(seconds=3 * settings.limit_s)
    talk = dist.new_group(list(range(world)), backend="gloo", timeout=patience)
    here = torch.device(device)
    if device == "cuda":
        here = torch.device(device, torch.cuda.current_device())
    at = Rank(rank, world, here, settings, talk)
    _warm(at)
    at.settle()
    every = {check.name: check for some in (CHECKS, *WAYS.values()) for check in some}
    for check in (every[name] for name in names):
        if rank == 0:
            print(f"selftest: {check.name}", file=screen, flush=True)
        at.iteration = 10_000 * list(every).index(check.name)
        # In place of the time that launch() set: where a check hangs, the rank ends.
        faulthandler.dump_traceback_later(check.limits * settings.limit_s, exit=True)
        journal.note(check.name, "begin")
        with ficco.options(timeout_s=settings.timeout_s, on_timeout="raise"):
            _attempt(at, check, journal)
        journal.note(check.name, "end")
    faulthandler.dump_traceback_later(settings.limit_s, exit=True)


def _warm(at: Rank) -> None:
    """What the first use of libraries takes is no peer's delay."""
    dtype = getattr(torch, at.settings.dtype)
    for kind in (dtype, torch.float32):
        a = torch.ones(2, 64, 64, dtype=kind, device=at.device)
        torch.bmm(a, a), torch.mm(a[0], a[1]), torch.addmm(a[0], a[0], a[1])
        torch.baddbmm(a, a, a), a.random_(-3, 4), (a != a.clone()).sum()
    with contextlib.suppress(NotImplementedError, BackendError, ImportError):  # its check will tell
        doctor.own_kernels(at.device)


def _attempt(at: Rank, check: Check, journal: _Journal) -> None:
    """Run one check in a group of its own; note what came out. Raises where this rank cannot go
    on."""
    began = time.monotonic()

    def note(verdict: str, seen: str, details: str = "") -> None:
        seconds = time.monotonic() - began
        journal.note(
            check.name, "outcome", verdict=verdict, seen=seen, details=details, seconds=seconds
        )

    group = dist.new_group(list(range(at.world)))
    try:
        found = check.run(at, group)
        note("ok", found.seen, found.details)
    except Wrong as error:
        note("failed", str(error))
    except (NotOffered, NotImplementedError) as error:
        note("not offered", str(error), "".join(traceback.format_exception(error)))
        if error.__cause__ is not None:  # who knows where the peers are
            raise
    except (SignalTimeout, RankMismatch, PeerFailed) as error:
        note("late", f"{type(error).__name__}: {error}", traceback.format_exc())
    except PeerLeft as error:
        note("left", str(error))
    except Exception as error:
        note("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        raise
    at.leave(group)


# Where the command was given.


@dataclass
class Selftest:
    """A run of all checks.

    Attributes:
        results: in the order of :data:`CHECKS`, then of the engine's :data:`WAYS`.
        logs: what ranks printed, by launch and rank.
        starts: how often new ranks were started: for the checks, for those that have ranks to
            themselves, and behind one after which ranks could not go on.
    """

    device: str
    ranks: int
    settings: Settings
    results: list[Result] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    starts: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return sum(result.verdict == "failed" for result in self.results)


def default_ranks(device: str) -> int:
    """As many as there are GPUs, two on CPUs."""
    return torch.cuda.device_count() if device == "cuda" else 2


def selftest(device: str, ranks: int | None = None, settings: Settings | None = None) -> Selftest:
    """Run all checks on ranks of this machine; goes on behind those that fail.

    Raises:
        ValueError: that many ranks cannot run here.
    """
    if under_torchrun():
        raise ValueError("the self-test starts its ranks by itself; run it without torchrun")
    if ranks is None and device == "cpu":
        ranks = default_ranks(device)
    run = Selftest(device, check_ranks(ranks, device), settings or Settings.of(device))
    began = time.monotonic()
    engine = engine_name(torch.device(device), current().engine)
    checks = (*CHECKS, *WAYS[engine])
    left = list(checks)
    found: dict[str, Result] = {}
    while left:
        batch = [left[0]] if left[0].alone else [check for check in left if not check.alone]
        new = _launched(run, batch)
        found |= new
        if not any(check.name in new for check in batch):  # they do not even start
            why = new["start of ranks"].seen if new else "nothing was noted"
            for check in left:
                found[check.name] = Result(check.name, "failed", f"not run: {why}", check.instead)
        left = [check for check in left if check.name not in found]
    names = [check.name for check in checks]
    run.results = [found[name] for name in names]
    run.results += [result for name, result in found.items() if name not in names]
    run.seconds = time.monotonic() - began
    return run


def _launched(run: Selftest, batch: Sequence[Check]) -> dict[str, Result]:
    """Run checks on new ranks; the results of those that they began."""
    settings, error = run.settings, None
    run.starts += 1
    with tempfile.TemporaryDirectory(prefix="ficco-selftest-") as folder:
        names = [check.name for check in batch]
        limit = START_S + sum(check.limits for check in batch) * settings.limit_s
        try:
            args = (names, settings, run.device, folder)
            launch(_on_a_rank, run.ranks, *args, device=run.device, timeout_s=limit)
        except RankFailed as failure:
            error = failure
        journals = []
        for rank in range(run.ranks):
            journal, log = _files(Path(folder), rank)
            journals.append(journal.read())
            if error is not None and log.exists():
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                run.logs[f"rank {rank}, from {names[0]!r}"] = "\n".join(lines)
    found = {}
    for check in batch:
        events = [journal.get(check.name, {}) for journal in journals]
        if any(events):
            found[check.name] = _result(check, events, error, settings)
    broken = any(len(journal.get(name, {})) < 3 for journal in journals for name in found)
    if error is not None and not broken:
        name = "end of ranks" if found else "start of ranks"
        found[name] = Result(name, "failed", str(error), _COLLECTIVE, details=error.details)
    return found


def _result(
    check: Check, events: list[dict[str, Any]], error: RankFailed | None, settings: Settings
) -> Result:
    """The verdict on a check, from what each rank noted of it."""
    outcomes = {rank: one["outcome"] for rank, one in enumerate(events) if "outcome" in one}
    unfinished = [rank for rank, one in enumerate(events) if "begin" in one and "end" not in one]
    worst = max(
        outcomes.values(), key=lambda one: ORDER.index(one["verdict"]), default={"verdict": "ok"}
    )
    seconds = max((one["seconds"] for one in outcomes.values()), default=0.0)
    if unfinished and worst["verdict"] in ("ok", "left", "late") and error is not None:
        stuck = [rank for rank in unfinished if rank not in outcomes]
        limit = check.limits * settings.limit_s
        seen = f"{error}; ranks {stuck or unfinished} did not finish (limit {limit:.0f} s)"
        details = [error.details]
        verdict = "failed"
    else:
        verdict = "failed" if worst["verdict"] in ("left", "late") else worst["verdict"]
        alike = [rank for rank, one in outcomes.items() if one["seen"] == worst["seen"]]
        everywhere = verdict == "ok" or len(alike) == len(events)
        seen = worst["seen"] if everywhere else f"rank {alike[0]}: {worst['seen']}"
        details = []
    for rank, one in outcomes.items():
        if one["details"] and (one["verdict"] != "ok" or rank == 0):
            details.append(f"rank {rank}:\n{one['details']}")
    instead = "" if verdict == "ok" else check.instead
    return Result(check.name, verdict, seen, instead, seconds, "\n".join(filter(None, details)))


# What people and machines read.


def as_json(run: Selftest, path: Path) -> str:
    """The results, and where the report is."""
    return json.dumps(
        {
            "device": run.device,
            "ranks": run.ranks,
            "failed": run.failed,
            "starts": run.starts,
            "seconds": round(run.seconds, 1),
            "report": str(path),
            "results": [asdict(result) for result in run.results],
        }
    )


def show(run: Selftest, path: Path) -> None:
    """Print the results as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "failed": "red", "not offered": "yellow"}
    table = Table(title=f"Self-test of {run.ranks} ranks on {run.device}", title_justify="left")
    for column in ("check", "verdict", "what was seen", "used instead"):
        table.add_column(column, overflow="fold")
    for result in run.results:
        verdict = f"[{colours[result.verdict]}]{result.verdict}[/]"
        table.add_row(
            escape(result.check), verdict, escape(_short(result.seen)), escape(result.instead)
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(escape(_summary(run)))
    console.print(f"The report is in {escape(str(path))}; attach it to a bug report.")


def _summary(run: Selftest) -> str:
    counts = [f"{_count(run, verdict)} {verdict}" for verdict in ("ok", "not offered", "failed")]
    return f"{', '.join(counts)}; {run.seconds:.0f} s."


def _went_on(run: Selftest) -> str:
    """Which checks ran although one in front of them had failed."""
    verdicts = [result.verdict for result in run.results]
    if "failed" not in verdicts:
        return ""
    behind = len(verdicts) - 1 - verdicts.index("failed")
    return f"; {behind} checks came behind the first that failed"


def _count(run: Selftest, verdict: str) -> int:
    return sum(result.verdict == verdict for result in run.results)


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def about() -> dict[str, Any]:
    """What ``ficco doctor`` says, in a process of its own: this one leaves the devices to ranks,
    and a device that hangs must not keep the report from being written."""
    command = [sys.executable, "-m", "ficco", "doctor", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"versions": f"ficco doctor cannot tell: {error}"}


def report(run: Selftest, about: dict[str, Any]) -> str:
    """All that was found, in Markdown; ``about`` is what :func:`about` found."""
    return "\n".join(_lines(run, about))


def _lines(run: Selftest, about: dict[str, Any]) -> Iterator[str]:
    yield from ("# ficco self-test", "")
    yield f"{datetime.now():%Y-%m-%d %H:%M}, {run.ranks} ranks on {run.device}: {_summary(run)}"
    yield f"New ranks were started {run.starts} times{_went_on(run)}."
    yield from (
        "",
        "| check | verdict | what was seen | used instead | seconds |",
        "|---|---|---|---|---|",
    )
    for result in run.results:
        cells = (result.check, result.verdict, _short(result.seen), result.instead)
        text = " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells)
        yield f"| {text} | {result.seconds:.1f} |"
    yield from _block("Settings", "\n".join(f"{k}: {v}" for k, v in asdict(run.settings).items()))
    for part in ("versions", "devices", "links", "engines", "use"):
        yield from _block(part.capitalize(), json.dumps(about.get(part), indent=1))
    variables = "\n".join(f"{name}={value}" for name, value in doctor.environment().items())
    yield from _block("Environment", variables or "none of the variables that matter is set")
    for result in run.results:
        if result.details or result.verdict == "failed":
            text = "\n".join(filter(None, (result.seen, result.details)))
            yield from _block(f"{result.check}: {result.verdict}", text)
    for name, log in run.logs.items():
        if log:
            yield from _block(f"Output of {name}", log)


def _block(title: str, text: str) -> Iterator[str]:
    yield from ("", f"## {title}", "", "```text", text.replace("```", "'''"), "```")
