#!/usr/bin/env python3
"""Run the whole course without a browser: each lab executed by papermill, one HTML page a lab in out/.

    make course                            every lab, as a learner's Run All would
    make course ARGS="--nproc 1 05 08"     labs 05 and 08, on one rank

A lab that fails doesn't stop the others; the exit code says whether one did.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

import nbformat
import papermill
from nbconvert import HTMLExporter
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent
LABS = ROOT / "notebooks"
OUT = ROOT / "out"


def parse_arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description="Execute every lab and write one HTML page each to out/.")
    parser.add_argument("labs", nargs="*", metavar="LAB", help="start of a lab's name: 05, 05_train (default: all)")
    parser.add_argument("--nproc", type=int, help="ranks a launch starts")
    parser.add_argument("--steps", type=int, help="training steps of a run")
    parser.add_argument("--device", help="auto, cpu or cuda")
    return parser.parse_args()


def select(starts: list[str]) -> list[Path]:
    """The labs whose names begin with one of `starts`, in order; all if none is given."""
    labs = sorted(LABS.glob("[0-9][0-9]_*.ipynb"))
    unknown = [start for start in starts if not any(lab.name.startswith(start) for lab in labs)]
    if unknown or not labs:
        what = f"No lab begins with {', '.join(unknown)}." if unknown else "No lab was found."
        sys.exit(f"{what} In {LABS} there are: {', '.join(lab.stem for lab in labs) or 'none'}.\nTry: make course")
    return [lab for lab in labs if not starts or lab.name.startswith(tuple(starts))]


def execute(lab: Path, parameters: dict[str, int | str]) -> str:
    """Execute one lab into out/. Returns the last line of its error, or nothing."""
    try:
        papermill.execute_notebook(
            str(lab),
            str(OUT / lab.name),
            parameters=parameters,
            cwd=str(LABS),
            kernel_name="python3",
            language="python",
            progress_bar=False,
            coalesce_streams=True,  # one output per stream, a progress bar's last state only
        )
    except PapermillExecutionError as error:
        return f"{error.ename}: {error.evalue}".splitlines()[0]
    except Exception as error:  # a dead kernel, a broken file: the next lab can still run
        return f"{type(error).__name__}: {error}".strip().splitlines()[-1]
    return ""


def write_page(lab: Path) -> None:
    """Write the executed lab's HTML page, figures inside, without the cell that papermill put in."""
    exporter = HTMLExporter(
        config=Config(TagRemovePreprocessor={"enabled": True, "remove_cell_tags": ["injected-parameters"]}),
        embed_images=True,
    )
    notebook = nbformat.read(OUT / lab.name, as_version=4)
    resources = {"metadata": {"name": lab.stem, "path": str(LABS)}}
    page, _ = exporter.from_notebook_node(notebook, resources=resources)
    (OUT / lab.name).with_suffix(".html").write_text(page, encoding="utf-8")


def run(lab: Path, parameters: dict[str, int | str]) -> str:
    """Execute a lab and write its page, with one line of progress. Returns its error, or nothing."""
    print(f"{lab.stem} …", end=" ", flush=True)
    start = time.monotonic()
    for old in (OUT / lab.name, (OUT / lab.name).with_suffix(".html")):
        old.unlink(missing_ok=True)  # so that no earlier result passes for this one's
    error = execute(lab, parameters)
    if (OUT / lab.name).exists():
        write_page(lab)
    print(f"{'failed after ' if error else ''}{time.monotonic() - start:.0f} s", flush=True)
    return error


def main() -> int:
    """Run the chosen labs; list the failures last."""
    arguments = vars(parse_arguments())
    labs = select(arguments.pop("labs"))
    parameters = {name: value for name, value in arguments.items() if value is not None}
    OUT.mkdir(exist_ok=True)
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what fails is in the table, what ran in the line
    errors = {lab.stem: run(lab, parameters) for lab in labs}
    failed = {name: error for name, error in errors.items() if error}
    print(f"{len(labs) - len(failed)} of {len(labs)} labs ran to the end; their pages are in {OUT}")
    width = max(map(len, failed), default=0)
    for name, error in failed.items():
        print(f"  {name:<{width}}  {error[:160]}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the labs already done are in out/.")
