"""Draw every schedule on the same pipeline, for the gallery, and print its table.

python docs/pictures/schedules.py
"""

from pathlib import Path

from penstock.report.schedule_picture import schedule_picture
from penstock.schedule.clock import memory_peaks_bytes, times_of
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape, StageCost, placement_of_style

GROUPS, MICRO_BATCHES = 4, 8
FOLDER = Path(__file__).with_name("schedules")


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


def picture_of(name: str) -> str:
    """The SVG of one schedule."""
    shape = shape_of(name)
    return schedule_picture(FAMILIES[name].make(shape), shape, name)


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


def main() -> None:
    """Write one picture for each schedule; print the rows of the table."""
    FOLDER.mkdir(exist_ok=True)
    for name in FAMILIES:
        (FOLDER / f"{name}.svg").write_text(picture_of(name))
        print(table_row(name))


if __name__ == "__main__":
    main()
