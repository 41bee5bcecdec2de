"""The rows of a Gantt chart: for each device its lanes of blocks and its memory.

`plot` and the report draw, print and show them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite

from penstock.timeline.metrics import COMPUTE, iteration_s
from penstock.timeline.palette import Style
from penstock.timeline.timeline import Event, Timeline


@dataclass(frozen=True, slots=True)
class DrawnEvent:
    """An event with the style it is drawn in."""

    event: Event
    style: Style


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device: what it computes, sends and reduces, and receives, and its memory over time.

    ``compute`` has one lane, or two if forwards run beside backwards. ``memory`` has pairs of time
    and bytes. ``limit_bytes`` is 0 if unknown.
    """

    device: int
    stages: tuple[int, ...]
    compute: tuple[tuple[DrawnEvent, ...], ...]
    sends: tuple[DrawnEvent, ...]
    receives: tuple[DrawnEvent, ...]
    memory: tuple[tuple[float, float], ...]
    limit_bytes: float = 0.0

    @property
    def lanes(self) -> tuple[tuple[DrawnEvent, ...], ...]:
        """All lanes of blocks, those of compute first."""
        return (*self.compute, self.sends, self.receives)

    @property
    def peak_bytes(self) -> float:
        return max((size for _, size in self.memory), default=0.0)


@dataclass(frozen=True, slots=True)
class GanttRows:
    """The rows of a chart, one for each device in use.

    ``shades`` is the largest number of stages on a device. If ``mirrored``, odd micro-batches pass
    the devices in the opposite direction, and the second shade is for them.
    """

    rows: tuple[DeviceRow, ...]
    end_s: float
    shades: int
    mirrored: bool

    @property
    def styles(self) -> tuple[Style, ...]:
        """All styles that occur."""
        lanes = (lane for row in self.rows for lane in row.lanes)
        return tuple(dict.fromkeys(block.style for lane in lanes for block in lane))

    @property
    def shade_words(self) -> str:
        """The meaning of the shades of a kind; empty if there is only one."""
        if self.mirrored:
            return "light: odd micro-batches, the other way round"
        several = f"dark to light: the {self.shades} stages of a device, upstream first"
        return several if self.shades > 1 else ""


def gantt_rows(timeline: Timeline, memory_limits: Sequence[float] = ()) -> GanttRows:
    """The rows of ``timeline``; ``memory_limits`` are bytes for each device of the cluster.

    A limit that is 0, infinite or missing counts as unknown.
    """
    events: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        events[event.device].append(event)
    memory: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in timeline.memory:
        memory[sample.device].append((sample.time_s, sample.bytes))
    mirrored = is_mirrored(timeline.events)
    stages = {
        device: sorted({e.stage for e in own if e.kind in COMPUTE and e.micro_batch >= 0})
        for device, own in events.items()
    }
    shades = 2 if mirrored else max((len(own) for own in stages.values()), default=1) or 1
    rows: list[DeviceRow] = []
    for device in sorted(events.keys() | memory.keys()):
        own, shade_of = events[device], {s: i for i, s in enumerate(stages.get(device, []))}
        blocks = [DrawnEvent(e, style_of(e, shade_of, shades, mirrored)) for e in own]
        rows.append(
            DeviceRow(
                device,
                tuple(shade_of),
                compute_lanes([b for b in blocks if b.event.kind in COMPUTE]),
                (
                    *(b for b in blocks if b.event.kind == "REDUCE"),
                    *(b for b in blocks if b.event.kind == "SEND"),
                ),
                tuple(b for b in blocks if b.event.kind == "RECV"),
                tuple(sorted(memory[device])),
                next((x for x in memory_limits[device : device + 1] if isfinite(x)), 0.0),
            )
        )
    return GanttRows(tuple(rows), iteration_s(timeline), shades, mirrored)


def is_mirrored(events: Iterable[Event]) -> bool:
    """Return whether each device takes only even or only odd micro-batches of each stage."""
    devices: dict[tuple[int, int], set[int]] = defaultdict(set)
    directions: dict[tuple[int, int], set[int]] = defaultdict(set)
    for event in events:
        if event.kind in COMPUTE and event.micro_batch >= 0:
            direction = event.micro_batch % 2
            directions[event.device, event.stage].add(direction)
            devices[event.stage, direction].add(event.device)
    both_directions = bool(devices) and all(
        (stage, 1 - direction) in devices for stage, direction in devices
    )
    return both_directions and all(len(seen) == 1 for seen in directions.values())


def style_of(event: Event, shade_of: dict[int, int], shades: int, mirrored: bool) -> Style:
    """The style of an event; its shade is the stage on the device, or the direction."""
    if event.kind not in COMPUTE or event.micro_batch < 0 or shades == 1:
        return one_style(event.kind, 0, 1)
    shade = event.micro_batch % 2 if mirrored else shade_of[event.stage]
    return one_style(event.kind, shade, shades)


one_style = cache(Style)
"""The style with these fields; one object of each, because timelines have very many events."""


def compute_lanes(blocks: Sequence[DrawnEvent]) -> tuple[tuple[DrawnEvent, ...], ...]:
    """One lane, or two (forwards, then the rest) if forwards run beside other work."""
    forwards = tuple(block for block in blocks if block.event.kind == "F")
    others = tuple(block for block in blocks if block.event.kind != "F")
    return (forwards, others) if overlap(block.event for block in blocks) else (tuple(blocks),)


def overlap(events: Iterable[Event]) -> bool:
    """Return whether events overlap in time by more than rounding errors."""
    until_s = 0.0
    for event in sorted(events, key=lambda event: (event.start_s, event.end_s)):
        if min(until_s, event.end_s) - event.start_s > 1e-6 * (event.end_s - event.start_s):
            return True
        until_s = max(until_s, event.end_s)
    return False


def stage_names(stages: Sequence[int], most: int = 14) -> str:
    """Some stages in words of at most ``most`` characters.

    >>> stage_names((3,)), stage_names((0, 4, 8)), stage_names((0, 64, 128, 192))
    ('stage 3', 'stages 0, 4, 8', '4 stages')
    """
    if len(stages) <= 1:
        return f"stage {stages[0]}" if stages else ""
    words = f"stages {', '.join(map(str, stages))}"
    return words if len(words) <= most else f"{len(stages)} stages"
