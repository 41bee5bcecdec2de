"""What a notebook shows of predictions, and the pictures of predictions and comparisons."""

import sys
from dataclasses import replace

import pytest

from penstock.advice.compare import Comparison, Comparisons, NoAnswer
from penstock.advice.plan_pipeline import compare_planners
from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.simulation import Prediction, simulate_plan
from penstock.timeline.timeline import Timeline


@pytest.fixture
def prediction(small_plan: Plan, small_profile: ModelProfile, small_cluster: Cluster) -> Prediction:
    return simulate_plan(small_plan, small_profile, small_cluster)


def test_a_prediction_is_drawn_with_its_figures(prediction: Prediction) -> None:
    ax = prediction.plot()
    assert sum(len(drawn.get_paths()) for drawn in ax.collections) >= len(
        prediction.timeline.events
    )
    assert ", bubble " in ax.get_title(loc="left")


def test_a_notebook_shows_the_timeline_or_else_a_table(
    prediction: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = prediction._repr_html_()
    assert shown.startswith("<svg") and shown.endswith(f"<p>{prediction!r}</p>")
    empty = replace(prediction, timeline=Timeline((), 4))
    assert empty._repr_html_().startswith("<table>")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert prediction._repr_html_().startswith("<table>")


def test_a_comparison_has_a_bar_for_each_plan(
    small_profile: ModelProfile, small_cluster: Cluster
) -> None:
    found = compare_planners(
        small_profile, small_cluster, 16, planners=("gpipe", "data-parallel", "single-device")
    )
    ax = Comparisons((*found, Comparison("broken", "auto", NoAnswer("it failed"), 0.1))).plot()
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [f"{one.planner} ({one.schedule})" for one in found]
    whole, busy = ax.containers
    assert whole[0].get_width() == pytest.approx(found[0].iteration_s)
    bubble = found[0].outcome.prediction.bubble
    assert busy[0].get_width() == pytest.approx(found[0].iteration_s * (1 - bubble))
    with pytest.raises(BadInput, match="no planner has a plan"):
        Comparisons((Comparison("broken", "auto", NoAnswer("it failed"), 0.1),)).plot()
