"""Warm and cold give a rank the same world, and cold is literally torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import labkit as lab

from ..conftest import run_cell
from .outside import environment

WORLD = """
import atexit, logging, os, signal, sys, threading, warnings
from pathlib import Path

def describe(rank, folder):
    import random
    import numpy, torch, torch.distributed as dist
    atexit.register(Path(folder, f"atexit-{rank.index}").write_text, "ran")
    threading.Thread(target=lambda: Path(folder, f"thread-{rank.index}").write_text("ran")).start()
    streams = {
        name: (stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.isatty())
        for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout), ("stderr", sys.stderr))
    }
    umask = os.umask(0)
    os.umask(umask)
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\\0")
    dist.init_process_group(rank.backend)
    total = torch.tensor([rank.index + 1.0])
    dist.all_reduce(total)
    dist.destroy_process_group()
    same = {
        "rank": (rank.index, rank.world_size, rank.local, rank.device, rank.backend),
        "environment": dict(os.environ),
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "path": sys.path,
        "streams": streams,
        "stdin": os.readlink("/proc/self/fd/0"),
        "signals": {number.name: str(signal.getsignal(number)) for number in signal.valid_signals() if number < 32},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "umask": umask,
        "affinity": os.sched_getaffinity(0),
        "leads its session": os.getsid(0) == os.getpid(),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "main": (sys.modules["__main__"].__name__, __name__),
        "debug level": str(dist.get_debug_level()),
        "handlers": [str(handler) for handler in logging.getLogger().handlers],
        "filters": [(action, str(kind), module) for action, _, kind, module, _ in warnings.filters],
        "recursion": sys.getrecursionlimit(),
        "hooks": (sys.excepthook is sys.__excepthook__, threading.active_count()),
        "flags": str(sys.flags),
        "sum": total.item(),
    }
    chance = (random.random(), numpy.random.rand(), numpy.random.default_rng().random(), torch.rand(1).item(), torch.initial_seed())
    return same, chance, parent, os.getpid()
