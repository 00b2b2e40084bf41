"""What a learner reads when a launch goes wrong: whole texts, with only paths and times taken out."""

from __future__ import annotations

import re
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import labkit as lab
from labkit.runs import call as call_module
from labkit.runs import launcher

from ..conftest import run_cell

IMPORTS = "import os, signal, sys, threading, time\nimport torch, torch.distributed as dist\n"
TRY_STDERR = 'Try: print(lab.Run.open("runs/RUN").logs(rank={}, stream="stderr"))'
COLLECTIVE = "A collective ends when all ranks have called it"
LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|recvValue failed|failed to recv, got 0 bytes")


def train(body: str, *, group: bool = True) -> Any:
    """A worker function with this body, typed in a cell; its first line is line 5 (4 without a group)."""
    lines = ["dist.init_process_group(rank.backend)"] if group else []
    lines += body.strip("\n").splitlines()
    return run_cell(IMPORTS + "def train(rank):\n" + "".join(f"    {line}\n" for line in lines))


def error_of(target: Any, *args: Any, kind: type = lab.LaunchError, nproc: Any = 2, **options: Any) -> Any:
    with pytest.raises(kind) as caught:
        lab.launch(target, *args, nproc=nproc, **options)
    assert type(caught.value) is kind
    return caught.value


def shown(error: Exception) -> list[str]:
    """The text by lines; run folders are named RUN, lost connections LOST, and echoes may be missing."""
    text = re.sub(r"\d{8}-\d{6}-\w+(-\d+)?", "RUN", str(error)).replace(str(Path.cwd()), "HERE")
    lines = LOST.sub("LOST", text).splitlines()
    lines = [line for line in lines if not re.fullmatch(r"\s+[~^]+", line)]  # Python 3.11 underlines what failed
    return [line for line in lines if line not in ("Rank 0 only echoes it: LOST.", "Rank 1 did the same.")]


def boom_text(line: int, try_: str = TRY_STDERR.format(1)) -> list[str]:
    return [
        "Rank 1 of 2 raised ValueError: boom",
        "    Traceback (most recent call last):",
        f'      File "the cell", line {line}, in train',
        '        raise ValueError("boom")',
        "    ValueError: boom",
        try_,
    ]


def test_one_rank_raises(warm: bool) -> None:
    work = train('rank.report(loss=2.5)\nif rank.index == 1:\n    raise ValueError("boom")\ntime.sleep(60)')
    error = error_of(work, warm=warm)
    assert shown(error) == boom_text(7)
    assert error.rank == 1
    assert "labkit" not in error.traceback
    run = lab.Run.open(error.folder)
    assert run.outcome == "failed"
    assert set(run.metrics.query("rank == 1")["loss"]) == {2.5}
    assert 'raise ValueError("boom")' in run.logs(rank=1, stream="stderr")


def test_rank_1_raises_while_rank_0_waits_for_it_20_of_20() -> None:
    work = train('if rank.index == 1:\n    raise ValueError("boom")\ndist.all_reduce(torch.ones(4))')
    assert [shown(error_of(work)) for _ in range(20)] == [boom_text(6)] * 20


def test_the_group_is_closed_before_the_account_is_written_10_of_10() -> None:
    work = train("""
try:
    if rank.index == 1:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(4))
finally:
    dist.destroy_process_group()
""")
    assert [shown(error_of(work)) for _ in range(10)] == [boom_text(7)] * 10


def test_the_cause_sleeps_before_it_raises_and_the_other_dies_of_it() -> None:
    work = train("""
if rank.index == 1:
    dist.destroy_process_group()
    time.sleep(0.3)
    raise ValueError("boom")
dist.all_reduce(torch.ones(4))
""")
    assert shown(error_of(work)) == boom_text(8)


