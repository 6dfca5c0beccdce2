"""``ficco doctor --selftest`` on intact and on broken engines, kernels and drivers."""

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


#: Checks of features that CPUs lack.
GPU_CHECKS = {"kernels", "graphs", "products beside copies"}


def _broken(breaks: Callable[[], None], fn: Callable[..., Any], *args: Any) -> Any:
    breaks()
    return fn(*args)


def selftest_results(
    monkeypatch: Any,
    breaks: Callable[[], None],
    only: Sequence[str] = (),
    settings: SelftestSettings = FAST,
    ranks: int = 2,
) -> dict[str, CheckResult]:
    """Results of the self-test, by check, on ranks with a fault. Its report must be complete."""
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


def failed(by_check: dict[str, CheckResult], verdict: str = "failed") -> set[str]:
    """Names of the checks with this verdict."""
    return {name for name, result in by_check.items() if result.verdict == verdict}


def halved(half: int) -> tuple[Any, ...]:
    """All checks except half of the schedules' and operators' checks."""
    checks = selftest.run.CHECKS
    halvable = [check for check in checks if check.name.startswith(("schedule ", "operator "))]
    return tuple(check for check in checks if check not in halvable or check in halvable[half::2])


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
    report = json.loads(ran("doctor --selftest --device cpu --json").out)
    assert report["ranks"] == 2 and report["failed"] == 0
    verdicts = {result["check"]: result["verdict"] for result in report["results"]}
    assert list(verdicts) == [check.name for check in selftest.run.CHECKS]
    refused = {name for name, verdict in verdicts.items() if verdict != "ok"}
    assert refused - {"signals by write", "signals by copy"} == GPU_CHECKS and len(refused) == 5
    (path,) = tmp_path.glob("ficco-selftest-????-??-??.md")
    assert json.loads(path.with_suffix(".json").read_text()) == report
    page = path.read_text()
    for words in ("0 failed", "| order of copy and signal | ok |", "GPU_MAX_HW_QUEUES=4"):
        assert words in page
    assert torch.__version__ in page


def test_one_rank(monkeypatch: Any) -> None:
    monkeypatch.setattr(selftest.run, "CHECKS", halved(1))
    run = selftest.run.selftest("cpu", 1, FAST)
    assert run.failed == 0, run.results
    verdicts = {result.check: result.verdict for result in run.results}
    assert verdicts["timeouts"] == verdicts["bandwidth of pairs"] == "not offered"


def _wrong_columns_and_posts() -> None:
    """Corrupt one byte of each strided copy; rank 0 drops the signals of ``shrinking:pull``."""
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
    checks = selftest_results(monkeypatch, _wrong_columns_and_posts, [*only, "timeouts"])
    wrong = {"memory of peers", "2D copies", "2D copies of every size", "order of copy and signal"}
    assert failed(checks) == wrong | {"signals, first way", "schedule shrinking"}
    assert "in the rows of ranks [1]" in checks["2D copies"].seen
    assert "hetero-fused-2d" in checks["memory of peers"].seen
    assert "shard-overlap" not in checks["memory of peers"].seen
    lost = checks["schedule shrinking"]
    assert "rank 1" in lost.seen and "SignalTimeout" in lost.seen and "rank 0" in lost.seen
    assert "Traceback" in lost.details and lost.instead


def _short_sums_a_slow_pair_and_no_kernels() -> None:
    """Rank 1 omits a part of each sum, one pair has a slow link, and no kernel copies exist."""
    engine, speed = cpu.CpuEngine, selftest.checks
    reduce, capabilities, alike = engine.reduce, engine.capabilities, speed.alike

    def short_sum(self: Any, program: Any, step: int, reduction: Any) -> Any:
        if self.rank == 1 and len(reduction.parts) > 1:
            reduction = reduction._replace(parts=reduction.parts[1:])
        return reduce(self, program, step, reduction)

    rates = {(0, 1): 40.0, (0, 2): 41.0, (1, 2): 27.0}
    speed.alike = lambda measured, shared: alike(rates, shared=False)
    dma_only: Any = lambda self: replace(capabilities(self), movers=("dma",))  # noqa: E731
    engine.reduce, engine.capabilities = short_sum, dma_only  # type: ignore[method-assign]


def test_short_sums_a_slow_pair_and_no_kernels(monkeypatch: Any) -> None:
    only = ["operator all_to_all_m", "operator matmul_reduce_scatter", "operator matmul_all_reduce"]
    only += ["copies by kernel", "bandwidth of pairs"]
    checks = selftest_results(monkeypatch, _short_sums_a_slow_pair_and_no_kernels, only)
    assert failed(checks) == {"operator matmul_reduce_scatter", "operator matmul_all_reduce"}
    scattered = checks["operator matmul_reduce_scatter"].seen
    assert re.search(r"rank 1: \S+, call \d+ of \d+: ", scattered) and "rank 0" not in scattered
    gathered = checks["operator matmul_all_reduce"].seen
    assert "rank 0: " in gathered and "in the rows of ranks [1]" in gathered
    # Missing features do not fail a check.
    assert checks["operator all_to_all_matmul"].verdict == "ok"
    assert checks["copies by kernel"].verdict == "not offered"
    pairs = checks["bandwidth of pairs"]
    assert pairs.verdict == "not offered" and "links" in pairs.instead
    assert "40.0 GB/s" in pairs.seen and "the slowest between ranks 1 and 2" in pairs.seen
    assert "ranks 0 and 2: 41.0 GB/s" in pairs.details and "Traceback" not in pairs.details


