"""The GPU checks as tests; `make gpu` runs the same and records what it measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from labkit.machine.probing import count_gpus
from tests.gpu.checks import CHECKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_gpus() == 0, reason="no NVIDIA GPU on this machine; run `make gpu` on one that has"),
]


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_on_gpu(check: Callable[[], str]) -> None:
    assert check()
