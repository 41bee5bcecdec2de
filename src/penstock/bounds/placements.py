"""What stages get out of links: on the sets of devices that exist, or on any at best."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

import numpy as np

from penstock.bounds.links import LinkLimits, links_to_others, most_links_at_once
from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import Way, all_reduce_ways
from penstock.plan.run_tables import Floats

__all__ = ["MOST_TRIED", "Placement", "Placements", "best_placements", "placements_by_class"]

MOST_TRIED = 10
"""Of clusters up to so many devices all sets are looked at; each has its own links."""

Placements = dict[tuple[int, ...], tuple["Placement", ...]]
"""By how many devices of each class are taken."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second, at most: of all replicas together, and of one over its best link.

    ``second``: of one over its second best link, for a single device.
    """

    all: float
    best: float
    second: float


@dataclass(frozen=True)
class Placement:
    """Where a stage is: the all-reduces it has, on one host or several, and what passes its links.

    Neither ``inside`` nor ``across`` where that makes no difference.
    """

    ways: tuple[Way, ...]
    inside: bool
    across: bool
    receive: Rates
    send: Rates

    def is_no_worse(self, other: "Placement") -> bool:
        """Whether nothing that this placement lets pass is slower than in the other one."""
        return (
            (self.inside, self.across) == (other.inside, other.across)
            and all(
                one >= two
                for one, two in zip(
                    astuple(self.receive) + astuple(self.send),
                    astuple(other.receive) + astuple(other.send),
                    strict=True,
                )
            )
            and all(
                any(
                    way.latency_s <= slow.latency_s and way.s_per_byte <= slow.s_per_byte
                    for way in self.ways
                )
                for slow in other.ways
            )
        )


def best_placements(limits: LinkLimits, fewest: int, most: int) -> Iterator[Placement]:
    """One placement of each sort that differs, with the best links that any devices have."""
    most = min(most, len(limits.receive_rates) - 1)
    receive = Rates(limits.receive_rates[most], limits.receive_rates[1], limits.second_rate)
    send = Rates(limits.send_rates[most], limits.send_rates[1], limits.second_send_rate)
    if not limits.host_devices:
        yield Placement(limits.ways(fewest), False, False, receive, send)
        return
    if fewest <= limits.host_devices:
        yield Placement(limits.ways_inside(fewest), True, False, receive, send)
    if fewest > 1:
        yield Placement(limits.ways_across(fewest), False, True, receive, send)


def placements_by_class(cluster: Cluster, classes: Sequence[int], hosts_differ: bool) -> Placements:
    """The placements of all sets of devices, without those that another is no worse than.

    ``classes``: of every device. ``hosts_differ``: whether it makes a difference to be on one host.
    """
    rates, _ = links_to_others(cluster)
    found: dict[tuple[int, ...], list[Placement]] = {}
    for count in range(1, len(classes) + 1):
        for devices in combinations(range(len(classes)), count):
            placement = placement_of(cluster, rates, devices, hosts_differ)
            taken = [0] * (max(classes) + 1)
            for device in devices:
                taken[classes[device]] += 1
            same = found.setdefault(tuple(taken), [])
            if not any(other.is_no_worse(placement) for other in same):
                same[:] = [other for other in same if not placement.is_no_worse(other)]
                same.append(placement)
    return {taken: tuple(placements) for taken, placements in found.items()}


def placement_of(
    cluster: Cluster, rates: Floats, devices: tuple[int, ...], hosts_differ: bool
) -> Placement:
    """The placement that ``devices`` are."""
    spread = len({cluster.host_index[device] for device in devices}) > 1
    return Placement(
        two_ways(all_reduce_ways(cluster, devices)),
        hosts_differ and not spread,
        hosts_differ and spread,
        rates_into(cluster, rates, devices),
        rates_into(cluster, rates.T, devices),
    )


def two_ways(ways: Sequence[Way]) -> tuple[Way, ...]:
    """At most two ways, of which for every size one is as fast as any of ``ways``."""
    best: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.latency_s, way.s_per_byte)):
        if not best or way.s_per_byte < best[-1].s_per_byte:
            best.append(way)
    return tuple(best[:1]) + tuple(Way(best[1].latency_s, best[-1].s_per_byte) for _ in best[1:2])


def rates_into(cluster: Cluster, rates: Floats, devices: tuple[int, ...]) -> Rates:
    """What ``devices`` can take in from all others; with transposed ``rates``, send to them.

    A host whose devices are all in the set shares its port among them.
    """
    others = [device for device in range(len(rates)) if device not in devices]
    if not others:
        return Rates(np.inf, np.inf, np.inf)
    from_others = rates[np.ix_(others, devices)]
    at_once = most_links_at_once(cluster)
    best = at_once * from_others.max(axis=0)
    total = 0.0
    first = 0
    for host in cluster.hosts:
        last = first + len(host.devices)
        inside = [place for place, device in enumerate(devices) if first <= device < last]
        passed = float(best[inside].sum())
        if len(inside) == last - first and not linked(cluster, inside, devices):
            passed = min(passed, float(host.port_bytes_per_s))
        total += passed
        first = last
    several = len(others) > 1 and at_once == 1
    second = float(np.sort(from_others[:, 0])[-2]) if several else np.inf
    return Rates(total, float(best.max()), second)


def linked(cluster: Cluster, inside: Sequence[int], devices: tuple[int, ...]) -> bool:
    """Whether an explicit link, which passes no port, ends at one of the devices."""
    return any(devices[place] in cluster.linked_devices for place in inside)
