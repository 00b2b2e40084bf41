"""Follow a run's files while they grow: steps, metrics and printed lines, a little at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.runs.run import RunFolder, parsed
from labkit.units import bytes_text

MOST_SHOWN_BYTES = 64 * 1024  # of one stream at one look: nobody reads more, and a notebook chokes on it


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
    """What was added to a file since the last look, in whole lines."""

    def __init__(self) -> None:
        self._offset = 0
        self.skipped_bytes = 0

    def lines(self, path: Path | None, *, most_bytes: int | None = None, last: bool = False) -> list[str]:
        """New lines.

        Args:
            path: The file, None if it isn't there yet.
            most_bytes: Skip what exceeds it, and count that in `skipped_bytes`.
            last: Take an unfinished line too.
        """
        if path is None or not path.exists():
            return []
        new_bytes = path.stat().st_size - self._offset
        if most_bytes and new_bytes > most_bytes:
            self.skipped_bytes += new_bytes - most_bytes
            self._offset += new_bytes - most_bytes
        with path.open("rb") as file:
            file.seek(self._offset)
            text = file.read(most_bytes)
        end = len(text) if last or len(text) == most_bytes else text.rfind(b"\n") + 1
        self._offset += end
        lines = text[:end].decode(errors="replace").removesuffix("\n").split("\n") if end else []
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines]  # of a bar that redraws itself, the last state


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

    def look(self, *, last: bool = False) -> Snapshot:
        """The run as it stands now.

        Args:
            last: Nothing more will come, so take unfinished lines too.
        """
        lines = [(view.rank, line) for view in self._views for line in self._printed(view.rank, last)]
        for rank in {rank for rank, _ in lines}:
            self._heard[rank] = time.time()
        self._views = [self._update(view) for view in self._views]
        return Snapshot(time.time() - self._begin, tuple(self._views), tuple(lines))

    def _printed(self, rank: int, last: bool) -> list[str]:
        found: list[str] = []
        for stream, tail in self._log_tails[rank].items():
            if stream == "stderr" and self._folder.of_rank("errors", rank).exists():
                continue  # its traceback is the launch's to show
            if self._log_paths.get((rank, stream)) is None:
                self._log_paths[rank, stream] = self._folder.rank_log(rank, stream)
            before = tail.skipped_bytes
            lines = tail.lines(self._log_paths[rank, stream], most_bytes=MOST_SHOWN_BYTES, last=last)
            if tail.skipped_bytes > before:
                left_out = f"… {bytes_text(tail.skipped_bytes - before)} not shown here, but in the run's logs …"
                lines = [left_out, *lines[1:]]
            found += lines
        return found

    def _update(self, view: RankView) -> RankView:
        rank, now = view.rank, time.time()
        if not self._started[rank]:
            hello = self._folder.read_json(self._folder.of_rank("ranks", rank))
            if hello is None:
                return view
            self._started[rank] = self._heard[rank] = hello["start_time"]
        step, total, metrics = view.step, view.total, dict(view.metrics)
        for values in parsed(self._metric_tails[rank].lines(self._folder.of_rank("metrics", rank))):
            self._heard[rank] = values.pop("_time")
            step, total = values.pop("_step", step), values.pop("_total", total)
            metrics.update(values)
        state = self._state(rank)
        elapsed_s = view.elapsed_s if state == view.state != "running" else now - self._started[rank]
        return RankView(rank, state, step, total, metrics, elapsed_s, now - self._heard[rank])

    def _state(self, rank: int) -> str:
        for kind, state in (("errors", "failed"), ("results", "finished")):
            if self._folder.of_rank(kind, rank).exists():
                return state
        return "running"
