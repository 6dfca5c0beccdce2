"""Which waits and writes a launch sees to in place of its stream."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ficco.dma.memops import (
    WAIT_32,
    WRITE_32,
    WRITE_64,
    Around,
    MemOp,
    behind,
    in_front,
    script,
)
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


def waits(*addresses: int) -> list[MemOp]:
    return [MemOp(WAIT_32, address, 1) for address in addresses]


def writes(*addresses: int) -> list[MemOp]:
    return [MemOp(WRITE_32, address, 2) for address in addresses]


def test_what_is_written_in_front_comes_behind_the_copies() -> None:
    """What is waited for does not: who may not write yet, may not copy either."""
    ops = waits(4, 8) + writes(12, 16)
    stays, found = in_front(ops, Around(), OWN, True)
    assert stays == () and found == Around((), tuple(waits(4, 8)), tuple(writes(12, 16)))
    # What comes in front of what it waits for already stays in front of that.
    stays, found = in_front(writes(20) + waits(24), found, OWN, True)
    assert stays == tuple(writes(20))
    assert found == Around((), tuple(waits(24, 4, 8)), tuple(writes(12, 16)))
    assert in_front(writes(20), found, OWN, True) == (tuple(writes(20)), found)


def test_what_comes_behind_copies_is_left_to_the_launch() -> None:
    found, stays = behind(writes(4, 8) + waits(12), Around(), True)
    assert (found.rear, stays) == ((*writes(4, 8), *waits(12)), ())
    again, stays = behind(waits(16) + writes(20), found, True)
    assert again.rear == (*found.rear, *waits(16), *writes(20)) and stays == ()


def test_a_launch_sees_to_so_many() -> None:
    full = writes(*range(0, 4 * MAX_SIGNALS, 4))
    assert in_front(full, Around(), OWN, True)[1].rear == tuple(full)
    one = in_front([*waits(0), *writes(0)], Around(), OWN, True)[1]
    assert in_front(full, one, OWN, True) == (tuple(full), one)
    assert behind(full, one, True) == (one, tuple(full))
    many = waits(*range(0, 4 * MAX_SIGNALS, 4))
    assert in_front(many, one, OWN, True) == (tuple(many), one)
    assert Around(tuple(writes(0)), tuple(many)).fits is False


def test_a_peer_is_told_behind_what_is_cleared_here() -> None:
    """A peer that gets nothing is told in front of the copies; it may answer in the word."""
    stays, found = in_front([*waits(4), *writes(4, 2000, 8)], Around(), OWN, True)
    assert stays == () and found.rear == tuple(writes(4, 8, 2000))
    found, _ = behind(writes(3000), found, True)
    assert found.rear == tuple(writes(4, 8, 2000, 3000))
    bare = Around(rear=tuple(writes(4, 8, 2000, 3000)))
    stays, found = in_front(writes(2004, 12), bare, OWN, True)
    assert found.rear == tuple(writes(12, 4, 8, 2004, 2000, 3000))


def test_beside_products_nothing_spins() -> None:
    found, stays = behind(writes(4) + waits(8) + writes(12), Around(), False)
    assert (found.rear, stays) == (tuple(writes(4)), (*waits(8), *writes(12)))
    stays, found = in_front(waits(4) + writes(8), Around(), OWN, False)
    assert (stays, found) == (tuple(waits(4)), Around(rear=tuple(writes(8))))


@given(OPS, OPS, st.booleans())
def test_nothing_is_lost_or_comes_too_early(
    front: list[MemOp], rear: list[MemOp], spins: bool
) -> None:
    mine = range(20)
    stays, found = in_front(front, Around(), mine, spins)
    moved = found.rear
    found, later = behind(rear, found, spins)
    assert stays == tuple(front[: len(stays)]) and found.fits and not found.begin
    awaited = [op for op in found.front if op.kind == WAIT_32]
    assert awaited == list(found.front) == front[len(stays) : len(stays) + len(awaited)]
    assert sorted(moved) == sorted(front[len(stays) + len(awaited) :])
    told = [op.address not in mine for op in moved]
    assert told == sorted(told) and all(op.kind != WAIT_32 for op in moved)
    assert [*found.rear[len(moved) :], *later] == rear
    if not spins:
        assert not awaited and all(op.kind != WAIT_32 for op in found.rear)


def test_each_block_waits_for_what_is_in_front() -> None:
    around = Around(tuple(writes(3000)), tuple(waits(4, 8)), tuple(writes(4, 2000) + waits(12)))
    found = around.signals(5000, OWN)
    assert found.arrived == 5000
    assert [step.address for step in found.front.steps] == [3000, 4, 8]
    assert (found.front.aside, found.front.alone) == (1, 1)
    assert [step.address for step in found.rear.steps] == [4, 2000, 12]
    assert [step.behind for step in found.rear.steps] == [False, True, False]
    assert [step.waits for step in found.rear.steps] == [False, False, True]


def test_a_script_is_what_the_stream_would_do() -> None:
    end = MemOp(WRITE_64, 3000, 1 << 32)
    ops = [*waits(4), *writes(4, 2000, 2004, 8, 2008), *waits(12), *writes(12), end]
    found = script(ops, OWN)
    assert [(step.address, step.value) for step in found.steps] == [op[1:] for op in ops]
    assert [step.waits for step in found.steps] == [op.kind == WAIT_32 for op in ops]
    assert [step.wide for step in found.steps] == [op is end for op in ops]
    # What is written elsewhere is seen behind all before it, be that waited for or written here.
    behind = [step.address for step in found.steps if step.behind]
    assert behind == [2000, 2008, 3000] and found.alone == len(ops)


@given(OPS)
def test_what_a_script_tells_others_is_behind_everything(ops: list[MemOp]) -> None:
    mine = range(0, 40, 8)
    steps = script(ops, mine).steps
    for index, (op, step) in enumerate(zip(ops, steps, strict=True)):
        tells = op.kind != WAIT_32 and op.address not in mine
        told = index > 0 and ops[index - 1].kind != WAIT_32 and ops[index - 1].address not in mine
        assert step.behind == (tells and not told)


def test_every_block_carries_out_the_waits_at_the_end() -> None:
    found = script([*waits(4), *writes(2000), *waits(8, 12)], OWN, everyone=True)
    assert (len(found.steps), found.alone) == (4, 2)
    assert script([*waits(4), *writes(8)], OWN, everyone=True).alone == 2
    assert script([], OWN, everyone=True).alone == 0


def test_what_is_aside_comes_first_and_has_nothing_behind_it() -> None:
    """For it is seen over PCIe, which takes longer than all of a call's words."""
    begin = writes(3000)
    ops = [*writes(2000), *waits(8)]
    found = script(ops, OWN, everyone=True, aside=begin)
    assert [step.address for step in found.steps] == [3000, 2000, 8]
    assert (found.aside, found.alone) == (1, 2)
    assert [step.behind for step in found.steps] == [False, True, False]
    assert script([], OWN, everyone=True, aside=begin).alone == 1


def test_a_script_is_packed_as_the_kernel_reads_it() -> None:
    steps = ScriptStep(8, 1, waits=True), ScriptStep(16, 1 << 32, wide=True, behind=True)
    packed = replace(script([], OWN), steps=steps, aside=2, alone=1).packed
    assert (list(packed.at)[:3], list(packed.value)[:3]) == ([8, 16, 0], [1, 1 << 32, 0])
    assert (packed.waits, packed.wide, packed.behind) == (0b01, 0b10, 0b10)
    assert (packed.count, packed.aside, packed.alone) == (2, 2, 1)
