"""The store by which the ranks of a run find one another.

It listens where ranks need it and nowhere else. Whoever reaches its port can read and write it, as
with torchrun: the network is trusted.

Torchrun's agent serves one store for as long as it lives. When it starts the ranks again, the store
still holds the addresses, positions and notes of those that have ended. Neither its port nor
``TORCHELASTIC_RESTART_COUNT`` distinguishes the starts: the count stays when hosts come and go, and
differs between hosts. So the ranks agree on a new name, and put it in front of all keys.
"""

import errno
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.errors import BadInput, RunFailed, Stalled
from penstock.runtime.processes.heartbeat import HEARTBEAT, RARE_LIMIT_S, CurrentWait

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.25
"""Between two looks at a store for a value that is not there yet."""

UNREACHABLE_S = 30.0
"""Seconds without a sign from the store's host after which a connection to it is lost."""


class StoreLost(RunFailed, RuntimeError):
    """The store cannot be reached any more; torch's own error is a RuntimeError too."""


class RunStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """A store that reports in a line when it is lost, and waits only as long as ranks answer."""

    def __init__(self, inner: dist.Store) -> None:  # pyright: ignore[reportPrivateImportUsage]
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: bytes | str) -> None:
        with reaching():
            self._inner.set(key, value)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        with reaching():
            return self._inner.get(key)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        with reaching():
            return self._inner.compare_set(key, expected_value, desired_value)

    def add(self, key: str, value: int) -> int:
        with reaching():
            return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        with reaching():
            return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values, as long as the ranks answer."""
        limit_s = timeout.total_seconds() if timeout is not None else RARE_LIMIT_S
        with joining() as pause:
            # A wait of the inner store prints a warning for each time limit that passes.
            while not self._inner.check(keys):
                if pause() > limit_s:
                    self._inner.wait(keys, timedelta(milliseconds=1))  # raises torch's error

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def clone(self) -> "RunStore":
        """The same store over a connection of its own."""
        return RunStore(self._inner.clone())  # pyright: ignore[reportAttributeAccessIssue]

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)


@contextmanager
def joining() -> Generator[Callable[[], float]]:
    """Publish that this rank waits for others to join, as long as they answer.

    The function pauses between two looks at the store, and returns the seconds that the rank has
    waited. A pause is a twentieth of that: a value is found a little late, and a long wait costs
    little.
    """
    start_s = time.perf_counter()

    def pause() -> float:
        HEARTBEAT.check()
        waited_s = time.perf_counter() - start_s
        time.sleep(min(max(waited_s / 20, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
        return waited_s

    with HEARTBEAT.waiting(CurrentWait(lambda: "all ranks to join", -1, "the start", start_s)):
        yield pause


@contextmanager
def reaching() -> Iterator[None]:
    """Raise `StoreLost` with a message of one line for an error of the network."""
    try:
        yield
    except dist.DistNetworkError as cause:
        text = str(cause).partition("\n")[0]
        raise StoreLost(
            f"the run's store cannot be reached any more ({text}): the process that serves it has "
            f"ended, or the link to its host is cut"
        ) from cause


@cache
def met_at(address: str, port: str) -> tuple[RunStore, int, int]:
    """The store of all ranks, this rank and the number of ranks, found once in a process.

    The store is kept, because without torchrun's agent rank 0 serves it: a slower rank may still
    read from it when rank 0 has left a group. Every start has a prefix of its own.
    """
    timeout = timedelta(seconds=RARE_LIMIT_S)
    with limited_silence(int(port)):
        store, rank, size = meet(address, port, timeout)
        store.set_timeout(timeout)
        whole = plain = RunStore(store)
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        restarts = served and "TORCHELASTIC_RUN_ID" in os.environ
        name = ""
        if restarts:
            name = secrets.token_hex(8) if rank == 0 else name_of_start(plain, rank, RARE_LIMIT_S)
            whole = RunStore(dist.PrefixStore(name, store))  # pyright: ignore[reportPrivateImportUsage]
        HEARTBEAT.begin(whole, rank, size)
        if name and rank == 0:
            tell_start(plain, name, size)
    return whole, rank, size


def meet(address: str, port: str, timeout: timedelta) -> tuple[Any, int, int]:
    """The store at ``address``, this rank and the number of ranks.

    Under torchrun its agent serves the store. Otherwise rank 0 does, on the interface that has
    ``address``, or on all interfaces if none has (it belongs to a service that forwards).
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        check_reachable(address, int(port))
    elif rank == 0:
        try:
            store = serve_store(address, int(port))
        except OSError as cause:
            if cause.errno == errno.EADDRINUSE:
                raise BadInput(
                    f"port {port} of {address} is taken; choose another MASTER_PORT"
                ) from cause
        else:
            return store, rank, size
    return next(rendezvous("env://", timeout=timeout))


