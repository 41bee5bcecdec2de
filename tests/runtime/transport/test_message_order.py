"""In the planned order no rank waits for ever, whoever carries the messages."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from runtime.matrix_plans import SYNCHRONOUS, Case, layouts
from runtime.transport.stream_model import (
    Program,
    Rules,
    boundaries_of,
    by_direction,
    receives_first,
    recorded_programs,
    recorded_ranks,
    stuck,
)

from penstock.plan.plan import Plan, Stage
from penstock.runtime.asynchronous.order import asynchronous_order
from penstock.runtime.asynchronous.training import planned_messages
from penstock.runtime.clock import StepClock
from penstock.runtime.execute import execute, steps_of
from penstock.runtime.micro_batches import BatchCut, cut_batch
from penstock.runtime.transport.messages import (
    messages_between_actions,
    messages_of_rank,
)
from penstock.schedule.action import Action
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.message_order import unit_times
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import schedule_from_actions

LAYERS = 24
NCCL, GLOO = Rules(first_launch_waits=True), Rules(waits_stop_the_host=True)
LAZY = Rules(made_by_first_use=True, first_launch_waits=True)


def drawn_plans(schedule: str) -> Iterator[Plan]:
    """Pipelines of 2 to 8 groups with unequal replicas; small ones where orders are searched."""
    draw, searched = random.Random(schedule), FAMILIES[schedule].is_searched
    for style, rounds in layouts(schedule):
        for _ in range(2):
            most = 3 if searched else 8 // (1 if style in ("straight", "mirrored") else 2)
            groups = draw.randint(2, most)
            groups += style == "mirrored" and groups % 2
            replicas = tuple(
                draw.choice((1, 1, 2, 3) if groups < 5 else (1, 1, 2)) for _ in range(groups)
            )
            count = draw.randint(1, 4 if searched else 2 * groups + 1)
            turned, costs = draw.random() < 0.5, draw.random() < 0.5
            case = Case(schedule, replicas, count, rounds, style, turned=turned, costs=costs)
            yield replace(case, recompute=draw.random() < 0.3).plan(LAYERS)


def assert_none_stuck(programs: dict[int, Program], what: str) -> None:
    """With one communicator, made before or by its first use, and with one for each direction."""
    for rules in (NCCL, LAZY):
        assert not stuck(programs, rules), f"{what}, {rules}"
    assert not stuck(by_direction(programs), NCCL), f"{what}, a communicator for each direction"


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_no_schedule_gets_stuck(schedule: str) -> None:
    for plan in drawn_plans(schedule):
        boundaries = boundaries_of(len(plan.stages))
        assert_none_stuck(recorded_programs(plan, boundaries), str(plan))
        forwards = recorded_programs(plan, boundaries, training=False)
        assert_none_stuck(forwards, f"forwards of {plan}")
        parted = recorded_programs(plan, boundaries, two_parts=True)
        assert_none_stuck(parted, f"warm-up and rest of {plan}")
        by_gloo = recorded_programs(plan, boundaries, backend="gloo")
        assert not stuck(by_gloo, GLOO), f"Gloo, {plan}"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_receives_that_are_all_posted_first_get_stuck(schedule: str) -> None:
    """So the model can tell a bad order from a good one."""
    plan = next(drawn_plans(schedule))
    programs = receives_first(recorded_programs(plan, boundaries_of(len(plan.stages))))
    assert stuck(programs, NCCL)
    assert stuck(programs, LAZY)


def test_orders_that_wait_in_a_circle_are_told() -> None:
    shape = Plan(
        (Stage(range(1), (0,), (1,)), Stage(range(1, 2), (1,), (1,))), 1, 1, "1f1b"
    ).shape()
    circle = schedule_from_actions(
        [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]
    )
    with pytest.raises(ValueError, match="in a circle"):
        unit_times(circle.orders, shape)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_an_order_of_a_devices_own_stages_may_make_a_peer_wait_long(backend: str) -> None:
    """Rank 1 waits for rank 2, which waits for what rank 0 computes after all first forwards."""
    stages = tuple(Stage(range(s, s + 1), (d,), (1,)) for s, d in enumerate((0, 1, 0, 2, 1)))
    many = 32
    plan = Plan(stages, many, 1, "interleaved")
    numbers = range(many)
    first = [Action("F", stage, m) for stage in (0, 2) for m in numbers]
    second = [Action("F", stage, m) for m in numbers for stage in (1, 4)]
    third = [Action("F", 3, m) for m in numbers]
    schedule = schedule_from_actions([first, second, third])
    # A row of so many numbers is too large to be sent without a window.
    boundaries, cut = boundaries_of(5, skips=False, width=1 << 18), cut_batch(plan, many)
    programs: dict[int, Program] = {}
    for rank in recorded_ranks(plan, boundaries, backend):
        passed = messages_between_actions(plan, boundaries, schedule, cut)
        channels = rank.channels(messages_of_rank(rank.number, schedule, plan.shape(), passed))
        channels.begin()
        execute(steps_of(schedule.of(rank.number), rank.stages, channels), channels, StepClock())
        programs[rank.number] = rank.program
    if backend == "gloo":
        assert not stuck(programs, GLOO)
    else:
        assert_none_stuck(programs, str(plan))


@pytest.mark.parametrize("schedule", [name for name in FAMILIES if not FAMILIES[name].flushes])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1, 3), (1, 1, 1, 1, 1)])
def test_no_asynchronous_order_gets_stuck(schedule: str, replicas: tuple[int, ...]) -> None:
    plan = Case(schedule, replicas, len(replicas)).plan(LAYERS)
    boundaries, order = boundaries_of(len(plan.stages)), asynchronous_order(plan)
    cut = cut_batch(plan, plan.global_batch)
    ringed = BatchCut(cut.micro_batches * order.ring, cut.slices * order.ring)
    shape = order.ring_shape
    parts = [tuple(order.part(stage, batch) for stage in range(shape.stages)) for batch in range(5)]
    parts.append(tuple(order.drain(stage, 5) for stage in range(shape.stages)))
    programs: dict[int, Program] = {}
    for rank in recorded_ranks(plan, boundaries):
        passed = messages_between_actions(plan, boundaries, one_f_one_b(shape), ringed)
        messages = messages_of_rank(rank.number, one_f_one_b(shape), shape, passed)
        channels = rank.channels(messages)
        (own,) = rank.stages
        channels.begin(announced=False)
        for orders in parts:
            channels.proceed(planned_messages(messages, unit_times(orders, shape)))
            execute(steps_of(orders[own], rank.stages, channels), channels, StepClock())
        programs[rank.number] = rank.program
    assert_none_stuck(programs, str(plan))
