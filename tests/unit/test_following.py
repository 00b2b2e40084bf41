"""Reading a run's files while they grow."""

from __future__ import annotations

import json
from pathlib import Path

from labkit.runs.following import MOST_SHOWN_BYTES, Follower, RankView, Snapshot
from labkit.runs.run import RunFolder

from .run_folders import failed, made


def followed(home: Path, nproc: int = 1) -> tuple[RunFolder, Follower, Path]:
    """A folder, its follower, and the log of rank 0."""
    folder, _ = made(home, nproc=nproc)
    for rank in range(nproc):
        folder.of_rank("ranks", rank).write_text(json.dumps({"pid": 1, "start_time": 0.0}))
        logs = folder.logs / "none_x" / "attempt_0" / str(rank)
        logs.mkdir(parents=True)
        (logs / "stdout.log").touch()
        (logs / "stderr.log").touch()
    return folder, Follower(folder, nproc), folder.logs / "none_x" / "attempt_0" / "0" / "stdout.log"


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    _, follower, log = followed(tmp_path)
    add(log, "one\ntw")
    assert follower.look().lines == ((0, "one"),)
    add(log, "o\n\nthree")
    assert follower.look().lines == ((0, "two"), (0, ""))
    assert follower.look().lines == ()
    assert follower.look(last=True).lines == ((0, "three"),)


def test_of_a_bar_that_redraws_itself_the_last_state_is_shown(tmp_path: Path) -> None:
    _, follower, log = followed(tmp_path)
    add(log, "10 %\r50 %\r100 %\n")
    assert follower.look().lines == ((0, "100 %"),)


def test_a_flood_is_skipped_and_counted(tmp_path: Path) -> None:
    _, follower, log = followed(tmp_path)
    add(log, "x" * 3 * MOST_SHOWN_BYTES + "\nlast\n")
    lines = [text for _, text in follower.look().lines]
    assert lines[0] == "… 128 KiB not shown here, but in the run's logs …"
    assert lines[-1] == "last"


def test_a_line_without_end_does_not_stop_it(tmp_path: Path) -> None:
    _, follower, log = followed(tmp_path)
    add(log, "x" * MOST_SHOWN_BYTES)
    assert len(follower.look().lines) == 1
    add(log, "y\n")
    assert follower.look().lines == ((0, "y"),)


def test_metrics_and_steps(tmp_path: Path) -> None:
    folder, follower, _ = followed(tmp_path)
    metrics = folder.of_rank("metrics", 0)
    add(metrics, '{"_time": 1.0, "loss": 3.0}\n{"_time": 2.0, "_step": 1, "_total": 4}\nbroken\n{"_time": 3.0, "lo')
    (view,) = follower.look().ranks
    assert (view.step, view.total, view.metrics, view.state) == (1, 4, {"loss": 3.0}, "running")
    add(metrics, 'ss": 2.0}\n')
    assert follower.look().ranks[0].metrics == {"loss": 2.0}


def test_states(tmp_path: Path) -> None:
    folder, _ = made(tmp_path)
    follower = Follower(folder, 2)
    assert [view.state for view in follower.look().ranks] == ["starting", "starting"]
    for rank in range(2):
        folder.of_rank("ranks", rank).write_text(json.dumps({"pid": 1, "start_time": 0.0}))
    folder.of_rank("results", 0).write_bytes(b"")
    failed(folder, 1, time=1.0)
    assert [view.state for view in follower.look().ranks] == ["finished", "failed"]
    before = follower.look().ranks
    assert [view.elapsed_s for view in follower.look().ranks] == [view.elapsed_s for view in before]


def test_the_traceback_of_a_failed_rank_is_left_to_the_error(tmp_path: Path) -> None:
    folder, follower, log = followed(tmp_path)
    add(log.with_name("stderr.log"), "Traceback …\n")
    failed(folder, 0, time=1.0)
    assert follower.look().lines == ()


def test_the_slowest_rank_says_how_far_a_run_is() -> None:
    fast, slow = (RankView(i, "running", step=step, total=8, elapsed_s=2.0) for i, step in enumerate((4, 2)))
    snapshot = Snapshot(2.0, (fast, slow), ())
    assert (snapshot.fraction, snapshot.left_s) == (0.25, 6.0)
    assert Snapshot(2.0, (RankView(0),), ()).left_s is None
