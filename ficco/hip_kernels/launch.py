"""Launch the kernels on a stream.

All methods enqueue and return. Addresses are those of the device or of memory mapped there, a
stream is what the vendor's binding takes for one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from ficco.hip_kernels.build import Target, compiled

# The same numbers as in kernels.cpp.
COPY_THREADS = 512
REDUCE_THREADS = 256
ONE_SHOT_THREADS = 512
SIGNAL_THREADS = 64
MAX_PARTS = 16
MAX_ENDS = 16
MAX_SIGNALS = 48

#: Blocks of a peer copy, one for each SM or CU that it may take. On 4 H200s 32 were as fast at
#: 0.5 MiB per peer, 5 % faster at 2 MiB and 8 % at 8 MiB.
PEER_BLOCKS = 8
#: Blocks of a launch that may spin, one for each SM or CU that it may take, at most half of them:
#: what the peers wait for must find others, also where two such launches are under way. With 32 a
#: sum at the peers took up to 13 % longer on 2 H200s, with 96 as long (driver 580.159.04,
#: 2026-11-23, near commit de28a6d, by graphs of eight calls that are not part of the project).
SPINNING_BLOCKS = 64
#: Blocks for each SM or CU of a kernel that may take the whole device.
WHOLE = 4
#: Units of 16 bytes that one launch of a copy takes, so that 32 bits count them.
MAX_UNITS = 1 << 30

#: Sums: dtype of the parts and of the result.
REDUCTIONS = {
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
}


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: Names of the kernels.
NAMES = (
    "ficco_copy_aligned",
    "ficco_copy_shifted",
    "ficco_exchange_aligned",
    "ficco_exchange_shifted",
    *(f"ficco_reduce_{_text(part)}_{_text(out)}" for part, out in REDUCTIONS),
    *(f"ficco_one_shot_{_text(part)}" for part, out in REDUCTIONS if part == out),
    "ficco_post",
    "ficco_wait",
    "ficco_script",
)


class Parts(ctypes.Structure):
    """Addresses of the parts of a sum."""

    _fields_ = [("at", ctypes.c_uint64 * MAX_PARTS)]


class Ends(ctypes.Structure):
    """Where copies of one shape lead, and where they come from."""

    _fields_ = [("dst", ctypes.c_uint64 * MAX_ENDS), ("src", ctypes.c_uint64 * MAX_ENDS)]


class ScriptStep(NamedTuple):
    """Of a :class:`Script`: wait for a 32-bit word to have a value, or write one of 32 or, if
    ``wide``, 64 bits; if ``behind``, when the whole system sees what came before."""

    address: int
    value: int
    waits: bool = False
    wide: bool = False
    behind: bool = False


@dataclass(frozen=True, eq=False)
class Script:
    """Waits and writes that one thread of a launch carries out one after the other. At most
    ``MAX_SIGNALS``.

    Attributes:
        aside: so many of the first of them are writes for which the others need not wait.
        alone: so many of the first of them are carried out once, the rest by every block.
    """

    steps: tuple[ScriptStep, ...] = ()
    aside: int = 0
    alone: int = 0

    @cached_property
    def packed(self) -> _Script:
        found = _Script(count=len(self.steps), aside=self.aside, alone=self.alone)
        for index, step in enumerate(self.steps):
            found.at[index], found.value[index] = step.address, step.value
            found.waits |= step.waits << index
            found.wide |= step.wide << index
            found.behind |= step.behind << index
        return found


class _Script(ctypes.Structure):
    _fields_ = [
        ("at", ctypes.c_uint64 * MAX_SIGNALS),
        ("value", ctypes.c_uint64 * MAX_SIGNALS),
        ("waits", ctypes.c_uint64),
        ("wide", ctypes.c_uint64),
        ("behind", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("aside", ctypes.c_uint32),
        ("alone", ctypes.c_uint32),
    ]


@dataclass(frozen=True, eq=False)
class Signals:
    """What a launch waits for and writes around its work: the whole system sees all of that before
    it sees what ``rear`` writes elsewhere. While a script waits, blocks of the device spin.

    Attributes:
        arrived: address of a word of the device's own, 0 when nothing is in flight. Launches that
            may run at the same time need one each.
        front: carried out before any of the work.
        rear: carried out once, when all of the work is done.
    """

    arrived: int
    front: Script = Script()
    rear: Script = Script()


class Words(ctypes.Structure):
    """Addresses and values of signal words."""

    _fields_ = [
        ("at", ctypes.c_uint64 * SIGNAL_THREADS),
        ("value", ctypes.c_uint32 * SIGNAL_THREADS),
    ]


class Packed:
    """Arguments of a kernel, and the addresses of each, as drivers want them."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.arguments = tuple(arguments)
        self._at = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, self.arguments))
        self.address = ctypes.addressof(self._at)