def test_all_ranks_raise() -> None:
    error = error_of(train('time.sleep(0.2)\nraise ValueError("boom")', group=False))
    assert shown(error)[1:5] == boom_text(5)[1:5]
    assert re.fullmatch(r"Rank \d of 2 raised ValueError: boom", shown(error)[0])


def test_a_chain_of_exceptions_is_quoted() -> None:
    body = 'try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError("no loss") from error'
    assert shown(error_of(train(body, group=False), nproc=1)) == [
        "Rank 0 of 1 raised RuntimeError: no loss",
        "    Traceback (most recent call last):",
        '      File "the cell", line 5, in train',
        "        1 / 0",
        "    ZeroDivisionError: division by zero",
        "",
        "    The above exception was the direct cause of the following exception:",
        "",
        "    Traceback (most recent call last):",
        '      File "the cell", line 7, in train',
        '        raise RuntimeError("no loss") from error',
        "    RuntimeError: no loss",
        TRY_STDERR.format(0),
    ]


@pytest.mark.parametrize("code", ["3", '"no data"'])
def test_sys_exit(code: str) -> None:
    error = error_of(train(f"if rank.index == 1:\n    sys.exit({code})\ntime.sleep(60)", group=False))
    assert shown(error) == [
        f"Rank 1 of 2 called sys.exit({code}) at line 5 of the cell, in train: sys.exit({code})",
        TRY_STDERR.format(1),
    ]
    assert error.rank == 1


def test_sys_exit_0_is_no_failure() -> None:
    assert lab.launch(train("sys.exit(0)", group=False), nproc=2).results == (None, None)


def test_os_exit() -> None:
    error = error_of(train("if rank.index == 1:\n    os._exit(5)\ntime.sleep(60)", group=False))
    assert shown(error) == [
        "Rank 1 of 2 ended with exit code 5 without an exception.",
        "It wrote no error, no report and nothing on stderr.",
        TRY_STDERR.format(1),
    ]


def test_hang() -> None:
    work = train("rank.report(loss=2.5)\nif rank.index == 1:\n    time.sleep(60)\ndist.all_reduce(torch.ones(4))")
    error = error_of(work, kind=lab.RankTimeout, timeout_s=2)
    assert shown(error) == [
        "2 of 2 ranks were still running after timeout_s=2.",
        "Rank 0 waits in all_reduce, line 8 of the cell, in train: dist.all_reduce(torch.ones(4))",
        "Rank 1 is at line 7 of the cell, in train: time.sleep(60)",
        f"{COLLECTIVE}: everyone waits for rank 1.",
        "Try: lab.launch(…, timeout_s=None)   (no limit, if it was only slow)",
    ]
    assert error.rank == 1
    assert "in train" in error.stacks[1]
    assert lab.Run.open(error.folder).metrics["loss"].tolist() == [2.5, 2.5]


def test_hang_in_backward_of_ddp() -> None:
    work = train("""
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
loss = model(torch.ones(2, 4)).sum()
if rank.index == 1:
    time.sleep(60)
loss.backward()
""")
    assert shown(error_of(work, kind=lab.RankTimeout, timeout_s=5))[1:4] == [
        "Rank 0 waits in backward, line 9 of the cell, in train: loss.backward()",
        "Rank 1 is at line 8 of the cell, in train: time.sleep(60)",
        f"{COLLECTIVE}: everyone waits for rank 1.",
    ]


def test_one_rank_returns_early() -> None:
    error = error_of(train("if rank.index == 1:\n    return\ndist.all_reduce(torch.ones(4))"))
    assert shown(error) == [
        "Rank 1 of 2 returned while another rank was still waiting for it in a collective.",
        "Rank 0 was waiting for it at line 7 of the cell, in train: dist.all_reduce(torch.ones(4))",
        f"{COLLECTIVE}, so every rank must make as many calls.",
        "Try: let every rank run the same number of steps, or use DDP's join()",
    ]


