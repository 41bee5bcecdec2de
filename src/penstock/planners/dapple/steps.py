"""The steps of DAPPLE's search for one micro-batch size, as flat arrays for its kernel."""

from typing import NamedTuple

import numpy as np

from penstock.plan.cost_tables import ChainCosts, Costs, Network
from penstock.plan.run_tables import Floats, Integers
from penstock.planners.dapple.groups import Groups

__all__ = ["Steps", "costs_of_groups", "network_of_steps", "steps_of"]


class Steps(NamedTuple):
    """Steps of `Occupancies` from each source, and the last stage on all devices left.

    Those from occupancy ``n`` are ``out[n]`` to ``out[n + 1] - 1``, at most ``widest`` of them. A
    group of -1 has more devices than a micro-batch has rows. ``rest_group`` is that of the last
    stage behind each occupancy, ``speed_left`` the speed of all devices left, ``idle`` how many
    times as many they are as those of the last stage.
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
    """What layers cost on every group."""
    return chain.costs(
        groups.devices, [groups.slices(devices, micro_batch_size) for devices in groups.devices]
    )


def network_of_steps(chain: ChainCosts, groups: Groups, micro_batch_size: int) -> Network:
    """Who sends to whom: steps as targets number the servers, as sources do, and the rests.

    So the devices of a step send as group ``step`` and receive as group ``steps + step``; the last
    stage behind occupancy ``n`` is group ``2 * steps + n``.
    """
    taken = [groups.slices(devices, micro_batch_size) for devices in groups.receivers]
    numbers = range(len(groups.places.used))
    rests = [groups.rest(number, micro_batch_size) for number in numbers]
    slices = [groups.slices(devices, micro_batch_size) for devices in rests]
    members = [*groups.senders, *groups.receivers, *rests]
    return chain.network(members, [*taken, *taken, *slices])
