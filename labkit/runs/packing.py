"""A task becomes bytes: functions of the notebook by value, with the source of their cells beside them."""

from __future__ import annotations

import inspect
import io
import linecache
import types
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _code_reduce

from labkit.errors import UsageError


def pack(function: Callable[..., Any], args: tuple[Any, ...], cells: Path) -> bytes:
    """Pickle a function and its arguments; a rank that unpickles them sees the learner's own source lines.

    Code that was typed in a cell (its file name is known to `linecache` but is no file) is renamed to a copy
    of the cell under `cells`, so that tracebacks in the rank quote it.

    Raises:
        UsageError: Something in it can't be pickled; says which argument or variable.
    """
    with_lines = {types.CodeType: lambda code: _reduce_code(code, cells)}

    class CellPickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table = ChainMap(with_lines, cloudpickle.Pickler.dispatch_table)  # noqa: RUF012

    buffer = io.BytesIO()
    try:
        CellPickler(buffer).dump((function, args))
    except Exception as error:
        raise UsageError(
            f"{getattr(function, '__name__', 'It')} can't be sent to other processes: {error}.",
            found=_culprit(function, args),
            try_="make it inside the function, or pass what it is made from",
        ) from None
    return buffer.getvalue()


def _reduce_code(code: types.CodeType, cells: Path) -> tuple[Any, ...]:
    """As cloudpickle reduces code, but with a file name: it puts "<dynamic-code>" in its place."""
    make, args = _code_reduce(code)
    return make, tuple(
        _file_to_quote(code, cells) if isinstance(arg, str) and arg == "<dynamic-code>" else arg for arg in args
    )


def _file_to_quote(code: types.CodeType, cells: Path) -> str:
    """The file that tracebacks of this code should quote: its own, or a saved copy of its cell."""
    lines = [] if Path(code.co_filename).exists() else linecache.getlines(code.co_filename)
    if not lines:
        return code.co_filename
    source = "".join(lines)
    for known in cells.iterdir():
        if known.read_text() == source:
            return str(known)
    saved = cells / f"cell_{len(list(cells.iterdir())) + 1}.py"
    saved.write_text(source)
    return str(saved)


def _culprit(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Which argument or variable of the function it is that can't be pickled."""
    names = [*inspect.signature(function).parameters][1:]
    candidates = [(f"argument {name!r}", value) for name, value in zip(names, args, strict=False)]
    candidates += [("an argument", value) for value in args[len(names) :]]
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        both = {**variables.globals, **variables.nonlocals}
        candidates += [(f"variable {name!r}", value) for name, value in both.items()]
    for label, value in candidates:
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"It is {label}, of type {type(value).__name__}."
    return ""
