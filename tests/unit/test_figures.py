"""Figures: the finding as title, alt text in words, 700 px wide; their data are real run folders made by hand."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import cloudpickle
import pytest

from labkit import GPTShape, UsageError, plan_ddp
from labkit.runs.run import Run, RunFolder
from labkit.views import figures


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A finished run of 2 ranks."""
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))
    folder = RunFolder.create("train")
    record = {
        "name": "train", "nproc": 2, "device": "cpu", "backend": "gloo", "why": "", "how": "warm", "outcome": "finished",
        "duration_s": 4.0, "command": "torchrun", "machine": "2 cores of a CPU", "started": "2026-12-01 00:00:00",
        "begin_time": 1e9,
    }  # fmt: skip
    folder.write("outcome.json", json.dumps(record))
    for rank in range(2):
        folder.of_rank("ranks", rank).write_text(json.dumps({"pid": 1, "start_time": 1e9 + 1}))
        folder.of_rank("results", rank).write_bytes(cloudpickle.dumps({"step_s": 0.3}))
        os.utime(folder.of_rank("results", rank), (1e9 + 3, 1e9 + 3))
        lines = [json.dumps({"_time": 1e9 + s, "step": s, "loss": 5.0 - s - rank}) for s in range(3)]
        folder.of_rank("metrics", rank).write_text("\n".join(lines) + "\n")
    return Run.open(folder.path)


def width_px(picture: figures.Picture) -> int:
    """Width of a PNG, from its header."""
    return int(struct.unpack(">I", picture.png[16:20])[0])


def test_every_figure_is_700_px_wide_and_says_what_it_shows(run: Run) -> None:
    plan = plan_ddp(GPTShape.of_depth(2), dp=2, micro_batch=8, compute_s=0.25, all_reduce_s=0.01)
    pictures = [
        figures.launch_tree(2),
        figures.launches(cold=run, warm=run),
        figures.buckets(),
        figures.losses(one=run, two=run),
        figures.scaling(plan, run, run),
        figures.bars({"a": [0.2, 0.21], "b": [0.3]}, run, baseline="b"),
    ]
    for picture in pictures:
        assert width_px(picture) == 700
        assert len(picture.alt) > 20
        assert f'alt="{picture.alt[:5]}' in picture._repr_html_()


def test_losses_are_means_over_ranks(run: Run) -> None:
    assert figures.losses(run=run).alt == "Loss against step. At the end: run 2.500"


def test_scaling_names_the_seconds(run: Run) -> None:
    plan = plan_ddp(GPTShape.of_depth(2), dp=2, micro_batch=8, compute_s=0.25, all_reduce_s=0.01)
    assert figures.scaling(plan, run, run).alt == "Step: 300 ms on 1 rank, 300 ms on 2, predicted 260 ms."


def test_what_cannot_be_drawn_is_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="draws 1 … 4 ranks, not 5"):
        figures.launch_tree(5)
    with pytest.raises(UsageError, match="baseline 'c' is not among a"):
        figures.bars({"a": [1.0]}, run, baseline="c")


def test_a_difference_within_the_noise_is_no_finding() -> None:
    clear, noisy = {"a": [0.2, 0.25], "b": [0.3, 0.4]}, {"a": [0.2, 0.35], "b": [0.3, 0.4]}
    medians = {"a": 0.225, "b": 0.35}
    assert figures._finding(clear, medians, "b") == "'a' takes 36% less than 'b'"
    assert figures._finding(noisy, medians, "b") == "Nothing beats 'b' by more than the noise"
    assert figures._finding(clear, medians, "a") == "Nothing beats 'a' by more than the noise"


def test_a_picture_can_be_saved(tmp_path: Path) -> None:
    figures.launch_tree(1).save(tmp_path / "tree.png")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
