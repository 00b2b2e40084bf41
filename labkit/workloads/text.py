"""Text that is on every machine already: the source files of Python's standard library, as bytes.

No download, the same order everywhere for the same Python, and a fixed split: every tenth sample is held out.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

CORPUS_BYTES = 4_000_000


@cache
def corpus() -> bytes:
    """The first 4 MB of the standard library's modules, in alphabetical order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text, size = [], 0
    for file in files:
        if size >= CORPUS_BYTES:
            break
        text.append(file.read_bytes())
        size += len(text[-1])
    return b"".join(text)[:CORPUS_BYTES]


class TextSamples(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the corpus: sample i is `sequence_length` bytes and the same shifted by one.

    Args:
        sequence_length: Tokens a sample, T.
        held_out: The held-out tenth instead of the training samples.
    """

    def __init__(self, sequence_length: int, *, held_out: bool = False) -> None:
        text_N = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
        num_samples = (len(text_N) - 1) // sequence_length
        chosen = [i for i in range(num_samples) if (i % 10 == 9) == held_out]
        self.text_N, self.sequence_length, self.starts = text_N, sequence_length, [i * sequence_length for i in chosen]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of one sample, each int64 [T]."""
        start = self.starts[index]
        piece_T1 = self.text_N[start : start + self.sequence_length + 1].long()
        return piece_T1[:-1], piece_T1[1:]


def batches(
    sequence_length: int, batch_size: int, *, rank: int = 0, world_size: int = 1, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end: tokens and targets, each int64 [B, T].

    Step by step, the batches of all ranks together are the one batch of a single rank that is `world_size` times as
    large: the same samples, so that runs on different numbers of ranks can be compared.

    Args:
        sequence_length: Tokens a sample, T.
        batch_size: Samples of this rank a step, B.
        rank: This rank.
        world_size: Number of ranks.
        seed: Of the order.
    """
    samples = TextSamples(sequence_length)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order_N = torch.randperm(len(samples), generator=generator)
        global_size = batch_size * world_size
        for first in range(0, len(order_N) - global_size + 1, global_size):
            mine_B = order_N[first + rank * batch_size : first + (rank + 1) * batch_size]
            pairs = [samples[int(i)] for i in mine_B]
            yield torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
