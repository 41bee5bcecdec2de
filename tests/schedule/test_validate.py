"""What `validate` refuses, each with its reason; and that it accepts exactly what can be played."""

from contextlib import nullcontext
from itertools import product

import pytest

from penstock.errors import BadInput
from penstock.schedule.families.early_backward import order_of_stage
from penstock.schedule.message_order import unit_times
from penstock.schedule.schedule import Schedule, parse_schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import validate

TWO = PipelineShape(stages=2, micro_batches=2)


def with_depths(shape: PipelineShape, depths: tuple[int, ...]) -> Schedule:
    """Early backward with warm-up depths as given, even where they cannot work."""
    return Schedule(tuple(order_of_stage(shape, stage, k) for stage, k in enumerate(depths)))


def test_warm_up_depths_that_grow_downstream_are_refused_with_their_cycle() -> None:
    with pytest.raises(BadInput) as refused:
        validate(with_depths(TWO, (1, 2)), TWO)
    message = str(refused.value)
    assert "0B0 waits for 1B0 waits for 1F1 waits for 0F1 waits for 0B0" in message
    assert "warm-up depths" in message


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_exactly_the_orders_that_can_be_played_are_accepted(
    stages: int, micro_batches: int
) -> None:
    shape = PipelineShape(stages, micro_batches)
    verdicts: set[bool] = set()
    for depths in product(range(1, micro_batches + 1), repeat=stages):
        schedule = with_depths(shape, depths)
        played = True
        try:
            unit_times(schedule.orders, shape)
        except ValueError:
            played = False
        verdicts.add(played)
        with nullcontext() if played else pytest.raises(BadInput):
            validate(schedule, shape)
    assert True in verdicts


REFUSED = {
    "missing backward": ("stage 0  F0 F1 B0 B1\nstage 1  F0 B0 F1", "micro-batch 1.*needs F and"),
    "half a backward": (
        "stage 0  F0 F1 B0 B1\nstage 1  F0 I0 F1 B1",
        "micro-batch 0 has the actions F I;",
    ),
    "whole and halves": (
        "stage 0  F0 F1 B0 B1\nstage 1  F0 B0 I0 W0 F1 B1",
        "micro-batch 0 has the actions B F I W;",
    ),
    "twice": ("stage 0  F0 F1 F1 B0 B1\nstage 1  F0 B0 F1 B1", "0F1 stands twice"),
    "too few groups": ("stage 0  F0 F1 B0 B1", "orders 1 device groups, the pipeline has 2"),
    "wrong group": ("stage 1  F0 F1 B0 B1\nstage 1  F0 B0 F1 B1", "stage 1 is on group 1"),
    "no such stage": ("stage 0  F0 F1 B0 B1\nstage 2  F0 B0 F1 B1", "outside 2 stages"),
    "no such micro-batch": ("stage 0  F0 F2 B0 B1\nstage 1  F0 B0 F1 B1", "2 micro-batches"),
    "backward before its forward": (
        "stage 0  F0 B1 F1 B0\nstage 1  F0 B0 F1 B1",
        "0B1 waits for 1B1 waits for 1F1 waits for 0F1 waits for 0B1",
    ),
    "recompute nobody asked for": (
        "stage 0  F0 F1 R0 B0 B1\nstage 1  F0 B0 F1 B1",
        "0R0 is not needed: stage 0 keeps all",
    ),
}


@pytest.mark.parametrize("text, reason", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_run_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        validate(parse_schedule(text), TWO)


def test_a_missing_and_a_needless_recompute_are_refused() -> None:
    shape = PipelineShape(stages=1, micro_batches=2, recompute=(True,))
    with pytest.raises(BadInput, match=r"0R0 is missing"):
        validate(parse_schedule("stage 0  F0 F1 B0 R1 B1"), shape)
    with pytest.raises(BadInput, match=r"0R0 is not needed: stage 0 has only just run"):
        validate(parse_schedule("stage 0  F0 R0 B0 F1 B1"), shape)
    validate(parse_schedule("stage 0  F0 F1 R0 B0 R1 B1"), shape)


def test_more_in_flight_than_the_limit_is_refused() -> None:
    shape = PipelineShape(stages=1, micro_batches=3, in_flight_limit=(2,))
    with pytest.raises(BadInput, match=r"holds 3 on stage 0, whose in-flight limit is 2"):
        validate(parse_schedule("stage 0  F0 F1 F2 B0 B1 B2"), shape)


def test_split_backwards_are_accepted_and_hold_their_micro_batch_until_the_weight_half() -> None:
    shape = PipelineShape(stages=2, micro_batches=2, in_flight_limit=(2, 2))
    split = parse_schedule("""
        stage 0   F0 F1 I0 I1 W0 W1
        stage 1   F0 I0 F1 I1 W0 W1
    """)
    validate(split, shape)
    tight = PipelineShape(stages=2, micro_batches=2, in_flight_limit=(2, 1))
    with pytest.raises(BadInput, match="holds 2 on stage 1"):
        validate(split, tight)


def test_a_weight_half_before_its_input_half_is_refused() -> None:
    shape = PipelineShape(stages=1, micro_batches=1)
    with pytest.raises(BadInput, match="deadlocks"):
        validate(parse_schedule("stage 0  F0 W0 I0"), shape)
