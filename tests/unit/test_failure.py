"""From what ranks left behind to one error."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from labkit.runs.failure import launch_error, rank_ends

from .run_folders import failed, lost, made


def test_echoes_come_after_the_cause_though_they_were_earlier(tmp_path: Path) -> None:
    folder, _ = made(tmp_path)
    lost(folder, 0, time=1.0)
    failed(folder, 1, time=2.0)
    assert [(end.rank, end.is_echo) for end in rank_ends(folder, 2)] == [(1, False), (0, True)]


def test_causes_come_by_time(tmp_path: Path) -> None:
    folder, run = made(tmp_path, nproc=3)
    for rank, time in enumerate((3.0, 1.0, 2.0)):
        failed(folder, rank, time, text=f"boom {rank}")
    assert [end.rank for end in rank_ends(folder, 3)] == [1, 2, 0]
    text = str(launch_error(folder, run, 1))
    assert text.startswith("Rank 1 of 3 raised ValueError: boom 1\n")
    assert "Rank 2, later: ValueError: boom 2\nRank 0, later: ValueError: boom 0" in text


def test_of_ranks_that_did_the_same_the_lowest_is_named(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    failed(folder, 0, time=2.0)
    failed(folder, 1, time=1.0)
    error = launch_error(folder, run, 1)
    assert error.rank == 0
    assert "Rank 1 did the same." in str(error)


def test_a_killed_rank_is_known_from_the_summary_and_comes_before_echoes(tmp_path: Path) -> None:
    folder, run = made(tmp_path, summary={0: 1, 1: -9})
    lost(folder, 0, time=1.0)
    error = launch_error(folder, run, 1)
    assert error.fact == "Rank 1 of 2 was killed by signal 9 (SIGKILL)."
    assert "Rank 0 only echoes it: Connection closed by peer." in str(error)


def test_sigterm_is_torchruns_own_unless_nobody_has_a_cause(tmp_path: Path) -> None:
    folder, run = made(tmp_path, summary={0: -signal.SIGTERM, 1: 1})
    failed(folder, 1, time=1.0)
    assert [end.rank for end in rank_ends(folder, 2)] == [1]
    folder, run = made(tmp_path / "all", summary={0: -signal.SIGTERM, 1: -signal.SIGTERM})
    assert launch_error(folder, run, 1).fact == "Rank 0 of 2 was killed by signal 15 (SIGTERM)."


def test_a_rank_that_torchrun_had_to_kill_is_not_the_cause(tmp_path: Path) -> None:
    folder, run = made(tmp_path, summary={0: -signal.SIGKILL, 1: 1})
    failed(folder, 1, time=1.0)
    assert launch_error(folder, run, 1).rank == 1


def test_one_echo_alone_is_still_an_error(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    lost(folder, 0, time=1.0)
    assert launch_error(folder, run, 1).fact == "Rank 0 of 2 raised RuntimeError: Connection closed by peer"


def test_an_echo_beside_a_result_means_a_rank_left_early(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    lost(folder, 0, time=1.0)
    folder.of_rank("results", 1).write_bytes(b"")
    error = launch_error(folder, run, 1)
    assert error.rank == 1
    assert "Rank 0 was waiting for it at line 7 of train.py, in main: step()" in str(error)


@pytest.mark.parametrize(
    ("status", "fact"),
    [
        (None, "The process that guards the ranks ended before them, and took them along."),
        (-9, "torchrun, the parent of the ranks, was killed by signal 9 (SIGKILL)."),
        (2, "torchrun ended with exit code 2, and no rank said why."),
    ],
)
def test_no_rank_failed(tmp_path: Path, status: int | None, fact: str) -> None:
    folder, run = made(tmp_path)
    folder.agent_log.write_text("usage: torchrun\n")
    error = launch_error(folder, run, status)
    assert (error.fact, error.rank) == (fact, None)
    assert "    usage: torchrun" in str(error)


def test_long_texts_are_cut_in_the_middle(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    traceback = "Traceback (most recent call last):\n" + "".join(f"  line {i}\n" for i in range(100))
    failed(folder, 0, time=1.0, text="x" * 1000, traceback=traceback)
    error = launch_error(folder, run, 1)
    assert len(error.fact) < 260
    assert "  … 77 lines left out …" in str(error)
    assert error.traceback == traceback


def test_calls_in_libraries_are_counted_not_shown(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    traceback = (
        f'Traceback (most recent call last):\n  File "{folder.cells}/cell_1.py", line 2, in f\n    step()\n'
        '  File "/x/site-packages/torch/a.py", line 1, in a\n    b()\n    ^^^\n'
        '  File "/usr/lib/python3.11/b.py", line 1, in b\n    c()\nValueError: boom\n'
    )
    failed(folder, 0, time=1.0, traceback=traceback)
    assert (
        '      File "the cell", line 2, in f\n        step()\n      … 2 calls in libraries …\n    ValueError: boom\n'
        in str(launch_error(folder, run, 1))
    )


def test_the_last_that_was_seen_of_a_crashed_rank(tmp_path: Path) -> None:
    folder, run = made(tmp_path, summary={0: -11})
    folder.of_rank("metrics", 0).write_text('{"_time": 1, "loss": 2.5}\n{"_time": 2, "_step": 4, "_to')
    folder.of_rank("stacks", 0).write_text(
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/x/site-packages/torch/nn.py", line 3 in forward\n  File "/home/ada/train.py", line 7 in main\n'
        '  File "/x/labkit/runs/worker.py", line 9 in _run_task\n  File "/x/labkit/runs/worker.py", line 5 in main\n'
    )
    assert str(launch_error(folder, run, 1)).splitlines()[:3] == [
        "Rank 0 of 2 was killed by signal 11 (SIGSEGV).",
        "It stood at line 7 of train.py, in main: ",
        "Its last report: loss 2.5.",
    ]
