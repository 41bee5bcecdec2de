"""The processes of a run: their ranks, hosts and devices, and the groups they form.

Exchanges values between the ranks of a group.

Every rank of the group must call these functions, with the same ``types``: the dataclasses that the
values may hold. The group must accept CPU tensors. A value that cannot be sent is an error on its
sender and on all receivers, so that none of them waits for it.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from penstock.errors import BadInput, RunFailed
from penstock.runtime.processes.positions import EXCHANGE
from penstock.runtime.processes.store import met_at
from penstock.runtime.processes.watch import RARE_LIMIT_S, WATCH, finish
from penstock.runtime.removed import check_variables
from penstock.runtime.serialization import from_bytes, to_bytes
from penstock.torch_internals import default_store

__all__ = ["Groups", "World", "join_world", "make_default_group"]

T = TypeVar("T")

Groups: TypeAlias = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Process groups by their ranks."""

DEFAULT_GROUPS = count()
"""Numbers the default groups created here, equally on every rank."""

USERS: Counter[dist.ProcessGroup] = Counter()
"""How many worlds use a default group that `join_world` has created; the last destroys it."""

LET_GO_WITHIN_S = 2.0
"""So long `let_go` waits, since a thread of Gloo ends only when its peers send or end."""


@dataclass
class World:
    """This process and the others of its run.

    ``hosts`` and ``devices`` give for each rank where it runs. `leave` destroys ``groups``, of
    which the first is `control`, and ``default_group`` with the last world that uses it (``None``:
    the default group is the caller's).
    """

    rank: int
    size: int
    device: torch.device
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    default_group: dist.ProcessGroup | None
    timeout_s: float
    groups: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def control(self) -> dist.ProcessGroup | None:
        """A Gloo group of all ranks; ``None``: this process is alone.

        Raises:
            RunFailed: this process has left.
        """
        if self.size > 1 and not self.groups:
            raise RunFailed("the pipeline was closed, and cannot do this; do it before close()")
        return self.groups[0] if self.groups else None

    @property
    def one_host(self) -> bool:
        """Whether all ranks see the same processes and share memory."""
        return len(set(self.hosts)) == 1

    @property
    def backend(self) -> str:
        """The backend for tensors of ``device``: NCCL if every rank has its own GPU, else Gloo."""
        places = set(zip(self.hosts, self.devices, strict=True))
        own_gpu = self.device.type == "cuda" and len(places) == self.size
        return "nccl" if own_gpu and dist.is_nccl_available() else "gloo"

    def gather(self, value: T, *types: type) -> list[T]:
        """The values of all ranks, by rank, on every rank.

        ``types`` are the dataclasses that the values may hold besides plain values and tensors.
        """
        if self.control is None:
            return [value]
        return gather_everywhere(value, self.control, types)

    def gather_to_first(self, value: T, *types: type) -> list[T]:
        """The values of all ranks, by rank, on rank 0; empty on others; see `gather`."""
        if self.control is None:
            return [value]
        return gather_to_first(value, self.control, types)

    def from_first(self, value: T | None, *types: type) -> T:
        """Rank 0's value on every rank; see `gather`."""
        if self.control is None:
            assert value is not None
            return value
        return tell_from_first(value, self.control, types)

    def share_from_first(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's values of a CPU tensor to the other ranks, which have one of its size."""
        if self.control is not None:
            share_from_first(tensor, self.control)

    def agreed(self, make: Callable[[], T], refusal: type[Exception] = BadInput) -> T:
        """The result of ``make`` on this rank; if it raises on one rank, all ranks raise.

        All ranks must call this.

        Raises:
            BadInput: the error of the first rank that raised (or another class, ``refusal``).
            RunFailed: another rank raised an error of any other class.
        """
        made: list[T] = []
        refused = failed = ""
        try:
            made.append(make())
        except refusal as cause:
            refused = str(cause)
        except RunFailed:
            # All ranks get it, each by its own connections.
            raise
        except Exception as cause:
            line = str(cause).strip().partition("\n")[0]
            failed = f"rank {self.rank} failed with {type(cause).__name__}: {line}"
            with suppress(RunFailed):
                self.gather([refused, failed])
            raise
        texts = self.gather([refused, failed])
        for text, _ in texts:
            if text:
                raise refusal(text)
        for _, text in texts:
            if text:
                raise RunFailed(text)
        return made[0]

    def done_by_first(self, act: Callable[[], object]) -> None:
        """Call ``act`` on rank 0; all ranks must call this, and all raise if rank 0 raises.

        Raises:
            BadInput: the error of rank 0.
        """
        self.agreed(act if self.rank == 0 else lambda: None)

    def new_group(self, ranks: Sequence[int], backend: str = "") -> dist.ProcessGroup | None:
        """A process group of ``ranks`` in that order; all ranks must make the same calls in order.

        ``None`` if there are no other ranks.
        """
        if self.size == 1:
            return None
        # NCCL needs the same order of creation on all ranks, so all call this, also ranks outside
        # the group and for groups of one.
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
        """Destroy all groups that were created here; peers may still be in their last operation."""
        if self.groups:
            let_go(self._destroyed())

    def _destroyed(self) -> list[dist.ProcessGroup]:
        """All groups, of which torch knows no more."""
        found = [*self.groups]
        for group in found:
            self.abandon(group)
        default, self.default_group = self.default_group, None
        if default is not None:
            USERS[default] -= 1
            if not USERS[default]:
                del USERS[default]
                if dist.group.WORLD is default:
                    dist.destroy_process_group()
            found.append(default)
        return found

    def abandon(self, group: dist.ProcessGroup) -> None:
        """Destroy one of ``groups``, although others may still wait in it."""
        if group not in self.groups:
            return
        self.groups.remove(group)
        # It may be destroyed already, with a peer that died or with the caller's default group.
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)


