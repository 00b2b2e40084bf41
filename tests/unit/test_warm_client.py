"""What a warm launch can't give a rank is known before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import labkit
from labkit.runs.warm_client import finding_labkit, fixed_at_start

ROOT = str(Path(labkit.__file__).parents[1])


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "LD_PRELOAD", "LC_ALL", "TZ", "OMP_SCHEDULE", "TORCH_LOGS"])
def test_read_when_a_process_starts(name: str) -> None:
    assert fixed_at_start({name: "1"}) != fixed_at_start({})


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MY_OWN", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"])
def test_read_later(name: str) -> None:
    assert fixed_at_start({name: "1"}) == fixed_at_start({})


def test_umask_and_cores_are_inherited() -> None:
    before, mask = fixed_at_start({}), os.umask(0o077)
    try:
        assert fixed_at_start({})["the umask"] == "077"
    finally:
        os.umask(mask)
    assert fixed_at_start({}) == before


@pytest.mark.parametrize(("paths", "expected"), [("", ROOT), ("/a:/b", f"{ROOT}:/a:/b"), (f"/a:{ROOT}", f"/a:{ROOT}")])
def test_children_find_labkit(paths: str, expected: str) -> None:
    assert finding_labkit({"PYTHONPATH": paths, "A": "1"}) == {"PYTHONPATH": expected, "A": "1"}
