"""The tiled product's Triton kernel without a GPU: exact results in Triton's interpreter, and the
instructions of the compiled kernel."""

from __future__ import annotations

import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from cases import compare
from interpreted import HostProducts, parts_first
from ranks import missing
from test_kernels import places
from test_worklist import COSTS, spans

from ficco.compute.tiled import worklist
from ficco.compute.tiled.portable import MOST_PRODUCTS, POLL_S, compiled_by_triton, lacking
from ficco.compute.tiled.products import Enqueue, TiledProducts, TileScales, TileTypes
from ficco.compute.tiled.worklist import Cut, RowSpan, TileList, Tiling, Work, listed
from ficco.hip_kernels.build import Target

SMALL = Tiling(32, 32, 1)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module", autouse=True)
def triton_is_here() -> None:
    if find_spec("triton") is None:
        missing("triton")


@pytest.fixture
def turns() -> Iterator[None]:
    """Switch threads more often than every 5 ms, so that those that open gates get the lock."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


#: Seconds after which a kernel no longer waits.
LIMIT_S = 4.0


class Call:
    """Operands, results, words and launch of one work list. Operands are integers, so that products
    are exact in any order. NaN surrounds operands and fills results."""

    def __init__(
        self,
        products: TiledProducts,
        tiles: TileList,
        types: torch.dtype | TileTypes,
        b_rows: bool,
        padding: int = 8,
        limit_s: float = LIMIT_S,
    ) -> None:
        work = tiles.work
        types = types if isinstance(types, TileTypes) else TileTypes.of(types)
        self.tiles, self.dtype, self.padding = tiles, types.out, padding
        self.device = products.device.type
        count = len(work.gates) + len(work.announces) + 1
        self.words = torch.zeros(count, dtype=torch.int32, device=self.device)
        at = [self.words.data_ptr() + 4 * i for i in range(count)]
        self.gates, self.posts = at[: len(work.gates)], at[len(work.gates) : -1]
        k, (a, b, *_) = work.k * 2 // types.a.itemsize, types
        self.a = [self.room(rows, k, a) for rows in work.rows]
        self.b = self.room(k, work.n, b) if b_rows else self.room(work.n, k, b).t()
        self.out = [self.room(rows, work.n) for rows in work.rows]
        self.scales: TileScales | None = None
        words = {"late": at[-1], "gates": self.gates, "words": self.posts}
        self.prepared = products.prepare(tiles, types, b_rows, limit_s=limit_s, **words)
        self.settle()

    def settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def room(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A matrix of NaN inside a larger one."""
        dtype = dtype or self.dtype
        extra, right = (2, self.padding * 2 // dtype.itemsize) if self.padding else (0, 0)
        whole = torch.full((rows + extra, columns + right), torch.nan, device=self.device)
        return whole.to(dtype)[extra // 2 :][:rows, :columns]

    def fill(self, seed: int) -> None:
        """Set the operands, fill results with NaN, and clear gates and announcements."""
        numbers = torch.Generator(self.device).manual_seed(seed)
        for tensor, low, high in (*((t, -2, 3) for t in self.a), (self.b, -1, 2)):
            where = {"device": self.device, "generator": numbers}
            tensor.copy_(torch.randint(low, high, tensor.shape, **where).to(tensor.dtype))
        for tensor in self.out:
            tensor.fill_(torch.nan)
        self.words.zero_()

    @property
    def exact(self) -> list[torch.Tensor]:
        products = [a.double() @ self.b.double() for a in self.a]
        if (scales := self.scales) is not None:
            bias = 0.0 if scales.bias is None else scales.bias.double()
            products = [
                product * of_a.double() * scales.b.double() + bias
                for product, of_a in zip(products, scales.a, strict=True)
            ]
        return [product.to(self.dtype) for product in products]

    def launch(self) -> Enqueue | None:
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None
        return self.prepared.launch(self.a, self.b, self.out, stream, self.scales)

    def verify(self, about: object = "", late: int = 0) -> None:
        self.settle()
        assert int(self.words[-1]) == late, f"{about}: late is {self.words[-1]}"
        for product, (out, exact) in enumerate(zip(self.out, self.exact, strict=True)):
            compare(f"product {product}", out.contiguous(), exact, str(about))
            if self.padding:
                buffer: Any = out._base
                assert int((~buffer.isnan()).sum()) == out.numel(), f"{about}: written around C"
        assert not self.prepared.counters.any(), f"{about}: counters are not at rest"


def interpreted(
    tiles: TileList, dtype: torch.dtype = torch.bfloat16, b_rows: bool = True, limit_s: float = 60.0
) -> Call:
    call = Call(HostProducts(tiles.clusters), tiles, dtype, b_rows, limit_s=limit_s)
    call.fill(1)
    return call


def tiles_of(work: Work, cut: Cut, clusters: int, tiling: Tiling = SMALL) -> TileList:
    return parts_first(listed(work, tiling, cut, clusters, COSTS))


@pytest.mark.parametrize("b_rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_exact(dtype: str, b_rows: bool) -> None:
    torch.manual_seed(len(dtype) + b_rows)
    cuts = 0
    for rows, n, k, cut, clusters in (
        ((1, 17, 70, 33), 40, 72, Cut.NONE, 3),
        ((65,), 8, 8, Cut.NONE, 1),
        ((33,), 40, 1024, Cut.END, 6),
        ((31,), 40, 1992, Cut.END, 5),
    ):
        call = interpreted(tiles_of(Work(rows, n, k), cut, clusters), DTYPES[dtype], b_rows)
        for _ in range(2):
            call.launch()
            call.verify()
        cuts += call.tiles.slots
    assert cuts == 8


def test_a_launch_is_enqueued_again() -> None:
    """The repeated launch has the same operands, skips their check and keeps its lists."""
    call = interpreted(tiles_of(Work((33,), 40, 1024), Cut.END, 6))
    again = call.launch()
    assert again is not None
    call.a[0].fill_(2)
    call.out[0].fill_(torch.nan)
    del call.prepared
    again(None)
    assert torch.equal(call.out[0], call.exact[0])


@contextmanager
def in_thread(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize(("rows", "count", "cut"), [((100,), 4, Cut.NONE), ((65, 33), 12, Cut.END)])
def test_tiles_wait_for_their_rows(rows: Any, count: int, cut: Cut, turns: None) -> None:
    """Rows are NaN until another thread writes them and opens their gate, in random order."""
    rng = random.Random(cut.name)
    work = Work(rows, 40, 1024, spans(rng, rows, count))
    call = interpreted(tiles_of(work, cut, 6))
    operands = [a.clone() for a in call.a]
    for product, first, last in (span for gate in work.gates for span in gate):
        call.a[product][first:last] = torch.nan

    def arrive() -> None:
        for gate in rng.sample(range(len(work.gates)), len(work.gates)):
            time.sleep(0.002)
            for product, first, last in work.gates[gate]:
                call.a[product][first:last] = operands[product][first:last]
            call.words[gate] = 1

    with in_thread(arrive):
        call.launch()
    call.verify()


@pytest.mark.parametrize(("rows", "cut"), [((100,), Cut.NONE), ((65, 33), Cut.END)])
def test_announced_rows_are_stored(rows: tuple[int, ...], cut: Cut, turns: None) -> None:
    work = Work(rows, 40, 1024, (), spans(random.Random(2), rows, 5))
    call = interpreted(tiles_of(work, cut, 6))
    early, expected = list[int](), call.exact

    def watch() -> None:
        left, end = {*range(len(work.announces))}, time.monotonic() + 30
        while left and time.monotonic() < end:
            for index in [index for index in left if call.words[index]]:
                left.remove(index)
                for product, *rows in work.announces[index]:
                    stored, exact = (out[product][slice(*rows)] for out in (call.out, expected))
                    early.extend([index] * (not torch.equal(stored, exact)))
        early.extend(left)

    with in_thread(watch):
        call.launch()
    call.verify()
    assert not early


def test_a_gate_that_never_opens() -> None:
    gates = tuple((RowSpan(0, first, first + 32),) for first in range(0, 96, 32))
    call = interpreted(tiles_of(Work((96,), 40, 64, gates), Cut.NONE, 2), limit_s=100 * POLL_S)
    call.words[:2] = 1
    call.launch()
    call.verify(late=3)
    call.words[-1], call.words[2] = 0, 1
    call.launch()
    call.verify()


@pytest.mark.filterwarnings("ignore:invalid value")  # unwritten parts are added
def test_parts_that_never_come() -> None:
    tiles = tiles_of(Work((32,), 32, 2048), Cut.END, 3)
    owners_first = replace(tiles, items=np.ascontiguousarray(tiles.items[:, ::-1]))
    call = interpreted(owners_first, limit_s=10 * POLL_S)
    call.launch()
    assert int(call.words[-1]) == 1 + worklist.MAX_GATES


def test_parts_are_added_in_one_order() -> None:
    """The sum does not depend on the order of arrival; the values round."""
    tiles = tiles_of(Work((31,), 40, 1992), Cut.END, 7)
    owns = (tiles.items[:, :, 7] > 0).any(0)
    results = []
    for seed in range(3):
        torch.manual_seed(0)
        order = np.random.default_rng(seed).permutation(tiles.clusters)
        order = order[np.argsort(owns[order], kind="stable")]
        call = interpreted(replace(tiles, items=np.ascontiguousarray(tiles.items[:, order])))
        for tensor in (*call.a, call.b):
            tensor.copy_(torch.randn(tensor.shape))
        call.launch()
        results.append(call.out[0].clone())
    assert tiles.slots == 4 and all(torch.equal(results[0], other) for other in results)


def test_unaligned_operands_are_copied_or_refused() -> None:
    """Rows that begin between multiples of 16 bytes are copied, or refused if they wait."""
    call = interpreted(tiles_of(Work((33,), 40, 72), Cut.NONE, 2))
    call.a = [torch.empty(33, 75, dtype=call.dtype)[:, 1:73].copy_(call.a[0])]
    assert call.launch() is None  # a repeated launch would read the copy
    call.verify()
    gated = interpreted(tiles_of(Work((33,), 40, 72, ((RowSpan(0, 0, 1),),)), Cut.NONE, 2))
    gated.a = call.a
    with pytest.raises(ValueError, match="multiples of 16"):
        gated.launch()


def test_unserved_products_have_a_reason() -> None:
    products = HostProducts()
    assert products.serves(TileTypes.of(torch.bfloat16), MOST_PRODUCTS, 8, 8) == ""
    assert "bfloat16 or float16" in products.serves(TileTypes.of(torch.float32), 1, 8, 8)
    assert "at most 4" in products.serves(TileTypes.of(torch.float16), MOST_PRODUCTS + 1, 8, 8)
    assert "multiples of 8" in products.serves(TileTypes.of(torch.float16), 1, 12, 8)


def test_missing_requirements_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacking(Target("hip", "gfx942:sramecc+:xnack-")) == ""
    assert "needs gfx942 (MI300X), not gfx90a" in lacking(Target("hip", "gfx90a"))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("ficco.compute.tiled.portable.find_spec", lambda name: None)
    assert "needs Triton, which is not installed" in lacking(Target("hip", "gfx942"))


class Code:
    """The kernel in AMD's assembly language, without comments and debug lines, and ``before``: its
    intermediate code, with blocks in the order of the source."""

    def __init__(self, kernel: Any) -> None:
        self.text, self.before = kernel.asm["amdgcn"], kernel.asm["ttgir"].splitlines()
        lines = (re.sub(r"\s+", " ", line.split(";")[0]).strip() for line in self.text.splitlines())
        self.lines = [line for line in lines if line and not line.startswith((".loc", ".Ltmp"))]

    def number(self, key: str) -> int:
        (value,) = re.findall(rf"\.{key}: +(\d+)", self.text)
        return int(value)

    def at(self, pattern: str) -> list[int]:
        return places(self.lines, pattern)


#: Compiled variants: dtype, whether B has contiguous rows, and whether BK divides k.
VARIANTS = (("bfloat16", True, True), ("float16", False, False))


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Code:
    dtype, b_rows, even_k = request.param
    (tiling,) = worklist.MI300X.multiply
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        target = Target("hip", "gfx942:sramecc+:xnack-")
        kernel = compiled_by_triton(target, tiling, DTYPES[dtype], b_rows, even_k)
    assert kernel.metadata.shared <= 64 << 10
    return Code(kernel)


def test_amd_spills_nothing_and_multiplies_by_matrix_cores(code: Code) -> None:
    for key in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert code.number(key) == 0, key
    assert not code.at("scratch_")
    assert len(code.at("v_mfma_f32_32x32x8_(bf16|f16) ")) >= 64
    # A lane has 512. A kernel that copies for a peer must fit at the same time.
    assert code.number("vgpr_count") <= 512 - 128


def test_amd_loads_and_stores_are_wide(code: Code) -> None:
    assert not code.at(r"(global|buffer)_(load|store)_(u?byte|u?short|s?byte|sshort)")
    assert len(code.at("(global|buffer)_load_dwordx4")) >= 16
    assert len(code.at("global_store_dwordx2")) == 16


def test_amd_waits_acquire_from_the_system(code: Code) -> None:
    """Each poll bypasses caches and empties them; gates are waited for before operands are read."""
    empties = code.at("buffer_inv")
    assert {code.lines[i] for i in empties} == {"buffer_inv sc0 sc1"}
    polls = [i for i in empties if code.lines[i - 2].startswith("global_load_dword ")]
    assert len(polls) == 4, "first and later polls of gates and of parts"
    for i in polls:
        assert code.lines[i - 2].endswith(" sc0 sc1")
        assert code.lines[i - 1] == "s_waitcnt vmcnt(0)"
    waits = places(code.before, r".*tt\.atomic_rmw add, acquire, sys")
    reads = places(code.before, r".*tt\.load.*: tensor<.*(bf16|f16)>")
    adds = places(code.before, r".*tt\.load.*: tensor<.*f32>")
    assert len(waits) == 4 and waits[1] < min(reads) < max(reads) < waits[2]
    assert len(adds) == 1 and waits[3] < adds[0]


def test_amd_releases_to_the_system(code: Code) -> None:
    """Before a program counts, every wave's stores are over and the cache is written back."""
    adds, swaps = code.at("global_atomic_add"), code.at("global_atomic_swap")
    assert len(adds) == 2 and len(swaps) == 1, "of tiles and of parts; of words"
    stores = code.at("(global|buffer)_store_dwordx[24]")
    released = "s_waitcnt vmcnt(0)", "buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)"
    ends = [
        i
        for i in code.at("buffer_wbl2 sc0 sc1")
        if tuple(code.lines[i - 1 : i + 2]) == released and "v_mov_b32" in code.lines[i + 2]
    ]
    assert len(ends) == 2, "after a tile, and after a part"
    for end, add in zip(ends, adds, strict=True):
        assert max(i for i in stores if i < add) < end, "a store after the release"
        assert "s_barrier" in code.lines[end:add]
    assert sum(code.lines[i].endswith(" sc0 sc1") for i in adds) == 1, "that of tiles"
    assert code.lines[swaps[0]].endswith(" sc1")
    assert "buffer_wbl2 sc0 sc1" in code.lines[swaps[0] - 2 : swaps[0]]


def test_nvidia_compiles_it_as_well(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/gpu/test_tiled_gpu.py runs the compiled kernel."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target, tiling = Target("cuda", "sm_90"), Tiling(128, 128, 3)
    kernel = compiled_by_triton(target, tiling, torch.bfloat16, True, True)
    text = kernel.asm["ptx"]
    assert "wgmma.mma_async" in text and kernel.metadata.shared <= 227 << 10
    assert text.count("ld.global.sys.acquire.b32") == 4
    assert text.count("atom.global.sys.release.exch.b32") == 1
