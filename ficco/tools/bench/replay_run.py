"""The bench of one rank on one GPU whose peers are played (:mod:`.replay`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.accelerator import gpu
from ficco.compute.buffers import buffers_of
from ficco.compute.program import Program
from ficco.dma import engine_name, make_engine
from ficco.dma.patience import limit_of
from ficco.heuristics.families import family_of, last_arrival
from ficco.machine import Fingerprint, find, nearest, save
from ficco.ops.operands import Scales, plain_scales
from ficco.options import current
from ficco.problems.products import Problem
from ficco.problems.specification import AnyProblem
from ficco.runtime.board import Board
from ficco.runtime.workspace import SLOTS, Workspace, adopt, workspace_of
from ficco.tools.bench.calls import Runner
from ficco.tools.bench.cases import Replayed
from ficco.tools.bench.inputs import Draw, Operands, draw_normal
from ficco.tools.bench.measure import HOST_ROWS, DeviceClock, Item
from ficco.tools.bench.replay import Courier, Paces, ReplayEngine, brought, plans_of, portable
from ficco.tools.bench.series import Call, Stopwatch

#: The name of the last arrival, which is no call, in rows.
ARRIVALS = "copies"

#: Seconds that a call may wait for the courier.
TIMEOUT_S = 20.0

LIMITS = (
    "copies between host and GPU stand in for the link's traffic, nothing cools the caches, and "
    "peers are as a simulation has them, whatever this rank does"
)


def replayed_watch(settings: Replayed, csv: Path, device: torch.device) -> ReplayWatch:
    """A stopwatch of one rank, in a process group of one. ``auto`` decides by its machine, which is
    written next to a CSV file."""
    ficco.set_options(on_timeout="raise", timeout_s=TIMEOUT_S)
    watch = ReplayWatch(settings, device)
    path = csv.with_name(f"{csv.stem}_machine.yaml").absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    save(watch.machine, path)
    ficco.set_options(machine=str(path))
    return watch


class ReplayOperands(Operands):
    """The operands of the rank that is played, and of its peers until random data are drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = range(self.problem.world)
        self.peers = {r: Operands(self.problem, r, self.device) for r in ranks if r != self.rank}

    def exact_b(self) -> None:
        super().exact_b()
        for peer in self.peers.values():
            peer.exact_b()

    def random(self, seed: int) -> None:
        """See :class:`ficco.tools.bench.inputs.Operands`."""
        self.peers.clear()
        super().random(seed)

    def _fill(self, iteration: int, draw: Draw, draw_factors: Draw) -> None:
        super()._fill(iteration, draw, draw_factors)
        for peer in self.peers.values():
            peer._fill(iteration, draw, draw_factors)


def proven(run: Callable[[], torch.Tensor], operands: ReplayOperands, workspace: Workspace) -> Any:
    """A call to which the courier brings the peers' rows, on memory that holds NaN before."""
    engine = workspace.engine
    assert isinstance(engine, ReplayEngine)
    with ficco.options(replay=False):
        run()  # its kind, and so its plans, are known from here on
        program = engine.latest
        assert program is not None
        for slot in workspace.slots:
            if slot.memory is not None:
                slot.memory.tensor[slot.data :].fill_(0xFF)
        every = plans_of(program.plan, engine.packs_columns)
        ranks = sorted({**operands.peers, operands.rank: operands}.items())
        everyone = [
            {"a": one.a_LK, "b": one.b_KN, **plain_scales(Scales(**one.scales), every[rank])}
            for rank, one in ranks
        ]
        images = brought(every, engine.courier.machine, everyone, engine.rank)
        engine.images = portable(buffers_of(program), images)
        try:
            result = run()
            engine.synchronize()
        finally:
            engine.images = None
    return result


class ReplayClock(DeviceClock):
    """Times calls whose peers a courier plays.

    Attributes:
        last_s: seconds of the last arrival, which is no call.
        off_s: by mode and candidate, of each timed call the most seconds that an arrival was off.
    """

    def __init__(self, watch: ReplayWatch) -> None:
        super().__init__(dist.group.WORLD, watch.barrier)
        self._watch = watch
        self._programs: dict[tuple[str, int], Program] = {}
        self.last_s = 0.0
        self.off_s: dict[tuple[str, str], list[float]] = {}

    def time(self, item: Item) -> tuple[float, float]:
        if item.name == ARRIVALS:
            return self.last_s, 0.0
        engine = self._watch.engine
        engine.latest = None
        taken = super().time(item)
        if engine.latest is not None:
            self._programs[item.name, id(engine.latest.slot)] = engine.latest
            off = max(map(abs, engine.courier.errors()), default=0.0)
            engine.courier.learn()
            self.off_s.setdefault((item.mode, item.name), []).append(off)
        return taken

    def forget(self) -> None:
        """The engine of the calls is gone, and what they used with it."""
        self._programs.clear()

    def host(self, item: Item) -> float:
        if item.name == ARRIVALS:
            return math.nan
        return median(self.time(item)[1] for _ in range(HOST_ROWS))

    def _line_up(self, item: Item) -> None:
        courier, engine = self._watch.engine.courier, self._watch.engine
        courier.mode, slot = item.mode, engine.next_slot
        program = self._programs.get((item.name, id(slot)))
        prepared = program is not None and program.slot is slot  # and not that of one that is gone
        courier.prepare(program if prepared else None)
        if item.mode != "idle":
            # And enqueue nothing else: the courier may hold a hardware queue up.
            gpu._sleep(int(item.sleep_s * self._hertz))
        if prepared and item.mode == "idle":
            courier.go()  # when the host begins; otherwise what precedes the Plan is before that


