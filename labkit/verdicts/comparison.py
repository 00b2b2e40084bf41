"""Predicted beside measured: the table that every lesson ends a loop with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from types import EllipsisType

from labkit.errors import UsageError
from labkit.runs.run import Run
from labkit.theory.steptime import StepPlan
from labkit.units import quantity_text

Predicted = StepPlan | Mapping[str, float] | float | int | EllipsisType | None


@dataclass(frozen=True)
class Row:
    """One quantity, predicted and measured.

    Attributes:
        name: Of the quantity, its unit at the end.
        predicted: In SI base units; None where nobody predicted it.
        measured: In SI base units.
    """

    name: str
    predicted: float | None
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None without a prediction."""
        return self.measured / self.predicted if self.predicted else None

    def cells(self) -> tuple[str, str, str, str]:
        """Name, predicted, measured, ratio, as text."""
        predicted = "no guess" if self.predicted is None else quantity_text(self.name, self.predicted)
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return self.name, predicted, quantity_text(self.name, self.measured), ratio


@dataclass(frozen=True)
class Comparison:
    """A table of quantities, predicted and measured, with what the evidence is."""

    rows: tuple[Row, ...]
    badge: str

    def __repr__(self) -> str:
        table = [("", "predicted", "measured", "measured/predicted"), *(row.cells() for row in self.rows)]
        lines = [f"{name:24} {predicted:>12} {measured:>12} {ratio:>19}" for name, predicted, measured, ratio in table]
        return "\n".join([*lines, self.badge])

    def _repr_html_(self) -> str:
        head = "<tr><th></th><th>predicted</th><th>measured</th><th>measured / predicted</th></tr>"
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.cells()) + "</tr>" for row in self.rows
        )
        style = "caption-side:bottom;white-space:nowrap"
        return f"<table><caption style='{style}'>{escape(self.badge)}</caption>{head}{rows}</table>"


def compare(
    predicted: Predicted, measured: Run | Mapping[str, float] | float, what: str = "", *, run: Run | None = None
) -> Comparison:
    """Put a prediction beside a measurement.

    Args:
        predicted: A plan, a mapping from name to value, one number, or `...` for no guess.
        measured: The same in measured values. For a run, what rank 0's function returned, if that is a mapping.
        what: Name of a single number, its unit at the end ("step_s", "sent_bytes").
        run: The run that the measured values come from; its badge says what the evidence is.

    Raises:
        UsageError: Nothing in the two can be compared.

    >>> compare(300, {"sent_bytes": 200}) == compare(300, 200, "sent_bytes")
    True
    >>> compare(300, 200, "sent_bytes").rows[0].cells()
    ('sent_bytes', '300 B', '200 B', '0.67')
    """
    if isinstance(measured, Run):
        run = measured
        measured = run.results[0]
    if not isinstance(measured, Mapping):
        if not isinstance(measured, (int, float)):
            raise UsageError(
                f"There is no number to compare in {type(measured).__name__}.",
                found="A run can be compared when rank 0's function returned a mapping from name to number.",
                try_='lab.compare(guess, run.results[0], "step_s", run=run)',
            )
        measured = {what or "value": measured}
    guesses = _by_name(predicted, what or (next(iter(measured)) if len(measured) == 1 else "value"))
    names = [name for name in measured if name in guesses] or ([] if guesses else list(measured))
    if not names:
        raise UsageError(
            f"Nothing to compare: predicted are {', '.join(guesses)}; measured are {', '.join(measured)}.",
            try_="give both the same names",
        )
    rows = tuple(Row(name, guesses.get(name), measured[name]) for name in names)
    return Comparison(rows, run.badge if run else "measured here")


def _by_name(predicted: Predicted, what: str) -> Mapping[str, float]:
    """A prediction as names and values; empty where there is no guess."""
    if predicted is None or isinstance(predicted, EllipsisType):
        return {}
    if isinstance(predicted, StepPlan):
        return predicted.as_dict()
    if isinstance(predicted, Mapping):
        return predicted
    if not isinstance(predicted, (int, float)):
        raise UsageError(f"A guess is a number, or ... for none; this is {predicted!r:.60}.", try_="guess = 0.5")
    return {what: predicted}
