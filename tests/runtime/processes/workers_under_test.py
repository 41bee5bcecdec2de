"""Functions that the launcher's tests run in worker processes."""

import contextlib
import gc
import io
import os
import runpy
import shutil
import signal
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import torch
from torch import distributed

from penstock.errors import BadInput, PeerFailed, RunFailed, Stalled
from penstock.runtime.processes.world import join_world
from penstock.torch_internals import default_store


def add_ranks() -> int:
    distributed.init_process_group("gloo")
    total = torch.tensor(distributed.get_rank())
    distributed.all_reduce(total)
    return int(total)


def many_bytes(count: int) -> bytes:
    """More than a pipe holds, so the worker cannot end before they are read."""
    return b"x" * count


def collected_and_imported() -> tuple[bool, bool, bool]:
    """Whether garbage is collected, imports are left out of that, and the compiler is imported."""
    return gc.isenabled(), gc.get_freeze_count() > 0, "torch._dynamo" in sys.modules


def threads_and_rank() -> tuple[int, int, str]:
    return int(os.environ["RANK"]), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def parent_and_variable(name: str) -> tuple[int, str | None]:
    return os.getppid(), os.environ.get(name)


def run_script(path: str, arguments: list[str], folder: str = ".") -> str:
    """What a script prints that is run in a folder as Python runs it."""
    os.chdir(folder)
    sys.argv, sys.path[0] = [path, *arguments], str(Path(path).resolve().parent)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def fail(kind: str, failing_rank: int) -> None:
    if int(os.environ["RANK"]) == failing_rank:
        if kind == "ours":
            raise BadInput("batch size 7 is not 8; drop the last batch")
        raise ValueError("no such thing\nsecond line")
    sleep_for_ever(Path(os.devnull))


def fail_after_a_peer_noticed() -> None:
    """Rank 1 tells at once that its peer has gone; rank 0 says later what was wrong with it."""
    if int(os.environ["RANK"]) == 1:
        raise PeerFailed("rank 1 lost another rank; see what that one says")
    time.sleep(0.3)
    raise RunFailed("rank 0 has no more memory")


def fail_without_a_folder(folder: Path) -> None:
    """Fail when the folder for tracebacks is gone."""
    shutil.rmtree(folder)
    raise ValueError("no such thing\nsecond line")


def fail_without_the_store() -> None:
    """Fail where the store cannot be reached, as over a link that is cut."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        os.environ["MASTER_PORT"] = str(closed.getsockname()[1])
    raise Stalled("rank 0 waited 60 s for an answer")


def limits_of_connections_to_the_store() -> list[int]:
    """How long the kernel lets each connection of this rank to the store be silent, in ms."""
    world = join_world("cpu", 60.0)
    limits: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.getpeername()[1:2] == (int(os.environ["MASTER_PORT"]),):
                    level, option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
                    limits.append(found.getsockopt(level, option))
    world.leave()
    return limits


def sleep_for_ever(pid_file: Path) -> None:
    with pid_file.open("a") as file:
        file.write(f"{os.environ['RANK']} {os.getpid()}\n")
    time.sleep(600)


def kill_the_server(pid_file: Path) -> None:
    """Rank 1 kills the server that has forked the workers; all go on."""
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    sleep_for_ever(pid_file)


def collective_after_a_death(victim: int) -> None:
    distributed.init_process_group("gloo")
    distributed.all_reduce(torch.zeros(1))
    if distributed.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.all_reduce(torch.zeros(1))


KEPT: list[object] = []
"""Lives until Python ends, as the variables of a script do."""


class SlowToFree:
    """Takes a second to be freed, asks for Python's lock all that time; says when that begins."""

    def __init__(self, begun: threading.Event) -> None:
        self._begun = begun

    def __del__(self) -> None:
        self._begun.set()
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            time.sleep(0.001)


def end_while_gloo_frees() -> None:
    """Leave and end while rank 0's thread of Gloo frees a tensor that nothing else refers to."""
    KEPT.append(world := join_world("cpu", 60.0))
    store, tensor = default_store(), torch.zeros(1)
    if world.rank:
        store.get("rank 0 has begun")
        distributed.all_reduce(tensor, group=world.control)
    else:
        freeing = threading.Event()
        tensor.slow = SlowToFree(freeing)  # pyright: ignore[reportAttributeAccessIssue]
        distributed.all_reduce(tensor, group=world.control, async_op=True)
        del tensor
        store.set("rank 0 has begun", "")
        assert freeing.wait(30.0)
    world.leave()
    sys.exit()  # not os._exit, with which Python would not be ended


def listening_addresses() -> tuple[list[str], list[str]]:
    """Where the launcher's store and this rank listen, as the kernel writes addresses."""
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    world = join_world("cpu", 60.0)
    port = f"{int(os.environ['MASTER_PORT']):04X}"
    tables = (Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [(*row[1].split(":"), row[9]) for row in rows if row[3] == "0A"]
    handles = {os.readlink(handle) for handle in Path("/proc/self/fd").iterdir() if handle.exists()}
    store = [address for address, own, _ in listening if own == port]
    ours = [address for address, _, inode in listening if f"socket:[{inode}]" in handles]
    world.barrier()
    return store, ours


def gather_what_cannot_be_sent() -> list[str]:
    """A rank sends an object of a class that messages do not hold, and then its number."""
    world = join_world("cpu", 60.0)
    texts: list[str] = []
    for sender, exchange in ((1, world.all_gather), (0, world.broadcast)):
        try:
            exchange(threading.Event() if world.rank == sender else None)
            texts.append("no error")
        except BadInput as refusal:
            texts.append(f"BadInput: {refusal}")
    return [*texts, str(world.all_gather(world.rank))]


def stop_once(continues: bool) -> int:
    """Rank 1 is stopped by a signal; a child continues it half a second later, if asked to."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        if continues and os.fork() == 0:
            time.sleep(0.5)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    return rank
