"""Waits for operations of torch.distributed, with a time limit and a message that names them."""

import time
from datetime import timedelta

import torch.distributed as dist

from penstock.errors import RunFailed, Stalled
from penstock.runtime.processes.torch_texts import has_timed_out
from penstock.runtime.processes.watch import WATCH, CurrentWait
from penstock.runtime.processes.world import World

__all__ = ["await_work", "failure_of"]

SLOWEST_BYTES_PER_S = 10e6
"""A large transfer may take as long as at this rate."""


def await_work(
    work: dist.Work | None,
    world: World,
    what: str,
    backend: str = "",
    *,
    peer: int = -1,
    size_bytes: float = 0.0,
) -> None:
    """Wait for ``work``, called ``what`` in messages; ``backend`` is its group's (empty: world's).

    ``peer`` is the rank on which it depends (-1: several). It may take longer than the limit of
    ``world`` if it moves many bytes.

    Raises:
        Stalled: it did not end in time.
        RunFailed: another rank has ended.
    """
    assert work is not None
    WATCH.wait = CurrentWait(lambda: what, peer, "", time.perf_counter())
    limit_s = world.timeout_s + size_bytes / SLOWEST_BYTES_PER_S
    try:
        # With NCCL this only orders streams; its own watchdog limits the time.
        if (backend or world.backend) == "nccl":
            work.wait()
        else:
            work.wait(timedelta(seconds=limit_s))
    except RuntimeError as cause:
        lost = RunFailed(f"rank {world.rank} lost {what}")
        raise failure_of(cause, world, what, lost) from cause
    WATCH.wait = None


def failure_of(cause: RuntimeError, world: World, what: str, lost: RunFailed) -> RunFailed:
    """The error of a failed wait: `Stalled` after a timeout, else ``lost``."""
    if has_timed_out(cause):
        return Stalled(f"rank {world.rank} waited {world.timeout_s:g} s for {what}")
    return lost
