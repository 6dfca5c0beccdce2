"""Errors of invalid arguments: their types, and texts with the requirement, the value and a remedy.

All ranks make the same mistake, and the group must stay usable. ``test_faults.py`` has the
mistakes of one rank.
"""

from __future__ import annotations

import importlib
import json
import pickle
import re
import sys
import threading
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import equal, exact
from ranks import Failure, Rank, caught, leave, on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

import ficco
from ficco.errors import reason_of
from ficco.options import Changes, Options, current, from_text, saves_gathered, to_text
from ficco.runtime.board import LATE, TEXT_BYTES, published

#: Rows of a shard, k and n of the calls.
ROWS, K, N = 4, 8, 6


def _a(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (ROWS, K))


def _b(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (K, N))


def _call(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return partial(ficco.all_gather_matmul, *args, **kwargs)


def _of(dtype: torch.dtype) -> Callable[[], Any]:
    return _call(_a().to(dtype), _b().to(dtype))


def _scheduled(name: Any, **options: Any) -> Callable[[], Any]:
    return _under(options, _call(_a(), _b(), schedule=name))


def _under(options: dict[str, Any], fn: Callable[[], Any]) -> Callable[[], Any]:
    def within() -> Any:
        with ficco.options(**options):
            return fn()

    return within


def _explain(operator: str, **sizes: float) -> Callable[[], Any]:
    return partial(ficco.explain, operator, **({"m": 8, "n": 8, "k": 8, "world": 2} | sizes))


def _no_features() -> None:
    ficco.explain("experts", experts=8, capacity=4, k=4, h=0, n=4, world=2)


def _rows(rows: Any) -> Callable[[], Any]:
    return _call(_a(), _b(), rows=rows)


def _call_of(operator: str, k: int = K, **kwargs: Any) -> Callable[[], Any]:
    """Return a call of an operator with 7 rows of a."""
    return partial(getattr(ficco, operator), _a(7, K), _b(k, N), **kwargs)


META, TABLE = "meta", [[3, 4], [3, 4]]
SCATTER, TAKE, SEND = "matmul_reduce_scatter", "all_to_all_matmul", "matmul_all_to_all"
TURNED, TAKE_TURNED = "all_gather_transposed_matmul", "all_to_all_transposed_matmul"
#: Invalid calls and their errors, whose texts have gaps. The error is a ``ValueError`` unless the
#: text begins with another type.
MISTAKES: list[tuple[Callable[[], Any], str]] = [
    # Shapes.
    (_call(_a(K), _b()), "a_shard [..., m/W, k] ... [8] ... reshape"),
    (_call(_a(), _b(K)), "b [k, n] ... [8]"),
    (_call(_a(), _b(N, K)), "k=8 ... k=6 ... weight.t()"),
    # Dtypes, devices, layouts.
    (_call(_a(), _b().bfloat16()), "required one dtype ... float32 ... bfloat16 ... convert"),
    (_call(_a(), _b().to(META)), "required one device ... cpu ... meta ... move"),
    (_call(_a().to(META), _b().to(META)), "NotImplementedError: ... meta ... cpu"),
    (_of(torch.int32), "NotImplementedError: ... int32 ... bfloat16 ... float32"),
    (_of(torch.float8_e4m3fn), "scale_a, scale_b ... float8_e4m3fn"),
    (_call(_a().to_sparse(), _b()), "NotImplementedError: ... a_shard ... sparse ... to_dense()"),
    (_call(_a(), _b().to_sparse()), "NotImplementedError: ... b: sparse ... to_dense()"),
    (_call([[1.0] * K] * ROWS, _b()), "a_shard: required a torch.Tensor ... list"),
    # Schedules.
    (_scheduled("shard_overlap:pull"), "did you mean 'shard-overlap'"),
    (_scheduled(["growing"]), "schedule: required a name ... got ['growing']"),
    (_scheduled("serial", workspace_bytes=1), "workspace_bytes ... at least ... serial ... pieces"),
    # Words and marks, 11 cache lines, and a shard.
    (_scheduled("growing", workspace_bytes=1215), "at least 1216 for one step ... 1215 ... pieces"),
    # Rows.
    (_rows([ROWS]), "rows: required 2 numbers ... got [4]"),
    (_rows([ROWS, -1]), "negative ... [4, -1]"),
    (_rows([ROWS + 1, ROWS + 1]), "rows[ ... ]=5 ... got 4"),
    (_rows(8), "rows: required ... 8"),
    (_rows(torch.tensor(8)), "required 2 numbers ... got 8"),
    (_rows(torch.tensor([4.5, 3.5])), "rows: required 2 numbers ... got [4.5, 3.5]"),
    (_rows(torch.tensor([4, 4], device=META)), "numbers on the CPU ... on meta ... .tolist()"),
    (_call_of(SCATTER), "share equally ... 7 ... rows="),
    (_call_of(SCATTER, rows=[3, 3]), "add up ... 7 ... 6"),
    (_call_of(TAKE), "equal blocks ... 7 ... rows="),
    (_call_of(TAKE, rows=[3, 4]), "table of 2 x 2"),
    (_call_of(SEND, rows=[[8, -1], [3, 4]]), "table ... negative"),
    (_call_of(SEND, rows=[[3, 3], [3, 3]]), "6 rows ... got 7"),
    (_call_of(SEND, rows=TABLE, schedule="ring"), "ring ... sum over ranks"),
    (_call_of(TAKE, rows=TABLE, schedule="growing:beta"), "beta ... sum over ranks"),
    (_call_of(TURNED, 9), "rows of b ... a_shard ... 9 ... 14 ... rows="),
    (_call_of(TAKE_TURNED, 9, rows=TABLE), "rows of b ... receives ... got 9 and ... rows="),
    (_call_of(TAKE_TURNED, 7, rows=TABLE), "rows of b ... receives ... got 7 and ... rows="),
    (_call_of(TAKE_TURNED, 7), "equal blocks ... 7 ... rows="),
    (_call_of(TAKE_TURNED, 6, rows=[[3, 3], [3, 3]]), "6 rows ... got 7"),
    (_call_of("matmul_all_reduce", 9), "columns of a ... k=8 ... k=9"),
    # Groups.
    (_call(_a(), _b(), group=[0, 1]), "group: required ... ProcessGroup ... [0, 1]"),
    (partial(ficco.memory, "tp"), "group: required ... 'tp'"),
    (partial(ficco.synchronize, 3), "group: required ... 3"),
    (partial(ficco.close, "tp"), "group: required ... 'tp'"),
    # ficco.empty and ficco.explain.
    (partial(ficco.empty, (4, -1)), "shape ... -1"),
    (partial(ficco.empty, 4), "shape: required ... 4"),
    (partial(ficco.empty, (2**63, 2)), "shape: required at most ... 9223372036854775808"),
    (partial(ficco.empty, (4, 4), dtype="float32"), "dtype: required a torch.dtype ... 'float32'"),
    (partial(ficco.empty, (4, 4), device="gpu"), "device: required ... cpu ... 'gpu'"),
    (_explain("conv"), "InvalidArgument: ... operator ... all_gather_matmul ... 'conv'"),
    (_no_features, "InvalidArgument: ... h: ... at least 1, got 0"),
    (_explain("all_gather_matmul", hosts=3), "InvalidArgument: ... hosts ... divisor of 2 ... 3"),
    (_explain("all_gather_matmul", m=8.5), "m: required a whole number ... 8.5"),
    # Options.
    (_under({"engine": "cuda"}, _call(_a(), _b())), "engine='cuda'): ... on cuda ... some on cpu"),
    (_under({"engine": "cpu"}, _call(_a().to(META), _b().to(META))), "on cpu ... some on meta"),
    (_under({"engine": "tpu"}, _call(_a(), _b())), "engine ... cpu ... 'tpu'"),
]


@on_ranks(2)
def test_mistakes_raise_precise_errors(at: Rank) -> None:
    """Errors are raised in the first call of a group, too. The group stays usable."""
    good = equal(at.world, ROWS, K, N, schedule="growing")
    for turn, (mistake, text) in enumerate(MISTAKES):
        failure = caught(mistake)
        assert isinstance(failure, Failure), text
        expected = text if re.match(r"\w+: \.\.\. ", text) else f"ValueError: ... {text}"
        pattern = ".*".join(map(re.escape, expected.split(" ... ")))
        message = f"{failure.type}: {failure.text}"
        assert re.match(pattern, message, re.DOTALL), f"{expected} not in {failure.traceback}"
        exact(at, good, turn)


@on_ranks(2)
def test_rows_that_are_no_whole_numbers_are_refused(at: Rank) -> None:
    """The refusal holds even if the rows equal those of an earlier call."""
    a, b = _a(1, K), _b()
    for rows in ([1.0, 1.0], [True, True], [1, 1.0]):
        assert ficco.all_gather_matmul(a, b, rows=[1, 1]).shape == (2, N)
        with pytest.raises(ValueError, match=re.escape(f"got {rows}")):
            ficco.all_gather_matmul(a, b, rows=rows)


@on_ranks(2)
def test_rows_of_any_integer_type_are_accepted(at: Rank) -> None:
    for rows in (
        (ROWS, ROWS + 1),
        torch.tensor([ROWS, ROWS + 1]),
        [torch.tensor(ROWS), torch.tensor(ROWS + 1, dtype=torch.int32)],
        np.array([ROWS, ROWS + 1]),
        [np.int64(ROWS), np.uint8(ROWS + 1)],
        array("q", [ROWS, ROWS + 1]),
        range(ROWS, ROWS + 2),
    ):
        for needs_grad in (False, True):
            a = _a(ROWS + at.rank, K).requires_grad_(needs_grad)
            assert (ficco.all_gather_matmul(a, _b(), rows=rows) == K).all()  # type: ignore[arg-type]
        with FlopCounterMode(display=False):
            assert (ficco.all_gather_matmul(_a(ROWS + at.rank, K), _b(), rows=rows) == K).all()  # type: ignore[arg-type]
    table = np.full((at.world, at.world), 3)
    for rows_table in (table, torch.from_numpy(table), list(table)):
        y = ficco.all_to_all_matmul(_a(3 * at.world, K), _b(), rows=rows_table)  # type: ignore[arg-type]
        assert y.shape == (3 * at.world, N) and (y == K).all()


@on_ranks(2)
def test_a_group_without_this_rank_and_a_destroyed_group_are_refused(at: Rank) -> None:
    group, failures = dist.new_group([0]), []
    if at.rank == 1:
        failures.append((caught(_call(_a(), _b(), group=group)), "this rank is in"))
    else:
        assert (ficco.all_gather_matmul(_a(), _b(), group=group) == K).all()
        leave(group)
    for engine, used in product((None, "cpu"), (False, True)):
        group = dist.new_group([0, 1])
        with ficco.options(engine=engine):
            if used:  # takes one of two slots
                ficco.all_gather_matmul(_a(), _b(), group=group)
            dist.destroy_process_group(group)
            failure = caught(_call(_a(), _b(), group=group))
        failures.append((failure, "destroyed.*ficco.close"))
        ficco.close(group)
    exact(at, equal(at.world, ROWS, K, N), 0)
    for failure, words in failures:
        assert isinstance(failure, Failure) and failure.type == "ValueError", failure
        assert re.search(f"group.*required.*{words}", failure.text), failure.text


@on_ranks(2)
def test_a_mesh_is_a_group(at: Rank) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    assert (ficco.all_gather_matmul(_a(), _b(), group=mesh) == K).all()
    held_bytes = ficco.memory(mesh)
    assert held_bytes == ficco.memory(mesh.get_group()) > 0
    assert ficco.empty((2, 2), group=mesh).shape == (2, 2)
    ficco.synchronize(mesh)
    ficco.close(mesh)
    assert ficco.memory(mesh) == 0


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    for fn in (_call(_a(), _b()), partial(ficco.empty, (4, 4))):
        with pytest.raises(ValueError, match="required an initialised.*init_process_group"):
            fn()


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"timeout_s": 0}, "timeout_s.*above 0.*0"),
    ({"timeout_s": float("nan")}, "timeout_s.*nan"),
    ({"timeout_s": "soon"}, "timeout_s.*soon"),
    ({"timeout_s": ""}, "timeout_s.*or None.*''"),
    ({"on_timeout": "ignore"}, "on_timeout.*abort, raise.*'ignore'"),
    ({"signals": "smoke"}, "signals.*auto, write, copy.*'smoke'"),
    ({"workspace_bytes": -1}, "workspace_bytes.*at least 0.*-1"),
    ({"workspace_bytes": "1 GiB"}, "workspace_bytes.*1 GiB"),
    ({"engine": "tpu"}, "engine.*cpu.*'tpu'"),
    ({"timeout": 5}, "timeout_s.*'timeout'"),
]


