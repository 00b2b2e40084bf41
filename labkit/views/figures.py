"""Figures of the course. Each returns a `Picture`, which shows itself in a notebook with its alt text.

One colour for each kind of evidence, everywhere: predicted blue (dashed, hatched), measured here orange, recorded
green, published pink; grey for everything that only helps. The badge in the lower right corner says what the evidence
is.
"""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from labkit.errors import UsageError
from labkit.runs.run import Run
from labkit.theory.steptime import StepPlan
from labkit.units import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = Path(__file__).parent / "lab.mplstyle"
PREDICTED, MEASURED, RECORDED, PUBLISHED, HELP = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#9A9A9A"
RANK_COLOURS = ("#4C72B0", "#DD8452", "#55A868", "#8172B3", "#937860", "#DA8BC3", "#8C8C8C", "#64B5CD")


@dataclass(frozen=True)
class Picture:
    """A drawn figure.

    Attributes:
        png: The image.
        alt: What it shows, in words.
    """

    png: bytes
    alt: str

    def save(self, path: str | Path) -> None:
        """Write the image to a file."""
        Path(path).write_bytes(self.png)

    def __repr__(self) -> str:
        return f"[figure] {self.alt}"

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.png).decode()
        return f'<img alt="{escape(self.alt)}" src="data:image/png;base64,{data}" style="max-width:700px">'


def _canvas(title: str, height: float = 3.2) -> tuple[Figure, Axes]:
    """An empty figure 700 px wide, with the finding as its title."""
    with matplotlib.style.context(str(STYLE)):
        figure = Figure(figsize=(7, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
    return figure, axes


def _finished(figure: Figure, alt: str, badge: str) -> Picture:
    """Put the badge in the corner and make the image."""
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, 0.05, 1, 0.95))
    figure.text(0.995, 0.01, badge, ha="right", va="bottom", fontsize=7.5, color="#707070")
    buffer = io.BytesIO()
    with matplotlib.style.context(str(STYLE)):
        figure.savefig(buffer, format="png")
    return Picture(buffer.getvalue(), alt)


def launch_tree(nproc: int) -> Picture:
    """Who starts whom: notebook, torchrun, ranks; and what each rank is told.

    Args:
        nproc: Ranks to draw, 1 … 4.

    Raises:
        UsageError: More ranks than fit.
    """
    if not 1 <= nproc <= 4:
        raise UsageError(f"launch_tree draws 1 … 4 ranks, not {nproc}.", try_="lab.show.launch_tree(4)")
    figure, axes = _canvas("torchrun starts the ranks and tells each who it is", 3.4)
    axes.set_axis_off()
    axes.set(xlim=(0, 10), ylim=(0, nproc))
    middle = nproc / 2
    _box(axes, (0.1, middle), 2.0, "your notebook", HELP)
    _box(axes, (3.0, middle), 2.0, "torchrun", HELP)
    axes.annotate("", (3.0, middle), (2.1, middle), arrowprops={"arrowstyle": "->", "color": HELP})
    for rank in range(nproc):
        y = nproc - rank - 0.5
        axes.annotate("", (6.0, y), (5.0, middle), arrowprops={"arrowstyle": "->", "color": HELP})
        _box(axes, (6.0, y), 3.9, f"RANK={rank}  WORLD_SIZE={nproc}", RANK_COLOURS[rank])
    alt = f"Your notebook starts torchrun, torchrun starts {nproc} ranks, each with RANK and WORLD_SIZE set."
    return _finished(figure, alt, "how it works, not a measurement")


def _box(axes: Axes, left_middle: tuple[float, float], width: float, text: str, colour: str) -> None:
    x, y = left_middle
    outline: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.1", "fc": "white", "ec": colour, "lw": 2}
    axes.add_patch(FancyBboxPatch((x, y - 0.3), width, 0.6, **outline))
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=10, family="monospace")