def test_killed(warm: bool) -> None:
    body = "rank.report(step=3, loss=1.5)\nif rank.index == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    error = error_of(train(body + "dist.all_reduce(torch.ones(4))"), warm=warm)
    assert shown(error) == [
        "Rank 1 of 2 was killed by signal 9 (SIGKILL).",
        "Its last report: step 3, loss 1.5.",
        "Try: dmesg | grep -i 'killed process'   (Linux kills a process when memory runs out)",
    ]
    assert error.rank == 1


def test_killed_while_the_other_waits_10_of_10() -> None:
    work = train("if rank.index == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(torch.ones(4))")
    assert {shown(error_of(work))[0] for _ in range(10)} == {"Rank 1 of 2 was killed by signal 9 (SIGKILL)."}


def test_crashed() -> None:
    body = "if rank.index == 1:\n    os.kill(os.getpid(), signal.SIGSEGV)\ndist.all_reduce(torch.ones(4))"
    assert shown(error_of(train(body))) == [
        "Rank 1 of 2 was killed by signal 11 (SIGSEGV).",
        "It stood at line 6 of the cell, in train: os.kill(os.getpid(), signal.SIGSEGV)",
        TRY_STDERR.format(1),
    ]


def test_wrong_shape() -> None:
    error = error_of(train("dist.all_reduce(torch.ones(4 + rank.index))\ntime.sleep(1)"))
    lines = shown(error)
    assert lines[0] == "Rank 0 of 2 was killed by signal 6 (SIGABRT)."
    assert "Received data size doesn't match expected size" in lines[1]
    assert lines[2:] in (
        [
            "It stood at line 5 of the cell, in train: dist.all_reduce(torch.ones(4 + rank.index))",
            *other,
            'Try: lab.launch(…, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})   (checks that ranks agree on shapes)',
        ]
        for other in ([], ["Rank 1 only echoes it: LOST."])
    )


