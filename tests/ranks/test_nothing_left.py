"""Whatever dies, and whenever: no process, port or file is left, and what was reported can be read."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import labkit as lab
from labkit.runs import launcher

from ..conftest import run_cell
from .conftest import eventually, left_over, marked
from .outside import JOB, Program

WAITING = """
import os, signal, subprocess, sys, time
def train(rank):
    rank.report(loss=2.5)
    time.sleep(60)
"""


class Background:
    """A launch in a thread of its own."""

    def __init__(self, source: str, **options: Any) -> None:
        self.error: Any = None
        self.run: Any = None
        self._work, self._options = run_cell(source), {"nproc": 2, **options}
        self._thread = threading.Thread(target=self._launch)
        self._thread.start()

    def _launch(self) -> None:
        try:
            self.run = lab.launch(self._work, **self._options)
        except lab.LabError as error:
            self.error = error

    def end(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.error


def reported(here: Path) -> list[Path]:
    """The reports of both ranks, waited for."""
    return eventually(lambda: len(files := list(here.glob("runs/*/metrics/*.jsonl"))) == 2 and files, 30)


def process_of(name: str, here: Path) -> psutil.Process:
    """A process of the launch that runs: a rank, their agent, or its guard."""
    pid = int(next(here.glob("runs/*/ranks/0.json")).read_text().split('"pid": ')[1].split(",")[0])
    rank = psutil.Process(pid)
    return {"rank": rank, "agent": rank.parent(), "guard": rank.parent().parent()}[name]


def test_two_launches_at_once() -> None:
    work = "import os, time\ndef train(rank):\n    time.sleep(0.5)\n    return os.getpid()"
    launches = [Background(work) for _ in range(2)]
    assert [launch.end() for launch in launches] == [None, None]
    assert len({pid for launch in launches for pid in launch.run.results}) == 4
    assert launches[0].run.folder != launches[1].run.folder


def test_two_processes_launch_at_once(here: Path) -> None:
    source = "import labkit as lab\ndef f(rank):\n    return rank.index\nprint(lab.launch(f, nproc=2).results)"
    programs = [Program(source, here / "runs") for _ in range(2)]
    assert ["(0, 1)" in program.output() for program in programs] == [True, True]
    assert [marked(program.mark) for program in programs] == [[], []]


def test_20_launches_in_a_row() -> None:
    work = run_cell("""
import torch, torch.distributed as dist
def train(rank):
    dist.init_process_group(rank.backend)
    x = torch.tensor([rank.index + 1.0])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()
""")
    assert [lab.launch(work, nproc=2).results for _ in range(20)] == [(3.0, 3.0)] * 20


@pytest.mark.parametrize(
    ("victim", "fact"),
    [
        ("server", "The warm server was killed while train ran on it."),
        ("guard", "The process that guards the ranks ended before them, and took them along."),
        ("agent", "torchrun, the parent of the ranks, was killed by signal 9 (SIGKILL)."),
    ],
)
def test_what_stands_above_the_ranks_is_killed(here: Path, victim: str, fact: str) -> None:
    launch = Background(WAITING)
    assert reported(here)
    pid = launcher.warm_up().pid if victim == "server" else process_of(victim, here).pid
    os.kill(pid, signal.SIGKILL)
    error = launch.end()
    assert error.fact == fact
    assert lab.Run.open(error.folder).metrics["loss"].tolist() == [2.5, 2.5]
    assert eventually(lambda: not left_over(), 5)
    assert lab.launch(run_cell("def train(rank):\n    return 1"), nproc=2).results == (1, 1)


@pytest.mark.parametrize("victim", ["guard", "agent"])
def test_what_stands_above_cold_ranks_is_killed(here: Path, victim: str) -> None:
    launch = Background(WAITING, warm=False)
    assert reported(here)
    process_of(victim, here).kill()
    assert launch.end()
    assert eventually(lambda: not left_over(), 5)


STUBBORN = """
import os, signal, subprocess, sys, time
def train(rank):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
    rank.report(loss=2.5)
    {last}
"""


def test_ranks_that_ignore_signals_and_have_children_in_sessions_of_their_own() -> None:
    begin = time.monotonic()
    with pytest.raises(lab.RankTimeout):
        lab.launch(run_cell(STUBBORN.format(last="time.sleep(60)")), nproc=2, timeout_s=1)
    assert time.monotonic() - begin < 15
    assert not left_over()


def test_children_of_ranks_end_with_the_run() -> None:
    lab.launch(run_cell(STUBBORN.format(last="return")), nproc=2)
    assert not left_over()


def test_a_rank_that_fails_while_the_other_ignores_signals() -> None:
    begin = time.monotonic()
    last = 'time.sleep(0.5)\n    if rank.index == 1:\n        raise ValueError("boom")\n    time.sleep(60)'
    with pytest.raises(lab.LaunchError, match="Rank 1 of 2 raised ValueError: boom"):
        lab.launch(run_cell(STUBBORN.format(last=last)), nproc=2)
    assert time.monotonic() - begin < 20


def test_a_thread_keeps_a_failed_rank_from_ending() -> None:
    work = run_cell("""
