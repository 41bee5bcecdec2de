"""What holds for every schedule of the registry, on any pipeline that it accepts."""

from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import BadInput
from penstock.schedule.registry import SCHEDULES
from penstock.schedule.shape import PipelineShape
from penstock.schedule.text import parse_schedule
from penstock.schedule.validate import in_flight_peaks, validate


@st.composite
def shapes(draw: st.DrawFn) -> PipelineShape:
    """Up to six stages and ten micro-batches, with limits and recompute on some."""
    stages = draw(st.integers(1, 6))
    micro_batches = draw(st.integers(1, 10))
    per_stage = {"min_size": stages, "max_size": stages}
    limits = st.lists(st.integers(1, micro_batches + 2), **per_stage).map(tuple)
    recompute = st.lists(st.booleans(), **per_stage).map(tuple)
    return PipelineShape(
        stages,
        micro_batches,
        in_flight_limit=draw(st.one_of(st.just(()), limits)),
        recompute=draw(st.one_of(st.just(()), recompute)),
    )


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=80, deadline=None)
@given(shape=shapes())
def test_it_can_be_played_within_its_limits_or_is_refused(name: str, shape: PipelineShape) -> None:
    try:
        schedule = SCHEDULES[name](shape)
    except BadInput:
        # Only a schedule that must hold more than a limit allows may refuse.
        assert min(shape.limit(stage) for stage in range(shape.stages)) < shape.micro_batches
        return
    validate(schedule, shape)
    for stage, peak in enumerate(in_flight_peaks(schedule, shape)):
        assert 1 <= peak <= shape.limit(stage)


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_accepts_every_pipeline_without_limits(name: str) -> None:
    for stages in range(1, 7):
        for micro_batches in range(1, 9):
            shape = PipelineShape(stages, micro_batches)
            validate(SCHEDULES[name](shape), shape)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=40, deadline=None)
@given(shape=shapes())
def test_it_does_the_work_of_every_micro_batch_once_and_reads_back_from_text(
    name: str, shape: PipelineShape
) -> None:
    assume(not shape.in_flight_limit)
    schedule = SCHEDULES[name](shape)
    for stage in range(shape.stages):
        order = schedule.of(shape.group_of(stage))
        kinds = Counter(action.kind for action in order)
        assert kinds["F"] == shape.micro_batches
        assert kinds["B"] + kinds["I"] == shape.micro_batches
        assert kinds["R"] <= shape.micro_batches * shape.recomputes(stage)
    assert parse_schedule(str(schedule)) == schedule
