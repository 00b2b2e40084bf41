"""`python -m tests.gpu`: all GPU checks, a record under data/reference/, and a table last.

Needs this repository, torch with CUDA, psutil, cloudpickle and nvidia-ml-py; says what it skipped for what is missing.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
NEEDED = ("torch", "psutil", "cloudpickle", "pynvml")


def main() -> int:
    """Run every check; 0 if all held, 2 if this machine can't run them."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"Skipped: {', '.join(missing)} not installed.\nTry: pip install psutil cloudpickle nvidia-ml-py")
        return 2
    from labkit.machine.probing import look

    machine = look()
    if not machine.gpus:
        print(f"Skipped: {machine.why}.")
        return 2
    rows = _run_all()
    _record(machine.describe(), machine.driver, rows)
    for name, outcome, seconds, text in rows:
        print(f"{outcome:6} {seconds:6.1f} s  {name:32} {text}")
    return int(any(outcome != "ok" for _, outcome, _, _ in rows))


def _run_all() -> list[tuple[str, str, float, str]]:
    """Name, outcome, seconds, text of each check; one that fails doesn't stop the others."""
    from tests.gpu.checks import CHECKS

    rows = []
    for name, check in CHECKS.items():
        begin = time.time()
        try:
            outcome, text = "ok", check()
        except Exception as error:
            outcome, text = "FAILED", f"{type(error).__name__}: {error}"
        rows.append((name, outcome, time.time() - begin, text))
    return rows


def _record(machine: str, driver: str, rows: list[tuple[str, str, float, str]]) -> None:
    """Keep what was measured, with device, versions, command and date."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "machine": machine,
        "driver": driver,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "command": "python -m tests.gpu",
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "checks": [{"name": n, "outcome": o, "duration_s": round(s, 2), "text": t} for n, o, s, t in rows],
    }
    REFERENCE.mkdir(parents=True, exist_ok=True)
    name = "".join(char if char.isalnum() else "-" for char in machine).lower()
    (REFERENCE / f"gpu-{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
