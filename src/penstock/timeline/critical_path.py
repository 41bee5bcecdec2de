"""What a timeline's length is made of: the chain of events that held up its end."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.timeline.metrics import COMPUTE
from penstock.timeline.timeline import Event, EventKind, Timeline

__all__ = ["PathStep", "critical_path", "seconds_on_path"]

MAKES_GRADIENTS: frozenset[EventKind] = frozenset({"B", "W"})
"""Events that complete gradients, bucket after bucket, before they end."""

SENDERS_WORK: tuple[EventKind, ...] = ("F", "B", "I")
"""Events whose results are sent."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """An event of the critical path, as far as the next one waited for it.

    ``until_s`` is the end of the event, or, for the backward in whose midst a gradient bucket
    became complete, the start of the bucket's all-reduce. ``waited_s`` is the time since the step
    before that no event explains: 0 in a simulated timeline.
    """

    event: Event
    until_s: float
    waited_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The event's own share of the path."""
        return self.until_s - self.event.start_s


def critical_path(timeline: Timeline, tolerance_s: float = 1e-9) -> tuple[PathStep, ...]:
    """The chain of events that ends last, each held up by the one before it, in order of time.

    Going back from the event that ends last, the cause of an event is, of those it can have
    waited for, the one that ended last before it started: the work before it on its device, the
    message that brought its input, the work that made a message or whatever occupied its engines,
    the backward that filled a gradient bucket. Of causes that end together the device's own work
    counts. Events do not name their causes, so in a measured timeline the path is a likely one.
    The seconds and waits of all steps add up to the iteration.
    """
    if not timeline.events:
        return ()
    causes = CauseIndex(timeline, tolerance_s)
    event = max(timeline.events, key=lambda event: (event.end_s, event.start_s))
    until_s, steps, seen = event.end_s, list[PathStep](), set[int]()
    while True:
        seen.add(id(event))
        cause = causes.of(event, seen)
        if cause is None:
            steps.append(PathStep(event, until_s, event.start_s))
            return tuple(reversed(steps))
        cause_until_s = min(cause.end_s, event.start_s)
        steps.append(PathStep(event, until_s, event.start_s - cause_until_s))
        event, until_s = cause, cause_until_s


def seconds_on_path(path: Iterable[PathStep]) -> dict[tuple[EventKind, int], float]:
    """Seconds of the path by kind and stage of its events; waits are left out."""
    seconds: dict[tuple[EventKind, int], float] = defaultdict(float)
    for step in path:
        seconds[step.event.kind, step.event.stage] += step.seconds
    return dict(seconds)