def _by_kernel(fault: Callable[[], Any]) -> None:
    """Make rank 1 run ``fault`` before each kernel copy."""
    right = cpu.CpuEngine.copy

    def copy(self: Any, program: Any, step: int, transfer: Any) -> Any:
        if transfer.mover == "kernel" and self.rank == 1:
            fault()
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


#: Fault of rank 1 before copies by a kernel or, in the last row, while its peers time the bandwidth
#: of all pairs; settings, and part of the message, which must name the first error.
FAILING: list[tuple[Callable[[], Any], dict[str, float], str]] = [
    (_refuses, {}, "rank 1: BackendError: moduleLoad"),
    (partial(os._exit, 7), {}, "exit code 7"),
    (partial(time.sleep, 1000), {"limit_s": 3.0}, "limit 3 s"),
    (_fails_while_timed, {"timeout_s": 1.0, "limit_s": 6.0}, "rank 1: MemoryError: no room"),
]


@pytest.mark.parametrize(("fault", "settings", "message"), FAILING)
def test_a_rank_that_fails(fault: Any, settings: Any, message: str, monkeypatch: Any) -> None:
    """Only the check of the fault fails, none before or after it."""
    by_kernel = fault is not _fails_while_timed
    breaks = partial(_by_kernel, fault) if by_kernel else fault
    only = ["schedule serial:collective", "copies by kernel", "bandwidth of all"]
    checks = selftest_results(monkeypatch, breaks, only, replace(FAST, **settings))
    check = "copies by kernel" if by_kernel else "bandwidth of all pairs"
    assert failed(checks) == {check} and message in checks[check].seen


def test_ranks_that_do_not_start_are_reported(monkeypatch: Any, tmp_path: Path, ran: Any) -> None:
    checks = selftest_results(monkeypatch, os.abort, ["memory", "timeouts"])
    untried = {name for name, result in checks.items() if result.verdict == "not tried"}
    assert failed(checks) == {"start of ranks"} and untried == {"memory of peers", "timeouts"}
    assert "SIGABRT" in checks["start of ranks"].seen
    monkeypatch.setattr(selftest.run, "about", dict)
    monkeypatch.setattr(SelftestSettings, "of", lambda device: FAST)
    out = tmp_path / "report.md"
    output = ran("doctor --selftest --device cpu --ranks 2 --report", out, code=1).out
    words = " ".join(output.split())
    assert "memory of peers" in words and "1 failed, 2 not tried" in words
    assert "report.md and" in words and "## start of ranks: failed" in out.read_text()


# Kernels: PyTorch's operations as replacements, and kernels compiled for the CPU. There a launch
# runs synchronously on any stream, one word of a signal after the other.


def _wide(rows: torch.Tensor) -> torch.Tensor:
    column = rows.storage_offset() % rows.stride(0)
    return rows.as_strided(
        (rows.shape[0], rows.stride(0)), rows.stride(), rows.storage_offset() - column
    )


class _Alone(Rank):
    """The only rank of a self-test, without processes."""

    def _exchange(self, outcome: tuple[bool, Any]) -> list[tuple[bool, Any]]:
        return [outcome]


def _checked(kernels: Kernels | TorchKernels, monkeypatch: Any) -> str:
    """Observation of the kernels' check, or its error."""
    monkeypatch.setattr(probe, "own_kernels", lambda device: (kernels, None))
    at = _Alone(0, 1, torch.device("cpu"), FAST, None)
    try:
        return selftest.kernels.own(at, None).seen
    except CheckFailed as error:
        return f"wrong: {error}"


def _loses_sums_below_2(right: Any, out: torch.Tensor, parts: Any, at: Any) -> None:
    right(out, parts, at)
    if out.dtype == torch.float16:
        out.div_(2).trunc_().mul_(2)


PADDED = "4 x 33 x 100 torch.{} at 8 of 160 is wrong"
SUMMED = [f"2 x 4096 torch.float{n} in torch.float16 is wrong" for n in (16, 32)]
#: Replacement of the sum, expected parts of the message, and a part that must not occur.
WRONG_SUMS: list[tuple[Callable[..., Any], list[str], str]] = [
    (lambda right, out, parts, at: right(out, parts[:8], at), ["sum of 16 x 7"], "8 x"),
    (  # sums the gaps between rows, too
        lambda right, out, parts, at: right(_wide(out), list(map(_wide, parts)), at),
        [PADDED.format(name) for name in ("bfloat16", "float16")],
        "2 x",
    ),
    (_loses_sums_below_2, [*SUMMED, PADDED.format("float16")], "bfloat16"),
]


