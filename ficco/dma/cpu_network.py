"""Transfers between hosts on CPUs, by sends and receives of a gloo group.

gloo's wait blocks, and a time limit on it would break all connections of the group. Threads
therefore wait, and lanes poll the threads: a lane also checks for a failure of its call, ranks that
disagree, and the timeout.

gloo sends no data before the receiver has announced its receive, which takes one latency of the
network. A call therefore posts all of its receives at the start, and waits for them on a separate
lane while another lane sends step after step.
"""

from __future__ import annotations

import time
from functools import partial

from ficco.compute.program import Call, Op, Program
from ficco.dma.cpu_collectives import DEATH_S
from ficco.dma.cpu_lanes import SLICE_S, CallState, Lane
from ficco.dma.engine import Engine, Missing, timed_out
from ficco.dma.gloo import GlooLinks, PeerExchange
from ficco.dma.messages import bytes_of, joined, joint_room, messages, parts_of, take_apart
from ficco.dma.patience import Patience
from ficco.errors import SignalTimeout


class GlooNetwork:
    """A rank's connections with other hosts. The constructor is collective."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._links = engine, GlooLinks(engine)
        self._sends, self._receives = Lane("network sends"), Lane("network receives")

    def send(self, program: Program, step: int) -> Op:
        """Send the data of a step. If the step posts signals, wait for its receives, too."""
        posts = bool(program.plan.steps[step].posts)
        outgoing = [message for message in messages(program.plan, step) if message.outward]
        moves = [(message.peer, parts_of(program, message)) for message in outgoing]

        def op(call: Call) -> None:
            state: CallState = call.state
            sent = [(peer, rows) for peer, rows_of in moves if (rows := rows_of(call))]
            parts = [(True, peer, bytes_of(joined(rows))) for peer, rows in sent]
            exchange = self._links.exchange(parts, state.timeout_s + DEATH_S)
            self._await(program, step, state, exchange, self._sends)
            state.sent[step].set()
            while posts and not state.moved[step].wait(SLICE_S):
                state.check()

        return op

    def receives(self, program: Program) -> list[Op]:
        """Operations that post all receives, then end step after step once it has also sent."""
        plan = program.plan
        moves = {
            index: [
                (message.peer, parts_of(program, message))
                for message in messages(plan, index)
                if not message.outward
            ]
            for index, step in enumerate(plan.steps)
            if step.op == "network"
        }

        def expect(call: Call) -> None:
            state: CallState = call.state
            for step, incoming in moves.items():
                parts, landings = [], []
                for peer, rows_of in incoming:
                    if rows := rows_of(call):
                        data = joint_room(rows)
                        landings.append((data, rows))
                        parts.append((False, peer, bytes_of(data)))
                exchange = self._links.exchange(parts, state.timeout_s + DEATH_S)
                self._links.expected.add(exchange)
                state.coming[step] = exchange, landings

        def receive(step: int, call: Call) -> None:
            state: CallState = call.state
            exchange, landings = state.coming.pop(step)
            self._await(program, step, state, exchange, self._receives)
            self._links.expected.remove(exchange)
            for data, rows in landings:
                take_apart(data, rows)
            while not state.sent[step].wait(SLICE_S):
                state.check()
            state.stamps.append((step, True, time.perf_counter()))
            state.moved[step].set()

        return [expect, *(partial(receive, step) for step in moves)]

    def _await(
        self, program: Program, step: int, state: CallState, exchange: PeerExchange, waiter: Lane
    ) -> None:
        patience, engine = Patience(), self._engine
        if not exchange.over.is_set():
            waiter.submit(exchange.run)

        def late(seconds: float, ended: bool = False) -> SignalTimeout:
            host = engine.hosts.named(exchange.peer)
            return timed_out(program.plan, Missing(step, exchange.peer), seconds, ended, host)

        try:
            while not exchange.over.wait(SLICE_S):
                state.check()
                engine.interrupt()
                if error := patience.ends(state.timeout_s, late):
                    raise error
            if exchange.error is None:
                return
            lost = time.monotonic()
            while time.monotonic() - lost < DEATH_S:  # the peer may report why it failed
                state.check()
                engine.interrupt()
                time.sleep(SLICE_S)
            raise late(patience.seconds, ended=True) from exchange.error
        except BaseException:
            self._links.broken = True
            raise

    def close(self) -> None:
        """Leave the group."""
        for waiter in (self._sends, self._receives):
            waiter.close(join=False)
        self._links.close()
