"""What goes between hosts on CPUs: sends and receives of a gloo group, waited for by a thread.

gloo's wait blocks, and a time limit on it would break all of the group's connections. So one thread
waits, and lanes look after it: they see that their call has failed, that ranks disagree, and the
time.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from ficco.dma.buffers import buffers_of
from ficco.dma.cpu_collectives import DEATH_S
from ficco.dma.cpu_lanes import SLICE_S, CallState, Lane
from ficco.dma.engine import Call, Engine, Missing, Op, Program, timed_out
from ficco.dma.gloo import GlooLinks, PeerExchange, messages


class GlooNetwork:
    """A rank's connections with other hosts. The constructor is collective."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._links = engine, GlooLinks(engine)
        self._waiter = Lane("network waits")

    def op(self, program: Program, step: int) -> Op:
        """Send and receive what a step moves."""
        view = buffers_of(program).view
        moves = [(one, view(one.region)) for one in messages(program.plan, step)]

        def op(call: Call) -> None:
            parts, landed = [], []
            for one, mine in moves:
                part = mine(call)
                if one.outward:
                    data = part.contiguous()
                else:
                    data = (
                        part
                        if part.is_contiguous()
                        else torch.empty_like(part, memory_format=torch.contiguous_format)
                    )
                    landed.append((part, data))
                parts.append((one.outward, one.peer, data.view(torch.uint8)))
            state: CallState = call.state
            exchange = self._links.exchange(parts, state.timeout_s + DEATH_S)
            self._await(program, step, state, exchange)
            for part, data in landed:
                if part is not data:
                    part.copy_(data)

        return op

    def _await(self, program: Program, step: int, state: CallState, exchange: PeerExchange) -> None:
        begin, engine = time.monotonic(), self._engine
        if not exchange.over.is_set():
            self._waiter.submit(exchange.run)
        late = partial(timed_out, program.plan)
        try:
            while not exchange.over.wait(SLICE_S):
                state.check()
                engine.interrupt()
                if (seconds := time.monotonic() - begin) > state.timeout_s:
                    host = engine.hosts.named(exchange.peer)
                    raise late(Missing(step, exchange.peer), seconds, host=host)
            if exchange.error is None:
                return
            lost = time.monotonic()
            while time.monotonic() - lost < DEATH_S:  # the peer may say why it is gone
                state.check()
                engine.interrupt()
                time.sleep(SLICE_S)
            seconds, host = time.monotonic() - begin, engine.hosts.named(exchange.peer)
            raise late(
                Missing(step, exchange.peer), seconds, ended=True, host=host
            ) from exchange.error
        except BaseException:
            self._links.broken = True
            raise

    def close(self) -> None:
        """Leave the group."""
        self._waiter.close(join=False)
        self._links.close()
