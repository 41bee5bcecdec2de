"""Waits for operations of torch.distributed, with a time limit and a message that names them."""

from datetime import timedelta

import torch.distributed as dist

from penstock.errors import RunFailed, Stalled
from penstock.runtime.processes.world import World

__all__ = ["await_work", "failure_of"]


def await_work(work: dist.Work, world: World, what: str, backend: str = "") -> None:
    """Wait for ``work``, called ``what`` in messages; ``backend`` is its group's (empty: world's).

    Raises:
        Stalled: it did not end in time.
        RunFailed: another rank has ended.
    """
    try:
        # With NCCL this only orders streams; its own watchdog limits the time.
        if (backend or world.backend) == "nccl":
            work.wait()
        else:
            work.wait(timedelta(seconds=world.timeout_s))
    except RuntimeError as cause:
        lost = RunFailed(f"rank {world.rank} lost {what}")
        raise failure_of(cause, world, what, lost) from cause


def failure_of(cause: RuntimeError, world: World, what: str, lost: RunFailed) -> RunFailed:
    """The error of a failed wait: `Stalled` after a timeout, else ``lost``."""
    if "imed out" in str(cause) or "imeout" in str(cause):
        return Stalled(f"rank {world.rank} waited {world.timeout_s:g} s for {what}")
    return lost
