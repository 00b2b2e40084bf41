"""Functions become bytes, with the source of their cells."""

from __future__ import annotations

import pickle
import threading
import traceback
from functools import partial
from pathlib import Path

import pytest

from labkit.errors import UsageError
from labkit.runs.packing import pack

from ..conftest import run_cell


def test_the_copy_does_the_same(tmp_path: Path) -> None:
    factor = 3
    function, args = pickle.loads(pack(lambda rank, x: factor * x + rank, (2,), tmp_path))
    assert function(1, *args) == 7


def test_a_traceback_quotes_the_saved_cell(tmp_path: Path) -> None:
    work = run_cell('def inner():\n    raise ValueError("boom")\n\ndef outer(rank):\n    return inner()\n')
    function, _ = pickle.loads(pack(work, (), tmp_path))
    with pytest.raises(ValueError, match="boom") as caught:
        function(0)
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]
    assert [(Path(frame.filename).name, frame.lineno, frame.line) for frame in frames] == [
        ("cell_1.py", 5, "return inner()"),
        ("cell_1.py", 2, 'raise ValueError("boom")'),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["cell_1.py"]


def test_functions_of_two_cells(tmp_path: Path) -> None:
    first = run_cell("def first():\n    return 1")
    second = run_cell("def second(rank, f):\n    return f()")
    function, args = pickle.loads(pack(second, (first,), tmp_path))
    assert function(0, *args) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cell_1.py", "cell_2.py"]


def test_a_function_of_a_file_keeps_its_file(tmp_path: Path) -> None:
    function, _ = pickle.loads(pack(lambda rank: rank, (), tmp_path))
    assert function.__code__.co_filename == __file__
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ((threading.Lock(),), "It is argument 'x', of type lock."),
        ((1, threading.Lock()), "It is argument 'more', of type lock."),
        ((1, 2, threading.Lock()), "It is an argument, of type lock."),
    ],
)
def test_the_culprit_is_named(tmp_path: Path, args: tuple[object, ...], found: str) -> None:
    with pytest.raises(UsageError) as caught:
        pack(lambda rank, x, *more: None, args, tmp_path)
    assert caught.value.found == found


def test_a_callable_without_a_name(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match="It can't be sent to other processes: cannot pickle"):
        pack(partial(lambda rank, lock: None, lock=lock), (), tmp_path)
