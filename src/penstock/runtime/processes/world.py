"""The processes of a run: who they are, where they are, and the groups they form."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.errors import BadInput
from penstock.runtime.processes.exchange import (
    gather_everywhere,
    gather_to_first,
    tell_from_first,
)

__all__ = ["World", "join_world"]

T = TypeVar("T")

CONTROL_TIMEOUT_S = 1800.0
"""Bound of rare exchanges in which one rank may work alone for long (checkpoint, verification)."""

DEFAULT_GROUPS = count()
"""Numbers of the default groups that are made here; the same on every rank."""


@dataclass(frozen=True)
class World:
    """This process among the others.

    ``control`` joins all ranks over Gloo (``None``: this process is alone). ``hosts`` and
    ``devices`` say for each rank where it runs; ``owns_default_group`` that it was made here, as
    were ``groups``.
    """

    rank: int
    size: int
    device: torch.device
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    control: dist.ProcessGroup | None
    owns_default_group: bool
    timeout_s: float
    groups: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def one_host(self) -> bool:
        """Whether all ranks see the same processes and the same memory."""
        return len(set(self.hosts)) == 1

    @property
    def backend(self) -> str:
        """What carries tensors of ``device``: NCCL where every rank has its own GPU, else Gloo."""
        places = set(zip(self.hosts, self.devices, strict=True))
        own_gpu = self.device.type == "cuda" and len(places) == self.size
        return "nccl" if own_gpu and dist.is_nccl_available() else "gloo"

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank, on every rank."""
        if self.control is None:
            return [value]
        return gather_everywhere(value, self.control)

    def gather_to_first(self, value: T) -> list[T]:
        """The values of all ranks, by rank, on rank 0; nothing elsewhere."""
        if self.control is None:
            return [value]
        return gather_to_first(value, self.control)

    def from_first(self, value: T | None) -> T:
        """Rank 0's value on every rank."""
        if self.control is None:
            assert value is not None
            return value
        return tell_from_first(value, self.control)

    def agreed(self, make: Callable[[], T], refusal: type[Exception] = BadInput) -> T:
        """What ``make`` gives here; every rank calls, and where it refuses on one it does on all.

        Raises:
            BadInput: that of the first rank that refused; or another kind of ``refusal``.
        """
        made: list[T] = []
        why = ""
        try:
            made.append(make())
        except refusal as cause:
            why = str(cause)
        for text in self.gather(why):
            if text:
                raise refusal(text)
        return made[0]

    def done_by_first(self, act: Callable[[], object]) -> None:
        """Let rank 0 act; every rank calls, and where rank 0 refuses, all do.

        Raises:
            BadInput: rank 0's.
        """
        self.agreed(act if self.rank == 0 else lambda: None)

    def new_group(self, ranks: Sequence[int], backend: str = "") -> dist.ProcessGroup | None:
        """A group of ``ranks`` in that order; every rank must call this in the same order.

        ``None`` where there is nobody to talk to.
        """
        if self.size == 1:
            return None
        # NCCL's rule of one order on all ranks is kept by calling this everywhere, also on ranks
        # outside the group and for groups of one.
        group = dist.new_group(
            list(ranks),
            backend=backend or self.backend,
            timeout=timedelta(seconds=self.timeout_s),
        )
        if not isinstance(group, dist.ProcessGroup):
            return None
        self.groups.append(group)
        return group if len(ranks) > 1 else None

    def leave(self) -> None:
        """Destroy all groups that were made here; peers may still be at their last operation."""
        for group in self.groups:
            dist.destroy_process_group(group)
        self.groups.clear()
        if self.owns_default_group and dist.is_initialized():
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)


def join_world(device: torch.device | str | None, timeout_s: float) -> World:
    """Join the processes that torchrun, or `launch_workers`, started; alone where none did.

    The default process group is made where the caller has not made one. ``device`` ``None`` means
    this rank's own GPU where the host has one for each of its ranks, the CPU otherwise.

    Raises:
        BadInput: the environment of torchrun is incomplete.
    """
    owns_default_group = False
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        check_environment()
        make_default_group()
        owns_default_group = True
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    rank, size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    chosen = torch.device(device) if device is not None else own_device()
    if chosen.type == "cuda":
        chosen = torch.device("cuda", chosen.index or 0)
        torch.cuda.set_device(chosen)
    control = None
    if not alone:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_TIMEOUT_S))
        assert isinstance(group, dist.ProcessGroup)  # this rank is in the group of all ranks
        control = group
    here = World(rank, size, chosen, (), (), control, owns_default_group, timeout_s)
    places = here.gather((host_identity(), str(chosen)))
    hosts, devices = zip(*places, strict=True)
    joined = World(rank, size, chosen, hosts, devices, control, owns_default_group, timeout_s)
    if control is not None:
        joined.groups.append(control)
    return joined


def make_default_group() -> None:
    """Join all ranks in torch's default group, which `World.leave` destroys.

    Each such group of a process has keys of its own in the store: the ranks would otherwise find
    the addresses that they had in the group before, and wait for sockets that are closed.
    """
    timeout = timedelta(seconds=CONTROL_TIMEOUT_S)
    store, rank, size = met_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    prefix = f"penstock/{next(DEFAULT_GROUPS)}"
    own = dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)


@cache
def met_at(address: str, port: str) -> tuple[Any, int, int]:
    """The store that all ranks meet at, this one's number and their count, once a process.

    Kept, because without torchrun's agent rank 0 serves it: a slower rank may still read from it
    when rank 0 has left a group.
    """
    timeout = timedelta(seconds=CONTROL_TIMEOUT_S)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return store, rank, size


def check_environment() -> None:
    """Raise unless the variables that torchrun sets are there."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise BadInput(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but {', '.join(missing)} is not set; start "
            f"the script with torchrun --nproc-per-node {os.environ['WORLD_SIZE']}"
        )


def own_device() -> torch.device:
    """This rank's GPU, where its host has one for each of its ranks; else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def host_identity() -> str:
    """Equal for two processes if and only if they can open one another's memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        # Not Linux: never the same as another, so nothing is shared.
        return f"{os.uname().nodename} {os.getpid()}"
