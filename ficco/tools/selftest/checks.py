"""The checks of the self-test: assumptions of engines, tested by calls with known results."""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, combinations, takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import ficco
from ficco.accelerator import gpu
from ficco.dma import WAYS
from ficco.dma.engine import Engine
from ficco.errors import BackendError, PeerFailed, RankMismatch, SignalTimeout
from ficco.heuristics import problem_of_sizes
from ficco.heuristics.decide import where
from ficco.machine.files import FOLDER_VARIABLE as FOLDER
from ficco.machine.files import VARIABLE as MACHINE
from ficco.problems.products import OPERATORS, Problem
from ficco.runtime.workspace import workspace_of
from ficco.schedules import NAMED, Schedule
from ficco.tools import probe
from ficco.tools.bench.candidates import caller, environment, of_problem, parse
from ficco.tools.bench.cases import OPERATOR as GATHER
from ficco.tools.bench.cases import Case
from ficco.tools.bench.inputs import Operands
from ficco.tools.bench.measure import MeasuredCalls, Stopwatch
from ficco.tools.tune.communication import slowdowns
from ficco.tools.tune.effort import GPU

# A rank, and the end of a check.


#: Bytes of copies on GPUs. AMD's runtime copies up to 16 KiB by a kernel. SDMA copies of 256 MiB
#: have hung (ROCm/rocm-systems #9927).
SIZES = (
    *(4, 64, 4 << 10, 16 << 10, (16 << 10) + 4, 1 << 20, 16 << 20, 64 << 20, 128 << 20),
    *((128 << 20) + 4, 256 << 20, (256 << 20) + 4, 512 << 20),
)


@dataclass(frozen=True)
class SelftestSettings:
    """Extent of the self-test.

    Attributes:
        iterations: calls with small pieces per schedule in the check of copy and signal order; an
            eighth as many with large pieces.
        repeat: calls per schedule in the other checks.
        small, large: rows per rank, k and n of calls.
        dtype: of the operands.
        sizes: bytes of the copies that are read back, rising.
        pair_bytes: bytes that a rank receives from a peer in measurements of bandwidth.
        rounds: times that each bandwidth is measured; the best counts.
        shapes: name of the set of timed shapes.
        shape_seconds: time for each of them.
        figures: steps of ``ficco tune`` for the machine's file; empty for the usual ones.
        timeout_s: seconds that a call may wait for a peer.
        limit_s: seconds after which a check has hung.
    """

    iterations: int = 100
    repeat: int = 3
    small: tuple[int, int, int] = (24, 40, 16)
    large: tuple[int, int, int] = (512, 512, 32)
    dtype: str = "float32"
    sizes: tuple[int, ...] = (4, 4096, 1 << 20, 16 << 20)
    pair_bytes: int = 8 << 20
    rounds: int = 3
    shapes: str = "cpu"
    shape_seconds: float = 1.0
    figures: tuple[str, ...] = ()
    timeout_s: float = 3.0
    limit_s: float = 30.0

    @classmethod
    def of(cls, device: str) -> SelftestSettings:
        """Settings for ``"cpu"`` or ``"cuda"``."""
        if device == "cpu":
            return cls()
        return cls(
            iterations=400,
            repeat=5,
            small=(48, 64, 40),
            large=(4096, 4096, 256),
            dtype="bfloat16",
            sizes=SIZES,
            pair_bytes=64 << 20,
            shapes="measured",
            shape_seconds=15.0,
            timeout_s=5.0,
            limit_s=45.0,
        )


@dataclass(frozen=True)
class Passed:
    """Outcome of a check that passed: one line, and details for the report."""

    seen: str
    details: str = ""


class CheckFailed(Exception):
    """A check has failed on ranks that are still in step."""


class NotOffered(Exception):
    """This machine lacks the feature of a check, or has it only in part; ``details`` are for the
    report."""

    def __init__(self, why: str, details: str = "") -> None:
        super().__init__(why)
        self.details = details


class PeerLeft(Exception):
    """A peer is no longer in this check."""


