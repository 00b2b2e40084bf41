"""A run and its folder."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

from labkit.errors import UsageError
from labkit.runs.run import Run, RunFolder, parsed

from .run_folders import made


def test_open_gives_the_same_run(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    assert Run.open(folder.path) == run
    assert Run.open(str(folder.path)) == run


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, r"holds no run\.\nThere is no outcome.json in it\.\nTry: ls /"),
        ('{"name": "tr', r"holds a run that can't be read: .*\nIts outcome.json is damaged\."),
        ('{"name": "train"}', r"holds a run that can't be read: .*missing"),
        ("[1]", r"holds a run that can't be read"),
    ],
)
def test_open_of_a_broken_folder(tmp_path: Path, content: str | None, text: str) -> None:
    folder, _ = made(tmp_path)
    (folder.path / "outcome.json").unlink()
    if content is not None:
        (folder.path / "outcome.json").write_text(content)
    with pytest.raises(UsageError, match=text):
        Run.open(folder.path)


def test_open_of_nothing() -> None:
    with pytest.raises(UsageError, match="holds no run"):
        Run.open("/nowhere/at/all")


def test_results_by_rank(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    folder.of_rank("results", 1).write_bytes(pickle.dumps(7))
    assert run.results == (None, 7)


def test_a_result_that_cannot_be_read(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    folder.of_rank("results", 0).write_bytes(b"cno_such_module\nThing\n.")
    with pytest.raises(UsageError, match="The result of rank 0 can't be read: ModuleNotFoundError: No module named"):
        _ = run.results


def test_metrics_survive_lines_cut_short(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    folder.of_rank("metrics", 0).write_text(
        '{"_time": 5.0, "loss": 2.0}\n{"_time": 6.0, "_step": 1, "_total": 2}\n{"_ti{"_time": 7.0, "loss": 1.5}\n{"_t'
    )
    folder.of_rank("metrics", 1).write_text('{"_time": 5.5, "loss": 3.0}\n')
    assert run.metrics.values.tolist() == [[0, 0.0, 2.0], [1, 0.5, 3.0]]
    assert run.metrics.columns.tolist() == ["rank", "time_s", "loss"]


def test_no_metrics(tmp_path: Path) -> None:
    _, run = made(tmp_path)
    assert run.metrics.columns.tolist() == ["rank", "time_s"]


def test_logs(tmp_path: Path) -> None:
    folder, run = made(tmp_path)
    assert run.logs(rank=1) == ""
    log = folder.logs / "none_x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"caf\xe9\n")
    assert run.logs(rank=1, stream="stderr") == "caf\ufffd\n"
    with pytest.raises(UsageError, match=re.escape("ranks 0 … 1 and streams stdout and stderr, not rank 2, 'stdout'")):
        run.logs(rank=2)


def test_shows_itself(tmp_path: Path) -> None:
    _, run = made(tmp_path)
    assert repr(run).splitlines()[:4] == [
        "run      train, 2 × cpu (gloo), warm",
        "why      no NVIDIA GPU here",
        "outcome  failed, 1.0 s",
        "command  torchrun train.py",
    ]
    assert run._repr_html_().startswith("<table><tr><th>run</th>")
    assert run.badge == "measured here · 2 ranks, gloo on 2 cores · 2026-12-01"


def test_folders_of_one_second_get_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))
    names = {RunFolder.create("<lambda> / x").path.name for _ in range(3)}
    assert len(names) == 3
    assert all(re.fullmatch(r"\d{8}-\d{6}-[\w.-]+", name) for name in names)


def test_write_is_whole_or_not_at_all(tmp_path: Path) -> None:
    folder, _ = made(tmp_path)
    folder.write("note.txt", "whole")
    folder.write("note.txt", b"again")
    assert (folder.path / "note.txt").read_text() == "again"
    assert not list(folder.path.glob(".note*"))


def test_parsed_leaves_out_what_is_broken() -> None:
    assert parsed(['{"a": 1}', "{", "", json.dumps({"b": 2})]) == [{"a": 1}, {"b": 2}]
