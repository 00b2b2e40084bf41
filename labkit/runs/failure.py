"""From what each rank left behind to one error: who failed first, at which line, and who only echoed it.

torchrun kills the other ranks as soon as one ends, and a rank that waits for a dead one fails too, so the
last thing printed is seldom the cause. Here every rank's own account (errors/<rank>.json, written before its
sockets close) is read, echoes are told from causes by what they say, and causes are ordered by time. A rank
that was killed by a signal wrote none: torchrun's summary holds its exit code.
"""

from __future__ import annotations

import math
import re
import shutil
import signal
import textwrap
from dataclasses import dataclass
from typing import Any

from labkit.errors import LaunchError
from labkit.runs.run import Run, RunFolder, read_lines, short_path
from labkit.runs.stacks import learner_frame, stack_frames
from labkit.runs.worker import ECHOES
from labkit.units import MIB, bytes_text

SUMMARY = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)")
# What TORCH_DISTRIBUTED_DEBUG=DETAIL says, with two fingerprints of 300 characters in it.
MISMATCH = re.compile(r"Detected mismatch between collectives.*in the following aspects: (?:Tensor )?(.*)")
LIBRARY_FRAMES = re.compile(
    r'(?:  File "[^"]*(?:site-packages|/lib/python3|/labkit/verdicts/)[^"]*", line .*\n(?:    .*\n)*)+'
)
FULL_DISK_BYTES = 1 * MIB


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        rank: Which.
        account: What it wrote itself (type, text, frames, traceback, time); None if it could not.
        exit_code: As torchrun saw it, negative for a signal; None if torchrun did not say.
    """

    rank: int
    account: dict[str, Any] | None
    exit_code: int | None

    @property
    def is_echo(self) -> bool:
        """Whether it only failed because another rank was gone."""
        return self.account is not None and bool(self.account["is_echo"])

    def is_like(self, other: RankEnd) -> bool:
        """Whether both ended of the same."""
        if self.account and other.account:
            return all(self.account[key] == other.account[key] for key in ("type", "text"))
        return not self.account and not other.account and self.exit_code == other.exit_code

    @property
    def order(self) -> tuple[bool, float]:
        """Sorts causes before echoes, then by time.

        One that died without a word comes before all that spoke, but a SIGKILL after them, since torchrun sends
        that to ranks that will not end, and a SIGABRT too: NCCL's watchdog aborts ranks that wait for a failed one.
        """
        if self.account:
            return self.is_echo, self.account["time"]
        return False, math.inf if self.exit_code in (-signal.SIGKILL, -signal.SIGABRT) else 0.0


def rank_ends(folder: RunFolder, nproc: int) -> list[RankEnd]:
    """Ranks that ended badly of themselves, the likely cause first; without those that torchrun ended."""
    exit_codes = {int(rank): int(code) for rank, code in SUMMARY.findall(_agent_log(folder))}
    ends = [
        RankEnd(rank, folder.read_json(folder.of_rank("errors", rank)), exit_codes.get(rank)) for rank in range(nproc)
    ]
    bad = [end for end in ends if end.account or end.exit_code]
    # SIGTERM is what torchrun sends to the survivors of a failure, so it is a cause only where nobody else
    # has one.
    of_themselves = [end for end in bad if end.account or end.exit_code != -signal.SIGTERM]
    return sorted(of_themselves or bad, key=lambda end: end.order)


def _agent_log(folder: RunFolder) -> str:
    return folder.agent_log.read_text(errors="replace") if folder.agent_log.exists() else ""


def launch_error(folder: RunFolder, run: Run, agent_status: int | None) -> LaunchError:
    """The error of a run that failed, in the learner's terms.

    Args:
        folder: Of the run.
        run: Its record.
        agent_status: torchrun's exit status, negative for a signal; None if its guard was killed before it
        could tell.
    """
    ends = rank_ends(folder, run.nproc)
    if not ends:
        return _agent_error(folder, run, agent_status)
    first = min((end for end in ends if end.is_like(ends[0])), key=lambda end: end.rank)
    others = [end for end in ends if end is not first]
    left = [rank for rank in range(run.nproc) if folder.of_rank("results", rank).exists()]
    if first.is_echo and left:
        return _left_alone(folder, run, ends, left[0])
    fact, quote = _describe(first, run, folder)
    found = [quote, *(_describe_other(end, first) for end in others)]
    return LaunchError(
        fact,
        found="\n".join(text for text in found if text),
        try_=_advice(first, run),
        rank=first.rank,
        traceback=first.account["traceback"] if first.account else "",
        folder=folder.path,
    )


def _left_alone(folder: RunFolder, run: Run, ends: list[RankEnd], left: int) -> LaunchError:
    """Ranks failed in a collective because another had returned: it made fewer calls than they did."""
    accounts = [end.account for end in ends if end.account]
    places = [learner_frame(account["frames"], folder.path) for account in accounts]
    waiting = [f"Rank {end.rank} was waiting for it at {place}" for end, place in zip(ends, places, strict=False)]
    return LaunchError(
        f"Rank {left} of {run.nproc} returned while another rank was still waiting for it in a collective.",
        found="\n".join(
            [
                *waiting,
                "A collective ends when all ranks have called it, so every rank must make as many calls.",
            ]
        ),
        try_="let every rank run the same number of steps, or use DDP's join()",
        rank=left,
        traceback=accounts[0]["traceback"] if accounts else "",
        folder=folder.path,
    )


def _describe(end: RankEnd, run: Run, folder: RunFolder) -> tuple[str, str]:
    """The fact about a rank's end, and what to quote below it."""
    who = f"Rank {end.rank} of {run.nproc}"
    if end.account is None:
        return f"{who} {_exit_text(end.exit_code or 0)}.", _last_seen(end.rank, folder)
    if end.account["returned"]:
        what = f"a value of type {end.account['returned']} that can't be sent back"
        return f"{who} returned {what}: {_said(end.account)}", ""
    if end.account["type"] == "SystemExit":
        line, code = learner_frame(end.account["frames"], folder.path), end.account["text"]
        said = _last_words(end.rank, folder) if code.isdigit() else ""  # a text is what it said
        return f"{who} called sys.exit({code}){f' at {line}' if line else '.'}", said
    return f"{who} raised {_said(end.account)}", _quoted(end.account["traceback"], folder)


