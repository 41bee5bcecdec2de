"""Metrics of small timelines whose values can be read off the picture."""

import pytest
from made_timelines import TWO_STAGES

from penstock.timeline.metrics import (
    bubble_fraction,
    busy_s,
    covered_s,
    iteration_s,
    peak_memory_bytes,
    working_devices,
)
from penstock.timeline.timeline import Event, Timeline


def test_iteration_ends_with_the_last_event() -> None:
    assert iteration_s(TWO_STAGES) == 7.5
    assert iteration_s(Timeline((), devices=2)) == 0.0


def test_a_device_is_busy_while_it_computes() -> None:
    assert busy_s(TWO_STAGES, 0) == 2.0
    assert busy_s(TWO_STAGES, 2) == 3.0
    assert busy_s(TWO_STAGES, 1) == 0.0


def test_bubbles_are_counted_over_devices_that_work() -> None:
    assert working_devices(TWO_STAGES) == (0, 2)
    assert bubble_fraction(TWO_STAGES) == pytest.approx(1 - 5.0 / 15.0)
    assert bubble_fraction(Timeline((), devices=2)) == 0.0


def test_overlapping_sends_and_receives_count_once() -> None:
    both_ways = Timeline(
        (
            Event(0, "SEND", 0, 0, 0.0, 2.0, peer=1),
            Event(0, "RECV", 0, 1, 1.0, 3.0, peer=1),
            Event(0, "SEND", 0, 1, 1.5, 2.5, peer=1),
        ),
        devices=2,
    )
    assert covered_s(both_ways.events) == 3.0


def test_peak_memory_is_the_largest_sample_of_each_device() -> None:
    assert peak_memory_bytes(TWO_STAGES) == (9.0, 0.0, 0.0)
