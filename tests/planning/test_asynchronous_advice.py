"""Advice on training without a flush: simulated gain against measured cost."""

import json
from math import inf
from pathlib import Path

import pytest

from penstock.bounds.lower_bound import lower_bound
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.problem import PlanningProblem
from penstock.planning import asynchronous_advice
from penstock.planning.answers import find_plan
from penstock.planning.assessment import PlannedPipeline, assess_plan, baselines_of
from penstock.planning.asynchronous_advice import MEASURED, advice_words, without_flush
from penstock.planning.planning_problem import planning_problem
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.simulate.score import make_score

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "convergence" / "results.json"
NAMES = {"sgd": "SGD with momentum", "adamw": "AdamW", "muon": "Muon"}


def equal_layers(micro_batches: int, memory_bytes: float = 1e12) -> PlanningProblem:
    """Four layers for four devices whose messages cost nothing."""
    layer = LayerCost("layer", Affine(1.0), Affine(1.0), Affine(1.0), parameter_bytes=1_000_000_000)
    profile = ModelProfile("four layers", (layer,) * 4)
    devices = (Device("any", memory_bytes),) * 4
    cluster = Cluster("four", (Host("host", devices, 1e15),))
    return planning_problem(
        profile, cluster, micro_batches, micro_batch_size=1, schedule="1f1b", memory_reserve=0.0
    )


def planned(problem: PlanningProblem) -> PlannedPipeline:
    score = make_score(problem)
    plan = find_plan(problem, "gpipe", score)
    return assess_plan(plan, problem, baselines_of(problem, score), lower_bound(problem))


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_the_gain_of_equal_stages_is_the_bubble(micro_batches: int) -> None:
    problem = equal_layers(micro_batches)
    found = without_flush(planned(problem), problem)
    assert [option.optimizer for option in found] == list(MEASURED)
    for option in found:
        assert option.gain == pytest.approx((micro_batches + 3) / micro_batches)


def test_it_is_recommended_only_where_the_gain_is_more_than_the_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = equal_layers(4)
    samples = {"A": ("spectrain", 1.7), "B": ("xpipe", 1.8), "C": ("2bw", inf)}
    monkeypatch.setattr(asynchronous_advice, "MEASURED", samples)
    found = without_flush(planned(problem), problem)
    assert [(o.optimizer, o.schedule, o.pays) for o in found] == [
        ("A", "spectrain", True),
        ("B", "xpipe", False),
        ("C", "2bw", False),
    ]
    assert all(option.gain == pytest.approx(1.75) for option in found)
    assert advice_words(found) == (
        "Without a flush: with A `spectrain` would be 1.75 times as fast and may take 70.0 % more "
        "samples: try `--schedule spectrain`; with B `xpipe` would be 1.75 times as fast, less "
        "than the 80.0 % more samples it may take; with C `2bw` would be 1.75 times as fast, but "
        "did not always come to the same loss."
    )
    assert [option.to_json()["samples"] for option in found] == [1.7, 1.8, None]
    assert without_flush(planned(problem), problem, only_paying=True) == found[:1]


def test_what_no_idle_pipeline_could_win_back_is_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = equal_layers(16)
    plan = planned(problem)
    monkeypatch.setattr(asynchronous_advice, "MEASURED", {"A": ("2bw", 1.2), "B": ("2bw", inf)})
    # Idle for 3 of 19: not flushing makes it at most 19 / 16 times as fast.
    assert plan.prediction.bubble == pytest.approx(3 / 19)
    monkeypatch.delattr(asynchronous_advice, "simulate_plan")
    assert without_flush(plan, problem, only_paying=True) == ()
    with pytest.raises(NameError):
        without_flush(plan, problem)


def test_it_is_not_recommended_where_its_second_copy_of_the_weights_does_not_fit() -> None:
    roomy = equal_layers(4)
    peak = max(planned(roomy).prediction.peak_memory_bytes)
    tight = equal_layers(4, peak)
    found = without_flush(planned(tight), tight)
    assert found and not any(option.fits or option.pays for option in found)
    assert "would not fit" in advice_words(found)


def test_one_stage_gets_no_advice() -> None:
    problem = equal_layers(4)
    score = make_score(problem)
    plan = find_plan(problem, "single-device", score)
    alone = assess_plan(plan, problem, baselines_of(problem, score), lower_bound(problem))
    assert without_flush(alone, problem) == ()


def test_the_samples_are_those_that_the_benchmark_measured() -> None:
    """The worst case of the method whose worst case is the best; never reached: infinitely many."""
    worst: dict[str, dict[str, list[float]]] = {name: {} for name in NAMES.values()}
    cases: dict[str, int] = dict.fromkeys(NAMES.values(), 0)
    for case in json.loads(RESULTS.read_text())["cases"]:
        name = NAMES[case["case"].split("/")[1]]
        cases[name] += 1
        for row in case["rows"]:
            ratio = inf if row["samples_ratio"] is None else row["samples_ratio"]
            worst[name].setdefault(row["method"], []).append(ratio)
    for name, methods in worst.items():
        everywhere = {
            method: round(max(ratios), 2)
            for method, ratios in methods.items()
            if method in FAMILIES and not FAMILIES[method].flushes and len(ratios) == cases[name]
        }
        method, samples = MEASURED[name]
        assert everywhere[method] == samples == min(everywhere.values())
