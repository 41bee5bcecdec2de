"""Every schedule of the gallery on the same pipeline: its timeline, and its row of the table."""

from penstock.schedule.clock import ActionTimes, memory_peaks_bytes, times_of
from penstock.schedule.order import Order
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape, StageCost, placement_of_style
from penstock.timeline.timeline import Event, MemorySample, Timeline

GROUPS, MICRO_BATCHES = 4, 8


def shape_of(name: str) -> PipelineShape:
    """Four groups; on each a forward and both halves of a backward take a second in all stages."""
    style = FAMILIES[name].placement
    rounds = 2 if style in ("looped", "folded") else 1
    placement = placement_of_style(style, GROUPS, rounds)
    share = 1 / rounds
    cost = StageCost(share, share, share, saved_bytes=share)
    return PipelineShape(
        stages=len(placement),
        micro_batches=MICRO_BATCHES,
        placement=placement if rounds > 1 else (),
        costs=(cost,) * len(placement),
        mirrored=style == "mirrored",
    )


def timeline_of(name: str) -> Timeline:
    """The timeline of a family's schedule."""
    shape = shape_of(name)
    return schedule_timeline(FAMILIES[name].make(shape), shape, name)


def table_row(name: str) -> str:
    """Makespan, idle time of the busiest device between its first and last action, memory."""
    shape = shape_of(name)
    schedule = FAMILIES[name].make(shape)
    times = times_of(schedule, shape)
    spans = [
        float(end.max() - start.min())
        for start, end in zip(times.start_s, times.end_s, strict=True)
    ]
    idle_s = max(spans) - 3 * MICRO_BATCHES
    memory = memory_peaks_bytes(schedule, shape)
    most, least = (f"{figure:g}" for figure in (max(memory), min(memory)))
    held = most if most == least else f"{least} to {most}"
    return f"| `{name}` | {times.makespan_s:g} | {idle_s:g} | {held} |"


def schedule_timeline(schedule: Schedule, shape: PipelineShape, title: str = "") -> Timeline:
    """The timeline of the schedule on its shape; device groups appear as devices.

    Actions take the seconds of the shape's costs, and transfers never wait for one another
    (`penstock.schedule.clock`).

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
