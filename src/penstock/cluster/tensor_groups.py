"""A cluster whose devices are groups of another cluster's devices.

A tensor group is planned for as one larger device. What its ranks do together is in the costs of
the layers; here are its memory and its links.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, permutations

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.errors import BadInput

Groups = tuple[tuple[int, ...], ...]
"""The devices of a cluster in each group; together all devices, each in one group."""


def one_each(cluster: Cluster) -> Groups:
    """Every device as a group of its own."""
    return tuple((device,) for device in range(len(cluster.devices)))


def grouped_cluster(
    cluster: Cluster, groups: Groups, speed_up: Callable[[tuple[int, ...]], float] = lambda _: 1.0
) -> Cluster:
    """The cluster with each group as one device, in the order of ``groups``.

    A group has the speed of its slowest device times ``speed_up(group)``, and the memory of its
    smallest: what each of its ranks holds is in the profile. Every rank of a group receives whole
    activations, from one rank of the sending group. So a port of a host carries them as often as
    the host's largest group has ranks. A rank that sends to several ranks of a larger group on its
    host takes as many times as long.
    """
    hosts: list[Host] = []
    at = 0
    for index, host in enumerate(cluster.hosts):
        own = list(groups_of_host(cluster, groups[at:], index))
        at += len(own)
        largest = max((len(group) for group in own), default=1)
        hosts.append(
            replace(
                host,
                devices=tuple(merged(cluster, group, speed_up(group)) for group in own),
                port_bytes_per_s=host.port_bytes_per_s / largest,
                full_speed_devices=-(-host.full_speed_devices // largest),
            )
        )
    if at != len(groups) or sorted(d for g in groups for d in g) != list(
        range(len(cluster.devices))
    ):
        raise BadInput(
            f"tensor groups {[list(group) for group in groups]} do not have each device of cluster "
            f"'{cluster.name}' once, host by host; a group needs devices of one host"
        )
    name = cluster.name if groups == one_each(cluster) else f"{cluster.name}, in groups"
    links = tuple(links_between(cluster, groups))
    return replace(cluster, name=name, hosts=tuple(hosts), links=links)


def groups_of_host(
    cluster: Cluster, groups: Sequence[tuple[int, ...]], host: int
) -> Iterator[tuple[int, ...]]:
    """The first of ``groups``, as long as all their devices are on the host."""
    for group in groups:
        if not group or any(not 0 <= device < len(cluster.devices) for device in group):
            return
        if {cluster.host_index[device] for device in group} != {host}:
            return
        yield group


def merged(cluster: Cluster, group: tuple[int, ...], speed_up: float) -> Device:
    """A group as a device."""
    devices = [cluster.devices[device] for device in group]
    if len(devices) == 1:
        return devices[0]
    kinds = sorted({device.kind for device in devices})
    if len(kinds) > 1:
        raise BadInput(
            f"tensor group {list(group)} has devices of the kinds {', '.join(kinds)}; its ranks "
            f"wait for one another, so give it devices of one kind"
        )
    slowest = min(device.speed for device in devices)
    return replace(
        devices[0],
        kind=f"{len(group)} x {kinds[0]}",
        speed=slowest * speed_up,
        memory_bytes=min(device.memory_bytes for device in devices),
        peak_flops_per_s=len(group) * min(device.peak_flops_per_s for device in devices),
    )


def links_between(cluster: Cluster, groups: Groups) -> Iterator[Link]:
    """The links between groups whose devices have links of their own, or that differ in size."""
    group_of = {device: number for number, group in enumerate(groups) for device in group}
    linked = {(group_of[a], group_of[b]) for a, b in cluster.special_links}
    of_host = groupby(range(len(groups)), lambda number: cluster.host_index[groups[number][0]])
    on_hosts = {pair for _, own in of_host for pair in permutations(own, 2)}
    for source, target in sorted(linked | on_hosts):
        pairs = [(a, b) for a in groups[source] for b in groups[target]]
        copies = -(-len(groups[target]) // len(groups[source]))
        own_link = any(pair in cluster.special_links for pair in pairs)
        if source != target and (own_link or copies > 1):
            rate = min(cluster.bandwidth(a, b) for a, b in pairs)
            delay_s = max(cluster.latency(a, b) for a, b in pairs)
            yield Link(source, target, rate / copies, delay_s)