def launches(**runs: Run) -> Picture:
    """Where the seconds of a launch go: before your function, inside it, after it; one bar a run.

    Args:
        **runs: Runs by the name to show, for instance `cold=…, warm=…`.
    """
    slowest = max(runs.values(), key=lambda run: run.duration_s)
    share = slowest.phases["before_s"] / slowest.duration_s
    finding = f"The slowest launch spends {share:.0%} of its time before your first line"
    figure, axes = _canvas(finding, 1.2 + 0.7 * len(runs))
    names = {"before_s": "before", "inside_s": "your function", "after_s": "after"}
    for y, (name, run) in enumerate(reversed(runs.items())):
        left = 0.0
        for phase, colour in zip(names, (HELP, MEASURED, "#D0D0D0"), strict=True):
            axes.barh(y, run.phases[phase], left=left, color=colour, height=0.55)
            left += run.phases[phase]
        axes.text(left, y, f"  {seconds_text(run.duration_s)}", va="center")
        axes.text(-0.01 * slowest.duration_s, y, name, va="center", ha="right")
    left = 0.0
    for phase, label in names.items():
        width = slowest.phases[phase]
        if width > 0.12 * slowest.duration_s:
            y = len(runs) - 1 - list(runs.values()).index(slowest)
            axes.text(left + width / 2, y, label, ha="center", va="center", fontsize=9)
        left += width
    axes.set(xlabel="seconds", yticks=[], xlim=(0, slowest.duration_s * 1.15))
    alt = "; ".join(f"{name}: {seconds_text(run.duration_s)}, {run.phases}" for name, run in runs.items())
    return _finished(figure, f"Seconds of a launch by phase. {alt}", slowest.badge)


def buckets(num_buckets: int = 4) -> Picture:
    """How DDP hides communication: gradients travel in buckets while backward still computes.

    Args:
        num_buckets: Buckets to draw, 2 … 6.
    """
    figure, axes = _canvas("What travels after the backward pass can't be hidden", 2.4)
    forward, piece, travel = 3.0, 6.0 / num_buckets, 4.5 / num_buckets
    axes.barh(1, forward, color=HELP, height=0.6)
    axes.text(forward / 2, 1, "forward", ha="center", va="center")
    free = 0.0
    for bucket in range(num_buckets):
        start = forward + bucket * piece
        axes.barh(1, piece, left=start, color=RANK_COLOURS[bucket], height=0.6, edgecolor="white")
        axes.text(start + piece / 2, 1, f"backward {bucket + 1}", ha="center", va="center", fontsize=8, color="white")
        free = max(free, start + piece)
        exposed = bucket == num_buckets - 1
        hatch = "//" if exposed else None
        axes.barh(0, travel, left=free, color=RANK_COLOURS[bucket], height=0.6, hatch=hatch, ec="white")
        axes.text(free + travel / 2, 0.42, f"{bucket + 1}", ha="center", va="center", fontsize=8, color="#404040")
        free += travel
    axes.text(free + 0.1, 0, "exposed", va="center", color="#404040")
    axes.set(yticks=[0, 1], yticklabels=["all-reduce", "compute"], xticks=[], xlim=(0, free + 1.6))
    axes.set_xlabel("time of one step")
    alt = "A step: forward, then backward in pieces; each piece's gradients are all-reduced while the next is computed."
    return _finished(figure, alt, "modelled, not to scale")


def losses(**runs: Run) -> Picture:
    """Loss against step, one line a run: the mean over ranks of what they reported as `loss` and `step`."""
    ends = {name: float(run.metrics.groupby("step")["loss"].mean().iloc[-1]) for name, run in runs.items()}
    texts = ", ".join(f"{name.replace('_', ' ')} {end:.2f}" for name, end in ends.items())
    figure, axes = _canvas(f"Loss at the end: {texts}")
    for colour, (name, run) in zip(RANK_COLOURS, runs.items(), strict=False):
        loss = run.metrics.groupby("step")["loss"].mean()
        axes.plot(loss.index, loss, color=colour, marker="o", markersize=3)
        axes.annotate(f" {name.replace('_', ' ')}", (loss.index[-1], loss.iloc[-1]), color=colour, va="center")
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.margins(x=0.12)
    alt = "Loss against step. At the end: " + ", ".join(f"{name} {value:.3f}" for name, value in ends.items())
    return _finished(figure, alt, max(runs.values(), key=lambda run: run.nproc).badge)


