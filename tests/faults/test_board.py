"""The agreement board: ficco.runtime.board."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import Rank, caught, on_ranks, run

from ficco.dma.host import hosts_of
from ficco.errors import FiccoError, PeerFailed, RankMismatch, SignalTimeout
from ficco.problems.products import digest
from ficco.runtime.board import COUNTS, ENTRIES, FAILED, LATE, LATE_S, TEXT_BYTES, TEXTS, Board

NUMBERS = 1 << 24


def new_board() -> Board:
    return Board(dist.group.WORLD, 20.0)


def agree(board: Board, number: int, timeout_s: float = 10.0) -> None:
    board.agree(number, timeout_s, "operator", "schedule")


@on_ranks(3)
def test_equal_entries_agree_and_numbers_wrap(at: Rank) -> None:
    board = new_board()
    for number in range(NUMBERS - 300, NUMBERS + 300):
        board.post(number, board.describe(f"problem {number % 7}"))
        if number % 97 == 0:
            time.sleep(0.01 * at.rank)
            agree(board, number)
    dist.barrier()
    assert board.mismatch(number) is None
    with pytest.raises(SignalTimeout) as missing:
        agree(board, number + 1, 0.05)
    assert missing.value.found == number
    dist.barrier()
    board.post(number + 1, 1 + at.rank)
    dist.barrier()
    assert board.mismatch(number + 1) is not None
    dist.barrier()
    board.close()
    board.close()
    assert board.mismatch(number + 1) is None
    board.post(number + 2, 5)  # a closed board ignores a late call or watchdog
    board.describe("too late")
    agree(board, number + 3, 0.0)
    assert board.posted(number + 3) and not board.refused(number + 3)


@on_ranks(2)
def test_counts_are_published_with_calls(at: Rank) -> None:
    """Counts are published in any order, after the calls are posted, with any delay."""
    board, counts = new_board(), [7, 0, (1 << 40) - 2 - at.rank]
    for number in (1, 2, 3):
        board.post(number, board.describe("counts"))
    for number in (3, 1, 2):
        time.sleep(0.02 * at.rank)
        board.publish_counts(number, [number, *counts])
        rows = board.gather_counts(number, 4, 10.0, "route")
        assert rows.tolist() == [[number, 7, 0, (1 << 40) - 2 - rank] for rank in range(at.world)]
    board.publish_counts(4, range(COUNTS))
    assert (board.gather_counts(4, COUNTS, 10.0, "route") == range(COUNTS)).all()
    board.publish_counts(5 + ENTRIES, [1])
    dist.barrier()
    with pytest.raises(FiccoError, match="within 256 calls"):
        board.gather_counts(5, 1, 10.0, "route")
    if at.rank == 0:
        board.publish_counts(6, [1])
    with pytest.raises(SignalTimeout) as late:
        board.gather_counts(6, 2, 0.1, "route")
    assert late.value.step.startswith("learn the counts")
    dist.barrier()
    # A count of 0 in a call whose number wraps to 0 is not a missing count.
    board = new_board()
    for number in range(NUMBERS - 2, NUMBERS + 3):
        time.sleep(0.02 * at.rank)
        board.post(number, 1)
        board.publish_counts(number, [0, 1, number % 3])
        rows = board.gather_counts(number, 3, 10.0, "route")
        assert rows.tolist() == [[0, 1, number % 3]] * at.world
        dist.barrier()


@on_ranks(3)
def test_a_call_that_differs_is_found_later_on_every_rank(at: Rank) -> None:
    board = new_board()
    usual, differing = board.describe("usual"), board.describe("other")

    def mismatch_after(first: int, last: int) -> RankMismatch | None:
        for number in range(first, last):  # no rank waits
            board.post(number, usual)
        dist.barrier()
        return board.mismatch(last - 1)

    assert mismatch_after(1, 400) is None
    board.post(400, (usual, differing, digest("a secret"))[at.rank])
    dist.barrier()
    mismatch = mismatch_after(401, 450)
    secret = f"unknown (digest {digest('a secret'):010x})"
    assert mismatch is not None and mismatch.values == {0: "usual", 1: "other", 2: secret}
    dist.barrier()
    assert mismatch_after(450, 1000) is None


def ends(at: Rank) -> Any:
    board = new_board()
    board.post(1, 9)
    dist.barrier()
    if at.rank == 1:
        os._exit(0)
    board.post(2, 9)
    begin = time.monotonic()
    return caught(lambda: agree(board, 2, 20.0)), time.monotonic() - begin


def test_a_rank_does_not_wait_for_an_ended_process() -> None:
    for failure, seconds in run(3, ends, fresh=True, catch=True)[::2]:
        assert failure.type == "SignalTimeout" and seconds < 10.0
        assert failure.fields["peer"] == 1 and failure.fields["ended"]


@on_ranks(3)
def test_a_difference_counts_before_an_absent_rank(at: Rank) -> None:
    """Rank 1 misses two calls: the other ranks disagree on the first, and agree on the second."""
    for text, seconds, kind in ((f"rank {at.rank}", 20.0, RankMismatch), ("", 0.3, SignalTimeout)):
        board = new_board()
        if at.rank != 1:
            board.post(1, board.describe(text))
            with pytest.raises(kind) as raised:
                agree(board, 1, seconds)
            error: Any = raised.value
            if text:
                assert error.values == {0: "rank 0", 2: "rank 2"}
            else:
                assert (error.operator, error.peer) == ("operator", 1)
                assert (error.wanted, error.found) == (1, 0)
        dist.barrier()


@on_ranks(3)
def test_a_failed_rank_is_named_without_waiting_for_the_other_ranks(at: Rank) -> None:
    """Rank 1 fails in a call that rank 2 has not begun; rank 0 waits for both."""
    for state, limit in ((FAILED, 20.0), (LATE, LATE_S)):
        board = new_board()
        board.post(1, 9)
        if at.rank != 2:
            board.post(2, board.describe("both"))
        if at.rank == 1:
            board.post(2, board.describe("MemoryError: \udc80", state))
        dist.barrier()
        if at.rank == 0:
            begin = time.monotonic()
            late = mock.patch("ficco.runtime.board.LATE_S", limit)
            with late, pytest.raises(PeerFailed) as raised:
                agree(board, 2)
            assert raised.value.reasons == {1: "MemoryError: ?"}
            seconds = time.monotonic() - begin
            assert seconds < 10 and (state == FAILED or seconds >= LATE_S), "FAILED: at once"
        assert [board.posted(number) for number in (1, 2, 3)] == [True, at.rank != 2, False]
        dist.barrier()


@on_ranks(2)
def test_a_rank_may_be_ahead(at: Rank) -> None:
    for lead in (1, ENTRIES - 1, ENTRIES, 5 * ENTRIES + 3):
        board = new_board()
        for number in range(1, 11 + (lead if at.rank else 0)):
            board.post(number, number)
        dist.barrier()
        agree(board, 10, 0.0)
        assert board.mismatch(10) is None
        dist.barrier()


@on_ranks(2)
def test_the_latest_texts_are_shown(at: Rank) -> None:
    """Rank 0 writes texts and rank 1 reads them, in turns."""
    board, reads = new_board(), at.rank == 1

    def shows(text: str, complete: bool = True) -> None:
        if reads:
            text_read = board._text(0, digest(text))
            assert text_read == text if complete else "unknown" in text_read

    written = ["first", *(f"text {i}" for i in range(TEXTS - 1))]
    for text in () if reads else written:
        assert board.describe(text) == digest(text)
    dist.barrier()
    shows(written[0]), shows(written[-1])
    assert "unknown" in board._text(1, digest("first"))
    for text, replaced in (("one more", "first"), ("first", "text 0")):
        dist.barrier()
        if not reads:
            board.describe(text)  # replaces the oldest text
        dist.barrier()
        shows(text), shows(replaced, complete=False)
    dist.barrier()
    long, short = "\N{SNOWMAN} long " * TEXT_BYTES, "\N{SNOWMAN}" * 10
    board.describe(long)
    board.describe(short)
    dist.barrier()
    peer = 1 - at.rank
    assert board._text(peer, digest(long)).endswith(f"(digest {digest(long):010x})")
    assert board._text(peer, digest(long)).startswith("? long ? long")
    assert board._text(peer, digest(short)) == short


@on_ranks(2)
def test_no_entry_is_read_in_part(at: Rank) -> None:
    """Equal entries never look different, however the writes and reads of ranks interleave."""
    board, latest, done = new_board(), 0, threading.Event()
    mismatches: list[RankMismatch] = []

    def watch() -> None:
        while not done.is_set():
            if mismatch := board.mismatch(latest):
                mismatches.append(mismatch)

    watcher = threading.Thread(target=watch)
    watcher.start()
    values = [digest(str(i)) for i in range(1000)]
    for latest in range(1, 50_000):
        board.post(latest, values[latest % 1000])
    done.set()
    watcher.join()
    dist.barrier()
    assert not mismatches


def on_two_hosts(at: Rank) -> Board:
    os.environ["FICCO_HOST"] = f"host-{2 * at.rank // at.world}"
    group: Any = dist.group.WORLD
    return Board(group, 20.0, hosts=hosts_of(group, 20.0, "operator"))


@on_ranks(2, fresh=True)
def test_a_rank_agrees_once_its_call_is_published(at: Rank) -> None:
    """Rank 1 posts a call after its thread last published, and reads the call of rank 0."""
    board: Any = on_two_hosts(at)
    reading, posted, released = threading.Event(), threading.Event(), threading.Event()
    relay, read, publish = board._relay, board._relay._read, board._relay._publish

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
    board.post(1, board.describe("usual"))
    posted.set()
    if at.rank == 1:
        while not board._passed(0, 1):
            read()
        threading.Timer(0.3, released.set).start()
    agree(board, 1)
    assert at.rank == 0 or released.is_set()


def silent_ranks(at: Rank, victim: int, leaver: int) -> list[list[int]]:
    """Return the silent ranks before and after a rank stops and another rank closes the board."""
    board = on_two_hosts(at)
    board.post(1, board.describe("usual"))
    agree(board, 1)
    done = threading.Event()

    def watch() -> None:  # as a watchdog does
        while not done.wait(0.05):
            board.mismatch(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = board.silent()
    dist.barrier()
    if at.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)  # a rank may leave the barrier late
    done.set()  # ranks in silent() answer their peers themselves
    watcher.join()
    if at.rank == leaver:
        board.close()
        return [before]
    time.sleep(0.1 * at.rank)
    return [before, board.silent()]


# Rank 0 holds the store, which silent() needs.
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "leaver"), [(1, 0), (3, 1)])
def test_ranks_that_stop_do_not_answer(victim: int, leaver: int) -> None:
    silent = run(4, silent_ranks, victim, leaver, fresh=True, catch=True, lost=[victim])
    for rank in {*range(4)} - {victim}:
        assert silent[rank] == [[], [victim]][: 2 - (rank == leaver)], (rank, silent[rank])
