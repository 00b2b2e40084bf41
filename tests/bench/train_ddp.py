"""Lab 05's training as a script: `train_ddp.py STEPS OUT_FOLDER`, the same under labkit and under plain torchrun.

GPT of depth 4, 8 samples of 128 tokens a rank, fp32, AdamW. Each rank writes OUT_FOLDER/<rank>.json: its process, the
clock at the first and after the last timed step, and for each timed step the seconds of training and of reporting.
OUT_FOLDER/started appears before the first timed step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from labkit import GPTShape, Rank
from labkit.workloads.gpt import GPT
from labkit.workloads.text import batches

WARM_UP_STEPS = 2
BATCH_SIZE = 8
STARTED = "started"


def train(rank: Rank, steps: int, out: Path) -> dict[str, object]:
    """Train, and say how long it took."""
    dist.init_process_group(rank.backend)
    shape = GPTShape.of_depth(4)
    model = DDP(GPT(shape).to(rank.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(shape.sequence_length, BATCH_SIZE, rank=rank.index, world_size=rank.world_size)
    training, reporting, clock = [], [], []
    for step in range(WARM_UP_STEPS + steps):
        batch = next(data)
        if step == WARM_UP_STEPS:
            (out / STARTED).touch()
        clock.append(time.time())
        begin = time.perf_counter()
        tokens_BT, targets_BT = (part.to(rank.device) for part in batch)
        loss = model(tokens_BT, targets_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_now = loss.item()
        trained = time.perf_counter()
        rank.report(step=step, loss=loss_now, tokens_per_s=tokens_BT.numel() / (trained - begin))
        rank.progress(step + 1, WARM_UP_STEPS + steps)
        training.append(trained - begin)
        reporting.append(time.perf_counter() - trained)
    end = time.time()
    dist.destroy_process_group()
    return {
        "pid": os.getpid(),
        "begin": clock[WARM_UP_STEPS],
        "end": end,
        "training_s": training[WARM_UP_STEPS:],
        "reporting_s": reporting[WARM_UP_STEPS:],
    }


if __name__ == "__main__":
    me = Rank.current()
    folder = Path(sys.argv[2])
    found = train(me, int(sys.argv[1]), folder)
    (folder / f"{me.index}.json").write_text(json.dumps(found))
