"""Orders on ideal links: as plain Python plays them; W in gaps; what is no order is refused."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from list_shapes import list_shapes

from penstock.core import native
from penstock.schedule.action import Action
from penstock.schedule.clock import makespan_s, times_of
from penstock.schedule.dependencies import predecessors
from penstock.schedule.families.v_schedules import v_half
from penstock.schedule.families.zero_bubble_order import (
    Pattern,
    Rearrangement,
    decoded,
    drawing_of,
    rearrangement,
    with_weights,
)
from penstock.schedule.schedule import Schedule
from penstock.schedule.searched.list_scheduler import quickest_list
from penstock.schedule.shape import PipelineShape, StageCost, folded
from penstock.schedule.validate import validate


def plain_starts(schedule: Schedule, shape: PipelineShape) -> dict[Action, float]:
    """The start of every action: rounds over all orders until nothing more can be played."""
    present = {action for order in schedule.orders for action in order}
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    while len(starts) < len(present):
        for order in schedule.orders:
            free_s = 0.0
            for action in order:
                needed = [one for one in predecessors(action, shape) if one in present]
                if any(one not in ends for one in needed):
                    break
                ready_s = [ends[one] + between_s(one, action, shape) for one in needed]
                starts[action] = max([free_s, *ready_s])
                seconds = shape.cost(action.stage).seconds(action.kind)
                free_s = ends[action] = starts[action] + seconds
    return starts


def between_s(before: Action, after: Action, shape: PipelineShape) -> float:
    """Seconds of the transfer between two actions."""
    group = shape.group_of(before.stage, before.micro_batch)
    if group == shape.group_of(after.stage, after.micro_batch):
        return 0.0
    return shape.cost(min(before.stage, after.stage)).transfer_s


@settings(max_examples=60, deadline=None)
@given(shape=list_shapes())
def test_every_action_starts_when_plain_python_says(shape: PipelineShape) -> None:
    schedule = quickest_list(shape)
    starts = plain_starts(schedule, shape)
    played = times_of(schedule, shape)
    for order, start_s in zip(schedule.orders, played.start_s, strict=True):
        assert [starts[action] for action in order] == start_s.tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_makespan_with_weights_is_that_of_the_clock(data: st.DataObject) -> None:
    groups, micro_batches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    seconds = st.sampled_from([0.25, 0.5, 1.0, 1.75])
    stages = 2 * groups
    costs = tuple(StageCost(*(data.draw(seconds) for _ in range(4))) for _ in range(stages))
    shape = PipelineShape(stages, micro_batches, folded(groups, 2), costs=costs)
    pattern = Pattern(np.array(slots_of(shape)), most=2 * groups + 2)
    drawn = drawing_of(shape, pattern)
    changes = [Rearrangement(up=1), Rearrangement(down=-2, deeper=1, patient=True)]
    for actions in (drawn.order, *(rearrangement(drawn, change) for change in changes)):
        filled, end_s = with_weights(drawn, actions, lateness=data.draw(st.sampled_from([0, 0.5])))
        if end_s < inf:
            schedule = decoded(drawn, filled)
            validate(schedule, shape)
            assert makespan_s(schedule, shape) == end_s


def slots_of(shape: PipelineShape) -> list[list[list[int]]]:
    """For F and I of each stage, the places in the order of V-Half."""
    places = {a: i for order in v_half(shape).orders for i, a in enumerate(order)}
    numbers = range(shape.micro_batches)
    return [
        [[places[Action(kind, s, m)] for m in numbers] for s in range(shape.stages)]
        for kind in ("F", "I")
    ]


@pytest.mark.parametrize(
    ("first", "actions", "why"),
    [
        ([0, 1], [-1], "no stage or micro-batch"),
        ([0, 1], [5 * 6], "no stage or micro-batch"),
        ([0, 2], [0], "must cover all"),
        ([0, 2, 1, 3], [0, 1, 2], "must cover all"),
        ([], [], "must cover all"),
    ],
)
def test_what_is_no_order_is_refused(first: list[int], actions: list[int], why: str) -> None:
    pipe = native.IdealPipe(2, 3, np.ones((5, 2)), np.zeros(1))
    codes = np.array(actions, dtype=np.int64)
    with pytest.raises(ValueError, match=why):
        native.play_orders(pipe, first, codes, np.zeros(len(codes)))
