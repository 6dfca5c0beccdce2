"""How long a rank waits for its peers: until when, and what it says meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ficco.errors import SignalTimeout

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

#: Seconds of a wait before the first warning; the next warning comes after twice as long.
WARN_AFTER_S = 60.0
#: Seconds that a call waits for a peer where PyTorch does not say how long the group waits: the
#: default of PyTorch's NCCL groups.
DEFAULT_S = 600.0

LOGGER = logging.getLogger("ficco")


def limit_of(group: ProcessGroup, device: torch.device) -> float:
    """Seconds that a call waits for a peer by default: as long as the group's own collectives do,
    by the ``timeout`` with which the group was made."""
    try:
        limit = group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # a backend without such options, or none for the device
        return DEFAULT_S
    return float(limit) if limit > 0 else DEFAULT_S


class Patience:
    """One wait for a peer, from the moment at which this is made.

    Attributes:
        begin: that moment, of ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.begin, self._warns_at = time.monotonic(), WARN_AFTER_S

    @property
    def seconds(self) -> float:
        """How long the wait has lasted."""
        return time.monotonic() - self.begin

    def ends(
        self,
        limit_s: float,
        error: Callable[[float], SignalTimeout],
        seconds: float | None = None,
    ) -> SignalTimeout | None:
        """The error of a wait that has lasted for longer than its limit; None before. A wait that
        lasts long warns that it does, ever more rarely.

        ``error`` makes the error of so many seconds; ``seconds``: how long the wait has lasted, if
        it began at another moment.
        """
        seconds = self.seconds if seconds is None else seconds
        if seconds > limit_s:
            return error(seconds)
        if seconds >= self._warns_at:
            while self._warns_at <= seconds:
                self._warns_at *= 2
            LOGGER.warning(
                "%s; it goes on waiting, for %.0f s in all (ficco.options(timeout_s=...))",
                error(seconds).wait,
                limit_s,
            )
        return None
