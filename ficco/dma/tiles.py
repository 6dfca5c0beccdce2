"""A step whose rows wait, or tell, as one launch of the product whose tiles do."""

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

#: When pieces are expected: bytes per second of a link, and seconds before the first byte (4 H200).
#: Tiles go in the order of arrival in any case; this says which of them are worth cutting.
LINK_BYTES_PER_S, LATENCY_S = 383e9, 12e-6
#: Processors that are left to copies of a GPU that ranks share, where these are kernels.
SHARED_SPARE = 16
#: Seconds after which a launch gives up; the watchdog ends it long before.
LIMIT_S = 86400.0
#: Sets of operands whose launches a step keeps.
KEPT = 64


def work_of(plan: Plan, step: Step) -> Work:
    """The products of a step that have rows, and which of these its signals are about."""
    products = [product for product in step.products if product.out.rows]
    numbers = [product_rows(plan, product) for product in products]

    def spans(signal: Signal) -> tuple[RowSpan, ...]:
        found = []
        for index, (first, last) in enumerate(numbers):
            begin, end = max(signal.first, first), min(signal.last, last)
            if begin < end:
                found.append(RowSpan(index, begin - first, end - first))
        return tuple(found)

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
    """The dtypes of a product: of A, B and the result."""
    a, b, out = (getattr(torch, buffer.dtype) for buffer in buffers)
    return TileTypes(a, b, out, precise=scaling is not None and not scaling.fast_accum)


class LaunchOrder:
    """How the launches of this process follow each other on a device. Two that wait at a time could
    keep the processors from the work that a peer waits for, while that one's launch waits for this
    rank. Launches of one stream follow each other anyway; those of graphs that others capture may
    come on any.

    Attributes:
        lock: held from :meth:`begin` until the call is enqueued.
    """

    def __init__(self, driver: Driver) -> None:
        self.lock, self._elsewhere = threading.RLock(), False  # launches before, on other streams
        self._over = driver.lasting_event()
        self._external = driver.external(self._over)
        self._stream: int | None = None
        self._captured = False

    def begin(self, stream: int) -> None:
        """A call on a stream, as PyTorch calls it, is about to be enqueued."""
        self._elsewhere = self._captured or self._stream not in (None, stream)
        self._stream = stream

    def launch(self, launch: Callable[[], None], lanes: Lanes) -> None:
        """Launch behind those before."""
        captured, stream = bool(lanes.mode), lanes["compute0"]
        event = self._external if captured else self._over
        self._captured |= captured
        if event is not None and (captured or self._elsewhere):
            event.hold(stream)
        launch()
        if event is not None:
            event.record(stream)


#: By device. Steps keep them.
_orders: WeakValueDictionary[int, LaunchOrder] = WeakValueDictionary()


def order(driver: Driver) -> LaunchOrder:
    """That of a driver's device."""
    found = _orders.get(driver.index)
    if found is None:
        with driver.aside():
            found = _orders.setdefault(driver.index, LaunchOrder(driver))
    return found


class TiledStep:
    """The launch of a step.

    :meth:`prepare` comes before anything of a call is enqueued: it may compile, and load a module,
    which waits for the device. It does so once for each layout of B.
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
            late: address of a word that is written when the launch gives up.
        """
        made = [product for product in step.products if product.out.rows]
        self._left = [places.view(product.a) for product in made]
        self._right: Callable[[Call], torch.Tensor] = places.view(made[0].b)
        self._out = [places.view(product.out) for product in made]
        self._of_left = [places.view(product.factors[0]) for product in made if product.factors]
        self._of_right = places.view(made[0].factors[1]) if made[0].factors else None
        self._bias = places.view(made[0].bias) if made[0].bias else None
        buffers = (plan.buffer[region.buffer] for region in made[0][:3])
        self._types = types_of(buffers, plan.problem.scaling)
        self._driver, self._gates, self._words = driver, gates, words
        self._late, self._work = late, work_of(plan, step)
        self._spare = SHARED_SPARE if driver.shared else 0
        self._order = order(driver)
        self._launches: dict[bool, TiledLaunch] = {}  # by whether the rows of B are contiguous
        self._again: dict[Any, Enqueue] = {}  # by where the operands lie

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
        again = self._again.get(key)
        if again is not None:
            return self._order.launch(partial(again, stream), call.state)
        if len(self._again) == KEPT:
            self._again.clear()
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
        again = launch.launch(left, b, out, call.state["compute0"], scales)
        if again is not None:
            self._again[key] = again
