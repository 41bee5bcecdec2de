"""The median of several workers' profiles."""

import pytest

from penstock.errors import BadInput
from penstock.measure.workers import median_profile
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile


def profile(seconds: float, name: str = "linear") -> ModelProfile:
    cost = Affine(seconds, 2 * seconds)
    layer = LayerCost(name, cost, cost, cost, parameter_bytes=8)
    return ModelProfile(
        "net",
        (layer,),
        batch_size=4,
        step_s_per_byte=seconds,
        stage_forward_s=seconds,
        stage_backward_s=2 * seconds,
        source="here",
    )


def test_one_slow_worker_does_not_move_the_median() -> None:
    merged = median_profile([profile(1.0), profile(50.0), profile(2.0)])
    assert merged.layers[0].forward_s == Affine(2.0, 4.0)
    assert merged.step_s_per_byte == merged.stage_forward_s == 2.0
    assert merged.stage_backward_s == 4.0
    assert merged.layers[0].parameter_bytes == 8
    assert merged.source == "here, 3 workers at once"


def test_profiles_of_different_models_have_no_median() -> None:
    with pytest.raises(BadInput, match="2 different models"):
        median_profile([profile(1.0), profile(1.0, "other")])