def test_wrong_shape_in_detail() -> None:
    work = train("dist.all_reduce(torch.ones(4 + rank.index))\ntime.sleep(1)")
    error = error_of(work, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    lines, rank, other = shown(error), error.rank, 1 - error.rank
    said = [f"RuntimeError: the ranks called different collectives: Tensor shapes: {a}vs {b}" for a, b in ("45", "54")]
    assert lines[:5] == [
        f"Rank {rank} of 2 raised {said[rank]}",
        "    Traceback (most recent call last):",
        '      File "the cell", line 5, in train',
        "        dist.all_reduce(torch.ones(4 + rank.index))",
        "      … 2 calls in libraries …",
    ]
    assert lines[5].startswith("    RuntimeError: Detected mismatch between collectives on ranks.")
    assert lines[6:] in (
        [f"Rank {other}, later: {said[other]}", TRY_STDERR.format(rank)],
        [TRY_STDERR.format(rank)],
    )


def test_argument_that_cannot_be_sent(here: Path) -> None:
    work = run_cell("def train(rank, lock):\n    pass")
    assert shown(error_of(work, threading.Lock(), kind=lab.UsageError)) == [
        "train can't be sent to other processes: cannot pickle '_thread.lock' object.",
        "It is argument 'lock', of type lock.",
        "Try: make it inside the function, or pass what it is made from",
    ]
    assert list((here / "runs").iterdir()) == []


def test_variable_that_cannot_be_sent() -> None:
    work = run_cell("import threading\nlock = threading.Lock()\ndef train(rank):\n    return lock")
    assert shown(error_of(work, kind=lab.UsageError))[1] == "It is variable 'lock', of type lock."
    inner = run_cell(
        "import threading\ndef make():\n    lock = threading.Lock()\n    return lambda rank: lock\nf = make()"
    )
    assert shown(error_of(inner, kind=lab.UsageError))[1] == "It is variable 'lock', of type lock."


def test_result_that_cannot_be_sent() -> None:
    error = error_of(train("time.sleep(rank.index * 30)\nreturn threading.Lock()", group=False))
    assert shown(error) == [
        "Rank 0 of 2 returned a value of type lock that can't be sent back: "
        "TypeError: cannot pickle '_thread.lock' object",
        "Try: return numbers, tensors, or lists and dicts of them",
    ]


def test_wrong_arguments() -> None:
    work = run_cell("def train(rank, steps):\n    pass")
    assert shown(error_of(work, kind=lab.UsageError)) == [
        "train(rank, steps) can't be called as train(rank): missing a required argument: 'steps'.",
        "Each rank calls it with its Rank first, then with what launch was given.",
        "Try: lab.launch(train, steps, nproc=2)",
    ]


def test_script_that_is_not_there(here: Path) -> None:
    assert shown(error_of("train.py", kind=lab.UsageError)) == [
        "There is no script 'train.py' in HERE.",
        "There are no Python files there.",
        "Try: %%writefile train.py",
    ]
    (here / "trian.py").write_text("")
    assert shown(error_of("train.py", kind=lab.UsageError))[1:] == [
        "Python files there: trian.py.",
        'Try: lab.launch("trian.py", nproc=2)',
    ]


def test_folder_as_script(here: Path) -> None:
    (here / "scripts").mkdir()
    (here / "scripts" / "train.py").write_text("")
    assert shown(error_of("scripts", kind=lab.UsageError)) == [
        "'scripts' is a folder, not a script.",
        "Python files there: train.py.",
        'Try: lab.launch("scripts/train.py", nproc=2)',
    ]


def test_script_with_a_syntax_error(here: Path) -> None:
    (here / "train.py").write_text("import os\nfor i in range(3)\n    print(i)\n")
    assert shown(error_of("train.py", kind=lab.UsageError)) == [
        "train.py is not valid Python: expected ':' in line 2.",
        "    for i in range(3)",
        "Try: python train.py",
    ]


def test_script_that_raises(here: Path) -> None:
    (here / "train.py").write_text(
        "import time\nimport labkit as lab\n\nrank = lab.Rank.current()\n\n\ndef main():\n"
        '    if rank.index == 1:\n        raise RuntimeError("no data")\n    time.sleep(60)\n\n\nmain()\n'
    )
    assert shown(error_of("train.py")) == [
        "Rank 1 of 2 raised RuntimeError: no data",
        "    Traceback (most recent call last):",
        '      File "HERE/train.py", line 13, in <module>',
        "        main()",
        '      File "HERE/train.py", line 9, in main',
        '        raise RuntimeError("no data")',
        "    RuntimeError: no data",
        TRY_STDERR.format(1),
    ]


def test_script_with_wrong_options(here: Path) -> None:
    (here / "train.py").write_text(
        'import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument("--steps", type=int)\n'
        "args = parser.parse_args()\n"
    )
    assert shown(error_of("train.py", "--steps", "many", nproc=1)) == [
        "Rank 0 of 1 called sys.exit(2) at line 5 of train.py, in <module>: args = parser.parse_args()",
        "Its last words on stderr: usage: train.py [-h] [--steps STEPS] / "
        "train.py: error: argument --steps: invalid int value: 'many'",
        TRY_STDERR.format(0),
    ]


NOTHING = "def train(rank):\n    pass"


@pytest.mark.parametrize("nproc", [0, -1, 1.5, True, "2", None])
def test_nproc(nproc: Any) -> None:
    assert shown(error_of(run_cell(NOTHING), nproc=nproc, kind=lab.UsageError)) == [
        f"nproc is {nproc!r}, but must be a whole number of ranks, 1 or more.",
        "Try: nproc=2",
    ]


@pytest.mark.parametrize(
    ("num_gpus", "texts"),
    [
        (
            0,
            [
                'nproc=2 ranks with device="cuda" need 2 GPUs, but this machine has 0.',
                'device="auto"   (gloo on the CPU)',
            ],
        ),
        (1, ['nproc=2 ranks with device="cuda" need 2 GPUs, but this machine has 1.', "nproc=1"]),
    ],
)
def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch, num_gpus: int, texts: list[str]) -> None:
    monkeypatch.setattr(call_module, "count_gpus", lambda env: num_gpus)
    assert shown(error_of(run_cell(NOTHING), device="cuda", kind=lab.UsageError)) == [
        texts[0],
        "NCCL refuses two ranks on one GPU.",
        f"Try: {texts[1]}",
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "gpu"}, "device is 'gpu'; it can be 'auto', 'cpu' or 'cuda'.\nTry: device=\"auto\""),
        (
            {"timeout_s": 0},
            "timeout_s is 0, but must be a number above 0, or None for no limit.\nTry: timeout_s=60",
        ),
        (
            {"timeout_s": "60"},
            "timeout_s is '60', but must be a number above 0, or None for no limit.\nTry: timeout_s=60",
        ),
        ({"env": {"A": 1}}, 'env[\'A\'] is 1, but a variable holds text.\nTry: env={"A": "1"}'),
        ({"env": ["A=1"]}, 'env is a list, but must be a dict.\nTry: env={"NCCL_DEBUG": "INFO"}'),
        (
            {"env": {"A=B": "1"}},
            'env has the name \'A=B\', which can\'t be a variable.\nTry: env={"NCCL_DEBUG": "INFO"}',
        ),
    ],
)
def test_options(options: dict[str, Any], text: str) -> None:
    assert str(error_of(run_cell(NOTHING), kind=lab.UsageError, **options)) == text


