"""A step with gated or announced rows, as one launch of a product whose tiles wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary

import torch

from ficco.compute.buffers import Buffers, operands_key
from ficco.compute.program import Call
from ficco.compute.tiled.products import Enqueue, TiledLaunch, TileScales, TileTypes
from ficco.compute.tiled.worklist import RowSpan, Work
from ficco.dma.driver import Driver, Lanes
from ficco.plan import Plan, Signal, Step, product_rows
from ficco.problems.scaling import Scaling
from ficco.problems.specification import Buffer

#: Bytes per second and latency in seconds of a link (4 H200), to predict when pieces arrive. Tiles
#: run in the order of arrival in any case; the times affect only which tiles are split.
LINK_BYTES_PER_S, LATENCY_S = 383e9, 12e-6
#: SMs left for copies on a GPU that ranks share, where copies are kernels.
SHARED_SPARE = 16
#: Seconds after which a launch gives up. The watchdog ends it long before.
LIMIT_S = 86400.0
#: Number of sets of operands whose launches a step caches.
KEPT = 64


def work_of(plan: Plan, step: Step) -> Work:
    """The nonempty products of a step, and the rows that each signal gates or announces."""
    products = [product for product in step.products if product.out.rows]
    numbers = [product_rows(plan, product) for product in products]

    def spans(signal: Signal) -> tuple[RowSpan, ...]:
        overlaps = []
        for index, (first, last) in enumerate(numbers):
            begin, end = max(signal.first, first), min(signal.last, last)
            if begin < end:
                overlaps.append(RowSpan(index, begin - first, end - first))
        return tuple(overlaps)

    left = products[0].a
    row_bytes = left.cols * plan.buffer[left.buffer].itemsize
    arrived = accumulate((gate.last - gate.first) * row_bytes for gate in step.gates)
    return Work(
        rows=tuple(product.out.rows for product in products),
        n=products[0].out.cols,
        k=row_bytes // 2,
        gates=tuple(map(spans, step.gates)),
        announces=tuple(map(spans, step.announces)),
        opens=tuple(LATENCY_S + nbytes / LINK_BYTES_PER_S for nbytes in arrived),
    )


def types_of(buffers: Iterable[Buffer], scaling: Scaling | None) -> TileTypes:
    """The dtypes of a product, from the buffers of A, B and the result."""
    a, b, out = (getattr(torch, buffer.dtype) for buffer in buffers)
    return TileTypes(a, b, out, precise=scaling is not None and not scaling.fast_accum)


class LaunchOrder:
    """Serializes the launches of this process on a device. Two launches that wait at the same time
    could occupy all SMs: work that a peer waits for would never run, while the peer's launch waits
    for this rank. Launches on one stream are ordered anyway; those of graphs may be on any stream.

    Attributes:
        lock: held from :meth:`begin` until the call is enqueued.
    """

    def __init__(self, driver: Driver) -> None:
        self.lock, self._crosses_streams = threading.RLock(), False
        self._over = driver.lasting_event()
        self._external = driver.external(self._over)
        self._stream: int | None = None
        self._captured = False

    def begin(self, stream: int) -> None:
        """Prepare to enqueue a call on a stream, given by PyTorch's integer handle."""
        self._crosses_streams = self._captured or self._stream not in (None, stream)
        self._stream = stream

    def launch(self, launch: Callable[[], None], lanes: Lanes) -> None:
        """Launch after all earlier launches."""
        captured, stream = bool(lanes.mode), lanes["compute0"]
        event = self._external if captured else self._over
        self._captured |= captured
        if event is not None and (captured or self._crosses_streams):
            event.hold(stream)
        launch()
        if event is not None:
            event.record(stream)


#: By device index. The steps keep the orders alive.
_orders: WeakValueDictionary[int, LaunchOrder] = WeakValueDictionary()


def order(driver: Driver) -> LaunchOrder:
    """The launch order of a driver's device."""
    existing = _orders.get(driver.index)
    if existing is not None:
        return existing
    with driver.aside():
        return _orders.setdefault(driver.index, LaunchOrder(driver))


class TiledStep:
    """The launch of a step.

    :meth:`prepare` must run before any operation of a call is enqueued. Once for each layout of B
    it may compile a kernel, and load a module, which waits for the device.
    """

    def __init__(
        self,
        plan: Plan,
        step: Step,
        places: Buffers,
        gates: Sequence[int],
        words: Sequence[int],
        late: int,
        driver: Driver,
    ) -> None:
        """
        Args:
            gates, words: addresses of the words of the step's gates and announcements.
            late: address of a word that the launch writes when it gives up.
        """
        products = [product for product in step.products if product.out.rows]
        first = products[0]
        self._left = [places.view(product.a) for product in products]
        self._right: Callable[[Call], torch.Tensor] = places.view(first.b)
        self._out = [places.view(product.out) for product in products]
        self._of_left = [places.view(product.factors[0]) for product in products if product.factors]
        self._of_right = places.view(first.factors[1]) if first.factors else None
        self._bias = places.view(first.bias) if first.bias else None
        buffers = (plan.buffer[region.buffer] for region in first[:3])
        self._types = types_of(buffers, plan.problem.scaling)
        self._driver, self._gates, self._words = driver, gates, words
        self._late, self._work = late, work_of(plan, step)
        self._spare = SHARED_SPARE if driver.shared else 0
        self._order = order(driver)
        self._launches: dict[bool, TiledLaunch] = {}  # by whether the rows of B are contiguous
        self._relaunches: dict[Any, Enqueue] = {}  # by the addresses of the operands

    def prepare(self, call: Call) -> None:
        b_rows = self._right(call).stride(1) == 1
        if b_rows in self._launches:
            return
        with self._driver.aside():
            products = self._driver.tiled()
            self._launches[b_rows] = products.prepare(
                products.best(self._work, self._types, b_rows, self._spare),
                self._types,
                b_rows,
                late=self._late,
                limit_s=LIMIT_S,
                gates=self._gates,
                words=self._words,
            )

    def __call__(self, call: Call) -> None:
        key, stream = operands_key(call), call.state["compute0"]
        relaunch = self._relaunches.get(key)
        if relaunch is not None:
            return self._order.launch(partial(relaunch, stream), call.state)
        if len(self._relaunches) == KEPT:
            self._relaunches.clear()
        launch = self._driver.on_lane("compute0", partial(self._launch, key))
        self._order.launch(lambda: launch(call), call.state)

    def _launch(self, key: Any, call: Call) -> None:
        b = self._right(call)
        left, out = ([view(call) for view in views] for views in (self._left, self._out))
        scales = None
        if self._of_right is not None:
            bias = None if self._bias is None else self._bias(call)
            scales = TileScales([view(call) for view in self._of_left], self._of_right(call), bias)
        launch = self._launches[b.stride(1) == 1]
        relaunch = launch.launch(left, b, out, call.state["compute0"], scales)
        if relaunch is not None:
            self._relaunches[key] = relaunch
