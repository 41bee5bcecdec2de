"""The list schedulers: valid on any pipeline, and never worse than the families beside it."""

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from list_shapes import least_memory_bytes, list_shapes

from penstock.errors import BadInput
from penstock.schedule.clock import makespan_s
from penstock.schedule.families.early_backward import deep_early_backward, one_f_one_b
from penstock.schedule.searched import automatic_zero_bubble, list_scheduler
from penstock.schedule.searched.automatic_zero_bubble import (
    fitting_schedules,
    within_micro_batches,
    zero_bubble,
)
from penstock.schedule.searched.bound import makespan_bound_s
from penstock.schedule.searched.list_arrays import arrays_of, list_order, quick_bound_s
from penstock.schedule.searched.list_scheduler import list_schedule
from penstock.schedule.searched.list_search import (
    CHOICES,
    Draws,
    decoded_schedule,
    drawn,
    wishes_of,
)
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.schedule.validate import validate


@settings(max_examples=300, deadline=None)
@given(shape=list_shapes(), split=st.booleans(), seed=st.integers(0, 10**6))
def test_no_policy_deadlocks_or_exceeds_a_limit(
    shape: PipelineShape, split: bool, seed: int
) -> None:
    arrays = arrays_of(shape, split=split)
    draws = Draws(seed)
    wishes = wishes_of(drawn(draws), arrays)
    # Nor do keys without rhyme or reason.
    if draws.chance(0.5):
        keys = np.random.default_rng(seed).uniform(0, 30, wishes.keys.shape)
        wishes = wishes._replace(keys=keys)
    order, end_s = list_order(arrays, wishes, np.inf)
    # A play that may end in time is not given up.
    assert list_order(arrays, wishes, end_s + 1e-6)[1] == end_s
    schedule = decoded_schedule(order, arrays, shape)
    validate(schedule, shape)
    # The clock starts everything as soon as the order allows; a policy may have waited.
    assert makespan_s(schedule, shape) <= end_s * (1 + 1e-9)
    assert quick_bound_s(arrays, shape) <= makespan_s(schedule, shape) * (1 + 1e-9)


@pytest.mark.parametrize("made", [list_scheduler, automatic_zero_bubble])
@settings(max_examples=30, deadline=None)
@given(shape=list_shapes())
def test_it_keeps_all_limits_and_is_never_worse_than_the_families_that_do(
    made: ModuleType, shape: PipelineShape
) -> None:
    splits = made is automatic_zero_bubble
    schedule = zero_bubble(shape) if splits else list_schedule(shape)
    validate(schedule, shape)
    took_s = makespan_s(schedule, shape)
    assert took_s >= makespan_bound_s(shape) * (1 - 1e-9)
    limited = shape.memory_bytes or shape.in_flight_limit
    if splits and not limited:
        shape = within_micro_batches(shape, shape.groups)
        validate(schedule, shape)
    if splits or limited:
        for other in fitting_schedules(made.HANDCRAFTED, shape):
            assert took_s <= makespan_s(other, shape) * (1 + 1e-9)


def test_it_warms_up_deeper_only_where_transfers_ask_for_it() -> None:
    shape = PipelineShape(stages=4, micro_batches=12)
    assert makespan_s(list_schedule(shape), shape) == makespan_s(one_f_one_b(shape), shape)
    slow = PipelineShape(stages=4, micro_batches=12, costs=(StageCost(transfer_s=1.0),) * 4)
    took_s = makespan_s(list_schedule(slow), slow)
    assert took_s < 0.9 * makespan_s(one_f_one_b(slow), slow)
    assert took_s <= makespan_s(deep_early_backward(slow), slow)


def test_it_uses_the_memory_that_each_group_has() -> None:
    costs = (StageCost(transfer_s=1.0),) * 3
    narrow, wide = (
        PipelineShape(3, 12, costs=costs, memory_bytes=memory)
        for memory in ((2.0, 2.0, 2.0), (6.0, 4.0, 2.0))
    )
    assert makespan_s(list_schedule(wide), wide) < makespan_s(list_schedule(narrow), narrow)


@pytest.mark.parametrize("split", [False, True])
def test_too_little_memory_is_refused_with_the_group_and_the_bytes(split: bool) -> None:
    shape = PipelineShape(
        4, 3, placement=(0, 1, 1, 0), memory_bytes=(2.0, 1.5), costs=(StageCost(),) * 4
    )
    with pytest.raises(BadInput, match=r"saves 2 bytes.*group 1.*room for 1\.5.*recompute"):
        arrays_of(shape, split=split)
    assert least_memory_bytes(shape) == [2.0, 2.0]


def test_every_choice_of_a_policy_is_a_number_of_it() -> None:
    policy = drawn(Draws(7))
    assert set(CHOICES) == set(policy._fields)
    assert all(value in CHOICES[name] for name, value in policy._asdict().items())


def test_the_draws_are_those_of_split_mix_64() -> None:
    """The first five numbers of seed 1234567, as published with the generator."""
    draws = Draws(1234567)
    assert [draws.below(2**53) for _ in range(5)] == [
        number >> 11
        for number in (
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
            16408922859458223821,
        )
    ]


def test_the_same_shape_gives_the_same_order() -> None:
    shape = PipelineShape(3, 7, memory_bytes=(2.0, 2.0, 1.0))
    assert list_schedule(shape) == list_schedule(shape)


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_the_quick_bound_is_what_equal_parts_take_without_a_bubble(groups: int) -> None:
    """The last group waits for the first forward only, and then never again."""
    shape = PipelineShape(groups, 2 * groups, costs=(StageCost(1.0, 1.0, 1.0),) * groups)
    found_s = quick_bound_s(arrays_of(shape, split=True), shape)
    assert found_s == groups - 1 + 3 * shape.micro_batches
    whole_s = quick_bound_s(arrays_of(shape, split=False), shape)
    assert whole_s == 3 * (shape.micro_batches + groups - 1)
