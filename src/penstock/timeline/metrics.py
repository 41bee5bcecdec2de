"""Single numbers from a timeline: seconds, bubble fraction, memory peaks."""

from collections import defaultdict
from collections.abc import Iterable

from penstock.timeline.timeline import Event, EventKind, Timeline

COMPUTE: frozenset[EventKind] = frozenset({"F", "B", "I", "W", "R", "STEP"})
"""Events that occupy a device's compute stream; all others occupy its communication engines."""


def iteration_s(timeline: Timeline) -> float:
    """Seconds from time 0 to the end of the last event."""
    return max((event.end_s for event in timeline.events), default=0.0)


def working_devices(timeline: Timeline) -> tuple[int, ...]:
    """The devices with at least one compute event, in order."""
    return tuple(sorted({event.device for event in timeline.events if event.kind in COMPUTE}))


def busy_s(timeline: Timeline, device: int) -> float:
    """Seconds in which ``device`` computes (forward, backward, recompute, optimizer step)."""
    return covered_s(
        event for event in timeline.events if event.device == device and event.kind in COMPUTE
    )


def bubble_fraction(timeline: Timeline) -> float:
    """The fraction of the working devices' time in which they do not compute.

        1 - (sum of busy seconds) / (devices * iteration seconds)

    Devices without any work are left out.
    """
    devices = working_devices(timeline)
    available_s = len(devices) * iteration_s(timeline)
    if available_s <= 0:
        return 0.0
    busy: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE:
            busy[event.device].append(event)
    return max(0.0, 1.0 - sum(covered_s(busy[device]) for device in devices) / available_s)


def peak_memory_bytes(timeline: Timeline) -> tuple[float, ...]:
    """The most bytes in use at once on each device; 0 where no sample was taken."""
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
