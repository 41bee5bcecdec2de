"""The parts of the search: its estimate, its climbs, its moves, its steps."""

from contextlib import suppress
from itertools import pairwise
from math import inf

import pytest
from bound_strategies import bound_problems
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning_strategies import problems
from reference.every_plan import every_plan

from penstock.bounds.lower_bound import lower_bound_s
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.presets import find_cluster
from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.registry import STARTING_PLANNERS
from penstock.profile.find import find_profile
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.search.climbs import climbed_plans
from penstock.search.moves import neighbours
from penstock.search.search import search_steps
from penstock.search.seeds import Climber, start_of_plan
from penstock.simulate.score import make_score

ROUNDING = 1e-9


@st.composite
def straight_problems(draw: st.DrawFn) -> PlanningProblem:
    """Unequal layers and devices, no messages: a stage waits for its neighbours' computing only."""
    seconds = st.floats(0.1, 3.0)
    count = draw(st.integers(2, 6))
    layers = tuple(
        LayerCost(
            f"layer{i}",
            Affine(draw(seconds), draw(seconds)),
            Affine(draw(seconds), draw(seconds)),
            Affine(draw(seconds), draw(seconds)),
            saved_bytes=Affine(0.0, 1.0),
        )
        for i in range(count)
    )
    memory = st.sampled_from([1e9, 6.0])
    devices = tuple(
        Device("drawn", draw(memory), draw(st.sampled_from([1.0, 2.0]))) for _ in range(count)
    )
    cluster = Cluster("drawn", (Host("host", devices, 1e9),))
    batch = draw(st.sampled_from([1, 6, 60]))
    return PlanningProblem(ModelProfile("drawn", layers), cluster, batch, (1,))


@settings(max_examples=60, deadline=None)
@given(problem=straight_problems())
def test_without_messages_and_replicas_the_estimate_is_the_simulated_time(
    problem: PlanningProblem,
):
    climber, score = Climber(problem), make_score(problem)
    order = tuple(range(len(problem.cluster.devices)))
    for way in climber.ways():
        for stages in range(1, climber.most_stages + 1):
            start = climber.even_start(order[:stages], stages, 1, way)
            seconds, plan = climber.estimate(start)
            if plan is None:
                assert seconds == inf
            else:
                assert seconds == pytest.approx(score(plan), rel=ROUNDING)


@settings(max_examples=40, deadline=None)
@given(problem=problems(memory=False))
def test_a_climb_never_ends_below_its_start(problem: PlanningProblem):
    climber = Climber(problem)
    devices = len(problem.cluster.devices)
    for plan in every_plan(problem, tuple(range(devices))):
        for way in climber.ways():
            start = start_of_plan(plan, devices, way)
            before_s, _ = climber.estimate(start)
            end = climber.climb(start, 50)
            assert climber.estimate(end)[0] <= before_s * (1 + ROUNDING)
            assert sorted(end.order) == list(range(devices))
            assert end.cuts[-1] == len(problem.profile.layers)
            assert all(lo < hi for lo, hi in pairwise(end.cuts))
        return


@settings(max_examples=25, deadline=None)
@given(problem=bound_problems(), data=st.data())
def test_every_move_makes_another_whole_plan(problem: PlanningProblem, data: st.DataObject):
    plans = list(every_plan(problem, tuple(range(len(problem.cluster.devices)))))
    assume(plans)
    plan = data.draw(st.sampled_from(plans))
    score = make_score(problem)
    for neighbour in neighbours(problem, plan):
        assert neighbour != plan
        assert neighbour.global_batch == problem.global_batch
        assert neighbour.schedule in problem.schedules
        assert score(neighbour) >= 0


def vgg_problem(cluster: str, *sizes: int) -> PlanningProblem:
    return PlanningProblem(find_profile("vgg-19"), find_cluster(cluster), 2048, sizes)


def test_the_steps_only_get_better_and_end_within_reach_of_the_bound():
    problem = vgg_problem("dapple-c", 256, 512)
    steps = list(search_steps(problem, make_score(problem), STARTING_PLANNERS))
    seconds = [step.seconds for step in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == inf and steps[-1].doing == "done"
    assert lower_bound_s(problem) <= seconds[-1] < 1.1 * lower_bound_s(problem)


def test_the_climbs_are_the_same_every_time():
    problem = vgg_problem("mixed-gpus", 512)

    def climbed() -> list[Plan]:
        return [plan for batch in climbed_plans(Climber(problem), None) for plan in batch]

    assert climbed() == climbed()


def test_a_better_plan_than_any_other_planners_is_found_where_there_is_one():
    problem = vgg_problem("mixed-gpus", 32, 64, 128, 256)
    score = make_score(problem)
    others: list[float] = []
    for planner in STARTING_PLANNERS.values():
        with suppress(Infeasible):
            others.append(score(planner(problem, score)))
    *_, last = search_steps(problem, score, STARTING_PLANNERS)
    assert last.seconds < min(others)
