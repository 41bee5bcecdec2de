"""The order of a batch that is cut into fewer micro-batches than planned."""

from dataclasses import replace

import pytest
from schedule_shapes import placed

from penstock.runtime.micro_batches import with_fewer_micro_batches
from penstock.schedule.families.early_backward import gpipe, one_f_one_b
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import in_flight_peaks, validate


@pytest.mark.parametrize("name", sorted(name for name, made in FAMILIES.items() if made.flushes))
@pytest.mark.parametrize("recompute", [False, True])
def test_it_can_be_played_and_holds_no_more(name: str, recompute: bool) -> None:
    style = FAMILIES[name].placement
    rounds = 2 if style in ("looped", "folded") else 1
    for groups in (1, 2, 3, 4):
        whole = placed(style, groups, 9, rounds)
        whole = replace(whole, recompute=(recompute,) * whole.stages)
        schedule = FAMILIES[name].make(whole)
        peaks = in_flight_peaks(schedule, whole)
        for micro_batches in range(1, 10):
            shape = replace(whole, micro_batches=micro_batches, in_flight_limit=peaks)
            validate(with_fewer_micro_batches(schedule, shape), shape)


def test_families_that_do_not_look_ahead_are_as_if_made_for_it() -> None:
    for make in (gpipe, one_f_one_b):
        whole = make(PipelineShape(4, 9))
        for micro_batches in range(1, 10):
            shape = PipelineShape(4, micro_batches)
            assert with_fewer_micro_batches(whole, shape) == make(shape)
