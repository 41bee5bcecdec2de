"""The rules of the core's engine (`core/play.hpp`) in plain Python: a reference for it."""

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import Literal, TypeAlias

from reference.plain_workload import PlainWorkload, Segment

from penstock.core.native import ReplicaWork
from penstock.schedule.action import Action, ActionKind
from penstock.schedule.message_order import in_planned_order, unit_times
from penstock.schedule.shape import PipelineShape
from penstock.simulate.instances import updating
from penstock.simulate.trace import Span, Trace
from penstock.simulate.workload import DeviceWork, Workload


@dataclass(frozen=True, slots=True)
class Piece:
    """Uninterrupted work of a stream: an action, a segment of one, or an optimizer step.

    A piece without a replica is a step. A piece without a kind makes a stream of forwards wait for
    step ``micro_batch``. Two streams share a device in proportion to ``claim_s``. A forward waits
    until ``after`` pieces of the other stream have ended.
    """

    kind: ActionKind | Literal["STEP", ""]
    seconds: float
    replica: int = -1
    micro_batch: int = 0
    starts: bool = True
    ends: bool = True
    buckets: tuple[int, ...] = ()
    claim_s: float = 0.0
    after: int = 0


def pieces_of_action(
    kind: ActionKind,
    work: ReplicaWork,
    number: int,
    micro_batch: int,
    last_backward: tuple[Segment, ...],
) -> list[Piece]:
    """An action as one piece or, if it completes gradients, as its segments."""
    claim_s = work.forward_s if kind in ("F", "R") else work.backward_s
    if not last_backward:
        return [Piece(kind, work.seconds(kind), number, micro_batch, claim_s=claim_s)]
    last = len(last_backward) - 1
    return [
        Piece(
            kind,
            segment.seconds,
            number,
            micro_batch,
            k == 0,
            k == last,
            segment.buckets,
            claim_s,
        )
        for k, segment in enumerate(last_backward)
    ]


@dataclass(slots=True)
class DeviceState:
    """The state that the streams of a device share.

    ``buckets_left``: buckets that the next step waits for. ``unsent``: messages waiting to be sent.
    """

    buckets: int
    buckets_left: int
    steps_done: int = 0
    unsent: int = 0


@dataclass(slots=True)
class Stream:
    """A compute stream and its pieces of work."""

    device: int
    host: int
    pieces: list[Piece]
    next_piece: int = 0
    computes: bool = False
    ending: bool = False
    finish: float = 0.0
    left: float = 0.0
    since_s: float = 0.0
    work_s: float = 0.0
    claim_s: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])


@dataclass(slots=True)
class Lane:
    """The messages of one pair or the buckets of one reduction, which pass one after the other."""

    resources: tuple[int, ...]
    seconds: list[float]
    spans: list[Span]
    waiting: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    current: int = -1


@dataclass(slots=True)
class Processor:
    """The compute slots of a host, with the virtual time that all its running devices share."""

    slots: int
    running: set[int] = field(default_factory=set[int])
    progress: float = 0.0
    since_s: float = 0.0


Input: TypeAlias = Literal["F", "B", "own"]
"""Messages of a direction, or the replica's own forward."""

Key: TypeAlias = tuple[int, Input, int]
"""What an action waits for: replica, input, micro-batch."""

AWAITED: dict[ActionKind, tuple[Input, ...]] = {
    "F": ("F",),
    "B": ("B", "own"),
    "I": ("B", "own"),
    "W": (),
    "R": ("own",),
}
"""The inputs of each kind of action. "own" counts only if forwards have a stream of their own."""


