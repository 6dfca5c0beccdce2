"""Rule 4: calls compose, whatever the previous and the next one are."""

from __future__ import annotations

import numpy as np

from ficco.proof.accesses import Footprint
from ficco.proof.columns import Claim, Ints, demand
from ficco.proof.order import Order
from ficco.proof.signals import SignalColumns
from ficco.proof.steps import Steps

#: More than the number of any step.
_LATE = np.int64(1) << 62


def call_claims(
    steps: Steps, signals: SignalColumns, footprint: Footprint, order: Order
) -> list[Claim]:
    """Check each use of a peer's slot or input, and return the claims of all uses."""
    access, me, host = footprint.access, steps.rank[footprint.access.step], steps.host
    shared = footprint.buffers.slot[access.buffer] | (access.rank != me)
    touched = [(access.step[shared], access.rank[shared])]
    for uses in (signals.posts, signals.waits, signals.clears):
        # The post that hands a slot over is for the next call.
        here = ~signals.released[uses.word] | (uses is not signals.posts)
        touched.append((uses.step[here], signals.word_of[uses.word[here]]))
    step, home = map(np.concatenate, zip(*touched, strict=True))
    near = host[steps.rank[step]] == host[home]  # to other hosts both sides take part
    home, first, last = _touches(steps, step[near], home[near])
    if not steps.words:
        demand(home < 0, steps.by_step(first), "shares memory without a signal")
        return []
    # The steps that post and wait for the words that hand slots over, by waiter and poster.
    posts, waits = np.full((2, steps.world, steps.world), -1)
    at = signals.word_of[signals.released], signals.word_at[signals.released]
    posts[at], waits[at] = signals.poster[signals.released], signals.waiter[signals.released]
    hand_over = posts.max(axis=0)
    other = (host[:, None] == host) & ~np.eye(steps.world, dtype=bool)
    whole = ((posts == hand_over) & (posts >= 0) | ~other).all(axis=0)
    why = "does not hand its slot to every peer in one step"
    demand(whole, lambda index: f"rank {index}", why)
    why = "may still use a slot when its rank hands it on"
    final = last[other.any(axis=0)[home]]  # there is a peer to hand it to
    handed_on = Claim(final, hand_over[home[other.any(axis=0)[home]]], steps.by_step(final), why)
    peer = steps.rank[first] != home
    home, first = home[peer], first[peer]
    why = "uses the slot of a peer that has not handed it over"
    handed_over = Claim(waits[steps.rank[first], home], first, steps.by_step(first), why)
    # A peer's input is valid once that peer has begun this call.
    inputs = footprint.buffers.operand[access.buffer] & (access.rank != me)
    inputs &= host[access.rank] == host[me]
    home, first, _ = _touches(steps, access.step[inputs], access.rank[inputs])
    begun, who = _heard(steps, signals, order)[steps.rank[first], home], steps.by_step(first)
    why = "reads the input of a peer that may not have begun this call"
    demand(begun >= 0, who, why)
    return [handed_on, handed_over, Claim(begun, first, who, why)]


def _touches(steps: Steps, step: Ints, home: Ints) -> tuple[Ints, Ints, Ints]:
    """By lane and rank whose memory its steps touch: the rank, and the first and last step."""
    pairs, pair = np.unique(steps.lane[step] * steps.world + home, return_inverse=True)
    first, last = np.full(len(pairs), _LATE), np.full(len(pairs), -1)
    np.minimum.at(first, pair, step)
    np.maximum.at(last, pair, step)
    return pairs % steps.world, first, last


def _heard(steps: Steps, signals: SignalColumns, order: Order) -> Ints:
    """By rank and peer, the step that first waits for a signal of the peer in this call."""
    data = ~signals.released[signals.waits.word]
    step, word = signals.waits.step[data], signals.waits.word[data]
    late_first = np.argsort(-order.when[step], kind="stable")
    step, word = step[late_first], word[late_first]
    heard = np.full((steps.world, steps.world), -1)
    heard[steps.rank[step], steps.rank[signals.poster[word]]] = step
    return heard
