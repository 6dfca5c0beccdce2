"""Launch the kernels on a stream.

All methods enqueue and return. Addresses are of device memory or of memory mapped there. A stream
has the form of the vendor's binding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ficco.hip_kernels.build import Target, compiled

# The same numbers as in kernels.cpp.
COPY_THREADS = 512
REDUCE_THREADS = 256
MERGE_THREADS = COMBINE_THREADS = GATE_THREADS = ROUTE_THREADS = 256
ONE_SHOT_THREADS = 512
SIGNAL_THREADS = 64
CAST_THREADS, CAST_HELD, CAST_HELD_SHORT = 256, 8, 4
MAX_PARTS = 16
MAX_ENDS = 16
MAX_RUNS = 64
MAX_SIGNALS = 48

#: Blocks of a peer copy, each on an SM or CU of its own. On 4 H200s 32 were as fast at 0.5 MiB per
#: peer, 5 % faster at 2 MiB and 8 % at 8 MiB.
PEER_BLOCKS = 8
#: Blocks of a launch that may spin, each on an SM or CU of its own, at most half of them: the work
#: that peers wait for needs others, also with two such launches in flight. With 32 a one-shot sum
#: took up to 13 % longer on 2 H200s, with 96 as long (driver 580.159.04, 2026-11-23, near commit
#: de28a6d, by graphs of eight calls that are not part of the project).
SPINNING_BLOCKS = 64
#: Blocks per SM or CU of a kernel that may occupy the whole device.
BLOCKS_PER_PROCESSOR = 4
#: Units of 16 bytes in one launch of a copy, so that 32 bits count them.
MAX_UNITS = 1 << 30

#: Elements that share a factor, where not all of a row do.
BLOCK = 128

_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
#: Addresses, or numbers of bytes, int64.
Numbers = np.ndarray[Any, Any]

#: Sums: dtype of the parts and of the result.
REDUCTIONS = {
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
}


#: Limit on elements of a merge: kernels count units of the result in 32 bits.
MOST_MERGED = 1 << 33
#: Dtypes whose parts of attention are merged, and whose rows of experts are combined.
MERGES = COMBINES = (torch.bfloat16, torch.float16)

#: Functions that gate the other half of a row, and of what dtypes.
GATES, GATED = ("silu gated", "relu gated"), (torch.bfloat16, torch.float16)

#: Casts: dtypes that are cast, and those of the result.
CASTS = (torch.bfloat16, torch.float16, torch.float32)
E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
#: Minimum of threads that cast a part with one factor, for loads of full width.
LEAST_TEAM = 4
#: 16-byte units of the longest parts whose threads hold fewer: the number of a block of float32.
SHORT_UNITS = 32


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: The kernels' names.
NAMES = (
    "ficco_copy_aligned",
    "ficco_copy_shifted",
    "ficco_copy_runs",
    "ficco_exchange_aligned",
    "ficco_exchange_shifted",
    *(f"ficco_reduce_{_text(part)}_{_text(out)}" for part, out in REDUCTIONS),
    *(f"ficco_{n}_shot_{_text(p)}" for n in ("one", "two") for p, out in REDUCTIONS if p == out),
    *(f"ficco_cast_{of}{_text(dtype)}" for of in ("", "short_") for dtype in CASTS),
    *(f"ficco_merge_{_text(dtype)}" for dtype in MERGES),
    *(f"ficco_combine_{_text(dtype)}" for dtype in COMBINES),
    *(f"ficco_{gate.replace(' ', '_')}_{_text(dtype)}" for gate in GATES for dtype in GATED),
    "ficco_route",
    "ficco_post",
    "ficco_wait",
    "ficco_script",
)


class SumAddresses(ctypes.Structure):
    """Addresses of the parts of a sum."""

    _fields_ = [("at", _U64 * MAX_PARTS)]


class Shares(ctypes.Structure):
    """Where the sums of a two-shot go and come from, and their signals, by peer."""

    _fields_ = [
        *((name, _U64 * MAX_PARTS) for name in ("sent", "posts", "come", "kept", "units", "waits")),
        *((name, _U32) for name in ("sends", "keeps")),
    ]


class Strides(ctypes.Structure):
    """How far batches, heads and rows of a tensor lie apart, in elements."""

    _fields_ = [(name, _U64) for name in ("batch", "head", "row")]


class MeanAddresses(ctypes.Structure):
    """Parts of attention, and where their log-sum-exp is."""

    _fields_ = [
        ("at", _U64 * MAX_PARTS),
        ("lse", _U64 * MAX_PARTS),
        ("strides", Strides * MAX_PARTS),
        ("lse_strides", Strides * MAX_PARTS),
        ("first", _U32 * MAX_PARTS),
        ("stop", _U32 * MAX_PARTS),
    ]


class CopyAddresses(ctypes.Structure):
    """Destinations and sources of copies of one shape."""

    _fields_ = [("dst", _U64 * MAX_ENDS), ("src", _U64 * MAX_ENDS)]


class CopyRuns(ctypes.Structure):
    """Destinations and sources of runs of 16-byte units, and how many units end with each."""

    _fields_ = [("dst", _U64 * MAX_RUNS), ("src", _U64 * MAX_RUNS), ("end", _U32 * MAX_RUNS)]

    @classmethod
    def of(cls, dst: Numbers, src: Numbers, end: Numbers) -> CopyRuns:
        runs = cls()
        (fields,) = np.frombuffer(runs, _RUNS)
        for name, values in (("dst", dst), ("src", src), ("end", end)):
            fields[name][: len(values)] = values
        return runs


_RUNS = np.dtype(CopyRuns)


class ScriptStep(NamedTuple):
    """A step of a :class:`Script`: wait until a 32-bit word has a value, or write one of 32 or, if
    ``wide``, 64 bits; if ``behind``, as a release: once all earlier writes are visible to the
    whole system."""

    address: int
    value: int
    waits: bool = False
    wide: bool = False
    behind: bool = False


@dataclass(frozen=True, eq=False)
class Script:
    """Waits and writes that one thread of a launch executes in order. At most ``MAX_SIGNALS``.

    Attributes:
        aside: how many of the first steps are writes that the others are not ordered after.
        alone: how many of the first steps one block executes, the rest by every block.
    """

    steps: tuple[ScriptStep, ...] = ()
    aside: int = 0
    alone: int = 0

    @cached_property
    def packed(self) -> _Script:
        packed = _Script(count=len(self.steps), aside=self.aside, alone=self.alone)
        for index, step in enumerate(self.steps):
            packed.at[index], packed.value[index] = step.address, step.value
            packed.waits |= step.waits << index
            packed.wide |= step.wide << index
            packed.behind |= step.behind << index
        return packed


class _Script(ctypes.Structure):
    _fields_ = [
        ("at", _U64 * MAX_SIGNALS),
        ("value", _U64 * MAX_SIGNALS),
        *((name, _U64) for name in ("waits", "wide", "behind")),  # a bit for each step
        *((name, _U32) for name in ("count", "aside", "alone")),
    ]


@dataclass(frozen=True, eq=False)
class Signals:
    """The signals of a launch: waits and writes before and after its work. The work is visible to
    the whole system before ``rear`` writes at peers. While a script waits, blocks spin on the
    device.

    Attributes:
        arrived: address of a word on the device that counts blocks, 0 when nothing is in flight.
            Launches that may run concurrently need one each.
        front: executed before any of the work.
        rear: executed once, after all of the work.
    """

    arrived: int
    front: Script = Script()
    rear: Script = Script()


class SignalWords(ctypes.Structure):
    """Addresses and values of signal words."""

    _fields_ = [("at", _U64 * SIGNAL_THREADS), ("value", _U32 * SIGNAL_THREADS)]


class Packed:
    """Arguments of a kernel, values of ctypes in its order, and an array of their addresses, which
    drivers take. Used for many launches."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.arguments = tuple(arguments)
        self._at = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, self.arguments))
        self.address = ctypes.addressof(self._at)


