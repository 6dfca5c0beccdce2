"""Run functions on the ranks of a process group, in worker processes that tests share.

    results = run(4, function, argument, device="cpu")

calls ``function(at, argument)`` on four ranks and returns the result of each; ``at`` is the
:class:`Rank`. The function must be at the top of a module, so that it can be pickled. The workers
of a world stay for the next test, since starting them costs seconds. With ``fresh=True`` a call
has its own processes, which may die. Survivors are not killed and dead processes are not restarted;
each rank sends its outcome to a parent that only waits.

A call that takes too long fails with the Python stacks of the ranks that are stuck.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist

#: The server imports the modules of all tests once; a rank is a fork of it and starts in
#: milliseconds. The server never uses a device, so that its forks can.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed._symmetric_memory"),
        *("torch.distributed.tensor.parallel", "ficco", "pytest", "hypothesis"),
        # In a PyTorch for GPUs this module initializes them, so that no fork could use a GPU.
        *(() if torch.backends.cuda.is_built() else ("torch._inductor.compile_fx",)),
        "datasets",  # of torchtitan, in the environment of clients
        "tests.preloaded",  # ignored unless tests start in the root of the project
    ]
)

#: Tests that ``make quick`` skips.
SLOW = pytest.mark.slow

#: Ranks that may share a GPU. With more than one, tests of large groups run on few GPUs and check
#: results, not times. Their group is gloo's: NCCL needs a GPU for each rank.
RANKS_PER_GPU = int(os.environ.get("FICCO_TESTS_RANKS_PER_GPU", "1"))


@dataclass(frozen=True)
class Rank:
    """The rank, group size and device of a running function."""

    rank: int
    world: int
    device: torch.device

    def barrier(self) -> None:
        dist.barrier()


@dataclass(frozen=True)
class Failure:
    """An exception on one rank, as data."""

    type: str
    text: str
    traceback: str
    fields: dict[str, Any] = field(default_factory=dict)


class Escaped(Failure):
    """An exception that left the function."""


@dataclass(frozen=True)
class Died:
    """A rank that ended without an answer, and its output."""

    exitcode: int | None
    output: str


def ranks(*worlds: int) -> pytest.MarkDecorator:
    """Run a test for each size ``world`` of a group; ``make quick`` runs those of two ranks."""
    params = [pytest.param(world, marks=() if world == 2 else SLOW) for world in worlds]
    return pytest.mark.parametrize("world", params)


def since(release: str, lacks: str) -> pytest.MarkDecorator:
    """Skip a test on a PyTorch older than ``release``, the oldest that passed it. ``lacks`` is the
    reason: a missing feature of PyTorch."""
    have = tuple(int(part) for part in torch.__version__.split(".")[:2])
    older = have < tuple(map(int, release.split(".")))
    return pytest.mark.skipif(older, reason=f"PyTorch {torch.__version__} {lacks}")


def missing(tool: object) -> NoReturn:
    """Skip a test, or fail it in CI, where every tool is installed."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(
        f"{tool}: tests/toolchain.sh installs it"
    )


def most_gpu_ranks() -> int:
    """Ranks that this machine's GPUs can take."""
    return torch.cuda.device_count() * RANKS_PER_GPU


def wider(world: int = 4) -> int:
    """The size ``world`` if the GPUs can take as many ranks, else two."""
    return world if most_gpu_ranks() >= world else 2


def backend_on_gpus(world: int) -> str:
    """Backend of a group of ``world`` ranks on this machine's GPUs."""
    return "nccl" if torch.cuda.device_count() >= world else "gloo"


def serves_tiled(device: str) -> bool:
    """Whether the engine of this type of device serves tiled products of all sizes."""
    return device == "cpu" and _around is None


@cache
def on_hopper() -> bool:
    """Whether all GPUs are Hopper, which has the kernel of tiled products. Another process queries
    them: this process must not use GPUs, since ranks are its forks."""
    if (program := shutil.which("nvidia-smi")) is None:
        return False
    command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    return set(subprocess.run(command, capture_output=True, text=True).stdout.split()) == {"9.0"}