def let_go(groups: list[dist.ProcessGroup]) -> None:
    """Empty the list, which ends the threads of groups that nothing else refers to.

    A thread of Gloo may have to take Python's lock to free the tensors of its last operation. If it
    does so while Python ends, the process aborts.
    """
    ending = Thread(target=groups.clear, name="penstock-let-go", daemon=True)
    ending.start()
    ending.join(LET_GO_WITHIN_S)


def join_world(device: torch.device | str | None, timeout_s: float) -> World:
    """Join the processes that torchrun or `launch_workers` started; without them, be alone.

    The default process group is created unless the caller has done so. With ``device=None`` this
    rank uses its own GPU if the host has one for each of its ranks, else the CPU.

    Raises:
        BadInput: torchrun's environment variables are incomplete, or one is set that is gone.
    """
    check_variables()
    WATCH.limit_s, WATCH.phase = timeout_s, "builds the pipeline"
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        check_environment()
        make_default_group()
        created = dist.group.WORLD
        assert created is not None
        USERS[created] = 0
    elif dist.is_initialized():
        WATCH.begin(default_store(), dist.get_rank(), dist.get_world_size())
    default = dist.group.WORLD if dist.is_initialized() else None
    if default is not None and default in USERS:
        USERS[default] += 1
    else:
        default = None
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    rank, size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    chosen = torch.device(device) if device is not None else own_device()
    if chosen.type == "cuda":
        chosen = torch.device("cuda", chosen.index or 0)
        torch.cuda.set_device(chosen)
    groups: list[dist.ProcessGroup] = []
    if not alone:
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=RARE_LIMIT_S))
        assert isinstance(control, dist.ProcessGroup)  # the group contains all ranks
        groups.append(control)
    here = World(rank, size, chosen, (), (), default, timeout_s, groups)
    places = here.gather((host_identity(), str(chosen)))
    here.hosts, here.devices = zip(*places, strict=True)
    return here


def make_default_group(backend: str = "gloo") -> None:
    """Join all ranks in torch's default group, which `World.leave` destroys.

    Each default group of a process uses its own keys in the store. Otherwise ranks would find the
    addresses of the previous group and wait for closed sockets.
    """
    timeout = timedelta(seconds=RARE_LIMIT_S)
    store, rank, size = met_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    prefix = f"penstock/{next(DEFAULT_GROUPS)}"
    own = dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)


def check_environment() -> None:
    """Raise `BadInput` unless torchrun's environment variables are set."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise BadInput(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but {', '.join(missing)} is not set; start "
            f"the script with torchrun --nproc-per-node {os.environ['WORLD_SIZE']}"
        )


def own_device() -> torch.device:
    """This rank's GPU if its host has one for each of its ranks; else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def host_identity() -> str:
    """Equal for two processes if and only if each can open the other's memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        # Not Linux: different for every process, so no memory is shared.
        return f"{os.uname().nodename} {os.getpid()}"


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
