"""The rules of the simulator in plain Python: the reference that the compiled engine must equal.

    compute     one stream a device; actions start in schedule order once their inputs are there;
                the optimizer steps once the device's gradients are reduced
    slots       of the devices of a host, `host_slots` compute at full speed; when more compute,
                all of them slow down alike: rate = slots / computing
    messages    leave when their action has ended and occupy the sender's send engine, the
                receiver's receive engine and, between hosts, both ports, all at once; of those
                that wait, the one that was ready first starts first; one that is blocked does not
                block others
    reductions  a bucket occupies both engines of its members (and ports) when all of them have
                its gradients; messages that can start go first

Ties in time are broken by the order of devices, then messages, then reductions.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from penstock.schedule.action import Action
from penstock.simulate.trace import Span, Trace
from penstock.simulate.workload import Workload

__all__ = ["play"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Uninterrupted work of a device: an action, a segment of its last backward, or the step."""

    action: Action | None
    seconds: float
    starts: bool = True
    ends: bool = True
    buckets: tuple[int, ...] = ()


@dataclass(slots=True)
class Computer:
    """A device while it plays its pieces."""

    host: int
    pieces: list[Piece]
    inputs: dict[tuple[str, int], int]
    buckets_left: int = 0
    next_piece: int = 0
    running: bool = False
    finish: float = 0.0
    spans: list[list[float]] = field(default_factory=list[list[float]])

    def is_ready(self) -> bool:
        """Whether the next piece has its inputs."""
        piece = self.pieces[self.next_piece]
        if piece.action is None:
            return self.buckets_left == 0
        kind = {"F": "F", "B": "B", "I": "B"}.get(piece.action.kind, "")
        return not piece.starts or not self.inputs.get((kind, piece.action.micro_batch), 0)


@dataclass(slots=True)
class Lane:
    """Messages of one pair, or buckets of one group: one after the other on the same resources."""

    resources: tuple[int, ...]
    seconds: list[float]
    spans: list[Span]
    waiting: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    current: int = -1


@dataclass(slots=True)
class Processor:
    """The compute slots of one host: virtual time that all its running devices share."""

    slots: int
    running: set[int] = field(default_factory=set[int])
    progress: float = 0.0
    since_s: float = 0.0

    def rate(self) -> float:
        """Seconds of work that each running device does in a second."""
        return min(1.0, self.slots / len(self.running)) if self.running else 1.0


