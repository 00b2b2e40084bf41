"""The warm server: a process that has imported torch once and forks a guarded torchrun agent for each launch.

`python -u -m labkit.runs.warm_server SOCKET_FD [MODULE …]`, started by `warm_client`. What it forks runs
torchrun's own `torch.distributed.run.main` with the same arguments that the cold launch gives to `python -m`.
One thing differs: where the agent would start `python -m labkit.runs.worker FOLDER` for a rank, it forks, and
calls the same function. That saves importing torch once in the agent and once in each rank, which is nearly
all of a launch's time.

It never initialises CUDA (a forked child could not use it then), and holds no state between launches.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

# torch.cuda.is_available() must not call cuInit before the fork; a rank's environment is set anew from the
# launch's.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when libgomp loads; ranks set their own by torch.set_num_threads

import torch
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from labkit.runs import worker
from labkit.runs.guard import guard
from labkit.runs.prctl import die_with_parent

HEADER = struct.Struct("!I")


class ForkedRank:
    """The part of `subprocess.Popen` that torchrun uses, for a rank that was forked instead of started."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], stdout: int, stderr: int) -> None:
        self.args = args
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(args, env, stdout, stderr)

    def poll(self) -> int | None:
        """The exit code if the rank has ended, negative for a signal; else None."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float) -> int | None:
        """Wait up to `timeout` seconds; raises TimeoutExpired as Popen does."""
        deadline = time.monotonic() + timeout
        while self._wait(os.WNOHANG) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.002)
        return self.returncode

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _become_rank(args: tuple[str, ...], env: dict[str, str], stdout: int, stderr: int) -> NoReturn:
    """Turn this fresh fork into what `python -u -m labkit.runs.worker FOLDER` would be; never returns."""
    code = 1
    gc.freeze()  # nothing of the agent's may be finalised here: its threads are not
    try:
        os.setsid()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # as Popen does: the sockets of the agent's store are not ours
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        _look_up_hosts_in(_host_services())
        os.environ.clear()
        os.environ.update(env)
        _reread_environment()
        code = worker.main(args[-1])
        threading._shutdown()  # type: ignore[attr-defined]  # wait for the learner's threads, as Python's exit does
        atexit._run_exitfuncs()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _look_up_hosts_in(services: str) -> None:
    """Where this process looks up host names, as in nsswitch.conf; only glibc can be told so."""
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure:
        configure(b"hosts", services.encode())


def _ask_name_servers_again_soon() -> None:
    """Read the resolver's options now, for all forks: ask again after 1 s, not 5, since each rank asks once too."""
    if "RES_OPTIONS" not in os.environ:
        os.putenv("RES_OPTIONS", "timeout:1 attempts:5")
        socket.getaddrinfo("localhost", None)
        os.unsetenv("RES_OPTIONS")


def _host_services() -> str:
    """Where this computer looks up host names."""
    file = Path("/etc/nsswitch.conf")
    found = re.search(r"^hosts:([^#\n]+)", file.read_text(), re.MULTILINE) if file.exists() else None
    return found[1].strip() if found else "files dns"


def _reread_environment() -> None:
    """Set what torch and numpy took from the environment, or from chance, when they were imported."""
    num_threads = re.match(r"[1-9]\d*", os.environ.get("OMP_NUM_THREADS", ""))
    torch.set_num_threads(int(num_threads[0]) if num_threads else len(os.sched_getaffinity(0)))
    torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    torch.default_generator.seed()  # a fresh process draws its seed by chance, on the CPU; on GPUs it is fixed
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()


def _become_agent(request: dict[str, Any]) -> NoReturn:
    """Run torchrun in this process with the arguments of the request; never returns."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["env"])
    # torch's store asks for the name of every client, ::ffff:127.0.0.1, which /etc/hosts does not have, and serves
    # nobody meanwhile. Where a name server does not answer, that is 5 s.
    _look_up_hosts_in("files myhostname")
    os.chdir(request["cwd"])
    _hasten_rendezvous()
    SubprocessHandler._popen = _fork_rank  # type: ignore[assignment,method-assign]
    sys.argv = [torchrun.__file__, *request["argv"]]
    try:
        torchrun.main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _fork_rank(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> ForkedRank:
    """Take the place of `SubprocessHandler._popen`; the handler has opened the rank's log files."""
    return ForkedRank(args, env, handler._stdout.fileno(), handler._stderr.fileno())


def _hasten_rendezvous() -> None:
    """Leave out two things of the rendezvous that serve large clusters.

    0 … 0.3 s of random delay before joining, so that many nodes don't arrive at once, and the method names of
    events that nobody listens to (0.1 s of `inspect`).
    """
    rendezvous._delay = lambda seconds: None if isinstance(seconds, tuple) else time.sleep(seconds)  # type: ignore[attr-defined]
    rendezvous.get_method_name = lambda depth=2: ""


def _receive(requests: socket.socket) -> tuple[dict[str, Any], socket.socket] | None:
    """The next request and the socket to its notebook; None when the notebook is gone."""
    head, fds, _, _ = socket.recv_fds(requests, HEADER.size, 1)
    if not head:
        return None
    (length,) = HEADER.unpack(head)
    body = b""
    while len(body) < length:
        chunk = requests.recv(length - len(body))
        if not chunk:  # the notebook died in the middle of asking
            return None
        body += chunk
    return json.loads(body), socket.socket(fileno=fds[0])


def _collect_guards(*_: object) -> None:
    """Reap guards that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    """Serve launches until the notebook's process ends."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    atexit._clear()  # torch's own handlers are the server's, not the ranks'
    gc.collect()
    gc.freeze()  # the forked ranks' collector leaves our pages alone, so they stay shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _collect_guards)
    _ask_name_servers_again_soon()
    requests.send(b"ready")
    while (received := _receive(requests)) is not None:
        request, control = received
        if os.fork() == 0:
            requests.close()
            os.setsid()
            die_with_parent(signal.SIGTERM)
            guard(control, partial(_become_agent, request))
        control.close()
    os._exit(0)  # what torch would do on the way out, it has told atexit, and that was cleared


if __name__ == "__main__":
    main()