def scaling(plan: StepPlan, one: Run, many: Run) -> Picture:
    """One rank's step beside that of many: compute, and what is lost; predicted hatched, measured solid.

    Args:
        plan: From `lab.plan_ddp`, for `many.nproc` ranks.
        one: Run on one rank; rank 0 returned {"step_s": …}.
        many: The same function on more ranks.
    """
    one_s, many_s = one.results[0]["step_s"], many.results[0]["step_s"]
    lost = 1 - one_s / many_s
    loss = f"{lost:.0%} of each step" if lost > 0.02 else "nothing measurable"
    figure, axes = _canvas(f"{many.nproc} ranks lose {loss}", 2.6)
    from_below = (
        (f"{many.nproc} ranks, measured", many_s, MEASURED, ""),
        (f"{many.nproc} ranks, predicted", plan["step_s"], PREDICTED, "//"),
        ("1 rank, measured", one_s, MEASURED, ""),
    )
    for y, (label, step_s, colour, hatch) in enumerate(from_below):
        axes.barh(y, step_s, color="white" if hatch else colour, edgecolor=colour, hatch=hatch, height=0.6)
        axes.text(step_s, y, f"  {seconds_text(step_s)}", va="center")
        axes.text(-0.01 * many_s, y, label, va="center", ha="right")
    axes.axvline(one_s, color=HELP, lw=1, ls=":")
    axes.set(xlabel="seconds a step", yticks=[], xlim=(0, 1.2 * max(one_s, many_s, plan["step_s"])))
    on_many = f"{seconds_text(many_s)} on {many.nproc}, predicted {seconds_text(plan['step_s'])}"
    return _finished(figure, f"Step: {seconds_text(one_s)} on 1 rank, {on_many}.", many.badge)


def bars(times_s: Mapping[str, Sequence[float]], run: Run, baseline: str) -> Picture:
    """Seconds of several variants of one thing: the median as a bar, all that was measured as a line through its end.

    Args:
        times_s: Measured seconds, by variant.
        run: Where they were measured.
        baseline: The variant that the others are compared with.

    Raises:
        UsageError: The baseline is not among them.
    """
    if baseline not in times_s:
        raise UsageError(
            f"baseline {baseline!r} is not among {', '.join(times_s)}.", try_=f"baseline={next(iter(times_s))!r}"
        )
    medians = {name: statistics.median(times) for name, times in times_s.items()}
    figure, axes = _canvas(_finding(times_s, medians, baseline), 1.4 + 0.45 * len(times_s))
    furthest = max(max(times) for times in times_s.values())
    for y, (name, times) in enumerate(reversed(list(times_s.items()))):
        axes.barh(y, medians[name], color=HELP if name == baseline else MEASURED, height=0.6)
        axes.plot((min(times), max(times)), (y, y), color="#303030", lw=1.5, solid_capstyle="butt")
        axes.text(1.03 * furthest, y, seconds_text(medians[name]), va="center")
    axes.set_yticks(range(len(times_s)), list(times_s)[::-1])
    axes.axvline(medians[baseline], color=HELP, lw=1, ls=":")
    axes.set(xlabel="seconds a step: median, and from least to most", xlim=(0, 1.18 * furthest))
    alt = "Seconds a step: " + ", ".join(f"{name} {seconds_text(value)}" for name, value in medians.items())
    return _finished(figure, alt, run.badge)


def _finding(times_s: Mapping[str, Sequence[float]], medians_s: Mapping[str, float], baseline: str) -> str:
    """What the bars show, if it is more than noise: the best variant's slowest beats the baseline's fastest."""
    best = min(medians_s, key=lambda name: medians_s[name])
    if best == baseline or max(times_s[best]) >= min(times_s[baseline]):
        return f"Nothing beats {baseline!r} by more than the noise"
    return f"{best!r} takes {1 - medians_s[best] / medians_s[baseline]:.0%} less than {baseline!r}"
