"""Input of the engines about a plan's work: seconds, messages, reductions, resources.

`Parts` describe instances of stages, pairs of them, and tied parameters. Each part is numbered from
zero on its own, so plans that differ in one stage share all other parts. A `Workload` adds the
order of work and global numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeAlias

from penstock.core.native import (
    Boundary,
    GradientShare,
    HostRules,
    PlanParts,
    Ports,
    ReplicaWork,
    StageWork,
    TiedGroup,
)
from penstock.schedule.schedule import Schedule
from penstock.simulate.instances import Instances

Direction: TypeAlias = Literal["F", "B"]
"""Forwards send activations, backwards send gradients."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The work of a plan without its order.

    ``stages`` are instances. Each of ``boundaries`` has its producer and consumer instance first.
    ``ties`` are sorted by their instances. ``in_order``: messages go in the planned order.
    """

    stages: tuple[StageWork, ...]
    boundaries: tuple[tuple[int, int, Boundary], ...]
    ties: tuple[TiedGroup, ...]
    hosts: Sequence[HostRules]
    in_order: bool = False

    @cached_property
    def in_core(self) -> PlanParts:
        """The same for the core's engine."""
        return PlanParts(self.stages, self.boundaries, self.ties, self.hosts, self.in_order)


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica of an instance; ``position`` is the index of its device in `Workload.devices`."""

    position: int
    stage: int
    instance: int
    work: ReplicaWork


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """One device: its number in the cluster, its group, and its replicas by instance."""

    device: int
    group: int
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


@dataclass(frozen=True, slots=True)
class Reduction:
    """The gradient all-reduces among the replicas of some instances, bucket after bucket.

    ``members`` are indices in `Workload.replicas`. ``buckets`` has the share of gradients that each
    bucket is of. They are summed ``rounds`` times.
    """

    instances: tuple[int, ...]
    members: tuple[int, ...]
    buckets: tuple[GradientShare, ...]
    rounds: int


@dataclass(frozen=True)
class Workload:
    """Iterations of one plan, ready to play.

    Replicas are in the order of their instances, devices in the order of their groups.
    A device has one compute stream, or two if its forwards run beside its backwards. If
    ``steps_together``, no step starts before the gradients of all devices are summed.
    """

    schedule: Schedule
    parts: Parts
    instances: Instances
    micro_batches_per_iteration: int
    iterations: int = 1
    steps_together: bool = False

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of all iterations together."""
        return self.micro_batches_per_iteration * self.iterations

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
        made: list[Replica] = []
        for instance, stage in enumerate(self.parts.stages):
            first = self.group_starts[self.instances.groups[instance]]
            for index, work in enumerate(stage.replicas):
                number = self.instances.stage_of[instance]
                made.append(Replica(first + index, number, instance, work))
        return tuple(made)

    @cached_property
    def devices(self) -> tuple[DeviceWork, ...]:
        made: list[DeviceWork] = []
        for group, members in enumerate(self.instances.members):
            first = self.parts.stages[members[0]]
            for index, device in enumerate(first.devices):
                held = {i: self.replicas[self.starts[i] + index] for i in members}
                made.append(DeviceWork(device, group, held))
        return tuple(made)

    @cached_property
    def messages(self) -> tuple[MessageWork, ...]:
        """The messages of every micro-batch, sorted by sender, direction and receiver."""
        made: list[MessageWork] = []
        for producer, consumer, boundary in self.parts.boundaries:
            for pair in boundary.pairs:
                i, j = self.starts[producer] + pair.sender, self.starts[consumer] + pair.receiver
                made.append(MessageWork(i, j, "F", pair.forward_s, pair.forward_bytes))
                if pair.returns:
                    made.append(MessageWork(j, i, "B", pair.backward_s, pair.backward_bytes))
        return tuple(sorted(made, key=lambda m: (m.sender, m.direction, m.receiver)))

    @cached_property
    def reduced(self) -> tuple[tuple[tuple[int, ...], Sequence[GradientShare], Ports], ...]:
        """Instances, gradients and ports of every reduction, sorted by instances."""
        own = [((s,), stage.shares, stage.ports) for s, stage in enumerate(self.parts.stages)]
        tied = [(tuple(tie.stages), tie.shares, tie.ports) for tie in self.parts.ties]
        found = (group for group in [*own, *tied] if group[1])
        return tuple(sorted(found, key=lambda group: group[0]))

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reductions, sorted by their instances."""
        made: list[Reduction] = []
        for instances, shares, _ in self.reduced:
            members = (r for i in instances for r in range(self.starts[i], self.starts[i + 1]))
            buckets = (share for share in shares for _ in range(share.buckets))
            rounds = max(self.instances.rounds[i] for i in instances) * self.iterations
            made.append(Reduction(instances, tuple(members), tuple(buckets), rounds))
        return tuple(made)

    @cached_property
    def works_on(self) -> tuple[frozenset[int], ...]:
        """The micro-batches that each instance works on; a message has both ends work on it."""
        found: list[set[int]] = [set() for _ in self.parts.stages]
        for order in self.schedule.orders:
            for action in order:
                found[self.instances.of(action)].add(action.micro_batch)
        return tuple(map(frozenset, found))

    @property
    def actions(self) -> int:
        """The number of compute actions of all devices together."""
        return self.iterations * sum(len(self.schedule.of(device.group)) for device in self.devices)
