"""Options of a call, set for a block of code or for the whole process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from ficco.dma.choose import ENGINES


@dataclass(frozen=True)
class Options:
    """What can be set beside the arguments of an operator.

    Attributes:
        timeout_s: seconds that a call may wait for its peers. 60 by default, because the first
            use of a library can be slow.
        on_timeout: on a GPU, ``"abort"`` prints the whole text and ends the process, as the
            vendor's collectives do; ``"raise"`` frees the streams and raises at the next ficco
            call or :func:`ficco.synchronize`. On the CPU engine the call itself raises.
        engine: ``"cpu"``, ``"cuda"`` or ``"hip"``. None: the one for the tensors' device and for
            what PyTorch is built for.
        workspace_bytes: most bytes of symmetric memory that a group's eager calls take on each
            rank; what gathers then uses its staging as a ring, and what scatters goes by a few
            columns of b at a time. None: no cap. The same on all ranks.
        signals: how signals reach a peer, ``"write"`` (stream write), ``"copy"`` (4-byte copy) or
            ``"auto"``, the first of them that the driver allows. On CUDA a launch of the copy
            kernel posts by itself. Used when a group makes its first call.
        replay: on a GPU, a call whose operands lie where they lay before is replayed from a graph
            that ficco records, which costs the host a fraction of enqueueing it.
        machine: the machine's description, a name or a path, in place of the one that this host's
            fingerprint finds; it goes before the variable ``FICCO_MACHINE``. The same on all ranks.
        search: ``schedule="auto"`` looks beyond the named schedules; that takes up to 0.2 s for a
            problem seen for the first time.
        log_problems: a file to which rank 0 appends every problem that it sees for the first time,
            for ``ficco tune --from-log``; it goes before the variable ``FICCO_LOG_PROBLEMS``.
        save_gathered: what an operator gathers is kept for the gradient of its ``b``, W times the
            memory of the shard. Otherwise the backward gathers it again, beside other work.
        all_reduce_gradients: what the gradients that reach ``matmul_all_reduce`` stand for.
            ``"sum"``: each rank's is that of its own copy of the result, and what was done with all
            copies counts, so that the backward adds them up over the ranks. ``"equal"``: all ranks
            do the same with their copies and it counts once, as Megatron-LM takes it; the gradients
            are then equal on all ranks and the backward needs no peer. The same on all ranks.
    """

    timeout_s: float = 60.0
    on_timeout: str = "abort"
    engine: str | None = None
    workspace_bytes: int | None = None
    signals: str = "auto"
    replay: bool = True
    machine: str | None = None
    search: bool = False
    log_problems: str | None = None
    save_gathered: bool = False
    all_reduce_gradients: str = "sum"

    def __post_init__(self) -> None:
        number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not number or not self.timeout_s > 0:
            raise ValueError(f"timeout_s: required a number above 0, got {self.timeout_s!r}")
        # Equal options have one text, whichever of them is met first.
        object.__setattr__(self, "timeout_s", float(self.timeout_s))
        for name, values in (
            ("on_timeout", ("abort", "raise")),
            ("signals", ("auto", "write", "copy")),
            ("engine", (None, *ENGINES)),
            ("all_reduce_gradients", ("sum", "equal")),
        ):
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name}: required one of {', '.join(map(str, values))}, "
                    f"got {getattr(self, name)!r}"
                )
        cap = self.workspace_bytes
        if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap < 0):
            raise ValueError(
                f"workspace_bytes: required a number of bytes, at least 0, or None, got {cap!r}"
            )
        for name, wanted in (("machine", "a name, a path"), ("log_problems", "a path")):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"{name}: required {wanted} or None, got {value!r}")
        for name in ("replay", "search", "save_gathered"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: required True or False, got {getattr(self, name)!r}")


_process = Options()
_process_text = ""
_block: ContextVar[Options | None] = ContextVar("ficco_options", default=None)
_block_text: ContextVar[str] = ContextVar("ficco_options_text")


class _Seen:
    """Where a compiler can look: it cannot read context variables, but reads properties that are
    written in C, anew whenever it looks whether what it compiled still holds.

    Attributes:
        text: the block's options as text; this object itself where no block is open, since
            ``ContextVar.get`` returns its argument then.
    """

    text = property(_block_text.get)


_seen = _Seen()


def current() -> Options:
    """The options in force here."""
    return _block.get() or _process


def current_text() -> str:
    """The options in force here as text, see :func:`from_text`.

    ``torch.compile`` traces this and guards what it reads, so that other options compile anew.
    """
    text = _seen.text
    return text if isinstance(text, str) else _process_text


@cache
def to_text(options: Options) -> str:
    """Options as text: those that differ from the defaults."""
    changed = {f.name: getattr(options, f.name) for f in fields(Options)}
    changed = {name: changed[name] for name in changed if changed[name] != getattr(Options, name)}
    return json.dumps(changed) if changed else ""


@cache
def from_text(text: str) -> Options:
    """The options that a text stands for."""
    return Options(**json.loads(text or "{}"))


def saves_gathered(text: str) -> bool:
    """``from_text(text).save_gathered``, in words that ``torch.compile`` can trace."""
    return '"save_gathered": true' in text


@contextmanager
def options(**changes: Any) -> Iterator[Options]:
    """Change options within a block: ``with ficco.options(timeout_s=5): ...``.

    See :class:`Options` for the names. Blocks nest; the setting follows the context: a thread
    starts with the process-wide one, an asyncio task with that of the place where it was created.

    Raises:
        ValueError: an unknown name or a value that is not allowed.
    """
    with carried(_changed(current(), changes)) as changed:
        yield changed


@contextmanager
def carried(options: Options) -> Iterator[Options]:
    """A block under the given options: a backward runs under those of its forward."""
    token, text = _block.set(options), _block_text.set(to_text(options))
    try:
        yield options
    finally:
        _block.reset(token)
        _block_text.reset(text)


def set_options(**changes: Any) -> None:
    """Change options for the whole process; :func:`options` blocks go before them."""
    global _process, _process_text
    _process = _changed(_process, changes)
    _process_text = to_text(_process)


def _changed(options: Options, changes: dict[str, Any]) -> Options:
    known = [field.name for field in fields(Options)]
    for name in changes:
        if name not in known:
            raise ValueError(f"options: required one of {', '.join(known)}, got {name!r}")
    for name in ("machine", "log_problems"):
        if isinstance(changes.get(name), os.PathLike):
            changes = {**changes, name: os.fspath(changes[name])}
    return replace(options, **changes)