def need_own_gpus(world: int) -> None:
    """Skip a test of NCCL, of times or of a device's memory where ranks share GPUs."""
    if torch.cuda.device_count() < world:
        pytest.skip("each rank needs a GPU of its own, for NCCL, times or the device's memory")


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    backend: str | None = None,
    catch: bool = False,
    fresh: bool = False,
    lost: Collection[int] = (),
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call ``fn(at, *args)`` on every rank and return the results in the order of ranks.

    Args:
        device: ``"cpu"`` with a gloo group, ``"cuda"`` with an NCCL group (gloo where ranks share
            GPUs); ``backend`` overrides.
        catch: return an :class:`Escaped` or :class:`Died` in place of a missing result; otherwise
            any of them fails the test.
        fresh: use new processes for this call only.
        lost: ranks of a fresh call that need not answer; those still running are killed at the end.
        env: environment of the processes; they stay for the next test with the same environment.
        timeout: seconds after which the call fails; by default 100, since machines are busy, and
            300 on GPUs, whose processes take turns: a kernel that waits for a peer keeps its turn.
    """
    assert fresh or not lost, "only fresh processes can die"
    env = env or {}
    timeout = timeout or (300.0 if device == "cuda" else 100.0)
    if device == "cuda" and most_gpu_ranks() < world:
        pytest.skip(f"needs {world} GPUs")
    if device == "cpu" and _around is not None:
        fn, env = partial(_around[0], fn), {**_around[1], **env}
    default_backend = backend_on_gpus(world) if device == "cuda" else "gloo"
    group_key = world, device, backend or default_backend
    key = *group_key, tuple(sorted(env.items()))
    if fresh:
        pool = _Pool(*group_key, env)
    else:
        pool = _pools.get(key) or _pools.setdefault(key, _Pool(*group_key, env))
    _used.add(world)
    try:
        results = pool.run(fn, args, lost, timeout)
    except BaseException:
        _drop(pool)
        raise
    all_answered = all(not isinstance(result, Escaped | Died) for result in results)
    if fresh or not all_answered:
        _drop(pool)
    if not all_answered and not catch:
        pytest.fail(_report(results), pytrace=False)
    return results


@dataclass(frozen=True)
class Body:
    """The function of a rank in a test of :func:`on_ranks`, looked up by the test's name."""

    module: str
    name: str

    def __call__(self, at: Rank, *args: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name).body(at, *args)


