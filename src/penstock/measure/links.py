"""Measures latency and bandwidth of the links of a process group by sending messages."""

import json
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import combinations
from statistics import median

import torch
from torch import distributed

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput
from penstock.measure.affine_fit import fit_affine
from penstock.measure.clock import wall_s

__all__ = ["MeasuredLink", "measure_links", "usable_cores", "usable_memory_bytes"]

SIZES_BYTES = (1_024, 16_384, 131_072, 1_048_576, 4_194_304)
ROUND_TRIPS = 10
"""Measured round trips; one more before them is a warm-up."""

MEMBER_BYTES = 1024
"""The bytes that describe a rank to the others."""

SEEN_IN_LARGEST = 0.1
"""The fitted bandwidth is used if it explains this fraction of the largest message's seconds."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link on which a message of ``n`` bytes takes ``latency_s + n / bytes_per_s`` seconds."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Member:
    """What a rank reports about itself."""

    host: str
    kind: str
    memory_bytes: float
    cores: int


def measure_links(device: torch.device | str = "cpu") -> Cluster:
    """The cluster of the running process group: its hosts, devices, and measured links.

    Every rank must call this, and all get the same result. Each pair of ranks in turn sends
    messages of several sizes back and forth while the others wait. The numbers of a host are the
    medians over its pairs; those of its port are the medians over its pairs with other hosts.

    Raises:
        BadInput: no process group was initialised.
    """
    if not distributed.is_initialized():
        raise BadInput(
            "measuring links needs a process group; "
            "call torch.distributed.init_process_group first, under torchrun"
        )
    where = torch.device(device)
    members = gathered_members(this_member(where), where)
    pairs = list(combinations(range(len(members)), 2))
    # The lower rank of a pair measures it, all others add zeros.
    figures = torch.zeros(len(pairs), 2, dtype=torch.float64, device=where)
    for place, pair in enumerate(pairs):
        if link := measured_pair(*pair, where):
            figures[place] = torch.tensor(astuple(link), dtype=torch.float64)
    if pairs:
        distributed.all_reduce(figures)
    links = (MeasuredLink(*row) for row in figures.tolist())
    return cluster_of(members, dict(zip(pairs, links, strict=True)))


def gathered_members(own: Member, device: torch.device) -> list[Member]:
    """The members of all ranks, by rank; they are sent as JSON, padded with spaces."""
    text = json.dumps(asdict(own)).encode().ljust(MEMBER_BYTES)
    if len(text) > MEMBER_BYTES:
        raise BadInput(f"host name and device name '{own.kind}' are too long to be sent")
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(sent) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, sent)
    return [Member(**json.loads(bytes(row.tolist()))) for row in rows]


def this_member(device: torch.device) -> Member:
    """This rank's host, device and memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Member(socket.gethostname(), properties.name, properties.total_memory, 0)
    return Member(socket.gethostname(), "cpu", usable_memory_bytes(), usable_cores())


def measured_pair(lower: int, upper: int, device: torch.device) -> MeasuredLink | None:
    """What the lower rank of a pair measured; None on all other ranks."""
    rank = distributed.get_rank()
    distributed.barrier()
    if rank not in (lower, upper):
        return None
    messages = [torch.zeros(size, dtype=torch.uint8, device=device) for size in SIZES_BYTES]
    peer = lower + upper - rank
    # Every round has all sizes, so that a temporary disturbance affects all of them alike.
    rounds = [
        [there_and_back_s(rank == lower, peer, message) / 2 for message in messages]
        for _ in range(ROUND_TRIPS + 1)
    ]
    return measured_link(rounds[1:]) if rank == lower else None


def there_and_back_s(starts: bool, peer: int, message: torch.Tensor) -> float:
    """Seconds of a message to a peer and back."""

    def round_trip() -> None:
        if starts:
            distributed.send(message, peer)
            distributed.recv(message, peer)
        else:
            distributed.recv(message, peer)
            distributed.send(message, peer)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)

    return wall_s(round_trip)


def measured_link(rounds: Sequence[Sequence[float]]) -> MeasuredLink:
    """Latency and bandwidth from rounds of one-way seconds, one for each of `SIZES_BYTES`.

    They are fitted to the median of every size. On a machine so busy that the largest message takes
    hardly longer than the smallest, they are fitted to the least seconds, since other programs only
    ever add time. If that fails too, the bandwidth is that of the largest message, which is too low
    rather than too high.
    """
    largest = SIZES_BYTES[-1]
    for typical in (median, min):
        fit = fit_affine(SIZES_BYTES, [typical(seconds) for seconds in zip(*rounds, strict=True)])
        if fit.per_sample * largest >= SEEN_IN_LARGEST * fit.at(largest):
            return MeasuredLink(fit.fixed, 1 / fit.per_sample)
    least_s = [min(seconds) for seconds in zip(*rounds, strict=True)]
    return MeasuredLink(min(least_s), largest / least_s[-1])


def cluster_of(members: list[Member], measured: dict[tuple[int, int], MeasuredLink]) -> Cluster:
    """Hosts of consecutive ranks, with the medians of their links and ports."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, member in enumerate(members):
        ranks[member.host].append(rank)
    if [rank for group in ranks.values() for rank in group] != list(range(len(members))):
        raise BadInput(
            f"the ranks of hosts {', '.join(ranks)} are interleaved, but a host's ranks must be "
            f"consecutive; start them with torchrun, host by host"
        )
    hosts: list[Host] = []
    for name, group in ranks.items():
        inside = [f for (i, j), f in measured.items() if i in group and j in group]
        port = [f for (i, j), f in measured.items() if (i in group) != (j in group)]
        hosts.append(
            Host(
                name=name,
                devices=tuple(device_of(members[rank], len(group)) for rank in group),
                link_bytes_per_s=median(f.bytes_per_s for f in inside) if inside else 0.0,
                link_latency_s=median(f.latency_s for f in inside) if inside else 0.0,
                port_bytes_per_s=median(f.bytes_per_s for f in port) if port else 0.0,
                port_latency_s=median(f.latency_s for f in port) if port else 0.0,
                full_speed_devices=cores_if_too_few(members[group[0]].cores, len(group)),
            )
        )
    return Cluster("measured", tuple(hosts))


def device_of(member: Member, sharing: int) -> Device:
    """A rank's device; CPU workers of one host share its memory equally."""
    memory = member.memory_bytes / sharing if member.kind == "cpu" else member.memory_bytes
    return Device(member.kind, memory)


def cores_if_too_few(cores: int, workers: int) -> int:
    """How many workers compute at full speed; 0 means all of them."""
    return cores if 0 < cores < workers else 0


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def usable_memory_bytes() -> float:
    """The physical memory of this machine."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
