"""What is tried of the plans of walks, and of the best plan: recompute, other orders."""

from dataclasses import replace
from math import inf

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.planning.planning_problem import schedules_named
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.search.judge import judge_of
from penstock.search.search import simulate_other_orders
from penstock.search.walked_plans import quick_s, simulate_walked
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
    asked = problem(messages=10.0)
    judge = judge_of(asked, make_score(asked))
    plans = [plan_of(1, 3), plan_of(2, 2), plan_of(3, 1)]
    simulate_walked(judge, plans, (), 0)
    _, best = judge.best_of(asked.schedules)
    assert best is not None
    assert [len(stage.layers) for stage in best.stages] == [2, 2]
    tried = {plan.in_flight_limit for plan in judge.seconds if len(plan.stages[0].layers) == 2}
    assert {(), (8, 4), (3, 1)} <= tried


@pytest.mark.parametrize("widths", [(2, 2), (1, 3)])
def test_the_best_plan_gets_every_order_that_is_searched_for(widths: tuple[int, ...]) -> None:
    asked = replace(problem(messages=10.0), schedules=schedules_named("1f1b,list,zero-bubble"))
    judge = judge_of(asked, make_score(asked))
    plan = plan_of(*widths)
    before_s = judge.simulate(plan)
    simulate_other_orders(judge)
    assert judge.best_s < before_s
    assert {one.schedule for one in judge.seconds} == {"1f1b", "list", "zero-bubble"}