def test_target_that_cannot_run() -> None:
    assert shown(error_of(5, kind=lab.UsageError)) == [
        "launch takes a function or the path of a script, not 5.",
        "Was the function called? Give it by its name alone, without ().",
        "Try: lab.launch(train, nproc=2)",
    ]


def test_no_room_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1 << 20))
    assert shown(error_of(run_cell(NOTHING), kind=lab.MachineError)) == [
        "The disk of HERE is full: 1 MiB free, a run folder wants 16 MiB.",
        "Try: rm -r runs/*   (old runs), or export LABKIT_RUNS=/a/roomier/place",
    ]


def test_no_memory() -> None:
    error = error_of(run_cell(NOTHING), nproc=100_000, kind=lab.MachineError)
    assert re.fullmatch(
        r"100000 ranks need 15\.3 TiB of memory to start, but [\d.]+ GiB is available\.\n"
        r"Try: nproc=\d+, or end other programs",
        str(error),
    )


def test_no_shared_memory() -> None:
    machine = SimpleNamespace(available_bytes=1 << 40, shm_bytes=1 << 20)
    call = SimpleNamespace(nproc=2, backend="nccl")
    with pytest.raises(lab.MachineError) as caught:
        call_module.check_room(machine, call)  # type: ignore[arg-type]
    assert shown(caught.value) == [
        "/dev/shm has 1 MiB free, NCCL may want 32 MiB for each of 2 ranks.",
        "Containers get 64 MiB unless told otherwise.",
        "Try: docker run --shm-size=1g …, or rm what fills /dev/shm",
    ]


def test_run_folder_that_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "file").write_text("")
    monkeypatch.setenv("LABKIT_RUNS", str(here / "file" / "runs"))
    lines = shown(error_of(run_cell(NOTHING), kind=lab.MachineError))
    assert lines[0] == "The run folder can't be written: Not a directory."
    assert lines[1].startswith("HERE/file/runs")
    assert lines[2] == "Try: export LABKIT_RUNS=/a/place/with/room"


def test_cold_because_of_a_broken_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "_server", [])
        server = launcher.warm_up(("no_such_module",))
        run = lab.launch(run_cell(NOTHING), nproc=1)
        server.close()
    assert run.how == "cold: the warm server ended while it was importing"