def test_operations_of_pytorch_in_place_of_kernels(monkeypatch: Any) -> None:
    right = _checked(TorchKernels(), monkeypatch)
    assert right.startswith("placement and sums exact, by PyTorch's operations; ")
    assert "posts and waits are not there" in right
    for wrong, expected, unexpected in WRONG_SUMS:
        kernels: Any = TorchKernels()
        kernels.reduce = partial(wrong, kernels.reduce)
        message = _checked(kernels, monkeypatch)
        assert all(words in message for words in expected) and unexpected not in message, message


#: Compiled for this CPU.
host_kernels = test_kernels.on_host


def test_compiled_kernels(host_kernels: Kernels, monkeypatch: Any) -> None:
    launches, right, batches = host_kernels.binding.launches, host_kernels.copies, []

    def copies(*args: Any, **options: Any) -> None:
        launched = len(launches)
        right(*args, **options)
        batches.append((len(args[0]), len(launches) - launched))

    monkeypatch.setattr(host_kernels, "copies", copies)
    launches.clear()
    assert _checked(host_kernels, monkeypatch) == (
        "placement, sums, copies, casts, merges, combinations, gates, routes, posts, waits and "
        "scripts as they should be, compiled for cpu"
    )
    assert batches == [(3, 1)] * 6  # several destinations, one launch
    assert {name for name, _ in launches} >= {name for name in NAMES if "copy" not in name}


def _waits_ten_times_in_parts(right: Any, words: Any, seconds: float, *rest: Any) -> None:
    """Wait ten times as long, in launches of 64 words that do not know the other words."""
    for start in range(0, len(words), 64):
        right(words[start : start + 64], 10 * seconds, *rest)


def _posts_all_words_once() -> Callable[..., Any]:
    """Omit the last word from the second call on."""
    ends = chain([None], repeat(-1))
    return lambda right, words, at: right(words[: next(ends)], at)


#: Replacements of kernels; lines of the message, each with the number of further lines about it.
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
            # Posts the word after the last one, too.
            "post": lambda right, words, at: right(
                [*words, (words[0][0] + 4 * selftest.kernels.WORDS, 1)], at
            ),
            "wait": _waits_ten_times_in_parts,
            # Loses the placement before the post.
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
def test_broken_compiled_kernels(turn: int, host_kernels: Kernels, monkeypatch: Any) -> None:
    """The message has a line for each broken kernel and for its consequences, and no other line."""
    wrong, expected = WRONG_KERNELS[turn]
    for name, instead in wrong.items():
        monkeypatch.setattr(host_kernels, name, partial(instead, getattr(host_kernels, name)))
    # Slow trials that use none of the replaced kernels.
    left_out = ["summed", "cast"] + ["merged", "gated", "routed", "combined"] * (turn > 0)
    for part in left_out:
        monkeypatch.setattr(selftest.kernels._Trial, part, lambda trial: [])
    message = _checked(host_kernels, monkeypatch)
    assert message.startswith("wrong: rank 0: ")
    for words in expected:
        assert words in message
    assert len(message.splitlines()) == len(expected) + sum(expected.values()), message


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
    """Results of the self-test on the HIP engine, of checks whose names start with ``only``."""
    hip_ranks.compile_kernels()
    paths = str(hip_ranks.library()), str(hip_ranks.wheel("7"))
    env = {f"HIP_DOUBLE_{name}": str(value) for name, value in settings.items()}
    double = partial(_on_the_double, *paths, env, breaks)
    ways = selftest.run.WAYS
    chosen = tuple(check for check in ways["hip"] if check.name.startswith(tuple(only)))
    monkeypatch.setattr(selftest.run, "WAYS", {**ways, "hip": chosen})
    with ficco.options(engine="hip"):  # the host runs its kernels, thread by thread
        return selftest_results(monkeypatch, double, only, replace(FAST, limit_s=90.0), ranks)


def _rates_by_call() -> None:
    """Report a rate of 77 for pulled calls with products, 55 for copies of columns, else 1."""

    def rate(at: Any, group: Any, schedule: str, peers: int, n: int = 0) -> float:
        if "-2d" in schedule:
            return 55.0
        return 77.0 if "pull" in schedule and n else 1.0

    selftest.checks.gb_per_s = rate


#: Text of a run with two-dimensional copies, and of a run without them.
COLUMNS = ("columns by hipMemcpy2DAsync;", "by packing or ficco's kernel, for want of a 2D copy")


