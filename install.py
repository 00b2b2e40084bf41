#!/usr/bin/env python3
"""Set up this repository: make .venv and install all that the course needs into it.

    python3 install.py                  what `make lab` and `make course` do first
    python3 install.py --with-browser   what `make test` does first: also finds a Chromium

It needs nothing but Python's standard library. Run again, it does only what changed. pip's own words go to
.venv/install.log.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

if sys.version_info < (3, 10):  # before any annotation that an older Python can't evaluate
    sys.exit(f"The course needs Python 3.10 or newer; this is {platform.python_version()}.\n"
             "Try: make lab PYTHON=python3.12   (or another newer Python that you have)")  # fmt: skip
if sys.platform == "win32":
    sys.exit("The course runs on Windows through WSL2, not natively: torchrun needs a POSIX system.\n"
             "Try: wsl --install   then run this again inside it")  # fmt: skip

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
STAMP = VENV / "install.json"  # what was installed, for what; written last
UNFINISHED = VENV / "install.unfinished"  # there only while pip works: if it is found, pip was killed
BROWSER = VENV / "browser.txt"  # path of the Chromium; empty for Playwright's own
NO_BROWSER = VENV / "browser.none"  # the search failed here once; don't wait for it at every `make test`

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SPACE_GIB = {"cpu": 3, "cuda": 10}  # .venv and what pip unpacks beside it; CUDA's libraries are the rest
PIP = ["-m", "pip", "--no-input", "--disable-pip-version-check", "install"]

JUPYTER_FILES = {
    # No "would you like to get news" pop-up on the first start.
    "share/jupyter/lab/settings/overrides.json": json.dumps(
        {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
    ),
    # ipykernel warns of unencrypted TCP on loopback at each start; errors still show.
    "etc/ipython/ipython_kernel_config.py": "c = get_config()\nc.IPKernelApp.log_level = 40\n",
}

# What the log of a failed step says -> what to do. The first that matches counts: with no network, pip ends
# with "No matching distribution", so the network stands before it.
REMEDIES = {
    r"ensurepip is not\s+available|No module named '?(venv|ensurepip)": (
        f"sudo apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    ),
    r"No space left on device": "df -h . ${TMPDIR:-/tmp}   (then free some, or set TMPDIR to a larger disk)",
    r"name resolution|Name or service not known|nodename nor servname|unreachable|NewConnectionError"
    r"|ConnectTimeout|[Tt]imed out|Could not resolve": (
        "connect to the network (behind a proxy: export HTTPS_PROXY=http://HOST:PORT); python3 install.py"
    ),
    r"CERTIFICATE_VERIFY_FAILED|SSLError": "export PIP_CERT=/path/to/your/network's/ca.pem",
    r"No matching distribution|requires a different Python": (
        "make lab PYTHON=python3.12   (a Python for which all the pinned releases exist)"
    ),
    r"Permission denied|Read-only file system": "ls -ld . .venv   (both must be yours to write)",
}


class StepFailed(Exception):
    """A step that could not be done: what happened, then a line that starts with `Try:`."""


class StepKilled(StepFailed):
    """A step whose command was killed, perhaps in the middle of a write."""


def has_nvidia_driver() -> bool:
    """Whether this machine can use a CUDA build; the driver itself is not loaded."""
    marks = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
    found = any(Path(mark).exists() for mark in marks) or shutil.which("nvidia-smi")
    return sys.platform == "linux" and bool(found)


def is_reachable(url: str) -> bool:
    """Whether `url` answers within a few seconds."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=4):
            return True
    except (OSError, ValueError):
        return False


def torch_source() -> tuple[list[str], str]:
    """The pip options for torch, and why."""
    if sys.platform == "darwin":
        return [], "the default index, whose builds for macOS are the right ones"
    if has_nvidia_driver():
        return [], "there is an NVIDIA driver, so the CUDA build, from the default index"
    if is_reachable(TORCH_CPU_INDEX + "/torch/"):
        return [
            "--extra-index-url",
            TORCH_CPU_INDEX,
        ], "no NVIDIA driver, so the CPU build, from PyTorch's own index"
    return [], "no NVIDIA driver, but PyTorch's CPU index can't be reached, so the default index"


def wanted() -> dict[str, str]:
    """What a finished .venv was made for. `place` can't change in place, `files` can."""
    digest = hashlib.sha256()
    for name in ("requirements.txt", "pyproject.toml", "install.py"):
        digest.update((ROOT / name).read_bytes())
    build = "cuda" if has_nvidia_driver() else "cpu"
    place = f"Python {platform.python_version()} {platform.machine()}, {build}, in {ROOT}"
    return {"place": place, "files": digest.hexdigest()}


