"""Buckets whose sums go through shared memory, as rank processes see them."""

import time
from typing import Any

import torch
from runtime.matrix_cases import batch_of, captured
from runtime.matrix_plans import Case
from torch import nn

from penstock.errors import Stalled
from penstock.runtime.clock import clock_for
from penstock.runtime.gradients.buckets import (
    GradientBucket,
    GradientBuckets,
    make_bucket,
    make_groups,
)
from penstock.runtime.processes.world import World, join_world
from penstock.runtime.transport.shared_memory.segments import Segments, join_segments
from penstock.runtime.transport.shared_memory.sums import SUMMED, SharedSum, share_sums

ROUNDS = 20
# More numbers than ranks, as many as no multiple of them, and fewer.
SIZES = (1000, 7, 1)


def shared_buckets(world: World) -> tuple[Segments, list[GradientBucket]]:
    """Buckets of all ranks and of the first and the last, of two element types."""
    segments = join_segments(world, {}, spin_s=1e-3)
    assert segments is not None
    every, ends = tuple(range(world.size)), (0, world.size - 1)
    buckets = [
        make_bucket(holders, (0,), 0, [nn.Parameter(torch.zeros(size, dtype=dtype))], 0)
        for holders in (every, ends)
        for size in SIZES
        for dtype in (torch.float64, torch.bfloat16)
        if world.rank in holders
    ]
    share_sums(world, segments, buckets)
    return segments, buckets


def addend(rank: int, turn: int, size: int) -> torch.Tensor:
    """What a rank adds: small whole numbers, which any type sums exactly."""
    return torch.arange(size) % 5 + rank + turn % 3


def sums_of_many_rounds() -> list[str]:
    """What is wrong on this rank; it is late in some rounds, and spoils its gradients at once."""
    world = join_world("cpu", 60.0)
    segments, buckets = shared_buckets(world)
    wrong: list[str] = []
    for turn in range(ROUNDS):
        for bucket in buckets:
            assert bucket.sum is not None
            bucket.flat.copy_(addend(world.rank, turn, bucket.flat.numel()))
            bucket.sum.start()
        for number, bucket in enumerate(buckets):
            assert bucket.sum is not None
            if (turn + number) % 7 == world.rank:
                time.sleep(0.02)
            bucket.sum.wait()
            size = bucket.flat.numel()
            parts = torch.stack([addend(rank, turn, size) for rank in bucket.holders])
            (gradient,) = [p.grad for p in bucket.parameters]
            assert gradient is not None
            if not torch.equal(gradient.double(), parts.sum(0).double()):
                wrong.append(f"turn {turn}, bucket {number}: {gradient}")
        for bucket in buckets:
            assert bucket.sum is not None
            bucket.sum.settle()
            bucket.flat.fill_(float("nan"))
    segments.close()
    world.leave()
    return wrong


def waiting_for_a_rank_that_gives_nothing() -> tuple[str, float]:
    """What a rank says whose peer never hands its gradients, and after how many seconds."""
    world = join_world("cpu", 1.0)
    _, buckets = shared_buckets(world)
    start = time.perf_counter()
    if world.rank:
        time.sleep(8.0)
        return "", 0.0
    assert buckets[0].sum is not None
    buckets[0].sum.start()
    try:
        buckets[0].sum.wait()
    except Stalled as stalled:
        return str(stalled), time.perf_counter() - start
    return "no end", 0.0


def sum_that_is_changed_at_once() -> list[float]:
    """What a rank finds that copies late, while its peer changes its own gradients right away."""
    world = join_world("cpu", 60.0)
    segments = join_segments(world, {}, spin_s=1e-3)
    assert segments is not None
    weight, both = nn.Parameter(torch.zeros(4)), (0, 1)
    groups = make_groups(world, [both])
    buckets = GradientBuckets(
        world,
        {0: {"weight": weight}},
        {"weight": (0,)},
        {"weight": both},
        groups,
        clock_for(world.device),
    )
    share_sums(world, segments, buckets.shared)
    buckets.zero()
    (bucket,) = buckets.shared
    assert isinstance(bucket.sum, SharedSum)
    bucket.flat.fill_(1.0 + world.rank)
    if world.rank:
        copied = bucket.sum._await

        def late(other: int, word: int) -> None:
            copied(other, word)
            if word == SUMMED:
                time.sleep(0.2)

        bucket.sum._await = late  # type: ignore[method-assign]
    buckets.finish()
    found = bucket.flat.tolist()
    bucket.flat.mul_(100.0)
    world.barrier()
    buckets.close()
    segments.close()
    world.leave()
    return found


def bits_of_replicas(transport: Any) -> list[list[int]]:
    """The bits of all gradients on every rank after a step."""
    from penstock.runtime.options import Safety
    from penstock.runtime.pipeline import Pipeline

    case = Case("gpipe", (3,), 2)
    subject, graph = captured(case.model, True)
    plan = case.plan(len(graph.layer_names))
    batch = batch_of(subject, plan.global_batch, True)
    with Pipeline(graph, batch, plan=plan, safety=Safety(transport=transport)) as pipe:
        pipe.step(batch)
        grads = [p.grad for p in pipe.parameters() if p.grad is not None]
        return [g.reshape(-1).view(torch.int64).tolist() for g in grads]
