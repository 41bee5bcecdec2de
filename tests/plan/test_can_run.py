"""What the runtime refuses is in no plan that is made for it."""

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput
from penstock.plan.ordering import (
    has_forwards_first,
    order_of,
    schedule_refusal,
    stage_refusal,
)
from penstock.plan.plan import Plan, Stage
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem, schedules_named
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.simulate.score import make_score
from penstock.train.plan_job import check_model_of_plan

second = Affine(0.0, 1.0)
LAYERS = tuple(LayerCost(f"layer{i}", second, second, second, 100) for i in range(4))
EDGES = tuple(Edge(i, i + 1, f"t{i}", Affine(0.0, 1e6), Affine(0.0, 1e6)) for i in range(3))
NORMED = replace(LAYERS[1], norms=1, norm_channels=8)
PLAIN = ModelProfile("plain", LAYERS, EDGES)
WITH_NORM = ModelProfile("normed", (LAYERS[0], NORMED, *LAYERS[2:]), EDGES)
HOST = Host("host", (Device("device", 1e9),) * 2, 1e9, link_latency_s=1e-3)


def test_schedules_that_hold_stages_twice_are_left_out_for_batch_norm() -> None:
    every, left = schedules_named("auto", "search"), schedules_named("auto", "search", norms=True)
    assert set(left) < set(every) and "fbp-as" not in every
    mirrored = {name for name in every if FAMILIES[name].placement == "mirrored"}
    assert set(every) - set(left) == mirrored >= {"chimera", "dualpipe"}
    assert "chimera" in schedules_named("any", norms=True)
    problem = planning_problem(WITH_NORM, Cluster("two", (HOST,)), 8, planner="search")
    assert "1f1b" in problem.schedules and "dualpipe" not in problem.schedules


@pytest.mark.parametrize("planner", ["search", "dapple", "pipedream", ""])
def test_a_loss_of_the_whole_batch_gets_plans_with_all_forwards_first(planner: str) -> None:
    profile = replace(PLAIN, whole_loss=True)
    problem = planning_problem(profile, Cluster("two", (HOST,)), 8, planner=planner)
    assert set(problem.schedules) <= {"gpipe", "breadth-first"}
    plan = find_plan(problem, planner or "dapple", make_score(problem))
    assert has_forwards_first(order_of(plan), len(plan.stages) - 1)
    check_model_of_plan(plan, profile)
    stages = Stage(range(2), (0,), (4,)), Stage(range(2, 4), (1,), (4,))
    with pytest.raises(BadInput, match=r"loss of 'plain' is of all samples.*'1f1b' has backwards"):
        check_model_of_plan(Plan(stages, 2, 4, "1f1b"), profile)
    check_model_of_plan(Plan(stages, 1, 4, "1f1b"), profile)


def test_a_problem_whose_best_plan_is_mirrored_gets_another_one_with_batch_norm() -> None:
    """Slow all-reduces of replicas, few micro-batches: two directions at once fill the bubble."""
    found: dict[str, Plan] = {}
    for profile in (PLAIN, WITH_NORM):
        problem = planning_problem(
            profile, Cluster("two", (HOST,)), 4, micro_batch_size=1, planner="search"
        )
        found[profile.name] = find_plan(problem, "search", make_score(problem))
    assert found["plain"].mirrored
    assert not found["normed"].mirrored


def test_a_mirrored_plan_for_batch_norm_is_refused_before_workers_start() -> None:
    stages = Stage(range(2), (0,), (4,)), Stage(range(2, 4), (1,), (4,))
    plan = Plan(stages, 2, 4, "chimera")
    check_model_of_plan(plan, PLAIN)
    check_model_of_plan(replace(plan, schedule="1f1b"), WITH_NORM)
    with pytest.raises(BadInput, match=r"'normed' has batch norm.* 'chimera' holds it twice.*once"):
        check_model_of_plan(plan, WITH_NORM)


def test_tensor_groups_run_no_batch_norm_and_only_schedules_that_flush_and_hold_stages_once() -> (
    None
):
    assert stage_refusal(norms=True, ranks=2) and not stage_refusal(norms=True, ranks=1)
    assert not stage_refusal(norms=False, ranks=2)
    assert schedule_refusal("pipedream", tensor_groups=True) == "has no flush"
    assert schedule_refusal("chimera", tensor_groups=True) == "holds stages twice"
    assert not schedule_refusal("zb-v", tensor_groups=True)