def test_it_passes_through_the_hip_engine(monkeypatch: Any) -> None:
    # Every check, but one schedule and one operator: tests/test_hip.py runs all of them.
    only = [check.name for check in (*selftest.run.CHECKS, *selftest.run.WAYS["hip"])]
    left_out = re.compile("(schedule|operator) (?!growing$|matmul_reduce_scatter$)")
    only = [name for name in only if not left_out.match(name)]
    checks = on_the_double(monkeypatch, only, _rates_by_call)
    assert failed(checks) == set(), checks
    assert "hip engine" in checks["device and engine"].seen
    for way, words in (("write", "hipStreamWriteValue32"), ("copy", "4-byte copy")):
        result = checks[f"signals by {way}"]
        assert result.verdict == "ok" and words in result.seen
    assert checks["attribute CanUseStreamWaitValue"].seen == "1"
    if find_spec("triton") is not None:
        assert "calls exact" in checks["product whose tiles wait"].seen
    assert COLUMNS[0] in checks["2D copies"].seen and COLUMNS[1] not in checks["2D copies"].seen
    assert sum(name.startswith("sharing of") for name in checks) == 3
    ways = dma.WAYS["hip"]
    rows = sum(map(len, ways.values())) + len(ways["copy"])  # copies of every size, too
    assert sum(name.startswith("FICCO_HIP") for name in checks) == rows
    # The fault's rates show which call timed each setting.
    rates = {
        **{f"copy={value}": "1.0 G" for value in ways["copy"]},
        **{f"columns={value}": "55.0 " for value in ("2d", "pack")},
        **{f"events={value}": "77.0 " for value in ("plain", "write")},
    }
    for way, rate in rates.items():
        assert checks[f"FICCO_HIP={way}"].seen.split("; ")[1].startswith(rate), way
    # CPUs have no kernels and no copy engines, and PyTorch has no symmetric memory on them. The
    # double waits only on signal memory. Without a compiler or Triton more checks are refused.
    refused = {name for name, result in checks.items() if result.verdict != "ok"}
    # The double's HIP is 7.2, which has no batches; two ranks have no use for them either.
    unsupported = {"FICCO_HIP=signals=uncached", "FICCO_HIP=memory=torch", "FICCO_HIP=copy=batch"}
    unsupported |= {"batches of copies"}
    assert "another way took its place" in checks["FICCO_HIP=copy=batch"].seen
    tools = {"FICCO_HIP=signals=kernel", "product whose tiles wait"}
    tools |= {"copies by kernel", "kernel copies of every size"}
    assert refused - tools == unsupported | GPU_CHECKS


def _no_copies_to_peers() -> None:
    from ficco.dma import hip_api

    right = hip_api.copy
    hip_api.copy = lambda dst, src, nbytes, stream: nbytes == 4 or right(dst, src, nbytes, stream)


def test_features_that_a_gpu_lacks(monkeypatch: Any) -> None:
    """The probes of memory and attributes run where no engine can be created. Copies to two kinds
    of memory write nothing."""
    settings = {"SIGNAL_IPC": 0, "WAIT": 0}
    checks = on_the_double(monkeypatch, ["attribute", "sharing"], _no_copies_to_peers, **settings)
    assert failed(checks) == {"sharing of plain memory", "sharing of uncached memory"}
    assert "0x0 by rank 1, not 0x5eed0001" in checks["sharing of plain memory"].seen
    signal, waits = "sharing of signal memory", "attribute CanUseStreamWaitValue"
    assert failed(checks, "not offered") == {signal, waits}
    assert "hipIpcGetMemHandle" in checks[signal].seen and "uncached" in checks[signal].instead
    assert checks[waits].seen == "0 on ranks [0, 1]" and "kernel" in checks[waits].instead


def test_calls_that_are_refused(monkeypatch: Any) -> None:
    """Packed columns are exact, but the check of 2D copies needs a 2D copy."""
    only = ["2D copies", "FICCO_HIP=copy=peer", "FICCO_HIP=copy=dtod, "]
    settings = {"FAIL": "hipMemcpyPeerAsync:801:1:1000000", "2D": 0}
    checks = on_the_double(monkeypatch, only, **settings)
    peer = {"FICCO_HIP=copy=peer", "FICCO_HIP=copy=peer, every size"}
    assert failed(checks, "not offered") == {"2D copies", *peer} and not failed(checks)
    for name in peer:
        assert "hipMemcpyPeerAsync" in checks[name].seen and "another" in checks[name].instead
    packed = checks["2D copies"]
    assert "calls exact" in packed.seen and "packs columns" in packed.instead
    assert COLUMNS[1] in packed.seen and COLUMNS[0] not in packed.seen
    ratio = "2d:pieces=4,copy=1 takes [0-9.]+ times as long as hetero-fused-1d:pieces=4,copy=1"
    assert re.search(ratio, packed.seen)


def _batches_of_small_copies_pay() -> None:
    def rate(at: Any, group: Any, schedule: str, peers: int, n: int = 0) -> float:
        batched = os.environ["FICCO_HIP"] == "copy=batch"
        return 1.5 if batched and at.settings.pair_bytes <= 1 << 16 else 1.0

    selftest.checks.gb_per_s = rate


