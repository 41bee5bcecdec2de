from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf

import pytest

from penstock.advice.assessment import PlannedPipeline
from penstock.advice.compare import (
    Comparison,
    NoAnswer,
    best_first,
    compare_plans,
    require_a_plan,
)
from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput, Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.problem import planning_problem
from penstock.planners.search import search
from penstock.profile.model_profile import ModelProfile


@pytest.fixture
def problem(small_profile: ModelProfile, small_cluster: Cluster) -> PlanningProblem:
    return planning_problem(small_profile, small_cluster, 12)


@pytest.fixture
def tight(small_profile: ModelProfile, small_cluster: Cluster) -> PlanningProblem:
    host = small_cluster.hosts[0]
    devices = tuple(replace(device, memory_bytes=20e6) for device in host.devices)
    return planning_problem(small_profile, Cluster("tight", (replace(host, devices=devices),)), 12)


def add(
    monkeypatch: pytest.MonkeyPatch, name: str, planner: Callable[[PlanningProblem, Score], Plan]
) -> None:
    monkeypatch.setitem(search.PLANNERS, name, planner)


def test_a_planner_that_finds_nothing_says_why(tight: PlanningProblem) -> None:
    found = list(compare_plans(tight, ["search", "single-device"], ["1f1b"], lambda: 0.0))
    by_name = {comparison.planner: comparison for comparison in found}
    assert "iteration_s" in by_name["search"].to_json()
    assert set(by_name["single-device"].to_json()) == {
        "planner",
        "schedule",
        "asked_schedule",
        "infeasible",
        "planning_s",
    }
    require_a_plan(found)
    with pytest.raises(Infeasible, match="finds no plan that fits"):
        require_a_plan([by_name["single-device"]])


def test_a_planner_that_breaks_takes_no_other_down(
    problem: PlanningProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(problem: PlanningProblem, score: Score) -> Plan:
        raise ZeroDivisionError("a\nb")

    add(monkeypatch, "broken", broken)
    found = list(compare_plans(problem, ["broken", "single-device"], ["auto"], lambda: 0.0))
    assert found[0].to_json()["failed"] == "ZeroDivisionError: a b"
    assert found[1].iteration_s < inf
    with pytest.raises(Infeasible, match="'broken': ZeroDivisionError"):
        require_a_plan(found[:1])


def test_after_its_limit_a_planner_may_answer_with_what_it_has(
    problem: PlanningProblem, small_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a planner is asked beside the main thread; nothing is interrupted anywhere."""
    seconds = 0.0
    better = replace(small_plan, schedule="gpipe")

    def slow(problem: PlanningProblem, score: Score) -> Plan:
        nonlocal seconds
        seconds = 60.0
        return min([small_plan, better], key=score)

    def ask() -> list[Comparison]:
        return list(compare_plans(problem, ["slow"], ["auto"], lambda: seconds, limit_s=0.2))

    add(monkeypatch, "slow", slow)
    with ThreadPoolExecutor(1) as pool:
        (found,) = pool.submit(ask).result()
    assert isinstance(found.outcome, PlannedPipeline) and found.outcome.plan == small_plan
    assert found.planning_s == 60.0


def test_the_best_comes_first_and_ties_keep_the_order_asked(problem: PlanningProblem) -> None:
    names = ["single-device", "data-parallel", "dynamic-program"]
    found = list(compare_plans(problem, names, ["auto"], lambda: 0.0))
    ordered = best_first([*found, Comparison("data-parallel", "auto", NoAnswer("x"), 0.0)], names)
    times = [comparison.iteration_s for comparison in ordered]
    assert times[-1] == inf and times == sorted(times)
    rounded = [replace(c, planner=n) for c, n in zip([found[0]] * 3, names, strict=True)]
    assert [c.planner for c in best_first(rounded[::-1], names)] == names


def test_unknown_names_are_refused(problem: PlanningProblem) -> None:
    with pytest.raises(BadInput, match="did you mean 'search'"):
        next(compare_plans(problem, ["serch"], ["auto"], lambda: 0.0))
    with pytest.raises(BadInput, match="did you mean 'gpipe'"):
        next(compare_plans(problem, ["search"], ["gpip"], lambda: 0.0))
