"""The timelines of the gallery have the times and the memory of the clock."""

import pytest
from made_timelines import schedule_timeline
from schedule_shapes import placed

from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape
from penstock.timeline.metrics import iteration_s, peak_memory_bytes


def shape_for(name: str) -> PipelineShape:
    """A shape that the family takes: four device groups, eight micro-batches."""
    return placed(FAMILIES[name].placement, 4, 8, rounds=2)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_action_is_there_in_its_time(name: str) -> None:
    shape = shape_for(name)
    schedule = FAMILIES[name].make(shape)
    timeline = schedule_timeline(schedule, shape)
    assert iteration_s(timeline) == pytest.approx(makespan_s(schedule, shape))
    assert len(timeline.events) == schedule.actions


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"fbp-as"}))
def test_memory_peaks_are_those_of_the_clock(name: str) -> None:
    shape = shape_for(name)
    schedule = FAMILIES[name].make(shape)
    timeline = schedule_timeline(schedule, shape)
    assert peak_memory_bytes(timeline) == pytest.approx(memory_peaks_bytes(schedule, shape))
