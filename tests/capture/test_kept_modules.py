"""Modules with long loops are kept whole; what they compute, and their gradients, stay the same."""

from typing import Any

import pytest
import torch
import transformers
from plain_training import assert_pipeline_equals_plain
from torch import nn

from penstock.capture import kept_modules
from penstock.capture.evaluation import set_training
from penstock.capture.kept_modules import Unknown
from penstock.capture.trace import capture_model

WORDS, WIDTH = 24, 6


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, values):
        state, states = torch.zeros_like(values[:, 0]), []
        mixed = self.mix(values)
        for word in range(values.shape[1]):
            state = torch.tanh(self.decay * state + mixed[:, word] * self.scale)
            states.append(state * (1 if self.training else 100))
        return torch.stack(states, dim=1)


class Texts(nn.Module):
    def __init__(self, kind=Recurrence):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList([kind(), kind()])
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, words):
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden).transpose(1, 2)


@pytest.fixture(autouse=True)
def _short_loops_count(monkeypatch):
    monkeypatch.setattr(kept_modules, "LIMIT", 80)


def _batch(rows=4, words=WORDS):
    return torch.randint(20, (rows, words)), torch.randint(20, (rows, words))


def _kept(graph: Any) -> int:
    return sum("run_opaque" in str(node.target) for node in graph.flow.clean.graph.nodes)


def test_loss_and_gradients_are_those_of_the_plain_model():
    graph = assert_pipeline_equals_plain(
        Texts().double(), _batch(), loss=nn.functional.cross_entropy
    )
    assert _kept(graph) == 2
    assert graph.layer_names == ("embed", "layers.0", "layers.1", "head", "loss")


def test_the_graph_does_not_grow_with_the_words():
    def operators(words):
        batch = _batch(2, words)
        graph: Any = capture_model(Texts(), batch, loss=nn.functional.cross_entropy)
        return len(graph.flow.clean.graph.nodes)

    assert operators(30) == operators(90) < 60


def test_short_loops_are_written_out():
    batch = _batch(words=5)
    assert _kept(capture_model(Texts(), batch, loss=nn.functional.cross_entropy)) == 0


def test_stages_run_for_any_number_of_samples_and_share_the_parameters(pipeline):
    model = Texts().double()
    graph = capture_model(model, _batch(), loss=nn.functional.cross_entropy)
    for rows in (1, 7):
        pipeline.assert_composition_equals_model(
            graph, model, _batch(rows), [1, 2, 3], loss=nn.functional.cross_entropy, rows=rows
        )
    held = dict(graph.stage(range(1, 2)).module.named_parameters())
    assert set(held) == {"layers.0.decay", "layers.0.mix.weight", "layers.0.mix.bias"}
    assert held["layers.0.decay"] is model.layers[0].decay


def test_a_model_in_evaluation_mode_is_trained_in_training_mode_and_evaluated_in_evaluation_mode():
    model = Texts().double().eval()
    graph = assert_pipeline_equals_plain(model, _batch(), loss=nn.functional.cross_entropy)
    assert _kept(graph) == 2
    assert not any(part.training for part in model.modules())
    batch = _batch()
    predicting = graph.without_loss()
    module = predicting.stage(range(len(predicting.layer_names))).module
    set_training(module, False)
    torch.testing.assert_close(module(batch[0])[0], model(batch[0]))


class ReturnsItsSize(Recurrence):
    """A size depends on the samples, and cannot be a result of an operator that is kept."""

    def forward(self, values):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(values), values.shape[0]


class UsesTheSize(Texts):
    def __init__(self):
        super().__init__(ReturnsItsSize)

    def forward(self, words):
        hidden = self.embed(words)
        for layer in self.layers:
            states, samples = layer(hidden)
            hidden = hidden + states.view(samples, -1, WIDTH)
        return self.head(hidden).transpose(1, 2)


def test_a_module_that_cannot_be_kept_is_written_out():
    graph = assert_pipeline_equals_plain(
        UsesTheSize().double(), _batch(), loss=nn.functional.cross_entropy
    )
    assert _kept(graph) == 0


def test_mamba_is_right():
    config = transformers.MambaConfig(
        hidden_size=8,
        num_hidden_layers=2,
        vocab_size=20,
        state_size=4,
        time_step_rank=2,
        pad_token_id=0,
    )
    words, _ = _batch(words=24)
    labels = words.clone()
    labels[0, 5:] = -100
    model = transformers.MambaForCausalLM(config).double()
    # The model computes its loss in float32.
    graph = assert_pipeline_equals_plain(
        model, {"input_ids": words, "labels": labels}, tolerance=1e-5
    )
    assert _kept(graph) == 2


def test_results_that_cannot_be_learnt_from_two_sizes_are_traced(monkeypatch):
    def fails(*args):
        raise Unknown

    monkeypatch.setattr(kept_modules, "learned", fails)
    graph = assert_pipeline_equals_plain(
        Texts().double(), _batch(), loss=nn.functional.cross_entropy
    )
    assert _kept(graph) == 2
