"""The guard: the process above a job's agent that leaves nothing behind, whatever dies.

It is the parent of one torchrun agent and, as a child subreaper, becomes the parent of every process that loses its
own (ranks live in sessions of their own, so no signal to a group reaches them all). It ends them when the job ends,
when the notebook asks, and when the notebook dies: then the socket between the two reads end-of-file.

    notebook ──socket── guard ── agent (torchrun) ── rank 0, rank 1, …

It ends only its own descendants, never by name. Linux has all of this; macOS has no subreaper, so there a process
that left its parent before the guard looked is not found.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TERMINATE = b"t"  # the only word the notebook says; end-of-file says the rest
GRACE_S = 3.0  # from SIGTERM to SIGKILL


def guard(control: socket.socket, start: Callable[[], None]) -> None:
    """Run `start` in a child process and stay until it and all its descendants are gone; then exit.

    Args:
        control: Our end of the notebook's socket; closed in the child. The last thing written to it is the child's
            exit status in ASCII, negative for a signal.
        start: Becomes the agent; must not return.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup = _listen_to_signals()
    agent = os.fork()
    if agent == 0:
        control.close()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent()
        start()
        os._exit(1)
    status = _wait_for_agent(agent, control, wakeup)
    end_descendants()
    try:
        control.send(str(status).encode())
    except OSError:  # the notebook is gone; nobody is left to tell
        pass
    os._exit(0)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask Linux to signal this process when its parent dies; a second line of defence behind the guard."""
    _prctl(PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _listen_to_signals() -> socket.socket:
    """A socket that becomes readable with the number of each signal that arrives."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return ours


def _wait_for_agent(agent: int, control: socket.socket, wakeup: socket.socket) -> int:
    """Wait until the agent ends by itself or is made to; its exit status."""
    deadline: float | None = None
    while True:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([control, wakeup], [], [], timeout)
        if not readable:
            return _kill(agent)
        if wakeup in readable:
            numbers = wakeup.recv(64)
            status = _reap(agent)
            if status is not None:
                return status
            if set(numbers) & {signal.SIGTERM, signal.SIGINT} and deadline is None:
                deadline = _terminate(agent)
        if control in readable:
            if control.recv(64) != TERMINATE:
                return _kill(agent)
            deadline = deadline or _terminate(agent)


def _terminate(agent: int) -> float:
    """Send SIGTERM, which torchrun passes on to its ranks; the time at which patience ends."""
    os.kill(agent, signal.SIGTERM)
    return time.monotonic() + GRACE_S


def _kill(agent: int) -> int:
    end_descendants(keep_unreaped=agent)
    return os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])


def _reap(agent: int) -> int | None:
    """Collect every dead child; the agent's exit status if it was among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == agent:
            found = os.waitstatus_to_exitcode(status)


def end_descendants(keep_unreaped: int = 0) -> None:
    """Kill every descendant of this process until none is left; children of the killed come to us and are next."""
    me = psutil.Process()
    while True:
        alive = [child for child in me.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
        if not alive:
            break
        for child in alive:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                pass
        time.sleep(0.005)
    if not keep_unreaped:
        _reap(0)


def main() -> None:
    """`python -m labkit.runs.guard SOCKET_FD COMMAND …`: guard a command of its own (the cold launch)."""
    control = socket.socket(fileno=int(sys.argv[1]))
    guard(control, lambda: os.execv(sys.argv[2], sys.argv[2:]))


if __name__ == "__main__":
    main()
