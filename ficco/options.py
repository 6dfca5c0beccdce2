"""Options of a call, set for a block of code or for the whole process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, TypedDict, Unpack

from ficco.dma import ENGINES


@dataclass(frozen=True)
class Options:
    """Settings of a call that are not arguments of the operator.

    Attributes:
        timeout_s: seconds that a call may wait for its peers. None: the ``timeout`` of the group's
            collectives, set when the group was created (PyTorch's default is 600 with NCCL and
            1800 with gloo); 600 if PyTorch does not report it. A wait of 60 s is logged as a
            warning with rank, peer and step (logger ``ficco``), and again each time that the wait
            has doubled.
        on_timeout: on a GPU, ``"abort"`` prints the error and ends the process, as the vendor's
            collectives do; ``"raise"`` frees the streams and raises at the next ficco call or
            :func:`ficco.synchronize`. On the CPU engine the call itself raises.
        engine: ``"cpu"``, ``"cuda"`` or ``"hip"``. None: chosen by the tensors' device and by
            PyTorch's build.
        workspace_bytes: cap on the symmetric memory that a group's eager calls take on each rank.
            To stay under it, gathering operators use their staging as a ring, and scattering
            operators process a few columns of b at a time. If some calls push and others pull, the
            cap holds for each of both kinds. None: no cap. The same on all ranks.
        signals: how signals reach a peer: ``"write"`` (stream write), ``"copy"`` (4-byte copy) or
            ``"auto"``, the first of them that the driver allows. On CUDA, launches of the copy
            kernel post their own signals. Read when a group makes its first call.
        replay: on a GPU, replay a call from a graph that ficco recorded if its operands are at the
            same addresses as before. This takes a fraction of the host time of enqueueing the call.
            The graph keeps the BLAS library and the share of SMs that PyTorch preferred when it was
            recorded; after a change of these, call :func:`ficco.close`.
        machine: name or path of a machine description, instead of the one that matches this
            host's fingerprint. Takes precedence over the variable ``FICCO_MACHINE``. The same on
            all ranks.
        log_problems: path of a file. Rank 0 appends every problem that it sees for the first time,
            for ``--from-log`` of ``ficco tune`` and ``ficco explain``.
        log: rank 0 logs a line (INFO, logger ``ficco``) on every problem that it sees for the first
            time: its schedule, and why.
        save_gathered: keep the gathered A for the gradient of ``b``, which takes W times the
            memory of the shard. Otherwise the backward gathers it again, overlapped.
        all_reduce_gradients: how ``matmul_all_reduce`` reads the gradients of its result.
            ``"sum"``: each rank has the gradient of its own copy, and the loss depends on all
            copies, so the backward sums the gradients over the ranks. ``"equal"``: all ranks use
            their copies in the same way, and the loss counts them once, as in Megatron-LM; the
            gradients are then equal on all ranks and the backward needs no communication. The
            option is the same on all ranks.

    A backward has the options of its forward. ``torch.utils.checkpoint`` recomputes under those in
    force at the backward: set ``save_gathered`` and ``all_reduce_gradients`` by
    :func:`set_options` there, or within the function that it calls.
    """

    timeout_s: float | None = None
    on_timeout: str = "abort"
    engine: str | None = None
    workspace_bytes: int | None = None
    signals: str = "auto"
    replay: bool = True
    machine: str | None = None
    log_problems: str | None = None
    log: bool = False
    save_gathered: bool = False
    all_reduce_gradients: str = "sum"

    def __post_init__(self) -> None:
        timeout_s, cap = self.timeout_s, self.workspace_bytes
        integral = isinstance(cap, int) and not isinstance(cap, bool)
        if timeout_s is not None:
            number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
            self._require(number and timeout_s > 0, "a number above 0, or None", "timeout_s")
            # Options that are equal must have equal texts: 5 and 5.0 would not.
            object.__setattr__(self, "timeout_s", float(timeout_s))
        for name, values in (
            ("on_timeout", ("abort", "raise")),
            ("signals", ("auto", "write", "copy")),
            ("engine", (None, *ENGINES)),
            ("all_reduce_gradients", ("sum", "equal")),
        ):
            allowed = f"one of {', '.join(map(str, values))}"
            self._require(getattr(self, name) in values, allowed, name)
        bounded = cap is None or (integral and cap >= 0)
        self._require(bounded, "a number of bytes, at least 0, or None", "workspace_bytes")
        for name, allowed in (("machine", "a name, a path"), ("log_problems", "a path")):
            value = getattr(self, name)
            valid = value is None or (isinstance(value, str) and bool(value))
            self._require(valid, f"{allowed} or None", name)
        for name in ("replay", "log", "save_gathered"):
            self._require(isinstance(getattr(self, name), bool), "True or False", name)

    def _require(self, valid: bool, allowed: str, name: str) -> None:
        if not valid:
            raise ValueError(f"{name}: required {allowed}, got {getattr(self, name)!r}")


class Changes(TypedDict, total=False):
    """The options that a call of :func:`options` may name, for type checkers; see
    :class:`Options`."""

    timeout_s: float | None
    on_timeout: Literal["abort", "raise"]
    engine: str | None
    workspace_bytes: int | None
    signals: Literal["auto", "write", "copy"]
    replay: bool
    machine: str | os.PathLike[str] | None
    log_problems: str | os.PathLike[str] | None
    log: bool
    save_gathered: bool
    all_reduce_gradients: Literal["sum", "equal"]


_process = Options()
_process_text = ""
_block: ContextVar[Options | None] = ContextVar("ficco_options", default=None)
_block_text: ContextVar[str] = ContextVar("ficco_options_text")


class _Seen:
    """Lets ``torch.compile`` read the options in force.

    A compiler cannot read context variables. It can read a property that is implemented in C, and
    it reads the property again in the guards of compiled code.

    Attributes:
        text: the block's options as text. Outside of blocks it is this object itself, since
            ``ContextVar.get`` then returns its argument.
    """

    text = property(_block_text.get)


_seen = _Seen()


def current() -> Options:
    """Return the options in force here."""
    return _block.get() or _process


def current_text() -> str:
    """Return the options in force here as text, see :func:`from_text`.

    ``torch.compile`` traces this function and guards the text, so a change of options recompiles.
    """
    text = _seen.text
    return text if isinstance(text, str) else _process_text


@cache
def to_text(options: Options) -> str:
    """Return the options that differ from the defaults, as JSON; empty if all are defaults."""
    changed = {f.name: getattr(options, f.name) for f in fields(Options)}
    changed = {name: changed[name] for name in changed if changed[name] != getattr(Options, name)}
    return json.dumps(changed) if changed else ""


@cache
def from_text(text: str) -> Options:
    """Return the options of a text."""
    return Options(**json.loads(text or "{}"))


def saves_gathered(text: str) -> bool:
    """Return ``from_text(text).save_gathered``; ``torch.compile`` can trace this."""
    return '"save_gathered": true' in text


@contextmanager
def options(**changes: Unpack[Changes]) -> Iterator[Options]:
    """Change options within a block: ``with ficco.options(timeout_s=5): ...``.

    See :class:`Options` for the names. Blocks nest. The setting belongs to the context: a thread
    starts with the process-wide options, an asyncio task with those in force where it was created.

    Raises:
        ValueError: an unknown name or a value that is not allowed.
    """
    with carried(_changed(current(), changes)) as changed:
        yield changed


@contextmanager
def carried(options: Options) -> Iterator[Options]:
    """Run a block under ``options``, as a backward under the options of its forward."""
    token, text = _block.set(options), _block_text.set(to_text(options))
    try:
        yield options
    finally:
        _block.reset(token)
        _block_text.reset(text)


def set_options(**changes: Unpack[Changes]) -> None:
    """Change options for the whole process. :func:`options` blocks take precedence.

    Raises:
        ValueError: an unknown name or a value that is not allowed.
    """
    global _process, _process_text
    _process = _changed(_process, changes)
    _process_text = to_text(_process)


def _changed(options: Options, requested: Changes) -> Options:
    changes: dict[str, Any] = {**requested}
    known = [field.name for field in fields(Options)]
    for name in changes:
        if name not in known:
            raise ValueError(f"options: required one of {', '.join(known)}, got {name!r}")
    for name in ("machine", "log_problems"):
        if isinstance(changes.get(name), os.PathLike):
            changes[name] = os.fspath(changes[name])
    return replace(options, **changes)
