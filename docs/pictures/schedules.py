"""Draw every schedule on the same pipeline, for the gallery.

python docs/pictures/schedules.py
"""

from pathlib import Path

from penstock.report.schedule_picture import schedule_picture
from penstock.schedule.placement import placement_of_style
from penstock.schedule.registry import PLACEMENT_STYLES, SCHEDULES
from penstock.schedule.shape import PipelineShape, StageCost

GROUPS, MICRO_BATCHES = 4, 8
FOLDER = Path(__file__).with_name("schedules")
UNPROVEN = ("exact",)
"""Searches too long on this pipeline to be drawn again and again."""


def shape_of(name: str) -> PipelineShape:
    """Four groups; on each a forward and both halves of a backward take a second in all stages."""
    style = PLACEMENT_STYLES.get(name, "straight")
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
    return schedule_picture(SCHEDULES[name](shape), shape, name)


def main() -> None:
    """Write one picture for each schedule."""
    FOLDER.mkdir(exist_ok=True)
    for name in SCHEDULES:
        if name not in UNPROVEN:
            (FOLDER / f"{name}.svg").write_text(picture_of(name))


if __name__ == "__main__":
    main()
