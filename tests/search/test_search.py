"""The parts of the search: its climbs, its moves, its steps."""

from contextlib import suppress
from math import inf

from bound_strategies import bound_problems
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning_strategies import problems
from reference.every_plan import every_plan

from penstock.bounds.lower_bound import lower_bound_s
from penstock.cluster.toml_file import find_cluster
from penstock.errors import Infeasible
from penstock.plan.problem import PlanningProblem
from penstock.planners.registry import STARTING_PLANNERS
from penstock.profile.find import find_profile
from penstock.search.judge import judge_of
from penstock.search.neighbours import climb, moves
from penstock.search.search import search_steps
from penstock.simulate.score import make_score

ROUNDING = 1e-9


@settings(max_examples=40, deadline=None)
@given(problem=problems(memory=False))
def test_a_climb_never_ends_below_its_start(problem: PlanningProblem):
    score = make_score(problem)
    plan = next(every_plan(problem, tuple(range(len(problem.cluster.devices)))))
    judge = judge_of(problem, score)
    start_s = judge.simulate(plan)
    end, end_s = climb(judge, plan, start_s, 20_000)
    assert end_s == score(end) == judge.best_s <= start_s
    assert end.global_batch == problem.global_batch


@settings(max_examples=25, deadline=None)
@given(problem=bound_problems(), data=st.data())
def test_every_move_makes_another_whole_plan(problem: PlanningProblem, data: st.DataObject):
    plans = list(every_plan(problem, tuple(range(len(problem.cluster.devices)))))
    assume(plans)
    plan = data.draw(st.sampled_from(plans))
    score = make_score(problem)
    for neighbour in moves(problem, plan):
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
    assert lower_bound_s(problem) <= seconds[-1] < 1.15 * lower_bound_s(problem)


def test_the_search_is_the_same_every_time():
    problem = vgg_problem("mixed-gpus", 512)
    found = [list(search_steps(problem, make_score(problem), STARTING_PLANNERS)) for _ in range(2)]
    assert found[0] == found[1]


def test_a_better_plan_than_any_other_planners_is_found_where_there_is_one():
    problem = vgg_problem("mixed-gpus", 32, 64, 128, 256)
    score = make_score(problem)
    others: list[float] = []
    for planner in STARTING_PLANNERS.values():
        with suppress(Infeasible):
            others.append(score(planner(problem, score)))
    *_, last = search_steps(problem, score, STARTING_PLANNERS)
    assert last.seconds < min(others)
