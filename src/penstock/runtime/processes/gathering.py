"""Gathers tensors of all ranks on rank 0 one by one, so that it holds each only once."""

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist

from penstock.runtime.processes.world import World

__all__ = ["as_bytes", "gathered"]

SENT_AT_ONCE = 8
"""A rank sends this many tensors ahead, since waiting for each would cost a round trip."""


def gathered(world: World, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks by name, on rank 0; empty on others. All ranks must call this.

    Tensors of other ranks arrive on the CPU of rank 0; its own are returned as they are. All names
    must be different.
    """
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    of_ranks = world.gather_to_first(shapes)
    if world.rank != 0:
        under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()
        for tensor in tensors.values():
            if tensor.numel():
                # CUDA tensors are copied to the CPU a few at a time.
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
    """The bytes of a contiguous tensor, so that all element types are sent alike."""
    return tensor.reshape(-1).view(torch.uint8)
