"""The steps of DAPPLE's search for one micro-batch size, as flat arrays for its kernel."""

from typing import NamedTuple

import numpy as np

from penstock.plan.cost_tables import ChainCosts, Costs, Network
from penstock.plan.run_tables import Floats, Integers
from penstock.planners.dapple.groups import Groups

__all__ = ["Steps", "costs_of_groups", "network_of_steps", "steps_of"]


class Steps(NamedTuple):
    """The steps of `Occupancies`, and the last stage on the devices left by each occupancy.

    The steps from occupancy ``n`` are ``out[n]`` to ``out[n + 1] - 1``, at most ``widest`` of them.
    ``group`` is -1 where a step takes more devices than a micro-batch has rows. For each occupancy,
    ``rest_group`` is the group of the last stage, ``speed_left`` the speed of all devices left, and
    ``idle`` the number of devices left over the number of those that the last stage uses.
    """

    steps: int
    places: int
    widest: int
    out: Integers
    target: Integers
    group: Integers
    rest_group: Integers
    speed_left: Floats
    idle: Floats


def steps_of(groups: Groups, micro_batch_size: int) -> Steps:
    """The steps of the search for micro-batches of that size."""
    speeds = [device.speed for device in groups.cluster.devices]
    places, size = groups.places, micro_batch_size
    count = len(places.used)
    rests = [groups.rest(number, size) for number in range(count)]
    free = [groups.free(number) for number in range(count)]
    out = np.searchsorted([step.source for step in places.steps], np.arange(count + 1))
    sizes = [len(devices) for devices in groups.receivers]
    fits = [n if taken <= size else -1 for n, taken in zip(groups.numbers, sizes, strict=True)]
    return Steps(
        steps=len(places.steps),
        places=count,
        widest=int(np.diff(out).max(initial=1)),
        out=out,
        target=np.array([step.target for step in places.steps], dtype=np.int64),
        group=np.array(fits, dtype=np.int64),
        rest_group=np.array([groups.number(rest) for rest in rests], dtype=np.int64),
        speed_left=np.array([sum(speeds[device] for device in left) for left in free]),
        idle=np.array([len(left) / len(rest) for left, rest in zip(free, rests, strict=True)]),
    )


def costs_of_groups(chain: ChainCosts, groups: Groups, micro_batch_size: int) -> Costs:
    """The costs of layers on every group."""
    return chain.costs(
        groups.devices, [groups.slices(devices, micro_batch_size) for devices in groups.devices]
    )


def network_of_steps(chain: ChainCosts, groups: Groups, micro_batch_size: int) -> Network:
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