def test_batches_are_timed_for_the_machine_file(monkeypatch: Any) -> None:
    only, breaks = ["batches", "FICCO_HIP=copy=batch"], _batches_of_small_copies_pay
    checks = on_the_double(monkeypatch, only, breaks, ranks=3, VERSION=71526333)
    assert checks["FICCO_HIP=copy=batch"].verdict == "ok"
    batches = checks["batches of copies"]
    assert (batches.verdict, batches.seen) == ("ok", "batched_copies: 65536 B in the machine file")
    assert "copies of 65536 bytes: 1.00 GB/s received per rank, 1.50 in batches" in batches.details
    gains = dict.fromkeys((4096, 16384, 65536), 40.0)
    for size, limit in ((4096, 0), (16384, 4096), (65536, 16384), (1, 65536)):
        assert selftest.checks.batched_bytes(gains | {size: -1.0} if size > 1 else gains) == limit


# Wrong copies, checks that crash or hang, and their reports.

#: The longest correct copy of the faulty runtimes below.
LONGEST = 1 << 20


def _breaks_copies(fault: str, machine: str = "") -> None:
    """Break copies to peers above ``LONGEST`` bytes, or all copies without compute units."""
    from ficco.dma import hip_api

    os.environ["FICCO_MACHINE"] = machine
    right, without_units = hip_api.copy, hip_api.calls.hipMemcpyAsync

    def copy(dst: int, src: int, nbytes: int, stream: Any) -> None:
        if nbytes <= LONGEST or fault == "nocu":
            right(dst, src, nbytes, stream)
        elif fault == "crash":
            os._exit(7)
        elif fault == "hang":
            word = hip_api.malloc(hip_api.SIGNAL_BYTES, "signal")
            hip_api.wait_equal(stream, word, 7)
        else:
            right(dst, src, nbytes - 4, stream)

    def nothing(dst: int, src: int, nbytes: int, kind: Any, stream: Any) -> None:
        if kind != hip_api.WITHOUT_UNITS:
            without_units(dst, src, nbytes, kind, stream)

    hip_api.copy = copy
    if fault == "nocu":
        hip_api.calls.hipMemcpyAsync = nothing


def reported(
    monkeypatch: Any, only: Sequence[str], breaks: Callable[[], None], **settings: Any
) -> tuple[dict[str, CheckResult], dict[str, Any]]:
    """Results of the self-test on the double, and its report after a round trip through JSON."""
    runs, right = [], selftest.run.selftest

    def run(*args: Any) -> Any:
        device, ranks, fast = args
        runs.append(right(device, ranks, replace(fast, **settings)))
        return runs[-1]

    monkeypatch.setattr(selftest.run, "selftest", run)
    by_check = on_the_double(monkeypatch, only, breaks)
    return by_check, json.loads(json.dumps(document(runs[0], {})))


def limited(by_check: dict[str, CheckResult], report: dict[str, Any], message: str) -> None:
    """Assert that only the check of copy sizes failed and that the machine file limits copies."""
    assert failed(by_check) == {"copies of every size"}
    result = by_check["copies of every size"]
    assert message in result.seen and "all copies up to 1048576 bytes were exact" in result.seen
    assert result.facts["largest"] == LONGEST
    machine = selftest.run.machine(report)
    assert machine is not None and machine.largest_copy == LONGEST
    line = next(row for row in selftest.run.claims(report) if "512 MiB" in row)
    assert "| refuted |" in line and "copies of every size" in line


@pytest.mark.parametrize(
    ("fault", "limit_s"), [("crash", 30.0), pytest.param("hang", 8.0, marks=pytest.mark.slow)]
)
def test_copies_of_more_than_a_limit(fault: str, limit_s: float, monkeypatch: Any) -> None:
    """The report has the limit, and the following checks run."""
    only = ["device", "copies of every", "sharing of plain"]
    checks, report = reported(monkeypatch, only, partial(_breaks_copies, fault), limit_s=limit_s)
    limited(checks, report, "it tried copies of 1048580 bytes by shard-overlap;")
    assert ("exit code 7" in checks["copies of every size"].seen) == (fault == "crash")


def test_copies_that_copy_nothing(monkeypatch: Any) -> None:
    """Copies without compute units fail from the first size on, so there is no limit."""
    only = ["copies of every", "FICCO_HIP=copy=nocu", "FICCO_HIP=copy=dtod, "]
    checks, report = reported(monkeypatch, only, partial(_breaks_copies, "nocu"))
    assert failed(checks) == {"FICCO_HIP=copy=nocu", "FICCO_HIP=copy=nocu, every size"}
    message = checks["FICCO_HIP=copy=nocu, every size"].seen
    assert "1 of 1 words of rank" in message and "up to 0 bytes" in message
    assert selftest.run.machine(report) is None