def found() -> dict[str, str]:
    """What .venv says it was made for; nothing if it is not there or was left half-made."""
    if UNFINISHED.exists() or not PYTHON.exists():
        return {}
    try:
        return dict(json.loads(STAMP.read_text()))
    except (OSError, ValueError):
        return {}


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[int]:
    """Hold the repository's lock. Children inherit it: a pip that outlives us is waited for, not raced."""
    import fcntl

    lock = os.open(ROOT, os.O_RDONLY)  # the folder itself, so that no lock file is left
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another install is at work here; waiting for it", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks: go on without
    try:
        yield lock
    finally:
        os.close(lock)


class Steps:
    """Runs the numbered steps, one printed line each."""

    def __init__(self, total: int, lock: int) -> None:
        self.total, self.lock, self.done = total, lock, 0

    @contextlib.contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Print the step's line: its number and name now, its seconds when it ends."""
        self.done += 1
        self.label, self.start = f"[{self.done}/{self.total}] {label} …", time.monotonic()
        print(self.label, end=" ", flush=True)
        try:
            yield
        except BaseException:
            print("failed", flush=True)
            raise
        self.show_seconds("\n")

    def show_seconds(self, end: str) -> None:
        """Print the step's seconds; on a terminal over the line that is there."""
        again = f"\r{self.label} " if sys.stdout.isatty() else ""
        print(f"{again}{time.monotonic() - self.start:.0f} s", end=end, flush=True)

    def call(self, command: list[str | Path], timeout_s: float = float("inf"), **env: str) -> None:
        """Run a command, its output to the log; raise StepFailed with the lines that matter."""
        words = [str(word) for word in command]
        with LOG.open("a+b") as log:
            log.write(f"\n$ {shlex.join(words)}\n".encode())
            log.flush()
            begin = log.tell()
            code = self.wait(self.spawn(words, log, timeout_s < float("inf"), env), timeout_s)
            log.seek(begin)
            text = log.read().decode(errors="replace")
        if code:
            failure = StepFailed if code > 0 else StepKilled
            raise failure(f"Step {self.done} of {self.total}: {explain(text, code)}")

    def spawn(self, words: list[str], log: IO[bytes], limited: bool, env: dict[str, str]) -> "subprocess.Popen[bytes]":
        """Start a command; one with a time limit in a group of its own, so that it can be ended whole."""
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=os.environ | env,
            start_new_session=limited,
            pass_fds=[] if limited else [self.lock],  # to pip, not to apt, whose packages may start services
        )

    def wait(self, child: "subprocess.Popen[bytes]", timeout_s: float) -> int:
        """Wait for the child, showing the seconds on a terminal; past the limit, end it and its children."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                return child.wait(timeout=1)
            except subprocess.TimeoutExpired:
                if sys.stdout.isatty():
                    self.show_seconds("")
                late_s = time.monotonic() - end
                if late_s > 0:
                    os.killpg(child.pid, signal.SIGTERM if late_s < 10 else signal.SIGKILL)
            except KeyboardInterrupt:
                if timeout_s < float("inf"):  # not in our group, so Ctrl-C did not reach it
                    os.killpg(child.pid, signal.SIGTERM)
                raise


def explain(text: str, code: int) -> str:
    """A failed command's last lines that matter, and what to do."""
    noise = ("[notice]", "note:", "hint:", "WARNING:")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(noise)]
    errors = [line for line in lines if "error" in line.lower()]
    said = "\n".join(f"  | {line[:200]}" for line in (errors or lines)[-4:]) or "  | (nothing)"
    if code < 0:
        how, cure = f"killed by signal {-code}", "free -h   (lack of memory?), then python3 install.py"
    else:
        how, cure = f"exit code {code}", remedy(text)
    return f"{how}. The lines that matter (all of them: .venv/install.log):\n{said}\nTry: {cure}"


def remedy(text: str) -> str:
    """What to do about an error."""
    cures = (cure for sign, cure in REMEDIES.items() if re.search(sign, text))
    return next(cures, "less .venv/install.log")


def check_space(build: str) -> None:
    """Say now, not after minutes of download, that the disk is too small."""
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    if free_gib < SPACE_GIB[build]:
        raise StepFailed(
            f"It needs about {SPACE_GIB[build]} GiB here; {free_gib:.1f} GiB are free in {ROOT}.\n"
            f"Try: df -h {shlex.quote(str(ROOT))}   (then free some, or move the repository to a larger disk)"
        )


def make_venv(steps: Steps) -> None:
    """Make an empty .venv, in place of any that can't be kept."""
    check_space("cuda" if has_nvidia_driver() else "cpu")
    inside = Path(sys.prefix) == VENV  # then this Python's name goes with .venv; what it stands for does not
    base = os.path.realpath(sys.executable) if inside else sys.executable
    if VENV.exists():
        shutil.rmtree(VENV)
    VENV.mkdir()
    UNFINISHED.touch()
    steps.call([base, "-m", "venv", VENV])


