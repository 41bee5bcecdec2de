"""The groups of devices that the stages of DAPPLE's search may take, and its steps for the core."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.cluster.cluster import Cluster
from penstock.core.native import DappleStep, LinkNetwork, Occupancy
from penstock.costs.stage_costs import rows_by_speed
from penstock.costs.tables import ChainCosts
from penstock.planners.dapple.placement import POLICIES, Counts, Occupancies


@dataclass
class Groups:
    """The device groups, by number, for any micro-batch size; groups of equal cost have one number.

    ``receivers`` and ``senders`` are the devices of every step: the former by the server numbers of
    its source, the latter by those of its target. ``numbers`` are the numbers of their groups.
    """

    cluster: Cluster
    places: Occupancies
    devices: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    known: dict[object, int] = field(default_factory=dict[object, int])

    def __post_init__(self) -> None:
        used, steps = self.places.used, self.places.steps
        self.receivers = [self.behind(used[step.source], step.taken) for step in steps]
        self.senders = [
            # The inverse of a permutation sorts it.
            self.behind(
                used[step.source],
                step.taken,
                sorted(range(len(step.servers)), key=step.servers.__getitem__),
            )
            for step in steps
        ]
        self.numbers = [self.number(devices) for devices in self.receivers]

    def behind(self, used: Counts, taken: Counts, places: Sequence[int] = ()) -> tuple[int, ...]:
        """The devices ``taken`` behind ``used`` ones; server ``s`` is at place ``places[s]``."""
        servers = self.places.servers
        return tuple(
            device
            for s in range(len(servers))
            if taken[s]
            for device in servers[places[s] if places else s][used[s] : used[s] + taken[s]]
        )

    def free(self, occupancy: int) -> tuple[int, ...]:
        used = self.places.used[occupancy]
        return self.behind(used, tuple(map(len, self.places.servers)))

    def rest(self, occupancy: int, rows: int) -> tuple[int, ...]:
        """The devices of a last stage: all that are left, or as many as a micro-batch has rows.

        Where rows are too few, by the first policy that can place them.
        """
        used = self.places.used[occupancy]
        free = tuple(len(s) - u for s, u in zip(self.places.servers, used, strict=True))
        if sum(free) <= rows:
            return self.behind(used, free)
        placed = (policy(free, used, rows) for policy in POLICIES)
        return self.behind(used, next(taken for taken in placed if taken is not None))

    def slices(self, devices: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Rows of each device of a group, in proportion to its speed."""
        return rows_by_speed(self.cluster, devices, rows)

    def number(self, devices: tuple[int, ...]) -> int:
        """The number of a group; between equal hosts only the counts matter."""
        key: object = devices
        if self.same_hosts:
            host = self.cluster.host_index
            key = tuple(sorted(Counter(host[device] for device in devices).values()))
        if key not in self.known:
            self.known[key] = len(self.devices)
            self.devices.append(devices)
        return self.known[key]

    @cached_property
    def same_hosts(self) -> bool:
        """True if all devices are equal, and the hosts but for their number of devices."""
        hosts = {replace(host, name="", devices=host.devices[:1]) for host in self.cluster.hosts}
        return len(hosts) == len(set(self.cluster.devices)) == 1 and not self.cluster.links


def search_steps_of(
    groups: Groups, micro_batch_size: int
) -> tuple[list[DappleStep], list[Occupancy]]:
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
