"""Start a task on several ranks through torchrun, see it through, and return what came of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from labkit.errors import LaunchError, MachineError
from labkit.machine.probe import look
from labkit.machine.records import Machine
from labkit.runs.call import Call, check_room
from labkit.runs.failure import launch_error, rank_timeout
from labkit.runs.following import Follower, Snapshot
from labkit.runs.job import Job, Request, interrupts_ignored
from labkit.runs.packing import pack
from labkit.runs.run import Run, RunFolder
from labkit.runs.warm_client import WarmServer
from labkit.runs.worker import STACK_SIGNAL

TICK_S = 0.1

Watch = Callable[[Snapshot], bool]  # shows a snapshot; returns whether the learner asked to stop


_server: list[WarmServer] = []  # at most one, for this process; a module's state because a kernel has one server


def warm_up(modules: tuple[str, ...] = ()) -> WarmServer:
    """Begin to warm the launcher in the background; returns at once. The server lives as long as this process.

    Args:
        modules: Imported beside torch, so that ranks find them loaded.
    """
    if _server and not (_server[0].alive and set(modules) <= set(_server[0].modules)):
        _server.pop().close()
    if not _server:
        _server.append(WarmServer(modules))
    return _server[0]


def start(*modules: str) -> Machine:
    """Look at this computer, and begin to warm the launcher in the background.

    Args:
        *modules: Packages that ranks should find loaded already, for instance "deepspeed".

    Returns:
        What the computer is, and the backend that a launch takes here, with the reason.
    """
    warm_up(modules)
    return look()


def run_on_ranks(call: Call, *, warm: bool = True, watch: Watch | None = None) -> Run:
    """Run a checked call and wait for it; `labkit.launch` is this with a live view.

    Args:
        call: From `checked`.
        warm: Fork the ranks from the warm server, where it can be used.
        watch: Called ten times a second with a snapshot; the run is stopped when it returns True.

    Raises:
        MachineError: No room, or no working launcher.
        LaunchError: A rank failed.
    """
    begin = time.time()
    machine = look()
    check_room(machine, call)
    server, how = _choose_server(call, warm)
    try:
        folder = RunFolder.create(call.name)
        _write_task(folder, call, machine)
    except OSError as error:
        raise MachineError(
            f"The run folder can't be written: {error.strerror}.", found=str(error), try_="df -h . ; export LABKIT_RUNS=/a/roomier/place"
        ) from None
    return _see_through(folder, call, machine, server, how, begin, watch)


def _choose_server(call: Call, warm: bool) -> tuple[WarmServer | None, str]:
    """The warm server and "warm", or None and the reason for a cold call."""
    if not warm:
        return None, "cold, as asked"
    server = warm_up()
    reason = server.unusable_for({**os.environ, **call.env})
    return (None, f"cold: {reason}") if reason else (server, "warm")


def _write_task(folder: RunFolder, call: Call, machine: Machine) -> None:
    task = {
        "name": call.name,
        "script": str(call.script) if call.script else None,
        "args": [str(arg) for arg in call.args] if call.script else [],
        "sys_path": [entry for entry in sys.path if entry],
    }
    if call.function:
        folder.write("task.pkl", pack(call.function, call.args, folder.cells))
    folder.write("task.json", json.dumps(task))
    folder.write("machine.json", json.dumps(asdict(machine)))
    folder.write("command.txt", shell_command(folder, call) + "\n")


def torchrun_args(folder: RunFolder, call: Call) -> tuple[str, ...]:
    """torchrun's arguments, the same for warm and cold. No port is fixed: `--standalone` takes a free one."""
    options = ("--standalone", f"--nproc-per-node={call.nproc}", f"--log-dir={folder.logs}", "--redirects=3")
    return (*options, "--monitor-interval=0.02", "-m", "labkit.runs.worker", str(folder.path))