class EventsByEnd:
    """Events sorted by end, to find those that ended last before a time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: (event.end_s, event.start_s))
        self.ends_s = [event.end_s for event in self.events]

    def before(self, time_s: float, seen: set[int]) -> Event | None:
        """The last that ended up to ``time_s`` and is not among ``seen``."""
        for index in range(bisect_right(self.ends_s, time_s) - 1, -1, -1):
            if id(self.events[index]) not in seen:
                return self.events[index]
        return None


NOTHING = EventsByEnd(())


class CauseIndex:
    """The events of a timeline by what can have waited for them."""

    def __init__(self, timeline: Timeline, tolerance_s: float) -> None:
        self.tolerance_s = tolerance_s
        compute: dict[int, list[Event]] = defaultdict(list)
        outgoing: dict[int, list[Event]] = defaultdict(list)
        incoming: dict[int, list[Event]] = defaultdict(list)
        self.inputs: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self.work: dict[tuple[EventKind, int, int], list[Event]] = defaultdict(list)
        self.made_on: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self.members: dict[tuple[float, float, float], list[int]] = defaultdict(list)
        self.last_gradients: dict[int, Event] = {}
        for event in timeline.events:
            device, m = event.device, event.micro_batch
            if event.kind in COMPUTE:
                compute[device].append(event)
                self.work[event.kind, event.stage, m].append(event)
                if event.kind in SENDERS_WORK:
                    self.made_on[device, m].append(event)
                if event.kind in MAKES_GRADIENTS:
                    self.last_gradients[device] = event
            if event.kind in ("SEND", "REDUCE"):
                outgoing[device].append(event)
            if event.kind in ("RECV", "REDUCE"):
                incoming[device].append(event)
            if event.kind == "RECV":
                self.inputs[device, m].append(event)
            if event.kind == "REDUCE":
                self.members[event.start_s, event.end_s, event.bytes].append(device)
        self.compute = {device: EventsByEnd(events) for device, events in compute.items()}
        self.outgoing = {device: EventsByEnd(events) for device, events in outgoing.items()}
        self.incoming = {device: EventsByEnd(events) for device, events in incoming.items()}
        self.transfers = EventsByEnd(e for events in incoming.values() for e in events)

    def of(self, event: Event, seen: set[int]) -> Event | None:
        """What held up ``event``: none of ``seen``; nothing where it could start at once."""
        match event.kind:
            case "SEND" | "RECV":
                return self.of_message(event, seen)
            case "REDUCE":
                return self.of_reduction(event, seen)
            case "F" | "B" | "I" | "R" | "W" | "STEP":
                return self.latest(event, self.causes_of_work(event, seen), seen)

    def causes_of_work(self, event: Event, seen: set[int]) -> list[Event | None]:
        """The device's work before, then the inputs, or the gradients that a step needs."""
        device, stage, m = event.device, event.stage, event.micro_batch
        before = self.ended(self.compute, device, event, seen)
        match event.kind:
            case "F":
                return [before, *self.inputs[device, m], *self.work["F", stage - 1, m]]
            case "B" | "I":
                above = (*self.work["B", stage + 1, m], *self.work["I", stage + 1, m])
                return [before, *self.inputs[device, m], *above]
            case "STEP":
                return [before, self.ended(self.outgoing, device, event, seen)]
            case _:
                return [before]

    def of_message(self, event: Event, seen: set[int]) -> Event | None:
        """The work that made a message, else what occupied an engine or a port until it left."""
        device, peer = event.device, event.peer
        sender, receiver = (device, peer) if event.kind == "SEND" else (peer, device)
        causes = [
            *self.made_on[sender, event.micro_batch],
            self.ended(self.outgoing, sender, event, seen),
            self.ended(self.incoming, receiver, event, seen),
        ]
        return self.or_port(event, self.latest(event, causes, seen), seen)

    def of_reduction(self, event: Event, seen: set[int]) -> Event | None:
        """What occupied an engine of a member until then, else the backward that filled the bucket.

        Buckets fill in the midst of the last backward, which then ends after the all-reduce began.
        """
        members = self.members[event.start_s, event.end_s, event.bytes]
        engines = [
            self.ended(engine, member, event, seen)
            for member in members
            for engine in (self.outgoing, self.incoming)
        ]
        found = self.latest(event, engines, seen)
        if found and found.end_s >= event.start_s - self.tolerance_s:
            return found
        filling = [
            work
            for member in members
            if (work := self.last_gradients.get(member)) and work.start_s < event.start_s
        ]
        last = max(filling, key=lambda w: (min(w.end_s, event.start_s), w.start_s), default=found)
        return self.or_port(event, last, seen)

    def or_port(self, event: Event, found: Event | None, seen: set[int]) -> Event | None:
        """The cause found where it explains the start; else a transfer that ended just then.

        Transfers between other devices can occupy a port that hosts share.
        """
        just_then_s = event.start_s - self.tolerance_s
        if found is None or found.end_s < just_then_s:
            other = self.transfers.before(event.start_s + self.tolerance_s, seen)
            if other and other.end_s >= just_then_s:
                return other
        return found

    def ended(
        self, events: dict[int, EventsByEnd], device: int, event: Event, seen: set[int]
    ) -> Event | None:
        """The last of a device's events that ended before ``event`` started."""
        return events.get(device, NOTHING).before(event.start_s + self.tolerance_s, seen)

    def latest(self, event: Event, causes: Sequence[Event | None], seen: set[int]) -> Event | None:
        """Of causes that ended before ``event`` started the last; the first of those that tie."""
        limit_s = event.start_s + self.tolerance_s
        fitting = [c for c in causes if c and c.end_s <= limit_s and id(c) not in seen]
        if not fitting:
            return None
        last_s = max(cause.end_s for cause in fitting)
        return next(cause for cause in fitting if cause.end_s >= last_s - self.tolerance_s)
