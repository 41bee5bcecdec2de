"""Predictions and scores: what goes in is checked, both ways give the same time."""

from dataclasses import replace
from math import inf, isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, cases

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import placement_of_style
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan
from penstock.timeline.metrics import bubble_fraction, iteration_s, peak_memory_bytes

LAYER = LayerCost("layer", Affine(1.0), Affine(1.0), Affine(1.0), 1000)
MODEL = ModelProfile("model", (LAYER,) * 2)
CLUSTER = Cluster("four", (Host("h", (Device("d", 1e6),) * 4, 1e9),))


def test_a_device_that_the_cluster_does_not_have_is_named_with_the_remedy() -> None:
    plan = Plan((Stage(range(2), (5,), (1,)),), 1, 1, "1f1b")
    with pytest.raises(BadInput, match=r"device 5 but the cluster has 4 devices; .*at least 6"):
        simulate_plan(plan, MODEL, CLUSTER)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_plan_for_another_number_of_layers_is_refused(layers: int) -> None:
    plan = Plan((Stage(range(layers), (0,), (1,)),), 1, 1, "1f1b")
    with pytest.raises(BadInput, match=rf"layers \[0, {layers}\) but .*'model' has 2"):
        simulate_plan(plan, MODEL, CLUSTER)


def test_a_plan_that_does_not_fit_scores_infinity() -> None:
    plan = Plan((Stage(range(2), (0,), (1,)),), 4, 1, "1f1b")
    tight = Cluster("tight", (Host("h", (Device("d", 7999.0),), 1e9),))
    roomy = Cluster("roomy", (Host("h", (Device("d", 8000.0),), 1e9),))
    assert make_score(PlanningProblem(MODEL, tight, 4, (1,)))(plan) == inf
    assert make_score(PlanningProblem(MODEL, roomy, 4, (1,)))(plan) == 24.0


def test_events_are_sorted_and_belong_to_devices_of_the_plan() -> None:
    plan = Plan((Stage(range(1), (3,), (1,)), Stage(range(1, 2), (1,), (1,))), 3, 1, "gpipe")
    timeline = simulate_plan(plan, MODEL, CLUSTER).timeline
    starts = [event.start_s for event in timeline.events]
    assert starts == sorted(starts)
    assert {event.device for event in timeline.events} == {1, 3}
    assert timeline.devices == 4


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 3))
def test_without_a_timeline_the_figures_are_the_same(case: Case, iterations: int) -> None:
    inputs = (case.plan, case.profile, case.cluster)
    whole = simulate_plan(*inputs, iterations=iterations)
    short = simulate_plan(*inputs, iterations=iterations, with_timeline=False)
    assert replace(whole, timeline=short.timeline) == short
    assert not short.timeline.events
    assert isclose(whole.bubble, bubble_fraction(whole.timeline), rel_tol=1e-6, abs_tol=1e-9)


TWO_STAGES = (Stage(range(1), (0,), (1,)), Stage(range(1, 2), (1,), (1,)))


def test_each_device_goes_on_after_its_own_step() -> None:
    """1F1B on two equal stages: the drain of one iteration overlaps the fill of the next."""
    plan = Plan(TWO_STAGES, 4, 1, "1f1b")
    # Stage 1 works from 1 to 13, stage 0 ends at 15: then stage 1 waits for its first input.
    alone = simulate_plan(plan, MODEL, CLUSTER)
    many = simulate_plan(plan, MODEL, CLUSTER, iterations=5)
    assert alone.iteration_s == alone.steady_s == 15.0
    assert many.iteration_s == 15.0
    assert many.steady_s == 15.0
    assert {event.micro_batch for event in many.timeline.events} == set(range(20))


def test_steps_begin_together_where_they_wait_for_all() -> None:
    """Stage 1's gradients are there 1 s after those of stage 0; each step takes 0.3 s."""
    stepped = replace(MODEL, step_s_per_byte=0.0003)
    for schedule in ("zb-h2", "gpipe"):
        plan = Plan(TWO_STAGES, 4, 1, schedule)
        timeline = simulate_plan(plan, stepped, CLUSTER, iterations=3).timeline
        steps = [e for e in timeline.events if e.kind == "STEP"]
        starts = [[e.start_s for e in steps if e.device == device] for device in (0, 1)]
        assert starts[0] == starts[1] and len(starts[0]) == 3
        ends = [e.end_s for e in timeline.events if e.kind != "STEP" and e.end_s <= starts[0][1]]
        assert starts[0][1] == max(ends)
        assert not [e for e in timeline.events if e.kind == "REDUCE"]


