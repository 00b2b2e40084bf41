"""Reader of the tables in `data/`: facts with their sources, never constants in code."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from labkit.errors import UsageError, closest

DATA = Path(__file__).parent.parent / "data"


@cache
def table(name: str) -> tuple[dict[str, str], ...]:
    """All rows of `data/<name>.csv`, in order, each a dict from column to text.

    Args:
        name: The file's name without `.csv`.

    Raises:
        UsageError: There is no such table.
    """
    path = DATA / f"{name}.csv"
    if not path.exists():
        names = [other.stem for other in DATA.glob("*.csv")]
        raise UsageError(f"There is no table {name!r} in data/.", found=closest(name, names))
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def row(name: str, key: str, value: str) -> dict[str, str]:
    """The one row of a table whose column `key` holds `value`.

    Raises:
        UsageError: No row has it; the closest one is named.
    """
    rows = table(name)
    for candidate in rows:
        if candidate[key] == value:
            return candidate
    near = closest(value, [candidate[key] for candidate in rows])
    raise UsageError(f"data/{name}.csv has no row with {key} {value!r}.", found=near)
