"""Gradients summed by the collective operations of a process group."""

import torch.distributed as dist

from penstock.runtime.gradients.bucket import GradientBucket
from penstock.runtime.processes.waiting import await_work
from penstock.runtime.processes.world import World

__all__ = ["GroupSum", "await_bucket"]


class GroupSum:
    """An all-reduce of one bucket, or a reduction to its owner; see `GradientSum`."""

    def __init__(self, bucket: GradientBucket, group: dist.ProcessGroup, world: World) -> None:
        self._bucket, self._group, self._world = bucket, group, world
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Hand the gradients to the group, which sums them in the background."""
        bucket, group = self._bucket, self._group
        # Gloo has no reduction to one rank for tensors on a GPU; a sum on all is one as well.
        to_all = bucket.flat.is_cuda and self._world.backend == "gloo"
        if bucket.values is None or to_all:
            self._work = dist.all_reduce(bucket.flat, group=group, async_op=True)
        else:
            self._work = dist.reduce(bucket.flat, bucket.owner, group=group, async_op=True)

    def wait(self) -> None:
        """Return once the bucket holds the sum."""
        if self._work is not None:
            await_bucket(self._work, self._bucket, self._world, "the gradient sum")
            self._work = None

    def settle(self) -> None:
        """Nothing to wait for: others got copies."""

    def close(self) -> None:
        """Nothing to do: the memory is this rank's own."""


def await_bucket(work: dist.Work, bucket: GradientBucket, world: World, of: str) -> None:
    """Wait for an operation on ``bucket`` among its holders; ``of`` says what it is.

    Raises:
        Stalled: a holder did not take part in time.
        RunFailed: a holder vanished.
    """
    ranks = ", ".join(str(rank) for rank in bucket.holders if rank != world.rank)
    await_work(work, world, f"{of} of stage {bucket.stage} with rank {ranks}")
