"""All that the engines need to know of one iteration: seconds, messages, reductions, resources.

`Parts` are what stages, pairs of stages and tied parameters need, each numbered from zero on its
own, so that plans which differ in one stage share all other parts. A `Workload` adds the order of
work and numbers everything through.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeAlias

from penstock.schedule.action import ActionKind
from penstock.schedule.schedule import Schedule
from penstock.simulate.gradients import Ports, Share, TiedGroup
from penstock.simulate.stage_work import ReplicaWork, StageWork
from penstock.simulate.transfers import Boundary

__all__ = ["Bucket", "DeviceWork", "Direction", "Message", "Parts", "Reduction", "Workload"]

Direction: TypeAlias = Literal["F", "B"]
"""Activations flow with the forwards, gradients with the backwards."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The work of a plan without its order.

    ``boundaries`` are sorted by producer and consumer stage, ``ties`` by their stages.
    ``host_slots[host]`` is how many devices of the host compute at full speed at once (0: all).
    """

    stages: tuple[StageWork, ...]
    boundaries: tuple[tuple[int, int, Boundary], ...]
    ties: tuple[TiedGroup, ...]
    host_slots: tuple[int, ...]
    micro_batches: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stage's last backward, and the gradient buckets that are complete at its end."""

    seconds: float
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """One replica of one stage: its device in the cluster, and its seconds.

    ``last_backward`` replaces the last action that makes gradients (B or W) by its segments.
    """

    device: int
    stage: int
    host: int
    replica: ReplicaWork
    last_backward: tuple[Segment, ...]

    @property
    def step_s(self) -> float:
        """Seconds of the optimizer step."""
        return self.replica.step_s

    def seconds(self, kind: ActionKind) -> float:
        """Seconds of one action at full speed."""
        return self.replica.seconds(kind)


@dataclass(frozen=True, slots=True)
class Message:
    """All tensors that one replica sends another for each micro-batch, in one direction.

    ``sender`` and ``receiver`` are positions in `Workload.devices`. A message of no seconds only
    orders the two stages; it occupies nothing.
    """

    sender: int
    receiver: int
    direction: Direction
    seconds: float
    bytes: float
    resources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed over the members of a reduction in one go."""

    stage: int
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Reduction:
    """The gradient all-reduces among the replicas of some stages, bucket after bucket."""

    stages: tuple[int, ...]
    members: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    resources: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """One iteration of one plan, ready to play.

    Devices are in order of stage and replica. Buckets are numbered through over `reductions`.
    `resources` counts what messages and reductions occupy one at a time, numbered

        0 .. D-1          send engine of device position d
        D .. 2D-1         receive engine of d
        2D .. 2D+H-1      outgoing port of host h
        2D+H .. 2D+2H-1   incoming port of h

    ``last_backward[stage]`` is the index of the stage's last action that makes gradients.
    """

    schedule: Schedule
    parts: Parts
    last_backward: tuple[int, ...]

    @property
    def micro_batches(self) -> int:
        """How many micro-batches pass the pipeline."""
        return self.parts.micro_batches

    @property
    def host_slots(self) -> tuple[int, ...]:
        """See `Parts`."""
        return self.parts.host_slots

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first position of every stage, and the number of devices."""
        return tuple(accumulate((len(stage.devices) for stage in self.parts.stages), initial=0))

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The host of every device position."""
        return tuple(host for stage in self.parts.stages for host in stage.hosts)

    @cached_property
    def devices(self) -> tuple[DeviceWork, ...]:
        """The work of every device position."""
        made: list[DeviceWork] = []
        for index, stage in enumerate(self.parts.stages):
            buckets = self.buckets_of_segments(index, stage)
            replicas = zip(stage.devices, stage.hosts, stage.replicas, strict=True)
            for device, host, replica in replicas:
                segments = tuple(map(Segment, replica.segments_s, buckets))
                made.append(DeviceWork(device, index, host, replica, segments))
        return tuple(made)

    def buckets_of_segments(self, index: int, stage: StageWork) -> list[tuple[int, ...]]:
        """The numbers of the buckets that each segment of a stage's last backward completes."""
        found: list[list[int]] = [[] for _ in stage.segment_layers]
        first = 0
        for group in self.reductions:
            numbers = range(first, first + len(group.buckets))
            first = numbers.stop
            if group.stages == (index,):
                own = iter(numbers)
                for share in stage.shares:
                    found[share.segment] += [next(own) for _ in range(share.buckets)]
            elif index in group.stages:
                found[-1] += numbers
        return [tuple(buckets) for buckets in found]

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The messages of every micro-batch, sorted by sender, direction and receiver."""
        made: list[Message] = []
        for producer, consumer, boundary in self.parts.boundaries:
            for pair in boundary.pairs:
                i, j = self.starts[producer] + pair.sender, self.starts[consumer] + pair.receiver
                down, up = self.occupied(i, j, pair.port_down), self.occupied(j, i, pair.port_up)
                made.append(Message(i, j, "F", pair.forward_s, pair.forward_bytes, down))
                if pair.returns:
                    made.append(Message(j, i, "B", pair.backward_s, pair.backward_bytes, up))
        return tuple(sorted(made, key=lambda m: (m.sender, m.direction, m.receiver)))

    def occupied(self, sender: int, receiver: int, port: bool) -> tuple[int, ...]:
        """What a message occupies."""
        hosts = self.hosts
        ports = Ports((hosts[sender],), (hosts[receiver],)) if port else Ports()
        return (sender, len(hosts) + receiver, *self.port_numbers(ports))

    def port_numbers(self, ports: Ports) -> tuple[int, ...]:
        """Resource numbers of ports."""
        first, hosts = 2 * self.starts[-1], len(self.host_slots)
        outgoing = (first + host for host in ports.outgoing)
        return (*outgoing, *(first + hosts + host for host in ports.incoming))

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reductions, sorted by their stages."""
        own = [((s,), stage.shares, stage.ports) for s, stage in enumerate(self.parts.stages)]
        tied = [(tie.stages, tie.shares, tie.ports) for tie in self.parts.ties]
        groups = sorted((group for group in [*own, *tied] if group[1]), key=lambda group: group[0])
        return tuple(self.reduction(*group) for group in groups)

    def reduction(
        self, stages: tuple[int, ...], shares: Sequence[Share], ports: Ports
    ) -> Reduction:
        """The reduction among all replicas of ``stages``."""
        members = tuple(p for s in stages for p in range(self.starts[s], self.starts[s + 1]))
        received = (self.starts[-1] + member for member in members)
        buckets = (
            Bucket(stages[0], share.seconds, share.bytes)
            for share in shares
            for _ in range(share.buckets)
        )
        resources = (*members, *received, *self.port_numbers(ports))
        return Reduction(stages, members, tuple(buckets), resources)

    @property
    def resources(self) -> int:
        """The number of engines and ports."""
        return 2 * len(self.devices) + 2 * len(self.host_slots)

    @property
    def actions(self) -> int:
        """Compute actions of all devices together."""
        return sum(
            len(self.schedule.of(index)) * len(stage.devices)
            for index, stage in enumerate(self.parts.stages)
        )
