"""A call is checked before anything starts; tests/ranks holds the texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labkit.errors import MachineError, UsageError
from labkit.machine.records import Machine
from labkit.runs import call as call_module
from labkit.runs.call import Call, check_room, checked
from labkit.units import GIB, MIB


def call_of(target: Any, *args: Any, **options: Any) -> Call:
    return checked(target, args, **{"nproc": 2, "device": "cpu", "timeout_s": None, "env": {}, **options})


def train(rank: object, steps: int = 1) -> None:
    """A worker."""


def test_a_function_and_a_script(here: Path) -> None:
    (here / "train.py").write_text("print('hello')\n")
    call = call_of(train, 3)
    assert (call.name, call.function, call.script, call.args) == ("train", train, None, (3,))
    call = call_of("train.py")
    assert (call.name, call.function, call.script) == ("train", None, here / "train.py")


def test_callables_of_all_kinds() -> None:
    class Worker:
        def __call__(self, rank: object) -> None:
            """A worker with a state."""

    assert call_of(Worker()).name == "Worker"
    assert call_of(lambda rank: None).name == "<lambda>"
    assert call_of(print).name == "print"


@pytest.mark.parametrize(
    ("num_gpus", "device", "backend"),
    [(0, "auto", "gloo"), (1, "auto", "gloo"), (2, "auto", "nccl"), (2, "cpu", "gloo")],
)
def test_device(monkeypatch: pytest.MonkeyPatch, num_gpus: int, device: str, backend: str) -> None:
    monkeypatch.setattr(call_module, "count_gpus", lambda env: num_gpus)
    call = call_of(train, device=device)
    assert (call.backend, call.device) == (backend, "cuda" if backend == "nccl" else "cpu")
    assert call.why


@pytest.mark.parametrize(
    "options",
    [
        {"nproc": 0}, {"nproc": 1.5}, {"nproc": True}, {"nproc": "2"}, {"device": "tpu"}, {"timeout_s": 0},
        {"timeout_s": -1}, {"timeout_s": float("nan")}, {"timeout_s": "1"}, {"env": {"A": 1}}, {"env": {1: "A"}},
        {"env": {"": "A"}}, {"env": {"A": "a\0b"}}, {"env": "A=1"},
    ],
)  # fmt: skip
def test_what_cannot_mean_anything(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Try: "):
        call_of(train, **options)


@pytest.mark.parametrize("args", [(1, 2), ()])
def test_arguments_that_do_not_fit(args: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="can't be called as"):
        call_of((lambda rank: None) if args else (lambda: None), *args)


@pytest.mark.parametrize("source", [b"def f(:\n", b"\0", b"\xff\xfe = 1\n", b"  x = 1\n"])
def test_scripts_that_are_not_python(here: Path, source: bytes) -> None:
    (here / "train.py").write_bytes(source)
    with pytest.raises(UsageError, match=r"train\.py is not valid Python: "):
        call_of("train.py")


def test_room(here: Path) -> None:
    machine = Machine("CPU", 2, 8 * GIB, 200 * MIB, 64 * MIB, (), "", "gloo", "no NVIDIA GPU here", "Linux")
    check_room(machine, call_of(train, nproc=1))
    with pytest.raises(MachineError, match=r"2 ranks need 320 MiB of memory to start, but 200 MiB is available\."):
        check_room(machine, call_of(train))
