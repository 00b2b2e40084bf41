"""Every exercise, from the registry: the starter is not attempted, the solution right, each near miss wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import labkit as lab
from labkit.verdicts.checker import Exercise, NearMiss, Outcome, exercises

ALL = exercises()
NEAR_MISSES = [(id, miss) for id, exercise in ALL.items() for miss in exercise.near_misses]


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))


def starter(*args: Any, **kwargs: Any) -> None:
    """What a learner finds in the cell."""
    raise NotImplementedError


@pytest.mark.parametrize(("id", "exercise"), ALL.items(), ids=ALL.keys())
def test_exercise(id: str, exercise: Exercise) -> None:
    assert lab.check(id).outcome is Outcome.NOT_ATTEMPTED
    if callable(exercise.solution):
        assert lab.check(id, starter).outcome is Outcome.NOT_ATTEMPTED
    verdict = lab.check(id, exercise.solution)
    assert verdict.outcome is Outcome.RIGHT, verdict
    assert f"{id}  right" in repr(lab.progress())
    assert len(exercise.near_misses) >= 2
    assert repr(lab.hint(id))


@pytest.mark.parametrize(("id", "miss"), NEAR_MISSES, ids=[f"{id}-{n}" for n, (id, _) in enumerate(NEAR_MISSES)])
def test_near_miss(id: str, miss: NearMiss) -> None:
    verdict = lab.check(id, miss.answer)
    assert verdict.outcome is Outcome.WRONG, verdict
    assert miss.says in verdict.text
    assert repr(ALL[id].solution) not in verdict.text


def test_an_answer_that_raises_is_a_verdict_not_an_exception() -> None:
    def answer(rank: Any, x: Any) -> int:
        return 1 // 0

    verdict = lab.check("00.2", answer)
    assert verdict.outcome is Outcome.FAILED
    assert "ZeroDivisionError" in verdict.text
    assert "return 1 // 0" in verdict.text


def test_right_stays_right() -> None:
    lab.check("05.3", ALL["05.3"].solution)
    lab.check("05.3", ALL["05.3"].near_misses[0].answer)
    assert "05.3  right" in repr(lab.progress())


def test_unknown_exercises_and_hints_are_named() -> None:
    with pytest.raises(lab.UsageError, match=r"There is no exercise '5\.1'"):
        lab.check("5.1", 1)
    with pytest.raises(lab.UsageError, match=r"has hints 1 … 2, not 3"):
        lab.hint("00.1", 3)


def test_a_solution_is_shown_as_code() -> None:
    assert repr(lab.solution("05.3")).startswith("def accumulation_steps(")
    assert repr(lab.solution("00.1")).startswith("[3.0, 13.0, 23.0]   # all_reduce leaves the sum")
