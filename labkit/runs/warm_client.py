"""The notebook's end of the warm server: start it behind, ask it to fork, know when it can't be used."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import MachineError

# Variables that Python, the loader and torch read once, when the process starts: a fork comes too late for them.
READ_AT_START = ("PYTHON", "LD_", "DYLD_", "MKL_", "KMP_", "GOMP_", "TORCH_LOGS", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP")


class WarmServer:
    """A warm server process, child of this one.

    Args:
        modules: Imported beside torch before the first fork, for instance ("deepspeed",).
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self.modules = tuple(modules)
        self._start_env = _read_at_start(os.environ)
        self._lock = threading.Lock()
        self._ready = False
        self._log = tempfile.TemporaryFile()
        self._requests, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "labkit.runs.warm_server", str(theirs.fileno()), *modules],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def unusable_for(self, env: Mapping[str, str]) -> str:
        """Why a launch with this environment can't be warm; empty if it can."""
        wanted = _read_at_start(env)
        changed = sorted(name for name in wanted | self._start_env if wanted.get(name) != self._start_env.get(name))
        if changed:
            return f"{', '.join(changed)} is read when a process starts"
        return "" if self.alive else "the warm server has ended"

    def fork(self, request: Mapping[str, Any], control: socket.socket) -> None:
        """Have the server fork a guard for this request, which then owns `control`.

        Raises:
            MachineError: The server can't be reached; its last words are in the text.
        """
        body = json.dumps(request).encode()
        with self._lock:
            try:
                self._wait_until_ready()
                self._send(body, control)
            except OSError as error:
                raise MachineError(f"The warm server does not answer: {error}.", found=self._last_words()) from None

    def _send(self, body: bytes, control: socket.socket) -> None:
        try:
            socket.send_fds(self._requests, [len(body).to_bytes(4, "big")], [control.fileno()])
            self._requests.sendall(body)
        except BaseException:  # half a request, perhaps by an interrupt: the server could not tell where the next begins
            self.close()
            raise

    def close(self) -> None:
        """End the server; running jobs end with it."""
        self._requests.close()
        self._process.wait(10)
        self._log.close()

    def _wait_until_ready(self) -> None:
        if not self._ready:
            if not self._requests.recv(16):
                raise ConnectionError("it ended while importing")
            self._ready = True

    def _last_words(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-5:])


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}
