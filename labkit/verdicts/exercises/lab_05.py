"""Exercises of lab 05: a gradient hook, a sampler, and accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from labkit.runs.call import checked
from labkit.runs.launcher import run_on_ranks
from labkit.runs.worker import Rank
from labkit.verdicts.checker import Exercise, NearMiss, Verdict, right, wrong

Hook = Callable[..., Any]
SCALES = (1.0, 60_000.0)  # the second one fits in float16, its sum over two ranks doesn't


def try_hook(rank: Rank, hook: Hook) -> list[tuple[float, float, int]]:
    """A backward pass with the hook for each scale: the gradient furthest from its mean, that mean, bytes sent.

    The gradient of weight i is its input: scale·(1 - r/10)·(8 - i)/8 on rank r, so the mean is known without DDP.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    sent_bytes = _count_all_reduce(dist)
    found = []
    for scale in SCALES:
        sent_bytes.clear()
        model = DDP(torch.nn.Linear(8, 1, bias=False))
        # DDP refuses annotations that it can't resolve, so it gets a function without any.
        model.register_comm_hook(dist.group.WORLD, lambda group, bucket: _future_of_float32(hook(group, bucket=bucket)))
        parts_8 = scale * torch.arange(8, 0, -1) / 8
        model((1 - rank.index / 10) * parts_8[None]).sum().backward()
        means_8, got_8 = (1 - (rank.world_size - 1) / 20) * parts_8, model.module.weight.grad[0]
        worst = int(((got_8 - means_8).abs() / means_8).nan_to_num(nan=torch.inf).argmax())
        found.append((means_8[worst].item(), got_8[worst].item(), sum(sent_bytes)))
    return found


def _future_of_float32(returned: Any) -> Any:
    """What a hook returned, if DDP can use it; it crashes the process, or worse, where it can't."""
    import torch

    if not isinstance(returned, torch._C.Future):
        raise TypeError(f"the hook returned {type(returned).__name__}; DDP wants a future of a tensor")

    def checked_value(done: Any) -> Any:
        value = done.value()
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"the future holds a {type(value).__name__}; use .then(lambda done: done.value()[0])")
        if value.dtype != torch.float32:
            raise TypeError(f"the future holds {value.dtype}; the bucket is float32")
        return value

    return returned.then(checked_value)


def _count_all_reduce(dist: Any) -> list[int]:
    """Note the bytes of every tensor that dist.all_reduce is given from now on."""
    sent_bytes: list[int] = []
    real = dist.all_reduce

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent_bytes.append(tensor.numel() * tensor.element_size())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counting
    return sent_bytes


def judge_hook(answer: Hook) -> Verdict:
    """The mean gradient, within float16's precision, with half of float32's bytes on the wire."""
    run = run_on_ranks(checked(try_hook, (answer,), nproc=2, device="cpu", timeout_s=20, env={}))
    for scale, (wanted, got, sent_bytes) in zip(SCALES, run.results[0], strict=True):
        if not abs(got - wanted) <= 2e-3 * wanted:
            return wrong(f"gradients up to {scale:g}: where the mean over 2 ranks is {wanted:g}, you leave {got:g}.")
        if sent_bytes != 16:
            return wrong(f"8 float32 gradients: all_reduce was given {sent_bytes} bytes, not 16.")
    return right("mean right to 0.2 %, half the bytes.")


def half_hook(group: Any, bucket: Any) -> Any:
    """Average gradients over the ranks, sent as float16; returns a future of the float32 bucket."""
    import torch
    import torch.distributed as dist

    buffer = bucket.buffer()
    half = (buffer / dist.get_world_size()).half()  # divide first: the sum might not fit in float16
    work = dist.all_reduce(half, group=group, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0].to(torch.float32)))


def _hook_sums(group: Any, bucket: Any) -> Any:
    import torch.distributed as dist

    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.half(), group=group, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0].float()))


def _hook_overflows(group: Any, bucket: Any) -> Any:
    import torch.distributed as dist

    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.half(), group=group, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_((done.value()[0] / dist.get_world_size()).float()))


def _hook_full_size(group: Any, bucket: Any) -> Any:
    import torch.distributed as dist

    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


