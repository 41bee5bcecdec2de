"""Tensors of all ranks brought to rank 0, one by one: it needs room for them once."""

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist

from penstock.runtime.processes.world import World

__all__ = ["as_bytes", "gathered"]

SENT_AT_ONCE = 8
"""So many tensors does a rank send before the first has arrived; each by itself is a round trip."""


def gathered(world: World, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks by name, on rank 0; nothing elsewhere. Every rank calls.

    Those of other ranks come to the CPU of rank 0, its own are there as they are. No two ranks
    have a name in common.
    """
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    of_ranks = world.gather_to_first(shapes)
    if world.rank != 0:
        under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()
        for tensor in tensors.values():
            if tensor.numel():
                # Copies of what is on a GPU are made a few at a time.
                while len(under_way) >= SENT_AT_ONCE:
                    under_way.popleft()[0].wait()
                sent = as_bytes(tensor.detach().cpu().contiguous())
                work = dist.isend(sent, group_dst=0, group=world.control)
                assert work is not None
                under_way.append((work, sent))
        for work, _ in under_way:
            work.wait()
        return {}
    found = dict(tensors)
    awaited: list[dist.Work] = []
    for rank, named in enumerate(of_ranks[1:], start=1):
        for name, (shape, dtype) in named.items():
            found[name] = torch.empty(shape, dtype=dtype)
            if found[name].numel():
                work = dist.irecv(as_bytes(found[name]), group_src=rank, group=world.control)
                assert work is not None
                awaited.append(work)
    for work in awaited:
        work.wait()
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, which every type of element travels as."""
    return tensor.reshape(-1).view(torch.uint8)
