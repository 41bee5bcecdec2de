"""The search over every schedule family: its skeletons, and what it finds."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bounds.lower_bound import lower_bound_s
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import find_cluster
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.plan.schedule_costs import load_s
from penstock.planning.answers import find_plan
from penstock.planning.planning_problem import planning_problem, schedules_named
from penstock.profile.built_in import packaged
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.search.families import family_steps, skeletons, under_schedule
from penstock.search.judge import judge_of
from penstock.search.search import PLANNERS
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan

ALL = schedules_named("auto", "search")


def problem_of(
    forwards_s: list[float], devices: int, batch: int, memory_bytes: float = inf
) -> PlanningProblem:
    """Layers of given times, devices on one host, messages that take a little."""
    layers = tuple(
        LayerCost(
            f"layer{i}",
            Affine(0.01, seconds),
            Affine(0.01, seconds),
            Affine(0.0, seconds),
            parameter_bytes=10,
            saved_bytes=Affine(0.0, 100.0),
        )
        for i, seconds in enumerate(forwards_s)
    )
    size = Affine(0.0, 1.0)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(len(layers) - 1))
    host = Host("host", (Device("device", memory_bytes),) * devices, link_bytes_per_s=50.0)
    profile, cluster = ModelProfile("chain", layers, edges), Cluster("one host", (host,))
    return planning_problem(profile, cluster, batch, planner="search", as_fast=0.0)


@settings(deadline=None, max_examples=8)
@given(
    forwards_s=st.lists(st.floats(0.1, 3.0), min_size=4, max_size=9),
    devices=st.integers(1, 4),
    batch=st.sampled_from([4, 6, 8]),
)
def test_no_schedule_beats_the_load_of_its_skeleton(
    forwards_s: list[float], devices: int, batch: int
) -> None:
    problem = problem_of(forwards_s, devices, batch)
    score = make_score(problem)
    found = [s for s in skeletons(problem, ALL) if not s.plan.stages[0].recompute]
    assert found
    for skeleton in found[:: max(1, len(found) // 6)]:
        for name in skeleton.schedules:
            try:
                seconds = score(under_schedule(skeleton.plan, name))
            except BadInput:
                continue
            assert seconds >= skeleton.load_s * (1 - 1e-9), name


def test_every_family_gets_skeletons_of_its_own_placement() -> None:
    problem = problem_of([1.0] * 16, 4, 8)
    seen: set[str] = set()
    for skeleton in skeletons(problem, ALL):
        for name in skeleton.schedules:
            seen.add(name)
            mirrored = FAMILIES[name].placement == "mirrored"
            assert replace(skeleton.plan, schedule=name).mirrored == mirrored
    assert seen == set(ALL)


@pytest.mark.parametrize("name", [n for n in ALL if n not in PlanningProblem.schedules])
def test_a_family_asked_for_alone_is_answered(name: str) -> None:
    problem = replace(problem_of([1.0] * 8, 2, 4), schedules=(name,))
    plan = find_plan(problem, "search", make_score(problem))
    assert plan.schedule == name
    assert simulate_plan(plan, problem.profile, problem.cluster).fits


def test_search_is_behind_no_planner_under_any_schedule() -> None:
    # Uneven layers on an uneven number of devices.
    problem = problem_of([1.0, 3.0, 0.5, 2.0, 1.0, 0.2, 0.7], 3, 6)
    score = make_score(problem)
    best_s = score(find_plan(problem, "search", score))
    for planner in PLANNERS:
        for name in ALL:
            one = replace(problem, schedules=(name,))
            assert best_s <= score(find_plan(one, planner, score)) * (1 + 1e-9), (planner, name)


@pytest.mark.parametrize(
    ("cluster", "found_before_s"),
    [
        pytest.param("dapple-a", 0.746, marks=pytest.mark.slow),
        ("dapple-b", 0.732),
        pytest.param("dapple-c", 0.774, marks=pytest.mark.slow),
    ],
)
def test_bert_is_planned_at_least_as_fast_as_by_rescheduling_one_plan(
    cluster: str, found_before_s: float
) -> None:
    """The times are those of the earlier search, which took over one plan for every schedule."""
    profile, machines = packaged("bert-48"), find_cluster(cluster)
    problem = planning_problem(profile, machines, 64, planner="search", as_fast=0.0)
    score = make_score(problem)
    plan = find_plan(problem, "search", score)
    assert score(plan) <= found_before_s * 1.0005
    # The simulation agrees with the score.
    played = simulate_plan(plan, profile, machines)
    assert played.fits
    assert played.iteration_s == pytest.approx(score(plan))
    assert lower_bound_s(problem) <= score(plan)


def test_what_does_not_fit_in_memory_is_no_answer() -> None:
    # A device holds the parameters, their gradients and state, and one micro-batch of one sample.
    problem = problem_of([1.0] * 4, 2, 4, memory_bytes=4 * 40 / 2 + 250.0)
    found = searched(problem)
    assert found is not None
    assert simulate_plan(found, problem.profile, problem.cluster).fits
    assert searched(problem_of([1.0] * 4, 2, 4, memory_bytes=100.0)) is None


def searched(problem: PlanningProblem) -> Plan | None:
    """The best plan on equal groups of devices."""
    judge = judge_of(problem, make_score(problem))
    *_, last = family_steps(judge, skeletons(problem, ALL))
    return last.plan


def test_loads_count_both_directions_of_mirrored_stages() -> None:
    problem = problem_of([1.0, 3.0], 2, 4)
    for skeleton in skeletons(problem, ("chimera",)):
        plan: Plan = replace(skeleton.plan, schedule="chimera")
        if len(plan.device_groups) == 2 and not plan.stages[0].recompute:
            # Each group works on half of the micro-batches of either stage.
            each_s = sum(c.forward_s + c.backward_s for c in plan.costs) / 2
            assert load_s(plan) == pytest.approx(plan.micro_batches * each_s)


def test_whole_backwards_can_be_asked_for() -> None:
    names = schedules_named("whole-backwards")
    assert {"1f1b", "interleaved", "chimera", "hanayo", "list"} <= set(names)
    assert not any(FAMILIES[name].splits for name in names)
    assert schedules_named("zb-v, 1f1b,zb-v") == ("zb-v", "1f1b")
    with pytest.raises(BadInput, match="schedule '1f2b' is unknown"):
        schedules_named("zb-v,1f2b")
    problem = replace(problem_of([1.0, 2.0, 1.0, 0.5, 0.5, 1.0], 2, 4), schedules=names)
    plan = find_plan(problem, "search", make_score(problem))
    assert not FAMILIES[plan.schedule].splits
