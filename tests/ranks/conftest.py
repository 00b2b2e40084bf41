"""Every test here launches real ranks; after each, nothing may be left of them."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit.runs import launcher

# Inherited by all that is started from here; /proc/<pid>/environ shows it even in processes that were forked.
MARK = "LABKIT_TEST_MARK"
os.environ[MARK] = uuid.uuid4().hex


def marked(mark: str) -> list[psutil.Process]:
    """All processes that run and were started, however indirectly, under this mark."""
    return [process for process in psutil.process_iter() if _carries(process, mark)]


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def eventually(condition: Callable[[], Any], within_s: float = 10.0) -> Any:
    """The condition's value once it is true, or its last value when time is up."""
    deadline = time.monotonic() + within_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def server_pids() -> set[int]:
    return {server.pid for server in launcher._server}


def left_over() -> list[str]:
    """Processes of launches from this process, the warm server aside; zombies count."""
    mine = {os.getpid(), *server_pids()}
    marks = {process for process in marked(os.environ[MARK]) if process.pid not in mine}
    children = {child for child in psutil.Process().children() if child.pid not in mine}
    return [str(process) for process in marks | children]


def listening() -> set[tuple[int, int]]:
    """Ports that processes of ours listen on."""
    pids = {process.pid for process in marked(os.environ[MARK])}
    found = psutil.net_connections(kind="tcp")
    return {(item.pid, item.laddr.port) for item in found if item.status == "LISTEN" and item.pid in pids}


def open_files() -> int:
    """Files, pipes and sockets that this process holds; not the event queues, which zmq keeps for good."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return len([target for target in targets if not target.startswith("anon_inode")])


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.fixture(scope="session")
def warm_server() -> Any:
    """The warm server, imported and used once, so that later launches open nothing new in this process."""
    from labkit.runs.call import checked

    call = checked(len, (), nproc=1, device="cpu", timeout_s=60, env={})
    with pytest.raises(Exception, match="Rank"):  # len(rank) fails, which warms that path too
        launcher.run_on_ranks(call)
    return launcher.warm_up()


@pytest.fixture(autouse=True)
def nothing_left(here: Path, warm_server: Any) -> Iterator[None]:
    """Before and after each test: the same open files, ports and shared memory, and no process but the server."""
    files, memory = open_files(), shared_memory()
    yield
    launcher.warm_up().wait_until_ready()  # a test may have killed it
    assert eventually(lambda: not left_over(), 5), left_over()
    assert not listening()
    assert eventually(lambda: shared_memory() <= memory, 2), shared_memory() - memory
    assert eventually(lambda: open_files() <= files, 2)


@pytest.fixture(params=[True, False], ids=["warm", "cold"])
def warm(request: pytest.FixtureRequest) -> bool:
    """Each failure reads the same after a warm and after a cold launch."""
    return bool(request.param)
