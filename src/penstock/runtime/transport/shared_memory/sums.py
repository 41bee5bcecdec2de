"""Sum gradients of one host's ranks in shared memory.

Every rank keeps the gradients that it shares in memory that its peers also map, so a sum sends
nothing. Each holder sums one part of a bucket from all holders' memory, and then copies the parts
that the others have summed. That is a reduce-scatter and an all-gather (as in ring all-reduce:
Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009) without the ring, since every
rank can read every other's memory. Gloo's all-reduce sends the same bytes through the kernel, from
threads that compete for the ranks' cores. One rank sums a part in a fixed order, so all ranks get
the same bits.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from penstock.runtime.gradients.buckets import GradientBucket, place_gradients
from penstock.runtime.processes.world import World
from penstock.runtime.transport.shared_memory.segments import (
    ASLEEP,
    CACHE_LINE_BYTES,
    Segments,
    open_memory,
)

HANDED, SUMMED, COPIED = 0, 1, 2
"""Indexes of a holder's counters for a bucket.

Each holds the number of the last sum for which the holder has completed its gradients, summed its
part, or copied the other parts.
"""
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Offer:
    """Process, memory and offsets by which peers map a rank's gradients.

    ``starts[holders]`` gives the offsets in bytes of the buckets with these holders, in the same
    order on all of them. A bucket begins with a cache line of counters, followed by the gradients.
    """

    process: int
    memory: int
    size_bytes: int
    starts: Mapping[tuple[int, ...], Sequence[int]]


class SharedSum:
    """The sum of one bucket over its holders; see `GradientSum`.

    ``flats`` and ``words`` are the gradients and counters of the holders, in their order.
    """

    def __init__(
        self,
        segments: Segments,
        bucket: GradientBucket,
        flats: Sequence[torch.Tensor],
        words: Sequence[memoryview],
    ) -> None:
        self._segments, self._bucket, self._words = segments, bucket, words
        holders = bucket.holders
        place = holders.index(segments.rank)
        flat = flats[place]
        self._own = words[place]
        self._others = [other for other in range(len(holders)) if other != place]
        bounds = [len(flat) * n // len(holders) for n in range(len(holders) + 1)]
        parts = [slice(lo, hi) for lo, hi in pairwise(bounds)]
        self._sum = flat[parts[place]]
        self._addends = {other: flats[other][parts[place]] for other in self._others}
        self._copies = {
            other: (flat[parts[other]], flats[other][parts[other]]) for other in self._others
        }
        self._number = 0

    def start(self) -> None:
        self._number += 1
        self._say(HANDED)

    def wait(self) -> None:
        for other, addend in self._addends.items():
            self._await(other, HANDED)
            self._sum.add_(addend)
        self._say(SUMMED)
        for other, (copy, part) in self._copies.items():
            self._await(other, SUMMED)
            copy.copy_(part)
        self._say(COPIED)

    def settle(self) -> None:
        for other in self._others:
            self._await(other, COPIED)

    def close(self) -> None:
        """Move the gradients out of the shared memory, which can then be released."""
        place_gradients(self._bucket, self._bucket.summed.clone())
        self._bucket.sum = None

    def _say(self, word: int) -> None:
        self._own[word] = self._number
        for other in self._others:
            peer = self._segments.peers[self._bucket.holders[other]]
            if peer.words[ASLEEP]:
                peer.wake()

    def _await(self, other: int, word: int) -> None:
        words, number = self._words[other], self._number
        if words[word] < number:
            rank = self._bucket.holders[other]
            self._segments.wait(
                lambda: words[word] >= number,
                lambda: f"the gradient sum of stage {self._bucket.stage} with rank {rank}",
                rank,
                progress=self._segments.positions,
            )


def share_sums(world: World, segments: Segments, buckets: Sequence[GradientBucket]) -> None:
    """Put the gradients of ``buckets`` into shared memory and sum them there from now on.

    All ranks must call this, also those without buckets. The holders of a bucket must list it in
    the same order. If any rank cannot open another's memory, nothing changes on any rank.
    """
    size = 0
    starts: dict[tuple[int, ...], list[int]] = {}
    for bucket in buckets:
        starts.setdefault(bucket.holders, []).append(size)
        size += -(-(CACHE_LINE_BYTES + bucket.summed.nbytes) // PAGE_BYTES) * PAGE_BYTES
    memory = os.memfd_create("penstock gradients")
    try:
        os.ftruncate(memory, size)
        offers = world.all_gather(Offer(os.getpid(), memory, size, starts), Offer)

        def open_all() -> dict[int, mmap.mmap]:
            return {
                rank: open_memory(offer.process, offer.memory, offer.size_bytes)
                for rank, offer in enumerate(offers)
                if any(rank in holders for holders in starts)
            }

        opened = world.all_succeed(open_all, OSError)
    except OSError:
        return
    finally:
        os.close(memory)
    seen: dict[tuple[int, ...], int] = {}
    for bucket in buckets:
        number = seen[bucket.holders] = seen.get(bucket.holders, -1) + 1
        words: list[memoryview] = []
        flats: list[torch.Tensor] = []
        for rank in bucket.holders:
            start = offers[rank].starts[bucket.holders][number]
            gradients = start + CACHE_LINE_BYTES
            words.append(memoryview(opened[rank])[start:gradients].cast("Q"))
            flats.append(
                torch.frombuffer(
                    opened[rank],
                    dtype=bucket.summed.dtype,
                    count=bucket.summed.numel(),
                    offset=gradients,
                )
            )
        place_gradients(bucket, flats[bucket.holders.index(world.rank)])
        bucket.sum = SharedSum(segments, bucket, flats, words)
