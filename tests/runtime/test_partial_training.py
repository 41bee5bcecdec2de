"""Adapters, frozen bodies and layers: equal to plain training, and nothing done in vain."""

from typing import Any

import pytest
from runtime.partial_cases import THAWED, thawed_in_all_ways, trained_in_all_ways

from penstock.runtime.processes.launch import launch_workers

Found = tuple[dict[str, dict[str, Any]], ...]


@pytest.fixture(scope="module")
def ranks() -> Found:
    """What `trained_in_all_ways` gave on each of three ranks."""
    return launch_workers(trained_in_all_ways, (), workers=3, threads=1)


def test_losses_and_weights_are_those_of_plain_training(ranks: Found) -> None:
    for found in ranks:
        assert len(found) == 7
        for case, result in found.items():
            ours, theirs = result["losses"]
            assert ours == pytest.approx(theirs, rel=1e-10), case
            assert result["wrong"] == [], case
            assert result["verified"].startswith("equal to your module"), case


def test_stages_before_the_first_trained_layer_run_no_backward(ranks: Found) -> None:
    """Their timeline has forwards alone, and nobody sends them gradients."""
    for found in ranks:
        for case in ("adapters, 1f1b, (1, 1, 1)", "adapters, zb-h1, (1, 1, 1)"):
            assert found[case]["kinds"][0] == {"F"}, case
            assert found[case]["gradients sent to"] <= {1}, case
        for case in ("frozen body, 1f1b, (1, 1, 1)", "frozen body, zb-h1, (1, 1, 1)"):
            assert found[case]["kinds"][0] == found[case]["kinds"][1] == {"F"}, case
            assert found[case]["gradients sent to"] == set(), case
    assert ranks[0]["frozen body, 1f1b, (1, 1, 1)"]["kinds"][2] == {"F", "B"}


def test_a_frozen_stage_behind_a_trained_one_passes_gradients_on_and_makes_none(
    ranks: Found,
) -> None:
    for found in ranks:
        kinds = found["frozen between, zb-h1, (1, 1, 1)"]["kinds"]
        assert kinds == {0: {"F", "I", "W"}, 1: {"F", "I"}, 2: {"F", "I", "W"}}


def test_frozen_parameters_have_no_gradient_no_sum_over_ranks_and_no_state(ranks: Found) -> None:
    for rank, found in enumerate(ranks):
        for case, result in found.items():
            assert result["frozen with gradients"] == [], case
            assert result["summed"] == result["trained"], case
            assert result["state"] == 2 * result["trained"], (case, rank)
    adapters = [found["adapters, 1f1b, (1, 1, 1)"] for found in ranks]
    assert adapters[0]["trained"] == 0 < adapters[1]["trained"] < adapters[1]["held"] / 10


def test_predicted_memory_counts_what_is_held_between_steps(ranks: Found) -> None:
    """Values of all parameters; gradients and two moments of the trained ones.

    Beside these there is a number for each of them, in how many places it has got a gradient.
    """
    for rank, found in enumerate(ranks):
        for case, result in found.items():
            assert result["lasting"] == result["predicted"] + result["counts"], (case, rank)


@pytest.fixture(scope="module")
def thawed(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What `thawed_in_all_ways` gave on each of three ranks."""
    folder = str(tmp_path_factory.mktemp("thawed"))
    return launch_workers(thawed_in_all_ways, (folder,), workers=3, threads=1)


def test_layers_are_thawed_and_frozen_between_steps_as_in_plain_training(thawed: Found) -> None:
    """Weights, the rate and the optimizer's resting state; with gradients sent only when thawed."""
    for found in thawed:
        for way, result in {**found["by way"], "meta": found["from meta"]}.items():
            assert result["wrong"] == [], way
            assert result["rate"] == pytest.approx(0.05 * 0.9**7), way
            assert result["verified"].startswith("equal to your module"), way
            for step, kinds in enumerate(result["kinds"]):
                assert (kinds > {"F"}) is (step in THAWED), (way, step)


def test_without_a_flush_thawing_is_like_a_pipeline_made_anew(thawed: Found) -> None:
    for found in thawed:
        assert found["as if loaded"] == 0.0


def test_a_change_that_cannot_be_followed_is_refused_with_the_remedy(thawed: Found) -> None:
    for found in thawed:
        sharded, within = found["refused"]
        assert "'0.0.weight'" in sharded
        assert "call save(), make a new Pipeline from the model, and load()" in sharded
        assert within == (
            "requires_grad of '0.0.weight' was changed within stream(); change it before stream() "
            "is called, or between calls of step()"
        )


def test_a_change_that_failed_is_not_trained_on(thawed: Found) -> None:
    for found in thawed:
        failed, later = found["half followed"]
        assert "one optimizer is enough" in failed
        assert "build a new one" in later


def test_ranks_that_are_not_alike_are_told_before_anything_runs(thawed: Found) -> None:
    for found in thawed:
        plan, calls, trained = found["unlike"]
        given, here = "was given the plan", "at a line of torch"
        remedy = "; give all ranks the same plan, model and example batch"
        assert plan == f"rank 1 {given} gpipe, where rank 0 {given} 1f1b{remedy}"
        assert calls == f"rank 1 calls 'relu' {here}, where rank 0 calls 'tanh' {here}{remedy}"
        assert trained == f"rank 1 trains 2.0.weight, where rank 0 trains 4.weight{remedy}"
