"""Every error labkit raises on purpose.

LabError
├── UsageError     a call that cannot mean anything (also a ValueError)
├── MachineError   this machine lacks something
└── LaunchError    a rank failed: .rank .traceback .folder
    └── RankTimeout    ranks waited too long: .stacks

`Interrupted` stands outside the tree: it is a KeyboardInterrupt, which `except Exception` must not swallow.

The text of each: a sentence with the fact and its values, what was found, and a last line `Try:`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path


class LabError(Exception):
    """Base of all errors labkit raises on purpose.

    Args:
        fact: One sentence: what is wrong, with the values.
        found: What was seen that led to it; may have several lines.
        try_: A line of code or a shell command that helps.
    """

    def __init__(self, fact: str, *, found: str = "", try_: str = "") -> None:
        self.fact, self.found, self.try_ = fact, found, try_
        lines = [fact, found, f"Try: {try_}" if try_ else ""]
        super().__init__("\n".join(line for line in lines if line))

    def _render_traceback_(self) -> list[str]:
        """Show the message alone in IPython: the frames above it are labkit's, not the learner's."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(LabError, ValueError):
    """A call that cannot mean anything; raised before any process starts."""


class MachineError(LabError):
    """This machine lacks something: room, a device, a program."""


class LaunchError(LabError):
    """A rank failed.

    Attributes:
        rank: The rank that failed first for a reason of its own; None where no rank is to blame.
        traceback: Its traceback, the learner's frames only.
        folder: The run folder; what was reported before the failure is readable there.
    """

    def __init__(
        self,
        fact: str,
        *,
        found: str = "",
        try_: str = "",
        rank: int | None = None,
        traceback: str = "",
        folder: Path | None = None,
    ) -> None:
        super().__init__(fact, found=found, try_=try_)
        self.rank, self.traceback, self.folder = rank, traceback, folder


class RankTimeout(LaunchError):
    """The time limit passed while ranks were still waiting or working.

    Attributes:
        stacks: For each rank, the text of where it stood (`faulthandler`), innermost frame first.
    """

    stacks: Mapping[int, str] = {}


class Interrupted(KeyboardInterrupt):
    """The learner interrupted a launch: all its processes have ended, what was reported is kept."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


def closest(word: str, known: Iterable[str]) -> str:
    """A `Did you mean …?` for an unknown name, or the list of known ones.

    >>> closest("gpu0", ["gpu", "cpu"])
    "Did you mean 'gpu'?"
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names)}."
