"""The search as a whole: its steps, its budget, and what it finds."""

from contextlib import suppress
from dataclasses import replace
from math import inf

from penstock.cluster.toml_file import find_cluster
from penstock.costs.lower_bound import lower_bound_s
from penstock.errors import Infeasible
from penstock.plan.problem import PlanningProblem
from penstock.planners.find_plan import TimeLimit, find_plan
from penstock.planners.problem import schedules_named
from penstock.planners.registry import STARTING_PLANNERS
from penstock.planners.search.arms import arms_of
from penstock.planners.search.judge import Judge
from penstock.planners.search.search import BUDGET, ArmSearch, search_steps
from penstock.profile.find import find_profile
from penstock.simulate.score import make_score

BEHIND_A_PLANNER = 0.002
"""The share by which the search may be behind a planner that it asked."""


def vgg_problem(cluster: str, *sizes: int) -> PlanningProblem:
    return PlanningProblem(find_profile("vgg-19"), find_cluster(cluster), 2048, sizes)


def test_the_steps_only_get_better_and_end_within_reach_of_the_bound() -> None:
    problem = vgg_problem("dapple-c", 256, 512)
    steps = list(search_steps(problem, make_score(problem)))
    seconds = [step.seconds for step in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == inf and steps[-1].doing == "done"
    assert lower_bound_s(problem) <= seconds[-1] < 1.15 * lower_bound_s(problem)


def test_the_search_is_the_same_every_time() -> None:
    problem = vgg_problem("mixed-gpus", 512)
    found = [list(search_steps(problem, make_score(problem))) for _ in range(2)]
    assert found[0] == found[1]


def test_the_search_is_not_behind_the_planners_that_it_asks() -> None:
    problem = vgg_problem("mixed-gpus", 32, 64, 128, 256)
    score = make_score(problem)
    others: list[float] = []
    for name in ("data-parallel", "bapipe", "dapple", "spp"):
        with suppress(Infeasible):
            others.append(score(STARTING_PLANNERS[name](problem, score)))
    *_, last = search_steps(problem, score)
    assert last.seconds <= min(others) * (1 + BEHIND_A_PLANNER)


def test_more_effort_simulates_more_plans_and_is_not_slower() -> None:
    problem = replace(
        vgg_problem("dapple-b", 128, 256, 512), schedules=schedules_named("auto", "search")
    )
    found: list[tuple[float, int]] = []
    for effort in (0.1, 1.0):
        score, scored = make_score(problem), set[object]()

        def counted(plan: object, score: object = score, scored: set[object] = scored) -> float:
            scored.add(plan)
            return score(plan)  # type: ignore[operator]

        *_, last = search_steps(problem, counted, effort)
        found.append((last.seconds, len(scored)))
    (little_s, few), (much_s, many) = found
    assert much_s <= little_s
    assert few <= many


def test_a_time_limit_ends_the_search_at_any_step() -> None:
    problem = vgg_problem("dapple-b", 128, 256, 512)
    score, ticks = make_score(problem), iter(range(10_000))
    steps: list[float] = []
    limit = TimeLimit(0.5, lambda: float(next(ticks)))
    plan = find_plan(
        problem, "search", score, limit=limit, on_step=lambda step: steps.append(step.seconds)
    )
    # The clock is past the limit at once, so the first plan is the answer.
    assert score(plan) == steps[-1]
    assert len([seconds for seconds in steps if seconds < inf]) == 1


def test_arms_draw_the_same_points_whatever_other_arms_there_are() -> None:
    problem = vgg_problem("dapple-b", 128, 256)
    every = replace(problem, schedules=schedules_named("auto", "search"))
    alone = replace(problem, schedules=("zb-h1", "zb-h2"))
    seeds = {
        arm.title: arm.seed(0) for arm in arms_of(every, every.schedules) if arm.style == "straight"
    }
    (only,) = arms_of(alone, alone.schedules)
    assert seeds[only.title] == only.seed(0)
    assert len(set(seeds.values())) == len(seeds)


def test_the_budget_is_counted_in_simulated_actions() -> None:
    problem = vgg_problem("dapple-b", 128, 256, 512)
    problem = replace(problem, schedules=schedules_named("auto", "search"))
    spent: list[float] = []
    for _ in range(2):
        judge = Judge(problem, make_score(problem))
        search = ArmSearch(problem, judge, arms_of(problem, problem.schedules), BUDGET, BUDGET)
        for _ in search.first_plans():
            pass
        for _ in search.pulls(0.0):
            pass
        spent.append(search.left)
    assert spent[0] == spent[1] < BUDGET
