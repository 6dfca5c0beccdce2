"""Waits and writes that are folded from a stream into a launch: ficco.dma.driver."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ficco.dma.driver import WAIT_32, WRITE_32, WRITE_64, Fused, MemOp, behind, in_front, script
from ficco.hip_kernels.launch import MAX_SIGNALS, ScriptStep

OPS = st.lists(
    st.builds(
        MemOp,
        st.sampled_from([WAIT_32, WRITE_32, WRITE_64]),
        st.integers(0, 9).map(lambda index: 4 * index),
        st.integers(0, 3),
    ),
    max_size=40,
)
#: Addresses of the rank's own words.
OWN = range(1000)


def waits(*addresses: int) -> tuple[MemOp, ...]:
    return tuple(MemOp(WAIT_32, address, 1) for address in addresses)


def writes(*addresses: int) -> tuple[MemOp, ...]:
    return tuple(MemOp(WRITE_32, address, 2) for address in addresses)


def test_operations_before_a_launch() -> None:
    """Writes move after the copies. Waits stay before the copies, since a rank that may not write
    yet may not copy either."""
    stays, fused = in_front([*waits(4, 8), *writes(12, 16)], Fused(), OWN, True)
    assert stays == () and fused == Fused((), waits(4, 8), writes(12, 16))
    # Operations before the waits of the launch stay before these waits.
    stays, fused = in_front([*writes(20), *waits(24)], fused, OWN, True)
    assert stays == writes(20)
    assert fused == Fused((), waits(24, 4, 8), writes(12, 16))
    assert in_front(writes(20), fused, OWN, True) == (writes(20), fused)
    # The post to a peer that receives no copy may move, but the peer may answer in a word that the
    # launch clears: the post comes after the clear.
    stays, fused = in_front([*waits(4), *writes(4, 2000, 8)], Fused(), OWN, True)
    assert stays == () and fused.rear == writes(4, 8, 2000)
    bare = Fused(rear=writes(4, 8, 2000, 3000))
    assert in_front(writes(2004, 12), bare, OWN, True)[1].rear == writes(
        *(12, 4, 8, 2004, 2000, 3000)
    )


def test_operations_after_a_launch() -> None:
    fused, stays = behind([*writes(4, 8), *waits(12)], Fused(), True)
    assert (fused.rear, stays) == ((*writes(4, 8), *waits(12)), ())
    extended, stays = behind([*waits(16), *writes(20)], fused, True)
    assert extended.rear == (*fused.rear, *waits(16), *writes(20)) and stays == ()
    # A launch that runs with products does not spin.
    fused, stays = behind([*writes(4), *waits(8), *writes(12)], Fused(), False)
    assert (fused.rear, stays) == (writes(4), (*waits(8), *writes(12)))
    before = in_front([*waits(4), *writes(8)], Fused(), OWN, False)
    assert before == (waits(4), Fused(rear=writes(8)))


def test_a_launch_carries_out_a_limited_number_of_operations() -> None:
    most_writes, most_waits = (kind(*range(0, 4 * MAX_SIGNALS, 4)) for kind in (writes, waits))
    assert in_front(most_writes, Fused(), OWN, True)[1].rear == most_writes
    small = in_front([*waits(0), *writes(0)], Fused(), OWN, True)[1]
    assert in_front(most_writes, small, OWN, True) == (most_writes, small)
    assert behind(most_writes, small, True) == (small, most_writes)
    assert in_front(most_waits, small, OWN, True) == (most_waits, small)
    assert not Fused(writes(0), most_waits).fits


@given(OPS, OPS, st.booleans())
def test_no_operation_is_lost_or_comes_too_early(
    front: list[MemOp], rear: list[MemOp], spins: bool
) -> None:
    own = range(20)
    stays, fused = in_front(front, Fused(), own, spins)
    moved = fused.rear
    fused, later = behind(rear, fused, spins)
    assert stays == tuple(front[: len(stays)]) and fused.fits and not fused.begin
    awaited = [op for op in fused.front if op.kind == WAIT_32]
    assert awaited == list(fused.front) == front[len(stays) : len(stays) + len(awaited)]
    assert sorted(moved) == sorted(front[len(stays) + len(awaited) :])
    to_peers = [op.address not in own for op in moved]
    assert to_peers == sorted(to_peers) and all(op.kind != WAIT_32 for op in moved)
    assert [*fused.rear[len(moved) :], *later] == rear
    if not spins:
        assert not awaited and all(op.kind != WAIT_32 for op in fused.rear)


def test_a_script_has_the_operations_of_the_stream() -> None:
    end = MemOp(WRITE_64, 3000, 1 << 32)
    ops = [*waits(4), *writes(4, 2000, 2004, 8, 2008), *waits(12), *writes(12), end]
    result = script(ops, OWN)
    assert [(step.address, step.value) for step in result.steps] == [op[1:] for op in ops]
    assert [step.waits for step in result.steps] == [op.kind == WAIT_32 for op in ops]
    assert [step.wide for step in result.steps] == [op is end for op in ops]
    # A write to a peer is ordered after all earlier waits and local writes.
    ordered = [step.address for step in result.steps if step.behind]
    assert ordered == [2000, 2008, 3000] and result.alone == len(ops)


@given(OPS)
def test_writes_of_a_script_to_peers_come_after_all_earlier_operations(ops: list[MemOp]) -> None:
    own = range(0, 40, 8)
    steps = script(ops, own).steps
    to_peers = [op.kind != WAIT_32 and op.address not in own for op in ops]
    pairs = zip(to_peers, [False, *to_peers], strict=False)
    assert [step.behind for step in steps] == [now and not before for now, before in pairs]


def test_blocks_that_carry_out_a_script() -> None:
    """Every block carries out the waits at the end, and the first block all other steps. Steps
    aside come first, and no step is ordered after them, as a write over PCIe outlasts a call."""
    begin, mixed = writes(3000), [*waits(4), *writes(2000), *waits(8, 12)]
    for ops, aside, alone in (
        (mixed, (), 2),
        ([*waits(4), *writes(8)], (), 2),
        ([], (), 0),
        (mixed, begin, 3),
        ([], begin, 1),
    ):
        result = script(ops, OWN, everyone=True, aside=aside)
        assert [step.address for step in result.steps] == [op.address for op in (*aside, *ops)]
        assert (result.aside, result.alone) == (len(aside), alone)
        assert [step.address for step in result.steps if step.behind] == [2000] * (ops is mixed)
    fused = Fused(begin, waits(4, 8), (*writes(4, 2000), *waits(12)))
    signals = fused.signals(5000, OWN)
    assert signals.arrived == 5000
    assert signals.front.steps == script(waits(4, 8), OWN, aside=begin).steps
    assert (signals.front.aside, signals.front.alone) == (1, 1)
    assert signals.rear.steps == script(fused.rear, OWN).steps
    rear = Fused(rear=(*writes(2000), *waits(4), *writes(2004))).signals(5000, OWN, reads=True).rear
    assert [step.address for step in rear.steps if step.behind] == [2004]


def test_a_script_is_packed_as_the_kernel_reads_it() -> None:
    steps = ScriptStep(8, 1, waits=True), ScriptStep(16, 1 << 32, wide=True, behind=True)
    packed = replace(script([], OWN), steps=steps, aside=2, alone=1).packed
    assert (list(packed.at)[:3], list(packed.value)[:3]) == ([8, 16, 0], [1, 1 << 32, 0])
    assert (packed.waits, packed.wide, packed.behind) == (0b01, 0b10, 0b10)
    assert (packed.count, packed.aside, packed.alone) == (2, 2, 1)
