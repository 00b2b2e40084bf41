"""A launch you can watch: a progress bar, each rank's state, and a Stop button that works while the cell is busy.

In JupyterLab it is a widget while the run goes on and one line of text when it has ended, so a saved notebook keeps
the line and not a stale bar. Where there is no front end (papermill, nbclient, a terminal) a plain line is printed now
and then.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any, Protocol

from labkit.errors import LabError
from labkit.runs.call import DEFAULT_TIMEOUT_S, checked
from labkit.runs.following import RankView, Snapshot
from labkit.runs.launcher import run_on_ranks
from labkit.runs.run import Run, short_path
from labkit.units import quantity_text, seconds_text

PLAIN_EVERY_S = 10.0


class View(Protocol):
    """What `launch` shows a run on."""

    def show(self, snapshot: Snapshot) -> bool:
        """Show the run as it stands; returns whether the learner asked to stop."""

    def end(self, text: str) -> None:
        """Leave one final line."""


def launch(
    target: Callable[..., Any] | str | Path,
    *args: Any,
    nproc: int,
    device: str = "auto",
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    warm: bool = True,
) -> Run:
    """Run a function or a script on several ranks through torchrun, live, and wait for it.

    Args:
        target: A function whose first argument is a `Rank`, or the path of a script.
        *args: Further arguments of the function, or of the script's command line.
        nproc: Ranks. Each is a process of its own with one thread, unless `env` sets OMP_NUM_THREADS.
        device: "cuda", "cpu", or "auto": NCCL when every rank can have a GPU of its own, else gloo on the CPU.
        timeout_s: Time limit of the whole run in seconds; past it, says where each rank waits. None: no limit.
        env: Environment variables for the ranks, beside those of this process.
        warm: Fork the ranks from a process that has imported torch. False: a plain torchrun subprocess.

    Returns:
        The finished run: results by rank, metrics, logs, and the torchrun line that does the same.

    Raises:
        UsageError: The call can't mean anything; nothing was started.
        MachineError: This machine has no room for it, or no working launcher.
        LaunchError: A rank failed; `RankTimeout` where ranks still waited at the limit.
    """
    call = checked(target, args, nproc=nproc, device=device, timeout_s=timeout_s, env=env or {})
    view = _choose_view(call.name, nproc)
    begin = time.time()
    try:
        run = run_on_ranks(call, warm=warm, watch=view.show)
    except (LabError, KeyboardInterrupt) as error:
        folder = getattr(error, "folder", None)
        kept = f"; kept in {short_path(folder)}" if folder else ""
        view.end(f"✗ {type(error).__name__} after {seconds_text(time.time() - begin)}{kept}")
        raise
    view.end(f"✓ {run.name}: {nproc} × {run.device} ({run.backend}), {run.how}, {seconds_text(run.duration_s)}")
    return run


def _choose_view(name: str, nproc: int) -> View:
    """The widget in a notebook, plain lines elsewhere."""
    try:
        from IPython import get_ipython
    except ImportError:
        return PlainView(name, nproc)
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return PlainView(name, nproc)
    # A front end with cells says which cell it runs; papermill and nbclient don't, and nobody watches their widgets.
    watched = "cellId" in (shell.kernel.get_parent("shell") or {}).get("metadata", {})
    return NotebookView(name, nproc, watched=watched)


def print_lines(snapshot: Snapshot) -> None:
    """Print what the ranks printed, each line behind its rank."""
    for rank, text in snapshot.lines:
        print(f"[{rank}] {text}")


def progress_text(snapshot: Snapshot) -> str:
    """One line: step, loss, tokens/s over all ranks, seconds left."""
    slowest = min(snapshot.ranks, key=lambda view: view.step)
    parts = [seconds_text(snapshot.elapsed_s)]
    if slowest.total:
        parts.append(f"step {slowest.step}/{slowest.total}")
    if "loss" in slowest.metrics:
        parts.append(f"loss {quantity_text('loss', slowest.metrics['loss'])}")
    reported = [view.metrics.get("tokens_per_s") for view in snapshot.ranks]
    rates = [rate for rate in reported if isinstance(rate, (int, float)) and math.isfinite(rate)]
    if rates:
        parts.append(f"{quantity_text('tokens_per_s', sum(rates))[:-2]} tokens/s")
    if snapshot.left_s is not None:
        parts.append(f"{seconds_text(snapshot.left_s)} left")
    return " · ".join(parts)


class PlainView:
    """Lines of text: what the ranks print, and where the run is.

    On a terminal that is one line, rewritten; elsewhere a line every ten seconds.
    """

    def __init__(self, name: str, nproc: int, every_s: float = PLAIN_EVERY_S) -> None:
        self._title = f"{name} on {nproc} rank{'s' if nproc > 1 else ''}"
        self._every_s, self._next = every_s, time.time() + every_s
        self._erase = "\r\x1b[K" if sys.stderr.isatty() else ""

    def show(self, snapshot: Snapshot) -> bool:
        """Print new lines, and a progress line when it is time."""
        line = f"{self._title}: {progress_text(snapshot)}"
        if self._erase:
            print(self._erase, end="", file=sys.stderr, flush=True)
            print_lines(snapshot)
            print(line, end="", file=sys.stderr, flush=True)
            return False
        print_lines(snapshot)
        if time.time() >= self._next:
            self._next = time.time() + self._every_s
            print(line, flush=True)
        return False

    def end(self, text: str) -> None:
        """Say how it ended, beside the output, not in it."""
        print(f"{self._erase}{text}", file=sys.stderr, flush=True)


class NotebookView:
    """A widget while the run goes on, one line when it has ended."""

    def __init__(self, name: str, nproc: int, *, watched: bool) -> None:
        import ipywidgets
        from IPython.display import display

        self._stop_asked = False
        self._plain = None if watched else PlainView(name, nproc)
        self._bar = ipywidgets.FloatProgress(0.0, min=0.0, max=1.0, layout={"width": "14em"})
        self._bar.style.bar_color = "#D55E00"
        self._text = ipywidgets.HTML(f"<code>{escape(name)}</code> starting …")
        self._ranks = ipywidgets.HTML()
        stop = ipywidgets.Button(description="Stop", icon="stop", layout={"width": "6em"})
        stop.on_click(self._ask_to_stop)
        self._box = ipywidgets.VBox([ipywidgets.HBox([self._bar, stop, self._text]), self._ranks])
        self._handle = display(self._box, display_id=True)  # type: ignore[no-untyped-call]

    def _ask_to_stop(self, _: object) -> None:
        self._stop_asked = True  # ipykernel runs this in a subshell thread while the cell is busy

    def show(self, snapshot: Snapshot) -> bool:
        """Move the bar, name each rank's state, print new lines."""
        if self._plain:
            self._plain.show(snapshot)
        else:
            print_lines(snapshot)
        self._bar.value = snapshot.fraction
        self._text.value = escape(progress_text(snapshot))
        self._ranks.value = _ranks_html(snapshot.ranks)
        return self._stop_asked

    def end(self, text: str) -> None:
        """Put one line where the widget was."""
        from IPython.display import HTML

        self._handle.update(HTML(f"<span>{escape(text)}</span>"))  # type: ignore[no-untyped-call]
        self._box.close()


def _ranks_html(views: tuple[RankView, ...]) -> str:
    """A row a rank: state, step, time, its last metrics."""
    rows = []
    for view in views:
        step = f"{view.step}/{view.total}" if view.total else ""
        metrics = ", ".join(f"{name} {quantity_text(name, value)}" for name, value in view.metrics.items())
        quiet = f"no word for {view.silent_s:.0f} s" if view.state == "running" and view.silent_s > 5 else ""
        cells = (f"rank {view.rank}", view.state, step, seconds_text(view.elapsed_s), metrics, quiet)
        rows.append("<tr>" + "".join(f"<td style='padding-right:1em'>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table style='font-size:85%'>{''.join(rows)}</table>"
