"""The command line: what the notebooks do, in a shell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from labkit.errors import LabError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Labs on training with several GPUs, in a shell.")


@app.callback()
def _keep_subcommands() -> None:
    """Typer would drop the name of a single command."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Script to run; what follows it is its own.")],
    nproc: Annotated[int, typer.Option("--nproc-per-node", "--nproc", "-n", help="Ranks.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Time limit in seconds.")] = None,
    warm: Annotated[bool, typer.Option(help="Fork the ranks from a process that has imported torch.")] = True,
) -> None:
    """Run a script on several ranks through torchrun, say where it is, and which rank failed if one did."""
    from labkit.views.live import launch

    done = launch(script, *context.args, nproc=nproc, device=device, timeout_s=timeout_s, warm=warm)
    print(f"{done.command}\n{done.folder}", file=sys.stderr)


@app.command()
def probe() -> None:
    """Say what this computer is, and which backend a launch takes on it."""
    from labkit.machine.probing import look

    print(look())


def main() -> None:
    """Run the command line; a labkit error is its text and exit code 1, a call that can't be meant is 2."""
    try:
        app()
    except LabError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
