"""What all tests share: a home for run folders, and cells as a notebook would run them."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

_numbers = count(1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, where run folders go to `runs/`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABKIT_RUNS", raising=False)
    return tmp_path


@pytest.fixture
def cell() -> Callable[[str], Any]:
    """Runs source as ipykernel runs a cell; returns the last function defined in it."""
    return run_cell


def run_cell(source: str) -> Any:
    """Execute source as a cell of a notebook; the last function defined in it."""
    source = textwrap.dedent(source).lstrip("\n")
    name = f"/tmp/ipykernel_0/{next(_numbers)}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)
    return [value for value in namespace.values() if callable(value)][-1]
