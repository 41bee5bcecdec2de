"""How long an order takes to be written down: seconds an action, at growing sizes."""

from dataclasses import dataclass

from pipelines import median_s

from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape, placement_of_style

__all__ = ["MICRO_BATCHES", "SEARCHED", "Generated", "generate_all"]

DEVICES = 16
MICRO_BATCHES = (64, 512, 4096, 16384)
GIVE_UP_S = 15.0
REPEATS = 3

SEARCHED = ("list", "zero-bubble")
"""Schedules that are searched for; their time is not that of writing them down."""


@dataclass(frozen=True)
class Generated:
    """Actions of a schedule and nanoseconds for each, by size; None where one took too long."""

    schedule: str
    actions: tuple[int, ...]
    nanoseconds_an_action: tuple[float | None, ...]


def generate_all() -> list[Generated]:
    """Every schedule that is written down, on `DEVICES` devices."""
    return [generate(name) for name in FAMILIES if name not in SEARCHED]


def generate(name: str) -> Generated:
    """One schedule at all sizes, as long as they do not take too long."""
    actions: list[int] = []
    times: list[float | None] = []
    last_s = 0.0
    for micro_batches in MICRO_BATCHES:
        shape = shape_of(name, micro_batches)
        actions.append(2 * shape.stages * micro_batches)
        if last_s > GIVE_UP_S * actions[-2] / actions[-1] if len(actions) > 1 else False:
            times.append(None)
            continue
        last_s = median_s([lambda shape=shape: FAMILIES[name].make(shape)] * REPEATS)
        times.append(1e9 * last_s / actions[-1])
    return Generated(name, tuple(actions), tuple(times))


def shape_of(name: str, micro_batches: int) -> PipelineShape:
    """A pipeline of equal stages, placed as the schedule asks."""
    style = FAMILIES[name].placement
    rounds = 2 if style in ("looped", "folded") else 1
    return PipelineShape(
        stages=rounds * DEVICES,
        micro_batches=micro_batches,
        placement=placement_of_style(style, DEVICES, rounds) if rounds > 1 else (),
        mirrored=style == "mirrored",
    )
