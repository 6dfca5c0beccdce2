"""The report of ``ficco doctor``: versions, devices, links, engines, and what ficco does with them.

Each part is collected on its own, and an error is reported in its place: this must still run on a
machine with a problem. Only :func:`after_a_call` needs a process group, and nothing needs a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.accelerator import gpu
from ficco.dma import ENGINES, engine_name, make_engine
from ficco.dma.engine import fingerprint
from ficco.dma.patience import limit_of
from ficco.errors import BackendError, FiccoError
from ficco.heuristics import decide, where
from ficco.hip_kernels.build import can_compile
from ficco.machine.files import cache_dir
from ficco.options import current
from ficco.problems.products import Problem
from ficco.runtime.workspace import workspace_of
from ficco.version import version

#: Seconds that a vendor's tool may take.
TOOL_S = 10.0

#: Device file and kernel module of AMD's driver, and the file with the version of ROCm.
KFD, AMDGPU = Path("/dev/kfd"), Path("/sys/module/amdgpu")
ROCM = Path("/opt/rocm/.info/version")

#: Prefixes of the variables that change what ficco, PyTorch or a vendor's runtime do.
VARIABLES = (
    *("FICCO_", "CUDA_", "HIP_", "HSA_", "ROCR_", "ROCM_", "ROCBLAS_", "HIPBLASLT_", "CUBLAS_"),
    *("GPU_", "AMD_", "NVIDIA_", "NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "GLOO_", "OMP_", "MKL_"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD"),
)


#: Parts of a report that may be missing, and their titles.
MORE = {"obstacle": "In the way of AMD GPUs", "extra": "The extra bench", "call": "A call"}

#: Capabilities of engines, in words.
LABELS = {
    "capture": "CUDA graphs",
    "partial_signals": "signals for rows of a product",
    "tiles": "products whose tiles wait",
    "scaled": "float8 products",
    "functions": "functions in a call",
    "network": "between hosts",
}


def report(ranks: int | None = None, device: str | None = None) -> dict[str, Any]:
    """The whole report, in types that JSON can hold.

    Args:
        ranks: the number of ranks to report schedules for; None for one per GPU, four on CPUs.
        device: their device, ``"cpu"`` or ``"cuda"``; None for GPUs if there are any.
    """
    return {
        "versions": _tried(versions),
        "devices": _tried(devices),
        "links": _tried(links),
        "engines": engines(),
        "use": _tried(partial(use, ranks, device)),
        "obstacle": _tried(obstacle, lambda error: ""),  # the engine's part has the error
    }


def _tried(
    ask: Callable[[], Any],
    said: Callable[[Exception], str] = lambda e: f"cannot be told: {type(e).__name__}: {e}",
) -> Any:
    try:
        return ask()
    except Exception as error:  # whatever a half-installed driver may raise
        return said(error)


def versions() -> dict[str, str]:
    """Versions of software, driver and kernel; empty for those that are not installed."""
    return {
        "ficco": package("ficco") or f"{version()} (source)",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "nccl": _tried(_nccl),
        "driver": _tried(driver),
        "rocm": ROCM.read_text().strip() if ROCM.exists() else "",
        "cuda-bindings": package("cuda-bindings"),
        "hip-python": package("hip-python"),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }


def obstacle() -> str:
    """Why the AMD GPUs of this host cannot be used, with the remedy; empty if nothing is in the way
    or there are none."""
    if not torch.version.hip:
        if gpu.is_available() or not (KFD.exists() or AMDGPU.exists()):
            return ""
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        return (
            f"this PyTorch, {torch.__version__}, is built for {build} and cannot use the AMD GPUs "
            "of this host; install PyTorch for ROCm (pytorch.org), then ficco again"
        )
    if not KFD.exists():
        return (
            f"{KFD} does not exist; start a container with --device /dev/kfd --device /dev/dri, or "
            "load the driver on the host: modprobe amdgpu"
        )
    if not os.access(KFD, os.R_OK | os.W_OK):
        return (
            f"{KFD} cannot be opened by this user; add the user to the groups render and video, or "
            "start a container with --group-add render --group-add video"
        )
    return _why_no_hip() or _unreachable()


def _unreachable() -> str:
    """Why GPUs cannot access each other's memory; empty if all can."""
    from ficco.dma import hip_api

    pairs = permutations(range(hip_api.start()), 2)
    if not (apart := [pair for pair in pairs if not hip_api.reachable(*pair)]):
        return ""
    return (
        f"GPU {apart[0][0]} cannot access the memory of GPU {apart[0][1]} (hipDeviceCanAccessPeer, "
        f"{len(apart)} such pairs); turn ACS and the IOMMU's translation off (iommu=pt), leave "
        "GPUs unpartitioned, or name linked ones in HIP_VISIBLE_DEVICES"
    )


