"""What labkit costs a training that runs under it, and how well DDP scales: lab 05's script, with rivals interleaved."""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench import train_ddp
from tests.bench.contenders import LAB
from tests.bench.kernels import Kernel, marked_environment, marked_processes
from tests.bench.seconds import Samples, worked
from tests.bench.tables import Figure, Table, say, spread_text

TOKENS_A_STEP = train_ddp.BATCH_SIZE * 128
SAMPLE_EVERY_S = 0.2


@dataclass
class Bystanders:
    """Watches, from outside, the processor time of all processes of a run while it trains."""

    mark: str
    out: Path
    samples: list[tuple[float, dict[int, float]]] = field(default_factory=list)

    def __enter__(self) -> Bystanders:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        """Look for the processes once, since that costs some itself; then only read their clocks."""
        while not (self.out / train_ddp.STARTED).exists() and not self._ended.wait(0.05):
            continue
        pids = [process.pid for process in marked_processes(self.mark)]
        while not self._ended.wait(SAMPLE_EVERY_S):
            self.samples.append((time.time(), {pid: _processor_s(pid) for pid in pids}))

    def shares(self, ranks: list[dict[str, Any]]) -> dict[int, float]:
        """Share of one core that each process beside the ranks took while all ranks trained, by process."""
        begin, end = max(rank["begin"] for rank in ranks), min(rank["end"] for rank in ranks)
        inside = [sample for sample in self.samples if begin <= sample[0] <= end]
        (first, before), (last, after) = inside[0], inside[-1]
        others = before.keys() - {rank["pid"] for rank in ranks}
        return {pid: (after[pid] - before[pid]) / (last - first) for pid in others}


def _processor_s(pid: int) -> float:
    """Processor time of a process so far, to the nanosecond (/proc rounds to 10 ms); 0 if it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3) on Linux
    except OSError:
        return 0.0


def rounds(home: Path, num_rounds: int, steps: int) -> Samples:
    """Samples of two ranks under labkit, two under plain torchrun, one under labkit, in turn."""
    samples: Samples = defaultdict(list)
    with Kernel(home / "training") as kernel:
        worked(kernel.run(LAB.setup))
        for index in range(num_rounds):
            say(f"training: round {index + 1} of {num_rounds}")
            takes = [_two_under_lab, _two_under_torchrun, _one_under_lab]
            for turn in range(len(takes)):
                take = takes[(index + turn) % len(takes)]
                out = home / f"training_{take.__name__}_{index}"
                out.mkdir()
                take(kernel, out, steps, samples)
            samples["paired_ratio"].append(samples["lab_step_s"][-1] / samples["torchrun_step_s"][-1])
    return samples


def _two_under_lab(kernel: Kernel, out: Path, steps: int, samples: Samples) -> None:
    with Bystanders(kernel.mark, out) as bystanders:
        worked(kernel.run(_lab_cell(out, steps, 2)))
    ranks = _ranks(out, 2)
    loop_s = sum(map(sum, (ranks[0]["training_s"], ranks[0]["reporting_s"])))
    samples["reporting_fraction"].append(sum(ranks[0]["reporting_s"]) / loop_s)
    samples["reporting_s"].append(sum(ranks[0]["reporting_s"]) / steps)
    shares = bystanders.shares(ranks)
    samples["lab_bystanders"].append(sum(shares.values()))
    samples["lab_kernel"].append(shares[kernel.pid])
    samples["lab_step_s"].append(_step_s(ranks))


def _two_under_torchrun(_: Kernel, out: Path, steps: int, samples: Samples) -> None:
    mark = uuid.uuid4().hex
    command = ["torchrun", "--standalone", "--nproc-per-node=2", train_ddp.__file__, str(steps), str(out)]
    with Bystanders(mark, out) as bystanders:
        env = marked_environment(mark, out) | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, capture_output=True, env=env, timeout=120)
    ranks = _ranks(out, 2)
    samples["torchrun_bystanders"].append(sum(bystanders.shares(ranks).values()))
    samples["torchrun_step_s"].append(_step_s(ranks))


def _one_under_lab(kernel: Kernel, out: Path, steps: int, samples: Samples) -> None:
    worked(kernel.run(_lab_cell(out, steps, 1)))
    samples["one_step_s"].append(_step_s(_ranks(out, 1)))


def _lab_cell(out: Path, steps: int, nproc: int) -> str:
    return f"run = lab.launch({train_ddp.__file__!r}, {steps}, {str(out)!r}, nproc={nproc}, device='cpu')"


def _ranks(out: Path, nproc: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(nproc)]


def _step_s(ranks: list[dict[str, Any]]) -> float:
    """Seconds of a step: the median of those of rank 0, which waits for the others in each."""
    return float(statistics.median(ranks[0]["training_s"]))


def figures(samples: Samples) -> dict[str, Figure]:
    """The figures of reporting and of scaling.

    Scaling compares the best runs: what else the machine does can only slow a run, and two ranks more than one.
    """
    median = {key: statistics.median(values) for key, values in samples.items()}
    watching = max(0.0, median["lab_bystanders"] - median["torchrun_bystanders"])
    return {
        "reporting_overhead_fraction": median["reporting_fraction"] + watching,
        "reporting_in_rank_fraction": median["reporting_fraction"],
        "watching_core_fraction": watching,
        "watching_kernel_core_fraction": median["lab_kernel"],
        "reporting_paired_ratio": median["paired_ratio"],
        "reporting_s": median["reporting_s"],
        "lab_step_s": median["lab_step_s"],
        "torchrun_step_s": median["torchrun_step_s"],
        "one_rank_step_s": median["one_step_s"],
        "lab_tokens_per_s": 2 * TOKENS_A_STEP / median["lab_step_s"],
        "torchrun_tokens_per_s": 2 * TOKENS_A_STEP / median["torchrun_step_s"],
        "one_rank_tokens_per_s": TOKENS_A_STEP / median["one_step_s"],
        "ddp_efficiency": min(samples["one_step_s"]) / min(samples["lab_step_s"]),
        "ddp_efficiency_of_medians": median["one_step_s"] / median["lab_step_s"],
    }


def table(samples: Samples) -> Table:
    """A row a way to run it."""

    def row(name: str, key: str, nproc: int, *rest: str) -> tuple[str, ...]:
        tokens_per_s = [nproc * TOKENS_A_STEP / step_s for step_s in samples[f"{key}_step_s"]]
        return name, spread_text(samples[f"{key}_step_s"], 1000), spread_text(tokens_per_s), *rest

    reporting = spread_text(samples["reporting_fraction"], 100)
    return Table(
        f"Lab 05's DDP (GPT depth 4, batch 8, T 128, fp32, 1 thread a rank): median [least … most] of "
        f"{len(samples['one_step_s'])} runs in turn, of each run its median step",
        ("", "step, ms", "tokens/s, all ranks", "rank.report + progress, % of loop", "beside the ranks, % of one core"),
        (
            row("labkit, 2 ranks", "lab", 2, reporting, spread_text(samples["lab_bystanders"], 100)),
            row("plain torchrun, 2 ranks", "torchrun", 2, "0", spread_text(samples["torchrun_bystanders"], 100)),
            row("labkit, 1 rank", "one", 1, "", ""),
        ),
        "Reporting overhead = report + progress inside the rank (its own clock) + the processor time of kernel, live view,\n"
        "server, guard and agent above that of plain torchrun's agent, each ms counted as if it stopped all ranks.\n"
        f"Paired, labkit's step over torchrun's: {spread_text(samples['paired_ratio'])}: the noise of the machine, "
        "shown as a check.",
    )
