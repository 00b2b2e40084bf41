"""Claims of the two articles that this course grew from, each with a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from labkit.errors import UsageError, closest
from labkit.facts import row, table


@dataclass(frozen=True)
class Claim:
    """A claim on trial.

    Attributes:
        id: A.. or B.., by article.
        topic: Lab topic.
        text: What the article says, in our words.
        verdict: "true", "false", "imprecise", "depends" or "unverifiable".
        correction: What is right.
        source: Where that comes from.
    """

    id: str
    topic: str
    text: str
    verdict: str
    correction: str
    source: str

    def rows(self) -> list[tuple[str, str]]:
        """The record as label and text."""
        return [
            (f"claim {self.id}", self.text),
            ("verdict", self.verdict),
            ("what is right", self.correction),
            ("source", self.source),
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{label:14} {text}" for label, text in self.rows())

    def _repr_html_(self) -> str:
        style = "text-align:left;max-width:44em"
        cells = (f"<tr><th>{escape(a)}</th><td style='{style}'>{escape(b)}</td></tr>" for a, b in self.rows())
        return f"<table>{''.join(cells)}</table>"


def claim(id: str) -> Claim:
    """What an article says, and what came of trying it.

    Args:
        id: "A01" … or "B01" ….

    Raises:
        UsageError: There is no such claim.

    >>> claim("A11").verdict
    'true'
    """
    ids = [entry["id"] for entry in table("claims")]
    if id not in ids:
        raise UsageError(f"There is no claim {id!r}.", found=closest(str(id), ids), try_='lab.claim("A11")')
    found = row("claims", "id", id)
    return Claim(
        id=id,
        topic=found["topic"],
        text=found["claim"],
        verdict=found["verdict"],
        correction=found["correct_statement"],
        source=found["primary_source"],
    )
