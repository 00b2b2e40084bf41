"""What this computer is, as plain records."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from labkit.units import bytes_text


@dataclass(frozen=True)
class GPU:
    """One GPU as the driver sees it.

    Attributes:
        index: As in nvidia-smi.
        name: Product name.
        memory_bytes: Total memory.
        compute_capability: Major and minor, for instance "8.9".
    """

    index: int
    name: str
    memory_bytes: int
    compute_capability: str


@dataclass(frozen=True)
class Machine:
    """A computer: what a launch can use, and why.

    Attributes:
        cpu: Processor's name.
        num_cores: Cores this process may use.
        memory_bytes: RAM, or the container's limit where it is lower.
        available_bytes: RAM that a launch could still take.
        shm_bytes: Free room in /dev/shm, where NCCL and data loaders put shared memory.
        gpus: All NVIDIA GPUs.
        driver: NVIDIA driver's version, empty without one.
        backend: "nccl" or "gloo": what `lab.launch` takes for two ranks with device="auto".
        why: The reason, in words.
        system: Operating system and Python.
    """

    cpu: str
    num_cores: int
    memory_bytes: int
    available_bytes: int
    shm_bytes: int
    gpus: tuple[GPU, ...]
    driver: str
    backend: str
    why: str
    system: str

    def describe(self, device: str = "cuda") -> str:
        """A few words for a badge: the GPUs, or the CPU where there are none or `device` is "cpu"."""
        names = {gpu.name for gpu in self.gpus}
        if names and device == "cuda":
            return f"{len(self.gpus)} × {', '.join(sorted(names))}"
        return f"{self.num_cores} cores of {self.cpu}"

    def rows(self) -> list[tuple[str, str]]:
        """The record as label and text."""
        gpus = [
            (
                f"GPU {gpu.index}",
                f"{gpu.name}, {bytes_text(gpu.memory_bytes)}, compute {gpu.compute_capability}",
            )
            for gpu in self.gpus
        ]
        return [
            ("CPU", f"{self.cpu}, {self.num_cores} cores"),
            ("RAM", f"{bytes_text(self.memory_bytes)}, {bytes_text(self.available_bytes)} available"),
            ("/dev/shm", f"{bytes_text(self.shm_bytes)} free"),
            *gpus,
            ("backend", f"{self.backend}: {self.why}"),
            ("system", self.system),
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{label:8} {text}" for label, text in self.rows())

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in self.rows())
        return f"<table>{rows}</table>"
