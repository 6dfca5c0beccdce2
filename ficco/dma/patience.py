"""Timeouts of waits for peers, and the warnings before the timeout."""

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
#: Timeout in seconds if PyTorch does not report the group's: the default of NCCL groups.
DEFAULT_S = 600.0

LOGGER = logging.getLogger("ficco")


def limit_of(group: ProcessGroup, device: torch.device) -> float:
    """The default timeout of a call in seconds: the ``timeout`` of the group's own collectives."""
    try:
        limit = group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # a backend without a timeout, or no backend
        return DEFAULT_S
    return float(limit) if limit > 0 else DEFAULT_S


class Patience:
    """One wait for a peer, which begins when this object is created.

    Attributes:
        begin: start of the wait, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.begin, self._warns_at = time.monotonic(), WARN_AFTER_S

    @property
    def seconds(self) -> float:
        """Duration of the wait so far."""
        return time.monotonic() - self.begin

    def ends(
        self,
        limit_s: float,
        error: Callable[[float], SignalTimeout],
        seconds: float | None = None,
    ) -> SignalTimeout | None:
        """The error of the wait once it has lasted longer than its limit; None before.

        Logs a warning after ``WARN_AFTER_S``, and again whenever the wait has doubled.

        Args:
            error: makes the error from the seconds of the wait.
            seconds: duration of the wait, if it did not begin with this object.
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
