"""The processes of a run: their ranks, hosts and devices, the groups they form, what they exchange.

All ranks must make the same exchanges in the same order, with the same ``types``: the dataclasses
that the values may hold besides plain values and tensors. A value that cannot be sent is an error
on all ranks, so that none of them waits for it.
"""

import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from penstock.device import identity_of, own_device
from penstock.errors import BadInput, PeerFailed, RunFailed
from penstock.runtime.processes.heartbeat import (
    BEAT_S,
    EXCHANGE,
    HEARTBEAT,
    RARE_LIMIT_S,
    CurrentWait,
)
from penstock.runtime.processes.store import met_at
from penstock.runtime.serialization import from_bytes, to_bytes
from penstock.torch_internals import OWN_GROUP, abort_group, default_store

T = TypeVar("T")

NAME = "a message between ranks"

PADDED_BYTES = 1 << 20
"""Most bytes of values that are exchanged at once, padded to the longest; longer ones in turn."""

SLOWEST_BYTES_PER_S = 10e6
"""A large transfer may take as long as at this rate."""

SENT_AT_ONCE = 8
"""A rank sends this many tensors ahead, since waiting for each would cost a round trip."""

Groups: TypeAlias = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Process groups by their ranks."""

DEFAULT_GROUPS = count()
"""Numbers of the default groups created here, equal on every rank."""

USERS: Counter[dist.ProcessGroup] = Counter()
"""Number of worlds that use a default group of `join_world`; the last destroys it."""

NCCL_SETTINGS = {
    # A rank that fails aborts its groups and reports why; torch would end the process instead.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Silence the warning: serialised P2P on one communicator is intended.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Torch's settings of NCCL, unless the user has set them."""

LET_GO_WITHIN_S = 2.0
"""Seconds that `World.leave` waits, since a thread of Gloo ends only when its peers send or end."""


