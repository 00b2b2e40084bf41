"""Follow a run's files while they grow: steps, metrics and printed lines, a little at a time."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.runs.run import RunFolder


@dataclass(frozen=True)
class RankView:
    """How far a rank is.

    Attributes:
        rank: Which.
        state: "starting", "running", "finished" or "failed".
        step: Steps done, 0 before the first.
        total: Steps in all, 0 where the rank said none.
        metrics: The last value of each metric it reported.
        elapsed_s: Since it started.
        silent_s: Since it last reported, progressed or printed.
    """

    rank: int
    state: str = "starting"
    step: int = 0
    total: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    elapsed_s: float = 0.0
    silent_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        elapsed_s: Since the launch began.
        ranks: One view a rank.
        lines: Lines printed since the snapshot before: (rank, text).
    """

    elapsed_s: float
    ranks: tuple[RankView, ...]
    lines: tuple[tuple[int, str], ...]

    @property
    def fraction(self) -> float:
        """Of all steps, done by the slowest rank; 0 where none said how many there are."""
        return min((view.step / view.total if view.total else 0.0) for view in self.ranks)

    @property
    def left_s(self) -> float | None:
        """Seconds left at the pace so far; None before it can be told."""
        slowest = min(self.ranks, key=lambda view: view.step)
        if not slowest.step or not slowest.total:
            return None
        return slowest.elapsed_s * (slowest.total - slowest.step) / slowest.step


class _Tail:
    """Whole lines added to a file since the last look."""

    def __init__(self) -> None:
        self._offset = 0

    def lines(self, path: Path | None) -> list[str]:
        if path is None or not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offset)
            text = file.read(1 << 20)
        end = text.rfind(b"\n") + 1
        self._offset += end
        return text[:end].decode(errors="replace").splitlines()


class Follower:
    """Reads what is new in a run folder at each `look`."""

    def __init__(self, folder: RunFolder, nproc: int) -> None:
        self._folder, self._begin = folder, time.time()
        self._views = [RankView(rank) for rank in range(nproc)]
        self._started = [0.0] * nproc
        self._heard = [0.0] * nproc
        self._metric_tails = [_Tail() for _ in range(nproc)]
        self._log_tails = [{"stdout": _Tail(), "stderr": _Tail()} for _ in range(nproc)]
        self._log_paths: dict[tuple[int, str], Path | None] = {}

    def look(self) -> Snapshot:
        """The run as it stands now."""
        lines = [(view.rank, line) for view in self._views for line in self._printed(view.rank)]
        for rank in {rank for rank, _ in lines}:
            self._heard[rank] = time.time()
        self._views = [self._update(view) for view in self._views]
        return Snapshot(time.time() - self._begin, tuple(self._views), tuple(lines))

    def _printed(self, rank: int) -> list[str]:
        found = []
        for stream, tail in self._log_tails[rank].items():
            if stream == "stderr" and self._folder.of_rank("errors", rank).exists():
                continue  # its traceback is the launch's to show
            if self._log_paths.get((rank, stream)) is None:
                self._log_paths[rank, stream] = self._folder.rank_log(rank, stream)
            found += tail.lines(self._log_paths[rank, stream])
        return found

    def _update(self, view: RankView) -> RankView:
        rank, now = view.rank, time.time()
        if not self._started[rank]:
            hello = self._folder.read_json(self._folder.of_rank("ranks", rank))
            if hello is None:
                return view
            self._started[rank] = self._heard[rank] = hello["start_time"]
        step, total, metrics = view.step, view.total, dict(view.metrics)
        for line in self._metric_tails[rank].lines(self._folder.of_rank("metrics", rank)):
            values = json.loads(line)
            self._heard[rank] = values.pop("_time")
            step, total = values.pop("_step", step), values.pop("_total", total)
            metrics.update(values)
        state = self._state(rank)
        elapsed_s = view.elapsed_s if state in ("finished", "failed") == view.state else now - self._started[rank]
        return RankView(rank, state, step, total, metrics, elapsed_s, now - self._heard[rank])

    def _state(self, rank: int) -> str:
        for kind, state in (("errors", "failed"), ("results", "finished")):
            if self._folder.of_rank(kind, rank).exists():
                return state
        return "running"
