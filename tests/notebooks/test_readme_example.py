"""The README's cell, in a fresh notebook: at most 12 lines, and a loss from each rank."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_cell_trains_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))
    block = re.search(r"<!-- example -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block
    code = block[1].strip()
    assert len(code.splitlines()) <= 12
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, kernel_name="python3", timeout=100).execute()
    result = next(output for output in notebook.cells[0].outputs if output.output_type == "execute_result")
    losses = ast.literal_eval(result["data"]["text/plain"])
    assert len(losses) == 2
    assert all(1 < loss < 5 for loss in losses)  # it began at ln 256 = 5.5 nats
