"""All that the engines need to know about a plan's work: seconds, messages, reductions, resources.

`Parts` describe instances of stages, pairs of them, and tied parameters. Each part is numbered from
zero on its own, so plans that differ in one stage share all other parts. A `Workload` adds the
order of work and global numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import Literal, TypeAlias

from penstock.schedule.schedule import Schedule
from penstock.simulate.gradients import GradientShare, Ports, TiedGroup
from penstock.simulate.instances import Instances
from penstock.simulate.stage_work import ReplicaWork, StageWork
from penstock.simulate.transfers import Boundary

__all__ = [
    "Bucket",
    "DeviceWork",
    "Direction",
    "MessageWork",
    "Parts",
    "Reduction",
    "Replica",
    "Segment",
    "Workload",
]

Direction: TypeAlias = Literal["F", "B"]
"""Forwards send activations, backwards send gradients."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The work of a plan without its order.

    ``stages`` are instances. Each of ``boundaries`` has its producer and consumer instance first.
    ``ties`` are sorted by their instances. ``host_slots[host]`` is how many devices of the host
    compute at full speed at once (0: all). For ``half_duplex`` and ``separate_links`` see
    `penstock.cluster.cluster.Host`.
    """

    stages: tuple[StageWork, ...]
    boundaries: tuple[tuple[int, int, Boundary], ...]
    ties: tuple[TiedGroup, ...]
    host_slots: tuple[int, ...]
    half_duplex: tuple[bool, ...]
    separate_links: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a last backward, and the gradient buckets that are complete at its end."""

    seconds: float
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of one instance; ``position`` is the index of its device in `Workload.devices`.

    ``last_backward`` are the segments of an action that makes the last gradients before an update
    (B or W).
    """

    position: int
    stage: int
    instance: int
    work: ReplicaWork
    last_backward: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """One device: its number in the cluster, its group, and its replicas by instance."""

    device: int
    group: int
    host: int
    overlaps: bool
    replicas: Mapping[int, Replica]

    @property
    def stage(self) -> int:
        """The first stage that the device holds."""
        return min(replica.stage for replica in self.replicas.values())

    @property
    def step_s(self) -> float:
        """Seconds of the optimizer step, which covers all its replicas."""
        return sum(replica.work.step_s for replica in self.replicas.values())


@dataclass(frozen=True, slots=True)
class MessageWork:
    """All tensors that one replica sends another for each micro-batch, in one direction.

    ``sender`` and ``receiver`` are indices in `Workload.replicas`. A message of zero seconds only
    orders the two stages and occupies nothing.
    """

    sender: int
    receiver: int
    direction: Direction
    seconds: float
    bytes: float
    resources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed over the members of a reduction in one operation."""

    stage: int
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Reduction:
    """The gradient all-reduces among the replicas of some instances, bucket after bucket.

    ``members`` are indices in `Workload.replicas`. The buckets are summed ``rounds`` times.
    """

    instances: tuple[int, ...]
    members: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    resources: tuple[int, ...]
    rounds: int


