"""`labkit run` and `course.py` as a shell sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import labkit as lab
rank = lab.Rank.current()
rank.progress(1, 2)
print(rank.index, rank.world_size, sys.argv[1:])
if "fail" in sys.argv and rank.index == 1:
    raise ValueError("boom")
"""


def shell(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run labkit in a folder with the script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "labkit.cli", *words]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)


def test_a_script_runs_on_two_ranks(tmp_path: Path) -> None:
    done = shell(tmp_path, "run", "train.py", "-n", "2", "--device", "cpu", "--lr", "3")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 2 ['--lr', '3']", "[1] 1 2 ['--lr', '3']"]
    assert "✓ train: 2 × cpu (gloo), warm" in done.stderr
    assert "LABKIT_DEVICE=cpu torchrun --standalone --nproc-per-node=2" in done.stderr
    assert len(list((tmp_path / "runs").glob("*-train"))) == 1


def test_a_failure_is_its_text_and_1(tmp_path: Path) -> None:
    done = shell(tmp_path, "run", "train.py", "-n", "2", "--device", "cpu", "fail")
    assert done.returncode == 1
    assert "LaunchError: Rank 1 of 2 raised ValueError: boom" in done.stderr
    assert 'raise ValueError("boom")' in done.stderr
    assert "labkit/cli.py" not in done.stderr


def test_a_call_that_cannot_be_meant_is_2(tmp_path: Path) -> None:
    done = shell(tmp_path, "run", "trian.py", "-n", "2")
    assert done.returncode == 2
    assert "UsageError: There is no script 'trian.py'" in done.stderr


@pytest.mark.slow
def test_the_course_writes_a_page_a_lab(tmp_path: Path) -> None:
    env = {**os.environ, "LABKIT_RUNS": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (ROOT / "out" / "00_start_here.html").unlink(missing_ok=True)
    command = [sys.executable, "course.py", "--nproc", "1", "--device", "cpu", "00"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 labs ran to the end" in done.stdout
    page = (ROOT / "out" / "00_start_here.html").read_text()
    assert "Start here" in page
    assert "I had one job" in page
    assert "injected-parameters" not in page
