"""Look at this computer without touching CUDA: NVML for the GPUs, psutil for the rest."""

from __future__ import annotations

import os
import platform
import re
import shutil
import warnings
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

import psutil

from labkit.machine.records import GPU, Machine


def look() -> Machine:
    """This computer, now. Never initialises CUDA.

    Shell: lscpu; free -b; df -B1 /dev/shm; nvidia-smi --query-gpu=index,name,memory.total,compute_cap
    --format=csv
    """
    gpus, driver, trouble = _gpus()
    memory = psutil.virtual_memory()
    limit_bytes, used_bytes = _container_memory()
    backend, why = choose_backend(_count_visible(len(gpus), os.environ), nproc=2, trouble=trouble)
    return Machine(
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=min(memory.total, limit_bytes),
        available_bytes=min(memory.available, max(0, limit_bytes - used_bytes)),
        shm_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0,
        gpus=gpus,
        driver=driver,
        backend=backend,
        why=why,
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    )


def choose_backend(num_gpus: int, *, nproc: int, trouble: str = "") -> tuple[str, str]:
    """NCCL when every rank can have a GPU of its own, else gloo on the CPU; and the reason.

    Args:
        num_gpus: GPUs that this process may use.
        nproc: Ranks wanted.
        trouble: Why no GPU was found, if something stood in the way.

    >>> choose_backend(1, nproc=2)
    ('gloo', '2 ranks but 1 GPU, and NCCL wants a GPU of its own for each rank')
    """
    if num_gpus >= nproc:
        return "nccl", f"every one of {nproc} rank{'s' if nproc > 1 else ''} has a GPU of its own"
    if num_gpus:
        plural = "s" if num_gpus > 1 else ""
        return (
            "gloo",
            f"{nproc} ranks but {num_gpus} GPU{plural}, and NCCL wants a GPU of its own for each rank",
        )
    return "gloo", trouble or "no NVIDIA GPU here"


def count_gpus(env: Mapping[str, str] = os.environ) -> int:
    """GPUs that a launch with this environment may use.

    Args:
        env: Where CUDA_VISIBLE_DEVICES may leave only some of those that NVML shows.
    """
    return _count_visible(len(_gpus()[0]), env)


def _count_visible(num_gpus: int, env: Mapping[str, str]) -> int:
    """Of all GPUs, those that CUDA_VISIBLE_DEVICES leaves; CUDA stops reading at the first entry that names none."""
    if "CUDA_VISIBLE_DEVICES" not in env:
        return num_gpus
    entries = [entry.strip() for entry in env["CUDA_VISIBLE_DEVICES"].split(",")]
    return min(num_gpus, len(list(takewhile(lambda entry: entry not in ("", "-1", "NoDevFiles"), entries))))


def _gpus() -> tuple[tuple[GPU, ...], str, str]:
    """All GPUs, the driver's version, and what stood in the way where there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a machine with the old pynvml package beside it warns on import
        import pynvml
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = isinstance(error, pynvml.NVMLError_LibraryNotFound)
        return (), "", "no NVIDIA driver here" if missing else f"NVML does not answer: {error}"
    try:
        count = pynvml.nvmlDeviceGetCount()
        return (
            tuple(_gpu(pynvml, index) for index in range(count)),
            str(pynvml.nvmlSystemGetDriverVersion()),
            "",
        )
    except pynvml.NVMLError as error:
        return (), "", f"NVML does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: object, index: int) -> GPU:
    nvml: object = pynvml
    handle = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)  # type: ignore[attr-defined]
    return GPU(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),  # type: ignore[attr-defined]
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),  # type: ignore[attr-defined]
        compute_capability=f"{major}.{minor}",
    )


def _cpu_name() -> str:
    """The processor's name as its maker spells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _container_memory() -> tuple[int, int]:
    """Limit and use of this container's memory in bytes (cgroup v2); no limit reads as a very large one.

    Files that Linux keeps in memory and can drop (inactive_file) don't count as used.
    """
    home = Path("/sys/fs/cgroup")
    if not (home / "memory.current").exists() or (limit := (home / "memory.max").read_text().strip()) == "max":
        return 1 << 62, 0
    droppable = re.search(r"^inactive_file (\d+)", (home / "memory.stat").read_text(), re.MULTILINE)
    return int(limit), int((home / "memory.current").read_text()) - (int(droppable[1]) if droppable else 0)