@dataclass
class World:
    """This process and the others of its run.

    ``hosts`` and ``devices`` give for each rank where it runs. ``backend`` is that for tensors of
    ``device``: NCCL if every rank has a GPU of its own, else Gloo. `leave` destroys ``groups``, of
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
    backend: str = "gloo"
    _by_nccl: list[dist.ProcessGroup] = field(default_factory=list, init=False)

    @property
    def control(self) -> dist.ProcessGroup | None:
        """A Gloo group of all ranks; ``None``: this process is alone."""
        if self.size > 1 and not self.groups:
            raise RunFailed("the pipeline was closed, and cannot do this; do it before close()")
        return self.groups[0] if self.groups else None

    @property
    def one_host(self) -> bool:
        """True if all ranks see the same processes and share memory."""
        return len(set(self.hosts)) == 1

    def take_device(self, wanted: torch.device | str | None) -> None:
        """Take this rank's device (see `own_device`), and agree with all ranks on the backend."""
        host = socket.gethostname()

        def taken() -> torch.device:
            try:
                return own_device(wanted)
            except BadInput as cause:
                raise BadInput(
                    f"rank {self.rank}: {cause}" if self.size > 1 else str(cause)
                ) from None

        self.device = self.all_succeed(taken)
        identity, device = identity_of(self.device), str(self.device)
        found = self.all_gather(
            (host_identity(), identity, f"{device} of host '{host}'", dist.is_nccl_available())
        )
        self.hosts, self.devices, places, with_nccl = zip(*found, strict=True)
        gpus = [rank for rank, identity in enumerate(self.devices) if identity != "cpu"]
        if not gpus:
            return
        on_cpu = next((rank for rank in range(self.size) if rank not in gpus), None)
        if on_cpu is not None:
            raise BadInput(
                f"rank {on_cpu} computes on {places[on_cpu]} and rank {gpus[0]} on "
                f"{places[gpus[0]]}, and all ranks need the same kind of device; start on each "
                f"host as many ranks as it has GPUs, or choose device 'cpu'"
            )
        if not self.sharing:
            if not all(with_nccl):
                rank = with_nccl.index(False)
                raise BadInput(
                    f"torch {torch.__version__} of rank {rank} ({places[rank]}) has no NCCL, "
                    f"which carries messages between GPUs; install a build of torch with NCCL"
                )
            self.backend = "nccl"
        elif not self.one_host:
            raise BadInput(
                f"{self.sharing}, which ranks may only if all run on one host, since their "
                f"messages go through its memory; start on each host as many ranks as it has GPUs"
            )

    @property
    def sharing(self) -> str:
        """The ranks that share a GPU, in words; empty if none do."""
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, place in enumerate(zip(self.hosts, self.devices, strict=True)):
            ranks.setdefault(place, []).append(rank)
        for (_, identity), own in ranks.items():
            if identity != "cpu" and len(own) > 1:
                return f"ranks {', '.join(map(str, own))} share one GPU"
        return ""

    def all_gather(self, value: T, *types: type) -> list[T]:
        """The values of all ranks, by rank, on every rank."""
        if self.control is None:
            return [value]
        try:
            data, sent = to_bytes(value, NAME), True
        except BadInput as cause:
            data, sent = to_bytes(str(cause), NAME), False
        own = torch.frombuffer(data, dtype=torch.uint8)
        sizes = [row.tolist() for row in self._rows_of(torch.tensor([len(own), int(sent)]))]
        rows = self._rows_of(own, [size for size, _ in sizes])
        values = [from_bytes(row.numpy().tobytes(), NAME, types) for row in rows]
        for text, (_, was_sent) in zip(values, sizes, strict=True):
            if not was_sent:
                raise BadInput(text)
        return values

    def _rows_of(self, own: torch.Tensor, sizes: Sequence[int] = ()) -> list[torch.Tensor]:
        """The tensors of all ranks, which have these sizes (none given: all the same)."""
        lengths = sizes or [len(own)] * self.size
        if max(lengths) > PADDED_BYTES:
            rows = [own.new_empty(length) for length in lengths]
            rows[self.rank] = own
            for rank, row in enumerate(rows):
                finish_work(dist.broadcast(row, group=self.control, group_src=rank, async_op=True))
            return rows
        padded = own.new_zeros(max(lengths))
        padded[: len(own)] = own
        rows = [torch.empty_like(padded) for _ in lengths]
        finish_work(dist.all_gather(rows, padded, group=self.control, async_op=True))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, value: T | None, *types: type) -> T:
        """Rank 0's value on every rank; others may give nothing. Fails as `all_gather`."""
        first = self.rank == 0
        received = self.all_gather(value if first else None, *types)[0]
        return cast(T, value if first else received)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather(None)

    def gather_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of all ranks by name, on rank 0; empty on others; see `spread`."""
        found = dict(self.spread(tensors, everywhere=False))
        return {} if self.rank else found

    def spread(
        self, tensors: Mapping[str, torch.Tensor], *, everywhere: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of all ranks with their names, one by one, on every rank or on rank 0.

        Those of other ranks arrive on the CPU; a rank's own are given as they are. All ranks must
        call this and take all. All names must be different. Fails as `all_gather`.
        """
        of_ranks = self.all_gather({name: (t.shape, t.dtype) for name, t in tensors.items()})
        every = (row for named in of_ranks for row in named.values())
        size_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in every)
        sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

        def finish_sent(left: int, peer: int) -> None:
            while len(sent) > left:
                work, _ = sent.popleft()
                what = "tensors that are gathered"
                await_work(work, self, what, "gloo", peer=peer, size_bytes=size_bytes)

        for source, named in enumerate(of_ranks):
            own, group = source == self.rank, self.control
            for name, (shape, dtype) in named.items():
                if not (own or everywhere or self.rank == 0):
                    break
                found = tensors[name] if own else torch.empty(shape, dtype=dtype)
                if found.numel() and self.size > 1 and (everywhere or source):
                    data = as_bytes(found.detach().cpu().contiguous())
                    if everywhere:
                        work = dist.broadcast(data, group=group, group_src=source, async_op=True)
                    elif own:
                        work = dist.isend(data, group=group, group_dst=0)
                    else:
                        work = dist.irecv(data, group=group, group_src=source)
                    sent.append((work, data))
                    finish_sent(SENT_AT_ONCE if own else 0, 0 if own else source)
                yield name, found
        finish_sent(0, 0)

    def all_succeed(self, make: Callable[[], T], *refusals: type[Exception]) -> T:
        """The result of ``make`` on this rank; if it raises on one rank, all ranks raise."""
        kinds = refusals or (BadInput,)
        made, kind, problem = None, 0, ""
        try:
            made = make()
        except RunFailed:
            # All ranks get it, each by its own connections.
            raise
        except Exception as cause:
            kind = next((n for n, kind in enumerate(kinds, 1) if isinstance(cause, kind)), -1)
            problem = str(cause)
            if kind < 0:
                line = problem.strip().partition("\n")[0]
                problem = f"rank {self.rank} failed with {type(cause).__name__}: {line}"
                with suppress(RunFailed):
                    self.all_gather((kind, problem))
                raise
        found = self.all_gather((kind, problem))
        for kind, problem in (*(one for one in found if one[0] > 0), *found):
            if kind:
                raise kinds[kind - 1](problem) if kind > 0 else RunFailed(problem)
        return cast(T, made)

    def on_first(self, act: Callable[[], object]) -> None:
        """Call ``act`` on rank 0 only; see `all_succeed`."""
        self.all_succeed(act if self.rank == 0 else lambda: None)

    def new_group(self, ranks: Sequence[int], backend: str = "") -> dist.ProcessGroup | None:
        """A process group of ``ranks`` in that order; all ranks must make the same calls in order.

        ``None`` if there are no other ranks, or this one is outside.
        """
        if self.size == 1 or len(ranks) == 1:
            return None
        # NCCL needs the same order of creation on all ranks, so all call this, also ranks outside
        # the group.
        kind = backend or self.backend
        if kind == "gloo":
            limit = timedelta(seconds=self.timeout_s)
            group = dist.new_group(list(ranks), backend=kind, timeout=limit, group_desc=OWN_GROUP)
        else:
            group = new_nccl_group(ranks, self.device)
        if not isinstance(group, dist.ProcessGroup):
            return None
        self.groups.append(group)
        if kind == "nccl":
            self._by_nccl.append(group)
            # The ranks connect in their first operation, which waits for all of the group. In an
            # iteration one of them may need something else of this rank before.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return group

    def leave(self) -> None:
        """Destroy all groups that were created here; peers may still be in their last operation.

        A thread of Gloo may have to take Python's lock to free the tensors of that. If it does so
        while Python ends, the process aborts. So the last references go in another thread.
        """
        if self.groups:
            ending = Thread(target=self._destroyed().clear, name="penstock-let-go", daemon=True)
            ending.start()
            ending.join(LET_GO_WITHIN_S)

    def _destroyed(self) -> list[dist.ProcessGroup]:
        """Remove all groups from torch, and return them."""
        found = [*self.groups]
        for group in found:
            self._destroy(group, dist.destroy_process_group)
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
        """Destroy one of ``groups``, although others may still wait in it.

        To destroy one of NCCL waits for its operations, and their peers may have ended. So that is
        aborted.
        """
        by_nccl = group in self._by_nccl
        self._destroy(group, abort_group if by_nccl else dist.destroy_process_group)

    def abandon_gpus(self) -> None:
        """Abandon all groups of NCCL, so that nothing waits for operations on this rank's GPU."""
        for group in [*self._by_nccl]:
            self.abandon(group)

    def _destroy(
        self, group: dist.ProcessGroup, destroy: Callable[[dist.ProcessGroup], None]
    ) -> None:
        if group not in self.groups:
            return
        self.groups.remove(group)
        if group in self._by_nccl:
            self._by_nccl.remove(group)
        # It may be destroyed already, with a peer that died or with the caller's default group.
        with suppress(RuntimeError, ValueError):
            destroy(group)


