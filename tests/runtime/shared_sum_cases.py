"""Buckets whose sums go through shared memory, as rank processes see them."""

import time
from typing import Any

import torch
from torch import nn

from penstock.errors import Stalled
from penstock.runtime.gradient_bucket import Bucket, make_bucket
from penstock.runtime.segment_opening import join_segments
from penstock.runtime.shared_segment import Segments
from penstock.runtime.shared_sums import share_sums
from penstock.runtime.world import World, join_world

ROUNDS = 20
# More numbers than ranks, as many as no multiple of them, and fewer.
SIZES = (1000, 7, 1)


def shared_buckets(world: World, timeout_s: float = 60.0) -> tuple[Segments, list[Bucket]]:
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
        time.sleep(3.0)
        return "", 0.0
    assert buckets[0].sum is not None
    buckets[0].sum.start()
    try:
        buckets[0].sum.wait()
    except Stalled as stalled:
        return str(stalled), time.perf_counter() - start
    return "no end", 0.0


def bits_of_replicas(transport: Any) -> list[list[int]]:
    """The bits of all gradients on every rank after a step, and whether they are views of one."""
    from matrix_cases import batch_of, captured
    from matrix_plans import Case

    from penstock.runtime.pipeline import Pipeline

    case = Case("gpipe", (3,), 2)
    subject, graph = captured(case.model, True)
    plan = case.plan(len(graph.layer_names))
    batch = batch_of(subject, plan.global_batch, True)
    with Pipeline(graph, plan, batch, transport=transport) as pipe:
        pipe.step(batch)
        grads = [p.grad for p in pipe.parameters() if p.grad is not None]
        return [g.reshape(-1).view(torch.int64).tolist() for g in grads]
