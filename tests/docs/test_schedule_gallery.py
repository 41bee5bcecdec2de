"""The gallery shows every schedule, as it is drawn and timed today: as the clock has it."""

import pytest
from docs.test_pages import DOCS
from made_timelines import GALLERY, schedule_timeline
from schedule_shapes import placed

from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape
from penstock.timeline.metrics import iteration_s, peak_memory_bytes

PAGE = (DOCS / "schedules.md").read_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_has_its_section_and_its_picture(name: str) -> None:
    section = PAGE.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    assert f"![{name}](pictures/schedules/{name}.svg)" in section
    assert (DOCS / "pictures" / "schedules" / f"{name}.svg").is_file()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_holds(name: str) -> None:
    assert f"\n{GALLERY.table_row(name)}\n" in PAGE


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
