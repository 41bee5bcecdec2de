"""Random moves keep plans whole; random walks never lose their best plan, and are repeatable."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from strategies import Case, cases

from penstock.cluster.presets import find_cluster
from penstock.plan.bound_plans import relaxed_plans
from penstock.plan.bounds import lower_bound_s, plan_bound_s
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.plan.search_anneal import annealed, deeper_variants
from penstock.plan.search_layout import layout_of, moved, plan_of
from penstock.profile.find import find_profile
from penstock.simulate.score import make_score

ROUNDING = 1e-9


def problem_of(case: Case) -> PlanningProblem:
    plan = case.plan
    sizes = tuple(n for n in range(1, plan.global_batch + 1) if plan.global_batch % n == 0)
    return PlanningProblem(case.profile, case.cluster, plan.global_batch, sizes)


@settings(max_examples=60, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
def test_every_random_move_leads_to_a_plan_of_the_same_problem(case: Case, seed: int):
    problem, generator = problem_of(case), default_rng(seed)
    layout = layout_of(case.plan)
    for _ in range(40):
        changed = moved(problem, layout, generator)
        plan = plan_of(problem, changed) if changed else None
        if changed is None or plan is None:
            continue
        assert plan.stages[-1].layers.stop == len(problem.profile.layers)
        assert plan.global_batch == problem.global_batch
        assert layout_of(plan).groups == changed.groups
        layout = changed


@settings(max_examples=25, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
def test_a_walk_ends_no_worse_than_it_starts_and_not_below_the_bounds(case: Case, seed: int):
    problem = problem_of(case)
    score = make_score(problem)
    start = min(deeper_variants(problem, case.plan), key=score)
    bound_s, seen = lower_bound_s(problem), list[Plan]()

    def watched(plan: Plan) -> float:
        seconds = score(plan)
        if seconds < inf:
            seen.append(plan)
            assert bound_s <= seconds * (1 + ROUNDING), plan
            assert plan_bound_s(problem, plan) <= seconds * (1 + ROUNDING), plan
        return seconds

    best = walk(problem, watched, start, seed)
    assert score(best) == min([score(start), *map(score, seen)])
    assert walk(problem, score, start, seed) == best


def test_a_walk_whose_time_is_up_ends_soon_with_the_best_plan_so_far():
    problem = PlanningProblem(find_profile("vgg-19"), find_cluster("dapple-c"), 64, (1, 2, 4, 8))
    score, asked = make_score(problem), list[Plan]()

    def short(plan: Plan) -> float:
        asked.append(plan)
        return score(plan) if len(asked) <= 100 else inf

    start = next(iter(relaxed_plans(problem)))
    best = annealed(problem, short, start, default_rng(0), 1e9, 0.05)
    assert score(best) <= score(start)
    assert len(asked) <= 700


def walk(problem: PlanningProblem, score: Score, start: Plan, seed: int) -> Plan:
    return annealed(problem, score, start, default_rng(seed), 1e5, 0.05)