class Binding(Protocol):
    """A vendor's driver, for the kernels of one device: either
    :class:`ficco.hip_kernels.cuda_binding.CudaBinding`, or :class:`ficco.dma.hip_driver.HipBinding`
    of the HIP engine.

    Attributes:
        target: what to compile for.
        processors: SMs or CUs of the device.
        ticks_per_s: of the clock that the waiting kernel reads: 1e9 on CUDA; on HIP 1000 times
            ``hipDeviceAttributeWallClockRate``.
    """

    target: Target
    processors: int
    ticks_per_s: float

    def load(self, image: bytes, names: Sequence[str], shared: int = 0) -> Mapping[str, Any]:
        """Load compiled code and look its kernels up. Launches of them ask for up to ``shared``
        bytes of shared memory."""
        ...

    def launch(
        self,
        kernel: Any,
        blocks: int,
        threads: int,
        arguments: Packed,
        stream: Any,
        shared: int = 0,
    ) -> None:
        """Enqueue one kernel, with bytes of shared memory. Raises
        :class:`ficco.errors.BackendError`."""
        ...


#: Of copies: row pitches of destination and source, and width of a row, in bytes; rows.
Shape = tuple[int, int, int, int]


class Strip(NamedTuple):
    """Rows that one launch copies.

    Attributes:
        aligned: at both ends all rows begin ``head`` bytes before a multiple of 16.
        units: of 16 bytes in each row, between head and tail; if not aligned, the most that hold
            bytes of one row.
    """

    aligned: bool
    dst: int
    src: int
    width: int
    height: int
    head: int
    units: int

    @property
    def shape(self) -> tuple[int, ...]:
        """All but the addresses."""
        return self.aligned, self.width, self.height, self.head


