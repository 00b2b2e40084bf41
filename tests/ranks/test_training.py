"""What the labs rest on, against independent truth: one process, counted tensors, bytes at the network device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from labkit import GPTShape, LaunchError, Rank, launch
from labkit.runs.call import checked
from labkit.runs.launcher import run_on_ranks
from labkit.runs.run import Run
from labkit.theory.comms import ring_all_reduce_bytes
from labkit.workloads.gpt import GPT
from labkit.workloads.text import TextSamples, batches, corpus


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))


def launched(function: Any, *args: Any, nproc: int = 2) -> Run:
    """A quiet launch on CPU."""
    return run_on_ranks(checked(function, args, nproc=nproc, device="cpu", timeout_s=60, env={}))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_parameters_are_exactly_those_of_the_formula(depth: int) -> None:
    shape = GPTShape.of_depth(depth)
    assert sum(parameter.numel() for parameter in GPT(shape).parameters()) == shape.num_params


def ddp_gradients(rank: Rank, shape: GPTShape) -> list[torch.Tensor]:
    """Gradients of this rank's part of a batch, averaged by DDP."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(GPT(shape).double())
    tokens_BT, targets_BT = next(batches(32, 4, rank=rank.index, world_size=rank.world_size))
    model(tokens_BT, targets_BT).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_of_two_ranks_are_those_of_one_process() -> None:
    shape = GPTShape.of_depth(1, sequence_length=32)
    run = launched(ddp_gradients, shape)
    alone = GPT(shape).double()
    alone(*next(batches(32, 8))).backward()
    for one, left, right in zip(alone.parameters(), *run.results, strict=True):
        assert torch.equal(left, right)
        torch.testing.assert_close(one.grad, left, rtol=1e-10, atol=1e-12)  # float64: rounding only


def test_batches_of_all_ranks_are_the_one_batch() -> None:
    whole, _ = next(batches(32, 8))
    parts = [next(batches(32, 4, rank=rank, world_size=2))[0] for rank in range(2)]
    assert torch.equal(whole, torch.cat(parts))


def test_held_out_samples_are_never_trained_on() -> None:
    train, held_out = TextSamples(128), TextSamples(128, held_out=True)
    assert not set(train.starts) & set(held_out.starts)
    assert len(held_out) == pytest.approx(len(train) / 9, rel=0.01)
    assert len(corpus()) == 4_000_000


def bytes_on_loopback(rank: Rank, size_bytes: int) -> int:
    """Bytes that all ranks together put on the loopback device during one all-reduce."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(size_bytes // 4)
    dist.barrier()
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    dist.all_reduce(x)
    dist.barrier()
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before


@pytest.mark.parametrize("nproc", [2, 3])
def test_an_all_reduce_puts_the_predicted_bytes_on_the_wire(nproc: int) -> None:
    size_bytes = 48 << 20
    counted = launched(bytes_on_loopback, size_bytes, nproc=nproc).results[0]
    assert counted == pytest.approx(nproc * ring_all_reduce_bytes(size_bytes, nproc), rel=0.05)  # headers, neighbours


def test_a_model_learns() -> None:
    model, data = GPT(GPTShape.of_depth(1)), batches(128, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.5, abs=0.3)  # ln 256: it knows nothing yet
    assert losses[-1] < 4


def report_oddly(rank: Rank) -> None:
    """Metrics that no number format fits."""
    import time

    rank.report(loss="diverged", step_s=float("nan"), tokens_per_s=float("inf"))
    rank.progress(1, 2)
    time.sleep(1)


def test_an_odd_metric_does_not_end_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = launch(report_oddly, nproc=2, device="cpu")
    assert run.outcome == "finished"
    assert list(run.metrics["loss"]) == ["diverged", "diverged"]


def break_a_pipe(rank: Rank) -> None:
    """One rank's own pipe breaks, after the other has returned."""
    import time

    if rank.index == 1:
        time.sleep(0.3)
        raise BrokenPipeError(32, "Broken pipe")


def test_a_rank_with_a_broken_pipe_of_its_own_is_to_blame() -> None:
    with pytest.raises(LaunchError, match="Rank 1 of 2 raised BrokenPipeError") as caught:
        launched(break_a_pipe)
    assert caught.value.rank == 1


def test_launches_stay_warm_after_an_optimizer_was_made_here() -> None:
    launched(report_oddly)  # the server is there
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).step()
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ  # torch writes it
    assert launched(report_oddly).how == "warm"
