"""Advice on training without a flush: simulated gain against measured cost."""

import json
from math import inf
from pathlib import Path

import pytest

from penstock.bounds.lower_bound import lower_bound
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.problem import PlanningProblem
from penstock.planning.answers import find_plan
from penstock.planning.assessment import PlannedPipeline, assess_plan, baselines_of
from penstock.planning.asynchronous_advice import SCHEDULES, advice_words, without_flush
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
    assert [option.optimizer for option in found] == list(SCHEDULES)
    for option in found:
        assert option.gain == pytest.approx((micro_batches + 3) / micro_batches)


def test_it_says_the_gain_and_where_the_cost_was_measured() -> None:
    problem = equal_layers(4)
    assert advice_words(without_flush(planned(problem), problem)) == (
        "Without a flush: with SGD with momentum `spectrain` would be 1.75 times as fast; with "
        "AdamW `xpipe` would be 1.75 times as fast; with Muon `2bw` would be 1.75 times as fast. "
        "The same loss may take more samples then (docs/benchmarks/convergence.md)."
    )


def test_it_says_where_a_second_copy_of_the_weights_does_not_fit() -> None:
    roomy = equal_layers(4)
    peak = max(planned(roomy).prediction.peak_memory_bytes)
    tight = equal_layers(4, peak)
    found = without_flush(planned(tight), tight)
    assert found and not any(option.fits for option in found)
    assert "would not fit" in advice_words(found)


def test_one_stage_gets_no_advice() -> None:
    problem = equal_layers(4)
    score = make_score(problem)
    plan = find_plan(problem, "single-device", score)
    alone = assess_plan(plan, problem, baselines_of(problem, score), lower_bound(problem))
    assert without_flush(alone, problem) == ()


def test_the_schedules_are_those_that_the_benchmark_found_best() -> None:
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
        assert everywhere[SCHEDULES[name]] == min(everywhere.values())
