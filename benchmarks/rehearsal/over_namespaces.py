"""A rehearsal whose hosts are network namespaces: the kernel carries what goes between them."""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from host_networks import PORT, HostNetwork, joined_hosts

from penstock.rehearse.emulated_links import LinkTransfer, Started
from penstock.rehearse.emulation import Emulation
from penstock.rehearse.link_server import LinkClient, LinkServer, serve_links
from penstock.rehearse.rehearsal import Rehearsal
from penstock.rehearse.rehearsing_rank import RankRecord, rehearse_with
from penstock.runtime.processes.launch import launch_workers
from penstock.simulate.simulation import simulate_plan

LIMIT_S = 120.0


class KernelLinks(LinkServer):
    """The emulated links, on which what goes from host to host takes no time."""

    def __init__(self, hosts: Sequence[int]) -> None:
        super().__init__()
        self.hosts = hosts

    def offer(self, transfer: LinkTransfer, ready_s: float) -> None:
        """See `LinkServer`; the rank that takes the transfer knows when it came."""
        ends = transfer.members or (transfer.source, transfer.target)
        if len({self.hosts[end] for end in ends}) > 1:
            transfer = transfer._replace(seconds=0.0, parts=())
        super().offer(transfer, ready_s)


class ArrivalClient(LinkClient):
    """A rank's connection that notes when messages and sums were here, before they are held."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arrivals: defaultdict[str, list[float]] = defaultdict(list)

    def wait_for(self, key: str) -> None:
        """See `LinkClient`."""
        self.arrivals[key].append(time.perf_counter())
        super().wait_for(key)


class HostRecord(NamedTuple):
    """The actions of a rank, and the times at which messages and sums were here."""

    rank: RankRecord
    arrivals: dict[str, list[float]]


def rehearse_on_host(
    emulation: Emulation, server: str, hosts: Sequence[HostNetwork], limit_s: float
) -> HostRecord:
    """The program of each process: the rehearsal, on the network of its host."""
    number = int(os.environ["RANK"])
    # The server's name is known outside of the host's network only.
    client = ArrivalClient(server, number, limit_s)
    hosts[emulation.cluster.host_index[number]].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = PORT
    record = rehearse_with(client, emulation, limit_s)
    return HostRecord(record, dict(client.arrivals))


def rehearse_over_namespaces(emulation: Emulation) -> Rehearsal:
    """Carry out a plan of several hosts, whose tensors cross the kernel's links.

    The ports have the cluster's rates, as many times lower as tensors take longer.
    """
    cluster = emulation.cluster
    emulation = replace(emulation, transport="process-groups")
    prediction = simulate_plan(emulation.plan, emulation.profile, cluster)
    used = cluster.hosts[: cluster.host_index[emulation.ranks - 1] + 1]
    rates = [h.port_bytes_per_s * emulation.byte_scale / emulation.time_scale for h in used]
    server = KernelLinks(cluster.host_index)
    with serve_links(server) as name, joined_hosts([h.name for h in used], rates) as hosts:
        begun_s = time.perf_counter()
        records = launch_workers(
            rehearse_on_host, (emulation, name, hosts, LIMIT_S), workers=emulation.ranks, threads=1
        )
    ranks = tuple(record.rank for record in records)
    start_s = max(rank.ready_s for rank in ranks) - begun_s
    return Rehearsal(
        emulation, prediction, ranks, tuple(with_real_ends(server.begun, records)), start_s
    )


def with_real_ends(begun: Sequence[Started], records: Sequence[HostRecord]) -> Iterator[Started]:
    """The transfers; those that the kernel carried end when they had come.

    That is when a rank that waited for one went on, so it may be late.
    """
    earlier = Counter[object]()
    for started in begun:
        transfer = started.transfer
        what = transfer.key, transfer.target
        number = earlier[what]
        earlier[what] += 1
        if transfer.parts:
            yield started
        else:
            ends = [records[rank].arrivals[transfer.key][number] for rank in transfer.receivers]
            yield replace(started, end_s=min(ends))
