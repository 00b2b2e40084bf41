"""Each notebook executed as shipped (nbval), then by papermill on one rank; with evidence of what really ran."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from labkit.runs.run import Run
from tests.notebooks.test_template import NOTEBOOKS, cells

RUN_ALL_LIMIT_S = 240  # a lab takes well under 60 s on two quiet cores; this catches a hang


def execute(command: list[str], runs: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a person's shell would, with run folders of its own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "LABKIT_RUNS": str(runs), "PATH": path, "PYTHONWARNINGS": "default"}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=RUN_ALL_LIMIT_S
    )


def left_behind(runs: Path) -> list[str]:
    """Processes that still know of these run folders."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("LABKIT_RUNS") == str(runs):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def assert_evidence(runs: Path, nproc: int) -> None:
    """Real ranks were spawned: as many processes as the lab claims, all different, and none is left."""
    finished = [Run.open(path.parent) for path in runs.glob("*/outcome.json")]
    real = [run for run in finished if run.outcome == "finished" and run.nproc == nproc]
    assert real, f"no finished run with {nproc} ranks in {runs}"
    for run in real:
        pids = {json.loads(path.read_text())["pid"] for path in (run.folder / "ranks").glob("*.json")}
        assert len(pids) == nproc
        assert os.getpid() not in pids
    assert left_behind(runs) == []


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, so that nothing a notebook writes lands in the repository."""
    copy = tmp_path / request.param.name
    copy.write_text(request.param.read_text())
    return copy


@pytest.mark.slow
@pytest.mark.timeout(RUN_ALL_LIMIT_S + 30)
def test_run_all_as_shipped(notebook: Path, tmp_path: Path) -> None:
    options = [
        "--nbval-lax",
        "--nbval-current-env",
        f"--nbval-cell-timeout={RUN_ALL_LIMIT_S}",
        "-p",
        "no:cacheprovider",
    ]
    done = execute(
        ["pytest", *options, "-c", os.devnull, f"--rootdir={tmp_path}", str(notebook)], tmp_path / "runs", tmp_path
    )
    code_cells = sum(cell["cell_type"] == "code" for cell in cells(notebook))
    assert re.search(rf"\b{code_cells} passed", done.stdout), done.stdout[-6000:]
    assert done.returncode == 0, done.stdout[-6000:]
    assert_evidence(tmp_path / "runs", nproc=2)


@pytest.mark.slow
@pytest.mark.timeout(RUN_ALL_LIMIT_S + 30)
def test_papermill_on_one_rank(notebook: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.ipynb"
    command = ["papermill", str(notebook), str(out), "-p", "nproc", "1", "-k", "python3", "--cwd", str(tmp_path)]
    command += ["-p", "steps", "4"] if "steps = " in notebook.read_text() else []
    done = execute(command, tmp_path / "runs", tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    assert_evidence(tmp_path / "runs", nproc=1)


def test_a_leftover_process_is_found(tmp_path: Path) -> None:
    env = {**os.environ, "LABKIT_RUNS": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    try:
        assert len(left_behind(tmp_path)) == 1
    finally:
        process.kill()
        process.wait()
