import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from made_timelines import schedule_picture, schedule_timeline

from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape, StageCost, placement_of_style
from penstock.timeline.metrics import iteration_s, peak_memory_bytes

SVG = "{http://www.w3.org/2000/svg}"


def words(picture: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(picture).iter(f"{SVG}text")]


def shape_for(name: str) -> PipelineShape:
    """A shape that the family takes: four device groups, eight micro-batches."""
    style = FAMILIES[name].placement
    placement = placement_of_style(style, groups=4, rounds=2)
    return PipelineShape(len(placement), 8, placement, mirrored=style == "mirrored")


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_drawn_with_all_its_actions_and_its_memory(name: str) -> None:
    shape = shape_for(name)
    schedule = FAMILIES[name].make(shape)
    timeline = schedule_timeline(schedule, shape)
    assert iteration_s(timeline) == pytest.approx(makespan_s(schedule, shape))
    picture = schedule_picture(schedule, shape, name)
    labels = [node.text or "" for node in ET.fromstring(picture).iter(f"{SVG}title")]
    assert len(labels) == schedule.actions
    told = Counter(words(picture))
    assert told[name] == 1 and told["memory in use"] == 1
    assert all(told[f"device {group}"] == 2 for group in range(4))


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"fbp-as"}))
def test_memory_peaks_are_those_of_the_clock(name: str) -> None:
    shape = shape_for(name)
    schedule = FAMILIES[name].make(shape)
    timeline = schedule_timeline(schedule, shape)
    assert peak_memory_bytes(timeline) == pytest.approx(memory_peaks_bytes(schedule, shape))


def test_with_costs_times_are_seconds_and_memory_is_bytes() -> None:
    costs = tuple(StageCost(0.01, 0.01, 0.01, 0.002, 3e6) for _ in range(3))
    shape = PipelineShape(3, 4, costs=costs, memory_bytes=(9.5e6, 9.5e6, 1e12))
    told = words(schedule_picture(one_f_one_b(shape), shape, "1f1b"))
    assert "peak 9.00 MB of 9.50 MB" in told and "memory in use; dashed: the limit" in told
    assert any(text.endswith("ms") for text in told)


def test_directions_of_a_mirrored_schedule_have_different_shades() -> None:
    from penstock.schedule.schedule import parse_schedule

    shape = PipelineShape(stages=2, micro_batches=2, mirrored=True)
    schedule = parse_schedule("stage 0,1 0F0 1F1 1B1 0B0\nstage 0,1 0F1 1F0 1B0 0B1")
    told = words(schedule_picture(schedule, shape, "mirrored"))
    assert "light: odd micro-batches, the other way round" in told
    picture = schedule_picture(schedule, shape, "mirrored")
    classes = Counter(
        (node.get("class") or "")
        for node in ET.fromstring(picture).iter(f"{SVG}rect")
        if node.findtext(f"{SVG}title")
    )
    assert classes == {"F0": 2, "F1": 2, "B0": 2, "B1": 2}
