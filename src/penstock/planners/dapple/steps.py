"""The steps of DAPPLE's search for one micro-batch size, for the core."""

from bisect import bisect_left

from penstock.core.native import DappleStep, GroupCosts, LinkNetwork, Occupancy
from penstock.plan.cost_tables import ChainCosts
from penstock.planners.dapple.groups import Groups

__all__ = ["costs_of_groups", "network_of_steps", "steps_of"]


def steps_of(groups: Groups, micro_batch_size: int) -> tuple[list[DappleStep], list[Occupancy]]:
    """The steps of the search for micro-batches of that size, and the sets of devices in use.

    The group of a step is -1 where it takes more devices than a micro-batch has rows. Each set has
    the group of the last stage on the devices left; the speed of all devices left; and their number
    over that of those that the last stage uses.
    """
    speeds = [device.speed for device in groups.cluster.devices]
    places, size = groups.places, micro_batch_size
    sources = [step.source for step in places.steps]
    steps = [
        DappleStep(step.target, number if len(devices) <= size else -1)
        for step, number, devices in zip(
            places.steps, groups.numbers, groups.receivers, strict=True
        )
    ]
    occupancies: list[Occupancy] = []
    for place in range(len(places.used)):
        rest, left = groups.rest(place, size), groups.free(place)
        speed, idle = sum(speeds[device] for device in left), len(left) / len(rest)
        first = bisect_left(sources, place)
        occupancies.append(Occupancy(first, groups.number(rest), speed, idle))
    return steps, occupancies


def costs_of_groups(chain: ChainCosts, groups: Groups, micro_batch_size: int) -> GroupCosts:
    """The costs of layers on every group."""
    return chain.costs(
        groups.devices, [groups.slices(devices, micro_batch_size) for devices in groups.devices]
    )


def network_of_steps(chain: ChainCosts, groups: Groups, micro_batch_size: int) -> LinkNetwork:
    """The senders and receivers of transfers.

    The devices of a step send as group ``step`` and receive as group ``steps + step``. The last
    stage behind occupancy ``n`` is group ``2 * steps + n``.
    """
    taken = [groups.slices(devices, micro_batch_size) for devices in groups.receivers]
    numbers = range(len(groups.places.used))
    rests = [groups.rest(number, micro_batch_size) for number in numbers]
    slices = [groups.slices(devices, micro_batch_size) for devices in rests]
    members = [*groups.senders, *groups.receivers, *rests]
    return chain.network(members, [*taken, *taken, *slices])