def shell_command(folder: RunFolder, call: Call) -> str:
    """The line that does the same in a shell: for a script plain torchrun, for a function its worker."""
    variables = {"OMP_NUM_THREADS": "1", **call.env}
    words = [f"{name}={value}" for name, value in variables.items()]
    words += ["torchrun", "--standalone", f"--nproc-per-node={call.nproc}"]
    if call.script:
        words += [str(call.script), *(str(arg) for arg in call.args)]
    else:
        words += ["-m", "labkit.runs.worker", str(folder.path)]
    return " ".join(words)


def _request(folder: RunFolder, call: Call) -> Request:
    """One thread a rank, as torchrun sets for two ranks and more; here for one too, so that runs compare."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, **call.env, "LABKIT_DEVICE": call.device}
    return Request(torchrun_args(folder, call), env, str(Path.cwd()), str(folder.agent_log))


def _see_through(
    folder: RunFolder, call: Call, machine: Machine, server: WarmServer | None, how: str, begin: float, watch: Watch | None
) -> Run:
    """Start the job, follow it to its end, write down the outcome, and return the run or raise its error."""

    def ended(outcome: str) -> Run:
        return _write_outcome(folder, call, machine, outcome, how, begin)

    follower = Follower(folder, call.nproc)
    stacks: dict[int, str] = {}
    outcome = "failed"
    try:
        with Job(_request(folder, call), server) as job:
            outcome = _follow(job, follower, call, watch, begin)
            if outcome != "ended":
                stacks = ask_where(folder, call.nproc)
    except KeyboardInterrupt:
        ended("interrupted")
        raise
    except MachineError:
        if server is None:
            raise
        return _see_through(folder, call, machine, None, "cold: the warm server did not answer", begin, watch)
    if watch:
        watch(follower.look())
    if outcome == "timeout":
        raise rank_timeout(folder, ended("timeout"), call.timeout_s or 0, stacks)
    if outcome == "stopped":
        raise _stopped(ended("stopped"))
    if job.agent_status != 0:
        raise launch_error(folder, ended("failed"))
    return ended("finished")


def _follow(job: Job, follower: Follower, call: Call, watch: Watch | None, begin: float) -> str:
    """Wait for the job's end while showing it: "ended", "timeout" or "stopped"."""
    while not job.wait(TICK_S):
        if watch and watch(follower.look()):
            return "stopped"
        if call.timeout_s is not None and time.time() - begin > call.timeout_s:
            return "timeout"
    return "ended"


def _stopped(run: Run) -> LaunchError:
    return LaunchError(
        f"You stopped {run.name} after {run.duration_s:.1f} s.",
        found="What it reported until then is kept.",
        try_=f'lab.Run.open("{run.folder}").metrics',
        folder=run.folder,
    )


def ask_where(folder: RunFolder, nproc: int, patience_s: float = 0.5) -> dict[int, str]:
    """Ask each running rank where it stands; the stacks of those that answered, innermost frame first."""
    asked = []
    for rank in range(nproc):
        hello = folder.read_json(folder.of_rank("ranks", rank))
        if hello and not folder.of_rank("results", rank).exists():
            try:
                os.kill(hello["pid"], STACK_SIGNAL)
                asked.append(rank)
            except ProcessLookupError:
                continue
    deadline = time.monotonic() + patience_s
    paths = {rank: folder.of_rank("stacks", rank) for rank in asked}
    while time.monotonic() < deadline and not all(path.stat().st_size for path in paths.values()):
        time.sleep(0.01)
    time.sleep(0.02)  # a stack is written line by line
    return {rank: path.read_text() for rank, path in paths.items() if path.stat().st_size}


def _write_outcome(folder: RunFolder, call: Call, machine: Machine, outcome: str, how: str, begin: float) -> Run:
    record = {
        "name": call.name,
        "nproc": call.nproc,
        "device": call.device,
        "backend": call.backend,
        "why": call.why,
        "how": how,
        "outcome": outcome,
        "duration_s": time.time() - begin,
        "command": shell_command(folder, call),
        "machine": machine.describe(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin)),
    }
    with interrupts_ignored():
        folder.write("outcome.json", json.dumps(record))
    return Run(folder=folder.path, **record)  # type: ignore[arg-type]
