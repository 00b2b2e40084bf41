"""The README tells the tree as it is, data has sources, and the project speaks of itself alone."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tracked() -> list[str]:
    """Files in git, and those about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(path for path in listed if path and (ROOT / path).exists())


def readme_tree() -> set[str]:
    """Paths named in the README's tree: lines "path   what it is", folders end in a slash."""
    block = re.search(r"<!-- tree -->\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md has no <!-- tree --> block"
    found, folders = set(), {0: ""}
    for line in block[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        found.add(folders[depth] + name)
        folders[depth + 1] = folders[depth] + name
    return found


def untold(named: set[str], files: list[str]) -> list[str]:
    """Files that the tree neither names nor covers by a folder whose inside it leaves out."""
    closed = [
        folder
        for folder in named
        if folder.endswith("/") and not any(n != folder and n.startswith(folder) for n in named)
    ]
    return [
        path for path in files if path not in named and not path.startswith(tuple(closed)) and "__init__" not in path
    ]


def test_readme_tree_is_the_tree() -> None:
    named = readme_tree()
    assert untold(named, tracked()) == [], "not in the README"
    assert [name for name in named if not (ROOT / name).exists()] == [], "in the README, not in the tree"


def test_a_file_that_the_readme_forgets_is_found() -> None:
    assert untold(readme_tree(), ["labkit/runs/forgotten.py", "tests/unit/covered.py"]) == ["labkit/runs/forgotten.py"]


def test_every_row_of_data_has_a_source_and_a_date() -> None:
    for path in (ROOT / "data").glob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                source = next((value for name, value in row.items() if "source" in name), "")
                assert source, f"{path.name}:{number} has no source"
                assert re.fullmatch(r"20\d\d-\d\d-\d\d", row.get("as_of", "")), f"{path.name}:{number} has no date"


def test_no_test_is_skipped_without_a_reason() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for match in re.finditer(r"pytest\.(?:mark\.)?(?:skip|skipif|xfail)\((.{0,200})", path.read_text(), re.DOTALL):
            assert path == Path(__file__) or "reason=" in match[1] or match[1].lstrip().startswith('"'), (
                f"{path.name}: {match[0][:80]}"
            )
