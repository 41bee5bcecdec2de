"""The list order that has SPP's bound: the sorted list, and what limits and recompute do to it."""

import pytest

from penstock.schedule.action import Action
from penstock.schedule.families.wavefront import wavefront
from penstock.schedule.schedule import Schedule, parse_schedule, schedule_from_actions
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import in_flight_peaks, validate


def sorted_list(shape: PipelineShape) -> Schedule:
    """Blocks by micro-batch plus position, older first; forward first where both are the same."""
    last = shape.stages - 1
    orders: list[tuple[Action, ...]] = []
    for stage in range(shape.stages):
        blocks = [("F", 2 * stage), ("B", 4 * last - 2 * stage)]
        keyed = sorted(
            (m + position, m, index, kind)
            for m in range(shape.micro_batches)
            for index, (kind, position) in enumerate(blocks)
        )
        orders.append(tuple(Action(kind, stage, m) for _, m, _, kind in keyed))  # pyright: ignore
    return schedule_from_actions(orders)


@pytest.mark.parametrize("stages", range(1, 8))
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8, 13, 40])
def test_it_is_the_list_sorted_by_wave(stages: int, micro_batches: int) -> None:
    shape = PipelineShape(stages, micro_batches)
    assert wavefront(shape) == sorted_list(shape)


def test_limits_cap_the_warm_up_and_recomputes_stand_before_backwards() -> None:
    shape = PipelineShape(3, 5, in_flight_limit=(5, 2, 2), recompute=(False, True, True))
    schedule = wavefront(shape)
    validate(schedule, shape)
    assert in_flight_peaks(schedule, shape) == (5, 2, 1)
    assert schedule == parse_schedule("""
        stage 0   F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
        stage 1   F0 F1 R0 B0 F2 R1 B1 F3 R2 B2 F4 R3 B3 R4 B4
        stage 2   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
    """)
