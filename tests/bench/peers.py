"""How each contender behaves when things go wrong: who is blamed, what is left behind, what works afterwards.

Each question is asked of a real kernel, fresh for it. The contenders answer at the same time, one thread each, since
most of it is waiting: the seconds here are upper bounds, the counts and names are not affected.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.bench import contenders as jobs
from tests.bench.contenders import CONTENDERS, Contender
from tests.bench.kernels import Cell, Kernel
from tests.bench.seconds import worked
from tests.bench.tables import Figure, Table, say

SILENT_S = 8.0  # a job with a rank that never comes is cut after so long
CUT_S = 12.0  # and any other: three contenders share the machine
REPEATS = 3  # of a failure that is a race
WORKS = "works"
STATES = {"prints": jobs.PRINTS, "quiet": jobs.QUIET, "stuck": jobs.STUCK}
USED_BACKWARD = (
    "import torch\ntorch.set_num_threads(2)\nv = torch.randn(512, 512, requires_grad=True)\n(v @ v).sum().backward()"
)


@dataclass(frozen=True)
class Answer:
    """What was found: figures by key (without contender), and the cell of a table that shows them."""

    figures: dict[str, Figure]
    text: str


Question = Callable[[Contender, Path], Answer]


def _prepare(kernel: Kernel, contender: Contender, scenario: str) -> None:
    """Make the kernel ready for its start cell."""
    worked(kernel.run(contender.setup))
    worked(kernel.run(contender.define(scenario)))


def _fails(contender: Contender, home: Path, *, name: str, scenario: str, sign: str) -> Answer:
    """Whether rank 1 is blamed and the sign of its failure is shown, of some repeats; does the next job work?"""
    named = shown = fails = 0
    next_text = ""
    for repeat in range(REPEATS):
        with Kernel(home / f"{name}_{repeat}") as kernel:
            _prepare(kernel, contender, scenario)
            cell = kernel.run(contender.start, CUT_S)
            blamed = re.search(contender.blamed, cell.text)
            named += bool(blamed and blamed[1] == "1")
            shown += sign in cell.text
            fails += cell.status == "error"
            if repeat == 0:
                next_text = _next_job(kernel, contender, jobs.JOB)
    figures: dict[str, Figure] = {
        f"{name}_rank_right_of_{REPEATS}": named,
        f"{name}_shown_of_{REPEATS}": shown,
        f"{name}_cell_fails_of_{REPEATS}": fails,
        f"{name}_next_job_works": next_text == WORKS,
    }
    cell_text = "fails" if fails else "stays green"
    return Answer(figures, f"rank {named}/{REPEATS}, shown {shown}/{REPEATS}, cell {cell_text}, next {next_text}")


def _next_job(kernel: Kernel, contender: Contender, scenario: str) -> str:
    """How a job that should work fares in this kernel."""
    worked(kernel.run(contender.define(scenario)))
    cell = kernel.run(contender.start, CUT_S)
    if cell.status == "busy":
        return f"hangs ({CUT_S:g} s cut)"
    return WORKS if _both_spoke(cell) else "fails"


def _both_spoke(cell: Cell) -> bool:
    return cell.status == "ok" and cell.text.count("<rank") == 2


def _skips(contender: Contender, home: Path) -> Answer:
    """Rank 1 never comes to a collective: is it said who waits at which line, and for whom, before the cut?"""
    with Kernel(home / "skips") as kernel:
        _prepare(kernel, contender, jobs.STUCK)
        cell = kernel.run(contender.start_limited, SILENT_S)
    waiting = bool(re.search(r"Rank 0 waits in \w+.*: dist\.all_reduce\(x\)", cell.text))
    missing = bool(re.search(r"Rank 1 is at .*: time\.sleep\(600\)", cell.text)) and "waits for rank 1" in cell.text
    figures: dict[str, Figure] = {"skip_names_who_waits": waiting, "skip_names_who_is_missing": missing}
    who = "both ranks and their lines" if waiting and missing else "nobody named"
    when = f"cut at {SILENT_S:g} s" if cell.status == "busy" else f"{cell.seconds:.1f} s"
    return Answer(figures, f"{who}, {when}")


def _left(contender: Contender, home: Path, *, how: str, state: str) -> Answer:
    """Processes left after the kernel was interrupted, or killed, in the middle of a job."""
    key = f"left_after_{how.replace(' ', '_')}_{state}"
    with Kernel(home / key) as kernel:
        _prepare(kernel, contender, STATES[state])
        own = kernel.processes()
        sent = kernel.send(contender.start)
        if not _came_up(kernel.folder):
            return Answer({key: "did not start"}, f"did not start: {kernel.finish(sent, 0.5).text.strip()[-60:]!r}")
        if how == "interrupt":
            kernel.interrupt()
        else:
            kernel.kill()
        left, seconds = kernel.wait_until_gone(keep=own if how == "interrupt" else set())
    return Answer({key: left, f"{key}_s": round(seconds, 2)}, f"{left} left" if left else f"0 ({seconds:.1f} s)")


def _came_up(folder: Path, limit_s: float = 20.0) -> bool:
    """Whether both ranks have met within the time; returns a little later, so that each is where it is meant to be."""
    deadline = time.monotonic() + limit_s
    while not all((folder / f"up{rank}").exists() for rank in (0, 1)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    time.sleep(0.5)
    return True


def _two_at_once(contender: Contender, home: Path) -> Answer:
    """Whether two notebooks can launch at the same time."""
    with Kernel(home / "one") as one, Kernel(home / "other") as other:
        kernels = (one, other)
        for kernel in kernels:
            _prepare(kernel, contender, jobs.OVERLAPS)
        sent = [kernel.send(contender.start) for kernel in kernels]
        cells = [kernel.finish(message, 2 * CUT_S) for kernel, message in zip(kernels, sent, strict=True)]
    num_worked = sum(map(_both_spoke, cells))
    clash = ", EADDRINUSE" if any("EADDRINUSE" in cell.text for cell in cells) else ""
    return Answer({"two_at_once_work_of_2": num_worked}, f"{num_worked} of 2 work{clash}")


def _after_backward(contender: Contender, home: Path) -> Answer:
    """Whether a training job works after the kernel itself has run a backward on two threads."""
    with Kernel(home / "after_backward") as kernel:
        worked(kernel.run(contender.setup))
        worked(kernel.run(USED_BACKWARD))
        text = _next_job(kernel, contender, jobs.TRAINS)
    return Answer({"after_backward_works": text == WORKS}, text)


RAISE = partial(_fails, name="raise", scenario=jobs.RAISES, sign=jobs.LEARNER_LINE)
SIGKILL = partial(_fails, name="sigkill", scenario=jobs.KILLED, sign="SIGKILL")
TABLES: dict[str, dict[str, Question]] = {
    f"Rank 1 fails while rank 0 enters a collective: right rank blamed, line or signal shown, of {REPEATS}": {
        'raise ValueError("boom")': RAISE,
        "killed by SIGKILL": SIGKILL,
    },
    "Rank 1 never enters a collective (limit 5 s where there is one); two notebooks; a kernel that has trained": {
        "skipped collective": _skips,
        "two launches at once": _two_at_once,
        "after a backward in the kernel": _after_backward,
    },
    "Processes of the job left (seconds until none) while it prints, is quiet, is stuck in a collective": {
        f"{how}, {state}": partial(_left, how=how, state=state)
        for how in ("interrupt", "kernel kill")
        for state in STATES
    },
}


def ask_all(home: Path) -> dict[str, dict[str, Answer]]:
    """Every question, answered by every contender: contender's key → column → answer."""
    with ThreadPoolExecutor(len(CONTENDERS)) as pool:
        answers = pool.map(lambda contender: _ask(contender, home / contender.key), CONTENDERS)
        return {contender.key: found for contender, found in zip(CONTENDERS, answers, strict=True)}


def _ask(contender: Contender, home: Path) -> dict[str, Answer]:
    found = {}
    for questions in TABLES.values():
        for column, question in questions.items():
            say(f"peers: {contender.name}, {column}")
            try:
                found[column] = question(contender, home)
            except RuntimeError as error:
                found[column] = Answer({}, f"not measured: {str(error)[:60]}")
    return found


def figures(answers: dict[str, dict[str, Answer]]) -> dict[str, Figure]:
    """All answers, flat: peers_<what>_<contender>."""
    return {
        f"peers_{name}_{key}": value
        for key, found in answers.items()
        for answer in found.values()
        for name, value in answer.figures.items()
    }


def tables(answers: dict[str, dict[str, Answer]]) -> tuple[Table, ...]:
    """A row a contender, in several tables."""
    return tuple(
        Table(
            title,
            ("", *questions),
            tuple(
                (contender.name, *(answers[contender.key][column].text for column in questions))
                for contender in CONTENDERS
            ),
        )
        for title, questions in TABLES.items()
    )