def _hook_half_way(group: Any, bucket: Any) -> Any:
    import torch.distributed as dist

    buffer = bucket.buffer().div_(dist.get_world_size())
    first_half = buffer[: len(buffer) // 2]
    work = dist.all_reduce(first_half, group=group, async_op=True)
    return work.get_future().then(lambda done: buffer)


def _sampler(rank: int) -> Any:
    """A fresh sampler of rank 0 or 1 of two, over six samples."""
    from torch.utils.data import DistributedSampler

    samples: Any = range(6)
    return DistributedSampler(samples, num_replicas=2, rank=rank, seed=1)


def _epochs(answer: Callable[[Any, int], Iterable[Iterable[Any]]], rank: int) -> list[list[int]]:
    """Four epochs of the learner's, as plain numbers."""
    return [[int(index) for index in epoch] for epoch in answer(_sampler(rank), 4)]


def judge_sampler(answer: Callable[[Any, int], Iterable[list[int]]]) -> Verdict:
    """Run the learner's epochs for both ranks of two, over six samples."""
    if answer(_sampler(0), 1) is None:
        return wrong("you return None, not a list of epochs.")
    seen = [_epochs(answer, rank) for rank in range(2)]
    if seen[0] != _epochs(answer, 0):
        return wrong("asked twice, the same rank gets other orders; a run must be repeatable.")
    if [len(epochs) for epochs in seen] != [4, 4]:
        return wrong(f"4 epochs were asked for, you gave {len(seen[0])} and {len(seen[1])} on the two ranks.")
    for epoch, (one, other) in enumerate(zip(*seen, strict=True)):
        if sorted([*one, *other]) != [0, 1, 2, 3, 4, 5]:
            seen_by = f"rank 0 sees {one}, rank 1 sees {other}"
            return wrong(f"epoch {epoch}: {seen_by}; together they should see 0 … 5 once.")
    for epoch in range(3):
        if seen[0][epoch] == seen[0][epoch + 1]:
            return wrong(f"rank 0 sees {seen[0][epoch]} in epoch {epoch} and again in epoch {epoch + 1}.")
    return right("every sample once an epoch, another order in each.")


def epoch_orders(sampler: Any, num_epochs: int) -> list[list[int]]:
    """The sample numbers of each epoch, in order, for this sampler's rank."""
    orders = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def _never_set(sampler: Any, num_epochs: int) -> list[list[int]]:
    return [list(sampler) for _ in range(num_epochs)]


def _set_too_late(sampler: Any, num_epochs: int) -> list[list[int]]:
    orders = []
    for epoch in range(num_epochs):
        orders.append(list(sampler))
        sampler.set_epoch(epoch)
    return orders


def _own_shuffle(sampler: Any, num_epochs: int) -> list[list[int]]:
    import random

    everything = list(range(6))
    return [random.Random(10 * epoch + sampler.rank).sample(everything, 3) for epoch in range(num_epochs)]


def _unseeded(sampler: Any, num_epochs: int) -> list[list[int]]:
    import random

    return [random.sample(list(sampler), 3) for _ in range(num_epochs)]


def judge_accumulation(answer: Callable[..., int]) -> Verdict:
    """Cases that divide, and one that doesn't."""
    for global_batch, micro_batch, dp, wanted in ((16, 8, 2, 1), (512, 8, 4, 16), (96, 4, 3, 8)):
        got = answer(global_batch=global_batch, micro_batch=micro_batch, dp=dp)
        if got != wanted or not isinstance(got, int):
            return wrong(f"global_batch={global_batch}, micro_batch={micro_batch}, dp={dp}: you say {got!r}.")
    for global_batch in (100, 8):
        try:
            got = answer(global_batch=global_batch, micro_batch=8, dp=2)
        except ValueError:
            continue
        case = f"global_batch={global_batch}, micro_batch=8, dp=2"
        return wrong(f"{case} can't be had exactly; you return {got!r}, and raise no ValueError.")
    return right("also where it can't be had.")


def accumulation_steps(*, global_batch: int, micro_batch: int, dp: int) -> int:
    """Backward passes before each optimizer step, so that a step sees `global_batch` samples."""
    steps, rest = divmod(global_batch, micro_batch * dp)
    if rest:
        raise ValueError(f"{global_batch} samples are no multiple of micro_batch({micro_batch}) × dp({dp})")
    return steps


EXERCISES = {
    "05.1": Exercise(
        "Write the gradient hook",
        judge_hook,
        hints=(
            "bucket.buffer() is a flat float32 tensor. DDP wants a future of the averaged one.",
            "float16 ends at 65,504. Divide by the world size before you sum.",
            "dist.all_reduce(x, group=group, async_op=True).get_future().then(f): "
            "f gets the future, its value()[0] is x.",
        ),
        solution=half_hook,
        near_misses=(
            NearMiss(_hook_sums, "2 ranks is 0.95, you leave 1.9"),
            NearMiss(_hook_half_way, "you leave"),
            NearMiss(_hook_overflows, "you leave inf"),
            NearMiss(_hook_full_size, "was given 32 bytes"),
        ),
    ),
    "05.2": Exercise(
        "Repair the sampler",
        judge_sampler,
        hints=(
            "A DistributedSampler shuffles with seed + epoch. Who tells it the epoch?",
            "sampler.set_epoch(epoch), before the loop over it begins.",
        ),
        solution=epoch_orders,
        near_misses=(
            NearMiss(_never_set, "in epoch 0 and again in epoch 1"),
            NearMiss(_set_too_late, "in epoch 0 and again in epoch 1"),
            NearMiss(_own_shuffle, "together they should see"),
            NearMiss(_unseeded, "a run must be repeatable"),
        ),
    ),
    "05.3": Exercise(
        "Choose accumulation for a global batch",
        judge_accumulation,
        hints=("How many samples do all ranks together see in one backward pass?", "And if that doesn't divide?"),
        solution=accumulation_steps,
        near_misses=(
            NearMiss(lambda *, global_batch, micro_batch, dp: global_batch // micro_batch, "you say 2."),
            NearMiss(
                lambda *, global_batch, micro_batch, dp: global_batch // (micro_batch * dp), "can't be had exactly"
            ),
            NearMiss(
                lambda *, global_batch, micro_batch, dp: max(1, round(global_batch / (micro_batch * dp))),
                "can't be had exactly",
            ),
        ),
    ),
}
