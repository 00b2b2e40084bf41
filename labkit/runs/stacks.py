"""Where ranks stand: read from their tracebacks and stacks, and asked of ranks that still run."""

from __future__ import annotations

import linecache
import os
import re
import time
from pathlib import Path
from typing import Any

from labkit.errors import RankTimeout
from labkit.runs.run import Run, RunFolder
from labkit.runs.worker import STACK_SIGNAL

ROOT = re.compile(r'  File "[^"]*/labkit/runs/worker\.py", line \d+ in _run_task')
NOT_THE_LEARNERS = re.compile(r"site-packages|/lib/python3|<frozen|/labkit/(runs|verdicts)/")


def ask_where(folder: RunFolder, nproc: int, patience_s: float = 2.0) -> dict[int, str]:
    """Ask each running rank where it stands; the stacks of those that answered, innermost frame first."""
    paths = {rank: folder.of_rank("stacks", rank) for rank in range(nproc) if _ask(folder, rank)}
    deadline = time.monotonic() + patience_s
    sizes, before = [0], [1]
    while time.monotonic() < deadline and not (all(sizes) and sizes == before):  # it is written line by line
        time.sleep(0.03)
        sizes, before = [path.stat().st_size for path in paths.values()], sizes
    return {rank: path.read_text() for rank, path in paths.items() if path.stat().st_size}


def _ask(folder: RunFolder, rank: int) -> bool:
    """Send the signal that makes a rank write down its stack; whether there was a rank to ask."""
    hello = folder.read_json(folder.of_rank("ranks", rank))
    stack = folder.of_rank("stacks", rank)
    if hello is None or not stack.exists() or folder.has_ended(rank):  # asked too early, the signal would kill it
        return False
    try:
        os.kill(hello["pid"], STACK_SIGNAL)
    except ProcessLookupError:
        return False
    return True


def rank_timeout(folder: RunFolder, run: Run, *, timeout_s: float, stacks: dict[int, str]) -> RankTimeout:
    """The error of a run that took too long: where each rank stood, and for whom they wait."""
    frames = {rank: stack_frames(stack) for rank, stack in stacks.items()}
    finished = [rank for rank in range(run.nproc) if folder.has_ended(rank)]
    waiting = {rank: call for rank, stack in frames.items() if (call := _waiting_in(stack))}
    late = [rank for rank in range(run.nproc) if rank not in waiting]
    lines = [
        f"Rank {rank} has finished." if rank in finished else _where(rank, frames.get(rank, []), folder)
        for rank in range(run.nproc)
    ]
    if waiting and late:
        names = " and ".join(f"rank {rank}" for rank in late)
        lines.append(f"A collective ends when all ranks have called it: everyone waits for {names}.")
    if not late and len(set(waiting.values())) > 1:
        lines.append(
            "They wait in different calls, so none ends: all ranks must make the same calls, in the same order."
        )
    error = RankTimeout(
        f"{run.nproc - len(finished)} of {run.nproc} ranks were still running after timeout_s={timeout_s:g}.",
        found="\n".join(lines),
        try_="lab.launch(…, timeout_s=None)   (no limit, if it was only slow)",
        rank=late[0] if waiting and late else None,
        folder=folder.path,
    )
    error.stacks = stacks
    return error


def _where(rank: int, frames: list[dict[str, Any]], folder: RunFolder) -> str:
    if not folder.of_rank("ranks", rank).exists():
        return f"Rank {rank} has not started yet."
    if not frames:
        return f"Rank {rank} did not answer when asked where it stands."
    call, place = _waiting_in(frames), learner_frame(frames[::-1], folder.path)
    if not place:
        return f"Rank {rank} has not come to your code yet."
    return f"Rank {rank} waits in {call}, {place}" if call else f"Rank {rank} is at {place}"


def _waiting_in(frames: list[dict[str, Any]]) -> str:
    """The torch.distributed call that a stack stands in, or the backward pass, where DDP waits; or empty."""
    for frame in frames:
        if frame["file"].endswith(("distributed_c10d.py", "rendezvous.py")) and frame["function"] != "wrapper":
            return str(frame["function"])
        if frame["function"] == "_engine_run_backward":
            return "backward"
    return ""


def stack_frames(stack: str) -> list[dict[str, Any]]:
    """The frames of the thread that runs the task, innermost first, from what faulthandler wrote."""
    threads = re.split(r"\n(?=Thread |Current thread )", stack)
    mine = next((thread for thread in threads if ROOT.search(thread)), "")
    found = []
    for file, line, function in re.findall(r'File "([^"]+)", line (\d+) in (.+)', ROOT.split(mine)[0]):
        code = linecache.getline(file, int(line)).strip()
        found.append({"file": file, "line": int(line), "function": function, "code": code})
    return found


def learner_frame(frames: list[dict[str, Any]], folder: Path) -> str:
    """The deepest line that the learner wrote: in a cell, or in a file outside installed packages."""
    for frame in reversed(frames):
        in_cell = Path(frame["file"]).is_relative_to(folder)
        if in_cell or not NOT_THE_LEARNERS.search(frame["file"]):
            place = "the cell" if in_cell else Path(frame["file"]).name
            return f"line {frame['line']} of {place}, in {frame['function']}: {frame['code']}"
    return ""