@dataclass
class Rank:
    """One rank of the self-test.

    Attributes:
        talk: a group for the ranks' outcomes, independent of devices.
        folder: a folder of this run, which is empty at first.
        iteration: number of the next inputs.
        facts: figures of the running check, for programs that read the report.
        journal: writes them down, so that they outlive this rank.
        pairs: GB/s of each pair of ranks, once they are measured.
    """

    rank: int
    world: int
    device: torch.device
    settings: SelftestSettings
    talk: ProcessGroup
    folder: str = ""
    iteration: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    journal: Callable[..., None] = lambda **facts: None
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, on every rank; :class:`PeerLeft` if one has left the check."""
        everyone = self._exchange((False, value))
        if gone := [rank for rank, (left, _) in enumerate(everyone) if left]:
            raise PeerLeft(f"ranks {gone} left the check")
        return [value for _, value in everyone]

    def _exchange(self, mine: tuple[bool, Any]) -> list[tuple[bool, Any]]:
        everyone: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(everyone, mine, group=self.talk)
        except RuntimeError as error:
            raise PeerLeft(f"a peer's process is gone: {error}") from error
        return everyone

    def note(self, **facts: Any) -> None:
        """Add facts of the running check. ``doing``: the operation that may not return."""
        self.facts |= facts
        self.journal(facts=self.facts)

    def idle(self) -> None:
        """Wait until this rank's device is idle."""
        if self.device.type == "cuda":
            gpu.synchronize()

    def settle(self) -> None:
        """Wait until every rank is here, with an idle device."""
        self.idle()
        self.gather(None)

    def leave(self, group: ProcessGroup) -> None:
        """Take a group down, once every rank has left the check and nothing uses its memory."""
        self._left()
        ficco.close(group)
        self._left()
        dist.destroy_process_group(group)

    def _left(self) -> None:
        """Wait until every rank has left the check. Ranks that are still in it learn that it has
        ended."""
        self.idle()
        while not all(left for left, _ in self._exchange((True, None))):
            pass

    def conclude(self, problems: Iterable[str]) -> None:
        """Raise the problems of all ranks, on every rank."""
        everyone = self.gather(list(problems))
        lines = [f"rank {rank}: {line}" for rank, own in enumerate(everyone) for line in own]
        if lines:
            raise CheckFailed("\n".join(lines))

    def engine(self, group: ProcessGroup) -> Engine:
        return workspace_of(group, self.device).engine


# Calls with integers, whose results are known exactly.

#: Wrong calls that are listed; further ones are counted.
NAMED_CALLS = 4

#: Rows per rank, k and n.
Shape = tuple[int, int, int]


def operands_of(at: Rank, problem: Problem) -> Operands:
    operands = Operands(problem, at.rank, at.device)
    operands.exact_b()
    return operands


def sized(at: Rank, shape: Shape, operator: str = GATHER, dtype: str = "") -> Operands:
    """Operands with the rows of ``shape`` per rank, or per pair of ranks."""
    rows, k, n = shape
    dtype = dtype or at.settings.dtype
    case = Case("", rows * at.world, n, k, dtype, operator=operator)
    return operands_of(at, case.problem(at.world))


def uneven_operands(at: Rank, operator: str) -> Operands:
    """Operands with different rows of ranks or pairs of ranks, and no rows for some."""
    rows, k, n = odd(at.settings.small)
    ranks = range(at.world)
    table = [[rows * ((i + 2 * j) % 3) for j in ranks] for i in ranks]
    sizes = (n, k, at.settings.dtype)
    if OPERATORS[operator].blocks:
        return operands_of(at, Problem.of_blocks(operator, table, *sizes))
    if OPERATORS[operator].returns:  # the operator itself decides who sums what
        return operands_of(at, problem_of_sizes(operator, sum(table[0]) + 1, *sizes, at.world))
    return operands_of(at, Problem(operator, tuple(table[0]), *sizes))


def odd(shape: Shape) -> Shape:
    rows, k, n = shape
    return rows - 7, k - 3, n - 1


def exact(
    at: Rank, group: ProcessGroup, schedules: Iterable[str], where: Operands | Shape, count: int
) -> list[str]:
    """Problems of calls of schedules with changing integers, on operands, or on the operands of an
    all-gather of a shape."""
    operands = where if isinstance(where, Operands) else sized(at, where)
    calls = {name: caller(operands, group, name) for name in schedules}
    return compared(at, group, calls, operands, count)


def compared(
    at: Rank,
    group: ProcessGroup,
    calls: Mapping[str, Callable[[], torch.Tensor]],
    operands: Operands,
    count: int,
) -> list[str]:
    """Problems of calls that read the operands: all calls ``count`` times, in an order that is
    shuffled anew each time, since the first has it easiest, and the same on all ranks.

    Every call has integers of its own, so that stale data shows. The left operand is overwritten as
    soon as a call is enqueued, so that data that is read too late shows, too.
    """
    order, outcomes = random.Random(0), []
    for name in chain.from_iterable(order.sample([*calls], len(calls)) for _ in range(count)):
        operands.exact(at.iteration)
        at.iteration += 1
        outcomes.append((name, wrong_rows(calls[name](), operands)))
    ficco.synchronize(group)
    lines = []
    for number, (name, on_device) in enumerate(outcomes, 1):
        if any(wrong := on_device.tolist()):
            line = f"{name}, call {number} of {len(outcomes)}: {sum(wrong)} wrong elements"
            where = f", in the rows of ranks {[i for i, n in enumerate(wrong) if n]}"
            lines.append(line + where * (len(wrong) > 1))
    if len(lines) > NAMED_CALLS:
        lines[NAMED_CALLS:] = [f"so were {len(lines) - NAMED_CALLS} more of {len(outcomes)} calls"]
    return lines


