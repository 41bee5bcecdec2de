"""In the planned order no rank waits for ever, whoever carries the messages."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from runtime.matrix_plans import SYNCHRONOUS, Case, layouts
from runtime.transport.stream_model import (
    Program,
    RecordedRank,
    Recorder,
    Rules,
    boundaries_of,
    by_direction,
    by_pair,
    receives_first,
    recorded_programs,
    recorded_ranks,
    stuck,
)

from penstock.plan.choices import choice_refusal
from penstock.plan.ordering import schedule_refusal
from penstock.plan.plan import Plan, Stage
from penstock.runtime.asynchronous.order import asynchronous_order
from penstock.runtime.asynchronous.training import planned_messages
from penstock.runtime.asynchronous.versioned_stage import with_updates
from penstock.runtime.micro_batches import BatchCut, cut_batch
from penstock.runtime.program import execute, prepared_steps
from penstock.runtime.transport import process_groups
from penstock.runtime.transport.messages import (
    messages_between_actions,
    messages_of_rank,
)
from penstock.runtime.transport.process_groups import GroupTransport
from penstock.schedule.action import Action
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.message_order import unit_times
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import schedule_from_actions

LAYERS = 24
NCCL, GLOO = Rules(first_launch_waits=True), Rules()
LAZY = Rules(made_by_first_use=True, connected_by_first_message=True, first_launch_waits=True)
NEAREST = Rules(first_launch_waits=True, near=1)


def drawn_plans(schedule: str, count: int = 1, seed: int = 0) -> Iterator[Plan]:
    """Pipelines of 2 to 6 groups with unequal replicas; small ones where orders are searched."""
    draw, searched = random.Random(f"{schedule} {seed}"), FAMILIES[schedule].is_searched
    for style, rounds in layouts(schedule) * count:
        most = 3 if searched else 6 // (1 if style in ("straight", "mirrored") else 2)
        groups = draw.randint(2, most)
        groups += style == "mirrored" and groups % 2
        replicas = tuple(
            draw.choice((1, 1, 2, 3) if groups < 5 else (1, 1, 2)) for _ in range(groups)
        )
        micro_batches = draw.randint(1, 4 if searched else 2 * groups + 1)
        turned, costs = draw.random() < 0.5, draw.random() < 0.5
        case = Case(schedule, replicas, micro_batches, rounds, style, turned=turned, costs=costs)
        yield replace(case, recompute=draw.random() < 0.3).plan(LAYERS)


def with_choices(plan: Plan) -> Iterator[Plan]:
    """The plan, and what else its schedule allows: divided state or parameters, tensor groups."""
    yield plan
    for choice in ("optimizer", "parameters"):
        if not choice_refusal(choice, plan.schedule):
            yield replace(plan, stages=tuple(replace(s, sharding=choice) for s in plan.stages))
    if not schedule_refusal(plan.schedule, tensor_groups=True):
        pairs = tuple((2 * device, 2 * device + 1) for device in sorted(plan.devices))
        yield replace(plan, tensor_groups=pairs)


def assert_none_stuck(programs: dict[int, Program], what: str) -> None:
    """With one communicator, made before or by its first use, and with several."""
    for rules in (NCCL, LAZY, NEAREST):
        assert not stuck(programs, rules), f"{what}, {rules}"
    assert not stuck(by_direction(programs), NCCL), f"{what}, a communicator for each direction"
    assert not stuck(by_pair(programs), LAZY), f"{what}, a communicator for each pair"


def assert_plan_not_stuck(drawn: Plan) -> None:
    """Training in every variant, with replicas that have no rows, and forwards alone."""
    boundaries = boundaries_of(len(drawn.stages))
    for plan in with_choices(drawn):
        assert_none_stuck(recorded_programs(plan, boundaries, iterations=2), str(plan))
        by_gloo = recorded_programs(plan, boundaries, backend="gloo", iterations=2)
        assert not stuck(by_gloo, GLOO), f"Gloo, {plan}"
    few = recorded_programs(drawn, boundaries, rows=2 * drawn.micro_batches)
    assert_none_stuck(few, f"two rows each of {drawn}")
    forwards = recorded_programs(drawn, boundaries, training=False)
    assert_none_stuck(forwards, f"forwards of {drawn}")


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_no_schedule_gets_stuck(schedule: str) -> None:
    for plan in drawn_plans(schedule):
        assert_plan_not_stuck(plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_none_of_many_more_plans_gets_stuck(schedule: str, seed: int) -> None:
    for plan in drawn_plans(schedule, 3, seed):
        assert_plan_not_stuck(plan)


@pytest.mark.parametrize("schedule", ["hanayo", "interleaved"])
def test_sums_that_start_early_get_stuck_only_while_kernels_are_loaded(schedule: str) -> None:
    """So the first iteration with batches of a size starts none before its end."""
    found = [
        recorded_programs(plan, boundaries_of(len(plan.stages)), hasty=True)
        for plan in drawn_plans(schedule, 4)
    ]
    assert any(stuck(programs, NCCL) for programs in found)
    assert not any(stuck(programs, Rules()) for programs in found)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_none_gets_stuck_over_gloo_where_few_messages_may_be_under_way(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large messages of many micro-batches: ranks that wait for room wait for one another's."""
    monkeypatch.setattr(process_groups, "FREE_BYTES", 0)
    count = 4 if FAMILIES[schedule].is_searched else 6 * process_groups.LEAST_WINDOW
    for style, rounds in layouts(schedule):
        for replicas in ((1, 1), (1, 2, 1)):
            plan = Case(schedule, replicas, count, rounds, style).plan(LAYERS)
            boundaries = boundaries_of(len(plan.stages))
            for training in (True, False):
                programs = recorded_programs(plan, boundaries, backend="gloo", training=training)
                assert not stuck(programs, GLOO), plan


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
        order = schedule.of(rank.number)
        messages = messages_of_rank(rank.number, schedule, plan.shape(), passed, order)
        channels = rank.channels(messages)
        channels.begin()
        channels.proceed(messages.planned)
        execute(prepared_steps(order, rank.stages, channels), channels, rank.clock)
        programs[rank.number] = rank.program
    if backend == "gloo":
        assert not stuck(programs, GLOO)
    else:
        assert_none_stuck(programs, str(plan))


@pytest.mark.parametrize("size", [2, 16])
def test_the_groups_of_a_transport_are_three_however_many_ranks_talk(size: int) -> None:
    """One for each direction of the pipeline, and one for sums."""
    recorder = Recorder(0, "gloo")
    given = {"rank": 0, "size": size, "backend": "gloo", "timeout_s": 1.0}
    world: Any = SimpleNamespace(**given, new_group=recorder.new_group)
    GroupTransport(world)
    assert recorder.groups == 3


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

        def update(micro_batch: int, nothing: Any, rank: RecordedRank = rank) -> Any:
            rank.buckets.finish()
            rank.buckets.zero()

        updated: Any = {own: SimpleNamespace(update=update)}
        channels.begin()
        exchanged: Callable[[], object] = list
        for orders in parts:
            channels.proceed(planned_messages(messages, orders[own], unit_times(orders, shape)))
            steps = prepared_steps(orders[own], rank.stages, channels)
            execute(with_updates(steps, updated, order), channels, rank.clock)
            exchanged()
            exchanged = rank.exchange("the numbers of a batch")
        exchanged()
        programs[rank.number] = rank.program
    assert_none_stuck(programs, str(plan))
