"""Messages of a network step: regions, or strided batches of regions.

A call may have only some rows of a region. Both ends of a move know which, so a message holds just
these rows, packed; without rows there is no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ficco.compute.buffers import buffers_of
from ficco.compute.program import Call, Program
from ficco.compute.ragged_blocks import EMPTY, filled, moves
from ficco.plan import Crossing, Plan, Region, Transfer


class Message(NamedTuple):
    """This rank's end of a move between hosts: a region or batch of regions, which is sent to a
    peer (``outward``) or received from it."""

    outward: bool
    peer: int
    region: Region
    move: Transfer


def messages(plan: Plan, step: int) -> list[Message]:
    """The messages of a network step, except those that are always empty."""
    nonempty, crossing = [], plan.steps[step].work
    for move in crossing.moves if isinstance(crossing, Crossing) else ():
        outward = move.src.rank == plan.rank
        mine, peer = (move.src, move.dst.rank) if outward else (move.dst, move.src.rank)
        if move.elements:
            nonempty.append(Message(outward, peer, mine, move))
    return nonempty


def most_bytes(plan: Plan, message: Message) -> int:
    """The most bytes that a message of any call has: at most the destination's capacity, if calls
    have only some of the rows."""
    region, move = message.region, message.move
    rows = move.batch * region.rows
    if filled(plan, region):
        rows = min(rows, plan.buffer[move.dst.buffer].room or rows)
    return rows * region.cols * plan.buffer[region.buffer].itemsize


def parts_of(program: Program, message: Message) -> Callable[[Call], list[torch.Tensor]]:
    """A function that returns a call's tensors of a message on this rank; empty if the call has no
    rows of it, at either end."""
    plan, places, (outward, _, region, move) = program.plan, buffers_of(program), message
    if not filled(plan, region):
        stride = move.src_stride if outward else move.dst_stride
        view = places.batch(region, move.batch, stride)
        return lambda call: [view(call)]
    moves_of, rows = moves(plan, move), places.rows(region)

    def parts(call: Call) -> list[torch.Tensor]:
        present = moves_of(call.filled or EMPTY)
        first = (present.src if outward else present.dst).tolist()
        spans = zip(first, present.rows.tolist(), strict=True)
        return [rows(call, at, at + count) for at, count in spans]

    return parts


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of ``parts``, contiguous; without a copy if they are contiguous already."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


def joint_room(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous memory for the elements of ``parts``: a single contiguous part, else new."""
    if len(parts) == 1 and parts[0].is_contiguous():
        return parts[0]
    return parts[0].new_empty(sum(part.numel() for part in parts))


def put_together(parts: Sequence[torch.Tensor], joint: torch.Tensor) -> None:
    """Copy ``parts`` into contiguous memory."""
    for part, packed in _pairs(parts, joint):
        packed.copy_(part, non_blocking=True)


def take_apart(joint: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy contiguous memory into ``parts``, unless it is the memory of the single part."""
    for part, packed in _pairs(parts, joint) if joint is not parts[0] else ():
        part.copy_(packed, non_blocking=True)


def _pairs(
    parts: Sequence[torch.Tensor], joint: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    pieces = joint.view(-1).split([part.numel() for part in parts])
    return ((part, piece.view(part.shape)) for part, piece in zip(parts, pieces, strict=True))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, whatever the stride of a dimension of size 1."""
    return tensor.view(-1).view(torch.uint8)
