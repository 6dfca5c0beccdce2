"""Runs a function on ranks on this machine: processes started here, or by torchrun.

Each rank gets the default process group (gloo on CPUs, NCCL or RCCL on GPUs), its share of the
CPU's cores, and a timeout after which it prints its stacks and exits. If a rank fails, the others
are terminated, and :func:`launch` raises its error.

PyTorch is imported by the functions that use it: the command line parses its options before that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from ficco.errors import ConfigError, FiccoError, InvalidArgument

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

#: Seconds that ranks get to exit once one of them has failed: long enough to report an error of
#: their own, too short to wait for a peer that is gone.
GRACE_S = 3.0

#: Seconds between SIGTERM and SIGKILL.
TERMINATE_S = 5.0

#: Ranks on CPUs that may share a core unless more are asked for: with more, most of the time goes
#: into switching between them, and starting them alone takes minutes.
RANKS_PER_CORE = 8

#: Seconds that ranks may take to start, before their own timeouts begin.
START_S = 60.0

#: The longest measurement in seconds, a week. Waits for pipes count milliseconds in 32 bits, and a
#: timeout is up to three times the measurement.
LONGEST_S = 604_800.0


class RankFailed(FiccoError):
    """A rank raised an exception, died or ran out of time.

    Attributes:
        rank: the rank that failed first.
        kind: name of the exception's type, ``"exit"`` or ``"timeout"``.
        details: its traceback; empty if there is none.
    """

    def __init__(self, rank: int, kind: str, text: str, details: str = "") -> None:
        self.rank, self.kind, self.details = rank, kind, details
        line = next(iter(text.splitlines()), "")
        super().__init__(f"rank {rank} failed: {kind}: {line}")


def under_torchrun() -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def own_rank() -> int:
    """The rank that a launcher gave this process; 0 without a launcher."""
    return _number("RANK") if under_torchrun() else 0


def ranks_of_a_host(ranks: int) -> int:
    """Ranks on this host, of ``ranks`` that a launcher has started; all without a launcher."""
    here = under_torchrun() and "LOCAL_WORLD_SIZE" in os.environ
    return _number("LOCAL_WORLD_SIZE") if here else ranks


def _number(variable: str) -> int:
    """The number in an environment variable of a launcher; ``ConfigError`` if it is none."""
    text = os.environ[variable]
    if not text.isdecimal():
        raise ConfigError(variable, text, "required a number, as torchrun sets it")
    return int(text)


def default_device() -> str:
    """``"cuda"`` if torch sees GPUs of any vendor, else ``"cpu"``."""
    from ficco.accelerator import gpu

    return "cuda" if gpu.is_available() else "cpu"


def local_device(device: str) -> torch.device:
    """This rank's device for ``"cpu"`` or ``"cuda"``: the GPU that :func:`launch` has set."""
    import torch

    from ficco.accelerator import gpu

    if device == "cuda":
        return torch.device(device, gpu.current_device())
    return torch.device(device)


def launch(
    fn: Callable[..., Any],
    ranks: int | None,
    *args: Any,
    device: str = "cpu",
    timeout_s: float = 600.0,
) -> Any:
    """Run ``fn(*args)`` on every rank, inside a process group.

    Under torchrun this process is one of the ranks, and the result is its own. Otherwise ``ranks``
    processes are started, ``fn`` and ``args`` are pickled, and the result is that of rank 0.

    Args:
        fn: a function at the top level of a module, so that it can be pickled.
        ranks: number of ranks; None for one per GPU, four on CPUs, or torchrun's number.
        device: ``"cpu"``, or ``"cuda"`` for GPUs of any vendor.
        timeout_s: seconds after which a rank prints its stacks and exits.

    Raises:
        ValueError: that many ranks cannot run here.
        RankFailed: a rank failed; the others have been terminated.
    """
    ranks = check_ranks(ranks, device)
    if under_torchrun():
        rank = own_rank()
        local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
        try:
            with _group((rank, ranks, local, device, timeout_s)):
                return fn(*args)
        except (ValueError, NotImplementedError):
            raise
        except Exception as error:
            details = traceback.format_exc()
            raise RankFailed(rank, type(error).__name__, str(error), details) from error
    import torch.distributed as dist

    # This process hosts the store, so that it outlives any rank that fails. A socket of the store's
    # own would listen on all interfaces; with libuv PyTorch 2.6 takes no other socket.
    server = socket.create_server(("127.0.0.1", 0))
    how: dict[str, Any] = {"wait_for_workers": False, "use_libuv": False}
    at = server.getsockname()
    store = dist.TCPStore(*at, None, True, master_listen_fd=server.detach(), **how)
    # Ranks are forks of a process that has imported torch but uses no device: they start in
    # milliseconds and can use any device.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "ficco"])
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    before = _on_terminate(_terminate)
    try:
        for rank in range(ranks):
            near_end, far_end = context.Pipe(duplex=False)
            place = rank, ranks, rank, device, timeout_s
            arguments = far_end, store.port, place, partial(fn, *args)
            name = f"ficco rank {rank}"
            process = context.Process(target=_rank, args=arguments, name=name, daemon=True)
            process.start()
            far_end.close()
            processes.append(process)
            pipes.append(near_end)
        return _collect(processes, pipes, timeout_s)
    finally:
        _on_terminate(before)
        _end(processes)
        for pipe in pipes:
            pipe.close()