def new_nccl_group(ranks: Sequence[int], device: torch.device) -> object:
    """A group of NCCL with one communicator, which exists when this returns.

    With a ``device_id`` torch makes it at once, for all operations. Without, it would make another
    for each two ranks at their first message. The streams of its operations are put before those of
    the computation, which may have many kernels waiting. Its time limit counts from the host's
    request, long before the GPU comes to the operation: `DeviceClock` has the limit that counts.
    """
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    # Builds for the CPU have no such class.
    of_torch: Any = getattr(dist, "ProcessGroupNCCL", None)
    options = of_torch.Options(is_high_priority_stream=True) if of_torch is not None else None
    return dist.new_group(
        list(ranks),
        backend="nccl",
        timeout=timedelta(seconds=RARE_LIMIT_S),
        pg_options=options,
        group_desc=OWN_GROUP,
        device_id=device,
    )


def join_world(device: torch.device | str | None, timeout_s: float) -> World:
    """Join the processes that torchrun or `launch_workers` started; without them, be alone.

    The default process group is created unless the caller has done so; then `World.leave` destroys
    it. ``device`` is as for `own_device`.
    """
    HEARTBEAT.limit_s, HEARTBEAT.phase = timeout_s, "builds the pipeline"
    if dist.is_initialized():
        HEARTBEAT.begin(default_store(), dist.get_rank(), dist.get_world_size())
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        check_environment()
        store, rank, size = met_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        # Each default group of a process uses its own keys in the store. Otherwise ranks would find
        # the addresses of the previous group and wait for closed sockets.
        own = dist.PrefixStore(f"penstock/{next(DEFAULT_GROUPS)}", store)  # pyright: ignore[reportPrivateImportUsage]
        limit = timedelta(seconds=RARE_LIMIT_S)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=limit)
        assert dist.group.WORLD is not None
        USERS[dist.group.WORLD] = 0
    default, rank, size = None, 0, 1
    if dist.is_initialized():
        default, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if default is not None and default in USERS:
        USERS[default] += 1
    else:
        default = None
    groups: list[dist.ProcessGroup] = []
    if size > 1:
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=RARE_LIMIT_S))
        assert isinstance(control, dist.ProcessGroup)  # the group contains all ranks
        groups.append(control)
    here = World(rank, size, torch.device("cpu"), (), (), default, timeout_s, groups)
    try:
        here.take_device(device)
    except BaseException:
        here.leave()
        raise
    return here


