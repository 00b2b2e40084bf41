"""Run folders made by hand, as a launch would have left them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.runs.run import Run, RunFolder


def made(home: Path, *, nproc: int = 2, summary: dict[int, int] | None = None) -> tuple[RunFolder, Run]:
    """A run's folder and record.

    Args:
        home: Where to make it.
        nproc: Ranks.
        summary: Exit code by rank, as in torchrun's closing summary.
    """
    folder = RunFolder(home / "run")
    for name in ("cells", "logs", "ranks", "metrics", "errors", "stacks", "results"):
        (folder.path / name).mkdir(parents=True)
    blocks = "".join(
        f"[{i}]:\n  time      : 2026-12-01_00:00:00\n  host      : box\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: 7)\n  error_file: <N/A>\n"
        for i, (rank, code) in enumerate((summary or {}).items())
    )
    folder.agent_log.write_text(f"train FAILED\nFailures:\n{blocks}" if blocks else "")
    record: dict[str, Any] = {
        "name": "train", "nproc": nproc, "device": "cpu", "backend": "gloo", "why": "no NVIDIA GPU here",
        "how": "warm", "outcome": "failed", "duration_s": 1.0, "command": "torchrun train.py", "machine": "2 cores",
        "started": "2026-12-01 00:00:00", "begin_time": 0.0,
    }  # fmt: skip
    (folder.path / "outcome.json").write_text(json.dumps(record))
    return folder, Run(folder=folder.path, **record)


def failed(folder: RunFolder, rank: int, time: float, text: str = "boom", **more: Any) -> None:
    """An account that a rank wrote."""
    frame = {"file": "/home/ada/train.py", "line": 7, "function": "main", "code": "step()"}
    account = {
        "time": time, "type": "ValueError", "text": text, "is_echo": False, "returned": "", "frames": [frame],
        "traceback": f"Traceback (most recent call last):\n  File ...\nValueError: {text}\n", **more,
    }  # fmt: skip
    folder.of_rank("errors", rank).write_text(json.dumps(account))


def lost(folder: RunFolder, rank: int, time: float) -> None:
    """An account of a lost connection."""
    failed(folder, rank, time, "Connection closed by peer", type="RuntimeError", is_echo=True)