def on_ranks(world: int | None = None, **how: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a function of a rank ``at``, which has to return on all ranks of a world. The
    default world is the test's argument ``world``. The function's other arguments are the test's;
    ``how`` has arguments of :func:`run`."""

    def test_of(body: Callable[..., None]) -> Any:
        names = [*inspect.signature(body).parameters][1:]

        def test(device: str, **arguments: Any) -> None:
            count = world or arguments["world"]
            values = (arguments[name] for name in names)
            run(count, Body(body.__module__, body.__name__), *values, device=device, **how)

        parameters = dict.fromkeys(("device", *(() if world else ("world",)), *names))
        kind = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(body, name))
        vars(test).update(body=body, __signature__=signature)
        return test

    return test_of


@contextlib.contextmanager
def around(fn: Callable[..., Any], env: Mapping[str, str]) -> Iterator[None]:
    """In this block ranks on CPUs have the environment ``env``, and ``fn(called, at, *args)``
    replaces ``called(at, *args)``: tests that were written for one engine run on another."""
    global _around
    close()  # running workers lack the environment
    _around = fn, env
    try:
        yield
    finally:
        _around = None
        close()


def start_server() -> None:
    """Start the server, whose forks are ranks, including those of ``ficco.tools.launch.launch``."""
    forkserver.ensure_running()


def close() -> None:
    """End all workers; kill those that do not end by themselves."""
    for pool in list(_pools.values()):
        pool.close()
    _pools.clear()


def _report(results: list[Any]) -> str:
    parts = []
    for rank, result in enumerate(results):
        if isinstance(result, Escaped):
            parts.append(f"rank {rank}:\n{result.traceback}")
        elif isinstance(result, Died):
            parts.append(f"rank {rank} died with exit code {result.exitcode}\n{result.output}")
    return "\n".join(parts)


def _drop(pool: _Pool) -> None:
    for key in [key for key, other in _pools.items() if other is pool]:
        del _pools[key]
    pool.kill()


class _Pool:
    """The processes of one process group."""

    def __init__(self, world: int, device: str, backend: str, env: Mapping[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.logs = [Path(self.folder.name) / f"{rank}.log" for rank in range(world)]
        self.pipes: list[Connection] = []
        self.processes = []
        # gloo would look for an interface by the name of the host, which a container may not have.
        settings = {"GLOO_SOCKET_IFNAME": "lo", **env}
        gpus = torch.cuda.device_count() if device == "cuda" else world
        if gpus < world:
            settings["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        for rank in range(world):
            parent_end, worker_end = _context.Pipe()
            at = Rank(rank, world, torch.device(device, rank % gpus))
            process = _context.Process(
                target=_serve,
                args=(at, backend, worker_end),
                kwargs={"log": str(self.logs[rank]), "env": settings},
                name=f"rank{rank}",
                daemon=True,
            )
            process.start()
            worker_end.close()
            self.pipes.append(parent_end)
            self.processes.append(process)
        # Rank 0 hosts the store on a port that the system picks.
        port = self._answers([0], 240.0)[0]
        if isinstance(port, Died):
            self.kill()
            pytest.fail(_report([port]), pytrace=False)
        for pipe in self.pipes[1:]:
            pipe.send(port)

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], lost: Collection[int], timeout: float
    ) -> list[Any]:
        task = pickle.dumps((fn, args))
        for pipe in self.pipes:
            # A process that has ended becomes Died below.
            with contextlib.suppress(BrokenPipeError):
                pipe.send((task, sys.path))
        expected = [rank for rank in range(len(self.pipes)) if rank not in lost]
        answers = self._answers(expected, timeout)
        stuck = [rank for rank in expected if rank not in answers]
        if stuck:
            self._fail_stuck(stuck, answers, timeout)
        for rank in lost:
            if not self.pipes[rank].poll():
                self.processes[rank].kill()
        answers |= self._answers(list(lost), 10.0)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _answers(self, expected: list[int], timeout: float) -> dict[int, Any]:
        """Answers of the ranks, or :class:`Died`; a rank without an answer in time has no entry."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        while missing := {self.pipes[rank]: rank for rank in expected if rank not in answers}:
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = missing[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(10.0)
                    answers[rank] = Died(self.processes[rank].exitcode, self._log(rank))
        return answers

    def _log(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace") if self.logs[rank].exists() else ""

    def _fail_stuck(self, stuck: list[int], answers: dict[int, Any], timeout: float) -> NoReturn:
        for rank in stuck:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        parts = [f"rank {rank} is stuck:\n{self._log(rank)}" for rank in stuck]
        rest = {rank: answers[rank] for rank in sorted(answers)}
        parts.append(f"the others answered: {rest}" if rest else "no rank answered")
        pytest.fail(f"no end after {timeout:.0f} s\n" + "\n".join(parts), pytrace=False)

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(10.0)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()  # also ends a stopped process
            process.join(240.0)  # the server reports the end, perhaps after other forks
            process.close()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()


_pools: dict[tuple[int, str, str, tuple[tuple[str, str], ...]], _Pool] = {}
_used: set[int] = set()
#: See :func:`around`.
_around: tuple[Callable[..., Any], Mapping[str, str]] | None = None
atexit.register(close)


# On the ranks.


def _serve(at: Rank, backend: str, pipe: Connection, log: str, env: Mapping[str, str]) -> None:
    os.environ.update(env)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, output, all_threads=True)
    torch.set_num_threads(1)
    if at.device.type == "cpu":
        import disturbance

        disturbance.install()
    device_id = None
    if at.device.type == "cuda":
        torch.cuda.set_device(at.device)
        device_id = at.device if backend == "nccl" else None
    patience = timedelta(seconds=240)
    if at.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), None, False, patience)
    dist.init_process_group(
        backend,
        store=store,
        rank=at.rank,
        world_size=at.world,
        timeout=patience,
        device_id=device_id,
    )
    # A shell that runs tests in the background may ignore the signal in its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            message = None
        if message is None:
            break
        pipe.send(_answer(at, *message))
    # A worker ends by os._exit, which skips exit handlers.
    if "ficco" in sys.modules:
        sys.modules["ficco"].close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(at: Rank, task: bytes, path: list[str]) -> Any:
    try:
        sys.path[:] = path
        fn, args = pickle.loads(task)
        result = fn(at, *args)
        pickle.dumps(result)
        return result
    except BaseException as error:
        return failure(error, Escaped)


