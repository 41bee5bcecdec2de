"""What a workload occupies, as the plain simulator and the tests of engines read it.

The wires, ports and streams of the core (`core/assembly.cpp`), written anew over `Workload`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from typing import Self

from penstock.core.native import Ports, StageWork
from penstock.simulate.workload import Replica, Workload


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a last backward, and the gradient buckets that are complete at its end."""

    seconds: float
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlainWorkload(Workload):
    """A workload with numbers for all that one message or reduction occupies at a time.

    Buckets are numbered throughout `reductions`. Of the `resources`

        0 .. D-1          send engine of device position d
        D .. 2D-1         receive engine of d (half-duplex: the send engine serves both)
        2D .. 2D+H-1      outgoing port of host h
        2D+H .. 2D+2H-1   incoming port of h (half-duplex: the outgoing port serves both)
        2D+2H ..          communicator of each device position, if messages go in order
        then              links of the hosts with separate links, host after host: with n devices
                          n * i + j is the link from the i-th to the j-th (half-duplex: from the
                          lower to the higher)
        then              compute streams, device after device: occupied also by transfers if a
                          device does not compute and communicate at once; on hosts with separate
                          links by any number of transfers together
    """

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """The same workload."""
        return cls(*(getattr(workload, field.name) for field in fields(Workload)))

    @property
    def host_slots(self) -> tuple[int, ...]:
        """How many devices of each host compute at full speed at once; 0: all."""
        return tuple(host.full_speed_devices for host in self.parts.hosts)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The host of each device position."""
        first = (self.parts.stages[members[0]] for members in self.instances.members)
        return tuple(host for stage in first for host in stage.hosts)

    @cached_property
    def overlaps(self) -> tuple[bool, ...]:
        """Whether each device position computes while it communicates."""
        first = (self.parts.stages[members[0]] for members in self.instances.members)
        return tuple(overlaps for stage in first for overlaps in stage.overlaps)

    @cached_property
    def streams_messages(self) -> tuple[bool, ...]:
        """Whether each of `messages` starts with the action that makes it."""
        first = (self.parts.stages[members[0]] for members in self.instances.members)
        devices = [streams for stage in first for streams in stage.streams_messages]
        return tuple(
            devices[self.replicas[message.sender].position] and message.seconds > 0
            for message in self.messages
        )

    def last_backward(self, replica: Replica) -> tuple[Segment, ...]:
        """The segments of an action that makes the last gradients before an update (B or W)."""
        stage = self.parts.stages[replica.instance]
        buckets = self.buckets_of_segments(replica.instance, stage)
        return tuple(map(Segment, replica.work.segments_s, buckets))

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
    def occupied_by_messages(self) -> tuple[tuple[int, ...], ...]:
        """The resources of each of `messages`."""
        through: dict[tuple[int, int], bool] = {}
        for producer, consumer, boundary in self.parts.boundaries:
            for pair in boundary.pairs:
                i, j = self.starts[producer] + pair.sender, self.starts[consumer] + pair.receiver
                through[i, j], through[j, i] = pair.port_down, pair.port_up
        ends = ((message.sender, message.receiver) for message in self.messages)
        return tuple(self.occupied(*pair, through[pair]) for pair in ends)

    def occupied(self, sender: int, receiver: int, port: bool) -> tuple[int, ...]:
        """The resources that a message between two replicas occupies."""
        ends = (self.replicas[sender].position, self.replicas[receiver].position)
        ports = self.port_numbers(Ports(*((self.hosts[end],) for end in ends))) if port else ()
        wires = self.links.get(ends) or (ends[0], self.receive_engine(ends[1]), *ports)
        first = self.first_link - len(self.devices)
        turns = [first + end for end in ends] if self.parts.in_order else []
        return tuple(dict.fromkeys((*wires, *turns, *self.blocked_streams(ends))))

    @cached_property
    def occupied_by_reductions(self) -> tuple[tuple[int, ...], ...]:
        """The resources of each of `reductions`."""
        made: list[tuple[int, ...]] = []
        for reduction, (_, _, ports) in zip(self.reductions, self.reduced, strict=True):
            positions = dict.fromkeys(self.replicas[m].position for m in reduction.members)
            engines = (*positions, *map(self.receive_engine, positions))
            blocked = self.blocked_streams(tuple(positions))
            made.append(tuple(dict.fromkeys((*engines, *self.port_numbers(ports), *blocked))))
        return tuple(made)

    @cached_property
    def links(self) -> dict[tuple[int, int], tuple[int]]:
        """The resource number of each separate link, by the positions of sender and receiver."""
        made: dict[tuple[int, int], tuple[int]] = {}
        first = self.first_link
        for host, rules in enumerate(self.parts.hosts):
            if rules.separate_links:
                held = [position for position, own in enumerate(self.hosts) if own == host]
                for (i, source), (j, target) in product(enumerate(held), repeat=2):
                    ends = sorted((i, j)) if rules.half_duplex else (i, j)
                    made[source, target] = (first + len(held) * ends[0] + ends[1],)
                first += len(held) ** 2
        return made

    def receive_engine(self, position: int) -> int:
        """The resource number of a device's receive engine."""
        half = self.parts.hosts[self.hosts[position]].half_duplex
        return position if half else self.group_starts[-1] + position

    def port_numbers(self, ports: Ports) -> tuple[int, ...]:
        """Resource numbers of ports."""
        first, hosts = 2 * self.group_starts[-1], len(self.host_slots)
        outgoing = [first + host for host in ports.outgoing]
        half = [rules.half_duplex for rules in self.parts.hosts]
        incoming = [first + host + (0 if half[host] else hosts) for host in ports.incoming]
        return (*outgoing, *incoming)

    def blocked_streams(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Resource numbers of the compute streams that stop while their devices communicate."""
        first, each = self.first_stream, self.streams_each
        return tuple(
            first + position * each + stream
            for position in positions
            if not self.overlaps[position]
            for stream in range(each)
        )

    @property
    def first_link(self) -> int:
        """The resource number of the first separate link."""
        ports = 2 * len(self.host_slots)
        return (2 + self.parts.in_order) * len(self.devices) + ports

    @property
    def first_stream(self) -> int:
        """The resource number of the first compute stream."""
        return self.first_link + len(self.links)

    @property
    def resources(self) -> int:
        """The number of engines, ports, links and compute streams."""
        return self.first_stream + len(self.devices) * self.streams_each

    def talks_at_once(self, position: int) -> bool:
        """Whether a device may run several transfers while it computes nothing."""
        return self.parts.hosts[self.hosts[position]].separate_links
