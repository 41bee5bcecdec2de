"""Chooses among plans that are about as fast as the best one, as people would.

The criteria, in this order: fewer devices; sets of devices that are whole hosts, or neighbours on
one host; fewer stages; whole backwards rather than halves; a schedule by a rule rather than by a
search; less recompute; more memory left; the shortest time.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf

from penstock.cluster.cluster import Cluster
from penstock.costs.schedule_costs import least_room, stages_of_groups, with_costs
from penstock.plan.ordering import order_of
from penstock.plan.plan import SHARDINGS, Plan
from penstock.plan.problem import PlanningProblem, Score, score_of
from penstock.schedule.clock import memory_peaks_bytes
from penstock.schedule.registry import FAMILIES

ROUNDING = 1e-9
"""Times that differ by less are equal."""

RENUMBERED = 4
"""The number of plans that are tried on whole hosts."""

COMPARED_BY_MEMORY = 6
"""Number of otherwise equal plans whose memory left is compared."""

MEMORY_STEP = 0.05
"""Smaller differences, as a share of a device's memory, do not count."""


def preferred(
    problem: PlanningProblem, simulated: Mapping[Plan, float], score: Score
) -> tuple[Plan, float]:
    """The plan to choose of those ``simulated``, and its seconds.

    Plans that are slower than the fastest by `PlanningProblem.as_fast` at most take part. So do the
    preferred of them with renumbered devices, if their sets of devices are less scattered then.
    """
    first = about_as_fast(simulated, problem.as_fast)
    renumbered = {
        other: score_of(other, score)
        for plan in sorted(first, key=lambda plan: (layout(problem, plan), first[plan]))[
            :RENUMBERED
        ]
        for other in on_whole_hosts(problem.cluster, plan)
        if other not in simulated
    }
    known = about_as_fast({**first, **renumbered}, problem.as_fast)
    least = min(layout(problem, plan) for plan in known)
    close = sorted(
        (plan for plan in known if layout(problem, plan) == least), key=known.__getitem__
    )
    chosen = close[0]
    # An order that is searched for takes too long to make again.
    compared = [
        plan for plan in close[:COMPARED_BY_MEMORY] if not FAMILIES[plan.schedule].is_searched
    ]
    if chosen in compared[:-1]:
        chosen = min(compared, key=lambda plan: ceil(fullest_share(problem, plan) / MEMORY_STEP))
    return chosen, known[chosen]


def about_as_fast(simulated: Mapping[Plan, float], as_fast: float) -> dict[Plan, float]:
    """The plans that are about as fast as the fastest."""
    limit_s = min(simulated.values()) * (1 + max(as_fast, ROUNDING))
    return {plan: seconds for plan, seconds in simulated.items() if seconds <= limit_s}


def layout(problem: PlanningProblem, plan: Plan) -> tuple[int, ...]:
    """Devices, how scattered they are, stages, halves, searched orders, recomputing layers, shards.

    The fewer the better.
    """
    recomputed = sum(
        len(stage.layers) for stage in plan.stages if stage.recompute or stage.by_block
    )
    divided = sum(SHARDINGS.index(stage.sharding) for stage in plan.stages)
    scattered, family = scatter(problem.cluster, plan), FAMILIES[plan.schedule]
    kind = family.splits, family.is_searched
    return len(plan.devices), *scattered, len(plan.stages), *kind, recomputed, divided


def scatter(cluster: Cluster, plan: Plan) -> tuple[int, int]:
    """Hosts of the sets of devices beyond the least number, and gaps in the devices' numbers."""
    largest = max(len(host.devices) for host in cluster.hosts)
    hosts, gaps = 0, 0
    for devices in plan.device_groups:
        touched = {cluster.host_index[device] for device in devices}
        hosts += len(touched) - ceil(len(devices) / largest)
        gaps += sum(after - before != 1 for before, after in pairwise(sorted(devices)))
    return hosts, gaps


def on_whole_hosts(cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """The plan on other devices of the same kinds, if its sets are less scattered there."""
    groups = plan.device_groups
    by_size = sorted(groups, key=len, reverse=True)
    for order in dict.fromkeys((groups, tuple(by_size))):
        new = on_few_hosts(cluster, order)
        stages = tuple(replace(stage, devices=new[stage.devices]) for stage in plan.stages)
        renumbered = replace(plan, stages=stages)
        if scatter(cluster, renumbered) < scatter(cluster, plan):
            yield renumbered


def on_few_hosts(
    cluster: Cluster, groups: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Replacements of sets of devices by ones of the same kinds on as few hosts as possible.

    Each set in turn takes the host that it fills most. If no host has all of its devices, it takes
    those of the emptiest hosts.
    """
    devices = cluster.devices
    free: list[list[int]] = [[] for _ in cluster.hosts]
    for device, host in enumerate(cluster.host_index):
        free[host].append(device)
    new: dict[tuple[int, ...], tuple[int, ...]] = {}
    for group in groups:
        needed = Counter(devices[device] for device in group)
        taken: list[int] = []
        while needed.total():
            have = [sum((needed & Counter(devices[d] for d in one)).values()) for one in free]
            host = max(range(len(free)), key=lambda h: (have[h], -len(free[h]), -h))
            for device in tuple(free[host]):
                if needed[devices[device]]:
                    needed[devices[device]] -= 1
                    free[host].remove(device)
                    taken.append(device)
        taken.sort()
        places: list[int] = []
        for device in group:
            same = next(one for one in taken if devices[one] == devices[device])
            taken.remove(same)
            places.append(same)
        new[group] = tuple(places)
    return new


def fullest_share(problem: PlanningProblem, plan: Plan) -> float:
    """The largest share of a device's memory that the plan needs."""
    peaks = memory_peaks_bytes(order_of(plan), with_costs(problem, plan).shape())
    shares: list[float] = []
    for (devices, stages), peak in zip(stages_of_groups(plan).items(), peaks, strict=True):
        left, _, replica = least_room(problem, devices, stages)
        memory_bytes = problem.cluster.devices[devices[replica]].memory_bytes
        shares.append(1 - (left - peak) / memory_bytes if memory_bytes < inf else 0.0)
    return max(shares)
