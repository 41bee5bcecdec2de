"""The critical path of a timeline: the chain of events that determines its length."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.timeline.timeline import Event, EventKind, Timeline

MAKES_GRADIENTS: frozenset[EventKind] = frozenset({"B", "W"})
"""Events during which gradient buckets become complete."""

SENDERS_WORK: tuple[EventKind, ...] = ("F", "B", "I")
"""Events whose results are sent."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """An event of the critical path, up to the moment at which the next one could start.

    ``until_s`` is the end of the event. If the next step is the all-reduce of a bucket that became
    complete during this event, or a message that passes beside it, it is the start of that one.
    ``waited_s`` are the seconds since the previous step that no event explains; in a simulated
    timeline they are 0.
    """

    event: Event
    until_s: float
    waited_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the event that are on the path."""
        return self.until_s - self.event.start_s


def critical_path(timeline: Timeline, tolerance_s: float = 1e-9) -> tuple[PathStep, ...]:
    """The critical path in order of time: each event waited for the one before it.

    The path is followed backwards from the event that ends last. The cause of an event is the one
    that ended last among those it can have waited for: the previous work on its device, the message
    with its input, the work that made a message or whatever occupied its engines, the backward that
    filled a gradient bucket. If several ended together, the device's own work counts. Events do not
    record their causes, so for a measured timeline the path is a likely one. The seconds and waits
    of all steps add up to the iteration.
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
    """Seconds of the path by kind and stage of its events, without waits."""
    seconds: dict[tuple[EventKind, int], float] = defaultdict(float)
    for step in path:
        seconds[step.event.kind, step.event.stage] += step.seconds
    return dict(seconds)


class EventsByEnd:
    """Events sorted by end, to find the last one that ended before a time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: (event.end_s, event.start_s))
        self.ends_s = [event.end_s for event in self.events]

    def before(self, time_s: float, seen: set[int]) -> Event | None:
        """The last event that ended by ``time_s`` and is not in ``seen``."""
        for index in range(bisect_right(self.ends_s, time_s) - 1, -1, -1):
            if id(self.events[index]) not in seen:
                return self.events[index]
        return None


Engine: TypeAlias = Literal["compute", "outgoing", "incoming"]

TRANSFERS: dict[EventKind, tuple[Engine, ...]] = {
    "SEND": ("outgoing",),
    "RECV": ("incoming",),
    "REDUCE": ("outgoing", "incoming"),
}
"""The engines of its device that an event occupies; all others occupy its compute stream."""


class CauseIndex:
    """The events of a timeline, indexed by what can have waited for them."""

    def __init__(self, timeline: Timeline, tolerance_s: float) -> None:
        self.tolerance_s = tolerance_s
        engines: dict[tuple[Engine, int], list[Event]] = defaultdict(list)
        self.inputs: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self.work: dict[tuple[EventKind, int, int], list[Event]] = defaultdict(list)
        self.made_on: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self.members: dict[tuple[float, float, float], list[int]] = defaultdict(list)
        self.last_gradients: dict[int, Event] = {}
        for event in timeline.events:
            device, m = event.device, event.micro_batch
            for engine in TRANSFERS.get(event.kind, ("compute",)):
                engines[engine, device].append(event)
            self.work[event.kind, event.stage, m].append(event)
            if event.kind in SENDERS_WORK:
                self.made_on[device, m].append(event)
            if event.kind in MAKES_GRADIENTS:
                self.last_gradients[device] = event
            if event.kind == "RECV":
                self.inputs[device, m].append(event)
            if event.kind == "REDUCE":
                self.members[event.start_s, event.end_s, event.bytes].append(device)
        self.engines = {key: EventsByEnd(events) for key, events in engines.items()}
        self.transfers = EventsByEnd(e for e in timeline.events if e.kind in ("RECV", "REDUCE"))

    def of(self, event: Event, seen: set[int]) -> Event | None:
        """The cause of ``event``, not in ``seen``; None if it could start at once."""
        match event.kind:
            case "SEND" | "RECV":
                return self.of_message(event, seen)
            case "REDUCE":
                return self.of_reduction(event, seen)
            case "F" | "B" | "I" | "R" | "W" | "STEP":
                return self.latest(event, self.causes_of_work(event, seen), seen)

    def causes_of_work(self, event: Event, seen: set[int]) -> list[Event | None]:
        """The device's previous work, then the inputs, or the gradients that a step needs."""
        device, stage, m = event.device, event.stage, event.micro_batch
        before = self.ended("compute", device, event, seen)
        match event.kind:
            case "F":
                return [before, *self.inputs[device, m], *self.work["F", stage - 1, m]]
            case "B" | "I":
                above = (*self.work["B", stage + 1, m], *self.work["I", stage + 1, m])
                return [before, *self.inputs[device, m], *above]
            case "STEP":
                return [before, self.ended("outgoing", device, event, seen)]
            case _:
                return [before]

    def of_message(self, event: Event, seen: set[int]) -> Event | None:
        """The work that made a message, or what occupied an engine or a port until it was sent.

        A device that streams may start the message with the work.
        """
        device, peer = event.device, event.peer
        sender, receiver = (device, peer) if event.kind == "SEND" else (peer, device)
        made_on = self.made_on[sender, event.micro_batch]
        causes = [
            *made_on,
            self.ended("outgoing", sender, event, seen),
            self.ended("incoming", receiver, event, seen),
        ]
        found, just_then_s = self.latest(event, causes, seen), event.start_s - self.tolerance_s
        if found is None or found.end_s < just_then_s:
            beside = (
                work for work in made_on if abs(work.start_s - event.start_s) <= self.tolerance_s
            )
            found = next((work for work in beside if id(work) not in seen), found)
        return self.or_port(event, found, seen)

    def of_reduction(self, event: Event, seen: set[int]) -> Event | None:
        """The last event on an engine of a member, or the backward that filled the bucket.

        Buckets are filled during the last backward, so the all-reduce may begin before it ends.
        """
        members = self.members[event.start_s, event.end_s, event.bytes]
        engines = [
            self.ended(engine, member, event, seen)
            for member in members
            for engine in ("outgoing", "incoming")
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
        """``found`` if it explains the start of ``event``, else a transfer that ended just then.

        Transfers between other devices can occupy a port that hosts share.
        """
        just_then_s = event.start_s - self.tolerance_s
        if found is None or found.end_s < just_then_s:
            other = self.transfers.before(event.start_s + self.tolerance_s, seen)
            if other and other.end_s >= just_then_s:
                return other
        return found

    def ended(self, engine: Engine, device: int, event: Event, seen: set[int]) -> Event | None:
        """The last event on an engine of a device that ended before ``event`` started."""
        events = self.engines.get((engine, device))
        return events and events.before(event.start_s + self.tolerance_s, seen)

    def latest(self, event: Event, causes: Sequence[Event | None], seen: set[int]) -> Event | None:
        """The last of the causes that ended before ``event`` started; the first if several tie."""
        limit_s = event.start_s + self.tolerance_s
        fitting = [c for c in causes if c and c.end_s <= limit_s and id(c) not in seen]
        if not fitting:
            return None
        last_s = max(cause.end_s for cause in fitting)
        return next(cause for cause in fitting if cause.end_s >= last_s - self.tolerance_s)
