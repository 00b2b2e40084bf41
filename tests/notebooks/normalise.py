"""`python -m tests.notebooks.normalise`: put notebooks into the form that git keeps.

Outputs stay only in cells tagged `nbval-check-output`; widget state, front ends' notes and the order of
execution go.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "notebooks"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def normalised(text: str) -> str:
    """A notebook's JSON in its one form."""
    content = json.loads(text)
    content["metadata"] = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    content["cells"] = [_cell(cell) for cell in content["cells"]]
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _cell(cell: dict[str, Any]) -> dict[str, Any]:
    tags = cell["metadata"].get("tags", [])
    kept = {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": {"tags": tags} if tags else {}}
    kept["source"] = "".join(cell["source"]).splitlines(keepends=True)
    if cell["cell_type"] == "code":
        outputs = cell["outputs"] if "nbval-check-output" in tags else []
        # nbval takes a cell without a count for one that was never run.
        kept |= {"execution_count": 1 if outputs else None, "outputs": [_output(output) for output in outputs]}
    return kept


def _output(output: dict[str, Any]) -> dict[str, Any]:
    return output | {"execution_count": 1} if "execution_count" in output else output


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("*.ipynb")):
        path.write_text(normalised(path.read_text()))
