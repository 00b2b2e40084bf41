"""A call of `launch`, checked before anything starts: what to run, on what, and whether there is room."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import MachineError, UsageError
from labkit.machine.probing import choose_backend, count_gpus
from labkit.machine.records import Machine
from labkit.runs.run import runs_home
from labkit.units import MIB, bytes_text

DEFAULT_TIMEOUT_S = 600.0
ROOM_ON_DISK_BYTES = 16 * MIB
RANK_MEMORY_BYTES = 160 * MIB  # what importing torch costs a rank that shares nothing
SHM_BYTES = 32 * MIB  # what NCCL may want of /dev/shm for a rank


@dataclass(frozen=True)
class Call:
    """A checked call of `launch`; nothing has started yet.

    Attributes:
        name: Of the function or script.
        function: The function, None for a script.
        script: The script's path, None for a function.
        args: Further arguments of either.
        nproc: Number of ranks.
        device: "cpu" or "cuda".
        backend: "gloo" or "nccl".
        why: Why this device and backend.
        env: Variables for the ranks beside those of this process.
        timeout_s: Time limit in seconds; None for no limit.
    """

    name: str
    function: Callable[..., Any] | None
    script: Path | None
    args: tuple[Any, ...]
    nproc: int
    device: str
    backend: str
    why: str
    env: Mapping[str, str]
    timeout_s: float | None


def checked(
    target: Callable[..., Any] | str | Path,
    args: tuple[Any, ...],
    *,
    nproc: int,
    device: str,
    timeout_s: float | None,
    env: Mapping[str, str],
) -> Call:
    """Refuse every call that can't mean anything, before any process starts.

    Raises:
        UsageError: Says which argument, and what it may be.
    """
    script = None if callable(target) else _script(target)
    name = script.stem if script else getattr(target, "__name__", type(target).__name__)
    if callable(target):
        _check_signature(name, target, args)
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise UsageError(f"nproc is {nproc!r}, but must be a whole number of ranks, 1 or more.", try_="nproc=2")
    if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and timeout_s > 0):
        raise UsageError(
            f"timeout_s is {timeout_s!r}, but must be a number above 0, or None for no limit.",
            try_="timeout_s=60",
        )
    _check_env(env)
    backend, why = _choose_device(device, nproc, {**os.environ, **env})
    return Call(
        name=name,
        function=target if callable(target) else None,
        script=script,
        args=args,
        nproc=nproc,
        device="cuda" if backend == "nccl" else "cpu",
        backend=backend,
        why=why,
        env=env,
        timeout_s=timeout_s,
    )


def _check_signature(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse arguments that the function can't take: a rank, then those of the launch."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind("rank", *args)
    except TypeError as error:
        call = ", ".join(["rank", *(f"{arg!r:.40}" for arg in args)])
        wanted = [name, *list(signature.parameters)[1:], "nproc=2"]
        raise UsageError(
            f"{name}{signature} can't be called as {name}({call}): {error}.",
            found="Each rank calls it with its Rank first, then with what launch was given.",
            try_=f"lab.launch({', '.join(wanted)})",
        ) from None


def _check_env(env: object) -> None:
    """Refuse an environment that no process can have."""
    if not isinstance(env, Mapping):
        raise UsageError(f"env is a {type(env).__name__}, but must be a dict.", try_='env={"NCCL_DEBUG": "INFO"}')
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise UsageError(
                f"env has the name {name!r}, which can't be a variable.", try_='env={"NCCL_DEBUG": "INFO"}'
            )
        if not isinstance(value, str) or "\0" in value:
            raise UsageError(
                f"env[{name!r}] is {value!r}, but a variable holds text.", try_=f'env={{"{name}": "{value}"}}'
            )


def _script(target: object) -> Path:
    """The path of a script that is there and can be compiled."""
    if not isinstance(target, (str, Path)):
        raise UsageError(
            f"launch takes a function or the path of a script, not {target!r:.60}.",
            found="Was the function called? Give it by its name alone, without ().",
            try_="lab.launch(train, nproc=2)",
        )
    path = Path(target)
    if not path.is_file():
        home = path if path.is_dir() else path.parent
        beside = sorted(other.name for other in home.glob("*.py")) if home.is_dir() else []
        what = f"{str(target)!r} is a folder, not a script." if home == path else f"There is no script {str(target)!r}"
        raise UsageError(
            what if home == path else f"{what} in {Path.cwd()}.",
            found=f"Python files there: {', '.join(beside[:8])}." if beside else "There are no Python files there.",
            try_=f'lab.launch("{home / beside[0]}", nproc=2)' if beside else "%%writefile train.py",
        )
    _check_syntax(path, str(target))
    return path.absolute()


def _check_syntax(path: Path, shown: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will show them
            ast.parse(path.read_bytes(), shown)
    except (SyntaxError, ValueError) as error:  # ValueError: not a text
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        code = (error.text or "").rstrip() if isinstance(error, SyntaxError) else ""
        raise UsageError(
            f"{shown} is not valid Python: {getattr(error, 'msg', error)}{line}.",
            found=f"    {code}" if code else "",
            try_=f"python {shown}",
        ) from None


def _choose_device(device: str, nproc: int, env: Mapping[str, str]) -> tuple[str, str]:
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is {device!r}; it can be 'auto', 'cpu' or 'cuda'.", try_='device="auto"')
    if device == "cpu":
        return "gloo", 'device="cpu" was asked for'
    num_gpus = count_gpus(env)
    if device == "cuda" and num_gpus < nproc:
        raise UsageError(
            f'nproc={nproc} ranks with device="cuda" need {nproc} GPUs, but this machine has {num_gpus}.',
            found="NCCL refuses two ranks on one GPU.",
            try_='device="auto"   (gloo on the CPU)' if not num_gpus else f"nproc={num_gpus}",
        )
    return choose_backend(num_gpus, nproc=nproc)


def check_room(machine: Machine, call: Call) -> None:
    """Refuse a launch that this machine has no room for, and say which room.

    Raises:
        MachineError: Disk, memory or shared memory is too small.
    """
    home = _existing(runs_home())
    free_bytes = shutil.disk_usage(home).free
    if free_bytes < ROOM_ON_DISK_BYTES:
        raise MachineError(
            f"The disk of {home} is full: {bytes_text(free_bytes)} free, "
            f"a run folder wants {bytes_text(ROOM_ON_DISK_BYTES)}.",
            try_="rm -r runs/*   (old runs), or export LABKIT_RUNS=/a/roomier/place",
        )
    need_bytes = call.nproc * RANK_MEMORY_BYTES
    if machine.available_bytes < need_bytes:
        raise MachineError(
            f"{call.nproc} ranks need {bytes_text(need_bytes)} of memory to start, "
            f"but {bytes_text(machine.available_bytes)} is available.",
            try_=f"nproc={max(1, machine.available_bytes // RANK_MEMORY_BYTES)}, or end other programs",
        )
    if call.backend == "nccl" and call.nproc > 1 and machine.shm_bytes < SHM_BYTES * call.nproc:
        raise MachineError(
            f"/dev/shm has {bytes_text(machine.shm_bytes)} free, "
            f"NCCL may want {bytes_text(SHM_BYTES)} for each of {call.nproc} ranks.",
            found="Containers get 64 MiB unless told otherwise.",
            try_="docker run --shm-size=1g …, or rm what fills /dev/shm",
        )


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
