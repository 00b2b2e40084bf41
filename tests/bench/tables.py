"""What a bench hands back, and how it is printed: tables for people, one flat JSON object for programs."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Figure = float | int | str | bool
BEGIN = time.monotonic()


@dataclass(frozen=True)
class Table:
    """Rows of text under a title.

    Attributes:
        title: What was measured, how often, on what.
        columns: Headings.
        rows: One tuple of cells each.
        note: What a reader must know to read it rightly.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        body = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, body[0], rule, *body[1:], *([self.note] if self.note else [])])


@dataclass(frozen=True)
class Report:
    """Figures under their JSON keys, and the tables that show them."""

    figures: dict[str, Figure]
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Bound:
    """What a figure must reach.

    Attributes:
        key: The figure.
        meaning: In words.
        most: It may not be above this; None where it has a least instead.
        least: It may not be below this.
    """

    key: str
    meaning: str
    most: float | None = None
    least: float | None = None

    def row(self, figures: dict[str, Figure]) -> tuple[str, ...]:
        """The figure beside the bound, with ok or MISSED."""
        value = float(figures[self.key])
        limit, sign = (self.most, "<=") if self.most is not None else (self.least, ">=")
        assert limit is not None
        met = value <= limit if sign == "<=" else value >= limit
        return self.key, f"{value:.4g}", f"{sign} {limit:g}", "ok" if met else "MISSED", self.meaning


def spread_text(values: Sequence[float], scale: float = 1.0) -> str:
    """Median, and in brackets the least and the most."""
    shown = [f"{scale * value:.3g}" for value in (statistics.median(values), min(values), max(values))]
    return f"{shown[0]} [{shown[1]} … {shown[2]}]"


def say(text: str) -> None:
    """Tell whoever waits how far the bench is; not part of its output."""
    print(f"{time.monotonic() - BEGIN:5.0f} s  {text}", file=sys.stderr, flush=True)


def main(measure: Callable[[], Report]) -> None:
    """The command line of a bench: the tables, or with `--json` the figures."""
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--json", action="store_true", help="one flat object instead of tables")
    as_json = parser.parse_args().json
    report = measure()
    print(json.dumps(report.figures, indent=1) if as_json else "\n\n".join(map(str, report.tables)))
