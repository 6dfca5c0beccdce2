"""What a network step sends and receives: regions, or strided batches of them, of which a call may
have only some rows.

Both ends of a move know which rows a call has, so that a message has these alone, one after the
other, and there is none where there are no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ficco.compute.buffers import buffers_of
from ficco.compute.program import Call, Program
from ficco.compute.ragged_blocks import EMPTY, filled, moves
from ficco.plan import Plan, Region, Transfer


class Message(NamedTuple):
    """A side of a move between hosts: this rank's region, or a batch of them, sent to a peer or
    received from it, one after the other."""

    outward: bool
    peer: int
    region: Region
    move: Transfer


def messages(plan: Plan, step: int) -> list[Message]:
    """What a network step sends and receives, without what is always empty."""
    found = []
    for move in plan.steps[step].moves:
        outward = move.src.rank == plan.rank
        mine, peer = (move.src, move.dst.rank) if outward else (move.dst, move.src.rank)
        if move.elements:
            found.append(Message(outward, peer, mine, move))
    return found


def most_bytes(plan: Plan, message: Message) -> int:
    """The most bytes that a message has, where a call may have only some of its rows: no more than
    where it goes has room for."""
    region, move = message.region, message.move
    rows = move.batch * region.rows
    if filled(plan, region):
        rows = min(rows, plan.buffer[move.dst.buffer].room or rows)
    return rows * region.cols * plan.buffer[region.buffer].itemsize


def parts_of(program: Program, message: Message) -> Callable[[Call], list[torch.Tensor]]:
    """What a call has of a message, on this rank; nothing if it has no such rows, which both sides
    know."""
    plan, places, (outward, _, region, move) = program.plan, buffers_of(program), message
    if not filled(plan, region):
        stride = move.src_stride if outward else move.dst_stride
        view = places.batch(region, move.batch, stride)
        return lambda call: [view(call)]
    found, rows = moves(plan, move), places.rows(region)

    def parts(call: Call) -> list[torch.Tensor]:
        there = found(call.filled or EMPTY)
        first = (there.src if outward else there.dst).tolist()
        each = zip(first, there.rows.tolist(), strict=True)
        return [rows(call, at, at + count) for at, count in each]

    return parts


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of some parts, contiguous: where they are so already, themselves."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


def joint_room(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous memory for the elements of some parts: where they are so already, themselves."""
    if len(parts) == 1 and parts[0].is_contiguous():
        return parts[0]
    return parts[0].new_empty(sum(part.numel() for part in parts))


def put_together(parts: Sequence[torch.Tensor], joint: torch.Tensor) -> None:
    """Bring parts to such memory of their own."""
    for part, some in _along(parts, joint):
        some.copy_(part, non_blocking=True)


def take_apart(joint: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Bring what has come to such memory to the parts, unless it is theirs."""
    for part, some in _along(parts, joint) if joint is not parts[0] else ():
        part.copy_(some, non_blocking=True)


def _along(
    parts: Sequence[torch.Tensor], joint: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    each = joint.view(-1).split([part.numel() for part in parts])
    return ((part, some.view(part.shape)) for part, some in zip(parts, each, strict=True))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, whatever the stride of a dimension of size 1."""
    return tensor.view(-1).view(torch.uint8)
