"""What every rank runs: unpack the task, run it, and write down what came of it.

`python -m labkit.runs.worker FOLDER` under torchrun (cold), or `main(FOLDER)` in a forked process (warm). The
two are the same from here on. This module imports no other room, so that it can be read as a whole: it is all
that stands between torchrun and the learner's function.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import re
import runpy
import signal
import sys
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.runs.prctl import die_with_parent

FOLDER_VARIABLE = "LABKIT_RUN"
STACK_SIGNAL = signal.SIGUSR2  # the guard's side sends it to ask a rank where it stands
ECHO_PATIENCE_S = 1.0

# What a rank says when another one is gone: gloo (tcp pair), torch's store, NCCL. Seen in torch 2.13 with
# gloo; NCCL's are from its documentation: docs.nvidia.com/deeplearning/nccl/user-guide (ncclRemoteError,
# ncclInternalError).
ECHOES = re.compile(
    r"Connection (closed|reset) by (peer|remote)|Broken pipe|recvValue failed|failed to recv, got 0 bytes|"
    r"Timed out waiting \d+ms for \w+ operation|remote process exited or there was a network error|"
    r"NCCL communicator was aborted"
)


@dataclass(frozen=True)
class Rank:
    """Who this process is among the ranks of a launch.

    Attributes:
        index: This rank, 0 … world_size - 1 (torchrun's RANK).
        world_size: Number of ranks in all (WORLD_SIZE).
        local: Rank on this machine (LOCAL_RANK).
        device: What the rank computes on: "cpu", or "cuda:<local>".
        backend: Backend for `dist.init_process_group`: "gloo" or "nccl".
    """

    index: int
    world_size: int
    local: int
    device: str
    backend: str

    @classmethod
    def current(cls) -> Rank:
        """This process's rank, from the environment that torchrun sets.

        Outside of any launch it is the only rank of one, so a script runs by plain `python` too.
        """
        local = int(os.environ.get("LOCAL_RANK", 0))
        kind = os.environ.get("LABKIT_DEVICE") or _default_device()
        return cls(
            index=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            local=local,
            device=f"cuda:{local}" if kind == "cuda" else "cpu",
            backend="nccl" if kind == "cuda" else "gloo",
        )

    def report(self, **metrics: float | int | str | bool) -> None:
        """Keep metrics, under their names, with the time; a one-element tensor counts as a number.

        Written at once, so that nothing is lost whatever happens next. Does nothing outside the course.
        """
        if FOLDER_VARIABLE in os.environ:
            self._append({name: _plain(name, value) for name, value in metrics.items()})

    def progress(self, step: int, total: int) -> None:
        """Say that `step` of `total` steps are done. Does nothing outside the course."""
        if FOLDER_VARIABLE in os.environ:
            self._append({"_step": int(step), "_total": int(total)})

    def _append(self, values: dict[str, Any]) -> None:
        """Write one JSON line with one system call; it survives this process."""
        path = Path(os.environ[FOLDER_VARIABLE]) / "metrics" / f"{self.index}.jsonl"
        line = json.dumps({"_time": time.time(), **values}) + "\n"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


def _default_device() -> str:
    """Outside labkit: GPUs where each local rank can have its own, else the CPU for all of them."""
    import torch

    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= wanted else "cpu"


def _plain(name: str, value: Any) -> float | int | str | bool:
    """A value that JSON can hold; tensors of one element become numbers."""
    if name in ("rank", "time_s") or name.startswith("_"):
        raise ValueError(f"report({name}=…): that name is taken; every report holds its rank and its time already.")
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (float, int, str, bool)):
        raise TypeError(f"report({name}=…) got {type(value).__name__}; a metric is a number, a text or a bool.")
    return value


def main(folder: str) -> int:
    """Run the task of a run folder as this rank; returns the process's exit code."""
    die_with_parent()
    home, rank = Path(folder), Rank.current()
    os.environ[FOLDER_VARIABLE] = folder
    hello = {"pid": os.getpid(), "start_time": time.time()}
    _write(home / "ranks" / f"{rank.index}.json", json.dumps(hello))
    _tell_stacks(home / "stacks" / f"{rank.index}.txt")
    result = None
    try:
        result = _run_task(home, rank, hello)
    except SystemExit as error:
        if error.code not in (None, 0):
            return _exit_with(home, rank, error)
    except BaseException as error:
        return _fail(home, rank, error)
    try:
        _write(home / "results" / f"{rank.index}.pkl", _pickle_result(result))
    except Exception as error:
        return _fail(home, rank, error, returned=type(result).__name__)
    return 0


def _fail(home: Path, rank: Rank, error: BaseException, returned: str = "") -> int:
    """Leave an account of the failure, before our sockets close and others fail of it; the exit code."""
    _write_error(home, rank, error, returned)
    sys.stderr.write("".join(_learner_traceback(error)))
    if _is_echo(error):
        _let_the_cause_speak(home, rank)
    return 1


def _is_echo(error: BaseException) -> bool:
    """Whether it says that another rank is gone; that one's error is the cause."""
    chain = (error, *_causes(error))  # torch's are RuntimeErrors; a broken pipe of the learner's own is an OSError
    return any(isinstance(each, RuntimeError) and ECHOES.search(_text(each)) for each in chain)


def _text(error: BaseException) -> str:
    """What it says; the `__str__` of a learner's own class may fail too."""
    try:
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            return json.dumps(error.code, ensure_ascii=False)
        return str(error)
    except Exception as second:
        return f"its __str__ raised {type(second).__name__}"


def _let_the_cause_speak(home: Path, rank: Rank) -> None:
    """Wait until another rank has left its word.

    torchrun ends all ranks as soon as the first has ended, and a rank that closes its group on the way out
    (`finally: destroy_process_group()`) makes others fail before it does.
    """
    deadline = time.monotonic() + ECHO_PATIENCE_S
    while time.monotonic() < deadline:
        words = {path.stem for kind in ("errors", "results") for path in (home / kind).glob("[0-9]*")}
        if words - {str(rank.index)}:
            break
        time.sleep(0.01)


def _tell_stacks(path: Path) -> None:
    """Write this rank's stack to a file when asked by signal, and when it crashes (SIGSEGV, SIGABRT …)."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)  # stays open: the handlers write to it
    faulthandler.enable(file)
    faulthandler.register(STACK_SIGNAL, file)


def _exit_with(home: Path, rank: Rank, error: SystemExit) -> int:
    """The exit code of `sys.exit(…)`: as Python does it, text goes to stderr and means 1."""
    _write_error(home, rank, error)
    if isinstance(error.code, int):
        return error.code
    sys.stderr.write(f"{error.code}\n")
    return 1


def _run_task(home: Path, rank: Rank, hello: dict[str, float]) -> Any:
    """Call the function with its arguments, or run the script as `__main__`; note when its first line begins."""
    task = json.loads((home / "task.json").read_text())
    sys.path[:0] = [entry for entry in task["sys_path"] if entry not in sys.path]
    sys.modules["__main__"] = types.ModuleType("__main__")
    if task["script"] is None:
        sys.argv = [task["name"]]
        function, args = pickle.loads((home / "task.pkl").read_bytes())  # imports what the function uses
        _write(home / "ranks" / f"{rank.index}.json", json.dumps(hello | {"begin_time": time.time()}))
        return function(rank, *args)
    sys.argv = [task["script"], *task["args"]]
    sys.path.insert(0, str(Path(task["script"]).parent))
    runpy.run_path(task["script"], run_name="__main__")
    return None


def _pickle_result(result: Any) -> bytes:
    """Bytes of a result; tensors go to the CPU first, since the notebook's process must not touch CUDA."""
    import io

    import cloudpickle

    class OnCPU(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch and isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return value.detach().cpu().__reduce_ex__(5)
            return super().reducer_override(value)

    buffer = io.BytesIO()
    OnCPU(buffer).dump(result)
    return buffer.getvalue()


def _write_error(home: Path, rank: Rank, error: BaseException, returned: str = "") -> None:
    """Write the rank's own account of its failure.

    Args:
        home: The run folder.
        rank: This rank.
        error: What it failed of.
        returned: Type of the result that could not be sent; empty where the task itself failed.
    """
    account = {
        "time": time.time(),
        "type": type(error).__name__,
        "text": _text(error),
        "is_echo": _is_echo(error),
        "returned": returned,
        "frames": [
            {"file": frame.filename, "line": frame.lineno, "function": frame.name, "code": frame.line}
            for frame in traceback.extract_tb(_learner_frames(error.__traceback__))
        ],
        "traceback": "".join(_learner_traceback(error)),
    }
    try:
        _write(home / "errors" / f"{rank.index}.json", json.dumps(account))
    except OSError as full:  # the launch finds out that the disk is
        sys.stderr.write(f"The account of this failure can't be written: {full}\n")


def _causes(error: BaseException) -> list[BaseException]:
    """The exceptions behind this one, nearest first."""
    found: list[BaseException] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found


def _learner_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    """Drop the frames of this module and of Python's own above the learner's; None if that is all."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith((__file__, runpy.__file__, "<frozen")):
        first = first.tb_next
    return first


def _learner_traceback(error: BaseException) -> list[str]:
    """The traceback as Python prints it, from the learner's first frame on."""
    return traceback.format_exception(type(error), error, _learner_frames(error.__traceback__))


def _write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: to a temporary name, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.rename(path)
    except OSError:  # a full disk: make room for the account of it
        temporary.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    from labkit.runs import worker  # by its name, so that Rank is the same class here and in what is pickled

    sys.exit(worker.main(sys.argv[1]))
