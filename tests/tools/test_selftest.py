"""``ficco doctor --selftest``: passes where all is well, and finds what is broken."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, combinations, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hip_ranks
import host_gpu
import pytest
import ranks
import test_kernels
import torch
import torch.distributed as dist
from torch_kernels import TorchKernels

import ficco
from ficco import dma
from ficco.dma import cpu
from ficco.hip_kernels.launch import NAMES, Kernels, Script
from ficco.machine import Fingerprint, load
from ficco.runtime.workspace import workspace_of
from ficco.tools import cli, doctor, probe, selftest
from ficco.tools.launch import launch
from ficco.tools.selftest.checks import CheckFailed, NotOffered, Rank, SelftestSettings
from ficco.tools.selftest.run import CheckResult, document, markdown

FAST = SelftestSettings(
    iterations=8,
    repeat=1,
    large=(96, 64, 16),
    sizes=(4, 1 << 12, 1 << 20, (1 << 20) + 4),
    pair_bytes=1 << 18,
    rounds=1,
    shapes="",
    figures=("memory",),
    timeout_s=2.0,
    limit_s=20.0,
)


#: Checks of what CPUs do not have.
OF_GPUS = {"kernels", "graphs", "products beside copies"}


def _broken(breaks: Callable[[], None], fn: Callable[..., Any], *args: Any) -> Any:
    breaks()
    return fn(*args)


def results(
    monkeypatch: Any,
    breaks: Callable[[], None],
    only: Sequence[str] = (),
    settings: SelftestSettings = FAST,
    ranks: int = 2,
) -> dict[str, CheckResult]:
    """What the self-test says, by check, where ranks are broken; and its report is whole."""
    monkeypatch.setattr(
        selftest.run,
        "launch",
        lambda fn, ranks, *args, **options: launch(_broken, ranks, breaks, fn, *args, **options),
    )
    if only:
        checks = tuple(check for check in selftest.run.CHECKS if check.name.startswith(tuple(only)))
        monkeypatch.setattr(selftest.run, "CHECKS", checks)
    run = selftest.run.selftest("cpu", ranks, settings)
    names = [result.check for result in run.results]
    assert names[: len(selftest.run.CHECKS)] == [check.name for check in selftest.run.CHECKS]
    assert len(names) == len(set(names))
    text = markdown(document(run, {}))
    assert f"ranks were started {run.starts} times" in text and run.starts > 0
    assert (" came after the first that failed" in text) == (run.failed > 0)
    for result in run.results:
        assert f"| {result.check} | {result.verdict} |" in text
        assert (f"## {result.check}: failed" in text) == (result.verdict == "failed")
    for result in run.results:  # shown if the test fails
        print(result.check, result.verdict, result.seen, result.details, sep="\n  ")
    return {result.check: result for result in run.results}


def failed(found: dict[str, CheckResult], verdict: str = "failed") -> set[str]:
    """The checks of a verdict."""
    return {name for name, result in found.items() if result.verdict == verdict}


# All is well.


def halved(half: int) -> tuple[Any, ...]:
    """The checks, with half of those of schedules and operators."""
    every = selftest.run.CHECKS
    alike = [check for check in every if check.name.startswith(("schedule ", "operator "))]
    return tuple(check for check in every if check not in alike or check in alike[half::2])


def _doctor_in_process(command: list[str], **options: Any) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.run(command[command.index("ficco") + 1 :]) == 0
    return SimpleNamespace(stdout=printed.getvalue())


def test_it_passes_here(tmp_path: Path, monkeypatch: Any, ran: Any) -> None:
    monkeypatch.setattr(selftest.run, "CHECKS", halved(0))
    monkeypatch.setattr(SelftestSettings, "of", lambda device: FAST)
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "4")
    monkeypatch.chdir(tmp_path)
    processes = SimpleNamespace(run=_doctor_in_process, SubprocessError=subprocess.SubprocessError)
    monkeypatch.setattr(selftest.run, "subprocess", processes)
    found = json.loads(ran("doctor --selftest --device cpu --json").out)
    assert found["ranks"] == 2 and found["failed"] == 0
    verdicts = {result["check"]: result["verdict"] for result in found["results"]}
    assert list(verdicts) == [check.name for check in selftest.run.CHECKS]
    refused = {name for name, verdict in verdicts.items() if verdict != "ok"}
    assert refused - {"signals by write", "signals by copy"} == OF_GPUS and len(refused) == 5
    (path,) = tmp_path.glob("ficco-selftest-????-??-??.md")
    assert json.loads(path.with_suffix(".json").read_text()) == found
    text = path.read_text()
    for words in ("0 failed", "| order of copy and signal | ok |", "GPU_MAX_HW_QUEUES=4"):
        assert words in text
    assert torch.__version__ in text


def test_one_rank(monkeypatch: Any) -> None:
    monkeypatch.setattr(selftest.run, "CHECKS", halved(1))
    run = selftest.run.selftest("cpu", 1, FAST)
    assert run.failed == 0, run.results
    verdicts = {result.check: result.verdict for result in run.results}
    assert verdicts["timeouts"] == verdicts["bandwidth of pairs"] == "not offered"


# Ranks on which something is broken.


def _wrong_columns_and_posts() -> None:
    """One byte of each rectangle whose rows are apart arrives wrong, and rank 0 posts nothing in
    pulled calls of one schedule."""
    move, post = cpu._move, cpu.CpuEngine.post

    def wrong_move(dst: torch.Tensor, src: torch.Tensor) -> None:
        move(dst, src)
        if dst.stride(0) != dst.shape[1] and dst.numel():
            dst.view(torch.uint8)[-1, 2] ^= 128

    def no_post(self: Any, program: Any, step: int, signals: Any) -> Any:
        broken = program.plan.schedule == "shrinking:pull" and self.rank == 0
        return post(self, program, step, () if broken else signals)

    cpu._move, cpu.CpuEngine.post = wrong_move, no_post  # type: ignore[method-assign]


def test_wrong_columns_and_lost_signals(monkeypatch: Any) -> None:
    only = ["memory", "signals, first", "order", "2D", "schedule sh", "schedule growing"]
    found = results(monkeypatch, _wrong_columns_and_posts, [*only, "timeouts"])
    places = {"memory of peers", "2D copies", "2D copies of every size", "order of copy and signal"}
    assert failed(found) == places | {"signals, first way", "schedule shrinking"}
    assert "in the rows of ranks [1]" in found["2D copies"].seen
    assert "hetero-fused-2d" in found["memory of peers"].seen
    assert "shard-overlap" not in found["memory of peers"].seen
    lost = found["schedule shrinking"]
    assert "rank 1" in lost.seen and "SignalTimeout" in lost.seen and "rank 0" in lost.seen
    assert "Traceback" in lost.details and lost.instead


def _short_sums_a_slow_pair_and_no_kernels() -> None:
    """Rank 1 leaves a part out of sums."""
    engine, speed = cpu.CpuEngine, selftest.checks
    reduce, capabilities, alike = engine.reduce, engine.capabilities, speed.alike

    def short_sum(self: Any, program: Any, step: int, reduction: Any) -> Any:
        if self.rank == 1 and len(reduction.parts) > 1:
            reduction = reduction._replace(parts=reduction.parts[1:])
        return reduce(self, program, step, reduction)

    rates = {(0, 1): 40.0, (0, 2): 41.0, (1, 2): 27.0}
    speed.alike = lambda found, shared: alike(rates, shared=False)
    engine.reduce = short_sum  # type: ignore[method-assign]
    engine.capabilities = lambda self: replace(  # type: ignore[method-assign]
        capabilities(self), movers=("dma",)
    )


def test_short_sums_a_slow_pair_and_no_kernels(monkeypatch: Any) -> None:
    only = ["operator all_to_all_m", "operator matmul_reduce_scatter", "operator matmul_all_reduce"]
    only += ["copies by kernel", "bandwidth of pairs"]
    found = results(monkeypatch, _short_sums_a_slow_pair_and_no_kernels, only)
    assert failed(found) == {"operator matmul_reduce_scatter", "operator matmul_all_reduce"}
    scattered = found["operator matmul_reduce_scatter"].seen
    assert re.search(r"rank 1: \S+, call \d+ of \d+: ", scattered) and "rank 0" not in scattered
    gathered = found["operator matmul_all_reduce"].seen
    assert "rank 0: " in gathered and "in the rows of ranks [1]" in gathered
    # What is not offered is not asked for.
    assert found["operator all_to_all_matmul"].verdict == "ok"
    assert found["copies by kernel"].verdict == "not offered"
    pairs = found["bandwidth of pairs"]
    assert pairs.verdict == "not offered" and "links" in pairs.instead
    assert "40.0 GB/s" in pairs.seen and "the slowest between ranks 1 and 2" in pairs.seen
    assert "ranks 0 and 2: 41.0 GB/s" in pairs.details and "Traceback" not in pairs.details


def _by_kernel(do: Callable[[], Any]) -> None:
    """Rank 1 does something when it is to copy by the kernel."""
    right = cpu.CpuEngine.copy

    def copy(self: Any, program: Any, step: int, transfer: Any) -> Any:
        if transfer.mover == "kernel" and self.rank == 1:
            do()
        return right(self, program, step, transfer)

    cpu.CpuEngine.copy = copy  # type: ignore[method-assign]


def _refuses() -> None:
    raise ficco.errors.BackendError("moduleLoad", "999", "no such code")


def _fails_while_timed() -> None:
    if dist.get_rank() == 1:
        right = ficco.all_gather_matmul

        def call(*args: Any, schedule: str, **more: Any) -> Any:
            if schedule == "shard-overlap":
                raise MemoryError("no room")
            return right(*args, schedule=schedule, **more)

        ficco.all_gather_matmul = call


#: What rank 1 does, settings, the check that fails, and what is said of it.
FAILING: dict[str, tuple[Callable[[], None], dict[str, float], str, str]] = {
    "refuses": (
        *(partial(_by_kernel, _refuses), {}),
        *("copies by kernel", "rank 1: BackendError: moduleLoad"),
    ),
    "dies": (partial(_by_kernel, partial(os._exit, 7)), {}, "copies by kernel", "exit code 7"),
    "stands still": (
        *(partial(_by_kernel, partial(time.sleep, 1000)), {"limit_s": 3.0}),
        *("copies by kernel", "limit 3 s"),
    ),
    # Its peers wait for it in vain; what is told is what befell it.
    "fails while its peers time": (
        *(_fails_while_timed, {"timeout_s": 1.0, "limit_s": 6.0}),
        *("bandwidth of all pairs", "rank 1: MemoryError: no room"),
    ),
}


@pytest.mark.parametrize("how", FAILING)
def test_a_rank_that_fails(how: str, monkeypatch: Any) -> None:
    """Its check fails, and no other one before or after."""
    breaks, settings, check, said = FAILING[how]
    only = ["schedule serial:collective", "copies by kernel", "bandwidth of all"]
    found = results(monkeypatch, breaks, only, replace(FAST, **settings))
    assert failed(found) == {check} and said in found[check].seen


def test_the_command_tells_of_ranks_that_do_not_start(
    monkeypatch: Any, tmp_path: Path, ran: Any
) -> None:
    found = results(monkeypatch, os.abort, ["memory", "timeouts"])
    untried = {name for name, result in found.items() if result.verdict == "not tried"}
    assert failed(found) == {"start of ranks"} and untried == {"memory of peers", "timeouts"}
    assert "SIGABRT" in found["start of ranks"].seen
    monkeypatch.setattr(selftest.run, "about", dict)
    monkeypatch.setattr(SelftestSettings, "of", lambda device: FAST)
    out = tmp_path / "report.md"
    said = ran("doctor --selftest --device cpu --ranks 2 --report", out, code=1).out
    printed = " ".join(said.split())
    assert "memory of peers" in printed and "1 failed, 2 not tried" in printed
    assert "report.md and" in printed and "## start of ranks: failed" in out.read_text()


# Kernels: PyTorch's operations in their place, and the compiled ones on this CPU, where launches
# are carried out at once, whatever their stream, one word of a signal after the other.


def _wide(rows: torch.Tensor) -> torch.Tensor:
    first = rows.storage_offset() % rows.stride(0)
    return rows.as_strided(
        (rows.shape[0], rows.stride(0)), rows.stride(), rows.storage_offset() - first
    )


class _Alone(Rank):
    """The one rank of a self-test, without processes."""

    def _exchange(self, mine: tuple[bool, Any]) -> list[tuple[bool, Any]]:
        return [mine]


def _checked(kernels: Kernels | TorchKernels, monkeypatch: Any) -> str:
    """What the check of kernels has seen, or finds wrong."""
    monkeypatch.setattr(probe, "own_kernels", lambda device: (kernels, None))
    at = _Alone(0, 1, torch.device("cpu"), FAST, None)
    try:
        return selftest.kernels.own(at, None).seen
    except CheckFailed as error:
        return f"wrong: {error}"


#: Wrong sums: what they do instead, what is said of it, and what is not.
WRONG_SUMS: list[tuple[Callable[..., Any], list[str], str]] = [
    (lambda right, out, parts, at: right(out, parts[:8], at), ["sum of 16 x 7"], "8 x"),
    (  # what lies between rows is summed, too
        lambda right, out, parts, at: right(_wide(out), list(map(_wide, parts)), at),
        [f"4 x 33 x 100 torch.{name} at 8 of 160 is wrong" for name in ("bfloat16", "float16")],
        "2 x",
    ),
    (  # what is smaller than 2 is lost
        lambda right, out, parts, at: (
            right(out, parts, at),
            out.dtype == torch.float16 and out.div_(2).trunc_().mul_(2),
        ),
        [
            *(f"2 x 4096 torch.{of} in torch.float16 is wrong" for of in ("float16", "float32")),
            "sum of 4 x 33 x 100 torch.float16 at 8 of 160 is wrong",
        ],
        "bfloat16",
    ),
]


def test_operations_of_pytorch_in_place_of_kernels(monkeypatch: Any) -> None:
    right = _checked(TorchKernels(), monkeypatch)
    assert right.startswith("placement and sums exact, by PyTorch's operations; ")
    assert "posts and waits are not there" in right
    for instead, said, unsaid in WRONG_SUMS:
        kernels: Any = TorchKernels()
        kernels.reduce = partial(instead, kernels.reduce)
        found = _checked(kernels, monkeypatch)
        assert all(words in found for words in said) and unsaid not in found, found


#: Compiled for this CPU.
host_kernels = test_kernels.on_host


def test_compiled_kernels(host_kernels: Kernels, monkeypatch: Any) -> None:
    launches, right, together = host_kernels.binding.launches, host_kernels.copies, []

    def copies(*args: Any, **more: Any) -> None:
        before = len(launches)
        right(*args, **more)
        together.append((len(args[0]), len(launches) - before))

    monkeypatch.setattr(host_kernels, "copies", copies)
    launches.clear()
    assert _checked(host_kernels, monkeypatch) == (
        "placement, sums, copies, casts, merges, combinations, gates, routes, posts, waits and "
        "scripts as they should be, compiled for cpu"
    )
    assert together == [(3, 1)] * 6  # several places, one launch
    assert {name for name, _ in launches} >= {name for name in NAMES if "copy" not in name}


def _waits_ten_times_in_parts(right: Any, words: Any, seconds: float, *rest: Any) -> None:
    """Ten times as long, in launches that name a word of theirs, not of the whole signal."""
    for first in range(0, len(words), 64):
        right(words[first : first + 64], 10 * seconds, *rest)


def _posts_all_words_once() -> Callable[..., Any]:
    """From the second call on the last word is left out."""
    ends = chain([None], repeat(-1))
    return lambda right, words, at: right(words[: next(ends)], at)


#: What kernels do instead, several at a time; what is said of it, and in how many more lines.
WRONG_KERNELS: list[tuple[dict[str, Callable[..., Any]], dict[str, int]]] = [
    (
        {
            "copies": lambda right, ends, *rest, **more: right(ends[:1], *rest, **more),
            "merge": lambda right, out, lse, parts, at: right(out, lse, parts[1:], at),
            "route": lambda right, chosen, experts, capacity, at: right(chosen, experts, 0, at),
            "gate": lambda right, function, out, x, at: out.copy_(x[..., : out.shape[-1]]),
            "combine": lambda right, out, rows, picked, weights, at: right(
                out, rows, picked[:, :-1], weights[:, :-1].contiguous(), at
            ),
            "one_shot": lambda right, out, parts, *rest: right(out, [*parts, parts[0]], *rest),
            "two_shot": lambda right, out, parts, *rest: right(out, parts[1:], *rest),
            "post": lambda right, words, at: right([*words[:5], *words[6:]], at),
        },
        {
            "33 x 100 at 8 of 160 to 3 places: wrong at [1, 2]": 5,
            "the merge of five parts of torch.float16 is wrong": 1,
            "the route of 700 tokens to 11 experts is wrong": 0,
            "relu gated of torch.float16 is wrong": 3,
            "the combination of three rows of torch.float16 is wrong": 1,
            "at 8 of 160 with scripts is wrong": 8,
            "the exchanged sum of 17 x 512 torch.float16 is wrong": 2,
            "a wait after its own posts missed word 5": 0,
        },
    ),
    (
        {
            "copies": lambda right, *args, signals: right(*args),
            "one_shot": lambda right, out, parts, signals, at: right(
                out, parts, replace(signals, front=Script()), at
            ),
            "wait": lambda right, words, seconds, late, at: None,
            "script": lambda right, script, at: None,
        },
        {
            "a launch of copies left [0, 0, 0, 0] in words": 2,
            "scripts left [0, 0, 9, 0, 0] in words": 8,
            "a wait that reached its deadline wrote 0, 68 is right": 1,
        },
    ),
    (
        {"post": _posts_all_words_once()},
        {"a wait missed word 69, which another stream had posted": 1},
    ),
    (
        {
            # The word after the last one is posted, too.
            "post": lambda right, words, at: right(
                [*words, (words[0][0] + 4 * selftest.kernels.WORDS, 1)], at
            ),
            "wait": _waits_ten_times_in_parts,
            # What is placed in front of a post is not there behind the wait.
            "place": lambda right, dst, src, at: (
                right(dst, src, at) if src.numel() > 1 or float(src) != 5.0 else None
            ),
        },
        {
            "posts wrote something else": 0,
            "a wait that reached its deadline wrote 4, 68": 0,
            "a deadline of 0.2 s was over after 2.": 0,
            "after a wait was not seen what came before the post": 0,
        },
    ),
]


@pytest.mark.parametrize("turn", range(len(WRONG_KERNELS)))
def test_compiled_kernels_that_are_broken(
    turn: int, host_kernels: Kernels, monkeypatch: Any
) -> None:
    """Each is found, and nothing else is said to be wrong but for what follows from it."""
    wrong, said = WRONG_KERNELS[turn]
    for name, instead in wrong.items():
        monkeypatch.setattr(host_kernels, name, partial(instead, getattr(host_kernels, name)))
    # What takes long and has none of these kernels.
    left_out = ["summed", "cast"] + ["merged", "gated", "routed", "combined"] * (turn > 0)
    for part in left_out:
        monkeypatch.setattr(selftest.kernels._Trial, part, lambda trial: [])
    found = _checked(host_kernels, monkeypatch)
    assert found.startswith("wrong: rank 0: ")
    for words in said:
        assert words in found
    assert len(found.splitlines()) == len(said) + sum(said.values()), found


def test_ranks_of_torchrun_are_refused(monkeypatch: Any, ran: Any) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert "without torchrun" in ran("doctor --selftest --device cpu", code=2).err


# The HIP engine on a double of its library.


def _on_the_double(
    library: str, wheel: str, settings: dict[str, str], breaks: Callable[[], None] | None
) -> None:
    os.environ.update(settings)  # before the library reads them
    hip_ranks.bind(wheel)
    host_gpu.serve_cpu_tensors()
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    ficco.set_options(engine="hip")
    if breaks is not None:
        breaks()


def on_the_double(
    monkeypatch: Any,
    only: Sequence[str],
    breaks: Callable[[], None] | None = None,
    ranks: int = 2,
    **settings: int | str,
) -> dict[str, CheckResult]:
    """What the self-test says through the HIP engine, in the checks that begin so."""
    hip_ranks.compile_kernels()
    found = str(hip_ranks.library()), str(hip_ranks.wheel("7"))
    env = {f"HIP_DOUBLE_{name}": str(value) for name, value in settings.items()}
    double = partial(_on_the_double, *found, env, breaks)
    ways = tuple(check for check in selftest.run.WAYS["hip"] if check.name.startswith(tuple(only)))
    monkeypatch.setattr(selftest.run, "WAYS", {**selftest.run.WAYS, "hip": ways})
    with ficco.options(engine="hip"):  # whose kernels the host carries out, thread by thread
        return results(monkeypatch, double, only, replace(FAST, limit_s=90.0), ranks)


def _tells_how_it_is_timed() -> None:
    """A rate of 77 says that a call was pulled, and with products, 55 that it moved columns."""

    def rate(at: Any, group: Any, schedule: str, peers: int, n: int = 0) -> float:
        if "-2d" in schedule:
            return 55.0
        return 77.0 if "pull" in schedule and n else 1.0

    selftest.checks.gb_per_s = rate


#: Of a run with two-dimensional copies, and of one without.
COLUMNS = ("columns by hipMemcpy2DAsync;", "by packing or ficco's kernel, for want of a 2D copy")


def test_it_passes_through_the_hip_engine(monkeypatch: Any) -> None:
    # Every check, of schedules and operators one each: tests/test_hip.py runs them all.
    only = [check.name for check in (*selftest.run.CHECKS, *selftest.run.WAYS["hip"])]
    each = {"schedule growing", "operator matmul_reduce_scatter"}
    only = [one for one in only if one in each or not one.startswith(("schedule ", "operator "))]
    found = on_the_double(monkeypatch, only, _tells_how_it_is_timed)
    assert failed(found) == set(), found
    assert "hip engine" in found["device and engine"].seen
    for way, words in (("write", "hipStreamWriteValue32"), ("copy", "4-byte copy")):
        result = found[f"signals by {way}"]
        assert result.verdict == "ok" and words in result.seen
    assert found["attribute CanUseStreamWaitValue"].seen == "1"
    if find_spec("triton") is not None:
        assert "calls exact" in found["product whose tiles wait"].seen
    assert COLUMNS[0] in found["2D copies"].seen and COLUMNS[1] not in found["2D copies"].seen
    assert sum(name.startswith("sharing of") for name in found) == 3
    ways = dma.WAYS["hip"]
    rows = sum(map(len, ways.values())) + len(ways["copy"])  # copies of every size, too
    assert sum(name.startswith("FICCO_HIP") for name in found) == rows
    # Ways are timed by what they are about.
    rates = {
        **{f"copy={value}": "1.0 G" for value in ways["copy"]},
        **{f"columns={value}": "55.0 " for value in ("2d", "pack")},
        **{f"events={value}": "77.0 " for value in ("plain", "write")},
    }
    for way, rate in rates.items():
        assert found[f"FICCO_HIP={way}"].seen.split("; ")[1].startswith(rate), way
    # On CPUs there are no kernels and no copy engines, and PyTorch has no symmetric memory; the
    # double waits on signal memory alone. Without a compiler, or Triton, there is more.
    refused = {name for name, result in found.items() if result.verdict != "ok"}
    # Its HIP is 7.2, without batches, which two ranks do not have either.
    ways = {"FICCO_HIP=signals=uncached", "FICCO_HIP=memory=torch", "FICCO_HIP=copy=batch"}
    ways |= {"batches of copies"}
    assert "another way took its place" in found["FICCO_HIP=copy=batch"].seen
    tools = {"FICCO_HIP=signals=kernel", "product whose tiles wait"}
    tools |= {"copies by kernel", "kernel copies of every size"}
    assert refused - tools == ways | OF_GPUS


def _no_copies_to_peers() -> None:
    from ficco.dma import hip_api

    right = hip_api.copy
    hip_api.copy = lambda dst, src, nbytes, stream: nbytes == 4 or right(dst, src, nbytes, stream)


def test_what_a_card_does_not_have(monkeypatch: Any) -> None:
    """Each kind of memory and each attribute by itself, where no engine can be made either; memory
    of two kinds stays as it was."""
    settings = {"SIGNAL_IPC": 0, "WAIT": 0}
    found = on_the_double(monkeypatch, ["attribute", "sharing"], _no_copies_to_peers, **settings)
    assert failed(found) == {"sharing of plain memory", "sharing of uncached memory"}
    assert "0x0 by rank 1, not 0x5eed0001" in found["sharing of plain memory"].seen
    signal, waits = "sharing of signal memory", "attribute CanUseStreamWaitValue"
    assert failed(found, "not offered") == {signal, waits}
    assert "hipIpcGetMemHandle" in found[signal].seen and "uncached" in found[signal].instead
    assert found[waits].seen == "0 on ranks [0, 1]" and "kernel" in found[waits].instead


def test_calls_that_are_refused(monkeypatch: Any) -> None:
    """Columns without a 2D copy are exact, but packed columns are not what was to be checked."""
    only = ["2D copies", "FICCO_HIP=copy=peer", "FICCO_HIP=copy=dtod, "]
    settings = {"FAIL": "hipMemcpyPeerAsync:801:1:1000000", "2D": 0}
    found = on_the_double(monkeypatch, only, **settings)
    peer = {"FICCO_HIP=copy=peer", "FICCO_HIP=copy=peer, every size"}
    assert failed(found, "not offered") == {"2D copies", *peer} and not failed(found)
    for name in peer:
        assert "hipMemcpyPeerAsync" in found[name].seen and "another" in found[name].instead
    packed = found["2D copies"]
    assert "calls exact" in packed.seen and "packs columns" in packed.instead
    assert COLUMNS[1] in packed.seen and COLUMNS[0] not in packed.seen
    beside = "2d:pieces=4,copy=1 takes [0-9.]+ times as long as hetero-fused-1d:pieces=4,copy=1"
    assert re.search(beside, packed.seen)


def _batches_of_small_copies_pay() -> None:
    def rate(at: Any, group: Any, schedule: str, peers: int, n: int = 0) -> float:
        batched = os.environ["FICCO_HIP"] == "copy=batch"
        return 1.5 if batched and at.settings.pair_bytes <= 1 << 16 else 1.0

    selftest.checks.gb_per_s = rate


def test_batches_are_timed_for_the_machine_file(monkeypatch: Any) -> None:
    only, breaks = ["batches", "FICCO_HIP=copy=batch"], _batches_of_small_copies_pay
    found = on_the_double(monkeypatch, only, breaks, ranks=3, VERSION=71526333)
    assert found["FICCO_HIP=copy=batch"].verdict == "ok"
    batches = found["batches of copies"]
    assert (batches.verdict, batches.seen) == ("ok", "batched_copies: 65536 B in the machine file")
    assert "copies of 65536 bytes: 1.00 GB/s received per rank, 1.50 in batches" in batches.details
    gains = dict.fromkeys((4096, 16384, 65536), 40.0)
    for size, most in ((4096, 0), (16384, 4096), (65536, 16384), (1, 65536)):
        assert selftest.checks.batched_bytes(gains | {size: -1.0} if size > 1 else gains) == most


# Copies that lie, parts that crash or hang, and what a report says of them.

#: The longest copy that the broken runtimes below make.
LONGEST = 1 << 20


def _breaks_copies(how: str, machine: str = "") -> None:
    """Copies to peers of more than ``LONGEST`` bytes, or those of one kind, go wrong."""
    from ficco.dma import hip_api

    os.environ["FICCO_MACHINE"] = machine
    right, without_units = hip_api.copy, hip_api.calls.hipMemcpyAsync

    def copy(dst: int, src: int, nbytes: int, stream: Any) -> None:
        if nbytes <= LONGEST or how == "nocu":
            right(dst, src, nbytes, stream)
        elif how == "crash":
            os._exit(7)
        elif how == "hang":
            word = hip_api.malloc(hip_api.SIGNAL_BYTES, "signal")
            hip_api.wait_equal(stream, word, 7)
        else:
            right(dst, src, nbytes - 4, stream)

    def nothing(dst: int, src: int, nbytes: int, kind: Any, stream: Any) -> None:
        if kind != hip_api.WITHOUT_UNITS:
            without_units(dst, src, nbytes, kind, stream)

    hip_api.copy = copy
    if how == "nocu":
        hip_api.calls.hipMemcpyAsync = nothing


def reported(
    monkeypatch: Any,
    only: Sequence[str],
    breaks: Callable[[], None],
    **settings: Any,
) -> tuple[dict[str, CheckResult], dict[str, Any]]:
    """What the self-test says on the double, and its report as JSON holds it."""
    runs, right = [], selftest.run.selftest

    def run(*args: Any) -> Any:
        device, ranks, fast = args
        runs.append(right(device, ranks, replace(fast, **settings)))
        return runs[-1]

    monkeypatch.setattr(selftest.run, "selftest", run)
    found = on_the_double(monkeypatch, only, breaks)
    return found, json.loads(json.dumps(document(runs[0], {})))


def limited(found: dict[str, CheckResult], report: dict[str, Any], said: str) -> None:
    """Fail unless copies are limited, and nothing else has failed."""
    assert failed(found) == {"copies of every size"}
    result = found["copies of every size"]
    assert said in result.seen and "all copies up to 1048576 bytes were exact" in result.seen
    assert result.facts["largest"] == LONGEST
    machine = selftest.run.machine(report)
    assert machine is not None and machine.largest_copy == LONGEST
    line = next(one for one in selftest.run.claims(report) if "512 MiB" in one)
    assert "| refuted |" in line and "copies of every size" in line


@pytest.mark.parametrize(
    ("how", "limit_s"), [("crash", 30.0), pytest.param("hang", 8.0, marks=pytest.mark.slow)]
)
def test_copies_of_more_than_a_limit(how: str, limit_s: float, monkeypatch: Any) -> None:
    """The report has the limit, and the checks behind it are tried."""
    only = ["device", "copies of every", "sharing of plain"]
    found, report = reported(monkeypatch, only, partial(_breaks_copies, how), limit_s=limit_s)
    limited(found, report, "it tried copies of 1048580 bytes by shard-overlap;")
    assert ("exit code 7" in found["copies of every size"].seen) == (how == "crash")


def test_copies_that_copy_nothing(monkeypatch: Any) -> None:
    """Of one kind, from the first size on: no limit helps."""
    only = ["copies of every", "FICCO_HIP=copy=nocu", "FICCO_HIP=copy=dtod, "]
    found, report = reported(monkeypatch, only, partial(_breaks_copies, "nocu"))
    assert failed(found) == {"FICCO_HIP=copy=nocu", "FICCO_HIP=copy=nocu, every size"}
    seen = found["FICCO_HIP=copy=nocu, every size"].seen
    assert "1 of 1 words of rank" in seen and "up to 0 bytes" in seen
    assert selftest.run.machine(report) is None


@pytest.mark.parametrize(
    ("verdicts", "largest", "verdict", "limit"),
    [
        (("ok", "ok"), 512 << 20, "proven", None),
        (("failed", "ok"), 128 << 20, "refuted", 128 << 20),
        (("ok", "failed"), 128 << 20, "refuted", None),  # of another way than the one in use
        (("failed", "ok"), 4096, "refuted", None),  # so small that a limit is of no use
        (("ok", "not offered"), 512 << 20, "not offered", None),
        (("not offered", "not tried"), 0, "not tried", None),
    ],
)
def test_the_most_severe_row_decides(
    verdicts: tuple[str, str], largest: int, verdict: str, limit: int | None
) -> None:
    run = selftest.run.Selftest("cuda", 8, FAST, "hip")
    names = "copies of every size", "FICCO_HIP=copy=nocu, every size"
    for name, one in zip(names, verdicts, strict=True):
        run.results.append(CheckResult(name, one, name, facts={"largest": largest}))
    known = {"accelerator": "AMD Instinct of tomorrow"}
    run.results.append(CheckResult("device and engine", "ok", "", facts=known))
    run.results.append(CheckResult("batches of copies", "ok", "", facts={"batched": 1 << 16}))
    report = document(run, {})
    line = next(one for one in selftest.run.claims(report) if "512 MiB" in one)
    assert f" | {verdict} | 8 x AMD Instinct of tomorrow, " in line
    machine = selftest.run.machine(report)
    assert (machine and machine.largest_copy) == limit
    assert machine is None or machine.batched_copies == 1 << 16


def _copies_behind_the_signal() -> None:
    """Copies are enqueued on another stream, which is late, so that no signal waits for them."""
    from ficco.dma import hip_api

    right, streams = hip_api.copy, []

    def copy(dst: int, src: int, nbytes: int, stream: Any) -> None:
        if nbytes > 4 and not streams:
            streams.append(hip_api.make_stream(0))
            double = ctypes.CDLL("libamdhip64.so")
            double.double_delay.argtypes = [ctypes.c_void_p, ctypes.c_long]
            double.double_delay(streams[0].as_c_void_p(), 2_000)
        right(dst, src, nbytes, streams[0] if nbytes > 4 else stream)

    def close(address: int) -> None:
        for one in streams:  # the double allows no copy to memory that is closed
            hip_api.drain(one)
        unmap(address)

    unmap, hip_api.close_shared = hip_api.close_shared, close
    hip_api.copy = copy


def test_signals_before_their_copies(monkeypatch: Any) -> None:
    only = ["order of", "attribute"]
    found, report = reported(monkeypatch, only, _copies_behind_the_signal)
    assert "wrong elements" in found["order of copy and signal"].seen
    assert found["attribute CanUseStreamWaitValue"].verdict == "ok"
    line = next(one for one in selftest.run.claims(report) if one.startswith("| another device"))
    assert "| refuted |" in line and "order of copy and signal: " in line


def test_a_doctor_that_hangs(monkeypatch: Any) -> None:
    """The report lacks its part alone."""

    def hangs(command: list[str], **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(selftest.run.subprocess, "run", hangs)
    run = selftest.run.Selftest("cuda", 8, FAST, "hip")
    report = document(run, selftest.run.about())
    assert "timed out after 60" in markdown(report)
    assert "| any speed | not tried | no row |" in selftest.run.claims(report)


def test_a_report_is_read_back_and_limits_copies(
    tmp_path: Path, monkeypatch: Any, ran: Any
) -> None:
    breaks = partial(_breaks_copies, "short")
    only = ["device", "copies of every", "figures", "sharing of", "attribute"]
    found, report = reported(monkeypatch, only, breaks)
    limited(found, report, "1 of 262145 words of rank")
    path = tmp_path / "mi300x.json"
    path.write_text(json.dumps(report))
    lines = ran("doctor --read", path.with_suffix(".md")).out.splitlines()
    verdicts = {line.split(" | ")[0][2:]: line.split(" | ")[1] for line in lines[2:]}
    assert list(verdicts) == [*probe.CLAIMS["hip"]]
    assert verdicts["processes can share signal memory"] == "proven"
    assert verdicts["float8 GEMMs are correct"] == "not tried"
    assert sum(verdict == "refuted" for verdict in verdicts.values()) == 1
    machine = load(path.with_suffix(".yaml"))
    assert machine.largest_copy == LONGEST and machine.memory is not None
    # With this file the engine is exact, although the runtime is as broken as before.
    in_pieces = partial(breaks, machine=str(path.with_suffix(".yaml")))
    assert hip_ranks.run(2, _gathers, in_pieces) == [(True, True, 3)] * 2
    assert hip_ranks.run(2, _gathers, breaks) == [(False, False, 1)] * 2
    # The self-test tries long copies in spite of the file.
    found = on_the_double(monkeypatch, ["copies of every"], in_pieces)
    assert found["copies of every size"].facts["largest"] == LONGEST


def _gathers(at: ranks.Rank, breaks: Callable[[], None]) -> tuple[bool, bool, int]:
    """Whether a shard of more than twice the limit arrives, pieces are reported, and their
    number."""
    breaks()
    shard = torch.arange(LONGEST // 2 + 3, dtype=torch.float32)[:, None] + at.rank
    call = partial(ficco.all_gather_matmul, shard, torch.empty(1, 0), return_gathered=True)
    call(schedule="shard-overlap")
    before = hip_ranks.calls("hipMemcpyDtoDAsync")
    _, gathered = call(schedule="shard-overlap")
    copies = hip_ranks.calls("hipMemcpyDtoDAsync") - before
    exact = all(
        torch.equal(part, shard - at.rank + rank)
        for rank, part in enumerate(gathered.view(at.world, -1, 1))
    )
    text = workspace_of(dist.group.WORLD, shard.device).engine.capabilities().copy
    hip_ranks.spotless()
    return exact, f"in pieces of {LONGEST} bytes" in text, copies


def _ends_in_a_step() -> None:
    from ficco.tools.tune import run

    run.MEASURES["memory"] = lambda site: os._exit(7)


def test_figures_of_steps_before_a_crash_and_times_of_shapes(monkeypatch: Any) -> None:
    settings = {"figures": ("copies", "memory"), "shapes": "cpu", "shape_seconds": 0.0}
    only = ["figures", "timeouts", "time of"]
    found, report = reported(monkeypatch, only, _ends_in_a_step, **settings)
    assert failed(found) == {"figures of the machine"} and found["timeouts"].verdict == "ok"
    machine = selftest.run.machine(report)
    assert machine is not None and machine.copies is not None and machine.memory is None
    shapes = [result.facts["ms"] for name, result in found.items() if name.startswith("time of")]
    assert len(shapes) == 3
    for ms in shapes:
        assert min(ms.values()) > 0 and "serial:collective" in ms
    line = next(one for one in selftest.run.claims(report) if one.startswith("| any speed"))
    assert "refuted" in line  # by the figures


def _stands_still_in_a_shape() -> None:
    right = selftest.checks.call_times

    def times(at: Any, group: Any, schedules: Any, sizes: Any, *rest: Any, **how: Any) -> Any:
        if sizes[1] == 128:
            time.sleep(1000)
        return right(at, group, schedules, sizes, *rest, **how)

    selftest.checks.call_times = times


@pytest.mark.slow
def test_times_of_shapes_besides_one_that_hangs(monkeypatch: Any) -> None:
    settings = {"shapes": "cpu", "shape_seconds": 0.0, "limit_s": 8.0}
    found, report = reported(monkeypatch, ["time of"], _stands_still_in_a_shape, **settings)
    assert failed(found) == {"time of 512x128x256"}
    others = [one for name, one in found.items() if name.startswith("time") and not one.instead]
    assert len(others) == 2
    for one in others:
        assert min(one.facts["ms"].values()) > 0 and "serial:collective" in one.facts["ms"]
    line = next(one for one in selftest.run.claims(report) if one.startswith("| any speed"))
    assert "refuted" in line


# Claims of the page, and hosts on which nothing can run.


def known_rows() -> list[str]:
    """Names of all checks on AMD GPUs."""
    every = (*selftest.run.CHECKS, *selftest.run.timed(SelftestSettings.of("cuda")))
    return [check.name for check in (*every, *selftest.run.WAYS["hip"])]


def test_the_page_has_the_claims_of_the_selftest() -> None:
    """Every claim with its rows; what it depends on, and the remedy, are on the page alone."""
    names = known_rows()
    claims = {claim: rows.split(", ") for claim, rows in probe.CLAIMS["hip"].items()}
    wanted = {
        claim: ", ".join(f"`{row}`" if row in names else f"`{row} ..`" for row in rows)
        for claim, rows in claims.items()
    } | {claim: "none" for claim, rows in claims.items() if rows == [""]}
    page = (Path(__file__).parents[2] / "docs/api/amd-claims.md").read_text()
    _, _, *table = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("|")]
    assert {claim: rows for claim, _, rows, _ in table} == wanted
    assert all(why and advice for _, why, _, advice in table)
    prefixes = [row for rows in claims.values() for row in rows if row]
    assert not [one for one in prefixes if not any(name.startswith(one) for name in names)]
    assert not [name for name in names if not name.startswith(tuple(prefixes))]


@pytest.mark.parametrize(
    ("builds", "there", "said"),
    [
        ({}, ("kfd", "amdgpu"), "is built for CPUs only and cannot use the AMD GPUs"),
        ({"cuda": "13.0"}, ("kfd",), "is built for CUDA 13.0 and cannot use the AMD GPUs"),
        ({"hip": "7.2"}, (), "kfd does not exist; start a container with --device /dev/kfd"),
        ({"hip": "7.2"}, ("kfd",), "hip-python"),
        ({}, (), ""),
    ],
)
def test_hosts_that_cannot_run(
    builds: dict[str, str],
    there: Sequence[str],
    said: str,
    tmp_path: Path,
    monkeypatch: Any,
    ran: Any,
) -> None:
    for name in there:
        (tmp_path / name).touch()
    monkeypatch.setattr(doctor, "KFD", tmp_path / "kfd")
    monkeypatch.setattr(doctor, "AMDGPU", tmp_path / "amdgpu")
    monkeypatch.setitem(sys.modules, "hip", None)  # as without hip-python
    monkeypatch.delitem(sys.modules, "ficco.dma.hip_api", raising=False)
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, builds.get(name))
    obstacle = doctor.obstacle()
    assert said in obstacle and bool(said) == bool(obstacle)
    if not obstacle:
        return
    monkeypatch.setattr(selftest.run, "about", lambda: {"obstacle": obstacle})
    monkeypatch.chdir(tmp_path)
    assert said in ran("doctor --selftest", code=2).err  # before a rank is started
    if "hip" not in builds:
        monkeypatch.setattr(doctor.gpu, "is_available", lambda: True)  # of NVIDIA, beside AMD's
        assert doctor.obstacle() == ""


def test_a_driver_without_peer_access_and_no_runtime(tmp_path: Path, monkeypatch: Any) -> None:
    kfd = tmp_path / "kfd"
    kfd.touch()
    for settings, words in (
        ({"PEER": 0}, "GPU 0 cannot access the memory of GPU 1 (hipDeviceCanAccessPeer, 56"),
        ({}, ""),
    ):
        (said,) = hip_ranks.run(1, _unreachable, str(kfd), settings=settings)
        assert words in said and bool(words) == bool(said)
    (said,) = ranks.run(1, _without_library, str(kfd), str(hip_ranks.wheel("7")))
    assert "libamdhip64.so cannot be opened; install ROCm 7.2 or later" in said


def _unreachable(at: ranks.Rank, kfd: str) -> str:
    with (
        mock.patch.object(torch.version, "hip", "7.2"),
        mock.patch.object(doctor, "KFD", Path(kfd)),
    ):
        return doctor.obstacle()


def _without_library(at: ranks.Rank, kfd: str, wheel: str) -> str:
    hip_ranks.bind(wheel)
    return _unreachable(at, kfd)


# What rates say.


def test_a_slow_pair_is_chance_on_cpus() -> None:
    rates = {(0, 1): 40.0, (0, 2): 41.0, (1, 2): 29.0}
    assert "slowest" not in selftest.checks.alike(rates, shared=False).seen
    rates[1, 2] = 27.0
    assert "the slowest between ranks 1 and 2" in selftest.checks.alike(rates, shared=True).seen


class _OfMany(_Alone):
    """A rank whose peers find what it finds."""

    known: Any = None

    def _exchange(self, mine: tuple[bool, Any]) -> list[tuple[bool, Any]]:
        return [mine] * self.world

    def engine(self, group: Any) -> Any:
        return self.known


def test_lanes_that_run_one_behind_the_other(monkeypatch: Any) -> None:
    """Four of seven links are filled: that is not what seven lanes are for."""
    speed, rates = selftest.checks, {"shard-overlap": 40.0}
    monkeypatch.setattr(speed, "gb_per_s", lambda at, group, name, peers: rates[name])
    for device, card, engines, compared in (
        ("cuda", "AMD Instinct MI300X", None, True),
        ("cuda", "a card that nobody described", None, True),
        ("cuda", "a card that nobody described", 4, False),
        ("cuda", "NVIDIA H200", None, False),  # a switch: one port, however many peers
        ("cpu", "AMD Instinct MI300X", None, False),
    ):
        at = _OfMany(0, 8, torch.device(device), FAST, None)
        gb_per_s = [38.0, 40.0, 42.0] * 9 + [40.0]
        at.pairs = dict(zip(combinations(range(8), 2), gb_per_s, strict=True))
        at.known = mock.Mock()
        at.known.fingerprint.return_value = Fingerprint(card, 8)
        at.known.copy_engines.return_value = engines
        rates[speed.all_at_once(at)] = 4 * 40.0
        if compared:
            with pytest.raises(NotOffered, match=r"0\.57 of 7 links of 40\.0 GB/s") as refused:
                speed.bandwidth_of_all(at, None)
            assert "shard-overlap: 40.0 GB/s" in refused.value.details
        else:
            assert "links" not in speed.bandwidth_of_all(at, None).seen
        rates[speed.all_at_once(at)] = 6 * 40.0
        assert ("0.86 of 7 links" in speed.bandwidth_of_all(at, None).seen) == compared


def test_advice_about_amd_is_for_the_hip_engine_only() -> None:
    advice = {
        engine: {check.name: check.on(engine).instead for check in selftest.run.CHECKS}
        for engine in ("cpu", "cuda", "hip")
    }
    assert not re.search("AMD|HIP|HSA|HW_QUEUES", str([advice["cpu"], advice["cuda"]]))
    changed = {name for name, text in advice["hip"].items() if text != advice["cpu"][name]}
    assert changed == set(probe.ADVICE["hip"]) and len(changed) == 4
    text = advice["hip"]["bandwidth of all pairs"]
    assert "GPU_MAX_HW_QUEUES=16" in text and "fewer copy lanes" in text


def test_what_copies_look_like() -> None:
    """Like engines, or like kernels where products or copies are slowed down by more than 1.3."""
    looks = selftest.checks.looks
    for products, copies in ((1.05, 1.02), (1.29, 1.29)):
        assert looks(products, copies).seen.startswith("looks like copies by DMA engines")
    for products, copies in ((1.5, 1.02), (1.05, 3.0)):
        with pytest.raises(NotOffered, match="looks like copies by compute units"):
            looks(products, copies)
