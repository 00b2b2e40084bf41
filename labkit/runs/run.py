"""A run and its folder: what was asked, what was reported, what came back, readable long after."""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import UsageError
from labkit.units import seconds_text

if TYPE_CHECKING:
    import pandas

SUBFOLDERS = ("cells", "logs", "ranks", "metrics", "errors", "stacks", "results")


def runs_home() -> Path:
    """Where run folders go: $LABKIT_RUNS, else `runs/` in the working directory."""
    return Path(os.environ.get("LABKIT_RUNS", "runs")).absolute()


def short_path(path: Path) -> str:
    """A path as one would type it here: relative to the working directory where it lies inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run; the only place that knows them."""

    path: Path

    @classmethod
    def create(cls, name: str) -> RunFolder:
        """Make a new folder `runs/<stamp>-<name>/` with its subfolders."""
        stamp, suffix = time.strftime("%Y%m%d-%H%M%S"), ""
        safe_name = re.sub(r"[^\w.-]+", "-", name)[:40]
        for attempt in range(1000):
            path = runs_home() / f"{stamp}-{safe_name}{suffix}"
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                suffix = f"-{attempt + 2}"
        for sub in SUBFOLDERS:
            (path / sub).mkdir()
        return cls(path)

    @property
    def cells(self) -> Path:
        """Source of the notebook cells that the task's functions come from."""
        return self.path / "cells"

    @property
    def agent_log(self) -> Path:
        """What torchrun itself printed."""
        return self.path / "agent.log"

    @property
    def logs(self) -> Path:
        """The `--log-dir` of torchrun."""
        return self.path / "logs"

    def rank_log(self, rank: int, stream: str) -> Path | None:
        """A rank's stdout.log or stderr.log, once torchrun has made it."""
        return next(iter(self.logs.glob(f"*/attempt_*/{rank}/{stream}.log")), None)

    def of_rank(self, kind: str, rank: int) -> Path:
        """The file of one rank in `ranks`, `metrics`, `errors`, `stacks` or `results`."""
        suffix = {"metrics": "jsonl", "stacks": "txt", "results": "pkl"}.get(kind, "json")
        return self.path / kind / f"{rank}.{suffix}"

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has left its result or its error."""
        return self.of_rank("results", rank).exists() or self.of_rank("errors", rank).exists()

    def read_json(self, path: Path) -> Any:
        """A JSON file's content, None where it isn't there."""
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file whole or not at all: to a temporary name, then renamed."""
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.rename(self.path / name)


@dataclass(frozen=True)
class Run:
    """What did happen in one launch.

    Attributes:
        name: Of the function or script.
        nproc: Number of ranks.
        device: "cpu" or "cuda".
        backend: "gloo" or "nccl".
        why: Why this device and backend.
        how: "warm" or "cold", and for cold the reason.
        outcome: "finished", "failed", "timeout", "stopped", "interrupted"; or "unfinished": it runs
            still, or the process that launched it was killed.
        duration_s: From the call to the last process's end.
        command: The torchrun line that does the same in a shell.
        machine: Short description of the machine it ran on.
        started: Date and time, local.
        begin_time: The same as seconds since 1970.
        folder: The run folder.
    """

    name: str
    nproc: int
    device: str
    backend: str
    why: str
    how: str
    outcome: str
    duration_s: float
    command: str
    machine: str
    started: str
    begin_time: float
    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """A run of earlier, from its folder.

        Raises:
            UsageError: The folder holds no run, or one that this version can't read.
        """
        path = Path(folder).absolute()
        if not (path / "outcome.json").is_file():
            raise UsageError(f"{path} holds no run.", found="There is no outcome.json in it.", try_=f"ls {path.parent}")
        try:
            return cls(folder=path, **json.loads((path / "outcome.json").read_text()))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path} holds a run that can't be read: {error}.",
                found="Its outcome.json is damaged.",
                try_=f"ls {path.parent}",
            ) from None

    @cached_property
    def results(self) -> tuple[Any, ...]:
        """What each rank's function returned, by rank; None for a rank that returned nothing."""
        return tuple(self._result(rank) for rank in range(self.nproc))

    def _result(self, rank: int) -> Any:
        path = RunFolder(self.folder).of_rank("results", rank)
        if not path.exists():
            return None
        try:
            return pickle.loads(path.read_bytes())
        except Exception as error:
            raise UsageError(
                f"The result of rank {rank} can't be read: {type(error).__name__}: {error}.",
                found="It may need a module that this process can't import.",
                try_="run.metrics",
            ) from error

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """All that was reported: columns rank, time_s (since the first report), then the metrics by name."""
        import pandas

        rows = [
            {"rank": rank, **line}
            for rank in range(self.nproc)
            for line in read_lines(RunFolder(self.folder).of_rank("metrics", rank))
            if "_step" not in line
        ]
        frame = pandas.DataFrame(rows, columns=None if rows else ["rank", "_time"])
        times = frame.pop("_time")
        frame.insert(1, "time_s", times - times.min())
        return frame

    def logs(self, rank: int = 0, stream: str = "stdout") -> str:
        """What a rank printed.

        Args:
            rank: Which.
            stream: "stdout" or "stderr".

        Raises:
            UsageError: There is no such rank or stream.
        """
        if rank not in range(self.nproc) or stream not in ("stdout", "stderr"):
            raise UsageError(
                f"This run has ranks 0 … {self.nproc - 1} and streams stdout and stderr, not rank {rank}, {stream!r}.",
                try_="run.logs(rank=0)",
            )
        path = RunFolder(self.folder).rank_log(rank, stream)
        return path.read_text(errors="replace") if path else ""

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds before the function began on the last rank, in it, and until every process was gone."""
        folder = RunFolder(self.folder)
        hellos = [folder.read_json(folder.of_rank("ranks", rank)) for rank in range(self.nproc)]
        begins = [hello.get("begin_time", hello["start_time"]) for hello in hellos if hello]
        begun = max(begins, default=self.begin_time)
        written = [folder.of_rank("results", rank) for rank in range(self.nproc)]
        returned = max((path.stat().st_mtime for path in written if path.exists()), default=begun)
        end = self.begin_time + self.duration_s
        return {"before_s": begun - self.begin_time, "inside_s": returned - begun, "after_s": end - returned}

    @property
    def badge(self) -> str:
        """What the evidence is: measured here, on what, when."""
        ranks = f"{self.nproc} rank{'s' if self.nproc > 1 else ''}"
        return f"measured here · {ranks}, {self.backend} on {self.machine} · {self.started[:10]}"

    def rows(self) -> list[tuple[str, str]]:
        """The record as label and text."""
        return [
            ("run", f"{self.name}, {self.nproc} × {self.device} ({self.backend}), {self.how}"),
            ("why", self.why),
            ("outcome", f"{self.outcome}, {seconds_text(self.duration_s)}"),
            ("command", self.command),
            ("folder", str(self.folder)),
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{label:8} {text}" for label, text in self.rows())

    def _repr_html_(self) -> str:
        from html import escape

        cells = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in self.rows())
        return f"<table>{cells}</table>"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What a JSON-lines file holds."""
    return parsed(path.read_text(errors="replace").splitlines()) if path.exists() else []


def parsed(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The values of JSON lines; a line cut short by a crash or a full disk is left out."""
    found = []
    for line in lines:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