import threading, time
def train(rank):
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("boom")
""")
    with pytest.raises(lab.LaunchError, match="Rank 0 of 1 raised ValueError: boom"):
        lab.launch(work, nproc=1)


def test_prints_100_mb(capsys: pytest.CaptureFixture[str]) -> None:
    work = run_cell("""
def train(rank):
    for i in range(100):
        print("x" * 999_999)
    print("the end")
""")
    run = lab.launch(work, nproc=1)
    assert len(run.logs()) == 100 * 1_000_000 + len("the end\n")
    shown = capsys.readouterr().out
    assert shown.endswith("[0] the end\n")
    assert "not shown here, but in the run's logs" in shown
    assert len(shown) < 10_000_000


def test_results_of_200_mb() -> None:
    work = run_cell("import torch\ndef train(rank):\n    return torch.full((25_000_000,), float(rank.index))")
    results = lab.launch(work, nproc=2).results
    assert [(len(x), float(x[-1])) for x in results] == [(25_000_000, 0.0), (25_000_000, 1.0)]


def test_the_disk_fills_up_while_it_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = here / "disk"
    disk.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=24m tmpfs {disk} 2>/dev/null"):
        pytest.skip("only root may mount a small disk")
    monkeypatch.setenv("LABKIT_RUNS", str(disk / "runs"))
    try:
        result = run_cell("def train(rank):\n    rank.report(loss=2.5)\n    return bytes(50_000_000)")
        with pytest.raises(lab.LaunchError) as caught:
            lab.launch(result, nproc=1)
        assert caught.value.fact == (
            "Rank 0 of 1 returned a value of type bytes that can't be sent back: "
            "OSError: [Errno 28] No space left on device"
        )
        assert lab.Run.open(caught.value.folder).metrics["loss"].tolist() == [2.5]
        checkpoint = run_cell("def train(rank):\n    open('disk/checkpoint', 'wb').write(bytes(50_000_000))")
        with pytest.raises(lab.LaunchError) as caught:
            lab.launch(checkpoint, nproc=1)
        assert "is full, 0 B free, so the reason could not be written." in str(caught.value)
        with pytest.raises(lab.MachineError, match=r"The disk of .* is full: 0 B free, a run folder"):
            lab.launch(checkpoint, nproc=1)
    finally:
        os.system(f"umount -l {disk}")


def test_a_run_folder_on_a_read_only_disk(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = here / "disk"
    disk.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o ro,size=24m tmpfs {disk} 2>/dev/null"):
        pytest.skip("only root may mount a read-only disk")
    monkeypatch.setenv("LABKIT_RUNS", str(disk))
    try:
        with pytest.raises(lab.MachineError, match=r"The run folder can't be written: Read-only file system\."):
            lab.launch(run_cell("def train(rank):\n    pass"), nproc=1)
    finally:
        os.system(f"umount -l {disk}")


LAUNCH = JOB + 'lab.launch(train, "quiet", nproc=2)'


@pytest.mark.parametrize("round_", range(10))
def test_interrupt_at_a_random_moment(here: Path, round_: int) -> None:
    """The first rounds fall while the server imports, the last while the ranks run."""
    program = Program(LAUNCH, here / "runs")
    eventually(lambda: program.others() or program.process.poll() is not None, 20)
    time.sleep(random.Random(round_).uniform(0, 0.25) + 0.25 * round_)
    program.interrupt()
    output = program.output(20)
    assert program.process.returncode in (-signal.SIGINT, 1), output
    assert "KeyboardInterrupt" in output or "Interrupted" in output
    assert eventually(lambda: not marked(program.mark), 5), marked(program.mark)


def test_double_interrupt(here: Path) -> None:
    program = Program(LAUNCH, here / "runs")
    assert program.reported()
    for _ in range(5):
        program.interrupt()
        time.sleep(0.01)
    output = program.output(20)
    assert "what it reported is kept" in output
    assert eventually(lambda: not marked(program.mark), 5)
    run = lab.Run.open(program.reported()[0].parents[1])
    assert (run.outcome, run.metrics["loss"].tolist()) == ("interrupted", [2.5, 2.5])


@pytest.mark.parametrize("state", ["printing", "quiet", "stuck"])
def test_the_launching_process_is_killed(here: Path, state: str) -> None:
    program = Program(JOB + f'lab.launch(train, "{state}", nproc=2)', here / "runs")
    assert program.reported()
    time.sleep(0.2)
    program.kill()
    program.output()
    assert eventually(lambda: not marked(program.mark), 5), marked(program.mark)
    run = lab.Run.open(program.reported()[0].parents[1])
    assert (run.outcome, run.metrics["loss"].tolist()) == ("unfinished", [2.5, 2.5])


def test_the_server_ends_when_its_notebook_dies_in_the_middle_of_asking() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-u", "-m", "labkit.runs.warm_server", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as server, theirs:
        assert ours.recv(16) == b"ready"
        socket.send_fds(ours, [(1000).to_bytes(4, "big")], [theirs.fileno()])
        ours.send(b"{")
        ours.close()
        assert server.wait(20) == 0
