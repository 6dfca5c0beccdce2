"""What a check of the self-test is given, and how it ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import ficco
from ficco.accelerator import gpu
from ficco.dma.engine import Engine
from ficco.runtime.workspace import workspace_of


@dataclass(frozen=True)
class SelftestSettings:
    """How much is tried.

    Attributes:
        iterations: calls with small pieces per schedule that is to show the order of copy and
            signal; an eighth of them with large ones.
        repeat: calls per schedule where that is not the question.
        small, large: rows per rank, k and n of calls.
        dtype: of the operands.
        pair_bytes: bytes that a rank receives from a peer where bandwidth is measured.
        rounds: times that each bandwidth is measured; the best counts.
        timeout_s: seconds that a call may wait for a peer.
        limit_s: seconds after which a check has hung.
    """

    iterations: int = 100
    repeat: int = 3
    small: tuple[int, int, int] = (24, 40, 16)
    large: tuple[int, int, int] = (512, 512, 32)
    dtype: str = "float32"
    pair_bytes: int = 8 << 20
    rounds: int = 3
    timeout_s: float = 3.0
    limit_s: float = 30.0

    @classmethod
    def of(cls, device: str) -> SelftestSettings:
        """What suits a device."""
        if device == "cpu":
            return cls()
        return cls(
            iterations=400,
            repeat=5,
            small=(48, 64, 40),
            large=(4096, 4096, 256),
            dtype="bfloat16",
            pair_bytes=64 << 20,
            timeout_s=5.0,
            limit_s=45.0,
        )


@dataclass(frozen=True)
class Passed:
    """What a check that passed has seen, in a line, and what the report says of it."""

    seen: str
    details: str = ""


class CheckFailed(Exception):
    """A check has failed on ranks that are still in step."""


class NotOffered(Exception):
    """This machine does not have what was to be checked, or not as it should be; ``details`` are
    for the report."""

    def __init__(self, why: str, details: str = "") -> None:
        super().__init__(why)
        self.details = details


class PeerLeft(Exception):
    """A peer is no longer in this check."""


@dataclass
class Rank:
    """One rank of the self-test.

    Attributes:
        talk: a group by which ranks tell each other what they saw, whatever their devices do.
        iteration: number of the next inputs.
        pairs: GB/s of each pair of ranks, once they are measured.
    """

    rank: int
    world: int
    device: torch.device
    settings: SelftestSettings
    talk: ProcessGroup
    iteration: int = 0
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, on every rank; :class:`PeerLeft` if one has left the check."""
        everyone = self._exchange((False, value))
        if gone := [rank for rank, (left, _) in enumerate(everyone) if left]:
            raise PeerLeft(f"ranks {gone} left the check")
        return [value for _, value in everyone]

    def _exchange(self, mine: tuple[bool, Any]) -> list[tuple[bool, Any]]:
        everyone: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(everyone, mine, group=self.talk)
        except RuntimeError as error:
            raise PeerLeft(f"a peer's process is gone: {error}") from error
        return everyone

    def idle(self) -> None:
        """Wait until this rank's device is idle."""
        if self.device.type == "cuda":
            gpu.synchronize()

    def settle(self) -> None:
        """Wait until every rank is here, with an idle device."""
        self.idle()
        self.gather(None)

    def leave(self, group: ProcessGroup) -> None:
        """Take a group down, once every rank has left the check and nothing uses its memory."""
        self._left()
        ficco.close(group)
        self._left()
        dist.destroy_process_group(group)

    def _left(self) -> None:
        """Wait until every rank has left the check; one that has not learns by this that it is
        over."""
        self.idle()
        while not all(left for left, _ in self._exchange((True, None))):
            pass

    def conclude(self, problems: Iterable[str]) -> None:
        """Raise on all ranks what any of them found wrong."""
        everyone = self.gather(list(problems))
        lines = [f"rank {rank}: {line}" for rank, some in enumerate(everyone) for line in some]
        if lines:
            raise CheckFailed("\n".join(lines))

    def engine(self, group: ProcessGroup) -> Engine:
        return workspace_of(group, self.device).engine