def package(name: str) -> str:
    """Version of an installed distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nccl() -> str:
    if not gpu.is_available() or not dist.is_nccl_available():
        return ""
    return ".".join(map(str, gpu.nccl.version()))


def driver() -> str:
    """Version of the GPU driver; empty if there is none."""
    nvidia, amd = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")
    text = nvidia.read_text() if nvidia.exists() else ""
    if number := re.search(r"(?<!\S)\d+(\.\d+)+(?!\S)", text):
        return number[0]
    return amd.read_text().strip() if amd.exists() else ""


def devices() -> list[dict[str, Any]]:
    here = [{"name": cpu_name(), "cores": len(os.sched_getaffinity(0)), "kind": "cpu"}]
    for index in range(_gpus()):
        one = gpu.get_device_properties(index)
        device = {"name": one.name, "cores": one.multi_processor_count, "kind": f"cuda:{index}"}
        architecture = getattr(one, "gcnArchName", f"sm_{one.major}{one.minor}")
        here.append(device | {"memory_bytes": one.total_memory, "architecture": architecture})
    return here


def _gpus() -> int:
    return gpu.device_count() if gpu.is_available() else 0


def cpu_name() -> str:
    with suppress(OSError):
        if name := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M):
            return name[1].strip()
    return platform.processor() or platform.machine()


def links() -> dict[str, Any]:
    """Access of GPUs to each other's memory, and their links."""
    if (count := _gpus()) < 2:
        return {"peer access": [], "topology": "fewer than two GPUs"}
    access = [
        [i == j or gpu.can_device_access_peer(i, j) for j in range(count)] for i in range(count)
    ]
    tool = ["nvidia-smi", "topo", "-m"]
    if torch.version.hip:
        tool = ["amd-smi", "topology"] if shutil.which("amd-smi") else ["rocm-smi", "--showtopo"]
    how: Any = {"text": True, "stderr": subprocess.DEVNULL, "timeout": TOOL_S}
    said = _tried(partial(subprocess.check_output, tool, **how))
    return {"peer access": access, "topology": said.strip()}


def engines() -> dict[str, Any]:
    """Capabilities of each engine, or the reason why it cannot be used."""
    return {
        name: _tried(partial(capabilities, name), lambda error: f"cannot be used here: {error}")
        for name in ENGINES
    }


def capabilities(name: str) -> dict[str, Any]:
    """Capabilities of an engine, which is made for a group of this process only."""
    if name == "cpu":
        device = torch.device("cpu")
    elif not gpu.is_available():
        more = _why_no_hip() if name == "hip" else ""
        raise RuntimeError("no GPU that this torch can use" + (more and f"; {more}"))
    elif bool(torch.version.hip) != (name == "hip"):
        raise RuntimeError(f"this torch is built for {'hip' if torch.version.hip else 'cuda'}")
    else:
        device = torch.device("cuda", gpu.current_device())
    with _own_group(device):
        options, group = current(), dist.group.WORLD
        limit = options.timeout_s or limit_of(group, device)
        engine = make_engine(name, group, device, options.signals, limit)
        try:
            return asdict(engine.capabilities())
        finally:
            engine.close()


def _why_no_hip() -> str:
    """Why the HIP library cannot be used here; empty if it can."""
    try:
        from ficco.dma.hip_api import start

        start()
    except ImportError as error:  # hip-python would not help a PyTorch for other GPUs
        return str(error) if torch.version.hip else "this torch is built without ROCm"
    except BackendError as error:
        return str(error)
    return ""