def write_jupyter_files() -> None:
    """Settings for JupyterLab and its kernels, inside .venv, so that the learner's own stay as they are."""
    for name, text in JUPYTER_FILES.items():
        write(VENV / name, text)


def install(steps: Steps) -> None:
    """Make or mend .venv, unless it is as wanted."""
    want, have = wanted(), found()
    if have == want:
        print(f".venv is up to date ({want['place'].split(',')[0]})", flush=True)
        steps.done = 4
        return
    keep = have.get("place") == want["place"]
    with steps.step(".venv (kept)" if keep else ".venv (made again)" if VENV.exists() else ".venv"):
        if not keep:
            make_venv(steps)
    UNFINISHED.touch()
    try:
        install_packages(steps)
    except StepKilled:
        raise
    except StepFailed:  # pip stopped by itself, so what is there is whole: the next try goes on from it
        write(STAMP, json.dumps({"place": want["place"], "files": ""}))
        UNFINISHED.unlink()
        raise
    write(STAMP, json.dumps(want))
    UNFINISHED.unlink()


def install_packages(steps: Steps) -> None:
    """Install torch, then all the rest, then this project itself."""
    requirements = ROOT / "requirements.txt"
    torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
    options, why = torch_source()
    print(f"torch: {why}", flush=True)
    with steps.step(torch):
        steps.call([PYTHON, *PIP, torch, *options])
    with steps.step("requirements"):
        steps.call([PYTHON, *PIP, "-r", requirements])
    with steps.step("labkit, Jupyter settings"):
        steps.call([PYTHON, *PIP, "--no-deps", "--editable", ROOT])
        write_jupyter_files()


def system_browser() -> str:
    """Path of a Chromium or Chrome that is on this system, or nothing."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    mac = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    return next(filter(None, map(shutil.which, (*names, mac))), "")


def succeeds(steps: Steps, command: list[str | Path], timeout_s: float, **env: str) -> bool:
    """Whether the command did its work; what it said is in the log."""
    try:
        steps.call(command, timeout_s, **env)
    except (StepFailed, OSError):
        return False
    return True


def starts(steps: Steps, path: str) -> bool:
    """Whether the browser runs here: a snap's stub, or one without its libraries, is found but does not."""
    script = (
        "import sys; from playwright.sync_api import sync_playwright\n"
        "with sync_playwright() as p: p.chromium.launch(executable_path=sys.argv[1] or None).close()"
    )
    return succeeds(steps, [PYTHON, "-c", script, path], timeout_s=60)


def apt_install(steps: Steps, *packages: str) -> bool:
    """Install Debian packages, where we may."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    apt: list[str | Path] = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    add = [*apt, "install", "-y", "--no-install-recommends", *packages]
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    return succeeds(steps, [*apt, "update"], 180, **quiet) and succeeds(steps, add, 600, **quiet)


def find_browser(steps: Steps) -> str | None:
    """A Chromium that starts: its path, "" for Playwright's own, None if there is none to be had."""
    path = system_browser()
    if path and starts(steps, path):
        return path
    download: list[str | Path] = [PYTHON, "-m", "playwright", "install", "chromium"]
    if succeeds(steps, download, timeout_s=120) and starts(steps, ""):
        return ""
    if apt_install(steps, "chromium", "fonts-dejavu-core"):
        path = system_browser()
        return path if path and starts(steps, path) else None
    return None


def is_browser_known() -> bool:
    """Whether an earlier search found a browser that is still there."""
    try:
        path = BROWSER.read_text()
    except OSError:
        return False
    return not path or Path(path).exists()


def record_browser(steps: Steps) -> None:
    """Find a Chromium for the browser test, once."""
    if is_browser_known():
        return
    if NO_BROWSER.exists() and not system_browser() and not os.environ.get("CI"):
        print(f"no Chromium: the browser test will be skipped (to search again: rm .venv/{NO_BROWSER.name})")
        return
    with steps.step("Chromium for the browser test"):
        path = find_browser(steps)
    if path is None:
        NO_BROWSER.touch()
        print("no Chromium was to be had: the browser test will be skipped (why: .venv/install.log)")
    else:
        write(BROWSER, path)


def main() -> int:
    """Parse the command line, install, say what failed."""
    parser = argparse.ArgumentParser(description="Set up .venv for the course.")
    parser.add_argument("--with-browser", action="store_true", help="also find a Chromium for the browser test")
    with_browser = parser.parse_args().with_browser
    with one_at_a_time() as lock:
        steps = Steps(4 + with_browser, lock)
        try:
            install(steps)
            if with_browser:
                record_browser(steps)
        except StepFailed as failure:
            print(failure, file=sys.stderr)
            return 1
        except OSError as error:
            print(f"{error}\nTry: {remedy(str(error))}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("Interrupted.\nTry: python3 install.py   (it mends what is half-made)", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
