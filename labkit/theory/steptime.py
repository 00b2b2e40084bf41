"""How long a training step takes: compute, communication, and what of it can't be hidden."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from labkit.errors import UsageError
from labkit.shapes import GPTShape
from labkit.theory.comms import ring_all_reduce_bytes
from labkit.units import quantity_text


@dataclass(frozen=True)
class Term:
    """One predicted number.

    Attributes:
        name: With its unit at the end, as the run reports it.
        value: In SI base units.
        formula: Where it comes from, in letters or numbers.
    """

    name: str
    value: float
    formula: str


@dataclass(frozen=True)
class StepPlan:
    """Predicted terms of a data-parallel step, each with its formula."""

    title: str
    terms: tuple[Term, ...]

    def __getitem__(self, name: str) -> float:
        """The value of a term by name."""
        return next(term.value for term in self.terms if term.name == name)

    def as_dict(self) -> dict[str, float]:
        """Terms by name."""
        return {term.name: term.value for term in self.terms}

    def __repr__(self) -> str:
        lines = [f"{term.name:24} {quantity_text(term.name, term.value):>12}   {term.formula}" for term in self.terms]
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{term.name}</td><td>{escape(quantity_text(term.name, term.value))}</td>"
            f"<td>{escape(term.formula)}</td></tr>"
            for term in self.terms
        )
        return f"<table><caption>{escape(self.title)}</caption>{rows}</table>"


def plan_ddp(
    shape: GPTShape, *, dp: int, micro_batch: int, compute_s: float, all_reduce_s: float, overlap_fraction: float = 0.0
) -> StepPlan:
    """Predict one DDP step on `dp` ranks from one rank's compute time and a measured all-reduce.

    Args:
        shape: The model.
        dp: Data-parallel ranks, n.
        micro_batch: Samples a rank and step, B.
        compute_s: Seconds that one rank alone takes for its step.
        all_reduce_s: Seconds of one all-reduce of the gradient's bytes between these ranks.
        overlap_fraction: Of the communication, hidden behind the backward pass: 0 none, 1 all.

    Returns:
        Gradient bytes, bytes sent, step seconds, tokens/s, scaling efficiency and speed-up over one rank.

    Raises:
        UsageError: A number that can't be.

    Source: Li et al. 2020, "PyTorch Distributed: experiences on accelerating data parallel training", section 3.2 (DDP
    overlaps buckets with backward); efficiency = time of one rank over time of n, the batch a rank held constant.

    >>> shape = GPTShape(1, hidden=2, num_heads=1, sequence_length=3, vocab_size=5)
    >>> plan = plan_ddp(shape, dp=2, micro_batch=1, compute_s=3.0, all_reduce_s=1.0)
    >>> plan["gradient_bytes"], plan["step_s"], plan["efficiency_fraction"]  # 70 parameters of 4 bytes
    (280, 4.0, 0.75)
    """
    if not 0 <= overlap_fraction <= 1 or dp < 1 or micro_batch < 1 or compute_s <= 0 or all_reduce_s < 0:
        raise UsageError(
            f"dp={dp}, micro_batch={micro_batch}, compute_s={compute_s:g}, all_reduce_s={all_reduce_s:g}, "
            f"overlap_fraction={overlap_fraction:g} can't be.",
            found="Counts start at 1, seconds at 0, and a fraction lies between 0 and 1.",
            try_="lab.plan_ddp(shape, dp=2, micro_batch=8, compute_s=0.2, all_reduce_s=0.02)",
        )
    gradient_bytes = 4 * shape.num_params
    sent_bytes = ring_all_reduce_bytes(gradient_bytes, dp)
    step_s = compute_s + (1 - overlap_fraction) * all_reduce_s
    tokens = dp * micro_batch * shape.sequence_length
    return StepPlan(
        f"DDP on {dp} ranks, {micro_batch} × {shape.sequence_length} tokens each, float32",
        (
            Term("gradient_bytes", gradient_bytes, f"4 B × {shape.num_params:,} parameters"),
            Term("sent_bytes", sent_bytes, f"2(n-1)/n × gradient bytes, n = {dp}"),
            Term("step_s", step_s, f"compute + (1 - {overlap_fraction:g}) × all-reduce"),
            Term("tokens_per_s", tokens / step_s, f"{tokens} tokens / step"),
            Term("efficiency_fraction", compute_s / step_s, "compute / step"),
            Term("speed_up", dp * compute_s / step_s, "n × efficiency"),
        ),
    )
