"""labkit: predict a number, launch a real multi-process run from a notebook cell, compare the two.

`import labkit as lab` has no side effect and loads nothing heavy; `lab.start()` is where things begin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError, LaunchError, MachineError, RankTimeout, UsageError

if TYPE_CHECKING:
    from labkit.machine.probing import look as probe  # noqa: F401  # renamed, so ruff can't see that it is public
    from labkit.runs.launcher import start as start
    from labkit.runs.run import Run as Run
    from labkit.runs.worker import Rank as Rank
    from labkit.shapes import GPTShape as GPTShape
    from labkit.theory.steptime import plan_ddp as plan_ddp
    from labkit.verdicts.checker import check as check
    from labkit.verdicts.checker import hint as hint
    from labkit.verdicts.checker import progress as progress
    from labkit.verdicts.checker import solution as solution
    from labkit.verdicts.claims import claim as claim
    from labkit.verdicts.comparison import compare as compare
    from labkit.views import figures as show  # noqa: F401  # renamed too
    from labkit.views.live import launch as launch

# Public name → where it is found, on first use; "module:" alone means the module itself.
_HOMES = {
    "GPTShape": "labkit.shapes:GPTShape",
    "Rank": "labkit.runs.worker:Rank",
    "Run": "labkit.runs.run:Run",
    "check": "labkit.verdicts.checker:check",
    "claim": "labkit.verdicts.claims:claim",
    "compare": "labkit.verdicts.comparison:compare",
    "hint": "labkit.verdicts.checker:hint",
    "launch": "labkit.views.live:launch",
    "plan_ddp": "labkit.theory.steptime:plan_ddp",
    "probe": "labkit.machine.probing:look",
    "progress": "labkit.verdicts.checker:progress",
    "show": "labkit.views.figures:",
    "solution": "labkit.verdicts.checker:solution",
    "start": "labkit.runs.launcher:start",
}

__all__ = ["LabError", "LaunchError", "MachineError", "RankTimeout", "UsageError", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from labkit.errors import closest

        raise AttributeError(f"labkit has no {name!r}. {closest(name, __all__)}")
    module, _, attribute = _HOMES[name].partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return sorted(__all__)