@pytest.mark.parametrize(
    ("verdicts", "largest", "verdict", "limit"),
    [
        (("ok", "ok"), 512 << 20, "proven", None),
        (("failed", "ok"), 128 << 20, "refuted", 128 << 20),
        (("ok", "failed"), 128 << 20, "refuted", None),  # a kind of copy that is not in use
        (("failed", "ok"), 4096, "refuted", None),  # too small for a useful limit
        (("ok", "not offered"), 512 << 20, "not offered", None),
        (("not offered", "not tried"), 0, "not tried", None),
    ],
)
def test_the_most_severe_row_decides(
    verdicts: tuple[str, str], largest: int, verdict: str, limit: int | None
) -> None:
    run = selftest.run.Selftest("cuda", 8, FAST, "hip")
    names = "copies of every size", "FICCO_HIP=copy=nocu, every size"
    for name, result in zip(names, verdicts, strict=True):
        run.results.append(CheckResult(name, result, name, facts={"largest": largest}))
    known = {"accelerator": "AMD Instinct of tomorrow"}
    run.results.append(CheckResult("device and engine", "ok", "", facts=known))
    run.results.append(CheckResult("batches of copies", "ok", "", facts={"batched": 1 << 16}))
    report = document(run, {})
    line = next(row for row in selftest.run.claims(report) if "512 MiB" in row)
    assert f" | {verdict} | 8 x AMD Instinct of tomorrow, " in line
    machine = selftest.run.machine(report)
    assert (machine and machine.largest_copy) == limit
    assert machine is None or machine.batched_copies == 1 << 16


def _copies_after_the_signal() -> None:
    """Enqueue copies on another, delayed stream, so that signals do not wait for them."""
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
        for stream in streams:  # the double refuses copies to closed memory
            hip_api.drain(stream)
        unmap(address)

    unmap, hip_api.close_shared = hip_api.close_shared, close
    hip_api.copy = copy


def test_signals_before_their_copies(monkeypatch: Any) -> None:
    only = ["order of", "attribute"]
    checks, report = reported(monkeypatch, only, _copies_after_the_signal)
    assert "wrong elements" in checks["order of copy and signal"].seen
    assert checks["attribute CanUseStreamWaitValue"].verdict == "ok"
    line = next(row for row in selftest.run.claims(report) if row.startswith("| another device"))
    assert "| refuted |" in line and "order of copy and signal: " in line


def test_a_doctor_that_hangs(monkeypatch: Any) -> None:
    """The report lacks only the doctor's part."""

    def hangs(command: list[str], **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(selftest.run.subprocess, "run", hangs)
    run = selftest.run.Selftest("cuda", 8, FAST, "hip")
    report = document(run, selftest.run.about())
    assert "timed out after 60" in markdown(report)
    assert "| any speed | not tried | no row |" in selftest.run.claims(report)


def test_a_report_without_a_part_is_refused(tmp_path: Path, ran: Any) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"format": selftest.run.FORMAT, "engine": "hip"}))
    assert "required a whole report, got" in ran("doctor --read", path, code=2).err


def test_a_report_is_read_back_and_limits_copies(
    tmp_path: Path, monkeypatch: Any, ran: Any
) -> None:
    breaks = partial(_breaks_copies, "short")
    only = ["device", "copies of every", "figures", "sharing of", "attribute"]
    checks, report = reported(monkeypatch, only, breaks)
    limited(checks, report, "1 of 262145 words of rank")
    path = tmp_path / "mi300x.json"
    path.write_text(json.dumps(report))
    lines = ran("doctor --read", path.with_suffix(".md")).out.splitlines()
    verdicts = dict(line[2:].split(" | ")[:2] for line in lines[2:])
    assert list(verdicts) == [*probe.CLAIMS["hip"]]
    assert verdicts["processes can share signal memory"] == "proven"
    assert verdicts["float8 GEMMs are correct"] == "not tried"
    assert [*verdicts.values()].count("refuted") == 1
    machine = load(path.with_suffix(".yaml"))
    assert machine.largest_copy == LONGEST and machine.memory is not None
    # With this file the engine is exact on the same faulty runtime.
    in_pieces = partial(breaks, machine=str(path.with_suffix(".yaml")))
    assert hip_ranks.run(2, _gathers, in_pieces) == [(True, True, 3)] * 2
    assert hip_ranks.run(2, _gathers, breaks) == [(False, False, 1)] * 2
    # The self-test tries long copies in spite of the file.
    checks = on_the_double(monkeypatch, ["copies of every"], in_pieces)
    assert checks["copies of every size"].facts["largest"] == LONGEST