class ReplayWatch(Stopwatch):
    """A stopwatch of one rank of a group that is not there otherwise."""

    clock: ReplayClock
    meets = False

    def __init__(self, settings: Replayed, device: torch.device) -> None:
        super().__init__(dist.group.WORLD, device)
        self.rank, self.world = settings.rank, settings.world
        # Of no backend: nobody communicates in it.
        self.group = dist.ProcessGroup(dist.HashStore(), self.rank, self.world)
        host = Fingerprint(gpu.get_device_name(device), self.world)
        machine = find(settings.machine, host) or nearest(host)
        if machine is None:
            raise ValueError(
                f"machine: required a name or a file, since none is of {host.accelerator}"
            )
        if machine.topology is None or machine.copies is None:
            raise ValueError(
                f"machine {machine.name}: required the blocks 'topology' and 'copies', which say "
                "when rows arrive; name another machine"
            )
        alike = machine if host.resembles(machine) else nearest(host) or machine
        self.machine = machine.with_devices_of(alike)
        self._devices = f"like those of {alike.name}"
        self._paces: Paces | None = None
        self.clock = ReplayClock(self)
        self._begin()
        if settings.products is not None:
            self.machine = settings.products(self, self.machine)
            self._devices = "as fast as this one"
            self.free()  # the courier goes by the machine

    @property
    def note(self) -> str:
        machine = self.machine
        assert machine.topology is not None and machine.copies is not None
        rate, latency = machine.topology.bandwidth / 1e9, machine.copies.latency * 1e6
        return (
            f"replay: one GPU plays rank {self.rank} of {self.world}; rows of others arrive as on "
            f"{machine.name} at {rate:.0f} GB/s and {latency:.0f} us, from GPUs {self._devices}; "
            f"`copies` is the last arrival. Limits: {LIMITS}"
        )

    def arrivals(self, problem: AnyProblem) -> str:
        moved = family_of(problem).received(problem, self.rank)
        self.clock.last_s = last_arrival(moved, self.machine)
        return ARRIVALS

    def operands(self, problem: Problem) -> ReplayOperands:
        return ReplayOperands(problem, self.rank, self.device)

    def proof(self, call: Call, operands: Operands) -> Call:
        assert isinstance(operands, ReplayOperands)
        return partial(proven, call, operands, workspace_of(self.group, self.device))

    def settle(self, calls: Sequence[Runner], dtype: torch.dtype) -> None:
        for runner in calls:
            with runner.context():
                for _ in range(SLOTS):  # slots grow now, and not between calls that are timed
                    runner.run()
        self.engine.synchronize()
        for slot in workspace_of(self.group, self.device).slots:
            if slot.memory is None:
                continue
            data = slot.memory.tensor[slot.data :]
            draw_normal(data.view(dtype))  # products are faster on zeros

    def figures(self, item: Item, done: int) -> dict[str, float]:
        off_s = self.clock.off_s.pop((item.mode, item.name), [])
        return {"off_us": median(off_s[-done:]) * 1e6} if off_s else {}

    @property
    def engine(self) -> ReplayEngine:
        """That of the workspace in use."""
        engine = workspace_of(self.group, self.device).engine
        assert isinstance(engine, ReplayEngine)
        return engine

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def together(
        self, action: Call, *, fatal: tuple[type[Exception], ...] = (), named: bool = False
    ) -> tuple[Any, str]:
        """Nothing is fatal: nobody else waits, and what comes next has an engine of its own."""
        return super().together(action, named=named)

    def free(self) -> None:
        self.clock.forget()
        super().free()
        self._begin()

    def close(self) -> None:
        ficco.close(self.group)
        super().close()

    def _begin(self) -> None:
        """Make an engine whose peers are played."""
        options = current()
        limit = options.timeout_s or limit_of(self.group, self.device)
        made = (self.group, self.device, options.signals, limit)
        name = engine_name(self.device, options.engine)
        engine: Any = make_engine(name, *made, kind=ReplayEngine)
        engine.courier = Courier(engine, self.machine, self._paces)
        if self._paces is None:
            self._paces = engine.courier.measure()
        adopt(self.group, self.device, Board(dist.group.WORLD, limit), engine)
