"""Exchanges values between the ranks of a group.

Every rank of the group must call these functions, with the same ``types``: the dataclasses that the
values may hold. The group must accept CPU tensors. A value that cannot be sent is an error on its
sender and on all receivers, so that none of them waits for it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import BadInput
from penstock.runtime.processes.positions import EXCHANGE
from penstock.runtime.processes.watch import WATCH, finish
from penstock.runtime.serialization import from_bytes, to_bytes

__all__ = ["gather_everywhere", "gather_to_first", "share_from_first", "tell_from_first"]

NAME = "a message between ranks"


@dataclass(frozen=True)
class NotSent:
    """Stands for a value that could not be sent."""

    why: str


def gather_everywhere(
    value: object, group: dist.ProcessGroup, types: tuple[type, ...] = ()
) -> list[Any]:
    """The values of all ranks, by rank.

    Raises:
        BadInput: a rank's value cannot be sent.
    """
    own, sizes, rows = padded(encode(value), group)
    finish(dist.all_gather(rows, own, group=group, async_op=True), *next_exchange())
    return [decode(row[:size], types) for row, size in zip(rows, sizes, strict=True)]


def gather_to_first(
    value: object, group: dist.ProcessGroup, types: tuple[type, ...] = ()
) -> list[Any]:
    """The values of all ranks, by rank, on the first rank; empty on others.

    Raises:
        BadInput: a rank's value cannot be sent; on the first rank and on that one.
    """
    data = encode(value)
    own, sizes, rows = padded(data, group)
    first = dist.get_rank(group) == 0
    work = dist.gather(own, rows if first else None, group=group, group_dst=0, async_op=True)
    finish(work, *next_exchange())
    if not first:
        decode(data, types)
        return []
    return [decode(row[:size], types) for row, size in zip(rows, sizes, strict=True)]


def tell_from_first(value: object, group: dist.ProcessGroup, types: tuple[type, ...] = ()) -> Any:
    """The first rank's value on every rank.

    Raises:
        BadInput: it cannot be sent.
    """
    first = dist.get_rank(group) == 0
    data = encode(value) if first else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    share_from_first(size, group)
    data = data if first else torch.empty(int(size), dtype=torch.uint8)
    share_from_first(data, group)
    received = decode(data, types)
    return value if first else received


def share_from_first(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Copy the first rank's values of a CPU tensor to the others, which have one of its size."""
    finish(dist.broadcast(tensor, group=group, group_src=0, async_op=True), *next_exchange())


def encode(value: object) -> torch.Tensor:
    """The bytes of a value, or of why it cannot be sent."""
    try:
        data = to_bytes(value, NAME)
    except BadInput as cause:
        data = to_bytes(NotSent(str(cause)), NAME)
    return torch.frombuffer(data, dtype=torch.uint8)


def decode(data: torch.Tensor, types: tuple[type, ...]) -> Any:
    """The value in ``data``; raises `BadInput` if it is the reason why there is none."""
    value = from_bytes(data.numpy().tobytes(), NAME, (*types, NotSent))
    if isinstance(value, NotSent):
        raise BadInput(value.why)
    return value


def next_exchange() -> tuple[str, str]:
    """What a rank waits for in the next exchange, and the name of this meeting on all ranks."""
    WATCH.meetings += 1
    return "all ranks", f"{EXCHANGE} {WATCH.meetings}"


def padded(
    data: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[int], list[torch.Tensor]]:
    """This rank's bytes padded to the longest, the lengths of all ranks, and receive buffers."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(lengths, torch.tensor([len(data)]), group=group, async_op=True)
    finish(work, *next_exchange())
    sizes = [int(length) for length in lengths]
    own = torch.zeros(max(sizes), dtype=torch.uint8)
    own[: len(data)] = data
    return own, sizes, [torch.empty_like(own) for _ in sizes]
