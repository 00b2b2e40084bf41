"""Exercises judged: not attempted, wrong (with the smallest failing case), failed, or right."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from html import escape
from pathlib import Path
from types import EllipsisType
from typing import Any

from labkit.errors import LabError, LaunchError, UsageError, closest
from labkit.runs.run import runs_home


class Outcome(Enum):
    """What came of an answer."""

    NOT_ATTEMPTED = "not attempted"
    WRONG = "wrong"
    FAILED = "failed"
    RIGHT = "right"


@dataclass(frozen=True)
class Verdict:
    """A judged answer.

    Attributes:
        outcome: One of four.
        text: Why; for a wrong answer the smallest case that shows it, never the solution.
        exercise: Its id.
    """

    outcome: Outcome
    text: str = ""
    exercise: str = ""

    def __repr__(self) -> str:
        mark = {Outcome.RIGHT: "✓", Outcome.NOT_ATTEMPTED: "·"}.get(self.outcome, "✗")
        return f"{mark} {self.exercise} {self.outcome.value}{': ' if self.text else ''}{self.text}"

    def _repr_html_(self) -> str:
        colour = {Outcome.RIGHT: "#009E73", Outcome.NOT_ATTEMPTED: "#767676"}.get(self.outcome, "#B34700")
        style = f"border-left:4px solid {colour};padding-left:8px;white-space:pre-wrap"
        return f"<div style='{style}'>{escape(repr(self))}</div>"


def right(text: str = "") -> Verdict:
    """The verdict for a right answer."""
    return Verdict(Outcome.RIGHT, text)


def wrong(text: str) -> Verdict:
    """The verdict for a wrong answer; `text` is the smallest failing case."""
    return Verdict(Outcome.WRONG, text)


@dataclass(frozen=True)
class NearMiss:
    """A plausible wrong answer that ships with an exercise.

    Attributes:
        answer: The answer.
        says: A piece of the verdict that it must get.
    """

    answer: Any
    says: str


@dataclass(frozen=True)
class Exercise:
    """An exercise and all that goes with it.

    Attributes:
        title: A few words.
        judge: From an answer to a verdict; may launch ranks.
        hints: From gentle to plain.
        solution: A right answer: a function, or a value.
        near_misses: Wrong answers that people give.
    """

    title: str
    judge: Callable[[Any], Verdict]
    hints: tuple[str, ...]
    solution: Any
    near_misses: tuple[NearMiss, ...]


def check(exercise: str, answer: Any = ...) -> Verdict:
    """Judge an answer.

    Args:
        exercise: Its id, "05.1".
        answer: What the exercise asks for; `...` or a function that raises NotImplementedError is not attempted.

    Raises:
        UsageError: There is no such exercise.
    """
    found = _exercise(exercise)
    verdict = replace(_judge(found, answer), exercise=exercise)
    _remember(exercise, verdict)
    return verdict


def _judge(exercise: Exercise, answer: Any) -> Verdict:
    """A learner's mistake becomes a verdict, never an exception."""
    if answer is None or isinstance(answer, EllipsisType):
        return Verdict(Outcome.NOT_ATTEMPTED)
    try:
        return exercise.judge(answer)
    except NotImplementedError:
        return Verdict(Outcome.NOT_ATTEMPTED)
    except LaunchError as error:
        if "NotImplementedError" in error.traceback:
            return Verdict(Outcome.NOT_ATTEMPTED)
        return Verdict(Outcome.FAILED, f"{error.fact}\n{error.found}")
    except LabError as error:
        return Verdict(Outcome.FAILED, str(error))
    except Exception as error:
        said = f": {error}" if str(error) else ""
        return Verdict(Outcome.FAILED, f"your answer raised {type(error).__name__}{said}")


def hint(exercise: str, number: int = 1) -> Source:
    """A hint, the first one gentle.

    Args:
        exercise: Its id.
        number: Which hint, from 1.

    Raises:
        UsageError: There is no such exercise or hint.
    """
    hints = _exercise(exercise).hints
    if not 1 <= number <= len(hints):
        raise UsageError(
            f"Exercise {exercise} has hints 1 … {len(hints)}, not {number}.", try_=f'lab.solution("{exercise}")'
        )
    more = f"  (lab.hint({exercise!r}, {number + 1}) says more)" if number < len(hints) else ""
    return Source(hints[number - 1] + more)


@dataclass(frozen=True)
class Source:
    """Text that shows itself as it is."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def solution(exercise: str) -> Source:
    """A right answer, as source.

    Raises:
        UsageError: There is no such exercise.
    """
    found = _exercise(exercise)
    if callable(found.solution):
        return Source(inspect.getsource(found.solution))
    return Source(f"{found.solution!r}   # {found.hints[-1]}")


def exercises() -> dict[str, Exercise]:
    """All exercises by id, in order."""
    found: dict[str, Exercise] = {}
    for path in sorted((Path(__file__).parent / "exercises").glob("lab_*.py")):
        found |= importlib.import_module(f"labkit.verdicts.exercises.{path.stem}").EXERCISES
    return found


def _exercise(id: str) -> Exercise:
    """Looked up by name, so that a lab's exercises are one file that nothing else mentions."""
    known = exercises()
    if id not in known:
        raise UsageError(f"There is no exercise {id!r}.", found=closest(str(id), known), try_="lab.progress()")
    return known[id]


@dataclass(frozen=True)
class Progress:
    """How far the exercises are: (id, title, best outcome so far)."""

    rows: tuple[tuple[str, str, str], ...]

    def __repr__(self) -> str:
        done = sum(outcome == Outcome.RIGHT.value for _, _, outcome in self.rows)
        lines = [f"{id}  {outcome:14} {title}" for id, title, outcome in self.rows]
        return "\n".join([f"{done} of {len(self.rows)} exercises right", *lines])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{a}</td><td>{escape(b)}</td><td>{c}</td></tr>" for a, b, c in self.rows)
        return f"<table>{rows}</table>"


def progress() -> Progress:
    """Which exercises you have solved on this machine."""
    best = _remembered()
    return Progress(
        tuple((id, exercise.title, best.get(id, Outcome.NOT_ATTEMPTED.value)) for id, exercise in exercises().items())
    )


def _remembered() -> dict[str, str]:
    path = runs_home() / "progress.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _remember(exercise: str, verdict: Verdict) -> None:
    """Keep the best outcome of each exercise beside the runs; a right answer stays right."""
    best = _remembered()
    if best.get(exercise) == Outcome.RIGHT.value:
        return
    runs_home().mkdir(parents=True, exist_ok=True)
    temporary = runs_home() / f".progress.{os.getpid()}"
    temporary.write_text(json.dumps({**best, exercise: verdict.outcome.value}))
    temporary.rename(runs_home() / "progress.json")


def normalised(text: str) -> str:
    """An answer in words without case, punctuation and double spaces."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