def test_steps_wait_for_the_slowest_sums() -> None:
    """Two stages of two replicas; those of stage 1 are on two hosts, 100 bytes a second apart.

    A pass takes 1 s forward and 2 s back. By 1F1B stage 1 works from 1 to 13 and stage 0 ends at
    15. Summing 1,000 bytes over two replicas sends each byte once either way: 10 s, until 23. Then
    both step, and every iteration takes 23 s.
    """
    device = Device("d", 1e6)
    alone = (Host(name, (device,), 1e15, port_bytes_per_s=100.0) for name in "bc")
    far = Cluster("far", (Host("a", (device,) * 2, 1e15, port_bytes_per_s=100.0), *alone))
    stages = (Stage(range(1), (0, 1), (1, 1)), Stage(range(1, 2), (2, 3), (1, 1)))
    plan = Plan(stages, 4, 2, "1f1b")
    before = simulate_plan(plan, MODEL, far, iterations=3)
    assert (before.iteration_s, before.steady_s) == pytest.approx((23.0, 23.0))


def test_without_a_flush_the_pipeline_stays_full() -> None:
    """PipeDream: after the fill every micro-batch takes as long as the slowest stage."""
    plan = Plan(TWO_STAGES, 4, 1, "pipedream")
    prediction = simulate_plan(plan, MODEL, CLUSTER, iterations=6)
    assert prediction.steady_s == 4 * 3.0
    # Two versions of 1,000 bytes on stage 0, one on stage 1; gradients, optimizer state.
    assert prediction.peak_memory_bytes[:2] == (5000.0, 4000.0)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [("vanilla", 1), ("pipedream", 1), ("spectrain-v2", 1 + 1 / 3), ("spectrain", 1 + 2 / 3)],
)
def test_predicting_weights_takes_a_third_of_a_step_each_time(schedule: str, steps: float) -> None:
    """Stage 0 predicts; each of its 1,000 bytes is stepped in 0.3 ms, after every micro-batch."""
    stepped = replace(MODEL, step_s_per_byte=0.0003)
    plan = Plan(TWO_STAGES, 4, 1, schedule)
    # From the end of the sixth iteration to that of the eleventh: the pipeline has filled by then.
    early_s, late_s = (
        (count - 1) * simulate_plan(plan, stepped, CLUSTER, iterations=count).steady_s
        for count in (6, 11)
    )
    assert late_s - early_s == pytest.approx(5 * 4 * (3.0 + 0.3 * steps))


def test_no_iterations_are_refused() -> None:
    plan = Plan((Stage(range(2), (0,), (1,)),), 1, 1, "1f1b")
    with pytest.raises(BadInput, match="0 iterations"):
        simulate_plan(plan, MODEL, CLUSTER, iterations=0)


@pytest.mark.parametrize("schedule", ["chimera", "interleaved", "dualpipe-v", "fbp-as", "zb-v"])
def test_the_score_is_the_predicted_time_of_schedules_of_every_kind(schedule: str) -> None:
    style = FAMILIES[schedule].placement
    rounds = 2 if style in ("looped", "folded") else 1
    model = ModelProfile("model", (LAYER,) * (2 * rounds))
    stages = tuple(
        Stage(range(s, s + 1), (device,), (1,))
        for s, device in enumerate(placement_of_style(style, 2, rounds))
    )
    plan = Plan(stages, 8, 1, schedule)
    prediction = simulate_plan(plan, model, CLUSTER)
    assert iteration_s(prediction.timeline) <= prediction.iteration_s * (1 + 1e-12)
    score = make_score(PlanningProblem(model, CLUSTER, 8, (1,)))
    assert isclose(score(plan), prediction.iteration_s, rel_tol=1e-12)
    assert peak_memory_bytes(prediction.timeline) == pytest.approx(prediction.peak_memory_bytes)
