"""From what each rank left behind to one error: who failed first, at which line, and who only echoed it.

torchrun kills the other ranks as soon as one ends, and a rank that waits for a dead one fails too, so the last thing
printed is seldom the cause. Here every rank's own account (errors/<rank>.json, written before its sockets close) is
read, echoes are told from causes by what they say, and causes are ordered by time. A rank that was killed by a signal
wrote none: torchrun's summary holds its exit code.
"""

from __future__ import annotations

import linecache
import re
import signal
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import LaunchError, RankTimeout
from labkit.runs.run import Run, RunFolder, read_lines

# What a rank says when another one is gone: gloo (tcp pair), torch's store, NCCL. Seen in torch 2.13 with gloo; the NCCL
# texts are from its documentation: docs.nvidia.com/deeplearning/nccl/user-guide (ncclRemoteError, ncclInternalError).
ECHOES = re.compile(
    r"Connection (closed|reset) by (peer|remote)|Broken pipe|recvValue failed|Timed out waiting \d+ms for \w+ operation|"
    r"remote process exited or there was a network error|NCCL communicator was aborted|failed to recv, got 0 bytes",
)
SUMMARY = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)")
AGENT_SIGNALS = (-signal.SIGTERM, -signal.SIGKILL)


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
        if self.account is None:
            return False
        return any(ECHOES.search(text) for text in (self.account["text"], *self.account["causes"]))

    @property
    def order(self) -> tuple[bool, float]:
        """Sorts causes before echoes, then by time; a rank killed without a word comes before all that spoke."""
        return self.is_echo, self.account["time"] if self.account else 0.0


def rank_ends(folder: RunFolder, nproc: int) -> list[RankEnd]:
    """Ranks that ended badly of themselves, the likely cause first; those that torchrun ended are left out."""
    log = folder.agent_log.read_text(errors="replace") if folder.agent_log.exists() else ""
    exit_codes = {int(rank): int(code) for rank, code in SUMMARY.findall(log)}
    ends = [
        RankEnd(rank, folder.read_json(folder.of_rank("errors", rank)), exit_codes.get(rank)) for rank in range(nproc)
    ]
    bad = [end for end in ends if end.account or end.exit_code]
    spoke = [end for end in bad if end.account and not end.is_echo]
    # SIGTERM is what torchrun sends to the survivors of a failure, so it is a cause only where nobody else has one.
    killed = [end for end in bad if not end.account and (end.exit_code != -signal.SIGTERM or len(bad) == 1)]
    silent = [] if spoke and all(end.exit_code in AGENT_SIGNALS for end in killed) else killed
    return sorted([*silent, *(end for end in bad if end.account)], key=lambda end: end.order)