def test_options() -> None:
    functions: tuple[Callable[..., Any], ...] = ficco.options, ficco.set_options
    for fn, (changes, pattern) in product(functions, OPTIONS):
        with pytest.raises(ValueError, match=pattern), fn(**changes) or nullcontext():
            pass
    with ficco.options(machine=Path("a.yaml"), log_problems=Path("log")) as options:
        assert (options.machine, options.log_problems) == ("a.yaml", "log")
    assert current() == ficco.Options()  # a refused change has no effect


def test_a_text_of_options_shows_whether_the_gathered_a_is_saved() -> None:
    for saves, timeout_s in product((False, True), (5.0, Options.timeout_s)):
        text = to_text(Options(save_gathered=saves, timeout_s=timeout_s))
        assert saves_gathered(text) == from_text(text).save_gathered == saves


def test_type_checkers_know_every_option() -> None:
    assert list(Changes.__annotations__) == [field.name for field in fields(ficco.Options)]


def test_options_nest_and_follow_the_context() -> None:
    with ficco.options(timeout_s=5) as outer:
        with ficco.options(on_timeout="raise") as inner:
            assert (inner.timeout_s, inner.on_timeout) == (5, "raise")
        assert current() == outer
        timeouts: list[float | None] = []
        thread = threading.Thread(target=lambda: timeouts.append(current().timeout_s))
        thread.start()
        thread.join()
        assert timeouts == [None]
        with pytest.raises(RuntimeError, match="on purpose"):
            with ficco.options(timeout_s=1):
                raise RuntimeError("on purpose")
        assert current() == outer
    try:
        ficco.set_options(timeout_s=7)  # for the process
        with ficco.options(on_timeout="raise") as options:
            assert (options.timeout_s, options.on_timeout) == (7, "raise")
    finally:
        ficco.set_options(timeout_s=None)


