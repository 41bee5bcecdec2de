"""Sums gradients with the collective operations of a process group."""

import torch.distributed as dist

from penstock.runtime.gradients.bucket import GradientBucket
from penstock.runtime.processes.waiting import await_work
from penstock.runtime.processes.world import World

__all__ = ["GroupSum", "await_bucket"]


class GroupSum:
    """An all-reduce of one bucket, or a reduce to its owner; see `GradientSum`."""

    def __init__(self, bucket: GradientBucket, group: dist.ProcessGroup, world: World) -> None:
        self._bucket, self._group, self._world = bucket, group, world
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Start the operation, which runs in the background."""
        bucket, group = self._bucket, self._group
        # Gloo cannot reduce CUDA tensors to one rank, so all ranks get the sum.
        to_all = bucket.flat.is_cuda and self._world.backend == "gloo"
        if bucket.values is None or to_all:
            self._work = dist.all_reduce(bucket.flat, group=group, async_op=True)
        else:
            self._work = dist.reduce(bucket.flat, bucket.owner, group=group, async_op=True)

    def wait(self) -> None:
        """Wait until the bucket holds the sum."""
        if self._work is not None:
            await_bucket(self._work, self._bucket, self._world, "the gradient sum")
            self._work = None

    def settle(self) -> None:
        """Nothing to wait for: other ranks have copies."""

    def close(self) -> None:
        """Nothing to do: the memory is not shared."""


def await_bucket(work: dist.Work, bucket: GradientBucket, world: World, of: str) -> None:
    """Wait for an operation on ``bucket`` among its holders; ``of`` names it in error messages.

    Raises:
        Stalled: a holder did not take part in time.
        RunFailed: a holder vanished.
    """
    ranks = ", ".join(str(rank) for rank in bucket.holders if rank != world.rank)
    await_work(work, world, f"{of} of stage {bucket.stage} with rank {ranks}")
