"""Shapes, bytes, steps: formulas against hand numbers and laws."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import labkit
from labkit import GPTShape, UsageError, compare, plan_ddp
from labkit.facts import row, table
from labkit.theory.comms import ring_all_reduce_bytes

SHAPE = GPTShape.of_depth(4)
NEEDS_TORCH = ("labkit.workloads.", "labkit.runs.warm_server")


@pytest.mark.parametrize(
    "module",
    [m.name for m in pkgutil.walk_packages(labkit.__path__, "labkit.") if not m.name.startswith(NEEDS_TORCH)],
)
def test_doctests(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_a_ring_sends_at_most_twice_the_vector_however_many_ranks() -> None:
    sent = [ring_all_reduce_bytes(1000, n) for n in (1, 2, 4, 8, 1024)]
    assert sent[:4] == [0, 1000, 1500, 1750]
    assert sent == sorted(sent)
    assert sent[-1] < 2000


def test_one_rank_is_the_case_without_communication() -> None:
    plan = plan_ddp(SHAPE, dp=1, micro_batch=8, compute_s=0.2, all_reduce_s=0.0)
    assert plan["sent_bytes"] == 0
    assert plan["efficiency_fraction"] == 1
    assert plan["speed_up"] == 1


def test_overlap_hides_all_or_nothing_at_its_ends() -> None:
    hidden, exposed = (
        plan_ddp(SHAPE, dp=4, micro_batch=8, compute_s=0.2, all_reduce_s=0.1, overlap_fraction=f) for f in (1, 0)
    )
    assert hidden["step_s"] == 0.2
    assert exposed["step_s"] == pytest.approx(0.3)
    assert exposed["speed_up"] == pytest.approx(4 * 2 / 3)


@pytest.mark.parametrize(
    "bad", [{"dp": 0}, {"micro_batch": 0}, {"compute_s": 0}, {"all_reduce_s": -1}, {"overlap_fraction": 1.1}]
)
def test_a_plan_that_cannot_be_is_refused(bad: dict[str, float]) -> None:
    good = {"dp": 2, "micro_batch": 8, "compute_s": 0.2, "all_reduce_s": 0.1}
    with pytest.raises(UsageError, match="can't be"):
        plan_ddp(SHAPE, **(good | bad))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 256, 4), "num_layers is 0, but must be a whole number of 1 or more."),
        ((4, 256.0, 4), "hidden is 256.0, but must be a whole number of 1 or more."),
        ((4, 250, 4), "hidden(250) is not a multiple of num_heads(4).\nTry: hidden=252"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(arguments: tuple[int, int, int], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        GPTShape(*arguments)
    assert text in str(caught.value)


def test_compare_shows_ratio_and_badge() -> None:
    comparison = compare({"step_s": 0.2}, {"step_s": 0.3, "other": 1.0})
    assert [row.cells() for row in comparison.rows] == [("step_s", "200 ms", "300 ms", "1.50")]
    assert repr(comparison).endswith("measured here")


def test_no_guess_is_allowed() -> None:
    assert compare(..., 0.3, "step_s").rows[0].cells() == ("step_s", "no guess", "300 ms", "")


@pytest.mark.parametrize("measured", [{"loss": 1.0}, "text"])
def test_nothing_to_compare_is_said(measured: object) -> None:
    with pytest.raises(UsageError):
        compare({"step_s": 0.2}, measured)  # type: ignore[arg-type]


def test_facts_are_read_by_key_and_unknown_ones_named() -> None:
    assert len(table("claims")) == 83
    assert row("claims", "id", "B17")["verdict"] == "false"
    with pytest.raises(UsageError, match="Did you mean 'B17'"):
        row("claims", "id", "B171")
    with pytest.raises(UsageError, match="There is no table 'claim' in data/"):
        table("claim")


def test_an_unknown_claim_gets_the_closest() -> None:
    with pytest.raises(UsageError, match="There is no claim 'A1'"):
        labkit.claim("A1")