WAIT: dict[str, Any] = {"rank": 1, "peer": 2, "step": "2.0>1", "schedule": "growing"}
TIMEOUT = {"operator": "all_gather_matmul", **WAIT, "seconds": 3.25, "wanted": 1, "found": 0}


def facts_of(error: ficco.FiccoError) -> dict[str, Any]:
    """Return the attributes of an error, and the facts of its timeouts."""
    timeouts = getattr(error, "timeouts", {})
    return vars(error) | {"timeouts": {rank: timeout.facts for rank, timeout in timeouts.items()}}


def test_either_error_of_a_survivor_has_all_facts_of_the_wait() -> None:
    timeout = ficco.SignalTimeout(**TIMEOUT, ended=True, host="h1")
    assert timeout.facts == {**TIMEOUT, "ended": True, "host": "h1"}
    assert timeout.timeouts == {1: timeout}
    text, state = published(timeout)
    assert state == LATE and ficco.SignalTimeout(**json.loads(text)).facts == timeout.facts
    failed = ficco.PeerFailed({1: reason_of(timeout)}, {1: timeout})
    for error in (timeout, failed):
        (wait,) = error.timeouts.values()
        assert {name: getattr(wait, name) for name in WAIT} == WAIT
        assert (wait.seconds, wait.ended) == (3.25, True)
        words = "all_gather_matmul: rank 1 waited 3.2 s for rank 2 on host h1 at step '2.0>1' of"
        assert words in str(error) and "The process of rank 2 on host h1 has ended" in str(error)
        assert str(error).count("ficco.close(group)") == 1
    # A step may quote a library: the text of the step leaves room for the other facts.
    long = ficco.SignalTimeout(**{**TIMEOUT, "step": "\N{SNOWMAN}\n" * 2000})
    text, _ = published(long)
    assert len(text.encode()) < TEXT_BYTES - 100
    assert json.loads(text) | {"step": ""} == long.facts | {"step": ""}