def check_environment() -> None:
    """Raise `BadInput` unless torchrun's environment variables are set."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise BadInput(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but {', '.join(missing)} is not set; start "
            f"the script with torchrun --nproc-per-node {os.environ['WORLD_SIZE']}"
        )


def host_identity() -> str:
    """Equal for two processes if and only if each can open the other's memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        # Not Linux: different for every process, so no memory is shared.
        return f"{os.uname().nodename} {os.getpid()}"


def finish_work(work: dist.Work | None) -> None:
    """Wait for a collective of all ranks, as long as they answer; see `World.all_gather`."""
    assert work is not None
    start_s = time.perf_counter()
    HEARTBEAT.meetings += 1
    meeting = f"{EXCHANGE} {HEARTBEAT.meetings}"
    with HEARTBEAT.waiting(CurrentWait(lambda: "all ranks", -1, meeting, start_s)):
        while True:
            has_ended = work.is_completed()
            try:
                work.wait(timedelta(seconds=BEAT_S))
                return
            except RuntimeError as cause:
                # A wait for work that had ended before cannot run out of time.
                if has_ended:
                    raise PeerFailed(
                        f"rank {HEARTBEAT.rank}, which {HEARTBEAT.phase}, lost another rank; see "
                        f"what that one says"
                    ) from cause
            if work.is_completed():
                continue
            if time.perf_counter() - start_s > RARE_LIMIT_S:
                raise HEARTBEAT.stalled(
                    f"rank {HEARTBEAT.rank} waited {RARE_LIMIT_S:g} s for all ranks"
                )
            HEARTBEAT.check()


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
    """
    assert work is not None
    HEARTBEAT.wait = CurrentWait(lambda: what, peer, "", time.perf_counter())
    limit_s = world.timeout_s + size_bytes / SLOWEST_BYTES_PER_S
    try:
        # With NCCL this only orders streams; see `DeviceClock` for the wait.
        if (backend or world.backend) == "nccl":
            work.wait()
        else:
            work.wait(timedelta(seconds=limit_s))
    except RuntimeError as cause:
        lost = RunFailed(f"rank {world.rank} lost {what}")
        raise failure_of(cause, world, what, lost) from cause
    HEARTBEAT.wait = None


def failure_of(cause: RuntimeError, world: World, what: str, lost: RunFailed) -> RunFailed:
    """The error of a failed operation: `Stalled` after a timeout, ``lost`` if a peer has gone.

    Everything else is this rank's own failure.
    """
    if has_timed_out(cause):
        return HEARTBEAT.stalled(f"rank {world.rank} waited {world.timeout_s:g} s for {what}")
    if connection_is_lost(cause):
        return lost
    line = str(cause).strip().partition("\n")[0]
    return RunFailed(f"rank {world.rank}, {what}: {line}")


def has_timed_out(failure: BaseException) -> bool:
    """Return whether an operation of a process group ended because its time limit was over.

    Gloo raises a plain `RuntimeError` for everything, so the text decides.
    """
    return "imed out" in str(failure) or "imeout" in str(failure)


def connection_is_lost(failure: BaseException) -> bool:
    """Return whether an operation of a group ended because another rank has left the group.

    Torch has no type of error for it: the text has a path of Gloo's source, or a result of NCCL.
    """
    text = str(failure)
    gone = "gloo/transport/" in text or "ncclRemoteError" in text
    return gone and not has_timed_out(failure)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, so that all element types are sent the same way."""
    return tensor.reshape(-1).view(torch.uint8)
