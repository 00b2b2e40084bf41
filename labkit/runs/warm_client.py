"""The notebook's end of the warm server: start it behind, ask it to fork, know when it can't be used."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.errors import MachineError

# Variables that Python, the loader, the C library, OpenMP and torch read once, when the process starts.
READ_AT_START = (
    "PYTHON", "LD_", "DYLD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_TUNABLES",
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_",
    "TORCH_LOGS", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_JIT",
    "RES_OPTIONS",
)  # fmt: skip
# Not these: a rank sets its threads itself, and torch reads the other when it compiles (and writes it when a notebook
# makes an optimizer, after which every launch would be cold).
SET_AFTER_FORK = ("OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")


class WarmServer:
    """A warm server process, child of this one.

    Args:
        modules: Imported beside torch before the first fork, for instance ("deepspeed",).
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self.modules = tuple(modules)
        self._start = fixed_at_start(os.environ)
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the server lives
        self._requests, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "labkit.runs.warm_server", str(theirs.fileno()), *modules],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=finding_labkit(os.environ),
                start_new_session=True,
            )
        atexit.register(self.close)

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
        wanted = fixed_at_start(env)
        changed = sorted(name for name in wanted | self._start if wanted.get(name) != self._start.get(name))
        if changed:
            return f"{', '.join(changed)} can't change in a process that has started"
        return "" if self.alive else "the warm server has ended"

    def wait_until_ready(self) -> None:
        """Wait until the server has imported everything.

        Raises:
            MachineError: It ended instead; its last words are in the text.
        """
        try:
            ready = self._requests.recv(16, socket.MSG_PEEK)  # stays there, for whoever asks next
        except OSError:
            ready = b""
        if not ready:
            raise MachineError("The warm server ended while it was importing.", found=self._last_words())

    def fork(self, request: Mapping[str, Any], control: socket.socket) -> None:
        """Have the ready server fork a guard for this request, which then owns `control`.

        Raises:
            MachineError: The server can't be reached; its last words are in the text.
        """
        body = json.dumps(request).encode()
        with self._lock:
            try:
                socket.send_fds(self._requests, [len(body).to_bytes(4, "big")], [control.fileno()])
                self._requests.sendall(body)
            except OSError as error:
                raise MachineError(f"The warm server does not answer: {error}.", found=self._last_words()) from None

    def close(self) -> None:
        """End the server; running jobs end with it."""
        atexit.unregister(self.close)
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._log.close()

    def _last_words(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-5:])


def finding_labkit(env: Mapping[str, str]) -> dict[str, str]:
    """This environment, in which a child process imports labkit from where we did, installed or not."""
    root, paths = str(Path(__file__).parents[2]), env.get("PYTHONPATH", "").split(os.pathsep)
    if root in paths or Path(root).name == "site-packages":
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join([root, *filter(None, paths)])}


def fixed_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """What a process takes from its parent and environment once: a fork comes too late for it."""
    fixed = {name: value for name, value in env.items() if name.startswith(READ_AT_START)}
    for name in SET_AFTER_FORK:
        fixed.pop(name, None)
    mask = os.umask(0o077)
    os.umask(mask)
    fixed["the umask"] = f"{mask:03o}"
    if hasattr(os, "sched_getaffinity"):
        fixed["the set of CPU cores"] = str(sorted(os.sched_getaffinity(0)))
    return fixed