def launch_error(folder: RunFolder, run: Run) -> LaunchError:
    """The error of a run that failed, in the learner's terms."""
    ends = rank_ends(folder, run.nproc)
    if not ends:
        return _agent_error(folder)
    first, others = ends[0], ends[1:]
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
    """Ranks failed in a collective because another had already returned: it made fewer calls than they did."""
    accounts = [end.account for end in ends if end.account]
    places = [learner_frame(account["frames"], folder.path) for account in accounts]
    waiting = [f"Rank {end.rank} was waiting for it at {place}" for end, place in zip(ends, places, strict=False)]
    return LaunchError(
        f"Rank {left} of {run.nproc} returned while another rank was still waiting for it in a collective.",
        found="\n".join([*waiting, "A collective ends when all ranks have called it, so every rank must make as many calls."]),
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
    line = learner_frame(end.account["frames"], folder.path)
    where = f" at {line}" if line else ""
    if end.account["type"] == "SystemExit":
        return f"{who} called sys.exit({end.account['text']}){where}.", ""
    return f"{who} raised {_said(end.account)}", textwrap.indent(_shortened(end.account["traceback"]), "    ")


def _describe_other(end: RankEnd, first: RankEnd) -> str:
    if end.account is None:
        return f"Rank {end.rank} {_exit_text(end.exit_code or 0)}."
    if first.account and (end.account["type"], end.account["text"]) == (first.account["type"], first.account["text"]):
        return f"Rank {end.rank} raised the same."
    if end.is_echo:
        return f"Rank {end.rank} only echoes it: {ECHOES.search(str(end.account))[0]}."  # type: ignore[index]
    return f"Rank {end.rank}, {'later' if first.account else 'too'}: {_said(end.account)}"


def _said(account: dict[str, Any], most: int = 200) -> str:
    """An exception in one line; the middle is left out where it is long."""
    text = " ".join(account["text"].split())
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-most // 2 :]}"
    return f"{account['type']}: {text}" if text else account["type"]


def _exit_text(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code} without an exception"


def _last_seen(rank: int, folder: RunFolder) -> str:
    """What a rank that left no account did last."""
    reported = read_lines(folder.of_rank("metrics", rank))
    log, stack = folder.rank_log(rank, "stderr"), folder.of_rank("stacks", rank)
    printed = log.read_text(errors="replace").strip().splitlines()[-2:] if log else []
    found = [f"Its last words on stderr: {' / '.join(printed)}"] if printed else []
    place = learner_frame(stack_frames(stack.read_text())[::-1], folder.path) if stack.exists() else ""
    if place:
        found.append(f"It stood at {place}")
    if reported:
        last = {name.lstrip("_"): value for name, value in reported[-1].items() if name != "_time"}
        found.append(f"Its last report: {', '.join(f'{name} {value}' for name, value in last.items())}.")
    return "\n".join(found or ["It wrote no error, no report and nothing on stderr."])


def _advice(end: RankEnd, run: Run) -> str:
    if end.exit_code == -signal.SIGKILL and end.account is None:
        return "dmesg | grep -i 'killed process'   (Linux kills a process when memory runs out)"
    if end.exit_code == -signal.SIGABRT and end.account is None and run.backend == "gloo":
        return 'lab.launch(…, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})   (checks that ranks agree on shapes)'
    return f'run = lab.Run.open("{_short_path(run.folder)}"); print(run.logs(rank={end.rank}, stream="stderr"))'


def _short_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _shortened(traceback: str, most: int = 24) -> str:
    """A traceback with its middle left out where it is long."""
    lines = [line if len(line) < 300 else f"{line[:150]} … {line[-150:]}" for line in traceback.rstrip().splitlines()]
    if len(lines) <= most:
        return "\n".join(lines)
    return "\n".join([*lines[: most // 2], f"  … {len(lines) - most} lines left out …", *lines[-most // 2 :]])


def _agent_error(folder: RunFolder) -> LaunchError:
    """No rank ended badly, so torchrun itself did."""
    log = folder.agent_log.read_text(errors="replace") if folder.agent_log.exists() else ""
    tail = "\n".join(f"    {line}" for line in log.strip().splitlines()[-6:])
    return LaunchError(
        "torchrun ended before it could start or finish the ranks.",
        found=f"The end of its log:\n{tail}" if tail else "It printed nothing; its guard may have been killed.",
        try_=f"cat {_short_path(folder.agent_log)}",
        folder=folder.path,
    )


def learner_frame(frames: list[dict[str, Any]], folder: Path) -> str:
    """The deepest line that the learner wrote: in a cell, or in a file outside installed packages."""
    for frame in reversed(frames):
        in_cell = Path(frame["file"]).is_relative_to(folder)
        if in_cell or not re.search(r"site-packages|/lib/python3|<frozen|/labkit/runs/", frame["file"]):
            place = "the cell" if in_cell else Path(frame["file"]).name
            return f"line {frame['line']} of {place}, in {frame['function']}: {frame['code']}"
    return ""


def rank_timeout(folder: RunFolder, run: Run, timeout_s: float, stacks: dict[int, str]) -> RankTimeout:
    """The error of a run that took too long: where each rank stood, and for whom they wait."""
    frames = {rank: stack_frames(stack) for rank, stack in stacks.items()}
    finished = [rank for rank in range(run.nproc) if folder.of_rank("results", rank).exists()]
    waiting = [rank for rank, stack in frames.items() if _waiting_in(stack)]
    late = [rank for rank in range(run.nproc) if rank not in waiting]
    lines = [
        f"Rank {rank} has finished." if rank in finished else _where(rank, frames.get(rank, []), folder)
        for rank in range(run.nproc)
    ]
    if waiting and late:
        names = " and ".join(f"rank {rank}" for rank in late)
        lines.append(f"A collective ends when all ranks have called it: everyone waits for {names}.")
    error = RankTimeout(
        f"{run.nproc - len(finished)} of {run.nproc} ranks were still running after timeout_s={timeout_s:g}.",
        found="\n".join(lines),
        try_="lab.launch(…, timeout_s=None)   (no limit, if it was only slow)",
        rank=late[0] if waiting and late else None,
        folder=folder.path,
    )
    error.stacks = stacks
    return error


def stack_frames(stack: str) -> list[dict[str, Any]]:
    """The frames of a faulthandler stack, innermost first, down to the rank's own beginning."""
    found = []
    for file, line, function in re.findall(r'File "([^"]+)", line (\d+) in (.+)', stack):
        if file.endswith("/labkit/runs/worker.py"):
            break
        code = linecache.getline(file, int(line)).strip()
        found.append({"file": file, "line": int(line), "function": function, "code": code})
    return found


def _waiting_in(frames: list[dict[str, Any]]) -> str:
    """The torch.distributed call that a stack stands in, or the backward pass, where DDP waits; empty if in neither."""
    for frame in frames:
        if frame["file"].endswith(("distributed_c10d.py", "rendezvous.py")) and frame["function"] != "wrapper":
            return str(frame["function"])
        if frame["function"] == "_engine_run_backward":
            return "backward"
    return ""


def _where(rank: int, frames: list[dict[str, Any]], folder: RunFolder) -> str:
    if not frames:
        return f"Rank {rank} did not answer when asked where it stands."
    call, place = _waiting_in(frames), learner_frame(frames[::-1], folder.path)
    return f"Rank {rank} waits in {call}, {place}" if call else f"Rank {rank} is at {place}"
