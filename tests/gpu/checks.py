"""What must hold on a machine with GPUs: one function a check, each returns a line for the table."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from labkit import GPTShape, Rank
from labkit.machine.probing import count_gpus
from labkit.runs.call import checked
from labkit.runs.launcher import run_on_ranks
from labkit.runs.run import Run


def launched(function: Callable[..., Any], *args: Any, nproc: int, warm: bool = True) -> Run:
    """A launch on GPUs."""
    return run_on_ranks(checked(function, args, nproc=nproc, device="cuda", timeout_s=120, env={}), warm=warm)


def all_reduce_ones(rank: Rank) -> tuple[float, str]:
    """Sum of ones over all ranks, and the device it was summed on."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank.device)
    dist.init_process_group(rank.backend, device_id=torch.device(rank.device))
    x = torch.ones(1 << 20, device=rank.device)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x[0].item(), str(x.device)


def train_briefly(rank: Rank, shape: GPTShape, steps: int) -> dict[str, float]:
    """DDP on random tokens: first and last loss, tokens/s of this rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from labkit.workloads.gpt import GPT

    torch.cuda.set_device(rank.device)
    dist.init_process_group(rank.backend, device_id=torch.device(rank.device))
    model = DistributedDataParallel(GPT(shape).to(rank.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens_BT = torch.randint(256, (8, shape.sequence_length + 1), device=rank.device)
    losses, begin = [], 0.0
    for step in range(steps):
        loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        begin = begin or time.perf_counter()  # the first step warms up
        rank.report(step=step, loss=losses[-1])
    rate = 8 * shape.sequence_length * (steps - 1) / (time.perf_counter() - begin)
    dist.destroy_process_group()
    return {"first_loss": losses[0], "last_loss": losses[-1], "tokens_per_s": rate}


def check_nccl_cold() -> str:
    """NCCL under plain torchrun."""
    return _reduced(launched(all_reduce_ones, nproc=count_gpus(), warm=False))


def check_nccl_warm() -> str:
    """NCCL in forked ranks: the server must not have touched CUDA."""
    return _reduced(launched(all_reduce_ones, nproc=count_gpus()))


def check_nccl_warm_again() -> str:
    """The same again, after CUDA was used in an earlier run."""
    launched(all_reduce_ones, nproc=count_gpus())
    return _reduced(launched(all_reduce_ones, nproc=count_gpus()))


def _reduced(run: Run) -> str:
    n = run.nproc
    assert run.results == tuple((float(n), f"cuda:{rank}") for rank in range(n)), run.results
    assert run.backend == "nccl"
    return f"{n} × {run.how}, {run.duration_s:.2f} s"


def check_ddp_on_one_gpu() -> str:
    """Training on one GPU learns."""
    return _learned(launched(train_briefly, GPTShape.of_depth(4), 20, nproc=1))


def check_ddp_on_all_gpus() -> str:
    """Training on all GPUs learns."""
    return _learned(launched(train_briefly, GPTShape.of_depth(4), 20, nproc=count_gpus()))


def _learned(run: Run) -> str:
    for result in run.results:
        assert result["last_loss"] < result["first_loss"] - 0.5, run.results
    rate = sum(result["tokens_per_s"] for result in run.results)
    return f"{run.nproc} × {run.device}, {rate:,.0f} tokens/s, loss {run.results[0]['last_loss']:.2f}"


def check_kernel_stays_off_the_gpu() -> str:
    """This process, which launched all that, has not initialised CUDA."""
    import torch

    assert not torch.cuda.is_initialized()
    return "CUDA not initialised here"


def check_nothing_left_on_the_gpu() -> str:
    """After a run, and after a rank was killed, no process of ours holds GPU memory."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count_gpus())]
    before = [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]
    launched(train_briefly, GPTShape.of_depth(4), 5, nproc=count_gpus())
    time.sleep(1)
    after = [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]
    grown_bytes = max(b - a for a, b in zip(before, after, strict=True))
    assert grown_bytes < 64 << 20, f"{grown_bytes} bytes left"
    return f"{grown_bytes >> 20} MiB more than before"


CHECKS = {
    name.removeprefix("check_").replace("_", " "): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}
