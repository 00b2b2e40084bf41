"""Launches from a real notebook kernel: what a cell shows, Interrupt, and the kernel's death."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit as lab

from .conftest import eventually, marked
from .outside import JOB, Kernel, kernel

BOOM = """
def train(rank):
    import torch.distributed as dist, torch
    dist.init_process_group(rank.backend)
    if rank.index == 1:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(4))

lab.launch(train, nproc=2)
"""


@pytest.fixture(scope="module", autouse=True)
def first_kernel(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first kernel makes jupyter_client open an event loop for good, which the check of open files would see."""
    with kernel(tmp_path_factory.mktemp("first") / "runs"):
        pass


@pytest.fixture
def notebook(here: Path) -> Iterator[Kernel]:
    with kernel(here / "runs") as running:
        assert running.run(JOB)[0] == "ok"
        yield running


def plain(lines: list[str]) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(lines))


def test_a_failed_launch_fails_the_cell_with_the_learners_line(notebook: Kernel) -> None:
    status, text, error = notebook.run(BOOM)
    assert status == "error"
    assert error["ename"] == "LaunchError"
    shown = plain(error["traceback"])
    assert shown.startswith("LaunchError: Rank 1 of 2 raised ValueError: boom\n")
    assert '    raise ValueError("boom")' in shown
    assert "labkit" not in shown
    assert "Connection" not in text
    status, text, _ = notebook.run("print(lab.launch(lambda rank: rank.index, nproc=2).results)")
    assert (status, "(0, 1)" in text) == ("ok", True)


def test_interrupts_then_the_kernels_death(notebook: Kernel) -> None:
    """The server outlives interrupted jobs, and nothing outlives the kernel."""
    for number, pause_s in enumerate([0.5, 0.1, 0.3, 0.6]):
        cell = notebook.start(f'lab.launch(train, "{"quiet" if number % 2 else "stuck"}", nproc=2)')
        eventually(lambda: len(notebook.others()) > 1, 20)
        time.sleep(pause_s)
        os.killpg(os.getpgid(notebook.pid()), signal.SIGINT)
        if number == 3:
            os.killpg(os.getpgid(notebook.pid()), signal.SIGINT)
        status, _, error = notebook.finish(cell)
        assert (status, error["ename"]) == ("error", "Interrupted")
        assert "labkit/" not in plain(error["traceback"])
        assert eventually(lambda: len(notebook.others()) == 1, 5), notebook.others()
    assert notebook.run("print(lab.launch(lambda rank: rank.index, nproc=2).how)")[1] == "warm\n"
    notebook.start('lab.launch(train, "stuck", nproc=2)')
    assert eventually(lambda: len(notebook.others()) >= 5, 20)
    notebook.manager.provisioner.process.kill()
    assert eventually(lambda: not marked(notebook.mark), 5), marked(notebook.mark)


def test_launch_after_the_kernel_has_run_a_backward_and_in_a_loop(notebook: Kernel) -> None:
    status, text, _ = notebook.run("""
import torch
torch.set_num_threads(2)
x = torch.ones(512, 512, requires_grad=True)
(x @ x).sum().backward()

def train_here(rank):
    import torch
    x = torch.ones(512, 512, requires_grad=True)
    (x @ x).sum().backward()
    return x.grad[0, 0].item()

print([lab.launch(train_here, nproc=2).results for _ in range(3)])
""")
    assert (status, "[(1024.0, 1024.0), (1024.0, 1024.0), (1024.0, 1024.0)]" in text) == ("ok", True)


def test_12_lines_train_a_gpt(notebook: Kernel) -> None:
    status, text, _ = notebook.run("""
def train_gpt(rank, shape):
    import torch, torch.distributed as dist
    from labkit.workloads.gpt import GPT
    dist.init_process_group(rank.backend)
    model = torch.nn.parallel.DistributedDataParallel(GPT(shape))
    tokens = torch.randint(256, (2, shape.sequence_length + 1))
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item()
print([type(loss).__name__ for loss in lab.launch(train_gpt, lab.GPTShape.of_depth(2), nproc=2).results])
""")
    assert (status, text.endswith("['float', 'float']\n")) == ("ok", True), text


def test_open_reads_what_a_kernel_left(here: Path, notebook: Kernel) -> None:
    notebook.run(BOOM)
    (folder,) = (here / "runs").iterdir()
    assert lab.Run.open(folder).outcome == "failed"
