"""Evaluation mode of stages."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model

DROPOUT = 0.5


def _run(pipeline, graph, programs, batch, training):
    graph.set_training(training)
    with torch.no_grad():
        return pipeline.run_programs(graph, programs, batch, backward=False).loss


@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet"])
def test_evaluation_equals_the_model_in_evaluation_mode(pipeline, name):
    options = {} if name == "resnet" else {"dropout": DROPOUT}
    model, batch = pipeline.models[name](**options)
    graph = capture_model(model, batch)
    programs = pipeline.split(graph, [2, 4])
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    found = _run(pipeline, graph, programs, batch, training=False)
    torch.testing.assert_close(found, model.eval()(**batch).loss.detach())
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), "evaluation must not update statistics"


def test_switching_back_trains_again_as_captured(pipeline):
    model, batch = pipeline.models["resnet"]()
    graph = capture_model(model, batch)
    programs = pipeline.split(graph, [3])
    _run(pipeline, graph, programs, batch, training=False)
    model.train()
    buffers = {key: tensor.clone() for key, tensor in model.named_buffers()}
    found = _run(pipeline, graph, programs, batch, training=True)
    assert any(not torch.equal(t, buffers[key]) for key, t in model.named_buffers())
    torch.testing.assert_close(found, model(**batch).loss.detach())


def test_a_norm_that_was_frozen_at_capture_stays_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    batch = (torch.randn(3, 4), torch.tensor([0, 1, 1]))
    graph = capture_model(model, batch, loss=functional.cross_entropy)
    program = graph.stage(range(0, 3))
    for training in (True, False, True):
        graph.set_training(training)
        program.module(*batch)
        assert model[1].num_batches_tracked.item() == 0


def test_a_model_captured_in_evaluation_mode_is_trained_in_training_mode(pipeline):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(1.0), nn.Linear(8, 2)).eval()
    batch = (torch.randn(3, 4), torch.tensor([0, 1, 1]))
    graph = capture_model(model, batch, loss=functional.cross_entropy)
    programs = pipeline.split(graph, [1])
    assert not model[1].training
    expected = functional.cross_entropy(model(batch[0]), batch[1])
    torch.testing.assert_close(_run(pipeline, graph, programs, batch, False), expected)
    graph.set_training(True)
    assert not model[1].training
    pipeline.run_programs(graph, programs, batch)
    assert model[1].training
    assert not model[0].weight.grad.any()
    model.eval()
    torch.testing.assert_close(pipeline.run_programs(graph, programs, batch).loss, expected)
