"""The agreement board: ficco.runtime.board."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Rank, caught, on_ranks, run

from ficco.dma.host import hosts_of
from ficco.errors import FiccoError, PeerFailed, RankMismatch, SignalTimeout
from ficco.problems.products import digest
from ficco.runtime.board import COUNTS, ENTRIES, FAILED, LATE, LATE_S, TEXT_BYTES, TEXTS, Board

NUMBERS = 1 << 24


def board() -> Board:
    return Board(dist.group.WORLD, 20.0)


def agree(of: Board, number: int, timeout_s: float = 10.0) -> None:
    of.agree(number, timeout_s, "operator", "schedule")


@on_ranks(3)
def test_equal_entries_agree_and_numbers_wrap(at: Rank) -> None:
    mine = board()
    for number in range(NUMBERS - 300, NUMBERS + 300):
        mine.post(number, mine.describe(f"problem {number % 7}"))
        if number % 97 == 0:
            time.sleep(0.01 * at.rank)
            agree(mine, number)
    dist.barrier()
    assert mine.mismatch(number) is None
    with pytest.raises(SignalTimeout) as missing:
        agree(mine, number + 1, 0.05)
    assert missing.value.found == number
    dist.barrier()
    mine.post(number + 1, 1 + at.rank)
    dist.barrier()
    assert mine.mismatch(number + 1) is not None
    dist.barrier()
    mine.close()
    mine.close()
    assert mine.mismatch(number + 1) is None
    mine.post(number + 2, 5)  # a late watchdog or call finds nothing to break
    mine.describe("too late")
    agree(mine, number + 3, 0.0)
    assert mine.posted(number + 3) and not mine.refused(number + 3)


@on_ranks(2)
def test_counts_are_published_with_calls(at: Rank) -> None:
    """With calls that ranks have posted, in any order, as late as they like."""
    mine, counts = board(), [7, 0, (1 << 40) - 2 - at.rank]
    for number in (1, 2, 3):
        mine.post(number, mine.describe("counts"))
    for number in (3, 1, 2):
        time.sleep(0.02 * at.rank)
        mine.publish_counts(number, [number, *counts])
        rows = mine.gather_counts(number, 4, 10.0, "route")
        assert rows.tolist() == [[number, 7, 0, (1 << 40) - 2 - rank] for rank in range(at.world)]
    mine.publish_counts(4, range(COUNTS))
    assert (mine.gather_counts(4, COUNTS, 10.0, "route") == range(COUNTS)).all()
    mine.publish_counts(5 + ENTRIES, [1])
    dist.barrier()
    with pytest.raises(FiccoError, match="within 256 calls"):
        mine.gather_counts(5, 1, 10.0, "route")
    if at.rank == 0:
        mine.publish_counts(6, [1])
    with pytest.raises(SignalTimeout) as late:
        mine.gather_counts(6, 2, 0.1, "route")
    assert late.value.step.startswith("learn the counts")
    dist.barrier()
    # A count of 0 in a call whose number wraps to 0 is not taken for none.
    mine = board()
    for number in range(NUMBERS - 2, NUMBERS + 3):
        time.sleep(0.02 * at.rank)
        mine.post(number, 1)
        mine.publish_counts(number, [0, 1, number % 3])
        rows = mine.gather_counts(number, 3, 10.0, "route")
        assert rows.tolist() == [[0, 1, number % 3]] * at.world
        dist.barrier()


@on_ranks(3)
def test_a_call_that_differs_is_found_later_on_every_rank(at: Rank) -> None:
    mine = board()
    usual, other = mine.describe("usual"), mine.describe("other")

    def posted(first: int, last: int) -> RankMismatch | None:
        for number in range(first, last):  # nobody waits
            mine.post(number, usual)
        dist.barrier()
        return mine.mismatch(last - 1)

    assert posted(1, 400) is None
    mine.post(400, (usual, other, digest("a secret"))[at.rank])
    dist.barrier()
    found = posted(401, 450)
    secret = f"unknown (digest {digest('a secret'):010x})"
    assert found is not None and found.values == {0: "usual", 1: "other", 2: secret}
    dist.barrier()
    assert posted(450, 1000) is None


def ends(at: Rank) -> Any:
    mine = board()
    mine.post(1, 9)
    dist.barrier()
    if at.rank == 1:
        os._exit(0)
    mine.post(2, 9)
    begin = time.monotonic()
    return caught(lambda: agree(mine, 2, 20.0)), time.monotonic() - begin


def test_a_rank_whose_process_has_ended_is_not_waited_for() -> None:
    for failure, seconds in run(3, ends, fresh=True, catch=True)[::2]:
        assert failure.type == "SignalTimeout" and seconds < 1.0
        assert failure.fields["peer"] == 1 and failure.fields["ended"]


@on_ranks(3)
def test_a_difference_counts_before_an_absent_rank(at: Rank) -> None:
    """Rank 1 stays away from a call of which the others disagree, and from one that is equal."""
    for text, seconds, kind in ((f"rank {at.rank}", 20.0, RankMismatch), ("", 0.3, SignalTimeout)):
        mine = board()
        if at.rank != 1:
            mine.post(1, mine.describe(text))
            with pytest.raises(kind) as raised:
                agree(mine, 1, seconds)
            error: Any = raised.value
            if text:
                assert error.values == {0: "rank 0", 2: "rank 2"}
            else:
                assert (error.operator, error.peer) == ("operator", 1)
                assert (error.wanted, error.found) == (1, 0)
        dist.barrier()


@on_ranks(3)
def test_a_rank_that_failed_is_named_without_waiting_for_the_rest(at: Rank) -> None:
    """Rank 1 fails in a call that rank 2 has not come to; rank 0 waits for both."""
    for how, patience in ((FAILED, 0.0), (LATE, LATE_S)):
        mine = board()
        mine.post(1, 9)
        if at.rank != 2:
            mine.post(2, mine.describe("both"))
        if at.rank == 1:
            mine.post(2, mine.describe("MemoryError: \udc80", how))
        dist.barrier()
        if at.rank == 0:
            begin = time.monotonic()
            with pytest.raises(PeerFailed) as raised:
                agree(mine, 2)
            assert raised.value.reasons == {1: "MemoryError: ?"}
            assert patience <= time.monotonic() - begin < patience + 0.4
        assert [mine.posted(number) for number in (1, 2, 3)] == [True, at.rank != 2, False]
        dist.barrier()


@on_ranks(2)
def test_a_rank_may_be_ahead(at: Rank) -> None:
    for by in (1, ENTRIES - 1, ENTRIES, 5 * ENTRIES + 3):
        mine = board()
        for number in range(1, 11 + (by if at.rank else 0)):
            mine.post(number, number)
        dist.barrier()
        agree(mine, 10, 0.0)
        assert mine.mismatch(10) is None
        dist.barrier()


@on_ranks(2)
def test_texts_are_shown_as_long_as_there_is_room(at: Rank) -> None:
    """Rank 0 writes texts, and rank 1 reads them, by turns."""
    mine, reads = board(), at.rank == 1

    def shows(text: str, whole: bool = True) -> None:
        if reads:
            found = mine._text(0, digest(text))
            assert found == text if whole else "unknown" in found

    written = ["first", *(f"text {i}" for i in range(TEXTS - 1))]
    for text in () if reads else written:
        assert mine.describe(text) == digest(text)
    dist.barrier()
    shows(written[0]), shows(written[-1])
    assert "unknown" in mine._text(1, digest("first"))
    for text, gone in (("one more", "first"), ("first", "text 0")):
        dist.barrier()
        if not reads:
            mine.describe(text)  # takes the place of the oldest
        dist.barrier()
        shows(text), shows(gone, whole=False)
    dist.barrier()
    long, short = "\N{SNOWMAN} long " * TEXT_BYTES, "\N{SNOWMAN}" * 10
    mine.describe(long)
    mine.describe(short)
    dist.barrier()
    peer = 1 - at.rank
    assert mine._text(peer, digest(long)).endswith(f"(digest {digest(long):010x})")
    assert mine._text(peer, digest(long)).startswith("? long ? long")
    assert mine._text(peer, digest(short)) == short


@on_ranks(2)
def test_no_entry_is_ever_seen_in_part(at: Rank) -> None:
    """Equal entries never look different, however the ranks run against each other."""
    mine, latest, done = board(), 0, threading.Event()
    found: list[RankMismatch] = []

    def watch() -> None:
        while not done.is_set():
            if mismatch := mine.mismatch(latest):
                found.append(mismatch)

    watcher = threading.Thread(target=watch)
    watcher.start()
    values = [digest(str(i)) for i in range(1000)]
    for latest in range(1, 50_000):
        mine.post(latest, values[latest % 1000])
    done.set()
    watcher.join()
    dist.barrier()
    assert not found


def on_two_hosts(at: Rank) -> Board:
    os.environ["FICCO_HOST"] = f"host-{2 * at.rank // at.world}"
    group: Any = dist.group.WORLD
    return Board(group, 20.0, hosts=hosts_of(group, 20.0, "operator"))


@on_ranks(2, fresh=True)
def test_a_rank_agrees_once_its_call_is_published(at: Rank) -> None:
    """Rank 1 posts after its thread has last published, and sees the call of rank 0."""
    mine: Any = on_two_hosts(at)
    reading, posted, released = threading.Event(), threading.Event(), threading.Event()
    relay, read, publish = mine._relay, mine._relay._read, mine._relay._publish

    def read_late() -> None:
        reading.set()
        posted.wait()
        read()

    def publish_late() -> None:
        if posted.is_set():
            released.wait()
        publish()

    if at.rank == 1:
        relay._read, relay._publish = read_late, publish_late
        relay.waiting(agrees=True)
        reading.wait()
    mine.post(1, mine.describe("usual"))
    posted.set()
    if at.rank == 1:
        while not mine._passed(0, 1):
            read()
        threading.Timer(0.3, released.set).start()
    agree(mine, 1)
    assert at.rank == 0 or released.is_set()


def calls_the_roll(at: Rank, victim: int, leaver: int) -> list[list[int]]:
    """Before and after a rank of two hosts has stopped, and another one has left."""
    mine = on_two_hosts(at)
    mine.post(1, mine.describe("usual"))
    agree(mine, 1)
    done = threading.Event()

    def watch() -> None:  # as a watchdog does
        while not done.wait(0.05):
            mine.mismatch(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = mine.silent()
    dist.barrier()
    if at.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)  # it leaves the barrier as late as it likes
    done.set()  # who calls the roll answers meanwhile
    watcher.join()
    if at.rank == leaver:
        mine.close()
        return [before]
    time.sleep(0.1 * at.rank)
    return [before, mine.silent()]


# Rank 0 has the store, without which nobody is silent.
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "leaver"), [(1, 0), (3, 1)])
def test_ranks_that_stop_do_not_answer(victim: int, leaver: int) -> None:
    found = run(4, calls_the_roll, victim, leaver, fresh=True, catch=True, lost=[victim])
    for rank in {*range(4)} - {victim}:
        assert found[rank] == [[], [victim]][: 2 - (rank == leaver)], (rank, found[rank])
