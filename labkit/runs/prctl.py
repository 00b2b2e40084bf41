"""Two things that Linux does for a process if asked: adopt orphaned descendants, and die with the parent."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, as `init` would (a child subreaper)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Receive this signal when the parent dies; a second line of defence behind the guard."""
    _prctl(PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
