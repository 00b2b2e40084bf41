"""The parts of a rank's work that need no rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.runs import worker
from labkit.runs.worker import Rank

RANK = Rank(index=1, world_size=2, local=1, device="cpu", backend="gloo")


class Number:
    """As a tensor of one element."""

    def item(self) -> float:
        return 2.5


def test_report_and_progress_do_nothing_outside(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(worker.FOLDER_VARIABLE, raising=False)
    RANK.report(loss=1.0)
    RANK.progress(1, 2)
    assert not list(here.iterdir())


def test_report_writes_lines(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(worker.FOLDER_VARIABLE, str(here))
    (here / "metrics").mkdir()
    RANK.report(loss=Number(), name="é", done=True)
    RANK.progress(1, 2)
    lines = [json.loads(line) for line in (here / "metrics" / "1.jsonl").read_text().splitlines()]
    assert [{key: value for key, value in line.items() if key != "_time"} for line in lines] == [
        {"loss": 2.5, "name": "é", "done": True},
        {"_step": 1, "_total": 2},
    ]


@pytest.mark.parametrize("name", ["rank", "time_s", "_time", "_step"])
def test_names_that_are_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(worker.FOLDER_VARIABLE, "/nowhere")
    with pytest.raises(ValueError, match="that name is taken"):
        RANK.report(**{name: 1})


def test_a_metric_is_a_plain_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(worker.FOLDER_VARIABLE, "/nowhere")
    with pytest.raises(TypeError, match=r"report\(loss=…\) got list; a metric is a number, a text or a bool\."):
        RANK.report(loss=[1.0])  # type: ignore[arg-type]


def test_rank_from_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("LABKIT_DEVICE", "cuda")):
        monkeypatch.setenv(name, value)
    assert Rank.current() == Rank(index=3, world_size=4, local=1, device="cuda:1", backend="nccl")


def test_echoes_are_known_by_their_causes_too() -> None:
    error = RuntimeError("no gradients")
    error.__cause__ = RuntimeError("[…/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert worker._is_echo(error)
    assert not worker._is_echo(ValueError("boom"))
    assert not worker._is_echo(BrokenPipeError(32, "Broken pipe"))
    assert not worker._is_echo(ConnectionResetError(104, "Connection reset by peer"))


def test_an_exception_whose_text_cannot_be_made(here: Path) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("x")

    (here / "errors").mkdir()
    worker._write_error(here, RANK, Broken())
    assert json.loads((here / "errors" / "1.json").read_text())["text"] == "its __str__ raised KeyError"


def test_exit_codes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "errors").mkdir()
    assert worker._exit_with(here, RANK, SystemExit(3)) == 3
    assert worker._exit_with(here, RANK, SystemExit("no data")) == 1
    assert capsys.readouterr().err == "no data\n"
    assert json.loads((here / "errors" / "1.json").read_text())["text"] == '"no data"'