class Play:
    """One run of the rules; sources of events are devices, then lanes."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.now_s = 0.0
        self.sequence = 0
        self.first_reduction = len(workload.messages)
        self.first_bucket: list[int] = []
        self.lanes = self.make_lanes()
        self.computers = [self.make_computer(position) for position in range(len(workload.devices))]
        self.processors = [Processor(slots) for slots in workload.host_slots]
        self.busy = [False] * workload.resources
        self.lanes_of: list[list[int]] = [[] for _ in self.busy]
        for index, lane in enumerate(self.lanes):
            for resource in lane.resources:
                self.lanes_of[resource].append(index)
        self.members_left = [
            len(group.members) for group in workload.reductions for _ in group.buckets
        ]
        self.next_s = [inf] * (len(self.computers) + len(self.lanes))
        self.heap: list[tuple[float, int]] = []

    def make_lanes(self) -> list[Lane]:
        """One lane for each message of the workload, then one for each reduction."""
        count = self.workload.micro_batches
        lanes = [
            Lane(m.resources, [m.seconds] * count, [(0.0, 0.0)] * count)
            for m in self.workload.messages
        ]
        for group in self.workload.reductions:
            self.first_bucket.append(sum(len(r.seconds) for r in lanes[self.first_reduction :]))
            seconds = [bucket.seconds for bucket in group.buckets]
            lanes.append(Lane(group.resources, seconds, [(0.0, 0.0)] * len(seconds)))
        return lanes

    def make_computer(self, position: int) -> Computer:
        """The pieces of one device and what they wait for."""
        work = self.workload.devices[position]
        pieces: list[Piece] = []
        for index, action in enumerate(self.workload.schedule.of(work.stage)):
            if index == self.workload.last_backward[work.stage]:
                last = len(work.last_backward) - 1
                for i, segment in enumerate(work.last_backward):
                    pieces.append(
                        Piece(action, segment.seconds, i == 0, i == last, segment.buckets)
                    )
            else:
                pieces.append(Piece(action, work.seconds(action.kind)))
        pieces.append(Piece(None, work.step_s))
        inputs: dict[tuple[str, int], int] = {}
        for message in self.workload.messages:
            if message.receiver == position:
                for m in range(self.workload.micro_batches):
                    key = (message.direction, m)
                    inputs[key] = inputs.get(key, 0) + 1
        groups = (group for group in self.workload.reductions if position in group.members)
        return Computer(work.host, pieces, inputs, sum(len(group.buckets) for group in groups))

    def run(self) -> Trace:
        """Play to the end."""
        for position in range(len(self.computers)):
            self.start_if_ready(position)
        while self.heap:
            time_s, source = heappop(self.heap)
            if self.next_s[source] == time_s:
                self.now_s = time_s
                self.next_s[source] = inf
                if source < len(self.computers):
                    self.end_piece(source)
                else:
                    self.end_transfer(source - len(self.computers))
        return self.trace()

    def schedule_event(self, source: int, time_s: float) -> None:
        """Let ``source`` act at ``time_s`` instead of any earlier appointment."""
        self.next_s[source] = time_s
        heappush(self.heap, (time_s, source))

    def start_if_ready(self, position: int) -> None:
        """Start the next piece of a device that is idle and has its inputs."""
        computer = self.computers[position]
        if computer.running or computer.next_piece == len(computer.pieces):
            return
        if computer.is_ready():
            piece = computer.pieces[computer.next_piece]
            computer.running = True
            if piece.starts:
                computer.spans.append([self.now_s, self.now_s])
            self.occupy(position, piece.seconds)

    def occupy(self, position: int, seconds: float) -> None:
        """Begin work on a device; where the host's slots are limited, slow the others down."""
        processor = self.processors[self.computers[position].host]
        if processor.slots == 0:
            self.schedule_event(position, self.now_s + seconds)
            return
        processor.progress += processor.rate() * (self.now_s - processor.since_s)
        processor.since_s = self.now_s
        processor.running.add(position)
        self.computers[position].finish = processor.progress + seconds
        self.retime(processor)

    def vacate(self, position: int) -> None:
        """End work on a device; where the host's slots are limited, speed the others up."""
        processor = self.processors[self.computers[position].host]
        if processor.slots:
            processor.progress += processor.rate() * (self.now_s - processor.since_s)
            processor.since_s = self.now_s
            processor.running.remove(position)
            self.retime(processor)

    def retime(self, processor: Processor) -> None:
        """Move the ends of all work on a host to its present rate."""
        rate = processor.rate()
        for position in processor.running:
            left = max(0.0, self.computers[position].finish - processor.progress)
            self.schedule_event(position, self.now_s + left / rate)

    def end_piece(self, position: int) -> None:
        """A piece of work has ended: send what it made, then go on."""
        computer = self.computers[position]
        piece = computer.pieces[computer.next_piece]
        computer.running = False
        computer.next_piece += 1
        computer.spans[-1][1] = self.now_s
        self.vacate(position)
        if piece.action and piece.ends and piece.action.kind in "FBI":
            direction = "F" if piece.action.kind == "F" else "B"
            for index, message in enumerate(self.workload.messages):
                if message.sender == position and message.direction == direction:
                    self.offer(index, piece.action.micro_batch)
        for bucket in piece.buckets:
            self.members_left[bucket] -= 1
            if self.members_left[bucket] == 0:
                group = max(g for g, first in enumerate(self.first_bucket) if first <= bucket)
                self.offer(self.first_reduction + group, bucket - self.first_bucket[group])
        self.start_if_ready(position)

    def offer(self, index: int, item: int) -> None:
        """A message or bucket is ready: start it if it can, else let it wait."""
        lane = self.lanes[index]
        if lane.seconds[item] == 0:
            lane.spans[item] = (self.now_s, self.now_s)
            self.arrive(index, item)
            return
        lane.waiting.append((self.sequence, item))
        self.sequence += 1
        if self.can_start(index) and len(lane.waiting) == 1:
            self.start_transfer(index)

    def can_start(self, index: int) -> bool:
        """Whether everything that a lane needs is free."""
        return not any(self.busy[resource] for resource in self.lanes[index].resources)

    def start_transfer(self, index: int) -> None:
        """Occupy the lane's resources with the first item that waits."""
        lane = self.lanes[index]
        _, lane.current = lane.waiting.pop(0)
        for resource in lane.resources:
            self.busy[resource] = True
        end_s = self.now_s + lane.seconds[lane.current]
        lane.spans[lane.current] = (self.now_s, end_s)
        self.schedule_event(len(self.computers) + index, end_s)

    def end_transfer(self, index: int) -> None:
        """Free the lane's resources, start what waited for them, deliver."""
        lane = self.lanes[index]
        done = lane.current  # the lane may start its next item below
        for resource in lane.resources:
            self.busy[resource] = False
        neighbours = {other for resource in lane.resources for other in self.lanes_of[resource]}
        while True:
            startable = [
                (other >= self.first_reduction, self.lanes[other].waiting[0], other)
                for other in neighbours
                if self.lanes[other].waiting and self.can_start(other)
            ]
            if not startable:
                break
            self.start_transfer(min(startable)[-1])
        self.arrive(index, done)

    def arrive(self, index: int, item: int) -> None:
        """Deliver a message, or the sum of a bucket."""
        if index < self.first_reduction:
            message = self.workload.messages[index]
            self.computers[message.receiver].inputs[message.direction, item] -= 1
            self.start_if_ready(message.receiver)
        else:
            for position in self.workload.reductions[index - self.first_reduction].members:
                self.computers[position].buckets_left -= 1
                self.start_if_ready(position)

    def trace(self) -> Trace:
        """The spans of everything."""
        spans = [[(start, end) for start, end in c.spans] for c in self.computers]
        messages, reductions = (
            self.lanes[: self.first_reduction],
            self.lanes[self.first_reduction :],
        )
        return Trace(
            actions=tuple(span for device in spans for span in device[:-1]),
            messages=tuple(span for lane in messages for span in lane.spans),
            buckets=tuple(span for lane in reductions for span in lane.spans),
            steps=tuple(device[-1] for device in spans),
            iteration_s=self.now_s,
        )


def play(workload: Workload) -> Trace:
    """Play one iteration; the schedule must be valid, or the trace ends where it is stuck."""
    return Play(workload).run()
