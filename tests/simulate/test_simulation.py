"""Predictions and scores: what goes in is checked, both ways give the same time."""

from math import inf, isclose

import pytest
from hypothesis import given, settings
from strategies import Case, cases

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.simulate import simulation
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan
from penstock.timeline.metrics import iteration_s

LAYER = LayerCost("layer", Affine(1.0), Affine(1.0), Affine(1.0), 1000)
MODEL = ModelProfile("model", (LAYER,) * 2)
CLUSTER = Cluster("four", (Host("h", (Device("d", 1e6),) * 4, 1e9),))


def problem_of(case: Case) -> PlanningProblem:
    """The problem that a case's plan answers."""
    return PlanningProblem(
        case.profile, case.cluster, case.plan.global_batch, (case.plan.micro_batch_size,)
    )


def test_a_device_that_the_cluster_does_not_have_is_named_with_the_remedy() -> None:
    plan = Plan((Stage(range(2), (5,), (1,)),), 1, 1, "1f1b")
    with pytest.raises(BadInput, match=r"device 5 but the cluster has 4 devices; .*at least 6"):
        simulate_plan(plan, MODEL, CLUSTER)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_plan_for_another_number_of_layers_is_refused(layers: int) -> None:
    plan = Plan((Stage(range(layers), (0,), (1,)),), 1, 1, "1f1b")
    with pytest.raises(BadInput, match=rf"layers \[0, {layers}\) but .*'model' has 2"):
        simulate_plan(plan, MODEL, CLUSTER)


def test_an_unknown_schedule_is_refused_by_name() -> None:
    plan = Plan((Stage(range(2), (0,), (1,)),), 1, 1, "zigzag")
    with pytest.raises(BadInput, match="'zigzag'"):
        simulate_plan(plan, MODEL, CLUSTER)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_score_of_a_plan_is_its_predicted_time(case: Case) -> None:
    prediction = simulate_plan(case.plan, case.profile, case.cluster)
    assert iteration_s(prediction.timeline) <= prediction.iteration_s * (1 + 1e-12)
    score = make_score(problem_of(case))
    assert isclose(score(case.plan), prediction.iteration_s, rel_tol=1e-9)


def test_a_plan_that_does_not_fit_scores_infinity() -> None:
    plan = Plan((Stage(range(2), (0,), (1,)),), 4, 1, "1f1b")
    tight = Cluster("tight", (Host("h", (Device("d", 7999.0),), 1e9),))
    roomy = Cluster("roomy", (Host("h", (Device("d", 8000.0),), 1e9),))
    assert make_score(PlanningProblem(MODEL, tight, 4, (1,)))(plan) == inf
    assert make_score(PlanningProblem(MODEL, roomy, 4, (1,)))(plan) == 24.0


def test_long_plans_are_played_by_the_compiled_engine_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan((Stage(range(1), (0,), (1,)), Stage(range(1, 2), (1,), (1,))), 12, 1, "1f1b")
    by_plain = simulate_plan(plan, MODEL, CLUSTER)
    monkeypatch.setattr(simulation, "FEW_ACTIONS", 0)
    assert simulate_plan(plan, MODEL, CLUSTER) == by_plain


def test_events_are_sorted_and_belong_to_devices_of_the_plan() -> None:
    plan = Plan((Stage(range(1), (3,), (1,)), Stage(range(1, 2), (1,), (1,))), 3, 1, "gpipe")
    timeline = simulate_plan(plan, MODEL, CLUSTER).timeline
    starts = [event.start_s for event in timeline.events]
    assert starts == sorted(starts)
    assert {event.device for event in timeline.events} == {1, 3}
    assert timeline.devices == 4
