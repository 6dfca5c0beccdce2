"""What the CUDA engine makes of operations that follow each other on a lane, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_kernels import missing

from ficco.dma.memops import WAIT_32, WRITE_32, MemOp
from ficco.dma.streams import KernelCopies

#: Words below are the rank's own, and these a peer's.
PEER = 2000


@pytest.fixture(scope="module")
def cuda() -> Any:
    try:
        from ficco.dma import cuda
    except ImportError:
        missing("cuda-bindings")
    return cuda


def wait(address: int) -> MemOp:
    return MemOp(WAIT_32, address, 1)


def write(address: int) -> MemOp:
    return MemOp(WRITE_32, address, 1)


def copies(lane: str) -> KernelCopies:
    return KernelCopies(None, lane, [(1, 2)], [lambda call: (1, 2)], 8, 2)  # type: ignore[arg-type]


def enqueued(cuda: Any, lane: str, *given: Any) -> list[Any]:
    """What is left of operations: waits and writes, or (clears, posts, waits) of a launch."""

    class Engine(cuda.CudaEngine):
        def __init__(self) -> None:
            self._flush, self.rank = False, 0

        def _own(self, program: Any) -> range:
            return range(PEER)

        def _scratch(self, program: Any, index: int) -> int:
            return 5000 + 4 * index

    ops = [cuda._Memops(lane, cuda.cu.Batch(op)) if isinstance(op, tuple) else op for op in given]
    plan = SimpleNamespace(lanes=("compute0", "copy0", "sync"))
    program = SimpleNamespace(plan=plan, ops=[(lane, op) for op in ops], state={}, slot=None)
    body = Engine()._run(program).body
    found: list[Any] = []
    for op in body:
        if isinstance(op, KernelCopies):
            seen = op.signals
            found.append(seen and tuple([a for a, _ in w] for w in _of(seen)))
        else:
            found.append([(one.kind, one.address) for one in op.ops])
    return found


def _of(signals: Any) -> tuple[Any, ...]:
    return signals.clears, signals.posts, signals.waits


def test_in_front_of_a_product_all_is_one_launch(cuda: Any) -> None:
    """But for the wait for the peer's slot, without which nothing may be copied."""
    given = (wait(4),), (write(4),), copies("compute0"), (write(PEER),), (wait(8),)
    first, launch = enqueued(cuda, "compute0", *given)
    assert first == [(WAIT_32, 4)] and launch == ([4], [PEER], [8])


def test_beside_products_a_launch_does_not_wait(cuda: Any) -> None:
    given = (wait(4), write(4)), copies("copy0"), (write(PEER),), (wait(8),), copies("copy0")
    first, launch, second, bare = enqueued(cuda, "copy0", *given)
    assert first == [(WAIT_32, 4)] and launch == ([4], [PEER], [])
    assert second == [(WAIT_32, 8)] and bare is None


def test_posts_by_copies_are_left_to_a_launch_too(cuda: Any) -> None:
    posts = cuda._Posts("compute0", (write(PEER),), (1,))
    given = (wait(4), write(4)), copies("compute0"), posts, (wait(8),)
    first, launch = enqueued(cuda, "compute0", *given)
    assert first == [(WAIT_32, 4)] and launch == ([4], [PEER], [8])


def test_a_launch_without_signals_stays_as_it_was(cuda: Any) -> None:
    assert enqueued(cuda, "copy0", (wait(4),), copies("copy0"), (wait(8),)) == [
        [(WAIT_32, 4)],
        None,
        [(WAIT_32, 8)],
    ]
