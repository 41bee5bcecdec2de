"""Tensors of all ranks brought to rank 0, one at a time: it needs room for them once."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from penstock.runtime.world import World

__all__ = ["as_bytes", "gathered"]


def gathered(world: World, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks by name, on rank 0; nothing elsewhere. Every rank calls.

    Those of other ranks come to the CPU of rank 0, its own are there as they are. No two ranks
    have a name in common.
    """
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    of_ranks = world.gather_to_first(shapes)
    if world.rank != 0:
        for tensor in tensors.values():
            if tensor.numel():
                sent = as_bytes(tensor.detach().cpu().contiguous())
                dist.send(sent, group_dst=0, group=world.control)
        return {}
    found = dict(tensors)
    for rank, named in enumerate(of_ranks[1:], start=1):
        for name, (shape, dtype) in named.items():
            found[name] = torch.empty(shape, dtype=dtype)
            if found[name].numel():
                dist.recv(as_bytes(found[name]), group_src=rank, group=world.control)
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, which every type of element travels as."""
    return tensor.reshape(-1).view(torch.uint8)
