"""``ficco doctor --selftest``: passes where all is well, and finds what is broken."""

from __future__ import annotations

import ctypes
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hip_ranks
import host_gpu
import pytest
import test_kernels as on_host
import torch
import torch.distributed as dist
from torch_kernels import TorchKernels

import ficco
from ficco.dma import cpu
from ficco.hip_kernels import build
from ficco.hip_kernels.launch import NAMES, Kernels, Script, Signals
from ficco.machine import Fingerprint
from ficco.tools import cli, probe, selftest
from ficco.tools.launch import launch
from ficco.tools.selftest.rank import CheckFailed, NotOffered, Rank, SelftestSettings
from ficco.tools.selftest.run import CheckResult, report

FAST = SelftestSettings(
    iterations=8,
    repeat=1,
    large=(96, 64, 16),
    pair_bytes=1 << 18,
    rounds=1,
    timeout_s=2.0,
    limit_s=20.0,
)


# Ranks on which something is broken.


def _columns_arrive_wrong() -> None:
    """One byte of each rectangle whose rows are apart."""
    right = cpu._move

    def move(dst: torch.Tensor, src: torch.Tensor) -> None:
        right(dst, src)
        if dst.stride(0) != dst.shape[1] and dst.numel():
            dst.view(torch.uint8)[-1, 2] ^= 128

    cpu._move = move


def _no_post() -> None:
    """Rank 0 posts nothing in pulled calls of one schedule."""
    right = cpu.CpuEngine.post

    def post(self: Any, program: Any, step: int, signals: Any) -> Any:
        broken = program.plan.schedule == "shrinking:pull" and self.rank == 0
        return right(self, program, step, () if broken else signals)

    cpu.CpuEngine.post = post  # type: ignore[method-assign]


def _refused_on_one_rank() -> None:
    right = cpu.CpuEngine.copy

    def copy(self: Any, program: Any, step: int, transfer: Any, mover: str) -> Any:
        if mover == "kernel" and self.rank == 1:
            raise ficco.errors.BackendError("moduleLoad", "999", "no such code")
        return right(self, program, step, transfer, mover)

    cpu.CpuEngine.copy = copy  # type: ignore[method-assign]


class _ForgetsAPart(TorchKernels):
    def reduce(self, out: torch.Tensor, parts: Sequence[torch.Tensor], stream: Any) -> None:
        super().reduce(out, parts[:8], stream)


class _CutsSmallHalves(TorchKernels):
    """Sums of float16, and those in it, lose what is smaller than 2."""

    def reduce(self, out: torch.Tensor, parts: Sequence[torch.Tensor], stream: Any) -> None:
        super().reduce(out, parts, stream)
        if out.dtype == torch.float16:
            out.div_(2).trunc_().mul_(2)


class _SumsWholeRows(TorchKernels):
    """Where rows lie apart, what is between them is summed, too."""

    def reduce(self, out: torch.Tensor, parts: Sequence[torch.Tensor], stream: Any) -> None:
        super().reduce(*(_wide(out), list(map(_wide, parts))), stream)


def _wide(rows: torch.Tensor) -> torch.Tensor:
    first = rows.storage_offset() % rows.stride(0)
    return rows.as_strided(
        (rows.shape[0], rows.stride(0)), rows.stride(), rows.storage_offset() - first
    )


def _forgets_a_term() -> None:
    """Rank 1 leaves a part out of sums."""
    right = cpu.CpuEngine.reduce

    def reduce(self: Any, program: Any, step: int, reduction: Any) -> Any:
        if self.rank == 1 and len(reduction.parts) > 1:
            reduction = reduction._replace(parts=reduction.parts[1:])
        return right(self, program, step, reduction)

    cpu.CpuEngine.reduce = reduce  # type: ignore[method-assign]


def _has(kernels: TorchKernels) -> None:
    probe.own_kernels = lambda device: (kernels, None)


def _dies() -> None:
    _on_kernel(lambda: os._exit(7))


def _stands_still() -> None:
    _on_kernel(lambda: time.sleep(1000))