"""
# Ports, run ids and folders differ between any two launches; the parent's process id is in the last.
OF_THIS_RUN = re.compile(r"\d{8}-\d{6}-\w+|MASTER_PORT=\d+|torchelastic_\w+|none_\w+|attempt_\d")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    here = tmp_path_factory.mktemp("worlds")
    before = Path.cwd()
    os.chdir(here)
    try:
        describe = run_cell(WORLD)
        runs = {}
        for warm in (True, False):
            (here / str(warm)).mkdir()
            runs[warm] = lab.launch(
                describe,
                str(here / str(warm)),
                nproc=2,
                warm=warm,
                env={"TORCH_DISTRIBUTED_DEBUG": "INFO", "MY_OWN": "1"},
            )
        return runs
    finally:
        os.chdir(before)


def comparable(world: dict[str, Any]) -> dict[str, Any]:
    environment_ = {
        name: OF_THIS_RUN.sub("…", value)
        for name, value in world["environment"].items()
        if name not in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "LABKIT_RUN")
    }
    return {**world, "environment": environment_}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_same_world(worlds: dict[bool, Any], rank: int) -> None:
    warm, cold = (comparable(worlds[kind].results[rank][0]) for kind in (True, False))
    for key in cold:
        assert warm[key] == cold[key], key
    assert set(worlds[True].results[rank][0]["environment"]) == set(worlds[False].results[rank][0]["environment"])
    assert cold["rank"] == (rank, 2, rank, "cpu", "gloo")
    assert cold["sum"] == 3.0
    assert cold["environment"]["MY_OWN"] == "1"
    assert cold["debug level"] == "DebugLevel.INFO"


def test_chance_differs_between_ranks_and_launches(worlds: dict[bool, Any]) -> None:
    again = lab.launch(run_cell(WORLD), str(Path.cwd()), nproc=2)
    drawn = [number for run in (*worlds.values(), again) for result in run.results for number in result[1]]
    assert len(set(drawn)) == len(drawn) == 30


def test_exit_handlers_and_threads_run(worlds: dict[bool, Any]) -> None:
    for warm in (True, False):
        folder = worlds[warm].folder.parents[1] / str(warm)
        assert sorted(path.name for path in folder.iterdir()) == ["atexit-0", "atexit-1", "thread-0", "thread-1"]


def test_cold_is_torchrun(worlds: dict[bool, Any]) -> None:
    *_, parent, _ = worlds[False].results[0]
    assert parent[1:3] == ["-m", "torch.distributed.run"]
    assert parent[3:5] == ["--standalone", "--nproc-per-node=2"]
    assert worlds[False].how == "cold, as asked"
    *_, parent, _ = worlds[True].results[0]
    assert "labkit.runs.warm_server" in parent
    assert worlds[True].how == "warm"


def test_every_rank_of_every_launch_is_a_fresh_process(worlds: dict[bool, Any]) -> None:
    pids = [result[3] for run in worlds.values() for result in run.results]
    assert len(set(pids)) == 4
    assert os.getpid() not in pids


def test_what_a_fork_comes_too_late_for_makes_it_cold() -> None:
    run = lab.launch(run_cell("def f(rank):\n    return hash('a')"), nproc=2, env={"PYTHONHASHSEED": "0"})
    assert run.how == "cold: PYTHONHASHSEED can't change in a process that has started"
    assert len(set(run.results)) == 1


def test_a_changed_umask_makes_it_cold() -> None:
    before = os.umask(0o077)
    try:
        run = lab.launch(run_cell("def f(rank):\n    import os\n    return os.umask(0)"), nproc=1)
    finally:
        os.umask(before)
    assert run.how == "cold: the umask can't change in a process that has started"
    assert run.results == (0o077,)


def test_threads_of_a_rank() -> None:
    count = run_cell("def f(rank):\n    import torch\n    return torch.get_num_threads()")
    assert lab.launch(count, nproc=1).results == (1,)
    assert lab.launch(count, nproc=2, env={"OMP_NUM_THREADS": "2"}).results == (2, 2)


def test_a_script_and_its_arguments(here: Path) -> None:
    (here / "train.py").write_text(
        "import sys\nimport labkit as lab\nfrom beside import VALUE\n\nrank = lab.Rank.current()\n"
        'if __name__ == "__main__":\n    rank.report(value=VALUE, args=" ".join(sys.argv[1:]))\n    print(sys.argv[0])\n'
    )
    (here / "beside.py").write_text("VALUE = 7\n")
    run = lab.launch("train.py", "--name", "two words", nproc=2)
    assert run.metrics[["rank", "value", "args"]].values.tolist() == [
        [0, 7, "--name two words"],
        [1, 7, "--name two words"],
    ]
    assert run.logs() == f"{here / 'train.py'}\n"
    assert run.command.endswith(f"torchrun --standalone --nproc-per-node=2 {here / 'train.py'} --name 'two words'")


def test_the_command_does_the_same_in_a_shell(here: Path) -> None:
    run = lab.launch(run_cell("def f(rank):\n    print('hello from', rank.index)"), nproc=2)
    for path in (run.folder / "results").iterdir():
        path.unlink()
    command = f"PATH={Path(sys.executable).parent}:$PATH; {run.command}"
    done = subprocess.run(
        command, shell=True, env=environment("none", here), capture_output=True, text=True, timeout=60
    )
    assert sorted(line for line in done.stdout.splitlines() if "hello" in line) == ["hello from 0", "hello from 1"]


def test_a_script_under_plain_torchrun(here: Path) -> None:
    (here / "train.py").write_text(
        "import labkit as lab\nrank = lab.Rank.current()\nrank.report(loss=1.0)\nrank.progress(1, 2)\nprint(rank)\n"
    )
    env = {name: value for name, value in environment("none", here).items() if not name.startswith("LABKIT")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(done.stdout.splitlines()) == [
        f"Rank(index={i}, world_size=2, local={i}, device='cpu', backend='gloo')" for i in (0, 1)
    ]
    alone = subprocess.run(
        [sys.executable, "train.py"], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert alone.stdout == "Rank(index=0, world_size=1, local=0, device='cpu', backend='gloo')\n"
    assert [path.name for path in here.iterdir()] == ["train.py"]