def leave(*groups: Any) -> None:
    """Destroy groups; on GPUs, once all calls are over."""
    import ficco

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for group in groups:
        ficco.close(group)
        dist.destroy_process_group(group)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count this rank's runs of ficco's operators, also in backwards and compiled code."""
    from ficco.nn import functional
    from ficco.ops import gradients, library, operators

    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for module in (operators, library, gradients, functional):

            def run(operator: str, *args: Any, _run: Any = module.run, **kwargs: Any) -> Any:
                counts[operator] += 1
                return _run(operator, *args, **kwargs)

            stack.enter_context(mock.patch.object(module, "run", run))
        again = operators.repeated

        def repeated(group: Any, operator: str, *args: Any) -> Any:
            result = again(group, operator, *args)
            counts.update([operator] if result is not None else [])
            return result

        stack.enter_context(mock.patch.object(operators, "repeated", repeated))
        yield counts


def failure(error: BaseException, kind: type[Failure] = Failure) -> Failure:
    """An exception as data, since not every exception can be pickled."""
    return kind(
        type(error).__name__,
        str(error),
        "".join(traceback.format_exception(error)),
        {key: value for key, value in vars(error).items() if not key.startswith("_")},
    )


def caught(fn: Callable[[], Any]) -> Any:
    """The :class:`Failure` of a call on this rank, or its result."""
    try:
        return fn()
    except Exception as error:
        return failure(error)


def gave_up(outcome: Any) -> list[dict[str, Any]]:
    """Facts of the waits for a lost rank from a survivor's error. Depending on the pace of the
    machine the error is the survivor's own ``SignalTimeout``, or a ``PeerFailed`` with the timeouts
    of other ranks."""
    assert isinstance(outcome, Failure), outcome
    assert outcome.type in ("SignalTimeout", "PeerFailed"), outcome
    if outcome.type == "SignalTimeout":
        facts = [outcome.fields]
    else:
        timeouts = outcome.fields["timeouts"]
        facts = [timeout.facts for timeout in timeouts.values()]
        assert [fact["rank"] for fact in facts] == list(timeouts) == list(outcome.fields["reasons"])
        assert facts, outcome
    for fact in facts:
        peer = "a peer" if fact["peer"] is None else f"rank {fact['peer']}"
        ended = "has ended" if fact["ended"] else "timeout_s"
        seconds = f"{fact['seconds']:.1f} s"
        words = [f"{fact['operator']}: rank {fact['rank']} waited {seconds} for {peer}", ended]
        assert fact["step"] in outcome.text or repr(fact["step"]) in outcome.text, outcome.text
        if fact["schedule"] not in ("none", "none yet"):
            words.append(f"of schedule '{fact['schedule']}'")
        for word in words:
            assert word in outcome.text, (word, outcome.text)
    assert outcome.text.count("ficco.close(group)") == 1, outcome.text
    return facts