def _gathers(at: ranks.Rank, breaks: Callable[[], None]) -> tuple[bool, bool, int]:
    """Gather a shard of more than twice the limit: whether it is exact, whether the engine reports
    pieces, and the number of copies."""
    breaks()
    shard = torch.arange(LONGEST // 2 + 3, dtype=torch.float32)[:, None] + at.rank
    call = partial(ficco.all_gather_matmul, shard, torch.empty(1, 0), return_gathered=True)
    call(schedule="shard-overlap")
    earlier = hip_ranks.calls("hipMemcpyDtoDAsync")
    _, gathered = call(schedule="shard-overlap")
    copies = hip_ranks.calls("hipMemcpyDtoDAsync") - earlier
    exact = all(
        torch.equal(part, shard - at.rank + rank)
        for rank, part in enumerate(gathered.view(at.world, -1, 1))
    )
    capability = workspace_of(dist.group.WORLD, shard.device).engine.capabilities().copy
    hip_ranks.spotless()
    return exact, f"in pieces of {LONGEST} bytes" in capability, copies


def _ends_in_a_step() -> None:
    from ficco.tools.tune import run

    run.MEASURES["memory"] = lambda site: os._exit(7)


def test_figures_of_steps_before_a_crash_and_times_of_shapes(monkeypatch: Any) -> None:
    settings = {"figures": ("copies", "memory"), "shapes": "cpu", "shape_seconds": 0.0}
    only = ["figures", "timeouts", "time of"]
    checks, report = reported(monkeypatch, only, _ends_in_a_step, **settings)
    assert failed(checks) == {"figures of the machine"} and checks["timeouts"].verdict == "ok"
    machine = selftest.run.machine(report)
    assert machine is not None and machine.copies is not None and machine.memory is None
    shapes = [result.facts["ms"] for name, result in checks.items() if name.startswith("time of")]
    assert len(shapes) == 3
    for ms in shapes:
        assert min(ms.values()) > 0 and "serial:collective" in ms
    line = next(row for row in selftest.run.claims(report) if row.startswith("| any speed"))
    assert "refuted" in line  # because the figures failed


def known_rows() -> list[str]:
    """Names of all checks on AMD GPUs."""
    checks = (*selftest.run.CHECKS, *selftest.run.timed(SelftestSettings.of("cuda")))
    return [check.name for check in (*checks, *selftest.run.WAYS["hip"])]


def test_the_page_has_the_claims_of_the_selftest() -> None:
    """The page has every claim with its rows. Only the page has the reasons and the remedies."""
    names = known_rows()
    claims = {claim: rows.split(", ") for claim, rows in probe.CLAIMS["hip"].items()}
    expected = {
        claim: ", ".join(f"`{row}`" if row in names else f"`{row} ..`" for row in rows)
        for claim, rows in claims.items()
    } | {claim: "none" for claim, rows in claims.items() if rows == [""]}
    page = (Path(__file__).parents[2] / "docs/api/amd-claims.md").read_text()
    _, _, *table = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("|")]
    assert {claim: rows for claim, _, rows, _ in table} == expected
    assert all(why and advice for _, why, _, advice in table)
    prefixes = [row for rows in claims.values() for row in rows if row]
    assert not [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)]
    assert not [name for name in names if not name.startswith(tuple(prefixes))]


@pytest.mark.parametrize(
    ("builds", "files", "message"),
    [
        ({}, "kfd amdgpu", "is built for CPUs only and cannot use the AMD GPUs"),
        ({"cuda": "13.0"}, "kfd", "is built for CUDA 13.0 and cannot use the AMD GPUs"),
        ({"hip": "7.2"}, "", "kfd does not exist; start a container with --device /dev/kfd"),
        ({"hip": "7.2"}, "kfd", "hip-python"),
        ({}, "", ""),
    ],
)
def test_hosts_that_cannot_run(
    builds: dict[str, str], files: str, message: str, tmp_path: Path, monkeypatch: Any, ran: Any
) -> None:
    for name in files.split():
        (tmp_path / name).touch()
    for name in ("kfd", "amdgpu"):
        monkeypatch.setattr(doctor, name.upper(), tmp_path / name)
    monkeypatch.setitem(sys.modules, "hip", None)  # hip-python is not installed
    monkeypatch.delitem(sys.modules, "ficco.dma.hip_api", raising=False)
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, builds.get(name))
    obstacle = doctor.obstacle()
    assert message in obstacle and bool(message) == bool(obstacle)
    if not obstacle:
        return
    monkeypatch.setattr(selftest.run, "about", lambda: {"obstacle": obstacle})
    monkeypatch.chdir(tmp_path)
    assert message in ran("doctor --selftest", code=2).err  # before a rank is started
    if "hip" not in builds:
        monkeypatch.setattr(doctor.gpu, "is_available", lambda: True)  # an NVIDIA GPU as well
        assert doctor.obstacle() == ""


