"""DAPPLE's placements of a stage: how many free devices of each server it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from penstock.cluster.cluster import Cluster

Counts: TypeAlias = tuple[int, ...]
"""Devices of each server."""

Policy: TypeAlias = Callable[[Counts, Counts, int], Counts | None]
"""From free and occupied devices of each server to those that a stage takes, or None."""

EVERY_COUNT = 16
"""Up to this number of devices all numbers of replicas are tried."""

MOST_OCCUPANCIES = 192
"""Number of sets of occupied devices explored on larger clusters, those of few stages first."""


def fresh_first(free: Counts, occupied: Counts, count: int) -> Counts | None:
    """Fill servers without an occupied device, in turn: the all-reduce stays inside a server.

    >>> fresh_first(free=(5, 8), occupied=(3, 0), count=4)
    (0, 4)
    >>> fresh_first(free=(5, 8), occupied=(3, 0), count=9) is None
    True
    """
    return fill_up([0 if used else left for left, used in zip(free, occupied, strict=True)], count)


def append_first(free: Counts, occupied: Counts, count: int) -> Counts | None:
    """Fill servers that are partly occupied, in turn.

    >>> append_first(free=(5, 8), occupied=(3, 0), count=4)
    (4, 0)
    >>> append_first(free=(5, 8), occupied=(3, 0), count=6) is None
    True
    """
    return fill_up([left if used else 0 for left, used in zip(free, occupied, strict=True)], count)


def scatter_first(free: Counts, occupied: Counts, count: int) -> Counts | None:
    """Take devices evenly from the servers in use, or from all where none is in use yet.

    So large activations are spread over the ports that the stages before it use.

    >>> scatter_first(free=(5, 5, 8), occupied=(3, 3, 0), count=4)
    (2, 2, 0)
    >>> scatter_first(free=(8, 8), occupied=(0, 0), count=5)
    (3, 2)
    >>> scatter_first(free=(5, 8), occupied=(3, 0), count=6) is None
    True
    """
    fresh = not any(occupied)
    return evenly([n if u or fresh else 0 for n, u in zip(free, occupied, strict=True)], count)


def scatter_over_all(free: Counts, occupied: Counts, count: int) -> Counts | None:
    """Take devices evenly from all servers: Scatter First as the authors' released code has it.

    >>> scatter_over_all(free=(5, 8), occupied=(3, 0), count=5)
    (3, 2)
    >>> scatter_over_all(free=(1, 8), occupied=(7, 0), count=5)
    (1, 4)
    """
    return evenly(free, count)


def evenly(available: Sequence[int], count: int) -> Counts | None:
    """``count`` devices, from every server as many as from the others while it has any."""
    if count > sum(available):
        return None
    taken = [0] * len(available)
    while count:
        open_servers = [s for s in range(len(taken)) if taken[s] < available[s]]
        rounds = min(available[s] - taken[s] for s in open_servers)
        rounds = min(rounds, count // len(open_servers))
        for place, server in enumerate(open_servers):
            taken[server] += rounds if rounds else int(place < count)
        count -= rounds * len(open_servers) if rounds else min(count, len(open_servers))
    return tuple(taken)


def fill_up(available: Sequence[int], count: int) -> Counts | None:
    """``count`` devices from the first servers that have any; None where they are too few."""
    if count > sum(available):
        return None
    taken: list[int] = []
    for left in available:
        taken.append(min(left, count))
        count -= taken[-1]
    return tuple(taken)


POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first, scatter_over_all)


@dataclass(frozen=True, slots=True)
class Step:
    """A stage takes devices: a step from one set of occupied devices to another.

    ``taken`` counts the devices of each server, by the server numbers of the occupancy ``source``.
    ``servers[i]`` is the number in ``source`` of the server with number ``i`` in ``target``.
    """

    source: int
    target: int
    taken: Counts
    servers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Occupancies:
    """The sets of occupied devices that placements reach, and the steps between them.

    ``servers[i]`` are the devices of server ``i``, taken in that order. ``used[n][i]`` counts the
    occupied ones in occupancy ``n``. Equal servers are interchangeable: fuller ones come first.
    ``steps`` are sorted by source. The first occupancy is empty.
    """

    servers: tuple[tuple[int, ...], ...]
    used: tuple[Counts, ...]
    steps: tuple[Step, ...]


def occupancies(cluster: Cluster, least_speed: float = 0.0) -> Occupancies:
    """All occupancies that the policies reach on the devices of at least ``least_speed``.

    On up to 16 devices every number of replicas is tried. On more devices, a few numbers are tried
    and at most 192 occupancies, those of the fewest stages: DAPPLE finds that few stages are best.
    """
    servers = servers_of(cluster, least_speed)
    sizes = tuple(len(server) for server in servers)
    kinds = server_kinds(cluster, servers)
    most = MOST_OCCUPANCIES if sum(sizes) > EVERY_COUNT else 1 << 30
    found: list[Counts] = [(0,) * len(sizes)]
    numbers = {found[0]: 0}
    steps: list[Step] = []
    source = 0
    while source < len(found):
        used = found[source]
        for taken in placements(sizes, used):
            after = tuple(u + t for u, t in zip(used, taken, strict=True))
            order = fullest_first(after, kinds)
            after = tuple(after[server] for server in order)
            if after not in numbers and len(found) < most:
                numbers[after] = len(found)
                found.append(after)
            if after in numbers:
                steps.append(Step(source, numbers[after], taken, order))
        source += 1
    return Occupancies(servers, tuple(found), tuple(steps))


def servers_of(cluster: Cluster, least_speed: float) -> tuple[tuple[int, ...], ...]:
    """The devices of at least a speed, by host; hosts without one are left out."""
    of_host: list[list[int]] = [[] for _ in cluster.hosts]
    for device, host in enumerate(cluster.host_index):
        if cluster.devices[device].speed >= least_speed:
            of_host[host].append(device)
    return tuple(tuple(devices) for devices in of_host if devices)


def server_kinds(cluster: Cluster, servers: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The number of the first server equal to each server; all differ with special links."""
    if cluster.links:
        return tuple(range(len(servers)))
    first: dict[object, int] = {}
    kinds: list[int] = []
    for index, devices in enumerate(servers):
        host = cluster.hosts[cluster.host_index[devices[0]]]
        chosen = tuple(cluster.devices[device] for device in devices)
        kinds.append(first.setdefault((replace(host, name=""), chosen), index))
    return tuple(kinds)


