"""What a timeline says in one number: times, bubbles, peaks; and its critical path."""

from collections import defaultdict
from collections.abc import Iterable

from penstock.timeline.timeline import Event, EventKind, Timeline

__all__ = [
    "bubble_fraction",
    "busy_s",
    "communication_s",
    "critical_path",
    "idle_s",
    "iteration_s",
    "peak_memory_bytes",
    "working_devices",
]

COMPUTE: frozenset[EventKind] = frozenset({"F", "B", "I", "W", "R", "STEP"})
"""Events that occupy a device's compute stream; the rest occupy its communication engines."""


ENDS_OF_GRADIENTS: tuple[EventKind, ...] = ("B", "W", "REDUCE")
"""What a gradient all-reduce of a stage can have waited for, on any of its replicas."""


def iteration_s(timeline: Timeline) -> float:
    """Seconds from time 0 to the end of the last event."""
    return max((event.end_s for event in timeline.events), default=0.0)


def working_devices(timeline: Timeline) -> tuple[int, ...]:
    """The devices that compute at all, in order."""
    return tuple(sorted({event.device for event in timeline.events if event.kind in COMPUTE}))


def busy_s(timeline: Timeline, device: int) -> float:
    """Seconds in which ``device`` computes (forward, backward, recompute, optimizer step)."""
    return covered_s(
        event for event in timeline.events if event.device == device and event.kind in COMPUTE
    )


def communication_s(timeline: Timeline, device: int) -> float:
    """Seconds in which ``device`` sends, receives or reduces, whether it computes or not."""
    return covered_s(
        event for event in timeline.events if event.device == device and event.kind not in COMPUTE
    )


def idle_s(timeline: Timeline, device: int) -> float:
    """Seconds of the iteration in which ``device`` does not compute."""
    return iteration_s(timeline) - busy_s(timeline, device)


def bubble_fraction(timeline: Timeline) -> float:
    """The share of the working devices' time in which they do not compute.

        1 - (sum of busy seconds) / (devices * iteration seconds)

    Devices without any work are left out: a plan that needs fewer has no bubble there.
    """
    devices = working_devices(timeline)
    available_s = len(devices) * iteration_s(timeline)
    if available_s <= 0:
        return 0.0
    busy: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE:
            busy[event.device].append(event)
    return max(0.0, 1.0 - sum(covered_s(events) for events in busy.values()) / available_s)


def peak_memory_bytes(timeline: Timeline) -> tuple[float, ...]:
    """For each device the most bytes in use at once; 0 where no sample was taken."""
    peaks = [0.0] * timeline.devices
    for sample in timeline.memory:
        peaks[sample.device] = max(peaks[sample.device], sample.bytes)
    return tuple(peaks)


def covered_s(events: Iterable[Event]) -> float:
    """Seconds covered by at least one of ``events``: overlaps count once."""
    total_s = 0.0
    until_s = float("-inf")
    for event in sorted(events, key=lambda event: event.start_s):
        if event.end_s > until_s:
            total_s += event.end_s - max(event.start_s, until_s)
            until_s = event.end_s
    return total_s


def critical_path(timeline: Timeline, tolerance_s: float = 1e-9) -> tuple[Event, ...]:
    """The chain of events that ends last, each held up by the one before it, in order of time.

    Going back from the event that ends last, the cause of an event is, of those it can have
    waited for, the one that ended last before it started: the event before it on its device or
    engine, the message that brought its input, the work that made a message, the stage next to
    it on the same micro-batch. Events do not name their causes, so in a measured timeline the
    path is a likely one; gaps in it are waits that no event explains.
    """
    if not timeline.events:
        return ()
    causes = CauseIndex(timeline)
    event = max(timeline.events, key=lambda event: (event.end_s, event.start_s))
    path = [event]
    while True:
        earlier = [
            cause
            for cause in causes.of(event)
            if cause.end_s <= event.start_s + tolerance_s and cause.start_s < event.start_s
        ]
        if not earlier:
            return tuple(reversed(path))
        event = max(earlier, key=lambda cause: (cause.end_s, cause.start_s))
        path.append(event)


class CauseIndex:
    """The events of a timeline by device and by work, to find what an event can have waited for."""

    def __init__(self, timeline: Timeline) -> None:
        self.by_device: dict[int, list[Event]] = defaultdict(list)
        self.by_work: dict[tuple[EventKind, int, int], list[Event]] = defaultdict(list)
        for event in timeline.events:
            self.by_device[event.device].append(event)
            self.by_work[event.kind, event.stage, event.micro_batch].append(event)

    def of(self, event: Event) -> list[Event]:
        """Events that can have held up ``event``; those that end after its start are no cause."""
        stage, m = event.stage, event.micro_batch
        match event.kind:
            case "F":
                other = self.by_work["F", stage - 1, m]
            case "B" | "I":
                other = self.by_work["B", stage + 1, m] + self.by_work["I", stage + 1, m]
            case "SEND" | "RECV":
                other = self.by_device[event.peer]
            case "REDUCE":
                other = [
                    cause for kind in ENDS_OF_GRADIENTS for cause in self.of_stage(kind, stage)
                ]
            case "R" | "W" | "STEP":
                other = []
        own = self.by_device[event.device]
        if event.kind in ("F", "B", "I", "W", "R"):
            own = [
                cause
                for cause in own
                if cause.kind in COMPUTE or (cause.kind == "RECV" and cause.micro_batch == m)
            ]
        return own + other

    def of_stage(self, kind: EventKind, stage: int) -> list[Event]:
        """All events of one kind and stage."""
        return [
            event
            for (some_kind, some_stage, _), events in self.by_work.items()
            if some_kind == kind and some_stage == stage
            for event in events
        ]