@dataclass(frozen=True)
class Workload:
    """Iterations of one plan, ready to play.

    Replicas are in the order of their instances, devices in the order of their groups. Buckets are
    numbered throughout `reductions`. `resources` is the number of resources, each of which one
    message or reduction occupies at a time. They are numbered

        0 .. D-1          send engine of device position d
        D .. 2D-1         receive engine of d (half-duplex: the send engine serves both)
        2D .. 2D+H-1      outgoing port of host h
        2D+H .. 2D+2H-1   incoming port of h (half-duplex: the outgoing port serves both)
        2D+2H ..          links of the hosts with separate links, host after host: with n devices
                          n * i + j is the link from the i-th to the j-th (half-duplex: from the
                          lower to the higher)
        then              compute streams, device after device: occupied also by transfers if a
                          device does not compute and communicate at once; on hosts with separate
                          links by any number of transfers together

    A device has one compute stream, or two if its forwards run beside its backwards.
    """

    schedule: Schedule
    parts: Parts
    instances: Instances
    micro_batches_per_iteration: int
    iterations: int = 1

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of all iterations together."""
        return self.micro_batches_per_iteration * self.iterations

    @property
    def host_slots(self) -> tuple[int, ...]:
        """See `Parts`."""
        return self.parts.host_slots

    @property
    def streams_each(self) -> int:
        """The number of compute streams of a device."""
        return 2 if self.schedule.concurrent else 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The index of the first replica of every instance, then the number of replicas."""
        return tuple(accumulate((len(stage.devices) for stage in self.parts.stages), initial=0))

    @cached_property
    def group_starts(self) -> tuple[int, ...]:
        """The first device position of every group, then the number of devices."""
        first = (self.parts.stages[members[0]] for members in self.instances.members)
        return tuple(accumulate((len(stage.devices) for stage in first), initial=0))

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas of all instances."""
        made: list[Replica] = []
        for instance, stage in enumerate(self.parts.stages):
            buckets = self.buckets_of_segments(instance, stage)
            first = self.group_starts[self.instances.groups[instance]]
            for index, work in enumerate(stage.replicas):
                segments = tuple(map(Segment, work.segments_s, buckets))
                number = instance % self.instances.stages
                made.append(Replica(first + index, number, instance, work, segments))
        return tuple(made)

    @cached_property
    def devices(self) -> tuple[DeviceWork, ...]:
        """The work of every device position."""
        made: list[DeviceWork] = []
        for group, members in enumerate(self.instances.members):
            first = self.parts.stages[members[0]]
            for index, device in enumerate(first.devices):
                held = {i: self.replicas[self.starts[i] + index] for i in members}
                host, overlaps = first.hosts[index], first.overlaps[index]
                made.append(DeviceWork(device, group, host, overlaps, held))
        return tuple(made)

    def buckets_of_segments(self, index: int, stage: StageWork) -> list[tuple[int, ...]]:
        """The numbers of the buckets that each segment of an instance's last backward completes."""
        found: list[list[int]] = [[] for _ in stage.segment_layers]
        first = 0
        for instances, shares, _ in self.reduced:
            numbers = range(first, first + sum(share.buckets for share in shares))
            first = numbers.stop
            if instances == (index,):
                own = iter(numbers)
                for share in stage.shares:
                    found[share.segment] += [next(own) for _ in range(share.buckets)]
            elif index in instances:
                found[-1] += numbers
        return [tuple(buckets) for buckets in found]

    @cached_property
    def messages(self) -> tuple[MessageWork, ...]:
        """The messages of every micro-batch, sorted by sender, direction and receiver."""
        made: list[MessageWork] = []
        for producer, consumer, boundary in self.parts.boundaries:
            for pair in boundary.pairs:
                i, j = self.starts[producer] + pair.sender, self.starts[consumer] + pair.receiver
                down, up = self.occupied(i, j, pair.port_down), self.occupied(j, i, pair.port_up)
                made.append(MessageWork(i, j, "F", pair.forward_s, pair.forward_bytes, down))
                if pair.returns:
                    made.append(MessageWork(j, i, "B", pair.backward_s, pair.backward_bytes, up))
        return tuple(sorted(made, key=lambda m: (m.sender, m.direction, m.receiver)))

    def occupied(self, sender: int, receiver: int, port: bool) -> tuple[int, ...]:
        """The resources that a message between two replicas occupies."""
        ends = (self.replicas[sender].position, self.replicas[receiver].position)
        hosts = [(self.devices[position].host,) for position in ends]
        ports = self.port_numbers(Ports(*hosts)) if port else ()
        wires = self.links.get(ends) or (ends[0], self.receive_engine(ends[1]), *ports)
        return tuple(dict.fromkeys((*wires, *self.blocked_streams(ends))))

    @cached_property
    def links(self) -> dict[tuple[int, int], tuple[int]]:
        """The resource number of each separate link, by the positions of sender and receiver."""
        made: dict[tuple[int, int], tuple[int]] = {}
        first = 2 * self.group_starts[-1] + 2 * len(self.host_slots)
        for host, separate in enumerate(self.parts.separate_links):
            if separate:
                held = [p for p, device in enumerate(self.devices) if device.host == host]
                for (i, source), (j, target) in product(enumerate(held), repeat=2):
                    ends = sorted((i, j)) if self.parts.half_duplex[host] else (i, j)
                    made[source, target] = (first + len(held) * ends[0] + ends[1],)
                first += len(held) ** 2
        return made

    def receive_engine(self, position: int) -> int:
        """The resource number of a device's receive engine."""
        half = self.parts.half_duplex[self.devices[position].host]
        return position if half else self.group_starts[-1] + position

    def port_numbers(self, ports: Ports) -> tuple[int, ...]:
        """Resource numbers of ports."""
        first, hosts = 2 * self.group_starts[-1], len(self.host_slots)
        outgoing = [first + host for host in ports.outgoing]
        half = self.parts.half_duplex
        incoming = [first + host + (0 if half[host] else hosts) for host in ports.incoming]
        return (*outgoing, *incoming)

    def blocked_streams(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Resource numbers of the compute streams that stop while their devices communicate."""
        first, each = self.first_stream, self.streams_each
        return tuple(
            first + position * each + stream
            for position in positions
            if not self.devices[position].overlaps
            for stream in range(each)
        )

    @cached_property
    def reduced(self) -> tuple[tuple[tuple[int, ...], tuple[GradientShare, ...], Ports], ...]:
        """Instances, gradients and ports of every reduction, sorted by instances."""
        own = [((s,), stage.shares, stage.ports) for s, stage in enumerate(self.parts.stages)]
        tied = [(tie.stages, tie.shares, tie.ports) for tie in self.parts.ties]
        found = (group for group in [*own, *tied] if group[1])
        return tuple(sorted(found, key=lambda group: group[0]))

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reductions, sorted by their instances."""
        return tuple(self.reduction(*group) for group in self.reduced)

    def reduction(
        self, instances: tuple[int, ...], shares: Sequence[GradientShare], ports: Ports
    ) -> Reduction:
        """The reduction among all replicas of ``instances``."""
        members = tuple(r for i in instances for r in range(self.starts[i], self.starts[i + 1]))
        positions = tuple(dict.fromkeys(self.replicas[member].position for member in members))
        buckets = (
            Bucket(instances[0] % self.instances.stages, share.seconds, share.bytes)
            for share in shares
            for _ in range(share.buckets)
        )
        engines = (*positions, *map(self.receive_engine, positions))
        resources = (*engines, *self.port_numbers(ports), *self.blocked_streams(positions))
        rounds = max(self.instances.rounds[i] for i in instances) * self.iterations
        return Reduction(
            instances, members, tuple(buckets), tuple(dict.fromkeys(resources)), rounds
        )

    @property
    def first_stream(self) -> int:
        """The resource number of the first compute stream."""
        return 2 * len(self.devices) + 2 * len(self.host_slots) + len(self.links)

    @property
    def resources(self) -> int:
        """The number of engines, ports, links and compute streams."""
        return self.first_stream + len(self.devices) * self.streams_each

    def talks_at_once(self, position: int) -> bool:
        """Whether a device may run several transfers while it computes nothing."""
        return self.parts.separate_links[self.devices[position].host]

    @property
    def actions(self) -> int:
        """The number of compute actions of all devices together."""
        return self.iterations * sum(len(self.schedule.of(device.group)) for device in self.devices)
