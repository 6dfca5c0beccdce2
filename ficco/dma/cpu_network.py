"""What goes between hosts on CPUs: sends and receives of a gloo group, waited for by a thread.

gloo's wait blocks, and a time limit on it would break all of the group's connections. So threads
wait, and lanes look after them: they see that their call has failed, that ranks disagree, and the
time.

gloo sends nothing before the receiver has said that it is there, which takes as long as the wire
delays. So a call says at its beginning what it receives, and has a lane for that: another one sends
step after step meanwhile.
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
        """Send what a step moves; where it posts signals, wait for its end, too."""
        posts = bool(program.plan.steps[step].posts)
        found = [one for one in messages(program.plan, step) if one.outward]
        moves = [(one.peer, parts_of(program, one)) for one in found]

        def op(call: Call) -> None:
            state: CallState = call.state
            some = [(peer, mine) for peer, rows in moves if (mine := rows(call))]
            parts = [(True, peer, bytes_of(joined(mine))) for peer, mine in some]
            exchange = self._links.exchange(parts, state.timeout_s + DEATH_S)
            self._await(program, step, state, exchange, self._sends)
            state.sent[step].set()
            while posts and not state.moved[step].wait(SLICE_S):
                state.check()

        return op

    def receives(self, program: Program) -> list[Op]:
        """Receive what all steps move, one after the other, each once it has sent its part."""
        plan = program.plan
        moves = {
            step: [
                (one.peer, parts_of(program, one))
                for one in messages(plan, step)
                if not one.outward
            ]
            for step, one in enumerate(plan.steps)
            if one.op == "network"
        }

        def expect(call: Call) -> None:
            state: CallState = call.state
            for step, some in moves.items():
                parts, landed = [], []
                for peer, rows in some:
                    if mine := rows(call):
                        data = joint_room(mine)
                        landed.append((data, mine))
                        parts.append((False, peer, bytes_of(data)))
                exchange = self._links.exchange(parts, state.timeout_s + DEATH_S)
                self._links.expected.add(exchange)
                state.coming[step] = exchange, landed

        def receive(step: int, call: Call) -> None:
            state: CallState = call.state
            exchange, landed = state.coming.pop(step)
            self._await(program, step, state, exchange, self._receives)
            self._links.expected.remove(exchange)
            for data, mine in landed:
                take_apart(data, mine)
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
            while time.monotonic() - lost < DEATH_S:  # the peer may say why it is gone
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