def test_a_driver_without_peer_access_and_no_runtime(tmp_path: Path, monkeypatch: Any) -> None:
    kfd = tmp_path / "kfd"
    kfd.touch()
    (obstacle,) = hip_ranks.run(1, _obstacle, kfd, settings={"PEER": 0})
    assert "GPU 0 cannot access the memory of GPU 1 (hipDeviceCanAccessPeer, 56" in obstacle
    assert hip_ranks.run(1, _obstacle, kfd) == [""]
    (obstacle,) = ranks.run(1, _obstacle, kfd, str(hip_ranks.wheel("7")))
    assert "libamdhip64.so cannot be opened; install ROCm 7.2 or later" in obstacle


def _obstacle(at: ranks.Rank, kfd: Path, wheel: str = "") -> str:
    """The doctor's obstacle; with a ``wheel`` of hip-python there is no library for it."""
    if wheel:
        hip_ranks.bind(wheel)
    patch = mock.patch.object
    with patch(torch.version, "hip", "7.2"), patch(doctor, "KFD", kfd):
        return doctor.obstacle()


def test_calls_are_shuffled_and_stale_data_shows() -> None:
    at, recorded = Rank(0, 1, torch.device("cpu"), FAST, None), []
    operands = selftest.checks.sized(at, FAST.small)
    stale = operands.reference().clone()

    def call(name: str, wrong: int) -> torch.Tensor:
        recorded.append((name, operands.a_LK.clone()))
        result = stale if name == "stale" else operands.reference()
        result.view(-1)[:wrong] += 1
        return result

    calls = {"right": partial(call, "right", 0), "off": partial(call, "off", 2)}
    lines = selftest.checks.compared(at, None, calls, operands, 20)
    rounds = [{name for name, _ in recorded[i : i + 2]} for i in range(0, 40, 2)]
    assert rounds == [{"right", "off"}] * 20 and len({recorded[i][0] for i in range(0, 40, 2)}) == 2
    assert len({a.numpy().tobytes() for _, a in recorded}) == at.iteration == 40
    assert len(lines) == 5 and lines[-1] == "so were 16 more of 40 calls"
    assert all(re.fullmatch(r"off, call \d+ of 40: 2 wrong elements", line) for line in lines[:4])
    (line,) = selftest.checks.compared(at, None, {"s": partial(call, "stale", 0)}, operands, 1)
    assert int(line.split()[-3]) > 100


def test_a_slow_pair_is_chance_on_cpus() -> None:
    rates = {(0, 1): 40.0, (0, 2): 41.0, (1, 2): 29.0}
    assert "slowest" not in selftest.checks.alike(rates, shared=False).seen
    rates[1, 2] = 27.0
    assert "the slowest between ranks 1 and 2" in selftest.checks.alike(rates, shared=True).seen


class _OfMany(_Alone):
    """A rank whose peers have its results."""

    stub: Any = None

    def _exchange(self, outcome: tuple[bool, Any]) -> list[tuple[bool, Any]]:
        return [outcome] * self.world

    def engine(self, group: Any) -> Any:
        return self.stub


def test_lanes_that_run_one_after_the_other(monkeypatch: Any) -> None:
    """Seven lanes fill only four of seven links."""
    speed, rates = selftest.checks, {"shard-overlap": 40.0}
    monkeypatch.setattr(speed, "gb_per_s", lambda at, group, name, peers: rates[name])
    for device, card, engines, limited in (
        ("cuda", "AMD Instinct MI300X", None, True),
        ("cuda", "a card that nobody described", None, True),
        ("cuda", "a card that nobody described", 4, False),
        ("cuda", "NVIDIA H200", None, False),  # a switch: one port, however many peers
        ("cpu", "AMD Instinct MI300X", None, False),
    ):
        at = _OfMany(0, 8, torch.device(device), FAST, None)
        gb_per_s = [38.0, 40.0, 42.0] * 9 + [40.0]
        at.pairs = dict(zip(combinations(range(8), 2), gb_per_s, strict=True))
        at.stub = mock.Mock()
        at.stub.fingerprint.return_value = Fingerprint(card, 8)
        at.stub.copy_engines.return_value = engines
        rates[speed.all_at_once(at)] = 4 * 40.0
        if limited:
            with pytest.raises(NotOffered, match=r"0\.57 of 7 links of 40\.0 GB/s") as refused:
                speed.bandwidth_of_all(at, None)
            assert "shard-overlap: 40.0 GB/s" in refused.value.details
        else:
            assert "links" not in speed.bandwidth_of_all(at, None).seen
        rates[speed.all_at_once(at)] = 6 * 40.0
        assert ("0.86 of 7 links" in speed.bandwidth_of_all(at, None).seen) == limited


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


def test_copies_look_like_engines_or_kernels() -> None:
    """Copies look like kernels if they slow products or copies down by more than 1.3."""
    looks = selftest.checks.looks
    for products, copies in ((1.05, 1.02), (1.29, 1.29)):
        assert looks(products, copies).seen.startswith("looks like copies by DMA engines")
    for products, copies in ((1.5, 1.02), (1.05, 3.0)):
        with pytest.raises(NotOffered, match="looks like copies by compute units"):
            looks(products, copies)
