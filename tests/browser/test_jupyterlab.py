"""JupyterLab as a learner meets it: `make lab`, Run All, a bar that moves, Stop while the cell is busy."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Page, TimeoutError, expect, sync_playwright

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out"
TOKEN = "a-token-for-the-test"
IDLE = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook-ExecutionIndicator[data-status=idle]"
OUTPUT = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea-output"
LONG_RUN = """
import time
import labkit as lab
lab.start()

def count(rank):
    for step in range(300):
        time.sleep(0.1)
        rank.report(loss=1 / (step + 1), tokens_per_s=1000.0)
        rank.progress(step + 1, 300)

lab.launch(count, nproc=2, device="cpu")
"""


def browser_path() -> str | None:
    """The browser that the set-up found: a path, "" for Playwright's own, None for no browser."""
    note = ROOT / ".venv" / "browser.txt"
    if note.exists():
        return note.read_text().strip()
    return shutil.which("chromium") or shutil.which("google-chrome")


pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        browser_path() is None and "CI" not in os.environ, reason="no Chromium here; `make test` says how to get one"
    ),
]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def lab_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`make lab` on a copy of the notebooks; what the test leaves goes with it."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "notebooks", home / "notebooks", ignore=shutil.ignore_patterns("runs", "*.py"))
    write_notebook(home / "notebooks" / "long.ipynb", LONG_RUN)
    port = free_port()
    options = f"--no-browser --IdentityProvider.token={TOKEN}"
    env = {
        **os.environ,
        "LABKIT_RUNS": str(home / "runs"),
        "JUPYTER_CONFIG_DIR": str(home),
        "JUPYTER_DATA_DIR": str(home),
    }
    command = ["make", "lab", f"PYTHON={sys.executable}", f"PORT={port}", f"FOLDER={home}", f"ARGS={options}"]
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for_port(port, server, home / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        end(server)


def write_notebook(path: Path, code: str) -> None:
    """A notebook of one cell."""
    cell = {"cell_type": "code", "id": "only", "metadata": {}, "source": code, "execution_count": None, "outputs": []}
    metadata = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}}
    path.write_text(json.dumps({"cells": [cell], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))


def wait_for_port(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.poll() is None, log.read_text()
        time.sleep(0.2)
    pytest.fail(f"JupyterLab did not answer within 90 s:\n{log.read_text()}")


def end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to JupyterLab, and whatever is left by force."""
    if server.poll() is not None:
        return
    children = psutil.Process(server.pid).children(recursive=True)
    for child in children:
        if "jupyterlab" in " ".join(child.cmdline()):
            child.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(children, timeout=15)
    for child in alive:
        child.kill()
    server.wait(10)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        options = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-sync",
            "--no-first-run",
        ]
        browser = playwright.chromium.launch(executable_path=browser_path() or None, args=options)
        page = browser.new_page(viewport={"width": 1280, "height": 1600})
        page.set_default_timeout(30_000)
        yield page
        browser.close()


def open_notebook(page: Page, url: str) -> None:
    """Open it in a clean workspace and wait for its kernel."""
    page.goto(url)
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_selector(IDLE)


def run_all(page: Page, *, outputs: int) -> None:
    """Run → Run All Cells, from the menu; again if JupyterLab took it before the kernel was connected, and dropped it.

    Args:
        page: With the notebook open.
        outputs: How many outputs the notebook has at least once it runs, more than it was saved with.
    """
    for _ in range(4):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()
        try:
            page.wait_for_function(f"document.querySelectorAll('{OUTPUT}').length >= {outputs}", timeout=10_000)
            return
        except TimeoutError:
            continue
    pytest.fail("JupyterLab runs no cell")


def test_make_lab_opens_lab_00_and_runs_it_all(page: Page, lab_url: str) -> None:
    page.goto(f"{lab_url}/?token={TOKEN}")
    page.wait_for_url(re.compile("00_start_here.ipynb"))
    open_notebook(page, f"{lab_url}/lab/tree/notebooks/00_start_here.ipynb?token={TOKEN}&reset")
    assert page.locator(".jp-toast, .jp-Dialog").count() == 0, "a first-run pop-up"
    run_all(page, outputs=2)
    expect(page.locator(OUTPUT, has_text="I had one job").last).to_be_visible(timeout=90_000)
    page.wait_for_selector(IDLE)
    OUT.mkdir(exist_ok=True)
    page.locator(OUTPUT, has_text="I had one job").last.scroll_into_view_if_needed()
    page.screenshot(path=OUT / "lab00.png")
    done = page.locator(OUTPUT, has_text=re.compile("✓ add_up: 2 ×"))
    assert done.count() == 2
    assert (
        page.locator(OUTPUT, has_text="Traceback (most recent call last)").count() == 1
    )  # the one we broke on purpose


def test_the_bar_moves_and_stop_ends_the_run(
    page: Page, lab_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    open_notebook(page, f"{lab_url}/lab/tree/notebooks/long.ipynb?token={TOKEN}&reset")
    run_all(page, outputs=1)
    bar = page.locator(".jp-OutputArea-output .progress-bar")
    bar.wait_for(state="attached")
    page.wait_for_function("document.querySelector('.jp-OutputArea-output').innerText.includes('loss')")
    widths = {bar.get_attribute("style")}
    deadline = time.monotonic() + 20
    while len(widths) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
        widths.add(bar.get_attribute("style"))
    assert len(widths) >= 3, "the bar does not move"
    page.screenshot(path=OUT / "live.png")
    assert ranks_running()
    page.locator(".jp-OutputArea-output button", has_text="Stop").click()
    expect(page.locator(OUTPUT, has_text="You stopped count after")).to_be_visible(timeout=10_000)
    assert page.locator(".jp-OutputArea-output .progress-bar").count() == 0, "a bar stays in the saved notebook"
    page.screenshot(path=OUT / "stopped.png")
    assert not ranks_running()


def ranks_running() -> list[int]:
    """What warm servers forked: guards, agents, ranks. (A forked process shows its server's command line.)"""
    forked = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            parent = process.parent()
            lines = (process.info["cmdline"] or [], parent.cmdline() if parent else [])
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if all("labkit.runs.warm_server" in line for line in lines):
            forked.append(process.pid)
    return forked
