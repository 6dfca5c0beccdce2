"""Which waits and writes a launch sees to in place of its stream."""

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


def test_what_is_in_front_of_a_launch() -> None:
    """What is written there comes behind the copies; what is waited for does not: who may not write
    yet, may not copy either."""
    stays, found = in_front([*waits(4, 8), *writes(12, 16)], Fused(), OWN, True)
    assert stays == () and found == Fused((), waits(4, 8), writes(12, 16))
    # What comes in front of what it waits for already stays in front of that.
    stays, found = in_front([*writes(20), *waits(24)], found, OWN, True)
    assert stays == writes(20)
    assert found == Fused((), waits(24, 4, 8), writes(12, 16))
    assert in_front(writes(20), found, OWN, True) == (writes(20), found)
    # A peer that gets nothing is told in front of the copies, but may answer in a word that is
    # cleared here: it is told behind that.
    stays, found = in_front([*waits(4), *writes(4, 2000, 8)], Fused(), OWN, True)
    assert stays == () and found.rear == writes(4, 8, 2000)
    bare = Fused(rear=writes(4, 8, 2000, 3000))
    assert in_front(writes(2004, 12), bare, OWN, True)[1].rear == writes(
        *(12, 4, 8, 2004, 2000, 3000)
    )


def test_what_is_behind_a_launch() -> None:
    found, stays = behind([*writes(4, 8), *waits(12)], Fused(), True)
    assert (found.rear, stays) == ((*writes(4, 8), *waits(12)), ())
    again, stays = behind([*waits(16), *writes(20)], found, True)
    assert again.rear == (*found.rear, *waits(16), *writes(20)) and stays == ()
    # Beside products nothing spins.
    found, stays = behind([*writes(4), *waits(8), *writes(12)], Fused(), False)
    assert (found.rear, stays) == (writes(4), (*waits(8), *writes(12)))
    ahead = in_front([*waits(4), *writes(8)], Fused(), OWN, False)
    assert ahead == (waits(4), Fused(rear=writes(8)))


def test_a_launch_sees_to_so_many() -> None:
    full, many = (kind(*range(0, 4 * MAX_SIGNALS, 4)) for kind in (writes, waits))
    assert in_front(full, Fused(), OWN, True)[1].rear == full
    one = in_front([*waits(0), *writes(0)], Fused(), OWN, True)[1]
    assert in_front(full, one, OWN, True) == (full, one)
    assert behind(full, one, True) == (one, full)
    assert in_front(many, one, OWN, True) == (many, one)
    assert not Fused(writes(0), many).fits


@given(OPS, OPS, st.booleans())
def test_nothing_is_lost_or_comes_too_early(
    front: list[MemOp], rear: list[MemOp], spins: bool
) -> None:
    mine = range(20)
    stays, found = in_front(front, Fused(), mine, spins)
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


def test_a_script_is_what_the_stream_would_do() -> None:
    end = MemOp(WRITE_64, 3000, 1 << 32)
    ops = [*waits(4), *writes(4, 2000, 2004, 8, 2008), *waits(12), *writes(12), end]
    found = script(ops, OWN)
    assert [(step.address, step.value) for step in found.steps] == [op[1:] for op in ops]
    assert [step.waits for step in found.steps] == [op.kind == WAIT_32 for op in ops]
    assert [step.wide for step in found.steps] == [op is end for op in ops]
    # What is written elsewhere is seen behind all before it, be that waited for or written here.
    told = [step.address for step in found.steps if step.behind]
    assert told == [2000, 2008, 3000] and found.alone == len(ops)


@given(OPS)
def test_what_a_script_tells_others_is_behind_everything(ops: list[MemOp]) -> None:
    mine = range(0, 40, 8)
    steps = script(ops, mine).steps
    tells = [op.kind != WAIT_32 and op.address not in mine for op in ops]
    pairs = zip(tells, [False, *tells], strict=False)
    assert [step.behind for step in steps] == [now and not before for now, before in pairs]


def test_who_carries_out_a_script() -> None:
    """Every block the waits at the end; the first all else. What is aside comes first and has
    nothing behind it, for it is seen over PCIe, which takes longer than all of a call's words."""
    begin, ops = writes(3000), [*waits(4), *writes(2000), *waits(8, 12)]
    for some, aside, alone in (
        (ops, (), 2),
        ([*waits(4), *writes(8)], (), 2),
        ([], (), 0),
        (ops, begin, 3),
        ([], begin, 1),
    ):
        found = script(some, OWN, everyone=True, aside=aside)
        assert [step.address for step in found.steps] == [op.address for op in (*aside, *some)]
        assert (found.aside, found.alone) == (len(aside), alone)
        assert [step.address for step in found.steps if step.behind] == [2000] * (some is ops)
    around = Fused(begin, waits(4, 8), (*writes(4, 2000), *waits(12)))
    found = around.signals(5000, OWN)
    assert found.arrived == 5000
    assert found.front.steps == script(waits(4, 8), OWN, aside=begin).steps
    assert (found.front.aside, found.front.alone) == (1, 1)
    assert found.rear.steps == script(around.rear, OWN).steps


def test_a_script_is_packed_as_the_kernel_reads_it() -> None:
    steps = ScriptStep(8, 1, waits=True), ScriptStep(16, 1 << 32, wide=True, behind=True)
    packed = replace(script([], OWN), steps=steps, aside=2, alone=1).packed
    assert (list(packed.at)[:3], list(packed.value)[:3]) == ([8, 16, 0], [1, 1 << 32, 0])
    assert (packed.waits, packed.wide, packed.behind) == (0b01, 0b10, 0b10)
    assert (packed.count, packed.aside, packed.alone) == (2, 2, 1)
