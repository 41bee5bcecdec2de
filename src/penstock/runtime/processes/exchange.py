"""Exchanges Python values between the ranks of a group.

Only `encode` and `decode` know how a value becomes bytes. Every rank of the group must call the
other functions. The group must accept CPU tensors.
"""

import pickle
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["decode", "encode", "gather_everywhere", "gather_to_first", "tell_from_first"]


def encode(value: object) -> torch.Tensor:
    """Pickle a value into a tensor of bytes."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def decode(data: torch.Tensor) -> Any:
    """The value that `encode` was given."""
    return pickle.loads(data.numpy().tobytes())


def gather_everywhere(value: object, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks, by rank."""
    own, sizes, rows = padded(value, group)
    dist.all_gather(rows, own, group=group)
    return [decode(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def gather_to_first(value: object, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks, by rank, on the first rank; empty on others."""
    own, sizes, rows = padded(value, group)
    first = dist.get_rank(group) == 0
    dist.gather(own, rows if first else None, group=group, group_dst=0)
    return [decode(row[:size]) for row, size in zip(rows, sizes, strict=True)] if first else []


def tell_from_first(value: object, group: dist.ProcessGroup) -> Any:
    """The first rank's value on every rank."""
    first = dist.get_rank(group) == 0
    data = encode(value) if first else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=group, group_src=0)
    data = data if first else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return value if first else decode(data)


def padded(
    value: object, group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[int], list[torch.Tensor]]:
    """This rank's bytes padded to the longest, the lengths of all ranks, and receive buffers."""
    data = encode(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    sizes = [int(length) for length in lengths]
    own = torch.zeros(max(sizes), dtype=torch.uint8)
    own[: len(data)] = data
    return own, sizes, [torch.empty_like(own) for _ in sizes]
