"""A step whose rows wait, or tell, as one launch of the product whose tiles do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ficco.dma.buffers import Buffers
from ficco.dma.driver import Driver, Event
from ficco.dma.engine import Call
from ficco.plan import Plan, Signal, Step, product_rows
from ficco.tiled.products import TiledLaunch
from ficco.tiled.worklist import RowSpan, Work

#: When pieces are expected: bytes per second of a link, and seconds before the first byte (4 H200).
#: Tiles go in the order of arrival in any case; this says which of them are worth cutting.
LINK_BYTES_PER_S, LATENCY_S = 383e9, 12e-6
#: Processors that are left to copies of a GPU that ranks share, where these are kernels.
SHARED_SPARE = 16
#: Seconds after which a launch gives up; the watchdog ends it long before.
LIMIT_S = 86400.0


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
        k=left.cols,
        gates=tuple(map(spans, step.gates)),
        announces=tuple(map(spans, step.announces)),
        opens=tuple(LATENCY_S + nbytes / LINK_BYTES_PER_S for nbytes in arrived),
    )


#: By device, the latest launch of this process: what it is over with, and its stream.
_latest: dict[int, tuple[Event, Any]] = {}


class TiledStep:
    """The launch of a step.

    :meth:`prepare` comes before anything of a call is enqueued: it may compile, and load a module,
    which waits for the device. It does so once for each layout of B.

    Launches of a process follow each other. Two that wait at a time could keep the processors from
    the work that a peer waits for, while that one's launch waits for this rank. Captured ones
    cannot wait for others: graphs that are replayed concurrently must be so in the same order on
    all ranks.
    """

    def __init__(
        self,
        driver: Driver,
        plan: Plan,
        step: Step,
        places: Buffers,
        gates: Sequence[int],
        words: Sequence[int],
        late: int,
        spare: int,
        over: Event | None,
    ) -> None:
        """
        Args:
            gates, words: addresses of the words of the step's gates and announcements.
            late: address of a word that is written when the launch gives up.
            spare: processors that are left to others.
            over: an event of its own; None for a captured call.
        """
        made = [product for product in step.products if product.out.rows]
        self._left = [places.view(product.a) for product in made]
        self._right: Callable[[Call], torch.Tensor] = places.view(made[0].b)
        self._out = [places.view(product.out) for product in made]
        self._driver, self._gates, self._words = driver, gates, words
        self._late, self._dtype, self._over = late, places.dtype(made[0].a), over
        self._work, self._spare = work_of(plan, step), spare
        self._launches: dict[bool, TiledLaunch] = {}  # by whether the rows of B are contiguous

    def prepare(self, call: Call) -> None:
        b_rows = self._right(call).stride(1) == 1
        if b_rows not in self._launches:
            products = self._driver.tiled()
            self._launches[b_rows] = products.prepare(
                products.best(self._work, b_rows, self._spare),
                self._dtype,
                b_rows,
                late=self._late,
                limit_s=LIMIT_S,
                gates=self._gates,
                words=self._words,
            )

    def __call__(self, call: Call) -> None:
        stream, index = call.state["compute0"], self._driver.index
        launch = self._driver.on_lane("compute0", self._launch)
        if self._over is None:
            return launch(call)
        before, where = _latest.get(index, (None, None))
        if before is not None and where != stream:
            before.hold(stream)
        launch(call)
        self._over.record(stream)
        _latest[index] = self._over, stream

    def _launch(self, call: Call) -> None:
        b = self._right(call)
        left, out = ([view(call) for view in views] for views in (self._left, self._out))
        self._launches[b.stride(1) == 1].launch(left, b, out, call.state["compute0"])
