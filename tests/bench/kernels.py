"""A real notebook kernel to type cells into, and every process that came of it."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

REPOSITORY = Path(__file__).parents[2]
MARK = "LABKIT_BENCH"  # in the environment of a kernel and of all that descends from it, orphans too


@dataclass(frozen=True)
class Cell:
    """A cell that was run.

    Attributes:
        status: "ok", "error", or "busy" where it had not ended at its time limit.
        text: All it showed.
        seconds: From sending it to the kernel being idle again.
    """

    status: str
    text: str
    seconds: float


class Kernel:
    """A fresh kernel in a folder. A context: on the way out it and all its processes are killed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.mark = folder, uuid.uuid4().hex
        # Sockets in the folder: free TCP ports are found first and bound later, and kernels that start together clash.
        connection_file = str(folder / "kernel.json")
        self._manager = KernelManager(kernel_name="python3", transport="ipc", connection_file=connection_file)
        self._manager.start_kernel(
            cwd=str(folder),
            env=marked_environment(self.mark, folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=30)

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def run(self, code: str, limit_s: float = 60.0) -> Cell:
        """Run a cell and wait for its end, or for the time limit."""
        return self.finish(self.send(code), limit_s)

    def send(self, code: str) -> tuple[str, float]:
        """Send a cell as JupyterLab does (with the id of a cell, so that live views know they are watched)."""
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": False}
        message = self._client.session.msg("execute_request", content, metadata={"cellId": "bench"})
        begin = time.perf_counter()
        self._client.shell_channel.send(message)
        return message["header"]["msg_id"], begin

    def finish(self, sent: tuple[str, float], limit_s: float = 60.0) -> Cell:
        """Collect what a sent cell shows until it ends."""
        ours, begin = sent
        status, shown = "ok", [""]
        while (left_s := begin + limit_s - time.perf_counter()) > 0:
            try:
                message = self._client.get_iopub_msg(timeout=left_s)
            except queue.Empty:
                break
            if message["parent_header"].get("msg_id") != ours:
                continue
            content = message["content"]
            if content.get("execution_state") == "idle":
                seconds = time.perf_counter() - begin
                self._await_reply(ours)
                return Cell(status, plain("".join(shown)), seconds)
            status = "error" if message["msg_type"] == "error" else status
            shown.append(_shown(content))
        return Cell("busy", plain("".join(shown)), time.perf_counter() - begin)

    def _await_reply(self, ours: str) -> None:
        """Wait for the cell's reply too: ipykernel 7 loses a request that comes while it sends one (its issue 1554)."""
        while self._client.get_shell_msg(timeout=10)["parent_header"].get("msg_id") != ours:
            continue

    def interrupt(self) -> None:
        """What the Interrupt button does: SIGINT to the kernel's process group."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """What the kernel's restart, or the system when memory runs out, does: SIGKILL to the kernel alone."""
        os.kill(self.pid, signal.SIGKILL)

    def processes(self) -> set[psutil.Process]:
        """The kernel and everything that descends from it, alive now."""
        return marked_processes(self.mark)

    def wait_until_gone(self, keep: set[psutil.Process], limit_s: float = 6.0) -> tuple[int, float]:
        """How many processes beside `keep` are left, and the seconds until there was none, up to the limit."""
        begin = time.perf_counter()
        while (left := self.processes() - keep) and time.perf_counter() - begin < limit_s:
            time.sleep(0.05)
        return len(left), time.perf_counter() - begin

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._client.stop_channels()
        while left := self.processes():
            for process in left:
                process.kill()
            time.sleep(0.02)
        self._manager.shutdown_kernel(now=True)  # reaps it


def marked_environment(mark: str, folder: Path) -> dict[str, str]:
    """This process's environment, with the mark, labkit importable, and the programs beside this Python first."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {
        **os.environ,
        MARK: mark,
        "PATH": programs,
        "PYTHONPATH": str(REPOSITORY),
        "LABKIT_RUNS": str(folder / "runs"),
    }


def marked_processes(mark: str) -> set[psutil.Process]:
    """Every living process that was started with this mark in its environment; zombies have none."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.add(process)
        except (psutil.Error, OSError):
            continue
    return found


def plain(text: str) -> str:
    """Text without the codes for colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _shown(content: dict[str, Any]) -> str:
    """What a message shows in the cell, as text."""
    if "traceback" in content:
        return "\n".join(content["traceback"]) + "\n"
    return str(content.get("text") or content.get("data", {}).get("text/plain", ""))
