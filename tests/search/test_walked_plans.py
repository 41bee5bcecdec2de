"""What is tried of the plans of walks, and of the best plan: recompute, other orders."""

from dataclasses import replace
from math import inf

import pytest
from numpy.random import default_rng

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planning.planning_problem import schedules_named
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.search.families import adapted_to
from penstock.search.judge import judge_of
from penstock.search.search import improve_leaders, simulate_other_orders
from penstock.search.walks import annealed, moved, quick_s, simulate_walked
from penstock.simulate.score import make_score

SAVED, STATE = 100.0, 40.0
"""Bytes that a layer saves of a micro-batch, and those of its parameters, gradients and state."""


def problem(memory_bytes: float = inf, messages: float = 1.0) -> PlanningProblem:
    """Four equal layers, and two devices on one host."""
    one = Affine(0.0, 1.0)
    layer = LayerCost("layer", one, one, one, 10, saved_bytes=Affine(0.0, SAVED))
    size = Affine(0.0, messages)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(3))
    host = Host("host", (Device("device", memory_bytes),) * 2, link_bytes_per_s=10.0)
    profile, cluster = ModelProfile("four", (layer,) * 4, edges), Cluster("two", (host,))
    return PlanningProblem(profile, cluster, 8, (1,))


def plan_of(*widths: int) -> Plan:
    """Stages of so many layers, a device each."""
    ends = [sum(widths[:s]) for s in range(len(widths) + 1)]
    stages = [Stage(range(ends[s], ends[s + 1]), (s,), (1,)) for s in range(len(widths))]
    return Plan(tuple(stages), 8, 1, "1f1b", planner="search")


def quick(asked: PlanningProblem, plan: Plan, split: tuple[str, ...] = ()) -> float:
    every = replace(asked, schedules=(*asked.schedules, *split))
    return quick_s(judge_of(every, make_score(every)), plan, split)


def test_a_plan_without_room_for_depth_is_tried_with_recompute() -> None:
    plan = plan_of(2, 2)
    # Room for two layers' state and what both save of one micro-batch; four are in flight.
    short = problem(2 * STATE + 2 * SAVED + 10.0)
    recomputing = tuple(replace(stage, recompute=True) for stage in plan.stages)
    deep = replace(plan, stages=recomputing, schedule="early-backward", in_flight_limit=(8, 4))
    assert quick(problem(), plan) < quick(short, plan) == make_score(short)(deep) < inf


def test_a_plan_is_tried_under_a_schedule_with_split_backwards() -> None:
    assert quick(problem(), plan_of(2, 2), ("zb-h2",)) < quick(problem(), plan_of(2, 2))


def test_the_fastest_plan_of_a_walk_is_found_and_simulated_at_other_depths() -> None:
    asked = problem(messages=40.0)
    judge = judge_of(asked, make_score(asked))
    plans = [plan_of(1, 3), plan_of(2, 2), plan_of(3, 1)]
    simulate_walked(judge, plans, ())
    _, best = judge.best_of(asked.schedules)
    assert best is not None
    assert [len(stage.layers) for stage in best.stages] == [2, 2]
    tried = {plan.in_flight_limit for plan in judge.seconds if len(plan.stages[0].layers) == 2}
    assert {(), (8, 4), (4, 2), (2, 1)} <= tried


@pytest.mark.parametrize("widths", [(2, 2), (1, 3)])
def test_the_best_plan_gets_every_order_that_is_searched_for(widths: tuple[int, ...]) -> None:
    asked = replace(problem(messages=10.0), schedules=schedules_named("1f1b,list,zero-bubble"))
    judge = judge_of(asked, make_score(asked))
    plan = plan_of(*widths)
    before_s = judge.simulate(plan)
    list(improve_leaders(judge, []))
    assert judge.best_s < before_s
    assert {one.schedule for one in judge.seconds} == {"1f1b", "list", "zero-bubble"}


