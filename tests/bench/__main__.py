"""Run every bench of this package: `python -m tests.bench [--json]`."""

from __future__ import annotations

import importlib
import pkgutil

from tests import bench
from tests.bench.tables import Report, main


def measure() -> Report:
    """What all benches measured, one after the other."""
    reports = []
    for module in sorted(pkgutil.iter_modules(bench.__path__), key=lambda module: module.name):
        if module.name != "__main__":
            found = importlib.import_module(f"tests.bench.{module.name}")
            if hasattr(found, "measure"):
                reports.append(found.measure())
    return Report(
        figures={key: value for report in reports for key, value in report.figures.items()},
        tables=tuple(table for report in reports for table in report.tables),
    )


if __name__ == "__main__":
    main(measure)
