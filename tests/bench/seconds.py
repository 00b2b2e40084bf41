"""How long a whole two-rank job takes from its cell: labkit warm and cold beside torchrun and notebook_launcher."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import psutil

from tests.bench.contenders import JOB, LAB, NOTEBOOK_LAUNCHER, TORCHRUN, Contender
from tests.bench.kernels import Cell, Kernel
from tests.bench.tables import Figure, Table, say, spread_text

NUM_TORCHRUN_THREE = 2
Samples = dict[str, list[float]]

# `!` itself costs 0.1 s, so the rival is started without it.
COMMAND = '["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]'
SUBPROCESS = replace(
    TORCHRUN, start=f"print(subprocess.run({COMMAND}, check=True, capture_output=True, text=True).stdout)"
)
NOT_STARTED = replace(LAB, setup="import labkit as lab")
COLD_START = "run = lab.launch(train, nproc=2, warm=False)"


def rounds(home: Path, num_rounds: int) -> Samples:
    """Samples of every figure, the contenders in turn, each in a fresh kernel; every round begins with another one."""
    samples: Samples = defaultdict(list)
    takes = (_time_lab, _time_torchrun, _time_notebook_launcher, _time_not_started)
    for index in range(num_rounds):
        say(f"seconds of a whole job: round {index + 1} of {num_rounds}")
        for turn in range(len(takes)):
            take = takes[(index + turn) % len(takes)]
            with Kernel(home / f"{take.__name__}_{index}") as kernel:
                take(kernel, samples, index)
    return samples


def _time_lab(kernel: Kernel, samples: Samples, _: int) -> None:
    samples["lab_setup_s"].append(worked(kernel.run(LAB.setup)).seconds)
    _time_three(kernel, LAB, samples)
    samples["cold_s"].append(worked(kernel.run(COLD_START)).seconds)
    memory = server_of(kernel).memory_full_info()
    samples["server_rss_mib"].append(memory.rss / 2**20)
    samples["server_pss_mib"].append(memory.pss / 2**20)


def _time_torchrun(kernel: Kernel, samples: Samples, index: int) -> None:
    """Every start of it is the same to it, so the costly samples go to one of the three."""
    worked(kernel.run(SUBPROCESS.setup))
    if index < NUM_TORCHRUN_THREE:
        return _time_three(kernel, SUBPROCESS, samples)
    worked(kernel.run(SUBPROCESS.define(JOB)))
    samples["torchrun_again_s"].append(_succeeded(kernel.run(SUBPROCESS.start)).seconds)


def _time_notebook_launcher(kernel: Kernel, samples: Samples, _: int) -> None:
    samples["notebook_launcher_setup_s"].append(worked(kernel.run(NOTEBOOK_LAUNCHER.setup)).seconds)
    _time_three(kernel, NOTEBOOK_LAUNCHER, samples)


def _time_not_started(kernel: Kernel, samples: Samples, _: int) -> None:
    kernel.run(NOT_STARTED.setup)
    samples["first_without_start_s"].append(_define_and_start(kernel, NOT_STARTED, JOB))


def _time_three(kernel: Kernel, contender: Contender, samples: Samples) -> None:
    """The first job of a kernel, the same again, and another function or file."""
    samples[f"{contender.key}_first_s"].append(_define_and_start(kernel, contender, JOB))
    samples[f"{contender.key}_again_s"].append(_succeeded(kernel.run(contender.start)).seconds)
    samples[f"{contender.key}_edited_s"].append(_define_and_start(kernel, contender, "dist.all_reduce(x)\n"))


def _define_and_start(kernel: Kernel, contender: Contender, scenario: str) -> float:
    defined = worked(kernel.run(contender.define(scenario)))
    return defined.seconds + _succeeded(kernel.run(contender.start)).seconds


def worked(cell: Cell) -> Cell:
    """The cell, if it did what it should.

    Raises:
        RuntimeError: A contender that fails here can't be timed.
    """
    if cell.status != "ok":
        raise RuntimeError(f"A cell that should work is {cell.status} after {cell.seconds:.1f} s:\n{cell.text}")
    return cell


def _succeeded(cell: Cell) -> Cell:
    """The cell of a job, if both ranks said their sum."""
    if worked(cell).text.count("<rank") != 2:
        raise RuntimeError(f"Two ranks should have spoken:\n{cell.text}")
    return cell


def server_of(kernel: Kernel) -> psutil.Process:
    """The kernel's warm server."""
    children = psutil.Process(kernel.pid).children()
    return next(child for child in children if "labkit.runs.warm_server" in child.cmdline())


def figures(samples: Samples) -> dict[str, Figure]:
    """The figures of the launch: medians and their ratios."""
    medians = {key: statistics.median(values) for key, values in samples.items()}
    warm_s, torchrun_s = medians["lab_again_s"], medians["torchrun_again_s"]
    peers = {f"peers_{when}_s_{key}": medians[f"{key}_{when}_s"] for when in WHEN for key in KEYS}
    return {
        "warm_over_torchrun": warm_s / torchrun_s,
        "cold_over_torchrun": medians["cold_s"] / torchrun_s,
        "warm_over_notebook_launcher": warm_s / medians["notebook_launcher_again_s"],
        "first_without_start_over_cold": medians["first_without_start_s"] / medians["cold_s"],
        "warm_s": warm_s,
        "cold_s": medians["cold_s"],
        "torchrun_s": torchrun_s,
        "notebook_launcher_s": medians["notebook_launcher_again_s"],
        "first_s": medians["lab_first_s"],
        "first_without_start_s": medians["first_without_start_s"],
        "server_ready_s": medians["lab_setup_s"],
        "server_rss_mib": medians["server_rss_mib"],
        "server_pss_mib": medians["server_pss_mib"],
        **peers,
    }


WHEN = ("first", "again", "edited")
KEYS = (LAB.key, TORCHRUN.key, NOTEBOOK_LAUNCHER.key)


def table(samples: Samples) -> Table:
    """A row a contender."""

    def row(name: str, *keys: str) -> tuple[str, ...]:
        return name, *(spread_text(samples[key]) if key else "" for key in keys)

    def three(key: str) -> tuple[str, ...]:
        return tuple(f"{key}_{when}_s" for when in WHEN)

    return Table(
        f"Seconds of a whole job of 2 ranks (init, all_reduce, destroy) from its cell: median [least … most] of "
        f"{len(samples['cold_s'])}, fresh kernels, order rotated",
        ("", "set-up cell", *WHEN),
        (
            row("lab.launch, server ready", "lab_setup_s", *three("lab")),
            row("lab.launch without lab.start()", "", "first_without_start_s", "", ""),
            row("lab.launch(warm=False)", "", "", "cold_s", ""),
            row("torchrun as a subprocess", "", *three("torchrun")),
            row("accelerate.notebook_launcher", "notebook_launcher_setup_s", *three("notebook_launcher")),
        ),
        f"torchrun's first and edited are of {NUM_TORCHRUN_THREE}.\nIdle warm server after these: RSS {spread_text(samples['server_rss_mib'])} MiB, "
        f"PSS {spread_text(samples['server_pss_mib'])} MiB.",
    )