class Play:
    """One play of a workload. The sources of events are numbered: streams, then lanes."""

    def __init__(self, workload: PlainWorkload) -> None:
        self.workload = workload
        self.now_s = 0.0
        self.sequence = 0
        self.first_reduction = len(workload.messages)
        sizes = (len(group.buckets) for group in workload.reductions)
        self.first_bucket = list(accumulate(sizes, initial=0))
        self.lanes = self.make_lanes()
        self.devices = [self.make_device(position) for position in range(len(workload.devices))]
        self.streams = [
            Stream(position, workload.hosts[position], pieces)
            for position, work in enumerate(workload.devices)
            for pieces in self.pieces_of(work)
        ]
        self.first_stream = workload.first_stream
        self.processors = [Processor(slots) for slots in workload.host_slots]
        self.busy = [0] * workload.resources
        self.shared = {
            self.first_stream + number
            for number, stream in enumerate(self.streams)
            if workload.talks_at_once(stream.device)
        }
        self.lanes_of: list[list[int]] = [[] for _ in self.busy]
        for index, lane in enumerate(self.lanes):
            for resource in lane.resources:
                self.lanes_of[resource].append(index)
        self.inputs = self.make_inputs()
        self.members_left = [self.working_members(b) for b in range(self.first_bucket[-1])]
        self.rounds_done = [0] * self.first_bucket[-1]
        self.turns = self.make_turns() if workload.parts.in_order else {}
        self.ready_to_step: dict[int, set[int]] = defaultdict(set)
        self.next_s = [inf] * (len(self.streams) + len(self.lanes))
        self.heap: list[tuple[float, int]] = []

    def make_lanes(self) -> list[Lane]:
        """One lane for each message of the workload, then one for each reduction."""
        count = self.workload.micro_batches
        lanes = [
            Lane(occupied, [message.seconds] * count, [(0.0, 0.0)] * count)
            for message, occupied in zip(
                self.workload.messages, self.workload.occupied_by_messages, strict=True
            )
        ]
        reductions = zip(
            self.workload.reductions, self.workload.occupied_by_reductions, strict=True
        )
        for group, occupied in reductions:
            seconds = [bucket.seconds for bucket in group.buckets] * group.rounds
            lanes.append(Lane(occupied, seconds, [(0.0, 0.0)] * len(seconds)))
        return lanes

    def make_device(self, position: int) -> DeviceState:
        """A device, with the number of buckets that each of its steps waits for."""
        held = self.workload.devices[position].replicas
        buckets = sum(
            len(group.buckets) * sum(instance in held for instance in group.instances)
            for group in self.workload.reductions
        )
        return DeviceState(buckets, buckets)

    def pieces_of(self, work: DeviceWork) -> list[list[Piece]]:
        """The pieces of each stream of a device, for all iterations."""
        workload, order = self.workload, self.workload.schedule.of(work.group)
        instances = [workload.instances.of(action) for action in order]
        per_update = workload.instances.micro_batches_per_update
        marked: list[bool] = updating(order, instances, per_update).tolist()
        streams: list[list[Piece]] = [[] for _ in range(workload.streams_each)]
        first = workload.parts.stages[workload.instances.members[work.group][0]]
        index = first.devices.index(work.device)
        after = 0
        for iteration in range(workload.iterations):
            if len(streams) > 1 and iteration:
                streams[0].append(Piece("", 0.0, micro_batch=iteration))
            for action, instance, updates in zip(order, instances, marked, strict=True):
                number = workload.starts[instance] + index
                micro_batch = action.micro_batch + iteration * workload.micro_batches_per_iteration
                stream = streams[0] if action.kind == "F" else streams[-1]
                replica = workload.replicas[number]
                last = workload.last_backward(replica) if updates else ()
                made = pieces_of_action(action.kind, replica.work, number, micro_batch, last)
                stream += [replace(piece, after=after) for piece in made]
                if len(streams) > 1 and action.kind != "F":
                    after = len(stream)
                if updates and per_update:
                    stream.append(Piece("STEP", work.step_s, claim_s=work.step_s))
            if not per_update:
                streams[-1].append(Piece("STEP", work.step_s, claim_s=work.step_s))
        return streams

    def make_inputs(self) -> dict[Key, int]:
        """How many inputs each action waits for; concurrent backwards also wait for a forward."""
        workload, inputs = self.workload, dict[Key, int]()
        for message, streams in zip(workload.messages, workload.streams_messages, strict=True):
            sent = workload.works_on[workload.replicas[message.sender].instance]
            for m in range(workload.micro_batches):
                if m % workload.micro_batches_per_iteration not in sent:
                    continue
                key: Key = (message.receiver, message.direction, m)
                ends = 2 if streams else 1  # of the transfer, and of the action that makes it
                inputs[key] = inputs.get(key, 0) + ends
        if workload.schedule.concurrent:
            for replica in range(len(workload.replicas)):
                for m in range(workload.micro_batches):
                    inputs[replica, "own", m] = 1
        return inputs

    def make_turns(self) -> dict[int, list[int]]:
        """The lanes of every device's messages, in the order that the runtime plans for NCCL."""
        workload, turns = self.workload, dict[int, list[int]]()
        shape = PipelineShape(len(workload.instances.copies), workload.micro_batches_per_iteration)
        times = unit_times([list(order) for order in workload.schedule.orders], shape)
        sent: list[tuple[Action, int, int]] = []
        for index, message in enumerate(workload.messages):
            sender, receiver = (workload.replicas[r] for r in (message.sender, message.receiver))
            for action in times:
                if (
                    message.seconds > 0
                    and action.kind in ("F" if message.direction == "F" else "BI")
                    and workload.instances.of(action) == sender.instance
                    and action.micro_batch in workload.works_on[receiver.instance]
                ):
                    sent.append((action, workload.devices[sender.position].device, index))
        for index in in_planned_order(sent, times) * workload.iterations:
            for position in self.ends_of(index):
                turns.setdefault(position, []).append(index)
        return turns

    def ends_of(self, index: int) -> tuple[int, int]:
        """The positions of the devices between which a message goes."""
        message, replicas = self.workload.messages[index], self.workload.replicas
        return replicas[message.sender].position, replicas[message.receiver].position

    def working_members(self, bucket: int) -> int:
        """How many members of a reduction have gradients; some mirrored stages have no work."""
        group = self.workload.reductions[self.group_of(bucket)]
        instances = (self.workload.replicas[member].instance for member in group.members)
        return sum(self.workload.instances.rounds[instance] > 0 for instance in instances)

    def group_of(self, bucket: int) -> int:
        """The reduction that a bucket belongs to."""
        return max(g for g, first in enumerate(self.first_bucket[:-1]) if first <= bucket)

    def run(self) -> Trace:
        """Play to the end."""
        for number in range(len(self.streams)):
            self.start_if_ready(number)
        while self.heap:
            time_s, source = heappop(self.heap)
            if self.next_s[source] == time_s:
                self.now_s = time_s
                self.next_s[source] = inf
                if source < len(self.streams):
                    self.end_piece(source)
                else:
                    self.end_transfer(source - len(self.streams))
        return self.trace()

    def schedule_event(self, source: int, time_s: float) -> None:
        """Set the next event of ``source`` to ``time_s``, instead of any earlier setting."""
        self.next_s[source] = time_s
        heappush(self.heap, (time_s, source))

    def is_ready(self, stream: Stream) -> bool:
        """Whether the inputs of the next piece have arrived."""
        piece, device = stream.pieces[stream.next_piece], self.devices[stream.device]
        match piece.kind:
            case "":
                return device.steps_done >= piece.micro_batch
            case "STEP":
                return device.buckets_left == 0 and self.all_may_step(stream.device)
            case "F" | "B" | "I" | "W" | "R":
                keys: list[Key] = [
                    (piece.replica, source, piece.micro_batch) for source in AWAITED[piece.kind]
                ]
                if piece.kind == "F" and self.last_stream(stream.device).next_piece < piece.after:
                    return False
                return not piece.starts or not any(self.inputs.get(key, 0) for key in keys)

    def all_may_step(self, position: int) -> bool:
        """Whether all are ready for a step that all take together; the last tells the others."""
        if not self.workload.steps_together:
            return True
        ready = self.ready_to_step[self.devices[position].steps_done]
        comes_last = position not in ready and len(ready) == len(self.devices) - 1
        ready.add(position)
        if comes_last:
            for number, stream in enumerate(self.streams):
                if stream.device != position:
                    self.start_if_ready(number)
        return len(ready) == len(self.devices)

    def start_if_ready(self, number: int) -> None:
        """Start the next piece of a stream if it is idle and its inputs have arrived."""
        stream = self.streams[number]
        if stream.ending or self.busy[self.first_stream + number] or self.holds_back(stream.device):
            return
        while stream.next_piece < len(stream.pieces) and self.is_ready(stream):
            piece = stream.pieces[stream.next_piece]
            if not piece.kind:
                stream.next_piece += 1
                continue
            if piece.starts:
                stream.spans.append((piece.kind, self.now_s, self.now_s))
            self.occupy(number, piece)
            if piece.starts:
                self.send(piece, begins=True)
            return

    def holds_back(self, position: int) -> bool:
        """Whether a device that does not overlap has messages waiting to be sent."""
        return self.devices[position].unsent > 0 and not self.workload.overlaps[position]

    def count_unsent(self, index: int, change: int) -> None:
        """Count a message of a lane that starts or stops waiting."""
        if index < self.first_reduction:
            sender = self.workload.messages[index].sender
            self.devices[self.workload.replicas[sender].position].unsent += change

    def last_stream(self, device: int) -> Stream:
        """The stream that runs a device's backwards."""
        return self.streams[self.streams_of(device)[-1]]

    def occupy(self, number: int, piece: Piece) -> None:
        """Begin work on a stream; streams that share its device or its host's slots slow down."""
        stream = self.streams[number]
        self.busy[self.first_stream + number] = 1
        with self.changing(number):
            stream.computes = True
            stream.work_s, stream.claim_s = piece.seconds, piece.claim_s
        processor = self.processors[stream.host]
        processor.running.add(number)
        stream.left, stream.since_s = 1.0, processor.progress
        stream.finish = processor.progress + self.seconds_of(number)
        self.retime(processor, number)

    def vacate(self, number: int) -> None:
        """End work on a stream; streams that share its device or its host's slots speed up."""
        stream = self.streams[number]
        self.busy[self.first_stream + number] = 0
        with self.changing(number):
            stream.computes = False
        processor = self.processors[stream.host]
        processor.running.remove(number)
        self.retime(processor, number)

    @contextmanager
    def changing(self, number: int) -> Generator[None]:
        """Advance a host to now, and keep the work left on the device's other stream unchanged."""
        processor = self.processors[self.streams[number].host]
        self.advance(processor)
        others = [
            other
            for other in self.streams_of(self.streams[number].device)
            if other != number and self.streams[other].computes and self.seconds_of(other) > 0
        ]
        for other in others:
            stream = self.streams[other]
            stream.left -= (processor.progress - stream.since_s) / self.seconds_of(other)
            stream.since_s = processor.progress
        yield
        for other in others:
            stream = self.streams[other]
            stream.finish = processor.progress + stream.left * self.seconds_of(other)

    def seconds_of(self, number: int) -> float:
        """Seconds of a stream's whole piece at its present share of the device."""
        stream = self.streams[number]
        running = [self.streams[each] for each in self.streams_of(stream.device)]
        claims = [each.claim_s for each in running if each.computes]
        if len(claims) < 2 or stream.claim_s == 0:
            return stream.work_s
        return stream.work_s / stream.claim_s * sum(claims)

    def rate(self, processor: Processor) -> float:
        """Seconds of work that each running device does in a second."""
        devices = {self.streams[number].device for number in processor.running}
        return min(1.0, processor.slots / len(devices)) if devices else 1.0

    def advance(self, processor: Processor) -> None:
        """Advance the virtual time of a host to now; it is the real time if slots suffice."""
        if processor.slots:
            processor.progress += self.rate(processor) * (self.now_s - processor.since_s)
            processor.since_s = self.now_s
        else:
            processor.progress = self.now_s

    def retime(self, processor: Processor, number: int) -> None:
        """Move the ends of all work that a begin or end on stream ``number`` changes."""
        if processor.slots == 0:
            for each in self.streams_of(self.streams[number].device):
                if self.streams[each].computes:
                    self.schedule_event(each, self.streams[each].finish)
            return
        rate = self.rate(processor)
        for each in processor.running:
            left = max(0.0, self.streams[each].finish - processor.progress)
            self.schedule_event(each, self.now_s + left / rate)

    def end_piece(self, number: int) -> None:
        """End a piece of work: send its results, then start what can start."""
        stream = self.streams[number]
        piece = stream.pieces[stream.next_piece]
        stream.next_piece += 1
        stream.spans[-1] = (*stream.spans[-1][:2], self.now_s)
        self.vacate(number)
        stream.ending = True
        self.start_waiting(self.lanes_of[self.first_stream + number])
        if piece.kind == "STEP":
            self.end_step(stream.device)
        elif piece.ends:
            self.send(piece, begins=False)
        for bucket in piece.buckets:
            self.members_left[bucket] -= 1
            if self.members_left[bucket] == 0:
                self.complete(bucket)
        stream.ending = False
        if piece.kind == "F" and piece.ends:
            self.inputs.pop((piece.replica, "own", piece.micro_batch), None)
        for each in self.streams_of(stream.device):
            self.start_if_ready(each)

    def streams_of(self, device: int) -> range:
        """The numbers of the streams of a device."""
        each = self.workload.streams_each
        return range(device * each, device * each + each)

    def end_step(self, device: int) -> None:
        """Count a step as done; the next step waits for all buckets again."""
        self.devices[device].buckets_left += self.devices[device].buckets
        self.devices[device].steps_done += 1

    def send(self, piece: Piece, *, begins: bool) -> None:
        """Offer the messages of a forward or a backward: as it begins those that stream, else all
        others. Of those that stream the end of the action is one of two ends."""
        if piece.kind in ("F", "B", "I"):
            direction = "F" if piece.kind == "F" else "B"
            for index, message in enumerate(self.workload.messages):
                if message.sender != piece.replica or message.direction != direction:
                    continue
                taken = self.workload.works_on[self.workload.replicas[message.receiver].instance]
                number = piece.micro_batch % self.workload.micro_batches_per_iteration
                if number not in taken:
                    continue
                if self.workload.streams_messages[index] == begins:
                    self.offer(index, piece.micro_batch)
                elif not begins:
                    self.arrive(index, piece.micro_batch)

    def complete(self, bucket: int) -> None:
        """All members have the gradients of a bucket: offer it."""
        self.members_left[bucket] = self.working_members(bucket)
        group = self.group_of(bucket)
        size = self.first_bucket[group + 1] - self.first_bucket[group]
        item = self.rounds_done[bucket] * size + bucket - self.first_bucket[group]
        self.rounds_done[bucket] += 1
        self.offer(self.first_reduction + group, item)

    def offer(self, index: int, item: int) -> None:
        """A message or bucket is ready: start it, or queue it."""
        lane = self.lanes[index]
        if lane.seconds[item] == 0:
            lane.spans[item] = (self.now_s, self.now_s)
            self.arrive(index, item)
            return
        lane.waiting.append((self.sequence, item))
        self.count_unsent(index, 1)
        self.sequence += 1
        if self.can_start(index) and len(lane.waiting) == 1:
            self.start_transfer(index)

    def can_start(self, index: int) -> bool:
        """Whether all resources of a lane are free, and both devices turn to it."""
        if self.turns and index < self.first_reduction:
            ends = self.ends_of(index)
            if any(self.turns[position][0] != index for position in ends):
                return False
        return not any(map(self.is_taken, self.lanes[index].resources))

    def is_taken(self, resource: int) -> bool:
        """Whether a transfer must wait for a resource; some streams allow several transfers."""
        if resource in self.shared:
            return self.streams[resource - self.first_stream].computes
        return self.busy[resource] > 0

    def start_transfer(self, index: int) -> None:
        """Occupy the lane's resources with the first item of its queue."""
        lane = self.lanes[index]
        _, lane.current = lane.waiting.pop(0)
        self.count_unsent(index, -1)
        for resource in lane.resources:
            self.busy[resource] += 1
        end_s = self.now_s + lane.seconds[lane.current]
        lane.spans[lane.current] = (self.now_s, end_s)
        self.schedule_event(len(self.streams) + index, end_s)

    def start_waiting(self, lanes: list[int]) -> None:
        """Start what can start of ``lanes``: messages first, then the oldest."""
        while True:
            startable = [
                (index >= self.first_reduction, self.lanes[index].waiting[0], index)
                for index in lanes
                if self.lanes[index].waiting and self.can_start(index)
            ]
            if not startable:
                break
            self.start_transfer(min(startable)[-1])

    def end_transfer(self, index: int) -> None:
        """Free the lane's resources, start what waited for them, deliver the item, resume work."""
        lane = self.lanes[index]
        done = lane.current  # The lane may start its next item below.
        for resource in lane.resources:
            self.busy[resource] -= 1
        if self.turns and index < self.first_reduction:
            for position in self.ends_of(index):
                del self.turns[position][0]
        neighbours = {other for resource in lane.resources for other in self.lanes_of[resource]}
        self.start_waiting(sorted(neighbours))
        self.arrive(index, done)
        for resource in lane.resources:
            if resource >= self.first_stream:
                self.start_if_ready(resource - self.first_stream)

    def arrive(self, index: int, item: int) -> None:
        """Deliver a message, or the sum of a bucket."""
        workload = self.workload
        if index < self.first_reduction:
            message = workload.messages[index]
            self.inputs[message.receiver, message.direction, item] -= 1
            streams = self.streams_of(workload.replicas[message.receiver].position)
            self.start_if_ready(streams[0] if message.direction == "F" else streams[-1])
        else:
            for member in workload.reductions[index - self.first_reduction].members:
                position = workload.replicas[member].position
                self.devices[position].buckets_left -= 1
                self.start_if_ready(self.streams_of(position)[-1])

    def trace(self) -> Trace:
        """The spans of everything."""
        actions: list[Span] = []
        steps: list[Span] = []
        for stream in self.streams:
            for kind, start_s, end_s in stream.spans:
                (steps if kind == "STEP" else actions).append((start_s, end_s))
        messages, reductions = (
            self.lanes[: self.first_reduction],
            self.lanes[self.first_reduction :],
        )
        return Trace(
            actions=tuple(actions),
            messages=tuple(span for lane in messages for span in lane.spans),
            buckets=tuple(span for lane in reductions for span in lane.spans),
            steps=tuple(steps),
            iteration_s=self.now_s,
        )


def play(workload: Workload) -> Trace:
    """Play all iterations. The schedule must be valid; otherwise the trace ends at the deadlock."""
    return Play(PlainWorkload.of(workload)).run()