def check_ranks(ranks: int | None, device: str, least: int = 1) -> int:
    """The number of ranks to start here, at least ``least``; ``ValueError`` if they cannot run."""
    from ficco.accelerator import gpu

    if device not in ("cpu", "cuda"):
        raise InvalidArgument("device", f"required cpu or cuda, got {device!r}")
    gpus = gpu.device_count() if device == "cuda" else 0
    if under_torchrun():
        world = _number("WORLD_SIZE")
        if ranks not in (None, world):
            why = f"required {world}, as torchrun started, got {ranks}; leave --ranks out"
            raise InvalidArgument("ranks", why)
        ranks = world
    elif device == "cuda" and gpus == 0:
        why = "required a GPU that torch sees, got none; use --device cpu"
        raise InvalidArgument("device", why)
    elif device == "cuda" and ranks is not None and ranks > gpus:
        raise InvalidArgument("ranks", f"required at most {gpus}, one per GPU, got {ranks}")
    if ranks is None:
        ranks = gpus or 4
    if ranks < least:
        raise InvalidArgument("ranks", f"required at least {least}, got {ranks}")
    return ranks


def check_load(ranks: int | None, device: str | None) -> None:
    """``ValueError`` for more ranks on CPUs than the cores of this process can carry."""
    cores = len(os.sched_getaffinity(0))
    most = RANKS_PER_CORE * cores
    on_cpus = (device or default_device()) == "cpu" and not under_torchrun()
    if on_cpus and ranks is not None and ranks > most:
        here = f"{most} on {cores} cores, got {ranks}; --oversubscribe starts more"
        raise InvalidArgument("ranks", f"required at most {here}")


def check_seconds(seconds: float) -> float:
    """The seconds of a measurement; ``ValueError`` if not above 0, or above ``LONGEST_S``."""
    if not 0 < seconds <= LONGEST_S:
        wanted = f"required a number above 0 and at most {LONGEST_S:.0f}"
        raise InvalidArgument("seconds", f"{wanted}, got {seconds:g}")
    return seconds


def _collect(processes: list[BaseProcess], pipes: list[Connection], timeout_s: float) -> Any:
    """The result of rank 0 once all ranks have reported; raises the first failure."""
    deadline = time.monotonic() + START_S + timeout_s + GRACE_S
    results: dict[int, Any] = {}
    failed: list[RankFailed] = []
    left = dict(enumerate(pipes))
    while left and (ready := wait(list(left.values()), max(deadline - time.monotonic(), 0))):
        new: list[RankFailed] = []
        for rank in [rank for rank, pipe in left.items() if pipe in ready]:
            outcome = _outcome(rank, processes[rank], left.pop(rank))
            if isinstance(outcome, RankFailed):
                new.append(outcome)
            else:
                results[rank] = outcome[0]
        if new and not failed:
            deadline = time.monotonic() + GRACE_S
        # A rank that died comes first: others fail because of it, perhaps at the same moment.
        failed += sorted(new, key=lambda failure: failure.kind != "exit")
    if failed:
        raise failed[0]
    if left:
        raise RankFailed(min(left), "timeout", f"not done after {timeout_s:.0f} s")
    for process in processes:
        process.join(TERMINATE_S)
    return results[0]


def _outcome(rank: int, process: BaseProcess, pipe: Connection) -> tuple[Any] | RankFailed:
    """A rank's result, or its failure."""
    try:
        kind, value = pipe.recv()
    except EOFError:
        process.join(TERMINATE_S)
        how = f"exit code {process.exitcode}"
        with contextlib.suppress(ValueError):  # it is of no signal
            how = f"signal {signal.Signals(-(process.exitcode or 0)).name}"
        return RankFailed(rank, "exit", f"the process ended with {how}")
    return (value,) if kind == "result" else RankFailed(rank, *value)


def _end(processes: list[BaseProcess]) -> None:
    """End the running processes at once: terminate, then kill after ``TERMINATE_S``."""
    for end in (BaseProcess.terminate, BaseProcess.kill):
        for process in processes:
            if process.is_alive():
                end(process)
        deadline = time.monotonic() + TERMINATE_S
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))


#: Of a rank: its number, the world, the number and kind of its device, and its timeout.
Place = tuple[int, int, int, str, float]


def _rank(pipe: Connection, port: int, place: Place, call: Callable[[], Any]) -> None:
    """The main function of a started process."""
    import torch.distributed as dist

    threading.Thread(target=_end_with_parent, name="ficco parent", daemon=True).start()
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too, and ends its ranks
    try:
        if place[3] == "cpu":
            # All ranks are on this machine, even if its host name resolves elsewhere.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.TCPStore("127.0.0.1", port, None, False)
        with _group(place, store):
            result = call()
        _send(pipe, "result", result)
    except Exception as error:
        _send(pipe, "failure", (type(error).__name__, str(error), traceback.format_exc()))
        raise SystemExit(1) from None
    finally:
        pipe.close()


def _end_with_parent() -> None:
    """Kill this process once its parent is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _send(pipe: Connection, *report: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process is about to exit
    pipe.send(report)


def _on_terminate(handler: Any) -> Any:
    """Set the handler of SIGTERM if this thread may; returns the previous one."""
    if handler is None or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, handler)


def _terminate(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def _group(place: Place, store: dist.Store | None = None) -> Iterator[None]:
    """Sets up the default process group, the rank's device and its share of the cores."""
    rank, world, local, device, timeout_s = place
    import torch
    import torch.distributed as dist

    from ficco.accelerator import gpu

    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
    if store is not None:
        options.update(store=store, rank=rank, world_size=world)
    if device == "cuda":
        gpu.set_device(local)
        options["device_id"] = torch.device("cuda", local)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **options)
    try:
        yield
        import ficco

        dist.barrier()  # no peer accesses this rank's symmetric memory any more
        ficco.close()
        dist.destroy_process_group()
    finally:
        # After an exception the group stays: destroy_process_group would wait for lost peers.
        faulthandler.cancel_dump_traceback_later()