def test_exceptions_survive_pickling() -> None:
    """Launchers send exceptions between processes."""
    for error in (
        ficco.RankMismatch({0: "this", 1: "that"}),
        ficco.PeerFailed({1: "MemoryError: none left"}),
        ficco.PeerFailed({1: "late"}, {1: ficco.SignalTimeout(**TIMEOUT)}),
        ficco.SignalTimeout(**TIMEOUT),
        ficco.BackendError("memcpy", "EFAULT", "bad address"),
        ficco.ConfigError("machine.yaml", "links", "required a list"),
    ):
        assert isinstance(error, ficco.FiccoError) and isinstance(error, RuntimeError)
        unpickled = pickle.loads(pickle.dumps(error))
        assert type(unpickled) is type(error)
        assert str(unpickled) == str(error)
        assert facts_of(unpickled) == facts_of(error)


def test_exception_tree() -> None:
    words = ("all_gather_matmul", "rank 1 ", "rank 2", "2.0>1", "growing", "3.2", "found 0")
    assert all(word in str(ficco.SignalTimeout(**TIMEOUT)) for word in words)
    text = str(ficco.RankMismatch({0: "this", 1: "that", 2: "this"}))
    assert "ranks 0, 2: this" in text and "rank 1: that" in text
    assert "rows=" not in text and "pad" not in text
    refused = "ValueError: k=7"
    for call, remedy in (
        ("all_gather_matmul(m=8, n=3)", "unequal shards need rows="),
        ("matmul_all_to_all(m=8, n=3)", "unequal shards need rows="),
        ("fsdp_all_gather(8 x 2 ranks)", "the same modules"),
        ("all_gather_attention(sequence=8)", "pad the sequence"),
        ("ulysses_attention(sequence=8)", "pad the sequence"),
    ):
        text = str(ficco.RankMismatch({0: call, 1: refused}))
        assert remedy in text and ("rows=" in text) == ("rows=" in remedy)
    text = str(ficco.PeerFailed({2: "MemoryError: none left.", 1: "KeyboardInterrupt"}))
    assert "since rank 1 failed: KeyboardInterrupt; rank 2 failed: MemoryError: none left. " in text
    assert "output of rank 1 and rank 2" in text and "ficco.close(group)" in text


RELEASES = {"torchtitan": "0.3.0", "transformers": "5.23", "megatron": "megatron-core 0.16"}
RELEASES["vllm"] = "0.32"


@pytest.mark.parametrize("package", RELEASES)
def test_an_integration_without_its_client_names_the_release(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"ficco.integrations.{package}"
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("FICCO_VLLM", "1")
    with pytest.raises(ImportError) as error:
        module = importlib.import_module(name)
        module.register()  # vLLM's plug-in imports the module even if vLLM is missing
    release = f"{package}: required release {RELEASES[package]} or one that has the same modules"
    assert re.fullmatch(f"{release}.*, got .*; install that release", str(error.value), re.DOTALL)