def strips(dst: int, src: int, shape: Shape) -> list[Strip]:
    """The launches that copy rows."""
    dst_pitch, src_pitch, width, height = shape
    if not width or not height:
        return []
    if width == dst_pitch == src_pitch:
        width, height = width * height, 1
    pitches = 0 if height == 1 else dst_pitch | src_pitch
    head = -dst % 16
    aligned = (dst - src) % 16 == 0 and pitches % 16 == 0 and width >= head + 16
    if not aligned:
        head = 0
    units = (width - head) // 16 if aligned else (width + 30) // 16
    if units > MAX_UNITS:
        first = head + (MAX_UNITS - 2) * 16
        rest = strips(dst + first, src + first, (dst_pitch, src_pitch, width - first, height))
        return strips(dst, src, (dst_pitch, src_pitch, first, height)) + rest
    rows = MAX_UNITS // units
    pieces = []
    for row in range(0, height, rows):
        to, at = dst + row * dst_pitch, src + row * src_pitch
        pieces.append(Strip(aligned, to, at, width, min(rows, height - row), head, units))
    return pieces


def divisor(units: int) -> tuple[int, int]:
    """``magic`` and ``shift`` with ``i // units == i * magic >> shift`` for all i below 2**31."""
    shift = 31 + (units - 1).bit_length()
    return (1 << shift) // units + 1, shift


