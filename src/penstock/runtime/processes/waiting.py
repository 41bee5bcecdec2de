"""Waits for operations of torch.distributed, with a time limit and a message that names them."""

import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from penstock.errors import RunFailed, Stalled
from penstock.runtime.processes.watch import WATCH, CurrentWait, has_timed_out
from penstock.runtime.processes.world import World

__all__ = ["as_bytes", "await_work", "failure_of", "gathered"]

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


TO_FIRST = "the tensors that rank 0 gathers"

SENT_AT_ONCE = 8
"""A rank sends this many tensors ahead, since waiting for each would cost a round trip."""


def gathered(world: World, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks by name, on rank 0; empty on others. All ranks must call this.

    Tensors of other ranks arrive on the CPU of rank 0; its own are returned as they are. All names
    must be different.

    Raises:
        Stalled: a rank does not answer any more.
        RunFailed: a rank has ended.
    """
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    own_bytes = sum(tensor.nbytes for tensor in tensors.values())
    of_ranks = world.gather_to_first(shapes)
    if world.rank != 0:
        under_way: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
        # Other ranks may send as much at the same time.
        sent = partial(
            await_work,
            world=world,
            what=TO_FIRST,
            backend="gloo",
            size_bytes=own_bytes * world.size,
        )
        for tensor in tensors.values():
            if tensor.numel():
                # CUDA tensors are copied to the CPU a few at a time.
                while len(under_way) >= SENT_AT_ONCE:
                    sent(under_way.popleft()[0], peer=0)
                data = as_bytes(tensor.detach().cpu().contiguous())
                work = dist.isend(data, group_dst=0, group=world.control)
                under_way.append((work, data))
        for work, _ in under_way:
            sent(work, peer=0)
        return {}
    found = dict(tensors)
    awaited: list[tuple[int, dist.Work | None]] = []
    size_bytes = 0
    for rank, named in enumerate(of_ranks[1:], start=1):
        for name, (shape, dtype) in named.items():
            found[name] = torch.empty(shape, dtype=dtype)
            if found[name].numel():
                size_bytes += found[name].nbytes
                work = dist.irecv(as_bytes(found[name]), group_src=rank, group=world.control)
                awaited.append((rank, work))
    for rank, work in awaited:
        what = f"{TO_FIRST} from rank {rank}"
        await_work(work, world, what, "gloo", peer=rank, size_bytes=size_bytes)
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, so that all element types are sent alike."""
    return tensor.reshape(-1).view(torch.uint8)
