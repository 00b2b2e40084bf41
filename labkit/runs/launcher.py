"""Start a task on several ranks through torchrun, see it through, and return what came of it."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from labkit.errors import Interrupted, LaunchError, MachineError, UsageError
from labkit.machine.probing import look
from labkit.machine.records import Machine
from labkit.runs.call import Call, check_room
from labkit.runs.failure import launch_error, open_line
from labkit.runs.following import Follower, Snapshot
from labkit.runs.job import Job, Request, interrupts_held
from labkit.runs.packing import pack
from labkit.runs.run import Run, RunFolder
from labkit.runs.stacks import ask_where, rank_timeout
from labkit.runs.warm_client import WarmServer, finding_labkit

TICK_S = 0.3  # three looks a second cost the ranks well below 1 % of a step, ten cost 2 %
FAILED_PATIENCE_S = 5.0  # from a rank's account of its failure to the job's end, which torchrun sees to

Watch = Callable[[Snapshot], bool]  # shows a snapshot; returns whether the learner asked to stop


_server: list[WarmServer] = []  # at most one, for this process; a module's state because a kernel has one server
_server_lock = threading.Lock()


def warm_up(modules: tuple[str, ...] = ()) -> WarmServer:
    """Begin to warm the launcher in the background; returns at once.

    The server lives as long as this process.

    Args:
        modules: Imported beside torch, so that ranks find them loaded.
    """
    with _server_lock:
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

    Raises:
        UsageError: There is no such package.
    """
    own_programs = str(Path(sys.executable).parent)
    if own_programs not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([own_programs, os.environ.get("PATH", "")])  # so that !torchrun is ours
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{missing[0]} is not installed, so ranks can't find it loaded.", try_=f"pip install {missing[0]}"
        )
    warm_up(modules)
    return look()


@dataclass(frozen=True)
class _Launch:
    """One launch: what was asked, where it is kept, and how it is started."""

    call: Call
    machine: Machine
    folder: RunFolder
    begin: float
    server: WarmServer | None
    how: str

    def record(self, outcome: str) -> Run:
        """Write down how the run stands; the last word is the outcome."""
        call, path = self.call, self.folder.path
        record = {
            "name": call.name,
            "nproc": call.nproc,
            "device": call.device,
            "backend": call.backend,
            "why": call.why,
            "how": self.how,
            "outcome": outcome,
            "duration_s": time.time() - self.begin,
            "command": shell_command(self.folder, call),
            "machine": self.machine.describe(call.device),
            "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.begin)),
            "begin_time": self.begin,
        }
        with interrupts_held(), suppress(OSError):  # the disk is full: the rank's own error says so better
            self.folder.write("outcome.json", json.dumps(record))
        return Run(folder=path, **record)  # type: ignore[arg-type]


def run_on_ranks(call: Call, *, warm: bool = True, watch: Watch | None = None) -> Run:
    """Run a checked call and wait for it; `labkit.launch` is this with a live view.

    Args:
        call: From `checked`.
        warm: Fork the ranks from the warm server, where it can be used.
        watch: Called three times a second with a snapshot; the run is stopped when it returns True.

    Raises:
        MachineError: No room, or no working launcher.
        LaunchError: A rank failed.
        Interrupted: The learner interrupted it.
    """
    begin, machine = time.time(), look()
    check_room(machine, call)
    server, how = _choose_server(call, warm)
    launch = _Launch(call, machine, _new_folder(call, machine), begin, server, how)
    try:
        return _see_through(launch, watch)
    except MachineError as error:
        if server is None:
            raise
        cold = replace(launch, server=None, how=f"cold: {error.fact[0].lower()}{error.fact[1:-1]}")
        return _see_through(cold, watch)


def _choose_server(call: Call, warm: bool) -> tuple[WarmServer | None, str]:
    """The warm server and "warm", or None and the reason for a cold call."""
    if not warm:
        return None, "cold, as asked"
    server = warm_up()
    reason = server.unusable_for({**os.environ, **call.env})
    return (None, f"cold: {reason}") if reason else (server, "warm")


