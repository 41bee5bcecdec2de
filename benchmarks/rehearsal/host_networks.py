"""Hosts as network namespaces of Linux, joined by a switch whose links the kernel slows down.

Each host has a namespace with one network port, which is an end of a `veth` pair. The other end
belongs to the switch, a namespace with a bridge. A token-bucket filter at each end limits the rate:
at the host for what it sends, at the switch for what it receives. The namespaces have no names.
Each lives as long as a process in it, and that one is killed when its maker ends. So nothing is
left behind, even after SIGKILL, and two runs do not meet.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import BadInput, RunFailed

PORT = "port"
"""The name of a host's network interface, for `GLOO_SOCKET_IFNAME`."""

TOOLS = ("ip", "nsenter", "setpriv", "tc", "unshare")
"""Programs that must be installed: Debian's packages iproute2 and util-linux."""

NEW_NETWORK = 0x40000000
"""The flag of a network namespace for ``setns``."""

FRAME_BYTES = 9_000
"""The largest packet. Larger ones would leave in bursts, smaller ones cost much computing."""

HEADER_BYTES = 66
"""Ethernet, IP and TCP with time stamps: what the filter counts beside the data of a packet."""

BUCKET_BYTES = 20_000
"""Bytes that may be sent at once after a pause: few, so that short messages take their time."""

QUEUE_BYTES = 64 << 20
"""The queue at the switch. Nothing may be dropped: the sender would notice late."""

SLOWEST_BYTES_PER_S = 1_000.0
STARTS_WITHIN_S = 10.0


@dataclass(frozen=True)
class HostNetwork:
    """The network of one host: its address, and the process that keeps it."""

    name: str
    address: str
    process: int

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """The words before a command that make it run on this host."""
        return ("nsenter", f"--net=/proc/{self.process}/ns/net", "--")

    @property
    def host_prefix(self) -> tuple[str, ...]:
        """The same, with a host's name and process numbers of its own: no memory is shared.

        All that it starts is killed when it ends.
        """
        apart = ("unshare", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child")
        named = ("sh", "-c", 'hostname "$0" && exec "$@"', self.name)
        return (*self.command_prefix, *apart, *named)

    def enter(self) -> None:
        """From now on, sockets of the calling thread and of its children belong to this host.

        Raises:
            RunFailed: the namespace has gone, or this process lacks the right.
        """
        library = ctypes.CDLL(None, use_errno=True)
        try:
            with Path(f"/proc/{self.process}/ns/net").open("rb") as namespace:
                failed = library.setns(namespace.fileno(), NEW_NETWORK)
                number = ctypes.get_errno()
        except OSError as cause:
            failed, number = -1, cause.errno or 0
        if failed:
            raise RunFailed(
                f"the network of host '{self.name}' cannot be entered ({os.strerror(number)})"
            )


def ready_network() -> None:
    """Raise unless this process can make network namespaces.

    Raises:
        BadInput: no Linux, a tool that is missing, or no right.
    """
    if sys.platform != "linux":
        raise BadInput(
            f"network namespaces exist on Linux only, and this is {sys.platform}; run it there"
        )
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise BadInput(
            f"network namespaces need {', '.join(missing)}; install iproute2 and util-linux"
        )
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "name", "left", "type", "veth"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        lines = tried.stderr.strip().splitlines() or ["no reason given"]
        raise BadInput(
            f"this process may not make network namespaces ({lines[0][:80]}); run it as root"
        )


@contextmanager
def joined_hosts(
    names: Sequence[str], bytes_per_s: Sequence[float]
) -> Iterator[tuple[HostNetwork, ...]]:
    """Keep in the block a network for each name, joined to the others at its rate each way.

    The rates are of the data within TCP, headers aside.

    Raises:
        BadInput: namespaces cannot be made here, or a rate is too low for the filter.
        RunFailed: the kernel refuses a part.
    """
    ready_network()
    for name, rate in zip(names, bytes_per_s, strict=True):
        if not rate >= SLOWEST_BYTES_PER_S:
            raise BadInput(
                f"the port of host '{name}' would carry {rate:.3g} bytes a second, and at least "
                f"{SLOWEST_BYTES_PER_S:.0f} are possible; use a larger byte scale, or a smaller "
                f"time scale"
            )
    with ExitStack() as stack:
        switch = HostNetwork("switch", "", stack.enter_context(kept_namespace()))
        hosts = tuple(
            HostNetwork(name, address_of(number), stack.enter_context(kept_namespace()))
            for number, name in enumerate(names)
        )
        run_in(switch, ["ip link add name bridge type bridge", "ip link set bridge up"])
        for number, (host, rate) in enumerate(zip(hosts, bytes_per_s, strict=True)):
            join(host, switch, f"host{number}", rate)
        yield hosts


def address_of(number: int) -> str:
    """The address of host ``number``. No packet leaves its namespaces, so any private one does."""
    return f"10.77.{number // 200}.{number % 200 + 1}"


def join(host: HostNetwork, switch: HostNetwork, end: str, bytes_per_s: float) -> None:
    """Join a host to the switch, where its end of the pair is called ``end``."""
    bits_per_s = 8 * bytes_per_s * FRAME_BYTES / (FRAME_BYTES - HEADER_BYTES)
    slow = f"tbf rate {bits_per_s:.0f}bit burst {BUCKET_BYTES} limit {QUEUE_BYTES}"
    size = f"mtu {FRAME_BYTES}"
    here = [
        "ip link set lo up",
        f"ip link add name {PORT} {size} type veth peer name {end} {size} netns {switch.process}",
        f"ip address add {host.address}/16 dev {PORT}",
        f"ip link set {PORT} up",
        f"tc qdisc add dev {PORT} root {slow}",
    ]
    run_in(host, here)
    there = [f"ip link set {end} master bridge", f"ip link set {end} up"]
    run_in(switch, [*there, f"tc qdisc add dev {end} root {slow}"])


def run_in(host: HostNetwork, commands: Sequence[str]) -> None:
    """Run commands in a namespace, one after the other.

    Raises:
        RunFailed: one has failed.
    """
    script = " && ".join(commands)
    done = subprocess.run(
        [*host.command_prefix, "sh", "-c", script], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise RunFailed(f"the network of host '{host.name}' cannot be made: {lines[0][:120]}")


@contextmanager
def kept_namespace() -> Iterator[int]:
    """Keep a network namespace in the block, by a process whose number is given."""
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_namespace(holder)
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


def wait_for_namespace(holder: "subprocess.Popen[bytes]") -> None:
    """Wait until a process has left the network namespace of this one."""
    own, deadline_s = os.readlink("/proc/self/ns/net"), time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline_s and holder.poll() is None:
        if os.readlink(f"/proc/{holder.pid}/ns/net") != own:
            return
        time.sleep(0.002)
    raise RunFailed("a process for a network namespace did not start; see 'unshare --net true'")