def _on_kernel(do: Callable[[], None]) -> None:
    right = cpu.CpuEngine.copy

    def copy(self: Any, program: Any, step: int, transfer: Any, mover: str) -> Any:
        if mover == "kernel" and self.rank == 1:
            do()
        return right(self, program, step, transfer, mover)

    cpu.CpuEngine.copy = copy  # type: ignore[method-assign]


def _no_kernels() -> None:
    real = cpu.CpuEngine.capabilities
    cpu.CpuEngine.capabilities = lambda self: replace(  # type: ignore[method-assign]
        real(self), movers=("dma",)
    )


def _broken(breaks: Callable[[], None], fn: Callable[..., Any], *args: Any) -> Any:
    breaks()
    return fn(*args)


def results(
    monkeypatch: pytest.MonkeyPatch,
    breaks: Callable[[], None],
    only: Sequence[str] = (),
    settings: SelftestSettings = FAST,
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
    run = selftest.run.selftest("cpu", 2, settings)
    names = [result.check for result in run.results]
    assert names[: len(selftest.run.CHECKS)] == [check.name for check in selftest.run.CHECKS]
    assert len(names) == len(set(names))
    text = report(run, {})
    assert f"ranks were started {run.starts} times" in text and run.starts > 0
    assert (" came after the first that failed" in text) == (run.failed > 0)
    for result in run.results:
        assert f"| {result.check} | {result.verdict} |" in text
        assert (f"## {result.check}: failed" in text) == (result.verdict == "failed")
    for result in run.results:  # shown if the test fails
        print(result.check, result.verdict, result.seen, result.details, sep="\n  ")
    return {result.check: result for result in run.results}


def failed(found: dict[str, CheckResult]) -> set[str]:
    return {name for name, result in found.items() if result.verdict == "failed"}


# All is well.


def test_it_passes_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SelftestSettings, "of", lambda device: FAST)
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "4")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["doctor", "--selftest", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 2 and found["failed"] == 0
    verdicts = {result["check"]: result["verdict"] for result in found["results"]}
    assert list(verdicts) == [check.name for check in selftest.run.CHECKS]
    offered = {name for name, verdict in verdicts.items() if verdict == "ok"}
    assert set(verdicts) - offered == {
        "signals by write",
        "signals by copy",
        "kernels",
        "graphs",
        "products beside copies",
    }
    (path,) = tmp_path.glob("ficco-selftest-????-??-??.md")
    assert found["report"] == path.name
    text = path.read_text()
    for words in ("0 failed", "| order of copy and signal | ok |", "GPU_MAX_HW_QUEUES=4"):
        assert words in text
    assert torch.__version__ in text


def test_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    run = selftest.run.selftest("cpu", 1, FAST)
    assert run.failed == 0, run.results
    verdicts = {result.check: result.verdict for result in run.results}
    assert verdicts["timeouts"] == verdicts["bandwidth of pairs"] == "not offered"


def test_an_engine_without_kernels_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    only = ["operator matmul_all_reduce", "copies by kernel"]
    found = results(monkeypatch, _no_kernels, only)
    assert found["operator matmul_all_reduce"].verdict == "ok"
    assert found["copies by kernel"].verdict == "not offered"


# Something is broken.


def test_a_corrupted_byte(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["memory", "2D", "order", "schedule growing"]
    found = results(monkeypatch, _columns_arrive_wrong, only)
    assert failed(found) == {"memory of peers", "2D copies", "order of copy and signal"}
    assert "in the rows of ranks [1]" in found["2D copies"].seen
    assert "hetero-fused-2d" in found["memory of peers"].seen
    assert "shard-overlap" not in found["memory of peers"].seen
    # The command says so, too.
    out = tmp_path / "report.md"
    monkeypatch.setattr(selftest.run, "CHECKS", selftest.run.CHECKS[:1])
    monkeypatch.setattr(selftest.run, "about", dict)
    monkeypatch.setattr(SelftestSettings, "of", lambda device: FAST)
    arguments = ["doctor", "--selftest", "--device", "cpu", "--ranks", "2", "--out", str(out)]
    assert cli.run(arguments) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "memory of peers" in printed and "1 failed" in printed and "report.md" in printed
    assert "## memory of peers: failed" in out.read_text()


def test_a_post_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, _no_post, ["signals, first", "schedule s", "timeouts"])
    assert failed(found) == {"signals, first way", "schedule shrinking"}
    lost = found["schedule shrinking"]
    assert "rank 1" in lost.seen and "SignalTimeout" in lost.seen and "rank 0" in lost.seen
    assert "Traceback" in lost.details and lost.instead


def test_a_refusal_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, _refused_on_one_rank, ["copies by kernel", "bandwidth of all"])
    assert failed(found) == {"copies by kernel"}
    assert "rank 1: BackendError: moduleLoad" in found["copies by kernel"].seen
    assert found["bandwidth of all pairs"].verdict == "ok"


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operations in their place: what there is of them is checked all the same."""
    right = results(monkeypatch, partial(_has, TorchKernels()), ["kernels"])["kernels"]
    assert right.verdict == "ok" and "by PyTorch's operations" in right.seen
    assert "posts and waits are not there" in right.seen
    wrong = results(monkeypatch, partial(_has, _ForgetsAPart()), ["kernels"])["kernels"]
    assert wrong.verdict == "failed"
    assert "sum of 16 x 7" in wrong.seen and "8 x" not in wrong.seen
    wide = _checked(_SumsWholeRows(), monkeypatch)
    for dtype in ("bfloat16", "float16"):
        assert f"sum of 4 x 33 x 100 torch.{dtype} at 8 of 160 is wrong" in wide
    cut = _checked(_CutsSmallHalves(), monkeypatch)
    for part in ("float16", "float32"):
        assert f"sum of 2 x 4096 torch.{part} in torch.float16 is wrong" in cut
    assert "sum of 4 x 33 x 100 torch.float16 at 8 of 160 is wrong" in cut
    assert "bfloat16" not in cut


# The compiled kernels, on this CPU: launches are carried out at once, whatever their stream, one
# word of a signal after the other.


@pytest.fixture(scope="module")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    header = (on_host.ON_HOST / "device.h").read_text()
    text = (build.HERE / "kernels.cpp").read_text().replace('#include "device.h"\n', header)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "source", lambda: text)
        patch.setitem(build.FINDERS, "host", (on_host.for_this_cpu,))
        patch.setenv("FICCO_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield Kernels(on_host.HostBinding())


class _Alone(Rank):
    """The one rank of a self-test, without processes."""

    def _exchange(self, mine: tuple[bool, Any]) -> list[tuple[bool, Any]]:
        return [mine]


def _checked(kernels: Kernels | TorchKernels, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the check of kernels has seen, or finds wrong."""
    monkeypatch.setattr(probe, "own_kernels", lambda device: (kernels, None))
    at = _Alone(0, 1, torch.device("cpu"), FAST, None)
    try:
        return selftest.kernels.own(at, None).seen
    except CheckFailed as error:
        return f"wrong: {error}"


