"""The tiled product on a Hopper GPU: exact results, gates, announcements and deadlines. The Triton
kernel for MI300X runs there, too."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from ranks import on_hopper
from test_tiled_triton import Call
from test_worklist import COSTS, spans

from ficco.compute.tiled.portable import TritonKernel
from ficco.compute.tiled.products import TiledProducts, TileScales, TileTypes
from ficco.compute.tiled.worklist import (
    H100_PRECISE,
    MAX_GATES,
    Cut,
    RowSpan,
    TileList,
    Tiling,
    Work,
    listed,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU"),
]

#: Kernels and tilings.
KERNELS = [
    ("hopper", Tiling(128, 256, 4)),
    ("hopper", Tiling(128, 256, 4, cm=2)),
    ("hopper", Tiling(128, 256, 4, cn=2)),
    ("hopper", Tiling(128, 224, 4)),
    ("hopper", Tiling(128, 192, 4)),
    ("hopper", Tiling(128, 160, 4)),
    ("hopper", Tiling(128, 128, 6)),
    ("triton", Tiling(128, 128, 3)),
]
#: Rows of each product, n and k.
SHAPES = [
    ((1, 17, 130, 513), 200, 72),
    ((513,), 8, 8),
    ((130, 1), 1376, 4096),
    ((640, 300, 17), 520, 2048),
    ((1,), 8, 4096),
    ((64, 65, 63, 128, 129, 127, 256, 1), 264, 1000),
]
Chosen = tuple[TiledProducts, Tiling]


@cache
def products_of(kernel: str) -> TiledProducts:
    from ficco.compute.tiled.hopper import hopper_products
    from ficco.hip_kernels.cuda_binding import CudaBinding

    index = torch.cuda.current_device()
    torch.backends.cuda.matmul.allow_tf32 = False
    if kernel == "hopper":
        return hopper_products(index)
    binding = CudaBinding(index)
    return TiledProducts(torch.device("cuda", index), binding.processors, TritonKernel(binding))


@pytest.fixture(params=KERNELS, ids=lambda pair: "-".join([pair[0], *map(str, pair[1])]))
def chosen(request: pytest.FixtureRequest) -> Chosen:
    kernel, tiling = request.param
    if kernel == "triton" and find_spec("triton") is None:
        pytest.skip("needs Triton")
    return products_of(kernel), tiling


def tiles_of(chosen: Chosen, work: Work, cut: Cut = Cut.END) -> TileList:
    products, tiling = chosen
    return listed(work, tiling, cut, products.processors // tiling.blocks, COSTS)


# Exact.


@pytest.mark.parametrize("b_rows", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_exact(chosen: Chosen, dtype: torch.dtype, b_rows: bool) -> None:
    for shape in (shape for shape in SHAPES if len(shape[0]) <= chosen[0].kernel.most):
        for cut in (Cut.NONE, Cut.END):
            call = Call(chosen[0], tiles_of(chosen, Work(*shape), cut), dtype, b_rows)
            call.fill(1)
            for _ in range(3):
                call.launch()
                call.verify((shape, cut))


# Operands of float8.

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FAST, OTHER = TileTypes(E4M3, E4M3, torch.bfloat16), TileTypes(E5M2, E4M3, torch.float16)
PRECISE = TileTypes(E4M3, E5M2, torch.bfloat16, precise=True)
SCALED = [
    *((tiling, types) for types in (FAST, OTHER) for name, tiling in KERNELS if name == "hopper"),
    *((tiling, PRECISE) for tiling in H100_PRECISE.multiply),
]


def powers(*shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-2, 3, shape, device="cuda")


@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("of_rows", [False, True], ids=["tensor", "row"])
@pytest.mark.parametrize(("tiling", "types"), SCALED, ids=str)
def test_scaled_products_are_exact(
    tiling: Tiling, types: TileTypes, of_rows: bool, bias: bool
) -> None:
    chosen = products_of("hopper"), tiling
    for rows, n, k in SHAPES:
        n = -(-n // 16) * 16
        for cut in (Cut.NONE, Cut.END):
            call = Call(chosen[0], tiles_of(chosen, Work(rows, n, k), cut), types, False)
            call.fill(1)
            row = torch.randint(-4, 5, (n,), device="cuda").to(types.out) if bias else None
            of_a = [powers(count if of_rows else 1, 1) for count in rows]
            call.scales = TileScales(of_a, powers(1, n if of_rows else 1), row)
            for _ in range(2):
                call.launch()
                call.verify((rows, n, k, cut))


@pytest.mark.parametrize("tiling", H100_PRECISE.multiply, ids=str)
def test_sums_of_float8_keep_float32(tiling: Tiling) -> None:
    """Terms of 1 / 512 after a sum of 1024 are not lost."""
    types = TileTypes(E4M3, E4M3, torch.float16, precise=True)
    tiles = listed(Work((128,), 128, 1024), tiling, Cut.NONE, 1, COSTS)
    call = Call(products_of("hopper"), tiles, types, False)
    call.fill(1)
    call.b.fill_(1.0)
    call.a[0].fill_(2.0**-9)
    call.a[0][:, :128] = 8.0
    call.scales = TileScales([torch.ones(1, 1, device="cuda")], torch.ones(1, 1, device="cuda"))
    call.launch()
    call.verify(tiling)
    assert call.out[0].unique().tolist() == [1028.0]


def test_the_same_list_gives_the_same_bits(chosen: Chosen) -> None:
    """The sums of these values are rounded."""
    tiles = tiles_of(chosen, Work((513, 130), 520, 4096))
    call = Call(chosen[0], tiles, torch.bfloat16, True)
    for tensor in (*call.a, call.b):
        tensor.copy_(torch.randn(tensor.shape, device="cuda"))
    results = []
    for _ in range(5):
        call.launch()
        results.append(torch.cat(call.out).clone())
    torch.cuda.synchronize()
    assert all(torch.equal(results[0], result) for result in results[1:])
    right = torch.cat([a.double() @ call.b.double() for a in call.a])
    assert float((results[0].double() - right).norm() / right.norm()) < 5e-3


def test_operands_that_the_hardware_cannot_address(chosen: Chosen) -> None:
    (products, tiling), rows, n, k = chosen, 130, 200, 72
    tiles = listed(Work((rows, rows), n, k), tiling, Cut.NONE, 66, COSTS)
    call = Call(products, tiles, torch.bfloat16, True)

    def shifted(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns + 8, device="cuda", dtype=call.dtype)[:, 1 : columns + 1]

    def odd_pitch(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns + 3, device="cuda", dtype=call.dtype)[:, :columns]

    def transposed(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(columns, rows, device="cuda", dtype=call.dtype).t()

    for make in (shifted, odd_pitch, transposed):
        for replaced in ("a", "b", "out", "all"):
            if replaced in ("a", "all"):
                call.a = [make(rows, k), call.a[1]]
            if replaced in ("b", "all"):
                call.b = make(k, n)
            if replaced in ("out", "all"):
                call.out = [call.room(rows, n), make(rows, n)]
                call.padding = 0
            call.fill(3)
            call.launch()
            call.verify((make.__name__, replaced))
    gated = Work((rows,), n, k, ((RowSpan(0, 0, 1),),))
    call = Call(products, listed(gated, tiling, Cut.NONE, 66, COSTS), torch.bfloat16, True)
    call.a = [odd_pitch(rows, k)]
    with pytest.raises(ValueError, match="multiples of 16"):
        call.launch()


# Gates and announcements.


def stream_word(operation: str, stream: torch.cuda.Stream, address: int) -> None:
    """Enqueue a write of 1 to a 32-bit word (``"Write"``), or a wait for 1 (``"Wait"``)."""
    from cuda.bindings import driver

    enqueue = getattr(driver, f"cuStream{operation}Value32")
    assert enqueue(stream.cuda_stream, address, 1, 0)[0] == 0


def attempts(
    chosen: Chosen, cut: Cut, dtype: torch.dtype, b_rows: bool, gated: bool
) -> Iterator[tuple[Call, random.Random, object]]:
    """Calls with operands whose rows wait for random gates or are announced, and descriptions of
    the calls."""
    rng = random.Random(f"{chosen[1]} {cut}")
    for rows, count in (((1024,), 6), ((513, 300, 130), 9), ((2600,), 100)):
        ranges = spans(rng, rows, count)
        work = Work(rows, 520, 1000, *((ranges, ()) if gated else ((), ranges)))
        call = Call(chosen[0], tiles_of(chosen, work, cut), dtype, b_rows, padding=0)
        for attempt in range(3):
            call.fill(attempt)
            yield call, rng, (rows, cut, attempt)


@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
def test_tiles_wait_for_their_rows(chosen: Chosen, cut: Cut) -> None:
    """A copy engine writes the rows in random order, each copy before the write of its gate. The
    rows hold NaN before, and the product does not end before the copies begin."""
    held, arrivals = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.cuda.Stream()
    for call, rng, description in attempts(chosen, cut, torch.bfloat16, True, gated=True):
        gates = call.tiles.work.gates
        hosts = [a.cpu().pin_memory() for a in call.a]
        for product, start, stop in (span for spanned in gates for span in spanned):
            call.a[product][start:stop].fill_(torch.nan)
        torch.cuda.synchronize()
        held[0] = 0
        stream_word("Wait", arrivals, held.data_ptr())
        for gate in rng.sample(range(len(gates)), len(gates)):
            with torch.cuda.stream(arrivals):
                for product, start, stop in gates[gate]:
                    target = call.a[product][start:stop]
                    target.copy_(hosts[product][start:stop], non_blocking=True)
            stream_word("Write", arrivals, call.gates[gate])
        call.launch()
        end = torch.cuda.Event()
        end.record()
        time.sleep(0.002)
        assert not end.query(), "the product did not wait"
        held[0] = 1
        call.verify(description)


@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
def test_announced_rows_are_stored(chosen: Chosen, cut: Cut) -> None:
    departures = torch.cuda.Stream()
    for call, _, description in attempts(chosen, cut, torch.float16, False, gated=False):
        announces = call.tiles.work.announces
        exact = [product.cpu() for product in call.exact]
        hosts = [torch.full_like(t, torch.nan).pin_memory() for t in exact]
        torch.cuda.synchronize()
        call.launch()
        for address, spanned in zip(call.posts, announces, strict=True):
            stream_word("Wait", departures, address)
            with torch.cuda.stream(departures):
                for product, start, stop in spanned:
                    source = call.out[product][start:stop]
                    hosts[product][start:stop].copy_(source, non_blocking=True)
        posted = call.words.cpu()[:-1]  # after the kernel
        call.words[:-1] = 1  # lets the other stream go on in any case
        assert bool((posted == 1).all()), f"{description}: not announced"
        call.verify(description)
        for product, start, stop in (span for spanned in announces for span in spanned):
            pair = hosts[product][start:stop], exact[product][start:stop]
            assert torch.equal(*pair), f"{description}: read too early"


@pytest.mark.parametrize("cut", [Cut.NONE, Cut.END], ids=lambda cut: cut.name)
def test_a_gate_that_never_opens(chosen: Chosen, cut: Cut) -> None:
    products, tiling = chosen
    gates = tuple((RowSpan(0, start, start + 128),) for start in range(0, 1024, 128))
    assert MAX_GATES >= len(gates)
    tiles = listed(Work((1024,), 520, 4096, gates), tiling, cut, 66, COSTS)
    call = Call(products, tiles, torch.bfloat16, True, limit_s=0.05)
    call.fill(1)
    call.words[:-1] = 1
    call.words[5] = 0
    torch.cuda.synchronize()
    began = time.perf_counter()
    call.launch()
    call.verify("late", late=6)
    shortest = 0.01 if tiling == Tiling(128, 128, 3) else 0.04  # Triton counts polls, not time
    assert shortest < time.perf_counter() - began < 1
    call.fill(2)
    call.words[:-1] = 1
    call.launch()
    call.verify("the next call")