def _new_folder(call: Call, machine: Machine) -> RunFolder:
    """A run folder with the task in it.

    Raises:
        UsageError: The task can't be sent to other processes; no folder is left.
        MachineError: The folder can't be written.
    """
    try:
        folder = RunFolder.create(call.name)
        try:
            _write_task(folder, call, machine)
        except BaseException:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
    except OSError as error:
        raise MachineError(
            f"The run folder can't be written: {error.strerror}.",
            found=f"{error.filename}",
            try_="export LABKIT_RUNS=/a/place/with/room",
        ) from None
    return folder


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
    """Torchrun's arguments, the same for warm and cold. No port is fixed: `--standalone` takes a free one."""
    options = ("--standalone", f"--nproc-per-node={call.nproc}", f"--log-dir={folder.logs}", "--redirects=3")
    return (*options, "--monitor-interval=0.05", "-m", "labkit.runs.worker", str(folder.path))


def shell_command(folder: RunFolder, call: Call) -> str:
    """The line that does the same in a shell: for a script plain torchrun, for a function its worker."""
    variables = {"OMP_NUM_THREADS": "1", "LABKIT_DEVICE": call.device, **call.env}
    words = ["torchrun", "--standalone", f"--nproc-per-node={call.nproc}"]
    if call.script:
        words += [str(call.script), *(str(arg) for arg in call.args)]
    else:
        words += ["-m", "labkit.runs.worker", str(folder.path)]
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(words)])


def _request(folder: RunFolder, call: Call) -> Request:
    """One thread a rank, as torchrun sets for two ranks and more; here for one too, so that runs compare."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, **call.env, "LABKIT_DEVICE": call.device}
    return Request(torchrun_args(folder, call), finding_labkit(env), str(Path.cwd()), str(folder.agent_log))


def _see_through(launch: _Launch, watch: Watch | None) -> Run:
    """Start the job, follow it to its end, write down the outcome, and return the run or raise its error."""
    call, folder = launch.call, launch.folder
    follower, stacks = Follower(folder, call.nproc), {}
    try:
        launch.record("unfinished")
        with Job(_request(folder, call), launch.server) as job:
            outcome = _follow(job, follower, call.timeout_s, watch)
            if outcome == "timeout":
                stacks = ask_where(folder, call.nproc)
    except KeyboardInterrupt:
        run = launch.record("interrupted")
        raise Interrupted(
            f"You stopped {call.name} after {run.duration_s:.1f} s; what it reported is kept.\n"
            f"Try: {open_line(run)}.metrics"
        ) from None
    if watch:
        watch(follower.look(last=True))
    if outcome == "ended":
        outcome = "finished" if job.agent_status == 0 else "failed"
    run = launch.record(outcome)
    if outcome == "finished":
        return run
    raise _error(launch, run, job.agent_status, stacks)


def _follow(job: Job, follower: Follower, timeout_s: float | None, watch: Watch | None) -> str:
    """Wait for the job's end while showing it.

    Returns:
        "ended", or why it must be ended: "timeout", "stopped", "failed".
    """
    begin, failed_at = time.time(), math.inf
    while not job.wait(TICK_S):
        snapshot, now = follower.look(), time.time()
        if watch and watch(snapshot):
            return "stopped"
        if timeout_s is not None and now - begin > timeout_s:
            return "timeout"
        if any(view.state == "failed" for view in snapshot.ranks):
            failed_at = min(failed_at, now)
        if now - failed_at > FAILED_PATIENCE_S:  # a rank that will not end keeps torchrun waiting
            return "failed"
    return "ended"


def _error(launch: _Launch, run: Run, agent_status: int | None, stacks: dict[int, str]) -> LaunchError:
    """The error of a run that did not finish."""
    folder = launch.folder
    if run.outcome == "timeout":
        return rank_timeout(folder, run, timeout_s=launch.call.timeout_s or 0, stacks=stacks)
    if run.outcome == "stopped":
        return LaunchError(
            f"You stopped {run.name} after {run.duration_s:.1f} s.",
            found="What it reported until then is kept.",
            try_=f"{open_line(run)}.metrics",
            folder=folder.path,
        )
    if launch.server and not launch.server.alive:
        return LaunchError(
            f"The warm server was killed while {run.name} ran on it.",
            found="Its ranks have been ended with it. What they reported is kept.",
            try_="the same launch again; a new server starts by itself",
            folder=folder.path,
        )
    return launch_error(folder, run, agent_status)