def placements(sizes: Counts, used: Counts) -> list[Counts]:
    """The devices that a stage may take, each choice once; at least one device is left over."""
    free = tuple(size - u for size, u in zip(sizes, used, strict=True))
    found: dict[Counts, None] = {}
    for count in replica_counts(sum(sizes), max(sizes), sum(free)):
        for policy in POLICIES:
            taken = policy(free, used, count)
            if taken is not None:
                found[taken] = None
    return list(found)


def replica_counts(devices: int, of_server: int, free: int) -> list[int]:
    """Numbers of replicas to try where ``free`` of all devices are left; at least one remains.

    >>> replica_counts(devices=4, of_server=4, free=4)
    [1, 2, 3]
    >>> replica_counts(devices=64, of_server=8, free=64)
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 56, 60, 62, 63]
    """
    if devices <= EVERY_COUNT:
        return list(range(1, free))
    steps = [n for power in range(devices.bit_length()) for n in (1 << power, 3 << power)]
    counts = {*steps, *(of_server * n for n in (1, 2, 4)), *(free - n for n in (1, 2, 4, 8))}
    return sorted(n for n in counts if 1 <= n < free)


def fullest_first(used: Counts, kinds: Counts) -> tuple[int, ...]:
    """The servers with those of one kind in order of their occupied devices, fullest first.

    >>> fullest_first((0, 3, 5), kinds=(0, 1, 0))
    (2, 1, 0)
    """
    order = list(range(len(used)))
    for kind in set(kinds):
        places = [server for server in order if kinds[server] == kind]
        by_use = sorted(places, key=lambda server: -used[server])
        for place, server in zip(places, by_use, strict=True):
            order[place] = server
    return tuple(order)
