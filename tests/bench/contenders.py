"""Three ways to start the same two-rank job from a notebook cell, as a learner would type them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

# Every job begins and ends with this; what is between is the scenario.
BEGIN = """\
import os, signal, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
me = dist.get_rank()
x = torch.ones(4)
dist.all_reduce(x)
open(f"up{me}", "w").close()
"""
END = """\
print(f"<rank {me} sum {x[0].item():g}>")
dist.destroy_process_group()
"""
LEARNER_LINE = 'raise ValueError("boom")'
JOB = ""
RAISES = f"if me == 1:\n    {LEARNER_LINE}\ndist.all_reduce(x)\n"
KILLED = "if me == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(x)\n"
STUCK = "if me == 1:\n    time.sleep(600)\ndist.all_reduce(x)\n"
PRINTS = "while True:\n    dist.all_reduce(x)\n    print('step', flush=True)\n    time.sleep(0.2)\n"
QUIET = "while True:\n    dist.all_reduce(x)\n    time.sleep(0.05)\n"
OVERLAPS = "time.sleep(1.5)\n"
TRAINS = "w = torch.randn(512, 512, requires_grad=True)\n(w @ w).sum().backward()\n"


@dataclass(frozen=True)
class Contender:
    """A way to start the job.

    Attributes:
        key: Its name in the figures.
        name: Its name in tables.
        setup: Cell that is run once.
        define: Makes the cell that holds the job's body.
        start: Cell that starts the job last defined.
        start_limited: The same with a limit of 5 s, where it offers one.
        blamed: Pattern that finds the rank which it blames for a failure in what it shows.
    """

    key: str
    name: str
    setup: str
    define: Callable[[str], str]
    start: str
    start_limited: str
    blamed: str


def body(scenario: str) -> str:
    """The whole job around a scenario."""
    return f"{BEGIN}{scenario}{END}"


def _in_function(head: str) -> Callable[[str], str]:
    return lambda scenario: f"{head}\n{textwrap.indent(body(scenario), '    ')}"


ROOT_CAUSE = r"Root Cause[\s\S]*?rank\s*: (\d+)"  # of torchrun's summary
TORCHRUN = Contender(
    key="torchrun",
    name="!torchrun",
    setup="import subprocess",
    define=lambda scenario: f"%%writefile train.py\n{body(scenario)}",
    start="!torchrun --standalone --nproc-per-node=2 train.py",
    start_limited="!torchrun --standalone --nproc-per-node=2 train.py",
    blamed=ROOT_CAUSE,
)
NOTEBOOK_LAUNCHER = Contender(
    key="notebook_launcher",
    name="notebook_launcher",
    setup="import torch\nfrom accelerate import notebook_launcher",
    define=_in_function("def train():"),
    start="notebook_launcher(train, num_processes=2)",
    start_limited="notebook_launcher(train, num_processes=2)",
    blamed=ROOT_CAUSE,
)
LAB = Contender(
    key="lab",
    name="lab.launch",
    setup="import labkit as lab\nfrom labkit.runs.launcher import warm_up\nlab.start()\nwarm_up().wait_until_ready()",
    define=_in_function("def train(rank):"),
    start="run = lab.launch(train, nproc=2)",
    start_limited="run = lab.launch(train, nproc=2, timeout_s=5)",
    blamed=r"Rank (\d+) of 2",
)
CONTENDERS = (LAB, TORCHRUN, NOTEBOOK_LAUNCHER)