def _describe_other(end: RankEnd, first: RankEnd) -> str:
    if end.is_like(first):
        return f"Rank {end.rank} did the same."
    if end.account is None:
        return f"Rank {end.rank} {_exit_text(end.exit_code or 0)}."
    if end.is_echo:
        return f"Rank {end.rank} only echoes it: {ECHOES.search(str(end.account))[0]}."  # type: ignore[index]
    return f"Rank {end.rank}, {'later' if first.account else 'too'}: {_said(end.account)}"


def _said(account: dict[str, Any], most: int = 200) -> str:
    """An exception in one line; the middle is left out where it is long."""
    text = MISMATCH.sub(r"the ranks called different collectives: \1", " ".join(account["text"].split()))
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-most // 2 :]}"
    return f"{account['type']}: {text}" if text else account["type"]


def _exit_text(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code} without an exception"


def _last_seen(rank: int, folder: RunFolder) -> str:
    """What a rank that left no account did last."""
    reported, stack = read_lines(folder.of_rank("metrics", rank)), folder.of_rank("stacks", rank)
    words = _last_words(rank, folder)
    found = [words] if words else []
    place = learner_frame(stack_frames(stack.read_text())[::-1], folder.path) if stack.exists() else ""
    if place:
        found.append(f"It stood at {place}")
    if reported:
        last = {name.lstrip("_"): value for name, value in reported[-1].items() if name != "_time"}
        found.append(f"Its last report: {', '.join(f'{name} {value}' for name, value in last.items())}.")
    if full := _full_disk(folder):
        found.append(full)
    return "\n".join(found or ["It wrote no error, no report and nothing on stderr."])


def _full_disk(folder: RunFolder) -> str:
    """Why nothing is written down, if that is why."""
    free_bytes = shutil.disk_usage(folder.path).free
    if free_bytes >= FULL_DISK_BYTES:
        return ""
    return f"The disk of {folder.path} is full, {bytes_text(free_bytes)} free, so the reason could not be written."


def _last_words(rank: int, folder: RunFolder) -> str:
    log = folder.rank_log(rank, "stderr")
    printed = log.read_text(errors="replace").strip().splitlines()[-2:] if log else []
    return f"Its last words on stderr: {' / '.join(printed)}" if printed else ""


def _advice(end: RankEnd, run: Run) -> str:
    if end.account and end.account["returned"]:
        return "return numbers, tensors, or lists and dicts of them"
    if end.exit_code == -signal.SIGKILL and end.account is None:
        return "dmesg | grep -i 'killed process'   (Linux kills a process when memory runs out)"
    if end.exit_code == -signal.SIGABRT and end.account is None and run.backend == "gloo":
        return 'lab.launch(…, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})   (checks that ranks agree on shapes)'
    return f'print({open_line(run)}.logs(rank={end.rank}, stream="stderr"))'


def open_line(run: Run) -> str:
    """The expression that opens a run, as the learner would type it here."""
    return f'lab.Run.open("{short_path(run.folder)}")'


def _quoted(traceback: str, folder: RunFolder, most: int = 24) -> str:
    """A traceback without what the learner did not write, and with its middle left out where it is long."""
    traceback = re.sub(rf"{re.escape(str(folder.cells))}/cell_\d+\.py", "the cell", traceback)
    traceback = LIBRARY_FRAMES.sub(_count_frames, traceback)
    lines = [line if len(line) < 300 else f"{line[:150]} … {line[-150:]}" for line in traceback.rstrip().splitlines()]
    if len(lines) > most:
        lines[most // 2 : -most // 2] = [f"  … {len(lines) - most} lines left out …"]
    return textwrap.indent("\n".join(lines), "    ")


def _count_frames(frames: re.Match[str]) -> str:
    return f"  … {frames[0].count('  File ')} calls in libraries …\n"


def _agent_error(folder: RunFolder, run: Run, status: int | None) -> LaunchError:
    """No rank ended badly of itself, so torchrun did, or the guard above it."""
    tail = "\n".join(f"    {line}" for line in _agent_log(folder).strip().splitlines()[-6:])
    found = _full_disk(folder) or (f"The end of its log:\n{tail}" if tail else "It printed nothing.")
    if status is None:
        fact = "The process that guards the ranks ended before them, and took them along."
    elif status < 0:
        fact = f"torchrun, the parent of the ranks, {_exit_text(status)}."
    else:
        fact = f"torchrun ended with exit code {status}, and no rank said why."
    return LaunchError(fact, found=found, try_=f"cat {short_path(folder.agent_log)}", folder=folder.path)
