"""Walks over depths: their moves keep stages alone, and they never lose their best plan."""

from dataclasses import replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from strategies import Case, cases

from penstock.bounds.lower_bound import lower_bound_s, plan_bound_s
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import find_cluster
from penstock.plan.cost import depths_of
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, Score
from penstock.profile.find import find_profile
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.search.walked_plans import deeper_variants, moved_in_flight, walked_depths
from penstock.simulate.score import make_score

ROUNDING = 1e-9


def problem_of(case: Case) -> PlanningProblem:
    plan = case.plan
    sizes = tuple(n for n in range(1, plan.global_batch + 1) if plan.global_batch % n == 0)
    return PlanningProblem(case.profile, case.cluster, plan.global_batch, sizes)


@settings(max_examples=40, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
def test_moves_in_flight_leave_stages_alone_and_depths_that_never_grow(case: Case, seed: int):
    problem, generator = problem_of(case), default_rng(seed)
    plan = replace(case.plan, schedule="early-backward", in_flight_limit=depths_of(case.plan))
    cuts = [(stage.layers, stage.devices) for stage in plan.stages]
    changed = 0
    for number in range(1000):
        moved = moved_in_flight(problem, plan, generator)
        assert [(stage.layers, stage.devices) for stage in moved.stages] == cuts
        assert min(moved.in_flight_limit) >= 1
        assert list(moved.in_flight_limit) == sorted(moved.in_flight_limit, reverse=True)
        changed += moved != plan
        plan = moved
        # Where one micro-batch passes one stage, only the rare moves of recompute change anything.
        if changed and number >= 30:
            break
    assert changed > 0


def test_a_walk_over_depths_finds_those_that_the_plan_lacks() -> None:
    # Transfers as long as the work of a stage: one micro-batch more must be on its way each time.
    cost, size = Affine(1.0), Affine(1.0)
    layers = tuple(LayerCost(f"layer{i}", cost, cost, Affine(), 10**12) for i in range(4))
    edges = tuple(Edge(i, i + 1, f"tensor{i}", size, size) for i in range(3))
    hosts = tuple(Host(f"h{i}", (Device("d", 4e12),), 1.0, 1.0) for i in range(4))
    problem = PlanningProblem(ModelProfile("four", layers, edges), Cluster("four", hosts), 24, (1,))
    stages = tuple(Stage(range(i, i + 1), (i,), (1,)) for i in range(4))
    shallow = Plan(stages, 24, 1, "early-backward", in_flight_limit=(4, 3, 2, 1))
    score = make_score(problem)
    deep = walked_depths(problem, score, shallow, default_rng(0), 1e5)
    assert score(deep) <= 0.75 * score(shallow)
    # Down and up three stages and three messages, and 24 micro-batches of 2 s.
    assert score(deep) <= 1.15 * (3 * 2 + 24 * 2 + 3 * 2)
    assert deep.stages == shallow.stages


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

    start = Plan((Stage(range(26), tuple(range(8)), (1,) * 8),), 8, 8, "1f1b")
    best = walked_depths(problem, short, start, default_rng(0), 1e9)
    assert score(best) <= score(start)
    assert len(asked) <= 700


def walk(problem: PlanningProblem, score: Score, start: Plan, seed: int) -> Plan:
    return walked_depths(problem, score, start, default_rng(seed), 1e5)
