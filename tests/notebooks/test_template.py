"""The notebooks keep to the template and its budgets, and carry no outputs but those that are checked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.normalise import normalised

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
MOST_CELLS, MOST_LINES, MOST_WORKER_LINES, MOST_WORDS, MOST_LAUNCHES = 45, 15, 30, 1500, 10
NEEDED = ("question", "predict", "run", "compare", "reading")
LOOP = (*NEEDED, "idea", "worker", "plan")


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook, with tags and source as text."""
    notebook = json.loads(path.read_text())
    return [{**c, "tags": c["metadata"].get("tags", []), "text": "".join(c["source"])} for c in notebook["cells"]]


def tagged(path: Path, tag: str) -> list[dict[str, Any]]:
    """The cells with a tag."""
    return [cell for cell in cells(path) if tag in cell["tags"]]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2


def test_budgets(notebook: Path) -> None:
    all_cells = cells(notebook)
    words = sum(len(cell["text"].split()) for cell in all_cells if cell["cell_type"] == "markdown")
    launches = sum(
        len(re.findall(r"lab\.launch\(|!torchrun", c["text"])) for c in all_cells if c["cell_type"] == "code"
    )
    assert len(all_cells) <= MOST_CELLS
    assert words <= MOST_WORDS
    assert 1 <= launches <= MOST_LAUNCHES
    for cell in all_cells:
        if cell["cell_type"] == "code":
            lines = len(cell["text"].splitlines())
            assert lines <= (MOST_WORKER_LINES if "worker" in cell["tags"] else MOST_LINES), cell["text"][:80]


def test_setup_is_two_statements(notebook: Path) -> None:
    (setup,) = tagged(notebook, "setup")
    assert setup["text"].split("\n") == ["import labkit as lab", "machine = lab.start()"]


def test_a_loop_asks_before_it_tells(notebook: Path) -> None:
    order = [tag for cell in cells(notebook) for tag in cell["tags"] if tag in LOOP]
    starts = [index for index, tag in enumerate(order) if tag == "question"]
    assert 1 <= len(starts) <= 3
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        loop = order[start:end]
        assert [tag for tag in NEEDED if tag not in loop] == []
        assert loop.index("predict") < loop.index("run") < loop.index("compare") < loop.index("reading")
    assert {"idea", "worker", "plan"} <= set(order)


def test_a_guess_may_be_left_empty(notebook: Path) -> None:
    for cell in tagged(notebook, "predict"):
        assert all("= ..." in line for line in cell["text"].splitlines())


def test_parameters_for_papermill(notebook: Path) -> None:
    (parameters,) = tagged(notebook, "parameters")
    assert "nproc = " in parameters["text"]
    assert "device = " in parameters["text"]


def test_exercises_come_with_contract_check_and_help(notebook: Path) -> None:
    text = "\n".join(cell["text"] for cell in cells(notebook))
    announced = re.findall(r"### Exercise (\d\d\.\d)", text)
    assert 2 <= len(announced) <= 4
    for exercise in announced:
        assert f'lab.check("{exercise}", ' in text
    assert text.count("**Contract.**") == len(announced)
    assert re.search(r"# lab\.hint\(", text)


def test_it_has_its_fixed_parts(notebook: Path) -> None:
    tags = [tag for cell in cells(notebook) for tag in cell["tags"]]
    assert [
        tag for tag in ("title", "contract", "setup", "parameters", "exercise", "break", "practice") if tag not in tags
    ] == []
    text = "\n".join(cell["text"] for cell in cells(notebook))
    assert re.search(r"What you'll do.*What you'll learn.*What you'll need", text, re.DOTALL)
    assert "## Key points" in text
    assert "**Sources" in text


def test_it_is_normalised(notebook: Path) -> None:
    assert notebook.read_text() == normalised(notebook.read_text()), "Try: python -m tests.notebooks.normalise"
    for cell in tagged(notebook, "nbval-check-output"):
        assert cell["outputs"], "a cell whose output is checked has one"


def test_normalising_strips_what_a_front_end_leaves() -> None:
    messy = json.loads(NOTEBOOKS[0].read_text())
    messy["metadata"]["widgets"] = {"state": 1}
    for cell in messy["cells"]:
        if cell["cell_type"] == "code" and not cell["outputs"]:
            cell["execution_count"] = 3
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["x"]}]
    assert normalised(json.dumps(messy)) == NOTEBOOKS[0].read_text()
