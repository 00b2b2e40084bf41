"""Exercises of lab 00: ranks, and one collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.runs.call import checked
from labkit.runs.launcher import run_on_ranks
from labkit.runs.worker import Rank
from labkit.verdicts.checker import Exercise, NearMiss, Verdict, right, wrong


def three_lines(rank: Rank) -> float:
    """The program of exercise 00.1."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.tensor([float(rank.index)])
    dist.all_reduce(x)
    return 10 * rank.index + x.item()


def judge_three_lines(answer: Any) -> Verdict:
    """Compare with a real run of the program on three ranks."""
    if not isinstance(answer, list | tuple) or not all(isinstance(value, int | float) for value in answer):
        return wrong(
            f"a list of three numbers is asked for, rank 0's first, such as [0, 0, 0]; this is {answer!r:.60}."
        )
    values = list(answer)
    if len(values) != 3:
        return wrong(f"three ranks print three numbers, you gave {len(values)}.")
    run = run_on_ranks(checked(three_lines, (), nproc=3, device="cpu", timeout_s=60, env={}))
    for rank, (mine, real) in enumerate(zip(values, run.results, strict=True)):
        if float(mine) != real:
            return wrong(f"rank {rank} does not print {mine:g}. What is in x on rank {rank} after the all-reduce?")
    return right("a real run on 3 ranks printed the same.")


def odd_one_of_three(rank: Rank, find_odd: Callable[[Rank, Any], int]) -> list[int]:
    """Call the learner's function on 3 ranks for each place the odd value can have, above and below the others."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for odd, value in ((1, 9.0), (2, 1.0), (0, 9.0), (0, 1.0)):
        x = torch.tensor([value if rank.index == odd else 5.0])
        found.append(find_odd(rank, x))
    return found


def judge_odd_one(answer: Callable[[Rank, Any], int]) -> Verdict:
    """Every rank must name the odd one, wherever it is."""
    run = run_on_ranks(checked(odd_one_of_three, (answer,), nproc=3, device="cpu", timeout_s=20, env={}))
    cases = ((1, "5, 9, 5"), (2, "5, 5, 1"), (0, "9, 5, 5"), (0, "1, 5, 5"))
    for case, (odd, values) in enumerate(cases):
        for rank, found in enumerate(run.results):
            if found[case] != odd:
                return wrong(f"with x = {values} on ranks 0, 1, 2, rank {rank} answers {found[case]!r}.")
    return right("named by every rank, in every place.")


def find_odd(rank: Rank, x: Any) -> int:
    """Which rank's x differs from the two others; the same answer on every rank."""
    import torch
    import torch.distributed as dist

    everyone = [torch.empty_like(x) for _ in range(rank.world_size)]
    dist.all_gather(everyone, x)
    values = [value.item() for value in everyone]
    return next(index for index, value in enumerate(values) if values.count(value) == 1)


def _odd_is_largest(rank: Rank, x: Any) -> int:
    import torch
    import torch.distributed as dist

    everyone = [torch.empty_like(x) for _ in range(rank.world_size)]
    dist.all_gather(everyone, x)
    return int(torch.cat(everyone).argmax())


def _odd_differs_from_rank_0(rank: Rank, x: Any) -> int:
    import torch
    import torch.distributed as dist

    everyone = [torch.empty_like(x) for _ in range(rank.world_size)]
    dist.all_gather(everyone, x)
    return next(index for index, value in enumerate(everyone) if value != everyone[0])


def _odd_known_to_rank_0(rank: Rank, x: Any) -> int | None:
    return find_odd(rank, x) if rank.index == 0 else find_odd(rank, x) and None


EXERCISES = {
    "00.1": Exercise(
        "Say what each rank prints",
        judge_three_lines,
        hints=(
            "All three run the same lines. What differs at the start is rank.index.",
            "all_reduce leaves the sum over all ranks in x, on every rank: 0 + 1 + 2.",
        ),
        solution=[3.0, 13.0, 23.0],
        near_misses=(
            NearMiss([0.0, 11.0, 22.0], "rank 0 does not print 0"),
            NearMiss([3.0, 3.0, 3.0], "rank 1 does not print 3"),
            NearMiss([6.0, 16.0, 26.0], "rank 0 does not print 6"),
            NearMiss([3.0], "three ranks print three numbers"),
        ),
    ),
    "00.2": Exercise(
        "Find the rank that is different",
        judge_odd_one,
        hints=(
            "No rank can tell alone. Let everyone see all values: dist.all_gather.",
            "all_gather fills a list of world_size tensors, the same on every rank. Which value is there once?",
        ),
        solution=find_odd,
        near_misses=(
            NearMiss(_odd_is_largest, "with x = 5, 5, 1"),
            NearMiss(_odd_differs_from_rank_0, "with x = 9, 5, 5"),
            NearMiss(_odd_known_to_rank_0, "rank 1 answers None"),
        ),
    ),
}
