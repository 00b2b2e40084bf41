"""The launch beside its rivals: seconds of a whole job, cost of reporting, scaling, memory, and behaviour in trouble.

`python -m tests.bench.launch [--json]`; about five minutes on two quiet cores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil

from tests.bench import peers, seconds, training
from tests.bench.tables import Bound, Figure, Report, Table, main

NUM_ROUNDS = 7
TRAINING_STEPS = 6
BOUNDS = (
    Bound("warm_over_torchrun", "a whole warm job / plain torchrun", most=0.12),
    Bound("warm_over_notebook_launcher", "a whole warm job / accelerate.notebook_launcher", most=2),
    Bound("first_without_start_over_cold", "the first launch waits no longer than a cold one", most=1),
    Bound("reporting_overhead_fraction", "reporting and live view, of the step time", most=0.01),
    Bound("ddp_efficiency", "2 ranks × 1 thread / (2 × 1 rank × 1 thread), tokens/s", least=0.90),
    Bound("server_rss_mib", "RSS of the idle warm server, MiB", most=350),
)


def measure() -> Report:
    """Measure the launch and its rivals."""
    busy_before = psutil.cpu_percent(interval=1) / 100
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        home = Path(folder)
        whole = seconds.rounds(home / "seconds", NUM_ROUNDS)
        trained = training.rounds(home / "training", NUM_ROUNDS, TRAINING_STEPS)
        answers = peers.ask_all(home / "peers")
    figures: dict[str, Figure] = {
        **seconds.figures(whole),
        **training.figures(trained),
        **peers.figures(answers),
        "busy_before_fraction": busy_before,
    }
    tables = (
        seconds.table(whole),
        training.table(trained),
        *peers.tables(answers),
        _bounds_table(figures, busy_before),
    )
    return Report(figures, tables)


def _bounds_table(figures: dict[str, Figure], busy_before: float) -> Table:
    return Table(
        f"Bounds, for a quiet machine (its processors were {100 * busy_before:.0f} % busy before this)",
        ("figure", "here", "bound", "", "meaning"),
        tuple(bound.row(figures) for bound in BOUNDS),
    )


if __name__ == "__main__":
    main(measure)