class Binding(Protocol):
    """What a vendor's driver does for the kernels of one device.

    There are two: :class:`ficco.hip_kernels.cuda_binding.CudaBinding`, and
    :class:`ficco.dma.hip_driver.HipBinding` by the calls of the HIP engine.

    Attributes:
        target: what to compile for.
        processors: SMs or CUs of the device.
        ticks_per_s: of the clock that the waiting kernel reads: 1e9 on CUDA; on HIP 1000 times
            ``hipDeviceAttributeWallClockRate``.
    """

    target: Target
    processors: int
    ticks_per_s: float

    def load(self, image: bytes, names: Sequence[str]) -> Mapping[str, Any]:
        """Load compiled code and look its kernels up."""
        ...

    def pack(self, arguments: Sequence[Any]) -> Any:
        """Arguments, values of ctypes in the order of the kernel's, as :meth:`launch` wants
        them. They are used again and again."""
        ...

    def launch(self, kernel: Any, blocks: int, threads: int, arguments: Any, stream: Any) -> None:
        """Enqueue one kernel. Raises :class:`ficco.errors.BackendError`."""
        ...


class Strip(NamedTuple):
    """Rows that one launch copies.

    Attributes:
        aligned: all rows are equally far behind multiples of 16 bytes at both ends, by ``-head``.
        units: of 16 bytes in each row, between head and tail; or, where rows begin anywhere, the
            most that hold bytes of one.
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
        """All but where it lies."""
        return self.aligned, self.width, self.height, self.head


def strips(
    dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int
) -> list[Strip]:
    """How to copy ``height`` rows of ``width`` bytes."""
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
        rest = dst + first, dst_pitch, src + first, src_pitch, width - first, height
        return strips(dst, dst_pitch, src, src_pitch, first, height) + strips(*rest)
    rows = MAX_UNITS // units
    return [
        Strip(
            aligned,
            dst + row * dst_pitch,
            src + row * src_pitch,
            width,
            min(rows, height - row),
            head,
            units,
        )
        for row in range(0, height, rows)
    ]


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


def check_place(dst: torch.Tensor, src: torch.Tensor) -> None:
    """``ValueError`` unless one can be placed in the other."""
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise ValueError(
            f"required a source of shape {tuple(dst.shape)} and {dst.dtype}, got "
            f"{tuple(src.shape)} and {src.dtype}; placement copies bytes"
        )


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


class Kernels:
    """The kernels, loaded for the device of a binding. Make it with that device current."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._kernels = binding.load(compiled(binding.target), NAMES)
        # An engine copies between the same places call after call.
        self._copies = lru_cache(maxsize=4096)(self._prepare)

    @property
    def most_that_spin(self) -> int:
        """Blocks of a launch that may spin: other launches must find room beside them."""
        return min(SPINNING_BLOCKS, self.binding.processors // 2)

    def copies(
        self,
        ends: tuple[tuple[int, int], ...],
        dst_pitch: int,
        src_pitch: int,
        width: int,
        height: int,
        stream: Any,
        blocks: int = PEER_BLOCKS,
        signals: Signals | None = None,
    ) -> None:
        """Copy ``height`` rows of ``width`` bytes between ranks for each pair of destination and
        source, all at the same time with ``blocks`` blocks each: where their addresses are alike,
        by one launch. What the stream writes behind it tells a peer that they are there. With
        ``signals`` there must be something to copy, and the stream must wait for nothing that is
        launched behind it on this device."""
        for prepared in self._copies(
            ends, dst_pitch, src_pitch, width, height, blocks, True, signals
        ):
            self.binding.launch(*prepared, stream)

    def place(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        """Copy rows within the device, which all of its SMs or CUs may serve."""
        check_place(dst, src)
        to, dst_pitch, width, height = address_of(dst)
        at, src_pitch, _, _ = address_of(src)
        blocks = WHOLE * self.binding.processors
        for prepared in self._copies(
            ((to, at),), dst_pitch, src_pitch, width, height, blocks, False, None
        ):
            self.binding.launch(*prepared, stream)

    def _prepare(
        self,
        ends: tuple[tuple[int, int], ...],
        dst_pitch: int,
        src_pitch: int,
        width: int,
        height: int,
        blocks: int,
        release: bool,
        signals: Signals | None,
    ) -> list[tuple[Any, ...]]:
        """What copies launch."""
        each = [strips(dst, dst_pitch, src, src_pitch, width, height) for dst, src in ends]
        launches: list[tuple[Strip, ...]] = [(strip,) for found in each for strip in found]
        alike = len({tuple(strip.shape for strip in found) for found in each}) == 1
        if alike and len(ends) <= MAX_ENDS:
            launches = list(zip(*each, strict=True))
        how = dst_pitch, src_pitch, blocks, release
        if signals is None or len(launches) < 2:
            return [self._launch(some, *how, signals) for some in launches]
        first, *rest, last = launches
        return [
            self._launch(first, *how, replace(signals, rear=Script())),
            *[self._launch(some, *how, None) for some in rest],
            self._launch(last, *how, replace(signals, front=Script())),
        ]

    def _launch(
        self,
        some: tuple[Strip, ...],
        dst_pitch: int,
        src_pitch: int,
        blocks: int,
        release: bool,
        signals: Signals | None,
    ) -> tuple[Any, ...]:
        """The launch that copies some strips of one shape."""
        strip, ends = some[0], Ends()
        for index, one in enumerate(some):
            ends.dst[index], ends.src[index] = one.dst, one.src
        count = min(blocks, -(-strip.units * strip.height // COPY_THREADS))
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        numbers = map(u32, (strip.units, *divisor(strip.units), strip.height, count))
        where = (ends, u64(dst_pitch), u64(src_pitch), u64(strip.width))
        shape, whole = "aligned" if strip.aligned else "shifted", count * len(some)
        if signals is None:
            kernel, rest = self._kernels[f"ficco_copy_{shape}"], (u32(release),)
        else:
            kernel = self._kernels[f"ficco_exchange_{shape}"]
            rest = u32(whole), *_around(signals)
        return kernel, whole, COPY_THREADS, self.binding.pack((*where, *numbers, *rest))

    def reduce(self, out: torch.Tensor, parts: Sequence[torch.Tensor], stream: Any) -> None:
        """``out = parts[0] + parts[1] + ...`` in that order, in float32, rounded once. ``out`` may
        be one of the parts. Rows may lie apart, by the same distance in all parts."""
        check_reduce(out, parts)
        if not out.numel():
            return
        arguments, work = self._sum(out, parts)
        blocks = min(8 * self.binding.processors, -(-work // REDUCE_THREADS))
        kernel = self._kernels[f"ficco_reduce_{_text(parts[0].dtype)}_{_text(out.dtype)}"]
        packed = self.binding.pack(arguments(blocks))
        self.binding.launch(kernel, blocks, REDUCE_THREADS, packed, stream)

    def one_shot(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        signals: Signals,
        stream: Any,
        blocks: int = SPINNING_BLOCKS,
    ) -> None:
        """:meth:`reduce` of parts of the result's dtype that lie at the peers, on few blocks, with
        ``signals`` around it: the stream must wait for nothing that is launched behind it on this
        device."""
        check_reduce(out, parts)
        arguments, work = self._sum(out, parts)
        blocks = max(1, min(blocks, self.most_that_spin, -(-work // ONE_SHOT_THREADS)))
        kernel = self._kernels[f"ficco_one_shot_{_text(out.dtype)}"]
        packed = self.binding.pack((*arguments(blocks), *_around(signals)))
        self.binding.launch(kernel, blocks, ONE_SHOT_THREADS, packed, stream)

    def _sum(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor]
    ) -> tuple[Callable[[int], tuple[Any, ...]], int]:
        """What a kernel that sums is told, by its blocks, and how many threads have work."""
        if len(parts) > MAX_PARTS:
            raise ValueError(f"parts: required 1 to {MAX_PARTS}, got {len(parts)}")
        elements = out.numel()
        addresses = [part.data_ptr() for part in parts]
        each = 16 // out.element_size()
        width = pitch = out_pitch = elements
        if not all(tensor.is_contiguous() for tensor in (out, *parts)):
            width, pitch, out_pitch = out.shape[1], parts[0].stride(0), out.stride(0)
        aligned = not any(address % 16 for address in (out.data_ptr(), *addresses))
        if not width == pitch == out_pitch:  # every row is of whole vectors, or none counts
            aligned = aligned and not (width % each or pitch % each or out_pitch % each)
        vectors = elements // each if aligned else 0
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        where = u64(out.data_ptr()), Parts((u64 * MAX_PARTS)(*addresses)), u32(len(parts))
        sizes = tuple(map(u64, (vectors, elements, width, pitch, out_pitch)))
        return lambda blocks: (*where, u32(blocks), *sizes), max(vectors, elements - vectors * each)

    def script(self, script: Script, stream: Any) -> None:
        """Carry out a script behind everything that the stream did before. Where it waits, one
        block of the device spins, as with :class:`Signals`."""
        packed = self.binding.pack((script.packed,))
        self.binding.launch(self._kernels["ficco_script"], 1, SIGNAL_THREADS, packed, stream)

    def post(self, words: Sequence[tuple[int, int]], stream: Any) -> None:
        """Write 32-bit words, (address, value), behind everything that the stream did before.
        The whole system sees what was written before it sees the words."""
        for first in range(0, len(words), SIGNAL_THREADS):
            some = words[first : first + SIGNAL_THREADS]
            self._signal("ficco_post", some, (), stream)

    def wait(
        self, words: Sequence[tuple[int, int]], seconds: float, late: int, stream: Any
    ) -> None:
        """Let the stream wait until 32-bit words, (address, value), have their values. It goes on
        after ``seconds`` in any case: then the 32-bit word at ``late`` becomes 1 + the index of
        one that is missing.

        A block of the device spins meanwhile: the stream must wait for nothing that is launched
        behind it on this device.
        """
        limit = ctypes.c_uint64(int(seconds * self.binding.ticks_per_s))
        for first in range(0, len(words), SIGNAL_THREADS):
            some = words[first : first + SIGNAL_THREADS]
            rest = (ctypes.c_uint32(1 + first), limit, ctypes.c_uint64(late))
            self._signal("ficco_wait", some, rest, stream)

    def _signal(
        self, name: str, words: Sequence[tuple[int, int]], rest: tuple[Any, ...], stream: Any
    ) -> None:
        found = Words()
        for index, (address, value) in enumerate(words):
            found.at[index], found.value[index] = address, value
        arguments = self.binding.pack((found, ctypes.c_uint32(len(words)), *rest))
        self.binding.launch(self._kernels[name], 1, SIGNAL_THREADS, arguments, stream)


def _around(signals: Signals) -> tuple[Any, ...]:
    """What a kernel is told of signals."""
    return ctypes.c_uint64(signals.arrived), signals.front.packed, signals.rear.packed
