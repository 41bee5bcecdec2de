"""Waiting for an operation of torch.distributed, with a bound and a message that says for what."""

from datetime import timedelta

import torch.distributed as dist

from penstock.errors import RunFailed, Stalled
from penstock.runtime.processes.world import World

__all__ = ["await_work", "failure_of"]


def await_work(work: dist.Work, world: World, what: str, backend: str = "") -> None:
    """Wait for ``work``, for ``what``; ``backend`` is its group's, if not the world's.

    Raises:
        Stalled: it did not end in time.
        RunFailed: another rank is gone.
    """
    try:
        # NCCL only orders streams here and is bounded by its own watchdog.
        if (backend or world.backend) == "nccl":
            work.wait()
        else:
            work.wait(timedelta(seconds=world.timeout_s))
    except RuntimeError as cause:
        lost = RunFailed(f"rank {world.rank} lost {what}")
        raise failure_of(cause, world, what, lost) from cause


def failure_of(cause: RuntimeError, world: World, what: str, lost: RunFailed) -> RunFailed:
    """What a failed wait means: it took too long, or the other end is gone, which is ``lost``."""
    if "imed out" in str(cause) or "imeout" in str(cause):
        return Stalled(f"rank {world.rank} waited {world.timeout_s:g} s for {what}")
    return lost
