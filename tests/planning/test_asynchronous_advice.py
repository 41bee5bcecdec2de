"""Advice on training without a flush: simulated gain against measured cost."""

import json
from math import inf
from pathlib import Path

import pytest

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.bounds import lower_bound
from penstock.plan.problem import PlanningProblem
from penstock.planning import asynchronous_advice
from penstock.planning.answers import find_plan
from penstock.planning.assessment import PlannedPipeline, assess_plan, baselines_of
from penstock.planning.asynchronous_advice import MEASURED_SAMPLES, advice_words, without_flush
from penstock.planning.questions import planning_problem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.simulate.score import make_score

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "convergence" / "results.json"
NAMES = {"sgd": "SGD with momentum", "adamw": "AdamW"}


def equal_layers(micro_batches: int, memory_bytes: float = 1e12) -> PlanningProblem:
    """Four layers for four devices whose messages cost nothing."""
    layer = LayerCost("layer", Affine(1.0), Affine(1.0), Affine(1.0), parameter_bytes=1_000_000_000)
    profile = ModelProfile("four layers", (layer,) * 4)
    devices = (Device("any", memory_bytes),) * 4
    cluster = Cluster("four", (Host("host", devices, 1e15),))
    return planning_problem(profile, cluster, micro_batches, micro_batch_size=1, schedule="1f1b")


def planned(problem: PlanningProblem) -> PlannedPipeline:
    score = make_score(problem)
    plan = find_plan(problem, "gpipe", score)
    return assess_plan(plan, problem, baselines_of(problem, score), lower_bound(problem))


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_the_gain_of_equal_stages_is_the_bubble(micro_batches: int) -> None:
    problem = equal_layers(micro_batches)
    found = without_flush(planned(problem), problem)
    assert found is not None
    assert found.gain == pytest.approx((micro_batches + 3) / micro_batches)


def test_it_is_recommended_only_where_the_gain_is_more_than_the_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = equal_layers(4)
    found = without_flush(planned(problem), problem)
    assert found is not None and found.gain == pytest.approx(1.75)
    monkeypatch.setattr(asynchronous_advice, "MEASURED_SAMPLES", {"A": 1.7, "B": 1.8})
    assert found.pays_with == ("A",)
    assert "with A that pays" in advice_words(found)
    monkeypatch.setattr(asynchronous_advice, "MEASURED_SAMPLES", {"B": 1.8})
    assert found.pays_with == ()
    assert "does not pay" in advice_words(found)


def test_it_is_not_recommended_where_its_second_copy_of_the_weights_does_not_fit() -> None:
    roomy = equal_layers(4)
    peak = max(planned(roomy).prediction.peak_memory_bytes)
    tight = equal_layers(4, peak)
    found = without_flush(planned(tight), tight)
    assert found is not None and not found.fits and not found.pays_with
    assert "would not fit" in advice_words(found)


def test_one_stage_gets_no_advice() -> None:
    problem = equal_layers(4)
    score = make_score(problem)
    plan = find_plan(problem, "single-device", score)
    alone = assess_plan(plan, problem, baselines_of(problem, score), lower_bound(problem))
    assert without_flush(alone, problem) is None


def test_the_samples_are_the_most_that_the_benchmark_measured() -> None:
    """A case where the loss was never reached counts as infinitely many."""
    most = dict.fromkeys(NAMES.values(), 0.0)
    for case in json.loads(RESULTS.read_text())["cases"]:
        optimizer = case["case"].split("/")[1]
        for row in case["rows"]:
            if row["method"] == "spectrain" and optimizer in NAMES:
                name, ratio = NAMES[optimizer], row["samples_ratio"]
                most[name] = max(most[name], inf if ratio is None else ratio)
    assert {name: round(ratio, 2) for name, ratio in most.items()} == MEASURED_SAMPLES
