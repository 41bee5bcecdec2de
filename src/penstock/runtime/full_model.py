"""All weights in the user's model for a while: `Pipeline.full_model`, and the end of a pipeline.

Each tensor comes from its owner. At the end each holder takes rank 0's values into the memory that
its weights had, where stages, optimizers and gradients find them.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.capture.record.absent import Absent, give_back, release
from penstock.device import free_memory
from penstock.errors import BadInput
from penstock.runtime.checkpoints.weight_saving import check_not_quantised
from penstock.runtime.engine import Engine
from penstock.runtime.processes.world import as_bytes
from penstock.text import size_text


@dataclass(slots=True)
class Gathered:
    """A tensor of the user's model at ``key`` of a module's ``place``, as it was before.

    ``memory`` has its values on a holder, and ``whence`` says where they are on another rank.
    """

    place: dict[str, Any]
    key: str
    tensor: Any
    memory: torch.Tensor | None
    whence: Any
    gradient: torch.Tensor | None = None
    digest: bytes = b""

    @property
    def now(self) -> torch.Tensor:
        """The tensor, or what the user has put into its place."""
        found = self.place.get(self.key)
        return found if isinstance(found, torch.Tensor) else self.tensor

    def fill(self, value: torch.Tensor) -> None:
        """Give the tensor all its values, if it has not."""
        tensor = self.tensor
        if type(tensor) is Absent or (tensor.is_meta and isinstance(tensor, nn.Parameter)):
            give_back(tensor, value)
        elif tensor.is_meta:
            self.place[self.key] = value
        elif tensor.shape != value.shape:  # a shard
            self.gradient, tensor.grad, tensor.data = tensor.grad, None, value
        elif self.memory is None:
            tensor.copy_(value)

    def digest_now(self) -> bytes:
        """A digest of the values, if they are here."""
        if type(self.now) is Absent:
            return b""
        data: Any = as_bytes(self.now.detach().cpu().contiguous())
        return hashlib.blake2b(data.numpy()).digest()

    def restore(self) -> None:
        """Make the tensor what it was, with the values in ``memory``, or none."""
        if self.now is not self.tensor:
            self.tensor.requires_grad_(self.now.requires_grad)
            self.place[self.key] = self.tensor
        if self.whence is not None:
            release(self.tensor, self.whence, may_be_read=True)
        elif self.memory is not None and self.memory.data_ptr() != self.tensor.data_ptr():
            self.tensor.grad, self.tensor.data = None, self.memory
            self.tensor.grad = self.gradient


@torch.no_grad()
def gather_weights(engine: Engine, *, everywhere: bool = True) -> Mapping[str, Gathered]:
    """Give the user's model all parameters and buffers on every rank, or on rank 0.

    All ranks must call this. Returns what the tensors were before, by their first names.
    """
    check_not_quantised(engine, "full_model() or close(gather=True)")
    world, program, held = engine.world, engine.graph.program, engine.held.named_tensors()
    found: dict[str, Gathered] = {}
    wanted = 0
    for name, tensor in (*program.named_parameters(), *program.named_buffers()):
        if name not in engine.graph.tied_names:
            memory = held[name].detach() if name in held else None
            whence = tensor.whence if type(tensor) is Absent else None
            found[name] = Gathered(*program.places(name), tensor, memory, whence)
            wanted += tensor.numel() * tensor.dtype.itemsize if memory is None else 0
            if memory is not None and engine.shards.dim_of(name) is not None:
                wanted += memory.nbytes * len(engine.shards.ranks)
    here = list(zip(world.hosts, world.devices, strict=True))
    sharing = here.count(here[world.rank]) if everywhere else 1
    free = free_memory(world.device)

    def check_room() -> None:
        if (everywhere or world.rank == 0) and wanted > free.bytes / sharing:
            raise BadInput(
                f"the weights of other ranks take {size_text(wanted)} on rank {world.rank}, and "
                f"{size_text(free.bytes / sharing)} are free for each rank there ({free.limit}); "
                f"use full_model(rank0_only=True), or files, by save_pretrained()"
            )

    world.all_succeed(check_room)
    with engine.failures.shared():
        for name, value in world.spread(engine.held.owned_tensors(), everywhere=everywhere):
            if name in found:
                found[name].fill(value.to(world.device))
    return found


@contextmanager
def all_weights(engine: Engine, *, rank0_only: bool) -> Iterator[None]:
    """Hold all weights in the user's model; see `Pipeline.full_model`."""
    gathered = gather_weights(engine, everywhere=not rank0_only)
    for each in gathered.values():
        each.digest = each.digest_now()
    try:
        with engine.shards.left_whole():
            yield
    except BaseException:
        return_values(engine, gathered)
        raise
    written = return_values(engine, gathered)
    for rank, names in enumerate(written):
        if lost := set(names).difference(written[0]):
            raise BadInput(
                f"rank {rank} wrote to '{min(lost)}' within full_model(), and rank 0 did not, "
                f"whose values are kept; write on all ranks, or on rank 0"
            )


@torch.no_grad()
def return_values(engine: Engine, gathered: Mapping[str, Gathered]) -> list[list[str]]:
    """Give holders rank 0's values, and release the others; what each rank has written to."""
    if engine.has_ended:
        return []
    with engine.failures.shared():
        own = [name for name, each in gathered.items() if each.digest_now() != each.digest]
        written = engine.world.all_gather(own)
        names = {name for names in written for name in names}
        kept = {} if engine.world.rank else {n: gathered[n].now for n in gathered if n in names}
        for name, value in engine.world.spread(kept):
            memory = gathered[name].memory
            if memory is not None:
                memory.copy_(engine.shards.own_part(name, value))
        for each in gathered.values():
            each.restore()
    return written
