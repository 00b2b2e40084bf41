"""Launching processes of their own for the tests: a Python program, or a Jupyter kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

import psutil

from .conftest import MARK, eventually, marked

REPOSITORY = Path(__file__).parents[2]
JOB = """
import labkit as lab

def train(rank, state):
    import time
    import torch, torch.distributed as dist
    rank.report(loss=2.5)
    dist.init_process_group(rank.backend)
    if state == "stuck" and rank.index == 0:
        dist.all_reduce(torch.ones(4))
    while True:
        if state == "printing":
            print("step", flush=True)
        time.sleep(0.05)

"""


def environment(mark: str, runs: Path) -> dict[str, str]:
    return {**os.environ, MARK: mark, "LABKIT_RUNS": str(runs), "PYTHONPATH": str(REPOSITORY)}


class Program:
    """A Python program in a process group of its own, which launches."""

    def __init__(self, source: str, runs: Path) -> None:
        self.mark, self.runs = uuid.uuid4().hex, runs
        self.process = subprocess.Popen(
            [sys.executable, "-c", source],
            env=environment(self.mark, runs),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def interrupt(self) -> None:
        """As Jupyter does: to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """As the OOM killer does: this process alone."""
        self.process.kill()

    def output(self, within_s: float = 40) -> str:
        return self.process.communicate(timeout=within_s)[0]

    def reported(self, num_runs: int = 1) -> list[Path]:
        """Waits until all ranks of the newest run have reported; the files."""
        return eventually(lambda: self._reports(num_runs), 40) or []

    def _reports(self, num_runs: int) -> list[Path]:
        files = sorted(self.runs.glob("*/metrics/*.jsonl"))
        return files if len(files) >= 2 * num_runs else []

    def others(self) -> list[psutil.Process]:
        return [process for process in marked(self.mark) if process.pid != self.process.pid]


class Kernel:
    """A Jupyter kernel, fresh, in which cells run."""

    def __init__(self, runs: Path) -> None:
        from jupyter_client.manager import KernelManager

        self.mark, self.runs = uuid.uuid4().hex, runs
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environment(self.mark, runs), cwd=str(runs.parent))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def start(self, source: str) -> str:
        return str(self.client.execute(source))

    def finish(self, message: str, within_s: float = 60) -> tuple[str, str, dict[str, Any]]:
        """Wait for a cell; its status, its text output, and its error output (empty without one)."""
        text, error, deadline = "", {}, time.monotonic() + within_s
        while time.monotonic() < deadline:
            try:
                received = self.client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            if received["parent_header"].get("msg_id") != message:
                continue
            content = received["content"]
            text += content.get("text", "")
            if received["msg_type"] == "error":
                error = content
            if received["msg_type"] == "status" and content["execution_state"] == "idle":
                return self._status(message), text, error
        raise TimeoutError(f"The cell has not ended after {within_s} s.")

    def _status(self, message: str) -> str:
        """The reply to this cell; late ones to earlier requests may come first."""
        while True:
            reply = self.client.get_shell_msg(timeout=10)
            if reply["parent_header"].get("msg_id") == message:
                return str(reply["content"]["status"])

    def run(self, source: str) -> tuple[str, str, dict[str, Any]]:
        return self.finish(self.start(source))

    def pid(self) -> int:
        return next(process.pid for process in marked(self.mark) if "ipykernel_launcher" in " ".join(process.cmdline()))

    def others(self) -> list[psutil.Process]:
        pid = self.pid()
        return [process for process in marked(self.mark) if process.pid != pid]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@contextmanager
def kernel(runs: Path) -> Iterator[Kernel]:
    running = Kernel(runs)
    try:
        yield running
    finally:
        running.close()