def wrong_rows(result: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Number of wrong elements in the rows of each source rank, on the device; one number if each
    row depends on all ranks, or on this rank only."""
    problem, rank = operands.problem, operands.rank
    wrong = (result != operands.reference()).sum(1)
    kind = problem.kind
    if kind.inner or (kind.sums and not kind.returns):
        return wrong.sum()[None]
    rows_from = [
        problem.rows[peer] if kind.sums else problem.block(peer, rank)
        for peer in range(problem.world)
    ]
    return torch.stack([part.sum() for part in wrong.split(rows_from)])


def proven(
    at: Rank, group: ProcessGroup, schedules: Sequence[str], *cases: tuple[Operands | Shape, int]
) -> int:
    """Make the calls of each schedule in each case; return their number, or raise on all ranks."""
    at.conclude(line for case in cases for line in exact(at, group, schedules, *case))
    return len(schedules) * sum(count for _, count in cases)


def in_turn(at: Rank, group: ProcessGroup, schedules: Sequence[str], detail: str) -> Passed:
    """Make small and large calls of schedules."""
    small, large, repeat = at.settings.small, at.settings.large, at.settings.repeat
    calls = proven(at, group, schedules, (small, repeat), (odd(small), repeat), (large, 1))
    return Passed(f"{calls} calls exact{detail}")


# The checks.

#: Seconds beyond the timeout within which a peer that stays away is noticed: the look of the
#: watchdog, and freeing the streams.
SLACK_S = 6.0


def device(at: Rank, group: ProcessGroup) -> Passed:
    try:
        proven(at, group, ["serial"], (at.settings.small, 1))
    except NotImplementedError as error:  # there is no engine
        raise CheckFailed(str(error)) from error
    engine = at.engine(group)
    accelerator = engine.fingerprint().accelerator
    at.note(accelerator=accelerator)
    mine = {"device": accelerator, **asdict(engine.capabilities())}
    mine["attributes"] = probe.attributes(at.device)
    problems = [] if at.gather(mine)[0] == mine else [f"differs from rank 0: {mine}"]
    if at.device.type == "cuda":
        here = gpu.current_device()
        problems += [
            f"device {here} cannot access the memory of device {peer}"
            for peer in at.gather(here)
            if peer != here and not gpu.can_device_access_peer(here, peer)
        ]
    at.conclude(problems)
    details = "\n".join(f"{name}: {value}" for name, value in mine.items())
    return Passed(f"{mine['engine']} engine on {at.world} x {mine['device']}", details)


#: Schedules that copy whole rows, and columns, in both directions.
MOVED = """
    shard-overlap shard-overlap:pull hetero-fused-2d:pieces=3 hetero-fused-2d:pieces=3,pull
""".split()


def memory(at: Rank, group: ProcessGroup) -> Passed:
    shape = at.settings.large[:2]
    plain = torch.empty(shape, device=at.device)
    shared = ficco.empty(shape, dtype=torch.float32, group=group, device=at.device)
    at.conclude(
        f"{line} from {place}"
        for place, shard in (("its own memory", plain), ("symmetric memory", shared))
        for schedule in MOVED
        for line in _moved(at, group, schedule, shard)
    )
    return Passed(f"each rank read {plain.nbytes / 2**20:.3g} MiB of every peer, push and pull")


def _moved(at: Rank, group: ProcessGroup, schedule: str, shard: torch.Tensor) -> list[str]:
    """Wrong words that every peer has of a rank's shard, for the first of two patterns of data that
    has some. The second pattern finds words that a copy leaves as they were."""
    count = torch.arange(shard.numel(), device=at.device, dtype=torch.int32).view(shard.shape)
    b, problems = shard.new_empty(shard.shape[1], 0), []
    for turn in (1, 2):
        seeds = [2 * (turn * at.world + rank) + 1 for rank in range(at.world)]
        shard.view(torch.int32).copy_(count * 40503 + seeds[at.rank])
        _, gathered = ficco.all_gather_matmul(
            shard, b, group=group, schedule=schedule, return_gathered=True
        )
        ficco.synchronize(group)
        parts = gathered.view(torch.int32).view(at.world, *shard.shape)
        for rank, part in enumerate(parts):
            if wrong := int((part != count * 40503 + seeds[rank]).sum()):
                text = f"{wrong} of {part.numel()} words of rank {rank} wrong"
                problems.append(f"{schedule}, {shard.nbytes} bytes: {text}")
        if any(at.gather(bool(problems))):
            break
    return problems


#: Schedules with one copy for each peer, of whole rows, of halves of the columns, and by kernel.
WHOLE = ("shard-overlap", "shard-overlap:pull")
HALVES = ("hetero-fused-2d:pieces=2", "hetero-fused-2d:pieces=2,pull")
BY_KERNEL = ("shard-overlap:kernel",)


def sizes(
    at: Rank, group: ProcessGroup, schedules: Sequence[str] = WHOLE, cols: int = 1, **variables: str
) -> Passed:
    """Test copies of each size to and from every peer, of shards of ``cols`` columns.
    ``variables``: of the environment."""
    # Without a machine file, whose largest_copy would cut the copies.
    variables |= {MACHINE: "", FOLDER: str(Path(at.folder, "no machines"))}
    sizes = [nbytes for nbytes in at.settings.sizes if nbytes % (4 * cols) == 0]
    largest, problems, room = 0, [], ""
    with environment(**variables):
        for nbytes in sizes:
            if not all(at.gather(_fits(at, nbytes))):
                room = "; there is no memory for more"
                break
            shard = torch.empty(nbytes // 4 // cols, cols, device=at.device)
            for schedule in schedules:
                exact = f"all copies up to {largest} bytes were exact"
                at.note(largest=largest, doing=f"copies of {nbytes} bytes by {schedule}; {exact}")
                try:
                    wrong = _moved(at, group, schedule, shard)
                except BackendError as error:
                    raise NotOffered(f"{error}") from error
                problems += [f"{line}; {exact}" for line in wrong]
            if any(at.gather(bool(problems))):
                break
            largest = nbytes
    at.note(largest=largest, doing="")
    at.conclude(problems)
    return Passed(f"exact from {sizes[0]} to {largest} bytes by {' and '.join(schedules)}{room}")


def _fits(at: Rank, nbytes: int) -> bool:
    """Whether a GPU has the memory: two slots of all ranks' bytes, and those of the test."""
    if at.device.type == "cpu":
        return True
    free, _ = gpu.mem_get_info()
    return (2 * at.world + 8) * nbytes < 0.9 * free


def signals(at: Rank, group: ProcessGroup, way: str) -> Passed:
    names = ["growing", "shrinking:pull", "hetero-fused-1d:pieces=2"]
    with ficco.options(signals=way):
        try:
            problems = exact(at, group, names, at.settings.small, at.settings.repeat)
        except BackendError as error:
            raise NotOffered(f"{error}") from error
        post = at.engine(group).capabilities().post
    at.conclude(problems)
    if way != "auto" and "asked for" not in post:
        raise NotOffered(f"this engine has one way: {post}")
    return Passed(post)


#: Schedules whose products come right after a signal, by pushed and by pulled pieces.
ORDERED = """
    growing shard-overlap:pull hetero-fused-1d:pieces=4 hetero-unfused-1d:pull
    uniform-fused-1d:pieces=2,copy=2 hetero-fused-2d:pieces=2
""".split()


def ordering(at: Rank, group: ProcessGroup) -> Passed:
    settings, problems, calls = at.settings, [], 0
    for replay in (True, False):
        with ficco.options(replay=replay):
            few = max(2, settings.iterations // 8)
            for shape, count in ((settings.small, settings.iterations), (settings.large, few)):
                problems += exact(at, group, ORDERED, shape, count)
                calls += count * len(ORDERED)
    at.conclude(problems)
    return Passed(f"{calls} calls with changing data, none stale")


def columns(at: Rank, group: ProcessGroup) -> Passed:
    names = [f"{name}:{knob}" for name in NAMED if "2d" in name for knob in ("pieces=3", "pull")]
    passed = in_turn(at, group, names, " with pieces of columns")
    capabilities = at.engine(group).capabilities()
    by = re.search(r"columns by .*?(?=, ends told|; |$)", capabilities.copy)
    seen = f"{passed.seen}, {by[0]}" if by else passed.seen
    if at.world > 1 and capabilities.engine != "cpu":  # on CPUs, threads share the cores
        of_rows = all_at_once(at)
        of_columns = of_rows.replace("-1d", "-2d")
        rows, cols = (gb_per_s(at, group, name, at.world - 1) for name in (of_rows, of_columns))
        seen += f"; {of_columns} takes {rows / cols:.2f} times as long as {of_rows}"
    if by and "want of a 2D copy" in by[0]:
        raise NotOffered(seen)
    return Passed(seen)


def schedule(at: Rank, group: ProcessGroup, name: str) -> Passed:
    problem = sized(at, at.settings.small).problem
    if why := at.engine(group).refuses(problem, Schedule.parse(name)):
        raise NotOffered(why)
    names = [name, f"{name}:pull", f"{name}:pieces=3", f"{name}:pieces=3,pull,copy=2"]
    return in_turn(at, group, names, ", push and pull, whole and in pieces")


#: Schedules of one product whose tiles wait.
TILES = "tiled tiled:pull tiled:pieces=3,order=piece tiled:pieces=2,tail=2".split()


def tiles(at: Rank, group: ProcessGroup) -> Passed:
    """Test tiles that wait, and tiles that announce rows; in a dtype and sizes of every kernel,
    with odd numbers of rows."""
    settings = at.settings

    def operands(shape: Shape, operator: str) -> Operands:
        return sized(at, (shape[0] - 7, *shape[1:]), operator, "bfloat16")

    small = operands(settings.small, GATHER)
    if why := at.engine(group).refuses(small.problem, Schedule.parse("tiled")):
        raise NotOffered(why)
    calls = proven(at, group, TILES, (small, settings.repeat))
    calls += proven(at, group, TILES[-1:], (operands(settings.large, GATHER), 1))
    scattered = operands(settings.small, "matmul_reduce_scatter")
    calls += proven(at, group, TILES, (scattered, settings.repeat))
    return Passed(f"{calls} calls exact, gathers and sums")


#: Schedules of each operator in its check: every named one, and knobs of each kind.
VARIED = f"""
    {" ".join(NAMED)} serial:collective shard-overlap:pull growing:tail=2 shrinking:pieces=2,pull
    hetero-fused-1d:pieces=3,copy=2,compute=2 hetero-fused-2d:pieces=3,pull
    shard-overlap:beta hetero-fused-1d:pieces=3,beta ring:pieces=3
""".split()


def operator(at: Rank, group: ProcessGroup, operator: str) -> Passed:
    settings = at.settings
    uneven = uneven_operands(at, operator)
    engine = at.engine(group)
    names = [one.schedule for one in of_problem(map(parse, VARIED), uneven.problem, engine)]
    few, (rows, k, n) = min(settings.repeat, 2), settings.large
    if OPERATORS[operator].scatters:  # what travels is wide
        n, k = k, n
    small = sized(at, settings.small, operator)
    large = sized(at, (max(rows // at.world, 1), k, n), operator)
    calls = proven(at, group, names, (small, settings.repeat), (large, few), (uneven, few))
    calls += proven(at, group, ORDERED, (large, max(2, settings.iterations // 8)))
    return Passed(f"{calls} calls of {len(names)} schedules exact, equal and uneven")


def collective(at: Rank, group: ProcessGroup) -> Passed:
    return in_turn(at, group, ["serial:collective"], f" by {dist.get_backend(group)}")


def mover(at: Rank, group: ProcessGroup) -> Passed:
    proven(at, group, ["serial"], (at.settings.small, 1))
    engine = at.engine(group)
    if "kernel" not in engine.capabilities().movers:
        raise NotOffered("the engine has no such mover: no compiler for ficco's kernels is here")
    at.settle()  # the kernels are compiled by now, which took each rank its time
    names = ["growing:kernel", "hetero-fused-1d:pieces=3,pull,kernel", "uniform-fused-2d:kernel"]
    return in_turn(at, group, names, " with copies by the kernel")


def graph(at: Rank, group: ProcessGroup) -> Passed:
    proven(at, group, ["growing"], (at.settings.small, 1))
    if at.device.type == "cpu" or not at.engine(group).capabilities().capture:
        raise NotOffered("this engine does not serve captured calls")
    # The last has a lane for every peer, so that many branches begin at one place.
    names, count = ("growing", "shrinking:pull", "hetero-fused-1d:pieces=4", all_at_once(at)), 10
    problems = []
    for name in names:
        operands = sized(at, at.settings.small)
        operands.exact(0)
        at.settle()
        graph, a, b = gpu.CUDAGraph(), operands.a_LK, operands.b_KN
        with gpu.graph(graph, capture_error_mode="thread_local"):
            product = ficco.all_gather_matmul(a, b, group=group, schedule=name)
        replays = {f"{name}, replayed": partial(_replayed, graph, product)}
        problems += compared(at, group, replays, operands, count)
        at.settle()
        del graph, product, replays
    at.conclude(problems)
    return Passed(f"{len(names) * count} replays of {len(names)} graphs exact")


def _replayed(graph: Any, product: torch.Tensor) -> torch.Tensor:
    graph.replay()
    return product


def timeout(at: Rank, group: ProcessGroup) -> Passed:
    if at.world == 1:
        raise NotOffered("one rank has no peer to wait for")
    proven(at, group, ["growing"], (at.settings.small, 2))
    at.settle()
    absent, limit = at.world - 1, at.settings.timeout_s / 2
    problems, waited = [], 0.0
    if at.rank != absent:
        operands = sized(at, at.settings.small)
        operands.exact(1)
        began = time.monotonic()
        try:
            # Every peer has a lane that waits for it, so that there may be no queue left.
            with ficco.options(timeout_s=limit, on_timeout="raise"):
                caller(operands, group, all_at_once(at))()
                ficco.synchronize(group)
            problems.append(f"a call ended although rank {absent} made none")
        except (SignalTimeout, PeerFailed):  # of this rank, or of one that gave up first
            waited = time.monotonic() - began
            if not limit * 0.9 <= waited <= limit + SLACK_S:
                problems.append(f"the error came after {waited:.1f} s, {limit:.1f} s were set")
    longest = max(at.gather(waited))
    at.conclude(problems)
    at.settle()
    ficco.close(group)
    other = dist.new_group(list(range(at.world)))
    proven(at, other, ["growing"], (at.settings.small, 2))
    at.settle()
    ficco.close(other)
    at.settle()
    dist.destroy_process_group(other)
    limits = f"{longest:.1f} s of {limit:.1f} s set"
    return Passed(f"SignalTimeout after {limits}; other groups are well")


#: Choices of an engine for the end of a pulled copy, and for copies of columns.
OF_PULLED, OF_COLUMNS = "events", "columns"


def way(at: Rank, group: ProcessGroup, variable: str, choice: str, value: str) -> Passed:
    """Test and time one value of an engine's choice."""
    schedule, pull = all_at_once(at), choice == OF_PULLED
    schedule = schedule.replace("-1d", "-2d" if choice == OF_COLUMNS else "-1d") + ",pull" * pull
    count = max(2, at.settings.iterations // 8)
    # A late signal of a pulled copy delays only products of the same call.
    n = min(1024, at.settings.pair_bytes // 2048) if pull else 0
    try:
        with environment(**{variable: f"{choice}={value}"}):
            calls = proven(at, group, ORDERED, (at.settings.small, count), (at.settings.large, 2))
            rate = gb_per_s(at, group, schedule, at.world - 1, n)
    except (SignalTimeout, RankMismatch, PeerFailed, NotImplementedError):
        raise
    except RuntimeError as error:  # raised by the engine, or by PyTorch's memory
        raise NotOffered(f"{type(error).__name__}: {error}") from error
    capabilities = at.engine(group).capabilities()
    details = "\n".join(map(str, (capabilities.post, capabilities.wait, capabilities.copy)))
    seen = f"{calls} calls exact; {rate:.1f} GB/s received per rank, by {schedule}"
    seen += f" with products of {n} columns" * pull
    if f"for want of {WAYS[capabilities.engine][choice][value]}" in capabilities.copy:
        raise NotOffered(f"another way took its place: {seen}", details)
    return Passed(seen, details)


#: Bytes of the copies that are timed in batches, and gain in percent that pays for later signals.
BATCHED_BYTES, BATCH_GAIN = tuple(1 << power for power in range(12, 27, 2)), 3.0


def batches(at: Rank, group: ProcessGroup, variable: str) -> Passed:
    """Time copies to all peers, on one lane, one by one and in batches, for ``batched_copies`` of
    a machine file."""
    if at.world < 3:
        raise NotOffered("a batch is copies to several peers, and there are fewer than two")
    sizes = [size for size in BATCHED_BYTES if size <= at.settings.pair_bytes]
    rates = {}
    for value in ("dtod", "batch"):
        at.settle()
        ficco.close(group)  # each way has an engine of its own
        at.settle()
        with environment(**{variable: f"copy={value}"}):
            proven(at, group, ORDERED, (at.settings.small, 2))
            if "for want of" in at.engine(group).capabilities().copy:
                raise NotOffered(at.engine(group).capabilities().copy)
            for size in sizes:
                smaller = replace(at, settings=replace(at.settings, pair_bytes=size))
                rates[value, size] = gb_per_s(smaller, group, "shard-overlap", at.world - 1)
    gains = {size: 100 * (rates["batch", size] / rates["dtod", size] - 1) for size in sizes}
    most = batched_bytes(gains)
    at.note(batched=most)
    lines = [
        f"copies of {size} bytes: {rates['dtod', size]:.2f} GB/s received per rank, "
        f"{rates['batch', size]:.2f} in batches ({gains[size]:+.0f} %)"
        for size in sizes
    ]
    return Passed(f"batched_copies: {most} B in the machine file", "\n".join(lines))


def batched_bytes(gains: Mapping[int, float]) -> int:
    """``batched_copies`` in bytes, from the gain of batches in percent by bytes of a copy: the
    largest size up to which batches pay; 0 if they do not pay at the smallest."""
    paying = list(takewhile(lambda size: gains[size] >= BATCH_GAIN, sorted(gains)))
    return paying[-1] if paying else 0


def attribute(at: Rank, group: ProcessGroup, engine: str, name: str) -> Passed:
    values = at.gather(probe.attribute(engine, name, at.device, at.rank))
    if not all(values):
        raise NotOffered(f"0 on ranks {[rank for rank, value in enumerate(values) if not value]}")
    return Passed(", ".join(map(str, dict.fromkeys(values))))


def sharing(at: Rank, group: ProcessGroup, kind: str) -> Passed:
    if at.world == 1:
        raise NotOffered("one rank has nobody to share with")
    seen = probe.share(kind, at.device, at.rank, at.gather)
    for rank, (refused, _) in enumerate(at.gather(seen)):
        if refused:
            raise NotOffered(f"rank {rank}: {refused[0]}")
    at.conclude(seen.wrong)
    return Passed("every rank read what its peers wrote in theirs, and what one wrote in its own")


# Speed of copies, exclusively and during products, as the tuner times them.


#: Largest slowdown of products and copies during each other for copies that seem to leave the
#: compute units free. With DMA engines the FiCCO paper saw 1.11 and 1.12 in the mean on MI300X;
#: ``ficco tune`` saw 1.05 and 1.02 on 2 H200.
SLOWER = 1.3
#: Least share of the expected rate. Pairs of 4 H200 lay within 4 % of their median
#: (docs/results/selftest-h200-4.md); 7 lanes that share 4 queues would reach 0.57.
SLOW = 0.7
#: Seconds for the times of products and copies during each other.
OVERLAP_S = 5.0


def gb_per_s(at: Rank, group: ProcessGroup | None, schedule: str, peers: int, n: int = 0) -> float:
    """GB/s that each rank of a group receives in a call, by the slowest rank. Collective over all
    ranks; ranks outside of the group wait.

    Products have ``n`` columns.
    """
    at.settle()
    sizes, seconds = (1024, n, at.settings.pair_bytes // 2048), 0.0
    if group is not None:
        rounds = at.settings.rounds
        how = {"seconds": 0.0, "least": rounds, "most": rounds}
        seconds = min(call_times(at, group, [schedule], sizes, torch.bfloat16, **how)[schedule])
    return peers * sizes[0] * sizes[2] * 2 / max(at.gather(seconds)) / 1e9


def call_times(
    at: Rank,
    group: ProcessGroup,
    schedules: Sequence[str],
    sizes: Shape,
    dtype: torch.dtype,
    **how: Any,
) -> dict[str, Any]:
    """Seconds of all-gathers by schedules, for rows of a rank, n and k; ``how``: as
    :meth:`Stopwatch.time`."""
    rows, n, k = sizes
    parts = MeasuredCalls(group, at.device, dtype)
    a, b = parts.matrix("a", rows, k), parts.matrix("b", k, max(n, 1))[:, :n]

    def call(schedule: str) -> None:
        ficco.all_gather_matmul(a, b, group=group, schedule=schedule)
        if not watch.on_gpu:  # where the host's clock runs until the call is over
            ficco.synchronize(group)

    calls = {schedule: partial(call, schedule) for schedule in schedules}
    with closing(Stopwatch(group, at.device, at.settings.limit_s / 2)) as watch:
        return watch.time(calls, **how)


def overlap(at: Rank, group: ProcessGroup) -> Passed:
    """Test whether copies seem to leave the compute units to products that fill the device."""
    if at.device.type == "cpu":
        raise NotOffered("there are no DMA engines: on a CPU the cores do all work")
    if at.world == 1:
        raise NotOffered("one rank has no peer to copy to")
    parts = MeasuredCalls(group, at.device, torch.bfloat16)
    products = {"product": parts.matmul(*GPU.products[0][:3])}
    copies = {"copies": parts.copies(all_at_once(at), at.settings.pair_bytes)}
    with closing(Stopwatch(group, at.device, at.settings.limit_s / 2)) as watch:

        def time(calls: dict[str, Callable[[], Any]], share: float, most: int = 40) -> Any:
            return watch.time(calls, seconds=OVERLAP_S * share, most=most)

        slowed = slowdowns(time, products, copies, at.device)
    return looks(slowed["product", "copies"], slowed["copies", "product"])


def looks(products: float, copies: float) -> Passed:
    """Outcome from the slowdowns of products and of copies during each other."""
    seen = f"during each other products take {products:.2f} and copies {copies:.2f} times as long "
    seen += "as without; only a profile proves it"
    if max(products, copies) > SLOWER:
        raise NotOffered(f"looks like copies by compute units: {seen}")
    return Passed(f"looks like copies by DMA engines: {seen}")


def all_at_once(at: Rank) -> str:
    """A schedule with a copy lane for every peer."""
    return f"hetero-fused-1d:pieces=4,copy={max(1, at.world - 1)}"


def pairs(at: Rank) -> dict[tuple[int, int], float]:
    """GB/s that each rank of a pair receives. Collective; measured once, if ranks live on."""
    if all(at.gather(bool(at.pairs))):
        return at.pairs
    rates = {}
    for pair in combinations(range(at.world), 2):
        both = dist.new_group(list(pair))
        mine = both if at.rank in pair else None
        rates[pair] = gb_per_s(at, mine, "shard-overlap", 1)
        at.settle()
        if mine is not None:
            ficco.close(mine)
        at.gather(None)
        if mine is not None:
            dist.destroy_process_group(mine)
    at.pairs = rates
    return rates


def bandwidth_of_pairs(at: Rank, group: ProcessGroup) -> Passed:
    if at.world == 1:
        raise NotOffered("one rank has no peer")
    rates = pairs(at)
    at.note(gb_per_s={f"{one}-{two}": rate for (one, two), rate in rates.items()})
    return alike(rates, shared=at.device.type == "cpu")


def alike(rates: dict[tuple[int, int], float], shared: bool) -> Passed:
    """Outcome from the rates of pairs; a slow pair counts only if pairs do not share cores."""
    middle = statistics.median(rates.values())
    slow = [pair for pair, rate in rates.items() if rate < SLOW * middle]
    seen = f"{middle:.1f} GB/s received per rank, both ways at once"
    if len(rates) > 1:
        least, most = min(rates.values()), max(rates.values())
        seen += f" (median of {len(rates)} pairs, {least:.1f} to {most:.1f})"
    if slow:
        one, two = min(slow, key=rates.__getitem__)
        seen += f"; {len(slow)} below {SLOW} of that, the slowest between ranks {one} and {two}"
    lines = (f"ranks {one} and {two}: {rate:.1f} GB/s" for (one, two), rate in rates.items())
    details = "\n".join(lines)
    if slow and not shared:
        raise NotOffered(f"pairs are not alike: {seen}", details)
    return Passed(seen, details)


def bandwidth_of_all(at: Rank, group: ProcessGroup) -> Passed:
    if at.world == 1:
        raise NotOffered("one rank has no peer")
    peers, lanes = at.world - 1, all_at_once(at)
    rates = {name: gb_per_s(at, group, name, peers) for name in ("shard-overlap", lanes)}
    best = max(rates, key=rates.__getitem__)
    at.note(gb_per_s=rates)
    details = "\n".join(f"{name}: {rate:.1f} GB/s" for name, rate in rates.items())
    seen = f"{rates[best]:.1f} GB/s received per rank from {peers}, by {best}"
    # One peer has one link, whatever lanes there are.
    if peers == 1 or at.device.type == "cpu" or not all(at.gather(_meshed(at, group))):
        return Passed(seen, details)
    pair = statistics.median(pairs(at).values())
    share = rates[lanes] / (peers * pair)
    seen += f"; {lanes} reaches {rates[lanes]:.1f} GB/s, {share:.2f} of {peers} links of "
    seen += f"{pair:.1f} GB/s each"
    if share < SLOW:
        raise NotOffered(f"copy lanes do not fill the links: {seen}", details)
    return Passed(seen, details)


def _meshed(at: Rank, group: ProcessGroup) -> bool:
    """Whether every pair is assumed to have a separate link: by the machine's description, or
    without one, if the engine does not know how many copies run at once."""
    engine = at.engine(group)
    machine = where(None, at.world, engine.fingerprint()).machine
    if machine is None or machine.topology is None:
        return engine.copy_engines() is None
    return machine.topology.kind == "mesh"