def test_an_order_that_is_searched_for_is_tried_with_other_micro_batches_and_less_memory() -> None:
    asked = replace(problem(messages=10.0), micro_batch_sizes=(1, 2, 4), schedules=("zero-bubble",))
    judge = judge_of(asked, make_score(asked))
    plan = adapted_to(asked, plan_of(2, 2), "zero-bubble")
    judge.simulate(plan)
    simulate_other_orders(judge)
    assert {one.micro_batch_size for one in judge.seconds} == {1, 2}
    rooms = {one.memory_bytes[0] / plan.memory_bytes[0] for one in judge.seconds}
    assert {0.5, 0.75, 1.0} <= rooms


def test_other_cuts_leave_every_stage_a_layer_and_its_devices() -> None:
    plan, generator, seen = plan_of(1, 2, 1), default_rng(0), set[tuple[int, ...]]()
    for _ in range(60):
        plan = moved(problem(), plan, generator, deep=False)
        assert [stage.devices for stage in plan.stages] == [(0,), (1,), (2,)]
        seen.add(tuple(len(stage.layers) for stage in plan.stages))
    assert seen == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}


def test_moves_of_depths_never_let_them_grow_and_change_recompute_too() -> None:
    plan, generator = plan_of(1, 2, 1), default_rng(0)
    plan = replace(plan, schedule="early-backward", in_flight_limit=(3, 2, 1))
    depths, recompute = set[tuple[int, ...]](), set[bool]()
    for _ in range(400):
        plan = moved(problem(), plan, generator, deep=True)
        assert min(plan.in_flight_limit) >= 1 and max(plan.in_flight_limit) <= 8
        assert list(plan.in_flight_limit) == sorted(plan.in_flight_limit, reverse=True)
        depths.add(plan.in_flight_limit)
        recompute |= {stage.recompute for stage in plan.stages}
    assert len(depths) > 50 and recompute == {False, True}


def test_a_walk_ends_no_worse_than_it_starts_and_the_same_every_time() -> None:
    asked = problem(messages=10.0)
    ends = list[Plan]()
    for _ in range(2):
        judge = judge_of(asked, make_score(asked))
        ends.append(annealed(judge, plan_of(1, 3), default_rng(0), 20_000.0))
        assert judge.simulate(ends[0]) == judge.best_s < judge.simulate(plan_of(1, 3))
    assert ends[0] == ends[1]
    assert [len(stage.layers) for stage in ends[0].stages] == [2, 2]


def test_a_walk_finds_the_depths_that_a_plan_lacks() -> None:
    asked = problem(messages=40.0)
    judge = judge_of(asked, make_score(asked))
    shallow = replace(plan_of(2, 2), schedule="early-backward", in_flight_limit=(2, 1))
    assert judge.simulate(annealed(judge, shallow, default_rng(0), 2e5)) <= 72.0
    assert judge.simulate(shallow) > 80.0


def test_what_leads_at_the_end_is_tried_under_the_other_schedules_with_other_cuts() -> None:
    asked = replace(problem(), schedules=schedules_named("1f1b,zb-h1"))
    judge = judge_of(asked, make_score(asked))
    before_s = judge.simulate(plan_of(1, 3))
    steps = list(improve_leaders(judge, []))
    _, best = judge.best_of(asked.schedules)
    assert best is not None and best.schedule == "zb-h1"
    assert [len(stage.layers) for stage in best.stages] == [2, 2]
    assert steps[-1].seconds <= before_s and judge.best_s < before_s


def test_a_plan_of_a_planner_is_tried_under_every_schedule_however_slow_it_is() -> None:
    asked = replace(problem(), schedules=schedules_named("1f1b,zb-h1,list"))
    judge = judge_of(asked, make_score(asked))
    judge.simulate(plan_of(2, 2))
    slow = plan_of(1, 3)
    list(improve_leaders(judge, [slow]))
    tried = {one.schedule for one in judge.seconds if one.stages == slow.stages}
    assert "zb-h1" in tried
