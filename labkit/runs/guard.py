"""The guard: the process above a job's agent that leaves nothing behind, whatever dies.

It is the parent of one torchrun agent and, as a child subreaper, becomes the parent of every process that
loses its own (ranks live in sessions of their own, so no signal to a group reaches them all). It ends them
when the job ends, when the notebook asks, and when the notebook dies: then the socket between the two reads
end-of-file.

    notebook ──socket── guard ── agent (torchrun) ── rank 0, rank 1, …

It ends only its own descendants, never by name. Linux has all of this; macOS has no subreaper, so there a
process that left its parent before the guard looked is not found.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from labkit.runs.prctl import adopt_orphans, die_with_parent

TERMINATE = b"t"  # the only word the notebook says; end-of-file says the rest
GRACE_S = 3.0  # from SIGTERM to SIGKILL
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def guard(control: socket.socket, start: Callable[[], None]) -> None:
    """Run `start` in a child process and stay until it and all its descendants are gone; then exit.

    Args:
        control: Our end of the notebook's socket; closed in the child. The last thing written to it is the
        child's
            exit status in ASCII, negative for a signal.
        start: Becomes the agent; must not return.
    """
    adopt_orphans()
    wakeup, wake = _listen_to_signals()
    agent = os.fork()
    if agent == 0:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for ours in (control, wakeup, wake):
            ours.close()
        die_with_parent()
        try:
            start()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    status = _wait_for_agent(agent, control, wakeup)
    status = end_descendants(agent, status)
    with suppress(OSError):  # the notebook is gone; nobody is left to tell
        control.send(str(status).encode())
    os._exit(0)


def _listen_to_signals() -> tuple[socket.socket, socket.socket]:
    """A pair of sockets: the first becomes readable with the number of each signal that arrives."""
    wakeup, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    return wakeup, wake


def _wait_for_agent(agent: int, control: socket.socket, wakeup: socket.socket) -> int | None:
    """Wait until the agent has ended, and return its status; None if it must be killed."""
    deadline: float | None = None
    while True:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([control, wakeup], [], [], timeout)
        if not readable:
            return None
        asked = False
        if wakeup in readable:
            numbers = wakeup.recv(64)
            status = _reap(agent)[1]
            if status is not None:
                return status
            asked = bool({signal.SIGTERM, signal.SIGINT} & set(numbers))
        if control in readable:
            if control.recv(64) != TERMINATE:
                return None
            asked = True
        if asked and deadline is None:
            os.kill(agent, signal.SIGTERM)  # torchrun passes it on to its ranks
            deadline = time.monotonic() + GRACE_S


def _reap(agent: int) -> tuple[bool, int | None]:
    """Collect dead children: whether any is left alive, and the agent's exit status if it was among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, found
        if pid == 0:
            return True, found
        if pid == agent:
            found = os.waitstatus_to_exitcode(status)


def end_descendants(agent: int, status: int | None) -> int | None:
    """Kill every descendant until none is left: the orphans of the killed come to us and are next.

    Returns:
        The agent's exit status: the given one, or what it died of here.
    """
    while True:
        left, found = _reap(agent)
        status = found if status is None else status
        if not left:
            return status
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.005)


def main() -> None:
    """`python -m labkit.runs.guard SOCKET_FD COMMAND …`: guard a command of its own (the cold launch)."""
    control = socket.socket(fileno=int(sys.argv[1]))
    guard(control, lambda: os.execv(sys.argv[2], sys.argv[2:]))


if __name__ == "__main__":
    main()
