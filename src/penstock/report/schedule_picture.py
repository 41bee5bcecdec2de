"""Draws a schedule without a cluster; times and bytes are those of a pipeline shape."""

from penstock.report.device_rows import gantt_rows
from penstock.report.drawing import Drawing, drawing_svg
from penstock.report.gantt_drawing import gantt_drawing
from penstock.schedule.clock import ActionTimes, times_of
from penstock.schedule.order import Order
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.timeline.metrics import bubble_fraction
from penstock.timeline.timeline import Event, MemorySample, Timeline
from penstock.words import percent_text, seconds_text

__all__ = ["schedule_drawing", "schedule_picture", "schedule_timeline"]

WIDTH = 960.0
"""Narrower than the timeline of a run, for pages with text around it."""


def schedule_picture(schedule: Schedule, shape: PipelineShape, title: str) -> str:
    """The SVG text of ``schedule`` on ``shape``: a row for each device group, memory below.

    Actions take the seconds of the shape's costs, and transfers never wait for one another
    (`penstock.schedule.clock`). If the shape has no costs, the unit of time is a forward, and the
    unit of memory is what a micro-batch saves on a stage.

    Raises:
        BadInput: the schedule deadlocks.
    """
    return drawing_svg(schedule_drawing(schedule, shape, title), "schedule")


def schedule_drawing(schedule: Schedule, shape: PipelineShape, title: str) -> Drawing:
    """The picture as a drawing."""
    timeline = schedule_timeline(schedule, shape, title)
    chart = gantt_rows(timeline, shape.memory_bytes)
    unit = "s" if shape.costs else "forwards"
    took = seconds_text(chart.end_s) if shape.costs else f"{chart.end_s:g} forwards"
    note = f"{took}, bubble {percent_text(bubble_fraction(timeline))}"
    return gantt_drawing(chart, title, note, unit, WIDTH)


def schedule_timeline(schedule: Schedule, shape: PipelineShape, title: str = "") -> Timeline:
    """The timeline of the schedule on its shape; device groups appear as devices.

    >>> from penstock.schedule.families.early_backward import gpipe
    >>> shape = PipelineShape(stages=2, micro_batches=1)
    >>> timeline = schedule_timeline(gpipe(shape), shape)
    >>> [(e.device, e.kind, e.start_s, e.end_s) for e in timeline.events][:3]
    [(0, 'F', 0.0, 1.0), (1, 'F', 1.0, 2.0), (1, 'B', 2.0, 4.0)]
    """
    times = times_of(schedule, shape)
    events: list[Event] = []
    memory: list[MemorySample] = []
    for group, order in enumerate(schedule.orders):
        starts, ends = times.start_s[group].tolist(), times.end_s[group].tolist()
        events += [
            Event(group, action.kind, action.stage, action.micro_batch, start, end)
            for action, start, end in zip(order, starts, ends, strict=True)
        ]
        memory += group_memory(group, order, times, shape)
    events.sort(key=lambda event: (event.start_s, event.device, event.end_s))
    return Timeline(tuple(events), len(schedule.orders), tuple(memory), title)


def group_memory(
    group: int, order: Order, times: ActionTimes, shape: PipelineShape
) -> list[MemorySample]:
    """A sample of what the stages of a group have saved whenever that changes.

    A forward allocates when it starts. At its end I frees what W does not need, and B or W frees
    the rest.
    """
    changes: list[tuple[float, float]] = [(0.0, 0.0)]
    starts, ends = times.start_s[group].tolist(), times.end_s[group].tolist()
    for action, start_s, end_s in zip(order, starts, ends, strict=True):
        cost = shape.cost(action.stage)
        match action.kind:
            case "F":
                changes.append((start_s, cost.saved_bytes))
            case "B":
                changes.append((end_s, -cost.saved_bytes))
            case "I":
                changes.append((end_s, cost.bytes_until_weight_backward - cost.saved_bytes))
            case "W":
                changes.append((end_s, -cost.bytes_until_weight_backward))
            case "R":
                pass
    samples: dict[float, float] = {}
    level = 0.0
    for time_s, change in sorted(changes):
        level += change
        samples[time_s] = level
    return [MemorySample(group, time_s, level) for time_s, level in samples.items()]
