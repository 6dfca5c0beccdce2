"""The agreement board: ficco.runtime.board."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Rank, caught, ranks, run

from ficco.dma.hosts import hosts_of
from ficco.errors import RankMismatch
from ficco.problems.products import digest
from ficco.runtime.board import ENTRIES, FAILED, LATE, LATE_S, TEXT_BYTES, TEXTS, TOLD, Board

NUMBERS = 1 << 24


def board() -> Board:
    return Board(dist.group.WORLD, 20.0)


def agree(of: Board, number: int, timeout_s: float = 10.0) -> None:
    of.agree(number, timeout_s, "operator", "schedule")


def same(at: Rank) -> None:
    mine = board()
    for number in range(1, 3 * ENTRIES):
        mine.post(number, mine.describe(f"problem {number % 7}"))
        if number % 50 == 1:
            time.sleep(0.01 * at.rank)
            agree(mine, number)
    agree(mine, number)
    assert mine.mismatch(number) is None
    dist.barrier()
    mine.close()
    mine.close()
    assert mine.mismatch(number) is None
    mine.post(number + 1, 5)  # a late watchdog or call finds nothing to break
    mine.describe("too late")
    agree(mine, number + 2, 0.0)
    assert mine.posted(number + 2) and not mine.refused(number + 2)


@ranks(1, 3)
def test_equal_entries_agree(world: int) -> None:
    run(world, same)


def telling(at: Rank) -> Any:
    """Ranks tell numbers with calls that they have posted, in any order, as late as they like."""
    mine, counts = board(), [7, 0, (1 << 40) - 2 - at.rank]
    for number in (1, 2, 3):
        mine.post(number, mine.describe("counts"))
    for number in (3, 1, 2):
        time.sleep(0.02 * at.rank)
        mine.tell(number, [number, *counts])
        told = mine.told(number, 4, 10.0, "route")
        assert told.tolist() == [[number, 7, 0, (1 << 40) - 2 - rank] for rank in range(at.world)]
    mine.tell(4, range(TOLD))
    assert (mine.told(4, TOLD, 10.0, "route") == range(TOLD)).all()
    mine.tell(5 + ENTRIES, [1])
    dist.barrier()
    gone = caught(lambda: mine.told(5, 1, 10.0, "route"))
    if at.rank == 0:
        mine.tell(6, [1])
    late = caught(lambda: mine.told(6, 2, 0.1, "route"))
    dist.barrier()
    # A 0 that is told with a call whose number wraps to 0 is not taken for none.
    for number in range(NUMBERS - 2, NUMBERS + 3):
        time.sleep(0.02 * at.rank)
        mine.post(number, 1)
        mine.tell(number, [0, 1, number % 3])
        assert mine.told(number, 3, 10.0, "route").tolist() == [[0, 1, number % 3]] * 2
        dist.barrier()
    return gone, late


def test_numbers_are_told_with_calls() -> None:
    for gone, late in run(2, telling):
        assert gone.type == "FiccoError" and "within 256 calls" in gone.text
        assert late.type == "SignalTimeout" and late.fields["step"].startswith("learn the counts")


def warm(at: Rank) -> Any:
    mine = board()
    usual, other = mine.describe("usual"), mine.describe("other")
    for number in range(1, 400):
        mine.post(number, usual)
    dist.barrier()
    before = mine.mismatch(399)
    mine.post(400, other if at.rank == 1 else digest("a secret") if at.rank == 3 else usual)
    dist.barrier()
    for number in range(401, 450):  # nobody waits
        mine.post(number, usual)
    dist.barrier()
    found = mine.mismatch(449)
    for number in range(450, 1000):
        mine.post(number, usual)
    dist.barrier()
    return before, found and found.values, mine.mismatch(999)


def test_a_call_that_differs_is_found_later_on_every_rank() -> None:
    secret = f"unknown (digest {digest('a secret'):010x})"
    for before, found, forgotten in run(4, warm):
        assert before is None and forgotten is None
        assert found == {0: "usual", 1: "other", 2: "usual", 3: secret}


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


def disagrees(at: Rank) -> list[Any]:
    """Rank 1 stays away from a call of which the others disagree, or from one that is equal."""
    found = []
    for text, seconds in ((f"rank {at.rank}", 20.0), ("equal", 0.3)):
        mine, failure = board(), None
        if at.rank != 1:
            mine.post(1, mine.describe(text))
            failure = caught(partial(agree, mine, 1, seconds))
        dist.barrier()
        found.append(failure)
    return found


def test_a_difference_counts_before_an_absent_rank() -> None:
    for rank, (different, absent) in enumerate(run(3, disagrees)):
        if rank != 1:
            assert different.type == "RankMismatch"
            assert different.fields["values"] == {0: "rank 0", 2: "rank 2"}
            assert absent.type == "SignalTimeout"
            assert absent.fields["operator"] == "operator" and absent.fields["peer"] == 1
            assert (absent.fields["wanted"], absent.fields["found"]) == (1, 0)


def fails(at: Rank, how: str) -> Any:
    """Rank 1 fails in a call that rank 2 has not come to; rank 0 waits for both."""
    mine = board()
    mine.post(1, 9)
    if at.rank != 2:
        mine.post(2, mine.describe("both"))
    if at.rank == 1:
        mine.post(2, mine.describe("MemoryError: \udc80", how))
    dist.barrier()
    begin = time.monotonic()
    failure = caught(lambda: agree(mine, 2)) if at.rank == 0 else None
    seconds = time.monotonic() - begin
    dist.barrier()
    return mine.posted(1), mine.posted(2), mine.posted(3), failure, seconds


@pytest.mark.parametrize(("how", "patience"), [(FAILED, 0.0), (LATE, LATE_S)])
def test_a_rank_that_failed_is_named_without_waiting_for_the_rest(
    how: str, patience: float
) -> None:
    found = run(3, fails, how)
    assert [posted for *posted, _, _ in found] == [[True, True, False]] * 2 + [[True, False, False]]
    *_, failure, seconds = found[0]
    assert failure.type == "PeerFailed"
    assert failure.fields["reasons"] == {1: "MemoryError: ?"}
    assert patience <= seconds < patience + 0.4


def ahead(at: Rank) -> None:
    for by in (1, ENTRIES - 1, ENTRIES, 5 * ENTRIES + 3):
        mine = board()
        for number in range(1, 11 + (by if at.rank else 0)):
            mine.post(number, number)
        dist.barrier()
        agree(mine, 10, 0.0)
        assert mine.mismatch(10) is None
        dist.barrier()


def test_a_rank_may_be_ahead() -> None:
    run(2, ahead)


def wrap(at: Rank) -> Any:
    mine = board()
    first = NUMBERS - 300
    for number in range(first, NUMBERS + 300):
        mine.post(number, number & 0xFF or 1)
        if number % 97 == 0:
            agree(mine, number)
    dist.barrier()
    clean = mine.mismatch(number)
    missing = caught(lambda: agree(mine, number + 1, 0.05))
    dist.barrier()
    mine.post(number + 1, 1 + at.rank)
    dist.barrier()
    found = mine.mismatch(number + 1)
    return clean, found is not None, missing.fields["found"] - number


def test_numbers_wrap() -> None:
    assert run(2, wrap) == [(None, True, 0)] * 2


def texts(at: Rank) -> None:
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


def test_texts_are_shown_as_long_as_there_is_room() -> None:
    run(2, texts)


def calls_the_roll(at: Rank, victim: int, leaver: int) -> list[list[int]]:
    """Before and after a rank of two hosts has stopped, and another one has left."""
    os.environ["FICCO_HOST"] = f"host-{at.rank // 2}"
    group: Any = dist.group.WORLD
    mine = Board(group, 20.0, hosts=hosts_of(group, 20.0, "operator"))
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


def hammer(at: Rank, calls: int) -> Any:
    """Equal entries never look different, however the ranks run against each other."""
    mine = board()
    done = threading.Event()
    found: list[RankMismatch] = []
    latest = 0

    def watch() -> None:
        while not done.is_set():
            if mismatch := mine.mismatch(latest):
                found.append(mismatch)

    watcher = threading.Thread(target=watch)
    watcher.start()
    values = [digest(str(i)) for i in range(1000)]
    for number in range(1, calls):
        latest = number
        mine.post(number, values[number % 1000])
    done.set()
    watcher.join()
    dist.barrier()
    return [str(mismatch) for mismatch in found]


def test_no_entry_is_ever_seen_in_part() -> None:
    assert run(2, hammer, 50_000) == [[], []]
