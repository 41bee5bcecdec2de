"""Profiles of partly trained models: nothing is counted that training does not do."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.toml_file import find_cluster
from penstock.measure.layer_times import measure_profile
from penstock.measure.roofline import estimate_profile
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine, ModelProfile
from penstock.simulate.simulation import simulate_plan

ROWS, WIDTH = 8, 16
BATCH = (torch.randn(ROWS, WIDTH), torch.randint(3, (ROWS,)))


def captured(frozen: tuple[int, ...]) -> LayerGraph:
    """Six linear layers, some of them frozen."""
    layers = [nn.Linear(WIDTH, WIDTH if i < 5 else 3) for i in range(6)]
    for i in frozen:
        layers[i].requires_grad_(False)
    model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
    return capture_model(model, BATCH, loss=functional.cross_entropy)


def profiles(graph: LayerGraph) -> list[ModelProfile]:
    """Measured here, and estimated for a GPU."""
    return [
        measure_profile(graph, BATCH, batch_sizes=(ROWS,), repeats=1),
        estimate_profile(graph, BATCH, "V100-16GB"),
    ]


def test_layers_before_the_first_trained_one_have_no_backward_and_keep_nothing() -> None:
    for profile in profiles(captured((0, 1, 2))):
        for layer in profile.layers[:3]:
            assert layer.backward_s == Affine()
            assert layer.saved_bytes == Affine()
            assert layer.parameter_bytes == 0
            assert layer.buffer_bytes == 4 * WIDTH * (WIDTH + 1)
        assert all(layer.backward_s.at(ROWS) > 0 for layer in profile.layers[3:])
        back = [edge.gradient_bytes.at(ROWS) > 0 for edge in profile.edges]
        assert back == [edge.producer >= 3 for edge in profile.edges]


def test_frozen_layers_behind_a_trained_one_make_gradients_of_their_inputs_only() -> None:
    for profile in profiles(captured((2, 3))):
        for layer in profile.layers[2:4]:
            assert layer.backward_weight_s == Affine()
            assert layer.backward_input_s.at(ROWS) > 0
        assert profile.layers[1].backward_weight_s.at(ROWS) > 0


def test_a_frozen_parameter_that_stages_share_is_held_by_each_of_them() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(7, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight
            self.embed.weight.requires_grad_(False)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(words)))

    words = torch.randint(7, (ROWS,))
    graph = capture_model(Tied(), (words, words), loss=functional.cross_entropy)
    profile = estimate_profile(graph, (words, words), "V100-16GB")
    assert profile.shared == ()
    held = {layer.name: layer.buffer_bytes for layer in profile.layers}
    assert held == {"embed": 112, "body": 0, "head": 112, "loss": 0}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_predicted_stages_without_a_backward_take_no_time_for_it_and_get_no_gradients(
    schedule: str,
) -> None:
    profile = profiles(captured((0, 1, 2)))[1]
    stages = (Stage(range(3), (0,), (2,)), Stage(range(3, len(profile.layers)), (1,), (2,)))
    plan = Plan(stages, 4, 2, schedule)
    events = simulate_plan(plan, profile, find_cluster("dapple-a")).timeline.events
    busy = {(e.device, e.kind) for e in events if e.end_s > e.start_s}
    assert {kind for device, kind in busy if device == 0} == {"F", "SEND"}
    assert (1, "SEND") not in busy