def address_of(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, pitch, width (bytes) and height of a matrix whose rows are contiguous."""
    if tensor.dim() != 2 and tensor.is_contiguous():
        tensor = tensor.view(1, -1)
    if tensor.dim() != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(
            "required a contiguous tensor or a matrix with contiguous rows, got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}; call contiguous() on it"
        )
    size = tensor.element_size()
    height, cols = tensor.shape
    return tensor.data_ptr(), tensor.stride(0) * size, cols * size, height


def check_reduce(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """``ValueError`` unless the parts can be summed."""
    if not parts:
        raise ValueError("parts: required at least 1, got none")
    for part in parts:
        if part.shape != out.shape or (part.dtype, out.dtype) not in REDUCTIONS:
            raise ValueError(
                f"parts: required shape {tuple(out.shape)} and {out.dtype} or float32, got "
                f"{tuple(part.shape)} and {part.dtype}"
            )
        if part.dtype != parts[0].dtype:
            raise ValueError("parts: required one dtype, got several; convert them first")
    if not all(tensor.is_contiguous() for tensor in (out, *parts)):
        pitches = {part.stride(0) for part in parts}
        if out.dim() != 2 or len(pitches) > 1 or any(t.stride(1) != 1 for t in (out, *parts)):
            raise ValueError(
                "required contiguous tensors, or contiguous rows at one distance in all parts, got "
                "other strides; call contiguous() on them"
            )


#: Attention of rows of a result to some keys: first row, end row, mean of the values [batch, heads,
#: rows, size], and log-sum-exp [batch, heads, rows].
Attended = tuple[int, int, torch.Tensor, torch.Tensor]


def check_merge(out: torch.Tensor, means: Iterable[torch.Tensor]) -> None:
    """``ValueError`` if a merge is too large, or heads, as a library lays them out, are not at
    multiples of 16 bytes."""
    if out.numel() >= MOST_MERGED:
        raise ValueError(f"out: required less than {MOST_MERGED} elements, got {out.numel()}")
    for one in (out, *means):
        steps, each = (*one.stride()[:3], one.shape[3]), 16 // one.element_size()
        if one.stride(3) != 1 or one.data_ptr() % 16 or any(step % each for step in steps):
            raise ValueError(
                f"parts, out: required heads at multiples of 16 bytes, got strides {one.stride()}; "
                "call contiguous() on it"
            )


def gates(function: str, out: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a function of rows, [rows, n] of [rows, 2n] or batches of such, is one of
    :data:`GATES` whose rows begin at multiples of 16 bytes."""
    each = 16 // out.element_size()
    steps = [*out.stride()[:-1], *x.stride()[:-1], out.shape[-1]]
    return (
        function in GATES
        and out.dtype == x.dtype
        and out.dtype in GATED
        and out.dim() == x.dim() <= 3
        and x.shape == (*out.shape[:-1], 2 * out.shape[-1])
        and not any(step % each for step in steps)
        and not (out.data_ptr() % 16 or x.data_ptr() % 16)
        and out.stride(-1) == x.stride(-1) == 1
    )


class Kernels:
    """The kernels, loaded for the device of a binding, which must be current."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._kernels = binding.load(compiled(binding.target), NAMES)
        # An engine copies between the same addresses call after call.
        self._copies = lru_cache(maxsize=4096)(self._prepare)

    @property
    def most_that_spin(self) -> int:
        """Blocks of a launch that may spin: concurrent launches need processors, too."""
        return min(SPINNING_BLOCKS, self.binding.processors // 2)

    def copies(
        self,
        ends: tuple[tuple[int, int], ...],
        shape: Shape,
        stream: Any,
        blocks: int = PEER_BLOCKS,
        signals: Signals | None = None,
    ) -> None:
        """Copy rows between ranks for each pair of destination and source, all concurrently with
        ``blocks`` blocks each: by one launch if their addresses are aligned alike. A write that
        follows on the stream tells a peer that the rows have arrived. With ``signals`` there must
        be something to copy, and the stream must wait for nothing that is launched after it on this
        device."""
        for prepared in self._copies(ends, shape, blocks, True, signals):
            self.binding.launch(*prepared, stream)

    def place(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        """Copy rows of the same shape and dtype within the device, on all of its SMs or CUs."""
        to, dst_pitch, width, height = address_of(dst)
        at, src_pitch, _, _ = address_of(src)
        blocks = BLOCKS_PER_PROCESSOR * self.binding.processors
        shape = dst_pitch, src_pitch, width, height
        for prepared in self._copies(((to, at),), shape, blocks, False, None):
            self.binding.launch(*prepared, stream)

    def copy_runs(self, dst: Numbers, src: Numbers, sizes: Numbers, stream: Any) -> None:
        """Copy runs of bytes within the device, on all SMs or CUs. Addresses and sizes are positive
        multiples of 16."""
        if int(np.bitwise_or.reduce(dst | src | sizes)) % 16 or sizes.sum() > 16 * MAX_UNITS:
            raise ValueError(
                f"required runs at multiples of 16 bytes, {MAX_UNITS} such units in all, got "
                f"{sizes.tolist()} bytes from {src.tolist()} to {dst.tolist()}"
            )
        for first in range(0, len(sizes), MAX_RUNS):
            batch = slice(first, first + MAX_RUNS)
            ends = (sizes[batch] // 16).cumsum()
            blocks = -(-int(ends[-1]) // COPY_THREADS)
            blocks = min(BLOCKS_PER_PROCESSOR * self.binding.processors, blocks)
            arguments = CopyRuns.of(dst[batch], src[batch], ends), _U32(len(ends)), _U32(blocks)
            self._launch("ficco_copy_runs", blocks, COPY_THREADS, arguments, stream)

    def _prepare(
        self,
        ends: tuple[tuple[int, int], ...],
        shape: Shape,
        blocks: int,
        release: bool,
        signals: Signals | None,
    ) -> list[tuple[Any, ...]]:
        """The launches of copies: kernel, blocks, threads and arguments of each."""

        def launch(group: tuple[Strip, ...], signals: Signals | None) -> tuple[Any, ...]:
            """The launch that copies strips of one shape."""
            strip, addresses = group[0], CopyAddresses()
            for index, one in enumerate(group):
                addresses.dst[index], addresses.src[index] = one.dst, one.src
            count = min(blocks, -(-strip.units * strip.height // COPY_THREADS))
            numbers = map(_U32, (strip.units, *divisor(strip.units), strip.height, count))
            sizes = map(_U64, (*shape[:2], strip.width))
            kind, total = "aligned" if strip.aligned else "shifted", count * len(group)
            if signals is None:
                kernel, rest = self._kernels[f"ficco_copy_{kind}"], (_U32(release),)
            else:
                kernel = self._kernels[f"ficco_exchange_{kind}"]
                rest = _U32(total), *_packed(signals)
            return kernel, total, COPY_THREADS, Packed((addresses, *sizes, *numbers, *rest))

        each = [strips(dst, src, shape) for dst, src in ends]
        groups: list[tuple[Strip, ...]] = [(strip,) for column in each for strip in column]
        alike = len({tuple(strip.shape for strip in column) for column in each}) == 1
        if alike and len(ends) <= MAX_ENDS:
            groups = list(zip(*each, strict=True))
        if signals is None or len(groups) < 2:
            return [launch(group, signals) for group in groups]
        first, *rest, last = groups
        return [
            launch(first, replace(signals, rear=Script())),
            *[launch(group, None) for group in rest],
            launch(last, replace(signals, front=Script())),
        ]

    def reduce(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], stream: Any, factor: float = 1.0
    ) -> None:
        """``out = (parts[0] + parts[1] + ...) * factor`` in that order, in float32, rounded once.
        ``out`` may be one of the parts. Rows may be strided, by the same pitch in all parts."""
        check_reduce(out, parts)
        if not out.numel():
            return
        arguments, work = self._sum(out, parts)
        blocks = min(8 * self.binding.processors, -(-work // REDUCE_THREADS))
        name = f"ficco_reduce_{_text(parts[0].dtype)}_{_text(out.dtype)}"
        packed = *arguments(blocks), ctypes.c_float(factor)
        self._launch(name, blocks, REDUCE_THREADS, packed, stream)

    def one_shot(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        signals: Signals,
        stream: Any,
        blocks: int = SPINNING_BLOCKS,
    ) -> None:
        """:meth:`reduce` of parts of the result's dtype in peers' memory, on few blocks, with
        ``signals``: the stream must wait for nothing that is launched after it on this device."""
        check_reduce(out, parts)
        arguments, work = self._sum(out, parts)
        blocks = max(1, min(blocks, self.most_that_spin, -(-work // ONE_SHOT_THREADS)))
        name, packed = f"ficco_one_shot_{_text(out.dtype)}", (*arguments(blocks), *_packed(signals))
        self._launch(name, blocks, ONE_SHOT_THREADS, packed, stream)

    def two_shot(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        sends: Sequence[tuple[int, int]],
        keeps: Sequence[tuple[int, int, torch.Tensor]],
        blocks: int,
        signals: Signals,
        stream: Any,
    ) -> None:
        """:meth:`one_shot` of this rank's rows of a sum, after which the ranks exchange their sums.
        A block waits for the same block of each peer, so all ranks launch as many ``blocks``. Rows
        are contiguous, and multiples of 16 bytes.

        Args:
            sends: for each peer, the address there of its copy of ``out``, and of the first of
                ``blocks`` adjacent words.
            keeps: for each peer with rows, the address here where its sums arrive, that of the
                first of ``blocks`` adjacent words, which are cleared, and its rows of the result.
        """
        check_reduce(out, parts)
        tensors = [out, *parts, *(rows for _, _, rows in keeps)]
        if any(t.data_ptr() % 16 or t.nbytes % 16 or not t.is_contiguous() for t in tensors):
            raise ValueError(
                "required contiguous rows at multiples of 16 bytes, got others; take one_shot"
            )
        shares = Shares(sends=len(sends), keeps=len(keeps))
        for index, ends in enumerate(sends):
            shares.sent[index], shares.posts[index] = ends
        for index, (come, word, rows) in enumerate(keeps):
            shares.come[index], shares.waits[index] = come, word
            shares.kept[index], shares.units[index] = rows.data_ptr(), rows.nbytes // 16
        arguments = *self._sum(out, parts)[0](blocks), *_packed(signals), shares
        name = f"ficco_two_shot_{_text(out.dtype)}"
        self._launch(name, blocks, ONE_SHOT_THREADS, arguments, stream)

    def _sum(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor]
    ) -> tuple[Callable[[int], tuple[Any, ...]], int]:
        """The arguments of a sum, given its blocks, and the number of threads with work."""
        elements = out.numel()
        addresses = [part.data_ptr() for part in parts]
        each = 16 // out.element_size()
        width = pitch = out_pitch = elements
        if not all(tensor.is_contiguous() for tensor in (out, *parts)):
            width, pitch, out_pitch = out.shape[1], parts[0].stride(0), out.stride(0)
        aligned = not any(address % 16 for address in (out.data_ptr(), *addresses))
        if not width == pitch == out_pitch:  # vectors must not cross the ends of rows
            aligned = aligned and not (width % each or pitch % each or out_pitch % each)
        vectors = elements // each if aligned else 0
        packed = SumAddresses((_U64 * MAX_PARTS)(*addresses))
        ends = _U64(out.data_ptr()), packed, _U32(len(parts))
        sizes = tuple(map(_U64, (vectors, elements, width, pitch, out_pitch)))
        return lambda blocks: (*ends, _U32(blocks), *sizes), max(vectors, elements - vectors * each)

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor | None, parts: Sequence[Attended], stream: Any
    ) -> None:
        """Merge results of attention to different keys to ``out``, [batch, heads, rows, size], by
        their log-sum-exp, in float32 and rounded once; ``lse``: leave that of all keys there. Every
        row is in a part. All have one dtype of :data:`MERGES`, and log-sum-exps are float32."""
        check_merge(out, (mean for _, _, mean, _ in parts))
        batch, heads, rows, size = out.shape
        units = size * out.element_size() // 16
        total = batch * heads * rows * units
        if not total:
            return
        means = MeanAddresses()
        for index, (first, stop, mean, weight) in enumerate(parts):
            means.first[index], means.stop[index] = first, stop
            means.at[index], means.lse[index] = mean.data_ptr(), weight.data_ptr()
            means.strides[index] = Strides(*mean.stride()[:3])
            means.lse_strides[index] = Strides(*weight.stride())
        blocks = min(8 * self.binding.processors, -(-total // MERGE_THREADS))
        where = (0, Strides()) if lse is None else (lse.data_ptr(), Strides(*lse.stride()))
        arguments = (
            *(_U64(out.data_ptr()), Strides(*out.stride()[:3]), _U64(where[0]), where[1], means),
            *map(_U32, (len(parts), units, heads, rows, total, blocks)),
        )
        self._launch(f"ficco_merge_{_text(out.dtype)}", blocks, MERGE_THREADS, arguments, stream)

    def route(
        self, chosen: torch.Tensor, experts: int, capacity: int, stream: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of experts that tokens chose, int64 [t, choices]: how often each was, [experts]; for each
        pair how often its expert was before, [t, choices], first choices first; and the row that it
        takes in blocks of ``capacity`` rows, ``experts * capacity`` if it takes none, as int64. If
        ``capacity`` is 0, blocks have the rows that they need, and [t * choices] is the token that
        has each; otherwise that is nothing."""
        tokens, choices = chosen.shape
        counts = chosen.new_zeros(experts)
        places, rows, held = chosen.new_zeros(3, choices, tokens)
        if chosen.numel():
            arguments = (
                *(_U64(one.data_ptr()) for one in (places, rows, held, counts, chosen)),
                *map(_U64, (*chosen.stride(), tokens, chosen.numel(), capacity)),
                _U32(experts),
            )
            self._launch("ficco_route", experts, ROUTE_THREADS, arguments, stream)
        return counts, places.t(), rows.t(), held.flatten()

    def gate(self, function: str, out: torch.Tensor, x: torch.Tensor, stream: Any) -> None:
        """``out = f(x[..., :n]) * x[..., n:]``, in float32 and rounded once, of operands that
        :func:`gates` accepts."""
        if not out.numel():
            return
        batched = out.dim() == 3
        ends = [(one.data_ptr(), *((0,) * (not batched)), *one.stride()[:-1]) for one in (out, x)]
        units = out.shape[-1] * out.element_size() // 16
        total = out.numel() // out.shape[-1] * units
        blocks = min(8 * self.binding.processors, -(-total // GATE_THREADS))
        arguments = (
            *map(_U64, (*ends[0], *ends[1])),
            *map(_U32, (out.shape[-2], units)),
            *(_U64(total), _U32(blocks)),
        )
        name = f"ficco_{function.replace(' ', '_')}_{_text(out.dtype)}"
        self._launch(name, blocks, GATE_THREADS, arguments, stream)

    def combine(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        picked: torch.Tensor,
        weights: torch.Tensor | None,
        stream: Any,
    ) -> None:
        """``out[t] = sum over j of weights[t, j] * rows[picked[t, j]]``, in float32, in that order,
        and rounded once. Rows of a dtype of :data:`COMBINES` are contiguous, and multiples of 16
        bytes. ``picked``: int64. ``weights``: contiguous float32, None for ones."""
        units = rows.shape[1] * rows.element_size() // 16
        total = out.shape[0] * units
        if not total:
            return
        blocks = min(8 * self.binding.processors, -(-total // COMBINE_THREADS))
        arguments = (
            *map(_U64, (out.data_ptr(), rows.data_ptr(), picked.data_ptr(), *picked.stride())),
            _U64(0 if weights is None else weights.data_ptr()),
            *map(_U32, (picked.shape[1], units)),
            *(_U64(total), _U32(blocks)),
        )
        name = f"ficco_combine_{_text(rows.dtype)}"
        self._launch(name, blocks, COMBINE_THREADS, arguments, stream)

    def cast(
        self, out: torch.Tensor, factors: torch.Tensor, matrix: torch.Tensor, stream: Any
    ) -> None:
        """Cast ``matrix`` [m, k] of one of :data:`CASTS` to one of :data:`E4M3`. ``factors`` [m, 1]
        or [m, k/128] float32 dequantize it: the smallest powers of two without overflow. k is a
        multiple of 16; rows may be strided, those of the result by multiples of 8 bytes."""
        (rows, cols), size = matrix.shape, matrix.element_size()
        if not rows or not cols:
            return
        length = cols if factors.shape[1] == 1 else BLOCK
        units = -(-length * size // 16)
        # Of short parts threads have few units: to skip more of them takes longer than memory does.
        held, of = (CAST_HELD_SHORT, "short_") if units <= SHORT_UNITS else (CAST_HELD, "")
        team = 1 << max(-(-units // held) - 1, 0).bit_length()
        team = min(max(team, LEAST_TEAM), CAST_THREADS)
        parts, teams = rows * factors.shape[1], CAST_THREADS // team
        blocks = min(8 * self.binding.processors, -(-parts // teams))
        aligned = not (matrix.data_ptr() % 16 or matrix.stride(0) * size % 16)
        ends = (
            *(_U64(out.data_ptr()), _U64(out.stride(0))),
            *(_U64(factors.data_ptr()), _U64(factors.stride(0))),
            *(_U64(matrix.data_ptr()), _U64(matrix.stride(0))),
        )
        fnuz = out.dtype == torch.float8_e4m3fnuz
        numbers = map(_U32, (rows, cols, length, team, fnuz, aligned, blocks))
        name = f"ficco_cast_{of}{_text(matrix.dtype)}"
        self._launch(name, blocks, CAST_THREADS, (*ends, *numbers), stream)

    def script(self, script: Script, stream: Any) -> None:
        """Execute a script after all earlier work of the stream. While it waits, one block spins on
        the device, as with :class:`Signals`."""
        self._launch("ficco_script", 1, SIGNAL_THREADS, (script.packed,), stream)

    def post(self, words: Sequence[tuple[int, int]], stream: Any) -> None:
        """Write 32-bit words, (address, value), after all earlier work of the stream, whose writes
        are visible to the whole system before the words."""
        self._signal("ficco_post", words, lambda first: (), stream)

    def wait(
        self, words: Sequence[tuple[int, int]], seconds: float, late: int, stream: Any
    ) -> None:
        """Make the stream wait until 32-bit words, (address, value), have their values. It resumes
        after ``seconds`` in any case: then the 32-bit word at ``late`` becomes 1 + the index of
        a missing one.

        Meanwhile a block spins on the device: the stream must wait for nothing that is launched
        after it on this device.
        """
        limit = _U64(int(seconds * self.binding.ticks_per_s))
        rest = limit, _U64(late)
        self._signal("ficco_wait", words, lambda first: (_U32(1 + first), *rest), stream)

    def _signal(
        self,
        name: str,
        words: Sequence[tuple[int, int]],
        rest: Callable[[int], tuple[Any, ...]],
        stream: Any,
    ) -> None:
        """Launch a kernel for each ``SIGNAL_THREADS`` words; ``rest`` makes its further arguments
        from the index of its first word."""
        for first in range(0, len(words), SIGNAL_THREADS):
            batch, packed = words[first : first + SIGNAL_THREADS], SignalWords()
            for index, (address, value) in enumerate(batch):
                packed.at[index], packed.value[index] = address, value
            arguments = packed, _U32(len(batch)), *rest(first)
            self._launch(name, 1, SIGNAL_THREADS, arguments, stream)

    def _launch(
        self, name: str, blocks: int, threads: int, arguments: Sequence[Any], stream: Any
    ) -> None:
        self.binding.launch(self._kernels[name], blocks, threads, Packed(arguments), stream)


def _packed(signals: Signals) -> tuple[Any, ...]:
    """Signals as arguments of a kernel."""
    return _U64(signals.arrived), signals.front.packed, signals.rear.packed