def environment() -> dict[str, str]:
    """The environment variables that can change results or measurements."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)}


def after_a_call(device: str) -> tuple[str, dict[str, Any]]:
    """The name and capabilities of these ranks' engine after a call. Collective.

    Raises:
        FiccoError: the call's result is wrong.
    """
    a = torch.ones(dist.get_world_size() * 16, 16, device=device)
    product = ficco.all_gather_matmul(a, a.new_ones(16, 16))
    ficco.synchronize()
    if not bool((product == 16).all()):
        raise FiccoError(
            "all_gather_matmul of ones: required 16 everywhere, got "
            f"{product.unique().tolist()}; `ficco doctor --selftest` finds what is wrong"
        )
    engine = workspace_of(dist.group.WORLD, a.device).engine
    return engine.name, asdict(engine.capabilities())


@contextmanager
def _own_group(device: torch.device) -> Iterator[None]:
    """A default process group of this process only, unless there is one already."""
    if dist.is_initialized():
        yield
        return
    on_gpu = device.type == "cuda"
    options: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    options["device_id"] = device if on_gpu else None
    dist.init_process_group("nccl" if on_gpu else "gloo", **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def use(ranks: int | None = None, device: str | None = None) -> dict[str, str]:
    """The engine of each kind of tensor, the schedules of ranks, and the reasons."""
    wanted = current().engine
    why = f"options(engine={wanted!r})" if wanted else "the tensors' device decides"
    if gpu.is_available():
        build = "ROCm" if torch.version.hip else "CUDA"
        name = engine_name(torch.device("cuda"), wanted)
        on_cuda = f"{name}: {why}, and this torch is built for {build}"
    elif torch.backends.cuda.is_built():
        on_cuda = (
            "none: torch sees no GPU; is the driver loaded, and CUDA_VISIBLE_DEVICES not empty?"
        )
    else:
        on_cuda = "none: this torch is built for CPUs only"
    return {
        "tensors on cpu": f"{engine_name(torch.device('cpu'), wanted)}: {why}",
        "tensors on cuda": on_cuda,
        "schedule='auto'": _auto(ranks, device),
        "kernels": _kernels(),
    }


def _kernels() -> str:
    """Where the kernels of GPUs are from."""
    if not gpu.is_available():
        return "none: they are for GPUs"
    if can_compile("hip" if torch.version.hip else "cuda"):
        return f"compiled at first use, into {cache_dir()}"
    return "PyTorch's operations instead: no compiler is installed (nvrtc, nvcc, or ROCm's clang)"


def _auto(ranks: int | None, device: str | None) -> str:
    """How ``auto`` decides for these ranks, or the schedule that they take for every problem."""
    gpus = 0 if device == "cpu" else _gpus()
    ranks = ranks or gpus or 4
    here = fingerprint("cuda" if gpus else "cpu", ranks)
    place = where(None, ranks, here)
    sizes = (1024,) * ranks, 1024, 1024, "bfloat16"
    decision = decide(Problem("all_gather_matmul", *sizes), machine=place.machine, mode=place.mode)
    whose = f"for {ranks} rank{'s' * (ranks > 1)} on {here.accelerator}"
    if decision.source == "fallback" or ranks == 1:
        return f"{whose}: {decision.schedule}, since {decision.reason}"
    assert place.machine is not None  # else the source is the fallback
    return (
        f"{whose}: by the figures of {place.machine.name} ({place.machine.source}); `ficco "
        "explain` says what it takes for a problem and why"
    )


def show(report: dict[str, Any]) -> None:
    width = shutil.get_terminal_size((110, 24)).columns
    devices = report["devices"]
    if isinstance(devices, list):
        devices = {one["kind"]: _device(one) for one in devices}
    parts = {"Versions": report["versions"], "Devices": devices, "Links": report["links"]}
    parts |= {f"Engine {name}": value for name, value in report["engines"].items()}
    parts["What would be used"] = report["use"]
    parts |= {title: report[key] for key, title in MORE.items() if report.get(key)}
    for title, values in parts.items():
        values = values if isinstance(values, dict) else {"": values}
        values = {LABELS.get(name, name): value for name, value in values.items()}
        blank = " " * (4 + max((len(str(name)) for name in values), default=0))
        print(f"\n{title}")
        for name, value in values.items():
            start = f"  {name}".ljust(len(blank))
            for line in _text(value).splitlines():
                print(textwrap.fill(line, width, initial_indent=start, subsequent_indent=blank))
                start = blank


def _device(one: dict[str, Any]) -> list[str]:
    memory = [f"{one['memory_bytes'] / 2**30:.0f} GiB"] if "memory_bytes" in one else []
    more = [one["architecture"]] if one.get("architecture") else []
    return [str(one["name"]), f"{one['cores']} cores", *memory, *more]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], list):
            return "\n".join(" ".join("yes" if x else "no" for x in row) for row in value)
        return ", ".join(map(str, value)) or "none"
    return str(value) if value else "-"
