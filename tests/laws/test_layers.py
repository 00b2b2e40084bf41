"""The rooms of labkit and who may import whom, as data; imports are read with ast."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUND = {"errors", "units", "facts", "shapes"}
TOP = {"__init__", "cli", "report"}
MAY_IMPORT = {
    "ground": {"ground"},
    "machine": {"ground", "machine"},
    "theory": {"ground", "machine", "theory"},
    "workloads": {"shapes", "workloads"},
    "runs": {"ground", "machine", "runs"},
    "verdicts": {"ground", "machine", "theory", "runs", "workloads", "verdicts"},
    "views": {"ground", "machine", "theory", "runs", "workloads", "verdicts", "views"},
    "top": {"ground", "machine", "theory", "runs", "workloads", "verdicts", "views", "top"},
}
WORKER = "labkit/runs/worker.py"  # imports no other room, so that it can be read alone


def room(module: str) -> str:
    """The room of a module named "labkit.x.y"."""
    parts = module.split(".")
    first = parts[1] if len(parts) > 1 else "__init__"
    if first in GROUND:
        return "ground"
    return "top" if first in TOP else first


def imports(source: str) -> Iterator[str]:
    """labkit modules that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield "labkit.relative"  # a room that does not exist: imports here are absolute
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "labkit":
            if node.module.count(".") > 1 or node.module.split(".")[-1] in GROUND:
                yield node.module
            else:  # "from labkit.runs import worker", "from labkit import Rank"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "labkit")


def offences(path: str, source: str) -> list[str]:
    """Imports that go up."""
    mine = room(path.removesuffix(".py").replace("/", "."))
    found = []
    for module in imports(source):
        theirs, name = room(module), module.split(".")[1]
        if theirs not in MAY_IMPORT[mine] and name not in MAY_IMPORT[mine]:
            found.append(f"{path} ({mine}) imports {module} ({theirs})")
        if path == WORKER and theirs != "runs":
            found.append(f"{path} imports {module}")
    return found


def test_imports_go_down_only() -> None:
    found = []
    for path in sorted((ROOT / "labkit").rglob("*.py")):
        found += offences(str(path.relative_to(ROOT)), path.read_text())
    assert found == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("labkit/runs/launcher.py", "from labkit.views.live import launch"),
        ("labkit/workloads/gpt.py", "from labkit.units import GIB"),
        ("labkit/machine/probing.py", "import labkit.runs.run"),
        ("labkit/runs/launcher.py", "from ..views.live import launch"),
        ("labkit/runs/worker.py", "from labkit.errors import LabError"),
        ("labkit/errors.py", "from labkit.machine import probing"),
    ],
)
def test_an_import_that_goes_up_is_found(path: str, source: str) -> None:
    assert offences(path, source)


def test_rooms_are_those_of_the_design() -> None:
    folders = {path.name for path in (ROOT / "labkit").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(MAY_IMPORT) - {"ground", "top"}