def serve_store(address: str, port: int = 0) -> dist.TCPStore:  # pyright: ignore[reportPrivateImportUsage]
    """A store that this process serves, on the interface with ``address`` only.

    Port 0: the kernel chooses one. Torch's own socket would listen on all interfaces.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(place[:2], family=family)
    chosen: int = listening.getsockname()[1]
    check_reachable(address, chosen)
    with limited_silence(chosen):
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address,
            chosen,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def check_reachable(address: str, port: int) -> None:
    """Raise `RunFailed` if nothing answers within `UNREACHABLE_S`; torch would wait much longer."""
    try:
        socket.create_connection((address, port), UNREACHABLE_S).close()
    except OSError as cause:
        raise StoreLost(
            f"the run's store at {address}:{port} cannot be reached ({cause}); see whether the "
            f"process that serves it runs, and whether the network is up ('ip link')"
        ) from cause


@contextmanager
def limited_silence(port: int) -> Iterator[None]:
    """Give connections to a store's port that are made within the limit `UNREACHABLE_S` (Linux).

    Without it, a request over a link that is cut waits for a quarter of an hour in the kernel,
    where no other limit reaches it. Connections that were there before are somebody else's.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        yield
        return
    before = open_sockets().keys()
    yield
    for inode, handle in open_sockets().items():
        # It may be closed meanwhile, and need not be connected.
        with suppress(OSError), socket.socket(fileno=os.dup(handle)) as connection:
            is_inet = inode not in before and connection.family != socket.AF_UNIX
            if is_inet and connection.getpeername()[1] == port:
                limit_ms = round(1e3 * UNREACHABLE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def open_sockets() -> dict[int, int]:
    """The handles of this process's sockets by their inodes, which no later socket gets (Linux)."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def name_of_start(store: RunStore, rank: int, limit_s: float) -> str:
    """The name of this start, which rank 0 has drawn; any other rank must call this.

    The rank draws a number, and takes the name that rank 0 writes as the answer to it. So it takes
    none that an earlier rank 0 has written.
    """
    own = secrets.token_hex(8)
    store.set(key_of_rank("drawn", rank), own)
    with joining() as pause:
        while True:
            number, _, name = written(store, key_of_rank("answer", rank)).partition(" ")
            if number == own:
                store.set(key_of_rank("taken", rank), name)
                return name
            if pause() > limit_s:
                raise Stalled(f"rank {rank} waited {limit_s:g} s for rank 0 to join the run")


def tell_start(store: RunStore, name: str, size: int) -> None:
    """Send ``name`` to every rank that requests it, until all have taken it.

    The number found for a rank may be that of an earlier one. At the present one's request there is
    another number, and it gets an answer as well.
    """
    answered, waiting = dict[int, str](), set(range(1, size))
    with joining() as pause:
        while waiting:
            for rank in sorted(waiting):
                number = written(store, key_of_rank("drawn", rank))
                if number and number != answered.get(rank):
                    store.set(key_of_rank("answer", rank), f"{number} {name}")
                    answered[rank] = number
                elif written(store, key_of_rank("taken", rank)) == name:
                    waiting.remove(rank)
            pause()


def written(store: RunStore, key: str) -> str:
    """Read the store's value at a key; empty if there is none."""
    return store.get(key).decode() if store.check([key]) else ""


def key_of_rank(what: str, rank: int) -> str:
    """The key of the number that a rank has "drawn", of its "answer", or of the name "taken"."""
    return f"penstock/start/{what}/{rank}"
