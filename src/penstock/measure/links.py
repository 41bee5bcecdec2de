"""Measure latency and bandwidth of the links of a process group by sending messages."""

import json
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from itertools import combinations, permutations, zip_longest
from statistics import median
from typing import NamedTuple

import torch
from torch import distributed

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.cluster.toml_file import local_cluster
from penstock.device import device_kind, free_memory, identity_of, is_gpu, memory_bytes_of
from penstock.errors import BadInput
from penstock.machine import usable_cores
from penstock.measure.affine_fit import fit_affine
from penstock.measure.clock import Stopwatch, work_s

SIZES_BYTES = (1_024, 16_384, 131_072, 1_048_576, 4_194_304)
GPU_SIZES_BYTES = (4_096, *(1_048_576 * 4**step for step in range(5)))
"""Bytes between GPUs: 4 MiB may be mostly latency, and most of these show the bandwidth."""

SUMMED, SUMS = 256, 50
"""The numbers that are summed over all ranks to measure what a sum takes, and the repeats."""

ROUND_TRIPS = 10
"""Measured round trips; one more before them is a warm-up, which also makes the connection."""

MEMBER_BYTES = 1024
"""The bytes that describe a rank to the others."""

TAKE_TURNS = 1.6
"""Messages of both directions take turns if one takes this many times as long beside another."""

CROWDED = 1.25
"""Pairs of GPUs share a way if a message takes this many times as long beside those of others."""

