"""The bound is below every order, and is met where an optimum has a closed form."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.every_order import enumerated_makespan_s
from schedule_strategies import STYLES, small_shapes

from penstock.errors import BadInput
from penstock.schedule.clock import makespan_s
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.registry import FAMILIES
from penstock.schedule.searched.bound import makespan_bound_s, preemptive_end_s
from penstock.schedule.shape import PipelineShape, PlacementStyle, StageCost, folded
from penstock.schedule.validate import validate
from penstock.schedule.weight_rule import SYNCHRONOUS


@pytest.mark.parametrize("split", [True, False])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_order_falls_below_it(split: bool, data: st.DataObject) -> None:
    shape = data.draw(small_shapes(most_groups=2, most_micro_batches=1 if split else 2))
    if shape.groups == 1 and shape.stages > 1 and shape.micro_batches > 1:
        shape = PipelineShape(1, 2, costs=shape.costs[:1])
    if len(shape.placement) == 4 and shape.micro_batches > 1:
        shape = PipelineShape(2, 2, costs=shape.costs[:2])
    assert makespan_bound_s(shape) <= enumerated_makespan_s(shape, split=split) + 1e-9


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_family_falls_below_it(style: PlacementStyle, data: st.DataObject) -> None:
    shape = data.draw(small_shapes(style=style, most_micro_batches=5))
    for name, family in FAMILIES.items():
        try:
            schedule = family.make(shape)
            validate(schedule, shape)
        except BadInput:
            continue
        if not schedule.concurrent and schedule.weights == SYNCHRONOUS:
            assert makespan_bound_s(shape) <= makespan_s(schedule, shape) * (1 + 1e-9), name


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_few_micro_batches_in_flight_cost_round_trips(in_flight: int) -> None:
    stages, micro_batches = 4, 8
    shape = PipelineShape(stages, micro_batches, in_flight_limit=(in_flight,) * stages)
    # The W of stage 0 needs to end, that of the others may follow.
    round_trip_s = 2.0 * stages + 1.0
    bound_s = makespan_bound_s(shape)
    assert bound_s >= micro_batches / in_flight * round_trip_s
    assert bound_s <= makespan_s(one_f_one_b(shape), shape)


def test_memory_counts_all_stages_of_a_group() -> None:
    # One micro-batch needs two at the turn, so none may start before another is past its own.
    free = PipelineShape(4, 3, placement=folded(2, 2))
    tight = replace(free, memory_bytes=(2.5, 2.5))
    past_the_turn_s, round_trip_s = 4 * 1.0 + 1.0, 9.0
    assert makespan_bound_s(tight) >= 2 * past_the_turn_s + round_trip_s
    assert makespan_bound_s(tight) > makespan_bound_s(free)
    assert makespan_bound_s(tight) <= makespan_s(FAMILIES["list"].make(tight), tight)


@given(
    jobs=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 9)), min_size=1)
)
def test_the_preemptive_rule_ends_at_the_worst_set_of_jobs(
    jobs: list[tuple[int, int, int]],
) -> None:
    # Of all sets with a least head and a least tail the fullest one has every job above both.
    worst = 0
    for head, _, _ in jobs:
        for _, _, tail in jobs:
            chosen = [job for job in jobs if job[0] >= head and job[2] >= tail]
            if chosen:
                worst = max(worst, head + sum(job[1] for job in chosen) + tail)
    assert preemptive_end_s([(float(h), float(p), float(t)) for h, p, t in jobs]) == worst


def test_a_way_that_no_micro_batch_takes_needs_no_room() -> None:
    large = StageCost(saved_bytes=5.0)
    shape = PipelineShape(
        stages=2,
        micro_batches=1,
        costs=(StageCost(saved_bytes=1.0), large),
        memory_bytes=(1.0, 5.0),
        mirrored=True,
    )
    # The other way stage 1 would be on group 0, which has no room for it.
    assert makespan_bound_s(shape) == 5.0
    with pytest.raises(BadInput, match=r"room for 1"):
        makespan_bound_s(replace(shape, micro_batches=2))
