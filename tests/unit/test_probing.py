"""What this computer is, with an NVML of our own."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from labkit.machine import probing


class NVMLError(Exception):
    pass


class LibraryNotFound(NVMLError):
    pass


class FakeNVML:
    """The part of pynvml that the probe uses.

    Args:
        num_gpus: GPUs here.
        at_init: Raised by nvmlInit.
        at_count: Raised by nvmlDeviceGetCount.
    """

    NVMLError, NVMLError_LibraryNotFound = NVMLError, LibraryNotFound

    def __init__(self, num_gpus: int = 0, at_init: Exception | None = None, at_count: Exception | None = None) -> None:
        self.num_gpus, self.at_init, self.at_count, self.open = num_gpus, at_init, at_count, 0

    def nvmlInit(self) -> None:
        if self.at_init:
            raise self.at_init
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        if self.at_count:
            raise self.at_count
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=150 << 30)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*args: Any, **options: Any) -> FakeNVML:
        fake = FakeNVML(*args, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        return fake

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def test_no_driver(nvml: Any) -> None:
    nvml(at_init=LibraryNotFound())
    machine = probing.look()
    assert (machine.gpus, machine.backend, machine.why) == ((), "gloo", "no NVIDIA driver here")
    assert "cores of" in machine.describe()


def test_a_driver_that_does_not_answer(nvml: Any) -> None:
    nvml(at_init=NVMLError("Insufficient Permissions"))
    assert probing.look().why == "NVML does not answer: Insufficient Permissions"
    fake = nvml(2, at_count=NVMLError("GPU is lost"))
    assert probing.look().why == "NVML does not answer: GPU is lost"
    assert fake.open == 0


def test_gpus(nvml: Any) -> None:
    fake = nvml(2)
    machine = probing.look()
    assert fake.open == 0
    assert [(gpu.index, gpu.name, gpu.compute_capability) for gpu in machine.gpus] == [
        (0, "NVIDIA H200", "9.0"),
        (1, "NVIDIA H200", "9.0"),
    ]
    assert (machine.backend, machine.driver, machine.describe()) == ("nccl", "570.86", "2 × NVIDIA H200")
    assert "cores of" in machine.describe("cpu")
    assert ("GPU 1", "NVIDIA H200, 150 GiB, compute 9.0") in machine.rows()


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("0", 1), ("", 0), ("-1", 0), ("0,1,2,3", 2), ("0,-1,1", 1)])
def test_visible_devices(nvml: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    nvml(2)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert probing.count_gpus() == count
    assert (probing.look().backend == "nccl") == (count == 2)
    assert probing.count_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == 1


def test_this_machine(nvml: Any) -> None:
    nvml()
    machine = probing.look()
    assert machine.num_cores >= 1
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine._repr_html_().startswith("<table><tr><th>CPU</th>")
    assert repr(machine).startswith("CPU      ")
