"""The public surface is frozen: a name more or less is a decision, not an accident."""

from __future__ import annotations

import subprocess
import sys

import pytest

import labkit

PUBLIC = {
    "GPTShape", "LabError", "LaunchError", "MachineError", "Rank", "RankTimeout", "Run", "UsageError", "check", "claim",
    "compare", "hint", "launch", "plan_ddp", "probe", "progress", "show", "solution", "start",
}  # fmt: skip


def test_public_names_are_these() -> None:
    assert set(labkit.__all__) == PUBLIC
    assert set(dir(labkit)) == PUBLIC


def test_every_public_name_is_there_and_documented() -> None:
    for name in PUBLIC:
        assert getattr(labkit, name).__doc__, name


def test_an_unknown_name_gets_the_closest() -> None:
    with pytest.raises(AttributeError, match=r"labkit has no 'lanch'\. Did you mean 'launch'\?"):
        getattr(labkit, "lanch")  # noqa: B009  # looking it up is the test


def test_importing_labkit_is_light() -> None:
    probe = (
        "import sys, time; begin = time.perf_counter(); import labkit; took = time.perf_counter() - begin;"
        "print(took); print([m for m in ('torch', 'matplotlib', 'ipywidgets', 'pandas', 'IPython') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[1] == "[]"
    assert float(out[0]) < 0.3  # seconds; it takes about 0.02
