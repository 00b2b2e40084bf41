"""A guarded job seen from the notebook: a socket to its guard, and nothing else."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from labkit.runs.guard import TERMINATE
from labkit.runs.warm_client import WarmServer


@dataclass(frozen=True)
class Request:
    """What to run under a guard.

    Attributes:
        argv: torchrun's arguments.
        env: The whole environment.
        cwd: Working directory.
        log: File for torchrun's own output.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    log: str


class Job:
    """One running job. A context: on the way out, whatever happened, job and guard are ended."""

    def __init__(self, request: Request, server: WarmServer | None) -> None:
        self._control, theirs = socket.socketpair()
        self._message = b""
        self._guard: subprocess.Popen[bytes] | None = None  # a warm guard is the server's child
        try:
            with theirs:
                if server is not None:
                    server.wait_until_ready()
                with interrupts_held():
                    if server is not None:
                        server.fork(vars(request), theirs)
                    else:
                        self._guard = _start_cold(request, theirs)
        except BaseException:
            self._end()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Whether the job has ended, waiting up to `timeout_s` for it."""
        self._control.settimeout(timeout_s)
        try:
            while chunk := self._control.recv(64):  # the guard says one thing and ends
                self._message += chunk
        except TimeoutError:
            return False
        except ConnectionError:  # the guard was killed with a word of ours unread
            pass
        return True

    def terminate(self) -> None:
        """Ask the guard to end the job: SIGTERM first, three seconds later SIGKILL."""
        with suppress(OSError):  # the guard has ended
            self._control.send(TERMINATE)

    @property
    def agent_status(self) -> int | None:
        """The exit status of torchrun, negative for a signal; None if the guard was killed before it told."""
        return int(self._message) if self._message else None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        with interrupts_held():
            try:
                self.terminate()
                self.wait(30)
            finally:
                self._control.close()  # end-of-file makes the guard kill what is left
            if self._guard:
                self._guard.wait(30)


def _start_cold(request: Request, control: socket.socket) -> subprocess.Popen[bytes]:
    """Start a guard of its own, which starts `python -m torch.distributed.run …`."""
    command = [sys.executable, "-m", "torch.distributed.run", *request.argv]
    with open(request.log, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "labkit.runs.guard", str(control.fileno()), *command],
            pass_fds=(control.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=request.env,
            cwd=request.cwd,
            start_new_session=True,
        )


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let an Interrupt wait until the block has ended: starting and cleaning up must not be cut short."""
    in_main = threading.current_thread() is threading.main_thread()  # Python interrupts no other
    if not in_main or signal.getsignal(signal.SIGINT) is None:  # None: a handler that is not Python's
        yield
        return
    held: list[tuple[Any, ...]] = []
    before = signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held and callable(before):
        before(*held[0])