def test_compiled_kernels(host_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, right, together = host_kernels.binding.launches, host_kernels.copies, []

    def copies(*args: Any, **more: Any) -> None:
        before = len(launches)
        right(*args, **more)
        together.append((len(args[0]), len(launches) - before))

    monkeypatch.setattr(host_kernels, "copies", copies)
    launches.clear()
    seen = _checked(host_kernels, monkeypatch)
    told = "placement, sums, copies, casts, merges, combinations, gates, routes, posts, waits and "
    told += "scripts as they should be, "
    told += "compiled for cpu"
    assert seen == told
    assert together == [(3, 1)] * 6  # several places, one launch
    assert {name for name, _ in launches} >= {name for name in NAMES if "copy" not in name}


def _copies_to_one_place(kernels: Kernels) -> dict[str, Any]:
    right = kernels.copies
    return {"copies": lambda ends, *args, **more: right(ends[:1], *args, **more)}


def _copies_without_signals(kernels: Kernels) -> dict[str, Any]:
    right = kernels.copies
    return {"copies": lambda *args, signals: right(*args)}


def _posts_all_but_one(kernels: Kernels) -> dict[str, Any]:
    right = kernels.post
    return {"post": lambda words, stream: right([*words[:5], *words[6:]], stream)}


def _posts_one_only_once(kernels: Kernels) -> dict[str, Any]:
    right, calls = kernels.post, []

    def post(words: Any, stream: Any) -> None:
        calls.append(words)
        right(words[: None if len(calls) == 1 else -1], stream)

    return {"post": post}


def _posts_the_word_behind(kernels: Kernels) -> dict[str, Any]:
    right = kernels.post
    behind = 4 * selftest.kernels.WORDS
    return {"post": lambda words, stream: right([*words, (words[0][0] + behind, 1)], stream)}


def _does_not_wait(kernels: Kernels) -> dict[str, Any]:
    return {"wait": lambda words, seconds, late, stream: None}


def _waits_ten_times_as_long(kernels: Kernels) -> dict[str, Any]:
    right = kernels.wait
    return {"wait": lambda words, seconds, late, stream: right(words, 10 * seconds, late, stream)}


def _names_the_word_of_its_launch(kernels: Kernels) -> dict[str, Any]:
    """Not that of the whole signal."""
    right = kernels.wait

    def wait(words: Any, seconds: float, late: int, stream: Any) -> None:
        for first in range(0, len(words), 64):
            right(words[first : first + 64], seconds, late, stream)

    return {"wait": wait}


def _brings_nothing_new(kernels: Kernels) -> dict[str, Any]:
    """What is placed in front of a post is not there behind the wait."""
    right = kernels.place

    def place(dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        if src.numel() > 1 or float(src) != 5.0:
            right(dst, src, stream)

    return {"place": place}


def _sums_without_their_front(kernels: Kernels) -> dict[str, Any]:
    right = kernels.one_shot

    def one_shot(out: Any, parts: Any, signals: Signals, stream: Any) -> None:
        right(out, parts, replace(signals, front=Script()), stream)

    return {"one_shot": one_shot}


def _carries_out_no_script(kernels: Kernels) -> dict[str, Any]:
    return {"script": lambda script, stream: None}


def _merges_all_but_one(kernels: Kernels) -> dict[str, Any]:
    right = kernels.merge
    return {"merge": lambda out, lse, parts, at: right(out, lse, parts[1:], at)}


def _routes_without_a_capacity(kernels: Kernels) -> dict[str, Any]:
    right = kernels.route
    return {"route": lambda chosen, experts, capacity, at: right(chosen, experts, 0, at)}


def _gates_nothing(kernels: Kernels) -> dict[str, Any]:
    return {"gate": lambda function, out, x, at: out.copy_(x[..., : out.shape[-1]])}


def _combines_all_but_one(kernels: Kernels) -> dict[str, Any]:
    right = kernels.combine
    return {
        "combine": lambda out, rows, picked, weights, at: right(
            out, rows, picked[:, :-1], weights[:, :-1].contiguous(), at
        )
    }


def _sums_one_part_twice(kernels: Kernels) -> dict[str, Any]:
    right = kernels.one_shot
    return {"one_shot": lambda out, parts, *rest: right(out, [*parts, parts[0]], *rest)}


@pytest.mark.parametrize(
    ("breaks", "words", "others"),
    [
        (_copies_to_one_place, "33 x 100 at 8 of 160 to 3 places: wrong at [1, 2]", 5),
        (_copies_without_signals, "a launch of copies left [0, 0, 0, 0] in words", 2),
        (_merges_all_but_one, "the merge of five parts of torch.float16 is wrong", 1),
        (_routes_without_a_capacity, "the route of 700 tokens to 11 experts is wrong", 0),
        (_gates_nothing, "relu gated of torch.float16 is wrong", 3),
        (_combines_all_but_one, "the combination of three rows of torch.float16 is wrong", 1),
        (_sums_one_part_twice, "at 8 of 160 with scripts is wrong", 8),
        (_sums_without_their_front, "scripts left [0, 0, 9, 5, 0] in words", 8),
        (_carries_out_no_script, "scripts left [0, 7, 9, 0, 0] in words", 8),
        (_posts_all_but_one, "a wait after its own posts missed word 5", 0),
        (_posts_one_only_once, "a wait missed word 69, which another stream had posted", 1),
        (_posts_the_word_behind, "posts wrote something else", 0),
        (_does_not_wait, "a wait that reached its deadline wrote 0, 68 is right", 1),
        (_waits_ten_times_as_long, "a deadline of 0.2 s was over after 2.", 0),
        (_names_the_word_of_its_launch, "a wait that reached its deadline wrote 4, 68", 0),
        (_brings_nothing_new, "after a wait was not seen what came before the post", 0),
    ],
)
def test_compiled_kernels_that_are_broken(
    breaks: Callable[[Kernels], dict[str, Any]],
    words: str,
    others: int,
    host_kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is found, and nothing else is said to be wrong but for what follows from it."""
    for name, wrong in breaks(host_kernels).items():
        monkeypatch.setattr(host_kernels, name, wrong)
    found = _checked(host_kernels, monkeypatch)
    assert found.startswith("wrong: rank 0: ") and words in found
    assert len(found.splitlines()) == 1 + others, found


def test_a_sum_without_a_term(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, _forgets_a_term, ["operator"])
    assert failed(found) == {"operator matmul_reduce_scatter", "operator matmul_all_reduce"}
    scattered = found["operator matmul_reduce_scatter"].seen
    assert re.search(r"rank 1: \S+, call \d+ of \d+: ", scattered) and "rank 0" not in scattered
    gathered = found["operator matmul_all_reduce"].seen
    assert "rank 0: " in gathered and "in the rows of ranks [1]" in gathered


def _fails_while_timed() -> None:
    if dist.get_rank() == 1:
        right = ficco.all_gather_matmul

        def call(*args: Any, schedule: str, **more: Any) -> Any:
            if schedule == "shard-overlap":
                raise MemoryError("no room")
            return right(*args, schedule=schedule, **more)

        ficco.all_gather_matmul = call


def test_a_rank_that_fails_while_its_peers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it in vain; what is told is what befell it."""
    settings = replace(FAST, timeout_s=1.0, limit_s=6.0)
    only = ["bandwidth of all", "schedule serial:collective"]
    found = results(monkeypatch, _fails_while_timed, only, settings)
    assert failed(found) == {"bandwidth of all pairs"}
    assert "rank 1: MemoryError: no room" in found["bandwidth of all pairs"].seen


def test_a_rank_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, _dies, ["2D copies", "copies by kernel", "bandwidth of all"])
    assert failed(found) == {"copies by kernel"}
    assert "exit code 7" in found["copies by kernel"].seen


def test_a_rank_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SelftestSettings(**{**vars(FAST), "limit_s": 3.0})
    only = ["copies by kernel", "schedule serial:collective", "bandwidth of all"]
    found = results(monkeypatch, _stands_still, only, settings)
    assert failed(found) == {"copies by kernel"}
    assert "limit 3 s" in found["copies by kernel"].seen


def test_ranks_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, os.abort, ["memory", "timeouts"])
    assert failed(found) == {"memory of peers", "timeouts", "start of ranks"}
    assert "SIGABRT" in found["start of ranks"].seen


# CheckFailed arguments.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--selftest", "--ranks", "0", "--device", "cpu"], "at least 1"),
        (["--selftest", "--device", "cpu", "--out", "/nowhere/at/all.md"], "--out: required"),
        (["--selftest", "--device", "cpu", "--out", "/"], "--out: required"),
        (["--selftest", "--device", "tpu"], "invalid choice"),
        (["--out", "report.md"], "required with --selftest"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_not_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert cli.run(["doctor", "--selftest", "--device", "cpu"]) == 2
    assert "without torchrun" in capsys.readouterr().err


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
    monkeypatch: pytest.MonkeyPatch,
    only: Sequence[str],
    breaks: Callable[[], None] | None = None,
    **settings: int,
) -> dict[str, CheckResult]:
    """What the self-test says through the HIP engine, in the checks that begin so."""
    hip_ranks.compile_kernels()
    found = str(hip_ranks.library()), str(hip_ranks.wheel("7"))
    env = {f"HIP_DOUBLE_{name}": str(value) for name, value in settings.items()}
    double = partial(_on_the_double, *found, env, breaks)
    ways = tuple(check for check in selftest.run.WAYS["hip"] if check.name.startswith(tuple(only)))
    monkeypatch.setattr(selftest.run, "WAYS", {**selftest.run.WAYS, "hip": ways})
    with ficco.options(engine="hip"):
        return results(monkeypatch, double, only)


def test_it_passes_through_the_hip_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every check, of schedules and operators one each: tests/test_hip.py runs them all.
    only = [check.name for check in (*selftest.run.CHECKS, *selftest.run.WAYS["hip"])]
    each = {"schedule growing", "operator matmul_reduce_scatter"}
    only = [one for one in only if one in each or not one.startswith(("schedule ", "operator "))]
    found = on_the_double(monkeypatch, only)
    assert failed(found) == set(), found
    assert "hip engine" in found["device and engine"].seen
    for way, words in (("write", "hipStreamWriteValue32"), ("copy", "4-byte copy")):
        result = found[f"signals by {way}"]
        assert result.verdict == "ok" and words in result.seen
    assert found["attribute CanUseStreamWaitValue"].seen == "1"
    if find_spec("triton") is not None:
        assert "calls exact" in found["product whose tiles wait"].seen
    assert sum(name.startswith("sharing of") for name in found) == 3
    assert sum(name.startswith("FICCO_HIP") for name in found) == 12
    # On CPUs there are no kernels and no copy engines, and PyTorch has no symmetric memory; the
    # double waits on signal memory alone. Without a compiler, or Triton, there is more.
    refused = {name for name, result in found.items() if result.verdict != "ok"}
    ways = {"FICCO_HIP=signals=uncached", "FICCO_HIP=memory=torch"}
    tools = {"FICCO_HIP=signals=kernel", "copies by kernel", "product whose tiles wait"}
    assert refused - tools == ways | {
        "kernels",
        "graphs",
        "products beside copies",
    }


def test_what_a_card_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of memory and each attribute by itself, where no engine can be made either."""
    only = ["attribute", "sharing"]
    found = on_the_double(monkeypatch, only, SIGNAL_IPC=0, WAIT=0)
    refused = {name: result for name, result in found.items() if result.verdict != "ok"}
    signal, waits = "sharing of signal memory", "attribute CanUseStreamWaitValue"
    assert set(refused) == {signal, waits}
    assert refused[signal].verdict == refused[waits].verdict == "not offered"
    assert "hipIpcGetMemHandle" in refused[signal].seen and "uncached" in refused[signal].instead
    assert refused[waits].seen == "0 on ranks [0, 1]" and "kernel" in refused[waits].instead


def _no_copies_to_peers() -> None:
    from ficco.dma import hip_api

    right = hip_api.copy
    hip_api.copy = lambda dst, src, nbytes, stream: nbytes == 4 or right(dst, src, nbytes, stream)


def test_memory_that_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_the_double(monkeypatch, ["sharing"], _no_copies_to_peers)
    assert failed(found) == {
        f"sharing of {kind} memory" for kind in ("plain", "uncached", "signal")
    }
    assert "0x0 by rank 1, not 0x5eed0001" in found["sharing of plain memory"].seen


@pytest.mark.parametrize(("offered", "verdict"), [(1, "ok"), (0, "not offered")])
def test_how_columns_are_copied(
    monkeypatch: pytest.MonkeyPatch, offered: int, verdict: str
) -> None:
    """Exact both times; packed columns are not what was to be checked."""
    found = on_the_double(monkeypatch, ["2D"], **{"2D": offered})["2D copies"]
    assert found.verdict == verdict and "calls exact" in found.seen
    assert ("columns by hipMemcpy2DAsync;" in found.seen) == bool(offered)
    assert ("by packing or ficco's kernel, for want of a 2D copy" in found.seen) != bool(offered)
    beside = "2d:pieces=4,copy=1 takes [0-9.]+ times as long as hetero-fused-1d:pieces=4,copy=1"
    assert re.search(beside, found.seen)
    assert ("packs columns" in found.instead) != bool(offered)


def _tells_how_it_is_timed() -> None:
    """A rate of 77 says that a call was pulled, and with products, 55 that it moved
    columns."""
    checks = selftest.checks

    def rate(at: Any, group: Any, schedule: str, peers: int, n: int = 0) -> float:
        if "-2d" in schedule:
            return 55.0
        return 77.0 if "pull" in schedule and n else 1.0

    checks.gb_per_s = rate


def test_ways_are_timed_by_what_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ["FICCO_HIP=ev", "FICCO_HIP=co"]
    found = on_the_double(monkeypatch, ways, _tells_how_it_is_timed)
    assert {name: result.seen.split("; ")[1][:5] for name, result in found.items()} == {
        **{f"FICCO_HIP=copy={value}": "1.0 G" for value in ("dtod", "peer", "nocu")},
        **{f"FICCO_HIP=columns={value}": "55.0 " for value in ("2d", "pack")},
        **{f"FICCO_HIP=events={value}": "77.0 " for value in ("plain", "write")},
    }


# What rates say.


def _one_slow_pair() -> None:
    right = selftest.speed.alike
    rates = {(0, 1): 40.0, (0, 2): 41.0, (1, 2): 27.0}
    selftest.speed.alike = lambda found, shared: right(rates, shared=False)


def test_a_slow_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, _one_slow_pair, ["bandwidth of pairs"])["bandwidth of pairs"]
    assert found.verdict == "not offered" and "links" in found.instead
    assert "40.0 GB/s" in found.seen and "the slowest between ranks 1 and 2" in found.seen
    assert "ranks 0 and 2: 41.0 GB/s" in found.details and "Traceback" not in found.details
    speed = selftest.speed
    rates = {(0, 1): 40.0, (0, 2): 41.0, (1, 2): 29.0}
    assert "slowest" not in speed.alike(rates, shared=False).seen
    rates[1, 2] = 27.0  # on CPUs, where it is chance
    assert "the slowest between ranks 1 and 2" in speed.alike(rates, shared=True).seen


class _OfMany(_Alone):
    """A rank whose peers find what it finds."""

    known: Any = None

    def _exchange(self, mine: tuple[bool, Any]) -> list[tuple[bool, Any]]:
        return [mine] * self.world

    def engine(self, group: Any) -> Any:
        return self.known


@pytest.mark.parametrize(
    ("device", "card", "engines", "compared"),
    [
        ("cuda", "AMD Instinct MI300X", None, True),
        ("cuda", "a card that nobody described", None, True),
        ("cuda", "a card that nobody described", 4, False),
        ("cuda", "NVIDIA H200", None, False),  # a switch: one port, however many peers
        ("cpu", "AMD Instinct MI300X", None, False),
    ],
)
def test_lanes_that_run_one_behind_the_other(
    device: str,
    card: str,
    engines: int | None,
    compared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four of seven links are filled: that is not what seven lanes are for."""
    speed, rates = selftest.speed, {"shard-overlap": 40.0}
    monkeypatch.setattr(speed, "gb_per_s", lambda at, group, name, peers: rates[name])
    at = _OfMany(0, 8, torch.device(device), FAST, None)
    at.pairs = dict(zip(combinations(range(8), 2), [38.0, 40.0, 42.0] * 9 + [40.0], strict=True))
    at.known = SimpleNamespace(
        fingerprint=lambda: Fingerprint(card, 8), copy_engines=lambda: engines
    )
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
    assert changed == set(probe.ADVICE["hip"]) and len(changed) == 3
    text = advice["hip"]["bandwidth of all pairs"]
    assert "GPU_MAX_HW_QUEUES=16" in text and "fewer copy lanes" in text


@pytest.mark.parametrize(("products", "copies"), [(1.05, 1.02), (1.29, 1.29)])
def test_copies_that_look_like_engines(products: float, copies: float) -> None:
    assert selftest.speed.looks(products, copies).seen.startswith(
        "looks like copies by DMA engines"
    )


@pytest.mark.parametrize(("products", "copies"), [(1.5, 1.02), (1.05, 3.0)])
def test_copies_that_look_like_kernels(products: float, copies: float) -> None:
    with pytest.raises(selftest.rank.NotOffered, match="looks like copies by compute units"):
        selftest.speed.looks(products, copies)
