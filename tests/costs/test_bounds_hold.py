"""No plan and no order beats the bounds: every plan of small problems, and random orders."""

from math import inf
from random import Random

from bound_strategies import bound_problems, slow_link_problems
from hypothesis import given, settings
from hypothesis import strategies as st
from random_pipelines import random_order
from reference.every_plan import every_plan_at_all
from strategies import Case, cases

from penstock.costs.lower_bound import lower_bound, lower_bound_s, plan_bound_s
from penstock.plan.problem import PlanningProblem
from penstock.schedule.validate import check_playable
from penstock.simulate.catalogue import workload_of
from penstock.simulate.compiled import play
from penstock.simulate.score import make_score

ROUNDING = 1e-9


@settings(max_examples=40, deadline=None)
@given(problem=bound_problems())
def test_no_plan_of_a_small_problem_beats_its_bounds(problem: PlanningProblem):
    score, bound = make_score(problem), lower_bound(problem)
    assert bound.argument
    for plan in every_plan_at_all(problem):
        seconds = score(plan)
        if seconds < inf:
            assert bound.seconds <= seconds * (1 + ROUNDING), plan
            assert plan_bound_s(problem, plan) <= seconds * (1 + ROUNDING), plan


@settings(max_examples=60, deadline=None)
@given(problem=slow_link_problems())
def test_no_plan_beats_the_bound_where_links_are_slow(problem: PlanningProblem):
    score, bound_s = make_score(problem), lower_bound_s(problem)
    for plan in every_plan_at_all(problem):
        assert bound_s <= score(plan) * (1 + ROUNDING), plan


@settings(max_examples=150, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
def test_no_order_of_whole_backwards_beats_the_bounds(case: Case, seed: int):
    plan = case.plan
    schedule = random_order(Random(seed), plan.shape(), split_share=0.0)
    check_playable(schedule, plan.shape())
    workload = workload_of(plan, case.profile, case.cluster, schedule)
    seconds = play(workload).iteration_s
    problem = PlanningProblem(
        case.profile, case.cluster, plan.global_batch, (plan.micro_batch_size,)
    )
    assert lower_bound_s(problem) <= seconds * (1 + ROUNDING)
    assert plan_bound_s(problem, plan) <= seconds * (1 + ROUNDING)
