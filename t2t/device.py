"""What we run on. The only file that asks."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from t2t.errors import InputError


def resolve(name: str = "auto", rank: int | None = None) -> torch.device:
    """The device of that name; ``auto`` is the accelerator if there is one, else the CPU.

    Of several processes on a machine, process ``rank`` takes the accelerator of that number where the name has none.

    >>> resolve("cpu")
    device(type='cpu')
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        name = found.type if found is not None else "cpu"
    numbered = rank is not None and found is not None and name == found.type
    if numbered:
        name = f"{name}:{rank}"
    counts = {"cpu": 1} if found is None else {"cpu": 1, found.type: torch.accelerator.device_count()}
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or (device.index or 0) >= counts.get(device.type, 0):
        here = ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in counts.items())
        raise InputError(f"run.device: {name!r} is not here; found: {here}")
    if numbered:
        torch.accelerator.set_device_index(device)
    return device


def backend() -> str:
    """What ranks talk through: gloo, and for tensors on the accelerator what belongs to it (nccl for CUDA).

    >>> backend().startswith(("gloo", "cpu:gloo,"))
    True
    """
    if not torch.accelerator.is_available():
        return "gloo"
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found.type)}"


def use_threads(count: int, processes: int = 1) -> int:
    """Use so many CPU threads; 0: one a core, the cores shared by so many processes. Gives back the number.

    >>> use_threads(1)
    1
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(count or max(1, affinity // processes))
    return torch.get_num_threads()


def keep_memory(device: torch.device) -> None:
    """On a CPU under glibc, let the process keep the memory that it frees; do nothing elsewhere.

    glibc hands large blocks back at once, and each new one faults in page by page; a training step on a CPU makes and
    drops hundreds of megabytes.
    """
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        arena_max, mmap_max, trim_threshold = -8, -4, -1  # from malloc.h
        for parameter, value in ((arena_max, 1), (mmap_max, 0), (trim_threshold, 2**31 - 1)):
            mallopt(parameter, value)


def workers(device: torch.device) -> int:
    """How many micro-batches are best computed at once: one a core on a CPU, else one.

    >>> use_threads(1), workers(torch.device("cpu"))
    (1, 1)
    """
    return torch.get_num_threads() if device.type == "cpu" else 1


def micro_slots(device: torch.device) -> int:
    """How many slots a micro-batch should have when train.micro_rows is "auto".

    >>> micro_slots(torch.device("cpu"))
    16384
    """
    return 16384 if device.type == "cpu" else 131072


def static_shapes(device: torch.device) -> bool:
    """Whether every micro-batch must have one shape; an eager CPU takes one row without padding instead.

    >>> static_shapes(torch.device("cpu"))
    False
    """
    return device.type != "cpu"


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; ``auto`` is mixed (bf16, fp32 masters) on an accelerator.

    >>> compute_dtype("auto", torch.device("cpu"))
    torch.float32
    """
    mixed = precision == "mixed" or (precision == "auto" and device.type != "cpu")
    return torch.bfloat16 if mixed else torch.float32


def use_torch_ort(model: torch.nn.Module) -> None:
    """Let ONNX Runtime compute the forward pass, where the package torch-ort is installed.

    >>> use_torch_ort(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    t2t.errors.InputError: train.torch_ort: the package torch-ort is not installed; torch.compile is its successor
    """
    try:
        from torch_ort import ORTModule
    except ImportError:
        raise InputError(
            "train.torch_ort: the package torch-ort is not installed; torch.compile is its successor"
        ) from None

    class Forward(torch.nn.Module):
        """The forward pass as the model's class has it: the model's own is to call ONNX Runtime."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return type(model).forward(model, *inputs)

    model.forward = ORTModule(Forward()).forward


def peak_memory(device: torch.device) -> int:
    """Most bytes used so far: of the process on a CPU, of tensors on an accelerator.

    >>> peak_memory(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cpu":
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return used if sys.platform == "darwin" else used * 1024
    return torch.accelerator.max_memory_allocated() if device.type == "cuda" else 0


def total_memory(device: torch.device) -> int:
    """Bytes of memory that the device has; 0 where it does not tell.

    >>> total_memory(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if device.type == "cpu" else 0


def describe(device: torch.device) -> str:
    """The device in words.

    >>> "threads" in describe(torch.device("cpu"))
    True
    """
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device.type})"
    return f"{device.type}, {_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