SEEN_IN_LARGEST = 0.1
"""The fitted bandwidth is used if it explains this fraction of the largest message's seconds."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link on which a message of ``n`` bytes takes ``latency_s + n / bytes_per_s`` seconds.

    Its ends compute for ``message_s + n / message_bytes_per_s`` seconds each meanwhile: the mean of
    sending and receiving. On a GPU that is 0. A large message takes ``both_ways`` times as long
    while another one goes the opposite way, and ``crowded`` times while other pairs of these hosts
    send (0: not measured).
    """

    latency_s: float
    bytes_per_s: float
    message_s: float = 0.0
    message_bytes_per_s: float = 0.0
    both_ways: float = 1.0
    crowded: float = 0.0

    def seconds(self, size_bytes: int) -> float:
        """Seconds of a message of that size."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Member:
    """The report of a rank about itself.

    ``node`` is the number that torchrun or srun has given its host; empty without them. It
    distinguishes hosts with the same name, and ``identity`` devices of a host. ``by_nccl``: its
    messages go by NCCL, which carries them in order. ``sum_step_s`` is what it has measured of an
    all-reduce (both: `penstock.cluster.cluster.Cluster`).
    """

    host: str
    kind: str
    memory_bytes: float
    cores: int
    node: str = ""
    identity: str = "cpu"
    by_nccl: bool = False
    sum_step_s: float = 0.0


class Carrier(NamedTuple):
    """The carrier of measured messages: a process group (None: the default one), and from where."""

    memory: torch.device
    group: distributed.ProcessGroup | None = None


def measure_links(device: torch.device | str = "cpu") -> Cluster:
    """The cluster of the running process group: its hosts, devices, and measured links.

    Every rank must call this, and all get the same result. The numbers of a host are the medians
    over its pairs; those of its port are the medians over its pairs with other hosts.
    """
    return cluster_of(*measure_pairs(device))


def measure_pairs(
    device: torch.device | str = "cpu", carrier: Carrier | None = None
) -> tuple[list[Member], dict[tuple[int, int], MeasuredLink]]:
    """The ranks of the running process group, and the links between pairs of them.

    Every rank must call this, and all get the same result. The two ranks of a pair send messages of
    several sizes back and forth. `disjoint_rounds` says which pairs do so at the same time. Without
    a ``carrier`` the default group carries them from the memory of ``device``.
    """
    if not distributed.is_initialized():
        raise BadInput(
            "measuring links needs a process group; "
            "call torch.distributed.init_process_group first, under torchrun"
        )
    own_device = torch.device(device)
    carrier = carrier or Carrier(own_device)
    where, group = carrier
    by_nccl = distributed.get_backend(group) == "nccl"
    step_s = measured_sum_step(carrier)
    member = replace(this_member(own_device), by_nccl=by_nccl, sum_step_s=step_s)
    members = gathered_members(member, carrier)
    rounds = disjoint_rounds(ranks_of_hosts(members))
    pairs = [pair for together in rounds for pair in together]
    # The lower rank of a pair measures it, all others add zeros.
    figures = torch.zeros(len(pairs), len(fields(MeasuredLink)), dtype=torch.float64, device=where)
    rank = distributed.get_rank()
    own: dict[tuple[int, int], MeasuredLink] = {}
    for together in rounds:
        distributed.barrier(group)
        for pair in together:
            if rank in pair and (link := measured_pair(*pair, carrier)):
                own[pair] = link
    for crowd in crowds_of(ranks_of_hosts(members)) if is_gpu(where) else ():
        distributed.barrier(group)
        for pair in crowd:
            if rank in pair:
                one_way_s = largest_one_way_s(*pair, carrier)
                if link := own.get(pair):
                    own[pair] = replace(link, crowded=one_way_s / link.seconds(GPU_SIZES_BYTES[-1]))
    for pair, link in own.items():
        figures[pairs.index(pair)] = torch.tensor(astuple(link), dtype=torch.float64)
    if pairs:
        distributed.all_reduce(figures, group=group)
    links = (MeasuredLink(*row) for row in figures.tolist())
    return members, dict(zip(pairs, links, strict=True))


def disjoint_rounds(hosts: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Pairs of ranks by round, so that no two pairs of a round use the same link or port.

    ``hosts`` are the ranks of each host. Inside a host all pairs are measured, one in each round.
    Of two hosts each rank is measured with the one in the same place. Every round pairs each host
    with another one at most (the circle method for tournaments), so few rounds do for many hosts.

    >>> disjoint_rounds([[0, 1], [2, 3], [4, 5]])
    [[(0, 1), (2, 3), (4, 5)], [(2, 4)], [(3, 5)], [(0, 4)], [(1, 5)], [(0, 2)], [(1, 3)]]
    """
    inside = zip_longest(*(combinations(ranks, 2) for ranks in hosts))
    rounds = [[pair for pair in together if pair] for together in inside]
    places: list[int | None] = [*range(len(hosts)), *([None] if len(hosts) % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = [
            (hosts[a], hosts[b])
            for a, b in zip(places[:half], reversed(places[half:]), strict=True)
            if a is not None and b is not None
        ]
        across = zip_longest(*(zip(*ends, strict=False) for ends in met))
        rounds += [[(min(p), max(p)) for p in together if p] for together in across]
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def crowds_of(hosts: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Pairs of ranks that send at once: all neighbours inside hosts, then all between two hosts.

    >>> crowds_of([[0, 1, 2, 3], [4, 5, 6, 7]])
    [[(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]]
    """
    inside = [list(zip(ranks[::2], ranks[1::2], strict=False)) for ranks in hosts]
    between = [
        list(zip(*ends, strict=False)) for ends in zip(hosts[::2], hosts[1::2], strict=False)
    ]
    # A single pair is what has been measured already.
    crowds = (
        [pair for pairs in kind if len(pairs) > 1 for pair in pairs] for kind in (inside, between)
    )
    return [crowd for crowd in crowds if crowd]


def ranks_of_hosts(members: Sequence[Member]) -> list[list[int]]:
    """The ranks of each host."""
    hosts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, member in enumerate(members):
        hosts[member.host, member.node].append(rank)
    return list(hosts.values())


def gathered_members(own: Member, carrier: Carrier) -> list[Member]:
    """The members of all ranks, by rank; they are sent as JSON, padded with spaces."""
    text = json.dumps(asdict(own)).encode().ljust(MEMBER_BYTES)
    if len(text) > MEMBER_BYTES:
        raise BadInput(f"host name and device name '{own.kind}' are too long to be sent")
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(carrier.memory)
    rows = [torch.empty_like(sent) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, sent, group=carrier.group)
    return [Member(**json.loads(bytes(row.tolist()))) for row in rows]


def this_member(device: torch.device) -> Member:
    """This rank's host, device and memory."""
    host, node = socket.gethostname(), os.environ.get("GROUP_RANK", "")
    cores = 0 if is_gpu(device) else usable_cores()
    memory_bytes, identity = usable_bytes(device), identity_of(device)
    return Member(host, device_kind(device), memory_bytes, cores, node, identity)


def usable_bytes(device: torch.device) -> float:
    """The memory that plans may use: of a GPU what no other process holds."""
    if is_gpu(device):
        return min(memory_bytes_of(device), free_memory(device).bytes)
    return memory_bytes_of(device)


def measured_sum_step(carrier: Carrier) -> float:
    """Seconds of a step of an all-reduce of a few numbers, of which a ring has two for each rank
    but one; 0 for a rank alone.

    The mean, since whoever waits longest for a core delays the sum for all. GPUs are not held, as
    they would not begin together.
    """
    ranks = distributed.get_world_size()
    if ranks == 1:
        return 0.0
    numbers = torch.zeros(SUMMED, device=carrier.memory)
    seconds_of = work_s(carrier.memory, with_waits=True)

    def sums() -> None:
        for _ in range(SUMS):
            distributed.all_reduce(numbers, group=carrier.group)

    seconds_of(sums)
    return seconds_of(sums) / SUMS / (2 * (ranks - 1))


def measured_pair(lower: int, upper: int, carrier: Carrier) -> MeasuredLink | None:
    """The link as the lower rank of a pair measured it; None on the upper one."""
    device, group = carrier
    starts, on_cpu = distributed.get_rank() == lower, not is_gpu(device)
    peer = upper if starts else lower
    sizes = SIZES_BYTES if on_cpu else GPU_SIZES_BYTES
    largest, other = (torch.zeros(sizes[-1], dtype=torch.uint8, device=device) for _ in "ab")
    seconds_of = work_s(device, with_waits=True, ahead=True, launches=False)
    # Every round has all sizes, so that a temporary disturbance affects all of them equally.
    rounds = [
        [there_and_back_s(starts, peer, largest[:size], seconds_of, group) for size in sizes]
        for _ in range(ROUND_TRIPS + 1)
    ]
    exchanged = [exchanged_s(peer, largest, other, seconds_of, group) for _ in rounds][1:]
    if not starts:
        return None
    link = measured_link([[wall / 2 for wall, _ in together] for together in rounds[1:]], sizes)
    link = replace(link, both_ways=median(exchanged) / link.seconds(sizes[-1]))
    if not on_cpu:
        return link
    work = [median(own for _, own in same) / 2 for same in zip(*rounds[1:], strict=True)]
    fit = fit_affine(sizes, work)
    rate = 1 / fit.per_sample if fit.per_sample > 0 else 0.0
    return replace(link, message_s=fit.fixed, message_bytes_per_s=rate)


def largest_one_way_s(lower: int, upper: int, carrier: Carrier) -> float:
    """Seconds of the largest message between two GPUs, one way."""
    device, group = carrier
    starts = distributed.get_rank() == lower
    message = torch.zeros(GPU_SIZES_BYTES[-1], dtype=torch.uint8, device=device)
    seconds_of = work_s(device, with_waits=True, ahead=True, launches=False)
    trips = [
        there_and_back_s(starts, upper if starts else lower, message, seconds_of, group)
        for _ in range(ROUND_TRIPS + 1)
    ]
    return median(seconds for seconds, _ in trips[1:]) / 2


def exchanged_s(
    peer: int,
    message: torch.Tensor,
    other: torch.Tensor,
    seconds_of: Stopwatch,
    group: distributed.ProcessGroup | None,
) -> float:
    """Seconds until two messages, one in each direction, have arrived."""

    def exchange() -> None:
        # As one: NCCL would not begin the second before the first has ended.
        coming = distributed.P2POp(distributed.irecv, other, peer, group)
        going = distributed.P2POp(distributed.isend, message, peer, group)
        for work in distributed.batch_isend_irecv([coming, going]):
            work.wait()

    return seconds_of(exchange)


def there_and_back_s(
    starts: bool,
    peer: int,
    message: torch.Tensor,
    seconds_of: Stopwatch,
    group: distributed.ProcessGroup | None,
) -> tuple[float, float]:
    """Seconds of a message to a peer and back: those that pass, and those that this process works.

    The second ones count all its threads, and what the kernel does for it.
    """

    def round_trip() -> None:
        if starts:
            distributed.send(message, peer, group)
            distributed.recv(message, peer, group)
        else:
            distributed.recv(message, peer, group)
            distributed.send(message, peer, group)

    before_s = time.process_time()
    return seconds_of(round_trip), time.process_time() - before_s


def measured_link(
    rounds: Sequence[Sequence[float]], sizes: Sequence[int] = SIZES_BYTES
) -> MeasuredLink:
    """Latency and bandwidth from rounds of one-way seconds, one for each of ``sizes``.

    They are fitted to the median of every size. On a machine so busy that the largest message takes
    hardly longer than the smallest, they are fitted to the least seconds, since other programs only
    ever add time. If that fails too, the bandwidth is that of the largest message, which is too low
    rather than too high.
    """
    largest = sizes[-1]
    for typical in (median, min):
        fit = fit_affine(sizes, [typical(seconds) for seconds in zip(*rounds, strict=True)])
        if fit.per_sample * largest >= SEEN_IN_LARGEST * fit.at(largest):
            return MeasuredLink(fit.fixed, 1 / fit.per_sample)
    least_s = [min(seconds) for seconds in zip(*rounds, strict=True)]
    return MeasuredLink(min(least_s), largest / least_s[-1])


def cluster_alone(device: torch.device) -> Cluster:
    """A rank without others, which computes on ``device``."""
    if is_gpu(device):
        own = Device(device_kind(device), usable_bytes(device))
        return Cluster("local-1", (Host("localhost", (own,), 0.0),))
    return local_cluster(1, usable_cores(), memory_bytes_of(device))


def cluster_of(members: list[Member], measured: dict[tuple[int, int], MeasuredLink]) -> Cluster:
    """Hosts of consecutive ranks, with the medians of their links and ports."""
    ranks: dict[str, list[int]] = defaultdict(list)
    names = Counter(name for name, _ in {(member.host, member.node) for member in members})
    for rank, member in enumerate(members):
        node = f"-{member.node}" if names[member.host] > 1 else ""
        ranks[f"{member.host}{node}"].append(rank)
    if [rank for group in ranks.values() for rank in group] != list(range(len(members))):
        raise BadInput(
            f"the ranks of hosts {', '.join(ranks)} are interleaved, but a host's ranks must be "
            f"consecutive; start them with torchrun, host by host"
        )
    hosts: list[Host] = []
    for name, group in ranks.items():
        inside = [f for (i, j), f in measured.items() if i in group and j in group]
        port = [f for (i, j), f in measured.items() if (i in group) != (j in group)]
        sharing = Counter(members[rank].identity for rank in group)
        cores = max(members[rank].cores for rank in group)  # a rank may have a quota of its own
        slowed = median([f.crowded for f in inside if f.crowded] or [1.0])
        beside = slowed if slowed >= CROWDED else 1.0  # while all neighbours send
        # Between ranks that share a CPU or a GPU messages go through memory.
        both_ways = port or (inside if max(sharing.values()) == 1 else [])
        hosts.append(
            Host(
                name=name,
                devices=tuple(
                    device_of(members[rank], sharing[members[rank].identity], port)
                    for rank in group
                ),
                link_bytes_per_s=median(f.bytes_per_s for f in inside) / beside if inside else 0.0,
                link_latency_s=median(f.latency_s for f in inside) if inside else 0.0,
                port_bytes_per_s=median(f.bytes_per_s for f in port) if port else 0.0,
                port_latency_s=median(f.latency_s for f in port) if port else 0.0,
                full_speed_devices=cores if 0 < cores < len(group) else 0,
                half_duplex=median([f.both_ways for f in both_ways] or [1.0]) >= TAKE_TURNS,
            )
        )
    in_order = all(member.by_nccl for member in members)
    step_s = median(member.sum_step_s for member in members)
    cluster = Cluster("measured", tuple(hosts), messages_in_order=in_order, sum_step_s=step_s)
    between = {pair: f for pair, f in measured.items() if cluster.uses_port(*pair)}
    crowded = [f.crowded for f in between.values() if f.crowded]
    if crowded and median(crowded) < CROWDED:
        return with_own_ports(cluster)
    return cluster


def with_own_ports(cluster: Cluster) -> Cluster:
    """The cluster with a port for each device, of its host's rate: explicit links use no other."""
    ways = permutations(range(len(cluster.devices)), 2)
    links = (
        Link(*way, cluster.bandwidth(*way), cluster.latency(*way))
        for way in ways
        if cluster.uses_port(*way)
    )
    return replace(cluster, links=tuple(links))


def device_of(member: Member, sharing: int, port: Sequence[MeasuredLink]) -> Device:
    """A rank's device; ranks that compute on the same one share its memory equally.

    Where CPUs have a ``port``, all messages go through sockets, which take their time. Ranks of a
    single host pass messages through shared memory, in hardly any.
    """
    own = Device(member.kind, member.memory_bytes / sharing)
    if member.kind != "cpu" or not port:
        return own
    return replace(
        own,
        message_s=median(link.message_s for link in port),
        message_bytes_per_s=median(link.message_bytes_per_s for link in port),
    )
