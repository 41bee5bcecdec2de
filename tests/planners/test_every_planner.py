"""What holds for every planner in the registry."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import example, given, settings
from planning_strategies import problems
from reference.every_plan import every_plan, every_plan_at_all

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.costs.leanest import device_orders
from penstock.errors import Infeasible
from penstock.plan.problem import PlanningProblem
from penstock.planners.search.search import PLANNERS
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score

ROUNDING = 1e-9


@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=10, deadline=None)
@given(problem=problems())
def test_every_planner_makes_a_plan_that_fits_deterministically(
    name: str, problem: PlanningProblem
):
    score = make_score(problem)
    try:
        plan = PLANNERS[name](problem, score)
    except Infeasible as error:
        assert str(error) and "\n" not in str(error)
        return
    assert plan.planner == name
    assert plan.global_batch == problem.global_batch
    assert score(plan) < inf
    assert PLANNERS[name](problem, score) == plan


@settings(max_examples=8, deadline=None)
@given(problem=problems())
def test_search_is_never_worse_than_another_planner(problem: PlanningProblem):
    score = make_score(problem)
    seconds: dict[str, float] = {}
    for name, planner in PLANNERS.items():
        try:
            seconds[name] = score(planner(problem, score))
        except Infeasible:
            seconds[name] = inf
    assert seconds["search"] == min(seconds.values())


# Only the middle layer has parameters. Only the last device has the memory for them, with room for
# one micro-batch in flight. What fits has neither the planners' order nor their depths.
HALF = Affine(per_sample=0.5)
MIDDLE_ON_THE_LAST = PlanningProblem(
    ModelProfile(
        "drawn",
        tuple(
            LayerCost(f"layer{i}", HALF, HALF, HALF, size, saved_bytes=HALF, workspace_bytes=HALF)
            for i, size in enumerate((0, 2, 0))
        ),
        tuple(Edge(i, i + 1, f"tensor{i}", HALF, HALF) for i in range(2)),
    ),
    Cluster("drawn", (Host("host", tuple(Device("drawn", size) for size in (8, 8, 9)), 1e12),)),
    4,
    (1,),
    optimizer_bytes_per_parameter_byte=2.0,
    schedules=("1f1b",),
)


@settings(max_examples=15, deadline=None)
@given(problem=problems(max_layers=3))
@example(problem=MIDDLE_ON_THE_LAST)
def test_a_problem_is_infeasible_only_if_no_plan_of_the_device_orders_fits(
    problem: PlanningProblem,
):
    score = make_score(problem)
    try:
        PLANNERS["search"](problem, score)
        feasible = True
    except Infeasible:
        feasible = False
    if feasible:
        # The search goes beyond the planners' orders of devices and depths, but not beyond these.
        plans = every_plan_at_all(replace(problem, schedules=("early-backward",)))
        assert any(score(plan) < inf for plan in plans)
    else:
        plans = (plan for order in device_orders(problem) for plan in every_plan(problem, order))
        assert not any(score(plan) < inf for plan in plans)
