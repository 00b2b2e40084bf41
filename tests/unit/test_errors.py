from __future__ import annotations

import pytest

from labkit.errors import Interrupted, LabError, LaunchError, MachineError, RankTimeout, UsageError, closest


def test_text_is_fact_found_and_try() -> None:
    assert str(LabError("It is so.", found="This was seen.", try_="that")) == "It is so.\nThis was seen.\nTry: that"
    assert str(LabError("It is so.")) == "It is so."


def test_tree() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(RankTimeout, LaunchError)
    assert all(issubclass(kind, LabError) for kind in (UsageError, MachineError, LaunchError))
    assert issubclass(Interrupted, KeyboardInterrupt)
    assert not issubclass(Interrupted, Exception)


@pytest.mark.parametrize(
    ("error", "text"),
    [(UsageError("No."), "UsageError: No."), (Interrupted("You stopped it."), "KeyboardInterrupt: You stopped it.")],
)
def test_ipython_shows_the_text_alone(error: UsageError | Interrupted, text: str) -> None:
    assert error._render_traceback_() == [text]


def test_launch_error_carries_what_failed() -> None:
    error = LaunchError("It failed.", rank=1, traceback="Traceback …")
    assert (error.rank, error.traceback, error.folder) == (1, "Traceback …", None)


def test_closest_lists_what_is_known_where_nothing_is_near() -> None:
    assert closest("xyz", ["b", "a"]) == "Known: a, b."
