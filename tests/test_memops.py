"""Which waits and writes a launch of copies sees to in place of its stream."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ficco.dma.memops import WAIT_32, WRITE_32, WRITE_64, MemOp, script, with_front, with_rear
from ficco.hip_kernels import MAX_SIGNALS, ScriptStep, Signals

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
    """What is waited for in front stays there: who may not write yet, may not copy either."""
    stays, found = with_front(Signals(0), waits(4, 8) + writes(12, 16), OWN)
    assert stays == tuple(waits(4, 8))
    assert found.clears == ((12, 2), (16, 2)) and not found.posts and not found.waits
    stays, found = with_front(found, writes(20) + waits(24) + writes(28), OWN)
    assert stays == (*writes(20), *waits(24))
    assert found.clears == ((28, 2), (12, 2), (16, 2))


def test_what_is_posted_and_waited_for_behind_is_left_to_the_launch() -> None:
    found, stays = with_rear(Signals(0), writes(4, 8) + waits(12), True)
    assert (found.posts, found.waits, stays) == (((4, 2), (8, 2)), ((12, 1),), ())
    found, stays = with_rear(found, waits(16) + writes(20) + waits(24), True)
    assert found.waits == ((12, 1), (16, 1)) and stays == (*writes(20), *waits(24))
    # It posts before it waits: nothing is posted that comes behind a wait.
    again, stays = with_rear(found, writes(20), True)
    assert again.posts == found.posts and stays == tuple(writes(20))


def test_the_end_of_a_call_is_for_the_stream() -> None:
    end = MemOp(WRITE_64, 0, 1)
    found, stays = with_rear(Signals(0), [*writes(4), end, *writes(8)], True)
    assert found.posts == ((4, 2),) and stays == (end, *writes(8))
    stays, found = with_front(Signals(0), [*writes(4), end], OWN)
    assert stays == (*writes(4), end) and not found.count


def test_a_launch_sees_to_so_many() -> None:
    full = writes(*range(0, 4 * MAX_SIGNALS, 4))
    assert with_front(Signals(0), full, OWN)[1].count == MAX_SIGNALS
    one = with_front(Signals(0), writes(0), OWN)[1]
    assert with_front(one, full, OWN) == (tuple(full), one)
    assert with_rear(one, full, True) == (one, tuple(full))


def test_a_peer_is_told_behind_what_is_cleared_here() -> None:
    """A peer that gets nothing is told in front of the copies; it may answer in the word."""
    ops = [*waits(4), *writes(4, 2000, 8)]
    stays, found = with_front(Signals(0), ops, OWN)
    assert stays == tuple(waits(4))
    assert found.clears == ((4, 2), (8, 2)) and found.posts == ((2000, 2),)
    found, _ = with_rear(found, writes(3000), True)
    assert found.posts == ((2000, 2), (3000, 2))


def test_beside_products_nothing_spins() -> None:
    found, stays = with_rear(Signals(0), writes(4) + waits(8), False)
    assert (found.posts, found.waits, stays) == (((4, 2),), (), tuple(waits(8)))


@given(OPS, OPS)
def test_nothing_is_lost_or_comes_too_early(front: list[MemOp], rear: list[MemOp]) -> None:
    stays, found = with_front(Signals(0), front, range(20))
    first = len(found.posts)
    found, behind = with_rear(found, rear, True)
    clears = [MemOp(WRITE_32, *word) for word in found.clears]
    posts = [MemOp(WRITE_32, *word) for word in found.posts]
    awaited = [MemOp(WAIT_32, *word) for word in found.waits]
    assert stays == tuple(front[: len(stays)])
    assert sorted([*clears, *posts[:first]]) == sorted(front[len(stays) :])
    assert all(op.address < 20 for op in clears) and all(op.address >= 20 for op in posts[:first])
    assert [*posts[first:], *awaited, *behind] == rear
    assert found.count <= MAX_SIGNALS


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
