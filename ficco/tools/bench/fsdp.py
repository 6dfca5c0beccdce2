"""Workload: forward and backward of a stack of blocks under FSDP2, by PyTorch's collectives and by
copy engines (:func:`ficco.fsdp.use`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import ficco
from ficco import fsdp
from ficco.tools.bench.frames import LAYERS
from ficco.tools.bench.harness import Subject, Workload
from ficco.tools.bench.layers import SHOWN, Layer, LayerData, heads
from ficco.tools.bench.measure import Stopwatch

#: Blocks of a stack.
BLOCKS = 6

#: Llama 3 8B. Columns: of queries, and 8 heads of keys and of values; inner: of the gated layer.
SHAPES = {
    "cuda": tuple(Layer(f"llama-8b-{n}", n, 4096, 4096 + 2048, 14336) for n in (2048, 8192)),
    "cpu": (Layer("small", 32, 64, 64 + 32, 96, "float32"),),
}


class LlamaBlock(nn.Module):
    """Attention and a gated layer, each after a norm; without positions."""

    def __init__(self, case: Layer) -> None:
        super().__init__()
        width, inner = case.hidden, case.inner
        self.widths = [width, *[(case.columns - width) // 2] * 2]
        self.head = min(128, self.widths[1])
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.qkv = nn.Linear(width, case.columns, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.up, self.gate = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        parts = self.qkv(self.norms[0](x)).split(self.widths, -1)
        q, k, v = (one.unflatten(2, (-1, self.head)).transpose(1, 2) for one in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        z = self.norms[1](x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class StackWay(NamedTuple):
    """How collectives travel: the change of a model after ``fully_shard``. Other fields are those
    of :class:`ficco.tools.bench.layers.LayerWay`."""

    prepare: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    calls: tuple[str, ...] = ()
    kept_bytes: Callable[[ProcessGroup], int] = ficco.memory
    schedule: str = ""
    lacks: str = ""


def registered(model: Any) -> None:
    """Let PyTorch take the buffers of FSDP2 from NCCL. Raises as :func:`symmetric`."""
    method = "set_allocate_memory_from_process_group_for_comm"
    require_nccl(model, method)
    device = next(model.parameters()).device
    if not dist.group.WORLD._get_backend(device).supports_tensor_alloc(device):
        raise NotImplementedError(f"FSDPModule.{method}: NCCL allocates no memory on this device")
    for module in (model, *model):
        getattr(module, method)(True)


def symmetric(model: Any) -> None:
    """Let PyTorch gather in NCCL's symmetric memory.

    Raises:
        NotImplementedError: PyTorch lacks the method, the group is not NCCL's, or the symmetric
            memory of the process has another backend.
    """
    require_nccl(model, "set_symm_mem_for_comm")
    try:
        for module in (model, *model):
            module.set_symm_mem_for_comm()
    except RuntimeError as error:
        raise NotImplementedError(f"FSDPModule.set_symm_mem_for_comm: {error}") from error


def require_nccl(model: Any, method: str) -> None:
    """Raise ``NotImplementedError`` unless ``FSDPModule`` has a method, and the group is NCCL's."""
    if not hasattr(model, method):
        raise NotImplementedError(f"PyTorch {torch.__version__} has no FSDPModule.{method}")
    if (backend := dist.get_backend()) != "nccl":
        raise NotImplementedError(f"FSDPModule.{method}: required NCCL, got {backend}")


_HOOKS = hasattr(FSDPModule, "set_custom_all_gather")
_LACKS = "" if _HOOKS else f"PyTorch {torch.__version__} has no hooks for FSDP2's collectives"
#: The first is the reference of the others. PyTorch's symmetric memory comes before ficco's: after
#: its first use it keeps its backend, and ficco then shares memory by handles.
WAYS = {
    "pytorch-serial": StackWay(lambda model: None),
    "pytorch-registered": StackWay(registered),
    "pytorch-symmetric": StackWay(symmetric),
    "gathers": StackWay(partial(fsdp.use, reduce_scatter=False), lacks=_LACKS),
    "gathers and sums": StackWay(fsdp.use, lacks=_LACKS),
}


def stack(case: Layer, device: torch.device, blocks: int = BLOCKS) -> Any:
    """Blocks with the same weights in every call, sharded over all ranks: weights travel in the
    case's dtype, and gradients are summed in float32."""
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*(LlamaBlock(case) for _ in range(blocks)))
    dtype = getattr(torch, case.dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


class StackData(LayerData):
    """A stack on one rank, for each of :data:`WAYS`."""

    def __init__(self, case: Layer, watch: Stopwatch, schedules: Sequence[Any] = ()) -> None:
        Workload.__init__(self, case, watch, schedules)
        shape, dtype = (1, case.tokens, case.hidden), getattr(torch, case.dtype)
        self.x = torch.empty(shape, dtype=dtype, device=self.device)
        self.offered = dict(WAYS)

    def fill(self, seed: int, exact: bool = False) -> None:
        """Normal data of unit variance, other data on every rank."""
        self.x.normal_(generator=self.generator(seed))

    def run(self, forward: Any) -> torch.Tensor:
        """A step of a model; its loss."""
        forward.zero_grad()
        loss: torch.Tensor = forward(self.x).float().square().mean()
        loss.backward()
        return loss.detach()

    def results(self, forward: Any) -> tuple[torch.Tensor, ...]:
        """The loss of a step and this rank's gradients."""
        loss = self.run(forward)
        return loss, *(weight.grad.to_local().clone() for weight in forward.parameters())

    def forward_of(self, variant: Any) -> Any:
        model = stack(self.case, self.device)
        variant.prepare(model)
        return model


HOW = (
    f"A step is forward and backward of {BLOCKS} blocks of a Llama model under FSDP2 (hidden "
    "width, columns of queries, keys and values, columns of the gated layer). All ways run in "
    "shuffled order in every round; a round's time is that of its slowest rank, ratios are medians "
    "over the rounds. pytorch-serial: PyTorch's collectives; pytorch-registered: in memory that "
    "NCCL allocates (since PyTorch 2.9); pytorch-symmetric: gathers in NCCL's symmetric memory "
    "(since 2.13), by copy engines if NCCL_CTA_POLICY is 2. Before it is timed every way must "
    "agree with PyTorch's in loss and gradients, within what rounding explains."
)

SUBJECT = Subject("fsdp", LAYERS, StackData, heads, HOW, how="", shown=SHOWN, gradients=True)
