"""Tensors of a rank's stages that a group of ranks divides: which, and how they become whole."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from penstock.runtime.processes.world import World, await_work


class Shards:
    """The shards that this rank holds; every rank of its group holds one of each divided tensor.

    ``ranks`` are those of the group (one: nothing is divided here), and ``place`` is this rank's
    among them in ascending order. ``dims`` are the divided dimensions by the first names of
    parameters, and ``sizes`` what they measure in the whole. A shard has as many rows as any other,
    but the last ones have fewer, or none, where the rows are no multiple of the ranks.
    """

    def __init__(self, world: World, ranks: Sequence[int], tied: Mapping[str, str]) -> None:
        self.ranks = tuple(ranks)
        self.place = sorted(ranks).index(world.rank)
        self.dims: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.world, self.tied = world, tied
        self.group: dist.ProcessGroup | None = None

    @property
    def is_divided(self) -> bool:
        """True if this rank shares its stages with others."""
        return len(self.ranks) > 1

    def dim_of(self, name: str) -> int | None:
        """The dimension in which this rank holds a shard of a tensor; ``None``: it is whole."""
        return self.dims.get(self.tied.get(name, name)) if self.is_divided else None

    def rows_of(self, name: str) -> int:
        """The most rows of a shard."""
        return -(-self.sizes[self.tied.get(name, name)] // len(self.ranks))

    def whole(
        self, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str] | None = None
    ) -> dict[str, torch.Tensor]:
        """``tensors`` with divided ones gathered, whole on its first rank in ascending order.

        All ranks of the group must call this. ``names`` gives the parameter to which a tensor (such
        as a state of the optimizer) belongs, where it is not called like it. Tensors that are no
        part of it, such as a count of steps, are kept.
        """
        found = dict(tensors)
        if self.group is None:
            return found
        for key in sorted(tensors):
            name = (names or {}).get(key, key)
            dim = self.dim_of(name)
            if dim is None or tensors[key].dim() <= dim:
                continue
            # An optimizer's state may be in host memory, which NCCL does not send.
            shard = tensors[key].detach().to(self.world.device)
            whole = self.gathered(key, name, shard)
            if not self.place:
                found[key] = whole.to(tensors[key].device)
        return found

    def gathered(self, key: str, name: str, shard: torch.Tensor) -> torch.Tensor:
        """The whole of a shard called ``key``, on all ranks of the group, which must call this."""
        dim = self.dims[self.tied.get(name, name)]
        shape = list(shard.shape)
        shape[dim] = self.rows_of(name)
        padded = shard.new_zeros(shape)
        padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)
        parts = [torch.empty_like(padded) for _ in self.ranks]
        work = dist.all_gather(parts, padded, group=self.group, async_op=True)
        await_work(work, self.world, f"the shards of '{key}'", size_bytes=padded.nbytes)
        size = self.sizes[self.tied.get(name, name)]
        return torch.cat(parts, dim).narrow(dim, 0, size).contiguous()

    def room(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """A tensor to read all of the parameter ``name`` into; ``shard`` itself if it is whole."""
        dim = self.dim_of(name)
        if dim is None:
            return shard
        shape = list(shard.shape)
        shape[dim] = self.sizes[self.tied.get(name, name)]
        return torch.empty(shape, dtype=shard.dtype, device=shard.device)

    def own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor that belongs to the parameter ``name``, or all of it."""
        dim = self.dim_of(name)
        if dim is None or tensor.dim() <= dim:
            return tensor
        rows, size = self.rows_of(name), self.sizes[self.tied.get(name, name)]
        first = min(self.place * rows, size)
        return tensor.narrow(dim, first, min(rows, size - first)).contiguous()

    def left_whole(self) -> AbstractContextManager[None]:
        """Hold modules as the user made them."""
        return nullcontext()

    def leave(self) -> None:
        """Leave the group, so that after a failure its other ranks do not wait for this one."""
        group, self.group = self.group, None
        if group is not None:
            self.world.abandon(group)


def copy_values(tensor: torch.Tensor, source: int, group: dist.ProcessGroup, world: World) -> None:
    """Give all ranks of ``group`` the values that ``tensor`` has on rank ``source``."""
    value = tensor.detach().contiguous()
    plain = value.view(torch.uint8) if value.dtype == torch.bool else value
    work = dist.broadcast(plain, source, group=group, async_op=True)
    await_work(work, world, f"values of rank {source}", peer=source, size_bytes=plain.nbytes)
    with torch.no_grad():
        tensor.copy_(value)
