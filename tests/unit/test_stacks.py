"""Where ranks stand."""

from __future__ import annotations

import json
from pathlib import Path

from labkit.runs.stacks import learner_frame, rank_timeout, stack_frames

from .run_folders import made

ROOT = '  File "/x/labkit/runs/worker.py", line 9 in _run_task\n  File "/x/labkit/runs/worker.py", line 5 in main\n'
WAITS = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
    '  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper\n'
    '  File "/home/ada/train.py", line 8 in main\n' + ROOT
)
WORKS = f'Current thread 0x1 (most recent call first):\n  File "/home/ada/train.py", line 7 in main\n{ROOT}'


def test_frames_end_where_the_task_begins() -> None:
    assert [frame["function"] for frame in stack_frames(WAITS)] == ["all_reduce", "wrapper", "main"]


def test_the_thread_of_the_task_is_found_among_others() -> None:
    other = 'Thread 0x2 (most recent call first):\n  File "/home/ada/loader.py", line 1 in load\n\n'
    assert stack_frames(other + WORKS) == stack_frames(WORKS)
    assert stack_frames("") == []


def test_reporting_is_seen_as_the_learners_line() -> None:
    stack = WORKS.replace("  File", '  File "/x/labkit/runs/worker.py", line 90 in report\n  File', 1)
    assert learner_frame(stack_frames(stack)[::-1], Path("/runs")) == "line 7 of train.py, in main: "


def test_who_waits_for_whom(tmp_path: Path) -> None:
    folder, run = made(tmp_path, nproc=4)
    for rank in range(3):
        folder.of_rank("ranks", rank).write_text(json.dumps({"pid": 1, "start_time": 0.0}))
    folder.of_rank("results", 2).write_bytes(b"")
    error = rank_timeout(folder, run, timeout_s=2.5, stacks={0: WAITS, 1: WORKS})
    assert str(error).splitlines() == [
        "3 of 4 ranks were still running after timeout_s=2.5.",
        "Rank 0 waits in all_reduce, line 8 of train.py, in main: ",
        "Rank 1 is at line 7 of train.py, in main: ",
        "Rank 2 has finished.",
        "Rank 3 has not started yet.",
        "A collective ends when all ranks have called it: everyone waits for rank 1 and rank 2 and rank 3.",
        "Try: lab.launch(…, timeout_s=None)   (no limit, if it was only slow)",
    ]
    assert error.stacks == {0: WAITS, 1: WORKS}


def test_nobody_is_blamed_where_all_wait_or_all_work(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    assert rank_timeout(folder, run, timeout_s=1, stacks={0: WAITS, 1: WAITS}).rank is None
    assert rank_timeout(folder, run, timeout_s=1, stacks={0: WORKS, 1: WORKS}).rank is None
