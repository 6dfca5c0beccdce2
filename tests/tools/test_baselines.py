"""AMD's ways in a bench: when they exist, and what they are asked, on doubles of PyTorch's API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ficco.accelerator import gpu
from ficco.problems.products import OPERATORS
from ficco.tools import baselines
from ficco.tools.baselines import COPY_ENGINES, PRODUCT, lacking, preferred, registered
from ficco.tools.bench import candidates as table
from ficco.tools.bench import report

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
VARIABLES = sorted({name for one in COPY_ENGINES.values() for name in one.variables})


@pytest.fixture
def rocm(monkeypatch: Any) -> pytest.MonkeyPatch:
    """A PyTorch for ROCm whose ranks were started without a variable of RCCL's."""
    monkeypatch.setattr(torch.version, "hip", "7.15")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_operators_have_the_collectives_of_their_exchange() -> None:
    of = {one.name: one.operators for one in table.REFERENCES}
    kinds = {name: {OPERATORS[one].collective for one in of[name]} for name in COPY_ENGINES}
    assert kinds == {
        "rccl-sdma": {"all-gather", "all-to-all"},
        "rccl-ce-all-reduce": {"all-reduce"},
    }
    assert of[PRODUCT] == () and set(COPY_ENGINES) < set(report.SERIALS)
    without_rocm = {
        lacking(name, on, True) for name in (*COPY_ENGINES, PRODUCT) for on in (CPU, CARD)
    }
    assert without_rocm == {"it needs GPUs and PyTorch for ROCm"}


@pytest.mark.parametrize("name", COPY_ENGINES)
def test_a_collective_says_what_it_lacks(name: str, rocm: pytest.MonkeyPatch) -> None:
    variables = dict(COPY_ENGINES[name].variables)
    first, value = variables.popitem()
    for variable, setting in variables.items():
        rocm.setenv(variable, setting)
    for setting in ("", "0"):
        rocm.setenv(first, setting)
        text = "RCCL reads its variables once: start all ranks with "
        assert lacking(name, CARD, True) == f"{text}{first}={value}"
    rocm.setenv(first, value)
    assert "one size on all ranks" in lacking(name, CARD, False)
    assert "has not loaded RCCL" in lacking(name, CARD, True)
    rocm.setattr(baselines, "_rccl", lambda: SimpleNamespace(ncclAllGather=None))
    assert "registers no symmetric memory" in lacking(name, CARD, True)
    rocm.setattr(baselines, "_rccl", lambda: SimpleNamespace(ncclCommWindowRegister=None))
    assert lacking(name, CARD, True) == ""


def test_hipblaslt_is_asked_for_and_left(rocm: pytest.MonkeyPatch) -> None:
    """PyTorch answers with the library that it takes, which is another one on some GPUs."""
    backends = torch._C._BlasBackend
    chosen, offered = [backends.Default], {"hipblaslt": backends.Cublaslt}

    def choose(wanted: Any = None) -> Any:
        if wanted is not None:
            chosen.append(offered.get(wanted, wanted))
        return chosen[-1]

    rocm.setattr(torch.backends.cuda, "preferred_blas_library", choose)
    assert lacking(PRODUCT, CARD, True) == ""
    offered["hipblaslt"] = backends.Cublas
    assert "PyTorch takes" in lacking(PRODUCT, CARD, True)
    offered["hipblaslt"] = backends.Cublaslt
    with pytest.raises(ZeroDivisionError), preferred():
        assert choose() == backends.Cublaslt
        raise ZeroDivisionError
    assert choose() == backends.Default


def test_memory_is_registered_before_it_is_timed(monkeypatch: Any) -> None:
    pools: list[Any] = []

    @contextmanager
    def use(pool: list[str]) -> Iterator[None]:
        pools.append(pool)
        yield
        pools.pop()

    monkeypatch.setattr(gpu, "MemPool", lambda allocator: [allocator])
    monkeypatch.setattr(gpu, "use_mem_pool", use)
    monkeypatch.setattr(gpu, "synchronize", lambda: None)
    seen: list[list[str]] = []

    def register(pool: list[str], symm: bool) -> None:
        seen.append(list(pool))

    def refuse(pool: list[str], **options: bool) -> None:
        raise TypeError("incompatible function arguments")

    backend = SimpleNamespace(mem_allocator="RCCL's", register_mem_pool=register)
    group: Any = SimpleNamespace(_get_backend=lambda device: backend)
    context = registered(group, CARD, lambda: pools[-1].append("a call"))
    assert seen == [["RCCL's", "a call"]] and not pools
    with context():
        assert pools == [["RCCL's", "a call"]]
    backend.register_mem_pool = refuse
    with pytest.raises(NotImplementedError, match="cannot be registered with RCCL: incompatible"):
        registered(group, CARD, lambda: None)
